"""The sentence in an error of the command line's parser, without the values that it was found in."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib
import inspect
import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

_KEY = re.compile(r'Parser key "(?P<key>[^"]+)"(?: element \d+)?:\s*(?P<rest>.*)')
_CLASS = re.compile(r"Problem with given class_path '(?P<path>[^']+)':\s*(?P<rest>.*)")
# What frames the causes, and the causes that only say which other kind of value there could have been.
_FRAME = (
    "Does not validate against any of the Union subtypes",
    "Subtypes: ",
    "Errors:",
    "Given value",
    "Expected a path but ",
    "Expected a <class 'NoneType'>",
    "Subclass types expect one of",
    "a class path (str)",
    "a dict ",
)
_UNKNOWN = re.compile(r"Option '(?P<name>[^']+)' is not accepted")
_UNRECOGNIZED = re.compile(r"unrecognized arguments: --(?P<name>[^\s=]+)")
_REQUIRED = re.compile(r"the following arguments are required: (?P<names>.*)")
_NO_ATTRIBUTE = re.compile(r"module '(?P<module>[^']+)' has no attribute '(?P<name>[^']+)'")
_EXPECTED = re.compile(
    r"Expected an? (?P<kind><class '[\w.]+'>|typing\.Literal\[.*?\])(?:\. Got value: (?P<value>.*))?"
)
_KINDS = {
    "bool": "true or false",
    "int": "a whole number (int)",
    "float": "a number (float)",
    "str": "text",
    "tuple": "a list, such as [a, b]",
    "list": "a list, such as [a, b]",
    "collections.abc.Sequence": "a list, such as [a, b]",
}
_OTHER_KIND = re.compile(r"Expected an? |Subclasses are disabled |Not a valid subclass |Expected a Named")


@dataclass(frozen=True)
class Cause:
    """One reason why a value was refused.

    Attributes:
        option: dotted name of the option, as far as the parser says it.
        sentence: why.
        class_path: the class that refused it, or the empty string.
        class_option: dotted name of the option that is of this class.
    """

    option: str
    sentence: str
    class_path: str = ""
    class_option: str = ""

    def __str__(self) -> str:
        return f"{self.option}: {self.sentence}" if self.option else self.sentence


def causes(message: str) -> list[Cause]:
    """Why a value was refused, from jsonargparse's ``message``.

    It nests a message for every level of the configuration and for every type that a value could have had, and dumps
    the value at each. What is left are the innermost messages; of those the ones that say more than that another type
    was tried, if there are any. A message of another form is one cause, as it is.
    """
    if not (_KEY.search(message) or _CLASS.search(message) or _FRAME[0] in message):
        return [Cause("", message.strip())]
    found = list(dict.fromkeys(_innermost(message)))
    certain = [cause for cause in found if not _OTHER_KIND.match(cause.sentence)]
    # A part of a value was refused: that the whole is of no other kind does not matter.
    inner = [cause for cause in found if not any(c.option.startswith(f"{cause.option}.") for c in found)]
    chosen = certain or inner or [Cause("", message.strip())]
    return [replace(cause, sentence=_plain(cause.sentence)) for cause in chosen]


def _plain(text: str) -> str:
    """An expected type in the words of a recipe; what is no such sentence stays as it is."""
    found = _EXPECTED.fullmatch(text)
    if found is None:
        return text
    if found["kind"].startswith("typing"):
        words = [str(word) for word in ast.literal_eval(found["kind"].removeprefix("typing.Literal"))]
        kind = " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
    else:
        kind = _KINDS.get(found["kind"].removeprefix("<class '").removesuffix("'>"), found["kind"])
    return f"must be {kind}" + (f", got {found['value']}" if found["value"] is not None else "")


def _innermost(message: str) -> Iterator[Cause]:
    """The lines that are no frame, each with the options and the class above it; indentation says what is above."""
    above: list[tuple[int, str, str]] = []  # indentation, option, class
    for line in message.splitlines():
        text = line.lstrip(" -")
        indent = len(line) - len(text)
        if not text or text.startswith(_FRAME):
            continue
        above = [entry for entry in above if entry[0] < indent]
        key, path = _KEY.match(text), _CLASS.match(text)
        if key or path:
            above.append((indent, key["key"] if key else "", path["path"] if path else ""))
            text = (key or path)["rest"]  # type: ignore[index]
        if text and not text.startswith(_FRAME):
            option = ".".join(entry[1] for entry in above if entry[1])
            depth, path = next(((i, entry[2]) for i, entry in reversed(list(enumerate(above))) if entry[2]), (0, ""))
            yield Cause(option, text, path, ".".join(entry[1] for entry in above[:depth] if entry[1]))


def sentence(message: str) -> str:
    """``message`` as one line for each cause: the option, and why its value was refused."""
    return "\n".join(map(str, causes(message)))


def explain(message: str, command: str, options: Sequence[str], words: Sequence[str]) -> str:
    """`sentence`, with the name that was probably meant and the command that lists the names.

    Args:
        message: of the parser.
        command: that was parsed, such as ``lqrl fit``.
        options: names that the parser knows, dashes included.
        words: of the command line.
    """
    return "\n".join(f"{cause}{_advice(cause, command, options, words)}" for cause in causes(message))


def _advice(cause: Cause, command: str, options: Sequence[str], words: Sequence[str]) -> str:
    owner = _import(cause.class_path)
    unknown, unrecognized = _UNKNOWN.search(cause.sentence), _UNRECOGNIZED.search(cause.sentence)
    required, no_attribute = _REQUIRED.search(cause.sentence), _NO_ATTRIBUTE.search(cause.sentence)
    more = ""
    if unknown and owner is not None:
        more = _closest(unknown["name"], list(inspect.signature(owner).parameters))
    elif unrecognized and owner is not None:  # the name is one below those of the class
        more = _below(unrecognized["name"].split("."), owner)
    elif unrecognized:
        more = _closest(f"--{unrecognized['name']}", options)
    elif no_attribute:
        more = _closest(no_attribute["name"], _public_names(no_attribute["module"]))
    elif required and cause.option:
        more = "; set " + " and ".join(f"--{cause.option}.{name}" for name in required["names"].split(", "))
    elif cause.sentence.endswith("expected one argument"):
        pairs = zip(words, [*words[1:], "--"], strict=True)
        more = f" after {', '.join(w for w, n in pairs if w.startswith('--') and '=' not in w and n.startswith('--'))}"
    lists = f"--{cause.class_option}.help {cause.class_path}" if owner is not None and cause.class_option else "--help"
    return f"{more} ({command} {lists} lists what there is)"


def _below(path: Sequence[str], owner: type) -> str:
    """What was probably meant by the first name of ``path`` that the class, or the class of its option, has not."""
    names = list(inspect.signature(owner).parameters)
    if path[0] not in names:
        return _closest(path[0], names) or f"; {owner.__name__} has {', '.join(names)}"
    try:
        hint = typing.get_type_hints(owner.__init__).get(path[0])
    except (NameError, AttributeError, TypeError):  # names that are imported for type checkers alone
        hint = None
    inner = next((each for each in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(each)), None)
    return _below(path[1:], inner) if isinstance(inner, type) and len(path) > 1 else ""


def _closest(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _public_names(module: str) -> list[str]:
    try:
        return [name for name in vars(importlib.import_module(module)) if not name.startswith("_")]
    except ImportError:
        return []


def _import(class_path: str) -> type | None:
    """The class of that name; ``None`` when there is none, which is then what the message says."""
    module, _, name = class_path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name, None) if module else None
    except ImportError:
        return None
    return found if inspect.isclass(found) else None
