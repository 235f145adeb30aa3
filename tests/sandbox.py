"""Programs in surroundings that refuse something: system calls, by seccomp; /proc, by mounting something else there."""

from __future__ import annotations

import os
import platform
import sys

import pytest

_ARCHITECTURES = {
    "x86_64": (0xC000003E, {"pidfd_open": 434, "memfd_create": 319, "eventfd2": 290}),
    "aarch64": (0xC00000B7, {"pidfd_open": 434, "memfd_create": 279, "eventfd2": 19}),
}
"""AUDIT_ARCH_* of linux/audit.h, and numbers of system calls."""

has_seccomp = pytest.mark.skipif(
    platform.machine() not in _ARCHITECTURES or sys.platform != "linux", reason="numbers of system calls are not known"
)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")

_REFUSE = """
import ctypes, os, struct, sys
def refuse(arch, numbers, code):
    n = len(numbers)
    lines = [(0x20, 0, 0, 4), (0x15, 0, n + 2, arch), (0x20, 0, 0, 0)]
    lines += [(0x15, n - i, 0, number) for i, number in enumerate(numbers)]
    lines += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050000 | code)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(lines), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program, 0, 0):
        sys.exit(f"seccomp: {os.strerror(ctypes.get_errno())}")
"""


def refusal(calls: tuple[str, ...], code: int) -> str:
    """Return a program after which the kernel answers these system calls of its process with error `code`."""
    arch, known = _ARCHITECTURES[platform.machine()]
    return f"{_REFUSE}refuse({arch}, {[known[name] for name in calls]}, {code})\n"


def refusing(calls: tuple[str, ...], code: int, *command: str) -> list[str]:
    """Return `command` in a process, and below it, to which the kernel answers these system calls with error `code`."""
    return [sys.executable, "-c", f"{refusal(calls, code)}os.execv(sys.argv[1], sys.argv[1:])", *command]


def without_proc(*command: str) -> list[str]:
    """Return `command` in a mount namespace of its own in which nothing is mounted on /proc. Needs root."""
    script = 'mount -t tmpfs none /proc && exec "$@"'
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", *command]


def in_own_pids(*command: str) -> list[str]:
    """Return `command` in a PID namespace of its own, with a /proc that shows it. Needs root."""
    return ["unshare", "--mount", "--pid", "--fork", "--mount-proc", *command]
