"""Copies bytes between addresses of this process: a queue of pieces that several threads share.

Behind the training nobody keeps tensors where they are: `share_memory_()`, which also the first `put` of a tensor into
a queue of torch.multiprocessing calls, and `resize_()` of a storage unmap memory that a copy may be reading. memmove
would end the process with SIGSEGV. So a careful copy is the kernel's, which looks at every page: 12.7 GB/s of
one core where memmove makes 17 (512 MiB in pieces of 4 MiB, an EPYC).
"""

from __future__ import annotations

import ctypes
import errno
import os
from array import array
from collections import deque
from collections.abc import Callable, Sequence

from asyncckpt.basics.libc import libc

PIECE_NBYTES = 4 << 20
"""One piece: long enough to amortise the call, short enough to share the work. 1 to 8 MiB measured alike."""

MAX_THREADS = 4
"""Memory bandwidth, not cores, is the limit. Chosen; on two cores two threads reach it."""


STEP_NBYTES = 1 << 20
"""Bytes that a copy by way of a file takes at a time: what a core's cache holds. Chosen, not measured."""

MARK_NBYTES = 32 << 20
"""Bytes that are copied between two marks of progress: some milliseconds. Chosen: below what anybody sees, and far
above the cost of a mark, which copies 8 bytes."""


class CopyQueue(deque[tuple[int, int, int]]):
    """Pieces that are still to be copied: (target address, source address, nbytes).

    Attributes:
        fault: Why a piece could not be copied; None: none has failed.
        on_copied: Called with the target address of each piece once it is copied.
    """

    fault: Exception | None = None
    on_copied: Callable[[int], None] | None = None


def copy_all(queue: CopyQueue, careful: bool = False) -> None:
    """Copy pieces until none is left, or one fails: then `queue.fault` says why. Several threads may do so at once.

    Args:
        queue: The pieces.
        careful: If memory goes away meanwhile, that is a fault and no SIGSEGV.
    """
    copy: Callable[[int, int, int], object] = careful_copy if careful else ctypes.memmove
    take = queue.popleft
    on_copied = queue.on_copied
    try:
        while True:
            piece = take()
            copy(*piece)
            if on_copied is not None:
                on_copied(piece[0])
    except IndexError:  # none left
        pass
    except OSError as error:
        queue.fault = error
        queue.clear()


class _Range(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_read = libc.process_vm_readv

_REFUSALS = (errno.ENOSYS, errno.EPERM)
"""Of sandboxes that filter the call; a process may always read itself otherwise (process_vm_readv(2))."""


def careful_copy(target: int, source: int, nbytes: int) -> None:
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
            _copy_by_a_file(target + done, source + done, nbytes - done)
        return


def careful_gather(target: int, sources: Sequence[int], nbytes: int) -> None:
    """Copy `nbytes` from each of the addresses `sources` to address `target`, one behind the other: as `careful_copy`.

    Raises:
        OSError: As `careful_copy`.
    """
    whole = _Range(target, len(sources) * nbytes)
    ranges = array("Q", [number for source in sources for number in (source, nbytes)])
    if _read(os.getpid(), ctypes.byref(whole), 1, ranges.buffer_info()[0], len(sources), 0) != whole.nbytes:
        for n, source in enumerate(sources):
            careful_copy(target + n * nbytes, source, nbytes)


def _copy_by_a_file(target: int, source: int, nbytes: int) -> None:
    """As `careful_copy`. The kernel reads another process's memory only where it is pages of memory; a device's, such
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


class Progress:
    """How many bytes of a snapshot are copied, for observers: a word in the slot's head page.

    It is stored by pieces among the others. Several threads copy, so a mark may be stored before the last pieces that
    it counts.

    Args:
        address: Address of the word; it must outlive the copies.
    """

    def __init__(self, address: int) -> None:
        self._word = ctypes.c_uint64.from_address(address)
        self._done = 0
        self._values: list[ctypes.c_uint64] = []

    def begin(self) -> None:
        """A copy begins, maybe the second one into the same snapshot. No piece of the one before is left."""
        self._done = self._word.value
        self._values.clear()

    def mark(self, queue: CopyQueue, nbytes: int) -> int:
        """Put a mark behind the pieces in `queue`; returns 0: nothing has come after it.

        Args:
            queue: Pieces of the copy.
            nbytes: Bytes of the pieces since the mark before.
        """
        self._done += nbytes
        value = ctypes.c_uint64(self._done)
        self._values.append(value)  # IMPORTANT: the copy reads it, later
        queue.append((ctypes.addressof(self._word), ctypes.addressof(value), ctypes.sizeof(value)))
        return 0

    def come_to(self, nbytes: int) -> None:
        """At least the first `nbytes` are copied; for pieces that are not copied in the order of the queue."""
        self._word.value = max(self._word.value, nbytes)

    def end(self, nbytes: int) -> None:
        """Everything is copied, and `nbytes` of it after the last mark."""
        self._word.value = self._done + nbytes
