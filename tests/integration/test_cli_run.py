"""`asyncckpt run`: what the command gets, what is passed on to it, and what becomes of the worker."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from real_worker import DEADLINE_S, RealWorker, running, status_of, wait_until

from asyncckpt.protocol.endpoint import socket_path
from asyncckpt.protocol.identity import start_ticks
from asyncckpt.storage.catalog import read_manifest
from asyncckpt.storage.local import LocalStore
from tests.leak_guard import fds_of
from tests.torch_free_client import Client, Snapshot

ROOT = Path(__file__).parents[2]
RUN = (sys.executable, "-m", "asyncckpt", "run")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)

RECORDER = """
import os, signal, sys
names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
numbers = [getattr(signal, name) for name in names]
assert not signal.pthread_sigmask(signal.SIG_BLOCK, numbers), "signals came blocked"
record = open(sys.argv[1], "a", buffering=1)
record.write("ready\\n")
while info := signal.sigtimedwait(numbers, 60):
    record.write(signal.Signals(info.si_signo).name + "\\n")
    if signal.Signals(info.si_signo).name in sys.argv[2:]:
        sys.exit(3)
"""
"""Writes down each signal that it gets; ends at those that are named."""

SAVES = """
import os, sys
from tests.torch_free_client import Client, Snapshot, new_save_id
path, world_size, nbytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
snapshot, save_id = Snapshot(nbytes=nbytes), new_save_id()
client = Client(os.environ["ASYNCCKPT_ENDPOINT"], world_size=world_size)
client.hello()
slot = client.allocate(snapshot.slot_nbytes(), populate=True)
client.stage(slot, snapshot, save_id, path, step=5)
client.submit(slot, save_id)
os._exit(0)
"""
"""A trainer of rank 0 that dies as soon as its save is submitted."""


@pytest.fixture
def environment(endpoint_dir: Path) -> dict[str, str]:
    """The environment of `asyncckpt run`; endpoints that it makes up are below `endpoint_dir`."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / ".typing", ROOT / "tests")))
    return {**os.environ, "PYTHONPATH": path, "XDG_RUNTIME_DIR": str(endpoint_dir), "PYTHONUNBUFFERED": "1"}


def leftovers(directory: Path) -> list[str]:
    """Return what is left where sockets are made."""
    return [str(p.relative_to(directory)) for p in directory.rglob("*") if not p.is_dir()]


def call(environment: dict[str, str], *words: str, options: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [*RUN, *options, "--", *words], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def _heed_every_signal() -> None:
    """These tests may run in the background, or under nohup: what is ignored from the start no shell can trap."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def begun(environment: dict[str, str], *words: str, options: Sequence[str] = ()) -> Iterator[subprocess.Popen[str]]:
    """Start a command; what still runs at the end is killed."""
    command = [*RUN, *options, "--", *words]
    pipes: dict[str, Any] = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, preexec_fn=_heed_every_signal, **pipes) as run:  # noqa: PLW1509
        try:
            yield run
        finally:
            run.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.wait(60)
            run.kill()


def ended(run: subprocess.Popen[str], code: int) -> str:
    """Wait for the end; return what was said on stderr."""
    _, said = run.communicate(timeout=DEADLINE_S)
    assert run.returncode == code, said
    return said


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def recorder(record: Path, *ending: str) -> tuple[str, ...]:
    return (sys.executable, "-c", RECORDER, str(record), *ending)


# ---- exit codes


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("true",), 0),
        (("sh", "-c", "exit 7"), 7),
        (("sh", "-c", "kill -KILL $$"), 128 + signal.SIGKILL),
        (("asyncckpt-no-such-command",), 127),
        ((os.devnull,), 126),
    ],
)
def test_exit_code_is_the_commands_and_nothing_is_left(
    environment: dict[str, str], endpoint_dir: Path, words: tuple[str, ...], code: int
) -> None:
    assert call(environment, *words).returncode == code
    assert leftovers(endpoint_dir) == []


@pytest.mark.parametrize(
    ("options", "words", "says"),
    [
        ((), (), "no command was given"),
        (("--detach",), ("true",), "--detach"),
        (("--while-pid", "1"), ("true",), "--while-pid"),
        (("--threads", "1"), ("true",), "threads"),
        (("--port", "70000"), ("true",), "port"),
        (("--advertise", "two words"), ("true",), "advertise"),
        (("--no-such-option",), ("true",), "--no-such-option"),
        (("--endpoint", "tcp://127.0.0.1:1"), ("true",), "ipc://"),
    ],
)
def test_wrong_options_are_usage_errors_and_the_command_does_not_run(
    environment: dict[str, str],
    endpoint_dir: Path,
    options: tuple[str, ...],
    words: tuple[str, ...],
    says: str,
) -> None:
    done = call(environment, *words, options=options)
    assert done.returncode == 2 and says in done.stderr, done.stderr
    assert [p for p in leftovers(endpoint_dir) if not p.endswith(".log")] == []


def test_an_endpoint_that_is_served_already_is_left_alone(environment: dict[str, str], endpoint: str) -> None:
    with running(endpoint) as other:
        done = call(environment, "true", options=("--endpoint", endpoint))
        assert done.returncode == 5 and "already served" in done.stderr, done.stderr
        assert status_of(endpoint)["pid"] == other.pid


def test_a_worker_that_ends_before_it_answers_is_exit_code_5(
    environment: dict[str, str], endpoint_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "asyncckpt_worker").mkdir()
    (tmp_path / "asyncckpt_worker" / "__init__.py").write_text("raise SystemExit('broken installation')")
    environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{environment['PYTHONPATH']}"
    done = call(environment, "touch", str(tmp_path / "ran"))
    assert done.returncode == 5 and "broken installation" in done.stderr, done.stderr
    assert not (tmp_path / "ran").exists()


# ---- the worker


def test_worker_is_our_child_in_its_own_session_and_inherits_nothing(
    environment: dict[str, str], endpoint: str, endpoint_dir: Path, tmp_path: Path
) -> None:
    secret = os.open(tmp_path / "secret", os.O_RDWR | os.O_CREAT)
    os.set_inheritable(secret, True)
    try:
        command = [*RUN, "--endpoint", endpoint, "--", *recorder(tmp_path / "record", "SIGTERM")]
        run = subprocess.Popen(command, env=environment, pass_fds=[secret], cwd=tmp_path)
    finally:
        os.close(secret)
    try:
        worker = RealWorker(endpoint)
        fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
        assert int(fields[1]) == run.pid
        assert os.getsid(worker.pid) == os.getpgid(worker.pid) == worker.pid
        assert os.readlink(f"/proc/{worker.pid}/cwd") == "/"
        held = fds_of(worker.pid)
        log = str(endpoint_dir / "w.log")
        assert (held["0"], held["1"], held["2"]) == (os.devnull, log, log)
        assert str(tmp_path / "secret") not in held.values()
        blocked = Path(f"/proc/{worker.pid}/status").read_text().partition("SigBlk:")[2].split()[0]
        assert int(blocked, 16) == 0
        wait_until(lambda: lines(tmp_path / "record"), "the command runs")
    finally:
        run.terminate()
        assert run.wait(DEADLINE_S) == 3
    assert not worker.alive
    assert sorted(leftovers(endpoint_dir)) == ["w.log", "w.sock.lock"]


def test_options_reach_the_worker_with_absolute_paths(
    environment: dict[str, str], endpoint: str, tmp_path: Path
) -> None:
    script = shlex.join([sys.executable, "-m", "asyncckpt", "worker", "status", "--json"])
    options = ("--root", "runs", "--log-file", "worker.log", "--log-format", "json", "--endpoint", endpoint)
    done = subprocess.run(
        [*RUN, *options, "--", "sh", "-c", script],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert (report["endpoint"], report["roots"]) == (endpoint, [str(tmp_path / "runs")])
    assert json.loads((tmp_path / "worker.log").read_text().splitlines()[-1])["text"].endswith("drained")


def test_a_worker_that_dies_is_started_again_with_the_same_options(
    environment: dict[str, str], endpoint: str, tmp_path: Path
) -> None:
    options = ("--endpoint", endpoint, "--root", str(tmp_path))
    with begun(environment, *recorder(tmp_path / "record", "SIGTERM"), options=options) as run:
        wait_until(lambda: lines(tmp_path / "record"), "the command runs")
        seen = [RealWorker(endpoint)]
        for number in (signal.SIGKILL, signal.SIGTERM):
            seen[-1].signal(number)
            seen[-1].wait_gone()
            seen.append(RealWorker(endpoint))
        assert len({worker.pid for worker in seen}) == 3
        assert list(seen[-1].status()["roots"]) == [str(tmp_path)]
        snapshot = Snapshot()
        with Client(endpoint) as client:
            client.hello()
            assert (
                client.save(client.allocate(snapshot.slot_nbytes()), snapshot, str(tmp_path / "a"))["phase"]
                == "committed"
            )
            client.goodbye()
        run.terminate()
        said = ended(run, 3)
    assert f"worker {seen[0].pid} was killed by SIGKILL" in said
    assert f"worker {seen[1].pid} exited with code 0" in said


def test_a_worker_whose_run_was_killed_ends_after_the_idle_time_and_not_before(
    environment: dict[str, str], endpoint: str, tmp_path: Path
) -> None:
    options = ("--endpoint", endpoint, "--idle-exit-s", "0.2")
    with begun(environment, *recorder(tmp_path / "record", "SIGTERM"), options=options) as run:
        worker = RealWorker(endpoint)
        time.sleep(0.6)
        assert worker.alive, "it left for idleness while its run lives"
        [child] = [p for p in _children(run.pid) if p != worker.pid]
        run.kill()
        run.wait(DEADLINE_S)
        worker.wait_gone()
        os.kill(child, signal.SIGTERM)
        wait_until(lambda: start_ticks(child) is None, "the command ends")


def _children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# ---- the drain


def test_saves_in_flight_are_finished_after_the_command(environment: dict[str, str], tmp_path: Path) -> None:
    done = call(environment, sys.executable, "-c", SAVES, str(tmp_path / "a"), "1", str(200 << 20))
    assert done.returncode == 0, done.stderr
    assert read_manifest(str(tmp_path / "a"), LocalStore()).step == 5
    assert "unfinished" not in done.stderr


def test_unfinished_saves_are_named_and_the_exit_code_stays_the_commands(
    environment: dict[str, str], endpoint_dir: Path, tmp_path: Path
) -> None:
    save = shlex.join([sys.executable, "-c", SAVES, str(tmp_path / "a"), "2", "1000"])  # the other rank never comes
    done = call(environment, "sh", "-c", f"{save}; exit 9", options=("--drain-timeout-s", "0.5"))
    assert done.returncode == 9
    assert "1 saves are unfinished" in done.stderr and f"step 5 at {tmp_path / 'a'}" in done.stderr, done.stderr
    assert not (tmp_path / "a" / "manifest.json").exists()
    [log] = leftovers(endpoint_dir)  # it is kept, since it tells why
    assert log in done.stderr


def test_a_second_signal_ends_a_drain_that_takes_long(environment: dict[str, str], tmp_path: Path) -> None:
    words = (sys.executable, "-c", SAVES, str(tmp_path / "a"), "2", "1000")
    with begun(environment, *words, options=("--drain-timeout-s", "300")) as run:
        assert run.stderr is not None
        said = [run.stderr.readline() for _ in range(2)]
        assert "waiting up to 300 s until the worker has finished 1 saves" in said[1], said
        run.terminate()
        assert "send the signal again" in run.stderr.readline()
        run.terminate()
        assert "unfinished" in ended(run, 0)


def test_a_worker_that_a_trainer_has_started_in_the_place_of_a_dead_one_is_drained_too(
    environment: dict[str, str], endpoint: str, tmp_path: Path
) -> None:
    patient = "import sys, asyncckpt.cli.commands.run as run; run.RESTART_DELAYS_S = (60.0,); "
    patient += "from asyncckpt.cli import main; sys.exit(main())"
    another = shlex.join([sys.executable, "-m", "asyncckpt_worker", "--endpoint", endpoint, "--detach"])
    save = shlex.join([sys.executable, "-c", SAVES, str(tmp_path / "a"), "1", str(200 << 20)])
    script = f"kill -9 $(cat {tmp_path}/pid); {another} && {save}"
    words = ("sh", "-c", f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done; {script}")
    command = [sys.executable, "-c", patient, "run", "--endpoint", endpoint, "--", *words]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as run:
        worker = RealWorker(endpoint)
        (tmp_path / "pid").write_text(str(worker.pid))
        (tmp_path / "go").touch()
        said = ended(run, 0)
    assert read_manifest(str(tmp_path / "a"), LocalStore()).step == 5 and "unfinished" not in said
    assert not Path(socket_path(endpoint)).exists(), "the other one has exited"


# ---- the log


def test_a_warning_is_told_of_and_both_logs_stay_also_where_the_older_one_has_it(
    environment: dict[str, str], endpoint_dir: Path
) -> None:
    rotate = 'log="${ASYNCCKPT_ENDPOINT#ipc://}"; log="${log%.sock}.log"; mv "$log" "$log.1"; echo new >"$log"; '
    line = "2026-01-02 03:04:05.678 WARNING the disk is slow"
    done = call(environment, "sh", "-c", f'{rotate} echo "{line}" >>"$log.1"; exit 7')
    assert done.returncode == 7 and "has warnings or errors" in done.stderr, done.stderr
    assert sorted(Path(name).suffix for name in leftovers(endpoint_dir)) == [".1", ".log"]


def test_warnings_of_earlier_runs_in_a_log_that_is_named_are_not_told_again(
    environment: dict[str, str], tmp_path: Path
) -> None:
    log = tmp_path / "worker.log"
    log.write_text("2026-01-02 03:04:05.678 WARNING the disk is slow\n")
    done = call(environment, "true", options=("--log-file", str(log)))
    assert done.returncode == 0 and "trouble" not in done.stderr, done.stderr
    assert "drained" in log.read_text()


def test_a_log_may_be_a_pipe_whose_reader_gets_all_of_it(environment: dict[str, str], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", str(tmp_path / "pipe")], stdout=subprocess.PIPE, text=True) as reader:
        done = call(environment, "true", options=("--log-file", str(tmp_path / "pipe")))
        assert done.returncode == 0, done.stderr
        assert "drained" in reader.communicate(timeout=DEADLINE_S)[0]


def test_what_the_command_leaves_in_the_place_of_the_log_does_not_cost_its_exit_code(
    environment: dict[str, str],
) -> None:
    script = 'log="${ASYNCCKPT_ENDPOINT#ipc://}"; log="${log%.sock}.log"; rm "$log"; mkdir "$log"; exit 7'
    done = call(environment, "sh", "-c", script)
    assert done.returncode == 7 and "asyncckpt run: [Errno" not in done.stderr, done.stderr


# ---- signals


def test_every_signal_is_passed_on_once(environment: dict[str, str], tmp_path: Path) -> None:
    record = tmp_path / "record"
    traps = "".join(f"trap 'echo {n.name} >>{record}' {n.name.removeprefix('SIG')}; " for n in SIGNALS[1:])
    script = f"trap 'echo SIGINT >>{record}; exit 3' INT; {traps} echo ready >>{record}; while :; do sleep 0.05; done"
    with begun(environment, "sh", "-c", script) as run:
        expected = ["ready"]
        for number in (*SIGNALS[1:], signal.SIGINT):
            wait_until(lambda: lines(record) == expected, f"{expected} is recorded")
            run.send_signal(number)
            expected.append(number.name)
        ended(run, 3)
    assert lines(record) == expected


@contextlib.contextmanager
def on_a_terminal(environment: dict[str, str], *words: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start a program as the leader of a session with a terminal of its own; yields it and the terminal's other end."""
    ours, theirs = pty.openpty()
    take = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", take, *words]
    process = subprocess.Popen(
        command, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        with contextlib.suppress(OSError):
            os.close(ours)


def test_the_terminals_interrupt_is_not_passed_on_a_second_time(environment: dict[str, str], tmp_path: Path) -> None:
    record = tmp_path / "record"
    with on_a_terminal(environment, *RUN, "--", *recorder(record, "SIGQUIT")) as (run, terminal):
        wait_until(lambda: lines(record) == ["ready"], "the command runs")
        os.write(terminal, b"\x03")
        wait_until(lambda: lines(record) == ["ready", "SIGINT"], "the interrupt arrives")
        time.sleep(0.2)
        os.write(terminal, b"\x1c")
        assert run.wait(DEADLINE_S) == 3
    assert lines(record) == ["ready", "SIGINT", "SIGQUIT"]


def test_a_hangup_that_only_the_sessions_leader_gets_is_passed_on(environment: dict[str, str], tmp_path: Path) -> None:
    record = tmp_path / "record"
    with on_a_terminal(environment, *RUN, "--", *recorder(record, "SIGHUP")) as (run, terminal):
        wait_until(lambda: lines(record) == ["ready"], "the command runs")
        os.close(terminal)
        assert run.wait(DEADLINE_S) == 3
    assert lines(record) == ["ready", "SIGHUP"]


def test_a_signal_while_the_worker_starts_ends_it(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "asyncckpt_worker").mkdir()
    (tmp_path / "asyncckpt_worker" / "__init__.py").write_text("")
    (tmp_path / "asyncckpt_worker" / "cli.py").write_text(
        f"import time; open({str(tmp_path / 'began')!r}, 'w').close(); time.sleep(60)"
    )
    environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{environment['PYTHONPATH']}"
    with begun(environment, "touch", str(tmp_path / "ran")) as run:
        wait_until((tmp_path / "began").exists, "the worker is about to start")
        run.terminate()
        ended(run, 128 + signal.SIGTERM)
    assert not (tmp_path / "ran").exists()


# ---- the other way to start one


def test_a_directory_that_is_called_like_the_package_hides_no_worker(
    environment: dict[str, str], endpoint: str, tmp_path: Path
) -> None:
    for name in ("asyncckpt", "asyncckpt_worker"):
        (tmp_path / name).mkdir()
    installed = (
        "import sys; sys.path.remove(''); from asyncckpt.cli import main; sys.exit(main())"  # as the script does
    )
    command = [sys.executable, "-c", installed, "worker", "start", "--endpoint", endpoint, "--idle-exit-s", "0.05"]
    environment.pop("PYTHONPATH")
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0 and "idle" in done.stderr, done.stderr
