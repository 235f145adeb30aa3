"""The trainer's end of the exporter: started with the first save, told of each one, left to itself at the end."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

from asyncckpt.integrations.spool import Job
from asyncckpt.launcher import worker_environment
from asyncckpt.staging.umask import current_umask

_left_alone: list[subprocess.Popen[bytes]] = []
"""Exporters that nobody waits for: reaped when others are started or asked."""


class ExporterProcess:
    """See the module. `submit` restarts one that was killed.

    Args:
        timeout_s: How long a save may take to be committed.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Of the process that works now."""
        return None if self._process is None else self._process.pid

    def is_alive(self, pid: int | None) -> bool:
        """Whether the process that was given a job still runs."""
        _left_alone[:] = [process for process in _left_alone if process.poll() is None]
        return self._process is not None and self._process.pid == pid and self._process.poll() is None

    def submit(self, job: Job) -> int | None:
        """Tell of a job that is on disk; return the process that has it.

        Raises:
            OSError: No process can be made.
        """
        line = os.fsencode(job.path) + b"\n"
        if self._process is None or self._process.poll() is not None or not self._tell(line):
            self.close()
            self._process = self._started()
            self._tell(line)
        return self._process.pid

    def _tell(self, line: bytes) -> bool:
        assert self._process is not None and self._process.stdin is not None
        try:
            os.write(self._process.stdin.fileno(), line)
        except BrokenPipeError:
            return False
        return True

    def _started(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "asyncckpt.integrations.exporter", "--timeout-s", str(self._timeout_s)]
        return subprocess.Popen(
            [*command, "--umask", str(current_umask()), "--parent", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            cwd="/",
            env=worker_environment(),
            start_new_session=True,
            bufsize=0,
        )

    def close(self, timeout_s: float = 0.0) -> None:
        """Tell of the end; what it has it does all the same. Waits up to `timeout_s` for its end. Twice is fine."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
            return
        _left_alone.append(process)
