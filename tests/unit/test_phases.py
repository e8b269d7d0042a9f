"""Clocks of phases: the seconds add up to the wall time, whatever is inside what."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lqrl.data import UniformBudget
from lqrl.phases import PHASES, PhaseClock, phase
from lqrl.rewards import RewardSum, RewardTerm
from lqrl.rollouts import Refill, collect
from lqrl.testing import BernoulliEngine
from lqrl.types import Prompt, SamplingParams


class Hand:
    """A clock's hand that is moved by hand."""

    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at

    def wait(self, seconds: float) -> None:
        self.at += seconds


@pytest.fixture
def hand() -> Hand:
    return Hand()


def spent(clock: PhaseClock) -> dict[str, float]:
    return {name: seconds for name, seconds in clock.lap().items() if seconds}


def test_what_no_phase_claims_is_other(hand: Hand):
    with PhaseClock(now=hand) as clock:
        hand.wait(1)
        with phase("generate"):
            hand.wait(2)
        hand.wait(4)
        assert clock.lap() == dict.fromkeys(PHASES, 0.0) | {"generate": 2.0, "other": 5.0}
        assert spent(clock) == {}


def test_a_phase_takes_its_time_from_the_one_around_it(hand: Hand):
    with PhaseClock(now=hand) as clock:
        with phase("refresh"):
            hand.wait(1)
            with phase("score"):
                hand.wait(2)
                with phase("score"):
                    hand.wait(4)
            hand.wait(8)
        assert spent(clock) == {"refresh": 9.0, "score": 6.0}


def test_all_of_a_validation_is_validation(hand: Hand):
    with PhaseClock(now=hand) as clock:
        with phase("validate"):
            hand.wait(1)
            with phase("generate"):
                hand.wait(2)
                with phase("reward"):
                    hand.wait(4)
        with phase("generate"):
            hand.wait(8)
        assert spent(clock) == {"validate": 7.0, "generate": 8.0}


def test_a_lap_inside_a_phase_cuts_it_in_two(hand: Hand):
    with PhaseClock(now=hand) as clock:
        with phase("step"):
            hand.wait(1)
            assert spent(clock) == {"step": 1.0}
            hand.wait(2)
        assert spent(clock) == {"step": 2.0}


def test_a_phase_that_raises_is_over(hand: Hand):
    @phase("reward")
    def failing() -> None:
        hand.wait(1)
        raise RuntimeError("no reward")

    with PhaseClock(now=hand) as clock:
        with pytest.raises(RuntimeError, match="no reward"):
            failing()
        hand.wait(2)
        assert spent(clock) == {"reward": 1.0, "other": 2.0}


def test_a_phase_that_an_interrupt_left_open_ends_with_the_one_around_it(hand: Hand):
    with PhaseClock(now=hand) as clock:
        with phase("refresh"):
            clock.enter("generate")  # and never left
            hand.wait(1)
        hand.wait(2)
        assert spent(clock) == {"generate": 1.0, "other": 2.0}
        clock.enter("generate")
    clock.start()
    hand.wait(4)
    assert spent(clock) == {"other": 4.0}
    clock.stop()


def test_a_phase_nobody_knows_is_refused():
    with pytest.raises(ValueError, match="no phase is called 'bogus'; there are: generate, reward"), phase("bogus"):
        pass


def test_clocks_may_start_and_stop_inside_a_phase(hand: Hand):
    early, late = PhaseClock(now=hand), PhaseClock(now=hand)
    early.start()
    with phase("generate"):
        hand.wait(1)
        late.start()
        hand.wait(2)
        early.stop()
        early.stop()
        with phase("reward"):
            hand.wait(4)
    hand.wait(8)
    late.stop()
    assert spent(late) == {"reward": 4.0, "other": 10.0}
    early.start()  # nothing of the first time is left
    hand.wait(1)
    early.stop()
    assert spent(early) == {"other": 1.0}


def test_what_comes_after_the_stop_is_nobody_s(hand: Hand):
    with PhaseClock(now=hand) as clock, phase("generate"):
        hand.wait(1)
    hand.wait(2)
    assert spent(clock) == {"generate": 1.0}


def test_a_decorated_function_is_a_phase_each_time(hand: Hand):
    @phase("score")
    def work(seconds: float) -> float:
        hand.wait(seconds)
        return seconds

    with PhaseClock(now=hand) as clock:
        assert work(1) + work(2) == 3
        assert spent(clock) == {"score": 3.0}


def test_the_device_is_waited_for_at_every_boundary_and_only_while_a_clock_runs(hand: Hand):
    owed = [0.0]

    def synchronize() -> None:
        hand.wait(owed[0])
        owed[0] = 0.0

    with PhaseClock(synchronize, hand) as clock:
        with phase("forward_backward"):
            owed[0] = 5.0  # launched here, so charged here
        assert spent(clock) == {"forward_backward": 5.0}
    with phase("forward_backward"):
        owed[0] = 5.0
    assert owed[0] == 5.0


def test_every_generation_of_a_refill_counts(hand: Hand):
    class Slow(BernoulliEngine):
        def generate(self, *args, **options):
            hand.wait(10)
            return super().generate(*args, **options)

    def judge(prompt, completions):
        hand.wait(1)
        return [float(c.text == "1") for c in completions]

    fresh = iter(range(100, 200))
    engine = Slow([0.0] * 200)
    engine.update_weights([], policy_version=0)
    with PhaseClock(now=hand) as clock:
        rollouts = collect(
            engine, [Prompt(i, (5,)) for i in range(2)], SamplingParams(max_tokens=1),
            RewardSum([RewardTerm(judge, "right")]), decode=lambda ids: str(ids[0]), budget=UniformBudget(2),
            pad_token_id=0, seed=0, refill=Refill(max_rounds=3),
            draw_more=lambda n: [Prompt(next(fresh), (5,)) for _ in range(n)],
        )  # fmt: skip
        assert rollouts.rounds == 3
        assert spent(clock) == {"generate": 30.0, "reward": 6.0}


def test_every_phase_is_explained():
    explained = Path("docs/metrics.md").read_text(encoding="utf-8")
    assert not [name for name in (*PHASES, "other", "iteration") if f"`time/{name}`" not in explained]


@pytest.mark.gpu
def test_a_phase_is_charged_with_the_kernels_it_launched():
    x = torch.randn(8192, 8192, device="cuda")
    (x @ x).sum().item()
    seconds = []
    for synchronize in (torch.cuda.synchronize, lambda: None):
        with PhaseClock(synchronize) as clock:
            with phase("forward_backward"):
                for _ in range(20):
                    x @ x
            seconds.append(clock.lap()["forward_backward"])
            torch.cuda.synchronize()
    assert seconds[0] > 3 * seconds[1]
