"""Jobs of the exporter: which checkpoint of ours becomes which files. Kept on disk, so that they outlive everybody.

Beside the place where the framework's checkpoint goes lies a directory `.asyncckpt`; in it, for each save that is under
way, `NAME/`, the checkpoint of ours, and `NAME.job`, a JSON file. Whoever works on a job holds a lock on that file; the
job is done when the file is gone. Imports no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from asyncckpt.format.names import MANIFEST_NAME

SPOOL_NAME = ".asyncckpt"
_JOB_SUFFIX = ".job"
_POLL_S = 0.05
"""How often a lock is tried and a manifest looked for. Chosen: an export takes longer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One checkpoint to publish.

    Attributes:
        path: Of the job's file.
        native: Directory of the checkpoint of ours.
        target: Where the framework looks for it: a directory, or a file.
        is_directory: Which of them.
        moved: The checkpoint itself, in the DCP layout, is what goes to `target`; files that the framework wants beside
            it are taken from its objects.
    """

    path: str
    native: str
    target: str
    is_directory: bool
    moved: bool = False

    def write(self) -> None:
        """Put the job where it is found, whole or not at all; the exporter flushes it, in its own time."""
        temporary = f"{self.path}.tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)
        os.replace(temporary, self.path)

    def flush(self) -> None:
        """Make the job outlive a power cut."""
        for path in (self.path, os.path.dirname(self.path)):
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)

    @property
    def is_committed(self) -> bool:
        """Whether the checkpoint of ours is."""
        return os.path.exists(os.path.join(self.native, MANIFEST_NAME))

    @property
    def is_open(self) -> bool:
        """Whether the job is yet to be done."""
        return os.path.exists(self.path)

    @property
    def failure_path(self) -> str:
        """Where the exporter says why it could not publish."""
        return f"{self.native}.log"

    def close(self) -> None:
        """Remove the job, then the checkpoint. In this order: what has no job is garbage."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        shutil.rmtree(self.native, ignore_errors=True)


def job_for(target: str, name: str, *, is_directory: bool, moved: bool = False) -> Job:
    """Return the job of publishing at `target` (absolute) what is saved under `name`."""
    spool = spool_of(target)
    native = os.path.join(spool, name)
    return Job(path=native + _JOB_SUFFIX, native=native, target=target, is_directory=is_directory, moved=moved)


def spool_of(target: str) -> str:
    """Return the directory for the jobs of `target`, an absolute path."""
    return os.path.join(os.path.dirname(target), SPOOL_NAME)


def read_job(path: str) -> Job | None:
    """Return the job at `path`; None if it is gone, or no job."""
    try:
        with open(path, encoding="utf-8") as file:
            return Job(**{**json.load(file), "path": path})
    except (OSError, ValueError, TypeError):
        return None


def jobs_in(spool: str) -> list[Job]:
    """Return the jobs of a directory, the oldest first."""
    try:
        paths = [entry.path for entry in os.scandir(spool) if entry.name.endswith(_JOB_SUFFIX)]
    except FileNotFoundError:
        return []
    found = [(os.path.getmtime(path), path) for path in paths if os.path.exists(path)]
    return [job for _, path in sorted(found) if (job := read_job(path)) is not None]


@contextlib.contextmanager
def locked(job: Job, timeout_s: float) -> Iterator[bool]:
    """Hold the lock of a job; gives False if it is done, or another process holds it for longer than `timeout_s`."""
    try:
        fd = os.open(job.path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield False
        return
    try:
        yield _lock(fd, time.monotonic() + timeout_s) and os.fstat(fd).st_nlink > 0
    finally:
        os.close(fd)


def _lock(fd: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        else:
            return True


def await_commit(job: Job, timeout_s: float) -> bool:
    """Wait until the checkpoint is committed; False if the job was taken back, or at the deadline."""
    deadline = time.monotonic() + timeout_s
    while not job.is_committed:
        if not job.is_open or time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True
