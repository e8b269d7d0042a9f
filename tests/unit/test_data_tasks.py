from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lqrl.data.expression import ExpressionError, parse_expression
from lqrl.data.tasks import Arithmetic, Countdown, Sort, Task

TASKS: list[type[Task]] = [Countdown, Sort, Arithmetic]


@pytest.mark.parametrize(
    ("text", "value", "integers"),
    [
        ("3*7+24", 45, (3, 7, 24)),
        (" 1 + (2 *3) ", 7, (1, 2, 3)),
        ("8-3-2", 3, (8, 3, 2)),  # left to right: (8-3)-2
        ("2*(3-(4-1))", 0, (2, 3, 4, 1)),
        ("0", 0, (0,)),
    ],
)
def test_expression_has_its_value_and_integers(text: str, value: int, integers: tuple[int, ...]) -> None:
    assert parse_expression(text) == (value, integers)


@pytest.mark.parametrize(
    "text",
    ["", "1+", "1 2+3", "01+2", "9**9", "2/0", "-3+4", "(1", "1)", "1²", "__import__('os')", "1;2", "1+\n2", "(" * 128],
)
def test_anything_else_is_no_expression(text: str) -> None:
    with pytest.raises(ExpressionError):
        parse_expression(text)


def test_expression_over_the_length_limit_is_refused() -> None:
    # 64 ones and 63 plus signs are 127 characters; two more are 129
    assert parse_expression("+".join("1" * 64))[0] == 64
    with pytest.raises(ExpressionError, match="longer than 128"):
        parse_expression("+".join("1" * 65))


def test_division_is_exact_and_refuses_zero() -> None:
    assert parse_expression("1/3*3", operators="*/")[0] == 1
    with pytest.raises(ExpressionError, match="division by zero"):
        parse_expression("1/(2-2)", operators="-/")


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="0123456789+-*() ", max_size=40))
def test_parser_agrees_with_python_where_it_accepts(text: str) -> None:
    try:
        value, _ = parse_expression(text)
    except ExpressionError:
        return
    assert value == eval(text)  # the alphabet above cannot name anything


@pytest.mark.parametrize("task", [Countdown(), Countdown(numbers=4, operators="+-*/"), Sort(), Arithmetic(digits=2)])
def test_own_solution_is_accepted(task: Task) -> None:
    assert all(task.check(row, row["solution"]) for row in (task[i] for i in range(200)))


def test_rows_are_the_same_on_every_machine() -> None:
    assert [Countdown()[i]["prompt"] for i in range(3)] == ["9 7 18=45:", "19 11 14=57:", "10 7 2=15:"]
    assert [Sort()[i]["prompt"] for i in range(2)] == ["44 38 26 51:", "99 52 45:"]
    assert Arithmetic()[0]["prompt"] == "What is 7 + 6? Answer with the number only."


def test_a_row_depends_on_seed_and_index_alone() -> None:
    assert Countdown(size=10)[7] == Countdown()[7]
    assert Countdown(seed=1)[7] != Countdown()[7]


@pytest.mark.parametrize("make", TASKS)
def test_splits_share_no_prompt(make: type[Task]) -> None:
    train = {make(split="train", seed=1)[i]["prompt"] for i in range(1000)}  # type: ignore[call-arg]
    validation = {make(split="validation", seed=2)[i]["prompt"] for i in range(1000)}  # type: ignore[call-arg]
    assert validation
    assert not train & validation


def test_a_permuted_countdown_stays_in_its_split() -> None:
    def key(row: dict) -> tuple:
        return (*sorted(row["numbers"]), row["target"])

    small = {"max_number": 4, "max_target": 20}
    train = {key(Countdown(**small)[i]) for i in range(500)}
    assert not train & {key(Countdown(split="validation", **small)[i]) for i in range(200)}


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ("3*7+24", True),
        ("24 + 7 * 3", True),
        ("(3*7)+24\n", True),
        ("3*7", False),  # 24 is missing
        ("3*7+24+3-3", False),  # 3 is used three times
        ("45", False),
        ("3*7+24=45", False),
        ("37+24-16", False),
        ("__import__('os').system('true')", False),
    ],
)
def test_countdown_counts_any_expression_over_the_given_numbers(text: str, accepted: bool) -> None:
    assert Countdown().check({"numbers": (3, 7, 24), "target": 45}, text) is accepted


def test_sort_wants_the_whole_list() -> None:
    row = {"answer": "4 15 31"}
    assert Sort().check(row, " 4 15  31\n")
    assert not any(Sort().check(row, text) for text in ("4 15", "4 15 31 31", "31 15 4", ""))


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ("12", True),
        ("7 + 5 = 12.", True),
        ("**12**", True),
        ("12.5", False),
        ("1,012", False),
        ("112", False),
        ("-12", False),
        ("12, no, 13", False),
        ("twelve", False),
        ("", False),
    ],
)
def test_arithmetic_takes_the_last_integer(text: str, accepted: bool) -> None:
    assert Arithmetic().check({"answer": "12"}, text) is accepted


def test_arithmetic_can_want_the_number_only() -> None:
    assert Arithmetic(last_number=False).check({"answer": "-3"}, " -3 ")
    assert not Arithmetic(last_number=False).check({"answer": "12"}, "It is 12")


def test_templates_change_the_prompt_and_not_the_problem() -> None:
    row = Countdown(template="Make {target} from {numbers}.")[0]
    assert row["prompt"] == "Make 45 from 9 7 18."
    assert row["solution"] == Countdown()[0]["solution"]


def test_an_endless_task_has_no_length_and_says_how_to_get_one() -> None:
    with pytest.raises(TypeError, match="set size"):
        len(Countdown())


def test_a_sized_task_ends() -> None:
    assert len(list(Sort(size=3))) == 3
    with pytest.raises(IndexError):
        Sort(size=3)[3]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Countdown(size=0), "size must be at least 1"),
        (lambda: Countdown(operators="+^"), "operators must be"),
        (lambda: Countdown(numbers=1), "numbers must be at least 2"),
        (lambda: Sort(min_items=4, max_items=3), "min_items <= max_items"),
        (lambda: Arithmetic(digits=0), "digits must be in 1..9"),
        (lambda: Arithmetic(validation_fraction=1.0), "validation_fraction"),
        (lambda: Countdown(max_number=1, max_target=1, numbers=2, operators="+")[0], "no problem for split"),
    ],
)
def test_bad_options_name_the_option(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
