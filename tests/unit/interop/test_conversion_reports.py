"""What a conversion cannot keep is said, with names."""

from __future__ import annotations

import collections
import json
import pathlib
from typing import Any

import foreign_samples
import pytest
import torch

import asyncckpt
from asyncckpt import PerRank
from asyncckpt.dtypes import DTYPES
from asyncckpt.errors import DuplicateNameError, UnsupportedFormatError, UnsupportedLeafError
from asyncckpt.format.state_tree import MAX_KEY_CHARS

pytest.importorskip("numpy")
safetensors_torch = pytest.importorskip("safetensors.torch")

FOREIGN = ("dcp", "torch", "safetensors", "hf")


def save(path: pathlib.Path, state: dict[str, Any], **more: Any) -> None:
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save(state, path, **more)


def metadata_of(path: pathlib.Path) -> Any:
    return json.loads((path / "manifest.json").read_text())["metadata"]


@pytest.mark.parametrize("to", FOREIGN)
def test_a_step_that_only_the_manifest_has_is_said_to_be_lost(to: str, tmp_path: pathlib.Path) -> None:
    said = "the checkpoint's step, 300, is not kept"
    save(tmp_path / "a", {"w": torch.ones(1)}, step=300)
    assert said in asyncckpt.convert(tmp_path / "a", tmp_path / "b", to=to).changed
    save(tmp_path / "c", {"w": torch.ones(1), "step": 300}, step=300)
    report = asyncckpt.convert(tmp_path / "c", tmp_path / "d", to=to, keys=None if to in ("dcp", "torch") else ["w"])
    assert (said in report.changed) is (to in ("safetensors", "hf"))


@pytest.mark.parametrize("to", FOREIGN)
def test_a_user_s_list_called_files_is_one_of_his_metadata(to: str, tmp_path: pathlib.Path) -> None:
    save(tmp_path / "a", {"w": torch.ones(1)}, metadata={"files": ["a", "b"], "note": "x"})
    report = asyncckpt.convert(tmp_path / "a", tmp_path / "b", to=to)
    if to in ("dcp", "torch"):
        assert "the checkpoint's metadata are not kept: files, note" in report.changed
        return
    asyncckpt.convert(tmp_path / "b", tmp_path / "c", to="asyncckpt")
    assert metadata_of(tmp_path / "c") == {"files": ["a", "b"], "note": "x"}


@pytest.mark.parametrize("to", ["safetensors", "hf"])
def test_metadata_that_are_no_texts_come_back(to: str, tmp_path: pathlib.Path) -> None:
    metadata = {"loss": 0.5, "run": {"name": "grüße"}, "epochs": [1, 2]}
    save(tmp_path / "a", {"w": torch.ones(1)}, metadata=metadata)
    asyncckpt.convert(tmp_path / "a", tmp_path / "b", to=to)
    asyncckpt.convert(tmp_path / "b", tmp_path / "c", to="asyncckpt")
    assert metadata_of(tmp_path / "c") == metadata


@pytest.fixture
def hub(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "hub"
    path.mkdir()
    foreign_samples.save_safetensors({"w": torch.ones(2)}, path / "model-00001-of-00001.safetensors")
    index = {
        "metadata": {"total_size": 8, "total_parameters": 2, "custom": "x"},
        "weight_map": {"w": "model-00001-of-00001.safetensors"},
    }
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text("{}")
    (path / "1_Pooling").mkdir()
    return path


@pytest.mark.parametrize("to", ["asyncckpt", *FOREIGN])
def test_what_a_hub_directory_has_beside_its_weights_is_said(
    to: str, hub: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    report = asyncckpt.convert(hub, tmp_path / "b", to=to)
    said = "metadata of the index of the files are not kept: the top level (custom, total_parameters)"
    assert said in report.changed
    if to == "hf":
        assert (report.copied, report.not_copied) == (("config.json",), ("1_Pooling",))
    else:
        assert (report.copied, report.not_copied) == ((), ("1_Pooling", "config.json"))
    if to == "asyncckpt":
        assert "files" not in metadata_of(tmp_path / "b")


def test_a_tied_tensor_in_a_tuple_is_said_to_be_stored_apart(tmp_path: pathlib.Path) -> None:
    x, y, z = (torch.full((2,), float(n)) for n in range(3))
    torch.save({"a": (x, 1), "b": x, "c": (y, y), "d": z, "e": {"f": z}}, tmp_path / "a")
    report = asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="dcp")
    said = "tied tensors are stored apart, for each tuple that holds one: a.0, b"
    assert said in report.changed
    found = asyncckpt.load(tmp_path / "b")
    assert found["a"][0] is not found["b"]
    assert found["c"][0] is found["c"][1]
    assert found["d"] is found["e"]["f"]


@pytest.mark.parametrize("source", ["torch", "asyncckpt"])
@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_versions_that_torch_does_not_read_are_left_out_and_said(to: str, source: str, tmp_path: pathlib.Path) -> None:
    bad: Any = collections.OrderedDict(w=torch.ones(1))
    bad._metadata = collections.OrderedDict({"": {"version": 1, "kinds": frozenset("ab")}})
    good: Any = collections.OrderedDict(w=torch.ones(1))
    good._metadata = collections.OrderedDict({"": {"version": 2}})
    torch.save({"m": {"bad": bad}, "good": good}, tmp_path / "a")
    if source == "asyncckpt":
        asyncckpt.convert(tmp_path / "a", tmp_path / "ours", to="asyncckpt")
    report = asyncckpt.convert(tmp_path / ("ours" if source == "asyncckpt" else "a"), tmp_path / "b", to=to)
    assert [said for said in report.changed if said.startswith("the _metadata of m.bad, which holds a frozenset")]
    if to == "torch":
        found = torch.load(tmp_path / "b", weights_only=True)
        assert found["good"]._metadata == {"": {"version": 2}}
        assert not getattr(found["m"]["bad"], "_metadata", None)


def test_a_state_dict_of_which_nothing_is_left_is_said_to_have_lost_its_versions(tmp_path: pathlib.Path) -> None:
    model: Any = collections.OrderedDict(x=frozenset("a"))
    model._metadata = collections.OrderedDict({"": {"version": 1}})
    torch.save({"model": model, "t": torch.ones(1)}, tmp_path / "a")
    report = asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="torch", partial=True)
    assert "the _metadata of model is not kept: all of it was left out" in report.changed
    assert report.left_out == ("model.x",)


def test_a_list_that_lacks_members_has_texts_for_keys_in_dcp(tmp_path: pathlib.Path) -> None:
    torch.save({"l": [torch.ones(1), frozenset("a"), torch.ones(2)]}, tmp_path / "a")
    for to, said, keys in (("dcp", "texts of their numbers", ["0", "2"]), ("torch", "their numbers", [0, 2])):
        report = asyncckpt.convert(tmp_path / "a", tmp_path / to, to=to, partial=True)
        assert f"lists that lack members became dicts of {said}: l" in report.changed
        assert list(asyncckpt.load(tmp_path / to)["l"]) == keys


@pytest.mark.parametrize("to", ["asyncckpt", "dcp", "torch"])
def test_a_key_that_is_too_long_is_refused_before_anything_is_written(to: str, tmp_path: pathlib.Path) -> None:
    name = "n" * (MAX_KEY_CHARS + 1)
    foreign_samples.save_safetensors({name: torch.ones(1), "w": torch.ones(2)}, tmp_path / "a")
    with pytest.raises(UnsupportedLeafError, match="characters"):
        asyncckpt.convert(tmp_path / "a", tmp_path / "b", to=to)
    with pytest.raises(UnsupportedLeafError, match="characters"):
        asyncckpt.convert(tmp_path / "a", tmp_path / "b", to=to, keys=["w"], key_map={"w": name})
    report = asyncckpt.convert(tmp_path / "a", tmp_path / "b", to=to, partial=True)
    assert report.left_out == (name,)
    assert list(asyncckpt.load(tmp_path / "b")) == ["w"]


def test_a_key_that_is_too_long_costs_its_own_leaf_alone(tmp_path: pathlib.Path) -> None:
    long = "k" * (MAX_KEY_CHARS + 1)
    inner = collections.OrderedDict([("y", 2), (long, [torch.ones(3)]), (long[1:] + "x!", 1)])
    torch.save({"w": torch.ones(2), long: torch.ones(1), "in": inner}, tmp_path / "a")
    first = f"{long[:80]}... (key 1, {len(long)} characters)"
    names = (first, f"in.{first}", f"in.{long[:80]}... (key 2, {len(long) + 1} characters)")
    with pytest.raises(UnsupportedFormatError, match="too long") as caught:
        asyncckpt.load(tmp_path / "a")
    assert all(name in str(caught.value) for name in names)
    found = asyncckpt.load(tmp_path / "a", keys=["w", "in.y"])
    assert torch.equal(found["w"], torch.ones(2)) and found["in"] == {"y": 2}
    for to in ("asyncckpt", "torch", "dcp"):
        with pytest.raises(UnsupportedFormatError, match="3 of the leaves"):
            asyncckpt.convert(tmp_path / "a", tmp_path / to, to=to)
        assert asyncckpt.convert(tmp_path / "a", tmp_path / to, to=to, partial=True).left_out == names
        assert asyncckpt.load(tmp_path / to)["in"] == {"y": 2}


def test_two_keys_that_begin_alike_stay_two_leaves(tmp_path: pathlib.Path) -> None:
    long = "k" * (MAX_KEY_CHARS + 1)
    shown = f"{long[:80]}... (key 1, {len(long)} characters)"
    torch.save({shown: torch.ones(2), long: torch.ones(1)}, tmp_path / "a")
    assert asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="torch", partial=True).left_out == (shown + "'",)
    assert list(torch.load(tmp_path / "b", weights_only=True)) == [shown]


def test_all_names_are_in_a_report_and_in_an_error(tmp_path: pathlib.Path) -> None:
    names = [f"p{n}" for n in range(300)]
    torch.save({name: torch.nn.Parameter(torch.ones(1)) for name in names}, tmp_path / "a")
    (said,) = asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="safetensors").changed
    assert said.endswith(": " + ", ".join(names))
    torch.save({name: name for name in names}, tmp_path / "c")
    with pytest.raises(UnsupportedLeafError) as caught:
        asyncckpt.convert(tmp_path / "c", tmp_path / "d", to="safetensors")
    assert all(f"  {name}: " in str(caught.value) for name in names)


@pytest.mark.parametrize(
    "key_map",
    [{"w": "empty"}, {"w": "in.5"}, {"in.x": "in"}, {"w": "in"}, {"w": "versions"}, lambda fqn: f"{fqn}".split(".")[0]],
)
def test_an_empty_dict_is_not_replaced_by_a_leaf_that_gets_its_name(key_map: Any, tmp_path: pathlib.Path) -> None:
    state = {"w": torch.ones(2), "empty": {}, "in": {5: {}, "x": torch.ones(1)}, "versions": collections.OrderedDict()}
    torch.save(state, tmp_path / "a")
    for to in ("asyncckpt", "torch", "dcp"):
        with pytest.raises(DuplicateNameError, match="key_map"):
            asyncckpt.convert(tmp_path / "a", tmp_path / to, to=to, key_map=key_map)
        assert not (tmp_path / to).exists()
    asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="torch", key_map={"w": "empty.w", "in.x": "in.5.x"})
    found = torch.load(tmp_path / "b", weights_only=True)
    assert torch.equal(found.pop("empty")["w"], torch.ones(2)) and torch.equal(found["in"][5]["x"], torch.ones(1))


@pytest.mark.parametrize("to", ["safetensors", "hf"])
def test_a_safetensors_file_keeps_the_order_of_the_dict(to: str, tmp_path: pathlib.Path) -> None:
    dtypes = (torch.int8, torch.float64, torch.float16, torch.bool, torch.int64)
    state = {name: torch.ones(3, dtype=dtype) for name, dtype in zip("zbyac", dtypes, strict=True)}
    torch.save(state, tmp_path / "a")
    assert asyncckpt.convert(tmp_path / "a", tmp_path / "b", to=to).changed == ()
    assert list(asyncckpt.load(tmp_path / "b")) == list(state)


def test_module_versions_are_lost_by_name_and_only_where_they_are_lost(tmp_path: pathlib.Path) -> None:
    module = torch.nn.BatchNorm1d(2).state_dict()
    torch.save({"model": module, "pair": (module, 2), "flat": collections.OrderedDict(a=1)}, tmp_path / "a")
    lost = "the _metadata of modules' state dicts, their versions, are not kept: "
    dicts = "an OrderedDict became a dict: "
    report = asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="dcp")
    assert {lost + "model", dicts + "flat, model"} <= set(report.changed)
    assert asyncckpt.load(tmp_path / "b")["pair"][0]._metadata == module._metadata
    keys = ["model", "pair.0"]
    report = asyncckpt.convert(tmp_path / "a", tmp_path / "c", to="safetensors", keys=keys)
    assert {lost + "model, pair.0", dicts + "model, pair.0"} <= set(report.changed)
    assert any(line.endswith("became names with dots, in: model, pair") for line in report.changed)


@pytest.mark.parametrize("to", ["safetensors", "hf"])
@pytest.mark.parametrize("name", [name for name, row in DTYPES.items() if hasattr(torch, name)])
def test_every_dtype_that_safetensors_has_is_written_as_its_own_tools_read_it(
    name: str, to: str, tmp_path: pathlib.Path
) -> None:
    dtype = getattr(torch, name)
    tensor = torch.arange(48, dtype=torch.uint8).remainder(2).view(dtype).reshape(3, -1)
    state = {"w": tensor, "empty": tensor[:0], "plain": torch.ones(3)}
    save(tmp_path / "a", {**state, "none": tensor[0, 0]})
    if name in ("complex32", "complex128"):
        with pytest.raises(UnsupportedLeafError, match=rf"no tensors of dtype {name}\n") as caught:
            asyncckpt.convert(tmp_path / "a", tmp_path / "b", to=to)
        assert "w: " in str(caught.value) and "none: " in str(caught.value)
        return
    if name == "float4_e2m1fn_x2":
        with pytest.raises(UnsupportedLeafError, match=r"none: .*without a dimension"):
            asyncckpt.convert(tmp_path / "a", tmp_path / "b", to=to)
    else:
        state["none"] = tensor[0, 0]
    report = asyncckpt.convert(tmp_path / "a", tmp_path / "b", to=to, keys=list(state))
    assert report.changed == ()
    file = tmp_path / "b" / "model.safetensors" if to == "hf" else tmp_path / "b"
    stock = safetensors_torch.load_file(file)
    for found in (stock, asyncckpt.load(tmp_path / "b")):
        assert found.keys() == state.keys()
        for key, wanted in state.items():
            assert (found[key].dtype, found[key].shape) == (wanted.dtype, wanted.shape)
            assert torch.equal(found[key].reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8))
    asyncckpt.convert(tmp_path / "b", tmp_path / "c", to="asyncckpt")
    assert asyncckpt.load(tmp_path / "c")["w"].dtype is dtype


@pytest.mark.parametrize(
    ("state", "names"),
    [
        ({"1": torch.ones(1), 1: {"k": torch.ones(2)}}, "1"),
        ({"a": {"1": torch.ones(1), 1: {"k": torch.ones(2)}}}, "a.1"),
        ({"1": {"a": torch.ones(1)}, 1: {"b": torch.ones(2)}}, "1"),
        ({"a": {"1": [(), []], 1: ({},)}}, "a.1"),
        ({1: {}, "1": torch.ones(1)}, "1"),
    ],
)
def test_keys_that_become_one_text_in_dcp_are_refused(state: Any, names: str, tmp_path: pathlib.Path) -> None:
    torch.save(state, tmp_path / "a")
    with pytest.raises(DuplicateNameError, match="are one in a DCP directory") as caught:
        asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="dcp")
    assert caught.value.fqn == names  # type: ignore[attr-defined]
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    asyncckpt.convert(tmp_path / "a", tmp_path / "c", to="torch")


@pytest.mark.parametrize("name", ["w@rank3", "__metadata__"])
def test_of_tied_tensors_one_may_be_left_out(name: str, tmp_path: pathlib.Path) -> None:
    tensor = torch.arange(3.0)
    torch.save({name: tensor, "b": tensor, "c": tensor}, tmp_path / "a")
    for to in ("asyncckpt", "safetensors"):
        if to == "safetensors" and name != "__metadata__":
            continue
        with pytest.raises(UnsupportedLeafError):
            asyncckpt.convert(tmp_path / "a", tmp_path / to, to=to)
        report = asyncckpt.convert(tmp_path / "a", tmp_path / to, to=to, partial=True)
        assert report.left_out == (name,)
        found = asyncckpt.load(tmp_path / to)
        assert list(found) == ["b", "c"] and torch.equal(found["b"], tensor) and torch.equal(found["c"], tensor)
        if to == "safetensors":
            assert report.changed == ("tied tensors are stored once for each name: c (= b)",)


@pytest.mark.parametrize("key", [2**64, "\ud800"])
@pytest.mark.parametrize("value", [{}, [[], {}], collections.OrderedDict(), ({},), {"x": {}}])
def test_a_key_that_ours_has_not_is_refused_also_where_nothing_is_in_it(
    key: Any, value: Any, tmp_path: pathlib.Path
) -> None:
    torch.save({key: value, "a": torch.ones(2)}, tmp_path / "a")
    with pytest.raises(UnsupportedLeafError, match="its key"):
        asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="asyncckpt")
    report = asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="asyncckpt", partial=True)
    assert report.left_out and all(name.startswith(str(key)) for name in report.left_out)
    assert list(asyncckpt.load(tmp_path / "b")) == ["a"]


def test_what_was_a_rank_s_own_is_named_where_it_is_held(tmp_path: pathlib.Path) -> None:
    own = {"none": PerRank({}), "t": PerRank({"x": torch.ones(1), "n": 1}), "raw": PerRank(bytes(70_000))}
    save(tmp_path / "a", {"w": torch.ones(2), **own})
    said = "what was the only rank's own (PerRank) is everybody's: "
    for to in ("asyncckpt", "torch"):
        assert said + "none, t, raw" in asyncckpt.convert(tmp_path / "a", tmp_path / to, to=to).changed
    report = asyncckpt.convert(tmp_path / "a", tmp_path / "s", to="safetensors", partial=True)
    assert said + "t" in report.changed
    report = asyncckpt.convert(tmp_path / "a", tmp_path / "k", to="torch", keys=["t.x"], key_map={"t.x": "y"})
    assert said + "t" in report.changed
