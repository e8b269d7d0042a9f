"""``lqrl fit --config recipe.yaml``: LightningCLI in subclass mode, nothing re-implemented."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

from lqrl.callbacks import HFExport, InterruptCheckpoint
from lqrl.callbacks.run_folder import run_folder
from lqrl.data import PromptDataModule
from lqrl.learner import PolicyModule

_DESCRIPTION = "Reinforcement learning of language models with quantized rollouts; `lqrl doctor` tests this machine"


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
        history = self.model.validation.history or [(0, {})]
        (before, first), (after, last) = history[0], history[-1]
        for name in last:
            print(f"{name}: {first.get(name, last[name]):.3f} at version {before}, {last[name]:.3f} at version {after}")
        print(f"\nRun folder: {folder}")
        if folder.is_dir():
            print("  " + ", ".join(sorted(p.name + "/" * p.is_dir() for p in folder.iterdir())))
        if exported is not None:
            print("Next: train on from the exported policy, in a new run with a schedule of its own")
            folded = " --model.init_args.transforms '[]'" if self.model.transforms else ""
            print(f"  lqrl fit --config {folder}/config.yaml --model.init_args.model {exported}{folded}")
            if self.model.lora is not None:
                print("  the adapters are merged into it; a new run adds fresh ones")


def run(args: ArgsType = None) -> LightningCLI:
    """Run one command; ``args`` replaces the command line (a list of words or a dict)."""
    defaults: dict[str, Any] = {"callbacks": [InterruptCheckpoint()]}
    return LqrlCLI(
        PolicyModule,
        PromptDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        seed_everything_default=1,
        trainer_defaults=defaults,
        parser_kwargs={"description": _DESCRIPTION},
        save_config_kwargs={"overwrite": True},
        args=args,
    )
