"""Pins host memory, so that devices copy into it without the CPU: once, and unpins it before it is unmapped."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from asyncckpt.basics.process_lifecycle import BackgroundThread
from asyncckpt.staging.device import SUCCESS, UNLOADING, Device

PIECE_NBYTES = 256 << 20
"""How much one call pins: the driver holds a lock during the call, and some drivers refuse hundreds of GiB at once.
Chosen, not measured. A multiple of every page size. No copy may cross the border of two pieces (CUDA driver API: the
host range of a copy must be registered as a whole, or not at all), so `device_copy` cuts copies there."""

_log = logging.getLogger("asyncckpt")


class Pin:
    """The pinning of `nbytes` from `address` on: all of them or none. `open` pins.

    Args:
        device: The interface to the devices.
        index: Index of a device that is in use: the calls are made with it current.
        address: Address of the first page.
        nbytes: Length, in whole pages.

    Attributes:
        failure: Why the driver refused; None: it did not.
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
        """Pin the memory; if the driver refuses, set `failure`.

        IMPORTANT: the memory's owner must have this object before the call. An interrupt is raised once the memory is
        pinned; if it were unmapped then without unpinning, the driver would refuse whatever is mapped there next.

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
        """Unpin; `_pieces` keeps the pieces that the driver refuses to unpin."""
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
        """Unpin. No copy may run into the memory. Idempotent; no-op in a forked child.

        Returns:
            False if the driver refused, so that a part is still pinned: then the memory must stay mapped.
        """
        if os.getpid() == self._owner_pid and self._pieces:
            _run_in_thread(self._unregister)
        return not self._pieces or os.getpid() != self._owner_pid


def _run_in_thread(work: Callable[[], None]) -> None:
    """Run `work` in a thread of its own, and wait for it: an error code of the driver stays with its thread.

    Blocks: for the driver, 0.1 s and more per GB. An interrupt is raised when the thread has ended.
    """
    thread = BackgroundThread(work, "asyncckpt-pin")
    interrupt: BaseException | None = None
    try:
        thread.start()
    except RuntimeError:  # can't start new thread: the interpreter ends, or the limit of threads is reached
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
