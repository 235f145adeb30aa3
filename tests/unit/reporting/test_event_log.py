"""`events.jsonl`: whole lines from everybody, bounded, and never anybody's trouble."""

from __future__ import annotations

import json
import logging
import os
import random
import threading
from pathlib import Path

import pytest
from real_worker import wait_until

from asyncckpt.errors import SaveFailedError
from asyncckpt.maintenance import event_log
from asyncckpt.maintenance.event_log import EVENTS_NAME, ROTATED_NAME, EventLog, append, read_events

DEADLINE_S = 60.0


def numbers(root: Path) -> list[int]:
    return [event["n"] for event in read_events(str(root))]


def test_lines_come_back_in_order_with_name_and_time(tmp_path: Path) -> None:
    log = EventLog()
    for n in range(100):
        log.add(str(tmp_path), "tried", {"n": n, "path": tmp_path})
    log.close(DEADLINE_S)
    events = list(read_events(str(tmp_path)))
    assert [event["n"] for event in events] == list(range(100))
    assert {event["event"] for event in events} == {"tried"} and all(event["t"] > 1e9 for event in events)
    assert events[0]["path"] == str(tmp_path), "what JSON has no form for is text"


def test_two_writers_of_one_file_lose_nothing_and_mix_nothing(tmp_path: Path) -> None:
    logs = [EventLog() for _ in range(2)]

    def run(n: int) -> None:
        for i in range(20):
            logs[n].add(str(tmp_path), "tried", {"n": n * 1000 + i})
            assert logs[n].flush(DEADLINE_S)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for log in logs:
        log.close(DEADLINE_S)
    assert sorted(numbers(tmp_path)) == [*range(20), *range(1000, 1020)]


def test_a_full_file_is_put_aside_and_one_older_one_is_kept(tmp_path: Path) -> None:
    for n in range(30):
        append(str(tmp_path / EVENTS_NAME), [json.dumps({"t": 1, "event": "e", "n": n})], umask=0o022, max_nbytes=200)
    assert sorted(p.name for p in tmp_path.iterdir()) == [EVENTS_NAME, ROTATED_NAME]
    assert all(p.stat().st_size < 300 for p in tmp_path.iterdir())
    found = numbers(tmp_path)
    assert found == list(range(found[0], 30)), "the newest, without a gap"


def test_the_limit_is_64_megabytes() -> None:
    assert event_log.MAX_EVENTS_NBYTES == 64 << 20


def test_lines_wait_for_the_directory_that_the_first_save_makes(tmp_path: Path) -> None:
    log, root = EventLog(), tmp_path / "later"
    log.add(str(root), "begun", {"n": 1})
    assert log.flush(DEADLINE_S) and not root.exists()
    root.mkdir()
    log.add(str(root), "sealed", {"n": 2})
    log.close(DEADLINE_S)
    assert numbers(root) == [1, 2] and log.dropped == 0


def test_where_it_cannot_be_written_lines_are_dropped_and_that_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / EVENTS_NAME).mkdir()
    log = EventLog()
    with caplog.at_level(logging.WARNING, "asyncckpt"):
        for n in range(5):
            log.add(str(tmp_path), "tried", {"n": n})
            assert log.flush(DEADLINE_S)
    log.close(DEADLINE_S)
    assert log.dropped == 5 and len(caplog.records) == 1


@pytest.mark.parametrize("error", [SaveFailedError("outside", code="EPERM"), AssertionError("a mistake")], ids=repr)
def test_a_directory_that_is_not_allowed_gets_no_line_and_costs_no_other_one_its_own(
    error: Exception, tmp_path: Path
) -> None:
    def refuse(directory: str) -> None:
        if directory.endswith("bad"):
            raise error

    (tmp_path / "bad").mkdir()
    log = EventLog(check=refuse)
    log.add(str(tmp_path / "bad"), "tried", {"n": 1})
    assert log.flush(DEADLINE_S)
    log.add(str(tmp_path), "tried", {"n": 2})
    log.close(DEADLINE_S)
    assert numbers(tmp_path) == [2] and log.dropped == 1 and not list((tmp_path / "bad").iterdir())


def test_directories_that_never_come_to_be_are_forgotten_the_oldest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "IDLE_EXIT_S", 0.0)
    monkeypatch.setattr(event_log, "MAX_DIRECTORIES", 3)
    log, roots = EventLog(), [tmp_path / str(n) for n in range(4)]
    for n, root in enumerate(roots):
        log.add(str(root), "begun", {"n": n})
        assert log.flush(DEADLINE_S)
        for thread in [t for t in threading.enumerate() if t.name == "asyncckpt-events"]:
            thread.join(DEADLINE_S)
    for root in roots:
        root.mkdir()
    for n in (1, 2, 3):
        log.add(str(roots[n]), "sealed", {"n": 10 + n})
    log.close(DEADLINE_S)
    assert [numbers(root) for root in roots] == [[], [1, 11], [2, 12], [3, 13]] and log.dropped == 1


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/null", path)], ids=["pipe", "link"])
def test_nothing_is_written_to_what_is_no_file(tmp_path: Path, make: object) -> None:
    make(tmp_path / EVENTS_NAME)  # type: ignore[operator]
    with pytest.raises(OSError):
        append(str(tmp_path / EVENTS_NAME), ["{}"], umask=0o022)


def test_a_disk_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flows, entered = threading.Event(), threading.Event()

    def hang(*_: object, **__: object) -> None:
        entered.set()
        assert flows.wait(DEADLINE_S)

    monkeypatch.setattr(event_log, "append", hang)
    log = EventLog()
    log.add(str(tmp_path), "tried", {})
    assert entered.wait(DEADLINE_S)
    for n in range(event_log.MAX_QUEUED + 10):
        log.add(str(tmp_path), "tried", {"n": n})
    assert log.dropped == 10, "what waits is bounded"
    assert not log.flush(0.01)
    log.close(0.01)
    flows.set()
    log.close(DEADLINE_S)


def test_a_directory_that_hangs_holds_up_its_own_lines_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flows, entered = threading.Event(), threading.Event()

    def hang(directory: str) -> None:
        if directory.endswith("hangs"):
            entered.set()
            assert flows.wait(DEADLINE_S)

    monkeypatch.setattr(event_log, "MAX_DIRECTORIES", 2)
    monkeypatch.setattr(event_log, "IDLE_EXIT_S", DEADLINE_S)
    log = EventLog(check=hang)
    for name in ("hangs", "flows"):
        (tmp_path / name).mkdir()
    log.add(str(tmp_path / "hangs"), "tried", {"n": 1})
    assert entered.wait(DEADLINE_S)
    log.add(str(tmp_path / "flows"), "tried", {"n": 2})
    wait_until(lambda: numbers(tmp_path / "flows") == [2], "the other directory's line is written")
    log.add(str(tmp_path / "third"), "tried", {})
    assert log.dropped == 1, "directories that are written to at once are bounded"
    flows.set()
    log.close(DEADLINE_S)
    assert numbers(tmp_path / "hangs") == [1]


def test_what_is_no_event_is_passed_over(tmp_path: Path, rng: random.Random) -> None:
    good = json.dumps({"t": 1.0, "event": "e", "n": 1}).encode()
    bad = [
        b"",
        b"{",
        b"[]",
        b'{"event": "e"}',
        b'{"t": "x", "event": "e"}',
        b'{"t": 1}',
        b"[" * 50_000,
        rng.randbytes(300),
    ]
    rng.shuffle(bad)
    lines = [line.replace(b"\n", b" ") for line in bad]
    (tmp_path / EVENTS_NAME).write_bytes(b"\n".join([*lines[:4], good, *lines[4:], good[:10]]))
    assert numbers(tmp_path) == [1]


def test_a_forked_child_adds_nothing_and_waits_for_nobody(tmp_path: Path) -> None:
    log = EventLog()
    log.add(str(tmp_path), "tried", {"n": 1})
    assert log.flush(DEADLINE_S)
    pid = os.fork()
    if not pid:
        log.add(str(tmp_path), "tried", {"n": 2})
        log.close(DEADLINE_S)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    log.close(DEADLINE_S)
    assert numbers(tmp_path) == [1]


def test_the_mode_is_that_of_the_trainers_umask(tmp_path: Path) -> None:
    append(str(tmp_path / EVENTS_NAME), ["{}"], umask=0o027)
    assert (tmp_path / EVENTS_NAME).stat().st_mode & 0o777 == 0o640
