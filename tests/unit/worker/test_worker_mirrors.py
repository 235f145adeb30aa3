"""The copies to mirrors in the worker's core: which is next, when it is tried again, and what it is waited for."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from worker_bench import CONFIG, ERROR, FIRST, PATH, SECOND, Bench, code

from asyncckpt.format.names import SaveId
from asyncckpt.maintenance.mirroring import Unmirrored
from asyncckpt.protocol import messages as m
from asyncckpt_worker.core import actions as ac
from asyncckpt_worker.core import events as ev
from asyncckpt_worker.mirrors import schedule as mirrors
from asyncckpt_worker.mirrors.schedule import (
    CHECK_EVERY_S,
    FIRST_PAUSE_S,
    FORGET_AFTER_S,
    LAST_PAUSE_S,
    MAX_BLOCKING_TRIES,
    TRIES_BEFORE_LAST_CHANCE,
    with_copied,
)

FIRST_ID, SECOND_ID = SaveId.parse(FIRST), SaveId.parse(SECOND)
PLACE = "s3://bucket/run/step-5"
OLDER = SaveId(0, 7, "b" * 12)


def committed(bench: Bench, save_id: str = FIRST, path: str = PATH, mirror: str = PLACE, peer: bytes = b"p") -> None:
    """Bring a save with a mirror to its commit."""
    slot = bench.slot(peer)
    bench.begin(slot, save_id, peer=peer, path=path)
    bench.feed(ev.Prepared, key=(save_id, 0))
    bench.submit(slot, save_id, peer=peer)
    bench.read(slot, save_id, path=path, mirror=mirror)
    bench.feed(ev.Written, key=(save_id, 0), report={"nbytes": 100})
    bench.feed(ev.Published, save_id=save_id)
    assert bench.phase(save_id) == "committed"


def look(bench: Bench) -> None:
    """Find nothing new in the slots that are being read, a drain's second look included."""
    while reads := bench.of(ac.ReadSlot):
        for read in reads:
            bench.feed(ev.SlotRead, slot=read.slot, reason="nothing new")


def leave(bench: Bench) -> None:
    """End the session, and free what it had."""
    bench.say(m.Goodbye)
    look(bench)
    for freed in bench.of(ac.FreeSlot):
        bench.feed(ev.SlotFreed, slot=freed.slot)


def copies(bench: Bench) -> list[str]:
    return [job.save_id for job in bench.of(ac.CopyToMirror)]


def scanned(bench: Bench, *found: Unmirrored, root: str = "/ckpt") -> None:
    bench.feed(ev.UnmirroredFound, root=root, found=found)


def unmirrored(save_id: SaveId, mirror: str = "s3://bucket/run/old", path: str = "/ckpt/old") -> Unmirrored:
    return Unmirrored(save_id=save_id, step=1, nbytes=10, path=path, mirror=mirror)


def asked(bench: Bench, save_id: str = FIRST, peer: bytes = b"p", mirror: str = PLACE, path: str = PATH) -> Any:
    return bench.say(m.Mirror, peer, save_id=save_id, path=path, mirror=mirror)


@pytest.fixture
def bench() -> Bench:
    found = Bench()
    found.hello()
    return found


def test_a_committed_save_is_copied_once_its_directory_was_searched(bench: Bench) -> None:
    committed(bench)
    assert copies(bench) == [] and [job.root for job in bench.of(ac.ScanUnmirrored)] == ["/ckpt"]
    assert asked(bench).phase == "waiting"
    scanned(bench)
    (job,) = bench.of(ac.CopyToMirror)
    assert (job.save_id, job.path, job.mirror) == (FIRST, PATH, PLACE)
    assert asked(bench).phase == "copying"
    bench.feed(ev.Copied, save_id=FIRST_ID, is_done=True, report={"nbytes": 100, "copied_nbytes": 60})
    answer = asked(bench)
    assert (answer.phase, dict(answer.report)) == ("done", {"nbytes": 100, "copied_nbytes": 60})
    assert bench.core.report()["mirrors"] == []


def test_a_save_without_a_mirror_is_not_copied(bench: Bench) -> None:
    committed(bench, mirror="")
    assert not bench.of(ac.ScanUnmirrored) and not copies(bench)


def test_a_save_that_failed_is_not_copied(bench: Bench) -> None:
    slot = bench.slot()
    bench.begin(slot)
    bench.feed(ev.Prepared, key=(FIRST, 0))
    bench.submit(slot)
    bench.read(slot, mirror=PLACE)
    bench.feed(ev.Written, key=(FIRST, 0), error=ERROR)
    assert bench.phase() == "failed" and not bench.of(ac.ScanUnmirrored)


def test_what_earlier_workers_have_left_goes_first(bench: Bench) -> None:
    committed(bench)
    scanned(bench, unmirrored(OLDER))
    assert copies(bench) == [OLDER], "one at a time to a directory, the oldest first"
    bench.feed(ev.Copied, save_id=OLDER, is_done=True)
    assert copies(bench) == [FIRST]


def test_a_directory_is_searched_once(bench: Bench) -> None:
    committed(bench)
    scanned(bench)
    committed(bench, SECOND, "/ckpt/b", "s3://bucket/run/b")
    assert not bench.of(ac.ScanUnmirrored)


def test_searched_directories_are_remembered_up_to_a_bound(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirrors, "MAX_SCANS", 8)
    searches = []
    for call, number in enumerate([*range(8), *range(8)]):
        asked(bench, save_id=SaveId(0, call, "b" * 12), path=f"/runs-{number}/a", mirror=f"/mirror-{call}/a")
        for search in bench.of(ac.ScanUnmirrored):
            searches.append(search.root)
            scanned(bench, root=search.root)
    assert searches == [f"/runs-{number}" for number in range(8)], "each once"


def test_a_search_that_fails_keeps_no_copy_waiting(bench: Bench) -> None:
    committed(bench)
    bench.feed(ev.UnmirroredFound, root="/ckpt", error=ERROR)
    assert copies(bench) == [FIRST]


def test_copies_to_different_directories_do_not_wait_for_each_other(bench: Bench) -> None:
    committed(bench)
    scanned(bench, unmirrored(OLDER, mirror="/elsewhere/old"))
    assert copies(bench) == [OLDER, FIRST]


def test_a_copy_that_fails_is_tried_again_with_growing_pauses_and_before_younger_ones(bench: Bench) -> None:
    committed(bench)
    scanned(bench)
    committed(bench, SECOND, "/ckpt/b", "s3://bucket/run/b")
    pauses = []
    for tries in range(1, 12):
        bench.feed(ev.Copied, save_id=FIRST_ID, error=ERROR)
        if tries == MAX_BLOCKING_TRIES:
            assert copies(bench) == [SECOND], "it may be this one alone that fails"
            bench.feed(ev.Copied, save_id=SECOND_ID, is_done=True)
            assert copies(bench) == [FIRST], "the mirror works, so it has another chance"
            continue
        assert copies(bench) == [], "neither at once, nor the next one"
        due = bench.core.wakes_at
        assert due is not None and asked(bench).phase == "waiting" and dict(asked(bench).error) == {}
        pauses.append(due - bench.now)
        bench.now = due
        bench.feed(ev.Tick)
        assert copies(bench) == [FIRST]
    tries_before = [1, 2, 3, 4, *range(TRIES_BEFORE_LAST_CHANCE + 1, TRIES_BEFORE_LAST_CHANCE + 7)]
    assert pauses == [min(LAST_PAUSE_S, FIRST_PAUSE_S * 2 ** (n - 1)) for n in tries_before]
    (row,) = bench.core.report()["mirrors"]
    assert (row["phase"], row["error"]) == ("copying", ERROR["text"])


def run_copies(
    bench: Bench, *, for_s: float, fails: Callable[[SaveId], bool], saves_for_s: float, every_s: float, try_s: float = 0
) -> list[SaveId]:
    """Find another checkpoint every `every_s`, and let each copy end after `try_s`; return those that are done."""
    done: list[SaveId] = []
    running: list[SaveId] = []
    began, known, next_at, ends_at = bench.now, 0, bench.now, float("inf")

    def note() -> None:
        nonlocal ends_at
        running.extend(job.save_id for job in bench.of(ac.CopyToMirror))
        assert len(running) < 2, "one at a time to a directory"
        ends_at = min(ends_at, bench.now + try_s) if running else float("inf")

    while bench.now < began + for_s:
        bench.feed(ev.Tick)
        note()
        if bench.now >= ends_at:
            save_id, ends_at = running.pop(), float("inf")
            error = ERROR if fails(save_id) else None
            done += [] if error else [save_id]
            bench.feed(ev.Copied, save_id=save_id, error=error, is_done=error is None)
            note()
        elif bench.now >= next_at:
            scanned(bench, unmirrored(SaveId(0, known, "b" * 12), f"s3://bucket/run/{known}", f"/ckpt/{known}"))
            known, next_at = known + 1, next_at + every_s
            next_at = next_at if next_at < began + saves_for_s else float("inf")
            note()
        else:
            wakes_at = bench.core.wakes_at
            bench.now = min(next_at, ends_at, began + for_s, float("inf") if wakes_at is None else wakes_at)
    return done


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("try_s", "most"), [(0.0, 0), (5.0, 1), (120.0, 1)])
def test_once_a_mirror_is_back_the_oldest_comes_first_however_long_it_was_gone(
    bench: Bench, seed: int, try_s: float, most: int
) -> None:
    gone_s, every_s = (choose := random.Random(seed)).uniform(1, 4000), choose.choice([20.0, 60.0, 400.0])
    back_at = bench.now + gone_s
    done = run_copies(
        bench,
        for_s=gone_s + LAST_PAUSE_S + 300 * max(try_s, 0.1),
        fails=lambda _: bench.now < back_at,
        saves_for_s=gone_s,
        every_s=every_s,
        try_s=try_s,
    )
    early = [one for number, one in enumerate(done) if any(later < one for later in done[number:])]
    shown = f"{seed=} {gone_s=} {every_s=} {early=}"
    assert len(done) == math.ceil(gone_s / every_s) and len(early) <= most, shown


@pytest.mark.parametrize(
    ("n_bad", "try_s", "every_s"), [(1, 5.0, 15.0), (3, 5.0, 15.0), (3, 0.0, 10.0), (3, 30.0, 60.0)]
)
def test_copies_that_fail_by_themselves_do_not_hold_others_up_for_long(
    bench: Bench, n_bad: int, try_s: float, every_s: float
) -> None:
    bad = [SaveId(0, number, "b" * 12) for number in (0, 1, 7)[:n_bad]]
    for_s = 2 * 3600.0
    fails = lambda save_id: save_id in bad  # noqa: E731
    done = run_copies(bench, for_s=for_s, fails=fails, saves_for_s=for_s - 1200, every_s=every_s, try_s=try_s)
    assert len(done) == (for_s - 1200) / every_s - n_bad and done == sorted(done)


def test_many_copies_that_fail_by_themselves_hold_others_up_for_minutes_only(bench: Bench) -> None:
    bad = [SaveId(0, number, "b" * 12) for number in range(100)]
    fails = lambda save_id: save_id in bad  # noqa: E731
    done = run_copies(bench, for_s=1500, fails=fails, saves_for_s=1010, every_s=10.0)
    assert done == [SaveId(0, 100, "b" * 12)]


def test_what_fails_for_good_makes_others_wait_no_longer(bench: Bench) -> None:
    scanned(bench, *(unmirrored(SaveId(0, n, "b" * 12), f"s3://bucket/run/{n}", f"/ckpt/{n}") for n in range(23)))
    began, done = bench.now, False
    while not done:
        while jobs := bench.of(ac.CopyToMirror):
            number = jobs[0].save_id.sequence
            done = number == 22
            error = None if done else ERROR
            bench.feed(ev.Copied, save_id=jobs[0].save_id, error=error, is_done=done, is_final=2 <= number < 22)
            if done:
                break
        else:
            bench.now = bench.core.wakes_at  # type: ignore[assignment]
            bench.feed(ev.Tick)
    assert bench.now - began < 120


def test_one_failure_more_once_the_mirror_is_back_does_not_change_the_order(bench: Bench) -> None:
    back_at, failed = bench.now + 900, list[SaveId]()

    def fails(save_id: SaveId) -> bool:
        if bench.now >= back_at and save_id.sequence == 1 and save_id not in failed:
            failed.append(save_id)
            return True
        return bench.now < back_at

    done = run_copies(bench, for_s=1200, fails=fails, saves_for_s=900, every_s=30.0)
    assert failed and done == sorted(done) and len(done) == 30


def test_a_copy_that_cannot_succeed_fails_and_lets_the_next_one_go(bench: Bench) -> None:
    committed(bench)
    scanned(bench)
    committed(bench, SECOND, "/ckpt/b", "s3://bucket/run/b")
    bench.feed(ev.Copied, save_id=FIRST_ID, error=ERROR, is_final=True)
    assert copies(bench) == [SECOND]
    answer = asked(bench)
    assert (answer.phase, dict(answer.error)) == ("failed", dict(ERROR))
    assert [row["phase"] for row in bench.core.report()["mirrors"]] == ["copying", "failed"]


def test_the_next_worker_goes_on_for_the_trainer_that_asks(bench: Bench) -> None:
    assert asked(bench).phase == "waiting" and [job.root for job in bench.of(ac.ScanUnmirrored)] == ["/ckpt"]
    scanned(bench, unmirrored(FIRST_ID, PLACE, PATH))
    assert copies(bench) == [FIRST], "once, though it was also found"


def test_a_worker_of_other_ranks_looks_and_does_not_copy(bench: Bench) -> None:
    bench.now += 10 * FORGET_AFTER_S  # the worker's clock does not begin at 0
    bench.hello(b"q", "2" * 16, 1, 2)
    assert asked(bench, peer=b"q").phase == "copying"
    bench.say(m.Heartbeat, b"q", saves=())
    assert not bench.of(ac.ScanUnmirrored)
    bench.feed(ev.Copied, save_id=FIRST_ID)
    assert asked(bench, peer=b"q").phase == "waiting"
    bench.now += CHECK_EVERY_S
    bench.feed(ev.Tick)
    assert len(bench.of(ac.CheckMirrored)) == 1 and not bench.of(ac.CopyToMirror)
    bench.feed(ev.Copied, save_id=FIRST_ID, is_done=True)
    assert asked(bench, peer=b"q").phase == "done"


def test_rank_0_makes_a_worker_copy_that_only_looked(bench: Bench) -> None:
    bench.hello(b"q", "2" * 16, 1, 2)
    asked(bench, peer=b"q")
    bench.feed(ev.Copied, save_id=FIRST_ID)
    asked(bench)
    bench.now += CHECK_EVERY_S
    bench.feed(ev.Tick)
    assert len(bench.of(ac.CopyToMirror)) == 1


def test_what_nobody_asks_for_any_more_is_looked_for_no_longer(bench: Bench) -> None:
    bench.hello(b"q", "2" * 16, 1, 2)
    asked(bench, peer=b"q")
    bench.feed(ev.Copied, save_id=FIRST_ID)
    bench.now += FORGET_AFTER_S + 1
    bench.feed(ev.Tick)
    assert not copies(bench) and not bench.core._mirrors._open


def test_a_worker_with_a_copy_is_not_idle_and_ends_when_it_is_done() -> None:
    bench = Bench(replace(CONFIG, keep_snapshots_s=0.0))
    bench.hello()
    committed(bench)
    scanned(bench)
    leave(bench)
    bench.now += CONFIG.idle_exit_s + 1
    bench.feed(ev.Tick)
    assert not bench.of(ac.Exit)
    bench.feed(ev.Copied, save_id=FIRST_ID, is_done=True)
    bench.now += CONFIG.idle_exit_s + 1
    bench.feed(ev.Tick)
    assert [leave.reason for leave in bench.of(ac.Exit)] == ["idle"]


@pytest.mark.parametrize("ends", ["done", "late"])
def test_a_drain_waits_for_copies_until_its_timeout_and_says_what_is_left(ends: str) -> None:
    bench = Bench(replace(CONFIG, keep_snapshots_s=0.0))
    bench.hello()
    committed(bench)
    scanned(bench)
    leave(bench)
    bench.feed(ev.StopRequested)
    look(bench)
    bench.now += CONFIG.staging_grace_s + 1
    assert not [a for a in bench.feed(ev.Tick) if isinstance(a, ac.Exit)]
    if ends == "done":
        bench.feed(ev.Copied, save_id=FIRST_ID, is_done=True)
        look(bench)  # once more, for what was sealed meanwhile
        assert [(leave.complete, leave.reason) for leave in bench.of(ac.Exit)] == [(True, "drained")]
        return
    bench.now += CONFIG.drain_timeout_s
    said = bench.core.handle(ev.Tick(now=bench.now))
    assert [leave.reason for leave in said if isinstance(leave, ac.Exit)] == ["drain timeout"]
    assert any("1 checkpoints are not in their mirrors" in log.text for log in said if isinstance(log, ac.Log))


def test_ranks_that_name_different_mirrors_disagree() -> None:
    bench = Bench()
    slots = []
    for rank, peer in enumerate((b"0", b"1")):
        bench.hello(peer, str(rank) * 16, rank, 2)
        slots.append(bench.slot(peer))
        bench.begin(slots[rank], peer=peer)
        bench.feed(ev.Prepared, key=(FIRST, rank))
        bench.submit(slots[rank], peer=peer)
    bench.read(slots[0], world_size=2, mirror=PLACE)
    bench.read(slots[1], world_size=2, rank=1, mirror="/elsewhere")
    assert bench.phase(rank=0) == "failed"
    assert "rank 1 saves with mirror='/elsewhere', rank 0 with mirror='s3://bucket/run/step-5'" in str(bench.pushed())


def test_copies_that_wait_are_bounded_and_the_rest_is_found_by_a_search_once_there_is_room(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirrors, "MAX_COPIES", 2)
    ids = [SaveId(0, number, "b" * 12) for number in range(6)]
    found = [unmirrored(one, f"s3://bucket/run/{n}", f"/ckpt/{n}") for n, one in enumerate(ids)]
    committed(bench)  # the newest
    scanned(bench, *found)
    done = []
    while jobs := bench.of(ac.CopyToMirror):
        done += [job.save_id for job in jobs]
        assert len(bench.core._mirrors._open) <= 2 and bench.core._mirrors.is_behind
        bench.feed(ev.Copied, save_id=done[-1], is_done=True)
        if bench.of(ac.ScanUnmirrored):
            left = [one for one in found if one.save_id not in done]
            scanned(bench, *left, unmirrored(FIRST_ID, PLACE, PATH))
    assert [one for one in done if one != FIRST_ID] == ids and FIRST_ID in done
    assert not bench.core._mirrors.is_behind


def test_a_search_that_hangs_keeps_only_copies_of_its_own_directory_waiting(bench: Bench) -> None:
    committed(bench)
    committed(bench, SECOND, "/other/b", "s3://bucket/else/b")
    scanned(bench, root="/other")
    assert copies(bench) == [SECOND] and asked(bench).phase == "waiting"


def test_a_search_that_failed_is_repeated_with_the_next_commit(bench: Bench) -> None:
    committed(bench)
    bench.feed(ev.UnmirroredFound, root="/ckpt", error=ERROR)
    committed(bench, SECOND, "/ckpt/b", "s3://bucket/run/b")
    assert [job.root for job in bench.of(ac.ScanUnmirrored)] == ["/ckpt"]


def test_a_save_that_is_found_committed_while_it_is_copied_is_not_copied_twice(bench: Bench) -> None:
    asked(bench)
    scanned(bench)
    assert copies(bench) == [FIRST]
    committed(bench)
    assert copies(bench) == [] and asked(bench).phase == "copying"


def test_a_drain_does_not_wait_for_copies_while_trainers_can_save_nowhere(bench: Bench) -> None:
    committed(bench)
    scanned(bench)
    bench.feed(ev.StopRequested)
    look(bench)
    assert [leave.reason for leave in bench.of(ac.Exit)] == ["drained"]


def test_options_of_object_stores_go_with_the_copies_that_a_search_finds(bench: Bench) -> None:
    bench.hello(b"o", "3" * 16, 0, 1, storage={"region": "x"})
    asked(bench, peer=b"o")
    (job,) = bench.of(ac.ScanUnmirrored)
    bench.feed(ev.UnmirroredFound, root=job.root, found=(unmirrored(OLDER),), storage=job.storage)
    (copy,) = bench.of(ac.CopyToMirror)
    assert copy.save_id == OLDER and dict(copy.storage) == dict(job.storage) == {"region": "x"}


def test_copies_that_dead_trainers_have_left_get_the_options_of_the_next_one(bench: Bench) -> None:
    """Theirs may have expired."""
    bench.hello(b"o", "3" * 16, 0, 1, storage={"token": "old"})
    asked(bench, peer=b"o", save_id=OLDER, mirror="s3://bucket/run/old", path="/ckpt/old")
    asked(bench, peer=b"o", save_id=FIRST)
    asked(bench, peer=b"o", save_id=SECOND, mirror="s3://elsewhere/b", path="/ckpt/b")
    scanned(bench)
    assert [(job.save_id, dict(job.storage)) for job in bench.of(ac.CopyToMirror)] == [
        (OLDER, {"token": "old"}),
        (SECOND, {"token": "old"}),
    ]
    for save_id in (OLDER, SECOND_ID):
        bench.feed(ev.Copied, save_id=save_id, error=ERROR)
    bench.say(m.Goodbye, b"o")
    bench.now += FORGET_AFTER_S + 1
    third = "000000-00000009-" + FIRST[-12:]
    bench.hello(b"n", "4" * 16, 0, 1, storage={"token": "new"})
    committed(bench, third, "/ckpt/c", "s3://bucket/run/c", peer=b"n")
    found: dict[str, Any] = {job.save_id: dict(job.storage) for job in bench.of(ac.CopyToMirror)}
    for save_id in (OLDER, SaveId.parse(third), FIRST_ID):
        bench.feed(ev.Copied, save_id=save_id, is_done=True)
        found |= {job.save_id: dict(job.storage) for job in bench.of(ac.CopyToMirror)}
    assert found == {
        OLDER: {"token": "new"},
        FIRST: {"token": "new"},
        third: {"token": "new"},
        SECOND: {"token": "old"},
    }, "options are those of one place"


def test_a_copy_that_its_trainer_asks_for_keeps_its_options(bench: Bench) -> None:
    bench.hello(b"o", "3" * 16, 0, 1, storage={"token": "mine"})
    asked(bench, peer=b"o")
    scanned(bench)
    bench.hello(b"n", "4" * 16, 0, 1, storage={"token": "another's"})
    committed(bench, SECOND, "/ckpt/b", "s3://bucket/run/b", peer=b"n")
    bench.feed(ev.Copied, save_id=FIRST_ID, error=ERROR)
    bench.now += FIRST_PAUSE_S
    bench.feed(ev.Tick)
    assert [dict(job.storage) for job in bench.of(ac.CopyToMirror)] == [{"token": "mine"}]


def test_progress_is_shown_beside_what_is_known(bench: Bench) -> None:
    committed(bench)
    rows = with_copied(bench.core.report()["mirrors"], {FIRST_ID: 40})
    assert [(row["step"], row["nbytes"], row["copied_nbytes"]) for row in rows] == [(5, 100, 40)]
    assert with_copied(rows, {})[0]["copied_nbytes"] is None


def test_a_message_has_some_of_the_copies_that_wait_and_metrics_have_all(bench: Bench) -> None:
    committed(bench)
    scanned(bench, *(unmirrored(SaveId(0, number, "b" * 12)) for number in range(200)))
    assert len(bench.core.report(has_all_mirrors=True)["mirrors"]) == 201
    assert [row["save_id"] for row in bench.core.report()["mirrors"]] == [SaveId(0, n, "b" * 12) for n in range(50)]


def test_a_peer_without_a_session_is_refused() -> None:
    assert code(asked(Bench())) == "unknown_save"
