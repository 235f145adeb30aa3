"""A worker in the test's own process, and a disk that is slow, or fails, on demand."""

from __future__ import annotations

import errno
import os
import stat
import threading
from typing import Any

from asyncckpt.storage.files import Files
from asyncckpt_worker.config import WorkerConfig
from asyncckpt_worker.service.daemon import Daemon

DEADLINE_S = 60.0


class Storage(Files):
    """A disk that is slow, or fails, on demand."""

    def __init__(self) -> None:
        self.flows = threading.Event()
        self.flows.set()
        self.broken = False

    def fsync(self, fd: int) -> None:
        """Wait for the gate; fail where it is broken."""
        assert self.flows.wait(DEADLINE_S)
        if self.broken and stat.S_ISREG(os.fstat(fd).st_mode):  # not before it is staged
            raise OSError(errno.EIO, "simulated")


class Here:
    """A worker in this process, and its disk: a `Storage`, or `files`."""

    def __init__(self, endpoint: str, files: Files | None = None, **changes: Any) -> None:
        self.storage, self.endpoint = Storage(), endpoint
        self.daemon = Daemon(WorkerConfig(endpoint=endpoint, **changes), files or self.storage)
        self._thread = threading.Thread(target=self.daemon.run)
        self._thread.start()

    def close(self) -> None:
        """End it."""
        self.storage.flows.set()
        self.daemon.stop(immediately=True)
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
