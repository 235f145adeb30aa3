"""The core's kept snapshots: slots of trainers that exited, from which the restarted trainers load.

A slot that is closing is freed, unless the snapshot in it is worth keeping: *whole* (all ranks have staged it, and
nobody has objected), and the newest one below its directory. What is kept is bounded by number, by time, and by the
machine's memory; it is lent again, warm, once it is committed and nobody reads it.
"""

from __future__ import annotations

import os

from asyncckpt.format.names import SaveId
from asyncckpt.protocol.fields import MAX_TABLE
from asyncckpt.protocol.messages import Allocate, Recall, Recalled
from asyncckpt.protocol.save_phases import COMMITTED
from asyncckpt_worker.core.actions import Send, Unwatch
from asyncckpt_worker.core.events import Wire
from asyncckpt_worker.core.model import RankSave, Save, Session, Slot
from asyncckpt_worker.core.tables import Tables

MAX_KEPT_SAVES = 4
"""Maximum number of saves whose slots are kept, over all directories. Chosen, not measured."""

GOODBYE_KEEP_S = 10.0
"""After a goodbye a process that crashes is gone by then; one that lives on has no use for its snapshot. Chosen."""

SPARE_SHARE = 64
"""A kept slot is lent again to who asks for less by a 64th at most: a limit of the asker's is kept, nearly."""

MAX_ROWS_NBYTES = 512 << 10
"""Limit of the answer to a Recall: half a frame."""

_ROW_NBYTES = 256
"""Size of a row without its path, names of the fields included, rounded up."""

_OBJECTIONS = frozenset({"vetoed", "coverage", "disagree", "withdrawn", "not_sealed", "slot_reused"})
"""Codes of `save_failed` that speak against the snapshot, not the storage."""


def discredits_snapshot(error: Wire) -> bool:
    """Whether the error that ended a save is about what was staged; else storage or a worker is at fault."""
    if error.get("code") in ("commit_unknown", "checkpoint_exists"):
        return False
    fields = error.get("fields") or {}
    return error.get("code") != "save_failed" or fields.get("code") in _OBJECTIONS


class SnapshotBook:
    """Decides about `Slot.kept`, and lends kept slots.

    Args:
        tables: The core's.
        keep_s: How long at most; 0 keeps nothing.
    """

    def __init__(self, tables: Tables, keep_s: float) -> None:
        self._t, self._keep_s = tables, keep_s
        self.asked: dict[str, Recall] = {}
        self._undecided = False
        self.decides_at = float("inf")
        """When time alone may change what is kept."""

    # ---- what is kept -----------------------------------------------------------------------------------------------

    def decide(self) -> None:
        """Say of each closing slot whether it is kept, and when that is to be decided again at the latest."""
        closing = self._t.closing.values()
        self._undecided = any(s.reading for s in closing)
        if self._undecided:
            # IMPORTANT: what looks like the newest may turn out to have been opened again: the one before it must stay.
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
        """Whether a closing slot may yet be kept, since others that are closing have not been read."""
        if not self._undecided or self._keep_s <= 0 or not self._may_keep(slot):
            return False
        found = _snapshot_in(slot)
        return found is not None and _is_whole(found[0])

    def _saves_to_keep(self) -> set[SaveId]:
        """Return the saves: of each directory the newest, of all of them those that are nowhere else, then the last."""
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

    # ---- who is gone ------------------------------------------------------------------------------------------------

    def session_ended(self, session: Session, *, died: bool, replaced: bool) -> None:
        """Note it of its slots, before they are closed; what it held for reading is free."""
        for number in session.slots:
            slot = self._t.slots[number]
            slot.closed_at, slot.said_goodbye, slot.dropped = self._t.now, not died, replaced
        for number in session.holds & self._t.slots.keys():
            self._t.slots[number].held_by.discard(session.name)
            self._t.review_closing_slots = True
        if not died:
            if session.slots and not replaced and self._keep_s > 0:
                # Still watched: its death is the proof that it writes no more.
                self._t.goodbye_slots[session.name] = set(session.slots)
            else:
                self._t.actions.append(Unwatch(session=session.name))

    def died(self, session: str) -> None:
        """A process is dead that had said goodbye."""
        self._t.review_closing_slots = True
        for number in self._t.goodbye_slots.pop(session, set()) & self._t.slots.keys():
            self._t.slots[number].said_goodbye = False

    def freed(self, slot: Slot) -> None:
        """A slot was freed: the process that held it need not be watched any more."""
        slots = self._t.goodbye_slots.get(slot.session, set())
        if slots == {slot.number}:
            del self._t.goodbye_slots[slot.session]
            self._t.actions.append(Unwatch(session=slot.session))
        slots.discard(slot.number)

    # ---- lending again ----------------------------------------------------------------------------------------------

    def lend_again(self, session: Session, m: Allocate) -> Slot | None:
        """Return a kept slot that fits a request, now that session's; None when there is none."""
        for slot in self._t.closing.values():  # a process that asks for memory after its goodbye lives on
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
            text = f"slot {slot.number} is lent again, warm"
            self._t.log("info", text, session=session.name, count="slots_lent_again", nbytes=slot.nbytes)
        return chosen

    def _is_free(self, slot: Slot) -> bool:
        """Whether a slot's snapshot is no longer needed: it is on disk and not being read, and its process is dead."""
        found = _snapshot_in(slot)
        idle = slot.kept and not (slot.held_by or slot.said_goodbye or slot.dropped or slot.reading or slot.writes)
        return idle and found is not None and _committed(found[0])

    # ---- memory -----------------------------------------------------------------------------------------------------

    @property
    def any(self) -> bool:
        """Whether any slot is kept."""
        return any(s.kept for s in self._t.closing.values())

    def make_room(self, *, include_uncommitted: bool = False) -> bool:
        """Give up what is kept and on disk; `include_uncommitted`, and there is none of that: all that is kept.

        Returns:
            Whether there was anything.
        """
        kept = [(s, _snapshot_in(s)) for s in self._t.closing.values() if s.kept and not s.held_by]
        chosen = [s for s, found in kept if found is not None and _committed(found[0])]
        if not chosen and include_uncommitted:
            chosen = [s for s, _ in kept]
        for slot in chosen:
            slot.dropped = self._t.review_closing_slots = True
            text = "given up: memory is short"
            self._t.log("warning" if include_uncommitted else "info", text, count="slots_given_up", slot=slot.number)
        return bool(chosen)

    # ---- reading ----------------------------------------------------------------------------------------------------

    def recall(self, session: Session, m: Recall) -> None:
        """Answer where the snapshots at a path and below it lie: once it is known what those have left who are gone."""
        self.asked[session.name] = m
        self.answer()

    def answer(self) -> None:
        """Answer the waiting requests, unless the slot of a trainer that exited is still being read."""
        if any(s.reading for s in self._t.closing.values()):
            return
        asked, self.asked = self.asked, {}
        for name, m in asked.items():
            session = self._t.sessions.get(name)
            if session is not None:
                self._t.actions.append(Send(peer=session.peer, message=self._recalled(session, m)))

    def _recalled(self, session: Session, m: Recall) -> Recalled:
        """Return the answer, newest first; hold what is in it if that is asked."""
        below = m.path.rstrip("/") + "/"
        found: list[tuple[Slot, Save, RankSave]] = []
        for slot in self._t.slots.values():
            if (held := _snapshot_in(slot)) is None or not _is_whole(held[0]):
                continue
            path = held[1].path
            # A step that is not known yet: rank 0 has said it on another node.
            if (path == m.path or path.startswith(below)) and held[1].step is not None:
                found.append((slot, *held))
        found.sort(key=lambda f: f[2].rank)
        found.sort(key=lambda f: f[1].save_id, reverse=True)
        rows: list[Wire] = []
        nbytes = 0
        for slot, save, entry in found[:MAX_TABLE]:
            nbytes += _ROW_NBYTES + len(entry.path.encode())
            if nbytes > MAX_ROWS_NBYTES:
                break
            rows.append(_row(slot, save, entry))
            if m.hold:
                slot.held_by.add(session.name)
                session.holds.add(slot.number)
        return Recalled(id=m.id, parts=tuple(rows))


def _row(slot: Slot, save: Save, entry: RankSave) -> Wire:
    return {
        "save_id": save.save_id,
        "step": entry.step,
        "path": entry.path,
        "rank": entry.rank,
        "world_size": save.world_size,
        "whole": True,
        "committed": _committed(save),
        "slot": slot.number,
        "fd": slot.fd,
        "nbytes": slot.nbytes,
        "token": slot.token,
        "generation": entry.generation,
        "inode": entry.home.inode,
        "birth_ns": entry.home.birth_ns,
    }


def _snapshot_in(slot: Slot) -> tuple[Save, RankSave] | None:
    """Return what a slot holds, sealed, as far as is known: a living trainer may open it at any time."""
    if slot.part is None or slot.fd < 0 or slot.reopened:
        return None
    entry = slot.part[1]
    if entry.is_open or entry.slot != slot.number or entry.ring or entry.generation != slot.accepted_generation:
        return None
    return slot.part


def _is_whole(save: Save) -> bool:
    return _committed(save) or (save.complete and not (save.error is not None and discredits_snapshot(save.error)))


def _committed(save: Save) -> bool:
    return save.outcome == COMMITTED


def is_in_flight(slot: Slot) -> bool:
    """Whether a save needs a slot until it has ended."""
    return slot.part is not None and slot.part[1].in_flight and slot.part[1].slot == slot.number
