from __future__ import annotations

import copy
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lqrl.rewards import MathReward
from lqrl.rewards.workers import WorkerPool, WorkerStartError
from lqrl.types import Completion, Prompt


def score(reward: MathReward, answer: str | None, *texts: str) -> list[float | None]:
    zeros = torch.zeros(1)
    group = [Completion(5, i, zeros.long(), zeros, zeros, "stop", 0, text) for i, text in enumerate(texts)]
    return reward(Prompt(5, (1,), answer=answer), group)


@pytest.fixture(scope="module")
def reward() -> Iterator[MathReward]:
    reward = MathReward(workers=1, timeout=5.0)
    yield reward
    reward.pool.close()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("gold", "text", "expected"),
    [
        ("18", "The answer is 18", 1),
        ("18", r"so \boxed{18.0}.", 1),
        ("18", r"\boxed{17} and then \boxed{18}", 1),
        ("1/2", r"\boxed{\frac{1}{2}}", 1),
        (r"\frac{1}{2}", r"\boxed{0.5}", 1),
        ("x^2+1", r"\boxed{1+x^2}", 1),
        ("(1,2)", r"\boxed{(1, 2)}", 1),
        ("18", r"\boxed{19}", 0),
        ("18", r"18 \boxed{19}", 0),
        ("18", r"\boxed{18", 0),  # never closed
        ("18", "", 0),
        ("18", "no idea", 0),
        ("18", r"\boxed{__import__('os').abort()}", 0),
    ],
)
def test_answers_are_compared_as_mathematics(reward: MathReward, gold: str, text: str, expected: int) -> None:
    assert score(reward, gold, text) == [expected]


def test_an_answer_that_never_ends_is_killed_and_scores_0(reward: MathReward) -> None:
    score(reward, "18", r"\boxed{18.0}")
    (before,) = reward.pool.process_ids
    timeouts, start = reward.pool.timeouts, time.monotonic()
    assert score(reward, "18", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{18.00}") == [0, 1]
    assert reward.pool.timeouts == timeouts + 1
    assert time.monotonic() - start < 60
    assert not alive(before)
    assert reward.pool.process_ids != [before]


def test_a_worker_that_dies_is_replaced(reward: MathReward) -> None:
    score(reward, "18", r"\boxed{18.0}")
    (pid,) = reward.pool.process_ids
    os.kill(pid, 9)
    time.sleep(0.2)
    assert score(reward, "2", r"\boxed{2.0}", r"\boxed{3}") == [1, 0]


def test_equal_strings_start_no_process() -> None:
    reward = MathReward()
    assert score(reward, r"\boxed{18}", "18", r"x \boxed{18}") == [1, 1]
    assert reward.pool.process_ids == []


def test_only_the_end_of_the_text_is_read() -> None:
    reward = MathReward(max_chars=20, max_answer_chars=5)
    assert reward.extract(r"\boxed{18}" + " " * 30) is None
    assert reward.extract("x" * 30 + "18\n") == "xxx18"
    assert reward.extract(r"\boxed{12345}") == r"\boxed{12345}"
    assert reward.extract(r"\boxed{123456}") is None
    assert MathReward(boxed_only=True).extract("18") is None


def test_an_unparsable_reference_cannot_be_scored(reward: MathReward) -> None:
    assert score(reward, "no $ here", r"\boxed{4}") == [None]


def test_missing_reference_answer_says_what_to_set() -> None:
    with pytest.raises(ValueError, match="set answer_field"):
        score(MathReward(), None, "1")


@pytest.mark.parametrize(
    "option", ["workers", "timeout", "max_chars", "max_answer_chars", "memory_mb", "start_timeout"]
)
def test_options_must_be_positive(option: str) -> None:
    with pytest.raises(ValueError, match=rf"MathReward\.{option} must be positive"):
        MathReward(**{option: 0})


def test_a_copy_has_its_own_processes(reward: MathReward) -> None:
    score(reward, "18", r"\boxed{18.0}")
    other = copy.deepcopy(reward)
    assert other == reward
    assert other.pool is not reward.pool
    assert other.pool.process_ids == []


def test_processes_end_with_the_interpreter_and_a_script_needs_no_main_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from lqrl.rewards import MathReward\n"
        "reward = MathReward(workers=1)\n"
        "reward.pool.map([{'gold': '1', 'answer': '1.0'}])\n"
        "print(*reward.pool.process_ids)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=120)
    (pid,) = map(int, done.stdout.split())
    assert not alive(pid)


def echo_pool(tmp_path: Path, body: str, **options: float) -> WorkerPool:
    script = tmp_path / "worker.py"
    script.write_text(
        "import json, sys, time\n"
        "print(json.dumps({'ready': True}), flush=True)\n"
        "for line in sys.stdin:\n"
        "    request = json.loads(line)\n" + body
    )
    return WorkerPool(script, [], workers=2, timeout=options.get("timeout", 60.0), start_timeout=60.0)


def test_replies_come_in_the_order_of_the_requests(tmp_path: Path) -> None:
    pool = echo_pool(tmp_path, "    time.sleep(request['wait'])\n    print(line, end='', flush=True)\n")
    requests = [{"wait": 0.2, "n": 0}, {"wait": 0, "n": 1}, {"wait": 0, "n": 2}]
    assert pool.map(requests) == requests
    assert pool.map([]) == []
    pool.close()
    assert pool.process_ids == []


def test_a_crash_is_told_from_a_timeout(tmp_path: Path) -> None:
    body = "    time.sleep(request['wait'])\n    sys.exit() if request['die'] else print(line, end='', flush=True)\n"
    pool = echo_pool(tmp_path, body, timeout=3.0)
    fine = {"wait": 0, "die": False}
    assert pool.map([{"wait": 60, "die": False}, {"wait": 0, "die": True}, fine]) == ["timeout", "crash", fine]
    assert (pool.timeouts, pool.crashes) == (1, 1)
    pool.close()


def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text("import no_such_module\n")
    with pytest.raises(WorkerStartError, match="No module named 'no_such_module'"):
        WorkerPool(script, [], workers=1, timeout=1.0, start_timeout=30.0).map([{}])
