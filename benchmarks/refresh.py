"""A refresh of a whole model: export with quantization, then the engine's checked copy, against the bytes it must move.

    python benchmarks/refresh.py [--device cuda] [--layers 36] [--formats fp8_per_channel int8_w8a8]

Learner and engine are bare modules with the layers of Qwen3-8B and random bf16 weights; no transformers model is built.
The learner is prepared and its codes are stale, as after an optimizer step. ``total`` is what a refresh costs without
its digest: `export_weights` (quantization, checks for NaN), `write_weights_` (copy, change counts, checks), packing and
the comparison of addresses. The floor reads the bf16 weights once and writes the engine's once, at the bandwidth of a
large copy. Wall times, host work included. Its parts run alone, each after the last has finished: ``quantize``
(`quantize_layers`), ``checks`` (an export of fresh codes: walking the model, looking for NaN), ``write`` and ``host``
(packing, and the comparison of addresses). Together they take longer than the total, in which the host
works ahead of the GPU. ``GPU``: the part before it by CUDA events, with the host ahead.
"""

from __future__ import annotations

import argparse

import torch
from options import positive, scheme_name
from side_by_side import Timer, bandwidth, card, measured_device
from torch import nn

from lqrl.engines.digest import tensor_digest
from lqrl.engines.transaction import HeldTensors, all_tensors, model_digest, write_weights_
from lqrl.quant import QuantScheme, export_weights
from lqrl.quant.codes import CodeModule
from lqrl.quant.linear import AlignedLinear, quantize_layers
from lqrl.quant.prepare import convert_, prepare_
from lqrl.quant.stream import StableTensors

QWEN3_8B = {"hidden": 4096, "wide": 12288, "heads": 32, "kv_heads": 8, "head_dim": 128, "vocabulary": 151936}
TINY = {"hidden": 128, "wide": 256, "heads": 2, "kv_heads": 1, "head_dim": 64, "vocabulary": 512}


class Layer(nn.Module):
    """The weights of one decoder layer, in bf16."""

    def __init__(self, hidden: int, wide: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        shapes = {
            "q_proj": (hidden, heads * head_dim),
            "k_proj": (hidden, kv_heads * head_dim),
            "v_proj": (hidden, kv_heads * head_dim),
            "o_proj": (heads * head_dim, hidden),
            "gate_proj": (hidden, wide),
            "up_proj": (hidden, wide),
            "down_proj": (wide, hidden),
        }
        for name, (k, n) in shapes.items():
            self.add_module(name, nn.Linear(k, n, bias=False))
        for name, width in {"norm_1": hidden, "norm_2": hidden, "q_norm": head_dim, "k_norm": head_dim}.items():
            self.register_parameter(name, nn.Parameter(torch.ones(width)))


class Weights(nn.Module):
    """The weights of a decoder with an untied head."""

    def __init__(self, layers: int, vocabulary: int, hidden: int, **shape: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList([Layer(hidden, **shape) for _ in range(layers)])
        self.norm = nn.Parameter(torch.ones(hidden))
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False)


class Engine:
    """The engine's side: its tensors and its layers with codes, found once."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.held = HeldTensors(model)
        self.coded = [module for module in model.modules() if isinstance(module, CodeModule)]


def weights(layers: int, shape: dict[str, int], device: torch.device) -> Weights:
    """Random bf16 weights."""
    with torch.device("meta"):
        model = Weights(layers, **shape)
    model = model.to(torch.bfloat16).to_empty(device=device).requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(std=0.02)
    return model


def held_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers."""
    return sum(t.numel() * t.element_size() for _, t in all_tensors(model))


def refresh(learner: nn.Module, engine: Engine, scheme: QuantScheme) -> None:
    """What `TorchEngine.update_weights` does, without the digest."""
    assert not engine.held.moved()
    written = write_weights_(engine.held, export_weights(learner, scheme, export_dtype=torch.bfloat16))
    host(engine)
    assert written.elements > 0


def host(engine: Engine) -> None:
    """What is done on the host alone."""
    for layer in engine.coded:
        layer.pack()
    assert not engine.held.moved()


def step(learner: nn.Module) -> None:
    """Make all codes stale, as an optimizer step does."""
    for parameter in learner.parameters():
        torch.autograd.graph.increment_version(parameter)


def measure(args: argparse.Namespace, name: str, timer: Timer, rate: float) -> str:
    """One row of the table."""
    scheme, shape = QuantScheme.preset(name), TINY if args.tiny else QWEN3_8B
    learner, model = (weights(args.layers, shape, timer.device) for _ in range(2))
    convert_(model, scheme)
    engine = Engine(model)
    prepare_(learner, scheme, export_dtype=torch.bfloat16)
    layers = [module for module in learner.modules() if isinstance(module, AlignedLinear)]

    def quantize() -> None:
        quantize_layers(layers)
        for layer in layers:
            layer.quantized_weight()  # where the format has no way to do it together

    def quantize_stale() -> None:
        step(learner)
        quantize()

    total = timer.wall(lambda: refresh(learner, engine, scheme), lambda: step(learner))
    codes = timer.wall(quantize, lambda: step(learner))
    export = timer.wall(lambda: list(export_weights(learner, scheme, export_dtype=torch.bfloat16)))
    exported = list(export_weights(learner, scheme, export_dtype=torch.bfloat16))
    write = timer.wall(lambda: write_weights_(engine.held, StableTensors(exported)))
    gpu = timer.in_turn(
        {"quantize": quantize_stale, "write": lambda: write_weights_(engine.held, StableTensors(exported))}
    )
    alone = timer.wall(lambda: host(engine))
    digest = timer.wall(lambda: model_digest(model))
    reading = held_bytes(model) / rate * 1e3
    floor = (held_bytes(learner) + held_bytes(model)) / rate * 1e3
    figures = (
        *(total, floor, total / floor, codes, gpu["quantize"], export, write, gpu["write"], alone),
        *(digest, digest / reading),
    )
    return f"| {name:16} | " + " | ".join(f"{ms:8.2f}" for ms in figures) + " |"


def check_digest(device: torch.device) -> None:
    """The digest is that of the CPU."""
    x = torch.randn(1000, 999, generator=torch.Generator().manual_seed(0))
    assert int(tensor_digest(x)) == int(tensor_digest(x.to(device)))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=positive, default=36)
    parser.add_argument("--formats", nargs="+", type=scheme_name, default=["fp8_per_channel", "int8_w8a8"])
    parser.add_argument("--repeats", type=positive, default=7)
    parser.add_argument("--tiny", action="store_true", help="small layers, for a rehearsal without a GPU")
    args = parser.parse_args()
    timer = Timer(measured_device(args.device), args.repeats)
    check_digest(timer.device)
    rate = bandwidth(timer.device)
    print(f"{card(timer.device)}; copy {rate / 1e12:.2f} TB/s; {args.layers} layers; ms")
    columns = ("total", "floor", "ratio", "quantize", "GPU", "checks", "write", "GPU", "host", "digest", "/ read")
    print(f"| {'format':16} | " + " | ".join(f"{c:>8}" for c in columns) + " |")
    print("|---" * 12 + "|")
    for name in args.formats:
        print(measure(args, name, timer, rate), flush=True)


if __name__ == "__main__":
    main()
