"""Where loaded bytes go: straight into a tensor's memory where that is possible, else by way of a temporary."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Iterable, Iterator

import torch

from asyncckpt.format.structure import Chunk
from asyncckpt.loading.boxes import Piece
from asyncckpt.planning.torch_types import torch_dtype
from asyncckpt.storage.block_reader import copy_bytes
from asyncckpt.storage.contents import SavedTensor
from asyncckpt.storage.read_plan import Sink, Wanted

_HUGE_PAGES_FROM_NBYTES = 4 << 20
"""Tensors of this size hold at least one aligned 2 MiB page inside."""

_PAGE_NBYTES = 4096
_MADV_HUGEPAGE = 14
_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_MADE_AS = {torch.complex32: torch.int32} if hasattr(torch, "complex32") else {}
"""torch warns of a whole class of operators whenever it makes a tensor of such a dtype; a view of integers is quiet."""


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
    """Return the tensor that `like` would be with its elements in `storage`."""
    empty = torch.empty(0, dtype=_MADE_AS.get(like.dtype, like.dtype), device=storage.device)
    return _as_dtype(empty.set_(storage, 0, like.shape, like.stride()), like.dtype)


def _as_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor if tensor.dtype == dtype else tensor.view(dtype).detach()  # a tensor of its own to autograd


def takes_bytes(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the stored bytes of a tensor of `dtype` are the target's memory as it is."""
    return target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous() and not _is_lazy(target)


def _is_lazy(target: torch.Tensor) -> bool:
    """A conjugated or negated view: its memory holds other values than it shows."""
    return target.is_conj() or target.is_neg()


def wanted_ranges(saved: SavedTensor, target: torch.Tensor) -> Iterator[tuple[tuple[int, int], Wanted]]:
    """Yield ((rank, part), range of that file) for every chunk of `saved`, going into `target`, which has its shape.

    The target must stay alive until the ranges have been read.
    """
    dtype = torch_dtype(saved.dtype)
    whole = takes_bytes(target, dtype)
    for rank, chunk in saved.chunks:
        start = _flat_start(chunk.offsets, chunk.sizes, saved.global_shape) if whole else None
        sink: int | Sink
        if start is None:
            sink = BoxSink(target, chunk.offsets, chunk.sizes, dtype, chunk.nbytes)
        else:
            sink = target.data_ptr() + start * dtype.itemsize
        yield (rank, chunk.part), Wanted(chunk.offset_bytes, chunk.nbytes, saved.fqn, sink)


def wanted_pieces(
    saved: SavedTensor, rank: int, chunk: Chunk, pieces: Iterable[Piece], target: torch.Tensor
) -> Iterator[tuple[tuple[int, int], Wanted]]:
    """Yield ((rank, part), range of that file) for pieces of one chunk, going into a contiguous tensor on the CPU.

    Args:
        saved: The tensor.
        rank, chunk: Of the tensor.
        pieces: Of that chunk.
        target: Of the shape of the box that was asked for; its dtype is as wide as the saved one. Must stay alive
            until the ranges have been read.
    """
    itemsize, shape = target.itemsize, tuple(target.shape)
    for piece in pieces:
        nbytes = piece.length * itemsize
        dense = piece.length == math.prod(piece.sizes)
        start = _flat_start(piece.offsets, piece.sizes, shape) if dense else None
        sink: int | Sink
        if start is None:
            sink = BoxSink(target, piece.offsets, piece.sizes, target.dtype, nbytes, piece.strides)
        else:
            sink = target.data_ptr() + start * itemsize
        yield (rank, chunk.part), Wanted(chunk.offset_bytes + piece.start * itemsize, nbytes, saved.fqn, sink)


def _flat_start(offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...]) -> int | None:
    """Return the first element's number if the box is one run of the row-major tensor, else None."""
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


class BoxSink:
    """Gathers one range in a temporary, and copies the box that it holds into the target when it is complete.

    The temporary lives from the first piece to the last, so that few exist at a time.

    Args:
        target: The tensor.
        offsets, sizes: The box of it, in elements.
        dtype: Of the stored elements.
        nbytes: Length of the range.
        strides: Of the box in the range, in elements; None: the range is the box, row-major.
    """

    __slots__ = ("_dtype", "_lock", "_missing", "_nbytes", "_offsets", "_sizes", "_strides", "_target", "_temporary")

    def __init__(
        self,
        target: torch.Tensor,
        offsets: tuple[int, ...],
        sizes: tuple[int, ...],
        dtype: torch.dtype,
        nbytes: int,
        strides: tuple[int, ...] | None = None,
    ) -> None:
        self._target, self._offsets, self._sizes, self._strides = target, offsets, sizes, strides
        self._dtype, self._nbytes, self._missing = dtype, nbytes, nbytes
        self._temporary: torch.Tensor | None = None
        self._lock = threading.Lock()

    def deliver(self, position: int, address: int, nbytes: int) -> None:
        with self._lock:
            if self._temporary is None:
                self._temporary = new_tensor((self._nbytes // self._dtype.itemsize,), self._dtype, torch.device("cpu"))
            temporary = self._temporary
        copy_bytes(temporary.data_ptr() + position, address, nbytes)
        with self._lock:
            self._missing -= nbytes
            complete = self._missing == 0
        if complete:
            self._temporary = None
            flat, strides = temporary, self._strides
            box = flat.view(self._sizes) if strides is None else flat.as_strided(self._sizes, strides)
            fill_box(self._target, self._offsets, box)


def fill_box(target: torch.Tensor, offsets: tuple[int, ...], values: torch.Tensor) -> None:
    """Copy `values` into their box of `target`, converting dtype and device; autograd does not see it."""
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        box = target
        for dim, (offset, size) in enumerate(zip(offsets, values.shape, strict=True)):
            if size != box.shape[dim]:
                box = box.narrow(dim, offset, size)
        box.copy_(values)
