"""What one rank writes of one tensor, and the orders for shards."""

from __future__ import annotations

import math
from collections.abc import Iterator
from operator import add
from typing import NamedTuple

from asyncckpt.dtypes import DTYPES
from asyncckpt.planning.agreement import Agreement
from asyncckpt.planning.assignment import box_of_rows, row_dimension
from asyncckpt.planning.contributions import TensorKey
from asyncckpt.planning.plan import Box, SharedTensor
from asyncckpt.planning.shard_book import BoxDuty, ShardDuty
from asyncckpt.planning.shard_leaves import ShardLeaf
from asyncckpt.planning.shard_lies import disagreement
from asyncckpt.planning.sharding import grid


class Order(NamedTuple):
    """What is written of one tensor.

    Attributes:
        key: The tensor.
        stored: Under which name.
        boxes: What, in the tensors that are here.
        shared: What is compared with other ranks'.
        is_news: The other ranks are to be told.
        origins: Of a shard, aligned with `boxes`: where the part that a box is cut from begins in the whole tensor.
    """

    key: TensorKey
    stored: str
    boxes: tuple[Box, ...]
    shared: tuple[SharedTensor, ...] = ()
    is_news: bool = False
    origins: tuple[tuple[int, ...], ...] = ()


def shard_order(number: int, key: TensorKey, leaf: ShardLeaf, rank: int, agreement: Agreement | None) -> Order:
    """Return what is written of a shard.

    Raises:
        RanksDisagreeError, OverlappingShardsError: The ranks contradict each other about this name.
    """
    fqn, dtype, _ = key
    if agreement is None or agreement.world_size == 1:
        duties = tuple(BoxDuty(((0, -1),)) for _ in leaf.boxes)
        duty = ShardDuty(duties, None, False)
    else:
        claim = leaf.claim(fqn, dtype)
        if claim.of_rank(rank) != leaf.boxes:
            text = f"rank {rank} of the checkpointer holds another shard of {fqn!r} than rank {rank} of its mesh"
            raise disagreement(text + "; number the ranks as torch.distributed does", [rank])
        duty = agreement.shards.duty(rank, claim)
    boxes, origins, shared = [], [], []
    for box, source, told in zip(leaf.boxes, leaf.sources, duty.boxes, strict=True):
        offsets, sizes = box
        for first, n_rows in told.rows:
            cut = ((0,) * len(sizes), sizes) if n_rows < 0 else box_of_rows(sizes, first, n_rows)
            boxes.append(Box(source, *cut))
            origins.append(offsets)
        if told.shared and duty.turn is not None:
            name, n_elements = box_name(fqn, box), math.prod(sizes)
            itemsize = DTYPES[dtype].itemsize
            shared.append(SharedTensor(name, source, told.split, duty.turn, n_elements, itemsize))
    return Order(key, fqn, tuple(boxes), tuple(shared), duty.is_news, tuple(origins))


def box_name(fqn: str, box: grid.Box) -> str:
    """Return what a box of a tensor is called where ranks compare it: `FQN [first:end,...]`."""
    offsets, sizes = box
    return f"{fqn} [{','.join(f'{o}:{o + s}' for o, s in zip(offsets, sizes, strict=True))}]"


def cut_to_size(order: Order, max_nbytes: int) -> Order:
    """Return `order` with boxes of at most `max_nbytes` where cuts between rows, and inside of them, can do that."""
    itemsize = DTYPES[order.key[1]].itemsize
    if all(math.prod(box.sizes) * itemsize <= max_nbytes for box in order.boxes):
        return order
    boxes: list[Box] = []
    origins: list[tuple[int, ...]] = []
    for n, box in enumerate(order.boxes):
        pieces = list(_cuts(box, max(1, max_nbytes // itemsize)))
        boxes += pieces
        origins += order.origins[n : n + 1] * len(pieces)
    return order._replace(boxes=tuple(boxes), origins=tuple(origins))


def _cuts(box: Box, max_elements: int) -> Iterator[Box]:
    n_elements, dimension = math.prod(box.sizes), row_dimension(box.sizes)
    if n_elements <= max_elements or dimension is None:
        yield box
        return
    n_rows = box.sizes[dimension]
    step = max(1, max_elements * n_rows // n_elements)
    for first in range(0, n_rows, step):
        offsets, sizes = box_of_rows(box.sizes, first, min(step, n_rows - first))
        yield from _cuts(Box(box.number, tuple(map(add, box.offsets, offsets)), sizes), max_elements)
