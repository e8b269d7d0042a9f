"""Checks of what prefills spare of the last layer, on any device.

Run as a script with ``TRITON_INTERPRET=1`` they go through Triton's interpreter on the CPU, with small shapes, and
print ``{check: what went wrong}`` as JSON; `test_last_tokens.py` does that, and runs them on a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from fused_cases import engine, same
from interpreter import mend_interpreter, print_checks

from lqrl.engines.fused_decoder import FusedDecoder
from lqrl.engines.slots import PrefillContext, SlotCache
from lqrl.quant.kv import kv_rounding


def check_last_tokens(device: torch.device) -> None:
    """The last layer for last tokens alone: a call's keys and values, and its hidden states; its bits in exact mode."""
    lengths = [9, 1, 4] if device.type == "cpu" else [9, 1, 40, 33]
    for name, scheme, exact in (
        ("llama", "int8_w8a8+kv_int8", False),
        ("mistral", "none+kv_fp8", True),
        ("llama", "int8_w8a8+kv_fp8_static", True),
    ):
        built = engine(name, scheme, torch.float32, device, exact=exact)
        decoder, kv = built.decoder, kv_rounding(built.decoder.model, built.spec.scheme)
        assert isinstance(decoder.lean, FusedDecoder), (name, scheme, exact)
        assert kv is not None
        shapes = [shape for _, shape in sorted(decoder.shapes.items())]
        tokens, caches, hidden = torch.arange(sum(lengths), device=device) % 50, [], []
        for alone in (False, True):
            scales = [kv.scales(layer) for layer in range(len(shapes))]
            cache = SlotCache(shapes, torch.float32, device, kv.method, scales, exact)
            cache.reserve(5, 48)
            context = PrefillContext(cache, lengths, [3, 0, 4, 1][: len(lengths)])
            run = decoder.prefill(tokens, context) if alone else decoder(tokens, context.position_ids, context)
            hidden.append(run if alone else run.index_select(0, context.last))
            caches.append(cache)
        assert hidden[1].shape == (len(lengths), built.spec.config.hidden_size)
        if exact:
            same(hidden[1], hidden[0], (name, scheme))
        torch.testing.assert_close(hidden[1], hidden[0], rtol=1e-4, atol=1e-4)
        for layers in zip(*(cache._views for cache in caches), strict=True):
            for a, b in zip(*layers, strict=True):
                same(a, b, (name, scheme, exact))


CHECKS: dict[str, Callable[[torch.device], None]] = {check_last_tokens.__name__: check_last_tokens}


def main() -> None:
    warnings.simplefilter("ignore")  # numpy's, of overflows
    mend_interpreter()
    print_checks(CHECKS)


if __name__ == "__main__":
    main()
