"""`BroadcastingTorchSaveReader`: stock `dcp.load` of a file that one rank reads; it sends each rank its own shards."""

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
from asyncckpt.dcp.file_leaves import FileLeaves, LeafInfo, decode_leaf_infos, encode_leaf_infos
from asyncckpt.dcp.plan_targets import PlanTargets, box_of_item
from asyncckpt.distributed.process_group import machine
from asyncckpt.distributed.user_group import UserGroup
from asyncckpt.errors import ConfigError
from asyncckpt.loading.fetch import thread_count
from asyncckpt.loading.shared.broadcast import Broadcast
from asyncckpt.loading.shared.broadcast_plan import MessagePart, Transfer, assign_reads, transfers_by_rank


@dataclass(frozen=True, slots=True)
class Route:
    """What one rank sends or receives.

    Attributes:
        world_size: Number of ranks of the group; if 1, nothing is sent.
        reader: Rank in the group that reads for this rank; may be this rank.
        receivers: The other ranks for which `reader` reads.
        names: On the reader, the FQNs that it reads; else empty.
        transfers: The transfers in which this rank takes part.
    """

    world_size: int
    reader: int
    receivers: tuple[int, ...]
    names: tuple[str, ...]
    transfers: tuple[Transfer, ...]


def plan_routes(plans: Sequence[LoadPlan], readers: Sequence[int]) -> list[Route]:
    """Return the route of every rank.

    Args:
        plans: The plan of each rank of the group.
        readers: For each rank, the rank that reads for it.
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
    """Read a file on one rank and send its tensors to the others; replaces torch's reader of the same name.

    Unlike torch's it needs little memory, and it also loads sharded targets and leaves that are no tensors. The reading
    rank broadcasts what all ranks need, and sends anything else only to the ranks that need it. At most two messages of
    16 MiB are in memory at a time. The file may have any format that `asyncckpt.load` reads. Pickles are read by a
    restricted unpickler that runs no code of the file. Use it with `DynamicMetaLoadPlanner`: it returns no metadata.

    Args:
        checkpoint_id: The file; the `checkpoint_id` of `dcp.load` takes precedence.
        coordinator_rank: Global rank that reads. It need not be the coordinator of `dcp.load`, which is rank 0.
        read_on: "coordinator": only that rank needs access to the file. "node": one rank of each machine reads.
        process_group: The process group of `dcp.load`, if it is given one.
        threads: Number of reading threads; None takes 4.

    Raises:
        ConfigError: An argument is invalid.
        UnsupportedPathError: `checkpoint_id` is a URL or no path.
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
            raise ConfigError(f"read_on={read_on!r}: expected 'coordinator' or 'node'", field="read_on", value=read_on)
        self.coordinator_rank, self.read_on = coordinator_rank, read_on
        self._process_group, self._threads = process_group, thread_count(threads)
        self.checkpoint_id: str | None = None
        self.reset(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Set the file of the next load.

        Raises:
            UnsupportedPathError: `checkpoint_id` is a URL or no path.
        """
        self.checkpoint_id = None if checkpoint_id is None else absolute_path(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return empty metadata: other ranks may have no access to the file; the planner uses its target's metadata."""
        return Metadata(state_dict_metadata={})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a load.

        Raises:
            ConfigError: No `checkpoint_id` was given.
        """
        if self.checkpoint_id is None:
            raise ConfigError(
                "no file to load: pass checkpoint_id to dcp.load or to BroadcastingTorchSaveReader",
                field="checkpoint_id",
            )

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan; with `read_on="node"` it holds the ID of this rank's machine."""
        return dataclasses.replace(plan, storage_data=machine() if self.read_on == "node" else None)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans; each holds the `Route` of its rank.

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
                f"{len(plans)} ranks load, but the reader's process_group has {len(ranks)} ranks: pass the process "
                "group of dcp.load",
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
        """Fill the tensors that the planner resolves for `plan`: read them, or receive them from the reading rank.

        Returns:
            A completed future.

        Raises:
            MissingKeysError, LeafTypeMismatchError, ShapeMismatchError: The file does not match the target; nothing was
                changed on any rank.
            SharedLoadError: Another rank failed, or the ranks can no longer communicate.
            AsyncCkptError, OSError: This rank reads, and failed to.
            ConfigError: The plan is not one that `prepare_global_plan` returned.
            Exception: An error of the planner.

        Blocks: for the reads and the other ranks; the timeout of the group limits the wait for each message.
        """
        route = plan.storage_data
        path = self.checkpoint_id
        if not isinstance(route, Route) or path is None:
            raise ConfigError(
                "the plan is not one that prepare_global_plan of this reader returned: use dcp.load", field="plan"
            )
        group = UserGroup(self._group() if route.world_size > 1 else None)
        broadcast = Broadcast(group, group.rank, path, group.device)
        opened: list[FileLeaves] = []
        found = bytearray()

        def look() -> int:
            if group.rank == route.reader:
                opened.append(FileLeaves(path, self._threads))
                found.extend(encode_leaf_infos(opened[0].facts(route.names)))
            return len(found)

        facts: dict[str, LeafInfo] = {}
        targets = PlanTargets(path, plan, planner, facts)

        def check() -> None:
            broadcast.broadcast_bytes(found, route.reader, route.receivers)
            facts.update(decode_leaf_infos(found))
            targets.check()

        # IMPORTANT: each of these steps ends with a collective call on all ranks. Without it, a rank that fails would
        # make its next collective call while the others still make an earlier one.
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
        """Whether `checkpoint_id` is a file."""
        return os.path.isfile(checkpoint_id)
