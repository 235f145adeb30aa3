"""Programs that need torch, in processes of their own, without the seconds that importing it takes.

One process has imported it, and forks for each program. The fork runs that as `python -c` does: its `__main__`, `argv`,
environment, working directory, standard streams and signals are its own, and it ends as an interpreter ends: threads
are waited for, what was registered for the exit runs, an exception gives a traceback and its code. Only what was
imported before is not searched for cycles, which takes a second.

Not for programs whose start, memory or import of something is what is tested.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Mapping
from typing import IO, Any

DEADLINE_S = 100.0
_MAX_NBYTES = 1 << 20
_STREAMS = 3


class WarmProcess:
    """A program that runs. `pid`; `returncode` as `subprocess.Popen` has it."""

    def __init__(self, pid: int, pidfd: int, ended: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd, self._ended = pidfd, ended

    def wait(self, timeout_s: float) -> int:
        """Return its code once it has ended.

        Raises:
            subprocess.TimeoutExpired: It has not.
        """
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout_s)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout_s)
            self.returncode = os.waitstatus_to_exitcode(int(self._ended.recv(100)))
        return self.returncode

    def poll(self) -> int | None:
        """Return its code, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """End it, and forget it."""
        self.kill()
        self.wait(DEADLINE_S)
        os.close(self._pidfd)
        self._ended.close()


class WarmPython:
    """Starts programs. Its own process ends with it, or with the process that has made it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", "import tests.warm_python as w; w.obey()", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=os.path.dirname(os.path.dirname(__file__)),
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )

    def start(
        self,
        program: str,
        *arguments: str,
        stdin: int | IO[Any] = subprocess.DEVNULL,
        stdout: int | IO[Any] = subprocess.DEVNULL,
        stderr: int | IO[Any] = subprocess.DEVNULL,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> WarmProcess:
        """Start a program.

        Args:
            program: Its text.
            arguments: `sys.argv[1:]`.
            stdin, stdout, stderr: Files, file descriptors, or `subprocess.DEVNULL`.
            env: Its environment; by default this one. What torch reads when it is imported was read before.
            cwd: Its working directory; by default this one.
        """
        order = {
            "program": program,
            "argv": ["-c", *arguments],
            "env": dict(os.environ if env is None else env),
            "cwd": os.fspath(cwd or os.getcwd()),
        }
        with contextlib.ExitStack() as opened:
            fds = []
            for stream in (stdin, stdout, stderr):
                if stream == subprocess.DEVNULL:
                    stream = opened.enter_context(open(os.devnull, "r+b", buffering=0))
                fds.append(stream if isinstance(stream, int) else stream.fileno())
            ended, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            opened.enter_context(theirs)
            socket.send_fds(self._socket, [json.dumps(order).encode()], [*fds, theirs.fileno()])
        assert select.select([ended], [], [], DEADLINE_S)[0], "no process was started"
        message, (pidfd,), _, _ = socket.recv_fds(ended, 100, 1)
        return WarmProcess(int(message), pidfd, ended)

    @contextlib.contextmanager
    def running(self, program: str, *arguments: str, **options: Any) -> Iterator[WarmProcess]:
        """As `start`; the process ends with the block."""
        process = self.start(program, *arguments, **options)
        try:
            yield process
        finally:
            process.close()

    @contextlib.contextmanager
    def talking(self, program: str, *arguments: str, **options: Any) -> Iterator[tuple[WarmProcess, IO[str], IO[str]]]:
        """As `running`; yields the process, what it reads as its stdin, and what it has written to its stdout."""
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        with contextlib.ExitStack() as opened:
            stdin, stdout = opened.enter_context(open(ours_in, "w")), opened.enter_context(open(ours_out))
            try:
                process = self.start(program, *arguments, stdin=theirs_in, stdout=theirs_out, **options)
            finally:
                os.close(theirs_in)
                os.close(theirs_out)
            opened.callback(process.close)
            yield process, stdin, stdout

    def run(
        self, program: str, *arguments: str, timeout_s: float = DEADLINE_S, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Return how a program has ended, and what it has written.

        Raises:
            subprocess.TimeoutExpired: It has not ended in time; it is killed.
        """
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            with self.running(program, *arguments, stdout=out, stderr=err, **options) as process:
                code = process.wait(timeout_s)
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode())
        return subprocess.CompletedProcess([program, *arguments], code, *texts)

    def close(self) -> None:
        """End every process that is left."""
        self._socket.close()
        self._process.wait(DEADLINE_S)


def obey() -> None:
    """Import torch, and fork for each order, until nobody gives any. Returns in no process but a fork."""
    import torch

    import asyncckpt
    from asyncckpt import cli
    from asyncckpt.interop import convert

    assert torch and convert and asyncckpt.AsyncCheckpointer and asyncckpt.load and cli.parser()
    gc.freeze()
    orders = socket.socket(fileno=int(sys.argv[1]))
    woken, wakes = socket.socketpair()
    woken.setblocking(False)
    wakes.setblocking(False)
    usual = signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all of a terminal; whoever started us ends us
    living: dict[int, socket.socket] = {}
    while True:
        ready = select.select([orders, woken], [], [])[0]
        if woken in ready:
            woken.recv(4096)
            _tell_ends(living)
        if orders not in ready:
            continue
        message, fds, _, _ = socket.recv_fds(orders, _MAX_NBYTES, _STREAMS + 1)
        if not message:
            _end(living)
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, usual)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests were started by nohup
            for one in (orders, woken, wakes, *living.values()):
                one.close()
            _become(json.loads(message), list(fds))
            return
        living[pid] = ended = socket.socket(fileno=fds.pop())
        for fd in fds:
            os.close(fd)
        pidfd = os.pidfd_open(pid)
        with contextlib.suppress(BrokenPipeError):
            socket.send_fds(ended, [str(pid).encode()], [pidfd])
        os.close(pidfd)


def _tell_ends(living: dict[int, socket.socket]) -> None:
    while living:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with living.pop(pid) as ended, contextlib.suppress(BrokenPipeError):
            ended.send(str(status).encode())


def _end(living: dict[int, socket.socket]) -> None:
    for pid in living:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os._exit(0)


def _become(order: dict[str, Any], fds: list[int]) -> None:
    """Run a program in this process, which is a fork, in the place of what `__main__` is here."""
    for number, fd in enumerate(fds[:_STREAMS]):
        os.dup2(fd, number)
    for fd in fds:
        os.close(fd)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    time.tzset()
    sys.argv = order["argv"]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(order["program"], "<string>", "exec"), main.__dict__)
