"""The slots that the worker has lent to this process, and which save uses which.

A slot is reused without asking the worker, once the worker has reported the end of the save that used it. So a save in
a running training costs no round trip. The pool is the only owner: it opens, keeps and closes every slot.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from asyncckpt.client.slot import Slot, describe_save
from asyncckpt.config import CheckpointerConfig
from asyncckpt.errors import (
    CheckpointerClosedError,
    InsufficientMemoryError,
    SaveSkippedError,
    SlotBusyError,
    SlotTimeoutError,
)
from asyncckpt.format.names import SaveId
from asyncckpt.memory.slot import PAGE_NBYTES
from asyncckpt.planning.save_plan import SavePlan

WAIT_STEP_S = 1.0
"""How often a waiting `acquire` looks again, even if it was not notified."""

NOWAIT_ANSWER_S = 1.0
"""How long to wait for the worker's answer if `on_busy` is not "wait": a live one answers in milliseconds. Chosen."""

SPARE_SAVES = 8
"""After so many saves in a row that found all other slots free, one of these is given back. Chosen, not measured."""


class RetainedSlot:
    """The slot that is not overwritten: it holds the newest committed snapshot, for `keep_in_memory="latest"`.

    Used by the pool only, under its lock.

    Args:
        wanted: Whether `keep_in_memory` is "latest".

    Attributes:
        slot: The slot, or None.
    """

    def __init__(self, *, wanted: bool) -> None:
        self.wanted = wanted
        self.slot: Slot | None = None
        self._sequence = -1

    def committed(self, slot: Slot, save_id: SaveId) -> None:
        """Retain `slot`, whose snapshot is committed, unless a later one is retained."""
        slot.committed = (save_id, slot.generation)
        if self.wanted and save_id.sequence > self._sequence:
            self.slot, self._sequence = slot, save_id.sequence

    def forget(self, slot: Slot) -> None:
        """Do not retain `slot` any more: it is closed."""
        if slot is self.slot:
            self.slot = None

    def is_idle(self, slot: Slot) -> bool:
        """Whether no save uses the slot, and it is not retained."""
        return slot.free and slot is not self.slot


def _too_large(what: str, nbytes: int, several: int, limit: int) -> InsufficientMemoryError:
    """Return the error of a save (`what`) that needs `several` slots of `nbytes`, more than `limit`."""
    slots = "two slots, since keep_in_memory='latest', each" if several > 1 else "a slot"
    return InsufficientMemoryError(
        f"{what}: the snapshot needs {slots} of {nbytes} bytes, but arena_limit_bytes is {limit}, which is too little "
        "even for a ring of segments; raise the limit",
        nbytes=several * nbytes,
        limit=limit,
    )


def _no_room_beside_retained(what: str, limit: int | None, kept_nbytes: int) -> InsufficientMemoryError:
    """Return the error of a save (`what`) that needs a slot besides the retained one."""
    text = (
        f"{what}: the snapshot does not fit into arena_limit_bytes={limit} beside the one of {kept_nbytes} bytes "
        "that keep_in_memory='latest' keeps; raise the limit"
    )
    return InsufficientMemoryError(text, limit=limit)


class SlotPool:
    """The slots of one checkpointer.

    Args:
        config: For `slots`, `arena_limit_bytes`, `keep_in_memory`, `on_busy` and `slot_timeout_s`.
        allocate: Asks the worker for a slot of so many bytes. The second argument is a timeout in seconds, or None;
            returns None if the worker has not answered by then. Blocks; raises typed errors.
        release: Tells the worker that a slot is given back.
        why: Returns why no slot becomes free, for error messages.
    """

    def __init__(
        self,
        config: CheckpointerConfig,
        allocate: Callable[[int, float | None], Slot | None],
        release: Callable[[Slot], None],
        why: Callable[[], str] = str,
    ) -> None:
        self._config, self._allocate, self._release, self._why = config, allocate, release, why
        self._slots: list[Slot] = []
        self._retained = RetainedSlot(wanted=config.keep_in_memory == "latest")
        # IMPORTANT: `with self._lock`, not `with self._changed`. An interrupt in the latter's `__enter__`, which is
        # written in Python, would leave the lock taken.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._saves_without_overlap = self._uses = 0

    def acquire(
        self,
        nbytes: int,
        plan: SavePlan | None,
        save_id: SaveId,
        *,
        step: int | None,
        path: str,
        spare_nbytes: int = 0,
        may_wait: bool = True,
    ) -> Slot:
        """Return a slot of at least `nbytes`, marked as used by `save_id`.

        Blocks: while every slot is in use and `on_busy` is "wait", up to `slot_timeout_s`; and for an allocation. If
        another slot is in use, the allocation counts towards `slot_timeout_s` too.

        Args:
            nbytes: The size wanted.
            plan: Prefer a slot that has views for this plan; None: no preference.
            save_id, step, path: ID, step and directory of the save; `step` is None if it is not known yet.
            spare_nbytes: Make a new slot larger by so much, as far as the limit allows.
            may_wait: False: do not wait for a slot in use, whatever `on_busy` says.

        Raises:
            SlotTimeoutError, SaveSkippedError, SlotBusyError: As `on_busy` says; SlotBusyError without `may_wait`.
            InsufficientMemoryError: The slot does not fit into `arena_limit_bytes` or the machine.
            WorkerUnavailableError: The worker cannot be reached.
            CheckpointerClosedError: The pool was closed.
        """
        what, deadline = describe_save(save_id, step), time.monotonic() + self._config.slot_timeout_s
        limit, several = self._config.arena_limit_bytes, 2 if self._retained.wanted else 1
        if limit is not None and several * nbytes > limit:
            raise _too_large(what, nbytes, several, limit)
        # The spare room is for new slots only: an old slot without it is still large enough.
        wanted = nbytes + spare_nbytes
        if limit is not None:
            wanted = max(nbytes, min(wanted, limit // several // PAGE_NBYTES * PAGE_NBYTES))
        while True:
            with self._lock:
                self._check_open()
                # IMPORTANT: read `free` once. A device's copies end without the lock, so a slot may become free at any
                # moment, and the decisions below must agree with each other.
                free = [s for s in self._slots if s.free]
                in_use = len(free) < len(self._slots)
                idle = [s for s in free if s is not self._retained.slot]
                slot = self._fitting(idle, nbytes, plan)
                if slot is not None:
                    slot = self._release_spare(slot)
                    self._use(slot, save_id)
                    return slot
                may_allocate = self._make_room(wanted, idle, in_use=in_use)
                if not may_allocate:
                    if not in_use:
                        raise _no_room_beside_retained(what, limit, self.nbytes)
                    self._wait(deadline if may_wait else None, save_id, step, path)
                    continue
            slot = self._try_allocate(wanted, deadline)
            with self._lock:
                if slot is not None:
                    self._slots.append(slot)
                    if self._closed:  # by another thread, before the slot was in the list
                        self._drop(slot, tell=True)
                    self._check_open()
                    self._use(slot, save_id)
                    return slot
                if any(not s.free for s in self._slots):  # no room for one more on this machine: wait for one in use
                    self._wait(deadline if may_wait else None, save_id, step, path)

    def _use(self, slot: Slot, save_id: SaveId) -> None:
        self._uses += 1
        slot.user, slot.staging, slot.used = save_id, True, self._uses

    def _release_spare(self, slot: Slot) -> Slot:
        """Give the smallest slot back if the last `SPARE_SAVES` saves did not overlap: one slot is enough.

        Returns:
            `slot`, which is free and large enough, or another such slot if `slot` is the smallest.
        """
        others = [s for s in self._slots if s is not slot and s is not self._retained.slot]
        spare = [s for s in others if s.free]
        if len(spare) < len(others) or not spare:
            self._saves_without_overlap = 0
            return slot
        self._saves_without_overlap += 1
        if self._saves_without_overlap < SPARE_SAVES:
            return slot
        self._saves_without_overlap = 0
        largest = max(slot, *spare, key=lambda s: s.memory.nbytes)  # `slot` itself if all have the same size
        smallest = min(*spare, slot, key=lambda s: s.memory.nbytes)
        self._drop(smallest, tell=True)
        return largest if smallest is slot else slot

    def _check_open(self) -> None:
        if self._closed:
            raise CheckpointerClosedError("the checkpointer was closed while a save waited for a slot")

    def _fitting(self, idle: Sequence[Slot], nbytes: int, plan: SavePlan | None) -> Slot | None:
        fitting = [s for s in idle if s.memory.nbytes >= nbytes]
        return min(fitting, key=lambda s: (plan is None or not s.has_views_for(plan), s.memory.nbytes), default=None)

    def fits(self, nbytes: int) -> bool:
        """Whether all slots are in use, and one of them has room for `nbytes`."""
        with self._lock:
            return not any(s.free for s in self._slots) and any(s.memory.nbytes >= nbytes for s in self._slots)

    @property
    def is_in_use(self) -> bool:
        """Whether a save has one of the slots."""
        with self._lock:
            return any(not s.free for s in self._slots)

    def _make_room(self, nbytes: int, idle: Sequence[Slot], *, in_use: bool) -> bool:
        """Give back idle slots, which are all too small, and return whether a slot of `nbytes` may be allocated."""
        limit = self._config.arena_limit_bytes
        busy = [s for s in self._slots if s not in idle]
        held = sum(s.memory.nbytes for s in busy) + nbytes
        if len(busy) >= self._config.slots or (limit is not None and held > limit):
            return False  # wait for a slot in use; idle slots, for smaller structures, are kept
        # The least recently used go first. If no slot is in use, all of them go: then memory holds one snapshot only.
        free = sorted(idle, key=lambda s: s.used)
        left = sum(s.memory.nbytes for s in free)
        while free and (
            not in_use or len(self._slots) >= self._config.slots or (limit is not None and held + left > limit)
        ):
            left -= free[0].memory.nbytes
            self._drop(free.pop(0), tell=True)
        return True

    def _try_allocate(self, nbytes: int, deadline: float) -> Slot | None:
        while True:
            try:
                return self._allocate(nbytes, self._allocation_timeout_s(deadline))
            except InsufficientMemoryError:
                with self._lock:
                    free = [s for s in self._slots if self._retained.is_idle(s)]
                    if all(s.free for s in self._slots):
                        raise
                    for slot in free:
                        self._drop(slot, tell=True)
                if not free:
                    return None

    def _allocation_timeout_s(self, deadline: float) -> float | None:
        if all(s.free for s in list(self._slots)):
            return None
        left = max(0.0, deadline - time.monotonic())
        return left if self._config.on_busy == "wait" else min(left, NOWAIT_ANSWER_S)

    def _wait(self, deadline: float | None, save_id: SaveId, step: int | None, path: str) -> None:
        timeout_s, what = self._config.slot_timeout_s, describe_save(save_id, step)
        facts = {"save_id": str(save_id), "step": step, "path": path}
        users = ", ".join(str(s.user or "copies of a save that has ended") for s in self._slots)
        busy = f"{what} was not saved: every slot is in use (by {users})"
        if self._config.on_busy == "skip" and deadline is not None:
            raise SaveSkippedError(busy, **facts)
        if self._config.on_busy == "error" or deadline is None:
            raise SlotBusyError(busy, **facts)
        left = deadline - time.monotonic()
        if left <= 0:
            text = f"{what}: no slot became free within slot_timeout_s={timeout_s:g} (in use by {users}); {self._why()}"
            raise SlotTimeoutError(text, timeout_s=timeout_s, **facts)
        self._changed.wait(min(left, WAIT_STEP_S))

    def staged(self, slot: Slot) -> None:
        """Note that the training thread no longer copies into the slot: it may be closed with its save or worker."""
        with self._lock:
            slot.staging = False

    def free(self, save_id: SaveId, only: Slot | None = None) -> None:
        """Free the slots of a save that has ended, or only the slot `only`. Unknown ids are ignored."""
        with self._lock:
            for slot in [s for s in self._slots if s.user == save_id and only in (None, s)]:
                slot.user, slot.staging, slot.handovers = None, False, 0
                if slot.orphaned or (not slot.free and slot.device_state_unknown):
                    self._drop(slot, tell=not slot.orphaned)
            self._changed.notify_all()

    def committed(self, save_id: SaveId) -> None:
        """Note that a save is committed; called before `free`. Its slots have not killed the worker."""
        with self._lock:
            for slot in self._slots:
                slot.handovers = 0
                if slot.user == save_id and not slot.is_ring:
                    self._retained.committed(slot, save_id)

    def give_up(self, save_id: SaveId) -> None:
        """Discard the snapshot in a save's slot, whose staging has failed, and free the slot."""
        with self._lock:
            for slot in self._slots:
                if slot.user == save_id:
                    slot.memory.control.discard()
            self.free(save_id)

    def orphan_all(self) -> None:
        """Close every slot, since the worker is lost; see `orphan`."""
        for slot in self.held():
            self.orphan(slot)

    def orphan(self, slot: Slot) -> None:
        """Close a slot that no worker has; if the training thread is copying into it, once that has ended."""
        with self._lock:
            slot.orphaned = True
            if not slot.staging and slot in self._slots:
                self._drop(slot, tell=False)
            self._changed.notify_all()

    def held(self) -> list[Slot]:
        """Return the slots that are not orphaned."""
        with self._lock:
            return [slot for slot in self._slots if not slot.orphaned]

    def adopted(self, slot: Slot, number: int, session: str) -> bool:
        """Note that another worker has adopted a slot as `number`; returns whether it is still held here."""
        with self._lock:
            slot.number, slot.session = number, session
            return slot in self._slots and not slot.orphaned

    def _drop(self, slot: Slot, *, tell: bool) -> None:
        self._slots.remove(slot)
        self._retained.forget(slot)
        slot.close()
        if tell:
            self._release(slot)

    def close(self) -> None:
        """Unmap and close every slot; a waiting `acquire` fails. Idempotent."""
        with self._lock:
            self._closed = True
            for slot in list(self._slots):
                # IMPORTANT: do not unmap a slot that another thread is copying into (an exit while a daemon thread
                # saves): that would end the process with SIGSEGV. `free` drops it later.
                slot.orphaned = True
                if not slot.staging:
                    self._drop(slot, tell=False)
            self._changed.notify_all()

    def close_inherited_fds(self) -> None:
        """In a forked child: close the child's copies of the slots' fds."""
        for slot in self._slots:
            slot.memory.close_inherited_fd()

    @property
    def nbytes(self) -> int:
        """Total size of all slots held."""
        with self._lock:
            return sum(s.memory.nbytes for s in self._slots)
