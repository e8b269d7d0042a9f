"""Arithmetic expressions from untrusted text: parsed into exact fractions, never evaluated as code."""

from __future__ import annotations

from fractions import Fraction

_DIGITS = "0123456789"


class ExpressionError(ValueError):
    """The text is not an arithmetic expression of the accepted grammar."""


class _Parser:
    """Recursive descent over ``sum := product (('+'|'-') product)*``, ``product := atom (('*'|'/') atom)*``."""

    def __init__(self, text: str, operators: str) -> None:
        self.text = text
        self.operators = operators
        self.position = 0
        self.integers: list[int] = []

    def _peek(self) -> str:
        return self.text[self.position] if self.position < len(self.text) else ""

    def skip_spaces(self) -> None:
        while self._peek() == " ":
            self.position += 1

    def _operator(self, accepted: str) -> str:
        self.skip_spaces()
        char = self._peek()
        if char and char in accepted and char in self.operators:
            self.position += 1
            return char
        return ""

    def sum(self) -> Fraction:
        value = self.product()
        while operator := self._operator("+-"):
            right = self.product()
            value = value + right if operator == "+" else value - right
        return value

    def product(self) -> Fraction:
        value = self.atom()
        while operator := self._operator("*/"):
            right = self.atom()
            if operator == "/" and right == 0:
                raise ExpressionError("division by zero")
            value = value * right if operator == "*" else value / right
        return value

    def atom(self) -> Fraction:
        self.skip_spaces()
        if self._peek() == "(":
            self.position += 1
            value = self.sum()
            self.skip_spaces()
            if self._peek() != ")":
                raise ExpressionError(f"expected ')' at {self.position}")
            self.position += 1
            return value
        start = self.position
        while self._peek() and self._peek() in _DIGITS:
            self.position += 1
        digits = self.text[start : self.position]
        if not digits or (len(digits) > 1 and digits[0] == "0"):
            raise ExpressionError(f"expected an integer or '(' at {start}")
        self.integers.append(int(digits))
        return Fraction(int(digits))


def parse_expression(text: str, *, operators: str = "+-*", max_chars: int = 128) -> tuple[Fraction, tuple[int, ...]]:
    """Value of an arithmetic expression, and the integers it uses from left to right.

    Binary operators, parentheses, unsigned decimal integers and spaces only; the length bounds time, depth and the
    size of the value.

    Raises:
        ExpressionError: when ``text`` is longer than ``max_chars``, is no such expression, or divides by zero.
    """
    if len(text) > max_chars:
        raise ExpressionError(f"longer than {max_chars} characters")
    parser = _Parser(text, operators)
    value = parser.sum()
    parser.skip_spaces()
    if parser.position != len(parser.text):
        raise ExpressionError(f"unexpected {parser._peek()!r} at {parser.position}")
    return value, tuple(parser.integers)
