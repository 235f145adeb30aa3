"""Which rank reads what for which others, where several want the same box. Pure, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgpack

from asyncckpt.dtypes import DTYPES

Box = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Stored name of a tensor, offsets and sizes in elements."""


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


@dataclass(slots=True)
class SharePlan:
    """Who passes on what.

    Attributes:
        readers: By box, which rank reads it for others.
        groups: By the ranks that want the same boxes: these boxes, by the rank that reads them.
    """

    readers: dict[Box, int] = field(default_factory=dict)
    groups: dict[tuple[int, ...], dict[int, list[Box]]] = field(default_factory=dict)


def plan_sharing(wishes: Sequence[Wish]) -> SharePlan:
    """Give every box that several ranks want to one of them, largest first to the one that reads the least so far.

    Boxes that none of them can pass on are read by each.

    Args:
        wishes: Of all ranks.
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
    plan = SharePlan()
    for nbytes, box, givers in sorted(shared, key=lambda item: (-item[0], item[1])):
        reader = min(givers, key=lambda rank: (loads[rank], rank))
        loads[reader] += nbytes
        plan.readers[box] = reader
        plan.groups.setdefault(tuple(holders[box]), {}).setdefault(reader, []).append(box)
    # IMPORTANT: all ranks go through groups and readers in one order; else two would wait for each other.
    plan.groups = {ranks: dict(sorted(plan.groups[ranks].items())) for ranks in sorted(plan.groups)}
    return plan


class Segment(NamedTuple):
    """Bytes of a message: `nbytes` at `at`, which belong at `position` of the `number`-th item."""

    number: int
    position: int
    at: int
    nbytes: int


def messages(lengths: Sequence[int], message_nbytes: int, align_nbytes: int) -> Iterator[list[Segment]]:
    """Pack items into messages, one behind the other.

    Args:
        lengths: Of the items, in bytes.
        message_nbytes: No message is longer; a multiple of `align_nbytes`.
        align_nbytes: Items begin at multiples of it.
    """
    message: list[Segment] = []
    at = 0
    for number, length in enumerate(lengths):
        position = 0
        while position < length:
            nbytes = min(length - position, message_nbytes - at)
            message.append(Segment(number, position, at, nbytes))
            position += nbytes
            at = -(-(at + nbytes) // align_nbytes) * align_nbytes
            if at >= message_nbytes:
                yield message
                message, at = [], 0
    if message:
        yield message
