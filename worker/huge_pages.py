"""Slots are put on huge pages while nobody waits for anything, a page at a time.

On huge pages the kernel writes a slot directly with a tenth of its work, and a process that loads from it maps it in no
time; with small pages it has 370,000 of them to look at in 1.5 GB. To take huge ones at once would make the first save
slower, so a slot gets them later: when all of its pages are there and no save is under way (docs/adr/0042).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable

from asyncckpt.memory.arena import SlotMemory
from asyncckpt.memory.mapping import HUGE_NBYTES
from asyncckpt.memory.slot import STATE_OPEN, STATE_STREAMED, SlotError
from asyncckpt.protocol.lifecycle import BEGUN, IN_FLIGHT
from asyncckpt_worker import logs
from asyncckpt_worker.records import Slot
from asyncckpt_worker.scheduler import Scheduler
from asyncckpt_worker.slots import SlotStore
from asyncckpt_worker.tables import Tables

LOOK_EVERY_S = 1.0

REST = 9
"""After each page it rests for so many times what that took: a tenth of a core at most, for seconds. Chosen."""

DEAR_S = 0.01
"""A page that takes as much of the processor had to be made by moving others: usual are 0.5 ms, and 2 on a virtual
machine whose host gives it memory only now. Chosen."""

MAX_REFUSED = 8
"""After as many that were refused, or dear, a slot stays as it is. Chosen."""


class HugePages:
    """Decides when, and does it in the lane `gather`. Safe: it changes where bytes lie and not what they are.

    Args:
        scheduler: Runs it.
        slots: Whose memory.
    """

    def __init__(self, scheduler: Scheduler, slots: SlotStore) -> None:
        self._scheduler, self._slots = scheduler, slots
        self._busy = threading.Event()
        self._working = self._off = self._ever = False
        self._looks_at = float("-inf")
        self._at: dict[int, int] = {}
        self._refused: dict[int, int] = {}

    def turn(self, now: float, tables: Tables) -> None:
        """Stop if anybody wants anything, else begin or go on. Called at each turn of the control loop; takes nothing.

        Raises:
            RuntimeError: As `Scheduler.submit`.
        """
        if tables.draining or is_busy(tables, tables.slots.values()):
            self._busy.set()
        elif now >= self._looks_at and not self._off and not self._working:
            self._looks_at = now + LOOK_EVERY_S
            self._busy.clear()
            if not self.done() >= set(self._slots.numbers()):
                self._working = True
                self._scheduler.submit("gather", self._work)

    def close(self) -> None:
        """Stop, for good."""
        self._off = True
        self._busy.set()

    def done(self) -> set[int]:
        """Return the slots that need not be looked at again."""
        return {number for number, at in list(self._at.items()) if at < 0}

    # ---- in the lane

    def _work(self) -> None:
        try:
            numbers = self._slots.numbers()
            for number in numbers:
                while not self._off and self._at.get(number, 0) >= 0:
                    began = time.thread_time()
                    if not self._gather_one(number, began):
                        break
                    if self._busy.wait(REST * (time.thread_time() - began)):
                        return
            for gone in set(self._at) - set(numbers):
                self._at.pop(gone), self._refused.pop(gone, None)
        finally:
            self._working = False

    def _gather_one(self, number: int, began: float) -> bool:
        """Put the next page's worth of a slot on one; say whether there may be more to do now."""
        at = self._at.get(number, 0)
        try:
            with self._slots.use(number) as memory:
                if not _is_still(memory):
                    return False
                if at + HUGE_NBYTES > memory.nbytes:
                    self._at[number] = -1
                    logs.write("debug", f"slot {number} lies on huge pages")
                    return False
                done = memory.mapping.collapse(at)
        except SlotError:
            return False
        self._at[number] = at + HUGE_NBYTES
        self._ever |= done
        if not done or time.thread_time() - began > DEAR_S:
            self._refuse(number)
        return True

    def _refuse(self, number: int) -> None:
        self._refused[number] = self._refused.get(number, 0) + 1
        if self._refused[number] >= MAX_REFUSED:
            self._at[number], self._off = -1, self._off or not self._ever
            logs.write("debug", f"slot {number} stays on small pages: huge ones are refused, or dear")


def is_busy(tables: Tables, slots: Iterable[Slot]) -> bool:
    """Whether any of the slots is being staged, written or read by the worker."""
    for slot in slots:
        entry = tables.entry(slot.key)
        if slot.writes or slot.reading or (entry is not None and (entry.phase == BEGUN or entry.phase in IN_FLIGHT)):
            return True
    return False


def _is_still(memory: SlotMemory) -> bool:
    """Whether a slot has all its pages, and nobody fills it: the doorbell may come later than the first bytes."""
    full = os.fstat(memory.fd).st_blocks * 512 >= memory.nbytes
    return full and memory.control.state not in (STATE_OPEN, STATE_STREAMED)
