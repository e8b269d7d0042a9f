"""Every fault of a refresh, at every tensor of the stream: the engine refuses, or serves the right weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from engine_models import SIZES
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel, Qwen2Config

from lqrl.engines.base import EngineSpec, RefreshError, StaleEngineError
from lqrl.engines.torch import TorchEngine, TorchEngineFactory
from lqrl.modeling.backbone import load_model
from lqrl.quant.export import export_weights
from lqrl.quant.prepare import prepare_
from lqrl.quant.scheme import QuantScheme
from lqrl.quant.stream import StableTensors
from lqrl.types import Prompt, SamplingParams

CONFIG = Qwen2Config(**{**SIZES, "num_hidden_layers": 1})
PROMPTS, PARAMS = [Prompt(1, (1, 2, 3))], SamplingParams(n=2, max_tokens=4)
DTYPE = torch.bfloat16
Named = tuple[str, Tensor]
Stream = list[Named]
Fault = Callable[[Stream, int], Iterator[Named]]


@dataclass
class Case:
    """One engine that lives through all faults, and what a fresh one would hold and say.

    It holds ``good``; a fault comes in a stream of ``other`` weights, of which nothing may be left.
    """

    scheme: QuantScheme
    engine: TorchEngine
    good: Stream
    other: Stream
    digest: str
    logprobs: list[Tensor]

    def check_recovery(self, version: int) -> None:
        """A good refresh after a fault leaves nothing of it."""
        assert self.engine.update_weights(self.good, policy_version=version).digest == self.digest
        assert self.engine.policy_version == version

    def check_samples(self) -> None:
        """The engine says what a fresh one says, so that nothing outside the digest went wrong either."""
        got = [c.logprobs for c in self.engine.generate(PROMPTS, PARAMS, seed=0)[0]]
        assert all(torch.equal(a, b) for a, b in zip(got, self.logprobs, strict=True))

    def check_refusal(self, faulty: Iterator[Named], version: int) -> RefreshError:
        """The refresh fails, the engine refuses; the error that it gave."""
        with pytest.raises(RefreshError) as error:
            self.engine.update_weights(faulty, policy_version=version)
        assert self.engine.policy_version == -1
        with pytest.raises(StaleEngineError, match="its last refresh failed"):
            self.engine.generate(PROMPTS, PARAMS, seed=0)
        return error.value


def new_policy(seed: int) -> PreTrainedModel:
    return load_model(CONFIG, dtype=torch.float32, seed=seed)


def new_engine(scheme: QuantScheme, device: torch.device) -> TorchEngine:
    return TorchEngineFactory()(EngineSpec(CONFIG, scheme, DTYPE, device, 64, ()))


def exported(policy: PreTrainedModel, scheme: QuantScheme) -> Stream:
    return [(name, tensor.clone()) for name, tensor in export_weights(policy, scheme, export_dtype=DTYPE)]


@pytest.fixture(scope="module", params=["int8_w8a8", "bf16"])
def case(request: pytest.FixtureRequest) -> Case:
    scheme = QuantScheme.preset(request.param)
    fresh, good = new_engine(scheme, torch.device("cpu")), exported(new_policy(0), scheme)
    digest = fresh.update_weights(good, policy_version=0).digest
    logprobs = [c.logprobs for c in fresh.generate(PROMPTS, PARAMS, seed=0)[0]]
    engine = new_engine(scheme, torch.device("cpu"))
    engine.update_weights(good, policy_version=0)
    return Case(scheme, engine, good, exported(new_policy(1), scheme), digest, logprobs)


def raises(weights: Stream, at: int) -> Iterator[Named]:
    yield from weights[:at]
    raise ConnectionError("the sender is gone")


def missing(weights: Stream, at: int) -> Iterator[Named]:
    yield from weights[:at] + weights[at + 1 :]


def doubled(weights: Stream, at: int) -> Iterator[Named]:
    yield from weights[: at + 1] + weights[at:]


def renamed(weights: Stream, at: int) -> Iterator[Named]:
    yield from with_tensor(weights, at, weights[at][1], name=f"{weights[at][0]}.old")


def broadcastable(weights: Stream, at: int) -> Iterator[Named]:
    yield from with_tensor(weights, at, weights[at][1][:1])


def reshaped(weights: Stream, at: int) -> Iterator[Named]:
    yield from with_tensor(weights, at, weights[at][1][None])


def same_size_dtype(weights: Stream, at: int) -> Iterator[Named]:
    """As many bytes, another meaning."""
    twin = {torch.int8: torch.uint8, torch.bfloat16: torch.float16, torch.float32: torch.int32}
    yield from with_tensor(weights, at, weights[at][1].to(twin[weights[at][1].dtype]))


def wider_dtype(weights: Stream, at: int) -> Iterator[Named]:
    yield from with_tensor(weights, at, weights[at][1].double())


def without_data(weights: Stream, at: int) -> Iterator[Named]:
    yield from with_tensor(weights, at, weights[at][1].to("meta"))


def sparse(weights: Stream, at: int) -> Iterator[Named]:
    yield from with_tensor(weights, at, weights[at][1].to_sparse())


def complex_dtype(weights: Stream, at: int) -> Iterator[Named]:
    yield from with_tensor(weights, at, weights[at][1].to(torch.complex64))


def simulated(weights: Stream, at: int) -> Iterator[Named]:
    """A subclass of tensors that says it is on the CPU and has no memory there."""
    with FakeTensorMode() as mode:
        tensor = mode.from_tensor(weights[at][1])
    yield from with_tensor(weights, at, tensor)


def no_tensor(weights: Stream, at: int) -> Iterator[Named]:
    yield from with_tensor(weights, at, weights[at][1].tolist())


def with_tensor(weights: Stream, at: int, tensor: Tensor, name: str | None = None) -> Stream:
    return [*weights[:at], (name or weights[at][0], tensor), *weights[at + 1 :]]


FAULTS: dict[Fault, str] = {
    raises: r"stream of weights failed after \d+ tensors: the sender is gone",
    missing: r"\d+ of \d+ elements were written; missing: {name}$",
    doubled: "{name} came twice",
    renamed: r"no tensor named {name}\.old",
    broadcastable: r"{name} has shape \(1,.*\), the engine's is \(",
    reshaped: r"{name} has shape \(1, .*\), the engine's is \(",
    same_size_dtype: r"{name} is torch\.\w+, the engine's is torch\.\w+;",
    wider_dtype: r"{name} is torch\.float64, the engine's is torch\.\w+;",
    without_data: "{name} is on the meta device",
    sparse: r"{name} is torch\.sparse_coo; send it dense",
    complex_dtype: r"{name} is torch\.complex64, the engine's is torch\.\w+;",
    simulated: "{name} is a FakeTensor, whose elements lie in other tensors",
    no_tensor: "{name} is a list; send a tensor",
}


@pytest.mark.parametrize("stable", [False, True], ids=["singly", "together"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_faulty_tensor_is_refused_wherever_it_is(case: Case, fault: Fault, stable: bool) -> None:
    for at, (name, _) in enumerate(case.good):
        faulty = fault(case.other, at)
        error = case.check_refusal(StableTensors(faulty) if stable else faulty, 10 * at)
        pattern = FAULTS[fault].replace("{name}", name.replace(".", r"\."))
        assert re.search(pattern, str(error)), f"{fault.__name__} at {name}: {error}"
        case.check_recovery(10 * at + 2)
    case.check_samples()


def test_a_number_that_is_not_finite_is_refused_wherever_it_is(case: Case) -> None:
    floating = [i for i, (_, t) in enumerate(case.good) if t.is_floating_point()]
    assert len(floating) >= len(case.good) / 2
    for at in floating:
        name, tensor = case.other[at]
        for place, value in ((0, torch.nan), (-1, torch.nan), (0, torch.inf), (-1, -torch.inf)):
            broken = tensor.clone()
            broken.view(-1)[place] = value
            error = case.check_refusal(iter(with_tensor(case.other, at, broken)), 10 * at)
            assert f"{name} holds NaN or inf" in str(error)
        case.check_recovery(10 * at + 2)
    case.check_samples()


@pytest.mark.parametrize("prepared", [False, True], ids=["plain", "prepared"])
def test_a_learner_with_nan_is_refused_whichever_parameter_holds_it(case: Case, prepared: bool) -> None:
    policy = new_policy(0)
    if prepared:
        prepare_(policy, case.scheme, export_dtype=DTYPE)
    for at, (name, parameter) in enumerate(policy.named_parameters()):
        flat = parameter.detach().view(-1)
        whole = flat[-1].clone()
        flat[-1] = torch.nan
        case.engine.update_weights(case.other, policy_version=10 * at)  # weights that must not shine through
        error = case.check_refusal(export_weights(policy, case.scheme, export_dtype=DTYPE), 10 * at)
        assert re.search(rf"{re.escape(name)}(_scale)? holds NaN or inf", str(error))
        flat[-1] = whole
        mended = export_weights(policy, case.scheme, export_dtype=DTYPE)
        assert case.engine.update_weights(mended, policy_version=10 * at + 2).digest == case.digest
    case.check_samples()


def test_an_interruption_is_not_swallowed_and_leaves_a_refusing_engine(case: Case) -> None:
    def interrupted(at: int) -> Iterator[Named]:
        yield from case.other[:at]
        raise KeyboardInterrupt

    for at in range(len(case.good) + 1):
        with pytest.raises(KeyboardInterrupt):
            case.engine.update_weights(interrupted(at), policy_version=0)
        with pytest.raises(StaleEngineError, match="did not complete"):
            case.engine.generate(PROMPTS, PARAMS, seed=0)
        case.check_recovery(1)
    case.check_samples()


def reused(weights: Stream, at: set[int]) -> Iterator[Named]:
    """One buffer for the tensors ``at``, overwritten as soon as the receiver asks for the next."""
    buffer = torch.empty(max(t.numel() * t.element_size() for _, t in weights), dtype=torch.int8)
    for i, (name, tensor) in enumerate(weights):
        if i not in at:
            yield name, tensor
            continue
        part = buffer[: tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
        part.copy_(tensor)
        yield name, part
        buffer.fill_(-1)  # NaN as floats


def test_a_buffer_that_the_sender_uses_again_is_no_fault(case: Case) -> None:
    everywhere = set(range(len(case.good)))
    for at in [*({i} for i in everywhere), everywhere]:
        case.engine.update_weights(case.other, policy_version=0)
        assert case.engine.update_weights(reused(case.good, at), policy_version=1).digest == case.digest
    case.check_samples()


def test_strides_and_order_of_the_stream_are_no_faults(case: Case) -> None:
    strided = [(n, t.t().contiguous().t() if t.dim() == 2 else torch.stack([t, t], -1)[..., 0]) for n, t in case.good]
    assert not all(t.is_contiguous() for _, t in strided)
    for weights in (strided, case.good[::-1]):
        case.engine.update_weights(case.other, policy_version=0)
        assert case.engine.update_weights(weights, policy_version=1).digest == case.digest
    case.check_samples()


def test_the_same_weights_twice_give_equal_digests(case: Case) -> None:
    first, second = (case.engine.update_weights(case.good, policy_version=v) for v in (0, 1))
    assert first.digest == second.digest == case.digest
    assert second.elements_changed_fraction == second.codes_changed_fraction == 0.0
    with torch.inference_mode():  # Lightning validates in it
        assert case.engine.update_weights(case.good, policy_version=2).digest == case.digest
    case.check_samples()


@pytest.mark.gpu
@pytest.mark.parametrize("receiver", ["cpu", "cuda"])
@pytest.mark.parametrize("sender", ["pageable", "pinned", "cuda"])
def test_a_reused_buffer_of_another_device_is_no_fault(sender: str, receiver: str) -> None:
    """Copies between devices can be asynchronous: a busy GPU reads late, and must be waited for."""
    config = Qwen2Config(**{**SIZES, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 1})
    work = torch.randn(4096, 4096, device="cuda")
    scheme, device = QuantScheme.preset("int8_w8a8"), torch.device("cuda" if sender == "cuda" else "cpu")
    weights = exported(load_model(config, dtype=torch.float32, seed=0), scheme)
    engine = TorchEngineFactory()(EngineSpec(config, scheme, DTYPE, torch.device(receiver), 64, ()))
    size = max(t.numel() * t.element_size() for _, t in weights)
    buffer = torch.empty(size, dtype=torch.int8, device=device, pin_memory=sender == "pinned")

    def stream() -> Iterator[Named]:
        for name, tensor in weights:
            part = buffer[: tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
            part.copy_(tensor)
            for _ in range(5):  # some 10 ms of queued work
                torch.mm(work, work)
            yield name, part
            buffer.fill_(-1)

    engine.update_weights(stream(), policy_version=0)
    held = engine.decoder.model.state_dict()
    assert not [name for name, tensor in weights if not torch.equal(held[name].cpu(), tensor)]
