"""Verifies a checkpoint of any kind, as far as its format has checksums."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from asyncckpt.errors import AsyncCkptError
from asyncckpt.interop.sources.detect import kind_at, read_any
from asyncckpt.interop.sources.safetensors_file import COPIES
from asyncckpt.interop.sources.torch_file import crc_of, damaged, data_offset, opened_archive, read_directory
from asyncckpt.storage.contents import NATIVE, Contents, ForeignSource, Place
from asyncckpt.storage.files import Files
from asyncckpt.storage.reader import DEFAULT_THREADS
from asyncckpt.storage.verification import Verdict, verify_checkpoint

_MAX_SHOWN = 8
_NO_CHECKSUMS = "the format has no checksums: names, shapes, sizes and lengths were checked, not the data"
_FAST = "names, shapes, sizes and lengths were checked, not the data"


def verify_any(path: str, files: Files, *, fast: bool = False, threads: int = DEFAULT_THREADS) -> Verdict:
    """Verify the checkpoint at `path`, of any kind.

    Args:
        path: A directory or a file.
        files: The storage seam.
        fast: Skip the elements of tensors.
        threads: Number of threads that read and compare.

    Returns:
        The verdict. Damage and read errors are in its `faults`, never raised; `unchecked` says what was not verified.

    Blocks: until everything is read.
    """
    try:
        kind = kind_at(path, files)
    except (AsyncCkptError, OSError) as error:
        return Verdict(path=path, faults=[error])
    if kind == NATIVE:
        return verify_checkpoint(path, files, fast=fast, threads=threads)
    verdict = Verdict(path=path)
    try:
        verdict.contents = read_any(path, files)
        source = verdict.contents.source
        if fast or source is None or not source.archives:
            verdict.unchecked = (_FAST if fast else _NO_CHECKSUMS) + _copies(verdict.contents)
            return verdict
        _check_archives(verdict, verdict.contents, source, files, threads)
    except (AsyncCkptError, OSError) as error:
        verdict.faults.append(error)
    return verdict


def _copies(contents: Contents) -> str:
    """Return the text about tensors that are in several files; empty if there are none."""
    found = contents.source.changed.get(COPIES, {}) if contents.source is not None else {}
    names = [name + more for name, more in found.items()]
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return f"; {COPIES}: {', '.join(names[:_MAX_SHOWN])}{more}" if names else ""


def _check_archives(verdict: Verdict, contents: Contents, source: ForeignSource, files: Files, threads: int) -> None:
    n_unheld = 0
    with ThreadPoolExecutor(max(1, threads), "asyncckpt-verify") as pool:
        for nbytes, faults in pool.map(lambda archive: _check_archive(contents, archive, files), source.archives):
            verdict.read_nbytes += nbytes
            verdict.faults += faults
            n_unheld += not nbytes and not faults
        if not verdict.faults:  # IMPORTANT: no checksum covers the names of entries, by which tensors are found
            found = pool.map(lambda part: _place_or_fault(source, part, files), range(len(source.places)))
            verdict.faults += [fault for fault in found if isinstance(fault, (AsyncCkptError, OSError))]
    if n_unheld:
        verdict.unchecked = (
            f"{n_unheld} of {len(source.archives)} archives were written without CRC-32: their data were not checked"
        )
    verdict.faults.sort(key=lambda fault: (str(getattr(fault, "file", "")), getattr(fault, "offset", None) or 0))


def _check_archive(
    contents: Contents, archive: tuple[str, int, int], files: Files
) -> tuple[int, list[AsyncCkptError | OSError]]:
    """Return how many bytes of an archive were read, and its faults; 0 and no faults if it has no CRC-32s."""
    name, start, nbytes = archive
    faults: list[AsyncCkptError | OSError] = []
    done = 0
    try:
        with opened_archive(contents, archive, files) as read_at:
            entries = list(read_directory(read_at, nbytes).values())
            if not any(entry.crc for entry in entries):  # torch.serialization.set_crc32_options(False)
                return 0, []
            for entry in entries:
                offset = data_offset(read_at, entry)
                if crc_of(read_at, entry, offset) != entry.crc:
                    faults.append(damaged(contents, name, entry, start + offset))
                done += entry.nbytes
    except (AsyncCkptError, OSError) as error:
        faults.append(error)
    return done, faults


def _place_or_fault(source: ForeignSource, part: int, files: Files) -> Place | AsyncCkptError | OSError:
    try:
        return source.place(part, files)
    except (AsyncCkptError, OSError) as error:
        return error
