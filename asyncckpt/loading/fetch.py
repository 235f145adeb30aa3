"""Reads saved tensors: into targets, into new tensors, or a part of one; in one pass over the files that are needed.

Targets are filled in one of two ways. With `low_memory=True` bytes are read directly into the targets; the load needs
only the readers' buffers in addition. With `low_memory=False` everything is first read into one copy, which takes as
much memory as the existing targets: all bytes have been verified before the first existing target changes, and bytes
for a GPU are copied from pinned memory, at the speed of its bus. Targets that share memory are filled last, one after
the other.

In a checkpoint of another format the chunks are located first; then they are read like ranges of our files. Elements
that are not row-major in their file are gathered: the part of the file that holds them is read, and the requested
elements are delivered in row-major order.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from asyncckpt.basics.failpoints import reach
from asyncckpt.errors import ConfigError, CorruptCheckpointError, InsufficientMemoryError
from asyncckpt.format.checksums import BLOCK_NBYTES
from asyncckpt.loading.byte_ranges import Placement, ranges_by_file, region_of, wanted_ranges
from asyncckpt.loading.shared.broadcast import SharedReads
from asyncckpt.loading.target_tensors import (
    ONE_TENSOR,
    Filling,
    Tie,
    check_ties,
    fill_aliased,
    find_aliased,
    notify_shard_types,
    placement_names,
    placements_of,
)
from asyncckpt.loading.tensor_writers import BoxWriter, fill_box, new_tensor
from asyncckpt.memory.mapping import copy_bytes
from asyncckpt.storage.contents import Contents, Inline, Located, SavedTensor, Strided, check_lengths
from asyncckpt.storage.files import Files
from asyncckpt.storage.read_plan import ShardRequest, Sink, Wanted
from asyncckpt.storage.reader import DEFAULT_THREADS, read_shards
from asyncckpt.torch_tensors import CARRIERS, torch_dtype

Ranges = Mapping[tuple[int, int], Sequence[Wanted]]


def read_foreign(
    contents: Contents, ranges: Ranges, files: Files, *, threads: int, buffer: memoryview | None = None
) -> None:
    """Read ranges of a checkpoint of another format. No checksums are compared: other formats have none for a range.

    Args:
        contents: The checkpoint.
        ranges: The ranges of each part.
        files: The storage seam.
        threads: Reading threads.
        buffer: The buffer that `storage.reader.read_shards` reads into; None: its own.

    Raises:
        CorruptCheckpointError: A file does not match the structure, or was changed while it was read.
        OSError: The files cannot be read.

    Blocks: for the reads. Host memory: for tensors that are gathered, one whole tensor; else a few extents.
    """
    source = contents.source
    assert source is not None
    parts = [part for _, part in ranges]
    if len(parts) > 1 and threads > 1:
        with ThreadPoolExecutor(threads, "asyncckpt-find") as pool:
            locations = list(pool.map(source.place, parts, itertools.repeat(files)))
    else:
        locations = [source.place(part, files) for part in parts]
    plain: dict[int, list[Wanted]] = {}
    for location, wanted in zip(locations, ranges.values(), strict=True):
        if isinstance(location, Inline):
            _deliver_rows(wanted, _address_of(location.data))
        elif isinstance(location, Located):
            plain.setdefault(location.part, []).extend(_located(w, location.offset) for w in wanted)
    _read_located(contents, plain, files, threads, buffer)
    for location, wanted in zip(locations, ranges.values(), strict=True):
        if isinstance(location, Strided):
            _read_strided(contents, location, wanted, files, threads)
    shards = contents.ranks[0].index.shards
    # IMPORTANT: after the reads. Each read opens its file by name, and a trainer may replace the files meanwhile.
    source.check_unchanged(
        files, [shards[location.part].name for location in locations if not isinstance(location, Inline)]
    )


def _located(wanted: Wanted, start: int) -> Wanted:
    """Return a range at its offset in the file. If its elements are not aligned there, it is read row by row, so that
    no element is cut.
    """
    offset, sink = wanted.offset + start, wanted.sink
    if isinstance(sink, BoxWriter) and not wanted.every:
        return wanted._replace(offset=offset, every=sink.row_nbytes(offset), dense=True)
    return wanted._replace(offset=offset)


def _read_located(
    contents: Contents,
    wanted: Mapping[int, Sequence[Wanted]],
    files: Files,
    threads: int,
    buffer: memoryview | None = None,
) -> None:
    assert contents.source is not None
    shards = contents.ranks[0].index.shards
    for part, found in wanted.items():
        beyond = next((w for w in found if w.offset + (w.times - 1) * w.every + w.nbytes > shards[part].nbytes), None)
        if beyond is not None:
            raise _corrupt(contents, part, beyond.fqn, "reaches beyond the end")
    requests = [
        ShardRequest(shard=shards[part], block_nbytes=BLOCK_NBYTES, wanted=found)
        for part, found in sorted(wanted.items())
    ]
    read_shards(contents.source.directory, None, requests, files=files, threads=threads, verify=False, buffer=buffer)


def _read_strided(contents: Contents, location: Strided, wanted: Sequence[Wanted], files: Files, threads: int) -> None:
    dtype = CARRIERS[location.itemsize]
    span = new_tensor((location.nbytes // location.itemsize,), dtype, torch.device("cpu"))
    read_span(contents, location, span.data_ptr(), wanted[0].fqn, files, threads=threads)
    rows = span.as_strided(location.sizes, location.strides).contiguous()
    _deliver_rows(wanted, rows.data_ptr())


def read_span(contents: Contents, location: Strided, address: int, fqn: str, files: Files, *, threads: int) -> None:
    """Read the range of a file that holds the elements of a tensor that is not row-major, to `address`."""
    _read_located(contents, {location.part: [Wanted(location.offset, location.nbytes, fqn, address)]}, files, threads)


def _address_of(data: bytes) -> int:
    """Return the address of bytes, which must stay alive. Copying them for each window of a long array is too slow."""
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


def _deliver_rows(wanted: Sequence[Wanted], address: int) -> None:
    """Deliver to each range its bytes of the row-major elements at `address`."""
    for offset, nbytes, _, sink, times, every, _ in wanted:
        for n in range(times if nbytes else 0):
            _deliver(sink, n * nbytes, address + offset + n * every, nbytes)


def _deliver(sink: int | Sink | None, position: int, address: int, nbytes: int) -> None:
    """Deliver the bytes at `address`, which belong at `position` of the range of `sink`."""
    if isinstance(sink, int):
        copy_bytes(sink + position, address, nbytes)
    elif sink is not None:
        sink.deliver(position, address, nbytes)


def _corrupt(contents: Contents, part: int, fqn: str, what: str) -> CorruptCheckpointError:
    assert contents.source is not None
    name, detail = contents.ranks[0].index.shards[part].name, f"tensor {fqn!r} {what}"
    return CorruptCheckpointError(
        f"{contents.source.directory}/{name}: {detail}", path=contents.path, file=name, fqn=fqn, detail=detail
    )


_MAX_NBYTES = 1 << 62
"""torch cannot represent the size of larger tensors."""

_NO_MEMORY = ("allocate memory", "out of memory", "not enough memory")
"""Parts of the messages by which torch reports a failed allocation: RuntimeError on the CPU, a subclass on a GPU."""


def thread_count(threads: int | None) -> int:
    """Check the argument `threads`; None takes the default.

    Raises:
        ConfigError: It is not a positive integer.
    """
    if threads is None:
        return DEFAULT_THREADS
    if type(threads) is not int or threads < 1:
        raise ConfigError(f"threads={threads!r}: expected a positive integer", field="threads", value=repr(threads))
    return threads


def tensor_for(
    saved: SavedTensor,
    path: str,
    *,
    shape: tuple[int, ...] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Return an uninitialised tensor for `saved`, or for a box of it of `shape`.

    Check the lengths of the shard files first: a damaged index might name a huge shape.

    Raises:
        CorruptCheckpointError: torch cannot make a tensor of the saved shape, so it cannot have been saved.
        InsufficientMemoryError: There is no room for it.
        UnsupportedLeafError: The installed torch has no such dtype.
    """
    wanted = saved.global_shape if shape is None else shape
    dtype = dtype or torch_dtype(saved.dtype)
    try:
        return new_tensor(wanted, dtype, device or torch.device("cpu"))
    except RuntimeError as error:
        nbytes = math.prod(wanted) * dtype.itemsize
        if 0 in saved.global_shape or nbytes > _MAX_NBYTES:
            detail = f"torch cannot make a tensor of shape {list(saved.global_shape)}"
            raise CorruptCheckpointError(
                f"{path}: tensor {saved.fqn!r}: {detail}", path=path, fqn=saved.fqn, detail=detail
            ) from error
        if not any(words in str(error).lower() for words in _NO_MEMORY):
            raise
        raise InsufficientMemoryError(
            f"{path}: tensor {saved.fqn!r}: there is no room for its {nbytes:,} bytes: {error}", nbytes=nbytes
        ) from error


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
    """Read ranges of shards, each named by (rank, part), in any order.

    Raises:
        CorruptCheckpointError, OSError: The same as from `storage.reader.read_shards`.
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
    """Read ranges of shards; like `read_ranges`, with the ranges of each file together.

    Raises:
        CorruptCheckpointError, OSError: The same as from `storage.reader.read_shards`.
    """
    if contents.source is not None:
        read_foreign(contents, by_file, files, threads=threads or DEFAULT_THREADS, buffer=buffer)
        return
    requests = []
    for (rank, part), found in sorted(by_file.items()):
        index = contents.ranks[rank].index
        requests.append(ShardRequest(shard=index.shards[part], block_nbytes=index.block_nbytes, wanted=found))
    read_shards(
        contents.path,
        contents.manifest.save_id,
        requests,
        files=files,
        threads=threads or DEFAULT_THREADS,
        verify=verify,
        buffer=buffer,
    )


def strided_view(contents: Contents, saved: SavedTensor, files: Files, *, threads: int) -> torch.Tensor | None:
    """Read a tensor that is not row-major in its file as a whole.

    Returns:
        A view with the tensor's strides, whose dtype is an integer, or complex128, of the same width. None: the tensor
        is row-major in its file, and was not read.

    Raises:
        CorruptCheckpointError: The file is not what the structure says.
        InsufficientMemoryError: There is no room for it.
        OSError: It cannot be read.
    """
    if contents.source is None or len(saved.chunks) != 1:
        return None
    location = contents.source.place(saved.chunks[0][1].part, files)
    if not isinstance(location, Strided):
        return None
    flat = tensor_for(
        saved, contents.path, shape=(location.nbytes // location.itemsize,), dtype=CARRIERS[location.itemsize]
    )
    read_span(contents, location, flat.data_ptr(), saved.fqn, files, threads=threads)
    return flat.as_strided(location.sizes, location.strides)


SLAB_NBYTES = 32 << 20
"""Bytes that are compared or sent at a time. Chosen, not measured."""


def read_tensor(
    contents: Contents,
    saved: SavedTensor,
    slices: Any,
    files: Files,
    *,
    threads: int,
    verify: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Read the part of a tensor that `slices` select. Returns a contiguous tensor on the CPU.

    Args:
        contents: The checkpoint.
        saved: The tensor.
        slices: As for `byte_ranges.region_of`.
        files: The storage seam.
        threads: Reading threads.
        verify: Whether whole blocks are read and their checksums compared; False reads only the needed pages.
        out: A byte tensor in host memory, large enough and aligned, for the result; None: new memory.

    Raises:
        ConfigError: `slices` do not fit the tensor.
        CorruptCheckpointError: The files differ from what was saved.
        UnsupportedLeafError: The installed torch lacks the dtype.
        OSError: The files cannot be read.
    """
    region = region_of(slices, saved.global_shape, saved.fqn)
    dtype = torch_dtype(saved.dtype)
    check_lengths(contents, files, saved)
    carrier = CARRIERS[dtype.itemsize]
    if out is None:
        found = tensor_for(saved, contents.path, shape=region.counts, dtype=carrier)
    else:
        found = out[: math.prod(region.counts) * carrier.itemsize].view(carrier).view(region.counts)
    ranges = wanted_ranges(contents, saved, region, found, carrier, verify=verify)
    read_ranges(contents, ranges, files, threads=threads, verify=verify)
    return found.view(dtype).view(region.shape).detach()


_ALIGN_NBYTES = 64


class Filler:
    """Reads saved tensors into targets.

    Args:
        contents: The checkpoint.
        files: The storage seam.
        threads: Reading threads; None: the default of `storage.reader`.
        verify: Whether whole blocks are read and their checksums compared.
        low_memory: Whether targets are filled directly; False: from a copy of everything.
        shared: The load that ranks share, so that each tensor is read once; None: each rank reads for itself.
    """

    def __init__(
        self,
        contents: Contents,
        files: Files,
        *,
        threads: int | None,
        verify: bool,
        low_memory: bool,
        shared: SharedReads | None = None,
    ) -> None:
        self._contents, self._files, self._shared = contents, files, shared
        self._threads, self._verify, self._low_memory = threads, verify, low_memory

    def check_ties(self, ties: Sequence[Tie], how: str = ONE_TENSOR) -> None:
        """Check that the values saved under the two names of each tie are equal. Changes nothing.

        Raises:
            AliasMismatchError: Two values differ.
            CorruptCheckpointError, OSError: The same as from `storage.reader.read_shards`.
        """
        check_ties(ties, self._read_files, self._contents.path, how)

    def fill(
        self,
        existing: Sequence[Filling],
        new: Sequence[Filling],
        plain: Sequence[Placement] = (),
        *,
        alone: bool = False,
    ) -> None:
        """Fill targets, tell autograd which tensors changed, and call `from_shards` of registered types.

        Args:
            existing: Targets of the user.
            new: Tensors that were made for this load; the user has no reference to them yet.
            plain: Plain tensors of the user that are filled whole.
            alone: Whether this rank reads for itself even in a shared load.

        Raises:
            CorruptCheckpointError, OSError: The same as from `storage.reader.read_shards`.
            InsufficientMemoryError: There is no room for the copy.
            AliasMismatchError: Two targets share memory, and their values differ.
            StateLoadError: A registered type refused its shards.
            SharedLoadError, PlanTimeoutError: The same as from `SharedReads.read`.
        """
        changed, unseen = [*plain, *placements_of(existing)], placements_of(new)
        watched = [target for _, target, _, _ in changed if not target.is_inference()]
        placed = changed + unseen
        aliased = find_aliased([p.target for p in placed]) if changed else []
        if aliased:
            changed, unseen = _without(changed, aliased, 0), _without(unseen, aliased, len(changed))
        if self._low_memory:
            # Also before the reads: a deferred copy of a snapshot out of a target detects a change by the version, so
            # the version must change before the elements do.
            bump_versions(watched)
            self._read(changed + unseen, alone=alone)
        else:
            copied = changed + [p for p in unseen if p.target.device.type != "cpu"]
            staged = _host_copies(copied)
            self._read(staged + [p for p in unseen if p.target.device.type == "cpu"], alone=alone)
            reach("load: copies verified")
            bump_versions(watched)
            _copy_over(staged, copied)
        if aliased:
            names = placement_names(plain, [*existing, *new])
            parts = [placed[n] for n in aliased]
            fill_aliased(parts, [names[n] for n in aliased], self._read_files, self._contents.path)
        bump_versions(watched)
        reach("load: tensors filled")
        notify_shard_types([*existing, *new], self._contents.path)

    def _read(self, placements: Sequence[Placement], *, alone: bool) -> None:
        if self._shared is None or alone:
            self._read_files(placements)
        else:
            save_id = str(self._contents.manifest.save_id)
            self._shared.read(self._contents.path, save_id, placements, self._read_files)

    def _read_files(self, placements: Sequence[Placement]) -> None:
        ranges = ranges_by_file(self._contents, placements, self._verify)
        read_files(self._contents, ranges, self._files, threads=self._threads, verify=self._verify)


def _without(placements: Sequence[Placement], numbers: Sequence[int], first: int) -> list[Placement]:
    """Return `placements`, numbered from `first`, without those whose numbers are in `numbers`."""
    left_out = set(numbers)
    return [placement for n, placement in enumerate(placements, first) if n not in left_out]


def bump_versions(changed: Sequence[torch.Tensor]) -> None:
    """Tell autograd that tensors change. None of them may be an inference tensor."""
    try:
        torch.autograd.graph.increment_version(changed)
    except (TypeError, RuntimeError):  # torch versions that take one tensor only
        for tensor in changed:
            torch.autograd.graph.increment_version(tensor)


def _host_copies(placements: Sequence[Placement]) -> list[Placement]:
    """Return placements of the same boxes in new host memory, one allocation; pinned if a target is on a GPU."""
    starts, at = [], 0
    for saved, target, _, _ in placements:
        starts.append(at)
        at += -(-target.numel() * torch_dtype(saved.dtype).itemsize // _ALIGN_NBYTES) * _ALIGN_NBYTES
    try:
        if any(placement.target.device.type == "cuda" for placement in placements):
            memory = torch.empty(at, dtype=torch.uint8, device="cpu", pin_memory=True)
        else:
            memory = new_tensor((at,), torch.uint8, torch.device("cpu"))
    except RuntimeError as error:
        raise InsufficientMemoryError(
            f"low_memory=False needs {at:,} bytes of host memory for a copy, which cannot be allocated; use "
            f"low_memory=True: {error}",
            nbytes=at,
        ) from error
    staged = []
    for start, (saved, target, offsets, _) in zip(starts, placements, strict=True):
        dtype = torch_dtype(saved.dtype)
        flat = memory[start : start + target.numel() * dtype.itemsize].view(dtype)
        staged.append(Placement(saved, flat.view(target.shape), offsets))
    return staged


def _copy_over(staged: Sequence[Placement], placements: Sequence[Placement]) -> None:
    for source, placement in zip(staged, placements, strict=True):
        pinned = placement.target.device.type == "cuda"
        fill_box(placement.target, (0,) * placement.target.dim(), source.target, non_blocking=pinned)
    for device in {p.target.device for p in placements if p.target.device.type == "cuda"}:
        torch.cuda.synchronize(device)  # the copies read memory that is about to be freed
