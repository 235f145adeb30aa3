"""`asyncckpt run`: a command with a worker beside it, which outlives every process of the command and then goes too."""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import secrets
import signal
import sys
import time

from asyncckpt import launcher
from asyncckpt.cli import foreground
from asyncckpt.cli.kept_worker import KeptWorker
from asyncckpt.cli.output import EXIT_UNREACHABLE, EXIT_USAGE
from asyncckpt.config import ENDPOINT_VARIABLE, EVENTS_VARIABLE
from asyncckpt.errors import WorkerUnavailableError
from asyncckpt.protocol.endpoint import private_endpoint, socket_path
from asyncckpt.protocol.options import add_options, to_arguments

HELP = "run a command, torchrun for instance, with a worker of its own beside it; exits as the command does"
EXAMPLES = (
    "asyncckpt run --root /checkpoints -- torchrun --standalone --nproc-per-node 8 train.py",
    "asyncckpt run --events --metrics 127.0.0.1:9555 -- torchrun --max-restarts 3 --nproc-per-node 8 train.py",
    "asyncckpt run --keep-snapshots-s 3600 -- srun python train.py",
)

START_TIMEOUT_S = 30.0
"""For the worker's first answer, which takes about 0.2 s."""

EXIT_MARGIN_S = 15.0
"""What a worker may take beyond its drain timeout: to give up its jobs (5 s at most) and to end."""

POLL_S = 0.05
ASK_EVERY_S = 0.5
SAY_AFTER_S = 1.0
MAX_NAMED = 20

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
    """Add the command's arguments."""
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
    wrong = "there is no command; put it behind --" if not words else ""
    if args.detach or args.while_pid or args.when_free:
        wrong = (
            "--detach, --while-pid and --when-free are for asyncckpt-worker: this command keeps its worker as long as "
            "it needs it"
        )
    if wrong:
        print(f"asyncckpt run: {wrong}", file=sys.stderr)
        return EXIT_USAGE
    foreground.block_signals()
    own = not args.endpoint
    endpoint = args.endpoint or private_endpoint(os.environ, uid=os.geteuid(), token=secrets.token_hex(6))
    beside_the_socket = launcher.log_path_of(endpoint)
    log_path = os.path.abspath(os.path.expanduser(args.log_file)) if args.log_file else beside_the_socket
    worker = KeptWorker(endpoint, _worker_options(args), log_path, _say)
    # What it raises is a bug: the worker finishes, and ends when idle.
    code = _run(words, worker, args.drain_timeout_s, events=args.events)
    worker.kill()
    if worker.log_tells_of_trouble():
        _say(f"the worker's log tells of trouble: {log_path}")
    elif own and not args.log_file:
        _remove(log_path, f"{log_path}.1")
    if own:
        _remove(socket_path(endpoint), f"{socket_path(endpoint)}.lock")
    return code


def _worker_options(args: argparse.Namespace) -> list[str]:
    options = copy.copy(args)
    options.endpoint = options.log_file = None
    options.while_pid = os.getpid()
    return to_arguments(options)


def _run(words: list[str], worker: KeptWorker, drain_timeout_s: float, *, events: bool) -> int:
    code = _await_answer(worker)
    if code is not None:
        return code
    _say(f"worker {worker.pid} at {worker.endpoint}, log {worker.log_path}")
    environment = {**os.environ, ENDPOINT_VARIABLE: worker.endpoint, **({EVENTS_VARIABLE: "1"} if events else {})}
    try:
        command = foreground.Command(words, environment)
    except FileNotFoundError:
        _say(f"{words[0]}: command not found")
        code = foreground.EXIT_COMMAND_NOT_FOUND
    except OSError as error:
        _say(f"{words[0]}: {error.strerror}")
        code = foreground.EXIT_NOT_EXECUTABLE
    else:
        code = _attend(command, worker)
    _drain(worker, drain_timeout_s)
    return code


def _await_answer(worker: KeptWorker) -> int | None:
    """Wait until the worker answers. Returns an exit code when there is a reason to end instead."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            if worker.answers():
                return None
        except WorkerUnavailableError as error:
            _say(str(error))
            return EXIT_USAGE if worker.exit_code == EXIT_USAGE else EXIT_UNREACHABLE
        info = foreground.next_signal(POLL_S)
        if info is not None and info.si_signo in foreground.ENDING:
            return foreground.EXIT_SIGNAL + info.si_signo
    _say(f"the worker does not answer within {START_TIMEOUT_S:g} s; its log is {worker.log_path}")
    return EXIT_UNREACHABLE


def _attend(command: foreground.Command, worker: KeptWorker) -> int:
    """Pass signals on and keep the worker alive until the command has ended; returns the command's exit code."""
    while (code := command.poll()) is None:
        again_at = worker.look_after()
        wait_s = 60.0 if again_at is None else again_at - time.monotonic()
        info = foreground.next_signal(wait_s)
        if info is not None and info.si_signo != signal.SIGCHLD:
            command.forward(info)
    return code


def _drain(worker: KeptWorker, timeout_s: float) -> None:
    """Let the worker finish; a second signal, or the deadline, ends the wait. Says what is left unfinished."""
    unfinished = worker.unfinished()
    worker.drain()
    began = asked = time.monotonic()
    deadline, interrupts, said = began + timeout_s + EXIT_MARGIN_S, 0, False
    while not worker.has_ended() and time.monotonic() < deadline:
        info = foreground.next_signal(POLL_S)
        now = time.monotonic()
        if unfinished and not said and now - began > SAY_AFTER_S:
            said = True
            _say(f"waiting up to {timeout_s:g} s until the worker has finished {len(unfinished)} saves")
        if info is not None and info.si_signo in foreground.ENDING:
            interrupts += 1
            if interrupts == 1:
                _say("the worker is still writing; once more to give that up")
            elif interrupts == 2:
                worker.cut_short()
                deadline = min(deadline, now + EXIT_MARGIN_S)
        if now - asked > ASK_EVERY_S and not worker.has_ended():
            asked, unfinished = now, worker.unfinished()
    worker.kill()
    if unfinished and worker.exit_code:
        _say(f"{len(unfinished)} saves are unfinished and will not be committed:")
        for text in unfinished[:MAX_NAMED]:
            _say(f"  {text}")


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # a terminal that is gone must cost neither the command nor its saves
        print(f"asyncckpt run: {text}", file=sys.stderr, flush=True)


def _remove(*paths: str) -> None:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
