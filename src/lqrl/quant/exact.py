"""Operations whose bits depend on nothing but the row they belong to: what exact mode is made of.

Products, attention, norms, SiLU and log-softmax sum each output in one order, whatever the batch, its company and how
the work is cut. CPU tensors go to C kernels (`lqrl.quant.exact_native`), CUDA tensors to Triton kernels
(``lqrl.quant.triton_exact_*``). The two devices add in different orders: engine and learner must share one. No autograd
graph is made here, see `lqrl.modeling.exact`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lqrl.quant import exact_native, triton_use
from lqrl.quant.exact_truncation import draw_truncated
from lqrl.quant.kv import Cached

_FLOATS = (torch.float32, torch.bfloat16)


def check_device(device: torch.device | str) -> None:
    """Raise where exact mode has no kernels.

    Raises:
        NotImplementedError: off the CPU and CUDA, and on a CUDA device that Triton does not serve.
        BuildError: on the CPU, when the kernels cannot be compiled here.
    """
    device = torch.device(device)
    if device.type == "cpu":
        exact_native.library()
    elif device.type != "cuda":
        raise NotImplementedError(f"exact mode runs on the CPU and on CUDA, not on {device}; set exact to false")
    elif not triton_use.serves(device):
        raise NotImplementedError(
            f"exact mode on {device} needs Triton and an NVIDIA GPU of compute capability 8.0 or more: install triton "
            f"and a C compiler, leave {triton_use.VARIABLE} unset, or set exact to false"
        )


def _check(*tensors: Tensor) -> None:
    device = tensors[0].device
    for x in tensors:
        if x.dtype not in _FLOATS:
            raise TypeError(f"exact operations take float32 or bfloat16, not {x.dtype}; set the compute dtype")
        if x.device != device:
            raise ValueError(f"an exact operation got tensors on {device} and {x.device}: move them to one device")
    if device.type != "cpu":
        check_device(device)


def pack(weight: Tensor, out: Tensor | None = None) -> Tensor:
    """A weight ``[N, K]`` as `linear` reads it: same shape and dtype; written into ``out`` if given.

    On CUDA that is the contiguous weight, which is returned itself if it is contiguous and no ``out`` is given.
    """
    _check(weight)
    weight = weight.detach().contiguous()
    target = out if out is not None else torch.empty_like(weight) if weight.is_cpu else weight
    if target.shape != weight.shape or target.dtype != weight.dtype or not target.is_contiguous():
        raise ValueError(
            f"a weight {tuple(weight.shape)} of {weight.dtype} does not fit {tuple(target.shape)} {target.dtype}"
        )
    if weight.is_cpu:
        exact_native.pack(weight, target)
    elif target.data_ptr() != weight.data_ptr():
        target.copy_(weight)
    return target


@torch.no_grad()
def linear(x: Tensor, packed: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """``x @ weight.T + bias``: one chain of sums over the inputs, in fp32; then the bias; rounded once.

    Args:
        x: ``[..., K]`` fp32 or bf16.
        packed: from `pack`, fp32 or bf16 ``[N, K]``.
        bias: ``[N]`` or ``None``.
        dtype: of the result; ``None`` for that of ``x``.

    Returns:
        ``[..., N]``.
    """
    (n, k), dtype = packed.shape, dtype or x.dtype
    bias = None if bias is None else bias.contiguous()
    _check(x, packed, *(() if bias is None else (bias,)))
    if dtype not in _FLOATS:
        raise TypeError(f"exact products are float32 or bfloat16, not {dtype}")
    if x.shape[-1] != k or not packed.is_contiguous() or (bias is not None and bias.numel() != n):
        raise ValueError(f"a packed weight {(n, k)} does not fit an input {tuple(x.shape)} or its bias")
    rows = x.reshape(-1, k).contiguous()
    if rows.is_cpu:
        out = exact_native.linear(rows, packed, bias, dtype)
    else:
        from lqrl.quant import triton_exact_gemm

        out = triton_exact_gemm.linear(rows, packed, bias, dtype)
    return out.view(*x.shape[:-1], n)


class Sequences(NamedTuple):
    """Which queries and keys belong together.

    Attributes:
        table: ``[4, S]`` int64, contiguous, on the device of the queries: row of the first query, number of queries,
            which token (or which slot of a cache) holds the first key, and which key the first query is. Query ``i``
            sees keys up to ``first + i``.
        longest: no sequence has more queries; the host must know it without asking the device.
        keys: no sequence has more keys; ``None`` where the host does not know.
    """

    table: Tensor
    longest: int
    keys: int | None = None


def packed_sequences(lengths: Sequence[int], device: torch.device | str = "cpu") -> Sequences:
    """Whole sequences that lie one after the other."""
    counts = torch.tensor(lengths)
    starts = counts.cumsum(0) - counts
    table = torch.stack([starts, counts, starts, torch.zeros_like(counts)])
    return Sequences(triton_use.on_device(table, torch.device(device)), max(lengths), max(lengths))


@torch.no_grad()
def attention(
    q: Tensor,
    k: Tensor | Cached,
    v: Tensor | Cached,
    sequences: Sequences,
    scaling: float,
    sliding_window: int | None = None,
) -> Tensor:
    """Causal attention, one arithmetic for every query row: keys in order, counted from the row's first key.

    What a low-bit cache holds is read as its values in the dtype of ``q``; on CUDA the kernel itself makes them.

    Args:
        q: ``[N, H, D]``, fp32 or bf16, any strides with contiguous ``D``.
        k, v: keys and values of the same dtype or as cached, heads in dimension 1, keys of a sequence one after the
            other in dimension 0 of ``[tokens, Hkv, D]``, or in dimension 2 of a cache ``[slots, Hkv, L, D]``.
        sequences: see there.
        scaling: factor of the scores.
        sliding_window: a query sees this many keys, itself included; ``None`` for all.

    Returns:
        ``[N, H, Dv]``.
    """
    _check(q, *(x.scale if isinstance(x, Cached) else x for x in (k, v)))
    for x in (k, v):
        if isinstance(x, Cached) and x.codes.dtype not in (torch.int8, torch.float8_e4m3fn):
            raise TypeError(f"cached keys and values are codes of int8 or float8_e4m3fn, not {x.codes.dtype}")
        if isinstance(x, Tensor) and x.dtype != q.dtype:
            raise TypeError(f"queries, keys and values must have one dtype, got {x.dtype} for queries of {q.dtype}")
    heads, (keys, values) = q.shape[1], ((x.codes if isinstance(x, Cached) else x).shape for x in (k, v))
    if heads % keys[1] or keys[:-1] != values[:-1] or keys[-1] != q.shape[-1]:
        raise ValueError(f"queries {tuple(q.shape)} do not fit keys {tuple(keys)} and values {tuple(values)}")
    if q.is_cpu:
        k, v = (x.values(q.dtype) if isinstance(x, Cached) else x for x in (k, v))
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        return exact_native.attention(q, k, v, sequences.table, scaling, sliding_window)
    from lqrl.quant import triton_exact_attention

    return triton_exact_attention.attention(q, k, v, sequences, scaling, sliding_window)


@torch.no_grad()
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``x / sqrt(mean(x^2) + eps)`` in fp32, rounded to the dtype of ``x``, times ``weight``.

    Args:
        x: ``[..., D]``.
        weight: ``[D]`` in the dtype of ``x``.
        eps: see above.

    Returns:
        The normed rows, and fp32 ``[..., 1]`` the factors ``1 / sqrt(mean(x^2) + eps)``.
    """
    _check(x, weight)
    if x.dtype != weight.dtype:
        raise TypeError(f"a norm of {x.dtype} got a weight of {weight.dtype}; cast the parameters to the compute dtype")
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"a norm's weight {tuple(weight.shape)} does not fit rows of {tuple(x.shape)}")
    x, weight = x.contiguous(), weight.contiguous()
    if x.is_cpu:
        return exact_native.rms_norm(x, weight, eps)
    from lqrl.quant import triton_exact_rows

    return triton_exact_rows.rms_norm(x, weight, eps)


@torch.no_grad()
def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``x + delta`` and `rms_norm` of it, with the bits of one after the other; all of one dtype."""
    if x.is_cpu:
        total = x + delta
        return total, rms_norm(total, weight, eps)[0]
    _check(x, delta, weight)
    if not x.dtype == delta.dtype == weight.dtype or x.shape != delta.shape:
        raise TypeError(
            f"a norm of {weight.dtype} got the sum of {tuple(x.shape)} of {x.dtype} and {tuple(delta.shape)} of "
            f"{delta.dtype}"
        )
    from lqrl.quant import triton_exact_rows

    return triton_exact_rows.add_rms_norm(x.contiguous(), delta.contiguous(), weight.contiguous(), eps)


@torch.no_grad()
def silu(x: Tensor) -> Tensor:
    """``x / (1 + exp(-x))`` in fp32, rounded once."""
    _check(x)
    x = x.contiguous()
    if x.is_cpu:
        return exact_native.silu(x)
    from lqrl.quant import triton_exact_rows

    return triton_exact_rows.silu(x)


@torch.no_grad()
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``[M, N]`` tensors of one dtype, with the bits of one after the other."""
    if gate.is_cpu:
        return silu(gate) * up
    _check(gate, up)
    if gate.dtype != up.dtype or gate.shape != up.shape or gate.ndim != 2:
        raise TypeError(f"a gate {tuple(gate.shape)} of {gate.dtype} got {tuple(up.shape)} of {up.dtype}")
    from lqrl.quant import triton_exact_rows

    gate, up = (x if x.stride(1) == 1 else x.contiguous() for x in (gate, up))
    return triton_exact_rows.silu_mul(gate, up)


class Normalizer(NamedTuple):
    """What turns a row's logits into log-probs: ``logit / temperature - largest - log_total``.

    Attributes:
        largest: ``[N]`` fp32, of the tempered logits.
        log_total: ``[N]`` float64, log of the sum of ``exp(logit / temperature - largest)``.
    """

    largest: Tensor
    log_total: Tensor


@torch.no_grad()
def normalizer(logits: Tensor, temperature: float) -> Normalizer:
    """The normalizer of each row of fp32 logits ``[N, V]``."""
    _check_logits(logits)
    logits = logits.contiguous()
    if logits.is_cpu:
        return Normalizer(*exact_native.logits(logits, temperature))
    from lqrl.quant import triton_exact_draw

    return Normalizer(*triton_exact_draw.totals(logits, temperature))


@torch.no_grad()
def sample(logits: Tensor, uniform: Tensor | None, temperature: float) -> tuple[Tensor, Normalizer]:
    """Draw a token for each row of fp32 logits ``[N, V]`` by its uniform ``[N]`` float64, or take the first largest."""
    _check_logits(logits)
    if uniform is not None:
        _check_uniform(logits, uniform)
    logits = logits.contiguous()
    uniform = None if uniform is None else uniform.contiguous()
    if logits.is_cpu:
        tokens = torch.empty(len(logits), dtype=torch.int64)
        return tokens, Normalizer(*exact_native.logits(logits, temperature, uniform, tokens))
    from lqrl.quant import triton_exact_draw

    tokens, *rows = triton_exact_draw.draw(logits, uniform, temperature)
    return tokens, Normalizer(*rows)


@torch.no_grad()
def sample_truncated(
    logits: Tensor, uniform: Tensor, temperature: float, top_k: int, top_p: float
) -> tuple[Tensor, Normalizer, Tensor]:
    """As `sample`, from the tokens that top-k, then top-p leave; also the log of their mass, fp32 ``[N]``.

    Args:
        logits, uniform, temperature: as for `sample`.
        top_k: most likely tokens that are kept; 0 for all.
        top_p: smallest set with at least this share of their mass is kept; 1 for all.
    """
    _check_logits(logits)
    _check_uniform(logits, uniform)
    if logits.is_cpu:
        rows = normalizer(logits, temperature)
        drawn = draw_truncated(tempered(logits, temperature), *rows, uniform, top_k, top_p)
        return drawn[0], rows, drawn[1]
    from lqrl.quant import triton_truncated_draw

    (tokens, *rows), log_mass = triton_truncated_draw.draw(
        logits.contiguous(), uniform.contiguous(), temperature, top_k, top_p
    )
    return tokens, Normalizer(*rows), log_mass


def _check_uniform(logits: Tensor, uniform: Tensor) -> None:
    if uniform.dtype != torch.float64 or uniform.shape != logits.shape[:1]:
        raise ValueError(
            f"{len(logits)} rows are drawn by as many float64 numbers, not by {tuple(uniform.shape)} of {uniform.dtype}"
        )


def _check_logits(logits: Tensor) -> None:
    if logits.dtype != torch.float32:
        raise TypeError(f"exact log-probs take float32 logits, not {logits.dtype}")
    _check(logits)


@torch.no_grad()
def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float, rows: Normalizer) -> Tensor:
    """Log-prob of one token a row: fp32 ``[N]`` from fp32 logits ``[N, V]``; computed in float64, rounded once."""
    if not logits.is_cpu:
        from lqrl.quant import triton_exact_draw

        return triton_exact_draw.token_logprobs(logits.contiguous(), tokens.contiguous(), temperature, *rows)
    chosen = tempered(logits.gather(1, tokens[:, None]).squeeze(1), temperature)
    return (chosen.double() - rows.largest.double() - rows.log_total).float()


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """``logits / temperature``, rounded once: on CUDA, torch multiplies by the reciprocal of a Python number."""
    return logits if temperature == 1 else logits / torch.full_like(logits, temperature)


def rotary_table(frequencies: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of ``position * frequency``, fp32 ``[length, F]``, each from its own position alone.

    They are computed on the CPU and moved to the device of ``frequencies``.
    """
    cos, sin = exact_native.rotary_table(frequencies.float().cpu().contiguous(), length)
    return cos.to(frequencies.device), sin.to(frequencies.device)
