"""Routed experts on both sides: `AlignedExperts` (learner) and `QuantizedExperts` (engine), one arithmetic.

An expert is two products with the scheme's `LinearMethod`, gate and up as one matrix. Tokens are sorted by expert, each
expert with tokens multiplies its own, and a token's results are added in the order in which its router ranked them, in
fp32. Both sides run `routed`, so equal inputs give equal bits.

Shipped names: the stacked tensors of projection ``p`` are ``p_<tensor of the method>``, expert first:
``gate_up_proj_weight`` ``[E, 2I, H]`` and ``gate_up_proj_weight_scale`` ``[E, 2I, 1]`` for int8. `lqrl.quant.stacks`
turns them into the names of a checkpoint, ``<i>.gate_proj.weight_scale`` and so on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lqrl.quant.codes import CodeModule
from lqrl.quant.linear import BackwardMode, Quantized, straight_through
from lqrl.quant.methods import LinearMethod
from lqrl.quant.moe import PROJECTIONS, check_layout
from lqrl.quant.weight_key import check_counts_changes, count_invalidation, weight_key

ExpertFn = Callable[[int, Tensor], Tensor]
_AT_ONCE = 16  # experts quantized in one call: few launches, bounded memory


def routed(x: Tensor, index: Tensor, weights: Tensor, count: int, expert: ExpertFn) -> Tensor:
    """Mixture of experts: ``sum_j weights[t, j] * expert(index[t, j], x[t])``, added in the order of ``j`` in fp32.

    The sizes of the groups are read by the host, once a call.

    Args:
        x: tokens ``[T, H]``.
        index: experts of each token ``[T, k]``, int64.
        weights: their weights ``[T, k]``.
        count: number of experts.
        expert: the function of an expert, ``[n, H]`` to ``[n, H]``.

    Returns:
        ``[T, H]`` in the dtype of ``x``.

    Raises:
        ValueError: for an index that is no expert's.
    """
    tokens, slots = index.shape
    if not tokens:
        return torch.zeros_like(x)
    chosen = index.reshape(-1)
    order = chosen.argsort(stable=True)
    sizes = torch.bincount(chosen, minlength=count).tolist()
    if len(sizes) > count:
        raise ValueError(f"the router chose expert {len(sizes) - 1} of {count}; expert parallelism is not supported")
    parts = x[order // slots].split(sizes)
    results = torch.cat([expert(e, part) for e, part in enumerate(parts) if len(part)])
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    each = results[place].view(tokens, slots, -1)
    total = each[:, 0].float() * weights[:, :1].float()
    for slot in range(1, slots):
        total = total + each[:, slot].float() * weights[:, slot : slot + 1].float()
    return total.to(x.dtype)


def gated(hidden: Tensor, act_fn: nn.Module) -> Tensor:
    """``act(gate) * up`` of ``[n, 2I]``, gate first."""
    gate, up = hidden.chunk(2, dim=-1)
    return act_fn(gate) * up


def quantize_stacked(method: LinearMethod, weight: Tensor) -> dict[str, Tensor]:
    """`LinearMethod.quantize` of every matrix of ``[E, N, K]``, stacked.

    A format with a scale for a whole tensor gives each expert its own, common to gate and up: the magnitude that dense
    siblings share, and what vLLM's FusedMoE computes with (its checkpoints have one a projection and it takes the
    larger). That it is not shared between experts is inferred from there.
    """
    together = not method.shares_amax and weight.shape[1] % method.row_block == 0
    parts = []
    for chunk in weight.split(_AT_ONCE if together else 1):
        tensors = method.quantize(chunk.flatten(0, 1))
        parts.append({name: t.unflatten(0, (len(chunk), -1)) for name, t in tensors.items()})
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def check_experts(name: str, experts: nn.Module, method: LinearMethod) -> None:
    """Refuse experts that compute something else than `routed` and `gated` do, or that ``method`` cannot hold.

    The module's own forward, with small random weights in place of its own, must give the same result.

    Raises:
        ValueError: naming the module, what is wrong, and how to leave it in high precision.
    """
    check_layout(name, experts)
    fix = f"keep it in high precision with skip=['*.{name.rpartition('.')[2]}']"
    count, rows, hidden = experts.get_parameter("gate_up_proj").shape
    try:
        for inputs in (hidden, rows // 2):
            method.quantize(_cpu_zeros(1, inputs))
    except ValueError as error:
        widths = f"{hidden} and {rows // 2} inputs"
        raise ValueError(f"{name} has {widths}, which {method} cannot hold: {error}; {fix}") from error
    if (rows // 2) % method.row_block:
        raise ValueError(
            f"{name} has {rows // 2} rows each in gate and up, and blocks of {method} would span both, which engines "
            f"refuse too; {fix}"
        )
    problem = _differs(experts, count)
    if problem:
        raise ValueError(f"{name} ({type(experts).__name__}) does not compute act(gate) * up: {problem}; {fix}")


def _cpu_zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float32, device="cpu")  # whatever the defaults are now


@torch.no_grad()
def _differs(experts: nn.Module, count: int, width: int = 16, tokens: int = 8) -> str | None:
    """What tells the module's own forward from ours, or ``None``."""
    generator, slots = torch.Generator("cpu").manual_seed(0), min(2, count)
    gate_up, down, x, weights, ranks = (
        _cpu_zeros(*shape).normal_(generator=generator)
        for shape in (
            (count, 2 * width, width), (count, width, width), (tokens, width), (tokens, slots), (tokens, count)
        )
    )  # fmt: skip
    gate_up, index = gate_up * 16, ranks.argsort(-1)[:, :slots]  # large values, so that a clamp shows
    act_fn = experts.get_submodule("act_fn")
    small: dict[str, Tensor] = dict(zip(PROJECTIONS, (gate_up, down), strict=True))
    try:
        with torch.autocast("cpu", enabled=False):
            ours = routed(x, index, weights, count, lambda e, part: gated(part @ gate_up[e].t(), act_fn) @ down[e].t())
            theirs = torch.func.functional_call(experts, small, (x, index, weights))
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        return f"its forward on 8 tokens failed ({error})"
    if theirs.shape != ours.shape or not torch.allclose(theirs, ours, rtol=1e-3, atol=1e-3 * float(ours.abs().max())):
        return "its forward gives another result"
    return None


@dataclass(frozen=True)
class _Stack:
    key: tuple[object, ...]
    tensors: dict[str, Tensor]
    experts: list[Quantized]


class AlignedExperts(nn.Module):
    """A learner's routed experts whose forward uses the engine's numbers; see `lqrl.quant.linear.AlignedLinear`.

    It keeps the stacked parameters ``gate_up_proj`` ``[E, 2I, H]`` and ``down_proj`` ``[E, H, I]`` of the module it
    replaces. Backward is straight-through, for every expert that had tokens; the routing weights get the gradient of
    the results that the forward computed.

    Args:
        experts: the module to replace, one that `check_experts` takes; its parameters are taken over, not copied.
        method: the format's operations.
        export_dtype: dtype in which the weights are exported before they are quantized.
        backward: operands of the backward products.
    """

    gate_up_proj: Tensor
    down_proj: Tensor
    act_fn: nn.Module

    def __init__(
        self,
        experts: nn.Module,
        method: LinearMethod,
        export_dtype: torch.dtype,
        backward: BackwardMode = "high_precision",
    ) -> None:
        super().__init__()
        for projection in PROJECTIONS:
            check_counts_changes(experts.get_parameter(projection))
            self.register_parameter(projection, experts.get_parameter(projection))
        self.act_fn = experts.get_submodule("act_fn")
        self.method = method
        self.export_dtype = export_dtype
        self.backward_mode: BackwardMode = backward
        self._cache: dict[str, _Stack] = {}
        self.train(experts.training)

    @property
    def num_experts(self) -> int:
        """How many there are."""
        return self.gate_up_proj.shape[0]

    def _stack(self, projection: str) -> _Stack:
        weight = self.get_parameter(projection)
        key, stack = weight_key([weight]), self._cache.get(projection)
        if stack is None or stack.key != key:
            with torch.no_grad():
                tensors = quantize_stacked(self.method, weight.detach().to(self.export_dtype))
                experts = []
                for e in range(self.num_experts):
                    own = {name: t[e] for name, t in tensors.items()}
                    experts.append(Quantized(key, self.method, own, self.export_dtype))
            self._cache[projection] = stack = _Stack(key, tensors, experts)
        return stack

    def quantized_weights(self) -> dict[str, Tensor]:
        """What the forward uses now, by the names it is shipped under; these very tensors are exported."""
        return {f"{p}_{name}": t for p in PROJECTIONS for name, t in self._stack(p).tensors.items()}

    def invalidate(self) -> None:
        """Forget the codes; the next forward or refresh quantizes anew."""
        count_invalidation()
        self._cache = {}

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`routed` for ``[T, H]``, ``[T, k]`` and ``[T, k]``, in the input's dtype (autocast's where it is on)."""
        device = hidden_states.device.type
        if not torch.is_autocast_enabled(device):
            return self._aligned(hidden_states, top_k_index, top_k_weights)
        with torch.autocast(device, enabled=False):
            x = hidden_states.to(torch.get_autocast_dtype(device))
            return self._aligned(x, top_k_index, top_k_weights)

    def _aligned(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        gate_up, down = (self._stack(projection).experts for projection in PROJECTIONS)
        # One node a projection: taking expert by expert would make a gradient of the whole stack for each.
        gate_up_weights, down_weights = self.gate_up_proj.unbind(0), self.down_proj.unbind(0)

        def expert(e: int, part: Tensor) -> Tensor:
            hidden = gated(self._product(part, gate_up_weights[e], gate_up[e]), self.act_fn)
            return self._product(hidden, down_weights[e], down[e])

        return routed(x, index, weights, self.num_experts, expert)

    def _product(self, x: Tensor, weight: Tensor, quantized: Quantized) -> Tensor:
        return straight_through(x, weight, None, quantized, self.export_dtype, self.backward_mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AlignedExperts:
        self.invalidate()
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        """What ``print(model)`` shows."""
        return f"num_experts={self.num_experts}, method={self.method}, export_dtype={self.export_dtype}"


class QuantizedExperts(CodeModule):
    """An engine's routed experts: stacked codes and scales as buffers, no gradient.

    Args:
        experts: the module to replace, one that `check_experts` takes; on the meta device the buffers are meta too.
        method: the format's operations.

    Raises:
        RuntimeError: under ``torch.inference_mode()``, whose tensors cannot be refreshed later.
    """

    act_fn: nn.Module

    def __init__(self, experts: nn.Module, method: LinearMethod) -> None:
        weights = {projection: experts.get_parameter(projection).detach() for projection in PROJECTIONS}
        super().__init__(method, weights[PROJECTIONS[0]].dtype)
        self.num_experts = len(weights[PROJECTIONS[0]])
        self.act_fn = experts.get_submodule("act_fn")
        self._hold(shipped_experts(experts, method, self.compute_dtype))

    def _matrices(self) -> dict[str, list[dict[str, Tensor]]]:
        matrices = {}
        for projection in PROJECTIONS:
            prefix = f"{projection}_"
            stacks = {n.removeprefix(prefix): t for n, t in self.shipped().items() if n.startswith(prefix)}
            matrices[f"{prefix}operand"] = [{n: t[e] for n, t in stacks.items()} for e in range(self.num_experts)]
        return matrices

    @torch.no_grad()
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`routed` for ``[T, H]``, ``[T, k]`` and ``[T, k]``, in the input's dtype.

        Raises:
            RuntimeError: when the codes were written and `pack` was not called, or hold nothing yet.
        """
        gate_up, down = self._ready().values()

        def expert(e: int, part: Tensor) -> Tensor:
            hidden = gated(self.method.linear(part, gate_up[e], None), self.act_fn)
            return self.method.linear(hidden, down[e], None)

        return routed(hidden_states, top_k_index, top_k_weights, self.num_experts, expert)

    def extra_repr(self) -> str:
        """What ``print(model)`` shows."""
        return f"num_experts={self.num_experts}, method={self.method}"


@torch.no_grad()
def shipped_experts(experts: nn.Module, method: LinearMethod, export_dtype: torch.dtype) -> dict[str, Tensor]:
    """What is shipped for a plain module of stacked experts, by the names of this module's docstring."""
    shipped = {}
    for projection in PROJECTIONS:
        weight = experts.get_parameter(projection).detach().to(export_dtype)
        shipped |= {f"{projection}_{name}": t for name, t in quantize_stacked(method, weight).items()}
    return shipped
