"""`SideProcess`: a process beside the trainer that writes checkpoints in other formats, and outlives it. No torch.

It is a child in a session of its own, so that neither Ctrl-C nor the end of the trainer ends it. Its standard input is
a socket, which ends when the trainer closes it or dies. The exporters of `integrations` and `manager` are such
processes.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Sequence
from typing import Any

from asyncckpt.client.launcher import python_command, worker_environment

_MAX_LOG_NBYTES = 1 << 20

_unwaited: list[subprocess.Popen[bytes]] = []
"""Processes that `close` did not wait for; later calls reap them."""


class SideProcess:
    """Starts a process, and talks to it. Not thread-safe, except for `wake`.

    Args:
        module: Full name of the module whose `main()` it runs.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Any = None

    @property
    def pid(self) -> int | None:
        """Process ID; None: none was started."""
        return None if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process runs."""
        _unwaited[:] = [process for process in _unwaited if process.poll() is None]
        return self._process is not None and self._process.poll() is None

    def start(self, *arguments: str, fds: Sequence[int] = (), log_path: str | None = None) -> None:
        """Start the process; an earlier one is left alone with what it was sent.

        Args:
            *arguments: Its arguments.
            fds: File descriptors that it inherits.
            log_path: File to which its standard error is appended; it is emptied when it is long. None: that of this
                process. IMPORTANT: who reads that through a pipe then waits for the end of both processes.

        Raises:
            OSError: No process can be started, or the file not be opened.

        Blocks: until the process executes Python, which takes longer on a busy machine.
        """
        self.close()
        self._channel, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as opened:
            log = None if log_path is None else opened.enter_context(open(log_path, "ab"))
            if log is not None and log.tell() > _MAX_LOG_NBYTES:
                log.truncate(0)
            self._process = subprocess.Popen(
                [*python_command(self._module), *arguments],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=log,
                cwd="/",
                env=worker_environment(),
                pass_fds=fds,
                start_new_session=True,
            )

    def send(self, data: bytes, fd: int | None = None) -> bool:
        """Send bytes, and maybe a file descriptor; return whether the process runs and was sent them."""
        if self._channel is not None and self.is_running:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                return bool(socket.send_fds(self._channel, [data], [] if fd is None else [fd]))
        return False

    def wake(self) -> None:
        """Send one byte, unless the process has enough unread ones. Never blocks, never raises."""
        channel = self._channel
        if channel is not None:
            with contextlib.suppress(OSError):
                channel.send(b"\0", socket.MSG_DONTWAIT)

    def close(self, timeout_s: float = 0.0) -> None:
        """Close the socket, and wait up to `timeout_s` until the process has ended. Idempotent."""
        process, self._process = self._process, None
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        if process is not None:
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                _unwaited.append(process)
