"""The worker's core and what trainers leave behind: kept, listed, held, lent again, given up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from worker_bench import CONFIG, ERROR, FIRST, SECOND, Bench

from asyncckpt.errors import InsufficientMemoryError, SaveFailedError, to_wire
from asyncckpt.protocol import messages as m
from asyncckpt_worker.core import actions as ac
from asyncckpt_worker.core import events as ev
from asyncckpt_worker.core.kept_snapshots import GOODBYE_KEEP_S, MAX_KEPT_SAVES, MAX_ROWS_NBYTES
from asyncckpt_worker.service.memory_pressure import is_short

KEEP_S = 300.0
NEWER_RUN = "000002-00000000-bbbbbbbbbbbb"
NO_ROOM = InsufficientMemoryError("no room", nbytes=1)


class Keeper(Bench):
    """A core that keeps snapshots."""

    def __init__(self, keep_s: float = KEEP_S) -> None:
        super().__init__(replace(CONFIG, keep_snapshots_s=keep_s))

    def staged(self, slot: int, save_id: str = FIRST, generation: int = 1, rank: int = 0, **changes: Any) -> None:
        """A rank has sealed a snapshot, and its files are being written."""
        peer = b"p" if rank == 0 else b"q"
        held = self.core.tables.slots[slot]
        self.begin(slot, save_id, generation, peer, **changes)
        self.feed(ev.Prepared, key=(save_id, rank))
        self.submit(slot, save_id, generation, peer)
        self.read(slot, save_id, generation, rank=rank, world_size=held.world_size, **changes)

    def committed(self, slot: int, save_id: str = FIRST, generation: int = 1, **changes: Any) -> None:
        """A save of one rank, from begin to end."""
        self.staged(slot, save_id, generation, **changes)
        self.feed(ev.Written, key=(save_id, 0), result="r")
        self.feed(ev.Published, save_id=save_id)
        assert self.phase(save_id) == "committed"

    def slot(self, peer: bytes = b"p", nbytes: int = 12288) -> int:
        granted = self.say(m.Allocate, peer, nbytes=nbytes, populate=True)
        return int(granted.slot)

    def dies(self, session: str = "1" * 16) -> list[Any]:
        """A trainer dies; its slots are read and found as they were taken up."""
        slots = sorted(self.core.tables.sessions[session].slots)
        self.feed(ev.Died, session=session)
        return self.reread(slots)

    def reread(self, slots: list[int]) -> list[Any]:
        found: list[Any] = []
        for number in slots:
            slot = self.core.tables.slots[number]
            if slot.key is None or slot.accepted_generation < 0:
                found += self.feed(ev.SlotRead, slot=number, reason="OPEN")
            else:
                part = self.core.tables.part(slot.key)
                assert part is not None
                found += self.read(
                    number, slot.key[0], slot.accepted_generation, rank=slot.rank, world_size=slot.world_size
                )
        return found

    def tick(self, **fields: Any) -> list[Any]:
        return self.feed(ev.Tick, **fields)

    def restarted(self, session: str = "2" * 16, peer: bytes = b"r", pid: int = 70, **changes: Any) -> bytes:
        """A new trainer's session."""
        self.hello(peer, session, pid=pid, **changes)
        return peer

    def rows(self, path: str = "/ckpt", peer: bytes = b"r", *, hold: bool = False) -> list[tuple[str, int, bool]]:
        found = self.say(m.Recall, peer, path=path, hold=hold)
        return [(p["save_id"], p["rank"], p["committed"]) for p in found.parts]

    def state(self, slot: int) -> str:
        held = self.core.tables.slots.get(slot)
        return held.state if held is not None else "freed"


@pytest.fixture
def keeper() -> Keeper:
    """A core that keeps, with one session."""
    keeper = Keeper()
    keeper.hello()
    return keeper


# ---- what is kept


def test_committed_snapshot_of_a_dead_trainer_is_kept_and_listed(keeper: Keeper) -> None:
    slot = keeper.slot()
    keeper.committed(slot)
    keeper.dies()
    assert keeper.state(slot) == "kept"
    peer = keeper.restarted()
    (part,) = keeper.say(m.Recall, peer, path="/ckpt/a", hold=False).parts
    assert (part["slot"], part["fd"], part["generation"], part["token"]) == (slot, 100 + slot, 1, b"t" * 16)
    assert part["whole"] and part["committed"] and part["step"] == 5 and part["world_size"] == 1


def test_snapshot_in_flight_is_listed_and_stays_when_it_is_committed(keeper: Keeper) -> None:
    slot = keeper.slot()
    keeper.staged(slot)
    keeper.dies()
    keeper.restarted()
    assert keeper.rows() == [(FIRST, 0, False)]
    keeper.feed(ev.Written, key=(FIRST, 0), result="r")
    keeper.feed(ev.Published, save_id=FIRST)
    assert keeper.rows() == [(FIRST, 0, True)] and keeper.state(slot) == "kept"


def test_snapshot_that_is_sealed_when_its_trainer_dies_is_taken_up_and_kept(keeper: Keeper) -> None:
    slot = keeper.slot()
    keeper.begin(slot)
    keeper.feed(ev.Died, session="1" * 16)
    keeper.read(slot)
    keeper.feed(ev.Prepared, key=(FIRST, 0))
    keeper.restarted()
    assert keeper.rows() == [(FIRST, 0, False)]


@pytest.mark.parametrize("read_first", [True, False])
def test_slot_that_was_opened_without_a_word_is_freed_and_hides_nothing(keeper: Keeper, read_first: bool) -> None:
    first, second = keeper.slot(), keeper.slot()
    keeper.committed(first)
    keeper.committed(second, SECOND)
    keeper.feed(ev.Died, session="1" * 16)
    if read_first:
        keeper.reread([first])
    keeper.feed(ev.SlotRead, slot=second, reason="OPEN", opened=True)
    if not read_first:
        keeper.reread([first])
    assert (keeper.state(first), keeper.state(second)) == ("kept", "freed")


def test_only_the_newest_save_of_a_directory_is_kept(keeper: Keeper) -> None:
    first, second = keeper.slot(), keeper.slot()
    keeper.committed(first)
    keeper.committed(second, SECOND)
    keeper.dies()
    assert (keeper.state(first), keeper.state(second)) == ("freed", "kept")


def test_newer_save_of_the_restarted_trainer_replaces_what_is_kept(keeper: Keeper) -> None:
    old = keeper.slot()
    keeper.staged(old)
    keeper.feed(ev.Written, key=(FIRST, 0), error=ERROR)
    keeper.dies()
    peer = keeper.restarted()
    new = keeper.slot(peer)
    keeper.begin(new, NEWER_RUN, peer=peer)
    keeper.feed(ev.Prepared, key=(NEWER_RUN, 0))
    keeper.submit(new, NEWER_RUN, peer=peer)
    assert keeper.state(old) == "kept", "the new one is not staged yet"
    keeper.read(new, NEWER_RUN)
    assert keeper.state(old) == "freed"
    assert keeper.rows() == [(NEWER_RUN, 0, False)], "a living trainer's snapshot is listed too"


def test_as_many_saves_are_kept_as_the_limit_says_those_on_disk_go_first() -> None:
    keeper = Keeper()
    slots = []
    for n in range(MAX_KEPT_SAVES + 1):
        peer = keeper.restarted(f"{n + 1:016x}", str(n).encode(), pid=70 + n)
        slot, save_id, path = keeper.slot(peer, 4096 * (3 + n)), f"000001-00000000-{n:012x}", f"/ckpt/{n}/a"
        keeper.begin(slot, save_id, peer=peer, path=path)
        keeper.feed(ev.Prepared, key=(save_id, 0))
        keeper.submit(slot, save_id, peer=peer)
        keeper.read(slot, save_id, path=path)
        keeper.feed(ev.Written, key=(save_id, 0), **({"error": ERROR} if n == 0 else {"result": "r"}))
        if n:
            keeper.feed(ev.Published, save_id=save_id)
        keeper.now += 1
        keeper.dies(f"{n + 1:016x}")
        slots.append(slot)
    assert [keeper.state(slot) for slot in slots] == ["kept", "freed", *["kept"] * (MAX_KEPT_SAVES - 1)]


@pytest.mark.parametrize("why", ["told to keep nothing", "released", "kept long enough"])
def test_what_is_not_kept_is_freed(why: str) -> None:
    keeper = Keeper(keep_s=0 if why == "told to keep nothing" else KEEP_S)
    keeper.hello()
    slot = keeper.slot()
    keeper.committed(slot)
    if why == "released":
        keeper.say(m.Release, slot=slot)
        keeper.reread([slot])
    else:
        keeper.dies()
    if why == "kept long enough":
        keeper.now += KEEP_S
        keeper.tick()
    assert keeper.state(slot) == "freed"


def test_slot_of_a_dead_worker_is_kept_when_its_trainer_dies_too_and_lent_again(keeper: Keeper) -> None:
    slot = keeper.adopted()
    keeper.read(slot, generation=4)
    keeper.feed(ev.Prepared, key=(FIRST, 0))
    keeper.dies()
    assert keeper.rows(peer=keeper.restarted()) == [(FIRST, 0, False)]
    keeper.feed(ev.Written, key=(FIRST, 0), result="r")
    keeper.feed(ev.Published, save_id=FIRST)
    assert keeper.state(slot) == "kept" and keeper.rows() == [(FIRST, 0, True)]
    assert keeper.slot(b"r") == slot
    keeper.begin(slot, NEWER_RUN, 5, peer=b"r")
    keeper.feed(ev.Prepared, key=(NEWER_RUN, 0))
    keeper.submit(slot, NEWER_RUN, 5, peer=b"r")
    keeper.read(slot, NEWER_RUN, 5)
    (write,) = keeper.of(ac.Write)
    assert not write.resumed, "what is staged into it now, no dead worker has written"


# ---- whole


class Two(Keeper):
    """Two ranks, each with a slot."""

    def __init__(self) -> None:
        super().__init__()
        self.hello(world_size=2)
        self.hello(b"q", "2" * 16, rank=1, world_size=2, pid=9)
        self.slots = [self.slot(b"p"), self.slot(b"q")]

    def both_die(self) -> None:
        for session in ("1" * 16, "2" * 16):
            self.dies(session)
        self.restarted("3" * 16)


def test_save_before_the_one_that_a_rank_has_not_staged_is_offered_where_it_is_left() -> None:
    two = Two()
    later = [two.slot(b"p"), two.slot(b"q")]
    for rank, slot in enumerate(two.slots):
        two.staged(slot, rank=rank)
    two.staged(later[0], SECOND)
    two.both_die()
    two.feed(ev.Written, key=(SECOND, 0), result="r")
    assert two.rows() == [(FIRST, 0, False), (FIRST, 1, False)]
    assert two.state(later[0]) == "freed"


def test_rank_whose_slot_was_used_again_is_missing_from_the_list() -> None:
    two = Two()
    for rank, slot in enumerate(two.slots):
        two.staged(slot, rank=rank)
    for rank in (0, 1):
        two.feed(ev.Written, key=(FIRST, rank), result="r")
    two.feed(ev.Published, save_id=FIRST)
    two.begin(two.slots[1], SECOND, 2, b"q")
    two.both_die()
    assert two.rows() == [(FIRST, 0, True)]


@pytest.mark.parametrize(
    ("error", "offered"),
    [
        *((to_wire(SaveFailedError("x", code=code)), True) for code in ("ENOSPC", "EIO", "internal", "not_shared")),
        *((to_wire(SaveFailedError("x", code=code)), False) for code in ("coverage", "slot_reused", "withdrawn")),
        ({"code": "commit_unknown", "text": ""}, True),
        ({"code": "checkpoint_exists", "text": ""}, True),
        ({"code": "replica_mismatch", "text": ""}, False),
        ({"code": "corrupt", "text": ""}, False),
    ],
    ids=lambda value: value.get("fields", {}).get("code") or value["code"] if isinstance(value, dict) else str(value),
)
def test_snapshot_is_offered_unless_its_error_speaks_against_it(keeper: Keeper, error: Any, offered: bool) -> None:
    keeper.staged(keeper.slot())
    keeper.feed(ev.Written, key=(FIRST, 0), error=error)
    assert keeper.phase() == "failed" and keeper.rows(peer=b"p") == [(FIRST, 0, False)] * offered


def test_vetoed_snapshot_is_not_offered(keeper: Keeper) -> None:
    slot = keeper.slot()
    keeper.begin(slot)
    keeper.feed(ev.Prepared, key=(FIRST, 0))
    keeper.submit(slot)
    keeper.read(slot, hook_timeout_s=5.0)
    keeper.feed(ev.Written, key=(FIRST, 0), result="r")
    keeper.say(m.Consent, save_id=FIRST, granted=False, reason="the loss is NaN")
    assert keeper.phase() == "failed" and keeper.rows(peer=b"p") == []


# ---- goodbye


@pytest.mark.parametrize("ends", [False, True])
def test_after_a_goodbye_a_snapshot_is_kept_while_the_process_may_be_ending_and_longer_once_it_has(
    keeper: Keeper, ends: bool
) -> None:
    slot = keeper.slot()
    keeper.committed(slot)
    keeper.say(m.Goodbye)
    assert not keeper.of(ac.Unwatch)
    keeper.reread([slot])
    assert keeper.state(slot) == "kept"
    if ends:
        keeper.feed(ev.Died, session="1" * 16)
    keeper.now += GOODBYE_KEEP_S
    keeper.tick()
    assert keeper.state(slot) == ("kept" if ends else "freed")
    assert keeper.of(ac.Unwatch) == ([] if ends else [ac.Unwatch(session="1" * 16)])


def test_process_that_asks_for_memory_after_its_goodbye_has_no_use_for_what_is_kept(keeper: Keeper) -> None:
    slot = keeper.slot()
    keeper.committed(slot)
    keeper.say(m.Goodbye)
    keeper.reread([slot])
    peer = keeper.restarted(pid=7)
    assert keeper.rows() == [(FIRST, 0, True)]
    assert keeper.slot(peer) != slot, "a thread of that process may still write to it"
    assert keeper.state(slot) == "freed"


# ---- holds


@pytest.mark.parametrize("ends", ["goodbye", "death"])
def test_held_slot_outlives_its_time_until_its_reader_ends(keeper: Keeper, ends: str) -> None:
    slot = keeper.slot()
    keeper.committed(slot)
    keeper.dies()
    peer = keeper.restarted()
    keeper.rows(hold=True)
    keeper.now += 2 * KEEP_S
    keeper.tick(memory_short=True)
    assert keeper.state(slot) == "kept"
    if ends == "goodbye":
        keeper.say(m.Goodbye, peer)
    else:
        keeper.feed(ev.Died, session="2" * 16)
    assert keeper.state(slot) == "freed"


def test_slot_that_is_held_when_its_save_ends_stays_while_what_another_has_left_is_being_read(keeper: Keeper) -> None:
    slot, newer = keeper.slot(), keeper.slot()
    keeper.staged(slot)
    keeper.staged(newer, SECOND, path="/ckpt/b")
    keeper.dies()
    before, left = (keeper.slot(keeper.restarted(n * 16, n.encode(), pid=80 + int(n))) for n in "34")
    reader = keeper.restarted()
    keeper.feed(ev.Died, session="3" * 16)
    assert keeper.say(m.Recall, reader, path="/ckpt", hold=True) is None, "it waits for what that one has left"
    keeper.reread([before])
    assert keeper.core.tables.slots[slot].held_by == {"2" * 16}
    keeper.feed(ev.Died, session="4" * 16)
    assert keeper.core.tables.slots[left].reading
    keeper.now += KEEP_S
    keeper.feed(ev.Written, key=(FIRST, 0), result="r")
    keeper.feed(ev.Published, save_id=FIRST)
    assert keeper.phase(FIRST) == "committed" and keeper.state(slot) != "freed"
    keeper.reread([left])
    assert (keeper.state(slot), keeper.state(left)) == ("kept", "freed")
    keeper.say(m.Goodbye, reader)
    assert keeper.state(slot) == "freed"


def test_held_slot_is_lent_to_nobody(keeper: Keeper) -> None:
    slot = keeper.slot()
    keeper.committed(slot)
    keeper.dies()
    peer = keeper.restarted()
    keeper.rows(hold=True)
    assert keeper.slot(peer) != slot
    assert keeper.state(slot) == "kept"


# ---- lent again


def test_committed_snapshots_memory_is_lent_to_the_restarted_trainer(keeper: Keeper) -> None:
    slot = keeper.slot()
    keeper.committed(slot)
    keeper.dies()
    peer = keeper.restarted()
    granted = keeper.say(m.Allocate, peer, nbytes=12288, populate=True)
    assert (granted.slot, granted.fd, granted.nbytes) == (slot, 100 + slot, 12288)
    assert not keeper.asked("create_slot") and keeper.state(slot) == "lent"
    assert keeper.rows() == [(FIRST, 0, True)], "until it is begun again"
    assert isinstance(keeper.begin(slot, NEWER_RUN, 2, peer), m.Ok)
    assert keeper.rows() == []
    keeper.feed(ev.Prepared, key=(NEWER_RUN, 0))
    keeper.submit(slot, NEWER_RUN, 2, peer)
    keeper.read(slot, NEWER_RUN, 2)
    assert keeper.phase(NEWER_RUN) == "writing"


def test_memory_that_was_lent_again_and_not_used_keeps_its_snapshot(keeper: Keeper) -> None:
    slot = keeper.slot()
    keeper.committed(slot)
    keeper.dies()
    keeper.say(m.Allocate, keeper.restarted(), nbytes=12288, populate=True)
    keeper.dies("2" * 16)
    assert keeper.state(slot) == "kept"


@pytest.mark.parametrize(
    ("changes", "nbytes", "on_disk"),
    [({"rank": 1, "world_size": 2}, 12288, True), ({}, 16384, True), ({}, 12288, False)],
    ids=["another rank", "another size", "nowhere else"],
)
def test_memory_of_another_rank_or_size_or_of_the_only_copy_is_not_lent(
    keeper: Keeper, changes: dict[str, int], nbytes: int, on_disk: bool
) -> None:
    slot = keeper.slot()
    if on_disk:
        keeper.committed(slot)
    else:
        keeper.staged(slot)
        keeper.feed(ev.Written, key=(FIRST, 0), error=ERROR)
    keeper.dies()
    keeper.say(m.Allocate, keeper.restarted(**changes), nbytes=nbytes, populate=True)
    assert keeper.asked("create_slot") and keeper.state(slot) == "kept"


# ---- memory


def test_what_is_kept_and_on_disk_makes_room_for_a_slot_that_does_not_fit(keeper: Keeper) -> None:
    slot = keeper.slot()
    keeper.committed(slot)
    keeper.dies()
    peer = keeper.restarted()
    keeper.resources.no_slot = NO_ROOM
    keeper.say(m.Allocate, peer, nbytes=1 << 20, populate=True)
    (created,) = keeper.asked("create_slot")
    assert keeper.of(ac.FreeSlot) == [ac.FreeSlot(slot=slot)] and not keeper.of(ac.Send)
    keeper.feed(ev.SlotFreed, slot=slot)
    assert keeper.asked("create_slot") == [created]


def test_the_only_copy_makes_room_for_no_slot(keeper: Keeper) -> None:
    slot = keeper.slot()
    keeper.staged(slot)
    keeper.feed(ev.Written, key=(FIRST, 0), error=ERROR)
    keeper.dies()
    peer = keeper.restarted()
    keeper.resources.no_slot = NO_ROOM
    keeper.say(m.Allocate, peer, nbytes=1 << 20, populate=True)
    assert [a.message.error["code"] for a in keeper.of(ac.Send)] == ["insufficient_memory"]  # type: ignore[attr-defined]
    assert keeper.state(slot) == "kept"


@pytest.mark.parametrize("on_disk", [True, False])
def test_what_is_kept_goes_when_the_machine_is_short_of_memory(keeper: Keeper, on_disk: bool) -> None:
    slot = keeper.slot()
    if on_disk:
        keeper.committed(slot)
    else:
        keeper.staged(slot)
        keeper.feed(ev.Written, key=(FIRST, 0), error=ERROR)
    keeper.dies()
    keeper.tick(memory_short=True)
    assert keeper.state(slot) == "freed"


@pytest.mark.parametrize(
    ("total", "available", "short"),
    [(64 << 30, 3 << 30, False), (64 << 30, 1 << 30, True), (1 << 30, 65 << 20, False), (1 << 30, 63 << 20, True)],
)
def test_short_is_a_small_part_of_all_memory(total: int, available: int, short: bool) -> None:
    assert is_short(total, available) is short


# ---- the worker's own end, and the list


@pytest.mark.parametrize("drains", [False, True])
def test_kept_snapshot_keeps_no_idle_worker_and_delays_no_drain(keeper: Keeper, drains: bool) -> None:
    slot = keeper.slot()
    keeper.committed(slot)
    keeper.dies()
    if not drains:
        keeper.now += CONFIG.idle_exit_s
        keeper.tick()
        assert keeper.of(ac.Exit)
        return
    keeper.say(m.Drain, b"z", now=False)
    keeper.reread([slot])
    keeper.now += CONFIG.staging_grace_s
    keeper.tick()
    assert keeper.of(ac.Exit) or keeper.reread([slot]), "it looks once more, and leaves"


@pytest.mark.parametrize(
    ("path", "found"), [("/", 1), ("/ckpt", 1), ("/ckpt/", 1), ("/ckpt/a", 1), ("/ckpt/a/b", 0), ("/ck", 0)]
)
def test_list_is_of_a_path_and_what_is_below_it(keeper: Keeper, path: str, found: int) -> None:
    keeper.committed(keeper.slot())
    assert len(keeper.rows(path, b"p")) == found


def test_list_waits_until_what_the_dead_have_left_was_read(keeper: Keeper) -> None:
    slot = keeper.slot()
    peer = keeper.restarted()
    keeper.begin(slot)
    keeper.feed(ev.Died, session="1" * 16)
    assert keeper.say(m.Recall, peer, path="/ckpt", hold=False) is None
    keeper.read(slot)
    (answer,) = [a.message for a in keeper.of(ac.Send) if isinstance(a.message, m.Recalled)]
    assert [part["save_id"] for part in answer.parts] == [FIRST]


def test_list_that_is_too_long_ends_with_the_newest() -> None:
    keeper = Keeper()
    keeper.hello()
    long = "/ckpt/" + "x" * 3900
    saves = []
    for n in range(60):
        save_id = f"000001-{n:08d}-aaaaaaaaaaaa"
        keeper.committed(keeper.slot(), save_id, path=f"{long}/{n}")
        saves.append(save_id)
    found = [row[0] for row in keeper.rows("/", b"p")]
    assert found == saves[::-1], "all of them fit"
    assert len(saves) * 4200 < MAX_ROWS_NBYTES
