"""A committed checkpoint of ours becomes the framework's files, published by one rename. Imports no torch.

IMPORTANT: every file is written under a hidden name and flushed before the rename, and the directory after it: who
finds the target finds all of it, also after a power cut.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import secrets
import shutil
from collections.abc import Callable, Sequence

from asyncckpt.conversion.arriving import Arriving
from asyncckpt.conversion.pieces import OutputFile, Target
from asyncckpt.conversion.publishing import beside, exchange
from asyncckpt.conversion.windows import Run
from asyncckpt.conversion.writing import write_files
from asyncckpt.integrations.spool import Job, await_commit, jobs_in
from asyncckpt.integrations.stock_files import StockFiles
from asyncckpt.storage.block_reader import read_shards
from asyncckpt.storage.contents import Contents, SavedTensor, check_lengths, read_contents
from asyncckpt.storage.files import MODE_DIRECTORY, MODE_FILE, Files, fsync_directory
from asyncckpt.storage.read_plan import ShardRequest, Wanted

EXPORT_THREADS = 2
"""Of a process that must not take the training's cores. Chosen, not measured."""


EARLIER_TIMEOUT_S = 60.0
"""How long the save before, whose files the worker began to write first, may take longer. Chosen."""


class _ByteReader:
    """Reads and verifies runs of tensors of bytes."""

    def __init__(self, contents: Contents, tensors: Sequence[SavedTensor], files: Files) -> None:
        check_lengths(contents, files)
        self._contents, self._tensors, self._files = contents, tensors, files

    def read(
        self, runs: Sequence[Run], address: int, origin: int, buffer: memoryview | None, _: Arriving | None = None
    ) -> None:
        by_file: dict[tuple[int, int], list[Wanted]] = {}
        for run in runs:
            saved = self._tensors[run.tensor]
            for rank, chunk in saved.chunks:
                first = max(run.start, chunk.offsets[0])
                end = min(run.start + run.nbytes, chunk.offsets[0] + chunk.sizes[0])
                if first < end:
                    to = address + run.at - origin + first - run.start
                    wanted = Wanted(chunk.offset_bytes + first - chunk.offsets[0], end - first, saved.fqn, to)
                    by_file.setdefault((rank, chunk.part), []).append(wanted)
        requests = []
        for (rank, part), found in sorted(by_file.items()):
            index = self._contents.ranks[rank].index
            requests.append(ShardRequest(shard=index.shards[part], block_nbytes=index.block_nbytes, wanted=found))
        read_shards(
            self._contents.path,
            self._contents.manifest.save_id,
            requests,
            files=self._files,
            threads=1,
            buffer=buffer,
        )

    def whole(self, number: int) -> bytes:
        nbytes = math.prod(self._tensors[number].global_shape)
        room = ctypes.create_string_buffer(max(nbytes, 1))
        self.read([Run(0, number, 0, nbytes, 0, True)], ctypes.addressof(room), 0, None)
        return room.raw[:nbytes]


def export(job: Job, *, umask: int) -> None:
    """Publish what a job says, and close it. Its checkpoint is committed, and its lock is held.

    Raises:
        CorruptCheckpointError: The checkpoint is damaged; nothing was published, the job stays.
        OSError: The file system refused; as above.

    Blocks: for reading and writing everything.
    """
    files = Files()
    contents = read_contents(job.native, files)
    stock = StockFiles(contents, files)
    reader = _ByteReader(contents, stock.tensors, files)
    outputs = stock.outputs({number: reader.whole(number) for number in sorted(stock.small_tensors())})
    os.makedirs(os.path.dirname(job.target), exist_ok=True)
    if job.moved:
        for one in outputs:  # of an export that was killed
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(job.native, one.name))
        _write(job.native, outputs, reader, files, umask)
        fsync_directory(files, job.native)
        _date(job.native, job)
        _into_place(job.native, job.target, files)
    else:
        with beside(os.path.join(os.path.dirname(job.native), os.path.basename(job.target))) as temporary:
            if job.is_directory:
                os.mkdir(temporary, MODE_DIRECTORY & ~umask)
                _write(temporary, outputs, reader, files, umask)
            else:
                _write_one(temporary, outputs[0], reader, files, umask)
            _date(temporary, job)
            _into_place(temporary, job.target, files)
    for earlier in jobs_in(os.path.dirname(job.path)):
        if earlier.path == job.path:
            break
        if earlier.target == job.target:  # it could not be done, and is older than what stands there now
            await_commit(earlier, EARLIER_TIMEOUT_S)  # else the worker would still write into what is removed
            earlier.close()
    job.close()


def _date(path: str, job: Job) -> None:
    """Give it the time at which its save began: frameworks tell by it which checkpoint is the newest."""
    with contextlib.suppress(OSError):
        began_ns = os.stat(job.path).st_mtime_ns
        os.utime(path, ns=(began_ns, began_ns))


def _write(directory: str, outputs: Sequence[OutputFile], reader: _ByteReader, files: Files, umask: int) -> None:
    folders = {os.path.dirname(os.path.join(directory, one.name)) for one in outputs} | {directory}
    for folder in sorted(folders):
        os.makedirs(folder, MODE_DIRECTORY & ~umask, exist_ok=True)
    full = [one for one in outputs if one.nbytes]
    mode = MODE_FILE & ~umask
    write_files(directory, Target(full, is_directory=True), reader, files, mode, _ignore, threads=EXPORT_THREADS)
    for one in outputs:
        if not one.nbytes:
            os.close(os.open(os.path.join(directory, one.name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    for folder in sorted(_with_parents(folders, directory), reverse=True):
        fsync_directory(files, folder)


def _with_parents(folders: set[str], top: str) -> set[str]:
    found = set(folders)
    for folder in folders:
        while folder != top:
            folder = os.path.dirname(folder)
            found.add(folder)
    return found


def _write_one(path: str, output: OutputFile, reader: _ByteReader, files: Files, umask: int) -> None:
    target = Target([output], is_directory=False)
    write_files(path, target, reader, files, MODE_FILE & ~umask, _ignore, threads=EXPORT_THREADS)


def _into_place(temporary: str, target: str, files: Files) -> None:
    """Rename; what stood at the target is replaced in one step, and then removed."""
    if not os.path.isdir(target) and not os.path.isdir(temporary):
        os.replace(temporary, target)  # a file, or nothing: the usual case
    elif not os.path.lexists(target):
        os.rename(temporary, target)
    else:
        _replace(temporary, target)
    fsync_directory(files, os.path.dirname(target))


def _replace(temporary: str, target: str) -> None:
    aside = os.path.join(os.path.dirname(temporary), f"{os.path.basename(target)}.{secrets.token_hex(6)}.old")
    if exchange(temporary, target):
        os.rename(temporary, aside)
    else:
        os.rename(target, aside)
        os.rename(temporary, target)
    if os.path.isdir(aside) and not os.path.islink(aside):
        shutil.rmtree(aside, ignore_errors=True)
    else:
        os.unlink(aside)


_ignore: Callable[[int], None] = lambda nbytes: None  # noqa: E731
