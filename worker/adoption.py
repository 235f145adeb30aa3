"""The brain's slots that a dead worker had lent: taken over from their trainer."""

from __future__ import annotations

from asyncckpt.errors import ProtocolError
from asyncckpt.memory.slot import MAX_SLOT_NBYTES, MIN_SLOT_NBYTES, PAGE_NBYTES
from asyncckpt.protocol.lifecycle import COMMITTED
from asyncckpt.protocol.messages import Adopt
from asyncckpt_worker.actions import AdoptSlot
from asyncckpt_worker.entries import entry_of_request
from asyncckpt_worker.lending import Lending, busy, draining
from asyncckpt_worker.records import MAX_JOBS, MAX_SLOTS_PER_SESSION, Save, Session, Slot
from asyncckpt_worker.tables import Tables


class AdoptionBook:
    """Adds to `tables.slots`.

    Args:
        tables: The brain's.
        lending: Does with an adopted slot what it does with others.
    """

    def __init__(self, tables: Tables, lending: Lending) -> None:
        self._t, self._lending = tables, lending

    def adopt(self, session: Session, m: Adopt) -> None:
        """Open the slot, answer, and look into it; a repeated request gets the slot that it got before."""
        if m.id in session.granted:
            return self._lending.grant_again(session, m.id)
        if self._t.draining:
            return self._lending.refuse(session.peer, m.id, draining())
        if len(session.slots) >= MAX_SLOTS_PER_SESSION or not self._is_sound(m):
            text = f"a slot of {m.nbytes} bytes, generation {m.generation}, ended {m.ended}"
            return self._lending.refuse(session.peer, m.id, ProtocolError(text, detail="slots"))
        if self._t.jobs >= MAX_JOBS:
            return self._lending.refuse(session.peer, m.id, busy())
        number = self._t.next_slot
        self._t.next_slot += 1
        slot = Slot(number, m.nbytes, session.name, session.rank, session.world_size, m.id)
        slot.taken, slot.adopted, slot.committed = m.ended, m.generation, m.committed
        slot.process = (session.pid, session.pid_start)
        # IMPORTANT: until it has been looked into: if the trainer dies meanwhile, what it has sealed is not lost, and
        # its rank is not gone before that is known.
        slot.reading = True
        self._t.slots[number] = slot
        self._lending.is_of(session, slot)
        self._t.actions.append(AdoptSlot(slot=number, nbytes=m.nbytes, pid=session.pid, fd=m.fd, token=m.token))
        return None

    def remember(self) -> None:
        """After each event: have what the worker before had committed, and still lies sealed, in memory as well.

        A rank whose trainer had not heard of the commit before that worker died is looked for on disk: it goes first.
        """
        for slot in [s for s in self._t.slots.values() if s.found is not None]:
            request = slot.found
            assert request is not None
            save = self._t.saves.get(request.save_id)
            if save is not None and save.outcome is None:
                continue
            slot.found = None
            key = (request.save_id, request.rank)
            is_ours = (request.rank, request.world_size) == (slot.rank, slot.world_size) and slot.key is None
            if save is None and is_ours:
                save = Save(request.save_id, request.world_size, outcome=COMMITTED, complete=True)
                self._t.saves[request.save_id] = save
            if save is None or not is_ours or save.outcome != COMMITTED or request.rank in save.ranks:
                continue
            if save.world_size != request.world_size:
                continue
            entry = entry_of_request(slot, slot.taken, request, self._t.now)
            entry.phase = COMMITTED
            save.ranks[request.rank], slot.key = entry, key
            text = f"slot {slot.number} holds what the worker before had committed"
            self._t.log("info", text, save_id=save.save_id, session=slot.session, count="snapshots_remembered")

    @staticmethod
    def _is_sound(m: Adopt) -> bool:
        whole = MIN_SLOT_NBYTES <= m.nbytes <= MAX_SLOT_NBYTES and m.nbytes % PAGE_NBYTES == 0
        return whole and m.ended <= m.generation
