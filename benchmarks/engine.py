"""Tokens a second of the embedded engine, beside transformers' generate and between its own formats.

Groups of samples share a prompt, as in reinforcement learning; prompts differ in length; every sample has the full
budget of tokens (``--eos`` lets them end). Engines and generate take turns; the figure is the median of the turns.

    python benchmarks/engine.py                                          # both models, all formats
    OMP_NUM_THREADS=1 python benchmarks/engine.py --models tiny --json   # one JSON object a line
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from options import at_least, positive
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen3Config
from transformers.utils import logging

from lqrl.engines.base import EngineSpec
from lqrl.engines.torch import TorchEngine, TorchEngineFactory
from lqrl.modeling.backbone import load_model
from lqrl.quant.export import export_weights
from lqrl.quant.scheme import QuantScheme
from lqrl.types import Prompt, SamplingParams

FORMATS = {
    "fp32": ("none", torch.float32),
    "bf16": ("none", torch.bfloat16),
    "int8_w8a8": ("int8_w8a8", torch.float32),
    "int8_w8a8+lm_head": ("int8_w8a8+lm_head", torch.float32),
    "int8_w8a8+bf16": ("int8_w8a8", torch.bfloat16),
}
SPECIAL = {"bos_token_id": None, "pad_token_id": None, "eos_token_id": None}


def config_of(model: str, positions: int) -> PretrainedConfig:
    if model == "tiny":
        return Qwen3Config(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=positions,
            tie_word_embeddings=True,
            **SPECIAL,
        )
    return LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        **SPECIAL,
    )


@dataclass(frozen=True)
class Load:
    """What every contender generates."""

    prompts: list[Prompt]
    samples: int
    max_tokens: int
    eos: tuple[int, ...]

    @staticmethod
    def of(config: PretrainedConfig, args: argparse.Namespace) -> Load:
        generator = torch.Generator().manual_seed(0)
        groups = args.batch // args.samples
        lengths = torch.randint(args.prompt // 2, args.prompt + 1, (groups,), generator=generator).tolist()
        ids = [torch.randint(1, config.vocab_size, (n,), generator=generator).tolist() for n in lengths]
        prompts = [Prompt(i, tuple(p)) for i, p in enumerate(ids)]
        return Load(prompts, args.samples, args.tokens, (0,) if args.eos else ())


def engine_run(policy: PreTrainedModel, load: Load, name: str, device: torch.device) -> Callable[[], int]:
    preset, dtype = FORMATS[name]
    scheme = QuantScheme.preset(preset)
    limit = policy.config.max_position_embeddings
    engine: TorchEngine = TorchEngineFactory()(EngineSpec(policy.config, scheme, dtype, device, limit, load.eos))
    engine.update_weights(export_weights(policy, scheme, export_dtype=dtype), policy_version=0)

    def run() -> int:
        groups = engine.generate(load.prompts, SamplingParams(n=load.samples, max_tokens=load.max_tokens), seed=0)
        return sum(len(c.token_ids) for group in groups for c in group)

    return run


def transformers_run(policy: PreTrainedModel, load: Load, name: str, device: torch.device) -> Callable[[], int]:
    dtype = FORMATS[name][1]
    model = AutoModelForCausalLM.from_config(policy.config, dtype=dtype, attn_implementation="sdpa")
    model.load_state_dict(policy.state_dict())
    model.to(device).eval()
    rows = [p.input_ids for p in load.prompts for _ in range(load.samples)]
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(r)) + list(r) for r in rows], device=device)
    mask = torch.tensor([[0] * (longest - len(r)) + [1] * len(r) for r in rows], device=device)

    def run() -> int:
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=load.max_tokens,
            eos_token_id=list(load.eos) or None,
            pad_token_id=0,
        )[:, longest:]
        ended = (out == 0).int().cumsum(1).cumsum(1) > 1 if load.eos else torch.zeros_like(out)
        return int((ended == 0).sum())

    return run


def measure(contenders: dict[str, Callable[[], int]], repeats: int, device: torch.device) -> dict[str, float]:
    """Median tokens a second; one warm-up each, then all in turn, ``repeats`` times."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(repeats + 1):
        for name, run in contenders.items():
            started = time.perf_counter()
            tokens = run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn:
                rates[name].append(tokens / (time.perf_counter() - started))
    return {name: statistics.median(r) for name, r in rates.items()}


def report(model: str, rates: dict[str, float], args: argparse.Namespace) -> None:
    base = rates.get("transformers fp32", rates.get("transformers bf16"))
    if args.json:
        for name, rate in rates.items():
            print(json.dumps({"model": model, "contender": name, "tokens_per_second": rate, **vars(args)}, default=str))
        return
    print(f"\n{model}: {args.batch // args.samples} prompts x {args.samples} samples, {args.tokens} new tokens each")
    print(f"{'':28}{'tokens/s':>12}{'x transformers':>16}{'x engine fp32':>16}{'x engine bf16':>16}")
    for name, rate in rates.items():
        ratios = [rate / x if x else float("nan") for x in (base, rates.get("engine fp32"), rates.get("engine bf16"))]
        print(f"{name:28}{rate:12.0f}" + "".join(f"{r:16.2f}" for r in ratios))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tiny", "smollm2"], choices=["tiny", "smollm2"])
    parser.add_argument("--formats", nargs="+", default=["fp32", "bf16", "int8_w8a8"], choices=list(FORMATS))
    parser.add_argument("--transformers", nargs="*", default=["fp32"], choices=["fp32", "bf16"])
    parser.add_argument("--batch", type=positive, default=64, help="samples that run together")
    parser.add_argument("--samples", type=positive, default=8, help="samples a prompt")
    parser.add_argument("--prompt", type=at_least(2), default=32, help="longest prompt; the shortest has half of it")
    parser.add_argument("--tokens", type=positive, default=64, help="new tokens of a sample")
    parser.add_argument("--eos", action="store_true", help="let samples end at token 0")
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true", help="JSON lines instead of tables")
    args = parser.parse_args()
    if args.batch % args.samples:
        parser.error(f"--samples {args.samples} does not divide --batch {args.batch}")
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    device = torch.device(args.device)
    for model in args.models:
        policy = load_model(config_of(model, args.prompt + args.tokens), dtype=torch.float32, seed=0)
        load = Load.of(policy.config, args)
        contenders = {f"transformers {f}": transformers_run(policy, load, f, device) for f in args.transformers}
        contenders |= {f"engine {f}": engine_run(policy, load, f, device) for f in args.formats}
        report(model, measure(contenders, args.repeats, device), args)


if __name__ == "__main__":
    main()
