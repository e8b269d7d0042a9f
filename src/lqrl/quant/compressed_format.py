"""A scheme in the words of compressed-tensors: the `quantization_config` of a config.json and the tensors of a layer.

What an engine is sent already has a checkpoint's names. Here is the rest: which of its formats holds a scheme, how
integer codes are packed there, and which of its configs this library computes.

A checkpoint does not say how activations are rounded. vLLM's kernels use this library's rules; transformers' emulation
takes ``amax / 127.5`` and codes down to -128 for int8, a grid of its own.

nvfp4 activations are a case apart: compressed-tensors has one calibrated global scale a layer for them, and vLLM reads
memory that nobody wrote where a checkpoint lacks it. Here the scale is the token's, so the ``quantization_config`` is
that of the weights alone, and `ACTIVATIONS` tells lqrl the rest. Caches with scales per token and head are in the same
case: vLLM refuses a ``kv_cache_scheme`` of that kind, so `CACHE` tells it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lqrl.quant.numerics import pack_int4, unpack_int4
from lqrl.quant.numerics.finite import whole_scale
from lqrl.quant.scheme import QuantScheme, TensorFormat

METHOD = "compressed-tensors"
_INTEGERS = ("int8", "int4", "int3")
# int3 is stored in four bits, as it is in memory: compressed-tensors changed its three-bit layout between releases.
_BITS = {"int8": 8, "int4": 4, "int3": 4, "fp8_e4m3": 8, "fp4_e2m1": 4}
_SCALE_DTYPES = {"fp8_e4m3": "torch.float8_e4m3fn", "e8m0": "torch.uint8"}
_BLOCK = [128, 128]
_STRATEGIES = ("tensor", "channel", "token", "group", "block", "tensor_group")
_SINGLE = ("num_bits", "type", "group_size", "strategy")
KV_STATIC = TensorFormat("fp8_e4m3", "tensor")
"""The one cache format that a ``quantization_config`` describes; it has calibrated scales."""
ACTIVATIONS = "rollout_input_activations"
"""Key of config.json for input activations that a ``quantization_config`` cannot describe; lqrl alone reads it."""
CACHE = "rollout_kv_cache"
"""The same for keys and values."""
INSTEAD = "export it in full precision (HFExport(quantized=False))"


def checkpoint_format(scheme: QuantScheme) -> str:
    """The format of compressed-tensors that holds ``scheme``'s weights.

    Raises:
        ValueError: when none does, or the scheme quantizes nothing; the message says what to do.
    """
    weight, activation = scheme.weight, scheme.activation
    if weight is None:
        raise ValueError(f"scheme {scheme.name!r} quantizes no weights; {INSTEAD}")
    if weight.dtype == "nf4":
        raise ValueError(
            f"scheme {scheme.name!r}: nf4 is a format of bitsandbytes, not of compressed-tensors; {INSTEAD}"
        )
    if activation is not None and activation.dtype == "int4":
        raise ValueError(
            f"scheme {scheme.name!r}: compressed-tensors rounds int4 activations to amax / 7.5 in [-8, 7], lqrl to "
            f"amax / 7 in [-7, 7], which is another policy at 15 levels; {INSTEAD}"
        )
    if weight.dtype in _INTEGERS:
        return "int-quantized" if weight.dtype == "int8" and activation is not None else "pack-quantized"
    if weight.dtype == "fp8_e4m3":
        return "mxfp8-quantized" if weight.scale_dtype == "e8m0" else "float-quantized"
    return "mxfp4-pack-quantized" if weight.scale_dtype == "e8m0" else "nvfp4-pack-quantized"


def unwritten_formats(scheme: QuantScheme) -> dict[str, dict[str, Any]]:
    """What the ``quantization_config`` leaves out of ``scheme``: arguments by key of config.json."""
    unwritten = {}
    if scheme.activation is not None and scheme.activation.dtype == "fp4_e2m1":
        unwritten[ACTIVATIONS] = _arguments(scheme.activation)
    if scheme.kv_cache not in (None, KV_STATIC):
        unwritten[CACHE] = _arguments(scheme.kv_cache)
    return unwritten


def with_unwritten(scheme: QuantScheme, config: Mapping[str, Any]) -> QuantScheme:
    """``scheme`` with what a config.json has under `ACTIVATIONS` and `CACHE`.

    Raises:
        ValueError: when it is not understood.
    """
    refused: list[str] = []
    fields = {"activation": ACTIVATIONS, "kv_cache": CACHE}
    said = {field: _object(config, key) for field, key in fields.items()}
    found: dict[str, Any] = {f: _parsed(fields[f], said_of, refused) for f, said_of in said.items() if said_of}
    if refused:
        raise ValueError("; ".join(refused))
    return replace(scheme, **found)


def quantization_config(
    scheme: QuantScheme, ignore: Sequence[str], targets: Sequence[str] = ("Linear",)
) -> dict[str, Any]:
    """The ``quantization_config`` of a config.json.

    Args:
        scheme: what quantizes.
        ignore: exact names of the linear layers that stay in high precision.
        targets: classes and names of the quantized layers, before ``ignore``.

    Raises:
        ValueError: see `checkpoint_format`.
    """
    name = checkpoint_format(scheme)
    assert scheme.weight is not None
    activation = None if ACTIVATIONS in unwritten_formats(scheme) else scheme.activation
    group = {
        "targets": list(targets),
        "weights": _arguments(scheme.weight),
        "input_activations": None if activation is None else _arguments(activation),
        "output_activations": None,
        "format": name,
    }
    return {
        "quant_method": METHOD,
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "kv_cache_scheme": _arguments(KV_STATIC) if scheme.kv_cache == KV_STATIC else None,
        "global_compression_ratio": None,
    }


def _arguments(held: TensorFormat) -> dict[str, Any]:
    nvfp4 = held.scale_dtype == "fp8_e4m3"
    arguments: dict[str, Any] = {
        "num_bits": _BITS[held.dtype],
        "type": "int" if held.dtype in _INTEGERS else "float",
        "symmetric": held.symmetric,
        "strategy": "tensor_group" if nvfp4 else held.granularity,
        "group_size": held.group_size,
        "dynamic": held.dynamic,
    }
    if held.granularity == "block":
        arguments["block_structure"] = _BLOCK
    if held.scale_dtype != "float":
        arguments["scale_dtype"] = _SCALE_DTYPES[held.scale_dtype]
    return arguments


def parse_quantization_config(config: Mapping[str, Any], name: str) -> QuantScheme:
    """The scheme that a ``quantization_config`` describes, called ``name``, with no layer skipped.

    ``targets`` and ``ignore`` are left to the tensors of the checkpoint, which show what is quantized.

    Raises:
        ValueError: listing everything in it that this library does not compute.
    """
    refused: list[str] = []
    if config.get("quant_method") != METHOD:
        raise ValueError(f"quant_method is {config.get('quant_method')!r}, not {METHOD!r}")
    for key in ("sparsity_config", "transform_config", "moe_sparsity_config"):
        if config.get(key):
            refused.append(f"{key} is set")
    groups = list((_object(config, "config_groups") or {}).values())
    if len(groups) != 1 or not isinstance(groups[0], Mapping):
        raise ValueError("; ".join([*refused, f"{len(groups)} config_groups, where one with its arguments is needed"]))
    weights, inputs = (_object(groups[0], part) for part in ("weights", "input_activations"))
    if groups[0].get("output_activations"):
        refused.append("output_activations are quantized")
    weight = None if weights is None else _parsed("weights", weights, refused)
    activation = None if inputs is None else _parsed("input_activations", inputs, refused)
    if weights is None:
        refused.append("weights are not quantized")
    elif weights.get("dynamic"):
        refused.append("weights are dynamic")
    if inputs is not None and inputs.get("dynamic") is not True:
        refused.append(f"input_activations have calibrated scales (dynamic: {inputs.get('dynamic', False)})")
    keys_and_values = _object(config, "kv_cache_scheme")
    cache = _parsed("kv_cache_scheme", keys_and_values, refused) if keys_and_values else None
    if cache not in (None, KV_STATIC):
        refused.append(f"kv_cache_scheme is {cache}, not {KV_STATIC}")
    if refused:
        raise ValueError("; ".join(refused))
    return QuantScheme(name, weight, activation, kv_cache=cache)


def _object(holder: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
    """What ``holder`` has under ``key``, if anything."""
    found = holder.get(key)
    if found is not None and not isinstance(found, Mapping):
        raise ValueError(f"{key} is {found!r}, where an object is needed")
    return found


def _parsed(what: str, arguments: Mapping[str, Any], refused: list[str]) -> TensorFormat | None:
    lists = [key for key in _SINGLE if isinstance(arguments.get(key), (list, dict))]
    if lists:
        refused.append(f"{what} have {lists[0]} {arguments[lists[0]]}, where a single value is needed")
        return None
    bits, kind = arguments.get("num_bits", 8), arguments.get("type", "int")
    dtypes = {(8, "int"): "int8", (4, "int"): "int4", (8, "float"): "fp8_e4m3", (4, "float"): "fp4_e2m1"}
    dtype = dtypes.get((bits, kind))
    if dtype is None:
        refused.append(f"{what} have {bits} bits of type {kind}")
    if not arguments.get("symmetric", True):
        refused.append(f"{what} have zero points (symmetric: false)")
    if arguments.get("actorder") in ("group", "dynamic"):
        refused.append(f"{what} are reordered (actorder: {arguments['actorder']})")
    size = arguments.get("group_size")
    strategy = arguments.get("strategy") or {None: "tensor", -1: "channel"}.get(size, "group")
    block = arguments.get("block_structure")
    if strategy == "block" and not (isinstance(block, Sequence) and list(block) == _BLOCK):
        refused.append(f"{what} have blocks of {block}, not {_BLOCK}")
    known = ("token_head",) if what == CACHE else _STRATEGIES
    if strategy not in known:
        refused.append(f"{what} have strategy {strategy}")
    if dtype is None or strategy not in known:
        return None
    scale = "float"
    if strategy == "tensor_group":
        strategy, scale = "group", "fp8_e4m3"
    elif strategy == "group" and (dtype == "fp4_e2m1" or "uint8" in str(arguments.get("scale_dtype"))):
        scale = "e8m0"
    dynamic = bool(arguments.get("dynamic", False))
    group_size = size if strategy == "group" else None
    return TensorFormat(dtype, strategy, dynamic, True, group_size, scale)  # type: ignore[arg-type]


def stored_tensors(name: str, tensor: Tensor, scheme: QuantScheme) -> Iterator[tuple[str, Tensor]]:
    """What a checkpoint holds of one tensor that a quantized layer ships, by last names.

    Codes of ``pack-quantized`` become ``weight_packed`` and ``weight_shape``; the others stay as they are.
    """
    assert scheme.weight is not None
    packs = checkpoint_format(scheme) == "pack-quantized"
    if packs and name == "weight":
        yield "weight_packed", pack_codes(tensor, _BITS[scheme.weight.dtype])
        yield "weight_shape", torch.tensor(tensor.shape)
    elif packs and name == "weight_packed":
        yield name, tensor
        yield "weight_shape", torch.tensor([tensor.shape[0], tensor.shape[1] * 8])
    else:
        yield name, tensor


def shipped_tensors(
    stored: Mapping[str, Tensor], weight: TensorFormat, expected: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The reverse of `stored_tensors` for a whole layer.

    Args:
        stored: what the checkpoint holds of the layer, by last name; ``bias`` left out.
        weight: its format.
        expected: tensors on the meta device with the names, shapes and dtypes that the layer's method ships.

    Returns:
        Tensors as ``expected``; scales are cast to its dtypes.

    Raises:
        ValueError: when a tensor is missing, not understood, or of another shape or type.
    """
    known = {*expected, "weight", "weight_packed", "weight_shape", "weight_zero_point"}
    unknown = sorted(set(stored) - known)
    if unknown:
        raise ValueError(f"it has {', '.join(unknown)}, which no kernel here reads")
    _check_unread(stored, expected)
    tensors = dict(stored)
    if weight.dtype in _INTEGERS:
        tensors.update(_codes(stored, _BITS[weight.dtype], expected))
    shipped = {}
    for name, like in expected.items():
        if name not in tensors:
            raise ValueError(f"it has no {name}")
        tensor = tensors[name]
        if name == "weight_scale" or name == "weight_global_scale":
            short, long = sorted((tuple(tensor.shape), tuple(like.shape)), key=len)
            if long == (*short, 1) and len(short) < 2:
                tensor = tensor.reshape(like.shape)  # [N] for [N, 1], [] for [1]
            if like.dtype.is_floating_point and like.dtype.itemsize > 1 and tensor.dtype.is_floating_point:
                tensor = tensor.to(like.dtype)
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            raise ValueError(
                f"its {name} is {tensor.dtype} {tuple(tensor.shape)}, where {like.dtype} {tuple(like.shape)} is needed"
            )
        shipped[name] = tensor
    return shipped


def _check_unread(stored: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """What is not shipped must say nothing new, and scales must be numbers."""
    if bool(stored.get("weight_zero_point", torch.zeros(1)).any()):
        raise ValueError("its weight_zero_point is not 0, and no kernel here reads it")
    packed = expected.get("weight_packed")
    shape = (
        expected["weight"].shape if packed is None else (packed.shape[0], packed.shape[1] * packed.element_size() * 2)
    )
    said = stored.get("weight_shape")
    if said is not None and said.tolist() != list(shape):
        raise ValueError(f"its weight_shape is {said.tolist()}, the model's {list(shape)}")
    for name, tensor in stored.items():
        if name.endswith("scale") and not whole_scale(name, tensor):
            raise ValueError(f"its {name} holds NaN or inf")


def _codes(stored: Mapping[str, Tensor], bits: int, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``weight`` or ``weight_packed``, whichever is expected, from whichever is stored."""
    if "weight_packed" in expected:
        return {"weight_packed": pack_int4(stored["weight"])} if "weight" in stored else {}
    if "weight_packed" not in stored or "weight" in stored:
        return {}
    return {"weight": unpack_codes(stored["weight_packed"], bits, expected["weight"].shape[-1])}


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes ``[N, K]`` int8 packed along ``K``: code + 2**(bits - 1), the first in the lowest bits of an int32.

    Args:
        codes: in [-2**(bits - 1), 2**(bits - 1) - 1].
        bits: 4 or 8.

    Returns:
        int32 ``[N, ceil(K * bits / 32)]``; the bits behind the last code are 0.
    """
    missing = -codes.shape[-1] % (32 // bits)
    padded = torch.nn.functional.pad(codes, (0, missing), value=-(1 << (bits - 1)))
    if bits == 4:
        return pack_int4(padded)
    return (padded.view(torch.uint8) ^ 128).contiguous().view(torch.int32)


def unpack_codes(packed: Tensor, bits: int, width: int) -> Tensor:
    """Codes ``[N, width]`` int8 from `pack_codes`' int32.

    Raises:
        ValueError: when ``packed`` holds more columns or fewer.
    """
    columns = -(-width * bits // 32)
    if packed.dtype != torch.int32 or packed.ndim != 2 or packed.shape[1] != columns:
        raise ValueError(
            f"its weight_packed is {packed.dtype} {tuple(packed.shape)}, where {torch.int32} with {columns} columns "
            f"is needed for {width} codes in each row"
        )
    if bits == 4:
        return unpack_int4(packed)[..., :width].contiguous()
    return (packed.contiguous().view(torch.uint8) ^ 128).view(torch.int8)[..., :width].contiguous()
