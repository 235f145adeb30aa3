"""From the chunks of saved tensors to tensors in memory: allocation, and one pass over all files that are needed."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import torch

from asyncckpt.errors import ConfigError, CorruptCheckpointError
from asyncckpt.loading.foreign_ranges import read_foreign
from asyncckpt.loading.sinks import new_tensor, wanted_ranges
from asyncckpt.planning.torch_types import torch_dtype
from asyncckpt.storage.block_reader import DEFAULT_THREADS, read_shards
from asyncckpt.storage.contents import Contents, SavedTensor
from asyncckpt.storage.files import Files
from asyncckpt.storage.read_plan import ShardRequest, Wanted


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
        UnsupportedLeafError: This torch has no such dtype.
    """
    try:
        return new_tensor(
            saved.global_shape if shape is None else shape,
            dtype or torch_dtype(saved.dtype),
            device or torch.device("cpu"),
        )
    except RuntimeError as error:
        if 0 not in saved.global_shape:
            raise
        detail = f"torch makes no tensor of shape {list(saved.global_shape)}"
        raise CorruptCheckpointError(
            f"{path}: tensor {saved.fqn!r}: {detail}", path=path, fqn=saved.fqn, detail=detail
        ) from error


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the elements of a contiguous uint8 tensor on the CPU."""
    return ctypes.string_at(tensor.data_ptr(), tensor.numel()) if tensor.numel() else b""


def fill_tensors(
    contents: Contents, pairs: Sequence[tuple[SavedTensor, torch.Tensor]], files: Files, *, threads: int, verify: bool
) -> None:
    """Read each saved tensor into the target beside it, and tell autograd which tensors changed.

    Raises:
        CorruptCheckpointError, OSError: As `storage.block_reader.read_shards`.
    """
    # Before too: a snapshot that is being copied out of a target learns of the change only if it comes first.
    _tell_of_change(pairs)
    read_ranges(
        contents,
        (found for saved, target in pairs for found in wanted_ranges(saved, target)),
        files,
        threads=threads,
        verify=verify,
    )
    _tell_of_change(pairs)


def _tell_of_change(pairs: Sequence[tuple[SavedTensor, torch.Tensor]]) -> None:
    for _, target in pairs:
        if not target.is_inference():
            torch.autograd.graph.increment_version(target)


def read_ranges(
    contents: Contents, ranges: Iterable[tuple[tuple[int, int], Wanted]], files: Files, *, threads: int, verify: bool
) -> None:
    """Read ranges of shards, each named by (rank, part).

    Raises:
        CorruptCheckpointError, OSError: As `storage.block_reader.read_shards`.
    """
    by_file: dict[tuple[int, int], list[Wanted]] = {}
    for file, wanted in ranges:
        by_file.setdefault(file, []).append(wanted)
    if contents.source is not None:
        read_foreign(contents, by_file, files, threads=threads)
        return
    requests = []
    for (rank, part), found in sorted(by_file.items()):
        index = contents.ranks[rank].index
        requests.append(ShardRequest(shard=index.shards[part], block_nbytes=index.block_nbytes, wanted=found))
    read_shards(contents.path, contents.manifest.save_id, requests, files=files, threads=threads, verify=verify)
