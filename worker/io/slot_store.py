"""The memory of the worker's slots: created or adopted, populated, used by jobs, and closed after the last use."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from asyncckpt.memory.arena import SlotMemory
from asyncckpt.memory.slot import SlotError

POPULATE_NBYTES = 32 << 20
"""Bytes that are populated at a time, so that a freed slot is closed within milliseconds."""


class _Held:
    def __init__(self, memory: SlotMemory) -> None:
        self.memory = memory
        self.users = 0
        self.freeing = False
        self.cut_off = -1


class SlotStore:
    """Slots by number. Safe to call from several threads.

    IMPORTANT: a slot is unmapped only when no job is inside `use`: access to unmapped pages would crash the worker, and
    lose the snapshots of all trainers.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._held: dict[int, _Held] = {}

    def create(self, number: int, nbytes: int) -> SlotMemory:
        """Create slot `number`.

        Raises:
            SlotError: The size is not valid.
            OSError: A system call failed.
        """
        return self._hold(number, SlotMemory.create(nbytes))

    def adopt(self, number: int, nbytes: int, pid: int, fd: int, token: bytes) -> SlotMemory:
        """Open the memory of another process as slot `number`.

        Raises:
            SlotError: Size or token are not those of the slot.
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
        """Keep slot `number` mapped in a `with` block.

        Raises:
            SlotError: The slot does not exist, or is being freed.
        """
        with self._lock:
            held = self._held.get(number)
            if held is None or held.freeing:
                raise SlotError(f"slot {number} does not exist or is being freed")
            held.users += 1
        try:
            yield held.memory
        finally:
            self._leave(number, held)

    def staged_nbytes(self, number: int, generation: int) -> int:
        """Return how many bytes of `generation` the trainer has copied into slot `number`; 0 if that is not known."""
        # IMPORTANT: under the lock, not in `use`: the control loop must not be the last user, which closes the slot.
        with self._lock:
            held = self._held.get(number)
            return 0 if held is None or held.freeing else held.memory.control.staged_nbytes(generation)

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
        """Close slot `number` now, or after its last use. Idempotent.

        Blocks: for the kernel to take the pages back, about 0.2 s per GiB.
        """
        with self._lock:
            held = self._held.get(number)
            if held is None or held.freeing:
                return
            held.freeing = True
            last = held.users == 0
        if last:
            self._close(number, held)

    def _leave(self, number: int, held: _Held) -> None:
        with self._lock:
            held.users -= 1
            last = held.freeing and held.users == 0
        if last:
            self._close(number, held)

    def _close(self, number: int, held: _Held) -> None:
        held.memory.close()
        with self._lock:
            del self._held[number]
            self._freed.notify_all()

    def wait_freed(self, number: int, timeout_s: float) -> None:
        """Wait until slot `number` is closed; at most `timeout_s`."""
        with self._freed:
            self._freed.wait_for(lambda: number not in self._held, timeout_s)

    def populate(self, number: int) -> None:
        """Fault in all pages, piece by piece; return early if the slot is freed.

        Raises:
            OSError: There is not enough memory.
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
        """Return the slots that are not being freed."""
        with self._lock:
            return [number for number, held in self._held.items() if not held.freeing]

    def promised_nbytes(self) -> int:
        """Return the bytes of slots that have no pages yet; slots that are being freed do not count."""
        # IMPORTANT: under the lock: the descriptor of a slot that is being freed may be closed or reused at any time.
        with self._lock:
            held = [h.memory for h in self._held.values() if not h.freeing]
            return sum(max(0, memory.nbytes - os.fstat(memory.fd).st_blocks * 512) for memory in held)

    def __len__(self) -> int:
        """Return the number of slots, including those that are being freed."""
        with self._lock:
            return len(self._held)

    def close(self) -> None:
        """Free all slots; slots in use are closed after their last use."""
        with self._lock:
            numbers = list(self._held)
        for number in numbers:
            self.free(number)
