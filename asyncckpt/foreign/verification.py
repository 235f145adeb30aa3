"""Is a foreign checkpoint what was written? As far as its format can tell; and a verdict for ours by the same name."""

from __future__ import annotations

import os
import zlib
from concurrent.futures import ThreadPoolExecutor

from asyncckpt.errors import AsyncCkptError, CorruptCheckpointError
from asyncckpt.foreign.kinds import OURS, kind_at, read_any
from asyncckpt.foreign.ranges import read_exactly
from asyncckpt.foreign.safetensors_files import COPIES
from asyncckpt.foreign.zip_directory import ReadAt, ZipEntry, data_offset, read_directory
from asyncckpt.storage.block_reader import DEFAULT_THREADS
from asyncckpt.storage.contents import Contents
from asyncckpt.storage.files import Files, opened
from asyncckpt.storage.verification import Verdict, verify_checkpoint

_STEP_NBYTES = 4 << 20
_MAX_SHOWN = 8
_NO_CHECKSUMS = "the format has no checksums: names, shapes, sizes and lengths were checked, not the data"
_FAST = "names, shapes, sizes and lengths were checked, not the data"


def verify_any(path: str, files: Files, *, fast: bool = False, threads: int = DEFAULT_THREADS) -> Verdict:
    """Check the checkpoint at `path`, whatever kind it is.

    Args:
        path: Directory or file.
        files: The storage seam.
        fast: Skips the data.
        threads: That read and compare.

    Returns:
        The verdict; nothing is raised for what is wrong. Its `unchecked` says what the format cannot tell. Blocks for
        the reads.
    """
    try:
        kind = kind_at(path, files)
    except (AsyncCkptError, OSError) as error:
        return Verdict(path=path, faults=[error])
    if kind == OURS:
        return verify_checkpoint(path, files, fast=fast, threads=threads)
    verdict = Verdict(path=path)
    try:
        verdict.contents = read_any(path, files)
        source = verdict.contents.source
        if fast or source is None or not source.archives:
            verdict.unchecked = (_FAST if fast else _NO_CHECKSUMS) + _copies(verdict.contents)
            return verdict
        _check_archives(verdict, files, threads)
    except (AsyncCkptError, OSError) as error:
        verdict.faults.append(error)
    return verdict


def _copies(contents: Contents) -> str:
    """Return what is said of tensors that several files have."""
    found = contents.source.changed.get(COPIES, {}) if contents.source is not None else {}
    names = [name + more for name, more in found.items()]
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return f"; {COPIES}: {', '.join(names[:_MAX_SHOWN])}{more}" if names else ""


def _check_archives(verdict: Verdict, files: Files, threads: int) -> None:
    contents = verdict.contents
    assert contents is not None and contents.source is not None
    windows, unheld = contents.source.archives, 0
    with ThreadPoolExecutor(max(1, threads), "asyncckpt-verify") as pool:
        for nbytes, faults in pool.map(lambda window: _check_window(contents, window, files), windows):
            verdict.read_nbytes += nbytes
            verdict.faults += faults
            unheld += not nbytes and not faults
    if unheld:
        verdict.unchecked = (
            f"{unheld} of {len(windows)} archives were written without CRC-32: their data were not checked"
        )
    verdict.faults.sort(key=lambda fault: (str(getattr(fault, "file", "")), getattr(fault, "offset", None) or 0))


def _check_window(
    contents: Contents, window: tuple[str, int, int], files: Files
) -> tuple[int, list[AsyncCkptError | OSError]]:
    """Return how many bytes of an archive were read, and what is wrong with it."""
    assert contents.source is not None
    name, start, nbytes = window
    faults: list[AsyncCkptError | OSError] = []
    done = 0
    try:
        with opened(files, os.path.join(contents.source.directory, name), os.O_RDONLY) as fd:
            read_at = read_exactly(files, fd, nbytes, start)
            entries = list(read_directory(read_at, nbytes).values())
            if not any(entry.crc for entry in entries):  # torch.serialization.set_crc32_options(False)
                return 0, []
            for entry in entries:
                offset = data_offset(read_at, entry)
                if crc_of(read_at, entry, offset) != entry.crc:
                    faults.append(damaged(contents, name, entry, start + offset))
                done += entry.nbytes
    except ValueError as error:
        if isinstance(error, AsyncCkptError):
            raise
        detail = f"bytes {start} to {start + nbytes}: {error}"
        where = os.path.join(contents.source.directory, name)
        faults.append(CorruptCheckpointError(f"{where}: {detail}", path=contents.path, file=name, detail=detail))
    except OSError as error:
        faults.append(error)
    return done, faults


def crc_of(read_at: ReadAt, entry: ZipEntry, offset: int) -> int:
    """Return the CRC-32 of an entry whose bytes begin at `offset` of its archive.

    Raises:
        ValueError: The file ends before they do.
        OSError: They cannot be read.
    """
    crc = 0
    for at in range(0, entry.nbytes, _STEP_NBYTES):
        crc = zlib.crc32(read_at(offset + at, min(_STEP_NBYTES, entry.nbytes - at)), crc)
    return crc


def damaged(contents: Contents, name: str, entry: ZipEntry, offset: int) -> CorruptCheckpointError:
    """Return the error for an entry, at byte `offset` of file `name`, whose CRC-32 is another; it names the tensors."""
    assert contents.source is not None
    shards = contents.ranks[0].index.shards
    end = offset + entry.nbytes
    holds = [
        tensor.fqn
        for tensor in contents.tensors.values()
        for _, chunk in tensor.chunks
        if shards[chunk.part].name == name and _begins_within(contents, chunk.part, chunk.offset_bytes, offset, end)
    ]
    detail = f"bytes {offset} to {end} differ from their CRC-32"
    what = f"; they hold tensor {', '.join(map(repr, holds[:3]))}" if holds else ""
    return CorruptCheckpointError(
        f"{os.path.join(contents.source.directory, name)}: {detail}{what}",
        path=contents.path,
        file=name,
        fqn=holds[0] if holds else None,
        offset=offset,
        nbytes=entry.nbytes,
        detail=detail,
    )


def _begins_within(contents: Contents, part: int, offset: int, start: int, end: int) -> bool:
    assert contents.source is not None
    try:
        place = contents.source.place(part, Files())
    except (AsyncCkptError, OSError):
        return False
    at = getattr(place, "offset", -1) + offset
    return start <= at < max(end, start + 1)
