"""The exports that a manager has requested, on disk, so that they outlive the manager and its exporter. No torch.

The queue is the directory `.exports` in the directory of the exports. A job is a file `NAME.TOKEN.job`, where NAME is
the name of a checkpoint's directory, and of the export's. It is made after the save has been staged, and removed when
the export is complete, or has failed; then `NAME.TOKEN.failed` says why until the manager has logged it. Each attempt
appends a line to the job, so that a checkpoint whose export kills the exporter is given up.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import time
from dataclasses import dataclass

from asyncckpt.storage.files import Files, read_small_file

QUEUE_NAME = ".exports"
_JOB, _FAILED, _LOCK_NAME = ".job", ".failed", "lock"
_MAX_NBYTES = 64 << 10
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportJob:
    """One checkpoint to export.

    Attributes:
        key: Name of the job's file without its suffix.
        name: Name of the checkpoint's directory in the root.
        step: Its step.
        call: The `SaveId.call` of its save; empty: any save.
        created_ns: Time at which it was requested, in ns since 1970.
        n_attempts: How often an exporter has begun it.
    """

    key: str
    name: str
    step: int
    call: str
    created_ns: int
    n_attempts: int = 0


class ExportQueue:
    """The queue below the directory of the exports, which the first job makes.

    Args:
        exports: Absolute path of the directory of the exports.
    """

    def __init__(self, exports: str) -> None:
        self._directory, self._files = os.path.join(exports, QUEUE_NAME), Files()

    def add(self, name: str, *, step: int, call: str) -> ExportJob:
        """Add a job, in one step.

        Raises:
            OSError: It cannot be written.
        """
        key = f"{name}.{secrets.token_hex(4)}"
        job = ExportJob(key=key, name=name, step=step, call=call, created_ns=time.time_ns())
        self.make()
        self._put(key, _JOB, {"step": step, "call": call, "created_ns": job.created_ns})
        return job

    def make(self) -> None:
        """Make the directory.

        Raises:
            OSError: It cannot be made.
        """
        os.makedirs(self._directory, exist_ok=True)

    def jobs(self) -> list[ExportJob]:
        """Return the jobs, the earliest request first. A file that is no job is left out.

        Raises:
            OSError: The queue cannot be listed.
        """
        found = [self._read(key) for key in self._keys(_JOB)]
        return sorted((job for job in found if job is not None), key=lambda job: job.created_ns)

    def names(self) -> set[str]:
        """Return the names of the checkpoints that are to be exported, or are being exported.

        Raises:
            OSError: The queue cannot be listed.
        """
        return {_name_of(key) for key in self._keys(_JOB)}

    def open_keys(self) -> set[str]:
        """Return the keys of the jobs.

        Raises:
            OSError: The queue cannot be listed.
        """
        return set(self._keys(_JOB))

    def begin(self, job: ExportJob) -> bool:
        """Record an attempt; return False if the job was withdrawn.

        Raises:
            OSError: It cannot be recorded.
        """
        try:
            fd = os.open(self._path(job.key, _JOB), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        with open(fd, "ab") as file:
            file.write(b"\n")
        return True

    def end(self, key: str) -> None:
        """Remove a job: it is done, or withdrawn. Idempotent."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(key, _JOB))

    def fail(self, key: str, reason: str) -> None:
        """Remove a job, and leave the reason for the manager."""
        with contextlib.suppress(OSError):  # a full disk, say: the job is removed nevertheless
            self._put(key, _FAILED, {"reason": reason})
        self.end(key)

    def take_failures(self) -> dict[str, str]:
        """Return the reasons of failed jobs by key, and remove them.

        Raises:
            OSError: The queue cannot be listed.
        """
        found = {}
        for key in self._keys(_FAILED):
            reason = (self._json(key, _FAILED) or {}).get("reason")
            found[key] = str(reason or "unknown")
            with contextlib.suppress(OSError):
                os.unlink(self._path(key, _FAILED))
        return found

    def lock(self) -> int | None:
        """Take the lock under which one exporter works; return a descriptor that holds it. None: another one works.

        Raises:
            OSError: It cannot be locked.
        """
        self.make()
        fd = os.open(os.path.join(self._directory, _LOCK_NAME), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(fd)
                raise  # without locks, two exporters may work: each writes under names of its own
        return fd

    def _keys(self, suffix: str) -> list[str]:
        try:
            names = os.listdir(self._directory)
        except FileNotFoundError:
            return []
        return sorted(name.removesuffix(suffix) for name in names if name.endswith(suffix))

    def _path(self, key: str, suffix: str) -> str:
        return os.path.join(self._directory, key + suffix)

    def _put(self, key: str, suffix: str, content: dict[str, object]) -> None:
        temporary = self._path(key, ".new")
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(temporary, self._path(key, suffix))

    def _text(self, key: str, suffix: str) -> str:
        return read_small_file(self._files, self._path(key, suffix), _MAX_NBYTES).decode()

    def _json(self, key: str, suffix: str) -> dict[str, object] | None:
        try:
            found = json.loads(self._text(key, suffix))
        except (OSError, ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None

    def _read(self, key: str) -> ExportJob | None:
        """Return a job; None: it is gone, or is no job.

        IMPORTANT: the name is taken from the file's name, so that it is one of an entry of the root: a forged or copied
        queue cannot lead elsewhere.
        """
        try:
            text = self._text(key, _JOB)
            found = json.loads(text)
            step, call, created_ns = found["step"], found["call"], found["created_ns"]
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None
        name = _name_of(key)
        if not (type(step) is type(created_ns) is int and isinstance(call, str)) or name in ("", ".", ".."):
            return None
        return ExportJob(
            key=key, name=name, step=step, call=call, created_ns=created_ns, n_attempts=len(text) - len(text.rstrip())
        )


def _name_of(key: str) -> str:
    return key.rpartition(".")[0]
