"""Options that make a run of the quickstart as short as a test wants it."""

LESS = [
    "--trainer.max_epochs=1",
    "--trainer.num_sanity_val_steps=0",
    "--data.init_args.iterations_per_epoch=1",
    "--data.init_args.prompts_per_iteration=8",
    "--data.init_args.train.limit=64",
    "--data.init_args.val.limit=8",
]
