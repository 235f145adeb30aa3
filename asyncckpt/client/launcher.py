"""Starts a worker as a detached process: not a child of the trainer, no inherited fds, in its own session."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence

from asyncckpt.errors import WorkerUnavailableError
from asyncckpt.protocol.endpoint import ALREADY_SERVED, make_directory

START_TIMEOUT_S = 30.0
"""How long the command may take. It returns once it has forked, usually within 0.1 s."""

START_ATTEMPTS = 3
"""How often the command is run if a signal kills it: as many workers as may die in turn before a save fails."""

WORKER_MODULE = "asyncckpt_worker.cli"
"""Its `main()` is the command `asyncckpt-worker`."""


def log_path_of(endpoint: str) -> str:
    """Return the path of the log of a worker that is started for `endpoint`: beside the socket.

    Raises:
        ConfigError: The endpoint is malformed.
        EndpointError: Its directory is not safe to use.
    """
    return make_directory(endpoint).removesuffix(".sock") + ".log"


def start_worker(endpoint: str, *, log_path: str | None = None, options: Sequence[str] = ()) -> None:
    """Start a worker, unless one serves `endpoint` already.

    Blocks: until the command has forked to the background; not until the worker answers.

    Args:
        endpoint: `ipc:///absolute/path`.
        log_path: Path of its log; None: beside the socket.
        options: More options for the command, such as ("--root", "/checkpoints").

    Raises:
        ConfigError: The endpoint is malformed.
        EndpointError: Its directory is not safe to use.
        WorkerUnavailableError: The command failed, with its output in `detail`; or there is no Python to run it.
    """
    log_path = log_path or log_path_of(endpoint)
    if not sys.executable:
        detail = (
            "sys.executable is empty, as in a Python that another program embeds; start a worker by `asyncckpt-worker "
            f"--endpoint {endpoint}`, or set sys.executable to a Python with asyncckpt installed"
        )
        raise _failed(endpoint, log_path, detail)
    command = [*python_command(WORKER_MODULE), "--endpoint", endpoint, "--detach", "--log-file", log_path]
    try:
        for _ in range(START_ATTEMPTS):
            done = subprocess.run(
                [*command, *options],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                cwd="/",
                env=worker_environment(),
                start_new_session=True,
                timeout=START_TIMEOUT_S,
                check=False,
            )
            if done.returncode >= 0:  # else it was killed while it started
                break
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _failed(endpoint, log_path, str(error)) from error
    output = done.stderr.decode(errors="replace").strip()
    if done.returncode != 0 and ALREADY_SERVED not in output:  # another process has started one: a success too
        raise _failed(endpoint, log_path, output[-2000:] or f"exit code {done.returncode}")


def start_child(endpoint: str, *, log_path: str, options: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """Start a worker in the foreground, as a child process, in its own session.

    Args:
        endpoint: `ipc:///absolute/path`.
        log_path: Path of its log, which also gets its output before the log is open.
        options: More options for the command.

    Raises:
        OSError: The log cannot be opened, or the process cannot be started.
    """
    command = [*python_command(WORKER_MODULE), "--endpoint", endpoint, "--log-file", log_path]
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    log = os.open(log_path, flags | os.O_NONBLOCK, 0o600)  # O_NONBLOCK: if it is a FIFO, opening it must not block
    os.set_blocking(log, True)
    try:
        return subprocess.Popen(
            [*command, *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env=worker_environment(),
            start_new_session=True,
        )
    finally:
        os.close(log)


def python_command(module: str) -> list[str]:
    """Return a command that calls `main()` of a module; the caller appends its arguments.

    The command can import what this process can: its `sys.path` ends with the directories that the program has added.

    IMPORTANT: it does not import from its current directory, as `-m` would. The directory is `/`, where a directory
    `/asyncckpt` would hide an editable installation, and no worker could be started.

    Args:
        module: Full name of the module.
    """
    added = [entry for entry in _absolute(sys.path) if os.path.exists(entry)]
    code = (
        f"import sys; sys.path = [p for p in sys.path if p]; sys.path += [p for p in {added!r} if p not in sys.path]; "
        f"from {module} import main; sys.exit(main())"
    )
    return [sys.executable, "-c", code]


def worker_environment() -> dict[str, str]:
    """Return our environment for a process in `/`: relative entries of PYTHONPATH are made absolute."""
    environment = dict(os.environ)
    if environment.get("PYTHONPATH"):
        entries = environment["PYTHONPATH"].split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join(_absolute(e for e in entries if e))
    return environment


def _absolute(entries: Iterable[str]) -> list[str]:
    """Make paths absolute; drop relative ones if the current directory was removed."""
    found = []
    for entry in entries:
        with contextlib.suppress(FileNotFoundError):
            found.append(os.path.abspath(entry))
    return found


def _failed(endpoint: str, log_path: str, detail: str) -> WorkerUnavailableError:
    return WorkerUnavailableError(
        f"cannot start a worker for {endpoint}: {detail}; its log is {log_path}", endpoint=endpoint, detail=detail
    )
