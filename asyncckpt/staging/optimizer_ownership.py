"""Finds the tensors of a state that attached optimizers own: these change in `step()` only.

An optimizer owns the storages of its parameters and of the tensors in its `state`, and nothing else of its
param_groups. Storages are compared by address, again in every save: state appears with the first step, groups are
added, and a `state_dict()` holds other tensor objects than the model does.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from typing import Any

import torch

from asyncckpt.errors import AsyncCkptError
from asyncckpt.sharding.dtensor import without_dtensors
from asyncckpt.state_dict.composite_tensors import decompose
from asyncckpt.state_dict.flatten import PLAIN_TENSORS

MAX_NESTING = 8
"""How deep to search an optimizer's state for tensors (LBFGS has lists of them). Chosen: far above any known one."""

_HOOK_CALLER = torch.optim.Optimizer.profile_hook_step(lambda self: None).__code__
"""The code object of torch's wrapper around every `step()`, which calls the hooks."""

_NO_STORAGE = (RuntimeError, NotImplementedError, ValueError)
"""Errors of torch for the storage of a tensor that has none."""

_log = logging.getLogger("asyncckpt")


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks can be registered: not if a wrapper did not call `Optimizer.__init__()`, which makes the tables."""
    return all(
        isinstance(vars(optimizer).get(table), dict)
        for table in ("_optimizer_step_pre_hooks", "_optimizer_load_state_dict_pre_hooks")
    )


def runs_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its `step()` calls hooks: some versions of torch.compile remove that."""
    step: Any = type(optimizer).step
    while step is not None:
        if getattr(step, "__code__", None) is _HOOK_CALLER:
            return True
        step = getattr(step, "__wrapped__", None)
    return False


class AttachedOptimizers:
    """The attached optimizers, by weak references."""

    def __init__(self) -> None:
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._last: frozenset[int] = frozenset()
        self._warned = False

    def add(self, optimizer: torch.optim.Optimizer) -> bool:
        """Add an optimizer; return False if it was attached already."""
        if any(optimizer is known for known in self._living()):
            return False
        self._optimizers = [*map(weakref.ref, self._living()), weakref.ref(optimizer)]
        return True

    def clear(self) -> None:
        """Remove all optimizers."""
        self._optimizers = []

    def __bool__(self) -> bool:
        return any(True for _ in self._living())

    def _living(self) -> Iterator[torch.optim.Optimizer]:
        return (found for reference in self._optimizers if (found := reference()) is not None)

    def owned(
        self, tensors: Sequence[torch.Tensor], among: Sequence[int] | None = None
    ) -> tuple[frozenset[int], list[torch.Tensor]]:
        """Find which of `tensors` the optimizers own, of those on the CPU or on CUDA devices.

        Args:
            tensors: All tensors of the state.
            among: Positions to consider; None: all of them.

        Returns:
            The positions in `tensors` (the same object as in the last call if they are equal), and the optimizers' own
            tensors in the same storages.
        """
        if among is None:
            among = range(len(tensors))
        if not among:
            return self._same([]), []
        own: list[torch.Tensor] = []
        for optimizer in self._living():
            if not runs_hooks(optimizer):
                self._warn(optimizer)
                continue
            for group in optimizer.param_groups:
                own += group["params"]
            own += _tensors_in(optimizer.state.values())
        own = without_dtensors(own)
        ptrs = storage_ptrs(own)
        if not all(ptrs):  # a composite tensor has no storage of its own; empty tensors have none either
            own = _with_components(own, ptrs)
            ptrs = storage_ptrs(own)
        # By address first, for row-major tensors that have elements: computing ranges is slow for many tensors.
        own_at = [tensor.data_ptr() if ptr else 0 for tensor, ptr in zip(own, ptrs, strict=True)]
        rows = [t.nbytes or -1 if ptr and t.is_contiguous() else -1 for t, ptr in zip(own, ptrs, strict=True)]
        nbytes_at, ptr_at = dict(zip(own_at, rows, strict=True)), dict(zip(own_at, ptrs, strict=True))
        some = [tensors[n] for n in among]
        found_at = _addresses(some)
        room = map(nbytes_at.get, found_at)
        fits = [r is not None and r >= t.nbytes and t.is_contiguous() for r, t in zip(room, some, strict=True)]
        numbers, used = list(compress(among, fits)), set(map(ptr_at.__getitem__, compress(found_at, fits)))
        others = [(n, address) for n, address, known in zip(among, found_at, fits, strict=True) if not known]
        found = storage_ptrs([tensors[n] for n, _ in others])
        owned = _by_storage(own, ptrs, set(found))
        owner_at = {tensor.data_ptr(): tensor for group in owned.values() for tensor in group}
        ranges: dict[int, list[tuple[int, int]]] = {}
        for (n, address), ptr in zip(others, found, strict=True):
            if ptr not in owned:
                continue
            if not (address in owner_at and _is_alike(tensors[n], owner_at[address])):
                if ptr not in ranges:
                    ranges[ptr] = _ranges(owned[ptr])
                if not _is_within(tensors[n], ranges[ptr]):
                    continue
            numbers.append(n)
            used.add(ptr)
        numbers = [n for n in numbers if tensors[n].is_cpu or tensors[n].is_cuda]  # not on the meta device, say
        return self._same(numbers), [t for t, ptr in zip(own, ptrs, strict=True) if ptr in used]

    def _warn(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(
                "torch.compile has removed the hooks of %s.step(), as some versions of torch do; tensors of this "
                "optimizer are copied before save() returns",
                type(optimizer).__name__,
            )

    def all_deferrable(
        self, tensors: Sequence[torch.Tensor], among: Sequence[int]
    ) -> tuple[frozenset[int], list[torch.Tensor]]:
        """As `owned`, but return all of `among` that can be deferred: the caller promises to change none of them."""
        return self._same([n for n in among if tensors[n].is_cpu or tensors[n].is_cuda]), []

    def _same(self, numbers: Sequence[int]) -> frozenset[int]:
        found = frozenset(numbers)
        if found != self._last:
            self._last = found
        return self._last


def _tensors_in(values: Any, depth: int = 0) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif depth < MAX_NESTING:
            if isinstance(value, (dict, Mapping)):  # an abstract class is slow to ask
                found += _tensors_in(value.values(), depth + 1)
            elif isinstance(value, (list, tuple)):
                found += _tensors_in(value, depth + 1)
    return found


def _with_components(tensors: list[torch.Tensor], ptrs: list[int]) -> list[torch.Tensor]:
    """Return `tensors` with the components of composite tensors in their place. `ptrs`: see `storage_ptrs`."""
    found: list[torch.Tensor] = []
    for tensor, ptr in zip(tensors, ptrs, strict=True):
        parts = None
        if not ptr and (type(tensor) not in PLAIN_TENSORS or tensor.layout is not torch.strided):
            with contextlib.suppress(AsyncCkptError):
                parts = decompose(tensor)
        if parts is None:
            found.append(tensor)
        else:
            inner = list(parts.tensors.values())
            found += _with_components(inner, storage_ptrs(inner))
    return found


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the range of bytes [start, end) that `tensor` occupies in its storage."""
    first, width = int(tensor.storage_offset()), tensor.itemsize
    if not tensor.numel():
        return first * width, first * width
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * width, (first + int(reach) + 1) * width


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the address of each tensor's first element; 0 for all of them if one has no storage."""
    try:
        return [tensor.data_ptr() for tensor in tensors]
    except _NO_STORAGE:
        return [0] * len(tensors)


def _is_alike(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both have the same layout, so that at one address they are the same elements."""
    return tensor.dtype is other.dtype and tensor.shape == other.shape and tensor.stride() == other.stride()


def _by_storage(own: Sequence[torch.Tensor], ptrs: Sequence[int], wanted: set[int]) -> dict[int, list[torch.Tensor]]:
    """Return the tensors by the address of their storage, for those storages that are `wanted`."""
    owned: dict[int, list[torch.Tensor]] = {}
    for tensor, ptr in zip(own, ptrs, strict=True):
        if ptr and ptr in wanted:
            owned.setdefault(ptr, []).append(tensor)
    return owned


def _ranges(own: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Return the owned ranges of bytes of one storage, merged; other tensors may lie between them."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(map(_span, own)):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _is_within(tensor: torch.Tensor, ranges: list[tuple[int, int]]) -> bool:
    start, end = _span(tensor)
    return any(first <= start and end <= last for first, last in ranges)


def storage_ptrs(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the address of each tensor's storage, for a DTensor that of its local tensor.

    0 for tensors without a storage: sparse ones, and parameters of lazy modules.
    """
    tensors = without_dtensors(tensors)
    try:
        return [tensor.untyped_storage().data_ptr() for tensor in tensors]
    except _NO_STORAGE:
        return [_storage(tensor) for tensor in tensors]


def _storage(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except _NO_STORAGE:
        return 0
