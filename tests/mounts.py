"""File systems for tests, as root: small, in a loop file, frozen, cut off, misbehaving; gone after their blocks."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / '.typing'}"}
EXT4_IOC_SHUTDOWN = 0x8004587D
FLUSH_LOG, NO_FLUSH_LOG, DEFAULT = 1, 2, 0
"""How a file system is cut off: after its journal is flushed, or as a power cut does it."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
_libc = ctypes.CDLL(None, use_errno=True)


_mounted: set[str] = set()
"""File systems of which this process has seen that they can be mounted: a later failure is one."""


def ran(*command: str, must: bool = False) -> str:
    """Run a command and return what it prints; a test that cannot have it is skipped, unless it `must` work."""
    try:
        done = subprocess.run(command, capture_output=True, check=False, text=True, timeout=60)
    except FileNotFoundError:
        pytest.skip(f"{command[0]} is not installed")
    if done.returncode:
        text = f"{' '.join(command)}: {done.stderr.strip()}"
        if must:
            pytest.fail(text)
        pytest.skip(text)
    return done.stdout


@contextlib.contextmanager
def tmpfs(path: pathlib.Path, options: str) -> Iterator[pathlib.Path]:
    """A small tmpfs."""
    path.mkdir(exist_ok=True)
    ran("mount", "-t", "tmpfs", "-o", options, "none", str(path))
    try:
        yield path
    finally:
        unmount(path)


def unmount(path: pathlib.Path, *, now: bool = True) -> None:
    """Unmount; `now`: at once, whoever still uses it."""
    deadline = time.monotonic() + 60
    while subprocess.run(["umount", *(["-l"] if now else []), str(path)], capture_output=True, check=False).returncode:
        assert time.monotonic() < deadline, f"cannot unmount {path}"
        time.sleep(0.05)


def make_ext4(image: pathlib.Path, nbytes: int) -> None:
    """Make an ext4 file system with a journal in a sparse file."""
    with open(image, "wb") as file:
        file.truncate(nbytes)
    ran("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard", "-J", "size=4", str(image))


def _loop_device(image: pathlib.Path, *, must: bool) -> str:
    """Lay a loop device over a file; of two programs that find the same free one, one is told to try again."""
    for _ in range(20):
        done = subprocess.run(["losetup", "-f", "--show", str(image)], capture_output=True, check=False, text=True)
        if not done.returncode:
            return done.stdout.strip()
        time.sleep(0.05)
    return ran("losetup", "-f", "--show", str(image), must=must).strip()


@contextlib.contextmanager
def loop_mounted(image: pathlib.Path, path: pathlib.Path, options: str = "") -> Iterator[pathlib.Path]:
    """Mount a file system that lies in a file."""
    path.mkdir(exist_ok=True)
    must = "ext4" in _mounted
    device = _loop_device(image, must=must)
    try:
        ran(
            "mount",
            "-t",
            "ext4",
            "-o",
            f"nodiscard,errors=continue,{options}".rstrip(","),
            device,
            str(path),
            must=must,
        )
        _mounted.add("ext4")
        try:
            yield path
        finally:
            unmount(path, now=False)
    finally:
        subprocess.run(["losetup", "-d", device], capture_output=True, check=False)


def shut_down(path: pathlib.Path, how: int = NO_FLUSH_LOG) -> None:
    """Cut an ext4 file system off from its device at this instant: nothing more reaches it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        argument = ctypes.c_uint32(how)
        if _libc.ioctl(fd, ctypes.c_ulong(EXT4_IOC_SHUTDOWN), ctypes.byref(argument)):
            code = ctypes.get_errno()
            pytest.skip(f"EXT4_IOC_SHUTDOWN: {os.strerror(code)}")
    finally:
        os.close(fd)


@contextlib.contextmanager
def frozen(path: pathlib.Path) -> Iterator[None]:
    """Every write to the file system waits inside the block."""
    ran("fsfreeze", "-f", str(path))
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "-u", str(path)], capture_output=True, check=False)


class Fuse:
    """A running `tests.fuse_memory`."""

    def __init__(self, path: pathlib.Path, log: str) -> None:
        self.path = path
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuse_memory", str(path), *([log] if log else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            env=ENVIRONMENT,
            text=True,
        )
        assert self._process.stdout and self._process.stderr
        if self._process.stdout.readline() != "ready\n":
            reason = self._process.communicate()[1].strip().rpartition("\n")[2]
            pytest.skip(f"FUSE: {reason}")

    def tell(self, **rule: Any) -> None:
        """Give it a rule, see there, and wait until it is in force."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(rule) + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "ok\n"

    def close(self) -> None:
        """Unmount and end it."""
        subprocess.run(["umount", "-l", str(self.path)], capture_output=True, check=False)
        with self._process:
            assert self._process.stdin
            self._process.stdin.close()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()


@contextlib.contextmanager
def fuse(path: pathlib.Path, log: str = "") -> Iterator[Fuse]:
    """A file system in memory that obeys rules."""
    path.mkdir(exist_ok=True)
    served = Fuse(path, log)
    try:
        yield served
    finally:
        served.close()
