"""The plan of a broadcast: which rank reads which boxes for which others, and how their bytes are cut into messages.

Pure: all ranks compute the same plan from the same input.
"""

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
"""Each part begins at a multiple of this in its message."""


class ReadRequest(NamedTuple):
    """The boxes that one rank needs.

    Attributes:
        save_id: ID of the save that it loads.
        boxes: By box, the dtype, and whether the rank can send the bytes that it reads to other ranks.
    """

    save_id: str
    boxes: dict[Box, tuple[str, bool]]


def encode_request(request: ReadRequest) -> bytes:
    """Return a request as msgpack."""
    boxes = [[*box, dtype, can_send] for box, (dtype, can_send) in request.boxes.items()]
    return bytes(msgpack.packb([request.save_id, boxes]))


def decode_request(data: bytes) -> ReadRequest:
    """Return the request that `encode_request` gave these bytes for."""
    save_id, boxes = msgpack.unpackb(data, use_list=False)
    return ReadRequest(
        save_id, {(fqn, offsets, sizes): (dtype, can_send) for fqn, offsets, sizes, dtype, can_send in boxes}
    )


class Transfer(NamedTuple):
    """Boxes that one rank reads and sends to the same other ranks.

    Attributes:
        reader: The rank that reads them.
        receivers: The ranks that receive them, ascending, without the reader; empty: the reader reads for itself only.
        boxes: The boxes, in the order in which they are read and sent.
    """

    reader: int
    receivers: tuple[int, ...]
    boxes: tuple[Box, ...]


def balance_reads(requests: Sequence[ReadRequest]) -> list[Transfer]:
    """Assign every box that several ranks need to one of them, largest first, to the one that reads the least so far.

    Boxes that only one rank needs, or that no rank can send, are in no transfer: each rank reads them itself.

    Args:
        requests: Requests by rank. The result does not depend on the order of a request's boxes.

    Returns:
        The transfers, in the order in which all ranks process them.
    """
    holders: dict[Box, list[int]] = {}
    for rank, request in enumerate(requests):
        for box in request.boxes:
            holders.setdefault(box, []).append(rank)
    loads = [0] * len(requests)
    shared: list[tuple[int, Box, list[int]]] = []
    for box, ranks in holders.items():
        senders = [rank for rank in ranks if requests[rank].boxes[box][1]]
        nbytes = math.prod(box[2]) * DTYPES[requests[ranks[0]].boxes[box][0]].itemsize
        if len(ranks) > 1 and senders:
            shared.append((nbytes, box, senders))
        else:
            for rank in ranks:
                loads[rank] += nbytes
    groups: dict[tuple[int, ...], dict[int, list[Box]]] = {}
    for nbytes, box, senders in sorted(shared, key=lambda item: (-item[0], item[1])):
        reader = min(senders, key=lambda rank: (loads[rank], rank))
        loads[reader] += nbytes
        groups.setdefault(tuple(holders[box]), {}).setdefault(reader, []).append(box)
    # IMPORTANT: all ranks process groups and readers in the same order. Otherwise two ranks would wait for each other.
    return [
        Transfer(reader, tuple(rank for rank in ranks if rank != reader), tuple(boxes))
        for ranks, by_reader in sorted(groups.items())
        for reader, boxes in sorted(by_reader.items())
    ]


def assign_reads(wanted: Sequence[Iterable[Box]], readers: Sequence[int]) -> list[Transfer]:
    """Let given ranks read everything: first the boxes that all ranks need, then the others by name.

    Boxes of one name keep the order in which the ranks need them.

    Args:
        wanted: By rank, the boxes that it needs.
        readers: By rank, the rank that reads for it; a reader reads for itself.

    Returns:
        The transfers; those of one reader are in the order in which it sends them.
    """
    transfers: list[Transfer] = []
    for reader in sorted(set(readers)):
        names: dict[str, dict[Box, set[int]]] = {}
        served = [rank for rank, other in enumerate(readers) if other == reader]
        for rank in sorted(served, key=lambda rank: rank != reader):
            for box in wanted[rank]:
                names.setdefault(box[0], {}).setdefault(box, set()).add(rank)
        found = [(tuple(sorted(ranks - {reader})), box) for boxes in names.values() for box, ranks in boxes.items()]
        # IMPORTANT: boxes for all ranks come first, since they are sent by a collective broadcast. A rank that was told
        # of a failure leaves, and a later collective broadcast would wait for it.
        found.sort(key=lambda item: len(item[0]) != len(readers) - 1)
        for receivers, group in itertools.groupby(found, key=lambda item: item[0]):
            transfers.append(Transfer(reader, receivers, tuple(box for _, box in group)))
    return transfers


def transfers_by_rank(transfers: Iterable[Transfer], world_size: int) -> list[list[Transfer]]:
    """Return, for each rank, the transfers in which it is the reader or a receiver."""
    found: list[list[Transfer]] = [[] for _ in range(world_size)]
    for transfer in transfers:
        for rank in (transfer.reader, *transfer.receivers):
            found[rank].append(transfer)
    return found


class MessagePart(NamedTuple):
    """A part of a box, and where its bytes are in a message.

    A part is a box itself, and its elements are consecutive in the row-major order of the whole box.

    Attributes:
        box: The whole box.
        offsets, sizes: The part, in elements; offsets are relative to the box.
        position: Offset of the part's first byte in the row-major bytes of the box.
        start, nbytes: Offset and length of its bytes in the message.
        is_last: Whether it is the last part of the box.
    """

    box: Box
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    position: int
    start: int
    nbytes: int
    is_last: bool


class Message(NamedTuple):
    """The bytes that are sent in one call.

    Attributes:
        transfer: The transfer that it belongs to.
        parts: The parts in it, in order; at least one.
    """

    transfer: Transfer
    parts: list[MessagePart]

    @property
    def nbytes(self) -> int:
        """Length of the message: all parts and the padding between them."""
        return self.parts[-1].start + self.parts[-1].nbytes


def cut_into_messages(
    transfers: Iterable[Transfer], itemsizes: Mapping[str, int], message_nbytes: int
) -> Iterator[Message]:
    """Cut transfers into messages. A message may hold parts of several boxes of one transfer.

    Args:
        transfers: The transfers, in the order in which they are processed.
        itemsizes: Bytes of an element by stored name. Boxes of other names, and boxes without elements, are left out.
        message_nbytes: Maximum length of a message; at least the size of one element.
    """
    for transfer in transfers:
        parts: list[MessagePart] = []
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


def _parts(boxes: Collection[Box], itemsizes: Mapping[str, int], limit_nbytes: int) -> Iterator[MessagePart]:
    """Cut boxes into parts of at most `limit_nbytes`. The caller sets where each starts in its message."""
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
            yield MessagePart(box, region.offsets, region.counts, position, 0, nbytes, is_last)
            position += nbytes
