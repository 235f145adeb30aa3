"""Any kind of checkpoint into any other: bits, types and names. The readers are stock tools."""

from __future__ import annotations

import collections
import copy
import json
import os
from pathlib import Path
from typing import Any

import foreign_samples
import pytest
import states
import torch
from conversions import KINDS, Workdir, read_by_stock_tools

import asyncckpt
from asyncckpt.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    DuplicateNameError,
    MissingKeysError,
)
from asyncckpt.interop import convert, verify_target
from asyncckpt.loading.byte_ranges import slab_slices

pytest.importorskip("numpy")
pytest.importorskip("safetensors")

# ---- every kind to every kind ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", KINDS)
@pytest.mark.parametrize("source", ["asyncckpt", *foreign_samples.KINDS])
def test_every_kind_becomes_every_kind_bit_for_bit(
    source: str, to: str, samples: dict[str, Path], work: Workdir
) -> None:
    options: dict[str, Any] = {}
    if to in ("safetensors", "hf") and source not in ("safetensors", "hf"):  # of a training state what they can hold
        options = {"keys": ["model"], "key_map": lambda fqn: fqn.removeprefix("model.")}
    seen: list[tuple[int, int]] = []
    report = work.convert(to, samples[source], progress=lambda *n: seen.append(n), **options)
    assert report.to == asyncckpt.open_checkpoint(work / "b").kind == to
    assert work.names() == ["b"]
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1] > 0
    model = foreign_samples.model()
    found = read_by_stock_tools(to, work / "b")
    weights = found.get("model", found)
    for name, tensor in model.items():
        if name == "parameter":
            assert weights[name].shape == tensor.shape
        else:
            states.assert_same(weights[name], tensor.detach().contiguous(), name)
    if "model" in found:
        assert (found["step"], found["name"], found["big"]) == (7, "grüße\n", 1 << 70)
        assert found["optim"]["param_groups"][0]["lr"] == 0.1


@pytest.mark.parametrize("source", ["asyncckpt", "torch", "legacy"])
@pytest.mark.parametrize("to", ["torch", "asyncckpt"])
def test_types_aliases_and_keys_survive_where_the_target_has_them(
    to: str, source: str, samples: dict[str, Path], work: Workdir
) -> None:
    work.convert(to, samples[source])
    found = read_by_stock_tools(to, work / "b")
    assert found["model"]["tied"] is found["model"]["large"]
    assert found["model"]._metadata == {"": {"version": 1}, "bn": {"version": 2}}
    assert list(found["optim"]["state"]) == [0, 1]
    assert found["optim"]["state"][1] == {}
    assert found["optim"]["param_groups"][0]["betas"] == (0.9, 0.999)
    expected = foreign_samples.plain(foreign_samples.training_state())
    for key in ("half", "device", "size", "raw", "array", "complex", "members"):
        assert (type(found[key]), found[key]) == (type(expected[key]), expected[key])
    assert type(found["mixed"][2]["deep"]) is tuple


def test_stock_dcp_load_finds_what_it_looks_for(samples: dict[str, Path], work: Workdir) -> None:
    report = work.convert("dcp", samples["asyncckpt"], max_shard_bytes=500_000)
    assert len(list((work / "b").glob("*.distcp"))) > 1
    target: Any = copy.deepcopy(foreign_samples.plain(foreign_samples.training_state()))
    target["step"], target["model"]["large"] = 0, torch.zeros(300, 1000)
    foreign_samples.load_dcp(target, work / "b")
    assert target["step"] == 7
    states.assert_same(target["model"]["large"], foreign_samples.model()["large"])
    told = "; ".join(report.changed)
    assert "optim.state" in told and "model" in told
    tied = work.load()["model"]
    assert tied["tied"] is tied["large"], "tied tensors share their item"
    mapped = asyncckpt.open_checkpoint(work / "b").tensor("model.large", mmap=True)
    states.assert_same(mapped.clone(), foreign_samples.model()["large"])


def test_a_hugging_face_directory_has_shards_an_index_and_its_other_files(
    samples: dict[str, Path], work: Workdir
) -> None:
    report = work.convert("hf", samples["hf"], max_shard_bytes=100_000)
    assert report.copied == ("config.json",)
    assert (work / "b" / "config.json").read_text() == (samples["hf"] / "config.json").read_text()
    index = json.loads((work / "b" / "model.safetensors.index.json").read_text())
    sizes = {name: t.numel() * t.itemsize for name, t in foreign_samples.model().items()}
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert set(index["weight_map"]) == set(sizes) and len(set(index["weight_map"].values())) > 1
    assert work.convert("hf", samples["hf"], "one").tensors == len(sizes)
    assert sorted(os.listdir(work / "one")) == ["config.json", "model.safetensors"]


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
@pytest.mark.parametrize("to", ["torch", "dcp", "asyncckpt"])
def test_every_dtype_of_torch_passes_through_torch_and_dcp_files(to: str, work: Workdir) -> None:
    dtypes = states.ALL_DTYPES if to == "asyncckpt" else states.PICKLED_DTYPES
    state = {str(d): states.tensor_of(d, (3, 5), n) for n, d in enumerate(dtypes)}
    work.ours(state)
    work.convert(to)
    work.convert("asyncckpt", "b", "back")
    states.assert_same(work.load("back"), state)
    if to == "torch":
        states.assert_same(torch.load(work / "b", weights_only=True), state)


@pytest.mark.parametrize("to", ["torch", "dcp", "asyncckpt"])
def test_sets_whose_order_changes_are_the_same_sets(to: str, work: Workdir) -> None:
    found = next(
        s for n in range(1000) if list(s := {n * 7919 % 4001, 0, 8, 16, n, 3 * n, 64 + n}) != list(set(list(s)))
    )
    work.torch({"s": found, "x": torch.ones(1)})
    work.convert(to)
    assert work.load()["s"] == found


# ---- names ----------------------------------------------------------------------------------------------------------


def test_key_map_renames_in_place_and_makes_dicts_of_what_is_left(work: Workdir) -> None:
    work.ours({"model": {"module.a": torch.ones(1), "b": torch.zeros(2)}, "opt": {"x": {"y": torch.ones(3)}}, "l": [1]})
    work.convert("torch", key_map={"model.module.a": "model.a", "opt.x.y": "moved"})
    found = torch.load(work / "b", weights_only=True)
    assert set(found) == {"model", "l", "moved"}
    assert set(found["model"]) == {"a", "b"}


NAMED: dict[str, Any] = {
    "w": torch.ones(2),
    "b": torch.ones(1),
    "c": {"d": torch.ones(1)},
    "empty": {},
    "in": {5: {}, "x": torch.ones(1)},
    "versions": collections.OrderedDict(),
}


@pytest.mark.parametrize("to", ["asyncckpt", "torch", "dcp"])
@pytest.mark.parametrize(
    "key_map",
    [
        *({"w": "b"}, {"w": "c"}, {"w": "q", "b": "q"}, {"w": "empty"}, {"w": "in.5"}, {"in.x": "in"}, {"w": "in"}),
        *({"w": "versions"}, lambda fqn: f"{fqn}".split(".")[0]),
    ],
)
def test_a_key_map_that_puts_a_leaf_where_another_or_an_empty_dict_is_is_refused(
    key_map: Any, to: str, work: Workdir
) -> None:
    work.torch(NAMED)
    with pytest.raises(DuplicateNameError, match="key_map"):
        work.convert(to, key_map=key_map)
    assert work.names() == ["a"]


def test_a_leaf_may_be_renamed_into_an_empty_dict(work: Workdir) -> None:
    work.torch(NAMED)
    work.convert("torch", key_map={"w": "empty.w", "in.x": "in.5.x"})
    found = torch.load(work / "b", weights_only=True)
    assert torch.equal(found["empty"]["w"], torch.ones(2)) and torch.equal(found["in"][5]["x"], torch.ones(1))


def test_keys_choose_and_unknown_ones_are_named(work: Workdir) -> None:
    work.ours({"a": {"x": torch.ones(1), "n": 1}, "b": torch.ones(2)})
    report = work.convert("torch", keys="a")
    assert (report.tensors, report.objects) == (1, 1)
    assert list(torch.load(work / "b", weights_only=True)) == ["a"]
    with pytest.raises(MissingKeysError) as caught:
        work.convert("torch", target="c", keys=["a", "nope"])
    assert caught.value.keys == ["nope"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("to", KINDS)
@pytest.mark.parametrize("how", ["keys", "rename"])
def test_what_stays_of_a_list_keeps_its_name(how: str, to: str, work: Workdir) -> None:
    layers: list[Any] = [torch.full((2,), float(n)) for n in range(4)]
    chosen: dict[str, Any] = {"keys": ["layers.1", "layers.3"]}
    wanted = {"layers.1": 1.0, "layers.3": 3.0}
    if how == "rename":
        chosen = {"key_map": {"layers.0": "head", "layers.2": "layers2"}}
        wanted |= {"head": 0.0, "layers2": 2.0}
    work.ours({"layers": layers})
    report = work.convert(to, **chosen)
    with asyncckpt.open_checkpoint(work / "b") as found:
        for name, value in wanted.items():
            assert float(found.tensor(name)[0]) == value, name
    if to in ("torch", "asyncckpt"):
        assert list(work.load()["layers"]) == [1, 3]
        assert any("layers" in line and "lack" in line for line in report.changed)
    elif to in ("safetensors", "hf"):
        assert set(work.load()) == set(wanted)


@pytest.mark.parametrize("key", ["\ud800", 1 << 70, -(1 << 64)])
def test_keys_that_are_no_names_of_ours_stay_what_they_are_in_a_torch_file(key: Any, work: Workdir) -> None:
    work.torch({"a": {key: torch.ones(1)}})
    work.convert("torch")
    assert list(torch.load(work / "b")["a"]) == [key]
    work.convert("dcp", target="c")


# ---- refused, or not put into place ---------------------------------------------------------------------------------


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
    arguments: dict[str, Any], field: str, samples: dict[str, Path], work: Workdir
) -> None:
    with pytest.raises(ConfigError) as caught:
        work.convert(source=samples["torch"], **arguments)
    assert caught.value.field == field  # type: ignore[attr-defined]
    assert work.names() == []


def test_a_missing_source_or_directory_is_not_found(work: Workdir) -> None:
    for target in ("x", "a/x"):
        with pytest.raises(CheckpointNotFoundError):
            work.convert("torch", "no", target)


def test_a_target_inside_its_source_is_refused(samples: dict[str, Path]) -> None:
    for path in (samples["dcp"], samples["dcp"] / "inside", samples["dcp"].parent):
        with pytest.raises(ConfigError):
            asyncckpt.convert(samples["dcp"], path, to="hf", overwrite=True)


@pytest.mark.parametrize("to", KINDS)
def test_a_target_that_reads_back_differently_is_never_put_into_place(
    to: str, samples: dict[str, Path], work: Workdir, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = convert.verify_structure

    def damaging(path: str, *arguments: Any) -> None:
        real(path, *arguments)
        file = max((p for p in [Path(path), *Path(path).glob("*")] if p.is_file()), key=os.path.getsize)
        with file.open("r+b") as opened:
            opened.seek(700_000)
            byte = opened.read(1)
            opened.seek(700_000)
            opened.write(bytes([byte[0] ^ 1]))

    monkeypatch.setattr(convert, "verify_structure", damaging)
    with pytest.raises(CorruptCheckpointError, match="holds other bytes") as caught:
        work.convert(to, samples["safetensors"])
    assert caught.value.fqn == "large"  # type: ignore[attr-defined]
    assert work.names() == []


@pytest.mark.parametrize("to", KINDS)
def test_elements_that_a_reader_would_look_for_elsewhere_are_noticed_without_reading_them(
    to: str, samples: dict[str, Path], work: Workdir, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = verify_target.payload_places
    monkeypatch.setattr(
        verify_target, "payload_places", lambda file: ((p, at + 64 * (p.nbytes > 0)) for p, at in real(file))
    )
    with pytest.raises(CorruptCheckpointError, match=r"is expected at .* by the reader"):
        work.convert(to, samples["safetensors"], read_back=False)
    assert work.names() == []


def test_a_damaged_source_of_ours_is_not_converted(work: Workdir) -> None:
    work.ours({"x": torch.arange(100_000.0)})
    shard = next((work / "a").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[300_000] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CorruptCheckpointError) as caught:
        work.convert("torch")
    assert caught.value.fqn == "x"  # type: ignore[attr-defined]
    assert work.names() == ["a"]


@pytest.mark.parametrize("shape", [(), (1,), (10,), (3, 7), (1, 1, 9), (2, 3, 4, 5), (5, 0, 2), (1, 40)])
@pytest.mark.parametrize("limit", [1, 4, 7, 1000])
def test_slabs_are_the_tensor_in_row_major_order(shape: tuple[int, ...], limit: int) -> None:
    tensor = torch.arange(int(torch.tensor(shape).prod()) if shape else 1).reshape(shape)
    parts = [tensor[slices].reshape(-1) for slices in slab_slices(shape, limit)]
    assert torch.equal(torch.cat(parts), tensor.reshape(-1))
    assert all(part.numel() <= max(limit, 1) for part in parts)
