"""The items of a stock load plan, held against what a file has and filled with boxes of its tensors."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from asyncckpt.dcp.file_leaves import Fact
from asyncckpt.dcp.write_plan import check_target
from asyncckpt.errors import LeafTypeMismatchError, MissingKeysError, ShapeMismatchError
from asyncckpt.loading.shared.broadcast_plan import Box, MessagePart
from asyncckpt.torch_tensors import CARRIERS


def box_of_item(item: ReadItem) -> Box | None:
    """Return the box that an item wants, in elements of the whole tensor, whatever chunk it names; None: an object."""
    if item.type is LoadItemType.BYTE_IO:
        return None
    index = item.storage_index
    start = tuple(index.offset) if index.offset is not None else (0,) * len(item.lengths)
    offsets = tuple(s + o for s, o in zip(start, item.storage_offsets, strict=True))
    return index.fqn, offsets, tuple(item.lengths)


class PlanTargets:
    """The items of one rank's plan, and what they fill.

    Args:
        path: Of the file, for messages.
        plan, planner: Of this rank.
        facts: What the file has, by FQN.
    """

    def __init__(self, path: str, plan: LoadPlan, planner: LoadPlanner, facts: Mapping[str, Fact]) -> None:
        self._path, self._plan, self._planner, self._facts = path, plan, planner, facts
        self._resolved: dict[int, torch.Tensor] = {}
        self._numbers: dict[Box, list[int]] = {}
        for number, item in enumerate(plan.items):
            if (box := box_of_item(item)) is not None:
                self._numbers.setdefault(box, []).append(number)

    def check(self) -> None:
        """Hold every item of the plan against the file. Nothing is changed yet.

        Raises:
            MissingKeysError: The file lacks some, and the planner does not allow it; all are named.
            LeafTypeMismatchError: A tensor meets an object.
            ShapeMismatchError: The file's tensor has another shape.
            UnsupportedLeafError: A target is a tensor subclass whose elements do not lie in its memory.
        """
        missing = sorted({item.storage_index.fqn for item in self._plan.items} - self._facts.keys())
        if missing and not getattr(self._planner, "allow_partial_load", False):
            raise MissingKeysError(
                f"{self._path}: nothing is called {', '.join(map(repr, missing))}", path=self._path, keys=missing
            )
        entries = getattr(getattr(self._planner, "metadata", None), "state_dict_metadata", {})
        planner = self._planner
        for item in self._plan.items:
            fqn = item.storage_index.fqn
            if fqn in self._facts:
                self._check(fqn, box_of_item(item), self._facts[fqn], entries.get(fqn))
        for item in self._plan.items:
            if item.type is not LoadItemType.BYTE_IO and isinstance(planner, DefaultLoadPlanner):
                check_target(self._path, item, planner.lookup_tensor(item.dest_index))

    def _check(self, fqn: str, box: Box | None, fact: Fact, entry: Any) -> None:
        saved, wanted = ("object" if d is None else "tensor" for d in (fact.dtype, box))
        if saved != wanted:
            raise LeafTypeMismatchError(
                f"{self._path}: {fqn!r} is of kind {saved}, and the target's of kind {wanted}",
                path=self._path,
                fqn=fqn,
                saved=saved,
                wanted=wanted,
            )
        if box is None:
            return
        size = tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else fact.shape
        ends = [o + n for o, n in zip(box[1], box[2], strict=True)]
        inside = len(ends) == len(fact.shape) and all(e <= s for e, s in zip(ends, fact.shape, strict=True))
        if size != fact.shape or not inside:
            wanted_shape = list(size) if size != fact.shape else ends
            raise ShapeMismatchError(
                f"{self._path}: tensor {fqn!r} has shape {list(fact.shape)}, the target wants {wanted_shape}",
                path=self._path,
                fqn=fqn,
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

    def put(self, part: MessagePart, data: torch.Tensor) -> None:
        """Put a part of a box into the items that want the box, and commit those that are complete with it.

        Args:
            part: The box, and where in it.
            data: The bytes, on any device.

        Raises:
            UnsupportedLeafError, ShapeMismatchError: What the planner resolves is not what its plan says.
            Exception: Whatever the planner raises.
        """
        dtype = self._facts[part.box[0]].dtype
        assert dtype is not None
        inside = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.sizes, strict=True))
        elements = data.view(CARRIERS[dtype.itemsize]).view(part.sizes)
        for number in self._numbers.get(part.box, ()):
            _copy(self._target(number)[inside], elements, dtype)
            if part.is_last:
                self._planner.commit_tensor(self._plan.items[number], self._resolved.pop(number))

    def _target(self, number: int) -> torch.Tensor:
        if number not in self._resolved:
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
            self._resolved[number] = target
        return self._resolved[number]


def _copy(target: torch.Tensor, data: torch.Tensor, dtype: torch.dtype) -> None:
    if target.dtype == dtype and not (target.is_conj() or target.is_neg()):
        carrier = CARRIERS[dtype.itemsize]  # not every dtype can be copied
        target.view(carrier).copy_(data.view(carrier))
    else:
        target.copy_(data.view(dtype))
