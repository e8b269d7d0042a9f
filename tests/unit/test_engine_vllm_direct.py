"""Where the bits of what is sent lie: found in any layout of whole tensors, and proven by trying or not used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lqrl.engines.base import RefreshError
from lqrl.engines.vllm.coverage import changed_fractions
from lqrl.engines.vllm.direct import DirectCopies, Rehearsal, UnexplainedError
from lqrl.engines.vllm.direct_refresh import DirectRefresh, changed_shares
from lqrl.engines.vllm.held import all_held, state_of
from lqrl.engines.vllm.layout import SentTensors
from lqrl.engines.vllm.trial import TrialWeights

CPU = torch.device("cpu")
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


class Layer(nn.Module):
    """Holds one tensor, and what a kernel may keep beside it."""

    held: Tensor
    kernel: Any
    number: float


def like(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in zip("abcdef", shapes, strict=False)}


def bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def pitched(tensor: Tensor, pitch: int) -> Tensor:
    """A matrix whose rows lie ``pitch`` elements apart."""
    room = torch.zeros(tensor.shape[0], pitch, dtype=tensor.dtype)
    room[:, : tensor.shape[1]] = tensor
    return room[:, : tensor.shape[1]]


def padded(tensor: Tensor, rows: int, columns: int) -> Tensor:
    return nn.functional.pad(tensor, (0, columns, 0, rows)).contiguous()


Made = Callable[[dict[str, Tensor]], Tensor]
LAYOUTS: dict[str, tuple[dict[str, Tensor], Made]] = {
    "as it is": (like((8, 5)), lambda w: w["a"].clone()),
    "a vector": (like((7,)), lambda w: w["a"].clone()),
    "a scalar": (like((1,)), lambda w: w["a"][0].clone()),
    "rows below each other": (like((8, 48), (4, 48), (4, 48), dtype=BF16), lambda w: torch.cat(list(w.values()))),
    "a view of another order": (like((8, 48), (4, 48), dtype=FP8), lambda w: torch.cat(list(w.values())).t()),
    "transposed": (like((8, 48)), lambda w: w["a"].t().contiguous()),
    "transposed, narrow": (like((100, 3)), lambda w: w["a"].t().contiguous()),
    "transposed, beside each other": (
        like((8, 48), (40, 48), dtype=BF16),
        lambda w: torch.cat([w["a"].t(), w["b"].t()], 1).contiguous(),
    ),
    "beside each other": (like((8, 3), (8, 5)), lambda w: torch.cat(list(w.values()), 1)),
    "vectors": (like((5,), (3,), (64,)), lambda w: torch.cat(list(w.values()))),
    "columns of scales": (like((5, 1), (3, 1)), lambda w: torch.cat(list(w.values()))),
    "another dtype": (like((8, 48), dtype=FP8), lambda w: w["a"].view(torch.uint8).clone()),
    "words of codes": (like((8, 48), dtype=torch.int8), lambda w: w["a"].view(torch.int32).clone()),
    "experts": (
        like((4, 48), (4, 48), (4, 48), (4, 48)),
        lambda w: torch.stack([torch.cat([w["a"], w["b"]]), torch.cat([w["c"], w["d"]])]),
    ),
    "rows padded": (like((8, 48), (4, 48)), lambda w: padded(torch.cat(list(w.values())), 3, 0)),
    "rows and columns padded": (like((8, 40), (4, 40)), lambda w: padded(torch.cat(list(w.values())), 3, 8)),
    "rows apart": (like((8, 5), (3, 5)), lambda w: pitched(torch.cat(list(w.values())), 8)),
    "columns apart": (like((6, 5)), lambda w: pitched(w["a"].t(), 8).t()),
    "cast": (like((8, 48), dtype=BF16), lambda w: w["a"].float()),
    "cast to fewer bits": (like((9,), (4,)), lambda w: torch.cat(list(w.values())).bfloat16()),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_are_found_in_any_layout_of_whole_tensors(layout: str) -> None:
    """What is found in one set is where another set must go."""
    shapes, make = LAYOUTS[layout]
    model = Layer()
    model.register_buffer("held", make(dict(TrialWeights(shapes, CPU, 1))))
    copies = DirectCopies(all_held(model), SentTensors(TrialWeights(shapes, CPU, 1).items()))
    other = dict(TrialWeights(shapes, CPU, 2))
    address = model.held.data_ptr()
    changed = copies.write(other.items())
    assert torch.equal(bits(model.held), bits(make(other)))
    assert model.held.data_ptr() == address
    assert all(0 < changed[name] <= tensor.numel() for name, tensor in shapes.items())
    assert sum(changed.values()) > 0.7 * sum(t.numel() for t in shapes.values())


STRANGERS: dict[str, Made] = {
    "rounded": lambda w: (w["a"] * 3).bfloat16(),
    "half of it": lambda w: w["a"][:, ::2].contiguous(),
    "interleaved": lambda w: w["a"].view(2, 4, 48).transpose(0, 1).contiguous(),
    "the middle changed": lambda w: torch.cat([w["a"][:1], w["a"][1:-1] + 1, w["a"][-1:]]),
    "nothing": lambda w: torch.zeros(8, 48),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_what_is_no_copy_is_no_part_or_is_noticed(stranger: str) -> None:
    loader = Loader(like((8, 48)), STRANGERS[stranger])
    with pytest.raises(UnexplainedError, match=r"no tensor of its model holds a|held is more than a copy"):
        loader.rehearsal().learn(loader.like, CPU)


def test_scalars_that_look_alike_are_told_apart_by_name() -> None:
    sent = {f"layers.{i}.k_scale": torch.tensor([0.25]) for i in range(12)}
    found = SentTensors(sent.items())
    for i in range(12):
        (part,) = found.parts_of(f"layers.{i}.attn._k_scale", torch.tensor(0.25))
        assert part.name == f"layers.{i}.k_scale" == found.scalar_of(f"layers.{i}.attn._k_scale_float", 0.25)


def test_trial_weights_are_the_same_when_they_are_asked_for_again() -> None:
    shapes = like((8, 48), (64,)) | {
        "x.weight": torch.empty(8, 48, dtype=FP8, device="meta"),
        "x.weight_scale": torch.empty(8, 1, device="meta"),
        "y.weight_scale": torch.empty(8, 3, dtype=torch.uint8, device="meta"),
        "y.weight_packed": torch.empty(8, 48, dtype=torch.int32, device="meta"),
        "k_scale": torch.empty(1, device="meta"),
    }
    one, two = (TrialWeights(shapes, CPU, seed) for seed in (1, 2))
    assert len(one) == len(list(one)) == 7
    for name, tensor in one.items():
        assert (tensor.shape, tensor.dtype) == (shapes[name].shape, shapes[name].dtype)
        assert torch.equal(bits(tensor), bits(one[name]))
        assert not torch.equal(bits(tensor), bits(two[name]))
        assert tensor.float().isfinite().all()
        assert not name.endswith("_scale") or tensor.float().min() > 0


# ---------------------------------------------------------------- a model that loads


class Kernel:
    """As those of vLLM, by the name of its module."""

    __module__ = "vllm.model_executor.kernels"

    def __init__(self) -> None:
        self.packed: Tensor = torch.zeros(1, 2)


class Loader:
    """A model that is loaded by a rule; what it says depends on what it computes with."""

    def __init__(
        self, tensors: dict[str, Tensor], make: Made, beside: Callable[[Layer, Any], None] | None = None
    ) -> None:
        self.like, self._make, self._beside = tensors, make, beside
        self.model = Layer()
        self.model.kernel, self.model.number = Kernel(), 1.0
        self.model.register_buffer("held", torch.zeros_like(make(dict(TrialWeights(tensors, CPU, 0)))))
        self.private = torch.zeros(())

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        sent = dict(weights)
        self.model.held.copy_(self._make(sent))
        if self._beside is not None:
            self._beside(self.model, sent)

    def say(self) -> tuple[float, ...]:
        return (float(self.model.held.double().sum() + self.private),)

    def rehearsal(self) -> Rehearsal:
        def stream(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
            return iter(weights.items())

        return Rehearsal(self.model, stream, self.load, self.say)


SHAPES = like((8, 48), (1,))


def both(sent: dict[str, Tensor]) -> Tensor:
    return torch.cat([sent["a"].flatten(), sent["b"]])


def keep_number(layer: Layer, sent: Mapping[str, Tensor]) -> None:
    layer.number = sent["b"].item()


def keep_on_host(layer: Layer, sent: Mapping[str, Tensor]) -> None:
    layer.kernel.scale = sent["b"].clone().reshape(())


def first(sent: dict[str, Tensor]) -> Tensor:
    return sent["a"].clone()


@pytest.mark.parametrize(
    ("make", "beside"), [(both, None), (both, keep_number), (both, keep_on_host), (first, keep_number)]
)
def test_a_model_of_copies_is_learned(make: Made, beside: Callable[[Layer, Any], None] | None) -> None:
    loader, plain = Loader(SHAPES, make, beside), Loader(SHAPES, make, beside)
    copies = loader.rehearsal().learn(SHAPES, CPU)
    assert copies.moved(loader.model) == []
    weights = dict(TrialWeights(SHAPES, CPU, 7))
    assert copies.write(weights.items()) == {"a": pytest.approx(8 * 48, rel=0.1), "b": 1}
    assert copies.write(weights.items()) == {"a": 0, "b": 0}
    plain.load(iter(weights.items()))
    states = [state_of(all_held(each.model)) for each in (loader, plain)]
    assert states[0] == states[1]


def pack(layer: Layer, sent: Mapping[str, Tensor]) -> None:
    layer.kernel.packed = sent["a"][:, :2] * 2


def count(layer: Layer, sent: Mapping[str, Tensor]) -> None:
    layer.kernel.handle = int(sent["b"].view(torch.int32))


def close_over(layer: Layer, sent: Mapping[str, Tensor]) -> None:
    packed = sent["a"][:, :2] * 2

    def kernel() -> Tensor:
        return packed

    kernel.__module__ = Kernel.__module__
    layer.kernel = kernel


def list_up(layer: Layer, sent: Mapping[str, Tensor]) -> None:
    layer.kernel.thresholds = [sent["b"].item(), 1]


def remember(layer: Layer, sent: Mapping[str, Tensor]) -> None:
    layer.number = float(sent["a"].max())


@pytest.mark.parametrize(
    ("beside", "name"),
    [
        (pack, "kernel.packed is more"),
        (count, "kernel.handle is more"),
        (close_over, "kernel.0 is more"),
        (list_up, "kernel.thresholds.0 is more"),
        (remember, "number is more"),
    ],
)
def test_what_a_kernel_keeps_of_the_weights_forbids_copies(beside: Callable[[Layer, Any], None], name: str) -> None:
    loader = Loader(SHAPES, both, beside)
    with pytest.raises(UnexplainedError, match=name):
        loader.rehearsal().learn(SHAPES, CPU)


def test_memory_that_nobody_sees_forbids_copies_by_what_the_model_says() -> None:
    loader = Loader(SHAPES, both)

    def keep(_: Layer, sent: Mapping[str, Tensor]) -> None:
        loader.private = sent["a"].sum()

    loader._beside = keep
    with pytest.raises(UnexplainedError, match="memory that is in no tensor"):
        loader.rehearsal().learn(SHAPES, CPU)


def test_a_model_that_says_the_same_of_any_weights_proves_nothing() -> None:
    loader = Loader(SHAPES, both)
    loader.say = lambda: (0.0,)  # type: ignore[method-assign]
    with pytest.raises(UnexplainedError, match="says the same"):
        loader.rehearsal().learn(SHAPES, CPU)


def test_what_generation_changes_is_not_compared() -> None:
    loader = Loader(SHAPES, both)
    say = loader.say

    def scribble() -> tuple[float, ...]:
        loader.model.kernel.packed += 1
        return say()

    loader.say = scribble  # type: ignore[method-assign]
    assert loader.rehearsal().learn(SHAPES, CPU).scratch == {"kernel.packed"}


def test_real_weights_that_a_reload_changes_end_direct_refreshes() -> None:
    loader, direct = Loader(SHAPES, lambda sent: both(sent).clamp(max=5.0)), DirectRefresh(SHAPES, CPU)
    rehearsal, weights = loader.rehearsal(), dict(TrialWeights(SHAPES, CPU, 7))
    weights["a"][3, 3] = 6.0
    direct.learn(rehearsal)
    assert direct.copies is not None
    written = direct.rehearse(rehearsal, weights)
    loader.load(iter(weights.items()))
    direct.confirm(rehearsal, written)
    assert direct.copies is None
    assert direct.refusal == "held is more than a copy of what was sent"
    direct.learn(rehearsal)
    assert direct.copies is None


def test_a_place_that_each_reload_makes_anew_ends_direct_refreshes() -> None:
    def renew(layer: Layer, sent: Mapping[str, Tensor]) -> None:
        layer.kernel = Kernel()
        layer.kernel.scale = float(sent["b"])

    loader, direct = Loader(SHAPES, both, renew), DirectRefresh(SHAPES, CPU)
    rehearsal = loader.rehearsal()
    direct.learn(rehearsal)
    direct.confirm(rehearsal, None)
    assert direct.copies is None


def test_a_trial_that_fails_is_told_and_leaves_the_reload(caplog: pytest.LogCaptureFixture) -> None:
    loader, direct = Loader(SHAPES, both), DirectRefresh(SHAPES, CPU)

    def fail() -> tuple[float, ...]:
        raise ZeroDivisionError("no card")

    loader.say = fail  # type: ignore[method-assign]
    direct.learn(loader.rehearsal())
    assert direct.copies is None
    assert [(record.levelname, record.exc_info is not None) for record in caplog.records] == [("WARNING", True)]
    assert "no card" in caplog.text


# ---------------------------------------------------------------- what is written


@pytest.fixture
def learned() -> tuple[Loader, DirectCopies]:
    loader = Loader(SHAPES, both)
    return loader, loader.rehearsal().learn(SHAPES, CPU)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w | {"a": w["a"].index_fill(1, torch.tensor([4]), torch.nan)}, "a holds NaN or inf"),
        (lambda w: w | {"b": w["b"] * torch.inf}, "b holds NaN or inf"),
        (lambda w: {"a": w["a"]}, "b did not come"),
        (lambda w: w | {"c": w["a"]}, "was tried without c"),
    ],
)
def test_a_set_that_is_not_whole_is_refused(
    learned: tuple[Loader, DirectCopies], change: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str
) -> None:
    with pytest.raises(RefreshError, match=message):
        learned[1].write(change(dict(TrialWeights(SHAPES, CPU, 7))).items())


def test_a_copy_knows_whether_the_tensors_are_where_they_were(learned: tuple[Loader, DirectCopies]) -> None:
    loader, copies = learned
    assert copies.at({"held": loader.model.held.data_ptr()})
    assert not copies.at({"held": loader.model.held.data_ptr() + 16})
    loader.model.register_buffer("held", loader.model.held.clone())
    assert copies.moved(loader.model) == ["held"]


def test_changes_are_counted_as_for_a_reload() -> None:
    """A scale that is sent once and held for every channel counts once."""
    sent = like((8, 48), (1,)) | {"c": torch.empty(4, 4, dtype=torch.int8, device="meta")}
    before, after = dict(TrialWeights(sent, CPU, 1)), dict(TrialWeights(sent, CPU, 1))
    for name, count in {"a": 5, "b": 1, "c": 3}.items():
        after[name].view(-1)[:count] += 1
    assert changed_shares({"a": 5, "b": 8, "c": 3}, sent) == pytest.approx(changed_fractions(before, after))
    assert changed_shares({"a": 5, "b": 8, "x": 3}, sent) is None
