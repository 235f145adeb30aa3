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
from asyncckpt_worker.core.status import report as core_report
from asyncckpt_worker.core.tables import History


@pytest.fixture
def bench() -> Bench:
    """A core with one session, that keeps nothing for trainers that are gone (`test_worker_keeping`)."""
    bench = Bench(replace(CONFIG, keep_snapshots_s=0.0))
    bench.hello()
    return bench


# ---- sessions


def test_hello_is_answered_once_the_process_is_watched() -> None:
    bench = Bench()
    bench.say(m.Hello, session="1" * 16, replaces="", package="t", pid=7, pid_start=8, rank=0, world_size=1)
    assert bench.asked("watch") == [("1" * 16, 7, 8)]
    (send,) = bench.of(ac.Send)
    assert isinstance(send.message, m.Welcome) and (send.message.id, send.message.instance) == (1, "ab" * 8)


def test_hello_of_an_invisible_process_is_refused_and_forgotten() -> None:
    bench = Bench()
    bench.resources.alive = False
    bench.say(m.Hello, session="1" * 16, replaces="", package="t", pid=7, pid_start=8, rank=0, world_size=1)
    assert code(bench.of(ac.Send)[0].message) == "worker_unavailable"
    assert not bench.core.tables.sessions and not bench.core.tables.peers


def test_hello_of_a_process_that_cannot_be_watched_hears_why_and_may_come_again() -> None:
    bench = Bench()
    bench.resources.no_watch = SaveFailedError("the worker failed", code="internal")
    assert code(bench.hello()) == "save_failed"
    assert not bench.core.tables.sessions and not bench.core.tables.peers
    bench.resources.no_watch = None
    assert isinstance(bench.hello(), m.Welcome)


def test_repeated_hello_is_welcomed_again_and_changes_nothing(bench: Bench) -> None:
    slot = bench.slot()
    assert isinstance(bench.hello(), m.Welcome)
    assert bench.core.tables.sessions["1" * 16].slots == {slot}


def test_hello_over_a_new_connection_moves_the_session_there(bench: Bench) -> None:
    slot = bench.slot()
    assert isinstance(bench.hello(peer=b"q"), m.Welcome)
    assert isinstance(bench.begin(slot, peer=b"q"), m.Ok)
    assert code(bench.say(m.Goodbye, b"p")) == "unknown_save"


@pytest.mark.parametrize("changes", [{"pid": 9}, {"pid_start": 9}, {"rank": 1, "world_size": 2}])
def test_hello_with_the_session_of_another_process_is_refused(bench: Bench, changes: dict[str, int]) -> None:
    assert code(bench.hello(peer=b"q", **changes)) == "protocol"


def test_hello_with_a_second_session_on_one_connection_is_refused(bench: Bench) -> None:
    assert code(bench.hello(session="2" * 16)) == "protocol"


def test_hello_with_a_rank_beyond_its_world_is_refused() -> None:
    assert code(Bench().hello(rank=2, world_size=2)) == "protocol"


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (m.Allocate, {"nbytes": 12288, "populate": False}),
        (m.Release, {"slot": 1}),
        (m.Lineage, {"run": OTHER_RUN, "path": "/a"}),
        (m.Consent, {"save_id": FIRST, "granted": True, "reason": ""}),
        (m.Share, {"board": "b", "offset": 0, "total": 0, "data": b""}),
        (m.Fetch, {"board": "b", "rank": 0, "offset": 0}),
        (m.Submit, {"save_id": FIRST, "slot": 1, "generation": 1}),
        (m.Withdraw, {"save_id": FIRST, "reason": "", "skipped": False}),
        (m.Heartbeat, {"saves": ()}),
        (m.Goodbye, {}),
    ],
)
def test_request_without_a_session_is_refused(kind: Any, fields: dict[str, Any]) -> None:
    assert code(Bench().say(kind, **fields)) == "unknown_save"


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


@pytest.mark.parametrize("changes", [{"pid": 9}, {"pid_start": 9}])
def test_hello_cannot_replace_the_session_of_another_process(bench: Bench, changes: dict[str, int]) -> None:
    bench.hello(b"q", "2" * 16, replaces="1" * 16, **changes)
    assert set(bench.core.tables.sessions) == {"1" * 16, "2" * 16}


@pytest.mark.parametrize("replaces", ["9" * 16, "2" * 16])
def test_hello_that_replaces_nobody_changes_nothing(bench: Bench, replaces: str) -> None:
    bench.hello(b"q", "2" * 16, replaces=replaces)
    assert set(bench.core.tables.sessions) == {"1" * 16, "2" * 16}


def test_hello_of_an_invisible_process_replaces_nobody(bench: Bench) -> None:
    bench.resources.alive = False
    bench.hello(b"q", "2" * 16, replaces="1" * 16)
    assert set(bench.core.tables.sessions) == {"1" * 16}


def test_status_and_drain_need_no_session() -> None:
    bench = Bench()
    bench.say(m.Status)
    assert bench.of(ac.SendStatus)
    assert isinstance(bench.say(m.Drain, now=False), m.Ok)


def test_drain_over_the_wire_answers_before_it_exits() -> None:
    bench = Bench()
    bench.say(m.Drain, now=False)
    assert [type(a) for a in bench.actions] == [ac.Send, ac.Exit]


# ---- slots


def test_allocate_is_granted_with_fd_and_token(bench: Bench) -> None:
    slot = bench.slot()
    assert bench.of(ac.Send)[0].message == m.Granted(id=2, slot=slot, fd=100 + slot, nbytes=12288, token=b"t" * 16)


def test_repeated_allocate_gets_the_same_slot(bench: Bench) -> None:
    slot = bench.slot()
    again = bench.say(m.Allocate, id=2, nbytes=12288, populate=True)
    assert again.slot == slot and not bench.asked("create_slot")


def test_late_repeat_of_allocate_after_the_release_makes_no_slot(bench: Bench) -> None:
    slot = bench.slot()
    bench.say(m.Release, slot=slot)
    assert code(bench.say(m.Allocate, id=2, nbytes=12288, populate=True)) == "unknown_save"
    assert not bench.asked("create_slot")


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


def test_released_slot_is_read_once_more_then_freed(bench: Bench) -> None:
    slot = bench.slot()
    assert isinstance(bench.say(m.Release, slot=slot), m.Ok)
    assert bench.of(ac.ReadSlot) and not bench.of(ac.FreeSlot)
    bench.feed(ev.SlotRead, slot=slot, reason="EMPTY")
    assert bench.of(ac.FreeSlot) == [ac.FreeSlot(slot=slot)]


def test_release_may_be_repeated_but_not_for_slots_of_others(bench: Bench) -> None:
    slot = bench.slot()
    bench.say(m.Release, slot=slot)
    assert isinstance(bench.say(m.Release, slot=slot), m.Ok)
    bench.feed(ev.SlotRead, slot=slot, reason="EMPTY")
    assert isinstance(bench.say(m.Release, slot=slot), m.Ok)
    bench.hello(b"q", "2" * 16)
    others = bench.slot(b"q")
    assert code(bench.say(m.Release, slot=others)) == "unknown_save"
    assert code(bench.say(m.Release, slot=99)) == "unknown_save"


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


def test_slot_of_a_session_that_lives_is_never_freed(bench: Bench) -> None:
    slot = bench.slot()
    bench.at_writing(slot)
    bench.feed(ev.Written, key=(FIRST, 0), result="r")
    bench.feed(ev.Published, save_id=FIRST)
    bench.now = 1e9
    bench.feed(ev.Tick)
    assert slot in bench.core.tables.slots


# ---- begin and submit


def test_begin_prepares_the_directory_and_is_acknowledged_at_once(bench: Bench) -> None:
    assert isinstance(bench.begin(bench.slot()), m.Ok)
    (prepare,) = bench.of(ac.Prepare)
    assert (prepare.path, prepare.umask, prepare.step) == (PATH, 0o22, 5)


@pytest.mark.parametrize("fsync", [True, False])
def test_directory_is_flushed_only_when_the_save_is(bench: Bench, fsync: bool) -> None:
    bench.begin(bench.slot(), fsync=fsync)
    assert bench.of(ac.Prepare)[0].fsync is fsync


@pytest.mark.parametrize("overwrite", [True, False])
def test_what_stands_at_the_path_is_looked_at_as_the_save_wants_to_treat_it(bench: Bench, overwrite: bool) -> None:
    slot = bench.slot()
    bench.begin(slot, overwrite=overwrite)
    assert bench.of(ac.Prepare)[0].overwrite is overwrite
    bench.begin(slot, SECOND, generation=2)
    assert bench.of(ac.Prepare)[0].overwrite is False


def test_a_sealed_request_that_overwrites_unlike_its_begin_fails(bench: Bench) -> None:
    slot = bench.slot()
    bench.begin(slot)
    bench.submit(slot)
    bench.read(slot, overwrite=True)
    assert bench.phase() == "failed" and "overwrite" in bench.row()["error"]["text"]


def test_repeated_begin_prepares_once(bench: Bench) -> None:
    slot = bench.slot()
    bench.begin(slot)
    assert isinstance(bench.begin(slot), m.Ok) and not bench.of(ac.Prepare)


def test_begin_in_a_slot_that_is_not_the_sessions_is_refused(bench: Bench) -> None:
    bench.hello(b"q", "2" * 16)
    others = bench.slot(b"q")
    assert code(bench.begin(others)) == "unknown_save"
    assert code(bench.begin(77)) == "unknown_save"


def test_begin_of_one_save_in_two_places_is_refused(bench: Bench) -> None:
    first, second = bench.slot(), bench.slot()
    bench.begin(first)
    assert code(bench.begin(second)) == "protocol"
    assert code(bench.begin(first, generation=2)) == "protocol"


def test_begin_with_a_generation_that_was_taken_is_refused(bench: Bench) -> None:
    slot = bench.slot()
    bench.at_writing(slot, generation=4)
    bench.feed(ev.Written, key=(FIRST, 0), error=ERROR)
    assert code(bench.begin(slot, SECOND, generation=4)) == "unknown_save"
    assert isinstance(bench.begin(slot, SECOND, generation=5), m.Ok)


def test_begin_while_the_slots_save_is_in_flight_is_refused(bench: Bench) -> None:
    slot = bench.slot()
    bench.at_writing(slot)
    assert code(bench.begin(slot, SECOND, generation=2)) == "protocol"
    assert bench.phase() == "writing"


def test_begin_of_the_next_save_in_a_slot_ends_the_one_that_was_never_sealed(bench: Bench) -> None:
    slot = bench.slot()
    bench.begin(slot)
    bench.begin(slot, SECOND, generation=2)
    assert bench.phase() == "abandoned" and bench.phase(SECOND) == "open"


def test_begin_of_another_world_size_is_refused(bench: Bench) -> None:
    bench.begin(bench.slot())
    bench.hello(b"q", "2" * 16, rank=1, world_size=2)
    assert code(bench.begin(bench.slot(b"q"), peer=b"q")) == "ranks_disagree"
    assert bench.row()["error"]["code"] == "ranks_disagree"


def test_begin_is_refused_when_too_many_jobs_wait(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    slot = bench.slot()
    monkeypatch.setattr("asyncckpt_worker.core.slots.MAX_JOBS", 0)
    assert code(bench.begin(slot)) == "worker_unavailable"


def test_submit_reads_the_slot_and_is_answered_after_that(bench: Bench) -> None:
    slot = bench.slot()
    bench.begin(slot)
    assert bench.submit(slot) is None
    assert bench.of(ac.ReadSlot) == [ac.ReadSlot(slot=slot)]
    bench.read(slot)
    assert [type(a.message) for a in bench.of(ac.Send)] == [m.Ok]
    assert bench.phase() == "sealed"


def test_submit_before_the_directory_is_ready_waits_for_it(bench: Bench) -> None:
    slot = bench.slot()
    bench.begin(slot)
    bench.submit(slot)
    assert not [a for a in bench.read(slot) if isinstance(a, (ac.Write, ac.Prepare))]
    bench.feed(ev.Prepared, key=(FIRST, 0))
    assert len(bench.of(ac.Write)) == 1


def test_submit_without_begin_takes_everything_from_the_slot(bench: Bench) -> None:
    slot = bench.slot()
    bench.submit(slot)
    bench.read(slot)
    (prepare,) = bench.of(ac.Prepare)
    assert prepare.path == PATH
    bench.feed(ev.Prepared, key=(FIRST, 0))
    assert bench.of(ac.Write)[0].request == REQUEST


def test_late_begin_after_submit_changes_nothing(bench: Bench) -> None:
    slot = bench.slot()
    bench.submit(slot)
    bench.read(slot)
    assert isinstance(bench.begin(slot), m.Ok)
    assert bench.phase() == "sealed" and not bench.of(ac.Prepare)


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


def test_submit_of_a_generation_that_is_over_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    slot = bench.slot()
    bench.at_writing(slot, generation=3)
    assert code(bench.submit(slot, SECOND, generation=3)) == "unknown_save"


def test_submit_from_the_wrong_place_is_refused(bench: Bench) -> None:
    first, second = bench.slot(), bench.slot()
    bench.begin(first)
    assert code(bench.submit(second)) == "protocol"
    assert code(bench.submit(first, generation=9)) == "protocol"
    assert code(bench.submit(55)) == "unknown_save"


@pytest.mark.parametrize(
    "changes", [{"step": 6}, {"path": "/elsewhere"}, {"world_size": 2}, {"rank": 1, "world_size": 2}]
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
        (ev.SlotCreated, {"slot": 77, "error": ERROR}),
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


def test_withdraw_after_the_seal_comes_too_late(bench: Bench) -> None:
    bench.at_writing(bench.slot())
    assert isinstance(bench.say(m.Withdraw, save_id=FIRST, reason="", skipped=False), m.Ok)
    assert bench.phase() == "writing"


def test_withdraw_that_overtakes_begin_keeps_the_save_from_beginning(bench: Bench) -> None:
    slot = bench.slot()
    bench.say(m.Withdraw, save_id=FIRST, reason="", skipped=False)
    assert isinstance(bench.begin(slot), m.Ok)
    assert bench.phase() == "abandoned" and not bench.of(ac.Prepare)


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


def test_lineage_is_scanned_and_answered(bench: Bench) -> None:
    assert bench.say(m.Lineage, id=70, run=OTHER_RUN, path=PATH) is None
    bench.feed(ev.LineageScanned, run=OTHER_RUN, path=PATH, epoch=4)
    assert bench.of(ac.Send)[0].message == m.LineageFound(id=70, epoch=4)
    bench.say(m.Lineage, id=71, run=OTHER_RUN, path="/other/b")
    bench.feed(ev.LineageScanned, run=OTHER_RUN, path="/other/b", error=ERROR)
    assert code(bench.of(ac.Send)[0].message) == "save_failed"


def test_lineage_counts_saves_that_no_disk_shows_yet(bench: Bench) -> None:
    bench.begin(bench.slot(), "000007-00000000-aaaaaaaaaaaa", path="/ckpt/first")
    for path, epoch in (("/ckpt/b", 8), ("/elsewhere/b", 2)):
        bench.say(m.Lineage, id=70, run=OTHER_RUN, path=path)
        bench.feed(ev.LineageScanned, run=OTHER_RUN, path=path, epoch=2)
        assert bench.of(ac.Send)[0].message == m.LineageFound(id=70, epoch=epoch)


def test_lineage_beyond_the_last_epoch_is_refused(bench: Bench) -> None:
    bench.begin(bench.slot(), "999999-00000000-aaaaaaaaaaaa", path="/ckpt/first")
    bench.say(m.Lineage, id=70, run=OTHER_RUN, path=PATH)
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


def test_small_save_commits_after_the_large_one_before_it(durable_small: Bench) -> None:
    bench = durable_small
    bench.feed(ev.Written, key=(LARGE, 0), result="large")
    assert [c.save_id for c in bench.of(ac.Commit)] == [LARGE]
    bench.feed(ev.Published, save_id=LARGE)
    assert [c.save_id for c in bench.of(ac.Commit)] == [SMALL]


def test_save_that_fails_lets_the_ones_after_it_go(durable_small: Bench) -> None:
    bench = durable_small
    bench.feed(ev.Written, key=(LARGE, 0), error=ERROR)
    assert [c.save_id for c in bench.of(ac.Commit)] == [SMALL]


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


def test_save_that_is_only_begun_holds_the_next_one_while_its_session_lives(bench: Bench) -> None:
    first, second = bench.slot(), bench.slot()
    bench.begin(first, LARGE, path="/ckpt/b")
    bench.feed(ev.Prepared, key=(LARGE, 0))
    bench.at_writing(second, SMALL)
    bench.feed(ev.Written, key=(SMALL, 0), result="r")
    assert not bench.of(ac.Commit)
    bench.feed(ev.Died, session="1" * 16)
    bench.read(second, SMALL)
    bench.feed(ev.SlotRead, slot=first, reason="OPEN")
    assert bench.phase(LARGE) == "abandoned" and [c.save_id for c in bench.of(ac.Commit)] == [SMALL]


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


def test_sealed_slot_to_a_path_in_flight_fails_too(bench: Bench) -> None:
    first, second = bench.slot(), bench.slot()
    bench.at_writing(first)
    bench.feed(ev.Died, session="1" * 16)
    bench.read(second, SECOND)
    error = bench.core.tables.find(SECOND).error
    assert error is not None and error["fields"]["code"] == "path_in_use" and bench.phase() == "writing"


def test_path_is_free_again_when_its_save_has_ended(bench: Bench) -> None:
    slot = bench.slot()
    bench.at_writing(slot)
    bench.feed(ev.Written, key=(FIRST, 0), error=ERROR)
    assert isinstance(bench.begin(slot, SECOND, generation=2), m.Ok)


def test_ranks_of_one_save_share_its_path(pair: tuple[Bench, int, int]) -> None:
    bench, first, second = pair
    assert isinstance(bench.begin(first), m.Ok) and isinstance(bench.begin(second, peer=b"q"), m.Ok)


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


def test_death_before_the_seal_abandons_and_frees(bench: Bench) -> None:
    slot = bench.slot()
    bench.begin(slot)
    bench.feed(ev.Died, session="1" * 16)
    bench.feed(ev.SlotRead, slot=slot, reason="OPEN")
    assert bench.phase() == "abandoned" and bench.of(ac.FreeSlot)
    bench.feed(ev.Prepared, key=(FIRST, 0))
    assert not bench.of(ac.Write)


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


def test_death_of_a_session_with_a_save_being_written_finishes_it(bench: Bench) -> None:
    slot = bench.slot()
    bench.at_writing(slot)
    bench.feed(ev.Died, session="1" * 16)
    bench.read(slot)
    assert not bench.of(ac.FreeSlot)
    bench.feed(ev.Written, key=(FIRST, 0), error=ERROR)
    assert bench.of(ac.FreeSlot)


def test_goodbye_takes_up_what_is_sealed_and_unwatches(bench: Bench) -> None:
    slot = bench.slot()
    assert isinstance(bench.say(m.Goodbye), m.Ok)
    assert bench.of(ac.Unwatch) and bench.of(ac.ReadSlot)
    bench.read(slot)
    assert bench.phase() == "sealed"


def test_message_of_the_dead_is_refused(bench: Bench) -> None:
    slot = bench.slot()
    bench.feed(ev.Died, session="1" * 16)
    assert code(bench.submit(slot)) == "unknown_save"


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


def test_failure_of_one_rank_ends_the_save_on_all(pair: tuple[Bench, int, int]) -> None:
    bench, first, second = pair
    bench.at_writing(first)
    bench.begin(second, peer=b"q")
    bench.feed(ev.Written, key=(FIRST, 0), error=ERROR)
    assert (bench.phase(rank=0), bench.phase(rank=1)) == ("failed", "failed")
    assert {a.peer for a in bench.of(ac.Send)} == {b"p", b"q"}


def test_rank_that_comes_after_the_failure_fails_too(pair: tuple[Bench, int, int]) -> None:
    bench, first, second = pair
    bench.at_writing(first)
    bench.feed(ev.Written, key=(FIRST, 0), error=ERROR)
    assert isinstance(bench.begin(second, peer=b"q"), m.Ok)
    assert bench.row(peer=b"q")["error"]["fields"]["code"] == "ENOSPC"


def test_files_of_a_failed_save_are_removed_once_nobody_writes(pair: tuple[Bench, int, int]) -> None:
    bench, first, second = pair
    bench.at_writing(first)
    bench.at_writing(second, peer=b"q", rank=1)
    bench.feed(ev.Written, key=(FIRST, 0), error=ERROR)
    assert not bench.of(ac.Remove)
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


def test_ranks_that_disagree_never_commit(pair: tuple[Bench, int, int]) -> None:
    bench, first, second = pair
    bench.at_writing(first)
    bench.begin(second, peer=b"q", path="/ckpt/other")
    bench.submit(second, peer=b"q")
    bench.read(second, rank=1, world_size=2, path="/ckpt/other")
    assert bench.core.tables.find(FIRST).outcome == "failed"


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


def test_bug_ends_the_save_that_it_met(bench: Bench) -> None:
    first, second = bench.slot(), bench.slot()
    bench.at_writing(first)
    bench.begin(second, SECOND, path="/ckpt/b")
    bench.feed(ev.Broken, save_id=FIRST, reason="AssertionError()")
    assert bench.row()["error"]["fields"]["code"] == "internal" and bench.phase(SECOND) == "open"
    bench.feed(ev.Broken, save_id=FIRST, reason="again")
    bench.feed(ev.Broken, save_id="000009-00000000-aaaaaaaaaaaa", reason="of nobody")


def test_missing_rank_ends_in_a_commit_timeout(pair: tuple[Bench, int, int]) -> None:
    bench, first, _ = pair
    bench.at_writing(first)
    bench.feed(ev.Written, key=(FIRST, 0), result="r0")
    bench.now = COMMIT_TIMEOUT_S
    bench.feed(ev.Tick)
    assert bench.row()["error"]["code"] == "commit_timeout" and "[1]" in bench.row()["error"]["text"]
    assert bench.row()["error"]["fields"]["missing_ranks"] == [1]


def test_second_session_with_the_same_rank_cannot_touch_the_save(pair: tuple[Bench, int, int]) -> None:
    bench, first, _ = pair
    bench.hello(b"z", "3" * 16, 0, 2)
    twin = bench.slot(b"z")
    bench.begin(first)
    assert code(bench.begin(twin, peer=b"z")) == "protocol"
    bench.say(m.Withdraw, b"z", save_id=FIRST, reason="", skipped=False)
    bench.feed(ev.Died, session="3" * 16)
    bench.read(twin, world_size=2)
    assert bench.phase() == "open" and bench.core.tables.entry((FIRST, 0)).slot == first  # type: ignore[union-attr]


# ---- the end


def test_drain_without_saves_exits_at_once(bench: Bench) -> None:
    bench.feed(ev.StopRequested)
    assert bench.of(ac.Exit) == [ac.Exit(complete=True, reason="drained")]


def test_drain_finishes_what_is_in_flight(bench: Bench) -> None:
    bench.at_writing(bench.slot())
    bench.feed(ev.StopRequested)
    bench.feed(ev.SlotRead, slot=1, generation=1, request=REQUEST)
    bench.feed(ev.Written, key=(FIRST, 0), result="r")
    assert not bench.of(ac.Exit)
    bench.feed(ev.Published, save_id=FIRST)
    assert bench.of(ac.ReadSlot) and not bench.of(ac.Exit), "one more look"
    bench.feed(ev.SlotRead, slot=1, generation=1, request=REQUEST)
    assert bench.of(ac.Exit) == [ac.Exit(complete=True, reason="drained")]


def test_drain_looks_once_more_before_the_exit(bench: Bench) -> None:
    slot = bench.slot()
    bench.feed(ev.StopRequested)
    bench.feed(ev.SlotRead, slot=slot, reason="EMPTY")
    assert bench.of(ac.ReadSlot) and not bench.of(ac.Exit)
    bench.read(slot)
    assert bench.phase() == "sealed" and not bench.of(ac.Exit)


def test_drain_lets_a_known_session_begin_within_the_grace(bench: Bench) -> None:
    slot = bench.slot()
    bench.feed(ev.StopRequested)
    bench.feed(ev.SlotRead, slot=slot, reason="OPEN", opened=True)
    bench.now = 9.0
    bench.feed(ev.Tick)
    assert not bench.of(ac.Exit) and not bench.of(ac.ReadSlot), "a trainer is copying, its Begin is under way"
    assert isinstance(bench.begin(slot), m.Ok)
    bench.now = 18.0
    bench.feed(ev.Prepared, key=(FIRST, 0))
    assert not bench.of(ac.Exit) and bench.core.wakes_at == 19.0
    bench.submit(slot)
    bench.read(slot)
    assert bench.phase() == "writing" and not bench.of(ac.Exit)


def test_drain_with_a_slot_that_stays_open_ends_after_the_grace(bench: Bench) -> None:
    slot = bench.slot()
    bench.feed(ev.StopRequested)
    bench.feed(ev.SlotRead, slot=slot, reason="OPEN", opened=True)
    assert bench.core.wakes_at == CONFIG.staging_grace_s
    bench.now = CONFIG.staging_grace_s
    bench.feed(ev.Tick)
    bench.feed(ev.SlotRead, slot=slot, reason="OPEN", opened=True)
    assert bench.of(ac.Exit) == [ac.Exit(complete=True, reason="drained")]


def test_drain_takes_up_what_is_sealed_though_its_doorbell_is_under_way(bench: Bench) -> None:
    slot = bench.slot()
    bench.begin(slot)
    bench.feed(ev.StopRequested)
    bench.read(slot)
    bench.now = 11.0
    bench.feed(ev.Tick)
    assert bench.phase() == "sealed" and not bench.of(ac.Exit)


def test_drain_waits_a_little_for_what_is_being_staged(bench: Bench) -> None:
    slot = bench.slot()
    bench.begin(slot)
    bench.feed(ev.Prepared, key=(FIRST, 0))
    bench.feed(ev.StopRequested)
    bench.feed(ev.SlotRead, slot=slot, reason="OPEN")
    assert not bench.of(ac.Exit) and bench.core.wakes_at == CONFIG.staging_grace_s
    bench.now = CONFIG.staging_grace_s
    bench.feed(ev.Tick)
    bench.feed(ev.SlotRead, slot=slot, reason="OPEN")
    assert bench.of(ac.Exit) == [ac.Exit(complete=True, reason="drained")]


def test_drain_gives_up_after_its_timeout_and_says_so(bench: Bench) -> None:
    bench.at_writing(bench.slot())
    bench.feed(ev.StopRequested)
    bench.feed(ev.SlotRead, slot=1, reason="")
    bench.now = CONFIG.drain_timeout_s
    bench.feed(ev.Tick)
    assert bench.of(ac.Exit) == [ac.Exit(complete=False, reason="drain timeout")]


def test_second_stop_exits_at_once(bench: Bench) -> None:
    bench.at_writing(bench.slot())
    bench.feed(ev.StopRequested)
    bench.feed(ev.StopRequested, immediately=True)
    assert bench.of(ac.Exit) == [ac.Exit(complete=False, reason="stopped at once")]


def test_stop_without_saves_is_no_error_though_slots_are_still_looked_into(bench: Bench) -> None:
    bench.slot()
    bench.feed(ev.StopRequested, immediately=True)
    assert bench.of(ac.Exit) == [ac.Exit(complete=True, reason="stopped at once")]
    assert not [log for log in bench.of(ac.Log) if log.level == "error"]


def test_draining_worker_refuses_sessions_slots_and_saves(bench: Bench) -> None:
    first, second = bench.slot(), bench.slot()
    bench.at_writing(first)
    bench.feed(ev.StopRequested)
    assert code(bench.hello(b"q", "2" * 16)) == "worker_unavailable"
    assert code(bench.say(m.Allocate, nbytes=12288, populate=False)) == "worker_unavailable"
    bench.now = CONFIG.staging_grace_s
    assert code(bench.begin(second, SECOND)) == "worker_unavailable"


def test_idle_worker_exits_and_a_session_keeps_it() -> None:
    bench = Bench()
    bench.now = 599.0
    bench.feed(ev.Tick)
    assert not bench.of(ac.Exit) and bench.core.wakes_at == 600.0
    bench.hello()
    bench.now = 5000.0
    bench.feed(ev.Tick)
    assert not bench.of(ac.Exit) and bench.core.wakes_at is None
    bench.say(m.Goodbye)
    bench.now = 5600.0
    bench.feed(ev.Tick)
    assert bench.of(ac.Exit) == [ac.Exit(complete=True, reason="idle")]


def test_idle_exit_of_zero_never_comes() -> None:
    bench = Bench(replace(CONFIG, idle_exit_s=0.0))
    bench.now = 1e9
    assert bench.feed(ev.Tick) == [] and bench.core.wakes_at is None


def test_status_report_names_sessions_slots_and_saves(bench: Bench) -> None:
    bench.at_writing(bench.slot())
    report = core_report(bench.core.tables, "ab" * 8)
    assert report["sessions"][0]["pid"] == 7
    assert report["slots"][0] == {"slot": 1, "nbytes": 12288, "state": "lent", "save_id": FIRST}
    row = {"save_id": FIRST, "step": 5, "path": PATH, "phase": "writing", "ranks": {"0": "writing"}, "missing": []}
    assert report["saves"][0] == row


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
    assert {entry.step for entry in bench.core.tables.saves[FIRST].ranks.values()} == {5}
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
    assert save.outcome == "failed" and "says no step" in str(save.error)


def test_steps_that_are_said_must_be_one(pair: tuple[Bench, int, int]) -> None:
    bench, first, second = pair
    for slot, peer, rank, step in ((first, b"p", 0, 5), (second, b"q", 1, 6)):
        bench.begin(slot, peer=peer, step=None)
        bench.feed(ev.Prepared, key=(FIRST, rank))
        bench.submit(slot, peer=peer)
        bench.read(slot, rank=rank, world_size=2, step=step)
    assert bench.core.tables.find(FIRST).outcome == "failed"
    assert "rank 1 saves step 6" in str(bench.row(peer=b"q")["error"])
