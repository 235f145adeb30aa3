"""Which rank reads which boxes for which others, and how their bytes are cut into messages. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgpack

from asyncckpt.dtypes import DTYPES
from asyncckpt.loading.byte_ranges import region_of, slab_slices

Box = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Stored name of a tensor, offsets and sizes in elements."""

ALIGN_NBYTES = 64
"""Parts begin at multiples of it in their message."""


class Wish(NamedTuple):
    """What one rank wants: its boxes with their dtypes, and whether it can pass on the bytes that it reads."""

    save_id: str
    boxes: dict[Box, tuple[str, bool]]


def encode_wish(wish: Wish) -> bytes:
    """Return the bytes of what a rank wants."""
    boxes = [[*box, dtype, gives] for box, (dtype, gives) in wish.boxes.items()]
    return bytes(msgpack.packb([wish.save_id, boxes]))


def decode_wish(data: bytes) -> Wish:
    """Return what a rank wants."""
    save_id, boxes = msgpack.unpackb(data, use_list=False)
    return Wish(save_id, {(fqn, offsets, sizes): (dtype, gives) for fqn, offsets, sizes, dtype, gives in boxes})


class Transfer(NamedTuple):
    """Boxes that one rank reads and the same others get.

    Attributes:
        reader: The rank that reads them.
        takers: The ranks that get them, ascending, without the reader; none: it reads for itself.
        boxes: In the order in which they are read and sent.
    """

    reader: int
    takers: tuple[int, ...]
    boxes: tuple[Box, ...]


def balance_reads(wishes: Sequence[Wish]) -> list[Transfer]:
    """Give every box that several ranks want to one of them, largest first to the one that reads the least so far.

    Boxes that only one rank wants, or that none of them can pass on, are in no transfer: each rank reads them itself.

    Args:
        wishes: By rank. The result does not depend on the order in which a rank names its boxes.

    Returns:
        The transfers, in the order in which all ranks go through them.
    """
    holders: dict[Box, list[int]] = {}
    for rank, wish in enumerate(wishes):
        for box in wish.boxes:
            holders.setdefault(box, []).append(rank)
    loads = [0] * len(wishes)
    shared: list[tuple[int, Box, list[int]]] = []
    for box, ranks in holders.items():
        givers = [rank for rank in ranks if wishes[rank].boxes[box][1]]
        nbytes = math.prod(box[2]) * DTYPES[wishes[ranks[0]].boxes[box][0]].itemsize
        if len(ranks) > 1 and givers:
            shared.append((nbytes, box, givers))
        else:
            for rank in ranks:
                loads[rank] += nbytes
    groups: dict[tuple[int, ...], dict[int, list[Box]]] = {}
    for nbytes, box, givers in sorted(shared, key=lambda item: (-item[0], item[1])):
        reader = min(givers, key=lambda rank: (loads[rank], rank))
        loads[reader] += nbytes
        groups.setdefault(tuple(holders[box]), {}).setdefault(reader, []).append(box)
    # IMPORTANT: all ranks go through groups and readers in one order; else two would wait for each other.
    return [
        Transfer(reader, tuple(rank for rank in ranks if rank != reader), tuple(boxes))
        for ranks, by_reader in sorted(groups.items())
        for reader, boxes in sorted(by_reader.items())
    ]


def assign_reads(wanted: Sequence[Iterable[Box]], readers: Sequence[int]) -> list[Transfer]:
    """Let given ranks read everything: what all ranks want first, then by name, in the order in which they want it.

    Args:
        wanted: By rank, its boxes.
        readers: By rank, the rank that reads for it; a reader reads for itself.

    Returns:
        The transfers, those of one reader in the order in which it sends them.
    """
    transfers: list[Transfer] = []
    for reader in sorted(set(readers)):
        names: dict[str, dict[Box, set[int]]] = {}
        served = [rank for rank, other in enumerate(readers) if other == reader]
        for rank in sorted(served, key=lambda rank: rank != reader):
            for box in wanted[rank]:
                names.setdefault(box[0], {}).setdefault(box, set()).add(rank)
        found = [(tuple(sorted(ranks - {reader})), box) for boxes in names.values() for box, ranks in boxes.items()]
        # IMPORTANT: what goes to all first. A rank that was told of a failure leaves, and would be missed by a later
        # collective broadcast.
        found.sort(key=lambda item: len(item[0]) != len(readers) - 1)
        for takers, group in itertools.groupby(found, key=lambda item: item[0]):
            transfers.append(Transfer(reader, takers, tuple(box for _, box in group)))
    return transfers


def by_rank(transfers: Iterable[Transfer], world_size: int) -> list[list[Transfer]]:
    """Return by rank the transfers in which it takes part."""
    found: list[list[Transfer]] = [[] for _ in range(world_size)]
    for transfer in transfers:
        for rank in (transfer.reader, *transfer.takers):
            found[rank].append(transfer)
    return found


class Part(NamedTuple):
    """A run of the row-major order of a box that is itself a box, and where its bytes lie in a message.

    Attributes:
        box: The whole box.
        offsets, sizes: Of the part, in elements, counted from the start of the box.
        position: The part's first byte, counted from the start of the box.
        start, nbytes: Its bytes in the message.
        is_last: The box ends with it.
    """

    box: Box
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    position: int
    start: int
    nbytes: int
    is_last: bool


class Message(NamedTuple):
    """What is sent at once.

    Attributes:
        transfer: Between which ranks.
        parts: One behind the other; at least one.
    """

    transfer: Transfer
    parts: list[Part]

    @property
    def nbytes(self) -> int:
        """Length of all parts with what lies between them."""
        return self.parts[-1].start + self.parts[-1].nbytes


def messages(transfers: Iterable[Transfer], itemsizes: Mapping[str, int], message_nbytes: int) -> Iterator[Message]:
    """Cut transfers into messages; boxes of one transfer share them.

    Args:
        transfers: In order.
        itemsizes: Bytes of an element, by name; boxes of other names are left out, and boxes without elements.
        message_nbytes: No message is longer; at least an element.
    """
    for transfer in transfers:
        parts: list[Part] = []
        end = 0
        for part in _parts(transfer.boxes, itemsizes, message_nbytes):
            start = -(-end // ALIGN_NBYTES) * ALIGN_NBYTES
            if parts and start + part.nbytes > message_nbytes:
                yield Message(transfer, parts)
                parts, start = [], 0
            parts.append(part._replace(start=start))
            end = start + part.nbytes
        if parts:
            yield Message(transfer, parts)


def _parts(boxes: Collection[Box], itemsizes: Mapping[str, int], limit_nbytes: int) -> Iterator[Part]:
    """Cut boxes into parts of at most `limit_nbytes`; none has a place in a message yet."""
    for box in boxes:
        fqn, _, sizes = box
        if fqn not in itemsizes or 0 in sizes:
            continue
        itemsize = itemsizes[fqn]
        box_nbytes, position = math.prod(sizes) * itemsize, 0
        for slices in slab_slices(sizes, max(1, limit_nbytes // itemsize)):
            region = region_of(slices, sizes, fqn)
            nbytes = math.prod(region.counts) * itemsize
            is_last = position + nbytes == box_nbytes
            yield Part(box, region.offsets, region.counts, position, 0, nbytes, is_last)
            position += nbytes
