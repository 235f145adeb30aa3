"""Moves bytes between addresses of this process: pieces that several threads share, each as hard as a `Pace` says.

Behind the training nobody keeps tensors where they are: `share_memory_()`, which also the first `put` of a tensor into
a queue of torch.multiprocessing calls, and `resize_()` of a storage unmap memory that a copy may be reading. memmove
would end the process with SIGSEGV. So a careful pace lets the kernel copy, which looks at every page: 12.7 GB/s of one
core where memmove makes 17 (512 MiB in pieces of 4 MiB, an EPYC).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from asyncckpt.basics.libc import libc

PIECE_NBYTES = 4 << 20
"""One move: long enough to amortise the call, short enough to share the work. 1 to 8 MiB measured alike."""

MAX_THREADS = 4
"""Memory bandwidth, not cores, is the limit. Chosen; on two cores two threads reach it."""


class Pace(NamedTuple):
    """How hard a copy works: one behind the training shares the cores with it.

    `threads`: so many move at most. `piece_nbytes`: one move. `nice`: above 0, threads with this niceness move, and the
    caller only waits for them; `batch`: these with the policy SCHED_BATCH, which wakes them late and runs them long.
    `careful`: memory of a tensor that goes away is an error and no crash.
    """

    threads: int = MAX_THREADS
    piece_nbytes: int = PIECE_NBYTES
    nice: int = 0
    batch: bool = False
    careful: bool = False


FULL = Pace()
"""As fast as it goes: somebody waits for the copy."""


class Moves(deque[tuple[int, int, int]]):
    """What is to be moved: (target, source, nbytes); what went wrong, if anything did; who hears what was moved."""

    fault: Exception | None = None
    moved: Callable[[int], None] | None = None


def move_all(moves: Moves, pace: Pace = FULL) -> None:
    """Move what there is until nothing is left, or a move fails: then `fault` says why."""
    if pace.nice:
        _yield_to_others(pace)
    move: Callable[[int, int, int], object] = careful_move if pace.careful else ctypes.memmove
    take = moves.popleft
    moved = moves.moved
    try:
        while True:
            piece = take()
            move(*piece)
            if moved is not None:
                moved(piece[0])
    except IndexError:  # none left
        pass
    except OSError as error:
        moves.fault = error
        moves.clear()


def _yield_to_others(pace: Pace) -> None:
    """Lower this thread's priority. Linux keeps one for each thread; it cannot be raised again without privilege."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, pace.nice)
    if pace.batch:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


class _Range(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_read = libc.process_vm_readv

_REFUSALS = (errno.ENOSYS, errno.EPERM)
"""Of sandboxes that filter the call; a process may always read itself otherwise (process_vm_readv(2))."""

STEP_NBYTES = 1 << 20
"""Of a copy by way of a file: what a core's cache holds. Chosen, not measured."""


def careful_move(target: int, source: int, nbytes: int) -> None:
    """Copy `nbytes` from address `source` to address `target`. Releases the GIL.

    Where a sandbox refuses the call, as memmove does it.

    Raises:
        OSError: EFAULT: one of them is not mapped, or not any more. Some of it may have been copied.
    """
    done = 0
    while done < nbytes:
        here, there = _Range(target + done, nbytes - done), _Range(source + done, nbytes - done)
        n = _read(os.getpid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if n >= 0:
            done += n
            continue
        code = ctypes.get_errno()
        if code in _REFUSALS:
            ctypes.memmove(target + done, source + done, nbytes - done)
        else:
            _move_by_a_file(target + done, source + done, nbytes - done)
        return


def careful_gather(target: int, sources: Sequence[int], nbytes: int) -> None:
    """Copy `nbytes` from each of the addresses `sources` to address `target`, one behind the other: as `careful_move`.

    Raises:
        OSError: As `careful_move`.
    """
    whole = _Range(target, len(sources) * nbytes)
    ranges = array("Q", [number for source in sources for number in (source, nbytes)])
    if _read(os.getpid(), ctypes.byref(whole), 1, ranges.buffer_info()[0], len(sources), 0) != whole.nbytes:
        for n, source in enumerate(sources):
            careful_move(target + n * nbytes, source, nbytes)


def _move_by_a_file(target: int, source: int, nbytes: int) -> None:
    """As `careful_move`. The kernel reads another process's memory only where it is pages of memory; a device's, such
    as what cudaHostAlloc returns, it answers with EFAULT. Of one's own it writes to a file whatever can be read.
    """
    fd = os.memfd_create("asyncckpt-move", os.MFD_CLOEXEC)
    try:
        done = 0
        while done < nbytes:
            n = os.pwrite(fd, _bytes(source + done, min(STEP_NBYTES, nbytes - done)), 0)
            done += os.preadv(fd, [_bytes(target + done, n)], 0)
    finally:
        os.close(fd)


def _bytes(address: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * nbytes).from_address(address)


MARK_NBYTES = 32 << 20
"""How much is copied between two marks: some milliseconds. Chosen: below what anybody sees, and far above the cost of a
mark, a move of 8 bytes."""


class Progress:
    """See the module. Several threads move, so a mark may be stored before the last pieces that it counts.

    Args:
        address: Of the word; it must outlive the moves.
    """

    def __init__(self, address: int) -> None:
        self._word = ctypes.c_uint64.from_address(address)
        self._done = 0
        self._values: list[ctypes.c_uint64] = []

    def begin(self) -> None:
        """A copy begins, maybe the second one into the same snapshot. No move of the one before is left."""
        self._done = self._word.value
        self._values.clear()

    def mark(self, moves: Moves, nbytes: int) -> int:
        """Put a mark behind the moves that there are; returns 0: nothing has come after it.

        Args:
            moves: Of the copy.
            nbytes: What they move since the mark before.
        """
        self._done += nbytes
        value = ctypes.c_uint64(self._done)
        self._values.append(value)  # IMPORTANT: the move reads it, later
        moves.append((ctypes.addressof(self._word), ctypes.addressof(value), ctypes.sizeof(value)))
        return 0

    def come_to(self, nbytes: int) -> None:
        """So much is there at least; where moves are not in the order in which they were put."""
        self._word.value = max(self._word.value, nbytes)

    def end(self, nbytes: int) -> None:
        """Everything was moved, and `nbytes` of it after the last mark."""
        self._word.value = self._done + nbytes
