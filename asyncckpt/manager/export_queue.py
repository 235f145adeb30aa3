"""The exports that a manager has requested, on disk, so that they outlive the manager and its exporter. No torch.

The queue is the directory `.exports` in the directory of the exports. A job is a file `NAME.TOKEN.job`, where NAME is
the name of a checkpoint's directory, and of the export's, and TOKEN begins with that of the run that has requested it.
It is made after the save has been staged, and removed when the export is complete, or has failed; then
`NAME.TOKEN.failed` says why until the manager has logged it. The commit of the checkpoint appends a line to the job, so
that one that is gone is not waited for; and so does each attempt, so that a checkpoint whose export kills the exporter
is given up.

The file `root` names the root whose exports they are. Another root's checkpoints have the same names, so they are not
exported there.

A run does its own jobs, and those that it finds when it begins. An earlier run's exporter may still be at work on those
then: what it has done by the time that it ends is no longer there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass

from asyncckpt.basics.paths import is_url
from asyncckpt.errors import ConfigError
from asyncckpt.format.names import converting_name, is_converting
from asyncckpt.interop.publish import is_inside, remove
from asyncckpt.storage.files import Files, put_new_name, read_small_file

QUEUE_NAME = ".exports"
_JOB, _FAILED, _LOCK_NAME, _ROOT_NAME = ".job", ".failed", "lock", "root"
_BEGUN, _COMMITTED = "begun", "committed"
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
        is_committed: Whether it was committed.
        created_ns: Time at which it was requested, in ns since 1970.
        n_attempts: How often an exporter has begun it.
    """

    key: str
    name: str
    step: int
    call: str
    created_ns: int
    is_committed: bool = False
    n_attempts: int = 0


class ExportQueue:
    """The queue below the directory of the exports, which the first job makes.

    Args:
        exports: Absolute path of the directory of the exports.
        run: Token of the run whose jobs are its own; empty: all are.
        adopted: Keys of further jobs that are its own.
        root: Absolute path, or URL, of the root, for `make`; None: it is not compared.
    """

    def __init__(self, exports: str, run: str = "", adopted: Collection[str] = (), *, root: str | None = None) -> None:
        self._exports, self._directory, self._files = exports, os.path.join(exports, QUEUE_NAME), Files()
        self._run, self._adopted, self._root = run, frozenset(adopted), root

    def adopt(self) -> list[str]:
        """Make all jobs that are there own ones, in this object; return their keys.

        Raises:
            OSError: The queue cannot be listed.
        """
        self._adopted = frozenset(self._keys(_JOB))
        return sorted(self._adopted)

    def add(self, name: str, *, step: int, call: str) -> ExportJob:
        """Add a job, in one step.

        Raises:
            ConfigError: As `make`.
            OSError: It cannot be written.
        """
        key = f"{name}.{self._run}{secrets.token_hex(4)}"
        job = ExportJob(key=key, name=name, step=step, call=call, created_ns=time.time_ns(), is_committed=not call)
        self.make()
        self._put(key, _JOB, {"step": step, "call": call, "created_ns": job.created_ns})
        return job

    def make(self) -> None:
        """Make the directory, for the exports of this root.

        Raises:
            ConfigError: The exports there are of another root.
            OSError: It cannot be made.
        """
        os.makedirs(self._directory, exist_ok=True)
        if self._root is None:
            return
        mine, path = _owner(self._root, self._exports), self._path(_ROOT_NAME, "")
        if not os.path.lexists(path):
            temporary = self._written(secrets.token_hex(4), {"root": mine})
            try:
                with contextlib.suppress(FileExistsError):
                    put_new_name(self._files, temporary, path)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary)
        found = (self._json(_ROOT_NAME, "") or {}).get("root")
        if found != mine:
            raise ConfigError(
                f"{self._exports} has the exports of another root, {found!r}, whose checkpoints have the same names: "
                f"give another export_to, or remove {path} if that root was moved here or is no longer used",
                field="export_to",
                value=self._exports,
            )

    def jobs(self) -> list[ExportJob]:
        """Return the own jobs, the earliest request first. A file that is no job fails; one that cannot be read stays.

        Raises:
            OSError: The queue cannot be listed, or a job not be removed.
        """
        found = [self._read(key) for key in self.open_keys()]
        return sorted((job for job in found if job is not None), key=lambda job: job.created_ns)

    def names(self) -> set[str]:
        """Return the names of the checkpoints that are to be exported, or are being exported.

        Raises:
            OSError: The queue cannot be listed.
        """
        return {_name_of(key) for key in self._keys(_JOB)}

    def open_keys(self) -> set[str]:
        """Return the keys of the own jobs.

        Raises:
            OSError: The queue cannot be listed.
        """
        keys = self._keys(_JOB)
        return {key for key in keys if key in self._adopted or key.rpartition(".")[2].startswith(self._run)}

    def begin(self, job: ExportJob) -> bool:
        """Record an attempt; return False if the job was withdrawn.

        Raises:
            OSError: It cannot be recorded.
        """
        return self._append(job.key, _BEGUN)

    def committed(self, key: str) -> None:
        """Record that the checkpoint of a job was committed.

        Raises:
            OSError: It cannot be recorded.
        """
        self._append(key, _COMMITTED)

    def _append(self, key: str, line: str) -> bool:
        """Append a line to a job, unless it has ended."""
        try:
            fd = os.open(self._path(key, _JOB), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        with open(fd, "ab") as file:
            file.write(f"{line}\n".encode())
        return True

    def end(self, key: str) -> None:
        """Remove a job: it is done, or withdrawn. Idempotent."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(key, _JOB))

    def fail(self, key: str, reason: str) -> None:
        """Remove a job and what a killed exporter has left of it, and leave the reason for the manager.

        Raises:
            OSError: The job cannot be removed.
        """
        self.remove_leftovers(_name_of(key))
        try:
            self._put(key, _FAILED, {"reason": reason})
        except OSError:  # a full disk, say. IMPORTANT: a job that is merely gone would count as exported
            with contextlib.suppress(FileNotFoundError):
                os.rename(self._path(key, _JOB), self._path(key, _FAILED))
        else:
            self.end(key)

    def give_up_older(self) -> None:
        """Give up the own jobs that were requested before one that was committed, and that no exporter has begun.

        Raises:
            OSError: As `jobs`.
        """
        waiting = [job for job in self.jobs() if not job.n_attempts]
        newest = next((job for job in reversed(waiting) if job.is_committed), None)
        if newest is not None:
            for job in waiting[: waiting.index(newest)]:
                self.fail(job.key, superseded(newest.step))

    def remove_leftovers(self, name: str) -> None:
        """Remove what an exporter that was killed has left of an export.

        Raises:
            OSError: The exports cannot be listed.
        """
        prefix, length = f".{name}.", len(converting_name(name, "0" * 12))
        for found in os.listdir(self._exports):
            if is_converting(found) and found.startswith(prefix) and len(found) == length:
                remove(os.path.join(self._exports, found))

    def take_failures(self) -> dict[str, str]:
        """Return the reasons of failed jobs by key, and remove them.

        Raises:
            OSError: The queue cannot be listed.
        """
        found = {}
        for key in self._keys(_FAILED):
            reason = (self._json(key, _FAILED) or {}).get("reason")
            found[key] = str(
                reason or f"why is unknown, as it could not be written, maybe for want of space; see {self.log_path}"
            )
            with contextlib.suppress(OSError):
                os.unlink(self._path(key, _FAILED))
        return found

    @property
    def log_path(self) -> str:
        """Path of the file that is the standard error of exporters."""
        return os.path.join(self._directory, "log")

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
        os.replace(self._written(key, content), self._path(key, suffix))

    def _written(self, key: str, content: dict[str, object]) -> str:
        """Write and flush a file; return its temporary path."""
        temporary = self._path(key, ".new")
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(json.dumps(content) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        return temporary

    def _text(self, key: str, suffix: str) -> str:
        return read_small_file(self._files, self._path(key, suffix), _MAX_NBYTES).decode()

    def _json(self, key: str, suffix: str) -> dict[str, object] | None:
        try:
            found = json.loads(self._text(key, suffix).partition("\n")[0])
        except (OSError, ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None

    def _read(self, key: str) -> ExportJob | None:
        """Return a job; None: it is gone, or cannot be read, or is no job, and fails.

        IMPORTANT: the name is taken from the file's name, so that it is one of an entry of the root: a forged or copied
        queue cannot lead elsewhere.
        """
        try:
            head, *lines = self._text(key, _JOB).split("\n")
            found = json.loads(head)
            job = ExportJob(
                key=key,
                name=_name_of(key),
                step=found["step"],
                call=found["call"],
                created_ns=found["created_ns"],
                is_committed=not found["call"] or _COMMITTED in lines,
                n_attempts=lines.count(_BEGUN),
            )
            if not (type(job.step) is type(job.created_ns) is int and isinstance(job.call, str)):
                raise ValueError("fields of other types")
            if job.name in ("", ".", ".."):
                raise ValueError("no name")
        except OSError:
            return None
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            self.fail(key, f"its request is unreadable, maybe after a power cut: {error!r}")
            return None
        return job


def _owner(root: str, exports: str) -> str:
    """Return the root as the queue names it: relative if the exports are in it, so that both may be moved."""
    if is_url(root):
        return root
    real = os.path.realpath(root)
    return os.path.relpath(real, os.path.realpath(exports)) if is_inside(exports, root) else real


def superseded(step: int) -> str:
    """Return why a job is given up: the checkpoint of `step` is exported."""
    return f"step {step} is newer and is exported instead: exports are too slow"


def _name_of(key: str) -> str:
    return key.rpartition(".")[0]
