"""Copies bytes between addresses of this process: a queue of pieces that several threads share.

A copy behind the training may read memory that is unmapped meanwhile: by `resize_()` of a storage, or by
`share_memory_()`, which the first `put` of a tensor into a queue of torch.multiprocessing also calls. memmove would end
the process with SIGSEGV. A fault-safe copy is made by the kernel, which checks every page: 12.7 GB/s on one core, where
memmove copies 17 GB/s (512 MiB in pieces of 4 MiB, an EPYC).
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
"""Size of a piece: long enough to amortise the call, short enough to share the work. 1 to 8 MiB measured alike."""

MAX_THREADS = 4
"""The most threads of a copy. Memory bandwidth, not the number of cores, is the limit. Chosen; on two cores two threads
reach it."""


STEP_NBYTES = 1 << 20
"""How much is copied at a time through a memfd: what a core's cache holds. Chosen, not measured."""

MARK_NBYTES = 32 << 20
"""How much is copied between two marks of progress: some milliseconds. Chosen: too short for an observer to notice,
and far longer than a mark, which copies 8 bytes, takes."""


class CopyQueue(deque[tuple[int, int, int]]):
    """Pieces that are still to be copied: (target address, source address, nbytes).

    Attributes:
        fault: Why a piece could not be copied; None: none has failed.
        on_copied: Called with the target address of each piece once it is copied.
    """

    fault: Exception | None = None
    on_copied: Callable[[int], None] | None = None


def copy_all(queue: CopyQueue, fault_safe: bool = False) -> None:
    """Copy pieces until none is left, or one fails; then `queue.fault` is set. For several threads at once.

    Args:
        queue: The pieces.
        fault_safe: Set `queue.fault`, instead of SIGSEGV, if memory is unmapped meanwhile.
    """
    copy: Callable[[int, int, int], object] = fault_safe_copy if fault_safe else ctypes.memmove
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
"""Errors of sandboxes that filter the call. Without a filter a process may always read itself (process_vm_readv(2))."""


def fault_safe_copy(target: int, source: int, nbytes: int) -> None:
    """Copy `nbytes` from address `source` to address `target`. Releases the GIL.

    If a sandbox refuses the system call, this is memmove, which is not fault-safe.

    Raises:
        OSError: EFAULT: a part of either range is not mapped. Other bytes may have been copied.
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
            _copy_through_memfd(target + done, source + done, nbytes - done)
        return


def fault_safe_gather(target: int, sources: Sequence[int], nbytes: int) -> None:
    """Copy `nbytes` from each of the addresses `sources` to `target`, one after another, as `fault_safe_copy`.

    Raises:
        OSError: As `fault_safe_copy`.
    """
    whole = _Range(target, len(sources) * nbytes)
    ranges = array("Q", [number for source in sources for number in (source, nbytes)])
    if _read(os.getpid(), ctypes.byref(whole), 1, ranges.buffer_info()[0], len(sources), 0) != whole.nbytes:
        for n, source in enumerate(sources):
            fault_safe_copy(target + n * nbytes, source, nbytes)


def _copy_through_memfd(target: int, source: int, nbytes: int) -> None:
    """Copy as `fault_safe_copy`, by writing the bytes to a memfd and reading them back.

    process_vm_readv reads only ordinary pages: for memory of a device driver, such as cudaHostAlloc returns, it fails
    with EFAULT. write(2) accepts any memory that this process can read.
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

    It is updated by marks: pieces in the queue that copy 8 bytes to that word. Several threads copy, so a mark may be
    copied before the last pieces that it counts.

    Args:
        address: Address of the word; it must outlive the copies.
    """

    def __init__(self, address: int) -> None:
        self._word = ctypes.c_uint64.from_address(address)
        self._done = 0
        self._values: list[ctypes.c_uint64] = []

    def begin(self) -> None:
        """Begin a copy, maybe the second one of the same snapshot. No piece of the first one may be left."""
        self._done = self._word.value
        self._values.clear()

    def mark(self, queue: CopyQueue, nbytes: int) -> int:
        """Append a mark to `queue`.

        Args:
            queue: Pieces of the copy.
            nbytes: Bytes of the pieces since the last mark.

        Returns:
            0: the bytes of the pieces since this mark.
        """
        self._done += nbytes
        value = ctypes.c_uint64(self._done)
        self._values.append(value)  # IMPORTANT: keep it alive: the copy of the mark reads its memory later
        queue.append((ctypes.addressof(self._word), ctypes.addressof(value), ctypes.sizeof(value)))
        return 0

    def come_to(self, nbytes: int) -> None:
        """Set the progress to at least `nbytes`; for copies without marks."""
        self._word.value = max(self._word.value, nbytes)

    def end(self, nbytes: int) -> None:
        """End the copy; `nbytes` were copied after the last mark."""
        self._word.value = self._done + nbytes
