"""A real worker in this process: real socket, real slots, real files; faults come in through the storage seam."""

from __future__ import annotations

import errno
import os
import pathlib
import resource
import secrets
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq
from real_worker import RealWorker

from asyncckpt.errors import (
    CommitTimeoutError,
    ProtocolError,
    SaveFailedError,
    UnknownSaveError,
    WorkerUnavailableError,
    from_wire,
)
from asyncckpt.format.names import MANIFEST_NAME, SaveId
from asyncckpt.protocol import messages as m
from asyncckpt.protocol.codec import MAX_FRAME_NBYTES, encode
from asyncckpt.protocol.identity import POLL_S
from asyncckpt.storage.catalog import read_manifest
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import LocalStore
from asyncckpt_worker.config import WorkerConfig
from asyncckpt_worker.core import saves
from asyncckpt_worker.core.model import Save
from asyncckpt_worker.core.tables import Tables
from asyncckpt_worker.service.daemon import Daemon
from asyncckpt_worker.service.process_watch import Liveness
from tests.torch_free_client import Client, ClientSlot, Order, Snapshot, encode_order, new_save_id


class Running:
    """A daemon in a thread, and what `run` returned."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.complete: bool | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        self.complete = self.daemon.run()

    def join(self, timeout_s: float = 60.0) -> bool | None:
        """Wait until it has exited, and return whether it was complete."""
        self.thread.join(timeout_s)
        assert not self.thread.is_alive(), "the daemon did not exit"
        return self.complete


@contextmanager
def running(
    endpoint: str, files: Files | None = None, liveness: Liveness | None = None, **changes: Any
) -> Iterator[Running]:
    """Run a daemon for the time of a `with` block."""
    worker = Running(Daemon(WorkerConfig(endpoint=endpoint, **changes), files, liveness=liveness))
    try:
        yield worker
    finally:
        worker.daemon.stop(immediately=True)
        worker.join()


@contextmanager
def session(endpoint: str, snapshot: Snapshot | None = None) -> Iterator[tuple[Client, ClientSlot, Snapshot]]:
    """Open a session with one slot."""
    snapshot = snapshot or Snapshot()
    with Client(endpoint) as client:
        client.hello()
        yield client, client.allocate(snapshot.slot_nbytes()), snapshot


def eventually(check: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait until `check()` holds."""
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


def status(client: Client) -> dict[str, Any]:
    return dict(client.call(m.Status(id=client.next_id())).report)


# ---- the good case


@pytest.mark.parametrize("n_parts", [1, 3])
def test_save_commits_what_was_staged(endpoint: str, tmp_path: pathlib.Path, n_parts: int) -> None:
    path = str(tmp_path / "run" / "step-1")
    snapshot = Snapshot(n_tensors=5, nbytes=3_000_000, n_parts=n_parts)
    with running(endpoint), session(endpoint, snapshot) as (client, slot, _):
        row = client.save(slot, snapshot, path, step=1, metadata='{"loss": 0.5}')
    assert row["phase"] == "committed"
    assert row["report"]["nbytes"] > 3_000_000 and row["report"]["seconds_write"] > 0
    manifest = read_manifest(path, LocalStore())
    assert (manifest.step, manifest.metadata, manifest.world_size) == (1, {"loss": 0.5}, 1)
    shards = sorted(pathlib.Path(path).glob("*.safetensors"))
    assert [s.read_bytes() for s in shards] == [bytes(image) for image in snapshot.images]


def test_save_without_fsync_flushes_nothing(endpoint: str, tmp_path: pathlib.Path) -> None:
    class Counting(Files):
        flushed = 0

        def fsync(self, fd: int) -> None:
            self.flushed += 1

    files = Counting()
    with running(endpoint, files), session(endpoint) as (client, slot, snapshot):
        client.save(slot, snapshot, str(tmp_path / "a" / "b"), fsync=False)
        assert files.flushed == 0
        client.save(slot, snapshot, str(tmp_path / "c" / "d"))
        assert files.flushed > 0


# ---- what fails


def failed(row: Any) -> SaveFailedError:
    error = from_wire(row["error"])
    assert isinstance(error, SaveFailedError), row
    return error


class FailOnce(Files):
    """The n-th call of one method fails with `code`."""

    def __init__(self, method: str, code: int, nth: int = 1) -> None:
        self.left = nth
        real = getattr(self, method)

        def call(*args: Any, **kw: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                raise OSError(code, os.strerror(code))
            return real(*args, **kw)

        setattr(self, method, call)


@pytest.mark.parametrize(
    ("method", "code"),
    [
        ("mkdir", errno.EROFS),
        ("pwrite", errno.EIO),
        ("fsync", errno.EIO),
        ("open", errno.EMFILE),
        ("link", errno.ENOSPC),
    ],
)
def test_failing_call_fails_one_save_and_publishes_nothing(
    endpoint: str, tmp_path: pathlib.Path, method: str, code: int
) -> None:
    with running(endpoint, FailOnce(method, code)), session(endpoint) as (client, slot, snapshot):
        error = failed(client.save(slot, snapshot, str(tmp_path / "a")))
        assert error.code == errno.errorcode[code]  # type: ignore[attr-defined]
        assert not (tmp_path / "a" / MANIFEST_NAME).exists()
        assert client.save(slot, snapshot, str(tmp_path / "b"))["phase"] == "committed"
        eventually(lambda: not list(tmp_path.glob("a/*.safetensors")))


def test_slot_reopened_under_the_writer_fails_the_save(endpoint: str, tmp_path: pathlib.Path) -> None:
    gate = threading.Event()

    class Slow(Files):
        def fallocate(self, fd: int, nbytes: int) -> None:
            gate.wait(60)

    with running(endpoint, Slow()), session(endpoint) as (client, slot, snapshot):
        save_id = new_save_id()
        client.stage(slot, snapshot, save_id, str(tmp_path / "a"))
        client.submit(slot, save_id)
        eventually(lambda: client.row(save_id)["phase"] == "writing")  # type: ignore[index]
        slot.memory.control.open(slot.generation + 1)
        gate.set()
        assert failed(client.wait(save_id)).code == "slot_reused"  # type: ignore[attr-defined]
    assert not (tmp_path / "a" / MANIFEST_NAME).exists()


class FullDisk(Files):
    """statvfs says that nothing is left."""

    def statvfs(self, path: str) -> os.statvfs_result:
        found = list(os.statvfs(path))
        found[3] = found[4] = 1
        return os.statvfs_result(found)


def test_full_disk_fails_before_anything_is_written(endpoint: str, tmp_path: pathlib.Path) -> None:
    with running(endpoint, FullDisk()), session(endpoint) as (client, slot, snapshot):
        error = failed(client.save(slot, snapshot, str(tmp_path / "a")))
    assert error.code == "ENOSPC" and "free space" in str(error)  # type: ignore[attr-defined]
    assert not (tmp_path / "a").exists(), "its directory was made for it, and goes with it"


def test_slot_of_an_impossible_size_is_refused(endpoint: str) -> None:
    with running(endpoint), Client(endpoint) as client:
        client.hello()
        with pytest.raises(SaveFailedError, match="slot"):
            client.allocate(4097)
        client.allocate(1 << 20)


@pytest.mark.parametrize("method", ["prepared", "written", "accept_sealed", "begin"])
def test_bug_of_the_brain_costs_one_save_and_not_the_worker(
    endpoint: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    with running(endpoint) as worker, session(endpoint) as (client, slot, snapshot):

        def bug(*args: Any) -> None:
            monkeypatch.undo()
            raise AssertionError("made up")

        registry = worker.daemon.core._admission if method in ("accept_sealed", "begin") else worker.daemon.core._saves
        monkeypatch.setattr(registry, method, bug)
        try:
            assert failed(client.save(slot, snapshot, str(tmp_path / "a"))).code == "internal"  # type: ignore[attr-defined]
        except SaveFailedError as error:
            assert error.code == "internal"  # type: ignore[attr-defined]
        assert client.save(slot, snapshot, str(tmp_path / "b"))["phase"] == "committed"
        assert status(client)["counters"]["internal_errors"] == 1


NO_DESCRIPTOR, NO_THREAD = OSError(errno.EMFILE, "simulated"), RuntimeError("can't start new thread")
LOOP_STEPS = [
    ("_server", "poll", zmq.ZMQError(errno.EMFILE)),
    ("_server", "receive", zmq.ZMQError(errno.EMFILE)),
    ("_node_sockets", "receive", zmq.ZMQError(errno.EMFILE)),
    ("_lanes", "results", NO_DESCRIPTOR),
    ("_liveness", "dead", NO_DESCRIPTOR),
    ("_memory_pressure", "check", NO_DESCRIPTOR),
    ("_observers", "update", NO_THREAD),
]


@pytest.mark.parametrize(("part", "method", "error"), LOOP_STEPS)
def test_step_of_the_control_loop_that_fails_costs_no_save(
    endpoint: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, part: str, method: str, error: Exception
) -> None:
    failures = threading.Semaphore(0)

    def fails(*_: Any, **__: Any) -> None:
        failures.release()
        raise error

    with running(endpoint) as worker, session(endpoint) as (client, slot, snapshot):
        with Client(endpoint) as other:  # the worker looks at the machine's memory for what it has left
            other.hello()
            other.save(other.allocate(snapshot.slot_nbytes()), snapshot, str(tmp_path / "a" / "1"))
            other.goodbye()
        eventually(lambda: bool(status(client)["kept"]))
        monkeypatch.setattr(getattr(worker.daemon, part), method, fails)
        for _ in range(2):  # more than one turn of the loop
            assert failures.acquire(timeout=10)
        monkeypatch.undo()
        assert client.save(slot, snapshot, str(tmp_path / "c"))["phase"] == "committed"
        assert status(client)["counters"]["internal_errors"] >= 2
        worker.daemon.stop()
        assert worker.join() is True


def test_worker_without_a_free_descriptor_goes_on_once_there_is_one(worker: RealWorker, tmp_path: pathlib.Path) -> None:
    with session(worker.endpoint) as (client, slot, snapshot), Client(worker.endpoint) as other:
        other.hello()
        other.save(other.allocate(snapshot.slot_nbytes()), snapshot, str(tmp_path / "a"))
        other.goodbye()
        eventually(lambda: bool(status(client)["kept"]))
        before = resource.prlimit(worker.pid, resource.RLIMIT_NOFILE)
        highest = max(int(number) for number in os.listdir(f"/proc/{worker.pid}/fd"))
        resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, (highest + 1, before[1]))
        eventually(lambda: status(client)["counters"].get("internal_errors", 0) > 0)
        resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, before)
        assert client.save(slot, snapshot, str(tmp_path / "b"))["phase"] == "committed"


def test_bug_at_the_deadline_of_one_save_stops_neither_the_deadline_of_another_nor_the_drain(
    endpoint: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(endpoint) as worker, Client(endpoint, world_size=2) as client:
        client.hello()
        snapshot = Snapshot()
        staged: list[SaveId] = []
        real = saves.deadline

        def deadline(tables: Tables, save: Save) -> Any:
            if save.save_id == str(staged[0]):
                raise AssertionError("made up")
            return real(tables, save)

        monkeypatch.setattr(saves, "deadline", deadline)
        for name in ("a", "b"):
            slot = client.allocate(snapshot.slot_nbytes())
            staged.append(new_save_id())
            client.stage(slot, snapshot, staged[-1], str(tmp_path / name), commit_timeout_s=0.5)
            client.submit(slot, staged[-1])
        first, second = (from_wire(client.wait(save_id)["error"]) for save_id in staged)
        assert first.code == "internal"  # type: ignore[attr-defined]
        assert isinstance(second, CommitTimeoutError)
        worker.daemon.stop()
        assert worker.join() is True


def test_job_that_cannot_be_begun_fails_its_save(
    endpoint: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(endpoint) as worker, session(endpoint) as (client, slot, snapshot):
        real = worker.daemon._lanes.submit

        def submit(lane: str, job: Any) -> None:
            if lane == "write":
                monkeypatch.undo()
                raise RuntimeError("can't start new thread")
            real(lane, job)

        monkeypatch.setattr(worker.daemon._lanes, "submit", submit)
        assert failed(client.save(slot, snapshot, str(tmp_path / "a"))).code == "internal"  # type: ignore[attr-defined]
        assert client.save(slot, snapshot, str(tmp_path / "b"))["phase"] == "committed"


def test_slot_whose_pages_cannot_be_faulted_in_ahead_of_use_is_lent_and_freed_like_any_other(
    endpoint: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(endpoint) as worker, session(endpoint) as (client, _, snapshot):
        real = worker.daemon._lanes.submit

        def submit(lane: str, job: Any) -> None:
            if lane == "populate":
                raise RuntimeError("can't start new thread")
            real(lane, job)

        monkeypatch.setattr(worker.daemon._lanes, "submit", submit)
        slot = client.allocate(snapshot.slot_nbytes(), populate=True)
        assert client.save(slot, snapshot, str(tmp_path / "a"))["phase"] == "committed"
        client.call(m.Release(id=client.next_id(), slot=slot.number))
        eventually(lambda: slot.number not in worker.daemon._slots.numbers())


def test_freeing_a_large_slot_holds_nobody_up(
    endpoint: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    with running(endpoint) as worker, session(endpoint) as (client, slot, snapshot):
        real = worker.daemon._slots.free
        monkeypatch.setattr(worker.daemon._slots, "free", lambda number: gate.wait(60) and real(number))
        large = client.allocate(1 << 20)
        client.call(m.Release(id=client.next_id(), slot=large.number))
        assert client.save(slot, snapshot, str(tmp_path / "a"))["phase"] == "committed"
        assert len(worker.daemon._slots) == 2
        gate.set()
        eventually(lambda: len(worker.daemon._slots) == 1)


# ---- sessions


def test_death_of_a_process_is_noticed_without_a_pidfd(endpoint: str, tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "a")
    order = Order(endpoint=endpoint, path=path, save_id=str(new_save_id()), die="sealed")
    with running(endpoint, liveness=Liveness(use_pidfd=False)):
        root = pathlib.Path(__file__).parents[2]
        command = [sys.executable, "-m", "tests.torch_free_client"]
        subprocess.run(
            command, input=encode_order(order).encode(), cwd=root, stdout=subprocess.DEVNULL, check=True, timeout=60
        )
        eventually(lambda: pathlib.Path(path, MANIFEST_NAME).exists())
        with Client(endpoint) as client:
            eventually(lambda: not status(client)["slots"])


def test_a_process_without_a_pidfd_is_looked_at_from_its_first_message_on(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone: list[float] = []
    watching: list[float] = []
    with running(endpoint, liveness=Liveness(use_pidfd=False)) as worker, Client(endpoint) as client:
        poll, tables = worker.daemon._server.poll, worker.daemon.core.tables

        def noted(name: str, others: Any, timeout_s: float) -> set[str]:
            (watching if tables.sessions else alone).append(timeout_s)
            return poll(name, others, timeout_s)

        monkeypatch.setattr(worker.daemon._server, "poll", noted)
        eventually(lambda: alone and alone[-1] > 4 * POLL_S)  # the next Tick is far
        client.hello()
        eventually(lambda: watching)
    assert max(watching) <= POLL_S


def test_message_to_a_restarted_worker_is_refused_as_unknown(endpoint: str) -> None:
    with Client(endpoint) as client:
        with running(endpoint):
            client.hello()
        with running(endpoint), pytest.raises(UnknownSaveError, match="restarted"):
            client.row(new_save_id())


def test_two_runs_that_ask_at_once_get_different_epochs_and_their_ranks_the_same(
    endpoint: str, tmp_path: pathlib.Path
) -> None:
    asked: dict[str, set[int]] = {secrets.token_hex(6): set() for _ in range(4)}
    gate = threading.Barrier(8)

    def ask(run: str, rank: int) -> None:
        with Client(endpoint, rank=rank, world_size=2) as client:
            client.hello()
            gate.wait(60)
            asked[run].add(client.lineage(run, str(tmp_path / f"step-{rank}")))

    with running(endpoint):
        threads = [threading.Thread(target=ask, args=(run, rank)) for run in asked for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert all(len(epochs) == 1 for epochs in asked.values())
    found = sorted(epoch for epochs in asked.values() for epoch in epochs)
    assert [epoch - found[0] for epoch in found] == [0, 1, 2, 3]


# ---- the wire


def test_socket_is_for_its_user_only(endpoint: str, endpoint_dir: pathlib.Path) -> None:
    with running(endpoint):
        assert stat.S_IMODE((endpoint_dir / "w.sock").stat().st_mode) == 0o600
        assert stat.S_IMODE(endpoint_dir.stat().st_mode) == 0o700
    assert not (endpoint_dir / "w.sock").exists()


HELLO = encode(m.Status(id=5))


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"x", b"y"],
        [HELLO[0]],
        [HELLO[0], b""],
        [HELLO[0], b"\xc1"],
        [HELLO[0], b"\x80"],
        [HELLO[0], b"\x81\xa1m\xa6wrong!"],
        [HELLO[0], b"\x82\xa1m\xa6status\xa4must\x91\x80"],
        [HELLO[0], b"\x91" * 5000 + b"\x01"],
        [*HELLO, b"more"],
        [b"z"] * 500,
    ],
)
def test_any_bytes_are_answered_and_survived(endpoint: str, frames: list[bytes]) -> None:
    with running(endpoint) as worker, Client(endpoint) as client:
        client.socket.send_multipart(frames)
        reply = client.receive(60.0)
        assert isinstance(reply, m.Refused) and isinstance(from_wire(reply.error), ProtocolError)
        assert status(client)["counters"]["messages_malformed"] == 1
        assert "internal_errors" not in worker.daemon.metrics.counters()


def test_frame_above_the_limit_costs_its_sender_the_connection_only(endpoint: str) -> None:
    with running(endpoint), Client(endpoint) as bad, Client(endpoint) as good:
        good.hello()
        bad.socket.send_multipart([HELLO[0], bytes(MAX_FRAME_NBYTES + 1)])
        assert bad.receive(0.2) is None
        good.row(new_save_id())


# ---- the end


def test_stop_finishes_what_is_in_flight_and_refuses_new_sessions(endpoint: str, tmp_path: pathlib.Path) -> None:
    gate = threading.Event()

    class Slow(Files):
        def fallocate(self, fd: int, nbytes: int) -> None:
            gate.wait(60)

    with running(endpoint, Slow()) as worker, session(endpoint) as (client, slot, snapshot):
        save_id = new_save_id()
        client.stage(slot, snapshot, save_id, str(tmp_path / "a"))
        client.submit(slot, save_id)
        worker.daemon.stop()
        eventually(lambda: status(client)["draining"])
        with Client(endpoint) as late, pytest.raises(WorkerUnavailableError, match="shutting down"):
            late.hello()
        gate.set()
        assert worker.join() is True
    read_manifest(str(tmp_path / "a"), LocalStore())


def test_stop_takes_up_a_sealed_slot_whose_doorbell_did_not_come(endpoint: str, tmp_path: pathlib.Path) -> None:
    with running(endpoint) as worker, session(endpoint) as (client, slot, snapshot):
        client.stage(slot, snapshot, new_save_id(), str(tmp_path / "a"))
        worker.daemon.stop()
        assert worker.join() is True
    read_manifest(str(tmp_path / "a"), LocalStore())


def test_drain_timeout_ends_a_wedged_save(endpoint: str, tmp_path: pathlib.Path) -> None:
    gate = threading.Event()

    class Wedged(Files):
        def fallocate(self, fd: int, nbytes: int) -> None:
            gate.wait(60)
            raise OSError(errno.EIO, "wedged")

    with running(endpoint, Wedged(), drain_timeout_s=0.1) as worker, session(endpoint) as (client, slot, snapshot):
        save_id = new_save_id()
        client.stage(slot, snapshot, save_id, str(tmp_path / "a"))
        client.submit(slot, save_id)
        eventually(lambda: client.row(save_id)["phase"] == "writing")  # type: ignore[index]
        worker.daemon.stop()
        eventually(lambda: worker.daemon._closed)
        gate.set()
        assert worker.join() is False


@pytest.mark.parametrize("use_pidfd", [True, False])
def test_idle_worker_stays_while_the_process_lives_that_it_was_started_for(endpoint: str, use_pidfd: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        liveness = Liveness(use_pidfd=use_pidfd)
        with running(endpoint, liveness=liveness, idle_exit_s=0.1, while_pid=process.pid) as worker:
            worker.thread.join(1.0)
            assert worker.thread.is_alive()
            process.kill()
            assert worker.join() is True
    with running(endpoint, idle_exit_s=0.1, while_pid=process.pid) as worker:  # it is dead already
        assert worker.join() is True
