"""A real worker, as others see it: service manager, Prometheus, `events.jsonl`, `asyncckpt top` and `report`."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pathlib
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from real_worker import DEADLINE_S, RealWorker, running, wait_until, written

from asyncckpt import AsyncCheckpointer, cli
from asyncckpt.cli.commands.top import ANSWER_WITHIN_S, ASK_EVERY_S
from asyncckpt.client.slot_stream import SlotStream
from asyncckpt.maintenance.event_log import EVENTS_NAME, read_events
from asyncckpt.staging import cpu_copy, memcopy
from asyncckpt_worker.service.observers import Supervisor

STATE = {"w": torch.arange(300_000.0)}


def json_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    capsys.readouterr()
    assert cli.main([str(a) for a in arguments]) == 0
    return json.loads(capsys.readouterr().out)


# ---- the service manager


class Manager:
    """The receiving end of sd_notify(3)."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.socket.settimeout(DEADLINE_S)
        self.heard: list[str] = []

    def hears(self, word: str) -> str:
        """Wait for a message with this word."""
        while True:
            self.heard.append(self.socket.recv(4096).decode())
            if word in self.heard[-1].splitlines():
                return self.heard[-1]

    def close(self) -> None:
        self.socket.close()
        if not self.address.startswith("@"):
            os.unlink(self.address)


@contextlib.contextmanager
def started(command: list[str], environ: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process, killed at the end."""
    with subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, endpoint: str) -> Iterator[tuple[str, Manager]]:
    """An address as systemd gives it, and who listens there."""
    path = f"{os.path.dirname(endpoint.removeprefix('ipc://'))}/notify"
    address = path if request.param == "path" else f"@asyncckpt-test-{os.getpid()}-{time.monotonic_ns()}"
    found = Manager(address)
    yield address, found
    found.close()


def test_a_service_is_ready_when_trainers_can_connect_and_says_that_it_lives_and_stops(
    manager: tuple[str, Manager], endpoint: str
) -> None:
    address, heard = manager
    environ = {**os.environ, "NOTIFY_SOCKET": address, "WATCHDOG_USEC": "400000"}
    command = [sys.executable, "-m", "asyncckpt_worker", "--endpoint", endpoint]
    with started(command, environ) as process:
        assert f"STATUS=serving {endpoint}" in heard.hears("READY=1")
        with AsyncCheckpointer(endpoint=endpoint):
            heard.hears("WATCHDOG=1")
            heard.hears("WATCHDOG=1")
        process.send_signal(signal.SIGTERM)
        heard.hears("STOPPING=1")
        assert process.wait(DEADLINE_S) == 0
    assert not [text for text in heard.heard if text.startswith("READY")][1:], "ready once"


def test_a_service_waits_for_the_end_of_a_worker_that_was_faster(endpoint: str) -> None:
    address = f"@asyncckpt-test-{os.getpid()}-{time.monotonic_ns()}"
    environ = {**os.environ, "NOTIFY_SOCKET": address}
    command = [sys.executable, "-m", "asyncckpt_worker", "--endpoint", endpoint, "--when-free"]
    with (
        contextlib.closing(Manager(address)) as heard,
        running(endpoint) as first,
        started(command, environ) as process,
    ):
        assert "by another worker" in heard.hears("READY=1")
        assert RealWorker(endpoint).pid == first.pid, "which serves on"
        first.kill()
        heard.hears(f"STATUS=serving {endpoint}")
        assert RealWorker(endpoint).pid == process.pid
        process.terminate()
        assert process.wait(DEADLINE_S) == 0


def test_a_worker_that_a_trainer_starts_does_not_speak_for_it(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"@asyncckpt-test-{os.getpid()}-{time.monotonic_ns()}"
    heard = Manager(address)
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    with contextlib.closing(heard), running(endpoint) as worker:
        worker.stop()
        heard.socket.setblocking(False)
        with pytest.raises(BlockingIOError):
            heard.socket.recv(4096)


def test_a_manager_that_is_gone_costs_nothing(endpoint: str) -> None:
    supervisor = Supervisor({"NOTIFY_SOCKET": "/nowhere/notify", "WATCHDOG_USEC": "x"}, os.getpid())
    supervisor.ready(endpoint)
    supervisor.stopping("")
    assert supervisor.interval_s is None


@pytest.mark.parametrize(
    ("environ", "interval_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "3000000"}, None),
        ({"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "3000000"}, 1.5),
        ({"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "5"}, 1.5),
        ({"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "6"}, None),
        ({"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "0"}, None),
    ],
)
def test_the_watchdog_is_told_at_half_its_time_if_it_watches_us(environ: dict[str, str], interval_s: float) -> None:
    assert Supervisor(environ, 5).interval_s == interval_s


# ---- Prometheus, top, events, report


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RealWorker, pathlib.Path]]:
    """A worker that is looked at in every way, and where two saves and a failed one have gone."""
    root = tmp_path_factory.mktemp("seen") / "runs"
    link = pathlib.Path(f"/tmp/ackpt-looked-{os.getpid()}")
    link.mkdir(mode=0o700)
    try:
        with running(f"ipc://{link}/w.sock", "--events", "--metrics", "127.0.0.1:0") as worker:
            with AsyncCheckpointer(endpoint=worker.endpoint, events=True) as checkpointer:
                optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(8))], lr=0.1)
                checkpointer.attach(optimizer)
                for step in (10, 20):
                    optimizer.step()
                    optimizer.step()
                    written(checkpointer.save({**STATE, "step": step}, root / f"step-{step}"))
                with pytest.raises(Exception, match="committed"):
                    written(checkpointer.save(STATE, root / "step-10", step=30))
            yield worker, root
    finally:
        for path in link.iterdir():
            path.unlink()
        link.rmdir()


def get(worker: RealWorker, target: str = "/metrics", **options: Any) -> tuple[int, str, str]:
    port = worker.status()["metrics_port"]
    request = urllib.request.Request(f"http://127.0.0.1:{port}{target}", **options)
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as reply:
            return reply.status, reply.headers["Content-Type"], reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, "", ""


def test_prometheus_is_told_what_has_happened(seen: tuple[RealWorker, pathlib.Path]) -> None:
    worker, _ = seen
    wait_until(lambda: 'asyncckpt_saves_total{outcome="committed"} 2.0\n' in get(worker)[2], "the page is of now")
    status, kind, text = get(worker)
    assert status == 200 and kind.startswith("text/plain; version=0.0.4")
    assert 'asyncckpt_saves_total{outcome="failed"} 1.0\n' in text
    assert re.search(r'asyncckpt_last_committed_step\{run="[0-9a-f]{12}"\} 20.0\n', text)
    assert "asyncckpt_write_seconds_count 2.0\n" in text and "asyncckpt_internal_errors_total 0.0\n" in text


@pytest.mark.parametrize("limit_nbytes", [None, 24 << 20], ids=["whole", "ring"])
def test_top_shows_how_far_the_copy_of_a_rank_has_come(
    limit_nbytes: int | None,
    worker: RealWorker,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares: list[float] = []

    def look() -> None:
        (row,) = json_of(capsys, "top", "--once", "--json", "--endpoint", worker.endpoint)["ranks"]
        if row["phase"] == "open":
            shares.append(row["staged"])

    def one_after_the_other(moves: memcopy.CopyQueue, careful: bool) -> None:
        while moves:
            ctypes.memmove(*moves.popleft())
            look()

    note = SlotStream.note_staged
    monkeypatch.setattr(SlotStream, "note_staged", lambda self, nbytes: (note(self, nbytes), look()))
    monkeypatch.setattr(cpu_copy, "copy_all", one_after_the_other)
    monkeypatch.setattr(cpu_copy, "MARK_NBYTES", 8 << 20)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    state = {f"w{n}": torch.zeros(2 << 20) for n in range(5)}
    with AsyncCheckpointer(endpoint=worker.endpoint, arena_limit_bytes=limit_nbytes) as checkpointer:
        checkpointer.save(state, tmp_path / "a", step=1).written.result(DEADLINE_S)
    assert shares == sorted(shares) and shares[-1] < 1
    assert any(0.1 < share < 0.9 for share in shares), shares


def test_top_shows_runs_and_ranks_and_its_json_is_one_line(
    seen: tuple[RealWorker, pathlib.Path], capsys: pytest.CaptureFixture[str]
) -> None:
    worker, root = seen
    with AsyncCheckpointer(endpoint=worker.endpoint) as checkpointer:
        written(checkpointer.save(STATE, root.parent / "other" / "a", step=70))
        assert cli.main(["top", "--once", "--endpoint", worker.endpoint]) == 0
        out = capsys.readouterr().out
        found = json_of(capsys, "top", "--once", "--json", "--endpoint", worker.endpoint)
    header, row = [re.split("  +", line) for line in out.splitlines()[-2:]]
    shown = dict(zip(header, row, strict=True))
    assert (shown["RANK"], shown["STEP"], shown["PHASE"], shown["STAGED"]) == ("0/1", "70", "committed", "100%")
    assert (shown["WRITTEN"], shown["DURABLE"], shown["SLOTS"]) == ("100%", "70", "1")
    assert f"step 20, {root}/step-20"[:8] in out and "3 committed, 1 failed" in out
    (rank,) = found["ranks"]
    assert (rank["step"], rank["durable_step"], rank["world_size"]) == (70, 70, 1)
    assert {run["committed_step"] for run in found["runs"]} == {20, 70}


def test_top_of_a_worker_that_is_not_there_is_exit_code_5(endpoint: str) -> None:
    assert cli.main(["top", "--once", "--endpoint", endpoint]) == 5


@contextlib.contextmanager
def top(*arguments: str) -> Iterator[Callable[[Callable[[str], bool]], str]]:
    """Run `asyncckpt top`; yields what returns the next of its lines that holds something."""
    command = [sys.executable, "-m", "asyncckpt", "top", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    reader = threading.Thread(target=lambda: [lines.put(line) for line in process.stdout or ()], daemon=True)
    reader.start()

    def next_line(holds: Callable[[str], bool]) -> str:
        deadline = time.monotonic() + DEADLINE_S
        while not holds(line := lines.get(timeout=max(0.1, deadline - time.monotonic()))):
            pass
        return line

    try:
        yield next_line
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stdout.close()


@pytest.mark.parametrize("interval", ["0.1", "3600"])
def test_top_waits_for_a_worker_marks_what_is_stale_and_goes_on_with_the_next_one(endpoint: str, interval: str) -> None:
    def says(state: str) -> Callable[[str], bool]:
        return lambda line: json.loads(line)["state"] == state

    with top("--json", "--interval", interval, "--endpoint", endpoint) as next_line:
        assert json.loads(next_line(says("waiting")))["pid"] is None
        with running(endpoint) as worker:
            first = json.loads(next_line(says("answers")))
            with worker.frozen():
                stale = json.loads(next_line(says("stale")))
                assert stale["pid"] == first["pid"] and stale["silent_s"] > 0
            next_line(says("answers"))
            worker.kill()
            worker.wait_gone()
            next_line(says("stale"))
        with running(endpoint):
            assert json.loads(next_line(says("answers")))["pid"] != first["pid"]


def test_top_says_in_words_what_it_waits_for_and_what_is_stale(endpoint: str) -> None:
    with top("--interval", "0.1", "--endpoint", endpoint) as next_line:
        assert "waiting" in next_line(lambda line: endpoint in line)
        with running(endpoint) as worker:
            next_line(lambda line: line.startswith(f"worker {worker.status()['pid']}"))
            worker.kill()
            worker.wait_gone()
            next_line(lambda line: line.startswith("STALE"))


def test_what_is_stale_is_marked_within_three_seconds() -> None:
    assert ASK_EVERY_S + ANSWER_WITHIN_S < 3


def test_the_events_tell_of_each_save_from_both_sides(seen: tuple[RealWorker, pathlib.Path]) -> None:
    _, root = seen
    wait_until(lambda: sum(e["event"] == "save" for e in read_events(str(root))) == 3, "the trainer's lines are there")
    wait_until(lambda: any(e["event"] == "failed" for e in read_events(str(root))), "the worker's lines are there")
    events = list(read_events(str(root)))
    mine = [e for e in events if e["step"] == 20]
    names = [e["event"] for e in mine]
    assert {"begun", "sealed", "durable", "committed", "save", "steps"} == set(names) and len(names) == 6
    (steps,) = [e for e in mine if e["event"] == "steps"]
    assert (steps["from_step"], steps["steps"]) == (10, 2) and steps["seconds"] >= steps["longest_s"] > 0
    (save,) = [e for e in mine if e["event"] == "save"]
    assert save["outcome"] == "written" and save["stall_s"] >= save["seconds"]["plan"] and "write" in save["seconds"]
    (failed,) = [e for e in events if e["event"] == "save" and e["step"] == 30]
    assert failed["outcome"] == "failed" and "committed" in failed["error"]


def test_a_report_is_made_of_them(seen: tuple[RealWorker, pathlib.Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, root = seen
    found = json_of(capsys, "report", root, "--json")
    assert [(s["step"], s["outcome"]) for s in found["saves"]] == [(10, "committed"), (20, "committed"), (30, "failed")]
    assert all(s["stall_s"] > 0 for s in found["saves"]) and found["saves"][1]["write_s"] > 0
    assert len(found["recovery_points"]) == 2 and len(found["spans"]) == 2
    assert cli.main(["report", str(root)]) == 0
    text = (root / "report.html").read_text()
    assert text.count("<svg") == 5 and "No data." not in text


def test_without_events_no_file_is_made_and_a_report_knows_what_the_manifests_say(
    worker: RealWorker, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with AsyncCheckpointer(endpoint=worker.endpoint) as checkpointer:
        written(checkpointer.save(STATE, tmp_path / "a", step=1))
    assert [p.name for p in tmp_path.iterdir()] == ["a"] and worker.status()["metrics_port"] == 0
    (save,) = json_of(capsys, "report", tmp_path, "--json")["saves"]
    assert (save["outcome"], save["step"], save["stall_s"]) == ("committed", 1, None)
    assert cli.main(["report", str(tmp_path)]) == 0
    assert cli.main(["report", str(tmp_path / "a" / "nothing")]) == 4


def test_events_that_cannot_be_written_cost_no_save(worker: RealWorker, tmp_path: pathlib.Path) -> None:
    (tmp_path / EVENTS_NAME).mkdir()
    with AsyncCheckpointer(endpoint=worker.endpoint, events=True) as checkpointer:
        for step in range(3):
            written(checkpointer.save(STATE, tmp_path / f"s{step}", step=step))
    assert list((tmp_path / EVENTS_NAME).iterdir()) == []


def test_run_tells_its_worker_and_its_command_of_events(tmp_path: pathlib.Path) -> None:
    script = "import os; print(os.environ['ASYNCCKPT_EVENTS'])"
    command = [sys.executable, "-m", "asyncckpt", "run", "--events", "--", sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
