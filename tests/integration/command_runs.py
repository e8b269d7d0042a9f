"""The quickstart, on less."""

from __future__ import annotations

from pathlib import Path

QUICKSTART = Path("configs/quickstart.yaml").resolve()
LESS = [
    "--trainer.max_epochs=1",
    "--trainer.num_sanity_val_steps=0",
    "--data.init_args.iterations_per_epoch=2",
    "--data.init_args.prompts_per_iteration=8",
    "--data.init_args.train.limit=32",
    "--data.init_args.val.limit=4",
]
