"""The exporter: converts a committed asyncckpt checkpoint into a framework's files, and publishes them. No torch.

The exporter is a separate process that runs `main`, so that exports are done even if the trainer is killed. Its
standard input is a socket, on which it receives the path of each job and a file descriptor that holds the job's lock.
It does one job after the other: it waits for the commit, and publishes by one rename. It tries a job again that fails
for a transient reason, such as a full disk. When its input ends, or the trainer has ended, it does the remaining jobs,
and ends. It has a session of its own, and a low priority. Jobs that it could not do are done at the next start of the
training (`finish_exports`).

IMPORTANT: every file is written under a hidden name and flushed before the rename, and the directory after it. So the
target is complete whenever it exists, also after a power cut.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import select
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from asyncckpt.basics.paths import current_umask
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
from asyncckpt.interop.checkpoint_files import copy_file
from asyncckpt.interop.copy_pipeline import ElementRun, Target, write_files
from asyncckpt.interop.publish import TemporaryPath, publish, temporary_path
from asyncckpt.interop.side_process import SideProcess
from asyncckpt.storage.contents import Contents, SavedTensor, check_lengths, read_contents
from asyncckpt.storage.files import MODE_DIRECTORY, MODE_FILE, Files, fsync_directory
from asyncckpt.storage.read_plan import ShardRequest, Wanted
from asyncckpt.storage.reader import read_shards

_POLL_PARENT_S = 0.5
"""How often the exporter checks whether the trainer lives: a forked child may hold the other end of the socket. Chosen,
as are the numbers below."""

FIRST_RETRY_S, LAST_RETRY_S = 1.0, 60.0
"""First and longest pause between two attempts; each pause is twice as long as the one before."""

MIN_PAUSE_FACTOR = 4
"""Shortest pause, as a multiple of the duration of an attempt: a large checkpoint must not be written all the time to a
disk that is too full for it."""

TRANSIENT_ERRNOS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT, errno.EROFS, errno.ENOLCK}
)
"""Errors after which another attempt may succeed."""

_log = logging.getLogger("asyncckpt.integrations")


class _FileReader:
    """Reads and verifies the tensors that the files consist of.

    Attributes:
        outputs: The files to write.
    """

    def __init__(self, contents: Contents, files: Files) -> None:
        check_lengths(contents, files)
        self._contents, self._files = contents, files
        self._tensors, self.outputs = files_in(contents, self._whole)

    def read(self, runs: Sequence[ElementRun], address: int, origin: int, buffer: memoryview) -> dict[ElementRun, int]:
        """Read runs of bytes, as an `interop.copy_pipeline.ReadsRuns`."""
        self._read([(self._tensors[r.tensor], r.start, r.nbytes, address + r.at - origin) for r in runs], buffer)
        return {}

    def _whole(self, tensor: SavedTensor) -> bytes:
        (nbytes,) = tensor.global_shape
        room = ctypes.create_string_buffer(max(nbytes, 1))
        self._read([(tensor, 0, nbytes, ctypes.addressof(room))], None)
        return room.raw[:nbytes]

    def _read(self, wanted: Iterable[tuple[SavedTensor, int, int, int]], buffer: memoryview | None) -> None:
        """Read byte ranges of tensors, given as (tensor, start, length, address to write to)."""
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
    """Publish the checkpoint of a job, and remove the job. The caller holds its lock; the checkpoint is committed.

    Raises:
        CorruptCheckpointError: The checkpoint is damaged. Nothing was published, and the job stays.
        OSError: A file system call failed. Nothing was published, and the job stays.

    Blocks: to read and write the whole checkpoint.
    """
    files = Files()
    reader = _FileReader(read_contents(job.native, files), files)
    place = os.path.join(os.path.dirname(job.native), os.path.basename(job.target))
    with temporary_path(place) as folder, temporary_path(place) as temporary:
        os.mkdir(folder, MODE_DIRECTORY & ~umask)
        for name in os.listdir(job.native) if job.kind == "dcp" else ():
            _link(os.path.join(job.native, name), os.path.join(folder, name))
        _write(folder, reader, files, umask)
        os.rename(os.path.join(folder, reader.outputs[0].name) if job.kind == "file" else folder, temporary)
        _put_into_place(temporary, job, files)
    for earlier in jobs_in(os.path.dirname(job.path)):
        if earlier.path == job.path:
            break
        if earlier.target == job.target:  # an earlier save to this target, whose export has failed
            earlier.await_commit(60.0)  # the worker must not write into a directory that is being removed
            earlier.close()
    job.close()


def _write(directory: str, reader: _FileReader, files: Files, umask: int) -> None:
    """Write and flush all files, empty ones included, and their directories."""
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
    """Hard-link a file; copy it if the file system has no hard links.

    IMPORTANT: do not move the file. The asyncckpt checkpoint must stay complete until its job is removed, since a
    killed export is repeated.
    """
    try:
        os.link(source, target)
    except OSError:
        copy_file(source, target)


def _put_into_place(temporary: TemporaryPath, job: ExportJob, files: Files) -> None:
    """Rename to the target. An existing target is replaced in one step, if the file system can exchange two names."""
    with contextlib.suppress(OSError):  # frameworks find the newest checkpoint by its mtime: set that of its save
        began_ns = os.stat(job.path).st_mtime_ns
        os.utime(temporary, ns=(began_ns, began_ns))
    try:
        publish(temporary, job.target, files, replace=True)
    except (
        CheckpointExistsError
    ):  # it cannot, as on NFS. If this process is killed before the rename, the job is redone
        remove_target(job.target)
        publish(temporary, job.target, files)


def finish_exports(queue: str, *, timeout_s: float) -> list[str]:
    """Do the jobs that an earlier run has left, or wait for another process that does them.

    Call it before looking for a framework's checkpoints.

    Args:
        queue: Directory of the jobs.
        timeout_s: Seconds to wait for another process that has a job. A job that no process has, and whose save was
            never committed, is removed.

    Returns:
        The targets that this process has published. A job that fails is logged, and stays.

    Blocks: up to `timeout_s`, apart from reading and writing the checkpoints.
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
        except Exception as error:  # the training must be able to start nevertheless
            _log.error("%s cannot be published; its checkpoint stays at %s: %s", job.target, job.native, error)
    remove_leftovers(queue)
    return done


class Retries:
    """Does jobs, and tries failed ones again.

    Args:
        do: Does a job; raises if that fails.
        clock: Clock, as `time.monotonic`.
    """

    def __init__(self, do: Callable[[ExportJob], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._do, self._clock = do, clock
        self._waiting: list[tuple[float, float, ExportJob]] = []  # when to try again, the last pause, the job

    def attempt(self, job: ExportJob, waited_s: float = 0.0) -> None:
        """Do a job. If it fails, write the reason to its `failure_path`; if the error is transient, try again later."""
        began = self._clock()
        try:
            self._do(job)
        except Exception as error:  # later jobs must be done nevertheless
            is_retried = _errno_of(error) in TRANSIENT_ERRNOS
            with contextlib.suppress(OSError), open(job.failure_path, "w", encoding="utf-8", errors="replace") as file:
                advice = WILL_RETRY if is_retried else ""
                file.write(f"{type(error).__name__}: {error}; its checkpoint stays at {job.native}{advice}")
            if is_retried:
                wait_s, now = min(2 * waited_s, LAST_RETRY_S) or FIRST_RETRY_S, self._clock()
                self._waiting.append((now + max(wait_s, MIN_PAUSE_FACTOR * (now - began)), wait_s, job))
        else:
            with contextlib.suppress(OSError):
                os.unlink(job.failure_path)

    def retry_due(self, *, last: bool = False) -> None:
        """Try jobs again whose pause is over; with `last` all of them, oldest first."""
        waiting, self._waiting = self._waiting, []
        for due, waited_s, job in waiting:
            if last or due <= self._clock():
                if job.is_open:  # it is not if a later save to the target was published
                    self.attempt(job, waited_s)
            else:
                self._waiting.append((due, waited_s, job))


def _errno_of(error: BaseException | None) -> int | None:
    """Return the errno of an error or of one of its causes; None: there is none."""
    for _ in range(10):
        if error is None or (isinstance(error, OSError) and error.errno is not None):
            break
        error = error.__cause__ or error.__context__
    return error.errno if isinstance(error, OSError) else None


class ExporterProcess(SideProcess):
    """Starts the exporter in the trainer, for the first job and again after it was killed, and sends it jobs."""

    def __init__(self) -> None:
        super().__init__(__name__)

    def is_alive(self, pid: int | None) -> bool:
        """Return whether the exporter with this process ID is running."""
        return self.is_running and self.pid == pid

    def submit(self, job: ExportJob, fd: int | None, *, timeout_s: float) -> int | None:
        """Send a job and its lock to the exporter; return the exporter's process ID, or None if `fd` is None.

        Args:
            job: The job.
            fd: File descriptor that holds its lock; it is closed. None: another process has the job.
            timeout_s: Seconds that a save may take to be committed. An exporter uses the value of its first job.

        Raises:
            OSError: No process can be started.
        """
        if fd is None:
            return None
        path = os.fsencode(job.path)
        with open(fd, "rb"):
            if not self.send(path, fd):
                self.start(str(timeout_s), str(current_umask()), str(os.getpid()))
                self.send(path, fd)
        return self.pid


def _incoming_jobs(parent: int) -> Iterator[tuple[str, int]]:
    """Yield (path of a job, file descriptor with its lock), until the trainer closes its end or has ended.

    Yields ("", -1) every `_POLL_PARENT_S` while there is no job.
    """
    channel = socket.socket(fileno=0)
    while True:
        if not select.select([channel], [], [], _POLL_PARENT_S)[0]:
            if os.getppid() != parent:
                return
            yield "", -1
            continue
        # unix(7): bytes that were sent with a descriptor are never merged with those of another message.
        path, fds, _, _ = socket.recv_fds(channel, 8192, 1)
        if not path:
            return
        yield os.fsdecode(path), fds[0]


def main() -> None:
    """Run the exporter, with the arguments that `ExporterProcess` passes. Remove the queue when it is empty."""
    timeout_s, umask, parent = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    os.nice(10)
    locks = dict[str, int]()

    def do(job: ExportJob) -> None:
        fd = locks.pop(job.path, None) or job.lock()
        if fd is not None:  # None: another process has it
            with open(fd, "rb"):
                job.flush()
                if job.await_commit(timeout_s) and job.is_open:
                    export(job, umask=umask)
        remove_leftovers(
            os.path.dirname(job.path)
        )  # the framework's tools may not expect it there, and the trainer may have ended

    retries = Retries(do)
    for path, fd in _incoming_jobs(parent):
        job = read_job(path) if path else None
        if job is not None:
            locks[path] = fd
            retries.attempt(job)
        elif path:  # it was withdrawn
            os.close(fd)
            remove_leftovers(os.path.dirname(path))
        retries.retry_due()
    retries.retry_due(last=True)
