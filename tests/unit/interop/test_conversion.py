"""Any kind of checkpoint into any other: bits, types, names, and what is refused. The readers are stock tools."""

from __future__ import annotations

import collections
import copy
import errno
import json
import os
import pathlib
import warnings
import zipfile
from typing import Any

import foreign_samples
import pytest
import states
import torch

import asyncckpt
from asyncckpt import PerRank, RankInfo, SyncCheckpointer
from asyncckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    DuplicateNameError,
    MissingKeysError,
    SaveFailedError,
    UnsupportedLeafError,
)
from asyncckpt.format.checksums import BLOCK_NBYTES
from asyncckpt.interop import convert, copy_pipeline, publish, verify_target
from asyncckpt.interop.diff import compare
from asyncckpt.loading.byte_ranges import slab_slices
from asyncckpt.storage.files import Files

pytest.importorskip("numpy")
pytest.importorskip("safetensors")

SOURCES = ("asyncckpt", *foreign_samples.KINDS)
TARGETS = ("asyncckpt", "dcp", "torch", "safetensors", "hf")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """One checkpoint of each kind, from its own tool."""
    root = tmp_path_factory.mktemp("sources")
    found = {}
    for kind in foreign_samples.KINDS:
        torch.manual_seed(0)
        found[kind] = foreign_samples.write(kind, root)
    torch.manual_seed(0)
    found["asyncckpt"] = root / "ours"
    save(foreign_samples.training_state(), root / "ours")
    return found


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def save(state: Any, path: pathlib.Path, **kw: Any) -> pathlib.Path:
    with SyncCheckpointer(rank_info=RankInfo(0, 1)) as checkpointer:
        checkpointer.save(state, path, **kw)
    return path


def chosen(source: str, to: str) -> dict[str, Any]:
    """Arguments that make of a training state what safetensors can hold."""
    if to in ("safetensors", "hf") and source not in ("safetensors", "hf"):
        return {"keys": ["model"], "key_map": lambda fqn: fqn.removeprefix("model.")}
    return {}


def leftovers(directory: pathlib.Path) -> list[str]:
    return [name for name in os.listdir(directory) if "converting" in name]


# ---- every kind to every kind ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_every_kind_becomes_every_kind_bit_for_bit(
    source: str, to: str, sources: dict[str, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "out"
    report = asyncckpt.convert(sources[source], path, to=to, **chosen(source, to))
    assert report.to == asyncckpt.open_checkpoint(path).kind == to
    assert not leftovers(tmp_path)
    torch.manual_seed(0)
    model = foreign_samples.model()
    found = read_by_stock_tools(to, path)
    weights = found.get("model", found)
    for name, tensor in model.items():
        if name == "parameter":
            assert weights[name].shape == tensor.shape
        else:
            states.assert_same(weights[name], tensor.detach().contiguous(), name)
    if "model" in found:
        assert (found["step"], found["name"], found["big"]) == (7, "grüße\n", 1 << 70)
        assert found["optim"]["param_groups"][0]["lr"] == 0.1


def read_by_stock_tools(to: str, path: pathlib.Path) -> Any:
    if to == "torch":
        return torch.load(path, weights_only=True)
    if to == "dcp":
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp_to_torch_save(str(path), str(path) + ".pt")
        return torch.load(str(path) + ".pt", weights_only=True)
    from safetensors.torch import load_file

    if to == "safetensors":
        return load_file(path)
    if to == "hf":
        return {name: t for file in sorted(path.glob("*.safetensors")) for name, t in load_file(file).items()}
    return asyncckpt.load(path)


@pytest.mark.parametrize("source", ["asyncckpt", "torch", "legacy"])
def test_types_aliases_and_keys_survive_where_the_target_has_them(
    source: str, sources: dict[str, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    for to, load in (("torch", lambda p: torch.load(p, weights_only=True)), ("asyncckpt", asyncckpt.load)):
        asyncckpt.convert(sources[source], tmp_path / to, to=to)
        found = load(tmp_path / to)
        assert found["model"]["tied"] is found["model"]["large"]
        assert found["model"]._metadata == {"": {"version": 1}, "bn": {"version": 2}}
        assert list(found["optim"]["state"]) == [0, 1]
        assert found["optim"]["state"][1] == {}
        assert found["optim"]["param_groups"][0]["betas"] == (0.9, 0.999)
        expected = foreign_samples.plain(foreign_samples.training_state())
        for key in ("half", "device", "size", "raw", "array", "complex", "members"):
            assert type(found[key]) is type(expected[key])
            assert found[key] == expected[key]
        assert type(found["mixed"][2]["deep"]) is tuple


def test_stock_dcp_load_finds_what_it_looks_for(sources: dict[str, pathlib.Path], tmp_path: pathlib.Path) -> None:
    report = asyncckpt.convert(sources["asyncckpt"], tmp_path / "d", to="dcp", max_shard_bytes=500_000)
    assert len(list((tmp_path / "d").glob("*.distcp"))) > 1
    target: Any = copy.deepcopy(foreign_samples.plain(foreign_samples.training_state()))
    target["step"], target["model"]["large"] = 0, torch.zeros(300, 1000)
    foreign_samples.load_dcp(target, tmp_path / "d")
    assert target["step"] == 7
    states.assert_same(target["model"]["large"], foreign_samples.model()["large"])
    told = "; ".join(report.changed)
    assert "optim.state" in told
    assert "model" in told
    tied = asyncckpt.load(tmp_path / "d")["model"]
    assert tied["tied"] is tied["large"], "tied tensors share their item"


def test_a_hugging_face_directory_has_shards_an_index_and_its_other_files(
    sources: dict[str, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    report = asyncckpt.convert(sources["hf"], tmp_path / "hf", to="hf", max_shard_bytes=100_000)
    assert report.copied == ("config.json",)
    assert (tmp_path / "hf" / "config.json").read_text() == (sources["hf"] / "config.json").read_text()
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    sizes = {name: t.numel() * t.itemsize for name, t in foreign_samples.model().items()}
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert set(index["weight_map"]) == set(sizes)
    for file in set(index["weight_map"].values()):
        held = [name for name, where in index["weight_map"].items() if where == file]
        assert sum(sizes[name] for name in held) <= 100_000 or len(held) == 1
    small = asyncckpt.convert(sources["hf"], tmp_path / "one", to="hf")
    assert sorted(os.listdir(tmp_path / "one")) == ["config.json", "model.safetensors"]
    assert small.tensors == len(sizes)


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
def test_every_dtype_of_torch_passes_through_torch_and_dcp_files(tmp_path: pathlib.Path) -> None:
    state = {str(d): states.tensor_of(d, (3, 5), n) for n, d in enumerate(states.ALL_DTYPES)}
    save(state, tmp_path / "ours")
    for to in ("torch", "dcp", "asyncckpt"):
        asyncckpt.convert(tmp_path / "ours", tmp_path / to, to=to)
        asyncckpt.convert(tmp_path / to, tmp_path / f"{to}-back", to="asyncckpt")
        states.assert_same(asyncckpt.load(tmp_path / f"{to}-back"), state)
    states.assert_same(torch.load(tmp_path / "torch", weights_only=True), state)


def test_a_mapped_tensor_of_a_converted_dcp_directory(sources: dict[str, pathlib.Path], tmp_path: pathlib.Path) -> None:
    asyncckpt.convert(sources["asyncckpt"], tmp_path / "d", to="dcp")
    mapped = asyncckpt.open_checkpoint(tmp_path / "d").tensor("model.large", mmap=True)
    states.assert_same(mapped.clone(), foreign_samples.model()["large"])
    assert mapped.untyped_storage().nbytes() >= mapped.nbytes


def test_metadata_and_step_go_from_ours_to_ours(tmp_path: pathlib.Path) -> None:
    save({"x": torch.ones(2)}, tmp_path / "a", step=41, metadata={"loss": 0.5})
    asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="asyncckpt")
    opened = asyncckpt.open_checkpoint(tmp_path / "b")
    assert (opened.step, opened.metadata) == (41, {"loss": 0.5})
    assert "loss" in asyncckpt.convert(tmp_path / "a", tmp_path / "c", to="torch").changed[0]
    asyncckpt.convert(tmp_path / "a", tmp_path / "d", to="safetensors")
    assert json.loads(asyncckpt.open_checkpoint(tmp_path / "d").metadata["asyncckpt_metadata"]) == {"loss": 0.5}


# ---- names ----------------------------------------------------------------------------------------------------------


def test_key_map_renames_in_place_and_makes_dicts_of_what_is_left(tmp_path: pathlib.Path) -> None:
    state = {"model": {"module.a": torch.ones(1), "b": torch.zeros(2)}, "opt": {"x": {"y": torch.ones(3)}}, "l": [1]}
    save(state, tmp_path / "a")
    table = {"model.module.a": "model.a", "opt.x.y": "moved"}
    asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="torch", key_map=table)
    found = torch.load(tmp_path / "b", weights_only=True)
    assert set(found) == {"model", "l", "moved"}
    assert set(found["model"]) == {"a", "b"}


@pytest.mark.parametrize("table", [{"a": "b"}, {"a": "c"}, {"a": "q", "b": "q"}])
def test_key_map_that_puts_two_leaves_in_one_place_is_refused(table: dict[str, str], tmp_path: pathlib.Path) -> None:
    save({"a": torch.ones(1), "b": torch.ones(1), "c": {"d": torch.ones(1)}}, tmp_path / "x")
    with pytest.raises(DuplicateNameError):
        asyncckpt.convert(tmp_path / "x", tmp_path / "y", to="asyncckpt", key_map=table)
    assert not (tmp_path / "y").exists()


def test_versions_of_a_module_that_renaming_emptied_are_reported(
    sources: dict[str, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    for to in ("torch", "safetensors"):
        report = asyncckpt.convert(sources["torch"], tmp_path / to, to=to, **chosen("torch", "safetensors"))
        assert any("_metadata of model" in line for line in report.changed)


def test_keys_choose_and_unknown_ones_are_named(tmp_path: pathlib.Path) -> None:
    save({"a": {"x": torch.ones(1), "n": 1}, "b": torch.ones(2)}, tmp_path / "s")
    report = asyncckpt.convert(tmp_path / "s", tmp_path / "t", to="torch", keys="a")
    assert (report.tensors, report.objects) == (1, 1)
    assert list(torch.load(tmp_path / "t", weights_only=True)) == ["a"]
    with pytest.raises(MissingKeysError) as caught:
        asyncckpt.convert(tmp_path / "s", tmp_path / "u", to="torch", keys=["a", "nope"])
    assert caught.value.keys == ["nope"]  # type: ignore[attr-defined]


# ---- refused by name ------------------------------------------------------------------------------------------------


def test_what_safetensors_cannot_hold_is_refused_by_name_or_left_out_and_said(tmp_path: pathlib.Path) -> None:
    state = {"w": torch.ones(2), "c": torch.ones(2, dtype=torch.complex128), "step": 3, "name": "x"}
    save(state, tmp_path / "a")
    with pytest.raises(UnsupportedLeafError) as caught:
        asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="safetensors")
    for word in ("c: ", "complex128", "step: ", "name: ", "partial"):
        assert word in str(caught.value)
    assert not (tmp_path / "b").exists()
    report = asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="safetensors", partial=True)
    assert report.left_out == ("c", "step", "name")
    assert list(asyncckpt.load(tmp_path / "b")) == ["w"]


def test_what_torch_does_not_read_back_safely_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    import datetime

    save({"w": torch.ones(2), "when": datetime.date(2024, 1, 1), "cut": slice(1)}, tmp_path / "a")
    for to in ("torch", "dcp"):
        with pytest.raises(UnsupportedLeafError, match="when: ") as caught:
            asyncckpt.convert(tmp_path / "a", tmp_path / to, to=to)
        assert "cut: " in str(caught.value)
        assert asyncckpt.convert(tmp_path / "a", tmp_path / to, to=to, partial=True).left_out == ("when", "cut")


@pytest.mark.parametrize("to", ["asyncckpt", "torch", "dcp"])
def test_what_was_the_only_rank_s_own_is_everybody_s_and_that_is_said(to: str, tmp_path: pathlib.Path) -> None:
    state = {"w": torch.ones(2), "rng": PerRank({"s": torch.ones(3), "n": 1})}
    save(state, tmp_path / "a")
    report = asyncckpt.convert(tmp_path / "a", tmp_path / "b", to=to)
    assert report.tensors == 2
    assert "what was the only rank's own (PerRank) is everybody's: rng" in report.changed
    states.assert_same(asyncckpt.load(tmp_path / "b"), {"w": torch.ones(2), "rng": {"s": torch.ones(3), "n": 1}})
    assert asyncckpt.convert(tmp_path / "a", tmp_path / "c", to=to, keys=["w"]).changed == ()


def test_numpy_arrays_become_tensors_and_it_is_said(tmp_path: pathlib.Path) -> None:
    import numpy as np

    save({"a": np.arange(5.0), "big": bytes(100_000)}, tmp_path / "a")
    report = asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="torch")
    found = torch.load(tmp_path / "b", weights_only=True)
    assert torch.equal(found["a"], torch.arange(5.0, dtype=torch.float64))
    assert found["big"] == bytes(100_000)
    assert "numpy" in report.changed[0]
    asyncckpt.convert(tmp_path / "a", tmp_path / "c", to="asyncckpt")
    states.assert_same(asyncckpt.load(tmp_path / "c"), asyncckpt.load(tmp_path / "a"))


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"to": "zip"}, "to"),
        ({"to": "torch", "max_shard_bytes": 10}, "max_shard_bytes"),
        ({"to": "hf", "max_shard_bytes": 0}, "max_shard_bytes"),
        ({"to": "torch", "threads": 0}, "threads"),
        *(
            ({"to": "torch", "key_map": table}, "key_map")
            for table in ("x", [1], {"model.large": 1}, {"model.large": ""}, lambda fqn: 1, lambda fqn: "")
        ),
        *(({"to": "torch", "keys": keys}, "keys") for keys in (7, [7])),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    arguments: dict[str, Any], field: str, sources: dict[str, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        asyncckpt.convert(sources["torch"], tmp_path / "x", **arguments)
    assert caught.value.field == field  # type: ignore[attr-defined]
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("how", ["keys", "rename", "partial"])
def test_what_stays_of_a_list_keeps_its_name(how: str, to: str, tmp_path: pathlib.Path) -> None:
    layers: list[Any] = [torch.full((2,), float(n)) for n in range(4)]
    chosen: dict[str, Any] = {"keys": ["layers.1", "layers.3"]}
    wanted = {"layers.1": 1.0, "layers.3": 3.0}
    if how == "rename":
        chosen = {"key_map": {"layers.0": "head", "layers.2": "layers2"}}
        wanted |= {"head": 0.0, "layers2": 2.0}
    elif how == "partial":
        layers[0] = layers[2] = slice(1, 2)
        chosen = {"partial": True}
    save({"layers": layers}, tmp_path / "a")
    report = asyncckpt.convert(tmp_path / "a", tmp_path / "b", to=to, **chosen)
    with asyncckpt.open_checkpoint(tmp_path / "b") as found:
        for name, value in wanted.items():
            assert float(found.tensor(name)[0]) == value, name
    if how == "partial" and to == "asyncckpt":
        assert not report.left_out
        return
    if to in ("torch", "asyncckpt"):
        assert list(asyncckpt.load(tmp_path / "b")["layers"]) == [1, 3]
        assert any("layers" in line and "lack" in line for line in report.changed)
    if to in ("safetensors", "hf"):
        assert set(asyncckpt.load(tmp_path / "b")) == set(wanted)


def test_the_members_of_a_list_that_is_a_file_are_chosen_by_number(tmp_path: pathlib.Path) -> None:
    torch.save([torch.full((2,), float(n)) for n in range(3)], tmp_path / "a")
    report = asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="torch", keys=["1"])
    assert list(torch.load(tmp_path / "b")) == [1]
    assert report.changed == ("a list became a dict of its members' numbers: the top level",)


@pytest.mark.parametrize("to", ["torch", "dcp", "asyncckpt"])
def test_sets_whose_order_changes_are_the_same_sets(to: str, tmp_path: pathlib.Path) -> None:
    found = next(
        s for n in range(1000) if list(s := {n * 7919 % 4001, 0, 8, 16, n, 3 * n, 64 + n}) != list(set(list(s)))
    )
    torch.save({"s": found, "x": torch.ones(1)}, tmp_path / "a")
    asyncckpt.convert(tmp_path / "a", tmp_path / "b", to=to)
    assert asyncckpt.load(tmp_path / "b")["s"] == found


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_numpy_scalars_are_refused_by_name(to: str, tmp_path: pathlib.Path) -> None:
    numpy = pytest.importorskip("numpy")
    torch.save({"lr": numpy.float64(1.5), "deep": [(numpy.int64(1),)], "x": torch.ones(1)}, tmp_path / "a")
    with pytest.raises(UnsupportedLeafError, match=r"numpy\.scalar") as caught:
        asyncckpt.convert(tmp_path / "a", tmp_path / "b", to=to)
    assert "lr" in str(caught.value)
    assert set(asyncckpt.convert(tmp_path / "a", tmp_path / "b", to=to, partial=True).left_out) == {"lr", "deep"}
    assert asyncckpt.convert(tmp_path / "a", tmp_path / "c", to="asyncckpt").objects == 2


@pytest.mark.parametrize("key", ["\ud800", 1 << 70, -(1 << 64)])
@pytest.mark.parametrize("to", TARGETS)
def test_keys_that_a_target_cannot_hold_are_named(key: Any, to: str, tmp_path: pathlib.Path) -> None:
    torch.save({"a": {key: torch.ones(1)}}, tmp_path / "a")
    if to in ("torch", "dcp") or (to != "asyncckpt" and type(key) is int):
        asyncckpt.convert(tmp_path / "a", tmp_path / "b", to=to)
        if to == "torch":
            assert list(torch.load(tmp_path / "b")["a"]) == [key]
        return
    with pytest.raises(UnsupportedLeafError, match="UTF-8"):
        asyncckpt.convert(tmp_path / "a", tmp_path / "b", to=to)
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("to", ["safetensors", "hf", "dcp"])
def test_empty_dicts_that_vanish_are_reported(to: str, tmp_path: pathlib.Path) -> None:
    torch.save({"x": torch.ones(1), "state": {}, "model": {"sub": {}}}, tmp_path / "a")
    report = asyncckpt.convert(tmp_path / "a", tmp_path / "b", to=to)
    assert "empty dicts are not kept: model.sub, state" in report.changed


def test_lists_that_lack_the_empty_dicts_in_them_are_reported(tmp_path: pathlib.Path) -> None:
    one = torch.ones(1)
    state = {"a": [{}], "b": [[{}, one]], "c": [1, {}], "whole": ({}, one), "full": [{"x": one}], "d": {"e": {}}}
    torch.save(state, tmp_path / "a")
    changed = asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="dcp").changed
    assert "lists are gone, or lack members, where empty dicts were: a, b, b.0, c" in changed
    assert "empty dicts are not kept: a.0, b.0.0, c.1, d.e" in changed
    assert asyncckpt.load(tmp_path / "b")["whole"][0] == {}
    assert not asyncckpt.convert(tmp_path / "a", tmp_path / "c", to="torch").changed
    assert asyncckpt.load(tmp_path / "c")["a"] == [{}]


@pytest.mark.parametrize("to", ["torch", "dcp", "asyncckpt"])
def test_what_is_read_as_something_plainer_is_reported(to: str, tmp_path: pathlib.Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.is_sharded, parameter.group = True, "x"  # type: ignore[attr-defined]
    defaults: Any = collections.defaultdict(list)
    defaults["x"] = torch.ones(1)
    path = pathlib.PurePosixPath
    state = {
        "p": parameter,
        "seen": collections.Counter("aab"),
        "defaults": defaults,
        "run": {"out": path("/data/a"), "all": [path("a/b"), path()]},
        "by_path": {path("/x"): torch.ones(3)},
        "flat": [collections.Counter("b"), {"k": {path("y")}}],
        "plain": {"w": torch.ones(1)},
    }
    torch.save(state, tmp_path / "a")
    report = asyncckpt.convert(tmp_path / "a", tmp_path / "b", to=to)
    lost = set() if to == "asyncckpt" else {"a defaultdict became a dict: defaults"}
    lost |= {"a Counter became a dict: flat.0, seen"} if to == "dcp" else set()
    assert set(report.changed) == {
        *lost,
        "a Parameter became a tensor: p",
        "attributes of tensors are not kept: p (is_sharded, group)",
        "a path became a text: run.out, run.all, by_path, flat.1.k",
    }
    found = asyncckpt.load(tmp_path / "b")
    assert found["run"] == {"out": "/data/a", "all": ["a/b", "."]}
    assert type(found["run"]["out"]) is type(next(iter(found["by_path"]))) is str
    assert (found["seen"], type(found["seen"])) == ({"a": 2, "b": 1}, dict if to == "dcp" else collections.Counter)
    assert type(found["defaults"]) is (collections.defaultdict if to == "asyncckpt" else dict)
    assert to != "asyncckpt" or found["defaults"].default_factory is list
    assert found["flat"] == [{"b": 1}, {"k": {"y"}}]
    assert not asyncckpt.convert(tmp_path / "a", tmp_path / "c", to=to, keys=["plain"]).changed


@pytest.mark.parametrize("to", TARGETS)
def test_what_the_top_level_was_is_reported(to: str, tmp_path: pathlib.Path) -> None:
    tensor = torch.ones(2)
    found = []
    for number, value in enumerate(([tensor], (tensor, tensor + 1), tensor, collections.Counter(a=tensor))):
        torch.save(value, tmp_path / f"{number}")
        keys = ["a"] if isinstance(value, dict) else None
        report = asyncckpt.convert(tmp_path / f"{number}", tmp_path / f"{number}.out", to=to, keys=keys)
        found.append([said for said in report.changed if said.endswith(": the top level")])
    others = ["keys that are no texts became texts in: the top level"] if to == "dcp" else []
    assert found == [
        [*others, "a list became a dict of its members' numbers: the top level"],
        [*others, "a tuple became a dict of its members' numbers: the top level"],
        ["what was no dict is its member 'value': the top level"],
        ["a Counter became a dict: the top level"] if to not in ("torch", "asyncckpt") else [],
    ]


def test_what_holds_a_chosen_leaf_is_reported(tmp_path: pathlib.Path) -> None:
    torch.save({"c": collections.Counter(a=torch.ones(1), b=2), "d": collections.Counter("x")}, tmp_path / "a")
    report = asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="dcp", keys=["c.a"])
    assert report.changed == ("a Counter became a dict: c",)


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("to", TARGETS)
def test_what_a_tensor_was_besides_its_elements_is_reported(to: str, older: bool, tmp_path: pathlib.Path) -> None:
    base = torch.arange(48.0)
    state = {
        "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "graph": torch.ones(3, requires_grad=True),
        "image": base.view(1, 4, 3, 4).contiguous(memory_format=torch.channels_last),
        "learnt": torch.nn.Parameter(base.view(6, 8).t()),
        "plain": base[:4],
        "every_second": base[::2],
        "same": torch.ones(1).expand(5),
    }
    torch.save(state, tmp_path / "a", _use_new_zipfile_serialization=not older)
    report = asyncckpt.convert(tmp_path / "a", tmp_path / "b", to=to)
    assert set(report.changed) >= {
        "a Parameter became a tensor: frozen, learnt",
        "requires_grad is not kept: graph",
        "a tensor that was strided otherwise became row-major: image, learnt, every_second, same",
    }
    assert not any("plain" in said for said in report.changed if "row-major" in said or "grad" in said)
    for name, tensor in read_by_stock_tools(to, tmp_path / "b").items():
        states.assert_same(tensor, state[name].detach().contiguous())
    again = asyncckpt.convert(tmp_path / "b", tmp_path / "c", to="torch").changed
    assert not [said for said in again if "Parameter" in said or "requires_grad" in said or "row-major" in said]


@pytest.mark.parametrize("to", TARGETS)
def test_views_of_the_same_elements_are_reported(to: str, tmp_path: pathlib.Path) -> None:
    flat = torch.arange(32.0)
    tied = torch.ones(3)
    state = {
        "q": flat[:12],
        "k": flat[8:16],
        "v": flat[16:20],
        "w": flat[20:].view(3, 4),
        "wt": flat[20:].view(3, 4).t(),
    }
    torch.save({**state, "tied": tied, "again": tied, "none": flat[:0]}, tmp_path / "a")
    report = asyncckpt.convert(tmp_path / "a", tmp_path / "b", to=to)
    assert "views of the same elements are stored apart: k, q, w, wt" in report.changed


# ---- all or nothing -------------------------------------------------------------------------------------------------


def test_a_missing_source_or_directory_is_not_found(tmp_path: pathlib.Path) -> None:
    for src, dst in ((tmp_path / "no", tmp_path / "x"), (tmp_path / "no", tmp_path / "a" / "x")):
        with pytest.raises(CheckpointNotFoundError):
            asyncckpt.convert(src, dst, to="torch")


@pytest.mark.parametrize("to", TARGETS)
def test_an_existing_target_is_left_alone_unless_told(
    to: str, sources: dict[str, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "out"
    asyncckpt.convert(sources["safetensors"], path, to=to, keys=["zero_dim"])
    with pytest.raises(CheckpointExistsError):
        asyncckpt.convert(sources["safetensors"], path, to=to)
    assert list(asyncckpt.load(path)) == ["zero_dim"]
    asyncckpt.convert(sources["safetensors"], path, to=to, keys=["large"], overwrite=True)
    assert list(asyncckpt.load(path)) == ["large"]
    assert os.listdir(tmp_path) == ["out"]


def test_overwrite_never_replaces_what_is_no_checkpoint(
    sources: dict[str, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    (tmp_path / "letter").write_text("dear")
    for path, to in ((tmp_path / "home", "dcp"), (tmp_path / "letter", "torch"), (tmp_path / "home", "torch")):
        with pytest.raises(CheckpointExistsError):
            asyncckpt.convert(sources["safetensors"], path, to=to, overwrite=True)
    assert (tmp_path / "home" / "letter.txt").read_text() == (tmp_path / "letter").read_text() == "dear"


@pytest.mark.parametrize("what", ["zip", "script", "cut", "empty"])
def test_overwrite_never_replaces_an_archive_that_torch_save_did_not_write(
    what: str, sources: dict[str, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "thesis.zip"
    names = {"zip": ["thesis.tex"], "script": ["a/data.pkl", "a/constants.pkl"], "cut": ["a/data.pkl"], "empty": []}
    with zipfile.ZipFile(path, "w") as file:
        for name in names[what]:
            file.writestr(name, b"dear" * 100)
    if what == "cut":
        path.write_bytes(path.read_bytes()[:-30])
    before = path.read_bytes()
    with pytest.raises(CheckpointExistsError):
        asyncckpt.convert(sources["safetensors"], path, to="safetensors", overwrite=True)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "names",
    [
        ["manifest.json", "src/a.js"],
        ["manifest.json", "index.html"],
        [".metadata/x", "notes.txt"],
        [".metadata", "__0_0.distcp", "thesis.tex"],
        [".metadata", "__0_0.distcp", "logs/a"],
        ["model.safetensors", "thesis.tex"],
        ["model.safetensors", "config.json", "other/precious"],
    ],
)
def test_overwrite_never_takes_what_lies_beside_a_checkpoint(
    names: list[str], sources: dict[str, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    for name in names:
        (tmp_path / "x" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "x" / name).write_text("dear")
    for to in TARGETS:
        with pytest.raises(CheckpointExistsError):
            asyncckpt.convert(sources["hf"], tmp_path / "x", to=to, overwrite=True)
    with pytest.raises(CheckpointExistsError):
        asyncckpt.dcp.torch_save_to_dcp(sources["torch"], tmp_path / "x")
    assert all((tmp_path / "x" / name).read_text() == "dear" for name in names)
    assert os.listdir(tmp_path) == ["x"]


def test_overwrite_of_a_link_names_what_it_leads_to(sources: dict[str, pathlib.Path], tmp_path: pathlib.Path) -> None:
    asyncckpt.convert(sources["hf"], tmp_path / "x", to="asyncckpt")
    (tmp_path / "latest").symlink_to("x")
    with pytest.raises(CheckpointExistsError, match=f"symbolic link.*{tmp_path / 'x'}$"):
        asyncckpt.convert(sources["torch"], tmp_path / "latest", to="asyncckpt", overwrite=True)
    assert os.readlink(tmp_path / "latest") == "x"
    assert asyncckpt.load(tmp_path / "latest").keys() == asyncckpt.load(tmp_path / "x").keys()


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("overwrite", [False, True])
def test_what_comes_into_the_target_meanwhile_is_left_alone(
    to: str,
    overwrite: bool,
    sources: dict[str, pathlib.Path],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = convert.verify_bytes
    if overwrite:
        asyncckpt.convert(sources["hf"], tmp_path / "x", to="dcp")
    else:
        (tmp_path / "x").mkdir()

    def meanwhile(*arguments: Any) -> None:
        real(*arguments)
        (tmp_path / "x" / "precious").write_text("dear")

    monkeypatch.setattr(convert, "verify_bytes", meanwhile)
    with pytest.raises(CheckpointExistsError, match="precious" if overwrite else "meanwhile"):
        asyncckpt.convert(sources["hf"], tmp_path / "x", to=to, overwrite=overwrite)
    assert (tmp_path / "x" / "precious").read_text() == "dear"
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("to", TARGETS)
def test_an_empty_directory_gives_way(to: str, sources: dict[str, pathlib.Path], tmp_path: pathlib.Path) -> None:
    (tmp_path / "x").mkdir()
    asyncckpt.convert(sources["hf"], tmp_path / "x", to=to)
    assert asyncckpt.load(tmp_path / "x")
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("step", ["_replace", "fsync_directory"])
@pytest.mark.parametrize("to", TARGETS)
def test_an_empty_directory_stands_again_after_a_failure(
    step: str, to: str, sources: dict[str, pathlib.Path], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").mkdir(0o750)

    def fail(*arguments: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(publish, step, fail)
    with pytest.raises(SaveFailedError):
        asyncckpt.convert(sources["hf"], tmp_path / "x", to=to)
    assert os.listdir(tmp_path) == ["x"]
    assert os.listdir(tmp_path / "x") == []
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("kind", ["torch", "safetensors", "dcp"])
@pytest.mark.parametrize("by", ["rename", "rewrite"])
def test_a_source_that_is_replaced_meanwhile_is_never_mixed_with_what_replaces_it(
    kind: str, by: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_pipeline, "WINDOW_NBYTES", BLOCK_NBYTES)
    for value in (1.0, 2.0):
        (tmp_path / str(value)).mkdir()
        state = {f"t{n}": torch.full((1 << 15,), value) for n in range(60)}
        torch.save(state, tmp_path / f"{value}.pt")
        if kind == "torch":
            torch.save(state, tmp_path / str(value) / "x")
        else:
            asyncckpt.convert(tmp_path / f"{value}.pt", tmp_path / str(value) / "x", to=kind)
    source, other = tmp_path / "1.0" / "x", tmp_path / "2.0" / "x"
    if kind == "dcp":
        source, other = source / "__0_0.distcp", other / "__0_0.distcp"

    def progress(done: int, _: int) -> None:
        if done > 300_000 and other.exists():
            if by == "rewrite":
                source.write_bytes(other.read_bytes())
                other.unlink()
            else:
                os.replace(other, source)

    (tmp_path / "out").mkdir()
    said = "while it was read" + ("|ends early|cut short" if by == "rewrite" else "")
    with pytest.raises(CorruptCheckpointError, match=said):
        asyncckpt.convert(tmp_path / "1.0" / "x", tmp_path / "out" / "y", to="torch", progress=progress)
    assert not os.listdir(tmp_path / "out")


def test_an_open_file_that_is_replaced_is_not_read_by_the_old_structure(tmp_path: pathlib.Path) -> None:
    for name, value in (("x", 1.0), ("y", 2.0)):
        (tmp_path / name).mkdir()
        torch.save({"a": torch.full((9,), value), "b": torch.full((9,), value)}, tmp_path / name / "x")
    with asyncckpt.open_checkpoint(tmp_path / "x" / "x") as opened:
        assert opened.tensor("a")[0] == 1
        os.replace(tmp_path / "y" / "x", tmp_path / "x" / "x")
        with pytest.raises(CorruptCheckpointError, match="while it was read"):
            opened.tensor("b")


def test_a_target_inside_its_source_is_refused(sources: dict[str, pathlib.Path]) -> None:
    for path in (sources["dcp"], sources["dcp"] / "inside", sources["dcp"].parent):
        with pytest.raises(ConfigError):
            asyncckpt.convert(sources["dcp"], path, to="hf", overwrite=True)


def test_too_little_room_is_said_before_anything_is_written(
    sources: dict[str, pathlib.Path], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = os.statvfs(tmp_path)
    small = os.statvfs_result((*found[:3], 10, 10, *found[5:]))
    monkeypatch.setattr(Files, "statvfs", lambda self, path: small)
    monkeypatch.setattr(Files, "mkdir", None)
    for to in TARGETS:
        with pytest.raises(SaveFailedError) as caught:
            asyncckpt.convert(sources["hf"], tmp_path / "x", to=to)
        assert caught.value.code == "ENOSPC"
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("fails", [("pwrite",), ("fsync",), ("link", "rename"), ("open",)])
def test_a_failing_call_leaves_nothing_behind(
    to: str,
    fails: tuple[str, ...],
    sources: dict[str, pathlib.Path],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = Files.open

    def failing(self: Files, *arguments: Any, **kw: Any) -> Any:
        writes = fails != ("open",) or arguments[1] & os.O_CREAT
        if writes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(self, *arguments, **kw)

    for call in fails:
        monkeypatch.setattr(Files, call, failing)
    with pytest.raises(SaveFailedError) as caught:
        asyncckpt.convert(sources["hf"], tmp_path / "x", to=to)
    assert caught.value.code == "ENOSPC"
    assert not os.listdir(tmp_path)


def test_a_failed_overwrite_leaves_what_was_there(
    sources: dict[str, pathlib.Path], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for to in ("torch", "dcp"):
        asyncckpt.convert(sources["safetensors"], tmp_path / to, to=to, keys=["zero_dim"])

    def failing(*_: Any, **__: Any) -> None:
        raise CorruptCheckpointError("no")

    monkeypatch.setattr(convert, "verify_structure", failing)
    for to in ("torch", "dcp"):
        with pytest.raises(CorruptCheckpointError):
            asyncckpt.convert(sources["safetensors"], tmp_path / to, to=to, overwrite=True)
        assert list(asyncckpt.load(tmp_path / to)) == ["zero_dim"]
    assert sorted(os.listdir(tmp_path)) == ["dcp", "torch"]


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_rename_that_is_not_durable_is_taken_back(
    to: str,
    overwrite: bool,
    sources: dict[str, pathlib.Path],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if overwrite:
        asyncckpt.convert(sources["safetensors"], tmp_path / "x", to=to, keys=["zero_dim"])

    def failing(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(publish, "fsync_directory", failing)
    with pytest.raises(SaveFailedError):
        asyncckpt.convert(sources["safetensors"], tmp_path / "x", to=to, keys=["large"], overwrite=overwrite)
    assert os.listdir(tmp_path) == (["x"] if overwrite else [])
    if overwrite:
        assert list(asyncckpt.load(tmp_path / "x")) == ["zero_dim"]


@pytest.mark.parametrize("to", TARGETS)
def test_a_target_that_reads_back_differently_is_never_put_into_place(
    to: str, sources: dict[str, pathlib.Path], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = convert.verify_structure

    def damaging(path: str, *arguments: Any) -> None:
        real(path, *arguments)
        file = max((p for p in [pathlib.Path(path), *pathlib.Path(path).glob("*")] if p.is_file()), key=os.path.getsize)
        with file.open("r+b") as opened:
            opened.seek(700_000)
            byte = opened.read(1)
            opened.seek(700_000)
            opened.write(bytes([byte[0] ^ 1]))

    monkeypatch.setattr(convert, "verify_structure", damaging)
    with pytest.raises(CorruptCheckpointError, match="holds other bytes") as caught:
        asyncckpt.convert(sources["safetensors"], tmp_path / "x", to=to)
    assert caught.value.fqn == "large"  # type: ignore[attr-defined]
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("to", TARGETS)
def test_elements_that_a_reader_would_look_for_elsewhere_are_noticed_without_reading_them(
    to: str, sources: dict[str, pathlib.Path], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = verify_target.payload_places
    monkeypatch.setattr(
        verify_target, "payload_places", lambda file: ((p, at + 64 * (p.nbytes > 0)) for p, at in real(file))
    )
    with pytest.raises(CorruptCheckpointError, match="is looked for"):
        asyncckpt.convert(sources["safetensors"], tmp_path / "x", to=to, read_back=False)
    assert not os.listdir(tmp_path)


def test_a_damaged_source_of_ours_is_not_converted(tmp_path: pathlib.Path) -> None:
    save({"x": torch.arange(100_000.0)}, tmp_path / "a")
    shard = next((tmp_path / "a").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[300_000] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CorruptCheckpointError) as caught:
        asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="torch")
    assert caught.value.fqn == "x"  # type: ignore[attr-defined]
    assert os.listdir(tmp_path) == ["a"]


def test_progress_goes_up_to_the_end(sources: dict[str, pathlib.Path], tmp_path: pathlib.Path) -> None:
    seen: list[tuple[int, int]] = []
    asyncckpt.convert(sources["torch"], tmp_path / "x", to="asyncckpt", progress=lambda *n: seen.append(n))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] > 0


# ---- slabs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (10,), (3, 7), (1, 1, 9), (2, 3, 4, 5), (5, 0, 2), (1, 40)])
@pytest.mark.parametrize("limit", [1, 4, 7, 1000])
def test_slabs_are_the_tensor_in_row_major_order(shape: tuple[int, ...], limit: int) -> None:
    tensor = torch.arange(int(torch.tensor(shape).prod()) if shape else 1).reshape(shape)
    parts = [tensor[slices].reshape(-1) for slices in slab_slices(shape, limit)]
    assert torch.equal(torch.cat(parts), tensor.reshape(-1))
    assert all(part.numel() <= max(limit, 1) for part in parts)


# ---- comparing ------------------------------------------------------------------------------------------------------


def test_what_differs_is_named_with_its_largest_difference(tmp_path: pathlib.Path) -> None:
    first = {"same": torch.ones(3), "v": torch.arange(4.0), "d": torch.ones(2), "s": torch.ones(2), "n": 1, "only": 1}
    second = {"same": torch.ones(3), "v": torch.tensor([0.0, 1.0, 2.5, 3.0]), "d": torch.ones(2).half()}
    second |= {"s": torch.ones(3), "n": 2, "more": torch.ones(1), "z": torch.tensor([0.0])}
    save(first | {"z": torch.tensor([-0.0])}, tmp_path / "a")
    torch.save(second, tmp_path / "b.pt")
    found = compare(str(tmp_path / "a"), str(tmp_path / "b.pt"))
    assert {(d.fqn, d.what, d.max_abs_difference) for d in found.differences} == {
        ("v", "value", 0.5),
        ("d", "dtype", 0.0),
        ("s", "shape", None),
        ("n", "value", 1.0),
        ("only", "only in A", None),
        ("more", "only in B", None),
        ("z", "bits", 0.0),
    }
    assert found.leaves == 8


def test_nan_on_one_side_is_a_difference_and_on_both_is_none(tmp_path: pathlib.Path) -> None:
    nan = float("nan")
    torch.save({"x": torch.tensor([nan, 1.0]), "y": torch.tensor([nan])}, tmp_path / "a")
    torch.save({"x": torch.tensor([2.0, 1.0]), "y": torch.tensor([nan])}, tmp_path / "b")
    (found,) = compare(str(tmp_path / "a"), str(tmp_path / "b")).differences
    assert found.fqn == "x"
    assert found.max_abs_difference != found.max_abs_difference
