"""The queue of export jobs: which asyncckpt checkpoint becomes which file or directory of a framework. No torch.

The queue is on disk, so that it outlives all processes: a directory `.asyncckpt` next to the framework's checkpoints.
For each save in progress it holds `NAME/`, the asyncckpt checkpoint, and `NAME.job`, a JSON file. The process that is
to do a job holds a lock on that file from the moment at which the file appears. A job is done when its file is gone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import time
from dataclasses import dataclass
from typing import Literal

from asyncckpt.format.names import MANIFEST_NAME
from asyncckpt.interop.publish import remove, temporary_path
from asyncckpt.storage.files import Files, fsync_directory, fsync_file, opened, read_small_file

QUEUE_NAME = ".asyncckpt"
_SUFFIX = ".job"
MAX_JOB_NBYTES = 64 << 10

WILL_RETRY = "; it is tried again while the training lives"
"""Suffix of the reason why a job has failed, if its exporter will try it again."""

_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP)

POLL_S = 0.05
"""How often to check for a manifest. Chosen: an export takes longer."""

Kind = Literal["directory", "file", "dcp"]
"""What is published: a directory of files, one file, or the asyncckpt checkpoint itself in layout "dcp", together with
files of the framework."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportJob:
    """One checkpoint to publish.

    Attributes:
        path: Path of the job's file.
        target: Absolute path at which the framework looks for the checkpoint.
        kind: What is published there.
    """

    path: str
    target: str
    kind: Kind

    @property
    def native(self) -> str:
        """Path of the asyncckpt checkpoint."""
        return self.path.removesuffix(_SUFFIX)

    @property
    def is_committed(self) -> bool:
        """Whether the asyncckpt checkpoint is committed."""
        return os.path.exists(os.path.join(self.native, MANIFEST_NAME))

    @property
    def is_open(self) -> bool:
        """Whether the job is not done yet."""
        return os.path.exists(self.path)

    @property
    def failure_path(self) -> str:
        """Path of the file in which the exporter writes why it could not publish."""
        return f"{self.native}.log"

    def write(self) -> int:
        """Put the job into the queue in one step; the exporter flushes it later. Returns its lock, as `lock` does.

        Raises:
            OSError: It cannot be written.
        """
        temporary = f"{self.path}.tmp"
        for _ in range(100):  # another process may remove a queue without jobs
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                with open(temporary, "w", encoding="utf-8") as file:
                    json.dump({"target": os.path.basename(self.target), "kind": self.kind}, file)
                fd = self.lock(temporary)
                if fd is not None:  # else it was taken for a leftover and removed before it was locked
                    return fd
        raise FileNotFoundError(errno.ENOENT, "another process keeps removing the directory of the queue", self.path)

    def flush(self) -> None:
        """Flush the job, so that it outlives a power cut."""
        files = Files()
        with contextlib.suppress(FileNotFoundError):
            with opened(files, self.path, os.O_RDONLY) as fd:
                fsync_file(files, fd, self.path)
            fsync_directory(files, os.path.dirname(self.path))

    def lock(self, temporary: str | None = None) -> int | None:
        """Take the job's lock, and return the file descriptor that holds it; None: the job is done, or locked.

        Args:
            temporary: Path of a new job, which is renamed once it is locked.
        """
        try:
            fd = os.open(temporary or self.path, os.O_RDWR | os.O_CLOEXEC)  # NFS locks only what is open for writing
        except FileNotFoundError:
            return None
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise  # without locks, as on Lustre without `-o flock`, do the job: twice is better than never
            if temporary is not None:
                os.replace(temporary, self.path)
            if os.fstat(fd).st_nlink:
                stack.pop_all()
                return fd
        return None

    def await_commit(self, timeout_s: float) -> bool:
        """Wait until the checkpoint is committed; False if the job was withdrawn, or after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not self.is_committed:
            if not self.is_open or time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        return True

    def close(self) -> None:
        """Remove the job, then the checkpoint. In this order: a checkpoint without a job is garbage."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(self.path)
        shutil.rmtree(self.native, ignore_errors=True)


def job_for(target: str, name: str, kind: Kind = "directory") -> ExportJob:
    """Return the job that publishes the save `name` at the absolute path `target`."""
    path = os.path.join(os.path.dirname(target), QUEUE_NAME, name + _SUFFIX)
    return ExportJob(path=path, target=target, kind=kind)


def read_job(path: str) -> ExportJob | None:
    """Return the job at `path`; None if it is gone, or is not a job.

    The target is always in the parent directory of the queue: a copied or forged queue cannot cause writes elsewhere.
    """
    path = os.path.abspath(path)
    try:
        found = json.loads(read_small_file(Files(), path, MAX_JOB_NBYTES))
        name, kind = os.path.basename(found["target"]), found["kind"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    if name in ("", ".", "..", QUEUE_NAME) or kind not in ("directory", "file", "dcp") or not path.endswith(_SUFFIX):
        return None
    return ExportJob(path=path, target=os.path.join(os.path.dirname(os.path.dirname(path)), name), kind=kind)


def _job_paths(queue: str) -> list[str]:
    """Return the paths of the jobs in a queue, unreadable ones included, the oldest first."""
    found = []
    for name in os.listdir(queue) if os.path.isdir(queue) else []:
        if name.endswith(_SUFFIX):
            with contextlib.suppress(FileNotFoundError):  # it may be done meanwhile
                path = os.path.join(queue, name)
                found.append((os.stat(path, follow_symlinks=False).st_mtime_ns, path))
    return [path for _, path in sorted(found)]


def jobs_in(queue: str) -> list[ExportJob]:
    """Return the jobs in a queue, the oldest first."""
    return [job for path in _job_paths(queue) if (job := read_job(path)) is not None]


def remove_leftovers(queue: str) -> None:
    """Remove a queue without jobs, with all leftovers of failed saves and killed processes in it.

    IMPORTANT: list the directory before reading the jobs. Another training may add a job at any time, and it writes the
    job before the checkpoint. In the other order, this would remove its checkpoint.
    """
    with contextlib.suppress(FileNotFoundError):
        names = os.listdir(queue)
        jobs = [ExportJob(path=path, target="", kind="directory") for path in _job_paths(queue)]
        if any(read_job(job.path) or job.is_committed for job in jobs):
            return
        for path in (os.path.join(queue, name) for name in names):
            shutil.rmtree(path, ignore_errors=True)  # an exporter may remove it at the same time
            remove(path)
    with contextlib.suppress(OSError):
        os.rmdir(queue)


def remove_target(path: str) -> None:
    """Remove a published checkpoint. It is renamed first, so that no reader finds a partly removed checkpoint.

    If this process is killed, the rest is in the queue, and is removed at the next start.
    """
    if os.path.lexists(path):
        queue = os.path.join(os.path.dirname(path), QUEUE_NAME)
        place = os.path.join(queue, os.path.basename(path))
        try:
            os.makedirs(queue, exist_ok=True)
        except OSError:  # the disk is full, so that no directory can be created; the removal frees space
            place = path
        with temporary_path(place) as aside:
            os.rename(path, aside)
        with contextlib.suppress(OSError):  # the queue is not empty
            os.rmdir(queue)
