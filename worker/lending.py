"""The brain's sessions and slots: who holds which memory, and when it may be freed.

Two rules: memory is freed only after a release, a goodbye or the proof of its holder's death, never by a timeout; and
only when no save reads it any more. Before it is freed it is read once more, so that a sealed snapshot whose doorbell
was lost is taken up.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncckpt.errors import AsyncCkptError, ProtocolError, UnknownSaveError, WorkerUnavailableError, from_wire, to_wire
from asyncckpt.protocol.lifecycle import BEGUN, IN_FLIGHT
from asyncckpt.protocol.messages import Allocate, Begin, Granted, Hello, Message, Ok, Refused, Release, Submit, Welcome
from asyncckpt_worker.events import (
    CreateSlot,
    Died,
    FreeSlot,
    Peer,
    ReadSlot,
    Send,
    SlotCreated,
    SlotRead,
    Unwatch,
    Watch,
    Watched,
)
from asyncckpt_worker.records import MAX_JOBS, MAX_SESSIONS, MAX_SLOTS_PER_SESSION, Session, Slot, Tables, Waiter
from asyncckpt_worker.saves import SaveBook

MAX_WAITERS = 16
"""Repeats of one Submit that are all answered; a trainer repeats it a few times at most."""


class Lending:
    """Changes `tables.sessions` and `tables.slots` and adds the actions that follow."""

    def __init__(self, tables: Tables, saves: SaveBook, welcome: Callable[[int], Welcome]) -> None:
        self._t = tables
        self._saves = saves
        self._welcome = welcome

    def send(self, peer: Peer, message: Message) -> None:
        """Add a Send action."""
        self._t.actions.append(Send(peer=peer, message=message))

    def refuse(self, peer: Peer, id: int, error: AsyncCkptError) -> None:
        """Answer a request with an error."""
        self._t.log("debug", f"refused: {error}", session=self._t.peers.get(peer), count="requests_refused")
        self.send(peer, Refused(id=id, error=to_wire(error)))

    # ---- sessions ---------------------------------------------------------------------------------------------------

    def hello(self, peer: Peer, m: Hello) -> None:
        """Open a session, or find it again: a repeated Hello, or one over a new connection."""
        known = self._t.sessions.get(m.session)
        if self._t.peers.get(peer, m.session) != m.session:
            return self.refuse(
                peer, m.id, ProtocolError("this connection belongs to another session", detail="session")
            )
        if known is not None:
            if (known.pid, known.pid_start, known.rank) != (m.pid, m.pid_start, m.rank):
                return self.refuse(peer, m.id, ProtocolError("another process has this session", detail="session"))
            self._t.peers.pop(known.peer, None)
            self._t.peers[peer], known.peer = known.name, peer
            if known.hello is None:
                self.send(peer, self._welcome(m.id))
            return None
        if self._t.draining or len(self._t.sessions) >= MAX_SESSIONS:
            why = "is shutting down" if self._t.draining else f"serves {MAX_SESSIONS} sessions already"
            return self.refuse(peer, m.id, WorkerUnavailableError(f"this worker {why}; start another", detail=why))
        if not m.rank < m.world_size:
            return self.refuse(peer, m.id, ProtocolError(f"rank {m.rank} of world {m.world_size}", detail="rank"))
        self._t.sessions[m.session] = Session(
            m.session, peer, m.pid, m.pid_start, m.rank, m.world_size, m.package, hello=m.id
        )
        self._t.peers[peer] = m.session
        self._t.actions.append(Watch(session=m.session, pid=m.pid, pid_start=m.pid_start))
        return None

    def watched(self, event: Watched) -> None:
        """Answer the Hello: the process is there and watched, or it is not."""
        session = self._t.sessions.get(event.session)
        if session is None or session.hello is None:
            return
        id, session.hello = session.hello, None
        if event.alive:
            self.send(session.peer, self._welcome(id))
            text = f"session opened by process {session.pid}, rank {session.rank} of {session.world_size}"
            self._t.log("info", text, session=session.name, count="sessions_opened")
            return
        text = f"the worker sees no process {session.pid} with that start time; both must share a PID namespace"
        self.refuse(session.peer, id, WorkerUnavailableError(text, detail="pid"))
        self._forget(session)

    def died(self, event: Died) -> None:
        """Take up what the dead process had sealed, free the rest."""
        session = self._t.sessions.get(event.session)
        if session is not None:
            self._t.log("info", "process died", session=session.name, count="sessions_died", pid=session.pid)
            self._forget(session)

    def goodbye(self, session: Session) -> None:
        """End a session in order."""
        self._t.log("info", "session closed", session=session.name, count="sessions_closed")
        self._t.actions.append(Unwatch(session=session.name))
        self._forget(session)

    def _forget(self, session: Session) -> None:
        self._t.sessions.pop(session.name, None)
        self._t.peers.pop(session.peer, None)
        for number in sorted(session.slots):
            self._close(self._t.slots[number])

    # ---- slots ------------------------------------------------------------------------------------------------------

    def allocate(self, session: Session, m: Allocate) -> None:
        """Grant a slot; a repeated request gets the one that it got before."""
        if m.id in session.granted:
            slot = self._t.slots.get(session.granted[m.id])
            if slot is None or slot.closing:
                self.refuse(session.peer, m.id, UnknownSaveError("that slot was released", detail="slot"))
            elif slot.fd >= 0:
                self._grant(session, slot)
        elif self._t.draining:
            self.refuse(session.peer, m.id, draining())
        elif len(session.slots) >= MAX_SLOTS_PER_SESSION:
            text = f"a session has at most {MAX_SLOTS_PER_SESSION} slots; release one"
            self.refuse(session.peer, m.id, ProtocolError(text, detail="slots"))
        else:
            number = self._t.next_slot
            self._t.next_slot += 1
            self._t.slots[number] = Slot(number, m.nbytes, session.name, session.rank, session.world_size, m.id)
            session.slots.add(number)
            for old in list(session.granted)[: -MAX_SLOTS_PER_SESSION * 4]:
                del session.granted[old]
            session.granted[m.id] = number
            self._t.actions.append(CreateSlot(slot=number, nbytes=m.nbytes, populate=m.populate))

    def created(self, event: SlotCreated) -> None:
        """Answer the Allocate."""
        slot = self._t.slots.get(event.slot)
        if slot is None or slot.fd >= 0:
            return
        session = self._t.sessions.get(slot.session)
        if event.error is not None:
            del self._t.slots[slot.number]
            if session is not None:
                session.slots.discard(slot.number)
                del session.granted[slot.allocate_id]
                self.refuse(session.peer, slot.allocate_id, from_wire(event.error))
            return
        slot.fd, slot.token = event.fd, event.token
        if session is not None and not slot.closing:
            self._grant(session, slot)
            self._t.log(
                "debug", "slot lent", session=session.name, count="slots_lent", slot=slot.number, nbytes=slot.nbytes
            )

    def _grant(self, session: Session, slot: Slot) -> None:
        self.send(
            session.peer,
            Granted(id=slot.allocate_id, slot=slot.number, fd=slot.fd, nbytes=slot.nbytes, token=slot.token),
        )

    def release(self, session: Session, m: Release) -> None:
        """Take a slot back; one that was freed before is as good."""
        if m.slot in session.slots:
            session.slots.discard(m.slot)
            self._close(self._t.slots[m.slot])
        elif not 0 < m.slot < self._t.next_slot or (m.slot in self._t.slots and not self._was_of(session, m.slot)):
            return self.refuse(session.peer, m.id, _unknown_slot(m.slot))
        self.send(session.peer, Ok(id=m.id))
        return None

    def _was_of(self, session: Session, number: int) -> bool:
        return self._t.slots[number].session == session.name

    def _close(self, slot: Slot) -> None:
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

    def read_all_lent(self) -> None:
        """Look into every slot: for the snapshots that are sealed while their doorbells are still under way."""
        for slot in self._t.slots.values():
            self._read(slot)

    # ---- saves in slots ---------------------------------------------------------------------------------------------

    def begin(self, session: Session, m: Begin) -> None:
        """Check slot and generation, then begin the save; a repeated Begin changes nothing."""
        slot = self._t.slots.get(m.slot) if m.slot in session.slots else None
        entry = self._t.entry((m.save_id, session.rank))
        if slot is None:
            return self.refuse(session.peer, m.id, _unknown_slot(m.slot))
        if entry is not None:
            if entry.slot and (entry.slot, entry.generation) != (m.slot, m.generation):
                text = f"save {m.save_id} was begun in slot {entry.slot}, generation {entry.generation}"
                return self.refuse(session.peer, m.id, ProtocolError(text, detail="slot"))
            return self.send(session.peer, Ok(id=m.id))
        save = self._t.saves.get(m.save_id)
        if save is not None and save.world_size != session.world_size:
            text = f"save {m.save_id} is one of {save.world_size} ranks, this session has {session.world_size}"
            return self.refuse(session.peer, m.id, ProtocolError(text, detail="world_size"))
        before = self._t.entry(slot.key)
        if m.generation <= slot.taken or (before and before.phase == BEGUN and m.generation <= before.generation):
            text = f"generation {m.generation} of slot {m.slot} is over"
            return self.refuse(session.peer, m.id, UnknownSaveError(text, detail="generation", save_id=m.save_id))
        if before is not None and before.phase in IN_FLIGHT:
            text = f"slot {m.slot} still holds save {slot.key[0] if slot.key else ''}, which has not ended"
            return self.refuse(session.peer, m.id, ProtocolError(text, detail="slot"))
        if self._t.draining:
            return self.refuse(session.peer, m.id, draining())
        if self._t.jobs >= MAX_JOBS:
            return self.refuse(session.peer, m.id, busy())
        self._saves.supersede(slot, m.save_id)
        self._saves.begin(session, m)
        slot.key = (m.save_id, session.rank)
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
        slot.reading = False
        request = event.request
        if request is not None and event.generation > slot.taken:
            taken = self._saves.take_up(slot, event.generation, request)
            if taken and slot.closing:
                text = "its doorbell had not come"
                self._t.log("info", text, save_id=request.save_id, session=slot.session, count="saves_rescued")
        waiters, slot.waiters = slot.waiters, []
        for w in waiters:
            if request is not None and (request.save_id, event.generation) == (w.save_id, w.generation):
                self.send(w.peer, Ok(id=w.id))
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
        """Free closing slots that no read and no save needs; abandon saves that were never sealed in them."""
        for slot in [s for s in self._t.slots.values() if s.closing and not s.reading]:
            entry = self._t.entry(slot.key)
            if entry is not None and slot.key is not None and entry.phase == BEGUN and entry.slot == slot.number:
                text = "the trainer ended, or gave its memory back, before the snapshot was complete"
                self._saves.abandon(self._t.saves[slot.key[0]], entry, "not_sealed", text)
            in_flight = entry is not None and entry.phase in IN_FLIGHT and entry.slot == slot.number
            # IMPORTANT: a write job may outlive its save's end (another rank failed): unmapping under it is a crash.
            if slot.fd >= 0 and not in_flight and not slot.writes:
                del self._t.slots[slot.number]
                self._t.actions.append(FreeSlot(slot=slot.number))
                self._t.log("debug", "slot freed", session=slot.session, count="slots_freed", slot=slot.number)


def _unknown_slot(number: int) -> UnknownSaveError:
    return UnknownSaveError(f"this session has no slot {number}", detail="slot")


def draining() -> WorkerUnavailableError:
    return WorkerUnavailableError("this worker is shutting down; start another", detail="draining")


def busy() -> WorkerUnavailableError:
    return WorkerUnavailableError("this worker has too many jobs waiting; try again later", detail="busy")
