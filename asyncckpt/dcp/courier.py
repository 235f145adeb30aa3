"""Passing on the parts of a file: read slab by slab by one rank, sent to those that want them, one message each.

The last byte of a message says whether the rest of it is right. A reader that fails tells every rank that still waits
for it by its next message; a rank that fails takes its messages to the end. So nobody waits for somebody who has left.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from asyncckpt.dcp.file_leaves import Fact, FileLeaves
from asyncckpt.dcp.routes import Delivery, Route
from asyncckpt.dcp.taking import Taking
from asyncckpt.errors import SharedLoadError
from asyncckpt.loading.boxes import region_of
from asyncckpt.loading.slicing import SLAB_NBYTES, slab_slices
from asyncckpt.planning.torch_types import CARRIERS

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
