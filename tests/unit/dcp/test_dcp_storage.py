"""`asyncckpt.dcp` in one process: what stock `dcp.save` writes through it, stock `dcp.load` and ours read."""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import pickle
from collections import namedtuple
from pathlib import Path
from typing import Any

import dcp_calls
import pytest
import states
import storage_samples
import torch
import torch.distributed.checkpoint as dcp
from in_process_writer import StorageWriter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.planner import WriteItemType

import asyncckpt
from asyncckpt.dcp import BroadcastingTorchSaveReader, StorageReader
from asyncckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    DuplicateNameError,
    LeafTypeMismatchError,
    MissingKeysError,
    PickledLeafError,
    SaveFailedError,
    UnsupportedLeafError,
    UnsupportedPathError,
)
from asyncckpt.format.names import SaveId
from asyncckpt.storage.files import Files
from asyncckpt.storage.verification import verify_checkpoint

Point = namedtuple("Point", "x y")


def objects() -> dict[str, Any]:
    found = states.every_object()
    del found["deep_flat"]  # torch takes a list inside a list apart, and leaves nothing of an empty one
    return found


def state() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.BatchNorm1d(40))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 30)).sum().backward()
    optimizer.step()
    tensors = {name: tensor.detach() for name, tensor in states.every_tensor().items()}
    nested = [{"lr": 0.1, "params": [0, 1]}, {"w": torch.ones(3)}]
    return {
        "model": dict(model.state_dict()),
        "optim": dict(optimizer.state_dict()),
        "tensors": tensors,
        "objects": objects(),
        "nested": nested,
        "step": 7,
    }


def text_keys(value: Any) -> Any:
    """Return `value` as torch flattens it: keys are text, and nothing is left of an empty dict."""
    if isinstance(value, dict):
        return {str(key): text_keys(member) for key, member in value.items()}
    return [text_keys(member) for member in value] if isinstance(value, list) else value


def is_sound(path: Path) -> bool:
    verdict = verify_checkpoint(str(path), Files())
    return verdict.state == "ok"


@pytest.mark.parametrize("threads", [1, 3])
def test_every_leaf_comes_back_by_stock_load_and_by_ours(tmp_path: Path, threads: int) -> None:
    saved = state()
    dcp_calls.save(saved, StorageWriter(tmp_path / "c", thread_count=threads))
    found = dcp_calls.load(dcp_calls.erased(saved), StorageReader(tmp_path / "c", threads=threads))
    states.assert_same(found, saved)
    fresh = asyncckpt.load(tmp_path / "c")
    texts = text_keys(saved)
    texts["optim"]["state"] = {int(key): one for key, one in texts["optim"]["state"].items()}  # which are numbers again
    states.assert_same(fresh, texts)
    assert list(fresh) == list(saved)
    assert is_sound(tmp_path / "c")


def test_what_a_checkpointer_saved_is_read_by_stock_load(tmp_path: Path) -> None:
    saved = states.every_leaf()
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save(saved, tmp_path / "c")
    wanted = {name: saved[name] for name in ("model", "tensors", "ordered", "optim", "step", "arrays", "scalars")}
    wanted["tensors"] = {name: tensor.detach() for name, tensor in wanted["tensors"].items()}
    wanted["objects"] = objects()
    wanted["scalars"] = {k: v for k, v in saved["scalars"].items() if k != "trailing"}  # numpy's pickles lose it
    wanted["tuple"] = saved["nested"][1]
    target = dcp_calls.erased({name: dict(v) if isinstance(v, dict) else v for name, v in wanted.items()})
    target["nested"] = [torch.zeros(4, dtype=torch.int64), None]
    del target["tuple"]
    dcp_calls.load(target, StorageReader(tmp_path / "c"))
    states.assert_same(target.pop("nested")[1], wanted.pop("tuple"))
    states.assert_same(
        text_keys(target), text_keys({k: dict(v) if isinstance(v, dict) else v for k, v in wanted.items()})
    )


def test_torch_s_own_tools_rebuild_the_nesting_from_the_metadata(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner

    saved = state()
    dcp_calls.save(saved, StorageWriter(tmp_path / "c"))
    found = dcp_calls.load_new(StorageReader(tmp_path / "c"), _EmptyStateDictLoadPlanner())
    states.assert_same(found, text_keys(saved))


@pytest.mark.parametrize("kind", ["dcp", "torch"])
def test_checkpoints_of_stock_torch_are_read_too(tmp_path: Path, kind: str) -> None:
    saved = {"a": {"w": torch.randn(30, 40), "n": 3}, "l": [{"x": torch.ones(2)}, {"y": 1}], "flat": [1, 2]}
    if kind == "dcp":
        dcp_calls.save(saved, dcp.FileSystemWriter(str(tmp_path / "c")))
    else:
        torch.save(saved, tmp_path / "c")
    states.assert_same(dcp_calls.load(dcp_calls.erased(saved), StorageReader(tmp_path / "c")), saved)


@pytest.mark.parametrize("to", ["dcp", "torch", "asyncckpt"])
def test_what_stock_torch_saved_through_us_converts(tmp_path: Path, to: str) -> None:
    saved = {"a": {"w": torch.randn(30, 40), "n": 3}, "step": 4}
    dcp_calls.save(saved, StorageWriter(tmp_path / "c"))
    asyncckpt.convert(tmp_path / "c", tmp_path / "d", to=to)
    states.assert_same(asyncckpt.load(tmp_path / "d"), saved)
    dcp_calls.save({"p": Point(1, 2), **saved}, StorageWriter(tmp_path / "c"))
    if to == "asyncckpt":
        asyncckpt.convert(tmp_path / "c", tmp_path / "e", to=to)
        assert asyncckpt.load(tmp_path / "e", allow_pickle=True)["p"] == Point(1, 2)
    else:
        with pytest.raises(UnsupportedLeafError, match=r"p: it was stored as a pickle"):
            asyncckpt.convert(tmp_path / "c", tmp_path / "e", to=to)


def test_only_the_wanted_keys_are_read(tmp_path: Path) -> None:
    dcp_calls.save({"a": torch.ones(3), "b": {"c": 1, "d": torch.ones(2)}}, StorageWriter(tmp_path / "c"))
    target = {"b": {"d": torch.zeros(2)}}
    assert torch.equal(dcp_calls.load(target, StorageReader(tmp_path / "c"))["b"]["d"], torch.ones(2))
    target = {"a": torch.zeros(3), "new": torch.zeros(1)}
    dcp_calls.load(target, StorageReader(tmp_path / "c"), planner=DefaultLoadPlanner(allow_partial_load=True))
    assert torch.equal(target["a"], torch.ones(3)) and not target["new"].any()
    with pytest.raises(CheckpointException, match="Missing key"):
        dcp_calls.load({"new": torch.zeros(1)}, StorageReader(tmp_path / "c"))


# ---- planners -------------------------------------------------------------------------------------------------------


class Halves(DefaultSavePlanner):
    """Stores every float tensor in half precision."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: Any) -> Any:
        found = super().resolve_data(write_item)
        return found if write_item.type == WriteItemType.BYTE_IO else found.to(torch.float16)


class OwnBytes(DefaultSavePlanner):
    """Writes leaves in a form of its own."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return io.BytesIO(b"own:" + str(object).encode()) if write_item.type == WriteItemType.BYTE_IO else object


class ReadsOwnBytes(DefaultLoadPlanner):
    """Reads them."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        assert value.read(4) == b"own:"
        self.original_state_dict[read_item.dest_index.fqn] = int(value.read())


class ByItsOwnNames(DefaultLoadPlanner):
    """Fills targets that it knows under other names than its plan has."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        self.target, self.metadata = state_dict, metadata

    def create_local_plan(self) -> Any:
        return create_default_local_load_plan({"a": self.target["A"], "n": None}, self.metadata)

    def resolve_tensor(self, read_item: Any) -> Any:
        return self.target[read_item.dest_index.fqn.upper()]

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.target[read_item.dest_index.fqn.upper()] = torch.load(value)


class Renamed(ByItsOwnNames):
    """As `ByItsOwnNames`, with the default planner's state."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, metadata)
        DefaultLoadPlanner.set_up_planner(self, state_dict, metadata, is_coordinator)


@pytest.mark.parametrize("kind", [ByItsOwnNames, Renamed])
@pytest.mark.parametrize("broadcast", [False, True])
def test_a_planner_may_resolve_names_that_its_state_does_not_have(tmp_path: Path, kind: Any, broadcast: bool) -> None:
    dcp_calls.save({"a": torch.ones(3), "n": 3}, StorageWriter(tmp_path / "c"))
    planner: Any = kind()
    reader: Any = StorageReader(tmp_path / "c")
    if broadcast:
        metadata = reader.read_metadata()
        torch.save({"a": torch.ones(3), "n": 3}, tmp_path / "a.pt")
        reader = BroadcastingTorchSaveReader(tmp_path / "a.pt")
        reader.read_metadata = lambda: metadata
    found = dcp_calls.load({"A": torch.zeros(3), "N": 0}, reader, planner=planner)
    assert torch.equal(found["A"], torch.ones(3)) and found["N"] == 3


class WithoutState(DefaultSavePlanner):
    """Keeps its state under a name of its own."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.own, self.mappings = state_dict, {}

    def create_local_plan(self) -> Any:
        plan = create_default_local_save_plan(self.own, True)
        return dataclasses.replace(plan, planner_data=self.mappings)

    def lookup_object(self, index: Any) -> Any:
        return self.own[index.fqn]


def test_a_planner_may_keep_its_state_where_it_likes(tmp_path: Path) -> None:
    dcp_calls.save({"a": torch.ones(3), "n": 3}, StorageWriter(tmp_path / "c"), planner=WithoutState())
    found = asyncckpt.load(tmp_path / "c")
    assert torch.equal(found["a"], torch.ones(3)) and found["n"] == 3


def test_a_planner_may_store_other_values_than_the_state_s(tmp_path: Path) -> None:
    dcp_calls.save({"a": torch.full((1000,), 1.5), "n": 3}, StorageWriter(tmp_path / "c"), planner=Halves())
    assert asyncckpt.load(tmp_path / "c")["a"].dtype is torch.float16
    assert torch.equal(
        dcp_calls.load({"a": torch.zeros(1000)}, StorageReader(tmp_path / "c"))["a"], torch.full((1000,), 1.5)
    )


def test_a_planner_s_own_bytes_come_back_to_it_as_they_were(tmp_path: Path) -> None:
    dcp_calls.save({"n": 3}, StorageWriter(tmp_path / "c"), planner=OwnBytes())
    assert dcp_calls.load({"n": 0}, StorageReader(tmp_path / "c"), planner=ReadsOwnBytes())["n"] == 3
    with pytest.raises(PickledLeafError, match="'n'"):
        asyncckpt.load(tmp_path / "c")


def test_leaves_that_only_pickle_are_for_planners_and_for_who_allows_it(tmp_path: Path) -> None:
    saved = {"p": Point(1, 2), "mixed": (torch.ones(2), 3), "t": torch.ones(1)}
    dcp_calls.save(saved, StorageWriter(tmp_path / "c"))
    found = dcp_calls.load({"p": None, "mixed": None}, StorageReader(tmp_path / "c"))
    assert found["p"] == Point(1, 2) and type(found["p"]) is Point and torch.equal(found["mixed"][0], torch.ones(2))
    with pytest.raises(PickledLeafError, match=r"('p'.*Point|'mixed'.*tuple)"):
        asyncckpt.load(tmp_path / "c")
    assert asyncckpt.load(tmp_path / "c", allow_pickle=True)["p"] == Point(1, 2)
    assert list(asyncckpt.load(tmp_path / "c", keys=["t"])) == ["t"]


def test_a_type_that_torch_was_told_is_safe_comes_back_as_that_type(tmp_path: Path) -> None:
    saved = {"p": Point(1, 2), "inside": [(Point(3, 4),)], "t": torch.ones(1)}
    with torch.serialization.safe_globals([Point]):
        dcp_calls.save(saved, StorageWriter(tmp_path / "c"))
    found = dcp_calls.load({"p": None, "inside": [None]}, StorageReader(tmp_path / "c"))
    assert found == {"p": Point(1, 2), "inside": [(Point(3, 4),)]}
    assert type(found["p"]) is Point and type(found["inside"][0][0]) is Point


def test_a_container_that_contains_itself_comes_back_as_stock_torch_pickles_it(tmp_path: Path) -> None:
    circle: list[Any] = [1]
    circle.append(circle)
    dcp_calls.save({"c": (circle,), "t": torch.ones(1)}, StorageWriter(tmp_path / "c"))
    found = dcp_calls.load({"c": None}, StorageReader(tmp_path / "c"))["c"][0]
    assert found[0] == 1 and found[1] is found


def test_what_a_checkpointer_pickled_needs_leave(tmp_path: Path) -> None:
    with asyncckpt.SyncCheckpointer(fsync=False, allow_pickle=True) as checkpointer:
        checkpointer.save({"p": {"q": range(3)}, "n": 1}, tmp_path / "c")
    assert dcp_calls.load({"n": 0}, StorageReader(tmp_path / "c"))["n"] == 1
    assert isinstance(dcp_calls.failed_load({"p": {"q": None}}, StorageReader(tmp_path / "c")), PickledLeafError)
    found = dcp_calls.load({"p": {"q": None}}, StorageReader(tmp_path / "c", allow_pickle=True))
    assert found["p"]["q"] == range(3)


@pytest.mark.parametrize("writer", [StorageWriter, dcp.FileSystemWriter])
def test_a_target_keeps_what_planners_leave_out_since_it_is_empty(
    tmp_path: Path, writer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    saved, optimizer = (torch.optim.SGD([parameter], lr=lr) for lr in (0.1, 0.5))  # without momentum: no state
    state = {"w": torch.ones(2), "optim": saved.state_dict(), "d": {}, "l": [{}, {"t": torch.ones(1)}]}
    dcp_calls.save(state, writer(str(tmp_path / "c")))
    targets: list[dict[str, Any]] = [{**dcp_calls.erased(state), "l": [{}, {"t": torch.zeros(1)}]} for _ in range(2)]
    for target in targets:
        asyncckpt.load(tmp_path / "c", target)
        states.assert_same(target, state)
    asyncckpt.load(tmp_path / "c", {"optim": optimizer})
    assert optimizer.state_dict() == saved.state_dict()
    assert caplog.records[-1].getMessage().endswith("nothing was saved for optim.state, which stays empty")


def test_an_empty_dict_in_a_list_with_tensors_stays_one(tmp_path: Path) -> None:
    saved: dict[str, Any] = {"l": [{}, [torch.ones(1), 5]]}
    dcp_calls.save(saved, StorageWriter(tmp_path / "c"))
    states.assert_same(asyncckpt.load(tmp_path / "c"), saved)
    target = dcp_calls.load({"l": [{}, [torch.zeros(1), 0]]}, StorageReader(tmp_path / "c"))
    states.assert_same(target, saved)


def test_planners_without_flattening_find_leaves_and_containers(tmp_path: Path) -> None:
    saved = {"cfg": {"a": 1, "b": [1, 2]}, "w": torch.ones(3)}
    dcp_calls.save(saved, StorageWriter(tmp_path / "flat"), planner=DefaultSavePlanner(flatten_state_dict=False))
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save(saved, tmp_path / "nested")
    for name in ("flat", "nested"):
        target: dict[str, Any] = {"cfg": 0, "w": torch.zeros(3)}
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        dcp_calls.load(target, StorageReader(tmp_path / name), planner=planner)
        assert target["cfg"] == saved["cfg"] and torch.equal(target["w"], saved["w"])


def test_a_cached_plan_whose_save_was_not_told_to_the_rank_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Untold(StorageWriter):
        def prepare_global_plan(self, plans: Any) -> Any:
            found = super().prepare_global_plan(plans)
            self._task = None  # as on another rank, to which plans came without being unpickled
            return found

    for name in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"):
        monkeypatch.setattr(dcp.planner.SavePlanner, f"_cached_{name}", {})
    saved = {"a": torch.ones(5)}
    dcp_calls.save(saved, Untold(tmp_path / "1"), planner=DefaultSavePlanner(enable_plan_caching=True))
    error = dcp_calls.failed_save(saved, Untold(tmp_path / "2"), planner=DefaultSavePlanner(enable_plan_caching=True))
    assert isinstance(error, SaveFailedError) and error.code == "task"
    assert asyncckpt.latest_checkpoint(tmp_path) == str(tmp_path / "1")
    assert torch.equal(asyncckpt.load(tmp_path / "1")["a"], saved["a"])


@pytest.mark.parametrize(
    ("kept", "found"),
    [
        (["a", ("b", 1)], ["a", ("b", 1)]),
        ({"a": ("elsewhere", 1)}, {"a": ("elsewhere", 1)}),
        (None, None),
        (Point(1, 2), None),
    ],
)
def test_what_a_planner_keeps_comes_back_to_planners(tmp_path: Path, kept: Any, found: Any) -> None:
    class Keeps(DefaultSavePlanner):
        def create_global_plan(self, all_plans: Any) -> Any:
            plans, metadata = super().create_global_plan(all_plans)
            return plans, dataclasses.replace(metadata, planner_data=kept)

    saved = dcp_calls.save({"a": {"b": torch.ones(2)}, "c": 1}, StorageWriter(tmp_path / "c"), planner=Keeps())
    read = StorageReader(tmp_path / "c").read_metadata()
    assert read.planner_data == found and read.state_dict_metadata == saved.state_dict_metadata
    assert StorageReader(tmp_path / "c", allow_pickle=True).read_metadata().planner_data == kept
    assert torch.equal(
        dcp_calls.load({"a": {"b": torch.zeros(2)}}, StorageReader(tmp_path / "c"))["a"]["b"], torch.ones(2)
    )


def test_values_of_other_ranks_are_missing_keys(tmp_path: Path) -> None:
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save({"own": asyncckpt.PerRank(torch.ones(2)), "n": 1}, tmp_path / "c")
    assert torch.equal(dcp_calls.load({"own": torch.zeros(2)}, StorageReader(tmp_path / "c"))["own"], torch.ones(2))
    other = StorageReader(tmp_path / "c", rank_info=asyncckpt.RankInfo(1, 2))
    with pytest.raises(CheckpointException, match="Missing key"):
        dcp_calls.load({"own": torch.zeros(2)}, other)


class Forgets(DefaultSavePlanner):
    """Leaves out half of the first tensor."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        data = plan.items[0].tensor_data
        assert data is not None
        data.chunk.sizes = torch.Size([data.size[0] // 2, *data.size[1:]])
        return plan

    def lookup_object(self, index: Any) -> Any:
        found = super().lookup_object(index)
        return found[: found.shape[0] // 2]


def test_a_hole_is_found_before_anything_is_published(tmp_path: Path) -> None:
    error = dcp_calls.failed_save({"a": torch.ones(4, 3)}, StorageWriter(tmp_path / "c"), planner=Forgets())
    assert isinstance(error, SaveFailedError) and error.code == "coverage" and "'a'" in str(error)
    assert not (tmp_path / "c").exists()


class Lies(DefaultSavePlanner):
    """Resolves another dtype than it planned."""

    def lookup_object(self, index: Any) -> Any:
        return super().lookup_object(index).double()


@pytest.mark.parametrize(
    ("state_dict", "planner", "kind"),
    [
        ({"a": torch.ones(2)}, Lies(), UnsupportedLeafError),
        ({"a": torch.eye(3).to_sparse()}, None, UnsupportedLeafError),
        ({"a@rank0": torch.ones(2)}, None, DuplicateNameError),
        ({"__metadata__": torch.ones(2)}, None, DuplicateNameError),
        ({"k" * 5000: 1}, None, UnsupportedLeafError),
    ],
)
def test_what_cannot_be_stored_is_refused_and_leaves_nothing(
    tmp_path: Path, state_dict: dict[str, Any], planner: Any, kind: type[Exception]
) -> None:
    assert isinstance(dcp_calls.failed_save(state_dict, StorageWriter(tmp_path / "c"), planner=planner), kind)
    assert not (tmp_path / "c").exists()


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(5)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.empty(2, 3, device="meta"), "on meta"),
        (lambda: torch.nn.Linear(2, 3, device="meta").weight, "on meta"),
        (lambda: states.resized(0), "no memory"),
        (lambda: states.resized(3999), "fewer bytes"),
        (fake, "of type FakeTensor"),
    ],
    ids=["meta", "parameter", "freed", "shrunk", "fake"],
)
def test_a_tensor_without_memory_is_refused(tmp_path: Path, make: Any, why: str) -> None:
    writer = StorageWriter(tmp_path / "c")
    reason = dcp_calls.failed_save({"a": torch.ones(3), "w": make()}, writer)
    assert isinstance(reason, UnsupportedLeafError)
    assert "'w'" in str(reason) and why in str(reason)
    assert not (tmp_path / "c").exists()


# ---- arguments ------------------------------------------------------------------------------------------------------


def test_one_file_per_rank_or_one_per_tensor(tmp_path: Path) -> None:
    saved = {f"t{n}": torch.full((10,), float(n)) for n in range(5)} | {"n": 1}
    dcp_calls.save(saved, StorageWriter(tmp_path / "one", thread_count=3))
    dcp_calls.save(saved, StorageWriter(tmp_path / "many", single_file_per_rank=False))
    assert len(storage_samples.shard_paths(str(tmp_path / "one"))) == 1
    assert len(storage_samples.shard_paths(str(tmp_path / "many"))) == 5
    states.assert_same(asyncckpt.load(tmp_path / "many"), saved)


@pytest.mark.parametrize("sync", [True, False])
def test_sync_files_flushes_and_the_manifest_says_so(tmp_path: Path, sync: bool) -> None:
    writer = StorageWriter(tmp_path / "c", sync_files=sync)
    writer._files = files = storage_samples.RecordingFiles()
    dcp_calls.save({"a": torch.ones(3)}, writer)
    assert any(call[0] == "fsync" for call in files.calls) is sync
    assert (b'"fsync": true' in (tmp_path / "c" / "manifest.json").read_bytes()) is sync


def test_an_older_checkpoint_is_replaced_at_once_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "c"
    dcp_calls.save({"a": torch.ones(3)}, StorageWriter(path))
    assert isinstance(
        dcp_calls.failed_save({"a": torch.zeros(3)}, StorageWriter(path, overwrite=False)), CheckpointExistsError
    )
    assert torch.equal(asyncckpt.load(path)["a"], torch.ones(3))
    before = set(os.listdir(path))
    dcp_calls.save({"a": torch.full((3,), 2.0)}, StorageWriter(path))
    assert torch.equal(asyncckpt.load(path)["a"], torch.full((3,), 2.0))
    assert set(os.listdir(path)) & before == {"manifest.json"}


def test_later_saves_are_newer_whoever_made_them(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path / "1")
    for name in ("1", "2"):
        dcp_calls.save({"a": torch.ones(1), "step": 5}, writer, checkpoint_id=tmp_path / name)
    dcp_calls.save({"a": torch.ones(1), "step": 1}, StorageWriter(tmp_path / "3"))
    ids = [SaveId.parse(asyncckpt.open_checkpoint(tmp_path / name).save_id) for name in ("1", "2", "3")]
    assert [one.epoch - ids[0].epoch for one in ids] == [0, 1, 2]
    assert asyncckpt.latest_checkpoint(tmp_path) == str(tmp_path / "3")
    assert asyncckpt.open_checkpoint(tmp_path / "2").step == 5


def test_a_reader_without_threads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="threads"):
        StorageReader(tmp_path, threads=0)


def test_saving_without_collectives_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="use_collectives"):
        dcp_calls.save({"a": 1}, StorageWriter(tmp_path / "c"), use_collectives=False)


@pytest.mark.parametrize("kind", [StorageWriter, StorageReader])
def test_ids_are_paths_and_of_readers_also_urls_of_object_stores(tmp_path: Path, kind: Any) -> None:
    assert kind.validate_checkpoint_id(tmp_path) and not kind.validate_checkpoint_id("ftp://host/c")
    assert kind.validate_checkpoint_id("s3://bucket/c") is (kind is StorageReader)
    with pytest.raises(UnsupportedPathError):
        kind("ftp://host/c")
    one = kind(tmp_path / "a")
    one.reset()
    assert one.checkpoint_id == str(tmp_path / "a")
    one.reset(tmp_path / "b")
    assert one.checkpoint_id == str(tmp_path / "b")


def test_metadata_name_the_version_of_torch_s_format(tmp_path: Path) -> None:
    written = dcp_calls.save({"w": torch.ones(2)}, StorageWriter(tmp_path))
    assert written.version == StorageReader(tmp_path).read_metadata().version == CURRENT_DCP_VERSION
    planner = DefaultLoadPlanner()
    dcp_calls.load({"w": torch.zeros(2)}, StorageReader(tmp_path), planner=planner)
    assert planner.metadata is not None and planner.metadata.version == CURRENT_DCP_VERSION


def test_the_result_says_what_was_saved_and_where(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path / "c")
    assert writer.save_id is None
    for _ in range(2):
        found = dcp_calls.save({"a": torch.ones(3), "n": 1}, writer)
        assert found.storage_meta.checkpoint_id == str(tmp_path / "c")
        assert found.storage_meta.save_id == asyncckpt.open_checkpoint(tmp_path / "c").save_id
        (stored,) = found.storage_data.values()
        data = (tmp_path / "c" / stored.relative_path).read_bytes()[stored.offset : stored.offset + stored.length]
        assert data == states.bits_of(torch.ones(3))
        read = StorageReader(tmp_path / "c").read_metadata()
        assert read.state_dict_metadata == found.state_dict_metadata and read.planner_data == found.planner_data
        assert read.storage_meta is not None and read.storage_meta.save_id == found.storage_meta.save_id
        assert writer.save_id == read.storage_meta.save_id == writer.storage_meta().save_id
    writer.reset(tmp_path / "d")
    assert writer.save_id is None


@pytest.mark.parametrize(
    ("make", "name", "nearest"),
    [
        (lambda **kw: asyncckpt.dcp.StorageWriter("/tmp/x", **kw), "thread_counts", "thread_count"),
        (lambda **kw: asyncckpt.dcp.StorageWriter("/tmp/x", use_worker=False, **kw), "thread_counts", "thread_count"),
        (lambda **kw: asyncckpt.dcp.StorageWriter("/tmp/x", use_worker=False, **kw), "slot_timeout", "slot_timeout_s"),
        (lambda **kw: asyncckpt.dcp.StorageWriter("/tmp/x", **kw), "over_write", "overwrite"),
        (lambda **kw: asyncckpt.dcp.StorageWriter("/tmp/x", **kw), "files_per_rank", ""),
        (lambda **kw: StorageReader("/tmp/x", **kw), "thread", "threads"),
        (asyncckpt.SyncCheckpointer, "files_per_ranks", "files_per_rank"),
        (asyncckpt.AsyncCheckpointer, "slot", "slots"),
    ],
)
def test_an_unknown_keyword_is_named_with_the_nearest_that_there_is(make: Any, name: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**{name: 1})
    assert caught.value.field == name and f"unknown field {name!r}; the nearest is '{nearest}" in str(caught.value)
    assert "is about the worker" not in str(caught.value)


@pytest.mark.parametrize("name", ["_extensions", "serialization_format"])
def test_what_only_stocks_writer_takes_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{name} is of torch's FileSystemWriter only: the format") as caught:
        StorageWriter(tmp_path, **{name: None})
    assert caught.value.field == name


IMPOSSIBLE: list[tuple[dict[str, Any], str, str]] = [
    ({"use_worker": False, "endpoint": "ipc:///x.sock"}, "endpoint", "is about the worker"),
    ({"use_worker": False, "write_threads": 4}, "write_threads", "is about the worker"),
    ({"use_worker": False, "slot_timeout_s": 3.0}, "slot_timeout_s", "is about the worker"),
    ({"use_worker": False, "thread_count": 0}, "thread_count", ""),
    ({"use_worker": False, "thread_count": 1.5}, "thread_count", ""),
    ({"use_worker": False, "per_thread_copy_ahead": -1}, "per_thread_copy_ahead", ""),
    ({"slots": 3}, "slots", ""),
    ({"fsync": False}, "fsync", ""),
    ({"write_threads": 1}, "write_threads", ""),
]


@pytest.mark.parametrize(("kw", "field", "said"), IMPOSSIBLE)
def test_impossible_settings_are_refused(kw: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}.*{said}") as caught:
        asyncckpt.dcp.StorageWriter("/tmp/x", **kw)
    assert caught.value.field == field


def test_a_writer_pickles_without_what_it_has_staged(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path / "c", thread_count=2, overwrite=False)
    staged = writer.stage({"a": torch.ones(100_000)})
    writer.state_dict_cache = staged
    data = pickle.dumps(writer)
    assert len(data) < 5000
    dcp_calls.save(staged, pickle.loads(data))
    assert torch.equal(asyncckpt.load(tmp_path / "c")["a"], torch.ones(100_000))


# ---- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "at"),
    [("mkdir", ""), ("open", ".safetensors"), ("pwrite", ""), ("fsync", ""), ("open", ".index"), ("link", "manifest")],
)
def test_a_save_that_fails_is_named_and_leaves_the_older_one_alone(tmp_path: Path, method: str, at: str) -> None:
    path = tmp_path / "run" / "c"
    for number, there in enumerate((False, True)):
        if there and method in ("mkdir", "link"):
            continue  # the directory is there, and an older manifest is renamed over
        if there:
            dcp_calls.save({"a": torch.ones(3)}, StorageWriter(path))
        before = sorted(os.listdir(path)) if there else []
        writer = StorageWriter(path)
        writer._files = files = storage_samples.failing(method, errno.ENOSPC, at=at)
        with pytest.raises(CheckpointException) as caught:
            dcp_calls.save({"a": torch.zeros(3)}, writer)
        assert files.failed == method
        error = dcp_calls.reason(caught.value)
        assert isinstance(error, SaveFailedError) and error.code == "ENOSPC", number
        writer.reset()
        assert sorted(os.listdir(path)) == before if there else not path.exists()
        if there:
            assert torch.equal(asyncckpt.load(path)["a"], torch.ones(3))


def test_what_other_ranks_wrote_goes_when_the_coordinator_s_writer_goes(tmp_path: Path) -> None:
    """Two ranks in one process: both have written when the save ends by something else."""
    path = tmp_path / "run" / "c"
    writers, planners = [StorageWriter(path) for _ in range(2)], [DefaultSavePlanner() for _ in range(2)]
    for rank in range(2):
        planners[rank].set_up_planner({f"t{rank}": torch.ones(3), "n": 1}, None, rank == 0)
        writers[rank].set_up_storage_writer(rank == 0, rank=rank)
    plans = [writers[rank].prepare_local_plan(planners[rank].create_local_plan()) for rank in range(2)]
    plans = writers[0].prepare_global_plan(planners[0].create_global_plan(plans)[0])
    for rank in range(2):
        writers[rank].write_data(pickle.loads(pickle.dumps(plans[rank])), planners[rank]).wait()
    assert sum(name.startswith("rank-00001") for name in os.listdir(path)) == 3
    writers.pop().reset()
    assert sum(name.startswith("rank-00001") for name in os.listdir(path)) == 3, "it might be being published"
    del writers[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("planner_data", [{"$": "no such tag", "v": 1}, {"$": "dcp", "v": 3}, {"nothing": 1}])
def test_planner_data_that_make_no_sense_are_damage(tmp_path: Path, planner_data: Any) -> None:
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
        metadata = {"torch.distributed.checkpoint": {"planner_data": planner_data}}
        checkpointer.save({"a": torch.ones(3)}, tmp_path / "c", metadata=metadata)
    with pytest.raises(CorruptCheckpointError, match="planner data"):
        StorageReader(tmp_path / "c").read_metadata()


@pytest.mark.parametrize("what", ["shard", "index", "manifest", "nothing"])
def test_damage_is_a_typed_error(tmp_path: Path, what: str) -> None:
    path = tmp_path / "c"
    if what != "nothing":
        dcp_calls.save({"a": torch.ones(3000), "n": 1}, StorageWriter(path))
        name = next(
            n for n in os.listdir(path) if n.endswith({"shard": ".safetensors"}.get(what, "index")) or what in n
        )
        storage_samples.flip_byte(str(path / name), 5000 if what == "shard" else 60)
    error = dcp_calls.failed_load({"a": torch.zeros(3000)}, StorageReader(path))
    assert isinstance(error, CheckpointNotFoundError if what == "nothing" else CorruptCheckpointError)
    if what == "shard":
        assert error.fqn == "a" and error.file.endswith(".safetensors")  # type: ignore[attr-defined]
        dcp_calls.load({"a": torch.zeros(3000)}, StorageReader(path, verify=False))
    else:
        with pytest.raises(type(error)):
            StorageReader(path).read_metadata()


def test_a_plan_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    class Wrong(DefaultLoadPlanner):
        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            object.__setattr__(plan.items[0].storage_index, "offset", torch.Size([1]))
            return plan

    dcp_calls.save({"a": torch.ones(3)}, StorageWriter(tmp_path / "c"))
    assert isinstance(
        dcp_calls.failed_load({"a": torch.zeros(3)}, StorageReader(tmp_path / "c"), planner=Wrong()), MissingKeysError
    )


def test_a_tensor_of_the_target_is_not_replaced_by_a_dict(tmp_path: Path) -> None:
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save({"a": {"b": torch.ones(2)}, "x": torch.ones(2)}, tmp_path / "c")
    target = {"a": torch.zeros(2), "x": torch.zeros(2)}
    own = target["a"]
    error = dcp_calls.failed_load(target, StorageReader(tmp_path / "c"))
    assert isinstance(error, LeafTypeMismatchError) and error.fqn == "a"
    assert target["a"] is own and not target["x"].any()


def test_targets_of_other_dtypes_and_layouts_are_filled(tmp_path: Path) -> None:
    saved = {"a": torch.arange(12.0).view(3, 4), "b": torch.arange(12.0).view(3, 4)}
    dcp_calls.save(saved, StorageWriter(tmp_path / "c"))
    target = {"a": torch.zeros(4, 3, dtype=torch.float64).t(), "b": torch.zeros(3, 8)[:, ::2]}
    dcp_calls.load(target, StorageReader(tmp_path / "c"))
    assert torch.equal(target["a"], saved["a"].double()) and torch.equal(target["b"], saved["b"])
