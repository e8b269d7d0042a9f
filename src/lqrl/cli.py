"""The ``lqrl`` command: ``fit`` and ``validate`` of `lqrl.lightning_cli`, and ``doctor``, which needs none of it."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch.cli import ArgsType, LightningCLI


def run(args: ArgsType = None) -> LightningCLI:
    """Run ``fit`` or ``validate``; ``args`` replaces the command line (a list of words or a dict)."""
    from lqrl import lightning_cli

    return lightning_cli.run(args)


def main() -> None:
    """The ``lqrl`` command: modules in the current directory can be named; an error of ours is one line.

    ``LQRL_TRACEBACK=1`` shows where it was raised.
    """
    if sys.argv[1:2] == ["doctor"]:
        from lqrl.doctor import main as doctor

        sys.exit(doctor(sys.argv[2:]))
    sys.path.insert(0, str(Path.cwd()))
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Lightning's own, about PyTorch
    try:
        _run_or_say_why_not()
    except KeyboardInterrupt:  # the Trainer answers one of its own
        print("\nStopped before the run began: nothing is saved. Start again with the same command.", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def _run_or_say_why_not() -> None:
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    from lqrl import lightning_cli
    from lqrl.callbacks import MismatchError
    from lqrl.engines import EngineUnavailableError, RefreshError, StaleEngineError
    from lqrl.parse_errors import sentence
    from lqrl.quant.native_build import BuildError, SelfTestError
    from lqrl.rewards import RewardError

    engines = EngineUnavailableError, RefreshError, StaleEngineError
    ours = RewardError, MismatchError, BuildError, SelfTestError, *engines
    try:
        lightning_cli.run()
    except (ValueError, OSError, ImportError, NotImplementedError, MisconfigurationException, *ours) as error:
        if os.environ.get("LQRL_TRACEBACK"):
            raise
        sys.exit(f"\n(LQRL_TRACEBACK=1 shows where)\n{type(error).__name__}: {sentence(str(error))}")


if __name__ == "__main__":
    main()
