"""The worker's slots in memory: made, filled with pages ahead of use, lent to jobs, closed by their last user."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from asyncckpt.memory.arena import SlotMemory
from asyncckpt.memory.slot import SlotError

POPULATE_NBYTES = 32 << 20
"""Pages are faulted in by this many bytes at a time, so that a freed slot is let go within milliseconds."""


class _Held:
    def __init__(self, memory: SlotMemory) -> None:
        self.memory = memory
        self.users = 0
        self.doomed = False
        self.cut_off = -1


class SlotStore:
    """Slots by number. Safe to call from several threads.

    IMPORTANT: a slot is unmapped only when nobody is inside `use`: a write or a population of unmapped pages would end
    the worker, and every trainer's snapshots with it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._held: dict[int, _Held] = {}

    def create(self, number: int, nbytes: int) -> SlotMemory:
        """Make slot `number`.

        Raises:
            SlotError: An impossible size.
            OSError: The kernel refused.
        """
        return self._hold(number, SlotMemory.create(nbytes))

    def adopt(self, number: int, nbytes: int, pid: int, fd: int, token: bytes) -> SlotMemory:
        """Open what is slot `number` from now on, and lies with another process.

        Raises:
            SlotError: It is not the slot that was promised.
            OSError: It cannot be opened.
        """
        return self._hold(number, SlotMemory.attach(pid, fd, nbytes, token))

    def _hold(self, number: int, memory: SlotMemory) -> SlotMemory:
        with self._lock:
            assert number not in self._held
            self._held[number] = _Held(memory)
        return memory

    @contextlib.contextmanager
    def use(self, number: int) -> Iterator[SlotMemory]:
        """Keep slot `number` mapped for the time of a `with` block.

        Raises:
            SlotError: It is not there, or is being freed.
        """
        with self._lock:
            held = self._held.get(number)
            if held is None or held.doomed:
                raise SlotError(f"slot {number} is gone")
            held.users += 1
        try:
            yield held.memory
        finally:
            self._leave(number, held)

    def staged_nbytes(self, number: int, generation: int) -> int:
        """Return how much of `generation` its trainer has copied into slot `number`; 0 also where that is not known."""
        # IMPORTANT: under the lock, not by `use`: the control loop asks, and must not be the last one to leave a slot.
        with self._lock:
            held = self._held.get(number)
            return 0 if held is None or held.doomed else held.memory.control.staged_nbytes(generation)

    def cut_off(self, number: int, generation: int) -> None:
        """Tell jobs that wait for `generation` to be filled to stop: they poll `is_cut_off`. Does not wait."""
        with self._lock:
            held = self._held.get(number)
            if held is not None:
                held.cut_off = max(held.cut_off, generation)

    def is_cut_off(self, number: int, generation: int) -> bool:
        """Whether `cut_off` was called for `generation`."""
        with self._lock:
            held = self._held.get(number)
            return held is None or held.cut_off >= generation

    def free(self, number: int) -> None:
        """Close slot `number` now, or when its last user leaves; one that is not there is left alone.

        Blocks: for the kernel to take the pages back, about 0.2 s per GiB.
        """
        with self._lock:
            held = self._held.get(number)
            if held is None or held.doomed:
                return
            held.doomed = True
            last = held.users == 0
        if last:
            self._close(number, held)

    def _leave(self, number: int, held: _Held) -> None:
        with self._lock:
            held.users -= 1
            last = held.doomed and held.users == 0
        if last:
            self._close(number, held)

    def _close(self, number: int, held: _Held) -> None:
        held.memory.close()
        with self._lock:
            del self._held[number]
            self._freed.notify_all()

    def wait_freed(self, number: int, timeout_s: float) -> None:
        """Wait until slot `number` is closed, by its last user maybe; at most `timeout_s`."""
        with self._freed:
            self._freed.wait_for(lambda: number not in self._held, timeout_s)

    def populate(self, number: int) -> None:
        """Fault all pages in, piece by piece; ends early when the slot is freed.

        Raises:
            OSError: No memory.
        """
        offset, nbytes = 0, 1
        while offset < nbytes:
            try:
                with self.use(number) as memory:
                    nbytes = memory.nbytes
                    memory.mapping.populate(offset, POPULATE_NBYTES)
            except SlotError:
                return
            offset += POPULATE_NBYTES

    def numbers(self) -> list[int]:
        """Return the slots that are there and not being freed."""
        with self._lock:
            return [number for number, held in self._held.items() if not held.doomed]

    def promised_nbytes(self) -> int:
        """Return how much was promised to slots and has no pages yet. One that is being freed is promised no more."""
        # IMPORTANT: under the lock: the fd of a slot that is doomed may be closed, or another file's, at any time.
        with self._lock:
            held = [h.memory for h in self._held.values() if not h.doomed]
            return sum(max(0, memory.nbytes - os.fstat(memory.fd).st_blocks * 512) for memory in held)

    def __len__(self) -> int:
        """How many there are, those that are being freed included."""
        with self._lock:
            return len(self._held)

    def close(self) -> None:
        """Free every slot; those in use close when their users leave."""
        with self._lock:
            numbers = list(self._held)
        for number in numbers:
            self.free(number)
