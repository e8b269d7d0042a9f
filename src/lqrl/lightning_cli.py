"""``lqrl fit --config recipe.yaml``: LightningCLI in subclass mode, nothing re-implemented."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_info

from lqrl import __version__
from lqrl.callbacks import HFExport, InterruptCheckpoint, SignalWatch
from lqrl.callbacks.run_config import RunConfig
from lqrl.callbacks.run_folder import absent_folders, keeps_files, remove_empty, run_folder
from lqrl.data import PromptDataModule
from lqrl.learner import PolicyModule
from lqrl.learner.options import check_trainer
from lqrl.parse_errors import explain
from lqrl.value_help import value_help

_DESCRIPTION = "Reinforcement learning of language models with quantized rollouts."

_CHOICES = re.compile(r"(?P<quote>'?)fit'?(?P<comma>, ?)'?validate'?(?=[)}])")  # as argparse and jsonargparse say them
_ROOTS = {"model": L.LightningModule, "data": L.LightningDataModule, "trainer": L.Trainer}

ROOT_DIR = "runs"
"""The Trainer's ``default_root_dir``: files of a run without a logger are no surprise in the current directory."""


class Parser(LightningArgumentParser):
    """Errors end with the sentence that says what to change, not with a usage of a hundred options before a dump."""

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """Of ``lqrl`` itself with ``doctor`` among the commands, which `lqrl.cli` answers without this parser."""
        commands = ",".join(LqrlCLI.subcommands())
        text = super().format_help(*args, **kwargs)
        if f"{{{commands}}}" not in text:
            return text
        doctor = "    doctor              Say what this machine can run and test it; see lqrl doctor --help."
        return f"{text.replace(f'{{{commands}}}', f'{{{commands},doctor}}').rstrip()}\n{doctor}\n"

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print ``message`` without its frame and exit; ``LQRL_TRACEBACK=1`` shows all of it."""
        if not self.exit_on_error or os.environ.get("LQRL_TRACEBACK"):  # a parser of a class inside another
            super().error(message, ex)
        words = list(self.args or [])
        usage = getattr(ex, "subcommand_parser", self).format_usage()
        options = [word.strip("[]") for word in usage.split() if word.startswith(("--", "[--"))]
        command = self.prog.replace(" [options]", "")
        if words[:1] and words[0] in LqrlCLI.subcommands():
            command = f"{command} {words[0]}"
        message = _CHOICES.sub(r"\g<0>\g<comma>\g<quote>doctor\g<quote>", message)
        short = explain(message, command, options, words, _ROOTS)
        self.exit(2, f"(LQRL_TRACEBACK=1 shows where)\nerror: {short}\n")


class LqrlCLI(LightningCLI):
    """One seed, and one model name, for module and data alike; a last line that says where everything is."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Link what must agree."""
        parser.link_arguments("seed_everything", "model.init_args.seed")
        parser.link_arguments("seed_everything", "data.init_args.seed")
        parser.link_arguments("model.init_args.model", "data.init_args.tokenizer")

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """``fit`` and ``validate``; there is nothing else to test or predict."""
        known = LightningCLI.subcommands()
        return {name: known[name] for name in ("fit", "validate")}

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Answer ``--model.<value>.help``, then parse.

        Raises:
            ValueError: for an option of the Trainer that a run cannot follow.
        """
        words = sys.argv[1:] if args is None else args
        if isinstance(words, list):
            text = value_help(words, {"model": PolicyModule, "data": PromptDataModule})
            if text is not None:
                print(text)
                sys.exit(0)
        super().parse_arguments(parser, args)
        check_trainer(vars(_of_command(self.config).trainer))

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Leave out the callbacks that an option switches off; Lightning refuses one beside the other."""
        options = _of_command(self.config_init).trainer
        given = options.callbacks or []
        callbacks = list(given) if isinstance(given, (list, tuple)) else [given]
        if options.enable_progress_bar is False:
            callbacks = [c for c in callbacks if not isinstance(c, ProgressBar)]
        if options.enable_checkpointing is False or options.fast_dev_run:
            callbacks = [c for c in callbacks if not isinstance(c, ModelCheckpoint)]
            kwargs["enable_checkpointing"] = None  # `InterruptCheckpoint` is a checkpoint, too
        return super().instantiate_trainer(**kwargs, callbacks=callbacks)

    def fit(self, **arguments: Any) -> None:
        """``Trainer.fit``, after saying where the files of an unusual run go."""
        if not keeps_files(self.trainer):
            rank_zero_info("A dry run (fast_dev_run): one iteration, one batch of validation, and no file is written.")
        elif not self.trainer.loggers:
            rank_zero_info(
                f"No logger: the files of this run go to {self.trainer.default_root_dir} (trainer.default_root_dir), "
                "and those of the next run without one over them."
            )
        self._run(self.trainer.fit, arguments)

    def validate(self, **arguments: Any) -> None:
        """``Trainer.validate``."""
        self._run(self.trainer.validate, arguments)

    def _run(self, command: Callable[..., Any], arguments: dict[str, Any]) -> None:
        """A run that ends without a result leaves no folder: loggers make theirs before anything else can fail.

        Raises:
            SystemExit: after an interrupt, with the status of a process that the signal ended.
        """
        absent = absent_folders(self.trainer)
        try:
            command(**arguments)
        except SystemExit as end:
            if not isinstance(end.__context__, KeyboardInterrupt):
                raise
            callbacks = vars(self.trainer)["callbacks"]
            received = [c.received for c in callbacks if isinstance(c, InterruptCheckpoint) and c.received is not None]
            raise SystemExit(128 + next(iter(received), signal.SIGINT)) from end
        finally:
            if self.trainer.is_global_zero:
                remove_empty(absent)

    def after_fit(self) -> None:
        """Say where the run's files are and what to do next."""
        folder = run_folder(self.trainer)  # these two are collectives: before the gate
        callbacks = vars(self.trainer)["callbacks"]
        exported = next((c.target(self.trainer) for c in callbacks if isinstance(c, HFExport)), None)
        if not self.trainer.is_global_zero:
            return
        if self.model.last_rollouts is None:
            print(f"\nNothing was trained: iteration {self.model.iteration} is the end; raise --trainer.max_epochs")
            return
        self._print_scores()
        if not keeps_files(self.trainer):
            print("\nA dry run: nothing was written. Leave out --trainer.fast_dev_run to train.")
            return
        print(f"\nRun folder: {folder}")
        if folder.is_dir():
            print("  " + ", ".join(sorted(p.name + "/" * p.is_dir() for p in folder.iterdir())))
        if exported is not None and (folder / "config.yaml").is_file():
            print("Next: train on from the exported policy, in a new run with a schedule of its own")
            folded = " --model.init_args.transforms '[]'" if self.model.transforms else ""
            print(f"  lqrl fit --config {folder}/config.yaml --model.init_args.model {exported}{folded}")
            if self.model.lora is not None:
                print("  the adapters are merged into it; a new run adds fresh ones")

    def _print_scores(self) -> None:
        """The last validation's, beside the first one's where there are two."""
        history = self.model.validation.history
        for name, score in history[-1][1].items() if history else ():
            before = ""
            if len(history) > 1 and name in history[0][1]:
                before = f"{history[0][1][name]:.3f} before (version {history[0][0]}), "
            when = f"after (version {history[-1][0]})" if before else f"at version {history[-1][0]}"
            print(f"{name}: {before}{score:.3f} {when}")


def _of_command(config: Any) -> Any:
    """The part of a parsed command line that a run is made of; all of it where no command is given, only values."""
    command = config.get("subcommand")
    return config[command] if command else config


def run(args: ArgsType = None) -> LightningCLI:
    """Run one command; ``args`` replaces the command line (a list of words or a dict)."""
    defaults: dict[str, Any] = {"callbacks": [SignalWatch(), InterruptCheckpoint()], "default_root_dir": ROOT_DIR}
    return LqrlCLI(
        PolicyModule,
        PromptDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        parser_class=Parser,
        save_config_callback=RunConfig,
        seed_everything_default=1,
        trainer_defaults=defaults,
        parser_kwargs={"description": _DESCRIPTION, "prog": "lqrl", "version": __version__},
        save_config_kwargs={"overwrite": True},
        args=args,
    )
