"""What every benchmark refuses in its options alike: before a model is built, a child started or a heading printed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn


def refuse(sentence: str) -> NoReturn:
    """End the program with the exit status of a wrong option."""
    print(f"error: {sentence}", file=sys.stderr)
    raise SystemExit(2)


def at_least(least: int) -> Callable[[str], int]:
    """The argparse type of whole numbers from ``least`` on."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, not {text}")
        return int(text)

    return number


positive = at_least(1)


def duration(text: str) -> float:
    """The argparse type of times that are not over at once."""
    if not float(text) > 0:
        raise argparse.ArgumentTypeError(f"must be more than 0 seconds, not {text}")
    return float(text)


def dtype_name(text: str) -> str:
    """The argparse type of a dtype's name."""
    from lqrl.modeling.precision import parse_dtype

    return _checked(parse_dtype, text)


def scheme_name(text: str) -> str:
    """The argparse type of a quantization scheme's name."""
    from lqrl.quant.scheme import QuantScheme

    return _checked(QuantScheme.preset, text)


def scheme_name_or(*names: str) -> Callable[[str], str]:
    """The same where ``names`` are choices too."""
    return lambda text: text if text in names else scheme_name(text)


def _checked(parse: Callable[[str], object], text: str) -> str:
    try:
        parse(text)
    except ValueError as error:  # whose sentence argparse would drop
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def require(package: str, option: str, *folders: Path | None) -> None:
    """End the program where children that look into ``folders`` too, which ``option`` names, would miss ``package``."""
    if find_spec(package) is None and PathFinder.find_spec(package, [str(each) for each in folders if each]) is None:
        refuse(
            f"{package} is not installed; install it, say where it is with {option}, or ask for no row that needs it"
        )
