"""Every low-bit format on one policy: what it costs in accuracy, and what alignment gives back.

For each format: bits a weight (codes and scales of the quantized layers, as they are shipped); signal to quantization
noise of these weights; the KL divergence of the quantized policy's next-token distribution from the full-precision
one's, averaged over sampled tokens; the mismatch between the engine that sampled and the learner on equal weights,
plain and aligned; and the share of code bytes that one AdamW step changes, at three learning rates (fp32 masters,
gradient of the sampled tokens' log-probs with random signs).

    python benchmarks/formats.py
    python benchmarks/formats.py --model models/smollm2 --prompts 8 --samples 2 --tokens 32 --ignore-eos
"""

from __future__ import annotations

import argparse
import json
import math

import torch
from mismatch import add_arguments, folded, gap, sample
from options import dtype_name, scheme_name
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from lqrl.learner.scorer import Scorer
from lqrl.modeling.backbone import hidden_states, pack
from lqrl.modeling.head import output_head
from lqrl.modeling.precision import parse_dtype
from lqrl.quant import AlignedLinear, QuantScheme, prepare_, target_modules
from lqrl.quant.kv import kv_rounding
from lqrl.quant.scheme import PRESETS
from lqrl.types import RolloutBatch

RATES = (1e-6, 1e-5, 1e-4)
EXTRA = ("none+kv_int8", "none+kv_fp8", "none+kv_fp8_static", "int8_w8a8+lm_head", "fp8_per_channel+lm_head+kv_fp8")


def aligned_layers(policy: PreTrainedModel, scheme: QuantScheme) -> dict[str, AlignedLinear]:
    """The layers in low precision by name."""
    layers = {name: policy.get_submodule(name) for name in target_modules(policy, scheme)}
    return {name: layer for name, layer in layers.items() if isinstance(layer, AlignedLinear)}


@torch.no_grad()
def weight_error(policy: PreTrainedModel, scheme: QuantScheme) -> tuple[float, float]:
    """Bits a weight and signal to noise in dB, over all quantized layers."""
    bits, weights, signal, noise = 0, 0, 0.0, 0.0
    for layer in aligned_layers(policy, scheme).values():
        tensors = layer.quantized_weight()
        exact = layer.weight.detach().double()
        bits += sum(8 * t.nbytes for t in tensors.values())
        weights += exact.numel()
        signal += float(exact.square().sum())
        noise += float((layer.method.dequantize(tensors, torch.float32).double() - exact).square().sum())
    return bits / weights, 10 * math.log10(signal / noise)


@torch.no_grad()
def log_probs(policy: PreTrainedModel, scheme: QuantScheme | None, batch: RolloutBatch) -> Tensor:
    """``[tokens, V]`` of the positions that predict a sampled token."""
    kv = None if scheme is None else kv_rounding(policy, scheme)
    packed = pack(batch.input_ids, batch.attention_mask, kv)
    predicts = batch.completion_mask.flatten()[(packed.index + 1).clamp_max(batch.completion_mask.numel() - 1)]
    predicts[-1] = False
    hidden, head = hidden_states(policy, packed)[predicts], output_head(policy)
    logits = hidden.float() @ head.weight.float().T if head.product is None else head.product(hidden)
    return torch.log_softmax(logits, -1)


def codes_changed(
    name: str, scheme: QuantScheme, dtype: torch.dtype, batch: RolloutBatch, args: argparse.Namespace
) -> list[float]:
    """Share of code bytes that one AdamW step changes, for each rate."""
    changed = []
    for rate in RATES:
        policy = folded(name, torch.float32, batch.input_ids.device, args)
        prepare_(policy, scheme, export_dtype=dtype)
        layers = aligned_layers(policy, scheme)
        before = {n: layer.quantized_weight() for n, layer in layers.items()}
        signs = torch.randint(0, 2, (len(batch.input_ids), 1), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
        optimizer = torch.optim.AdamW(policy.parameters(), lr=rate)
        logprobs = Scorer(policy, 1.0, dtype).score(batch.input_ids, batch.attention_mask)
        (logprobs * batch.completion_mask * signs.to(logprobs.device)).mean().backward()
        optimizer.step()
        moved = total = 0
        for n, layer in layers.items():
            code = next(iter(before[n]))  # codes come first, scales after them
            old, new = (t[code].view(torch.uint8) for t in (before[n], layer.quantized_weight()))
            moved, total = moved + int((old != new).sum()), total + old.numel()
        changed.append(moved / total)
    return changed


def measure(name: str, preset: str, dtype: torch.dtype, args: argparse.Namespace) -> dict:
    """One row of the table."""
    scheme, device = QuantScheme.preset(preset), torch.device(args.device)
    policy, batch = sample(name, scheme, dtype, device, args)
    row = {"format": preset, "plain": gap(policy, None, dtype, batch)}
    expected = log_probs(policy, None, batch)
    if scheme.quantizes:
        prepare_(policy, scheme, export_dtype=dtype)
        row["bits"], row["sqnr"] = weight_error(policy, scheme)
    row["aligned"] = gap(policy, scheme, dtype, batch)
    quantized = log_probs(policy, scheme, batch)
    row["kl"] = float((expected.exp() * (expected - quantized)).sum(-1).mean())
    if scheme.quantizes and not args.no_step:
        row["codes_changed"] = codes_changed(name, scheme, dtype, batch, args)
    return row


def line(row: dict) -> str:
    """A row as text."""
    sqnr = f"{row['bits']:5.2f} {row['sqnr']:6.1f}" if "bits" in row else f"{'':5} {'':6}"
    changed = " ".join(f"{c:8.2%}" for c in row.get("codes_changed", []))
    plain, aligned = row["plain"], row["aligned"]
    return (
        f"{row['format']:31} {sqnr} {row['kl']:9.2e} {plain['k3']:9.2e} {aligned['k3']:9.2e} "
        f"{plain['max_abs']:8.1e} {aligned['max_abs']:8.1e} {aligned['equal']:6.1%} {changed}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--formats", nargs="+", type=scheme_name, default=[*[n for n in PRESETS if n != "bf16"], *EXTRA]
    )
    parser.add_argument("--dtype", type=dtype_name, default="float32")
    parser.add_argument("--no-step", action="store_true", help="leave out the AdamW steps")
    add_arguments(parser)
    args = parser.parse_args()
    logging.disable_progress_bar()
    print(f"{args.model}, {args.device}, {args.dtype}, transform {args.transform}, torch {torch.__version__}")
    print(f"{'format':31} {'bits':>5} {'SQNR':>6} {'KL':>9} {'k3':>9} {'aligned':>9} {'max':>8}", end=" ")
    print(f"{'aligned':>8} {'equal':>6} " + " ".join(f"{f'lr {rate:.0e}':>8}" for rate in RATES))
    for preset in args.formats:
        try:
            row = measure(args.model, preset, parse_dtype(args.dtype), args)
        except ValueError as error:
            print(f"{preset:31} does not fit: {str(error).split(':')[0]}", flush=True)
            continue
        print(json.dumps(row) if args.json else line(row), flush=True)


if __name__ == "__main__":
    main()
