"""A process that compares mathematical answers; started by path, so that it imports neither lqrl nor torch.

Reads one JSON request a line, ``{"gold": str, "answer": str}``, and writes one JSON reply a line, ``{"equal": bool}``
or ``{"equal": null}`` when the gold answer cannot be parsed. The first line it writes is ``{"ready": true}``.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys


def _limit_memory(megabytes: int) -> None:
    try:
        import resource
    except ImportError:  # Windows has no limits of this kind
        return
    resource.setrlimit(resource.RLIMIT_AS, (megabytes * 2**20, megabytes * 2**20))


def main(seconds: int, megabytes: int) -> None:
    """Serve until standard input closes.

    Args:
        seconds: the system ends the process when one request takes longer, should nobody else be left to do so.
        megabytes: limit of the address space.
    """
    # whatever a library prints must not be taken for a reply
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    _limit_memory(megabytes)
    # the default action needs no interpreter: it also ends a computation inside one long C call
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def equal(gold: str, answer: str) -> bool | None:
        quoted = gold if "$" in gold or "\\boxed" in gold else f"\\boxed{{{gold}}}"
        try:
            reference = parse(quoted, parsing_timeout=0) or parse(gold, parsing_timeout=0)
        except Exception:
            reference = []
        if not reference:
            return None
        try:
            # not symmetric: gold comes first
            return bool(verify(reference, parse(answer, parsing_timeout=0), timeout_seconds=0))
        except Exception:  # RecursionError and MemoryError included
            return False

    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        signal.alarm(seconds)
        result = equal(request["gold"], request["answer"])
        signal.alarm(0)
        print(json.dumps({"equal": result}), file=replies, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
