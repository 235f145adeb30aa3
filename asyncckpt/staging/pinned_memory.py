"""Host memory that devices copy into without the CPU: pinned once, unpinned before it is unmapped."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from asyncckpt.basics.process_lifecycle import BackgroundThread
from asyncckpt.staging.device import SUCCESS, UNLOADING, Device

PIECE_NBYTES = 256 << 20
"""Bytes that one call pins: the driver holds its lock meanwhile, and some refuse hundreds of GiB at once. Chosen, not
measured. A multiple of every page size. No copy may cross from one piece into the next (CUDA driver API: a host range
must be registered as a whole, or not at all), so `device_copy` cuts there."""

_log = logging.getLogger("asyncckpt")


class Pin:
    """The pinning of `nbytes` from `address` on, all of it or nothing; nothing before `open()`.

    Args:
        device: The interface to the devices.
        index: Index of a device that is in use: the calls are made with it current.
        address: Address of the first page.
        nbytes: Length, in whole pages.

    Attributes:
        failure: Why the driver has refused; None: it has not.
    """

    def __init__(self, device: Device, index: int, address: int, nbytes: int) -> None:
        self._device, self._index, self._address, self._nbytes = device, index, address, nbytes
        self._pieces: list[int] = []
        self._owner_pid = os.getpid()
        self.failure: str | None = None
        self._complete = False

    @property
    def held(self) -> bool:
        """Whether the memory is pinned."""
        return self._complete

    def open(self) -> None:
        """Pin; what the driver refuses is in `failure`.

        IMPORTANT: the memory's owner must know this object before. An interrupt in here is raised when the memory is
        pinned, and unmapped like that it would stay with the driver, which then refuses whatever is mapped there next.

        Blocks: about 0.1 to 0.5 s per GB.
        """
        _run_in_thread(self._register)

    def _register(self) -> None:
        try:
            with self._device.on(self._index):
                for offset in range(0, self._nbytes, PIECE_NBYTES):
                    nbytes = min(PIECE_NBYTES, self._nbytes - offset)
                    code = self._device.register(self._address + offset, nbytes)
                    if code != SUCCESS:
                        self.failure = f"code {code} ({self._device.error_name(code)}) for {nbytes} bytes at {offset}"
                        break
                    self._pieces.append(self._address + offset)
        except RuntimeError as error:
            self.failure = str(error)
        self._complete = self.failure is None
        if self.failure is not None:
            self._unregister()

    def _unregister(self) -> None:
        """Undo what stands; `_pieces` keeps what cannot be undone."""
        self._complete = False
        left = []
        try:
            with self._device.on(self._index):
                while self._pieces:
                    code = self._device.unregister(self._pieces[-1])
                    address = self._pieces.pop()
                    if code not in (SUCCESS, UNLOADING):
                        left.append(address)
                        name = self._device.error_name(code)
                        _log.warning("unpinning memory for checkpoints failed with code %d (%s)", code, name)
        except RuntimeError as error:
            _log.warning("unpinning memory for checkpoints failed: %s", error)
        self._pieces += left

    def close(self) -> bool:
        """Unpin; later calls, and calls in a forked child, do nothing. Nothing may be copied into it any more.

        Returns:
            False when some of it is still pinned, since the driver refused: then it must stay mapped.
        """
        if os.getpid() == self._owner_pid and self._pieces:
            _run_in_thread(self._unregister)
        return not self._pieces or os.getpid() != self._owner_pid


def _run_in_thread(work: Callable[[], None]) -> None:
    """Run `work` in a thread of its own, and wait for it: an error code stays with the thread that got it.

    Blocks for the driver, 0.1 s and more per GB. An interrupt is raised when the thread has ended.
    """
    thread = BackgroundThread(work, "asyncckpt-pin")
    interrupt: BaseException | None = None
    try:
        thread.start()
    except RuntimeError:  # can't start new thread: the interpreter ends, or the system has no more
        work()
        return
    except BaseException as error:
        interrupt = error
    while thread.ident is not None and thread.is_alive():
        try:
            thread.join()
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
