"""Run a command, such as torchrun, together with a worker of its own, and exit with the command's exit code.

The worker outlives every process of the command, and ends when every submitted save is written.
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
from asyncckpt.protocol.identity import is_gone, start_ticks
from asyncckpt.protocol.options import add_options, to_arguments
from asyncckpt.protocol.save_phases import ENDED

EXAMPLES = (
    "asyncckpt run --root /checkpoints -- torchrun --standalone --nproc-per-node 8 train.py",
    "asyncckpt run --events --metrics 127.0.0.1:9555 -- torchrun --max-restarts 3 --nproc-per-node 8 train.py",
    "asyncckpt run --keep-snapshots-s 3600 -- srun python train.py",
)

START_TIMEOUT_S = 30.0
"""Timeout of the worker's first answer, which takes about 0.2 s."""

EXIT_MARGIN_S = 15.0
"""Time that a worker may take beyond its drain timeout, to give up its jobs (5 s at most) and to end."""

RESTART_DELAYS_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Delays before the first, second, ... restart after a death; the last one for all further. Chosen, not measured."""

LIVED_S = 60.0
"""A worker that has lived this long did not die at its start: the delays begin again."""

POLL_S = 0.05
ASK_EVERY_S = ASK_TIMEOUT_S = 0.5
LOOK_EVERY_S = 60.0
SAY_AFTER_S = 1.0
MAX_NAMED = 20
TAIL_NBYTES = 2000

EXIT_NOT_EXECUTABLE = 126
EXIT_COMMAND_NOT_FOUND = 127
"""As in POSIX's shell, "Exit Status for Commands"."""

FORWARDED = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2})
ENDING = FORWARDED - {signal.SIGUSR1, signal.SIGUSR2}
_WAITED = FORWARDED | {signal.SIGCHLD}
_RESTORED = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD)
"""Python ignores the first two, and an ignored signal stays ignored in what we start."""

_SI_KERNEL = 0x80
"""sigaction(2): the kernel sent it, which for these signals means the terminal."""

_TROUBLE = re.compile(rb'^\S+ \S+ (WARNING|ERROR) |"level": "(warning|error)"', re.MULTILINE)
"""In either format of the log (`asyncckpt_worker.service.log`)."""

_HELPS = {
    "--endpoint": "ipc:///absolute/path of the worker's socket (default: a new one); the command finds it in "
    "ASYNCCKPT_ENDPOINT",
    "--idle-exit-s": "a worker whose `asyncckpt run` was killed ends after S idle seconds (default: %(default)s)",
    "--log-file": "append the worker's log to FILE (default: beside the socket, and removed unless it has warnings)",
    "--when-free": argparse.SUPPRESS,
    "--detach": argparse.SUPPRESS,
    "--while-pid": argparse.SUPPRESS,
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "asyncckpt run [-h] [options of the worker] -- CMD..."
    add_options(parser, _HELPS)
    parser.add_argument("words", metavar="CMD...", nargs=argparse.REMAINDER, help="the command and its arguments")


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        The command's exit code, 128 and the number for a signal, 127 not found, 126 not executable; 5 when no worker
        could be started.

    Raises:
        AsyncCkptError: The endpoint is malformed or its directory not safe to use.
        OSError: The log cannot be opened.
    """
    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    if not words:
        _say("no command was given; put it after --")
        return EXIT_USAGE
    if args.detach or args.while_pid or args.when_free:
        _say("--detach, --while-pid and --when-free are for asyncckpt-worker: `asyncckpt run` ends its worker itself")
        return EXIT_USAGE
    # IMPORTANT: signals are blocked and waited for, never handled: none is lost between two looks, and none interrupts
    # us between the command's start and the moment from which it would be forwarded.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # whoever started us may ignore it; then nobody could be waited for
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED)
    endpoint = args.endpoint or private_endpoint(os.environ, uid=os.geteuid(), token=secrets.token_hex(6))
    log_path = launcher.log_path_of(endpoint)
    if args.log_file:
        log_path = os.path.abspath(os.path.expanduser(args.log_file))
    options = copy.copy(args)
    options.endpoint = options.log_file = None
    options.while_pid = os.getpid()
    worker = WorkerSupervisor(endpoint, to_arguments(options), log_path)
    # What it raises is a bug: the worker finishes, and ends when idle.
    code = _await_answer(worker)
    if code is None:
        code = _command(words, worker, with_events=args.events)
        _drain(worker, args.drain_timeout_s)
    worker.kill()
    made = [] if args.endpoint else [socket_path(endpoint), f"{socket_path(endpoint)}.lock"]
    if _TROUBLE.search(worker.logged()):
        _say(f"the worker's log has warnings or errors: {log_path}")
    elif made and not args.log_file:
        made += map(str, worker.logs)
    for path in made:
        with contextlib.suppress(OSError):  # whatever the command has put there: the exit code is its own
            os.unlink(path)
    return code


def _await_answer(worker: WorkerSupervisor) -> int | None:
    """Wait until the worker answers. Returns an exit code when there is a reason to end instead."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if worker.report().get("pid") == worker.process.pid:
            return None
        if worker.process.poll() is not None:
            words = worker.logged()[-TAIL_NBYTES:].decode(errors="replace").strip() or "its log is empty"
            _say(f"the worker ended with {worker.process.returncode}: {words}")
            return EXIT_USAGE if worker.process.returncode == EXIT_USAGE else EXIT_UNREACHABLE
        info = _next_signal(POLL_S)
        if info is not None and info.si_signo in ENDING:
            return EXIT_SIGNAL + info.si_signo
    _say(f"the worker has not answered within {START_TIMEOUT_S:g} s; its log is {worker.logs[-1]}")
    return EXIT_UNREACHABLE


def _command(words: Sequence[str], worker: WorkerSupervisor, *, with_events: bool) -> int:
    """Run the command to its end, pass signals on to it and keep the worker alive; returns its exit code."""
    _say(f"worker {worker.process.pid} at {worker.endpoint}, log {worker.logs[-1]}")
    environ = {**os.environ, ENDPOINT_VARIABLE: worker.endpoint, **({EVENTS_VARIABLE: "1"} if with_events else {})}
    try:
        # In our process group, with our terminal.
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
            os.kill(pid, info.si_signo)  # not reaped yet, so the number is still its own


def _is_to_forward(info: signal.struct_siginfo) -> bool:
    """Whether a signal was meant for the command too and has not reached it.

    The terminal sends a signal to its whole foreground group, the command in it included; a hangup, at first, to the
    leader of the session alone.
    """
    is_leaders = info.si_signo == signal.SIGHUP and os.getsid(0) == os.getpid()
    return info.si_signo in FORWARDED and (info.si_code != _SI_KERNEL or is_leaders)


def _drain(worker: WorkerSupervisor, timeout_s: float) -> None:
    """Let the worker finish; a second signal, or the deadline, ends the wait. Says what is left unfinished."""
    unfinished = worker.unfinished()
    worker.drain()
    began = time.monotonic()
    deadline, interrupts, said = began + timeout_s + EXIT_MARGIN_S, 0, False
    while not worker.has_ended() and (now := time.monotonic()) < deadline:
        if unfinished and not said and now - began > SAY_AFTER_S:
            said = True
            _say(f"waiting up to {timeout_s:g} s until the worker has finished {len(unfinished)} saves")
        info = _next_signal(ASK_EVERY_S)  # the worker's end is one
        if info is not None and info.si_signo in ENDING:
            interrupts += 1
            if interrupts == 1:
                _say("the worker is still writing; signal again to give up these saves")
            elif interrupts == 2:
                worker.drain(now=True)
                deadline = min(deadline, now + EXIT_MARGIN_S)
        unfinished = worker.unfinished()
    gave_up = not worker.has_ended()
    worker.kill()
    if unfinished and (gave_up or (worker.process.returncode and not worker.is_another)):
        _say(f"{len(unfinished)} saves are unfinished and will not be committed:")
        for text in unfinished[:MAX_NAMED]:
            _say(f"  {text}")


def _next_signal(timeout_s: float) -> signal.struct_siginfo | None:
    """Return the next signal, the end of a child (SIGCHLD) among them, or None after `timeout_s`."""
    return signal.sigtimedwait(_WAITED, max(0.0, timeout_s))


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # a terminal that is gone must cost neither the command nor its saves
        say(f"asyncckpt run: {text}", file=sys.stderr)
        sys.stderr.flush()


class WorkerSupervisor:
    """Runs the worker as a child process in a session of its own, and restarts it when it ends. Not thread-safe.

    Args:
        endpoint: Endpoint on which the worker listens.
        options: Command line options of the worker, without the endpoint and the log file.
        log_path: Path of its log file.

    Attributes:
        process: The process that was started last.
        logs: Paths of the rotated log file, and of the current one.

    Raises:
        OSError: The log cannot be opened.
        WorkerUnavailableError: The worker cannot be started.
    """

    def __init__(self, endpoint: str, options: Sequence[str], log_path: str) -> None:
        self.endpoint, self.logs = endpoint, (pathlib.Path(f"{log_path}.1"), pathlib.Path(log_path))
        self._options = options
        self._deaths = 0
        self._again_at: float | None = None
        self._rows: list[Mapping[str, Any]] = []
        self._old = {log.stat().st_ino: log.stat().st_size for log in self.logs if log.is_file()}
        self._start()

    def _start(self) -> None:
        self.process = launcher.start_child(self.endpoint, log_path=str(self.logs[-1]), options=self._options)
        self._started = time.monotonic()
        self._served = self.process.pid, start_ticks(self.process.pid)

    def report(self) -> Mapping[str, Any]:
        """Return the status of the worker at the endpoint; empty if none answers. Blocks: up to `ASK_TIMEOUT_S`."""
        try:
            found = status_of(self.endpoint, ASK_TIMEOUT_S)
        except AsyncCkptError:
            return {}
        self._served = found["pid"], start_ticks(found["pid"])
        return found

    def logged(self) -> bytes:
        """Return what was logged since the first start, as far as log rotation has kept it."""
        text = b""
        for log in self.logs:
            with contextlib.suppress(OSError):
                data = log.read_bytes() if log.is_file() else b""  # a pipe may have a reader
                before = self._old.get(log.stat().st_ino, 0)
                text += data[before:] if len(data) >= before else data  # the worker has cut it
        return text

    def restart_if_dead(self) -> float:
        """Restart the worker if it has died and the delay is over; return in how many seconds to call this again."""
        if self.process.poll() is None:
            return LOOK_EVERY_S
        now = time.monotonic()
        if self._again_at is None:
            self._deaths = 1 if now - self._started >= LIVED_S else self._deaths + 1
            delay_s = RESTART_DELAYS_S[min(self._deaths, len(RESTART_DELAYS_S)) - 1]
            self._again_at = now + delay_s
            lost = " with saves in flight" if self.process.returncode else ""
            later = f" in {delay_s:g} s" if delay_s else ""
            _say(f"worker {self.process.pid} {_ended(self.process.returncode)}{lost}; starting it again{later}")
        if now >= self._again_at:
            try:
                self._start()
            except (OSError, AsyncCkptError) as error:
                self._again_at = now + RESTART_DELAYS_S[-1]
                _say(f"{error}; trying again in {RESTART_DELAYS_S[-1]:g} s")
            else:
                self._again_at = None
                return LOOK_EVERY_S
        return self._again_at - now

    def drain(self, *, now: bool = False) -> None:
        """Let the worker finish submitted saves, then exit; with `now` exit at once. Blocks: up to `ASK_TIMEOUT_S`.

        If a trainer has started another worker in place of a dead one, that one gets the same request.
        """
        if not now:
            self.process.terminate()  # nothing once it has been reaped
        if now or self.is_another:
            with contextlib.suppress(AsyncCkptError):
                tell_to_drain(self.endpoint, ASK_TIMEOUT_S, now=now)

    @property
    def is_another(self) -> bool:
        """Whether the worker that answered last was started by a trainer, not by this process."""
        return self._served[0] != self.process.pid

    def has_ended(self) -> bool:
        """Return whether the worker has ended, and also one that a trainer has started in its place."""
        pid, started = self._served
        return self.process.poll() is not None and (not self.is_another or started is None or is_gone(pid, started))

    def kill(self) -> None:
        """Kill the child process, and wait for its end."""
        self.process.kill()
        self.process.wait()

    def unfinished(self) -> list[str]:
        """Return a text for each save that had not ended at the last answer. Blocks: up to `ASK_TIMEOUT_S`."""
        if report := self.report():
            self._rows = [row for row in report.get("saves") or () if row.get("phase") not in ENDED]
        return [_described(row) for row in self._rows]


def _described(row: Mapping[str, Any]) -> str:
    missing = ", ".join(map(str, row.get("missing") or ()))
    what = "a save" if row["step"] is None else f"step {row['step']}"
    return f"{what} at {row['path']}: {row['phase']}" + (f", rank {missing} never came" if missing else "")


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with {code}"
    name = next((one.name for one in signal.Signals if one == -code), f"signal {-code}")
    return f"was ended by {name}"
