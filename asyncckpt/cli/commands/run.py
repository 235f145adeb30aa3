"""Run a command, such as torchrun, together with a new worker, and exit with the command's exit code.

The worker survives all processes of the command. When the command has ended, it writes the submitted saves and exits.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import pathlib
import re
import secrets
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from asyncckpt.cli.output import EXIT_SIGNAL, EXIT_UNREACHABLE, EXIT_USAGE, say
from asyncckpt.cli.worker_requests import status_of, tell_to_drain
from asyncckpt.client import launcher
from asyncckpt.config import ENDPOINT_VARIABLE, EVENTS_VARIABLE
from asyncckpt.errors import AsyncCkptError
from asyncckpt.protocol.endpoint import private_endpoint, socket_path
from asyncckpt.protocol.identity import has_exited, start_ticks
from asyncckpt.protocol.options import add_options, to_arguments
from asyncckpt.protocol.save_phases import ENDED

EXAMPLES = (
    "asyncckpt run --root /checkpoints -- torchrun --standalone --nproc-per-node 8 train.py",
    "asyncckpt run --events --metrics 127.0.0.1:9555 -- torchrun --max-restarts 3 --nproc-per-node 8 train.py",
    "asyncckpt run --keep-snapshots-s 3600 -- srun python train.py",
)

START_TIMEOUT_S = 30.0
"""Timeout of the worker's first answer, which usually takes about 0.2 s."""

EXIT_MARGIN_S = 15.0
"""Time that a worker may take beyond its drain timeout, to cancel its jobs (at most 5 s) and to exit."""

RESTART_DELAYS_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Delays before the first, second, ... restart in a row; the last one is used for all further. Chosen, not measured."""

MIN_UPTIME_S = 60.0
"""If a worker has run this long before it ended, the delays start again with the first."""

POLL_S = 0.05
STATUS_INTERVAL_S = STATUS_TIMEOUT_S = 0.5
CHECK_INTERVAL_S = 60.0
SAY_AFTER_S = 1.0
MAX_NAMED = 20
TAIL_NBYTES = 2000

EXIT_NOT_EXECUTABLE = 126
EXIT_COMMAND_NOT_FOUND = 127
"""As in POSIX shells (POSIX, Shell Command Language, "Exit Status for Commands")."""

FORWARDED = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2})
ENDING = FORWARDED - {signal.SIGUSR1, signal.SIGUSR2}
_WAITED = FORWARDED | {signal.SIGCHLD}
_RESTORED = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD)
"""Signals with default action in the command: Python ignores the first two, and child processes inherit that."""

_SI_KERNEL = 0x80
"""si_code in sigaction(2): sent by the kernel. For these signals: by the terminal."""

_WARNING_OR_ERROR = re.compile(rb'^\S+ \S+ (WARNING|ERROR) |"level": "(warning|error)"', re.MULTILINE)
"""Matches in both formats of the log (`asyncckpt_worker.service.log`)."""

_HELPS = {
    "--endpoint": "address of the worker's socket, ipc:///absolute/path (default: a new one); it is passed to the "
    "command in ASYNCCKPT_ENDPOINT",
    "--idle-exit-s": "if `asyncckpt run` is killed, the worker exits after S idle seconds (default: %(default)s)",
    "--log-file": "append the worker's log to FILE (default: a file beside the socket, removed if it has no warnings)",
    "--when-free": argparse.SUPPRESS,
    "--detach": argparse.SUPPRESS,
    "--while-pid": argparse.SUPPRESS,
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "asyncckpt run [-h] [options of the worker] -- CMD..."
    add_options(parser, _HELPS)
    parser.add_argument(
        "words", metavar="CMD...", nargs=argparse.REMAINDER, help="the command to run, and its arguments"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        The command's exit code; 128 plus the signal's number if a signal ended it; 127 not found; 126 not executable;
        5 if no worker could be started.

    Raises:
        AsyncCkptError: The endpoint is malformed, or its directory is not safe to use.
        OSError: The log cannot be opened.
    """
    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    if not words:
        _say("no command was given; write it after --")
        return EXIT_USAGE
    if args.detach or args.while_pid or args.when_free:
        _say("--detach, --while-pid and --when-free are for asyncckpt-worker: `asyncckpt run` stops its worker itself")
        return EXIT_USAGE
    # IMPORTANT: signals are blocked and read with sigtimedwait, never handled. So none is lost between two checks, and
    # none arrives between the start of the command and the moment from which on signals are forwarded to it.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the parent may have ignored it; waitpid would then fail
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED)
    endpoint = args.endpoint or private_endpoint(os.environ, uid=os.geteuid(), token=secrets.token_hex(6))
    log_path = launcher.log_path_of(endpoint)
    if args.log_file:
        log_path = os.path.abspath(os.path.expanduser(args.log_file))
    options = copy.copy(args)
    options.endpoint = options.log_file = None
    options.while_pid = os.getpid()
    worker = WorkerSupervisor(endpoint, to_arguments(options), log_path)
    # If the calls below raise, which would be a bug, the worker finishes the saves and exits when idle.
    code = _await_answer(worker)
    if code is None:
        code = _command(words, worker, with_events=args.events)
        _drain(worker, args.drain_timeout_s)
    worker.kill()
    made = [] if args.endpoint else [socket_path(endpoint), f"{socket_path(endpoint)}.lock"]
    if _WARNING_OR_ERROR.search(worker.logged()):
        _say(f"the worker's log has warnings or errors: {log_path}")
    elif made and not args.log_file:
        made += map(str, worker.logs)
    for path in made:
        with contextlib.suppress(OSError):  # the exit code must be the command's
            os.unlink(path)
    return code


def _await_answer(worker: WorkerSupervisor) -> int | None:
    """Wait until the worker answers. Returns None, or an exit code if it cannot start or a signal arrived."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if worker.report().get("pid") == worker.process.pid:
            return None
        if worker.process.poll() is not None:
            words = worker.logged()[-TAIL_NBYTES:].decode(errors="replace").strip() or "its log is empty"
            _say(f"the worker exited with code {worker.process.returncode}: {words}")
            return EXIT_USAGE if worker.process.returncode == EXIT_USAGE else EXIT_UNREACHABLE
        info = _next_signal(POLL_S)
        if info is not None and info.si_signo in ENDING:
            return EXIT_SIGNAL + info.si_signo
    _say(f"the worker did not answer within {START_TIMEOUT_S:g} s; see its log {worker.logs[-1]}")
    return EXIT_UNREACHABLE


def _command(words: Sequence[str], worker: WorkerSupervisor, *, with_events: bool) -> int:
    """Run the command to its end, forward signals to it, restart the worker if it dies. Returns the exit code."""
    _say(f"worker {worker.process.pid} at {worker.endpoint}, log {worker.logs[-1]}")
    environ = {**os.environ, ENDPOINT_VARIABLE: worker.endpoint, **({EVENTS_VARIABLE: "1"} if with_events else {})}
    try:
        # In the same process group, so that it can use the terminal.
        pid = os.posix_spawnp(words[0], list(words), environ, setsigmask=(), setsigdef=_RESTORED)
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        _say(f"{words[0]}: {'command not found' if is_missing else error.strerror}")
        return EXIT_COMMAND_NOT_FOUND if is_missing else EXIT_NOT_EXECUTABLE
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else EXIT_SIGNAL - code
        info = _next_signal(worker.restart_if_dead())
        if info is not None and _is_to_forward(info):
            os.kill(pid, info.si_signo)  # it was not reaped yet, so the PID is still its own


def _is_to_forward(info: signal.struct_siginfo) -> bool:
    """Whether a signal must be forwarded to the command.

    The terminal sends signals to the whole foreground process group, which includes the command; but a hangup first to
    the session leader only.
    """
    is_leaders = info.si_signo == signal.SIGHUP and os.getsid(0) == os.getpid()
    return info.si_signo in FORWARDED and (info.si_code != _SI_KERNEL or is_leaders)


def _drain(worker: WorkerSupervisor, timeout_s: float) -> None:
    """Let the worker finish. A second signal or the deadline ends the wait. Reports saves that are not finished."""
    unfinished = worker.unfinished()
    worker.drain()
    began = time.monotonic()
    deadline, interrupts, said = began + timeout_s + EXIT_MARGIN_S, 0, False
    while not worker.has_ended() and (now := time.monotonic()) < deadline:
        if unfinished and not said and now - began > SAY_AFTER_S:
            said = True
            _say(f"waiting up to {timeout_s:g} s until the worker has finished {len(unfinished)} saves")
        info = _next_signal(STATUS_INTERVAL_S)  # also returns when the worker exits: SIGCHLD
        if info is not None and info.si_signo in ENDING:
            interrupts += 1
            if interrupts == 1:
                _say("the worker is still writing; send the signal again to give up these saves")
            elif interrupts == 2:
                worker.drain(now=True)
                deadline = min(deadline, now + EXIT_MARGIN_S)
        unfinished = worker.unfinished()
    is_late = not worker.has_ended()
    worker.kill()
    if unfinished and (is_late or (worker.process.returncode and not worker.is_another)):
        _say(f"{len(unfinished)} saves are unfinished and will not be committed:")
        for text in unfinished[:MAX_NAMED]:
            _say(f"  {text}")


def _next_signal(timeout_s: float) -> signal.struct_siginfo | None:
    """Return the next signal, which may be SIGCHLD, or None after `timeout_s`."""
    return signal.sigtimedwait(_WAITED, max(0.0, timeout_s))


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # a closed terminal must neither end the command nor lose saves
        say(f"asyncckpt run: {text}", file=sys.stderr)
        sys.stderr.flush()


class WorkerSupervisor:
    """Runs the worker as a child process in a new session, and restarts it if it ends. Not thread-safe.

    Args:
        endpoint: Endpoint on which the worker listens.
        options: Command line options of the worker, without the endpoint and the log file.
        log_path: Path of its log file.

    Attributes:
        process: The child process that was started last.
        logs: Paths of the rotated log file, and of the current one.

    Raises:
        OSError: The log cannot be opened.
        WorkerUnavailableError: The worker cannot be started.
    """

    def __init__(self, endpoint: str, options: Sequence[str], log_path: str) -> None:
        self.endpoint, self.logs = endpoint, (pathlib.Path(f"{log_path}.1"), pathlib.Path(log_path))
        self._options = options
        self._deaths = 0
        self._restart_at: float | None = None
        self._rows: list[Mapping[str, Any]] = []
        self._old = {log.stat().st_ino: log.stat().st_size for log in self.logs if log.is_file()}
        self._start()

    def _start(self) -> None:
        self.process = launcher.start_child(self.endpoint, log_path=str(self.logs[-1]), options=self._options)
        self._started = time.monotonic()
        self._served = self.process.pid, start_ticks(self.process.pid)

    def report(self) -> Mapping[str, Any]:
        """Return the status of the worker at the endpoint; empty if none answers. Blocks: up to `STATUS_TIMEOUT_S`."""
        try:
            found = status_of(self.endpoint, STATUS_TIMEOUT_S)
        except AsyncCkptError:
            return {}
        self._served = found["pid"], start_ticks(found["pid"])
        return found

    def logged(self) -> bytes:
        """Return the log since the first start, as far as log rotation has kept it."""
        text = b""
        for log in self.logs:
            with contextlib.suppress(OSError):
                data = log.read_bytes() if log.is_file() else b""  # reading a pipe would take data from its reader
                before = self._old.get(log.stat().st_ino, 0)
                text += data[before:] if len(data) >= before else data  # shorter than before: the worker has rotated it
        return text

    def restart_if_dead(self) -> float:
        """Restart the worker if it has ended and the delay is over; return the seconds until the next call."""
        if self.process.poll() is None:
            return CHECK_INTERVAL_S
        now = time.monotonic()
        if self._restart_at is None:
            self._deaths = 1 if now - self._started >= MIN_UPTIME_S else self._deaths + 1
            delay_s = RESTART_DELAYS_S[min(self._deaths, len(RESTART_DELAYS_S)) - 1]
            self._restart_at = now + delay_s
            lost = " with saves in flight" if self.process.returncode else ""
            later = f" in {delay_s:g} s" if delay_s else ""
            _say(f"worker {self.process.pid} {_ended(self.process.returncode)}{lost}; restarting it{later}")
        if now >= self._restart_at:
            try:
                self._start()
            except (OSError, AsyncCkptError) as error:
                self._restart_at = now + RESTART_DELAYS_S[-1]
                _say(f"{error}; trying again in {RESTART_DELAYS_S[-1]:g} s")
            else:
                self._restart_at = None
                return CHECK_INTERVAL_S
        return self._restart_at - now

    def drain(self, *, now: bool = False) -> None:
        """Tell the worker to finish submitted saves and exit; with `now`, to exit immediately.

        If a trainer has started another worker in place of a dead one, that gets the same request.

        Blocks: up to `STATUS_TIMEOUT_S`.
        """
        if not now:
            self.process.terminate()  # does nothing if it has ended
        if now or self.is_another:
            with contextlib.suppress(AsyncCkptError):
                tell_to_drain(self.endpoint, STATUS_TIMEOUT_S, now=now)

    @property
    def is_another(self) -> bool:
        """Whether the worker that answered last was started by a trainer, not by this process."""
        return self._served[0] != self.process.pid

    def has_ended(self) -> bool:
        """Return whether the worker has ended, and any worker that a trainer has started in its place."""
        pid, started = self._served
        return self.process.poll() is not None and (not self.is_another or started is None or has_exited(pid, started))

    def kill(self) -> None:
        """Kill the child process, and wait for its end."""
        self.process.kill()
        self.process.wait()

    def unfinished(self) -> list[str]:
        """Describe each save that had not ended at the worker's last answer. Blocks: up to `STATUS_TIMEOUT_S`."""
        if report := self.report():
            self._rows = [row for row in report.get("saves") or () if row.get("phase") not in ENDED]
        return [_described(row) for row in self._rows]


def _described(row: Mapping[str, Any]) -> str:
    missing = ", ".join(map(str, row.get("missing") or ()))
    what = "a save" if row["step"] is None else f"step {row['step']}"
    return f"{what} at {row['path']}: {row['phase']}" + (f", missing ranks: {missing}" if missing else "")


def _ended(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    name = next((one.name for one in signal.Signals if one == -code), f"signal {-code}")
    return f"was killed by {name}"
