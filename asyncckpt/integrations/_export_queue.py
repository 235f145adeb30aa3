"""The queue of exports: which checkpoints of ours become which files of a framework. On disk, so it outlives everybody.

Beside the place of a framework's checkpoint is a directory `.asyncckpt`. For each save in progress it holds `NAME/`,
the checkpoint of ours, and `NAME.job`, a JSON file. Whoever is to do a job has a lock on that file, from the moment at
which the file appears; the job is done when it is gone. Imports no torch.
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
from asyncckpt.interop.publish import beside, remove
from asyncckpt.storage.files import Files, fsync_directory, fsync_file, opened, read_small_file

QUEUE_NAME = ".asyncckpt"
_SUFFIX = ".job"
MAX_JOB_NBYTES = 64 << 10

WILL_RETRY = "; it is tried again while the training lives"
"""At the end of the reason why a job failed, if its exporter tries it again."""

_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP)

POLL_S = 0.05
"""How often a manifest is looked for. Chosen: an export takes longer."""

Kind = Literal["directory", "file", "dcp"]
"""What is published: a directory of files, one file, or the checkpoint of ours itself, in the DCP layout, with the
files that the framework wants beside it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportJob:
    """One checkpoint to publish.

    Attributes:
        path: The job's file.
        target: Where the framework looks for the checkpoint; absolute.
        kind: What it looks for.
    """

    path: str
    target: str
    kind: Kind

    @property
    def native(self) -> str:
        """The directory of the checkpoint of ours."""
        return self.path.removesuffix(_SUFFIX)

    @property
    def is_committed(self) -> bool:
        """Whether the checkpoint of ours is committed."""
        return os.path.exists(os.path.join(self.native, MANIFEST_NAME))

    @property
    def is_open(self) -> bool:
        """Whether the job is yet to be done."""
        return os.path.exists(self.path)

    @property
    def failure_path(self) -> str:
        """Where the exporter writes why it could not publish."""
        return f"{self.native}.log"

    def write(self) -> int | None:
        """Put the job where it is found, whole or not at all; the exporter flushes it later. Returns as `lock`."""
        temporary = f"{self.path}.tmp"
        for _ in range(100):  # another process may remove an empty queue
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                with open(temporary, "w", encoding="utf-8") as file:
                    json.dump({"target": os.path.basename(self.target), "kind": self.kind}, file)
                return self.lock(temporary)
        raise FileNotFoundError(errno.ENOENT, "another process removes the directory again and again", self.path)

    def flush(self) -> None:
        """Make the job outlive a power cut."""
        files = Files()
        with contextlib.suppress(FileNotFoundError):
            with opened(files, self.path, os.O_RDONLY) as fd:
                fsync_file(files, fd, self.path)
            fsync_directory(files, os.path.dirname(self.path))

    def lock(self, temporary: str | None = None) -> int | None:
        """Take the job's lock, which ends with the descriptor; None if the job is done, or another process has it.

        Args:
            temporary: Where the job is; it is renamed once it is locked.
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
                    raise  # else the file system has none, as Lustre without `-o flock`: better twice than not at all
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
        """Remove the job, then the checkpoint. In this order: what has no job is garbage."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(self.path)
        shutil.rmtree(self.native, ignore_errors=True)


def job_for(target: str, name: str, kind: Kind = "directory") -> ExportJob:
    """Return the job of publishing at `target` (absolute) what is saved under `name`."""
    path = os.path.join(os.path.dirname(target), QUEUE_NAME, name + _SUFFIX)
    return ExportJob(path=path, target=target, kind=kind)


def read_job(path: str) -> ExportJob | None:
    """Return the job at `path`; None if it is gone, or no job.

    The target is a neighbour of the queue: a queue that was copied, moved, or made by somebody else leads nowhere
    outside of its directory.
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
    """Return the paths of the jobs of a directory, also of those that nobody here understands; the oldest first."""
    found = []
    for name in os.listdir(queue) if os.path.isdir(queue) else []:
        if name.endswith(_SUFFIX):
            with contextlib.suppress(FileNotFoundError):  # it may be done meanwhile
                path = os.path.join(queue, name)
                found.append((os.stat(path, follow_symlinks=False).st_mtime_ns, path))
    return [path for _, path in sorted(found)]


def jobs_in(queue: str) -> list[ExportJob]:
    """Return the jobs of a directory, the oldest first."""
    return [job for path in _job_paths(queue) if (job := read_job(path)) is not None]


def remove_leftovers(queue: str) -> None:
    """Remove a queue without jobs, and what kills and failed saves have left in it.

    IMPORTANT: only what was there before the look at the jobs. Another training may put a job there at any moment, and
    writes it before its checkpoint.
    """
    with contextlib.suppress(FileNotFoundError):
        names = os.listdir(queue)
        jobs = [ExportJob(path=path, target="", kind="directory") for path in _job_paths(queue)]
        if any(read_job(job.path) or job.is_committed for job in jobs):
            return
        for path in (os.path.join(queue, name) for name in names):
            shutil.rmtree(path, ignore_errors=True)  # an exporter may be removing it, too
            remove(path)
    with contextlib.suppress(OSError):
        os.rmdir(queue)


def remove_target(path: str) -> None:
    """Remove a published checkpoint, whatever it is: first its name, so that nobody finds a part of it.

    What a kill leaves of it is in the queue, and goes at the next start.
    """
    if os.path.lexists(path):
        queue = os.path.join(os.path.dirname(path), QUEUE_NAME)
        place = os.path.join(queue, os.path.basename(path))
        try:
            os.makedirs(queue, exist_ok=True)
        except OSError:  # a full disk, which this is to make room on
            place = path
        with beside(place) as aside:
            os.rename(path, aside)
        with contextlib.suppress(OSError):  # something else is there
            os.rmdir(queue)
