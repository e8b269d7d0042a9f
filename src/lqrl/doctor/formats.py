"""The presets on one device: learner and engine equal as bits, how the product computes there, and exact mode."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lqrl.doctor.machine import device_name, dotted
from lqrl.doctor.native import COMPILER
from lqrl.doctor.report import Row, Section, WrongResultError, attempt, one_line
from lqrl.quant import exact, kernels, triton_use
from lqrl.quant.linear import AlignedLinear, QuantizedLinear
from lqrl.quant.methods import Fp8Block, Fp8Channel, FullPrecision, IntegerGemm, LinearMethod, linear_method
from lqrl.quant.methods.exact import exact_method
from lqrl.quant.methods.weight_only import PackedWeightOnly
from lqrl.quant.native_build import BuildError
from lqrl.quant.scheme import PRESETS
from lqrl.quant.triton_use import TENSOR_CORES_FP8, TENSOR_CORES_INT8

_OUTPUTS, _INPUTS, _ROWS = 48, 256, 7  # every group and block divides the inputs
_ERROR = {torch.float32: 2e-3, torch.bfloat16: 1e-2}  # fp8 tensor cores add in about 14 bits; bf16 has 8
_CPU_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class _Product:
    """How a format multiplies here.

    Attributes:
        how: in words.
        native: in low precision, or from the packed weight; else with dequantized values.
        remedy: what would make it native.
    """

    how: str
    native: bool = True
    remedy: str = ""


def formats_section(device: torch.device) -> Section:
    """A row a preset."""
    names = [name for name, scheme in PRESETS.items() if scheme.name == name]
    rows = (attempt(name, _format, device) for name in names)
    return Section(f"formats on {device_name(device)}: AlignedLinear against QuantizedLinear", tuple(rows))


def _format(name: str, device: torch.device) -> Row:
    method = linear_method(PRESETS[name]) if PRESETS[name].quantizes else FullPrecision()
    for dtype in _ERROR:
        _check(method, device, dtype)
    supports = _exact(method, device)
    product = _product(method, device)
    facts = {"device": str(device), "product": product.how, "native": product.native, "exact": supports is None}
    exactly = "exact mode" if supports is None else supports
    status = "ok" if product.native else "emulated"
    return Row(name, status, f"{product.how}; equal bits; {exactly}", product.remedy, facts)


def _layers(method: LinearMethod, device: torch.device, dtype: torch.dtype) -> tuple[AlignedLinear, QuantizedLinear]:
    plain = nn.Linear(_INPUTS, _OUTPUTS, device="meta").to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * _INPUTS**-0.5)
    plain = plain.to(device, dtype)
    return AlignedLinear(copy.deepcopy(plain), method, dtype), QuantizedLinear(plain, method)


def _inputs(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(_ROWS, _INPUTS, generator=torch.Generator().manual_seed(1)).to(device, dtype)


@torch.no_grad()
def _check(method: LinearMethod, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The engine's output; raises unless it is the learner's, and near the product of what the codes stand for."""
    (learner, engine), x = _layers(method, device, dtype), _inputs(device, dtype)
    y, mine = engine(x), learner(x)
    if not torch.equal(y, mine):
        apart = (y.double() - mine.double()).abs().max().item()
        raise WrongResultError(f"learner and engine differ by up to {apart:.1e} in {dtype}")
    weight = method.dequantize(engine.shipped(), torch.float32)
    bias = 0 if engine.bias is None else engine.bias.double()
    expected = method.round_input(x).double() @ weight.double().T + bias
    error = ((y.double() - expected).norm() / expected.norm()).item()
    if not error <= (_CPU_ERROR if device.type == "cpu" else _ERROR)[dtype]:
        raise WrongResultError(f"the product in {dtype} is off by {error:.1e} of its size")
    return y


def _exact(method: LinearMethod, device: torch.device) -> str | None:
    """Why exact mode cannot run the format here; ``None`` where it can, which is tested."""
    try:
        exact.check_device(device)
        chosen = exact_method(method)
    except BuildError:
        return "no exact mode: its C kernels are missing"
    except NotImplementedError as error:
        return f"no exact mode: {one_line(error).partition(':')[0]}"
    for dtype in _ERROR:
        y = _check(chosen, device, dtype)
        _, engine = _layers(chosen, device, dtype)
        if not torch.equal(engine(_inputs(device, dtype)[2:3]), y[2:3]):
            raise WrongResultError(f"exact mode in {dtype}: a row has other bits alone than in a batch")
    return None


def _product(method: LinearMethod, device: torch.device) -> _Product:
    """How ``method`` multiplies on ``device`` in the dtype that is usual there: bf16 on GPUs, fp32 elsewhere."""
    if isinstance(method, FullPrecision):
        return _Product("torch")
    if isinstance(method, IntegerGemm):
        return _integer_product(device)
    fp8 = f"an NVIDIA GPU of capability {dotted(TENSOR_CORES_FP8)}"
    if isinstance(method, Fp8Block):
        if triton_use.serves(device, TENSOR_CORES_FP8):
            return _Product("Triton on fp8 tensor cores")
        return _Product("fp32 products of the codes", False, f"{fp8} and triton")
    if isinstance(method, Fp8Channel):
        if device.type == "cuda" and torch.cuda.get_device_capability(device) >= TENSOR_CORES_FP8:
            return _Product("torch._scaled_mm on fp8 tensor cores")
        return _Product("fp32 products of the codes", False, fp8)
    _, engine = _layers(method, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    shipped = {t.data_ptr() for t in engine.shipped().values()}
    operands = method.operands(engine.shipped(), engine.compute_dtype)
    if {t.data_ptr() for t in operands} == shipped:
        return _Product("Triton reads the packed weight")
    remedy = ""  # the others have no kernel on any device
    if isinstance(method, PackedWeightOnly):
        remedy = f"an NVIDIA GPU of capability {dotted(TENSOR_CORES_INT8)} and triton"
    return _Product("product of the dequantized values", False, remedy)


def _integer_product(device: torch.device) -> _Product:
    backend = kernels.int8_backend(device)
    if backend == "native":
        return _Product("C int8 kernel")
    if backend == "torch":
        own = device.type == "cuda" and triton_use.serves(device)
        return _Product("int8 tensor cores through Triton" if own else "torch._int_mm")
    chosen = os.environ.get(kernels.BACKEND_VARIABLE)
    return _Product("fp32 products of the codes", False, f"unset {kernels.BACKEND_VARIABLE}" if chosen else COMPILER)
