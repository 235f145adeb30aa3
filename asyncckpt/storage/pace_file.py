"""What was learnt of a device, kept for this user's other processes: one small file per device and direction.

The file is advice. One that is missing, damaged, of another version, somebody else's, or of a device that only has the
same number is as good as none; it is replaced by rename, so that nobody reads half of it, and of two processes that
add a sample at the same time one loses its own.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import stat
import time
from collections.abc import Callable, Sequence
from typing import Any

from asyncckpt.storage.pace import SAMPLE_NBYTES, Pace, Sample, best_pace, kept_samples

VERSION = 1
EXPIRES_S = 14 * 86400.0
"""Samples older than this count no more: devices are filled, replaced and shared anew. Chosen, not measured."""

MAX_FILE_NBYTES = 16 << 10
MAX_SAMPLES = 64


class DevicePaces:
    """The paces of one direction, for whatever device a path lies on. Safe to use from several threads.

    Args:
        directory: This user's own, mode 0700; made when there is something to keep. None: nothing is learnt.
        direction: "read" or "write".
        paces: The default, then what else may be tried. None: whatever was kept is shown, for those who only look.
        clock: Seconds since the epoch.
    """

    def __init__(
        self,
        directory: str | None,
        direction: str,
        paces: Sequence[Pace] | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._directory, self._direction = directory, direction
        self._paces, self._shows_all, self._clock = tuple(paces or ()), paces is None, clock

    def choose(self, path: str) -> Pace:
        """Return the pace for a path that is there. Blocks for a small file; raises nothing."""
        return best_pace(self._paces, self.samples(path))

    def samples(self, path: str) -> list[Sample]:
        """Return what is known of a path's device, the oldest first."""
        device = _device_of(path)
        if self._directory is None or device is None or not _is_own_directory(self._directory):
            return []
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError, OverflowError):
            return self._checked(json.loads(_read_own(self._file(device))), device)
        return []

    def took(self, path: str, pace: Pace, nbytes: int, seconds: float) -> None:
        """Learn from an operation that has ended well. Blocks for a small file; raises nothing.

        Args:
            path: Where it was.
            pace: What it went at.
            nbytes: That the device has read or written, not the page cache.
            seconds: That it took.
        """
        if self._directory is None or nbytes < SAMPLE_NBYTES or seconds <= 0 or pace not in self._paces:
            return
        device = _device_of(path)
        if device is None:
            return
        samples = [*self.samples(path), Sample(pace, nbytes / seconds, self._clock())]
        document = {
            "asyncckpt_pace": VERSION,
            "device": device,
            "samples": [[*s.pace, s.bytes_per_s, s.at] for s in kept_samples(samples)],
        }
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(self._directory), exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._directory, 0o700)
            if _is_own_directory(self._directory):
                _replace(self._file(device), json.dumps(document).encode())

    def _file(self, device: str) -> str:
        assert self._directory is not None
        number = device.split(maxsplit=1)[0].replace(":", "-")
        return os.path.join(self._directory, f"pace-{self._direction}-{number}.json")

    def _checked(self, raw: Any, device: str) -> list[Sample]:
        if raw["asyncckpt_pace"] != VERSION or raw["device"] != device or len(raw["samples"]) > MAX_SAMPLES:
            return []
        now, found = self._clock(), []
        for threads, extent_nbytes, rate, at in raw["samples"]:
            pace = Pace(threads, extent_nbytes)
            if (self._shows_all or pace in self._paces) and 0 < float(rate) < math.inf and now - EXPIRES_S < at <= now:
                found.append(Sample(pace, float(rate), float(at)))
        return found


def _device_of(path: str) -> str | None:
    """Return the number of the device that holds `path`, which start of the system gave it, and what is mounted there.

    A number alone is another device's after a while.
    """
    try:
        number = os.stat(path).st_dev
        name = f"{os.major(number)}:{os.minor(number)}"
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read(64).strip()
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            rows = [line.split() for line in file]
    except (OSError, ValueError):
        return None
    mounted = [row[row.index("-") + 1 : row.index("-") + 3] for row in rows if row[2] == name and "-" in row]
    return " ".join([name, boot, *(mounted[0] if mounted else ())])


def _is_own_directory(path: str) -> bool:
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _read_own(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise ValueError("somebody else's")
        return os.read(fd, MAX_FILE_NBYTES)
    finally:
        os.close(fd)


def _replace(path: str, data: bytes) -> None:
    temporary = f"{path}.{secrets.token_hex(6)}.tmp"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            os.write(fd, data)
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
