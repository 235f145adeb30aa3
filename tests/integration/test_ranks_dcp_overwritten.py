"""Stock `dcp.load` through `StorageReader` of a checkpoint that is overwritten after one rank has read its metadata."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import dcp_calls
import foreign_samples
import pytest
import rank_processes
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from in_process_writer import StorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan

from asyncckpt.dcp import StorageReader
from asyncckpt.errors import RanksDisagreeError

pytest.importorskip("numpy")
pytest.importorskip("safetensors")


class OwnPlans(DefaultLoadPlanner):
    """Makes other plans of the ranks', with nothing in them but the items."""

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return [LoadPlan(plan.items) for plan in super().create_global_plan(global_plan)]


class KeepsPlans(DefaultLoadPlanner):
    """Gives the plans of its first load again, which have the coordinator's and the ranks' marks of then."""

    plans: list[LoadPlan] | None = None
    own: LoadPlan | None = None

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        self.plans = self.plans or super().create_global_plan(global_plan)
        return self.plans

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        self.own = self.own or super().finish_plan(new_plan)
        return self.own


class KeepsPlansOfAll(KeepsPlans):
    """As that, on the coordinator only."""

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        return new_plan


class Overtaken(StorageReader):
    """Rank 1 reads the metadata when rank 0 has read them and saved anew."""

    def __init__(self, path: str, kind: str) -> None:
        super().__init__(path)
        self._kind = kind

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        token = torch.zeros(1)
        if dist.get_rank() == 1:
            dist.recv(token, 0)
            return super().read_metadata(*args, **kwargs)
        try:
            return super().read_metadata(*args, **kwargs)
        finally:
            write(self._kind, self.path, 2.0)
            dist.send(token, 1)


def write(kind: str, path: str, value: float) -> None:
    state = {"a": torch.full((3, 4), value), "b": torch.full((5,), value)}
    if kind == "ours":
        dcp_calls.save(state, StorageWriter(path, sync_files=False))
    elif kind == "dcp":
        dcp_calls.save(state, dcp.FileSystemWriter(path, sync_files=False))
    elif kind == "torch":
        torch.save(state, path)
    else:
        foreign_samples.save_safetensors(state, pathlib.Path(path))
        os.utime(path, (value, value))  # two saves may fall into one tick of the file system's clock


def target() -> dict[str, Any]:
    return {"a": torch.zeros(3, 4), "b": torch.zeros(5)}


def load(rank: int, root: str, kind: str) -> Any:
    path, found = f"{root}/c", {}
    for planner in (DefaultLoadPlanner(), OwnPlans()):
        if rank == 0:
            write(kind, path, 1.0)
        state = target()
        try:
            dcp.load(state, storage_reader=Overtaken(path, kind), planner=planner)
        except CheckpointException as error:
            kinds = {type(failure[0]) for failure in error.failures.values()}
            found[type(planner).__name__] = kinds, [float(value.max()) for value in state.values()]
        dist.barrier()
        dcp.load(state, storage_reader=StorageReader(path), planner=type(planner)())
        assert all(bool((value == 2).all()) for value in state.values())
    return found


@pytest.mark.parametrize("kind", ["ours", "dcp", "torch", "safetensors"])
def test_ranks_that_have_found_different_saves_load_neither(tmp_path: pathlib.Path, kind: str) -> None:
    for found in rank_processes.run(2, load, str(tmp_path), kind):
        assert found["DefaultLoadPlanner"] == ({RanksDisagreeError}, [0.0, 0.0])
        assert RanksDisagreeError in found["OwnPlans"][0]  # of rank 1; the files of what rank 0 has found are gone


def load_on(rank: int, root: str) -> list[float]:
    """Load different saves with one planner, which keeps its plans; then one of each rank's own."""
    found = []
    for planner in (DefaultLoadPlanner(), OwnPlans(), KeepsPlans(), KeepsPlansOfAll()):
        for number in (1, 2):
            state = target()
            kept = planner if isinstance(planner, KeepsPlans) else type(planner)()
            dcp.load(state, storage_reader=StorageReader(f"{root}/{number}"), planner=kept)
            found.append(float(state["a"][2, 3]))
    state = target()
    dcp.load(state, storage_reader=StorageReader(f"{root}/ours-{rank}"))
    found.append(float(state["b"][4]))
    for number in (1, 2):
        state = target()
        dcp_calls.load(state, StorageReader(f"{root}/{1 + (rank + number) % 2}"))  # each for itself
        found.append(float(state["a"][2, 3]) - (rank + number) % 2)
    return found


def test_planners_that_keep_plans_and_paths_of_each_rank_load_as_ever(tmp_path: pathlib.Path) -> None:
    for number in (1, 2):
        write("ours", str(tmp_path / str(number)), float(number))
    for rank in (0, 1):
        write("ours", str(tmp_path / f"ours-{rank}"), 3.0)
    for found in rank_processes.run(2, load_on, str(tmp_path)):
        assert found == [1.0, 2.0] * 4 + [3.0] + [1.0, 1.0]
