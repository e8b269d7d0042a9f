"""What the invariant transforms do for INT8 W8A8: errors of inputs and weights, and the KL to full precision.

The policy itself, in full precision, completes prompts; every transform is then folded into a fresh copy, and on those
sequences are measured the signal-to-quantization-noise ratio (SQNR, in dB: 6 is one bit) of the layers' int8 inputs and
int8 weights, averaged over layers and, for inputs, in the worst layer; and the KL divergence of the quantized model's
next-token distribution from the untransformed full-precision one's, averaged over completion tokens.

    python benchmarks/transforms.py
    python benchmarks/transforms.py --model models/smollm2 --prompts 8 --samples 2 --tokens 48 [--layers]
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from options import positive
from prompts import make_prompts
from torch import Tensor, nn
from transformers import PreTrainedModel

from lqrl.engines import EngineSpec, TorchEngineFactory
from lqrl.modeling.backbone import Packed, hidden_states, load_model, output_weight, pack
from lqrl.modeling.sources import load_tokenizer, resolve_source
from lqrl.quant import (
    HadamardRotation,
    InvariantTransform,
    QuantScheme,
    SmoothQuant,
    UpdateAwareScaling,
    export_weights,
    fold_all_,
    prepare_,
    target_modules,
)
from lqrl.quant.numerics import quantize_int8_channel, quantize_int8_token
from lqrl.types import Prompt, SamplingParams

KINDS = ("q_proj", "o_proj", "gate_proj", "down_proj")  # k, v read what q reads, up what gate reads


@dataclass(frozen=True)
class Sequences:
    """Prompts with completions, and where a completion's token is predicted in the packed row."""

    packed: Packed
    predicts: Tensor


@dataclass(frozen=True)
class Measured:
    """One row of the table; SQNR in dB by the layer's name."""

    inputs: dict[str, float]
    weights: dict[str, float]
    kl: float
    drift: float  # largest difference of a log-prob that folding alone makes


@torch.no_grad()
def sample(policy: PreTrainedModel, prompts: list[Prompt], params: SamplingParams, eos: int) -> Sequences:
    """Completions of the full-precision engine."""
    scheme = QuantScheme.preset("none")
    limit = policy.config.max_position_embeddings
    spec = EngineSpec(policy.config, scheme, torch.float32, policy.device, limit, (eos,))
    engine = TorchEngineFactory(max_num_seqs=64)(spec)
    engine.update_weights(export_weights(policy, scheme, export_dtype=torch.float32), policy_version=0)
    rows, predicts = [], []
    for prompt, group in zip(prompts, engine.generate(prompts, params, seed=0), strict=True):
        for completion in group:
            ids = [*prompt.input_ids, *completion.token_ids]
            rows.append(torch.tensor(ids))
            at = torch.arange(len(ids))
            predicts.append((at >= len(prompt.input_ids) - 1) & (at < len(ids) - 1))
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones(len(row), dtype=torch.bool) for row in rows], batch_first=True)
    return Sequences(pack(ids.to(policy.device), mask.to(policy.device)), torch.cat(predicts).to(policy.device))


@torch.no_grad()
def log_probs(model: PreTrainedModel, sequences: Sequences) -> Tensor:
    """``[N, V]`` of the positions that predict a completion token."""
    hidden = hidden_states(model, sequences.packed)[sequences.predicts]
    return torch.log_softmax(hidden @ output_weight(model).T, -1)


def sqnr(x: Tensor, codes: Tensor, scale: Tensor) -> float:
    """Signal over quantization noise in dB."""
    noise = (codes * scale - x).double().square().sum()
    return float(10 * (x.double().square().sum() / noise).log10())


@torch.no_grad()
def measure(name: str, transforms: Sequence[InvariantTransform], sequences: Sequences, expected: Tensor) -> Measured:
    """Fold into a fresh model, then quantize it."""
    scheme = QuantScheme.preset("int8_w8a8")
    model = load_model(resolve_source(name), dtype=torch.float32, device=expected.device).eval()
    fold_all_(model, transforms)
    inputs: dict[str, float] = {}

    def note(layer: str, module: nn.Module, args: tuple[Tensor]) -> None:
        inputs[layer] = sqnr(args[0], *quantize_int8_token(args[0]))

    layers = {layer: model.get_submodule(layer) for layer in target_modules(model, scheme)}
    handles = [module.register_forward_pre_hook(partial(note, layer)) for layer, module in layers.items()]
    drift = float((log_probs(model, sequences) - expected).abs().max())
    for handle in handles:
        handle.remove()
    weights = {layer: sqnr(module.weight, *quantize_int8_channel(module.weight)) for layer, module in layers.items()}
    prepare_(model, scheme, export_dtype=torch.float32)
    quantized = log_probs(model, sequences)
    kl = float((expected.exp() * (expected - quantized)).sum(-1).mean())
    return Measured(inputs, weights, kl, drift)


def row(label: str, measured: Measured) -> str:
    """Inputs by kind, the worst input, all weights, KL."""
    by_kind = defaultdict(list)
    for layer, value in measured.inputs.items():
        by_kind[layer.rpartition(".")[2]].append(value)
    means = [sum(by_kind[kind]) / len(by_kind[kind]) for kind in KINDS]
    weights = sum(measured.weights.values()) / len(measured.weights)
    cells = " ".join(f"{value:9.1f}" for value in (*means, min(measured.inputs.values()), weights))
    return f"{label:34} {cells} {measured.kl:9.2e} {measured.drift:9.1e}"


def main() -> None:
    """Print the table; with ``--layers`` also every layer's input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="asset:countdown_policy")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompts", type=positive, default=32)
    parser.add_argument("--samples", type=positive, default=4)
    parser.add_argument("--tokens", type=positive, default=16)
    parser.add_argument("--layers", action="store_true")
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.model)
    policy = load_model(resolve_source(args.model), dtype=torch.float32, device=args.device).eval()
    prompts = make_prompts(tokenizer, 2 * args.prompts)
    # The second half calibrates: no sequence that is measured has been seen.
    prompts, held_out = prompts[: args.prompts], tuple(prompt.input_ids for prompt in prompts[args.prompts :])
    params = SamplingParams(n=args.samples, max_tokens=args.tokens)
    sequences = sample(policy, prompts, params, tokenizer.eos_token_id)
    expected = log_probs(policy, sequences)
    cases: dict[str, tuple[InvariantTransform, ...]] = {
        "none": (),
        "UAQ": (UpdateAwareScaling(),),
        "SmoothQuant, random tokens": (SmoothQuant(),),
        "SmoothQuant, prompts": (SmoothQuant(tokens=held_out),),
        "SmoothQuant, prompts, no pairs": (SmoothQuant(tokens=held_out, pairs=False),),
        "Hadamard": (HadamardRotation(),),
        "Hadamard, SmoothQuant on prompts": (HadamardRotation(), SmoothQuant(tokens=held_out)),
    }
    print(f"{args.model}, {args.device}, torch {torch.__version__}, {len(expected)} completion tokens")
    print(f"{'int8_w8a8, SQNR in dB':34} " + " ".join(f"{k:>9}" for k in (*KINDS, "worst", "weights")), end=" ")
    print(f"{'KL':>9} {'fold':>9}")
    results = {}
    for label, transforms in cases.items():
        results[label] = measure(args.model, transforms, sequences, expected)
        print(row(label, results[label]), flush=True)
    if args.layers:
        for layer in results["none"].inputs:
            print(f"{layer:40} " + " ".join(f"{measured.inputs[layer]:9.1f}" for measured in results.values()))


if __name__ == "__main__":
    main()
