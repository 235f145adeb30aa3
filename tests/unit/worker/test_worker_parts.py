"""The worker's small parts: slots in memory, errors with advice, log lines, liveness, answers that are too large."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import pathlib
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from asyncckpt.errors import CheckpointExistsError, CommitUnknownError, ProtocolError, SaveFailedError, to_wire
from asyncckpt.memory.slot import SlotError
from asyncckpt.protocol import messages as m
from asyncckpt.protocol.codec import MAX_FRAME_NBYTES, decode, encode
from asyncckpt.protocol.identity import start_ticks
from asyncckpt.storage.files import ADVICE
from asyncckpt_worker.io.slot_store import SlotStore
from asyncckpt_worker.io.writer import wrap
from asyncckpt_worker.service import log
from asyncckpt_worker.service.process_watch import Liveness
from asyncckpt_worker.service.resources import LocalResources
from asyncckpt_worker.service.server import Server

# ---- slots


@pytest.fixture
def store() -> Iterator[SlotStore]:
    """A store that is closed at the end."""
    store = SlotStore()
    yield store
    store.close()
    assert not len(store)


def test_slot_in_use_is_closed_by_its_last_user(store: SlotStore) -> None:
    store.create(1, 12288)
    with store.use(1) as memory, store.use(1):
        store.free(1)
        assert not memory.mapping.closed
        memory.mapping.view()[5000] = 1
        with pytest.raises(SlotError, match="being freed"), store.use(1):
            pass
    assert memory.mapping.closed and not len(store)


def test_promised_is_what_has_no_pages_yet_and_nothing_of_the_doomed(store: SlotStore) -> None:
    memory = store.create(1, 1 << 20)
    store.create(2, 1 << 21)
    before = store.promised_nbytes()
    memory.mapping.view()[:] = bytes(1 << 20)
    assert before - store.promised_nbytes() >= (1 << 20) - 8192
    with store.use(2):
        store.free(2)
        assert store.promised_nbytes() == 0 and len(store) == 2
    store.wait_freed(2, 1.0)
    assert len(store) == 1


def test_slot_freed_while_it_is_populated_is_closed_without_a_crash(store: SlotStore) -> None:
    memory = store.create(0, 8 << 20)
    store.populate(0)
    assert os.fstat(memory.fd).st_blocks * 512 == 8 << 20
    for number in range(10):
        store.create(number + 1, 32 << 20)
        thread = threading.Thread(target=store.populate, args=(number + 1,))
        thread.start()
        store.free(number + 1)
        thread.join()
    store.free(0)
    store.free(0)
    store.populate(0)
    assert not len(store)


# ---- errors


@pytest.mark.parametrize("name", sorted(ADVICE))
def test_every_known_errno_says_what_to_do(name: str) -> None:
    code = getattr(errno, name)
    error = wrap(OSError(code, os.strerror(code), "/ckpt/a/x"), "id", 3, 40, "/ckpt/a")
    assert isinstance(error, SaveFailedError)
    assert error.facts() == {
        "code": name, "rank": 3, "path": "/ckpt/a", "detail": error.facts()["detail"], "save_id": "id", "step": 40
    }  # fmt: skip
    assert ADVICE[name] in str(error) and "/ckpt/a/x" in str(error)


@pytest.mark.parametrize(
    ("error", "kind", "facts"),
    [
        (SlotError("gone"), SaveFailedError, {"code": "slot_reused"}),
        (KeyError("x"), SaveFailedError, {"code": "internal"}),
        (CheckpointExistsError("there", path="/a", existing_save_id="old"), CheckpointExistsError, {"path": "/a"}),
        (CommitUnknownError("?", code="EIO", path="/a"), CommitUnknownError, {"code": "EIO", "step": 1}),
    ],
    ids=repr,
)
def test_other_errors_are_of_our_tree_and_learn_the_save(error: Exception, kind: type, facts: dict[str, Any]) -> None:
    found = wrap(error, "new", 0, 1, "/a")
    assert type(found) is kind and {**facts, "save_id": "new"}.items() <= found.facts().items()


# ---- log, counters, liveness


@pytest.mark.parametrize("log_format", ["json", "human"])
def test_log_lines_carry_save_session_and_facts(log_format: str) -> None:
    stream = io.StringIO()
    logger = logging.getLogger("asyncckpt")
    before = (logger.level, logger.propagate)
    handler = log.configure(log_format, stream)
    try:
        log.write("info", "two\nlines", save_id="s1", session="t1", facts={"seconds": 0.12345, "n": 3})
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]
    (line,) = stream.getvalue().splitlines()
    if log_format == "json":
        assert {"save_id": "s1", "session": "t1", "n": 3, "text": "two\nlines"}.items() <= json.loads(line).items()
    else:
        assert line.endswith("INFO    two lines  [save_id=s1 session=t1 seconds=0.123 n=3]")


def test_long_log_of_earlier_workers_is_cut_to_its_end(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "w.log"
    log.keep_tail(str(path))
    path.write_text("short\n")
    log.keep_tail(str(path))
    assert path.read_text() == "short\n"
    path.write_text("".join(f"line {i:09d}\n" for i in range(200_000)))
    log.keep_tail(str(path))
    lines = path.read_text().splitlines()
    assert lines[-1] == "line 000199999" and len(lines[0]) == 14
    assert 0 < path.stat().st_size <= log.MAX_LOG_NBYTES // 2


def test_log_of_a_started_worker_is_bounded(tmp_path: pathlib.Path) -> None:
    code = (
        "import sys\nfrom asyncckpt_worker.service import log\n"
        "log.redirect_output(sys.argv[1])\nlog.configure('human', rotated=sys.argv[1])\n"
        "for i in range(4000): log.write('info', f'{i:06d}' + 'x' * 1000)\n"
        "print('the last word', file=sys.stderr)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "w.log")], check=True, timeout=60)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["w.log", "w.log.1"]
    assert all(p.stat().st_size < log.MAX_LOG_NBYTES + 2000 for p in tmp_path.iterdir())
    assert (tmp_path / "w.log").read_text().endswith("the last word\n")
    assert "003999" in (tmp_path / "w.log").read_text()


def test_a_watch_that_fails_is_our_own_bug_and_says_nothing_of_the_process() -> None:
    class Broken(Liveness):
        def watch(self, session: str, pid: int, pid_start: int) -> bool:
            raise MemoryError

    bugs: list[str] = []
    unused: Any = None
    resources = LocalResources(unused, Broken(), unused, unused, lambda where, error: bugs.append(where))
    with pytest.raises(SaveFailedError) as caught:
        resources.watch("one", os.getpid(), start_ticks(os.getpid()) or 0)
    assert caught.value.code == "internal" and bugs == ["a watch"]


@pytest.fixture
def talk(endpoint_dir: pathlib.Path) -> Iterator[tuple[Server, Callable[[], Any]]]:
    """A server that has heard from peer `one`, and what reads the next message to it."""
    context = zmq.Context()
    server, socket = Server(f"ipc://{endpoint_dir}/w.sock", lambda name: None), context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, b"one")
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(f"ipc://{endpoint_dir}/w.sock")

    def heard() -> Any:
        assert socket.poll(60_000)
        return decode(socket.recv_multipart(), m.REPLIES)

    socket.send_multipart(encode(m.Status(id=7)))
    server.poll("messages", {}, 60.0)
    assert [message for _, message in server.receive()] == [m.Status(id=7)]
    yield server, heard
    server.close()
    socket.close()
    context.term()


def test_who_asks_for_what_does_not_fit_into_a_frame_is_refused_at_once(
    talk: tuple[Server, Callable[[], Any]],
) -> None:
    server, heard = talk
    with pytest.raises(ProtocolError):
        server.send(b"one", m.StatusReport(id=7, report={"text": "x" * MAX_FRAME_NBYTES}))
    refused = heard()
    assert isinstance(refused, m.Refused) and refused.id == 7 and refused.error["code"] == "protocol"


def test_rows_of_saves_that_do_not_fit_into_a_frame_come_in_several(talk: tuple[Server, Callable[[], Any]]) -> None:
    server, heard = talk
    error = to_wire(SaveFailedError("x" * 3000, code="EIO"))
    rows = [{"save_id": f"000001-{n:08d}-{'a' * 12}", "phase": "failed", "error": error} for n in range(m.MAX_TABLE)]
    server.send(b"one", m.Saves(id=7, saves=tuple(rows), run="", outcomes=()))
    found: list[Any] = []
    while len(found) < len(rows):
        said = heard()
        assert isinstance(said, m.Saves) and said.id == 7
        found += said.saves
    assert [row["save_id"] for row in found] == [row["save_id"] for row in rows]


def test_death_is_told_though_its_descriptor_cannot_be_taken_from_the_others() -> None:
    class Broken:
        def __init__(self, epoll: select.epoll) -> None:
            self.poll, self.register, self.close = epoll.poll, epoll.register, epoll.close

        def unregister(self, fd: int) -> None:
            raise OSError(errno.EBADF, "simulated")

    liveness = Liveness()
    with subprocess.Popen(["sleep", "60"]) as one:
        assert liveness.watch("one", one.pid, start_ticks(one.pid) or 0)
        liveness._epoll = Broken(liveness._epoll)  # type: ignore[arg-type,assignment]
        one.kill()
        one.wait()
    assert liveness.dead() == ["one"]
    liveness.close()


@pytest.mark.parametrize("use_pidfd", [True, False])
def test_liveness_tells_the_living_from_the_dead_and_the_mistaken(use_pidfd: bool) -> None:
    liveness = Liveness(use_pidfd=use_pidfd)
    started = start_ticks(os.getpid())
    assert started is not None
    assert liveness.watch("me", os.getpid(), started)
    assert not liveness.watch("other", os.getpid(), started + 1)
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE) as child:
        assert liveness.watch("child", child.pid, start_ticks(child.pid) or 0)
        assert liveness.dead() == [] and (liveness.poll_s is None) == use_pidfd and len(liveness.fds) == use_pidfd
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert liveness.dead() == ["child"] and liveness.dead() == []
    assert not liveness.watch("child", child.pid, started)
    liveness.close()
    assert liveness.fds == []


@pytest.mark.parametrize("use_pidfd", [True, False])
@pytest.mark.parametrize("pid", [1 << 31, 1 << 40, (1 << 63) - 1, 0])
def test_a_number_that_no_process_can_have_is_a_dead_one(pid: int, use_pidfd: bool) -> None:
    liveness = Liveness(use_pidfd=use_pidfd)
    assert liveness.watch("s", pid, 1) is False
    assert liveness.fds == [] and liveness.dead() == []
