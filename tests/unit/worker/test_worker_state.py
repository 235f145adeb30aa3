"""The worker's core, one behaviour at a time. No sockets, no sleeps: events in, actions out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from worker_bench import COMMIT_TIMEOUT_S, CONFIG, ERROR, FIRST, OTHER_RUN, PATH, REQUEST, SECOND, Bench, code

from asyncckpt.errors import CheckpointExistsError, InsufficientMemoryError, SaveFailedError, from_wire, to_wire
from asyncckpt.protocol import messages as m
from asyncckpt_worker.core import actions as ac
from asyncckpt_worker.core import events as ev
from asyncckpt_worker.core import model as records
from asyncckpt_worker.core.tables import History


@pytest.fixture
def bench() -> Bench:
    """A core with one session, that keeps nothing for trainers that are gone (`test_worker_keeping`)."""
    bench = Bench(replace(CONFIG, keep_snapshots_s=0.0))
    bench.hello()
    return bench


# ---- sessions


@pytest.mark.parametrize("hidden", [True, False])
def test_hello_of_a_process_that_cannot_be_watched_is_refused_and_may_come_again(hidden: bool) -> None:
    bench = Bench()
    if hidden:
        bench.resources.alive = False
    else:
        bench.resources.no_watch = SaveFailedError("the worker failed", code="internal")
    assert code(bench.hello()) == ("worker_unavailable" if hidden else "save_failed")
    assert not bench.core.tables.sessions and not bench.core.tables.peers
    bench.resources.alive, bench.resources.no_watch = True, None
    assert isinstance(bench.hello(), m.Welcome)


def test_hello_over_a_new_connection_moves_the_session_there(bench: Bench) -> None:
    slot = bench.slot()
    assert isinstance(bench.hello(peer=b"q"), m.Welcome)
    assert isinstance(bench.begin(slot, peer=b"q"), m.Ok)
    assert code(bench.say(m.Goodbye, b"p")) == "unknown_save"


@pytest.mark.parametrize(
    "changes",
    [
        {"peer": b"q", "pid": 9},
        {"peer": b"q", "pid_start": 9},
        {"peer": b"q", "rank": 1, "world_size": 2},
        {"session": "2" * 16},
        {"peer": b"q", "session": "2" * 16, "rank": 2, "world_size": 2},
    ],
    ids=["another pid", "another start", "another rank", "second session of a connection", "rank beyond its world"],
)
def test_hello_that_contradicts_what_is_known_is_refused(bench: Bench, changes: dict[str, Any]) -> None:
    assert code(bench.hello(**changes)) == "protocol"


def test_hello_ends_the_session_that_it_replaces(bench: Bench) -> None:
    sealed, begun, empty = bench.slot(), bench.slot(), bench.slot()
    bench.begin(begun, SECOND, path="/ckpt/b")
    bench.feed(ev.Prepared, key=(SECOND, 0))
    assert isinstance(bench.hello(b"q", "2" * 16, replaces="1" * 16), m.Welcome)
    assert set(bench.core.tables.sessions) == {"2" * 16}
    assert bench.of(ac.Unwatch) == [ac.Unwatch(session="1" * 16)]
    assert {a.slot for a in bench.of(ac.ReadSlot)} == {sealed, begun, empty}
    bench.read(sealed)
    assert bench.phase() == "sealed", "what was sealed is taken up"
    bench.feed(ev.SlotRead, slot=begun, reason="OPEN")
    bench.feed(ev.SlotRead, slot=empty, reason="EMPTY")
    assert bench.phase(SECOND) == "abandoned" and set(bench.core.tables.slots) == {sealed}
    assert code(bench.say(m.Allocate, b"p", nbytes=12288, populate=False)) == "unknown_save"
    assert isinstance(bench.hello(b"q", "2" * 16, replaces="1" * 16), m.Welcome)


@pytest.mark.parametrize(
    ("changes", "sessions"),
    [
        ({"replaces": "1" * 16, "pid": 9}, "12"),
        ({"replaces": "1" * 16, "pid_start": 9}, "12"),
        ({"replaces": "9" * 16}, "12"),
        ({"replaces": "2" * 16}, "12"),
        ({"replaces": "1" * 16, "is_hidden": True}, "1"),
    ],
    ids=["of another process", "of another start", "unknown", "itself", "by an invisible process"],
)
def test_hello_that_may_not_replace_a_session_leaves_it(bench: Bench, changes: dict[str, Any], sessions: str) -> None:
    bench.resources.alive = not changes.pop("is_hidden", False)
    bench.hello(b"q", "2" * 16, **changes)
    assert set(bench.core.tables.sessions) == {digit * 16 for digit in sessions}


def test_status_and_drain_need_no_session_and_drain_is_answered_before_the_exit() -> None:
    bench = Bench()
    bench.say(m.Status)
    assert bench.of(ac.SendStatus)
    bench.say(m.Drain, now=False)
    assert [type(a) for a in bench.actions] == [ac.Send, ac.Draining, ac.Exit]
    assert bench.of(ac.Exit) == [ac.Exit(complete=True, reason="drained")]


# ---- slots


def test_allocate_is_granted_and_its_repeat_gets_the_same_slot(bench: Bench) -> None:
    slot = bench.slot()
    granted = m.Granted(id=2, slot=slot, fd=100 + slot, nbytes=12288, token=b"t" * 16)
    assert bench.of(ac.Send)[0].message == granted
    assert bench.say(m.Allocate, id=2, nbytes=12288, populate=True) == granted and not bench.asked("create_slot")


def test_allocate_without_memory_is_refused_and_may_be_tried_again(bench: Bench) -> None:
    bench.resources.no_slot = from_wire(ERROR)
    assert code(bench.say(m.Allocate, id=50, nbytes=12288, populate=True)) == "save_failed"
    assert not bench.core.tables.slots
    bench.resources.no_slot = None
    assert isinstance(bench.say(m.Allocate, id=50, nbytes=12288, populate=True), m.Granted)


NO_MEMORY = InsufficientMemoryError("it does not fit", nbytes=12288, available=0)


def test_slot_that_does_not_fit_while_another_is_freed_waits_for_that(bench: Bench) -> None:
    old = bench.slot()
    bench.say(m.Release, slot=old)
    bench.resources.no_slot = NO_MEMORY
    assert bench.say(m.Allocate, id=50, nbytes=12288, populate=True) is None
    (created,) = bench.asked("create_slot")
    assert bench.feed(ev.SlotRead, slot=old, reason="EMPTY") == [ac.FreeSlot(slot=old)]
    assert bench.core.tables.jobs == 1 and bench.say(m.Allocate, id=50, nbytes=12288, populate=True) is None
    bench.feed(ev.SlotFreed, slot=old)
    assert bench.asked("create_slot") == [created]
    assert code(bench.of(ac.Send)[0].message) == "insufficient_memory", "nothing more will be freed"
    assert not bench.core.tables.slots and bench.core.tables.jobs == 0


def test_slot_that_waits_for_memory_is_forgotten_with_its_session(bench: Bench) -> None:
    old = bench.slot()
    bench.say(m.Release, slot=old)
    bench.resources.no_slot = NO_MEMORY
    bench.say(m.Allocate, nbytes=12288, populate=True)
    bench.feed(ev.Died, session="1" * 16)
    bench.feed(ev.SlotRead, slot=old, reason="EMPTY")
    assert not bench.feed(ev.SlotFreed, slot=old) and not bench.core.tables.slots


def test_session_has_a_bounded_number_of_slots(bench: Bench) -> None:
    for _ in range(records.MAX_SLOTS_PER_SESSION):
        bench.slot()
    assert code(bench.say(m.Allocate, nbytes=12288, populate=True)) == "protocol"


def test_released_slot_is_read_once_more_then_freed_and_release_may_be_repeated(bench: Bench) -> None:
    slot = bench.slot()
    for _ in range(2):
        assert isinstance(bench.say(m.Release, slot=slot), m.Ok)
        assert not bench.of(ac.FreeSlot)
    bench.feed(ev.SlotRead, slot=slot, reason="EMPTY")
    assert bench.of(ac.FreeSlot) == [ac.FreeSlot(slot=slot)]
    assert isinstance(bench.say(m.Release, slot=slot), m.Ok)


def test_slots_of_others_can_be_neither_released_nor_used(bench: Bench) -> None:
    bench.hello(b"q", "2" * 16)
    for slot in (bench.slot(b"q"), 99):
        assert code(bench.say(m.Release, slot=slot)) == "unknown_save"
        assert code(bench.begin(slot)) == "unknown_save"


def test_slot_is_kept_while_its_save_is_in_flight_though_released(bench: Bench) -> None:
    slot = bench.slot()
    bench.at_writing(slot)
    bench.say(m.Release, slot=slot)
    bench.feed(ev.SlotRead, slot=slot, generation=1, request=REQUEST)
    assert not bench.of(ac.FreeSlot)
    bench.feed(ev.Written, key=(FIRST, 0), result="r")
    assert not bench.of(ac.FreeSlot), "a durable save may need a rewrite until it is committed"
    bench.feed(ev.Published, save_id=FIRST)
    assert bench.of(ac.FreeSlot) == [ac.FreeSlot(slot=slot)]


# ---- begin and submit


@pytest.mark.parametrize("fsync", [True, False])
@pytest.mark.parametrize("overwrite", [True, False])
def test_begin_prepares_the_directory_as_the_save_wants_it(bench: Bench, overwrite: bool, fsync: bool) -> None:
    assert isinstance(bench.begin(bench.slot(), overwrite=overwrite, fsync=fsync), m.Ok)
    (prepare,) = bench.of(ac.Prepare)
    assert (prepare.path, prepare.umask, prepare.step) == (PATH, 0o22, 5)
    assert (prepare.overwrite, prepare.fsync) == (overwrite, fsync)


@pytest.mark.parametrize("sealed", [False, True])
def test_repeated_or_late_begin_changes_nothing(bench: Bench, sealed: bool) -> None:
    slot = bench.slot()
    if sealed:
        bench.submit(slot)
        bench.read(slot)
    else:
        bench.begin(slot)
    assert isinstance(bench.begin(slot), m.Ok) and not bench.of(ac.Prepare)
    assert bench.phase() == ("sealed" if sealed else "open")


def test_one_save_is_begun_and_submitted_in_one_place_only(bench: Bench) -> None:
    first, second = bench.slot(), bench.slot()
    bench.begin(first)
    for slot, generation in ((second, 1), (first, 2)):
        assert code(bench.begin(slot, generation=generation)) == "protocol"
        assert code(bench.submit(slot, generation=generation)) == "protocol"
    assert code(bench.submit(55)) == "unknown_save"


def test_slot_in_use_takes_no_other_save_and_no_generation_twice(bench: Bench) -> None:
    slot = bench.slot()
    bench.at_writing(slot, generation=4)
    assert code(bench.begin(slot, SECOND, generation=5)) == "protocol"
    assert code(bench.submit(slot, SECOND, generation=4)) == "unknown_save"
    assert bench.phase() == "writing"
    bench.feed(ev.Written, key=(FIRST, 0), error=ERROR)
    assert code(bench.begin(slot, SECOND, generation=4)) == "unknown_save"
    assert isinstance(bench.begin(slot, SECOND, generation=5), m.Ok)


def test_begin_of_the_next_save_in_a_slot_ends_the_one_that_was_never_sealed(bench: Bench) -> None:
    slot = bench.slot()
    bench.begin(slot)
    bench.begin(slot, SECOND, generation=2)
    assert bench.phase() == "abandoned" and bench.phase(SECOND) == "open"


def test_begin_is_refused_when_too_many_jobs_wait(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    slot = bench.slot()
    monkeypatch.setattr("asyncckpt_worker.core.slots.MAX_JOBS", 0)
    assert code(bench.begin(slot)) == "worker_unavailable"


def test_submit_reads_the_slot_is_answered_after_that_and_waits_for_the_directory(bench: Bench) -> None:
    slot = bench.slot()
    bench.begin(slot)
    assert bench.submit(slot) is None
    assert bench.of(ac.ReadSlot) == [ac.ReadSlot(slot=slot)]
    bench.read(slot)
    assert [type(a.message) for a in bench.of(ac.Send)] == [m.Ok]
    assert bench.phase() == "sealed" and not bench.of(ac.Write) and not bench.of(ac.Prepare)
    bench.feed(ev.Prepared, key=(FIRST, 0))
    assert len(bench.of(ac.Write)) == 1


def test_repeated_submits_are_all_answered_and_write_once(bench: Bench) -> None:
    slot = bench.slot()
    bench.begin(slot)
    bench.feed(ev.Prepared, key=(FIRST, 0))
    bench.submit(slot)
    bench.submit(slot)
    bench.read(slot)
    assert [type(a.message) for a in bench.of(ac.Send)] == [m.Ok, m.Ok] and len(bench.of(ac.Write)) == 1
    assert bench.read(slot) == []
    assert isinstance(bench.submit(slot), m.Ok) and not bench.of(ac.ReadSlot)


def test_submit_of_an_unsealed_slot_is_refused_and_the_save_goes_on(bench: Bench) -> None:
    slot = bench.slot()
    bench.begin(slot)
    bench.submit(slot)
    bench.feed(ev.SlotRead, slot=slot, reason="the slot is OPEN, not SEALED")
    reply = bench.of(ac.Send)[0].message
    assert code(reply) == "unknown_save" and "OPEN" in reply.error["text"]
    assert bench.phase() == "open"


def test_submit_naming_another_save_than_the_slot_holds_is_refused(bench: Bench) -> None:
    slot = bench.slot()
    bench.submit(slot, SECOND)
    bench.read(slot, FIRST)
    assert code(bench.of(ac.Send)[-1].message) == "unknown_save"


@pytest.mark.parametrize(
    "changes",
    [{"step": 6}, {"path": "/elsewhere"}, {"overwrite": True}, {"world_size": 2}, {"rank": 1, "world_size": 2}],
)
def test_sealed_request_that_contradicts_its_begin_fails_the_save(bench: Bench, changes: dict[str, Any]) -> None:
    slot = bench.slot()
    bench.begin(slot)
    bench.feed(ev.Prepared, key=(FIRST, 0))
    bench.submit(slot)
    bench.read(slot, **changes)
    assert not bench.of(ac.Write)
    save = bench.core.tables.find(FIRST)
    assert save is not None and save.outcome == "failed" and save.error is not None
    if "world_size" in changes:
        assert save.error["code"] == "ranks_disagree"
    else:
        assert save.error["fields"]["code"] == "disagree"


def test_forgotten_save_is_not_written_again_from_its_old_slot(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    slot = bench.slot()
    bench.at_writing(slot)
    bench.feed(ev.Written, key=(FIRST, 0), result="r")
    bench.feed(ev.Published, save_id=FIRST)
    bench.core.tables.ended = History()
    bench.feed(ev.Died, session="1" * 16)
    bench.read(slot)
    assert not bench.of(ac.Prepare) and not bench.core.tables.saves


# ---- the life of a save


def test_whole_save_pushes_durable_and_committed(bench: Bench) -> None:
    slot = bench.slot()
    bench.at_writing(slot)
    bench.feed(ev.Written, key=(FIRST, 0), result="r", report={"nbytes": 9})
    assert [r["phase"] for r in bench.pushed()] == ["durable"]
    assert bench.of(ac.Commit) == [ac.Commit(save_id=FIRST, requests=(REQUEST,), results=("r",))]
    bench.feed(ev.Published, save_id=FIRST, report={"seconds_commit": 0.5})
    assert bench.pushed() == [{"save_id": FIRST, "phase": "committed", "report": {"nbytes": 9, "seconds_commit": 0.5}}]


def test_failed_prepare_fails_the_save_while_it_is_staged(bench: Bench) -> None:
    slot = bench.slot()
    bench.begin(slot)
    error = to_wire(CheckpointExistsError("there", path=PATH))
    bench.feed(ev.Prepared, key=(FIRST, 0), error=error)
    assert [(r["phase"], r["error"]["code"]) for r in bench.pushed()] == [("failed", "checkpoint_exists")]
    bench.submit(slot)
    bench.read(slot)
    assert not bench.of(ac.Write) and bench.phase() == "failed"


def test_failed_write_publishes_nothing_and_the_next_save_works(bench: Bench) -> None:
    slot = bench.slot()
    bench.at_writing(slot)
    bench.feed(ev.Written, key=(FIRST, 0), error=ERROR)
    assert bench.row()["error"]["fields"]["code"] == "ENOSPC" and not bench.of(ac.Commit)
    bench.at_writing(slot, SECOND, generation=2)


@pytest.mark.parametrize(
    "part", ["asyncckpt_worker.core.saves.compare", "asyncckpt_worker.mirrors.schedule.MirrorRegistry.committed"]
)
def test_bug_behind_the_commit_does_not_fail_the_save(bench: Bench, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a bug")

    slot = bench.slot()
    bench.begin(slot)
    bench.feed(ev.Prepared, key=(FIRST, 0))
    bench.submit(slot)
    bench.read(slot, mirror="/mirror/a")
    bench.feed(ev.Written, key=(FIRST, 0), result="files")
    monkeypatch.setattr(part, broken)
    bench.feed(ev.Published, save_id=FIRST)
    (fault,) = bench.of(ac.LogFault)
    assert not fault.save_id and [row["phase"] for row in bench.pushed()] == ["committed"]


def test_failed_commit_removes_the_files(bench: Bench) -> None:
    bench.at_writing(bench.slot())
    bench.feed(ev.Written, key=(FIRST, 0), result="r")
    bench.feed(ev.Published, save_id=FIRST, error=ERROR)
    assert bench.phase() == "failed" and bench.of(ac.Remove) == [ac.Remove(save_id=FIRST, path=PATH)]


def test_unknown_commit_removes_nothing(bench: Bench) -> None:
    bench.at_writing(bench.slot())
    bench.feed(ev.Written, key=(FIRST, 0), result="r")
    bench.feed(ev.Published, save_id=FIRST, error=ERROR, unknown=True)
    assert bench.phase() == "unknown" and not bench.of(ac.Remove)


def test_results_that_come_twice_or_for_nothing_are_ignored(bench: Bench) -> None:
    bench.at_writing(bench.slot())
    bench.feed(ev.Written, key=(FIRST, 0), result="r")
    for kind, fields in (
        (ev.Written, {"key": (FIRST, 0), "error": ERROR}),
        (ev.Prepared, {"key": (FIRST, 0), "error": ERROR}),
        (ev.Written, {"key": (SECOND, 3), "error": ERROR}),
        (ev.Published, {"save_id": SECOND}),
        (ev.Removed, {"save_id": SECOND}),
        (ev.SlotRead, {"slot": 77}),
        (ev.SlotAdopted, {"slot": 77, "error": ERROR}),
        (ev.Died, {"session": "9" * 16}),
    ):
        assert bench.feed(kind, **fields) == []
    assert bench.phase() == "durable"


def test_withdraw_abandons_and_keeps_the_slot(bench: Bench) -> None:
    slot = bench.slot()
    bench.begin(slot)
    assert isinstance(bench.say(m.Withdraw, save_id=FIRST, reason="out of luck", skipped=False), m.Ok)
    assert bench.phase() == "abandoned" and "out of luck" in bench.row()["error"]["text"]
    assert isinstance(bench.begin(slot, SECOND, generation=2), m.Ok)


def test_heartbeat_leaves_out_unknown_saves(bench: Bench) -> None:
    bench.begin(bench.slot())
    reply = bench.say(m.Heartbeat, saves=(SECOND, FIRST, FIRST))
    assert [(r["save_id"], r["phase"]) for r in reply.saves] == [(FIRST, "open")]


def test_history_of_ended_saves_is_bounded(bench: Bench) -> None:
    slot = bench.slot()
    for generation in range(1, records.MAX_HISTORY + 50):
        save_id = f"000001-{generation:08d}-aaaaaaaaaaaa"
        bench.begin(slot, save_id, generation)
        bench.feed(ev.Prepared, key=(save_id, 0), error=ERROR)
    assert (len(bench.core.tables.saves), len(bench.core.tables.ended)) == (0, records.MAX_HISTORY)
    assert bench.phase(f"000001-{records.MAX_HISTORY + 49:08d}-aaaaaaaaaaaa") == "failed"


def test_lineage_counts_saves_that_no_disk_shows_yet(bench: Bench) -> None:
    bench.begin(bench.slot(), "000007-00000000-aaaaaaaaaaaa", path="/ckpt/first")
    for path, epoch in (("/ckpt/b", 8), ("/elsewhere/b", 2)):
        bench.say(m.Lineage, id=70, run=OTHER_RUN, path=path, least_epoch=0)
        bench.feed(ev.LineageScanned, run=OTHER_RUN, path=path, epoch=2)
        assert bench.of(ac.Send)[0].message == m.LineageFound(id=70, epoch=epoch)


def test_lineage_beyond_the_last_epoch_is_refused(bench: Bench) -> None:
    bench.begin(bench.slot(), "999999-00000000-aaaaaaaaaaaa", path="/ckpt/first")
    bench.say(m.Lineage, id=70, run=OTHER_RUN, path=PATH, least_epoch=0)
    bench.feed(ev.LineageScanned, run=OTHER_RUN, path=PATH, epoch=2)
    assert bench.of(ac.Send)[0].message.error["fields"]["code"] == "epoch"


# ---- order

LARGE, SMALL = FIRST, SECOND


@pytest.fixture
def durable_small(bench: Bench) -> Bench:
    """A large save is being written in slot 1, a small one after it is durable in slot 2."""
    first, second = bench.slot(), bench.slot()
    bench.at_writing(first, LARGE)
    bench.begin(second, SMALL, path="/ckpt/b")
    bench.feed(ev.Prepared, key=(SMALL, 0))
    bench.submit(second, SMALL)
    bench.read(second, SMALL, path="/ckpt/b")
    bench.feed(ev.Written, key=(SMALL, 0), result="small")
    assert bench.phase(SMALL) == "durable" and not bench.of(ac.Commit)
    return bench


def test_save_that_never_ends_holds_the_next_one_until_its_deadline(durable_small: Bench) -> None:
    bench = durable_small
    bench.now = COMMIT_TIMEOUT_S
    bench.feed(ev.Tick)
    assert [c.save_id for c in bench.of(ac.Commit)] == [SMALL] and bench.phase(LARGE) == "writing"
    bench.feed(ev.Published, save_id=SMALL)
    assert bench.phase(SMALL) == "committed"


def test_saves_of_other_runs_wait_for_nobody(durable_small: Bench) -> None:
    bench, other = durable_small, "000002-00000009-bbbbbbbbbbbb"
    bench.hello(b"q", "2" * 16)
    third = bench.slot(b"q")
    bench.begin(third, other, peer=b"q", path="/ckpt/c")
    bench.feed(ev.Prepared, key=(other, 0))
    bench.submit(third, other, peer=b"q")
    bench.read(third, other, path="/ckpt/c")
    bench.feed(ev.Written, key=(other, 0), result="r")
    assert [c.save_id for c in bench.of(ac.Commit)] == [other]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("sealed_first", [False, True])
def test_second_save_to_a_path_in_flight_is_refused(bench: Bench, sealed_first: bool, overwrite: bool) -> None:
    first, second = bench.slot(), bench.slot()
    if sealed_first:
        bench.at_writing(first)
    else:
        bench.begin(first)
    reply = bench.begin(second, SECOND, overwrite=overwrite)
    assert reply.error["fields"]["code"] == "path_in_use" and not bench.of(ac.Prepare)
    assert bench.row(SECOND)["error"] == reply.error and bench.phase() == ("writing" if sealed_first else "open")
    bench.submit(second, SECOND)
    bench.read(second, SECOND)
    assert bench.phase(SECOND) == "failed" and not bench.of(ac.Prepare), "sealed all the same, it is not taken up"


# ---- death


def test_death_after_the_seal_commits_though_no_message_came(bench: Bench) -> None:
    slot = bench.slot()
    bench.feed(ev.Died, session="1" * 16)
    assert bench.of(ac.ReadSlot) == [ac.ReadSlot(slot=slot)]
    bench.read(slot)
    bench.feed(ev.Prepared, key=(FIRST, 0))
    bench.feed(ev.Written, key=(FIRST, 0), result="r")
    assert bench.of(ac.Commit)
    bench.feed(ev.Published, save_id=FIRST)
    assert bench.of(ac.FreeSlot) == [ac.FreeSlot(slot=slot)] and bench.phase() == "committed"


def test_death_during_a_read_reads_again(bench: Bench) -> None:
    slot = bench.slot()
    bench.begin(slot)
    bench.submit(slot)
    bench.feed(ev.Died, session="1" * 16)
    assert not bench.of(ac.ReadSlot)
    bench.feed(ev.SlotRead, slot=slot, reason="OPEN: the read was faster than the seal")
    assert bench.of(ac.ReadSlot) and not bench.of(ac.FreeSlot)
    bench.read(slot)
    assert bench.phase() == "sealed"


def test_goodbye_takes_up_what_is_sealed_and_unwatches(bench: Bench) -> None:
    slot = bench.slot()
    assert isinstance(bench.say(m.Goodbye), m.Ok)
    assert bench.of(ac.Unwatch) and bench.of(ac.ReadSlot)
    bench.read(slot)
    assert bench.phase() == "sealed"


# ---- several ranks


@pytest.fixture
def pair() -> tuple[Bench, int, int]:
    """Two ranks of one world and a slot of each."""
    bench = Bench(replace(CONFIG, keep_snapshots_s=0.0))
    bench.hello(b"p", "1" * 16, 0, 2)
    bench.hello(b"q", "2" * 16, 1, 2)
    return bench, bench.slot(b"p"), bench.slot(b"q")


def test_save_of_two_ranks_commits_when_both_are_durable(pair: tuple[Bench, int, int]) -> None:
    bench, first, second = pair
    bench.at_writing(first)
    bench.feed(ev.Written, key=(FIRST, 0), result="r0")
    assert not bench.of(ac.Commit)
    bench.at_writing(second, peer=b"q", rank=1)
    bench.feed(ev.Written, key=(FIRST, 1), result="r1")
    assert bench.of(ac.Commit)[0].results == ("r0", "r1")
    bench.feed(ev.Published, save_id=FIRST)
    assert sorted(a.peer for a in bench.of(ac.Send)) == [b"p", b"q"]


def test_save_of_two_ranks_waits_for_the_one_that_still_writes(pair: tuple[Bench, int, int]) -> None:
    bench, first, second = pair
    bench.at_writing(first)
    bench.at_writing(second, peer=b"q", rank=1)
    bench.feed(ev.Written, key=(FIRST, 0), result="r0")
    assert (bench.phase(rank=0), bench.phase(rank=1)) == ("durable", "writing")
    assert not bench.of(ac.Commit)
    bench.feed(ev.Written, key=(FIRST, 1), result="r1")
    assert bench.of(ac.Commit)[0].results == ("r0", "r1")


def test_failure_of_one_rank_is_told_to_all_and_the_files_are_removed_once_nobody_writes(
    pair: tuple[Bench, int, int],
) -> None:
    bench, first, second = pair
    bench.at_writing(first)
    bench.at_writing(second, peer=b"q", rank=1)
    bench.feed(ev.Written, key=(FIRST, 0), error=ERROR)
    assert (bench.phase(rank=0), bench.phase(rank=1)) == ("failed", "failed")
    assert {a.peer for a in bench.of(ac.Send)} == {b"p", b"q"} and not bench.of(ac.Remove)
    bench.feed(ev.Written, key=(FIRST, 1), result="r1")
    assert len(bench.of(ac.Remove)) == 1


def test_slot_is_kept_for_a_writer_that_outlives_its_save(pair: tuple[Bench, int, int]) -> None:
    bench, first, second = pair
    bench.at_writing(first)
    bench.at_writing(second, peer=b"q", rank=1)
    bench.feed(ev.Written, key=(FIRST, 0), error=ERROR)
    bench.feed(ev.Died, session="2" * 16)
    bench.read(second, rank=1, world_size=2)
    assert not bench.of(ac.FreeSlot)
    bench.feed(ev.Written, key=(FIRST, 1), result="r1")
    assert bench.of(ac.FreeSlot) == [ac.FreeSlot(slot=second)]


@pytest.mark.parametrize("moment", ["open", "writing", "committing", "committed"])
def test_rank_of_another_world_never_spoils_a_commit(moment: str) -> None:
    bench = Bench()
    bench.hello()
    bench.hello(b"q", "2" * 16, 1, 2)
    first, second = bench.slot(), bench.slot(b"q")
    if moment == "open":
        bench.begin(first)
    else:
        bench.at_writing(first)
    if moment in ("committing", "committed"):
        bench.feed(ev.Written, key=(FIRST, 0), result="r")
    if moment == "committed":
        bench.feed(ev.Published, save_id=FIRST)
    before = bench.phase()
    bench.submit(second, peer=b"q")
    bench.read(second, rank=1, world_size=2)
    assert code(next(a.message for a in bench.of(ac.Send) if a.peer == b"q")) == "ranks_disagree"
    assert bench.phase(rank=1) is None
    assert bench.phase() == (before if moment.startswith("commit") else "failed")
    bench.say(m.Withdraw, b"q", save_id=FIRST, reason="", skipped=False)
    assert bench.phase(rank=1) is None
    if moment == "committing":
        bench.feed(ev.Published, save_id=FIRST)
        assert bench.phase() == "committed"


def test_missing_rank_ends_in_a_commit_timeout(pair: tuple[Bench, int, int]) -> None:
    bench, first, _ = pair
    bench.at_writing(first)
    bench.feed(ev.Written, key=(FIRST, 0), result="r0")
    bench.now = COMMIT_TIMEOUT_S
    bench.feed(ev.Tick)
    assert bench.row()["error"]["code"] == "commit_timeout" and "[1]" in bench.row()["error"]["text"]
    assert bench.row()["error"]["fields"]["missing_ranks"] == [1]


# ---- the step is left to rank 0


@pytest.mark.parametrize("first_to_seal", [0, 1])
@pytest.mark.parametrize("begun", [None, 5])
def test_a_rank_may_leave_the_step_to_rank_0(
    pair: tuple[Bench, int, int], first_to_seal: int, begun: int | None
) -> None:
    bench, *slots = pair
    peers, steps = (b"p", b"q"), (5, None)
    for rank in (0, 1):
        bench.begin(slots[rank], peer=peers[rank], step=begun if rank == 0 else None)
        bench.feed(ev.Prepared, key=(FIRST, rank))
    for rank in (first_to_seal, 1 - first_to_seal):
        bench.submit(slots[rank], peer=peers[rank])
        bench.read(slots[rank], rank=rank, world_size=2, step=steps[rank])
    assert {part.step for part in bench.core.tables.saves[FIRST].ranks.values()} == {5}
    for rank in (1, 0):
        bench.feed(ev.Written, key=(FIRST, rank), result="r")
    assert [request.step for request in bench.of(ac.Commit)[0].requests] == [5, None]
    bench.feed(ev.Published, save_id=FIRST)
    assert bench.phase(rank=1) == "committed"
    assert bench.core.report()["saves"][0]["step"] == 5


def test_rank_0_has_to_say_the_step_when_it_seals(pair: tuple[Bench, int, int]) -> None:
    bench, first, _ = pair
    bench.begin(first, step=None)
    bench.feed(ev.Prepared, key=(FIRST, 0))
    bench.submit(first)
    bench.read(first, world_size=2, step=None)
    save = bench.core.tables.find(FIRST)
    assert save.outcome == "failed" and "has no step" in str(save.error)


def test_steps_that_are_said_must_be_one(pair: tuple[Bench, int, int]) -> None:
    bench, first, second = pair
    for slot, peer, rank, step in ((first, b"p", 0, 5), (second, b"q", 1, 6)):
        bench.begin(slot, peer=peer, step=None)
        bench.feed(ev.Prepared, key=(FIRST, rank))
        bench.submit(slot, peer=peer)
        bench.read(slot, rank=rank, world_size=2, step=step)
    assert bench.core.tables.find(FIRST).outcome == "failed"
    assert "rank 1 saves step 6" in str(bench.row(peer=b"q")["error"])
