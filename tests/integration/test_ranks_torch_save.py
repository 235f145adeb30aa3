"""Stock `dcp.load` of a torch.save file by `BroadcastingTorchSaveReader`: one rank reads, each gets its own shards."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import rank_processes
import states
import torch

from asyncckpt.errors import SharedLoadError

pytest.importorskip("numpy")

ROWS, COLUMNS, MESSAGE_NBYTES = 10, 6, 256
WHOLE = {
    "by_rows": torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS),
    "by_columns": torch.arange(35, dtype=torch.bfloat16).reshape(5, 7),
    "turned": torch.arange(500.0).reshape(20, 25).t(),
    "few": torch.arange(3.0).reshape(3, 1),
}


def saved_state() -> dict[str, Any]:
    return {
        "model": WHOLE,
        "same": torch.linspace(0, 1, 200, dtype=torch.float64),
        "scalar": torch.tensor(5),
        "empty": torch.zeros(0, 3),
        "optim": {"state": {0: {"step": torch.tensor(4.0)}}, "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
        "step": 7,
        "name": "grüße",
        "list": [1, 2, "x"],
    }


def target_state(world_size: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    placements = {"by_rows": Shard(0), "by_columns": Shard(1), "turned": Shard(1), "few": Shard(0)}
    model: dict[str, Any] = {
        name: distribute_tensor(torch.zeros_like(whole).contiguous(), mesh, [placements[name]])
        for name, whole in WHOLE.items()
    }
    model["by_rows"] = model["by_rows"].double()  # of another dtype than the file's
    return {
        "model": model,
        "same": distribute_tensor(torch.zeros(200, dtype=torch.float64), mesh, [Replicate()]),
        "scalar": torch.tensor(0),
        "empty": torch.ones(0, 3),
        "optim": {"state": {0: {"step": torch.tensor(0.0)}}, "groups": [{"lr": 0.0, "betas": (0, 0)}]},
        "step": 0,
        "name": "",
        "list": [],
    }


def check(state: dict[str, Any]) -> None:
    for name, whole in WHOLE.items():
        wanted = whole.double() if name == "by_rows" else whole
        states.assert_same(state["model"][name].full_tensor(), wanted.contiguous(), name)
    expected = saved_state()
    states.assert_same(state["same"].to_local(), expected["same"])
    for name in ("scalar", "empty", "optim", "step", "name", "list"):
        states.assert_same(state[name], expected[name], name)


def stock_load(state: dict[str, Any], path: str, *, allow_partial: bool = False, **kw: Any) -> None:
    import torch.distributed.checkpoint as dcp

    from asyncckpt.dcp import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner

    group = kw.get("process_group")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(
            state,
            checkpoint_id=path,
            storage_reader=BroadcastingTorchSaveReader(**kw),
            planner=DynamicMetaLoadPlanner(allow_partial_load=allow_partial),
            process_group=group,
        )


class Counted:
    """Counts the bytes of messages that this rank takes, and cuts messages small."""

    def __init__(self, message_nbytes: int = MESSAGE_NBYTES) -> None:
        import torch.distributed as dist

        from asyncckpt.dcp import file_leaves
        from asyncckpt.loading.shared import broadcast

        self.received = 0
        self.opened = False
        recv, leaves = dist.recv, file_leaves.FileLeaves.__init__

        def counting_recv(tensor: torch.Tensor, *args: Any, **kw: Any) -> Any:
            self.received += tensor.numel() * (tensor.dtype == torch.uint8)
            return recv(tensor, *args, **kw)

        def noting_open(*args: Any) -> None:
            self.opened = True
            leaves(*args)

        dist.recv = counting_recv  # type: ignore[assignment]
        file_leaves.FileLeaves.__init__ = noting_open  # type: ignore[method-assign, assignment]
        broadcast.MESSAGE_NBYTES = file_leaves.SLAB_NBYTES = message_nbytes  # type: ignore[attr-defined]


def load(rank: int, path: str, world_size: int, ways: list[tuple[int, str]]) -> list[bool]:
    """Load in several ways; only the ranks that read get the right path. Return whether this one opened it."""
    from asyncckpt.dcp import broadcast_reader

    found = []
    broadcast_reader.machine = lambda: f"machine-{rank // 2}"  # type: ignore[attr-defined]
    for coordinator, read_on in ways:
        counted = Counted()
        reads = rank == coordinator or (read_on == "node" and rank // 2 != coordinator // 2 and rank % 2 == 0)
        state = target_state(world_size)
        stock_load(state, path if reads else "/nowhere", coordinator_rank=coordinator, read_on=read_on)
        check(state)
        found.append(counted.opened)
    return found


@pytest.mark.parametrize(
    ("world_size", "ways"),
    [
        (1, [(0, "coordinator"), (0, "node")]),
        (2, [(0, "coordinator"), (1, "coordinator")]),
        (4, [(2, "coordinator"), (3, "node")]),
    ],
)
def test_one_rank_reads_and_every_rank_gets_its_shards(
    world_size: int, ways: list[tuple[int, str]], tmp_path: Path
) -> None:
    torch.save(saved_state(), tmp_path / "a.pt")
    found = rank_processes.run(world_size, load, str(tmp_path / "a.pt"), world_size, ways)
    for n, (coordinator, read_on) in enumerate(ways):
        readers = {coordinator} | ({0} if read_on == "node" else set())
        assert {rank for rank, opened in enumerate(found) if opened[n]} == readers


def load_one(rank: int, path: str, world_size: int) -> int:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    counted = Counted(1 << 16)
    mesh = init_device_mesh("cpu", (world_size,))
    state: dict[str, Any] = {"w": distribute_tensor(torch.zeros(1000, 128), mesh, [Shard(0)])}
    stock_load(state, path, coordinator_rank=1)
    assert torch.equal(state["w"].full_tensor(), torch.arange(128_000.0).reshape(1000, 128))
    return counted.received


def test_a_rank_receives_its_own_shard_and_no_more(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(128_000.0).reshape(1000, 128), "other": torch.ones(100_000)}, tmp_path / "a.pt")
    found = rank_processes.run(3, load_one, str(tmp_path / "a.pt"), 3)
    shard = 334 * 128 * 4
    assert found[1] == 0, "it reads"
    assert shard <= found[0] <= shard + 1000
    assert shard - 1024 <= found[2] <= shard


FAILURES = {
    "missing": ("MissingKeysError", "MissingKeysError"),
    "missing on one": ("SharedLoadError", "MissingKeysError"),
    "shape": ("ShapeMismatchError", "ShapeMismatchError"),
    "object": ("LeafTypeMismatchError", "LeafTypeMismatchError"),
    "no file": ("CheckpointNotFoundError", "SharedLoadError"),
    "reading": ("OSError", "SharedLoadError"),
    "reading what all want": ("OSError", "SharedLoadError"),
    "planner": ("", "ValueError"),
    "planner of the reader": ("ValueError", "SharedLoadError"),
    "interrupted": ("SharedLoadError", "KeyboardInterrupt"),
}


def fail(rank: int, path: str) -> tuple[dict[str, tuple[str, str]], str]:
    """Return the errors of both ranks in every case; a group that survived them all loads."""
    from unittest import mock

    from torch.distributed.checkpoint.api import CheckpointException

    from asyncckpt.dcp import DynamicMetaLoadPlanner
    from asyncckpt.dcp.file_leaves import FileLeaves

    Counted()
    found = {}
    for what in FAILURES:
        state = changed_target(what, rank)
        patches: list[Any] = []
        if what.startswith("reading") and rank == 0:
            effect = failing_read(FileLeaves.read, 12 if what == "reading" else 2)
            patches.append(mock.patch.object(FileLeaves, "read", effect))
        if what.startswith("planner") and rank == (0 if what.endswith("reader") else 1):
            patches.append(mock.patch.object(DynamicMetaLoadPlanner, "commit_tensor", side_effect=ValueError("no")))
        if what == "interrupted" and rank == 1:
            patches.append(mock.patch.object(DynamicMetaLoadPlanner, "load_bytes", side_effect=KeyboardInterrupt))
        for patch in patches:
            patch.start()
        try:
            stock_load(state, "/nowhere" if what == "no file" else path)
        except CheckpointException as error:
            names = [type(error.failures[r][0]).__name__ if r in error.failures else "" for r in (0, 1)]
            found[what] = (names[0], names[1])
        mock.patch.stopall()
        assert "reading" in what or "planner" in what or not bool(state["scalar"]), "something was changed"
    state = target_state(2)
    stock_load(state, path)
    check(state)
    return found, "loaded"


def changed_target(what: str, rank: int) -> dict[str, Any]:
    state = target_state(2)
    if what == "missing" or (what == "missing on one" and rank == 1):
        state["absent"] = torch.zeros(2)
    elif what == "shape":
        state["same"] = torch.zeros(100, dtype=torch.float64)
    elif what == "object":
        state["name"] = torch.zeros(2)
    return state


def failing_read(read: Any, at: int) -> Any:
    count = [0]

    def failing(*args: Any) -> None:
        count[0] += 1
        if count[0] == at:
            raise OSError(5, "the disk is gone")
        read(*args)

    return failing


def test_a_failure_ends_the_load_on_all_ranks_and_the_group_goes_on(tmp_path: Path) -> None:
    torch.save(saved_state(), tmp_path / "a.pt")
    assert rank_processes.run(2, fail, str(tmp_path / "a.pt"), timeout_s=60) == [(FAILURES, "loaded")] * 2


def load_part(rank: int, path: str) -> Any:
    state = {"same": torch.zeros(200, dtype=torch.float64), "absent": torch.full((2,), 3.0), "note": "mine"}
    stock_load(state, path, allow_partial=True)
    states.assert_same(state["same"], saved_state()["same"])
    return state["absent"].tolist(), state["note"]


def test_what_the_file_lacks_stays_where_the_planner_allows_it(tmp_path: Path) -> None:
    torch.save(saved_state(), tmp_path / "a.pt")
    assert rank_processes.run(2, load_part, str(tmp_path / "a.pt")) == [([3.0, 3.0], "mine")] * 2


def load_in_a_group(rank: int, path: str) -> list[str]:
    import torch.distributed as dist
    from torch.distributed.checkpoint.api import CheckpointException

    group = dist.new_group([1, 2])
    if rank == 0:
        return []
    found = []
    for coordinator in (2, 0):
        state = {"same": torch.zeros(200, dtype=torch.float64), "name": ""}
        try:
            stock_load(state, path if rank == 2 else "/nowhere", coordinator_rank=coordinator, process_group=group)
        except CheckpointException as error:
            found += sorted({type(failure[0]).__name__ for failure in error.failures.values()})
        else:
            states.assert_same(state, {"same": saved_state()["same"], "name": "grüße"})
            found.append("loaded")
    return found


def test_a_part_of_the_ranks_loads_and_the_one_that_reads_must_be_among_them(tmp_path: Path) -> None:
    torch.save(saved_state(), tmp_path / "a.pt")
    found = rank_processes.run(3, load_in_a_group, str(tmp_path / "a.pt"))
    assert found == [[], ["loaded", "ConfigError"], ["loaded", "ConfigError"]]


NODE_FAILURES = {
    "absent": ["SharedLoadError", "SharedLoadError", "CheckpointNotFoundError", "SharedLoadError"],
    "absent for the coordinator": ["CheckpointNotFoundError", "SharedLoadError", "SharedLoadError", "SharedLoadError"],
    "absent everywhere": ["CheckpointNotFoundError", "SharedLoadError", "CheckpointNotFoundError", "SharedLoadError"],
    "damaged": ["SharedLoadError", "SharedLoadError", "CorruptCheckpointError", "SharedLoadError"],
    "interrupted": ["SharedLoadError", "SharedLoadError", "KeyboardInterrupt", "SharedLoadError"],
    "another file": ["SharedLoadError", "SharedLoadError", "MissingKeysError", "MissingKeysError"],
    "reading": ["", "", "OSError", "SharedLoadError"],
}


def fail_on_nodes(rank: int, good: str, bad: dict[str, str]) -> dict[str, tuple[list[str], set[int | None]]]:
    """Return, for each case, the ranks' errors and whom they name; ranks 2 and 3 are a node, which rank 2 reads for."""
    from unittest import mock

    import torch.distributed as dist
    from torch.distributed.checkpoint.api import CheckpointException

    from asyncckpt.dcp import broadcast_reader
    from asyncckpt.dcp.file_leaves import FileLeaves

    broadcast_reader.machine = lambda: f"machine-{rank // 2}"  # type: ignore[attr-defined]
    found = {}
    for what in NODE_FAILURES:
        Counted()
        fails = {"absent everywhere": True, "absent for the coordinator": rank < 2}.get(what, rank >= 2)
        if fails and what == "reading":
            mock.patch.object(FileLeaves, "read", failing_read(FileLeaves.read, 3)).start()
        if fails and what == "interrupted":
            mock.patch.object(FileLeaves, "facts", side_effect=KeyboardInterrupt).start()
        try:
            stock_load(target_state(4), bad.get(what, good) if fails else good, read_on="node")
        except CheckpointException as error:
            errors = [error.failures[r][0] if r in error.failures else None for r in range(4)]
            named = {e.rank for e in errors if isinstance(e, SharedLoadError)}
            found[what] = ["" if e is None else type(e).__name__ for e in errors], named
        mock.patch.stopall()
        said: list[Any] = [None] * 4
        dist.all_gather_object(said, (what, rank))
        assert said == [(what, r) for r in range(4)], "the ranks are in step"
    state = target_state(4)
    stock_load(state, good, read_on="node")
    check(state)
    return found


def test_a_failure_on_one_node_ends_the_load_on_all_and_the_group_goes_on(tmp_path: Path) -> None:
    torch.save(saved_state(), tmp_path / "a.pt")
    torch.save({"other": 1}, tmp_path / "other.pt")
    (tmp_path / "damaged.pt").write_bytes((tmp_path / "a.pt").read_bytes()[:-300])
    bad = {"damaged": str(tmp_path / "damaged.pt"), "another file": str(tmp_path / "other.pt")}
    bad |= {what: "/nowhere" for what in NODE_FAILURES if what.startswith("absent")}
    for found in rank_processes.run(4, fail_on_nodes, str(tmp_path / "a.pt"), bad):
        assert {what: errors for what, (errors, _) in found.items()} == NODE_FAILURES
        assert {what: named for what, (_, named) in found.items()} == {
            what: {0} if "coordinator" in what or "everywhere" in what else {2} for what in NODE_FAILURES
        }
