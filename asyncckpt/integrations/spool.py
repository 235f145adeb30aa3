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
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from asyncckpt.format.names import MANIFEST_NAME

SPOOL_NAME = ".asyncckpt"
_JOB_SUFFIX = ".job"
MAX_JOB_NBYTES = 64 << 10
"""Of a job file: some paths."""

AGAIN = "; it is tried again while the training lives"
"""At the end of what is said of a job that its exporter tries again (`Job.failure_path`)."""

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
    """Return the job at `path`; None if it is gone, or no job.

    Places are taken from where the job lies: a directory that was copied, moved, or made by somebody else leads nowhere
    outside of it.
    """
    path = os.path.abspath(path)
    try:
        found = json.loads(_text_of(path))
        name = os.path.basename(found["target"])
        if name in ("", ".", "..", SPOOL_NAME) or not path.endswith(_JOB_SUFFIX):
            return None
        return Job(
            path=path,
            native=path.removesuffix(_JOB_SUFFIX),
            target=os.path.join(os.path.dirname(os.path.dirname(path)), name),
            is_directory=bool(found["is_directory"]),
            moved=bool(found["moved"]),
        )
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _text_of(path: str) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(f"{path} is no regular file")
        return os.read(fd, MAX_JOB_NBYTES).decode()
    finally:
        os.close(fd)


def jobs_in(spool: str) -> list[Job]:
    """Return the jobs of a directory, the oldest first."""
    return [job for path in _job_paths(spool) if (job := read_job(path)) is not None]


def holds_staged(spool: str) -> bool:
    """Whether something that is committed waits there, also for who understands its job better than we do."""
    natives = (path.removesuffix(_JOB_SUFFIX) for path in _job_paths(spool))
    return any(os.path.exists(os.path.join(native, MANIFEST_NAME)) for native in natives)


def _job_paths(spool: str) -> list[str]:
    found = []
    try:
        with os.scandir(spool) as entries:
            paths = [entry.path for entry in entries if entry.name.endswith(_JOB_SUFFIX)]
    except FileNotFoundError:
        return []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # it may be done meanwhile
            found.append((os.stat(path, follow_symlinks=False).st_mtime_ns, path))
    return [path for _, path in sorted(found)]


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
