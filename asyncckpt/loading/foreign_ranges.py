"""Reading ranges of another format's chunks: where they lie is resolved, then they are read as ranges of files are.

Elements that are not row-major in their file are gathered: the part of the file that holds them is read, and what is
wanted of it handed on in the order that everybody expects.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.checksum import BLOCK_NBYTES
from asyncckpt.loading.sinks import BoxSink, new_tensor
from asyncckpt.memory.copying import copy_bytes
from asyncckpt.storage import latin1
from asyncckpt.storage.block_reader import read_shards
from asyncckpt.storage.bringing import UNIT_NBYTES
from asyncckpt.storage.contents import Contents
from asyncckpt.storage.files import MODE_FILE, Files
from asyncckpt.storage.read_plan import ShardRequest, Sink, Wanted
from asyncckpt.storage.source import Inline, Latin1, Located, Place, Strided

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_WIDEST_NBYTES = max(_CARRIERS)
_LARGE_NBYTES = 4 * UNIT_NBYTES
"""What is read through of a part, from which on the large pages around its headers are wanted too."""

_OTHER_TEXT = "lies in a pickle as a text, which was changed while it was read"

Ranges = Mapping[tuple[int, int], Sequence[Wanted]]


class _BringingFiles(Files):
    """Opens, reads and closes files of another seam, and brings in large pages around what it reads.

    IMPORTANT: of files all of which is read through afterwards. A small page that is there, of a header, would keep the
    kernel from taking its neighbours as a large one.
    """

    def __init__(self, below: Files) -> None:
        self._below = below
        self._brought: dict[int, tuple[int, int]] = {}

    def open(self, path: str, flags: int, mode: int = MODE_FILE) -> int:
        return self._below.open(path, flags, mode)

    def close(self, fd: int) -> None:
        self._brought.pop(fd, None)
        self._below.close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview | bytearray], offset: int, flags: int = 0) -> int:
        nbytes = sum(map(len, buffers))
        units = offset // UNIT_NBYTES, (offset + nbytes - 1) // UNIT_NBYTES
        if self._brought.get(fd) != units:  # a header is read in several pieces that lie close together
            self._brought[fd] = units
            self._below.bring(fd, offset, nbytes)
        return self._below.preadv(fd, buffers, offset, flags)


def read_foreign(
    contents: Contents, ranges: Ranges, files: Files, *, threads: int, buffer: memoryview | None = None
) -> None:
    """Read ranges of parts and hand them on; the formats have no checksums that a part of a file could be held to.

    `buffer` is as `storage.block_reader.read_shards` has it.

    Raises:
        CorruptCheckpointError: What is there is not what the structure says, or was changed meanwhile.
        OSError: The files cannot be read.

    Blocks: for the reads. Host memory: a tensor that is gathered, once; else a few extents.
    """
    source = contents.source
    assert source is not None
    parts = [part for _, part in ranges]
    bringing = _BringingFiles(files)
    large = {part for (_, part), wanted in ranges.items() if sum(map(_through_nbytes, wanted)) >= _LARGE_NBYTES}

    def place_of(part: int) -> Place:
        return source.place(part, bringing if part in large else files)

    if len(parts) > 1 and threads > 1:
        with ThreadPoolExecutor(threads, "asyncckpt-find") as pool:
            places = list(pool.map(place_of, parts))
    else:
        places = [place_of(part) for part in parts]
    plain: dict[int, list[Wanted]] = {}
    for place, wanted in zip(places, ranges.values(), strict=True):
        if isinstance(place, Inline):
            _hand_on_from(wanted, _address_of(place.data))
        elif isinstance(place, Located):
            plain.setdefault(place.part, []).extend(_placed(w, place.offset) for w in wanted)
    _read(contents, plain, files, threads, buffer)
    for place, wanted in zip(places, ranges.values(), strict=True):
        if isinstance(place, Strided):
            _gather(contents, place, wanted, files, threads)
        elif isinstance(place, Latin1):
            _decode(contents, place, wanted, files)
    shards = contents.ranks[0].index.shards
    # IMPORTANT: after the reads. Files are opened anew for each, by name, and a trainer may put the next save there.
    source.check_unchanged(files, [shards[place.part].name for place in places if not isinstance(place, Inline)])


def _through_nbytes(wanted: Wanted) -> int:
    return wanted.nbytes if wanted.every and wanted.times == 1 else 0


def _placed(wanted: Wanted, start: int) -> Wanted:
    """Return a range of a file, whose elements may begin anywhere: then it comes in rows, which cuts none."""
    offset, sink = wanted.offset + start, wanted.sink
    if isinstance(sink, BoxSink) and not wanted.every:
        return wanted._replace(offset=offset, every=sink.row_nbytes(offset), dense=True)
    return wanted._replace(offset=offset)


def _read(
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


def _gather(contents: Contents, place: Strided, wanted: Sequence[Wanted], files: Files, threads: int) -> None:
    dtype = _CARRIERS[place.itemsize]
    span = new_tensor((place.nbytes // place.itemsize,), dtype, torch.device("cpu"))
    read_span(contents, place, span.data_ptr(), wanted[0].fqn, files, threads=threads)
    rows = span.as_strided(place.sizes, place.strides).contiguous()
    _hand_on_from(wanted, rows.data_ptr())


def _decode(contents: Contents, place: Latin1, wanted: Sequence[Wanted], files: Files) -> None:
    """Hand on ranges of bytes that lie in their file as a text, a step at a time."""
    first, block = 0, b""
    limit = max(_WIDEST_NBYTES, place.step // _WIDEST_NBYTES * _WIDEST_NBYTES)  # no piece ends inside an element
    for w in wanted:
        for n, done in itertools.product(range(w.times), range(0, w.nbytes, limit)):
            low, nbytes = w.offset + n * w.every + done, min(limit, w.nbytes - done)
            if not first <= low <= low + nbytes <= first + len(block):
                first, block = low, _decoded(contents, place, low, limit, w.fqn, files)
                if len(block) < nbytes:
                    raise _corrupt(contents, place.part, w.fqn, _OTHER_TEXT)
            _put(w.sink, n * w.nbytes + done, _address_of(block) + low - first, nbytes)


def _decoded(contents: Contents, place: Latin1, low: int, nbytes: int, fqn: str, files: Files) -> bytes:
    """Return bytes of a text from number `low` on: `nbytes` of them, or as many as there are."""
    start, end, first = latin1.span_of(place.firsts, place.step, place.nbytes, low, low + nbytes)
    part = bytearray(end - start)
    address = ctypes.addressof((ctypes.c_char * len(part)).from_buffer(part))
    _read(contents, {place.part: [Wanted(place.offset + start, len(part), fqn, address)]}, files, 1)
    try:
        return latin1.decoded(part)[low - first :][:nbytes]
    except ValueError as error:
        raise _corrupt(contents, place.part, fqn, _OTHER_TEXT) from error


def read_span(contents: Contents, place: Strided, address: int, fqn: str, files: Files, *, threads: int) -> None:
    """Read the range of a file that holds the elements of a tensor that is not row-major, to `address`."""
    _read(contents, {place.part: [Wanted(place.offset, place.nbytes, fqn, address)]}, files, threads)


def _address_of(data: bytes) -> int:
    """Return where bytes lie that stay alive: a copy, for every window of a long array, would take as long as all."""
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


def _hand_on_from(wanted: Sequence[Wanted], address: int) -> None:
    """Give each range its bytes of the row-major elements at `address`."""
    for offset, nbytes, _, sink, times, every, _ in wanted:
        for n in range(times if nbytes else 0):
            _put(sink, n * nbytes, address + offset + n * every, nbytes)


def _put(sink: int | Sink | None, position: int, address: int, nbytes: int) -> None:
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
