"""The brain's kept snapshots: slots whose trainers are gone, so that the restarted ones load what they hold.

A slot that is closing is freed, unless the snapshot in it is worth keeping: *whole* (all ranks have staged it, and
nobody has objected), and the newest one below its directory. What is kept is bounded by number, by time, and by the
machine's memory; it is lent again, warm, once it is committed and nobody reads it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from asyncckpt.format.names import SaveId
from asyncckpt.format.steps import lineage_key
from asyncckpt.protocol.fields import MAX_TABLE
from asyncckpt.protocol.lifecycle import BEGUN, COMMITTED, IN_FLIGHT
from asyncckpt.protocol.messages import Allocate, Recall, Recalled
from asyncckpt_worker.actions import Send, Unwatch
from asyncckpt_worker.events import Wire
from asyncckpt_worker.records import RankSave, Save, Session, Slot
from asyncckpt_worker.tables import Tables

MAX_KEPT_SAVES = 4
"""Saves of which slots are kept, whatever number of directories they go to. Chosen, not measured."""

PARTING_S = 10.0
"""After a goodbye a process that crashes is gone by then; one that lives on has no use for its snapshot. Chosen."""

SPARE_SHARE = 64
"""A kept slot is lent again to who asks for less by a 64th at most: a limit of the asker's is kept, nearly."""

MAX_ROWS_NBYTES = 512 << 10
"""Of the answer to a Recall: half a frame."""

_ROW_NBYTES = 256
"""Of a row without its path, names of the fields included, rounded up."""

_OBJECTIONS = frozenset({"vetoed", "coverage", "disagree", "withdrawn", "not_sealed", "slot_reused"})
"""Codes of `save_failed` that speak against the snapshot, not the storage."""


def speaks_against(error: Wire) -> bool:
    """Whether the error that ended a save is about what was staged; else storage or a worker is at fault."""
    if error.get("code") in ("commit_unknown", "checkpoint_exists"):
        return False
    fields = error.get("fields") or {}
    return error.get("code") != "save_failed" or fields.get("code") in _OBJECTIONS


class KeepBook:
    """Decides about `Slot.kept`, and lends kept slots.

    Args:
        tables: The brain's.
        keep_s: How long at most; 0 keeps nothing.
    """

    def __init__(self, tables: Tables, keep_s: float) -> None:
        self._t, self._keep_s = tables, keep_s
        self._asked: dict[str, Recall] = {}

    # ---- what is kept -----------------------------------------------------------------------------------------------

    def consider(self) -> None:
        """Say of each closing slot whether it is kept."""
        closing = [s for s in self._t.slots.values() if s.closing]
        if not closing:
            return
        if any(s.reading for s in closing):
            # IMPORTANT: what looks like the newest may turn out to have been opened again: the one before it must stay.
            return
        kept = self._worth_keeping(closing) if self._keep_s > 0 else set()
        for slot in closing:
            found = _snapshot_in(self._t, slot)
            keep = bool(slot.held_by) or (found is not None and self._may_keep(slot) and found[0].save_id in kept)
            if keep and not slot.kept and found is not None:
                text = f"slot {slot.number} is kept: rank {slot.rank}, {slot.nbytes} bytes"
                self._t.log("info", text, save_id=found[0].save_id, count="slots_kept", committed=_committed(found[0]))
            slot.kept = keep

    def is_undecided(self, slot: Slot) -> bool:
        """Whether a closing slot may yet be kept, since others that are closing have not been read."""
        found = _snapshot_in(self._t, slot) if self._keep_s > 0 and self._may_keep(slot) else None
        return (
            found is not None and _is_whole(found[0]) and any(s.reading and s.closing for s in self._t.slots.values())
        )

    def _worth_keeping(self, closing: Iterable[Slot]) -> set[str]:
        """Return the saves: of each directory the newest, of all of them those that are nowhere else, then the last."""
        newest: dict[str, Save] = {}
        for slot in self._t.slots.values():
            if (found := _snapshot_in(self._t, slot)) is not None and _is_whole(found[0]):
                save, root = found[0], os.path.dirname(found[1].path)
                if root not in newest or _age(newest[root]) < _age(save):
                    newest[root] = save
        closed_at: dict[str, float] = {}
        for slot in closing:
            found = _snapshot_in(self._t, slot)
            if found is not None and self._may_keep(slot) and found[0] in newest.values():
                save_id = found[0].save_id
                closed_at[save_id] = max(slot.closed_at, closed_at.get(save_id, 0.0))
        order = sorted(closed_at, key=lambda i: (_committed(self._t.saves[i]), -closed_at[i]))
        return set(order[:MAX_KEPT_SAVES])

    def _may_keep(self, slot: Slot) -> bool:
        kept_for = self._t.now - slot.closed_at
        return not slot.dropped and kept_for < self._keep_s and not (slot.parting and kept_for >= PARTING_S)

    # ---- who is gone ------------------------------------------------------------------------------------------------

    def session_ended(self, session: Session, *, died: bool, replaced: bool) -> None:
        """Note it of its slots, before they are closed; what it held for reading is free."""
        for number in session.slots:
            slot = self._t.slots[number]
            slot.closed_at, slot.parting, slot.dropped = self._t.now, not died, replaced
        for slot in self._t.slots.values():
            slot.held_by.discard(session.name)
        if not died:
            if session.slots and not replaced and self._keep_s > 0:
                self._t.parting.add(session.name)  # still watched: its death is the proof that it writes no more
            else:
                self._t.actions.append(Unwatch(session=session.name))

    def died(self, session: str) -> None:
        """A process is dead that had said goodbye."""
        self._t.parting.discard(session)
        for slot in self._t.slots.values():
            slot.parting = slot.parting and slot.session != session

    def freed(self, slot: Slot) -> None:
        """A slot is no more: nobody needs to watch who had it."""
        if slot.session in self._t.parting and all(s.session != slot.session for s in self._t.slots.values()):
            self._t.parting.discard(slot.session)
            self._t.actions.append(Unwatch(session=slot.session))

    # ---- lending again ----------------------------------------------------------------------------------------------

    def lend_again(self, session: Session, m: Allocate) -> Slot | None:
        """Return a kept slot that fits a request, now that session's; None when there is none."""
        for slot in self._t.slots.values():  # a process that asks for memory after its goodbye lives on
            if slot.parting and slot.closing and slot.process == (session.pid, session.pid_start):
                slot.dropped = True
        fitting = [s for s in self._t.slots.values() if s.rank == session.rank and self._is_free(s)]
        fitting = [s for s in fitting if m.nbytes <= s.nbytes <= m.nbytes + m.nbytes // SPARE_SHARE]
        chosen = min(fitting, key=lambda s: s.nbytes, default=None)
        if chosen is not None:
            slot = chosen
            slot.session, slot.world_size, slot.allocate_id = session.name, session.world_size, m.id
            slot.process = (session.pid, session.pid_start)
            slot.closing = slot.kept = False
            text = f"slot {slot.number} is lent again, warm"
            self._t.log("info", text, session=session.name, count="slots_lent_again", nbytes=slot.nbytes)
        return chosen

    def _is_free(self, slot: Slot) -> bool:
        """Whether nobody needs what a slot holds: it is on disk, not being read, and its former process is dead."""
        found = _snapshot_in(self._t, slot)
        idle = slot.kept and not (slot.held_by or slot.parting or slot.dropped or slot.reading or slot.writes)
        return idle and found is not None and _committed(found[0])

    # ---- memory -----------------------------------------------------------------------------------------------------

    @property
    def any(self) -> bool:
        """Whether any slot is kept."""
        return any(s.kept for s in self._t.slots.values())

    def make_room(self, *, wholly: bool = False) -> bool:
        """Give up what is kept and on disk; `wholly`, and there is none of that: all that is kept.

        Returns:
            Whether there was anything.
        """
        kept = [(s, _snapshot_in(self._t, s)) for s in self._t.slots.values() if s.kept and not s.held_by]
        chosen = [s for s, found in kept if found is not None and _committed(found[0])]
        if not chosen and wholly:
            chosen = [s for s, _ in kept]
        for slot in chosen:
            slot.dropped = True
            text = "given up: memory is short"
            self._t.log("warning" if wholly else "info", text, count="slots_given_up", slot=slot.number)
        return bool(chosen)

    # ---- reading ----------------------------------------------------------------------------------------------------

    def recall(self, session: Session, m: Recall) -> None:
        """Answer where the snapshots at a path and below it lie: once it is known what those have left who are gone."""
        self._asked[session.name] = m
        self.answer()

    def answer(self) -> None:
        """Answer what waits, unless a slot is being read whose trainer is gone."""
        if not self._asked or any(s.reading and s.closing for s in self._t.slots.values()):
            return
        asked, self._asked = self._asked, {}
        for name, m in asked.items():
            session = self._t.sessions.get(name)
            if session is not None:
                self._t.actions.append(Send(peer=session.peer, message=self._recalled(session, m)))

    def _recalled(self, session: Session, m: Recall) -> Recalled:
        """Return the answer, newest first; hold what is in it if that is asked."""
        below = m.path.rstrip("/") + "/"
        found = [(slot, *held) for slot in self._t.slots.values() if (held := _snapshot_in(self._t, slot)) is not None]
        found = [f for f in found if _is_whole(f[1]) and (f[2].path == m.path or f[2].path.startswith(below))]
        found = [f for f in found if f[2].step is not None]  # else rank 0 has said it on another node
        found.sort(key=lambda f: f[2].rank)
        found.sort(key=lambda f: _age(f[1]), reverse=True)
        rows: list[Wire] = []
        nbytes = 0
        for slot, save, entry in found[:MAX_TABLE]:
            nbytes += _ROW_NBYTES + len(entry.path.encode())
            if nbytes > MAX_ROWS_NBYTES:
                break
            rows.append(_row(slot, save, entry))
            if m.hold:
                slot.held_by.add(session.name)
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


def _snapshot_in(t: Tables, slot: Slot) -> tuple[Save, RankSave] | None:
    """Return what a slot holds, sealed, as far as is known: a living trainer may open it at any time."""
    entry = t.entry(slot.key)
    if entry is None or slot.key is None or entry.phase == BEGUN or entry.slot != slot.number:
        return None
    if slot.fd < 0 or slot.void or entry.ring:
        return None
    return (t.saves[slot.key[0]], entry) if entry.generation == slot.taken else None


def _is_whole(save: Save) -> bool:
    return _committed(save) or (save.complete and not save.objected)


def _committed(save: Save) -> bool:
    return save.outcome == COMMITTED


def _age(save: Save) -> tuple[int, int, str]:
    return lineage_key(SaveId.parse(save.save_id))


def is_in_flight(t: Tables, slot: Slot) -> bool:
    """Whether a save needs a slot until it has ended."""
    entry = t.entry(slot.key)
    return entry is not None and entry.phase in IN_FLIGHT and entry.slot == slot.number
