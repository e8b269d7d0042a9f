"""Engine against learner on equal weights: how different are the log-probs of the same tokens?

The engine decodes token by token with a key-value cache, the learner scores the same tokens in one packed forward pass.
Formats: identity (nothing quantized), int8_w8a8 with a plain learner, with the aligned learner, and with an int8
head too.

    python benchmarks/mismatch.py --model asset:countdown_policy
    python benchmarks/mismatch.py --model models/smollm2 --prompts 8 --samples 4 --tokens 48 --dtype float32,bfloat16
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

import torch

from lqrl.algorithms import mismatch_metrics
from lqrl.data import Arithmetic, Countdown
from lqrl.engines import EngineSpec, TorchEngineFactory
from lqrl.learner.scorer import Scorer
from lqrl.modeling.backbone import load_model
from lqrl.modeling.precision import parse_dtype
from lqrl.modeling.sources import load_tokenizer, resolve_source
from lqrl.quant import QuantScheme, export_weights, prepare_
from lqrl.rollouts import pad_rollouts
from lqrl.types import Prompt, SamplingParams


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    engine: str
    learner: str
    aligned: bool


CASES = (
    Case("none", "the same", False),
    Case("int8_w8a8", "not aligned", False),
    Case("int8_w8a8", "aligned", True),
    Case("int8_w8a8+lm_head", "aligned", True),
)


def make_prompts(tokenizer, count: int) -> list[Prompt]:
    """Chat prompts where the model chats, countdown problems where it does not."""
    if tokenizer.chat_template:
        task = Arithmetic(digits=2, size=count)
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": task[i]["prompt"]}], tokenize=False, add_generation_prompt=True
            )
            for i in range(count)
        ]
    else:
        texts = [Countdown(size=count)[i]["prompt"] for i in range(count)]
    return [Prompt(i, tuple(tokenizer(t)["input_ids"]), t) for i, t in enumerate(texts)]


@torch.no_grad()
def measure(name: str, case: Case, dtype: torch.dtype, device: torch.device, args: argparse.Namespace) -> dict:
    """Sample with the engine, score with the learner."""
    tokenizer, scheme = load_tokenizer(name), QuantScheme.preset(case.engine)
    policy = load_model(resolve_source(name), dtype=dtype).to(device).eval()
    eos = tokenizer.eos_token_id
    spec = EngineSpec(policy.config, scheme, dtype, device, policy.config.max_position_embeddings, (eos,))
    engine = TorchEngineFactory(max_num_seqs=64)(spec)
    engine.update_weights(export_weights(policy, scheme, export_dtype=dtype), policy_version=0)
    prompts = make_prompts(tokenizer, args.prompts)
    params = SamplingParams(n=args.samples, max_tokens=args.tokens, ignore_eos=args.ignore_eos)
    groups = engine.generate(prompts, params, seed=0)
    rows = sum(map(len, groups))
    zeros = torch.zeros(rows)
    batch = pad_rollouts(
        prompts, groups, rewards=zeros, reward_terms=zeros[:, None], accuracy=zeros, term_names=("r",), pad_token_id=0
    ).to(device)
    if case.aligned:
        prepare_(policy, scheme, export_dtype=dtype)
    scored = Scorer(policy, 1.0, dtype).score(batch.input_ids, batch.attention_mask)
    mask = batch.completion_mask
    gap = (scored - batch.rollout_logprobs)[mask].abs()
    metrics = {k: float(v.value) for k, v in mismatch_metrics(scored, batch.rollout_logprobs, mask).items()}
    return {
        "model": name,
        "dtype": str(dtype).removeprefix("torch."),
        "engine": case.engine,
        "learner": case.learner,
        "tokens": int(mask.sum()),
        "equal": float((gap == 0).float().mean()),
        "k3": metrics["mismatch/k3"],
        "mean_abs": float(gap.mean()),
        "max_abs": float(gap.max()),
        "ratio_mean": metrics["mismatch/ratio_mean"],
        "ess": metrics["mismatch/ess"],
    }


def main() -> None:
    """Print the table, one JSON line a row with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="asset:countdown_policy")
    parser.add_argument("--dtype", default="float32", help="one or several, separated by commas")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    print(f"{args.model}, {args.device}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"{'dtype':9} {'engine':17} {'learner':12} {'tokens':>7} {'equal':>7} {'k3':>9}", end=" ")
    print(f"{'mean':>9} {'max':>9} {'ESS':>6}")
    for dtype in args.dtype.split(","):
        for case in CASES:
            row = measure(args.model, case, parse_dtype(dtype), torch.device(args.device), args)
            if args.json:
                print(json.dumps(row))
            else:
                print(
                    f"{row['dtype']:9} {row['engine']:17} {row['learner']:12} {row['tokens']:7d} {row['equal']:7.1%} "
                    f"{row['k3']:9.2e} {row['mean_abs']:9.2e} {row['max_abs']:9.2e} {row['ess']:6.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
