"""What exact mode costs: decoding and the learner's forward and backward, exact beside inexact, on random weights.

For each format the sampled tokens whose log-probs are equal as bits are counted first, scored in batches of another
height. Then exact and inexact take turns. Decoding is the time of a whole call less that of a call for one token; the
learner scores the sampled sequences ``--rows`` at a time.

    python benchmarks/exact_cost.py --model 0.6B --device cuda
    python benchmarks/exact_cost.py --model 8B --layers 8 --device cuda --formats int8_w8a8 --batches 256
    OMP_NUM_THREADS=1 python benchmarks/exact_cost.py --device cpu --tiny --batches 8 --prompt 8 --tokens 6 --repeats 1
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass

import torch
from options import at_least, dtype_name, positive, scheme_name
from side_by_side import Timer, card, measured_device
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, Qwen3Config
from transformers.utils import logging

from lqrl.engines.base import EngineSpec
from lqrl.engines.torch import TorchEngine, TorchEngineFactory
from lqrl.learner.scorer import Scorer
from lqrl.modeling.backbone import load_model
from lqrl.modeling.exact import exact_learner_
from lqrl.modeling.precision import parse_dtype
from lqrl.quant import QuantScheme, export_weights, prepare_
from lqrl.quant.kv import kv_rounding, prepare_kv_
from lqrl.types import Completion, Prompt, SamplingParams

# hidden, intermediate, layers, heads, key heads, head width, vocabulary, tied embeddings
SHAPES = {
    "0.6B": (1024, 3072, 28, 16, 8, 128, 151936, True),
    "8B": (4096, 12288, 36, 32, 8, 128, 151936, False),
}
TINY = (128, 384, 2, 8, 4, 16, 128, True)
FORMATS = ("none", "int8_w8a8", "int4_w4a16", "fp8_per_channel")
SAMPLES = 8  # of a prompt


@dataclass(frozen=True)
class Side:
    """An engine and the learner whose weights it holds."""

    policy: PreTrainedModel
    engine: TorchEngine
    scorer: Scorer

    @staticmethod
    def of(config: Qwen3Config, scheme: QuantScheme, exact: bool, args: argparse.Namespace) -> Side:
        device, dtype = torch.device(args.device), parse_dtype(args.dtype)
        policy = load_model(config, dtype=dtype, device=device)
        generator = torch.Generator(device).manual_seed(0)
        with torch.no_grad():
            for parameter in policy.parameters():
                if parameter.dim() == 1:
                    parameter.fill_(1.0)
                else:
                    parameter.normal_(std=0.2 if args.tiny else 0.02, generator=generator)
        if scheme.quantizes:
            prepare_(policy, scheme, export_dtype=dtype)
        prepare_kv_(policy, scheme)
        if exact:
            exact_learner_(policy, dtype)
        spec = EngineSpec(policy.config, scheme, dtype, device, config.max_position_embeddings, (), None, exact)
        engine = TorchEngineFactory(max_num_seqs=max(args.batches))(spec)
        engine.update_weights(export_weights(policy, scheme, export_dtype=dtype), policy_version=0)
        return Side(policy, engine, Scorer(policy, 1.0, dtype, kv_rounding(policy, scheme), exact))

    def generate(self, prompts: list[Prompt], tokens: int) -> list[tuple[Prompt, Completion]]:
        """Every sample, of ``tokens`` tokens."""
        params = SamplingParams(n=SAMPLES, max_tokens=tokens, ignore_eos=True)
        groups = self.engine.generate(prompts, params, seed=0)
        return [(p, c) for p, group in zip(prompts, groups, strict=True) for c in group]

    def score(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Forward and backward."""
        self.policy.zero_grad(set_to_none=True)
        scores = self.scorer(ids, mask)
        scores.sum().backward()
        return scores


def config_of(args: argparse.Namespace) -> Qwen3Config:
    hidden, inner, layers, heads, kv_heads, width, vocabulary, tied = TINY if args.tiny else SHAPES[args.model]
    return Qwen3Config(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=args.layers or layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=width,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=args.prompt + args.tokens + 1,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def make_prompts(config: Qwen3Config, batch: int, longest: int) -> list[Prompt]:
    """Of two lengths, so that rows of a batch stand at other places."""
    generator, made = torch.Generator().manual_seed(0), []
    for i in range(max(1, batch // SAMPLES)):
        length = longest if i % 2 else max(1, longest // 2)
        made.append(Prompt(i, tuple(torch.randint(config.vocab_size, (length,), generator=generator).tolist())))
    return made


def padded(samples: list[tuple[Prompt, Completion]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and mask ``[B, T]`` of prompts and completions."""
    rows = [torch.cat([torch.tensor(p.input_ids), c.token_ids]) for p, c in samples]
    ids = pad_sequence(rows, batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
    return ids.to(device), mask.to(device)


@torch.no_grad()
def equal_logprobs(side: Side, samples: list[tuple[Prompt, Completion]], rows: int) -> tuple[int, int, float]:
    """How many log-probs of the learner have the bits of the engine's, of how many, and the largest difference."""
    equal, tokens, largest = 0, 0, 0.0
    for start in range(0, len(samples), rows):
        part = samples[start : start + rows]
        scores = side.scorer(*padded(part, side.engine.spec.device)).cpu()
        for row, (prompt, completion) in zip(scores, part, strict=True):
            mine, theirs = row[len(prompt.input_ids) :][: len(completion.token_ids)], completion.logprobs
            equal += int((mine.view(torch.int32) == theirs.view(torch.int32)).sum())
            tokens += len(theirs)
            largest = max(largest, float((mine - theirs).abs().max()))
    return equal, tokens, largest


def measure(sides: dict[str, Side], config: Qwen3Config, batch: int, timer: Timer, args: argparse.Namespace) -> dict:
    """One row of the table."""
    prompts = make_prompts(config, batch, args.prompt)
    row: dict = {"samples": SAMPLES * len(prompts)}
    samples = {name: side.generate(prompts, args.tokens) for name, side in sides.items()}
    for name, side in sides.items():
        counts = equal_logprobs(side, samples[name], args.rows)
        row[name] = dict(zip(("equal", "tokens", "max_abs"), counts, strict=True))
    decode: dict[str, Callable[[], object]] = {}
    for name, side in sides.items():
        decode[f"{name} whole"] = lambda side=side: side.generate(prompts, args.tokens)
        decode[f"{name} first"] = lambda side=side: side.generate(prompts, 1)
    times = timer.in_turn(decode)
    ids, mask = padded(samples["exact"][: args.rows], timer.device)
    learn = timer.in_turn({name: lambda side=side: side.score(ids, mask) for name, side in sides.items()})
    with torch.no_grad():
        forward = timer.in_turn({name: lambda side=side: side.scorer(ids, mask) for name, side in sides.items()})
    for name, side in sides.items():
        side.policy.zero_grad(set_to_none=True)
        seconds = (times[f"{name} whole"] - times[f"{name} first"]) / 1e3
        row[name] |= {
            "decode_tokens_per_s": row["samples"] * (args.tokens - 1) / seconds,
            "forward_ms": forward[name],
            "forward_backward_ms": learn[name],
        }
    return row


def report(name: str, row: dict) -> str:
    exact, plain = row["exact"], row["inexact"]
    decode, forward, both = "decode_tokens_per_s", "forward_ms", "forward_backward_ms"
    return (
        f"{name:16} {row['samples']:5d} {exact['equal']:8d} of {exact['tokens']:8d} {plain['equal']:8d} "
        f"{exact[decode]:9.0f} {plain[decode]:9.0f} {exact[decode] / plain[decode]:6.2f} "
        f"{exact[forward]:9.1f} {plain[forward]:9.1f} {plain[forward] / exact[forward]:6.2f} "
        f"{exact[both]:9.1f} {plain[both]:9.1f} {plain[both] / exact[both]:6.2f}"
    )


def main() -> None:
    """Print the table; a ratio is the speed of exact over that of inexact."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="0.6B", choices=list(SHAPES))
    parser.add_argument("--tiny", action="store_true", help="a small model, for a rehearsal without a GPU")
    parser.add_argument("--layers", type=positive, help="fewer layers than the model has")
    parser.add_argument("--formats", nargs="+", type=scheme_name, default=list(FORMATS))
    parser.add_argument("--batches", nargs="+", type=positive, default=[64, 256], help="samples that run together")
    parser.add_argument("--prompt", type=positive, default=128, help="longest prompt")
    parser.add_argument("--tokens", type=at_least(2), default=64, help="new tokens of a sample, at least 2")
    parser.add_argument("--rows", type=positive, default=24, help="sequences that the learner scores together")
    parser.add_argument("--dtype", type=dtype_name, default="bfloat16")
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    args = parser.parse_args()
    logging.disable_progress_bar()
    config, timer = config_of(args), Timer(measured_device(args.device), args.repeats)
    model = "tiny" if args.tiny else args.model
    print(f"{model}, {config.num_hidden_layers} layers, {args.dtype}, {card(timer.device)}")
    print(f"{'':16} {'':5} {'equal log-probs':>20} {'inexact':>8} {'decode':>9} {'inexact':>9} {'ratio':>6} ", end="")
    print(f"{'forward':>9} {'inexact':>9} {'ratio':>6} {'backward':>9} {'inexact':>9} {'ratio':>6}")
    for name in args.formats:
        scheme = QuantScheme.preset(name)
        sides = {kind: Side.of(config, scheme, kind == "exact", args) for kind in ("exact", "inexact")}
        for batch in args.batches:
            row = measure(sides, config, batch, timer, args)
            print(json.dumps({"model": model, "format": name, **row}) if args.json else report(name, row), flush=True)
        del sides


if __name__ == "__main__":
    main()
