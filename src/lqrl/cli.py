"""``lqrl fit --config recipe.yaml``: LightningCLI in subclass mode, nothing re-implemented."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_only

from lqrl.callbacks import HFExport, InterruptCheckpoint
from lqrl.callbacks.run_folder import checkpoint_folder, run_folder
from lqrl.data import PromptDataModule
from lqrl.learner import PolicyModule


class LqrlCLI(LightningCLI):
    """One seed, and one model name, for module and data alike; a last line that says where everything is."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Link what must agree."""
        parser.link_arguments("seed_everything", "model.init_args.seed")
        parser.link_arguments("seed_everything", "data.init_args.seed")
        parser.link_arguments("model.init_args.model", "data.init_args.tokenizer")

    @rank_zero_only
    def after_fit(self) -> None:
        """Say where the run's files are and what to do next."""
        folder, checkpoints = run_folder(self.trainer), checkpoint_folder(self.trainer)
        exported = next(
            (c.target(self.trainer) for c in vars(self.trainer)["callbacks"] if isinstance(c, HFExport)), None
        )
        saved = sorted(checkpoints.glob("*.ckpt"), key=lambda p: p.stat().st_mtime) if checkpoints.is_dir() else []
        history = self.model.validation.history
        first, last = (history[0][1], history[-1][1]) if history else ({}, {})
        for name in last:
            print(f"{name}: {first.get(name, last[name]):.3f} before, {last[name]:.3f} after")
        print(f"\nRun folder: {folder} (config.yaml, metrics.csv, rollouts.jsonl, checkpoints/)")
        if exported is not None:
            print(f"Trained policy: {exported} (transformers format; train on with --model.init_args.model {exported})")
        if saved:
            resume = f"lqrl fit --config {folder}/config.yaml --ckpt_path {saved[-1]}"
            print(f"Next: train longer with\n  {resume} --trainer.max_epochs {2 * self.trainer.current_epoch}")


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
        save_config_kwargs={"overwrite": True},
        args=args,
    )


def main() -> None:
    """The ``lqrl`` command."""
    run()


if __name__ == "__main__":
    main()
