"""The brain's slots: who holds which memory, and when it may be freed.

Two rules: memory is freed only after a release, a goodbye or the proof of its holder's death, never by a timeout; and
only when no save reads it any more. Before it is freed it is read once more, so that a sealed snapshot whose doorbell
was lost is taken up.
"""

from __future__ import annotations

from asyncckpt.errors import (
    AsyncCkptError,
    InsufficientMemoryError,
    ProtocolError,
    RanksDisagreeError,
    UnknownSaveError,
    WorkerUnavailableError,
    from_wire,
    to_wire,
)
from asyncckpt.protocol.lifecycle import BEGUN, IN_FLIGHT
from asyncckpt.protocol.messages import Allocate, Begin, Granted, Message, Ok, Refused, Release, Submit
from asyncckpt_worker.actions import CreateSlot, FreeSlot, ReadSlot, Send
from asyncckpt_worker.events import Peer, SlotCreated, SlotRead
from asyncckpt_worker.intake import Intake
from asyncckpt_worker.keeping import KeepBook, is_in_flight
from asyncckpt_worker.records import MAX_JOBS, MAX_SLOTS_PER_SESSION, Session, Slot, Waiter
from asyncckpt_worker.tables import Tables

MAX_WAITERS = 16
"""Repeats of one Submit that are all answered; a trainer repeats it a few times at most."""


class Lending:
    """Changes `tables.slots` and adds the actions that follow."""

    def __init__(self, tables: Tables, intake: Intake, keeping: KeepBook) -> None:
        self._t = tables
        self._intake, self._keeping = intake, keeping

    def send(self, peer: Peer, message: Message) -> None:
        """Add a Send action."""
        self._t.actions.append(Send(peer=peer, message=message))

    def refuse(self, peer: Peer, id: int, error: AsyncCkptError) -> None:
        """Answer a request with an error."""
        self._t.log("debug", f"refused: {error}", session=self._t.peers.get(peer), count="requests_refused")
        self.send(peer, Refused(id=id, error=to_wire(error)))

    # ---- slots ------------------------------------------------------------------------------------------------------

    def allocate(self, session: Session, m: Allocate) -> None:
        """Grant a slot; a repeated request gets the one that it got before."""
        if m.id in session.granted:
            self.grant_again(session, m.id)
        elif self._t.draining:
            self.refuse(session.peer, m.id, draining())
        elif len(session.slots) >= MAX_SLOTS_PER_SESSION:
            text = f"a session has at most {MAX_SLOTS_PER_SESSION} slots; release one"
            self.refuse(session.peer, m.id, ProtocolError(text, detail="slots"))
        elif self._t.jobs >= MAX_JOBS:
            self.refuse(session.peer, m.id, busy())
        elif (kept := self._keeping.lend_again(session, m)) is not None:
            self.is_of(session, kept)
            self._grant(session, kept)
        else:
            number = self._t.next_slot
            self._t.next_slot += 1
            slot = Slot(number, m.nbytes, session.name, session.rank, session.world_size, m.id, populate=m.populate)
            slot.process = (session.pid, session.pid_start)
            self._t.slots[number] = slot
            self.is_of(session, slot)
            self._t.actions.append(CreateSlot(slot=number, nbytes=m.nbytes, populate=m.populate))

    def is_of(self, session: Session, slot: Slot) -> None:
        """Note whose slot it is, and which request it answers."""
        session.slots.add(slot.number)
        for old in list(session.granted)[: -MAX_SLOTS_PER_SESSION * 4]:
            del session.granted[old]
        session.granted[slot.allocate_id] = slot.number

    def grant_again(self, session: Session, id: int) -> None:
        """Answer a repeated Allocate or Adopt, unless the first one is still under way."""
        slot = self._t.slots.get(session.granted[id])
        if slot is None or slot.closing:
            self.refuse(session.peer, id, UnknownSaveError("that slot was released", detail="slot"))
        elif slot.fd >= 0:
            self._grant(session, slot)

    def created(self, event: SlotCreated) -> None:
        """Answer the Allocate or Adopt."""
        slot = self._t.slots.get(event.slot)
        if slot is None or slot.fd >= 0:
            return
        session = self._t.sessions.get(slot.session)
        if event.error is not None and event.error.get("code") == InsufficientMemoryError.wire_code:
            slot.postponed = self._freeing() or self._keeping.make_room()
            if slot.postponed:
                return
        if event.error is not None:
            del self._t.slots[slot.number]
            if session is not None:
                session.slots.discard(slot.number)
                session.granted.pop(slot.allocate_id, None)
                self.refuse(session.peer, slot.allocate_id, from_wire(event.error))
            return
        slot.fd, slot.token = event.fd, event.token
        if slot.adopted >= 0:
            self._t.actions.append(ReadSlot(slot=slot.number))
        if session is not None and not slot.closing:
            self._grant(session, slot)
            self._t.log(
                "debug", "slot lent", session=session.name, count="slots_lent", slot=slot.number, nbytes=slot.nbytes
            )

    def _freeing(self) -> bool:
        """Whether memory is about to come back."""
        return bool(self._t.freeing) or any(s.closing and s.reading for s in self._t.slots.values())

    def create_what_was_postponed(self) -> None:
        """Try again what did not fit, once everything that was being freed is."""
        postponed = [s for s in self._t.slots.values() if s.postponed]
        if not postponed or self._freeing():
            return
        for slot in postponed:
            slot.postponed = False
            if slot.closing:
                del self._t.slots[slot.number]
            else:
                self._t.actions.append(CreateSlot(slot=slot.number, nbytes=slot.nbytes, populate=slot.populate))

    def _grant(self, session: Session, slot: Slot) -> None:
        self.send(
            session.peer,
            Granted(id=slot.allocate_id, slot=slot.number, fd=slot.fd, nbytes=slot.nbytes, token=slot.token),
        )

    def release(self, session: Session, m: Release) -> None:
        """Take a slot back; one that was freed before is as good."""
        if m.slot in session.slots:
            session.slots.discard(m.slot)
            self._t.slots[m.slot].dropped = True
            self.close(self._t.slots[m.slot])
        elif not 0 < m.slot < self._t.next_slot or (m.slot in self._t.slots and not self._was_of(session, m.slot)):
            return self.refuse(session.peer, m.id, _unknown_slot(m.slot))
        self.send(session.peer, Ok(id=m.id))
        return None

    def _was_of(self, session: Session, number: int) -> bool:
        return self._t.slots[number].session == session.name

    def close(self, slot: Slot) -> None:
        """Take a slot back; it is read once more, then freed when nothing needs it."""
        slot.closing = True
        self._read(slot)

    def _read(self, slot: Slot) -> None:
        if slot.fd < 0:
            return  # it is only being made: nothing can be in it
        if slot.reading:
            # IMPORTANT: a read that began before the seal, or before the death, proves nothing: read again.
            slot.read_again = True
        else:
            slot.reading = True
            self._t.actions.append(ReadSlot(slot=slot.number))

    def read_all_lent(self) -> bool:
        """Look into every slot: for the snapshots that are sealed while their doorbells are still under way.

        Returns:
            Whether there is any to look into.
        """
        for slot in self._t.slots.values():
            self._read(slot)
        return any(s.reading for s in self._t.slots.values())

    # ---- saves in slots ---------------------------------------------------------------------------------------------

    def begin(self, session: Session, m: Begin) -> None:
        """Check slot and generation, then begin the save; a repeated Begin changes nothing."""
        slot = self._t.slots.get(m.slot) if m.slot in session.slots else None
        entry = self._t.entry((m.save_id, session.rank))
        if slot is None:
            return self.refuse(session.peer, m.id, _unknown_slot(m.slot))
        other_world = self._intake.refuse_other_world(session, m.save_id)
        if other_world is not None:
            return self.refuse(session.peer, m.id, from_wire(other_world))
        if entry is not None:
            if entry.slot and (entry.slot, entry.generation) != (m.slot, m.generation):
                text = f"save {m.save_id} was begun in slot {entry.slot}, generation {entry.generation}"
                return self.refuse(session.peer, m.id, ProtocolError(text, detail="slot"))
            return self.send(session.peer, Ok(id=m.id))
        before = self._t.entry(slot.key)
        if m.generation <= slot.taken or (before and before.phase == BEGUN and m.generation <= before.generation):
            text = f"generation {m.generation} of slot {m.slot} is over"
            return self.refuse(session.peer, m.id, UnknownSaveError(text, detail="generation", save_id=m.save_id))
        if before is not None and before.phase in IN_FLIGHT:
            text = f"slot {m.slot} still holds save {slot.key[0] if slot.key else ''}, which has not ended"
            return self.refuse(session.peer, m.id, ProtocolError(text, detail="slot"))
        if self._t.now >= self._t.begins_until:
            return self.refuse(session.peer, m.id, draining())
        if self._t.jobs >= MAX_JOBS:
            return self.refuse(session.peer, m.id, busy())
        self._intake.supersede(slot, m.save_id)
        error = self._intake.begin(session, m)
        slot.key = (m.save_id, session.rank)
        if error is not None:
            return self.refuse(session.peer, m.id, from_wire(error))
        return self.send(session.peer, Ok(id=m.id))

    def submit(self, session: Session, m: Submit) -> None:
        """Answer the doorbell: at once when the save is known to be sealed, else when its slot has been read."""
        slot = self._t.slots.get(m.slot) if m.slot in session.slots else None
        entry = self._t.entry((m.save_id, session.rank))
        if slot is None:
            self.refuse(session.peer, m.id, _unknown_slot(m.slot))
        elif entry is not None and (entry.slot, entry.generation) != (m.slot, m.generation):
            text = f"save {m.save_id} is in slot {entry.slot}, generation {entry.generation}"
            self.refuse(session.peer, m.id, ProtocolError(text, detail="slot"))
        elif entry is not None and entry.phase != BEGUN:
            self.send(session.peer, Ok(id=m.id))
        elif m.generation <= slot.taken:
            text = f"generation {m.generation} of slot {m.slot} is over"
            self.refuse(session.peer, m.id, UnknownSaveError(text, detail="generation", save_id=m.save_id))
        elif len(slot.waiters) < MAX_WAITERS:
            slot.waiters.append(Waiter(session.peer, m.id, m.save_id, m.generation))
            self._read(slot)

    def slot_read(self, event: SlotRead) -> None:
        """Take up what is sealed, whoever asked: a sealed snapshot is meant to be written."""
        slot = self._t.slots.get(event.slot)
        if slot is None or not slot.reading:
            return
        slot.reading, slot.opened = False, event.opened
        request = event.request
        if request is not None and event.streamed:
            # Of what the worker before has streamed, only a ring is gone on with before it is sealed, and only once its
            # trainer has begun it here.
            begun = request.ring_segments and self._t.entry((request.save_id, slot.rank)) is not None
            if not slot.closing and (begun or event.generation > slot.adopted):
                self._intake.stream(slot, event.generation, request)
        elif request is not None and event.generation > slot.taken:
            taken = self._intake.take_up(slot, event.generation, request)
            if taken and slot.closing:
                text = "its doorbell had not come"
                self._t.log("info", text, save_id=request.save_id, session=slot.session, count="saves_rescued")
        elif request is not None and slot.committed == request.save_id and event.generation == slot.taken:
            slot.found = None if request.ring_segments else request  # of a ring only the end is there
        slot.committed = ""
        slot.void = slot.closing and not slot.read_again and (request is None or event.generation != slot.taken)
        waiters, slot.waiters = slot.waiters, []
        for w in waiters:
            if request is not None and (request.save_id, event.generation) == (w.save_id, w.generation):
                if self._t.entry((w.save_id, slot.rank)) is not None:
                    self.send(w.peer, Ok(id=w.id))
                else:
                    detail = "the request in the slot is of another rank or world than its session, or than its save"
                    text = f"save {w.save_id}: {detail}"
                    self.refuse(w.peer, w.id, RanksDisagreeError(text, detail=detail, save_id=w.save_id))
            elif slot.read_again:
                slot.waiters.append(w)
            else:
                text = f"slot {slot.number} does not hold generation {w.generation} of save {w.save_id}, sealed"
                text += f": {event.reason}" if event.reason else ""
                self.refuse(w.peer, w.id, UnknownSaveError(text, detail=event.reason, save_id=w.save_id))
        if slot.read_again:
            slot.read_again = False
            self._read(slot)

    def free_what_is_over(self) -> None:
        """Free closing slots that no read, save or reader needs; abandon saves that were never sealed in them."""
        self._keeping.consider()
        for slot in [s for s in self._t.slots.values() if s.closing and not s.reading]:
            entry = self._t.entry(slot.key)
            if entry is not None and slot.key is not None and entry.phase == BEGUN and entry.slot == slot.number:
                text = "the trainer ended, or gave its memory back, before the snapshot was complete"
                self._intake.abandon(self._t.saves[slot.key[0]], entry, "not_sealed", text)
            # IMPORTANT: a write job may outlive its save's end (another rank failed): unmapping under it is a crash.
            if slot.fd >= 0 and not is_in_flight(self._t, slot) and not slot.writes and not slot.kept:
                # IMPORTANT: whoever reads it counts even while it cannot be said what is worth keeping.
                if slot.held_by or slot.found is not None or self._keeping.is_undecided(slot):
                    continue
                del self._t.slots[slot.number]
                self._keeping.freed(slot)
                self._t.freeing.add(slot.number)
                self._t.actions.append(FreeSlot(slot=slot.number))
                self._t.log("debug", "slot freed", session=slot.session, count="slots_freed", slot=slot.number)


def _unknown_slot(number: int) -> UnknownSaveError:
    return UnknownSaveError(f"this session has no slot {number}", detail="slot")


def draining() -> WorkerUnavailableError:
    return WorkerUnavailableError("this worker is shutting down; start another", detail="draining")


def busy() -> WorkerUnavailableError:
    return WorkerUnavailableError("this worker has too many jobs waiting; try again later", detail="busy")
