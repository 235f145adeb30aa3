"""Reads saved tensors: into targets, into new tensors, or a part of one; in one pass over the files that are needed.

Targets are filled directly as the bytes are read, or from a copy of all of them. Directly, a load needs no memory
beside its targets but the readers' buffers. By way of a copy (`low_memory=False`), which takes as much memory again as
the targets that are there, all that is read has been verified before the first of these targets changes; and what goes
to a GPU is copied from pinned memory, at the speed of its bus. Targets that share memory are filled last, one after the
other.

In a checkpoint of another format the chunks are located first; then they are read like ranges of our files. Elements
that are not row-major in their file are gathered: the part of the file that holds them is read, and what is wanted of
it is delivered in row-major order.
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
from asyncckpt.loading.broadcast import SharedReads
from asyncckpt.loading.byte_ranges import Placement, ranges_by_file, region_of, wanted_ranges
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
    """Read ranges of a checkpoint of another format; a part of its files has no checksum to be compared with.

    Args:
        contents: The checkpoint.
        ranges: The ranges of each part.
        files: The storage seam.
        threads: Reading threads.
        buffer: The buffer that `storage.reader.read_shards` reads into; None: its own.

    Raises:
        CorruptCheckpointError: What is there is not what the structure says, or was changed meanwhile.
        OSError: The files cannot be read.

    Blocks: for the reads. Host memory: a tensor that is gathered, once; else a few extents.
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
    # IMPORTANT: after the reads. Files are opened anew for each, by name, and a trainer may put the next save there.
    source.check_unchanged(
        files, [shards[location.part].name for location in locations if not isinstance(location, Inline)]
    )


def _located(wanted: Wanted, start: int) -> Wanted:
    """Return a range of a file, whose elements may begin anywhere: then it comes in rows, which cuts none."""
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
    """Return the address of bytes that stay alive: a copy, for each window of a long array, would take too long."""
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


def _deliver_rows(wanted: Sequence[Wanted], address: int) -> None:
    """Give each range its bytes of the row-major elements at `address`."""
    for offset, nbytes, _, sink, times, every, _ in wanted:
        for n in range(times if nbytes else 0):
            _deliver(sink, n * nbytes, address + offset + n * every, nbytes)


def _deliver(sink: int | Sink | None, position: int, address: int, nbytes: int) -> None:
    """Give a range the bytes at `address`, which belong at `position` of it."""
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
    """Return a tensor that is not row-major in its file, read whole, as integers or complex128 of its width.

    Returns:
        None for any other.

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
"""How much is compared or sent at a time. Chosen, not measured."""


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
    """Return what `slices` select of a tensor: a new, contiguous one on the CPU.

    Args:
        contents: The checkpoint.
        saved: The tensor.
        slices: What `byte_ranges.region_of` takes.
        files: The storage seam.
        threads: Reading threads.
        verify: Read whole blocks and compare their checksums; False reads the pages that are needed.
        out: Bytes of host memory, enough and aligned, that the result is put into; None: new memory.

    Raises:
        ConfigError: Slices that make no sense.
        CorruptCheckpointError: The files differ from what was saved.
        UnsupportedLeafError: This torch lacks the dtype.
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
        low_memory: Whether targets are filled directly; False: by way of a copy.
        shared: The ranks that read once what several of them want; None: each reads for itself.
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
        """Check that targets with two names can hold what was saved under each; changes nothing.

        Raises:
            AliasMismatchError: One cannot.
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
        """Fill targets, tell autograd which tensors changed, and registered types that all their shards are in.

        Args:
            existing: Targets of the user.
            new: Tensors that were made for this load, which nobody has seen yet.
            plain: Plain tensors of the user that are filled whole.
            alone: Whether this rank reads for itself, whatever the others do.

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
            # Before too: a snapshot that is copied out of a target learns of the change only if it comes first.
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
    """Return `placements`, which are counted from `first` on, without some of them."""
    left_out = set(numbers)
    return [placement for n, placement in enumerate(placements, first) if n not in left_out]


def bump_versions(changed: Sequence[torch.Tensor]) -> None:
    """Tell autograd that tensors change, none of them of inference mode."""
    try:
        torch.autograd.graph.increment_version(changed)
    except (TypeError, RuntimeError):  # a torch that takes them one by one
        for tensor in changed:
            torch.autograd.graph.increment_version(tensor)


def _host_copies(placements: Sequence[Placement]) -> list[Placement]:
    """Return the same placements in one new piece of host memory, pinned where something goes to a GPU."""
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
            f"low_memory=False copies {at} bytes first, and there is no room for them; use low_memory=True: {error}",
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
