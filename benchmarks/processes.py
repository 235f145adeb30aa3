"""Functions of this package in processes of their own, on one rank or several, with a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import pkgutil
import resource
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import machine

KILL_S = 30.0
"""How long a killed process may take to end."""


class ProcessError(Exception):
    """A function has failed in its process, or did not return in time; the text says why."""


def call(
    function: Callable[..., Any],
    *arguments: Any,
    deadline_s: float = 300.0,
    ranks: int = 0,
    own_worker: bool = False,
    echo: bool = False,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Any:
    """Call a function in a new process, or in one per rank; return what it returns on the first rank.

    Whatever the processes have started is killed afterwards.

    Args:
        function: A function of a module; arguments (paths as texts) and result are passed as JSON.
        arguments: Its arguments.
        deadline_s: For all of it.
        ranks: How many processes, with the environment that torchrun sets and one thread each; 0: one, without that.
        own_worker: The processes have a worker of their own, which is stopped afterwards.
        echo: Show what the processes have printed once they have ended.
        environment: More environment variables.
        cwd: The working directory.

    Raises:
        ProcessError: The function raised an exception, or its process ended or took longer than `deadline_s`.
    """
    env = os.environ | dict(environment or {})
    if own_worker:
        env["ASYNCCKPT_JOB"] = f"bench-{secrets.token_hex(4)}"
        env.pop("ASYNCCKPT_ENDPOINT", None)
    if ranks:
        env |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    name = f"{function.__module__}:{function.__qualname__}"
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="asyncckpt-bench-call-", ignore_cleanup_errors=True) as directory:
        place = Path(directory)
        (place / "arguments").write_text(json.dumps(arguments, default=str))
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.processes", name, directory]
        try:
            with (place / "log").open("wb") as log:
                how: dict[str, Any] = {"stdout": log, "stderr": log, "start_new_session": True, "cwd": cwd}
                for rank in range(max(1, ranks)):
                    of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks else {}
                    processes.append(subprocess.Popen(command, env=env | of_rank, **how))
            late = not _ended(processes, time.monotonic() + deadline_s)
            if echo:
                sys.stderr.write((place / "log").read_text(errors="replace"))
            code = next((process.returncode for process in processes if process.returncode), 0)
            return _outcome(place, f"not ended after {deadline_s:.0f} s" if late else f"ended with {code}")
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(KILL_S)
            if own_worker:
                machine.stop_worker(env=env, cwd=cwd)


def _ended(processes: list[subprocess.Popen[bytes]], deadline: float) -> bool:
    """Wait until the first process has ended, or any other one with an error; return False at the deadline."""
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if codes[0] is not None or any(codes):
            return True
        time.sleep(0.02)
    return False


def _outcome(place: Path, without: str) -> Any:
    """Return the function's result; `without` says why there is none if the process has left no error."""
    if (place / "result").exists():
        return json.loads((place / "result").read_text())
    if (place / "error").exists():
        raise ProcessError((place / "error").read_text())
    lines = [line.strip() for line in (place / "log").read_text(errors="replace").splitlines() if line.strip()]
    raise ProcessError(": ".join([without, *(line[:200] for line in lines[-1:])]))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def main() -> None:
    """Call the function that the command names, and leave its result for `call`."""
    function, place = sys.argv[1], Path(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    first, code = os.environ.get("RANK", "0") == "0", 0
    try:
        found = pkgutil.resolve_name(function)(*json.loads((place / "arguments").read_text()))
        name, text = "result", json.dumps(found)
    except BaseException as error:
        traceback.print_exc()
        first_line = next((line for line in str(error).splitlines() if line.strip()), "")
        name, text, first, code = "error", f"{type(error).__name__}: {first_line}"[:300], True, 1
    if first:
        new = place / f"new-{os.getpid()}"
        new.write_text(text)
        new.replace(place / name)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # not through the exit handlers of whatever a library has left running


if __name__ == "__main__":
    main()
