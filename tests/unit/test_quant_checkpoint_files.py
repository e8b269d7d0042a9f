"""Which files of a directory are its checkpoint, and what a process that is killed while it exports leaves of them."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file
from test_quant_checkpoint import bits, built
from torch import Tensor

from lqrl.modeling.backbone import load_model
from lqrl.quant import QuantScheme
from lqrl.quant.checkpoint import load_quantized, resolve_scheme, save_quantized
from lqrl.quant.checkpoint_reader import holds_codes

INDEX, ONE = "model.safetensors.index.json", "model.safetensors"


def saved(directory: Path, name: str = "fp8_per_channel", shard: int = 10**9) -> dict[str, Tensor]:
    scheme = QuantScheme.preset(name)
    save_quantized(built(scheme), scheme, directory, export_dtype=torch.bfloat16, max_shard_bytes=shard)
    return read(directory)


def trained(scheme: QuantScheme):
    """The policy of `saved` with other weights."""
    policy = built(scheme)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.5)
    return policy


def read(directory: Path) -> dict[str, Tensor]:
    return dict(load_quantized(directory)[1])


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(bits(one[n]), bits(t)) for n, t in other.items())


# ------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize(
    ("shard", "stale"),
    [
        (50_000, ONE),
        (50_000, "model-00001-of-00009.safetensors"),
        (50_000, "model-part-00000.safetensors"),
        (10**9, "model-part-00000.safetensors"),
        (10**9, "model-00001-of-00002.safetensors"),
        (10**9, "model_old.safetensors"),
    ],
)
def test_files_beside_those_of_the_checkpoint_are_no_part_of_it(shard, stale, tmp_path):
    whole = saved(tmp_path, shard=shard)
    held = {name: tensor for path in tmp_path.glob("*.safetensors") for name, tensor in load_file(path).items()}
    save_file({name: torch.zeros_like(tensor) for name, tensor in held.items()}, tmp_path / stale)
    assert same(read(tmp_path), whole)


def test_the_index_says_which_of_two_files_holds_a_tensor(tmp_path):
    whole = saved(tmp_path, shard=50_000)
    path = max(tmp_path.glob("model-*.safetensors"))
    save_file(load_file(path) | {"model.embed_tokens.weight": torch.zeros(3)}, path)
    assert same(read(tmp_path), whole)


def emptied(directory: Path) -> None:
    for path in directory.glob("*.safetensors"):
        path.unlink()


def halved(directory: Path) -> None:
    path = min(directory.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def renamed(directory: Path) -> None:
    """A tensor of another name than the index has."""
    path = min(directory.glob("*.safetensors"))
    save_file({f"{name}.x": tensor for name, tensor in load_file(path).items()}, path)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no index": (lambda d: (d / INDEX).unlink(), f"neither {INDEX} nor {ONE}"),
    "no weights": (emptied, f"lacks model-00001-of-.*, which {INDEX} names"),
    "a cut file": (halved, "model-00001-of-.* is broken"),
    "other tensors": (renamed, f"more tensors that {INDEX} names"),
    "a cut index": (lambda d: (d / INDEX).write_text("{"), f"{INDEX} is not JSON"),
    "an index without a map": (lambda d: (d / INDEX).write_text("{}"), f"{INDEX} has no weight_map"),
    "an index of numbers": (lambda d: (d / INDEX).write_text('{"weight_map": {"a": 1}}'), "has no weight_map"),
    "an index of other folders": (lambda d: (d / INDEX).write_text('{"weight_map": {"a": "../a"}}'), "no weight_map"),
    "an index that is a list": (lambda d: (d / INDEX).write_text("[]"), f"{INDEX} holds a list, not an object"),
    "no config": (lambda d: (d / "config.json").unlink(), r"holds no config\.json"),
    "a cut config": (lambda d: (d / "config.json").write_text('{"a": '), r"config\.json is not JSON"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_checkpoint_that_is_not_whole_is_refused_with_the_way_out(name, tmp_path):
    breaks, message = BROKEN[name]
    saved(tmp_path, shard=50_000)
    breaks(tmp_path)
    for use in (resolve_scheme, load_quantized):
        with pytest.raises(ValueError, match=rf"{message}.*copy it again from where it is whole, or export it again"):
            use(tmp_path)


# ------------------------------------------------------------------------------------------------- a killed export


def killed(export: Callable[[], object], directory: Path, moment: int) -> bool:
    """Run ``export`` in a process that dies before its ``moment``-th change of a file; whether it did."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # a forked process has no other
        seen = 0

        def tick() -> None:
            nonlocal seen
            seen += 1
            if seen > moment:
                os._exit(9)

        def audit(event: str, arguments: tuple[object, ...]) -> None:
            written = event == "open" and "w" in str(arguments[1])
            if (written or event in ("os.rename", "os.remove", "os.mkdir")) and str(directory) in str(arguments[0]):
                tick()

        def save(*arguments: object, **options: object) -> None:
            tick()  # the library writes files that Python does not see
            save_file(*arguments, **options)  # type: ignore[arg-type]

        safetensors.torch.save_file = save
        sys.addaudithook(audit)
        code = 1
        try:
            export()
            code = 0
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9)
    return status == 9


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("fp8_per_channel", 10**9), ("int4_w4a16_g32", 50_000)),
        (("fp8_per_channel", 50_000), ("int4_w4a16_g32", 10**9)),
        (("fp8_per_channel", 50_000), ("fp8_per_channel", 30_000)),
        (("fp8_per_channel", 10**9), ("int8_w8a8", 10**9)),
    ],
)
def test_a_killed_export_leaves_the_old_one_or_none_or_the_new_one(before, after, tmp_path):
    """Never a part of each, and the next export is as one into an empty directory."""
    scheme = QuantScheme.preset(after[0])
    policy, states, moment, dies = trained(scheme), [], 0, True

    def export(directory: Path) -> None:
        save_quantized(policy, scheme, directory, export_dtype=torch.bfloat16, max_shard_bytes=after[1])

    export(tmp_path / "new")
    old, new = saved(tmp_path / "old", *before), read(tmp_path / "new")
    while dies:
        place = tmp_path / f"{moment}"
        shutil.copytree(tmp_path / "old", place)
        dies = killed(partial(export, place), place, moment)
        if holds_codes(place):
            found = read(place)
            assert same(found, old) or same(found, new)
            states.append("new" if same(found, new) else "old")
            load_model(place, dtype=torch.float32)
        else:
            states.append("none")
            assert not (place / "config.json").exists()
            with pytest.raises(ValueError, match=r"holds no config\.json.*export it again"):
                read(place)
        moment += 1
    assert sorted(states, key=["old", "none", "new"].index) == states
    assert {"old", "none", "new"} == set(states)
    for place in (tmp_path / "0", tmp_path / f"{states.index('none') - 1}", tmp_path / f"{states.index('none') + 1}"):
        export(place)
        assert contents(place) == contents(tmp_path / "new")


def test_an_export_whose_model_has_no_generation_config_leaves_none(tmp_path, monkeypatch):
    saved(tmp_path)
    scheme = QuantScheme.preset("int8_w8a8")
    policy = built(scheme)
    monkeypatch.setattr(policy, "generation_config", None)
    save_quantized(policy, scheme, tmp_path, export_dtype=torch.bfloat16)
    assert sorted(contents(tmp_path)) == ["config.json", ONE]
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["format"] == "int-quantized"
