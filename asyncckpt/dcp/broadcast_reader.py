"""`BroadcastingTorchSaveReader`: stock `dcp.load` of a file that one rank reads, each rank getting its own shard."""

from __future__ import annotations

import dataclasses
import io
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from asyncckpt.basics.paths import absolute_path
from asyncckpt.dcp.file_leaves import Fact, FileLeaves
from asyncckpt.dcp.write_plan import check_target
from asyncckpt.distributed.process_group import machine
from asyncckpt.errors import ConfigError, LeafTypeMismatchError, MissingKeysError, ShapeMismatchError, SharedLoadError
from asyncckpt.loading.byte_ranges import region_of
from asyncckpt.loading.fetch import SLAB_NBYTES, slab_slices, thread_count
from asyncckpt.torch_tensors import CARRIERS


class Wish(NamedTuple):
    """An item of a plan: a box of a whole tensor, in elements; or, without offsets, a leaf that is no tensor."""

    fqn: str
    offsets: tuple[int, ...] | None = None
    lengths: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Delivery:
    """A box, and who takes it.

    Attributes:
        fqn, offsets, lengths: As `Wish`'s.
        takers: By rank of the group: the numbers of the items in its plan. Of others' only the reader knows.
        to_all: Broadcast to the whole group; else sent to each taker.
    """

    fqn: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    takers: dict[int, tuple[int, ...]]
    to_all: bool


@dataclass(frozen=True, slots=True)
class Route:
    """What one rank sends or takes, in order.

    Attributes:
        world_size: Ranks of the group; 1: nothing is sent.
        reader: The rank of the group that reads for this one; maybe itself.
        served: The reader only: the ranks that it reads for, itself included.
        names: The reader only: the FQNs that they want.
        deliveries: Those in which this rank takes part; of the reader, all.
    """

    world_size: int
    reader: int
    served: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    deliveries: tuple[Delivery, ...] = ()


def plan_routes(wishes: Sequence[Sequence[Wish]], readers: Sequence[int]) -> list[Route]:
    """Return the route of every rank.

    Args:
        wishes: By rank of the group, what it wants.
        readers: By rank, who reads for it.
    """
    found: list[Route] = []
    by_reader = {reader: _deliveries(wishes, readers, reader) for reader in sorted(set(readers))}
    for rank, reader in enumerate(readers):
        if rank == reader:
            served = tuple(r for r, other in enumerate(readers) if other == reader)
            names = tuple(dict.fromkeys(wish.fqn for r in served for wish in wishes[r]))
            found.append(Route(len(readers), reader, served, names, tuple(by_reader[reader])))
        else:
            own = [
                Delivery(d.fqn, d.offsets, d.lengths, {rank: d.takers[rank]}, d.to_all)
                for d in by_reader[reader]
                if rank in d.takers
            ]
            found.append(Route(len(readers), reader, deliveries=tuple(own)))
    return found


def _deliveries(wishes: Sequence[Sequence[Wish]], readers: Sequence[int], reader: int) -> list[Delivery]:
    """Return what one reader sends: what all want first, then by name, in the order in which it wants them itself."""
    names: dict[str, dict[Wish, dict[int, list[int]]]] = {}
    served = [rank for rank, other in enumerate(readers) if other == reader]
    for rank in sorted(served, key=lambda rank: rank != reader):
        for number, wish in enumerate(wishes[rank]):
            if wish.offsets is not None:
                names.setdefault(wish.fqn, {}).setdefault(wish, {}).setdefault(rank, []).append(number)
    found = [
        Delivery(
            wish.fqn,
            wish.offsets or (),
            wish.lengths,
            {rank: tuple(numbers) for rank, numbers in takers.items()},
            to_all=len(takers) == len(wishes) > 1,
        )
        for boxes in names.values()
        for wish, takers in boxes.items()
    ]
    # IMPORTANT: broadcasts first. A rank that was told of a failure leaves, and would be missed by a later broadcast.
    return sorted(found, key=lambda delivery: not delivery.to_all)


def wish_of(item: ReadItem) -> Wish:
    """Return what an item wants of the file, counted from the tensor's start whatever chunk it names."""
    index = item.storage_index
    if item.type is LoadItemType.BYTE_IO:
        return Wish(index.fqn)
    start = tuple(index.offset) if index.offset is not None else (0,) * len(item.lengths)
    offsets = tuple(s + o for s, o in zip(start, item.storage_offsets, strict=True))
    return Wish(index.fqn, offsets, tuple(item.lengths))


class Taking:
    """See the module.

    Args:
        path: Of the file, for messages.
        plan, planner: Of this rank.
        facts: What the file has, by FQN.

    Attributes:
        failure: The first thing that went wrong while parts were put in; later parts are dropped.
    """

    def __init__(self, path: str, plan: LoadPlan, planner: LoadPlanner, facts: Mapping[str, Fact]) -> None:
        self._path, self._plan, self._planner, self._facts = path, plan, planner, facts
        self._targets: dict[int, torch.Tensor] = {}
        self.failure: Exception | None = None

    def check(self) -> None:
        """Hold every item of the plan against the file. Nothing is changed yet.

        Raises:
            MissingKeysError: The file lacks some, and the planner does not allow it; all are named.
            LeafTypeMismatchError: A tensor meets an object.
            ShapeMismatchError: The file's tensor has another shape.
            UnsupportedLeafError: A target is a tensor subclass whose elements do not lie in its memory.
        """
        wishes = [wish_of(item) for item in self._plan.items]
        missing = sorted({wish.fqn for wish in wishes if wish.fqn not in self._facts})
        if missing and not getattr(self._planner, "allow_partial_load", False):
            raise MissingKeysError(
                f"{self._path}: nothing is called {', '.join(map(repr, missing))}", path=self._path, keys=missing
            )
        entries = getattr(getattr(self._planner, "metadata", None), "state_dict_metadata", {})
        for wish in wishes:
            if wish.fqn in self._facts:
                self._check(wish, self._facts[wish.fqn], entries.get(wish.fqn))
        planner = self._planner
        for item in self._plan.items:
            if item.type is not LoadItemType.BYTE_IO and isinstance(planner, DefaultLoadPlanner):
                check_target(self._path, item, planner.lookup_tensor(item.dest_index))

    def _check(self, wish: Wish, fact: Fact, entry: Any) -> None:
        saved, wanted = ("object" if d is None else "tensor" for d in (fact.dtype, wish.offsets))
        if saved != wanted:
            raise LeafTypeMismatchError(
                f"{self._path}: {wish.fqn!r} is of kind {saved}, and the target's of kind {wanted}",
                path=self._path,
                fqn=wish.fqn,
                saved=saved,
                wanted=wanted,
            )
        if wish.offsets is None:
            return
        size = tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else fact.shape
        ends = [o + n for o, n in zip(wish.offsets, wish.lengths, strict=True)]
        inside = len(ends) == len(fact.shape) and all(e <= s for e, s in zip(ends, fact.shape, strict=True))
        if size != fact.shape or not inside:
            wanted_shape = list(size) if size != fact.shape else ends
            raise ShapeMismatchError(
                f"{self._path}: tensor {wish.fqn!r} has shape {list(fact.shape)}, the target wants {wanted_shape}",
                path=self._path,
                fqn=wish.fqn,
                saved=list(fact.shape),
                wanted=wanted_shape,
            )

    def begin(self) -> None:
        """Hand over leaves that are no tensors, and boxes without elements."""
        for number, item in enumerate(self._plan.items):
            fact = self._facts.get(item.storage_index.fqn)
            if fact is None:
                continue
            if item.type is LoadItemType.BYTE_IO:
                self._planner.load_bytes(item, io.BytesIO(fact.data))
            elif 0 in item.lengths:
                self._planner.commit_tensor(item, self._target(number))

    def put(
        self, numbers: tuple[int, ...], part: tuple[slice, ...], data: torch.Tensor, dtype: torch.dtype, *, last: bool
    ) -> None:
        """Put elements into items of the plan; an error is kept in `failure`, and nothing more is put in.

        Args:
            numbers: Of the items.
            part: Where in their boxes.
            data: The elements, of the width of `dtype`.
            dtype: In which they were saved.
            last: Whether the items are complete with it.
        """
        if self.failure is not None:
            return
        try:
            for number in numbers:
                target = self._target(number)
                _copy(target[part], data, dtype)
                if last:
                    self._planner.commit_tensor(self._plan.items[number], self._targets.pop(number))
        except Exception as error:
            self.failure = error

    def _target(self, number: int) -> torch.Tensor:
        if number not in self._targets:
            item = self._plan.items[number]
            target = self._planner.resolve_tensor(item)
            check_target(self._path, item, target)
            target = target.detach()
            if tuple(target.shape) != tuple(item.lengths):
                fqn, lengths, shape = item.storage_index.fqn, list(item.lengths), list(target.shape)
                raise ShapeMismatchError(
                    f"{self._path}: tensor {fqn!r}: the planner resolves lengths {lengths} to a tensor of {shape}",
                    path=self._path,
                    fqn=fqn,
                    saved=lengths,
                    wanted=shape,
                )
            self._targets[number] = target
        return self._targets[number]


def _copy(target: torch.Tensor, data: torch.Tensor, dtype: torch.dtype) -> None:
    if target.dtype == dtype and not (target.is_conj() or target.is_neg()):
        carrier = CARRIERS[dtype.itemsize]  # not every dtype can be copied
        target.view(carrier).copy_(data.view(carrier))
    else:
        target.copy_(data.view(dtype))


_SLACK_NBYTES = 4096
_GOOD, _BAD = 1, 0


class _Message(NamedTuple):
    """A slab of a delivery: where in its box, how many bytes, whether it is the delivery's last."""

    delivery: Delivery
    part: tuple[slice, ...]
    dtype: torch.dtype
    nbytes: int
    last: bool


def _messages(route: Route, facts: Mapping[str, Fact]) -> Iterator[_Message]:
    for delivery in route.deliveries:
        fact = facts.get(delivery.fqn)
        if fact is None or fact.dtype is None or 0 in delivery.lengths:
            continue
        parts = list(slab_slices(delivery.lengths, max(1, SLAB_NBYTES // fact.dtype.itemsize)))
        for n, slices in enumerate(parts):
            region = region_of(slices, delivery.lengths, delivery.fqn)
            part = tuple(slice(o, o + c) for o, c in zip(region.offsets, region.counts, strict=True))
            nbytes = math.prod(region.counts) * fact.dtype.itemsize
            yield _Message(delivery, part, fact.dtype, nbytes, n == len(parts) - 1)


class Courier:
    """One load of one rank of a group; two slabs of memory.

    Args:
        group: None where the rank is alone.
        rank: In that group.
        route: Of this rank.
        path: Of the file, for messages.
    """

    def __init__(self, group: Any, rank: int, route: Route, path: str) -> None:
        self._group, self._rank, self._route, self._path = group, rank, route, path
        self._device = _device_of(group) if route.world_size > 1 else torch.device("cpu")
        self._rooms = [torch.empty(SLAB_NBYTES + _SLACK_NBYTES, dtype=torch.uint8, device="cpu") for _ in range(2)]
        self._works: list[list[tuple[Any, torch.Tensor]]] = [[], []]

    def run(self, facts: Mapping[str, Fact], taking: Taking, leaves: FileLeaves | None) -> None:
        """Send, or take, everything.

        Args:
            facts: What the file has.
            taking: What this rank wants.
            leaves: The file, if this rank reads it.

        Raises:
            SharedLoadError: The rank that reads failed, or the connection to it.
            AsyncCkptError, OSError: This rank reads, and could not.
            Exception: Whatever the planner raises.

        Blocks: for the reads and for the other ranks; the group's timeout bounds every message.
        """
        try:
            if leaves is not None:
                self._send_all(facts, taking, leaves)
            else:
                self._take_all(facts, taking)
        except RuntimeError as error:  # DistError and its kin, and gloo's own
            if isinstance(error, SharedLoadError) or self._route.world_size == 1 or hasattr(error, "code"):
                raise
            raise lost_load(self._path, None, f"{type(error).__name__}: {error}") from error
        if taking.failure is not None:
            raise taking.failure

    def _send_all(self, facts: Mapping[str, Fact], taking: Taking, leaves: FileLeaves) -> None:
        failure: BaseException | None = None
        told: set[int] = set()
        for number, message in enumerate(_messages(self._route, facts)):
            room = self._room(number % 2)
            delivery, nbytes = message.delivery, message.nbytes
            takers = set(delivery.takers) - told - {self._rank}
            if failure is None:
                box = tuple(slice(o + p.start, o + p.stop) for o, p in zip(delivery.offsets, message.part, strict=True))
                try:
                    leaves.read(delivery.fqn, box, room)
                    room[nbytes] = _GOOD
                except BaseException as error:
                    failure = error
            if failure is not None:
                room[nbytes] = _BAD
                told |= takers
            elif self._rank in delivery.takers:
                self._put(taking, message, room, delivery.takers[self._rank])
            self._send(number % 2, room[: nbytes + 1], takers, to_all=delivery.to_all)
            if failure is not None and (delivery.to_all or len(told) == len(self._route.served) - 1):
                break
        for n in range(2):
            self._room(n)
        if failure is not None:
            raise failure

    def _room(self, n: int) -> torch.Tensor:
        """Return memory that nothing is sent from any more."""
        for work, _ in self._works[n]:
            work.wait()
        self._works[n] = []
        return self._rooms[n]

    def _send(self, n: int, message: torch.Tensor, takers: set[int], *, to_all: bool) -> None:
        if not takers:
            return
        there = message.to(self._device)
        if to_all:
            root = dist.get_global_rank(self._group, self._rank)
            self._works[n] = [(dist.broadcast(there, root, group=self._group, async_op=True), there)]
        else:
            ranks = [dist.get_global_rank(self._group, taker) for taker in sorted(takers)]
            self._works[n] = [(dist.isend(there, rank, group=self._group), there) for rank in ranks]

    def _take_all(self, facts: Mapping[str, Fact], taking: Taking) -> None:
        reader = dist.get_global_rank(self._group, self._route.reader)
        room = self._rooms[0] if self._device.type == "cpu" else self._rooms[0].to(self._device)
        for message in _messages(self._route, facts):
            data = room[: message.nbytes + 1]
            if message.delivery.to_all:
                dist.broadcast(data, reader, group=self._group)
            else:
                dist.recv(data, reader, group=self._group)
            if data[-1].item() != _GOOD:
                raise lost_load(self._path, self._route.reader, "it could not read the file")
            self._put(taking, message, room, message.delivery.takers[self._rank])

    def _put(self, taking: Taking, message: _Message, room: torch.Tensor, numbers: tuple[int, ...]) -> None:
        sizes = [p.stop - p.start for p in message.part]
        data = room[: message.nbytes].view(CARRIERS[message.dtype.itemsize]).view(sizes)
        taking.put(numbers, message.part, data, message.dtype, last=message.last)


def lost_load(path: str, rank: int | None, detail: str) -> SharedLoadError:
    """Return the error for a load that ends because of another rank of the group; None: nobody knows which."""
    who = "the ranks lost each other" if rank is None else f"rank {rank} of the group failed"
    return SharedLoadError(
        f"{path}: a load that one rank reads for others ends on all ranks, as {who}: {detail}",
        path=path,
        rank=rank,
        detail=detail,
    )


def _device_of(group: Any) -> torch.device:
    """Return where a group's messages lie."""
    kinds = [device.type for device in group._device_types]
    if "cpu" in kinds or not kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())


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
