"""Finds the file system of a path without a call to that file system, which may hang."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Mapping

from asyncckpt.basics.urls import is_object_url, location_of

MOUNTINFO = "/proc/self/mountinfo"

UNKNOWN = "?"
"""The device of all paths if there is no mount table: they share lanes."""

MAX_AGE_S = 1.0
"""Maximum age of the table. If a new mount is missed, jobs only share a lane. Chosen."""

MAX_LINKS = 40
"""Maximum number of links, as in the kernel (path_resolution(7))."""


class MountTable:
    """The mounts of this process's namespace. Safe to call from several threads.

    Args:
        mountinfo: Path of a file in the format of proc_pid_mountinfo(5).
    """

    def __init__(self, mountinfo: str = MOUNTINFO) -> None:
        self._file = mountinfo
        self._devices: Mapping[str, str] = {}
        self._read_at = float("-inf")

    def device_of(self, path: str) -> str:
        """Return the device number of the mount of `path`, without following links; for a URL: the bucket.

        Does not block.
        """
        if is_object_url(path):
            return location_of(path).root
        devices = self._mounts()
        return devices.get(_mount_point(os.path.normpath(path), devices), UNKNOWN)

    def name_of(self, device: str) -> str:
        """Return a directory at which `device` is mounted; the number itself if there is none."""
        return min((point for point, found in self._mounts().items() if found == device), default=device)

    def resolve(self, path: str) -> tuple[str, str]:
        """Resolve the links of `path`, up to the first one that leads to another device.

        Returns:
            The path, and its device.

        Blocks: if the file system of `path` hangs; other file systems are not accessed.
        """
        if is_object_url(path):
            return path, location_of(path).root
        path = os.path.normpath(path)
        devices = self._mounts()
        point = _mount_point(path, devices)
        device = devices.get(point, UNKNOWN)
        for _ in range(MAX_LINKS):
            after = _resolve_once(path, point)
            if after is None:
                break
            path, point = after, _mount_point(after, devices)
            if (other := devices.get(point, UNKNOWN)) != device:
                return path, other
        return path, device

    def _mounts(self) -> Mapping[str, str]:
        now = time.monotonic()
        if now - self._read_at >= MAX_AGE_S:
            self._read_at = now
            try:
                with open(self._file, encoding="utf-8", errors="surrogateescape") as file:
                    rows = [line.split(" ", 5) for line in file]
            except OSError:
                return self._devices
            self._devices = {_unescaped(row[4]): row[2] for row in rows if len(row) > 5}  # later mounts win
        return self._devices


def _resolve_once(path: str, point: str) -> str | None:
    """Return `path` with its first link below the mount point `point` resolved; None if there is none."""
    # IMPORTANT: starts below the mount point. The part above it may be on a device that hangs.
    at, names = point.rstrip("/"), path[len(point) :].strip("/").split("/")
    for n, name in enumerate(names, 1):
        parent, at = at, f"{at}/{name}"
        try:
            target = os.readlink(at)
        except OSError as error:
            if error.errno == errno.EINVAL:  # not a link
                continue
            return None  # the caller gets the same error when it uses the path
        return os.path.normpath(os.path.join(parent or "/", target, *names[n:]))
    return None


def _mount_point(path: str, devices: Mapping[str, str]) -> str:
    """Return the longest prefix of the normalized `path` that is a mount point."""
    while path not in devices and len(path) > 1:
        path = path[: path.rfind("/")] or "/"
    return path


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
