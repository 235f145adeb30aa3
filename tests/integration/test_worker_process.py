"""The worker as a process: how fast it starts, what it weighs, how it is launched and told to stop."""

from __future__ import annotations

import json
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from asyncckpt.client import launcher
from asyncckpt.errors import WorkerUnavailableError
from asyncckpt.protocol import messages as m
from asyncckpt.protocol.identity import start_ticks
from asyncckpt.storage.catalog import read_manifest
from asyncckpt.storage.local import LocalStore
from asyncckpt_worker import cli
from tests.leak_guard import fds_of
from tests.torch_free_client import Client, Snapshot, new_save_id

ROOT = pathlib.Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / '.typing'}"}
MAX_MODULES = 400
"""359 with Python 3.11, of which 68 are there before the first line."""
MAX_RSS_NBYTES = 40 << 20


def start(
    endpoint: str, *options: str, module: tuple[str, ...] = ("-m", "asyncckpt_worker")
) -> subprocess.Popen[bytes]:
    command = [sys.executable, *module, "--endpoint", endpoint, *options]
    return subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE)


def slots_nbytes(pid: int) -> int:
    """Return how much of a process's resident memory is shared: a worker's slots, also those that it keeps."""
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssShmem:"))


def end(process: subprocess.Popen[bytes]) -> str:
    """End a worker and return what it wrote to stderr."""
    process.terminate()
    try:
        _, said = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        _, said = process.communicate()
    return said.decode()


@pytest.fixture
def worker(endpoint: str) -> Iterator[subprocess.Popen[bytes]]:
    """A worker in the foreground."""
    process = start(endpoint)
    yield process
    end(process)


def status(endpoint: str) -> dict[str, Any]:
    with Client(endpoint) as client:
        return dict(client.call(m.Status(id=client.next_id()), resend_s=0.1).report)


def wait_gone(pid: int, timeout_s: float = 60.0) -> None:
    """Wait until a process that is not our child is gone; a zombie that init has not reaped yet counts as gone."""
    deadline = time.monotonic() + timeout_s
    while start_ticks(pid) is not None:
        assert time.monotonic() < deadline, f"process {pid} stays"
        time.sleep(0.01)


def test_worker_imports_little_and_never_torch_or_numpy(endpoint: str, tmp_path: pathlib.Path) -> None:
    """Its start is what it imports; `python -m benchmarks save_load` measures how long that takes."""
    program = (
        "import sys; from asyncckpt_worker.cli import main; code = main(sys.argv[1:]); "
        "forbidden = {'torch', 'numpy', 'asyncio'} & set(sys.modules); "
        "print(len(sys.modules), sorted(forbidden), file=sys.stderr); sys.exit(code)"
    )
    process = start(endpoint, module=("-c", program))
    snapshot = Snapshot()
    with Client(endpoint) as client:
        client.hello()
        client.save(client.allocate(snapshot.slot_nbytes()), snapshot, str(tmp_path / "a"))
        status(endpoint)
        client.goodbye()
    count, _, forbidden = end(process).splitlines()[-1].partition(" ")
    assert int(count) <= MAX_MODULES and forbidden == "[]"


def test_worker_without_slots_is_small_and_does_not_grow_with_saves(
    worker: subprocess.Popen[bytes], endpoint: str, tmp_path: pathlib.Path
) -> None:
    process = status(endpoint)["process"]
    assert process["rss_nbytes"] <= MAX_RSS_NBYTES
    snapshot = Snapshot(nbytes=8 << 20)
    with Client(endpoint) as client:
        client.hello()
        slot = client.allocate(snapshot.slot_nbytes(), populate=True)
        for step in range(10):
            client.save(slot, snapshot, str(tmp_path / f"step-{step}"))
        client.goodbye()
    assert status(endpoint)["process"]["rss_nbytes"] - slots_nbytes(worker.pid) <= MAX_RSS_NBYTES


def test_second_worker_says_that_the_endpoint_is_taken(worker: subprocess.Popen[bytes], endpoint: str) -> None:
    first = status(endpoint)["instance"]
    for options in ((), ("--detach",)):
        second = start(endpoint, *options)
        _, said = second.communicate(timeout=60)
        assert second.returncode == 1 and b"already served" in said, said
    assert status(endpoint)["instance"] == first


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_drains_finishes_saves_and_leaves_no_socket(
    worker: subprocess.Popen[bytes],
    endpoint: str,
    endpoint_dir: pathlib.Path,
    tmp_path: pathlib.Path,
    number: signal.Signals,
) -> None:
    snapshot = Snapshot(nbytes=16 << 20)
    with Client(endpoint) as client:
        client.hello()
        slot = client.allocate(snapshot.slot_nbytes(), populate=True)
        save_id = new_save_id()
        client.stage(slot, snapshot, save_id, str(tmp_path / "a"))
        client.submit(slot, save_id)
        worker.send_signal(number)
        assert worker.wait(60) == 0
        while client.receive(0.2) is not None:
            pass
        assert client.pushed[-1]["phase"] == "committed", "the last word was lost"
    read_manifest(str(tmp_path / "a"), LocalStore())
    assert [p.name for p in endpoint_dir.iterdir()] == ["w.sock.lock"]


def test_unfinished_saves_at_the_drains_end_are_an_exit_code(endpoint: str, tmp_path: pathlib.Path) -> None:
    process = start(endpoint, "--drain-timeout-s", "0")
    snapshot = Snapshot()
    with Client(endpoint, rank=0, world_size=2) as client:  # the other rank never comes: it cannot be committed
        client.hello()
        slot = client.allocate(snapshot.slot_nbytes())
        save_id = new_save_id()
        client.stage(slot, snapshot, save_id, str(tmp_path / "a"))
        client.submit(slot, save_id)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 3 and b"unfinished" in said
    assert not (tmp_path / "a" / "manifest.json").exists()


def test_idle_worker_exits_with_zero(endpoint: str) -> None:
    process = start(endpoint, "--idle-exit-s", "0.05")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0 and b"idle" in said


def test_json_log_has_save_and_session_on_every_line(endpoint: str, tmp_path: pathlib.Path) -> None:
    process = start(endpoint, "--log-format", "json")
    snapshot = Snapshot()
    with Client(endpoint) as client:
        client.hello()
        row = client.save(client.allocate(snapshot.slot_nbytes()), snapshot, str(tmp_path / "a"), step=4)
        client.goodbye()
    lines = [json.loads(line) for line in end(process).splitlines()]
    assert all({"time", "level", "text", "save_id", "session"} <= set(line) for line in lines)
    (committed,) = [line for line in lines if line["text"] == f"save of step 4 to {tmp_path / 'a'}: committed"]
    assert (committed["save_id"], committed["session"], committed["step"]) == (row["save_id"], client.session, 4)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--endpoint", "tcp://127.0.0.1:1"), "ipc://"),
        (("--threads", "-1"), "threads"),
        (("--idle-exit-s", "nan"), "--idle-exit-s"),
        (("--keep-snapshots-s", "-1"), "--keep-snapshots-s"),
    ],
)
def test_wrong_options_are_usage_errors(
    endpoint: str, capfd: pytest.CaptureFixture[str], options: tuple[str, ...], word: str
) -> None:
    try:
        ended = cli.main(["--endpoint", endpoint, *options])
    except SystemExit as exit_:
        ended = exit_.code  # type: ignore[assignment]
    assert ended == 2 and word in capfd.readouterr().err


def test_help_shows_an_example_and_version_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    for option, word in (("--help", "example:"), ("--version", "asyncckpt-worker 0")):
        with pytest.raises(SystemExit) as ended:
            cli.main([option])
        assert not ended.value.code and word in capsys.readouterr().out


# ---- the launcher


@pytest.fixture
def launched(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A worker that the launcher started, by its status report; drained at the end."""
    monkeypatch.setenv("PYTHONPATH", os.path.relpath(ROOT) + os.pathsep + os.path.relpath(ROOT / ".typing"))
    launcher.start_worker(endpoint)
    report = status(endpoint)
    yield report
    with Client(endpoint) as client:
        client.call(m.Drain(id=client.next_id(), now=True))
    wait_gone(report["pid"])


def test_launched_worker_is_nobodys_child_in_its_own_session_with_lower_priority_and_is_launched_once(
    launched: dict[str, Any], endpoint: str, endpoint_dir: pathlib.Path
) -> None:
    pid = launched["pid"]
    launcher.start_worker(endpoint)
    assert status(endpoint)["pid"] == pid
    assert launched["process"]["nice"] >= min(19, os.nice(0) + 5)
    assert os.getsid(pid) != os.getsid(0) and os.getpgid(pid) != os.getpgid(0)
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    assert int(fields[1]) != os.getpid()
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    fds = {n: os.readlink(f"/proc/{pid}/fd/{n}") for n in ("0", "1", "2")}
    assert fds == {"0": "/dev/null", "1": str(endpoint_dir / "w.log"), "2": str(endpoint_dir / "w.log")}
    assert "listens" in (endpoint_dir / "w.log").read_text()


def test_launched_worker_inherits_no_fd(endpoint: str, tmp_path: pathlib.Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("")
    fd = os.open(secret, os.O_RDONLY)
    os.set_inheritable(fd, True)
    command = [sys.executable, "-m", "asyncckpt_worker", "--endpoint", endpoint, "--detach"]
    try:
        subprocess.run(command, env=ENVIRONMENT, close_fds=False, check=True, timeout=60)
    finally:
        os.close(fd)
    pid = status(endpoint)["pid"]
    held = set(fds_of(pid).values())
    assert str(secret) not in held
    os.kill(pid, signal.SIGTERM)
    wait_gone(pid)


@pytest.mark.parametrize("cwd", ["there", "removed"])
def test_a_launched_worker_finds_what_its_starter_finds_and_does_not_look_in_the_root_directory(
    endpoint: str, tmp_path: pathlib.Path, cwd: str
) -> None:
    """As where packages lie in a directory that the program itself adds: notebooks, `pip install --target`."""
    (tmp_path / "cwd").mkdir()
    (tmp_path / "added").mkdir()
    (tmp_path / "added" / "asyncckpt").symlink_to(ROOT / "asyncckpt")
    (tmp_path / "added" / "asyncckpt_worker").symlink_to(ROOT / "worker")
    (tmp_path / "noted").mkdir()
    (tmp_path / "noted" / "sitecustomize.py").write_text(
        "import atexit, json, os, sys\n"
        "atexit.register(lambda: open(os.environ['NOTE'], 'w').write(json.dumps(sys.path)))\n"
    )
    paths = [str(tmp_path / "added"), *(p for p in sys.path if "site-packages" in p)]
    code = (
        f"import os, sys\nsys.path += {paths!r}\nfrom asyncckpt.client import launcher\n"
        f"if {cwd == 'removed'}: os.rmdir(os.getcwd())\n"
        f"os.environ['NOTE'] = {str(tmp_path / 'note')!r}\n"
        "launcher.start_worker(sys.argv[1], options=('--idle-exit-s', '0.1'))\n"
        "os.environ['NOTE'] = os.devnull\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'noted'}:relative", "NOTE": os.devnull}
    command = [sys._base_executable, "-c", code, endpoint]  # type: ignore[attr-defined]
    subprocess.run(command, env=environment, cwd=tmp_path / "cwd", check=True, timeout=60)
    deadline = time.monotonic() + 60
    while not (tmp_path / "note").exists() or not (tmp_path / "note").read_text():
        assert time.monotonic() < deadline, "the worker has not ended"
        time.sleep(0.01)
    found = json.loads((tmp_path / "note").read_text())
    assert found[0] == str(tmp_path / "noted") and str(tmp_path / "added") in found
    assert not {"", "/"}.intersection(found)
    assert (str(tmp_path / "cwd") in found) == (cwd == "there")


def test_launch_that_fails_says_why(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / '.typing'}")
    with pytest.raises(WorkerUnavailableError, match="threads"):
        launcher.start_worker(endpoint, options=("--threads", "-5"))


def test_a_worker_that_is_killed_while_it_starts_is_started_again_twice(
    endpoint: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / '.typing'}")
    starts, fake = tmp_path / "starts", tmp_path / "python"

    def killed(times: int) -> None:
        starts.unlink(missing_ok=True)
        text = f"#!/bin/sh\necho >> {starts}\n[ $(wc -l < {starts}) -gt {times} ] || kill -9 $$\n"
        fake.write_text(f'{text}exec {python} "$@"\n')

    python = sys.executable
    fake.touch(0o700)
    monkeypatch.setattr(sys, "executable", str(fake))
    killed(3)
    with pytest.raises(WorkerUnavailableError, match="exit code -9"):
        launcher.start_worker(endpoint)
    killed(2)
    launcher.start_worker(endpoint)
    pid = status(endpoint)["pid"]
    with Client(endpoint) as client:
        client.call(m.Drain(id=client.next_id(), now=True))
    wait_gone(pid)


@pytest.mark.parametrize("executable", [None, ""])
def test_a_python_that_does_not_know_its_executable_says_so(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, executable: str | None
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(WorkerUnavailableError, match=r"sys\.executable is empty"):
        launcher.start_worker(endpoint)


def test_started_worker_keeps_neither_cores_nor_signal_mask_nor_limits_of_its_trainer(
    endpoint: str, endpoint_dir: pathlib.Path
) -> None:
    cores = os.sched_getaffinity(0)
    code = (
        "import os, resource, signal, sys\nfrom asyncckpt.client import launcher\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "launcher.start_worker(sys.argv[1])\n"
    )
    subprocess.run([sys.executable, "-c", code, endpoint], env=ENVIRONMENT, check=True, timeout=60)
    pid = status(endpoint)["pid"]
    try:
        assert os.sched_getaffinity(pid) >= cores
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        assert soft == hard
        blocked = re.search(r"^SigBlk:\s*(\w+)", pathlib.Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        assert blocked and int(blocked[1], 16) == 0
    finally:
        with Client(endpoint) as client:
            client.call(m.Drain(id=client.next_id(), now=True))
        wait_gone(pid)
