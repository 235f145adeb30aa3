"""`ShardedSavePlanner` and `ShardedLoadPlanner` in the stock planners' place, with our storage and with stock."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dcp_calls
import pytest
import states
import torch
import torch.distributed.checkpoint as dcp
from in_process_writer import StorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType

import asyncckpt
from asyncckpt.dcp import ShardedLoadPlanner, ShardedSavePlanner, StorageReader
from asyncckpt.errors import (
    AliasMismatchError,
    CorruptCheckpointError,
    DuplicateNameError,
    LeafTypeMismatchError,
    OverlappingShardsError,
    UnsupportedLeafError,
)
from asyncckpt.sharding import registry


class Tiles:
    """A framework's sharded tensor: padded copies of parts on a device."""

    def __init__(self, shape: tuple[int, ...], parts: dict[tuple[int, ...], torch.Tensor]) -> None:
        self.shape, self.parts = shape, parts
        self.given: list[dict[tuple[int, ...], torch.Tensor]] = []


def to_shards(value: Tiles) -> Any:
    padded = []
    for offsets, part in value.parts.items():
        larger = torch.zeros([n + 2 for n in part.shape])
        larger[tuple(slice(n) for n in part.shape)] = part
        padded.append((larger, offsets, tuple(part.shape)))
    return value.shape, padded


def from_shards(value: Tiles, shards: Any) -> None:
    value.given.append({offsets: tensor.clone() for tensor, offsets in shards})
    for tensor, offsets in shards:
        value.parts[offsets].copy_(tensor)


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_registered", {})
    asyncckpt.register_shard_type(Tiles, to_shards, from_shards)
    yield


WHOLE = torch.arange(70.0).view(10, 7)
STORAGES = ("ours", "stock")


def writer(kind: str, path: Path) -> Any:
    return StorageWriter(path, sync_files=False) if kind == "ours" else dcp.FileSystemWriter(str(path))


def reader(kind: str, path: Path) -> Any:
    return StorageReader(path) if kind == "ours" else dcp.FileSystemReader(path)


def sharded_state() -> dict[str, Any]:
    """Everything in one process: a tensor in several shards of several types."""
    rows = {(0, 0): WHOLE[:4].clone(), (4, 0): WHOLE[4:, :5].clone(), (4, 5): WHOLE[4:, 5:].clone()}
    return {
        "model": {"tiles": Tiles((10, 7), rows), "w": torch.ones(3)},
        "list": [
            asyncckpt.ShardedSlice(WHOLE.clone(), (10, 7), (0, 0)),
            {"flat": asyncckpt.FlatShard(WHOLE.flatten(), (10, 7), 0)},
        ],
        "step": 5,
        "none": None,
    }


def empty_state() -> dict[str, Any]:
    other = {(0, 0): torch.zeros(10, 2), (0, 2): torch.zeros(10, 5)}
    return {
        "model": {"tiles": asyncckpt.ShardedSlice(torch.zeros(3, 7), (10, 7), (2, 0)), "w": torch.zeros(3)},
        "list": [Tiles((10, 7), other), {"flat": asyncckpt.FlatShard(torch.zeros(11), (10, 7), 5)}],
        "step": 0,
        "none": 3,
    }


@pytest.mark.parametrize("storage", STORAGES)
def test_shards_of_any_type_are_saved_and_loaded_by_overlap(tmp_path: Path, tiles: None, storage: str) -> None:
    dcp_calls.save(sharded_state(), writer(storage, tmp_path / "c"), planner=ShardedSavePlanner())
    target = empty_state()
    model, members = target["model"], target["list"]
    found = dcp_calls.load(target, reader(storage, tmp_path / "c"), planner=ShardedLoadPlanner())
    assert found["model"] is model and found["list"] is members, "the user's own containers"
    assert torch.equal(model["tiles"].tensor, WHOLE[2:5])
    assert torch.equal(members[0].parts[0, 0], WHOLE[:, :2]) and torch.equal(members[0].parts[0, 2], WHOLE[:, 2:])
    assert len(members[0].given) == 1, "handed over once, when all parts were in"
    assert torch.equal(members[1]["flat"].tensor, WHOLE.flatten()[5:16])
    assert torch.equal(model["w"], torch.ones(3)) and found["step"] == 5 and found["none"] is None


def test_what_a_sharded_save_wrote_loads_without_any_of_its_types(tmp_path: Path, tiles: None) -> None:
    dcp_calls.save(sharded_state(), StorageWriter(tmp_path / "c"), planner=ShardedSavePlanner())
    found = asyncckpt.load(tmp_path / "c")
    assert torch.equal(found["model"]["tiles"], WHOLE) and torch.equal(found["list"][1]["flat"], WHOLE)
    target = dcp_calls.load({"model": {"tiles": torch.zeros(10, 7)}}, StorageReader(tmp_path / "c"))
    assert torch.equal(target["model"]["tiles"], WHOLE)


def test_unsharded_tensors_of_stock_saves_go_into_shards(tmp_path: Path, tiles: None) -> None:
    for storage in STORAGES:
        dcp_calls.save({"x": WHOLE, "n": [1, 2]}, writer(storage, tmp_path / storage))
        target: dict[str, Any] = {
            "x": Tiles((10, 7), {(3, 3): torch.zeros(2, 2), (9, 0): torch.zeros(1, 7)}),
            "n": None,
        }
        dcp_calls.load(target, reader(storage, tmp_path / storage), planner=ShardedLoadPlanner())
        assert torch.equal(target["x"].parts[3, 3], WHOLE[3:5, 3:5]) and torch.equal(target["x"].parts[9, 0], WHOLE[9:])
        assert target["n"] == [1, 2]


def test_a_read_resolves_to_exactly_its_lengths_and_is_taken_once(tmp_path: Path, tiles: None) -> None:
    dcp_calls.save(sharded_state(), StorageWriter(tmp_path / "c"), planner=ShardedSavePlanner())
    value = Tiles((10, 7), {(1, 1): torch.zeros(6, 6)})
    planner = ShardedLoadPlanner()
    planner.set_up_planner({"model": {"tiles": value}}, StorageReader(tmp_path / "c").read_metadata(), True)
    plan = planner.finish_plan(planner.create_local_plan())
    assert len(plan.items) == 3
    for number, item in enumerate(plan.items):
        target = planner.resolve_tensor(item)
        assert target.shape == item.lengths and item.type is LoadItemType.TENSOR
        target.fill_(number + 1)
        assert not value.given
        planner.commit_tensor(item, target)
        if number == 0:
            with pytest.raises(OverlappingShardsError, match="second write") as caught:
                planner.commit_tensor(item, target)
            assert caught.value.fqn == "model.tiles"
    assert len(value.given) == 1 and value.parts[1, 1].min() == 1
    with pytest.raises(OverlappingShardsError):
        planner.commit_tensor(plan.items[-1], target)


def test_chunks_that_do_not_hold_all_of_a_shard_are_an_error(tmp_path: Path) -> None:
    dcp_calls.save({"x": WHOLE}, StorageWriter(tmp_path / "c"))
    metadata = StorageReader(tmp_path / "c").read_metadata()
    metadata.state_dict_metadata["x"].chunks[0].sizes = torch.Size([9, 7])  # type: ignore[union-attr]
    planner = ShardedLoadPlanner()
    planner.set_up_planner({"x": asyncckpt.ShardedSlice(torch.zeros(4, 7), (10, 7), (6, 0))}, metadata, True)
    with pytest.raises(CorruptCheckpointError, match=r"21 elements.*28"):
        planner.finish_plan(planner.create_local_plan())


def test_an_object_does_not_go_into_a_shard(tmp_path: Path) -> None:
    dcp_calls.save({"x": 3}, StorageWriter(tmp_path / "c"))
    target = {"x": asyncckpt.ShardedSlice(torch.zeros(4), (4,), (0,))}
    assert isinstance(
        dcp_calls.failed_load(target, StorageReader(tmp_path / "c"), planner=ShardedLoadPlanner()),
        LeafTypeMismatchError,
    )


def test_missing_keys_and_other_shapes_are_as_with_the_stock_planner(tmp_path: Path) -> None:
    dcp_calls.save({"x": WHOLE}, StorageWriter(tmp_path / "c"))
    target: dict[str, Any] = {"y": asyncckpt.ShardedSlice(torch.zeros(4), (4,), (0,)), "x": torch.zeros(10, 7)}
    with pytest.raises(CheckpointException, match="Missing key"):
        dcp_calls.load(target, StorageReader(tmp_path / "c"), planner=ShardedLoadPlanner())
    dcp_calls.load(target, StorageReader(tmp_path / "c"), planner=ShardedLoadPlanner(allow_partial_load=True))
    assert torch.equal(target["x"], WHOLE)
    target = {"x": asyncckpt.ShardedSlice(torch.zeros(4, 7), (11, 7), (0, 0))}
    with pytest.raises(CheckpointException, match="Size mismatch"):
        dcp_calls.load(target, StorageReader(tmp_path / "c"), planner=ShardedLoadPlanner())


def test_a_registered_type_without_elements_is_handed_over_too(tmp_path: Path, tiles: None) -> None:
    dcp_calls.save({"x": WHOLE}, StorageWriter(tmp_path / "c"))
    value = Tiles((10, 7), {(0, 0): torch.zeros(0, 7)})
    dcp_calls.load({"x": value}, StorageReader(tmp_path / "c"), planner=ShardedLoadPlanner())
    assert len(value.given) == 1


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        ({(0, 0): torch.zeros(2, 2), (1, 1): torch.zeros(2, 2)}, OverlappingShardsError),
        ({(9, 0): torch.zeros(2, 2)}, UnsupportedLeafError),
    ],
)
def test_shards_that_cannot_be_are_named(tmp_path: Path, tiles: None, parts: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"'a\.x'"):
        ShardedSavePlanner().set_up_planner({"a": {"x": Tiles((10, 7), parts)}})
    with pytest.raises(kind, match=r"'a\.x'"):
        ShardedLoadPlanner().set_up_planner({"a": {"x": Tiles((10, 7), parts)}})


def test_two_leaves_of_one_name_are_refused() -> None:
    with pytest.raises(DuplicateNameError, match=r"'a\.b'"):
        ShardedSavePlanner().set_up_planner({"a": {"b": 1}, "a.b": 2})


def test_checkpoints_of_torch_2_3_are_found_under_their_older_names(tmp_path: Path) -> None:
    dcp_calls.save({"cfg": {"a": 1}, "w": WHOLE}, StorageWriter(tmp_path / "c"))
    reading = StorageReader(tmp_path / "c")
    metadata = reading.read_metadata()
    older = {"cfg": BytesStorageMetadata(), "w": metadata.state_dict_metadata["w"]}
    metadata.state_dict_metadata = older
    planner = ShardedLoadPlanner()
    target = {"cfg": {"a": 0}, "w": asyncckpt.ShardedSlice(torch.zeros(10, 7), (10, 7), (0, 0))}
    planner.set_up_planner(target, metadata, True)
    plan = planner.create_local_plan()
    assert {item.storage_index.fqn for item in plan.items} == {"cfg", "w"}
    reading.read_data(planner.finish_plan(plan), planner)
    assert target["cfg"] == {"a": 1} and torch.equal(target["w"].tensor, WHOLE)  # type: ignore[attr-defined]


def test_leaves_under_keys_that_are_no_text_get_to_their_places(tmp_path: Path) -> None:
    def state(n: int, key: Any) -> dict[str, Any]:
        return {"s": {key: {"n": n, "t": torch.full((2,), float(n))}, "x": [{key: n}]}, "y": {key: [n, n]}}

    keys: list[Any] = [0, 7, None, 1.5, True, ("a", 1), b"x", "text"]
    saved = {str(n): state(n + 1, key) for n, key in enumerate(keys)}
    dcp_calls.save(saved, dcp.FileSystemWriter(tmp_path / "c"), planner=ShardedSavePlanner())
    target = {str(n): state(0, key) for n, key in enumerate(keys)}
    dcp_calls.load(target, dcp.FileSystemReader(tmp_path / "c"), planner=ShardedLoadPlanner())
    states.assert_same(target, saved)


@pytest.mark.parametrize("flatten", [True, False])
def test_what_is_no_tensor_gets_into_the_target_flattened_or_not(flatten: bool, tmp_path: Path) -> None:
    box = asyncckpt.ShardedSlice(WHOLE.clone(), (10, 7), (0, 0))
    saving = ShardedSavePlanner(flatten_state_dict=flatten)
    dcp_calls.save({"b": 7, "l": [1, "x"], "w": box}, StorageWriter(tmp_path / "c"), planner=saving)
    target = {"b": 0, "l": [0, ""], "w": asyncckpt.ShardedSlice(torch.zeros(10, 7), (10, 7), (0, 0))}
    loading = ShardedLoadPlanner(flatten_state_dict=flatten)
    dcp_calls.load(target, StorageReader(tmp_path / "c"), planner=loading)
    assert (target["b"], target["l"]) == (7, [1, "x"])
    assert torch.equal(target["w"].tensor, WHOLE)  # type: ignore[attr-defined]


class OnDevice:
    """The whole of a tensor on a device: the host sees a copy, or a view."""

    def __init__(self, memory: torch.Tensor, *, copies: bool = True) -> None:
        self.memory, self.copies = memory, copies
        self.told: list[torch.Tensor] = []

    def seen(self) -> torch.Tensor:
        return self.memory.clone() if self.copies else self.memory

    def take(self, parts: Any) -> None:
        [(part, offsets)] = parts
        assert offsets == (0,) * self.memory.dim()
        self.told.append(part.clone())
        self.memory.copy_(part)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_registered", {})
    asyncckpt.register_shard_type(OnDevice, OnDevice.seen, OnDevice.take)
    yield


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("copies", [True, False])
def test_a_registered_value_that_is_whole_is_handed_over_once(
    tmp_path: Path, on_device: None, storage: str, copies: bool
) -> None:
    def nested(values: list[OnDevice]) -> dict[str, Any]:
        plain, listed, deep = (values[n::3] for n in range(3))
        return {
            "plain": dict(zip("abcd", plain, strict=True)),
            "listed": [1, *listed],
            "deep": [{"b": v} for v in deep],
        }

    saved = [torch.randn(shape) for shape in [(10, 7), (), (0, 3), (1,)] for _ in range(3)]
    saving = [OnDevice(tensor.clone(), copies=copies) for tensor in saved]
    dcp_calls.save(nested(saving), writer(storage, tmp_path / "c"), planner=ShardedSavePlanner())
    values = [OnDevice(torch.zeros_like(tensor), copies=copies) for tensor in saved]
    dcp_calls.load(nested(values), reader(storage, tmp_path / "c"), planner=ShardedLoadPlanner())
    for tensor, value in zip(saved, values, strict=True):
        assert torch.equal(value.memory, tensor) and len(value.told) == 1 and torch.equal(value.told[0], tensor)
    assert not any(value.told for value in saving)


def test_several_whole_values_and_one_under_two_names_all_get_theirs(tmp_path: Path, on_device: None) -> None:
    dcp_calls.save({"a": WHOLE, "b": WHOLE + 1, "c": WHOLE + 1}, StorageWriter(tmp_path / "c"))
    first, tied = OnDevice(torch.zeros(10, 7)), OnDevice(torch.zeros(10, 7))
    target = {"a": first, "b": tied, "c": tied}
    dcp_calls.load(target, StorageReader(tmp_path / "c"), planner=ShardedLoadPlanner())
    assert torch.equal(first.memory, WHOLE) and torch.equal(tied.memory, WHOLE + 1) and len(first.told) == 1
    assert target == {"a": first, "b": tied, "c": tied}, "the user's own objects"


def test_a_whole_value_of_another_shape_or_that_was_an_object_is_an_error(tmp_path: Path, on_device: None) -> None:
    dcp_calls.save({"x": WHOLE, "n": 3}, StorageWriter(tmp_path / "c"))
    for target, kind in (({"x": OnDevice(torch.zeros(7))}, ValueError), ({"n": OnDevice(torch.zeros(7))}, Exception)):
        assert isinstance(
            dcp_calls.failed_load(target, StorageReader(tmp_path / "c"), planner=ShardedLoadPlanner()), kind
        )
        assert not next(iter(target.values())).told


@pytest.mark.parametrize("pack", [lambda v: (1, v), lambda v: [(v,)], lambda v: {"k": ({"z": v},)}])
def test_a_sharded_value_in_a_tuple_is_refused_by_name(tmp_path: Path, on_device: None, pack: Any) -> None:
    for value in (OnDevice(WHOLE.clone()), asyncckpt.ShardedSlice(WHOLE.clone(), (10, 7), (0, 0))):
        for planner in (ShardedSavePlanner(), ShardedLoadPlanner()):
            with pytest.raises(UnsupportedLeafError, match=r"'x.*tuple.*list") as caught:
                planner.set_up_planner({"x": pack(value)})
            assert caught.value.facts()["leaf"].startswith("x")
            assert caught.value.facts()["type_name"] == type(value).__name__


def test_shards_on_the_meta_device_are_refused_by_name() -> None:
    target = {"a": {"x": asyncckpt.ShardedSlice(torch.zeros(2, device="meta"), (4,), (2,))}}
    with pytest.raises(UnsupportedLeafError, match=r"'a\.x'.*meta"):
        ShardedLoadPlanner().set_up_planner(target)


@pytest.mark.parametrize("storage", STORAGES)
def test_sharded_values_without_elements_are_in_the_checkpoint(tmp_path: Path, storage: str) -> None:
    state = {
        "slice": asyncckpt.ShardedSlice(torch.zeros(0, 3), (0, 3), (0, 0)),
        "flat": asyncckpt.FlatShard(torch.zeros(0), (4, 0), 0),
    }
    dcp_calls.save(dict(state), writer(storage, tmp_path / "c"), planner=ShardedSavePlanner())
    dcp_calls.load(dict(state), reader(storage, tmp_path / "c"), planner=ShardedLoadPlanner())
    target = {"slice": torch.ones(0, 3), "flat": torch.ones(4, 0)}
    dcp_calls.load(target, reader(storage, tmp_path / "c"))


# ---- targets that share memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("kind", ["tied", "transposed", "slice", "conj", "in_a_shard"])
def test_targets_that_share_memory_hold_what_was_saved_under_each_name_or_both_are_named(
    tmp_path: Path, storage: str, kind: str
) -> None:
    def made(square: torch.Tensor, z: torch.Tensor) -> dict[str, Any]:
        other: Any = {
            "tied": square, "transposed": square.t(), "slice": square[1:, :3], "conj": z.conj(),
            "in_a_shard": asyncckpt.ShardedSlice(square.t(), (4, 4), (0, 0)),
        }[kind]  # fmt: skip
        return {"one": z if kind == "conj" else square, "apart": square.new_zeros(3), "nested": {"other": other}}

    square, z = torch.randn(4, 4), torch.randn(5, dtype=torch.complex64)
    whole, found = made(square, z)["one"], made(square, z)["nested"]["other"]
    saved = {"one": whole, "apart": torch.ones(3), "nested": {"other": getattr(found, "tensor", found).clone()}}
    dcp_calls.save(saved, writer(storage, tmp_path / "c"), planner=ShardedSavePlanner())
    memory = torch.zeros(4, 4), torch.zeros(5, dtype=torch.complex64)
    target = made(*memory)
    dcp_calls.load(target, reader(storage, tmp_path / "c"), planner=ShardedLoadPlanner())
    assert torch.equal(target["one"], whole) and target["apart"].tolist() == [1, 1, 1]

    saved["nested"]["other"] = saved["nested"]["other"] + 1
    dcp_calls.save(saved, writer(storage, tmp_path / "d"), planner=ShardedSavePlanner())
    error = dcp_calls.failed_load(made(*memory), reader(storage, tmp_path / "d"), planner=ShardedLoadPlanner())
    assert isinstance(error, AliasMismatchError)
    assert {error.fqn, error.other_fqn} == {"one", "nested.other"}


@pytest.mark.parametrize("storage", STORAGES)
def test_slices_of_one_tensor_are_read_to_where_they_lie(
    tmp_path: Path, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.randn(6, 4)
    saved = {"q": whole[:, :2].clone(), "k": whole[:2, 2:].clone(), "v": whole[2:, 2:].clone()}
    dcp_calls.save(saved, writer(storage, tmp_path / "c"), planner=ShardedSavePlanner())
    memory = torch.zeros(6, 4)
    monkeypatch.setattr(ShardedLoadPlanner, "_take_shared", lambda *_: pytest.fail("read twice"))
    target = {"q": memory[:, :2], "k": memory[:2, 2:], "v": memory[2:, 2:]}
    dcp_calls.load(target, reader(storage, tmp_path / "c"), planner=ShardedLoadPlanner())
    assert torch.equal(memory, whole)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_part_of_a_registered_type_that_shares_memory_is_in_when_it_is_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str
) -> None:
    seen: list[list[float]] = []
    monkeypatch.setattr(registry, "_registered", {})

    class Row:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    asyncckpt.register_shard_type(
        Row, lambda row: ((4,), [(row.tensor, (0,))]), lambda row, _: seen.append(row.tensor.tolist())
    )
    dcp_calls.save({"w": torch.arange(8.0), "r": torch.arange(2.0, 6)}, writer(storage, tmp_path / "c"))
    memory = torch.zeros(8)
    target = {"w": memory, "r": Row(memory[2:6])}
    dcp_calls.load(target, reader(storage, tmp_path / "c"), planner=ShardedLoadPlanner())
    assert memory.tolist() == list(range(8)) and seen == [[2, 3, 4, 5]]


@pytest.mark.parametrize("empty", [{}, []], ids=["dict", "list"])
def test_an_empty_place_that_has_saved_names_below_it_is_named(
    empty: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inside = {"m": torch.ones(2)} if empty == {} else [torch.ones(2)]
    saved = {"a": torch.ones(3), "state": {"inner": inside}, "none": {}}
    asyncckpt.SyncCheckpointer().save(saved, tmp_path / "x")
    target = {"a": torch.zeros(3), "state": {"inner": empty}, "none": {}}
    dcp_calls.load(target, StorageReader(tmp_path / "x"), planner=ShardedLoadPlanner())
    assert torch.equal(target["a"], saved["a"])  # type: ignore[arg-type]
    (said,) = [record.message for record in caplog.records if "empty in the target" in record.message]
    assert "'state.inner'" in said and "1 of the saved leaves" in said and "asyncckpt.load" in said
