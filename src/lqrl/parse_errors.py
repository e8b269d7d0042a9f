"""The sentence in an error of the command line's parser, without the values that it was found in."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lqrl.extras import pip_install

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
_NO_CALLABLE = re.compile(r"Type .* expects a function or a callable class: (?P<why>.*)\. Got value: .*")
_NO_MODULE = re.compile(r"No module named '(?P<module>[^']+)'")
_NOT_OF_KIND = re.compile(r"Import path (?P<module>[\w.]+)\.(?P<name>\w+) does not correspond to a subclass of")
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
_FEW = 12  # classes that an error can list
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
    """An expected type, or a missing package, in the words of a recipe; what is no such sentence stays as it is."""
    callable_ = _NO_CALLABLE.fullmatch(text)
    text = callable_["why"] if callable_ is not None else text
    absent = _NO_MODULE.fullmatch(text)
    if absent is not None:
        return _missing(absent["module"]) or text
    found = _EXPECTED.fullmatch(text)
    if found is None:
        return text
    if found["kind"].startswith("typing"):
        words = [str(word) for word in ast.literal_eval(found["kind"].removeprefix("typing.Literal"))]
        kind = " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
    else:
        kind = _KINDS.get(found["kind"].removeprefix("<class '").removesuffix("'>"), found["kind"])
    return f"must be {kind}" + (f", got {found['value']}" if found["value"] is not None else "")


def _missing(module: str) -> str:
    """How to get a module of a package that is not installed; nothing where the package is."""
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is not None:
        return ""
    command = pip_install(package)
    if "'" in command:  # a version: lqrl knows the package
        return f"{package} is not installed: {command}"
    return (
        f"No module named '{package}': it is not installed, and no {package}.py is in the current directory; correct "
        "the name, or install the package that holds it"
    )


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


def explain(message: str, command: str, options: Sequence[str], words: Sequence[str], roots: Mapping[str, type]) -> str:
    """`sentence`, with the name that was probably meant and the command that lists the names.

    Args:
        message: of the parser.
        command: that was parsed, such as ``lqrl fit``.
        options: names that the parser knows, dashes included.
        words: of the command line.
        roots: what the options without a class above them are of, by name.
    """
    return "\n".join(f"{cause}{_advice(cause, command, options, words, roots)}" for cause in causes(message))


def _advice(cause: Cause, command: str, options: Sequence[str], words: Sequence[str], roots: Mapping[str, type]) -> str:
    owner = _import(cause.class_path)
    unknown, unrecognized = _UNKNOWN.search(cause.sentence), _UNRECOGNIZED.search(cause.sentence)
    wrong_kind = _NOT_OF_KIND.match(cause.sentence)
    required, no_attribute = _REQUIRED.search(cause.sentence), _NO_ATTRIBUTE.search(cause.sentence)
    more = ""
    if unknown and owner is not None:
        more = _closest(unknown["name"], list(inspect.signature(owner).parameters))
    elif unrecognized and owner is not None:  # the name is one below those of the class
        more = _below(unrecognized["name"].split("."), owner)
    elif unrecognized:
        more = _closest(f"--{unrecognized['name']}", options)
    elif no_attribute or wrong_kind:
        found = no_attribute or wrong_kind
        assert found is not None
        more = _instead(found["name"], _public_names(found["module"]), _kinds(cause, owner, roots))
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


def _instead(name: str, values: Mapping[str, object], kinds: Sequence[type]) -> str:
    """What was probably meant, of a module's ``values``: one that the option takes, or a module on the way to it."""
    fits = [n for n, v in values.items() if not kinds or (inspect.isclass(v) and issubclass(v, tuple(kinds)))]
    fits = [n for n in fits if not inspect.isabstract(values[n])]
    modules = [] if kinds and fits else [n for n, v in values.items() if inspect.ismodule(v)]
    close = _closest(name, fits) or _closest(name, modules)
    return close or (f"; there is {', '.join(fits)}" if kinds and 0 < len(fits) <= _FEW else "")


def _kinds(cause: Cause, owner: type | None, roots: Mapping[str, type]) -> list[type]:
    """The classes that an option may be of; none where that is not known."""
    if cause.option in roots:
        return [roots[cause.option]]
    option = cause.option.removeprefix(f"{cause.class_option}.")
    if owner is None:
        root, _, option = cause.option.partition(".")
        owner = roots.get(root)
    if owner is None or "." in option:
        return []
    try:
        hint = typing.get_type_hints(owner.__init__).get(option)
    except (NameError, AttributeError, TypeError):  # names that are imported for type checkers alone
        return []
    return [kind for kind in _classes(hint) if kind.__module__ not in ("builtins", "typing", "collections.abc")]


def _classes(hint: object) -> Iterator[type]:
    """The classes in a type hint; of a callable, what it makes."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is Callable:
        arguments = arguments[-1:]
    for argument in arguments:
        yield from _classes(argument)
    if inspect.isclass(hint) and not arguments:
        yield hint


def _public_names(module: str) -> dict[str, object]:
    try:
        found = importlib.import_module(module)
    except ImportError:
        return {}
    late = vars(found).get("__all__", ())  # some are imported when they are asked for
    return {name: getattr(found, name) for name in (*vars(found), *late) if not name.startswith("_")}


def _import(class_path: str) -> type | None:
    """The class of that name; ``None`` when there is none, which is then what the message says."""
    module, _, name = class_path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name, None) if module else None
    except ImportError:
        return None
    return found if inspect.isclass(found) else None
