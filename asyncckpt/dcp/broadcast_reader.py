"""`BroadcastingTorchSaveReader`: stock `dcp.load` of a file that one rank reads, each rank getting its own shard."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from asyncckpt.basics.paths import absolute_path
from asyncckpt.dcp.file_leaves import Fact, FileLeaves, decode_facts, encode_facts
from asyncckpt.dcp.plan_targets import PlanTargets, box_of_item
from asyncckpt.distributed.process_group import machine
from asyncckpt.distributed.user_group import UserGroup
from asyncckpt.errors import ConfigError
from asyncckpt.loading.fetch import thread_count
from asyncckpt.loading.shared.broadcast import Broadcast
from asyncckpt.loading.shared.broadcast_plan import MessagePart, Transfer, assign_reads, transfers_by_rank


@dataclass(frozen=True, slots=True)
class Route:
    """What one rank sends or takes.

    Attributes:
        world_size: Ranks of the group; 1: nothing is sent.
        reader: The rank of the group that reads for this one; maybe itself.
        receivers: The others that it reads for.
        names: The reader only: the FQNs that they want.
        transfers: Those in which this rank takes part.
    """

    world_size: int
    reader: int
    receivers: tuple[int, ...]
    names: tuple[str, ...]
    transfers: tuple[Transfer, ...]


def plan_routes(plans: Sequence[LoadPlan], readers: Sequence[int]) -> list[Route]:
    """Return the route of every rank.

    Args:
        plans: By rank of the group.
        readers: By rank, who reads for it.
    """
    wanted = [[box for item in plan.items if (box := box_of_item(item)) is not None] for plan in plans]
    transfers = transfers_by_rank(assign_reads(wanted, readers), len(plans))
    served = {reader: [rank for rank, other in enumerate(readers) if other == reader] for reader in set(readers)}
    names = {
        reader: tuple(dict.fromkeys(item.storage_index.fqn for rank in ranks for item in plans[rank].items))
        for reader, ranks in served.items()
    }
    receivers = {reader: tuple(rank for rank in ranks if rank != reader) for reader, ranks in served.items()}
    return [
        Route(len(plans), reader, receivers[reader], names[reader] if rank == reader else (), tuple(transfers[rank]))
        for rank, reader in enumerate(readers)
    ]


class BroadcastingTorchSaveReader(StorageReader):
    """As torch's reader of this name; streaming, for sharded targets, and with leaves that are no tensors.

    One rank reads the file and passes it on over the group: what all ranks want by broadcast, anything else to those
    who want it, so that a rank gets its own shards and no more. At most two messages of 16 MiB are in memory at a time.
    The file may be anything that `asyncckpt.load` reads; pickles go through the restricted unpickler, so nothing of it
    is run. Used with `DynamicMetaLoadPlanner`, as it gives no metadata.

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
        routes = plan_routes(plans, self._readers(plans))
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
        group = UserGroup(self._group() if route.world_size > 1 else None)
        broadcast = Broadcast(group, group.rank, path, group.device)
        opened: list[FileLeaves] = []
        found = bytearray()

        def look() -> int:
            if group.rank == route.reader:
                opened.append(FileLeaves(path, self._threads))
                found.extend(encode_facts(opened[0].facts(route.names)))
            return len(found)

        facts: dict[str, Fact] = {}
        targets = PlanTargets(path, plan, planner, facts)

        def check() -> None:
            broadcast.broadcast_bytes(found, route.reader, route.receivers)
            facts.update(decode_facts(found))
            targets.check()

        # IMPORTANT: one step of all ranks after another: a rank that fails alone, or with those that its reader serves,
        # goes on to the next collective call, which must be the same one on all ranks.
        nbytes = broadcast.agree(look)[route.reader]
        found.extend(bytes(nbytes - len(found)))
        broadcast.agree(check)
        broadcast.agree(targets.begin)

        def read(part: MessagePart, buffer: torch.Tensor) -> None:
            fqn, offsets, _ = part.box
            starts = [o + inner for o, inner in zip(offsets, part.offsets, strict=True)]
            box = tuple(slice(start, start + n) for start, n in zip(starts, part.sizes, strict=True))
            opened[0].read(fqn, box, buffer)

        itemsizes = {fqn: fact.dtype.itemsize for fqn, fact in facts.items() if fact.dtype is not None}
        broadcast.stream(route.transfers, itemsizes, read, targets.put)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a file that this process sees."""
        return os.path.isfile(checkpoint_id)
