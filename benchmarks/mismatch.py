"""Engine against learner on equal weights: how different are the log-probs of the same tokens?

The engine decodes token by token with a key-value cache, the learner scores the same tokens in one packed forward pass.
Formats: identity (nothing quantized), int8_w8a8 with a plain learner, with the aligned learner, and with an int8
head too; or those of ``--schemes``, aligned. ``--exact`` puts engine and aligned learner in exact mode, in which all
log-probs are equal. It runs on a GPU where there is one, else on the CPU.

    python benchmarks/mismatch.py --model asset:countdown_policy
    python benchmarks/mismatch.py --device cpu --exact --schemes none int8_w8a8 --prompts 4 --samples 2
    python benchmarks/mismatch.py --model models/smollm2 --prompts 8 --samples 4 --tokens 48 --dtype float32,bfloat16
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

import torch
from options import dtype_name, positive, scheme_name
from prompts import make_prompts
from torch import Tensor
from transformers import PreTrainedModel

from lqrl.algorithms import mismatch_metrics
from lqrl.engines import EngineSpec, TorchEngineFactory
from lqrl.learner.kv_scales import calibrate_kv_
from lqrl.learner.scorer import Scorer
from lqrl.modeling.backbone import load_model
from lqrl.modeling.exact import exact_learner_
from lqrl.modeling.precision import parse_dtype
from lqrl.modeling.sources import load_tokenizer, resolve_source
from lqrl.quant import (
    HadamardRotation,
    QuantScheme,
    SmoothQuant,
    UpdateAwareScaling,
    export_weights,
    fold_all_,
    prepare_,
)
from lqrl.quant.kv import kv_rounding, prepare_kv_
from lqrl.rollouts import pad_rollouts
from lqrl.types import RolloutBatch, SamplingParams


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    engine: str
    learner: str
    aligned: bool


TRANSFORMS = {
    "none": (),
    "uaq": (UpdateAwareScaling(),),
    "smooth": (SmoothQuant(),),
    "hadamard": (HadamardRotation(),),
}
CASES = (
    Case("none", "the same", False),
    Case("int8_w8a8", "not aligned", False),
    Case("int8_w8a8", "aligned", True),
    Case("int8_w8a8+lm_head", "aligned", True),
)


def folded(name: str, dtype: torch.dtype, device: torch.device, args: argparse.Namespace) -> PreTrainedModel:
    """The policy, with the invariant transform of ``args``."""
    policy = load_model(resolve_source(name), dtype=torch.float32, device=device)
    fold_all_(policy, TRANSFORMS[args.transform])
    for parameter in policy.parameters():  # not policy.to(dtype), which would round the rotary frequencies too
        parameter.data = parameter.data.to(dtype)
    return policy


@torch.no_grad()
def sample(
    name: str, scheme: QuantScheme, dtype: torch.dtype, device: torch.device, args: argparse.Namespace
) -> tuple[PreTrainedModel, RolloutBatch]:
    """A policy, not aligned yet, and what an engine of ``scheme`` samples with its weights."""
    tokenizer = load_tokenizer(name)
    policy = folded(name, dtype, device, args).eval()
    prompts = make_prompts(tokenizer, args.prompts)
    prepare_kv_(policy, scheme)
    if scheme.kv_cache is not None and not scheme.kv_cache.dynamic:
        longest = max(len(p.input_ids) for p in prompts)
        ids = torch.tensor([[*p.input_ids, *[0] * (longest - len(p.input_ids))] for p in prompts], device=device)
        mask = torch.arange(longest)[None] < torch.tensor([len(p.input_ids) for p in prompts])[:, None]
        calibrate_kv_(Scorer(policy, 1.0, dtype), ids, mask.to(device), token_budget=8192)
    limit = policy.config.max_position_embeddings
    spec = EngineSpec(policy.config, scheme, dtype, device, limit, (tokenizer.eos_token_id,), exact=args.exact)
    engine = TorchEngineFactory(max_num_seqs=64, fused=not args.unfused)(spec)
    engine.update_weights(export_weights(policy, scheme, export_dtype=dtype), policy_version=0)
    params = SamplingParams(n=args.samples, max_tokens=args.tokens, ignore_eos=args.ignore_eos)
    groups = engine.generate(prompts, params, seed=0)
    zeros = torch.zeros(sum(map(len, groups)))
    batch = pad_rollouts(
        prompts, groups, rewards=zeros, reward_terms=zeros[:, None], accuracy=zeros, term_names=("r",), pad_token_id=0
    )
    return policy, batch.to(device)


@torch.no_grad()
def gap(
    policy: PreTrainedModel, scheme: QuantScheme | None, dtype: torch.dtype, batch: RolloutBatch, exact: bool = False
) -> dict:
    """The learner's log-probs of sampled tokens against the engine's; ``scheme`` rounds the learner's cache."""
    kv = None if scheme is None else kv_rounding(policy, scheme)
    scored = Scorer(policy, 1.0, dtype, kv, exact).score(batch.input_ids, batch.attention_mask)
    mask: Tensor = batch.completion_mask
    difference = (scored - batch.rollout_logprobs)[mask].abs()
    metrics = {k: float(v.value) for k, v in mismatch_metrics(scored, batch.rollout_logprobs, mask).items()}
    return {
        "tokens": int(mask.sum()),
        "equal": float((difference == 0).float().mean()),
        "k3": metrics["mismatch/k3"],
        "mean_abs": float(difference.mean()),
        "max_abs": float(difference.max()),
        "ratio_mean": metrics["mismatch/ratio_mean"],
        "ess": metrics["mismatch/ess"],
    }


def measure(name: str, case: Case, dtype: torch.dtype, device: torch.device, args: argparse.Namespace) -> dict:
    """Sample with the engine, score with the learner."""
    scheme = QuantScheme.preset(case.engine)
    policy, batch = sample(name, scheme, dtype, device, args)
    if case.aligned:
        prepare_(policy, scheme, export_dtype=dtype)
    exact = args.exact and (case.aligned or not scheme.quantizes)
    if exact:
        exact_learner_(policy, dtype)
    row = gap(policy, scheme if case.aligned else None, dtype, batch, exact)
    return {
        "model": name,
        "dtype": str(dtype).removeprefix("torch."),
        "engine": case.engine,
        "learner": case.learner,
        **row,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that say what is sampled, and where."""
    parser.add_argument("--model", default="asset:countdown_policy")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--exact", action="store_true", help="engine and aligned learner in exact mode")
    parser.add_argument("--unfused", action="store_true", help="the engine's layers run PyTorch's kernels")
    parser.add_argument("--transform", default="none", choices=list(TRANSFORMS), help="folded in before all else")
    parser.add_argument("--prompts", type=positive, default=64)
    parser.add_argument("--samples", type=positive, default=8)
    parser.add_argument("--tokens", type=positive, default=16)
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object a row")


def dtype_names(text: str) -> list[str]:
    """The argparse type of names with commas between them."""
    return [dtype_name(name) for name in text.split(",")]


def main() -> None:
    """Print the table, one JSON line a row with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", type=dtype_names, default="float32", help="one or several, with commas")
    parser.add_argument(
        "--schemes", nargs="*", type=scheme_name, help="aligned learners of these schemes instead of the usual cases"
    )
    add_arguments(parser)
    args = parser.parse_args()
    print(f"{args.model}, {args.device}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"{'dtype':9} {'engine':17} {'learner':12} {'tokens':>7} {'equal':>7} {'k3':>9}", end=" ")
    print(f"{'mean':>9} {'max':>9} {'ESS':>6}")
    for dtype in args.dtype:
        cases = [Case(name, "aligned", True) for name in args.schemes or ()] or CASES
        for case in cases:
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
