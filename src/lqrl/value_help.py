"""``--model.scheme.help`` and the like: the options of a value that belongs to the model or the data.

jsonargparse shows the options of a class that is named by its path. A plain value, such as `SamplingParams`, has no
path to name, and below ``--model`` its ``.help`` cannot be spelled.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Mapping, Sequence

from lqrl.quant.scheme import ADDITIONS, PRESETS, QuantScheme, TensorFormat

_WORD = re.compile(r"--(?P<root>\w+)\.(?:init_args\.)?(?P<name>\w+)\.help(?:=.*)?")


def value_help(words: Sequence[str], roots: Mapping[str, type]) -> str | None:
    """The help that ``words`` ask for, or ``None`` when they ask for none that is known here.

    Args:
        words: of the command line.
        roots: classes of ``--model`` and ``--data`` by name.
    """
    for word in words:
        asked = _WORD.fullmatch(word)
        if asked is None or asked["root"] not in roots:
            continue
        annotation = typing.get_type_hints(roots[asked["root"]].__init__).get(asked["name"])
        for kind in typing.get_args(annotation) or (annotation,):
            if inspect.isclass(kind) and dataclasses.is_dataclass(kind) and not inspect.isabstract(kind):
                return _describe(kind, f"--{asked['root']}.init_args.{asked['name']}")
    return None


def _describe(kind: type, option: str) -> str:
    lines = [f"{option}: {kind.__module__}.{kind.__qualname__}", "", inspect.getdoc(kind) or "", "", "Options:"]
    return "\n".join([*lines, *_options(kind, option), *(_presets(option) if kind is QuantScheme else [])])


def _options(kind: type, option: str) -> list[str]:
    lines = []
    for field in dataclasses.fields(kind):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        set_by = "required" if default is dataclasses.MISSING else f"default {default!r}"
        lines.append(f"  {option}.{field.name} ({field.type}, {set_by})")
    return lines


def _presets(option: str) -> list[str]:
    rows = [
        f"  {name:16} {s.weight or 'full precision'}; activations {s.activation or 'as they are'}"
        for name, s in PRESETS.items()
    ]
    return [
        "",
        f"Presets, as {option} NAME:",
        *rows,
        f"  and, after the name: {', '.join(f'+{name}' for name in ADDITIONS)}",
        "",
        "A preset with options:",
        f"""  {option}.name nf4 {option}.skip '["*.down_proj"]'""",
        "",
        f"A format spelled out, of {option}.weight, activation and kv_cache alike:",
        *_options(TensorFormat, f"{option}.weight"),
        "",
        inspect.getdoc(TensorFormat) or "",
    ]
