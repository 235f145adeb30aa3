"""One rank's plan while it is filled: what the file has is held against what the planner wants, then handed to it."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from asyncckpt.dcp.file_leaves import Fact
from asyncckpt.dcp.items import check_target
from asyncckpt.dcp.routes import Wish
from asyncckpt.errors import LeafTypeMismatchError, MissingKeysError, ShapeMismatchError
from asyncckpt.planning.torch_types import CARRIERS


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
