"""Writes loaded bytes into tensors: directly into their memory if possible, else box by box. Makes new tensors."""

from __future__ import annotations

import ctypes
import math
import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch

from asyncckpt.basics.libc import libc as _libc
from asyncckpt.memory.mapping import copy_bytes
from asyncckpt.torch_tensors import copyable

_HUGE_PAGES_FROM_NBYTES = 4 << 20
"""Tensors of this size hold at least one aligned 2 MiB page inside."""

_GRAIN = 32768
"""torch uses several threads for copies of at least this many elements (at::internal::GRAIN_SIZE)."""

_WIDE, _WIDE_NBYTES = torch.complex128, 16
"""The widest dtype; its copies keep every bit. IMPORTANT: use it only at aligned addresses, also for tensors that were
saved as complex128. Otherwise the process crashes."""

_PAGE_NBYTES = 4096
_MADV_HUGEPAGE = 14

_MADE_AS = {torch.complex32: torch.int32} if hasattr(torch, "complex32") else {}
"""torch warns whenever it allocates a tensor of such a dtype, but not for a view of integers."""


def new_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an uninitialised tensor; a large one on the CPU asks for huge pages, which fault in faster."""
    tensor = _as_dtype(torch.empty(shape, dtype=_MADE_AS.get(dtype, dtype), device=device), dtype)
    nbytes = tensor.numel() * tensor.itemsize
    if nbytes >= _HUGE_PAGES_FROM_NBYTES and device.type == "cpu":
        start = -(-tensor.data_ptr() // _PAGE_NBYTES) * _PAGE_NBYTES
        end = (tensor.data_ptr() + nbytes) // _PAGE_NBYTES * _PAGE_NBYTES
        _libc.madvise(start, end - start, _MADV_HUGEPAGE)
    return tensor


def tensor_over(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the elements of `storage` and the dtype, shape and strides of `like`."""
    empty = torch.empty(0, dtype=_MADE_AS.get(like.dtype, like.dtype), device=storage.device)
    return _as_dtype(empty.set_(storage, 0, like.shape, like.stride()), like.dtype)


def _as_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor if tensor.dtype == dtype else tensor.view(dtype).detach()  # detached: for autograd it is no view


def takes_bytes(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the stored bytes of a tensor of `dtype` can be read into the target's memory without conversion."""
    return target.is_cpu and target.dtype == dtype and target.is_contiguous() and not _is_conj_or_neg(target)


def _is_conj_or_neg(target: torch.Tensor) -> bool:
    """Whether it is a conjugated or negated view, whose memory holds other values than its elements."""
    return target.is_conj() or target.is_neg()


def flat_start(offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...]) -> int | None:
    """Return the index of the box's first element if the box is one run of the row-major tensor, else None."""
    if sizes == shape:
        return 0
    stride, start, inner_is_whole = 1, 0, True
    for offset, size, total in zip(offsets[::-1], sizes[::-1], shape[::-1], strict=True):
        if not inner_is_whole and size != 1:
            return None
        inner_is_whole = inner_is_whole and size == total
        start += offset * stride
        stride *= total
    return start


class BoxWriter:
    """Copies the bytes of a range into a box of a tensor. The bytes are delivered in pieces, in any order.

    Nothing is kept between pieces, so the memory that a load needs in addition to its targets does not grow with the
    ranges. Only a range whose elements are not aligned in the file is gathered first.

    Args:
        target: The tensor.
        offsets, sizes: The box in the tensor, in elements.
        dtype: Dtype of the stored elements.
        nbytes: Length of the range.
        strides: Strides of the box in the range, in elements, descending.
        aligned: Whether each piece begins and ends between elements.
    """

    __slots__ = ("_box", "_gathered", "_lock", "_missing", "_nbytes", "_wide")

    def __init__(
        self,
        target: torch.Tensor,
        offsets: tuple[int, ...],
        sizes: tuple[int, ...],
        dtype: torch.dtype,
        nbytes: int,
        strides: tuple[int, ...],
        *,
        aligned: bool = True,
    ) -> None:
        self._box = _StridedBox(target, offsets, sizes, strides, dtype)
        self._wide = _as_wide_elements(self._box)
        self._nbytes, self._missing = nbytes, nbytes
        self._gathered: torch.Tensor | None = None
        self._lock = None if aligned else threading.Lock()

    def row_nbytes(self, offset: int) -> int:
        """Return 0 if a range that begins at `offset` of a file is aligned to elements, else the bytes of one row."""
        itemsize = self._box.dtype.itemsize
        if offset % itemsize == 0:
            return 0
        return next((s for n, s in zip(self._box.sizes, self._box.strides, strict=True) if n > 1), 1) * itemsize

    def deliver(self, position: int, address: int, nbytes: int) -> None:
        if self._lock is None:
            if address % self._box.dtype.itemsize:  # in a buffer of whole pages, or behind a range of narrower elements
                moved = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
                copy_bytes(moved.data_ptr(), address, nbytes)
                address = moved.data_ptr()
            box = self._box if (position | address | nbytes) % _WIDE_NBYTES else self._wide
            _write_elements(box, position // box.dtype.itemsize, elements_at(address, nbytes, box.dtype))
            return
        with self._lock:
            if self._gathered is None:
                self._gathered = torch.empty(self._nbytes, dtype=torch.uint8, device="cpu")
            gathered = self._gathered
        copy_bytes(gathered.data_ptr() + position, address, nbytes)
        with self._lock:
            self._missing -= nbytes
            complete = self._missing == 0
        if complete:
            self._gathered = None
            _write_elements(self._box, 0, elements_at(gathered.data_ptr(), self._nbytes, self._box.dtype))


class _StridedBox(NamedTuple):
    """A box of a target, and its strides in a range; in elements of `dtype`."""

    target: torch.Tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


def _as_wide_elements(box: _StridedBox) -> _StridedBox:
    """Return the box with elements of 16 bytes, if it is aligned to these in range and target; else the box itself.

    Copies of fewer elements need fewer calls into torch. Each call releases the GIL: two readers that waited for it at
    every call took twice as long as the copies.
    """
    target, offsets, sizes, strides, dtype = box
    n = _WIDE_NBYTES // dtype.itemsize
    target_strides = target.stride()
    if n < 2 or not sizes or not target.is_cpu or target.dtype != dtype or _is_conj_or_neg(target):
        return box
    if strides[-1] != 1 or target_strides[-1] != 1 or target.data_ptr() % _WIDE_NBYTES:
        return box
    if any(size % n for size in (offsets[-1], sizes[-1], target.shape[-1], target.storage_offset())):
        return box
    if any(stride % n for stride in (*strides[:-1], *target_strides[:-1])):
        return box
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        wide = target.detach().view(_WIDE)

    def divided(inner: tuple[int, ...]) -> tuple[int, ...]:
        return (*inner[:-1], inner[-1] // n)

    return _StridedBox(wide, divided(offsets), divided(sizes), (*(stride // n for stride in strides[:-1]), 1), _WIDE)


def _write_elements(box: _StridedBox, first: int, elements: torch.Tensor) -> None:
    """Copy `elements`, which begin at element `first` of the range, into the box."""
    target, end, strides = box.target, first + elements.numel(), box.strides
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        target, elements = copyable(target), copyable(elements)
    boxes = boxes_within(box.sizes, strides, box.offsets, first, end)
    if not target.is_cpu or _is_conj_or_neg(target):
        for start, offsets, sizes in boxes:
            fill_box(target, offsets, elements.as_strided(sizes, strides, start - first))
        return
    target_strides, origin = target.stride(), target.storage_offset()
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        into, out = [], []
        for found in boxes:
            for start, offsets, sizes in _slabs(strides, *found):
                at = origin + sum(map(operator.mul, offsets, target_strides))
                into.append(target.as_strided(sizes, target_strides, at))
                out.append(elements.as_strided(sizes, strides, start - first))
        if into:
            torch._foreach_copy_(into, out)  # one call into torch, which releases the GIL once


def _slabs(
    strides: tuple[int, ...], start: int, offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Cut a box into smaller boxes that torch copies in this thread: there are enough reading threads already."""
    dim = next((d for d, n in enumerate(sizes) if n > 1), 0)
    n = sizes[dim] if sizes else 0
    step = max(1, (_GRAIN - 1) * n // max(1, math.prod(sizes)))
    if step >= n or torch.get_num_threads() == 1:
        yield start, offsets, sizes
        return
    for at in range(0, n, step):
        moved = (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :])
        yield start + at * strides[dim], moved, (*sizes[:dim], min(step, n - at), *sizes[dim + 1 :])


def elements_at(address: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the memory at `address` as a flat tensor, without a copy."""
    memory = (ctypes.c_char * nbytes).from_address(address)
    if dtype is _WIDE:
        return torch.frombuffer(memory, dtype=_WIDE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)


def boxes_within(
    sizes: tuple[int, ...], strides: tuple[int, ...], offsets: tuple[int, ...], low: int, high: int, start: int = 0
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Yield the parts of a strided box that lie in one run of its range.

    Args:
        sizes, strides: The box in the range; the strides descend, and no two elements share an address.
        offsets: Offsets of the box in its tensor.
        low, high: Start and end of the run, in elements of the range.
        start: Position of the box's first element in the range.

    Yields:
        (position of the first element in the range, offsets in the tensor, sizes) of at most three boxes per dimension.
    """
    span = 1 + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))
    if low <= start and start + span <= high:
        yield start, offsets, sizes
        return
    if start >= high or start + span <= low:
        return
    dim = next(d for d, n in enumerate(sizes) if n > 1)
    n, stride = sizes[dim], strides[dim]
    inner = span - (n - 1) * stride  # the span at one index of this dimension
    touched = range(max(0, (low - start - inner) // stride + 1), min(n, -((start - high) // stride)))
    whole = range(max(0, -((start - low) // stride)), min(n, (high - start - inner) // stride + 1))

    def part(at: int, count: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        moved = (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :])
        return start + at * stride, moved, (*sizes[:dim], count, *sizes[dim + 1 :])

    if whole:
        yield part(whole.start, len(whole))
    edges = (*range(touched.start, whole.start), *range(whole.stop, touched.stop)) if whole else touched
    for at in edges:
        first, moved, shape = part(at, 1)
        yield from boxes_within(shape, strides, moved, low, high, first)


def fill_box(
    target: torch.Tensor, offsets: tuple[int, ...], values: torch.Tensor, *, non_blocking: bool = False
) -> None:
    """Copy `values` into their box of `target`, converting dtype and device; without autograd."""
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        box = target
        if values.dtype == target.dtype:
            box, values = copyable(box), copyable(values)
        for dim, (offset, size) in enumerate(zip(offsets, values.shape, strict=True)):
            if size != box.shape[dim]:
                box = box.narrow(dim, offset, size)
        box.copy_(values, non_blocking=non_blocking)


MapLocation = (
    torch.device | str | Mapping[str, str] | Callable[[torch.UntypedStorage, str], torch.UntypedStorage | None] | None
)
"""Device of new tensors, in the forms that `torch.load` accepts. Every saved location is "cpu"."""


def device_of(map_location: MapLocation) -> torch.device:
    """Return the device on which new tensors are made: the CPU for a callable, which moves them later."""
    if map_location is None or callable(map_location):
        return torch.device("cpu")
    if isinstance(map_location, Mapping):
        return torch.device(map_location.get("cpu", "cpu"))
    return torch.device(map_location)


def relocated(
    tensor: torch.Tensor, move: Callable[[torch.UntypedStorage, str], torch.UntypedStorage | None]
) -> torch.Tensor:
    """Return `tensor` with the storage that the callable `move` returns for it."""
    storage = move(tensor.untyped_storage(), "cpu")
    if storage is None or storage.data_ptr() == tensor.untyped_storage().data_ptr():
        return tensor
    return tensor_over(storage, tensor)
