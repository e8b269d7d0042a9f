"""`QuantScheme`: the one description of low precision that learner, export and engine read."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True)
class TensorFormat:
    """How one kind of tensor is held in low precision; the words are those of compressed-tensors.

    Attributes:
        dtype: type of the codes.
        granularity: what shares a scale: ``tensor``, ``channel`` (a row of the weight), ``token`` (a row of the
            activations), ``token_head`` (keys or values of one head), ``group`` (neighbors along the input) or
            ``block`` (128 x 128 of the weight).
        dynamic: scales are computed when the tensor is used (activations), not stored beside the codes.
        symmetric: no zero point.
        group_size: neighbors of a group.
        scale_dtype: type of the scales; those in ``fp8_e4m3`` (nvfp4) have a global fp32 scale besides.

    Raises:
        ValueError: when ``group_size`` is set without ``granularity: group``, or the reverse.
    """

    dtype: Literal["int8", "int4", "int3", "fp8_e4m3", "fp4_e2m1", "nf4"]
    granularity: Literal["tensor", "channel", "token", "token_head", "group", "block"]
    dynamic: bool = False
    symmetric: bool = True
    group_size: int | None = None
    scale_dtype: Literal["float", "fp8_e4m3", "e8m0"] = "float"

    def __post_init__(self) -> None:
        if (self.group_size is not None) != (self.granularity == "group"):
            raise ValueError(
                f"TensorFormat: group_size belongs to granularity 'group', got granularity {self.granularity!r} and "
                f"group_size {self.group_size}"
            )

    def __str__(self) -> str:
        shared = f"{self.granularity}{self.group_size or ''}"
        scale = "" if self.scale_dtype == "float" else f", {self.scale_dtype} scales"
        dynamic = ", dynamic" if self.dynamic else ""
        return f"{self.dtype} per {shared}{scale}{dynamic}{'' if self.symmetric else ', asymmetric'}"


@dataclass(frozen=True)
class QuantScheme:
    """Which linear layers run in which format.

    A preset's name without a ``weight`` stands for the preset's formats, so that options can be added to them:
    ``QuantScheme("nf4", skip=("*.down_proj",))``. A format that nothing can compute is refused where the layers are
    swapped (`lqrl.quant.methods.linear_method`).

    Attributes:
        name: what it is called in logs and reports; without ``weight`` also the preset that is meant, with additions.
        weight: format of the linear weights, or ``None`` for no quantization (the identity scheme).
        activation: format of the linear layers' inputs, or ``None`` for weight-only.
        skip: fnmatch patterns of module names that stay in high precision, besides those `target_modules` leaves out.
        lm_head: the output head is quantized too. Tied weights are shipped twice then: the embedding's in full
            precision, the head's as codes.
        kv_cache: format of keys and values in the engine's cache, or ``None`` for the compute dtype. Not dynamic means
            scales calibrated for each layer.

    Raises:
        ValueError: when ``activation``, ``skip`` or ``lm_head`` is set without ``weight`` and the name of a preset,
            since it would do nothing.
    """

    name: str
    weight: TensorFormat | None = None
    activation: TensorFormat | None = None
    skip: tuple[str, ...] = ()
    lm_head: bool = False
    kv_cache: TensorFormat | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "skip", tuple(self.skip))
        if self.weight is None and self.activation is None and self.name.split("+")[0] in _FORMATS:
            self._take_from(QuantScheme.preset(self.name))
        if self.weight is None and (self.activation is not None or self.skip or self.lm_head):
            raise ValueError(
                f"QuantScheme {self.name!r} sets activation, skip or lm_head without a weight format, which has no "
                f"effect; set weight, set name to a preset ({', '.join(_FORMATS)}), or use the scheme 'none'"
            )

    def _take_from(self, preset: QuantScheme) -> None:
        """Fill what was not set; an attribute is fixed from here on."""
        object.__setattr__(self, "weight", preset.weight)
        object.__setattr__(self, "activation", preset.activation)
        object.__setattr__(self, "lm_head", self.lm_head or preset.lm_head)
        object.__setattr__(self, "kv_cache", self.kv_cache or preset.kv_cache)

    @property
    def quantizes(self) -> bool:
        """Whether any layer is quantized; false for the identity scheme."""
        return self.weight is not None

    @classmethod
    def preset(cls, name: str) -> QuantScheme:
        """A named scheme, one of `PRESETS`; ``none`` (alias ``bf16``) keeps the engine's dtype.

        Additions after the name, in any number: ``+lm_head`` quantizes the output head too; ``+kv_int8`` and
        ``+kv_fp8`` the key/value cache, with scales per token and head; ``+kv_fp8_static`` with calibrated scales.
        ``fp8_per_channel+lm_head+kv_fp8`` has all of it in 8 bits.

        Raises:
            ValueError: when ``name`` is unknown, and lists the names; or an addition is.
        """
        base, *additions = name.split("+")
        if base not in PRESETS:
            close = difflib.get_close_matches(base, PRESETS, n=1)
            raise ValueError(
                f"unknown quantization scheme {base!r}{f' (did you mean {close[0]}?)' if close else ''}; use one of "
                f"{', '.join(sorted(PRESETS))}, and after it {', '.join(f'+{name}' for name in ADDITIONS)}"
            )
        scheme = PRESETS[base]
        fields: dict[str, Any] = {}
        for addition in additions:
            if addition not in ADDITIONS:
                raise ValueError(f"unknown addition {addition!r} to scheme {base!r}; use one of {', '.join(ADDITIONS)}")
            doubled = fields.keys() & ADDITIONS[addition].keys()
            if doubled:
                raise ValueError(
                    f"{addition!r} sets {', '.join(doubled)}, which an addition before it has set; keep one of them"
                )
            fields |= ADDITIONS[addition]
        return replace(scheme, name=name, **fields) if fields else scheme

    @classmethod
    def parse(cls, value: str | QuantScheme) -> QuantScheme:
        """A scheme from what a config holds: a preset's name, or a whole scheme.

        Raises:
            ValueError: when a name is unknown, or a whole scheme goes by the name of a preset with other formats.
        """
        if not isinstance(value, QuantScheme):
            return cls.preset(value)
        formats = _FORMATS.get(value.name.split("+")[0])
        if formats is not None and formats != (value.weight, value.activation):
            raise ValueError(
                f"the scheme is named {value.name!r}, but its weight ({value.weight}) and activation "
                f"({value.activation}) are not those of that preset; leave both out (null), or choose another name"
            )
        return value


_INT8_TOKEN = TensorFormat("int8", "token", dynamic=True)
_FP8_TOKEN = TensorFormat("fp8_e4m3", "token", dynamic=True)
_NVFP4 = TensorFormat("fp4_e2m1", "group", group_size=16, scale_dtype="fp8_e4m3")
_MXFP8 = TensorFormat("fp8_e4m3", "group", group_size=32, scale_dtype="e8m0")

_FORMATS: dict[str, tuple[TensorFormat, TensorFormat | None]] = {
    "int8_w8a8": (TensorFormat("int8", "channel"), _INT8_TOKEN),
    "int8_w8a16": (TensorFormat("int8", "channel"), None),
    "int4_w4a16": (TensorFormat("int4", "group", group_size=128), None),
    "int4_w4a16_g32": (TensorFormat("int4", "group", group_size=32), None),
    "fp8_per_tensor": (TensorFormat("fp8_e4m3", "tensor"), _FP8_TOKEN),
    "fp8_per_channel": (TensorFormat("fp8_e4m3", "channel"), _FP8_TOKEN),
    "fp8_per_block": (
        TensorFormat("fp8_e4m3", "block"),
        TensorFormat("fp8_e4m3", "group", group_size=128, dynamic=True),
    ),
    "nvfp4_w4a16": (_NVFP4, None),
    "nvfp4_w4a4": (_NVFP4, replace(_NVFP4, dynamic=True)),
    "mxfp4_w4a16": (TensorFormat("fp4_e2m1", "group", group_size=32, scale_dtype="e8m0"), None),
    "mxfp8": (_MXFP8, replace(_MXFP8, dynamic=True)),
    "nf4": (TensorFormat("nf4", "group", group_size=64), None),
    # Stress formats: harsher than anything that is served, for experiments with corrections.
    "int3_w3a16_g32": (TensorFormat("int3", "group", group_size=32), None),
    "int4_w4a4": (TensorFormat("int4", "channel"), TensorFormat("int4", "token", dynamic=True)),
}

_IDENTITY = QuantScheme("none")

PRESETS: dict[str, QuantScheme] = {
    "none": _IDENTITY,
    "bf16": _IDENTITY,
    **{name: QuantScheme(name, weight, activation) for name, (weight, activation) in _FORMATS.items()},
}

ADDITIONS: dict[str, dict[str, Any]] = {
    "lm_head": {"lm_head": True},
    "kv_int8": {"kv_cache": TensorFormat("int8", "token_head", dynamic=True)},
    "kv_fp8": {"kv_cache": TensorFormat("fp8_e4m3", "token_head", dynamic=True)},
    "kv_fp8_static": {"kv_cache": TensorFormat("fp8_e4m3", "tensor")},
}
"""What may follow a preset's name after ``+``, and the fields it sets."""
