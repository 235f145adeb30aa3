"""Slots: which session uses which memory, and when it may be freed.

Memory is freed only after Release, Goodbye or the proof that the session's process is dead, never by a timeout; and
only when no save needs it. It is read once more before it is freed, so that a sealed snapshot whose Submit was lost is
accepted.
"""

from __future__ import annotations

from asyncckpt.errors import (
    AsyncCkptError,
    InsufficientMemoryError,
    ProtocolError,
    RanksDisagreeError,
    UnknownSaveError,
    from_wire,
)
from asyncckpt.format.names import SaveId
from asyncckpt.memory.slot import MAX_SLOT_NBYTES, MIN_SLOT_NBYTES, PAGE_NBYTES
from asyncckpt.protocol.messages import Adopt, Allocate, Begin, Granted, Ok, Release, Submit
from asyncckpt.protocol.request import SaveRequest
from asyncckpt.protocol.save_phases import COMMITTED
from asyncckpt_worker.core.actions import AdoptSlot, FreeSlot, ReadSlot, Resources
from asyncckpt_worker.core.events import SlotAdopted, SlotRead
from asyncckpt_worker.core.failures import busy, draining
from asyncckpt_worker.core.kept_snapshots import SnapshotRegistry, is_in_flight
from asyncckpt_worker.core.model import MAX_JOBS, MAX_SLOTS_PER_SESSION, Save, Session, Slot, Waiter
from asyncckpt_worker.core.save_admission import SaveAdmission, part_of_request
from asyncckpt_worker.core.tables import Tables

MAX_WAITERS = 16
"""Maximum number of Submits that wait for one read of a slot; a trainer repeats a Submit only a few times."""


class SlotRegistry:
    """Changes `tables.slots`."""

    def __init__(
        self, tables: Tables, admission: SaveAdmission, snapshot_registry: SnapshotRegistry, resources: Resources
    ) -> None:
        self._t, self._resources = tables, resources
        self._admission, self._snapshot_registry = admission, snapshot_registry

    # ---- slots ------------------------------------------------------------------------------------------------------

    def allocate(self, session: Session, m: Allocate) -> None:
        """Grant a slot; a repeated request gets the same slot."""
        if m.id in session.granted:
            self.grant_again(session, m.id)
        elif self._t.draining:
            self._t.refuse(session.peer, m.id, draining())
        elif len(session.slots) >= MAX_SLOTS_PER_SESSION:
            text = f"a session has at most {MAX_SLOTS_PER_SESSION} slots; release one"
            self._t.refuse(session.peer, m.id, ProtocolError(text, detail="slots"))
        elif self._t.jobs >= MAX_JOBS:
            self._t.refuse(session.peer, m.id, busy())
        elif (kept := self._snapshot_registry.lend_again(session, m)) is not None:
            self.assign(session, kept)
            self._grant(session, kept)
        else:
            number = self._t.next_slot
            self._t.next_slot += 1
            slot = Slot(number, m.nbytes, session.name, session.rank, session.world_size, m.id, populate=m.populate)
            slot.process = (session.pid, session.pid_start)
            self._t.slots[number] = slot
            self.assign(session, slot)
            self._create(slot)

    def assign(self, session: Session, slot: Slot) -> None:
        """Assign a slot to a session, and remember the request that it answers."""
        session.slots.add(slot.number)
        slot.storage = session.storage
        for old in list(session.granted)[: -MAX_SLOTS_PER_SESSION * 4]:
            del session.granted[old]
        session.granted[slot.allocate_id] = slot.number

    def grant_again(self, session: Session, id: int) -> None:
        """Answer a repeated Allocate or Adopt, unless the first one is still in progress."""
        slot = self._t.slots.get(session.granted[id])
        if slot is None or slot.closing:
            self._t.refuse(session.peer, id, UnknownSaveError("that slot was released", detail="slot"))
        elif slot.fd >= 0:
            self._grant(session, slot)

    def _create(self, slot: Slot) -> None:
        try:
            slot.fd, slot.token = self._resources.create_slot(slot.number, slot.nbytes, populate=slot.populate)
        except InsufficientMemoryError as error:
            if self._is_freeing() or self._snapshot_registry.make_room():
                self._t.postponed[slot.number] = slot
            else:
                self._creation_failed(slot, error)
        except AsyncCkptError as error:
            self._creation_failed(slot, error)
        else:
            self._created(slot)

    def adopted(self, event: SlotAdopted) -> None:
        """Answer the Adopt, and read the slot."""
        slot = self._t.slots.get(event.slot)
        if slot is None or slot.fd >= 0:
            return
        if event.error is not None:
            return self._creation_failed(slot, from_wire(event.error))
        slot.fd, slot.token = event.fd, event.token
        self._t.review_closing_slots = self._t.review_closing_slots or slot.closing
        self._t.actions.append(ReadSlot(slot=slot.number))
        return self._created(slot)

    def _created(self, slot: Slot) -> None:
        session = self._t.sessions.get(slot.session)
        if session is not None and not slot.closing:
            self._grant(session, slot)
            self._t.log(
                "debug", "slot lent", session=session.name, count="slots_lent", slot=slot.number, nbytes=slot.nbytes
            )

    def _creation_failed(self, slot: Slot, error: AsyncCkptError) -> None:
        del self._t.slots[slot.number]
        self._t.closing.pop(slot.number, None)
        self._t.review_closing_slots = True
        self._t.n_reading -= slot.reading
        session = self._t.sessions.get(slot.session)
        if session is not None:
            session.slots.discard(slot.number)
            session.granted.pop(slot.allocate_id, None)
            self._t.refuse(session.peer, slot.allocate_id, error)

    def _is_freeing(self) -> bool:
        """Whether slots are being freed, or may be freed after a read."""
        return bool(self._t.freeing) or any(s.reading for s in self._t.closing.values())

    def create_postponed(self) -> None:
        """Create the slots that did not fit into memory, once all pending frees are done."""
        if self._is_freeing():
            return
        postponed, self._t.postponed = self._t.postponed, {}
        for slot in postponed.values():
            if slot.closing:
                del self._t.slots[slot.number], self._t.closing[slot.number]
                self._t.n_reading -= slot.reading
            else:
                self._t.run_guarded("", self._create, slot)

    def _grant(self, session: Session, slot: Slot) -> None:
        self._t.send(
            session.peer,
            Granted(id=slot.allocate_id, slot=slot.number, fd=slot.fd, nbytes=slot.nbytes, token=slot.token),
        )

    def release(self, session: Session, m: Release) -> None:
        """Close a slot that its session releases; a repeated Release is answered again."""
        if m.slot in session.slots:
            session.slots.discard(m.slot)
            self._t.slots[m.slot].dropped = True
            self.close(self._t.slots[m.slot])
        elif not 0 < m.slot < self._t.next_slot or (m.slot in self._t.slots and not self._belonged_to(session, m.slot)):
            return self._t.refuse(session.peer, m.id, _unknown_slot(m.slot))
        self._t.send(session.peer, Ok(id=m.id))
        return None

    def _belonged_to(self, session: Session, number: int) -> bool:
        return self._t.slots[number].session == session.name

    def close(self, slot: Slot) -> None:
        """Close a slot: it is read once more, then freed when nothing needs it."""
        slot.closing = self._t.review_closing_slots = True
        self._t.closing[slot.number] = slot
        self._read(slot)

    def _read(self, slot: Slot) -> None:
        if slot.fd < 0:
            return  # it is not created yet, and cannot hold a snapshot
        if slot.reading:
            # IMPORTANT: a read that began before the seal, or before the death, may miss the snapshot: read again.
            slot.read_again = True
        else:
            slot.reading = True
            self._t.n_reading += 1
            self._t.actions.append(ReadSlot(slot=slot.number))

    def read_all_lent(self) -> bool:
        """Read every slot, to find sealed snapshots whose Submits have not arrived.

        Returns:
            Whether a read is in progress.
        """
        for slot in self._t.slots.values():
            self._read(slot)
        return self._t.n_reading > 0

    # ---- saves in slots ---------------------------------------------------------------------------------------------

    def begin(self, session: Session, m: Begin) -> None:
        """Check slot and generation, then begin the save; a repeated Begin changes nothing."""
        slot = self._t.slots.get(m.slot) if m.slot in session.slots else None
        part = self._t.part((m.save_id, session.rank))
        if slot is None:
            return self._t.refuse(session.peer, m.id, _unknown_slot(m.slot))
        other_world = self._admission.refuse_other_world(session, SaveId.parse(m.save_id))
        if other_world is not None:
            return self._t.refuse(session.peer, m.id, from_wire(other_world))
        if part is not None:
            if part.slot and (part.slot, part.generation) != (m.slot, m.generation):
                text = f"save {m.save_id} was begun in slot {part.slot}, generation {part.generation}"
                return self._t.refuse(session.peer, m.id, ProtocolError(text, detail="slot"))
            return self._t.send(session.peer, Ok(id=m.id))
        before = slot.last[1] if slot.last is not None else None
        if m.generation <= slot.accepted_generation or (
            before and before.is_open and m.generation <= before.generation
        ):
            text = f"generation {m.generation} of slot {m.slot} has ended"
            return self._t.refuse(session.peer, m.id, UnknownSaveError(text, detail="generation", save_id=m.save_id))
        if before is not None and before.in_flight:
            text = f"slot {m.slot} still holds save {slot.key[0] if slot.key else ''}, which has not ended"
            return self._t.refuse(session.peer, m.id, ProtocolError(text, detail="slot"))
        if self._t.now >= self._t.begins_until:
            return self._t.refuse(session.peer, m.id, draining())
        if self._t.jobs >= MAX_JOBS:
            return self._t.refuse(session.peer, m.id, busy())
        self._admission.supersede(slot, m.save_id, m.generation)
        error = self._admission.begin(session, m)
        save = self._t.saves[m.save_id]
        slot.last = (save, save.ranks[session.rank])
        if error is not None:
            return self._t.refuse(session.peer, m.id, from_wire(error))
        return self._t.send(session.peer, Ok(id=m.id))

    def submit(self, session: Session, m: Submit) -> None:
        """Answer a Submit: at once if the save is known to be sealed, else when its slot has been read."""
        slot = self._t.slots.get(m.slot) if m.slot in session.slots else None
        part = self._t.part((m.save_id, session.rank))
        if slot is None:
            self._t.refuse(session.peer, m.id, _unknown_slot(m.slot))
        elif part is not None and (part.slot, part.generation) != (m.slot, m.generation):
            text = f"save {m.save_id} is in slot {part.slot}, generation {part.generation}"
            self._t.refuse(session.peer, m.id, ProtocolError(text, detail="slot"))
        elif part is not None and not part.is_open:
            self._t.send(session.peer, Ok(id=m.id))
        elif m.generation <= slot.accepted_generation:
            text = f"generation {m.generation} of slot {m.slot} has ended"
            self._t.refuse(session.peer, m.id, UnknownSaveError(text, detail="generation", save_id=m.save_id))
        elif len(slot.waiters) < MAX_WAITERS:
            slot.waiters.append(Waiter(session.peer, m.id, m.save_id, m.generation))
            self._read(slot)

    def slot_read(self, event: SlotRead) -> None:
        """Handle the result of a read. A sealed snapshot is accepted, whatever caused the read."""
        slot = self._t.slots.get(event.slot)
        if slot is None or not slot.reading:
            return
        slot.reading, slot.opened = False, event.opened
        self._t.n_reading -= 1
        self._t.review_closing_slots = self._t.review_closing_slots or slot.closing
        request = event.request
        if request is not None and request.ring_segments:
            slot.committed = ""  # a ring holds only its last segments
        if request is not None and event.streamed:
            # An adopted slot is written before its seal only if it is a ring, and its trainer has sent Begin here.
            begun = request.ring_segments and self._t.part((request.save_id, slot.rank)) is not None
            if not slot.closing and (begun or event.generation > slot.adopted_generation):
                self._admission.stream(slot, event.generation, request)
        elif request is not None and event.generation > slot.accepted_generation:
            taken = self._admission.accept_sealed(slot, event.generation, request)
            if taken and slot.closing:
                text = "sealed snapshot found in a closing slot; its Submit was lost"
                self._t.log("info", text, save_id=request.save_id, session=slot.session, count="saves_rescued")
        elif request is not None and slot.committed == request.save_id and event.generation == slot.accepted_generation:
            self._t.adopted_committed[slot.number] = (slot, request)
        slot.committed = ""
        slot.reopened = (
            slot.closing and not slot.read_again and (request is None or event.generation != slot.accepted_generation)
        )
        waiters, slot.waiters = slot.waiters, []
        for w in waiters:
            if request is not None and (request.save_id, event.generation) == (w.save_id, w.generation):
                if self._t.part((w.save_id, slot.rank)) is not None:
                    self._t.send(w.peer, Ok(id=w.id))
                else:
                    detail = "the request in the slot has another rank or world size than its session or its save"
                    text = f"save {w.save_id}: {detail}"
                    self._t.refuse(w.peer, w.id, RanksDisagreeError(text, detail=detail, save_id=w.save_id))
            elif slot.read_again:
                slot.waiters.append(w)
            else:
                text = f"slot {slot.number} does not hold generation {w.generation} of save {w.save_id}, sealed"
                text += f": {event.reason}" if event.reason else ""
                self._t.refuse(w.peer, w.id, UnknownSaveError(text, detail=event.reason, save_id=w.save_id))
        if slot.read_again:
            slot.read_again = False
            self._read(slot)

    def abandon_released(self) -> None:
        """Abandon unsealed saves in closing slots."""
        for slot in list(self._t.closing.values()):
            if not slot.reading and slot.last is not None:
                save, part = slot.last
                if part.is_open and part.slot == slot.number:
                    text = "its slot was released before the snapshot was sealed"
                    self._t.run_guarded(save.save_id, self._admission.abandon, save, part, "not_sealed", text)

    def free_unneeded(self) -> None:
        """Free closing slots that no read, save or reader needs and that are not kept."""
        self._t.review_closing_slots = False
        self._snapshot_registry.decide()
        for slot in list(self._t.closing.values()):
            # IMPORTANT: a write job may outlast its save (another rank failed); unmapping its slot would crash it.
            if slot.kept or slot.reading or slot.fd < 0 or slot.writes or is_in_flight(slot):
                continue
            # IMPORTANT: a slot that is held by a reader must stay, also while it is undecided which slots are kept.
            if slot.held_by or slot.number in self._t.adopted_committed or self._snapshot_registry.is_undecided(slot):
                continue
            del self._t.slots[slot.number], self._t.closing[slot.number]
            self._snapshot_registry.freed(slot)
            self._t.freeing.add(slot.number)
            self._t.actions.append(FreeSlot(slot=slot.number))
            self._t.log("debug", "slot freed", session=slot.session, count="slots_freed", slot=slot.number)


def _unknown_slot(number: int) -> UnknownSaveError:
    return UnknownSaveError(f"this session has no slot {number}", detail="slot")


class AdoptionRegistry:
    """Adopts slots of dead workers.

    Args:
        tables: Tables of the core.
        slot_registry: Assigns adopted slots, and answers repeated requests.
    """

    def __init__(self, tables: Tables, slot_registry: SlotRegistry) -> None:
        self._t, self._slot_registry = tables, slot_registry

    def adopt(self, session: Session, m: Adopt) -> None:
        """Open the slot of a dead worker, and read it; a repeated request gets the same slot."""
        if m.id in session.granted:
            return self._slot_registry.grant_again(session, m.id)
        if self._t.draining:
            return self._t.refuse(session.peer, m.id, draining())
        if len(session.slots) >= MAX_SLOTS_PER_SESSION or not self._is_sound(m):
            text = f"a slot of {m.nbytes} bytes, generation {m.generation}, ended {m.ended}"
            return self._t.refuse(session.peer, m.id, ProtocolError(text, detail="slots"))
        if self._t.jobs >= MAX_JOBS:
            return self._t.refuse(session.peer, m.id, busy())
        number = self._t.next_slot
        self._t.next_slot += 1
        slot = Slot(number, m.nbytes, session.name, session.rank, session.world_size, m.id)
        slot.accepted_generation, slot.adopted_generation, slot.committed = m.ended, m.generation, m.committed
        slot.process = (session.pid, session.pid_start)
        # IMPORTANT: counts as being read from here on. If the trainer dies meanwhile, its rank must not depart before
        # the slot was read, and a sealed snapshot must not be lost.
        slot.reading = True
        self._t.n_reading += 1
        self._t.slots[number] = slot
        self._slot_registry.assign(session, slot)
        self._t.actions.append(AdoptSlot(slot=number, nbytes=m.nbytes, pid=session.pid, fd=m.fd, token=m.token))
        return None

    def restore_committed(self) -> None:
        """Record snapshots of saves that a dead worker had committed, so that they can be loaded from adopted slots.

        If another rank of the save does not know of the commit, the recovery from disk comes first.
        """
        for slot, request in list(self._t.adopted_committed.values()):
            known = self._t.find(request.save_id)
            if known is not None and known.outcome is None:
                continue
            del self._t.adopted_committed[slot.number]
            self._t.review_closing_slots = True
            self._t.run_guarded("", self._restore, slot, request)

    def _restore(self, slot: Slot, request: SaveRequest) -> None:
        known = self._t.find(request.save_id)
        is_ours = (request.rank, request.world_size) == (slot.rank, slot.world_size) and slot.last is None
        if not is_ours or self._t.part((request.save_id, request.rank)) is not None:
            return
        if known is not None and (known.outcome, known.world_size) != (COMMITTED, request.world_size):
            return
        part = part_of_request(slot, slot.accepted_generation, request, self._t.now)
        save = self._t.find_or_reopen(request.save_id)
        if save is None:
            save = Save(SaveId.parse(request.save_id), request.world_size, outcome=COMMITTED, complete=True)
            self._t.saves[request.save_id] = save
        part.phase = COMMITTED
        save.add(part)
        slot.last = (save, part)
        text = f"slot {slot.number} holds its snapshot, which a dead worker had committed"
        self._t.log("info", text, save_id=save.save_id, session=slot.session, count="snapshots_remembered")

    @staticmethod
    def _is_sound(m: Adopt) -> bool:
        whole = MIN_SLOT_NBYTES <= m.nbytes <= MAX_SLOT_NBYTES and m.nbytes % PAGE_NBYTES == 0
        return whole and m.ended <= m.generation
