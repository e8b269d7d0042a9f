"""The process of a vLLM server that lqrl starts: it ends when whoever started it does, however that ends.

``python -m lqrl.engines.vllm.keeper ARGUMENTS`` is vLLM's API server with those arguments, and with a thread that
waits for the end of standard input.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time

# Not the `vllm` command: it reads the metadata of a distribution of that name, which the CPU build does not have.
_SERVER = "vllm.entrypoints.openai.api_server"
_STOP_S = 10.0


def _follow() -> None:
    """Wait for the other end of the pipe to be closed, then end the group: the server and its workers."""
    while os.read(0, 1):
        pass
    os.killpg(os.getpgrp(), signal.SIGTERM)
    time.sleep(_STOP_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main() -> None:
    """Serve until the end of standard input."""
    threading.Thread(target=_follow, name="lqrl-keeper", daemon=True).start()
    sys.argv[0] = _SERVER
    runpy.run_module(_SERVER, run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    main()
