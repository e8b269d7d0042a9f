"""Train the starting policy that ships with lqrl: a 0.09M-parameter Qwen3 that solves about 3 in 10 countdown problems.

    python examples/train_starting_policy.py [DIRECTORY]

Writes a transformers directory (default: the package's own copy) in about a minute on one CPU core, and prints
pass@1 and pass@8 on validation problems. The same seed gives the same files on the same machine and versions.
"""

from __future__ import annotations

import argparse
import math
import time
from functools import partial
from itertools import groupby
from pathlib import Path

import lightning as L
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config

from lqrl.assets import path
from lqrl.data.tasks import Countdown, Row
from lqrl.learner.sft import SFTDataset, SFTModule
from lqrl.modeling.backbone import load_model

CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz =:,()+-*/.?!'\";<>_%^|#&\n"
SPECIAL = ("<pad>", "<bos>", "<eos>")
ROWS, EPOCHS, BATCH = 38_400, 2, 128
LEARNING_RATE, WARMUP = 3e-3, 30
STEPS = ROWS // BATCH * EPOCHS


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, 64 in all; text is lower-cased, any other character is an error."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # <unk> is not there: unknown raises
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    pad, bos, eos = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos,
        model_max_length=128, clean_up_tokenization_spaces=False, padding_side="left",
    )  # fmt: skip


def build_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    """The architecture: Qwen3, as small as countdown allows."""
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def warmup_cosine(step: int) -> float:
    """Factor of the learning rate: up over ``WARMUP`` steps, then down to 0 along a half cosine."""
    return min(1.0, (step + 1) / WARMUP) * 0.5 * (1.0 + math.cos(math.pi * step / STEPS))


def pass_rates(directory: Path, problems: int = 1024, samples: int = 8) -> tuple[float, float]:
    """pass@1 and pass@``samples`` at temperature 1, with the files as any user of transformers reads them."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    task = Countdown(size=problems, split="validation")
    rows = sorted(task, key=lambda row: len(row["prompt"]))
    solved: list[int] = []
    for _, same_length in groupby(rows, key=lambda row: len(row["prompt"])):  # no padding anywhere
        group: list[Row] = list(same_length)
        inputs = tokenizer([row["prompt"] for row in group], return_tensors="pt", return_token_type_ids=False)
        output = model.generate(**inputs, do_sample=True, top_k=0, num_return_sequences=samples, max_new_tokens=24)
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for index, row in enumerate(group):
            solved.append(sum(task.check(row, t) for t in texts[index * samples : (index + 1) * samples]))
    return sum(solved) / len(solved) / samples, sum(s > 0 for s in solved) / len(solved)


def main() -> None:
    """Train, save, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", help="where to write; default: the package's own copy")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    directory: Path = arguments.directory or path("countdown_policy")
    torch.set_num_threads(1)  # a model this small waits for threads longer than it computes
    L.seed_everything(arguments.seed)

    start = time.perf_counter()
    tokenizer = build_tokenizer()
    data = SFTDataset(Countdown(size=ROWS, seed=arguments.seed), tokenizer)
    held_out = SFTDataset(Countdown(size=4 * BATCH, split="validation"), tokenizer)
    prepared = time.perf_counter()
    policy = load_model(build_config(tokenizer), dtype=torch.float32, seed=arguments.seed)
    module = SFTModule(
        policy,
        optimizer=partial(torch.optim.AdamW, lr=LEARNING_RATE, betas=(0.9, 0.98), foreach=True),
        lr_scheduler=partial(LambdaLR, lr_lambda=warmup_cosine),
    )
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=EPOCHS, gradient_clip_val=1.0, log_every_n_steps=50,
        logger=False, enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, data.loader(BATCH, seed=arguments.seed), held_out.loader(BATCH, seed=0))
    trained = time.perf_counter()

    policy.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    torch.manual_seed(arguments.seed)
    once, any_of_eight = pass_rates(directory)
    print(
        f"{sum(p.numel() for p in policy.parameters()):,} parameters, {len(data):,} problems: "
        f"{prepared - start:.0f} s to make the data, {trained - prepared:.0f} s to train, "
        f"{time.perf_counter() - trained:.0f} s to measure\n"
        f"pass@1 {once:.3f}, pass@8 {any_of_eight:.3f} on validation problems; wrote {directory}"
    )


if __name__ == "__main__":
    main()
