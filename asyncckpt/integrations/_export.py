"""Exports: a committed checkpoint of ours becomes a framework's files, published by one rename. Imports no torch.

A process of its own does it, which calls `main`, so that it is done however the trainer ends.
Its standard input is a socket, by which it gets the path of each job, and the descriptor that has the job's lock. It
does the jobs in turn: it waits for the commit, and publishes. What fails for a reason that may pass, such as a full
disk, it tries again. When its input ends, or the trainer is gone, it does what is left, and ends. It has a session of
its own and a low priority. What it could not do stays a job for the next start of the training (`finish_exports`).

IMPORTANT: every file is written under a hidden name and flushed before the rename, and the directory after it: whoever
finds the target finds all of it, also after a power cut.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import select
import shutil
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from asyncckpt.basics.paths import current_umask
from asyncckpt.client.launcher import python_command, worker_environment
from asyncckpt.errors import CheckpointExistsError
from asyncckpt.integrations._export_queue import (
    POLL_S,
    WILL_RETRY,
    ExportJob,
    jobs_in,
    read_job,
    remove_leftovers,
    remove_target,
)
from asyncckpt.integrations._file_manifest import files_in
from asyncckpt.interop.copy_pipeline import Run, Target, write_files
from asyncckpt.interop.publish import Beside, beside, publish
from asyncckpt.storage.contents import Contents, SavedTensor, check_lengths, read_contents
from asyncckpt.storage.files import MODE_DIRECTORY, MODE_FILE, Files, fsync_directory
from asyncckpt.storage.read_plan import ShardRequest, Wanted
from asyncckpt.storage.reader import read_shards

_LOOK_S = 0.5
"""How often it looks whether the trainer is still there: a forked child may hold the other end of the socket. Chosen,
not measured, as are the numbers below."""

FIRST_RETRY_S, LAST_RETRY_S = 1.0, 60.0
"""Between two attempts; each waits twice as long as the one before."""

REST = 4
"""The least wait, as a multiple of the time of an attempt: a large checkpoint is not written all the time to a disk
that is too full for it."""

PASSING = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT, errno.EROFS, errno.ENOLCK}
)
"""What may pass."""

_log = logging.getLogger("asyncckpt.integrations")


class _FileReader:
    """Reads and verifies what the files consist of.

    Attributes:
        outputs: The files.
    """

    def __init__(self, contents: Contents, files: Files) -> None:
        check_lengths(contents, files)
        self._contents, self._files = contents, files
        self._tensors, self.outputs = files_in(contents, self._whole)

    def read(self, runs: Sequence[Run], address: int, origin: int, buffer: memoryview) -> dict[Run, int]:
        """Read runs; see `interop.copy_pipeline.ReadsRuns`."""
        self._read([(self._tensors[r.tensor], r.start, r.nbytes, address + r.at - origin) for r in runs], buffer)
        return {}

    def _whole(self, tensor: SavedTensor) -> bytes:
        (nbytes,) = tensor.global_shape
        room = ctypes.create_string_buffer(max(nbytes, 1))
        self._read([(tensor, 0, nbytes, ctypes.addressof(room))], None)
        return room.raw[:nbytes]

    def _read(self, wanted: Iterable[tuple[SavedTensor, int, int, int]], buffer: memoryview | None) -> None:
        """Read (tensor, start, length, address)."""
        by_shard: dict[tuple[int, int], list[Wanted]] = defaultdict(list)
        for tensor, start, nbytes, address in wanted:
            for rank, chunk in tensor.chunks:
                origin = chunk.offsets[0]
                first, end = max(start, origin), min(start + nbytes, origin + chunk.sizes[0])
                if first < end:
                    place, to = chunk.offset_bytes + first - origin, address + first - start
                    by_shard[rank, chunk.part].append(Wanted(place, end - first, tensor.fqn, to))
        requests = []
        for (rank, part), found in sorted(by_shard.items()):
            index = self._contents.ranks[rank].index
            requests.append(ShardRequest(shard=index.shards[part], block_nbytes=index.block_nbytes, wanted=found))
        path, save_id = self._contents.path, self._contents.manifest.save_id
        read_shards(path, save_id, requests, files=self._files, threads=1, buffer=buffer)


def export(job: ExportJob, *, umask: int) -> None:
    """Publish what a job says, and close it. Its checkpoint is committed, and its lock is held.

    Raises:
        CorruptCheckpointError: The checkpoint is damaged; nothing was published, the job stays.
        OSError: The file system refused; nothing was published, the job stays.

    Blocks: for reading and writing everything.
    """
    files = Files()
    reader = _FileReader(read_contents(job.native, files), files)
    place = os.path.join(os.path.dirname(job.native), os.path.basename(job.target))
    with beside(place) as folder, beside(place) as temporary:
        os.mkdir(folder, MODE_DIRECTORY & ~umask)
        for name in os.listdir(job.native) if job.kind == "dcp" else ():
            _link(os.path.join(job.native, name), os.path.join(folder, name))
        _write(folder, reader, files, umask)
        os.rename(os.path.join(folder, reader.outputs[0].name) if job.kind == "file" else folder, temporary)
        _put_into_place(temporary, job, files)
    for earlier in jobs_in(os.path.dirname(job.path)):
        if earlier.path == job.path:
            break
        if earlier.target == job.target:  # it could not be done, and is older than what stands there now
            earlier.await_commit(60.0)  # else the worker would still write into what is removed
            earlier.close()
    job.close()


def _write(directory: str, reader: _FileReader, files: Files, umask: int) -> None:
    """Write and flush all files, those without a byte too, and their directories."""
    mode = MODE_FILE & ~umask
    for one in reader.outputs:
        os.makedirs(os.path.dirname(os.path.join(directory, one.name)), MODE_DIRECTORY & ~umask, exist_ok=True)
        if not one.nbytes:
            os.close(os.open(os.path.join(directory, one.name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    full = Target([one for one in reader.outputs if one.nbytes], is_directory=True)
    write_files(directory, full, reader, files, mode, lambda nbytes: None, threads=2)
    for folder, _, _ in os.walk(directory, topdown=False):
        fsync_directory(files, folder)


def _link(source: str, target: str) -> None:
    """Give a file another name; where the file system has no hard links, copy it.

    IMPORTANT: the checkpoint of ours stays whole until its job is closed, so an export that is killed is done again.
    """
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
        with open(target, "rb") as file:
            os.fsync(file.fileno())


def _put_into_place(temporary: Beside, job: ExportJob, files: Files) -> None:
    """Rename; what stood at the target is replaced in one step where the file system can exchange two names."""
    with contextlib.suppress(OSError):  # frameworks tell the newest checkpoint by its time: that of its save
        began_ns = os.stat(job.path).st_mtime_ns
        os.utime(temporary, ns=(began_ns, began_ns))
    try:
        publish(temporary, job.target, files, replace=True)
    except CheckpointExistsError:  # it cannot, as NFS; if we are killed between these two lines, it is done again
        remove_target(job.target)
        publish(temporary, job.target, files)


def finish_exports(queue: str, *, timeout_s: float) -> list[str]:
    """Do what is left of an earlier run, or wait for who does; to be called before a run asks what is there.

    Args:
        queue: The directory of the jobs.
        timeout_s: How long to wait for another process that is to do a job. A job that nobody has, and whose save was
            never committed, is removed.

    Returns:
        The targets that were published here. A job that fails is logged, and stays.
    """
    done, deadline = [], time.monotonic() + timeout_s
    for job in jobs_in(queue):
        try:
            while (fd := job.lock()) is None and job.is_open and time.monotonic() < deadline:
                time.sleep(POLL_S)
            if fd is not None:
                with open(fd, "rb"):
                    if job.is_committed:
                        export(job, umask=current_umask())
                        done.append(job.target)
                    else:
                        job.close()
        except Exception as error:  # it must not keep the training from its start
            _log.error("%s cannot be published, its snapshot stays at %s: %s", job.target, job.native, error)
    remove_leftovers(queue)
    return done


class Retries:
    """Jobs that have failed and are tried again.

    Args:
        do: Does a job; raises where that fails.
        clock: As `time.monotonic`.
    """

    def __init__(self, do: Callable[[ExportJob], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._do, self._clock = do, clock
        self._waiting: list[tuple[float, float, ExportJob]] = []  # when it is due, how long it has waited, what

    def attempt(self, job: ExportJob, waited_s: float = 0.0) -> None:
        """Do a job; where it fails, say why beside it, and try it again later if that may help."""
        began = self._clock()
        try:
            self._do(job)
        except Exception as error:  # whatever it is, those that were told after it are done all the same
            is_retried = _errno_of(error) in PASSING
            with contextlib.suppress(OSError), open(job.failure_path, "w", encoding="utf-8", errors="replace") as file:
                advice = WILL_RETRY if is_retried else ""
                file.write(f"{type(error).__name__}: {error}; its snapshot stays at {job.native}{advice}")
            if is_retried:
                wait_s, now = min(2 * waited_s, LAST_RETRY_S) or FIRST_RETRY_S, self._clock()
                self._waiting.append((now + max(wait_s, REST * (now - began)), wait_s, job))
        else:
            with contextlib.suppress(OSError):
                os.unlink(job.failure_path)

    def turn(self, *, last: bool = False) -> None:
        """Try what is due again; `last`: all, oldest first."""
        waiting, self._waiting = self._waiting, []
        for due, waited_s, job in waiting:
            if last or due <= self._clock():
                if job.is_open:  # else a newer one stands in its place
                    self.attempt(job, waited_s)
            else:
                self._waiting.append((due, waited_s, job))


def _errno_of(error: BaseException | None) -> int | None:
    """Return the system's reason for an error, or for what has caused it."""
    for _ in range(10):
        if error is None or (isinstance(error, OSError) and error.errno is not None):
            break
        error = error.__cause__ or error.__context__
    return error.errno if isinstance(error, OSError) else None


_left_alone: list[subprocess.Popen[bytes]] = []
"""Exporters that nobody waits for: reaped when others are started or asked."""


class ExporterProcess:
    """The trainer's end of the exporter, which is started by the first job, and again when it was killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Any = None

    def is_alive(self, pid: int | None) -> bool:
        """Whether the process that was given a job still runs."""
        _left_alone[:] = [process for process in _left_alone if process.poll() is None]
        return self._process is not None and self._process.pid == pid and self._process.poll() is None

    def submit(self, job: ExportJob, fd: int | None, *, timeout_s: float) -> int | None:
        """Give a job to the process, with its lock; return the process that has it.

        Args:
            job: The job.
            fd: Has its lock, and is closed. None: another process has the lock, and does the job.
            timeout_s: How long a save may take to be committed; that of the first job counts.

        Raises:
            OSError: No process can be made.
        """
        if fd is None:
            return None
        with open(fd, "rb"):
            if self._process is None or self._process.poll() is not None or not self._give(job, fd):
                self.close()
                self._channel, theirs = socket.socketpair()
                arguments = (str(timeout_s), str(current_umask()), str(os.getpid()))
                with theirs:
                    self._process = subprocess.Popen(
                        [*python_command(__name__), *arguments],
                        stdin=theirs.fileno(),
                        stdout=subprocess.DEVNULL,
                        cwd="/",
                        env=worker_environment(),
                        start_new_session=True,
                    )
                self._give(job, fd)
        return self._process.pid

    def _give(self, job: ExportJob, fd: int) -> bool:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            return bool(socket.send_fds(self._channel, [os.fsencode(job.path)], [fd]))
        return False

    def close(self, timeout_s: float = 0.0) -> None:
        """Tell of the end; what it has it does all the same. Waits up to `timeout_s` for its end. Twice is fine."""
        process, self._process = self._process, None
        if self._channel is not None:
            self._channel.close()
        if process is not None:
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                _left_alone.append(process)


def _received(parent: int) -> Iterator[tuple[str, int]]:
    """Yield (path of the job, descriptor that has its lock) until the trainer has closed its end, or has gone.

    ("", -1), now and then, while there is nothing to do.
    """
    channel = socket.socket(fileno=0)
    while True:
        if not select.select([channel], [], [], _LOOK_S)[0]:
            if os.getppid() != parent:
                return
            yield "", -1
            continue
        # unix(7): what comes with a descriptor is never joined with what was sent before or after it.
        path, fds, _, _ = socket.recv_fds(channel, 8192, 1)
        if not path:
            return
        yield os.fsdecode(path), fds[0]


def main() -> None:
    """Do the jobs that come, and remove a queue that is empty then; arguments as `ExporterProcess` gives them."""
    timeout_s, umask, parent = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    os.nice(10)
    locks = dict[str, int]()

    def do(job: ExportJob) -> None:
        fd = locks.pop(job.path, None) or job.lock()
        if fd is not None:  # else another process has it
            with open(fd, "rb"):
                job.flush()
                if job.await_commit(timeout_s) and job.is_open:
                    export(job, umask=umask)
        remove_leftovers(os.path.dirname(job.path))  # stock tools may trip over it, should the trainer be gone

    retries = Retries(do)
    for path, fd in _received(parent):
        job = read_job(path) if path else None
        if job is not None:
            locks[path] = fd
            retries.attempt(job)
        elif path:  # it was withdrawn
            os.close(fd)
            remove_leftovers(os.path.dirname(path))
        retries.turn()
    retries.turn(last=True)
