"""Checks of the engine's fused kernels against PyTorch's, on any device: cache writes, decode attention, whole engines.

Run as a script with ``TRITON_INTERPRET=1`` they go through Triton's interpreter on the CPU, with small shapes, and
print ``{check: what went wrong}`` as JSON; `test_engine_fused.py` does that, and runs them on a GPU.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator

import torch
from engine_models import CONFIGS
from exact_inputs import randn
from exact_sides import both, compared
from exact_sides import prompts as exact_prompts
from interpreter import mend_interpreter, print_checks
from torch import Tensor

from lqrl.engines.base import EngineSpec
from lqrl.engines.fused_decoder import FusedDecoder
from lqrl.engines.layers import Rotation
from lqrl.engines.lean import LeanDecoder
from lqrl.engines.slots import SlotCache
from lqrl.engines.torch import TorchEngine, TorchEngineFactory
from lqrl.modeling.attention import decode_attention, live_bias
from lqrl.modeling.backbone import AttentionShape, load_model
from lqrl.quant.export import export_weights
from lqrl.quant.kv import METHODS, KVCacheMethod, prepare_kv_
from lqrl.quant.scheme import QuantScheme
from lqrl.types import Prompt, SamplingParams

DTYPES = (torch.float32, torch.bfloat16)
NAN_CODE = 0x7F
Shape = tuple[int, int, int, int]
"""Heads, key heads, widths of keys and values."""
SMALL: tuple[Shape, ...] = ((4, 2, 16, 16), (3, 1, 20, 12), (34, 2, 32, 32))
REAL: tuple[Shape, ...] = (
    (32, 8, 128, 128), (16, 8, 64, 64), (9, 3, 80, 80), (8, 8, 96, 96), (8, 1, 256, 256), (40, 1, 128, 128),
)  # fmt: skip


def cases(device: torch.device) -> Iterator[tuple[Shape, torch.dtype, KVCacheMethod | None]]:
    """Shapes, dtypes and formats of the cache; on a GPU more of them, fp32 with few."""
    methods = [None, *METHODS.values()]
    yield from itertools.product(SMALL[:2], DTYPES, methods)
    yield from itertools.product(SMALL[2:], [torch.bfloat16], methods[:2])
    if device.type == "cuda":
        yield from itertools.product(REAL, [torch.bfloat16], methods)
        yield from itertools.product(REAL[:1], [torch.float32], methods)


def cache_of(
    device: torch.device, shape: Shape, dtype: torch.dtype, method: KVCacheMethod | None,
    slots: int, length: int,
) -> SlotCache:  # fmt: skip
    """An empty cache whose storage is NaN, where it can be."""
    _, kv_heads, width, value_width = shape
    scales = [(torch.tensor([0.0061]), torch.tensor([0.0073]))]  # some values saturate
    cache = SlotCache(
        [AttentionShape(kv_heads, width, value_width, width**-0.5, None)], dtype, device, method,
        scales if method is not None else (),
    )  # fmt: skip
    cache.reserve(slots, length)
    for view in cache._views[0]:
        if view.dtype == torch.float8_e4m3fn:
            view.view(torch.uint8).fill_(NAN_CODE)
        else:
            view.fill_(torch.nan if view.is_floating_point() else 111)
    return cache


def product_of(device: torch.device, shape: Shape, tokens: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Query, key and value side by side, with tokens that are zero, huge, tiny, NaN and inf."""
    heads, kv_heads, width, value_width = shape
    widths = [heads * width, kv_heads * width, kv_heads * value_width]
    x = randn(device, tokens, sum(widths), seed=tokens)
    for token, value in ((1, 0.0), (2, 3e30), (3, 1e-38), (4, torch.nan), (5, -torch.inf)):
        if token < tokens:
            x[token, widths[0] + 1] = x[token, -2] = value
    if tokens > 1:
        x[1] = 0.0
    return x.to(dtype).split(widths, 1)


def rotated(x: Tensor, rotation: Rotation, positions: Tensor) -> Tensor:
    """What the layers of `lqrl.engines.lean` compute of heads ``[N, H, D]``."""
    half = x.shape[-1] // 2
    turned = torch.cat([x[..., half:], x[..., :half]], -1) * rotation.sin[positions][:, None]
    return x * rotation.cos[positions][:, None] + turned


def tables(device: torch.device, width: int, length: int, dtype: torch.dtype) -> Rotation:
    angles = torch.arange(length)[:, None] / 100.0 ** (torch.arange(width // 2) * 2 / width)
    cos, sin = torch.cat([angles.cos()] * 2, 1), torch.cat([-angles.sin(), angles.sin()], 1)
    return Rotation(cos.to(dtype).to(device), sin.to(dtype).to(device))


def same(a: Tensor, b: Tensor, what: object) -> None:
    """Equal bits; every NaN is one NaN."""
    assert a.dtype == b.dtype, (what, a.dtype, b.dtype)
    if a.is_floating_point():
        a, b = (torch.where(x.float().isnan(), torch.nan, x.float()).contiguous().view(torch.int32) for x in (a, b))
    assert torch.equal(a, b), (what, int((a != b).sum()), "of", a.numel(), "elements differ")


def check_cache_writes(device: torch.device) -> None:
    """Without head norms: the bits of rotating, quantizing and storing one after the other."""
    for case in cases(device):
        for tokens, slots in ((7, None), (9, [3, 3, 0, 0, 5, 1, 1, 2, 4])):
            _write_case(device, *case, tokens, slots)


def _write_case(
    device: torch.device, shape: Shape, dtype: torch.dtype, method: KVCacheMethod | None,
    tokens: int, slots: list[int] | None,
) -> None:  # fmt: skip
    _, kv_heads, width, value_width = shape
    what = (shape, dtype, method, slots)
    fused, eager = (cache_of(device, shape, dtype, method, 10, 23) for _ in range(2))
    product, rotation = product_of(device, shape, tokens, dtype), tables(device, width, 23, dtype)
    positions = (torch.arange(tokens, device=device) * 5 + 2) % 23
    where = None if slots is None else torch.tensor(slots, device=device)
    out = fused.rotate_and_write(0, product, rotation, positions, where)
    q, k, v = (x.reshape(tokens, -1, w) for x, w in zip(product, (width, width, value_width), strict=True))
    same(out, rotated(q, rotation, positions), (what, "queries"))
    rows = eager.rows(kv_heads, torch.arange(tokens, device=device) if where is None else where, positions)
    eager.write(0, rows, rotated(k, rotation, positions).transpose(0, 1)[None], v.transpose(0, 1)[None])
    for name, a, b in zip(
        ("keys", "values", "key scales", "value scales"), fused._views[0], eager._views[0], strict=False
    ):
        same(a, b, (what, name))


def check_head_norms(device: torch.device) -> None:
    """With head norms: the bits of those of exact mode, and the same codes as for what a plain cache is given."""
    from lqrl.quant.triton_exact_rows import rms_norm

    tokens = 6 if device.type == "cpu" else 300  # bf16 hides most of what another order of sums does
    at, positions = torch.arange(tokens, device=device), torch.arange(tokens, device=device) * 5 % 12
    for shape, dtype, method in cases(device):
        heads, kv_heads, width, _ = shape
        product = product_of(device, shape, tokens, dtype)
        norms = [randn(device, width, seed=i, dtype=dtype) for i in (8, 9)]
        rotation = tables(device, width, 12, dtype)._replace(query_norm=norms[0], key_norm=norms[1], eps=1e-6)
        plain = cache_of(device, shape, dtype, None, tokens, 12)
        out = plain.rotate_and_write(0, product, rotation, positions, None)
        keys = plain._views[0][0][at, :, positions]
        if method is None:
            for x, norm, got, number in ((product[0], norms[0], out, heads), (product[1], norms[1], keys, kv_heads)):
                normed = rms_norm(x.reshape(tokens, number, width).contiguous(), norm, 1e-6)[0]
                same(got, rotated(normed, rotation, positions), (shape, dtype, number))
            continue
        cache = cache_of(device, shape, dtype, method, tokens, 12)
        same(cache.rotate_and_write(0, product, rotation, positions, None), out, (shape, dtype, method))
        stored = method.quantize(keys, torch.tensor([0.0061], device=device))
        same(cache._views[0][0][at, :, positions], stored.codes, (shape, dtype, method))
        if method.per_token:
            same(cache._views[0][2][at, :, positions], stored.scale, (shape, dtype, method))


def check_tiles_of_heads(device: torch.device) -> None:
    """Programs that take several tiles of heads give the bits of those that take one."""
    from lqrl.engines.triton_cache_write import rotate_and_store

    shapes = [(9, 3, 128, 40)] if device.type == "cpu" else [SMALL[2], *REAL[:3]]
    for shape, dtype, method in itertools.product(shapes, DTYPES, [None, *METHODS.values()]):
        tokens, width, what = 7, shape[2], (shape, dtype, method)
        product, positions = product_of(device, shape, tokens, dtype), torch.arange(tokens, device=device)
        norms = [randn(device, width, seed=i, dtype=dtype) for i in (8, 9)]
        rotation = tables(device, width, 12, dtype)
        scales = (torch.tensor([0.0061], device=device), torch.tensor([0.0073], device=device))
        for turning in (rotation, rotation._replace(query_norm=norms[0], key_norm=norms[1], eps=1e-6)):
            one, some = (cache_of(device, shape, dtype, method, tokens, 12) for _ in range(2))
            out, other = (
                rotate_and_store(product, turning, positions, None, cache._views[0], method, scales, times=times)
                for cache, times in ((one, 1), (some, 3))
            )
            same(out, other, what)
            for a, b in zip(one._views[0], some._views[0], strict=True):
                same(a, b, what)


def check_decode_attention(device: torch.device) -> None:
    """Against the dense path: lengths from one key on, windows, slots beyond the rows, NaN behind every end."""
    lengths = [1, 40, 7, 33] if device.type == "cpu" else [1, 300, 77, 64, 65, 513, 128, 1000, 2]
    for case in cases(device):
        _attention_case(device, *case, lengths)


def _attention_case(
    device: torch.device, shape: Shape, dtype: torch.dtype, method: KVCacheMethod | None,
    lengths: list[int],
) -> None:  # fmt: skip
    from lqrl.engines import triton_decode_attention as t

    heads, kv_heads, width, value_width = shape
    rows, longest = len(lengths), max(lengths)
    cache = cache_of(device, shape, dtype, method, rows + 2, longest + 5)
    keys, values = (randn(device, 1, kv_heads, sum(lengths), w, seed=w, dtype=dtype) for w in (width, value_width + 1))
    counts = torch.tensor(lengths, device=device)
    slots = torch.arange(rows, device=device).repeat_interleave(counts)
    at = torch.cat([torch.arange(n, device=device) for n in lengths])
    cache.write(0, cache.rows(kv_heads, slots, at), keys, values[..., :-1] * 3)
    q, positions = randn(device, rows, heads, width, dtype=dtype), counts - 1
    clean = [x.nan_to_num(0.0) for x in cache.read(0, rows, longest)]
    stored = cache.stored(0, cache.slots, cache.length)
    for window in (None, 6) if device.type == "cpu" else (None, 1, 6, 100):
        wanted = decode_attention(q, *clean, live_bias(positions, longest, dtype, window), width**-0.5)
        for tile, splits in ((None, 1), (t.Tile(16, 4, 2), 4), (None, None)):
            got = t.attend(q, *stored, positions, width**-0.5, window, tile=tile, splits=splits)
            error = (got.double() - wanted.double()).norm(dim=2) / wanted.double().norm(dim=2).clamp_min(0.1)
            bound = 2e-6 if dtype == torch.float32 else 1.5e-2
            assert error.max() < bound, (shape, dtype, method, window, tile, splits, float(error.max()))


def check_splits(device: torch.device) -> None:
    from lqrl.engines.triton_decode_attention import splits_of

    assert [splits_of(n, 100, 132) for n in (8, 64, 512, 529, 4096)] == [64, 8, 1, 1, 1]
    assert [splits_of(8, blocks, 132) for blocks in (1, 2, 3, 70)] == [1, 2, 2, 64]


def engine(
    name: str, scheme: str, dtype: torch.dtype, device: torch.device, exact: bool = False, **options: int | bool
) -> TorchEngine:
    spec = EngineSpec(CONFIGS[name], QuantScheme.parse(scheme), dtype, device, 64, (3,), exact=exact)
    built = TorchEngineFactory(max_num_seqs=3, **options)(spec)
    built.decoder._fuses = built.options.fused  # which on the CPU is the interpreter's business alone
    policy = load_model(CONFIGS[name], dtype=torch.float32, seed=0).eval()
    prepare_kv_(policy, built.spec.scheme)
    built.update_weights(export_weights(policy, built.spec.scheme, export_dtype=dtype), policy_version=0)
    return built


def check_engines(device: torch.device) -> None:
    """Greedy tokens of fused and plain engines: groups of samples, slots that are left and taken again, windows."""
    prompts = [Prompt(id=i, input_ids=tuple(range(1, 3 + 2 * i))) for i in range(4)]
    params = SamplingParams(n=(1, 3, 1, 2), max_tokens=5, temperature=0)
    for name, scheme in (
        ("qwen3", "none"),
        ("qwen3", "int8_w8a16+kv_int8"),
        ("llama", "none+kv_fp8"),
        ("qwen2", "none+kv_fp8_static"),
        ("mistral", "none"),
    ):
        fused, plain = (engine(name, scheme, torch.float32, device, fused=on) for on in (True, False))
        assert isinstance(fused.decoder.lean, FusedDecoder), (name, scheme)
        assert not isinstance(plain.decoder.lean, FusedDecoder), (name, scheme)
        both = zip(*(e.generate(prompts, params, seed=0) for e in (fused, plain)), strict=True)
        for a, b in ((x, y) for groups in both for x, y in zip(*groups, strict=True)):
            assert a.token_ids.tolist() == b.token_ids.tolist(), (name, scheme)
            # A difference in the last place may move a code of the cache by one.
            error = float((a.logprobs - b.logprobs).abs().max())
            assert error < (2e-2 if "kv" in scheme else 1e-4), (name, scheme, error)


def check_exact_engines(device: torch.device) -> None:
    """Exact engines run fused where that gives the learner's bits, and give them: groups, slots taken again, windows.

    The CPU's exact modules add a head norm's squares in another order than the interpreted kernel, so there Qwen3's
    engine must notice and run without it.
    """
    params, small = SamplingParams(n=2, max_tokens=3), device.type == "cpu"
    cases = [
        ("llama", "none+kv_fp8", torch.bfloat16),
        ("mistral", "int8_w8a8", torch.float32),
        ("qwen3", "int8_w8a8+kv_int8", torch.float32),
        ("qwen2", "none+kv_fp8_static", torch.float32),
    ]
    for name, scheme, dtype in cases[: 3 if small else None]:
        case = both(CONFIGS[name], scheme, dtype, max_num_seqs=3, device=device, positions=64)
        decoder = case.engine.decoder
        decoder._fuses, decoder._chosen = True, False  # which on the CPU is the interpreter's business alone
        decoder.refresh_derived()
        wanted = LeanDecoder if small and name == "qwen3" else FusedDecoder
        assert type(decoder.lean) is wanted, (name, scheme, decoder.lean)
        assert compared(case, exact_prompts(3, 9, 56), params, rows=4) == (3 * 2 * 3, 0), (name, scheme)


def check_round_trips(device: torch.device) -> None:
    """What a cache gives back, in one pass, has the bits of quantizing and dequantizing, whatever lies where."""
    from lqrl.quant.triton_kv import round_trip

    shapes = [(3, 5, 20), (1, 70, 64)] if device.type == "cpu" else [(8, 3000, 128), (2, 777, 80), (1, 5, 256)]
    for method in METHODS.values():
        for dtype in (torch.float32, torch.bfloat16):
            for heads, tokens, width in shapes:
                x = product_of(device, (heads, heads, width, width), tokens, dtype)[0].view(tokens, heads, width)
                for laid in (x.transpose(0, 1)[None], x[:, :, None], x.contiguous()[1:, :1], x[:0]):
                    scale = torch.tensor([0.0061], device=device)  # some values saturate
                    got, wanted = round_trip(laid, method, scale), method.quantize(laid, scale).values(dtype)
                    same(got, wanted, (method, dtype, laid.shape))
                    assert got.shape == laid.shape
                whole = x.contiguous().transpose(0, 1)[None]
                assert round_trip(whole, method, scale).stride() == whole.stride()
                if method.per_token:  # a learner hands over a scale of the host's that nobody reads
                    same(round_trip(whole, method, torch.ones(())), method.round_trip(whole, scale), method)


def check_what_is_refused(device: torch.device) -> None:
    """Norms of another kind, and kernels whose result is another one."""
    from lqrl.engines import fused_decoder

    assert not isinstance(engine("gemma", "none", torch.float32, device).decoder.lean, FusedDecoder)
    silu_mul = fused_decoder.exact.silu_mul
    try:
        fused_decoder.exact.silu_mul = lambda gate, up: silu_mul(gate, up) * 1.001
        assert isinstance(engine("llama", "none", torch.float32, device).decoder.lean, LeanDecoder)
    finally:
        fused_decoder.exact.silu_mul = silu_mul


CHECKS: dict[str, Callable[[torch.device], None]] = {
    check.__name__: check
    for check in (
        check_cache_writes,
        check_head_norms,
        check_tiles_of_heads,
        check_decode_attention,
        check_splits,
        check_engines,
        check_exact_engines,
        check_round_trips,
        check_what_is_refused,
    )
}


def main() -> None:
    warnings.simplefilter("ignore")  # numpy's, of overflows
    mend_interpreter()
    print_checks(CHECKS)


if __name__ == "__main__":
    main()
