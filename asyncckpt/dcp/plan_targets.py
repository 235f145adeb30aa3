"""Checks the items of a stock load plan against the leaves of a file, and fills them with boxes of its tensors."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from asyncckpt.dcp.file_leaves import LeafInfo
from asyncckpt.dcp.write_plan import check_target, leaves_of
from asyncckpt.errors import LeafTypeMismatchError, MissingKeysError, ShapeMismatchError
from asyncckpt.loading.shared.broadcast_plan import Box, MessagePart
from asyncckpt.torch_tensors import CARRIERS


def box_of_item(item: ReadItem) -> Box | None:
    """Return the box of an item in the global tensor, whatever chunk the item names; None: the item is no tensor."""
    if item.type is LoadItemType.BYTE_IO:
        return None
    index = item.storage_index
    start = tuple(index.offset) if index.offset is not None else (0,) * len(item.lengths)
    offsets = tuple(s + o for s, o in zip(start, item.storage_offsets, strict=True))
    return index.fqn, offsets, tuple(item.lengths)


class PlanTargets:
    """The items of one rank's plan and the tensors that they fill.

    Args:
        path: Path of the file, for messages.
        plan, planner: The plan of this rank and its planner.
        facts: Descriptions of the leaves of the file, by FQN.
    """

    def __init__(self, path: str, plan: LoadPlan, planner: LoadPlanner, facts: Mapping[str, LeafInfo]) -> None:
        self._path, self._plan, self._planner, self._facts = path, plan, planner, facts
        self._resolved: dict[int, torch.Tensor] = {}
        self._numbers: dict[Box, list[int]] = {}
        for number, item in enumerate(plan.items):
            if (box := box_of_item(item)) is not None:
                self._numbers.setdefault(box, []).append(number)

    def check(self) -> None:
        """Check every item of the plan against the file. Changes nothing.

        Raises:
            MissingKeysError: The file lacks leaves, and the planner does not allow that; names all of them.
            LeafTypeMismatchError: A leaf is a tensor in the file and an object in the target, or the reverse.
            ShapeMismatchError: A tensor has another shape in the file.
            UnsupportedLeafError: A target is a tensor subclass whose elements are not in its memory.
        """
        missing = sorted({item.storage_index.fqn for item in self._plan.items} - self._facts.keys())
        if missing and not getattr(self._planner, "allow_partial_load", False):
            raise MissingKeysError(
                f"{self._path}: the file lacks {', '.join(map(repr, missing))}; nothing was changed. Leave them out of "
                "the target, or use a planner with allow_partial_load=True",
                path=self._path,
                keys=missing,
            )
        entries = getattr(getattr(self._planner, "metadata", None), "state_dict_metadata", {})
        for item in self._plan.items:
            fqn = item.storage_index.fqn
            if fqn in self._facts:
                self._check(fqn, box_of_item(item), self._facts[fqn], entries.get(fqn))
        planner: Any = self._planner
        named = leaves_of(planner)
        for item in self._plan.items:
            if item.type is not LoadItemType.BYTE_IO and item.dest_index.fqn in named:
                check_target(self._path, item, planner.lookup_tensor(item.dest_index))

    def _check(self, fqn: str, box: Box | None, fact: LeafInfo, entry: Any) -> None:
        saved, wanted = ("object" if d is None else "tensor" for d in (fact.dtype, box))
        if saved != wanted:
            raise LeafTypeMismatchError(
                f"{self._path}: {fqn!r} was saved as kind {saved}, but the target is of kind {wanted}; nothing was "
                "changed",
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
                f"{self._path}: tensor {fqn!r} has shape {list(fact.shape)}, but the target expects {wanted_shape}; "
                "nothing was changed",
                path=self._path,
                fqn=fqn,
                saved=list(fact.shape),
                wanted=wanted_shape,
            )

    def begin(self) -> None:
        """Give the planner all leaves that are no tensors, and commit boxes without elements."""
        for number, item in enumerate(self._plan.items):
            fact = self._facts.get(item.storage_index.fqn)
            if fact is None:
                continue
            if item.type is LoadItemType.BYTE_IO:
                self._planner.load_bytes(item, io.BytesIO(fact.data))
            elif 0 in item.lengths:
                self._planner.commit_tensor(item, self._target(number))

    def put(self, part: MessagePart, data: torch.Tensor) -> None:
        """Copy a part of a box into all items with this box; commit the items after the last part.

        Args:
            part: The box and the part of it.
            data: The elements of the part as bytes, on any device.

        Raises:
            UnsupportedLeafError, ShapeMismatchError: A tensor that the planner resolves does not match its plan.
            Exception: An error of the planner.
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
                    f"{self._path}: tensor {fqn!r}: the planner resolves a read of lengths {lengths} to a tensor of "
                    f"shape {shape}",
                    path=self._path,
                    fqn=fqn,
                    saved=lengths,
                    wanted=shape,
                )
            self._resolved[number] = target
        return self._resolved[number]


def _copy(target: torch.Tensor, data: torch.Tensor, dtype: torch.dtype) -> None:
    if target.dtype == dtype and not (target.is_conj() or target.is_neg()):
        carrier = CARRIERS[dtype.itemsize]  # torch cannot copy every dtype
        target.view(carrier).copy_(data.view(carrier))
    else:
        target.copy_(data.view(dtype))
