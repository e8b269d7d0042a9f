"""AdamW for parameters kept in bf16: `KahanAdamW` keeps what rounding cuts off, `StochasticAdamW` rounds by chance."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from lqrl.learner.seeds import derive_seed
from lqrl.modeling.precision import parse_dtype


@dataclass(frozen=True)
class _Piece:
    """A parameter, or a slice of a large one, with what the step reads and writes; all of one shape."""

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    low: Tensor | None
    step: Tensor
    place: tuple[int, ...]


class BFloat16AdamW(torch.optim.Optimizer):
    """AdamW computed in fp32 by PyTorch's own kernel, chunk by chunk, on bf16 parameters.

    bf16 keeps 8 bits: a step below half a unit in the last place, 2^-9 to 2^-8 of the weight, is rounded away. At a
    learning rate of 1e-6 no weight above 5e-4 moves under ``torch.optim.AdamW``. The two subclasses are the two ways
    out; this class is what they share.

    The second moment is fp32: with ``beta2`` 0.999 it changes by 1e-3 of itself, which bf16 cannot hold, so it would
    never fall. Gradients are bf16 and add up in bf16 over micro-batches.

    Args:
        params: parameters or groups of them, all bf16.
        lr, betas, eps, weight_decay: as in ``torch.optim.AdamW``.
        momentum_dtype: of the first moment, ``bfloat16`` (2 bytes a parameter) or ``float32``.
        chunk_elements: elements that are widened to fp32 at once, some 20 bytes each while the step runs.

    Raises:
        ValueError: for an option out of range, and for parameters of another dtype.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        momentum_dtype: str = "bfloat16",
        chunk_elements: int = 2**24,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas) or chunk_elements < 1:
            raise ValueError(
                f"{type(self).__name__} needs lr, eps, weight_decay >= 0, betas in [0, 1), chunk_elements >= 1; got "
                f"lr={lr}, eps={eps}, weight_decay={weight_decay}, betas={betas}, chunk_elements={chunk_elements}"
            )
        self.momentum_dtype, self.chunk_elements = parse_dtype(momentum_dtype), chunk_elements
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; see the class for what they must be."""
        super().add_param_group(param_group)
        odd = {p.dtype for p in self.param_groups[-1]["params"]} - {torch.bfloat16}
        if odd:
            raise ValueError(
                f"{type(self).__name__} is for bfloat16 parameters, these are {', '.join(sorted(map(str, odd)))}: set "
                "master_dtype: bfloat16, or use torch.optim.AdamW"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update of every parameter that has a gradient; returns what ``closure`` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, group in enumerate(self.param_groups):
            for chunk in _chunks(self._pieces(group["params"], index), self.chunk_elements):
                self._update(group, chunk)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore bit for bit: PyTorch alone would cast every state to the parameter's dtype."""
        super().load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for p, key in zip(group["params"], saved["params"], strict=True):
                for name, value in state_dict["state"].get(key, {}).items():
                    self.state[p][name] = value.clone() if name == "step" else value.to(p.device, copy=True)

    def master(self, parameter: Tensor) -> Tensor:
        """The fp32 value that the next step starts from."""
        state = self.state.get(parameter, {})
        low = state.get("low")
        return self._widen(_local(parameter.detach()), None if low is None else _local(low))

    @abstractmethod
    def _widen(self, param: Tensor, low: Tensor | None) -> Tensor:
        """A new fp32 tensor of the value that ``param`` stands for."""

    @abstractmethod
    def _narrow_(self, piece: _Piece, master: Tensor) -> None:
        """Write ``master`` back into ``piece``."""

    def _new_state(self, p: Tensor) -> dict[str, Tensor]:
        return {
            "step": torch.zeros((), dtype=torch.float32),
            "exp_avg": torch.zeros_like(p, dtype=self.momentum_dtype),
            "exp_avg_sq": torch.zeros_like(p, dtype=torch.float32),
        }

    def _pieces(self, params: list[Tensor], group: int) -> Iterator[_Piece]:
        for index, p in enumerate(params):
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state.update(self._new_state(p))
            step = state["step"].clone()  # the kernel counts on; a parameter counts once, however many its pieces
            state["step"] += 1
            names = ("exp_avg", "exp_avg_sq", "low") if "low" in state else ("exp_avg", "exp_avg_sq")
            tensors = [_local(p), _local(p.grad), *(_local(state[name]) for name in names)]
            numel, size = tensors[0].numel(), self.chunk_elements
            if numel > size and all(t.is_contiguous() for t in tensors):
                flat = [t.view(-1) for t in tensors]
                parts = [[t[start : start + size] for t in flat] for start in range(0, numel, size)]
            else:
                parts = [tensors]
            for number, (param, grad, exp_avg, exp_avg_sq, *low) in enumerate(parts):
                place = (group, index, number)
                yield _Piece(param, grad, exp_avg, exp_avg_sq, low[0] if low else None, step.clone(), place)
            if isinstance(p, DTensor):  # a write to the local part does not show on the whole
                torch.autograd.graph.increment_version(p)

    def _update(self, group: dict[str, Any], chunk: list[_Piece]) -> None:
        masters = [self._widen(piece.param, piece.low) for piece in chunk]
        momenta = [piece.exp_avg.float() for piece in chunk]
        adamw(
            masters,
            [piece.grad.float() for piece in chunk],
            momenta,
            [piece.exp_avg_sq for piece in chunk],
            [],
            [piece.step for piece in chunk],
            foreach=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for piece, master, momentum in zip(chunk, masters, momenta, strict=True):
            piece.exp_avg.copy_(momentum)
            self._narrow_(piece, master)


class KahanAdamW(BFloat16AdamW):
    """AdamW on bf16 parameters with compensated (Kahan) summation.

    The form for parameter updates is that of low-precision SAC (arXiv 2102.13565, item 6): ``y = u - c; t = p + y;
    c = (t - p) - y; p = t``. What differs: ``c`` is no bf16 number but the 16 bits that bf16 cuts off an fp32 one, as
    an integer, which takes the same 2 bytes. Parameter and compensation together *are* the fp32 weight, so with
    ``momentum_dtype: float32`` the weights are those of AdamW in fp32 on the same gradients, bit for bit, and the
    parameter is the nearest bf16 to them (a tie goes away from 0). A compensation in bf16 would lose steps again:
    beside a weight of 1 it grows to 2^-9 and then resolves 4e-6, more than a step at a learning rate of 1e-6.

    Memory, in bytes a parameter and with gradients: 12, or 14 with an fp32 first moment; AdamW in fp32 has 16.

    A parameter that something else writes keeps its compensation, at most half a unit in its last place.
    """

    def _new_state(self, p: Tensor) -> dict[str, Tensor]:
        return super()._new_state(p) | {"low": torch.zeros_like(p, dtype=torch.int16)}

    def _widen(self, param: Tensor, low: Tensor | None) -> Tensor:
        magnitude = (param.view(torch.int16).int() & 0x7FFF) << 16
        if low is not None:  # a parameter that was set to 0 from outside must not wrap around to NaN
            magnitude = (magnitude + low).clamp_(min=0)
        return torch.copysign(magnitude.view(torch.float32), param)

    def _narrow_(self, piece: _Piece, master: Tensor) -> None:
        assert piece.low is not None
        magnitude = master.view(torch.int32) & 0x7FFFFFFF
        rounded = ((magnitude + 0x8000) >> 16) << 16
        wide = torch.copysign(rounded.view(torch.float32), master)
        piece.param.copy_(torch.where(master.isnan(), master, wide))  # the integers of NaN may wrap around to 0
        piece.low.copy_(magnitude - rounded)


class StochasticAdamW(BFloat16AdamW):
    """AdamW on bf16 parameters that are rounded up or down at random, so that the mean is the fp32 result.

    2 bytes a parameter less than `KahanAdamW`, for noise: a step ``u`` below the spacing ``q`` of bf16 moves the weight
    by ``q`` with probability ``u / q``. The noise is a function of ``(seed, step, place of the parameter)``: equal on
    all ranks, so that replicas stay equal, and in a resumed run. (torchao's optimizers with ``bf16_stochastic_round``
    draw from the global generator, which promises neither.)

    Args:
        params, lr, betas, eps, weight_decay, momentum_dtype, chunk_elements: see `BFloat16AdamW`; the noise depends on
            ``chunk_elements``.
        seed: of the rounding.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        momentum_dtype: str = "bfloat16",
        chunk_elements: int = 2**24,
        seed: int = 0,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, momentum_dtype, chunk_elements)
        self.seed = seed

    def _widen(self, param: Tensor, low: Tensor | None) -> Tensor:
        return param.float()

    def _narrow_(self, piece: _Piece, master: Tensor) -> None:
        seed = derive_seed(self.seed, "stochastic rounding", int(piece.step), *piece.place)
        generator = torch.Generator(master.device).manual_seed(seed)
        chance = torch.randint(0, 2**16, master.shape, generator=generator, device=master.device, dtype=torch.int32)
        rounded = ((master.view(torch.int32) + chance) >> 16) << 16
        # inf is a bf16 number and stays; the bits of NaN may carry over into a number
        piece.param.copy_(torch.where(master.isnan(), master, rounded.view(torch.float32)))


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _chunks(pieces: Iterable[_Piece], elements: int) -> Iterator[list[_Piece]]:
    """Lists of pieces with at most ``elements`` elements together, or one piece."""
    chunk: list[_Piece] = []
    size = 0
    for piece in pieces:
        if chunk and size + piece.param.numel() > elements:
            yield chunk
            chunk, size = [], 0
        chunk.append(piece)
        size += piece.param.numel()
    if chunk:
        yield chunk
