"""Kept snapshots: slots of trainers that have exited, from which the restarted trainers load.

A closing slot is kept if its snapshot is *whole* (all ranks have sealed it, and no check or hook has rejected it) and
the newest one in its directory; else it is freed. Kept slots are limited by number, time and the machine's memory. A
kept slot is lent to another session once its save is committed and nobody reads it.
"""

from __future__ import annotations

import os

from asyncckpt.format.names import SaveId
from asyncckpt.protocol.fields import MAX_TABLE
from asyncckpt.protocol.messages import Allocate, Recall, Recalled
from asyncckpt.protocol.save_phases import COMMITTED
from asyncckpt_worker.core.actions import Unwatch
from asyncckpt_worker.core.events import Wire
from asyncckpt_worker.core.model import RankSave, Save, Session, Slot
from asyncckpt_worker.core.tables import Tables

MAX_KEPT_SAVES = 4
"""Maximum number of saves whose slots are kept, over all directories. Chosen, not measured."""

GOODBYE_KEEP_S = 10.0
"""How long a slot is kept after Goodbye if its process still runs: that one will not restart. Chosen."""

SPARE_SHARE = 64
"""A kept slot may be larger than a request by 1/64 of the request at most, so that memory limits nearly hold."""

MAX_ROWS_NBYTES = 512 << 10
"""Maximum size of the answer to a Recall: half a frame."""

_ROW_NBYTES = 256
"""Size of a row without its path, names of the fields included, rounded up."""

_OBJECTIONS = frozenset({"vetoed", "coverage", "disagree", "withdrawn", "not_sealed", "slot_reused"})
"""Codes of `save_failed` that mean that the snapshot is not valid; the others are failures of storage or workers."""


def discredits_snapshot(error: Wire) -> bool:
    """Whether the error means that the snapshot is not valid, rather than that storage or a worker has failed."""
    if error.get("code") in ("commit_unknown", "checkpoint_exists"):
        return False
    fields = error.get("fields") or {}
    return error.get("code") != "save_failed" or fields.get("code") in _OBJECTIONS


class SnapshotRegistry:
    """Decides which slots are kept, and lends kept slots.

    Args:
        tables: Tables of the core.
        keep_s: How long a slot is kept at most; 0 keeps none.
    """

    def __init__(self, tables: Tables, keep_s: float) -> None:
        self._t, self._keep_s = tables, keep_s
        self.asked: dict[str, Recall] = {}
        """Session -> its latest unanswered Recall; answered as soon as no closing slot is being read."""

        self._undecided = False
        self.decides_at = float("inf")
        """When the next kept slot expires, so that `decide` must run; inf: there is none."""

    # ---- what is kept -----------------------------------------------------------------------------------------------

    def decide(self) -> None:
        """Decide for each closing slot whether it is kept, and when the next one expires."""
        closing = self._t.closing.values()
        self._undecided = any(s.reading for s in closing)
        if self._undecided:
            # IMPORTANT: a read may show that the newest snapshot was overwritten; until then the one before must stay.
            return
        kept = self._saves_to_keep() if self._keep_s > 0 and closing else set()
        self.decides_at = float("inf")
        for slot in closing:
            found = _snapshot_in(slot)
            keep = bool(slot.held_by) or (found is not None and self._may_keep(slot) and found[0].save_id in kept)
            if keep and not slot.kept and found is not None:
                text = f"slot {slot.number} is kept: rank {slot.rank}, {slot.nbytes} bytes"
                self._t.log("info", text, save_id=found[0].save_id, count="slots_kept", committed=_committed(found[0]))
            slot.kept = keep
            until = slot.closed_at + (min(self._keep_s, GOODBYE_KEEP_S) if slot.said_goodbye else self._keep_s)
            if keep and until > self._t.now:
                self.decides_at = min(self.decides_at, until)

    def is_undecided(self, slot: Slot) -> bool:
        """Whether a closing slot may still be kept, since other closing slots have not been read."""
        if not self._undecided or self._keep_s <= 0 or not self._may_keep(slot):
            return False
        found = _snapshot_in(slot)
        return found is not None and _is_whole(found[0])

    def _saves_to_keep(self) -> set[SaveId]:
        """Return the saves to keep: the newest of each directory, of these uncommitted ones first, then recent ones."""
        newest: dict[str, Save] = {}
        seen: set[int] = set()
        for slot in self._t.slots.values():
            found = _snapshot_in(slot)
            if found is None or id(found[0]) in seen:
                continue
            save, root = found[0], os.path.dirname(found[1].path)
            seen.add(id(save))
            if _is_whole(save) and (root not in newest or newest[root].save_id < save.save_id):
                newest[root] = save
        saves = {save.save_id: save for save in newest.values()}
        closed_at: dict[SaveId, float] = {}
        for slot in self._t.closing.values():
            found = _snapshot_in(slot)
            if found is not None and found[0].save_id in saves and self._may_keep(slot):
                save_id = found[0].save_id
                closed_at[save_id] = max(slot.closed_at, closed_at.get(save_id, 0.0))
        order = sorted(closed_at, key=lambda i: (_committed(saves[i]), -closed_at[i]))
        return set(order[:MAX_KEPT_SAVES])

    def _may_keep(self, slot: Slot) -> bool:
        kept_for = self._t.now - slot.closed_at
        return not slot.dropped and kept_for < self._keep_s and not (slot.said_goodbye and kept_for >= GOODBYE_KEEP_S)

    # ---- ended sessions ---------------------------------------------------------------------------------------------

    def session_ended(self, session: Session, *, died: bool, replaced: bool) -> None:
        """Mark the slots of an ended session before they are closed, and release the slots that it held for loading."""
        for number in session.slots:
            slot = self._t.slots[number]
            slot.closed_at, slot.said_goodbye, slot.dropped = self._t.now, not died, replaced
        for number in session.holds & self._t.slots.keys():
            self._t.slots[number].held_by.discard(session.name)
            self._t.review_closing_slots = True
        if not died:
            if session.slots and not replaced and self._keep_s > 0:
                # Its process is still watched: only its death proves that it no longer writes to the slots.
                self._t.goodbye_slots[session.name] = set(session.slots)
            else:
                self._t.actions.append(Unwatch(session=session.name))

    def died(self, session: str) -> None:
        """The process of a session that had sent Goodbye is dead."""
        self._t.review_closing_slots = True
        for number in self._t.goodbye_slots.pop(session, set()) & self._t.slots.keys():
            self._t.slots[number].said_goodbye = False

    def freed(self, slot: Slot) -> None:
        """A slot was freed: stop watching the process after the last slot of its session."""
        slots = self._t.goodbye_slots.get(slot.session, set())
        if slots == {slot.number}:
            del self._t.goodbye_slots[slot.session]
            self._t.actions.append(Unwatch(session=slot.session))
        slots.discard(slot.number)

    # ---- lending again ----------------------------------------------------------------------------------------------

    def lend_again(self, session: Session, m: Allocate) -> Slot | None:
        """Give a kept slot that fits the request to the session and return it; None if none fits."""
        for slot in self._t.closing.values():
            # A process that allocates after Goodbye has not exited: it does not need its snapshots.
            if slot.said_goodbye and slot.closing and slot.process == (session.pid, session.pid_start):
                slot.dropped = self._t.review_closing_slots = True
        fitting = [s for s in self._t.closing.values() if s.rank == session.rank and self._is_free(s)]
        fitting = [s for s in fitting if m.nbytes <= s.nbytes <= m.nbytes + m.nbytes // SPARE_SHARE]
        chosen = min(fitting, key=lambda s: s.nbytes, default=None)
        if chosen is not None:
            slot = chosen
            slot.session, slot.world_size, slot.allocate_id = session.name, session.world_size, m.id
            slot.process = (session.pid, session.pid_start)
            slot.closing = slot.kept = False
            del self._t.closing[slot.number]
            text = f"kept slot {slot.number} is lent again"
            self._t.log("info", text, session=session.name, count="slots_lent_again", nbytes=slot.nbytes)
        return chosen

    def _is_free(self, slot: Slot) -> bool:
        """Whether nobody needs a slot's snapshot: it is on disk, not being loaded or read, and its process is dead."""
        found = _snapshot_in(slot)
        idle = slot.kept and not (slot.held_by or slot.said_goodbye or slot.dropped or slot.reading or slot.writes)
        return idle and found is not None and _committed(found[0])

    # ---- memory -----------------------------------------------------------------------------------------------------

    @property
    def has_kept(self) -> bool:
        """Whether any slot is kept."""
        return any(s.kept for s in self._t.closing.values())

    def make_room(self, *, include_uncommitted: bool = False) -> bool:
        """Drop kept slots that nobody reads and whose save is committed.

        Args:
            include_uncommitted: If no kept slot is committed, drop the uncommitted ones.

        Returns:
            Whether any slot was dropped.
        """
        kept = [(s, _snapshot_in(s)) for s in self._t.closing.values() if s.kept and not s.held_by]
        chosen = [s for s, found in kept if found is not None and _committed(found[0])]
        if not chosen and include_uncommitted:
            chosen = [s for s, _ in kept]
        for slot in chosen:
            slot.dropped = self._t.review_closing_slots = True
            text = f"kept slot {slot.number} is dropped: the machine is short of memory"
            self._t.log("warning" if include_uncommitted else "info", text, count="slots_given_up", slot=slot.number)
        return bool(chosen)

    # ---- loading ----------------------------------------------------------------------------------------------------

    def recall(self, session: Session, m: Recall) -> None:
        """Answer which slots hold snapshots at a path or below it, once the slots of ended sessions have been read."""
        self.asked[session.name] = m
        self.answer()

    def answer(self) -> None:
        """Answer the waiting requests, unless a closing slot is still being read."""
        if any(s.reading for s in self._t.closing.values()):
            return
        asked, self.asked = self.asked, {}
        for name, m in asked.items():
            session = self._t.sessions.get(name)
            if session is not None:
                self._t.run_guarded("", lambda s=session, m=m: self._t.send(s.peer, self._recalled(s, m)))

    def _recalled(self, session: Session, m: Recall) -> Recalled:
        """Return the answer, newest saves first; with `hold`, hold its slots for the session."""
        below = m.path.rstrip("/") + "/"
        found: list[tuple[Slot, Save, RankSave]] = []
        for slot in self._t.slots.values():
            if (held := _snapshot_in(slot)) is None or not _is_whole(held[0]):
                continue
            path = held[1].path
            # Without a step: rank 0 is on another node, and has not sealed it yet.
            if (path == m.path or path.startswith(below)) and held[1].step is not None:
                found.append((slot, *held))
        found.sort(key=lambda f: f[2].rank)
        found.sort(key=lambda f: f[1].save_id, reverse=True)
        rows: list[Wire] = []
        nbytes = 0
        for slot, save, part in found[:MAX_TABLE]:
            nbytes += _ROW_NBYTES + len(part.path.encode())
            if nbytes > MAX_ROWS_NBYTES:
                break
            rows.append(_row(slot, save, part))
            if m.hold:
                slot.held_by.add(session.name)
                session.holds.add(slot.number)
        return Recalled(id=m.id, parts=tuple(rows))


def _row(slot: Slot, save: Save, part: RankSave) -> Wire:
    return {
        "save_id": save.save_id,
        "step": part.step,
        "path": part.path,
        "rank": part.rank,
        "world_size": save.world_size,
        "whole": True,
        "committed": _committed(save),
        "slot": slot.number,
        "fd": slot.fd,
        "nbytes": slot.nbytes,
        "token": slot.token,
        "generation": part.generation,
        "inode": part.directory_identity.inode,
        "birth_ns": part.directory_identity.birth_ns,
    }


def _snapshot_in(slot: Slot) -> tuple[Save, RankSave] | None:
    """Return save and part of the sealed snapshot in a slot, by its last read; its trainer may open it any time."""
    if slot.last is None or slot.fd < 0 or slot.reopened:
        return None
    part = slot.last[1]
    if part.is_open or part.slot != slot.number or part.ring or part.generation != slot.accepted_generation:
        return None
    return slot.last


def _is_whole(save: Save) -> bool:
    return _committed(save) or (save.complete and not (save.error is not None and discredits_snapshot(save.error)))


def _committed(save: Save) -> bool:
    return save.outcome == COMMITTED


def is_in_flight(slot: Slot) -> bool:
    """Whether a save needs a slot until it has ended."""
    return slot.last is not None and slot.last[1].in_flight and slot.last[1].slot == slot.number
