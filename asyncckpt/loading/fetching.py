"""Tensors for what is loaded, and one pass over all files that are needed."""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections.abc import Iterable

import torch

from asyncckpt.errors import ConfigError, CorruptCheckpointError, InsufficientMemoryError
from asyncckpt.loading.foreign_ranges import read_foreign
from asyncckpt.loading.sinks import new_tensor
from asyncckpt.planning.torch_types import torch_dtype
from asyncckpt.protocol.endpoint import users_directory
from asyncckpt.storage.block_reader import DEFAULT_THREADS, read_shards
from asyncckpt.storage.contents import Contents, SavedTensor
from asyncckpt.storage.files import Files
from asyncckpt.storage.pace import Pace
from asyncckpt.storage.pace_file import DevicePaces
from asyncckpt.storage.read_plan import EXTENT_NBYTES, ShardRequest, Wanted

READ_PACES = (
    Pace(DEFAULT_THREADS, EXTENT_NBYTES),
    Pace(2 * DEFAULT_THREADS, EXTENT_NBYTES),
    Pace(2, 4 * EXTENT_NBYTES),
    Pace(2 * DEFAULT_THREADS, EXTENT_NBYTES // 4),
)
"""What is tried on a device: the default, more at a time, larger pieces, smaller ones."""

MOSTLY_COLD = 10
"""A load of which more than this part came from the page cache says nothing about the device."""

_MAX_NBYTES = 1 << 62
"""Beyond it torch counts no bytes."""

_NO_MEMORY = ("allocate memory", "out of memory", "not enough memory")
"""How torch says it: a plain RuntimeError on the CPU, one of its subclasses on a GPU."""


def thread_count(threads: int | None) -> int:
    """Check the argument `threads`; None takes the default.

    Raises:
        ConfigError: No positive integer.
    """
    if threads is None:
        return DEFAULT_THREADS
    if type(threads) is not int or threads < 1:
        raise ConfigError(f"threads={threads!r}: a positive integer is wanted", field="threads", value=repr(threads))
    return threads


def tensor_for(
    saved: SavedTensor,
    path: str,
    *,
    shape: tuple[int, ...] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Return an uninitialised tensor for `saved`, or for a box of it of `shape`. Check the shards' lengths before.

    Raises:
        CorruptCheckpointError: torch makes no tensor of such a shape, which nobody can have saved.
        InsufficientMemoryError: There is no room for it.
        UnsupportedLeafError: This torch has no such dtype.
    """
    wanted = saved.global_shape if shape is None else shape
    dtype = dtype or torch_dtype(saved.dtype)
    try:
        return new_tensor(wanted, dtype, device or torch.device("cpu"))
    except RuntimeError as error:
        nbytes = math.prod(wanted) * dtype.itemsize
        if 0 in saved.global_shape or nbytes > _MAX_NBYTES:
            detail = f"torch makes no tensor of shape {list(saved.global_shape)}"
            raise CorruptCheckpointError(
                f"{path}: tensor {saved.fqn!r}: {detail}", path=path, fqn=saved.fqn, detail=detail
            ) from error
        if not any(words in str(error).lower() for words in _NO_MEMORY):
            raise
        raise InsufficientMemoryError(
            f"{path}: tensor {saved.fqn!r}: there is no room for its {nbytes:,} bytes: {error}", nbytes=nbytes
        ) from error


def read_paces() -> DevicePaces:
    """Return how fast this user's loads read from which devices."""
    return DevicePaces(users_directory(os.environ, os.geteuid()), "read", READ_PACES)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the elements of a contiguous uint8 tensor on the CPU."""
    return ctypes.string_at(tensor.data_ptr(), tensor.numel()) if tensor.numel() else b""


def read_ranges(
    contents: Contents,
    ranges: Iterable[tuple[tuple[int, int], Wanted]],
    files: Files,
    *,
    threads: int,
    verify: bool,
    buffer: memoryview | None = None,
) -> None:
    """Read ranges of shards, each named by (rank, part); `buffer` as `storage.block_reader.read_shards` has it.

    Raises:
        CorruptCheckpointError, OSError: As `storage.block_reader.read_shards`.
    """
    by_file: dict[tuple[int, int], list[Wanted]] = {}
    for file, wanted in ranges:
        by_file.setdefault(file, []).append(wanted)
    read_files(contents, by_file, files, threads=threads, verify=verify, buffer=buffer)


def read_files(
    contents: Contents,
    by_file: dict[tuple[int, int], list[Wanted]],
    files: Files,
    *,
    threads: int | None,
    verify: bool,
    buffer: memoryview | None = None,
) -> None:
    """Read ranges of shards; as `read_ranges`, with the ranges of each file together.

    Without a number of threads it goes at the pace that was learnt for the device, and is learnt from.

    Raises:
        CorruptCheckpointError, OSError: As `storage.block_reader.read_shards`.
    """
    if contents.source is not None:
        read_foreign(contents, by_file, files, threads=threads or DEFAULT_THREADS, buffer=buffer)
        return
    requests = []
    for (rank, part), found in sorted(by_file.items()):
        index = contents.ranks[rank].index
        requests.append(ShardRequest(shard=index.shards[part], block_nbytes=index.block_nbytes, wanted=found))
    paces = read_paces() if threads is None else None
    pace = Pace(threads or DEFAULT_THREADS, EXTENT_NBYTES) if paces is None else paces.choose(contents.path)
    began = time.perf_counter()
    report = read_shards(
        contents.path,
        contents.manifest.save_id,
        requests,
        files=files,
        threads=pace.threads,
        verify=verify,
        buffer=buffer,
        extent_nbytes=pace.extent_nbytes,
    )
    if paces is not None and report.cached_nbytes < report.disk_nbytes / MOSTLY_COLD:
        paces.took(contents.path, pace, report.disk_nbytes, time.perf_counter() - began)
