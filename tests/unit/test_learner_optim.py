"""AdamW on bf16 parameters: small steps arrive, and a resumed run is the same run."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lqrl.cli import run
from lqrl.data.tasks import Countdown
from lqrl.engines import TorchEngineFactory
from lqrl.learner import KahanAdamW, PolicyModule, StochasticAdamW
from lqrl.learner.optim import BFloat16AdamW
from lqrl.quant.linear import AlignedLinear
from lqrl.quant.methods import linear_method
from lqrl.quant.scheme import QuantScheme
from lqrl.rewards import RewardSum, RewardTerm, TaskReward

LR = 1e-6
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def start() -> list[Tensor]:
    """A matrix like a linear layer's, and a norm's weight."""
    return [
        (torch.randn(64, 32, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16(),
        torch.ones(64).bfloat16(),
    ]


def gradients(steps: int, first: int = 0) -> Iterator[list[Tensor]]:
    """bf16 gradients with a drift of 0.3 deviations."""
    for i in range(first, steps):
        generator = torch.Generator().manual_seed(i)
        yield [(torch.randn(w.shape, generator=generator) + 0.3).bfloat16() for w in start()]


def train(make: Make, steps: int, dtype: torch.dtype = torch.bfloat16) -> tuple[list[nn.Parameter], Any]:
    parameters = [nn.Parameter(w.to(dtype)) for w in start()]
    optimizer = make(parameters)
    advance(parameters, optimizer, gradients(steps))
    return parameters, optimizer


def advance(parameters: list[nn.Parameter], optimizer: Any, steps: Iterator[list[Tensor]]) -> None:
    for grads in steps:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad.to(parameter.dtype)
        optimizer.step()


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, foreach=True)


@pytest.fixture(scope="module")
def exact() -> list[Tensor]:
    """What 1000 steps of AdamW in fp32 make of the same gradients."""
    return [p.detach() for p in train(adamw, 1000, torch.float32)[0]]


def error(moved: list[Tensor], exact: list[Tensor]) -> list[float]:
    """Relative error of the distance from the start, for each tensor."""
    return [float((m - e).norm() / (e - w.float()).norm()) for m, e, w in zip(moved, exact, start(), strict=True)]


def test_plain_adamw_in_bf16_loses_almost_every_step(exact: list[Tensor]) -> None:
    parameters, _ = train(adamw, 1000)
    # steps of 1e-6 move weights below 512e-6 only: |N(0, 0.02)| < 5e-4 is 2% of them, and no norm's
    moved = [float((p != w).float().mean()) for p, w in zip(parameters, start(), strict=True)]
    assert 0 < moved[0] < 0.03
    assert moved[1] == 0.0
    assert min(error([p.detach().float() for p in parameters], exact)) > 0.98


def test_kahan_with_an_fp32_moment_is_fp32_adamw_bit_for_bit(exact: list[Tensor]) -> None:
    parameters, optimizer = train(lambda p: KahanAdamW(p, lr=LR, momentum_dtype="float32"), 1000)
    for parameter, expected in zip(parameters, exact, strict=True):
        assert torch.equal(optimizer.master(parameter), expected)
        # the parameter is the nearest bf16 number; PyTorch's rounding differs in a tie at most
        spacing = (expected.bfloat16().float() - parameter.detach().float()).abs()
        assert float((spacing > 0).float().mean()) < 0.001
    assert float((parameters[0] != start()[0]).float().mean()) > 0.99


def test_kahan_with_a_bf16_moment_tracks_fp32(exact: list[Tensor]) -> None:
    parameters, optimizer = train(lambda p: KahanAdamW(p, lr=LR), 1000)
    assert optimizer.state[parameters[0]]["exp_avg"].dtype == torch.bfloat16
    assert max(error([optimizer.master(p) for p in parameters], exact)) < 2e-3


def test_stochastic_rounding_is_right_on_average(exact: list[Tensor]) -> None:
    parameters, _ = train(lambda p: StochasticAdamW(p, lr=LR), 1000)
    weight, expected, first = parameters[0].detach().float(), exact[0], start()[0].float()
    assert float((weight != first).float().mean()) > 0.8
    # 1000 steps u of probability u / q have the variance sum(u q). With u = 1e-6 and q = 2^-13, the spacing at 0.02, a
    # weight deviates by sqrt(1e-3 * 1.2e-4) = 3.5e-4 and the mean of 2048 by 7.7e-6
    assert float((expected - first).mean()) < -2e-4
    assert float((weight - expected).mean()) == pytest.approx(0, abs=4 * 7.7e-6)


def test_stochastic_rounding_follows_its_seed_alone() -> None:
    def result(seed: int, noise: int) -> Tensor:
        torch.manual_seed(noise)
        return train(lambda p: StochasticAdamW(p, lr=LR, seed=seed), 20)[0][0].detach()

    assert torch.equal(result(0, 1), result(0, 2))
    assert not torch.equal(result(0, 1), result(1, 1))


@pytest.mark.parametrize("cls", [KahanAdamW, StochasticAdamW])
def test_a_resumed_run_is_the_same_run(cls: type[BFloat16AdamW]) -> None:
    whole, _ = train(lambda p: cls(p, lr=LR), 30)
    parameters, optimizer = train(lambda p: cls(p, lr=LR), 20)
    file = io.BytesIO()
    torch.save([parameters, optimizer.state_dict()], file)
    file.seek(0)
    loaded, state = torch.load(file, weights_only=True)
    resumed = [nn.Parameter(p.detach()) for p in loaded]
    again = cls(resumed, lr=1.0)
    again.load_state_dict(state)
    for a, b in zip(optimizer.state.values(), again.state.values(), strict=True):
        assert all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)
        assert a["exp_avg_sq"].data_ptr() != b["exp_avg_sq"].data_ptr()
    advance(resumed, again, gradients(30, first=20))
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


def test_chunks_change_nothing() -> None:
    whole, first = train(lambda p: KahanAdamW(p, lr=LR), 5)
    pieces, second = train(lambda p: KahanAdamW(p, lr=LR, chunk_elements=100), 5)
    for a, b in zip(whole, pieces, strict=True):
        assert torch.equal(first.master(a), second.master(b))
        assert first.state[a]["step"] == second.state[b]["step"] == 5


def test_groups_have_rates_of_their_own_and_a_parameter_without_gradient_rests() -> None:
    a, b, c = (nn.Parameter(torch.ones(4).bfloat16()) for _ in range(3))
    optimizer = KahanAdamW([{"params": [a, c], "lr": 0.25}, {"params": [b], "lr": 0.125}], weight_decay=0.0)
    a.grad, b.grad = torch.ones(4).bfloat16(), -torch.ones(4).bfloat16()
    optimizer.step()
    # the first step of Adam is lr * sign(gradient)
    assert a.tolist() == [0.75] * 4
    assert b.tolist() == [1.125] * 4
    assert c.tolist() == [1.0] * 4
    assert c not in optimizer.state


def test_aligned_layers_follow_the_optimizer() -> None:
    layer = AlignedLinear(
        nn.Linear(8, 4, dtype=torch.bfloat16), linear_method(QuantScheme.preset("int8_w8a8")), torch.bfloat16
    )
    optimizer = KahanAdamW(layer.parameters(), lr=0.05)
    before = layer.quantized_weight()["weight"].clone()
    version = layer.weight._version
    layer(torch.randn(3, 8, dtype=torch.bfloat16)).float().square().sum().backward()
    optimizer.step()
    used, expected = layer.quantized_weight(), layer.method.quantize(layer.weight.detach())
    assert all(torch.equal(used[name], expected[name]) for name in expected)
    assert not torch.equal(used["weight"], before)
    assert layer.weight._version > version  # what a refresh looks at


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20))
def test_a_weight_and_its_compensation_are_the_fp32_number(values: list[float]) -> None:
    master = torch.tensor(values, dtype=torch.float32)
    parameter = nn.Parameter(torch.zeros(len(values), dtype=torch.bfloat16))
    optimizer = KahanAdamW([parameter], lr=0.0)
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    (piece,) = optimizer._pieces([parameter], 0)
    with torch.no_grad():
        optimizer._narrow_(piece, master)
    assert torch.equal(optimizer.master(parameter), master)
    nearest = master.bfloat16()
    off = (parameter.detach() != nearest).nonzero().flatten().tolist()
    for i in off:  # ties alone
        assert abs(float(parameter[i]) - values[i]) == abs(float(nearest[i]) - values[i])


def test_a_weight_set_to_zero_from_outside_stays_a_number() -> None:
    parameters, optimizer = train(lambda p: KahanAdamW(p, lr=LR), 3)
    assert int(optimizer.state[parameters[0]]["low"].min()) < 0
    with torch.no_grad():
        parameters[0].zero_()
    assert optimizer.master(parameters[0]).isfinite().all()
    assert float(optimizer.master(parameters[0]).abs().max()) < 1e-37


@pytest.mark.parametrize("cls", [KahanAdamW, StochasticAdamW])
@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7FC00000, -1, 0x7F800001])
def test_nan_stays_nan(cls: type[BFloat16AdamW], bits: int) -> None:
    parameter = nn.Parameter(torch.ones(3).bfloat16())
    parameter.grad = torch.zeros_like(parameter)
    optimizer = cls([parameter])
    (piece,) = optimizer._pieces([parameter], 0)
    with torch.no_grad():
        optimizer._narrow_(piece, torch.full((3,), bits, dtype=torch.int32).view(torch.float32))
    assert parameter.isnan().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\)"),
        ({"chunk_elements": 0}, "chunk_elements=0"),
        ({"momentum_dtype": "float16"}, "unknown dtype 'float16'"),
    ],
)
def test_options_out_of_range_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KahanAdamW([nn.Parameter(torch.zeros(1).bfloat16())], **options)


def test_fp32_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match=r"set master_dtype: bfloat16, or use torch\.optim\.AdamW"):
        KahanAdamW([nn.Parameter(torch.zeros(1))])


def module(optimizer: Any, master_dtype: str = "bfloat16") -> PolicyModule:
    return PolicyModule(
        "asset:countdown_policy",
        RewardSum([RewardTerm(TaskReward(Countdown()), "correct")]),
        TorchEngineFactory(),
        master_dtype=master_dtype,
        optimizer=optimizer,
    )


def test_steps_that_bf16_masters_lose_are_announced() -> None:
    with pytest.warns(
        UserWarning, match=r"AdamW rounds to nearest: at lr=1e-06 weights above about 0.0005 do not move"
    ):
        module(lambda p: torch.optim.AdamW(p, lr=1e-6))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(lambda p: torch.optim.AdamW(p, lr=1e-6), master_dtype="float32")
        module(lambda p: torch.optim.AdamW(p, lr=1e-3))
        module(lambda p: KahanAdamW(p, lr=1e-6))
        module(lambda p: StochasticAdamW(p, lr=1e-6))


@pytest.mark.filterwarnings("ignore")
def test_torchaos_stochastic_rounding_counts() -> None:
    torchao = pytest.importorskip("torchao.optim")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*rounds to nearest")
        module(lambda p: torchao.AdamW8bit(p, lr=1e-6, bf16_stochastic_round=True))
    with pytest.warns(UserWarning, match="AdamW8bit rounds to nearest"):
        module(lambda p: torchao.AdamW8bit(p, lr=1e-6))


def test_a_recipe_trains_bf16_masters(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lqrl"])
    config = yaml.safe_load(Path("configs/quickstart.yaml").read_text())
    config["trainer"] |= {"max_epochs": 1, "limit_val_batches": 0, "num_sanity_val_steps": 0}
    config["trainer"]["callbacks"] = [
        {"class_path": f"lqrl.callbacks.{n}"} for n in ("EngineRefresh", "SamplerFeedback")
    ]
    config["trainer"]["logger"] = False
    config["trainer"]["default_root_dir"] = str(tmp_path)
    model, data = config["model"]["init_args"], config["data"]["init_args"]
    model |= {"master_dtype": "bfloat16", "dtype": "bfloat16", "sampling": {"max_tokens": 8}}
    model["optimizer"] = {"class_path": "lqrl.learner.KahanAdamW", "init_args": {"lr": 1e-5}}
    data |= {"prompts_per_iteration": 16, "iterations_per_epoch": 2}
    data["train"]["rows"]["init_args"]["size"] = data["val"]["rows"]["init_args"]["size"] = 32
    path = tmp_path / "bf16.yaml"
    path.write_text(yaml.safe_dump(config))
    cli = run(["fit", "--config", str(path)])
    optimizer: Any = cli.trainer.optimizers[0]
    assert type(optimizer) is KahanAdamW
    assert all(p.dtype == torch.bfloat16 for p in cli.model.policy.parameters())
    assert float(cli.trainer.callback_metrics["train/skipped_steps"]) == 0
    # a step of 1e-5 crosses a bf16 boundary in few weights; the others have it in their compensation
    low = torch.cat([optimizer.state[p]["low"].flatten() for p in cli.model.policy.parameters()])
    assert float((low != 0).float().mean()) > 0.5
    assert float(cli.trainer.callback_metrics["refresh/codes_changed_fraction"]) > 0
