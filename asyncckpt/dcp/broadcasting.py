"""`BroadcastingTorchSaveReader`: stock `dcp.load` of a file that one rank reads, each rank getting its own shard."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from asyncckpt.dcp.courier import Courier, lost_load
from asyncckpt.dcp.file_leaves import Fact, FileLeaves
from asyncckpt.dcp.routes import Route, plan_routes
from asyncckpt.dcp.taking import Taking, wish_of
from asyncckpt.distributed.process_group import machine
from asyncckpt.errors import ConfigError
from asyncckpt.loading.fetching import thread_count
from asyncckpt.paths import absolute_path


class BroadcastingTorchSaveReader(StorageReader):
    """As torch's reader of this name; streaming, for sharded targets, and with leaves that are no tensors.

    One rank reads the file and passes it on over the group: what all ranks want by broadcast, anything else to those
    who want it, so that a rank gets its own shards and no more. Two slabs of 32 MiB are in memory at a time. The file
    may be anything that `asyncckpt.load` reads; pickles go through the restricted unpickler, so nothing of it is run.
    Used with `DynamicMetaLoadPlanner`, as it gives no metadata.

    Args:
        checkpoint_id: The file; that of `dcp.load` takes its place.
        coordinator_rank: The global rank that reads. It need not be the coordinator of `dcp.load`, which is rank 0.
        read_on: "coordinator": only that rank needs to see the file. "node": one rank of each machine reads for it.
        process_group: That of `dcp.load`, if it is given one.
        threads: Reading threads; None takes 4.

    Raises:
        ConfigError: An argument that makes no sense.
        UnsupportedPathError: A URL, or no path at all.
    """

    def __init__(
        self,
        checkpoint_id: str | os.PathLike[str] | None = None,
        coordinator_rank: int = 0,
        *,
        read_on: str = "coordinator",
        process_group: dist.ProcessGroup | None = None,
        threads: int | None = None,
    ) -> None:
        if read_on not in ("coordinator", "node"):
            raise ConfigError(f"read_on={read_on!r}: 'coordinator' or 'node' is wanted", field="read_on", value=read_on)
        self.coordinator_rank, self.read_on = coordinator_rank, read_on
        self._process_group, self._threads = process_group, thread_count(threads)
        self.checkpoint_id: str | None = None
        self.reset(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin anew, at `checkpoint_id`.

        Raises:
            UnsupportedPathError: A URL, or no path at all.
        """
        self.checkpoint_id = None if checkpoint_id is None else absolute_path(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return nothing: most ranks need not see the file, and the planner builds metadata from its target."""
        return Metadata(state_dict_metadata={})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a load.

        Raises:
            ConfigError: There is no file to read.
        """
        if self.checkpoint_id is None:
            raise ConfigError("give checkpoint_id to dcp.load or to the reader", field="checkpoint_id")

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan, with this rank's machine for `read_on="node"`."""
        return dataclasses.replace(plan, storage_data=machine() if self.read_on == "node" else None)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans, each with who reads for that rank, and what is sent in which order.

        Raises:
            ConfigError: `process_group` is not the group of `dcp.load`, or `coordinator_rank` is not in it.
        """
        routes = plan_routes([[wish_of(item) for item in plan.items] for plan in plans], self._readers(plans))
        return [dataclasses.replace(plan, storage_data=route) for plan, route in zip(plans, routes, strict=True)]

    def _readers(self, plans: list[LoadPlan]) -> list[int]:
        if len(plans) == 1:
            return [0]
        ranks = dist.get_process_group_ranks(self._group())
        if len(ranks) != len(plans):
            raise ConfigError(
                f"{len(plans)} ranks load, and the reader's process_group has {len(ranks)}: give it that of dcp.load",
                field="process_group",
            )
        if self.coordinator_rank not in ranks:
            raise ConfigError(
                f"coordinator_rank={self.coordinator_rank!r} is not among the ranks that load: {ranks[:20]}",
                field="coordinator_rank",
                value=repr(self.coordinator_rank),
            )
        coordinator = ranks.index(self.coordinator_rank)
        machines = [plan.storage_data for plan in plans]
        readers = {machines[rank]: rank for rank in reversed(range(len(plans)))}
        readers[machines[coordinator]] = coordinator
        return [readers[name] for name in machines]

    def _group(self) -> Any:
        return self._process_group if self._process_group is not None else dist.group.WORLD

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read, or take from the rank that reads, what `plan` names, into what the planner resolves.

        Raises:
            MissingKeysError, LeafTypeMismatchError, ShapeMismatchError: The file does not hold what the target wants;
                nothing was changed on any rank.
            SharedLoadError: Another rank failed, or the ranks lost each other.
            AsyncCkptError, OSError: This rank reads, and could not.
            ConfigError: The plan did not go through `prepare_global_plan`.
            Exception: Whatever the planner raises.

        Blocks: for the reads and the other ranks; the group's timeout bounds every message.
        """
        route = plan.storage_data
        path = self.checkpoint_id
        if not isinstance(route, Route) or path is None:
            raise ConfigError("the plan did not go through prepare_global_plan of this reader", field="plan")
        group = self._group() if route.world_size > 1 else None
        rank = dist.get_rank(group) if route.world_size > 1 else 0
        opened: list[FileLeaves] = []
        found: dict[str, Fact] = {}

        def look() -> None:
            if rank == route.reader:
                opened.append(FileLeaves(path, self._threads))
                found.update(opened[0].facts(route.names))

        # IMPORTANT: before any rank waits for another one's facts: a rank that fails alone goes on to the next
        # collective call, which must be the same one on all ranks.
        _together(look, group, path)
        facts = _exchanged(found, group, rank, route, by_broadcast=self.read_on == "coordinator")
        taking = Taking(path, plan, planner, facts)
        _together(taking.check, group, path)
        _together(taking.begin, group, path)
        Courier(group, rank, route, path).run(facts, taking, opened[0] if opened else None)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a file that this process sees."""
        return os.path.isfile(checkpoint_id)


def _exchanged(found: dict[str, Fact], group: Any, rank: int, route: Route, *, by_broadcast: bool) -> dict[str, Fact]:
    """Return what the rank that reads has found."""
    if route.world_size == 1:
        return found
    box: list[Any] = [found]
    if by_broadcast:
        dist.broadcast_object_list(box, dist.get_global_rank(group, route.reader), group=group)
    elif rank == route.reader:
        for other in route.served:
            if other != rank:
                dist.send_object_list(box, dist.get_global_rank(group, other), group=group)
    else:
        dist.recv_object_list(box, dist.get_global_rank(group, route.reader), group=group)
    return box[0]  # type: ignore[no-any-return]


def _together(step: Callable[[], None], group: Any, path: str) -> None:
    """Take a step, and go on if all ranks have."""
    failure: BaseException | None = None
    try:
        step()
    except BaseException as error:  # `dcp.load` tells the other ranks of any kind, too
        failure = error
    if group is not None:
        said: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(said, failure and f"{type(failure).__name__}: {failure}"[:1000], group=group)
        first = next((n for n, text in enumerate(said) if text is not None), None)
        if failure is None and first is not None:
            raise lost_load(path, first, said[first])
    if failure is not None:
        raise failure
