"""Writes the files of a target from front to back, digesting what passes: nothing is in memory but two slabs."""

from __future__ import annotations

import ctypes
import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import xxhash

from asyncckpt.conversion.payloads import Slab
from asyncckpt.conversion.pieces import OutputFile
from asyncckpt.format.archive import Payload
from asyncckpt.format.checksum import BLOCK_NBYTES, block_digest
from asyncckpt.storage.files import Files, apply_mode, fsync_file, opened, write_all

_FLUSH_NBYTES = 64 << 20
_SYNC_FILE_RANGE_WRITE = 2
_libc = ctypes.CDLL(None)


@dataclass(slots=True)
class Written:
    """What passed: by tensor number its digest, by file name the digests of its blocks."""

    tensors: dict[int, bytes] = field(default_factory=dict)
    blocks: dict[str, bytes] = field(default_factory=dict)


def write_file(
    path: str,
    file: OutputFile,
    slabs: Iterator[Slab],
    written: Written,
    files: Files,
    mode: int,
    step: Callable[[int], None],
) -> None:
    """Write one file, flush and close it.

    Args:
        path: It must not exist.
        file: What it is made of.
        slabs: The elements of its payloads, in their order.
        written: Takes the digests.
        files: The storage seam.
        mode: Permission bits.
        step: Called with the bytes of every write.

    Raises:
        OSError: Names the file; it may be left behind, incomplete.
        Exception: Whatever `slabs` raises.
    """
    with opened(files, path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode) as fd:
        apply_mode(files, fd, mode)
        out = _Out(files, fd, path, step, blocks=file.digest_blocks)
        crcs: dict[int, int] = {}
        wanted = {n for n, _ in file.crc_at}
        with ThreadPoolExecutor(1, "asyncckpt-crc") as pool:
            for number, piece in enumerate(file.pieces):
                if isinstance(piece, Payload):
                    crcs[number] = _write_payload(out, piece, slabs, written, pool if number in wanted else None)
                else:
                    out.write(memoryview(piece))
        for number, offset in file.crc_at:
            write_all(files, fd, memoryview(crcs[number].to_bytes(4, "little")), offset, path)
        if file.digest_blocks:
            written.blocks[file.name] = out.finished_blocks()
        fsync_file(files, fd, path)


def _write_payload(out: _Out, piece: Payload, slabs: Iterator[Slab], written: Written, pool: Executor | None) -> int:
    """Write a tensor; return its CRC-32, which `pool` computes beside the writes, or 0 without one."""
    digest, done = xxhash.xxh3_128(), 0
    crc: Future[int] | None = None
    while True:
        slab = next(slabs)
        assert slab.tensor == piece.tensor, "slabs come in another order than pieces"
        crc = pool.submit(zlib.crc32, slab.data, crc.result() if crc else 0) if pool is not None else None
        try:
            digest.update(slab.data)
            out.write(slab.data)
        finally:
            if crc is not None:
                crc.result()  # the slab's memory is used again
        done += len(slab.data)
        if slab.is_last:
            break
    assert done == piece.nbytes, "a tensor of another length than its piece"
    written.tensors[piece.tensor] = digest.digest()
    return crc.result() if crc else 0


class _Out:
    """An open file that is appended to."""

    def __init__(self, files: Files, fd: int, path: str, step: Callable[[int], None], *, blocks: bool) -> None:
        self._files, self._fd, self._path, self._step = files, fd, path, step
        self._blocks: bytearray | None = bytearray() if blocks else None
        self._open_block: Any = bytearray()
        self._at = self._flushed = 0

    def write(self, data: memoryview) -> None:
        if self._blocks is not None:
            self._digest(data)
        write_all(self._files, self._fd, data, self._at, self._path)
        self._at += len(data)
        self._step(len(data))
        if self._at - self._flushed >= _FLUSH_NBYTES:
            # So that the disk works meanwhile; the flush at the end then finds little to do, and counts the errors.
            _libc.sync_file_range(
                self._fd,
                ctypes.c_int64(self._flushed),
                ctypes.c_int64(self._at - self._flushed),
                _SYNC_FILE_RANGE_WRITE,
            )
            self._flushed = self._at

    def _digest(self, data: memoryview) -> None:
        assert self._blocks is not None
        at = 0
        if self._open_block:
            at = min(BLOCK_NBYTES - len(self._open_block), len(data))
            self._open_block += data[:at]
            if len(self._open_block) == BLOCK_NBYTES:
                self._blocks += block_digest(self._open_block)
                self._open_block = bytearray()
        while at + BLOCK_NBYTES <= len(data):
            self._blocks += block_digest(data[at : at + BLOCK_NBYTES])
            at += BLOCK_NBYTES
        self._open_block += data[at:]

    def finished_blocks(self) -> bytes:
        """Return the digests of all blocks, the short last one too."""
        assert self._blocks is not None
        if self._open_block:
            self._blocks += block_digest(self._open_block)
            self._open_block = bytearray()
        return bytes(self._blocks)
