"""A worker whose storage kills it, or stops it, at a chosen call. For tests; as a program: ENDPOINT KILL.

KILL is `method:nth:signal:late`: the signal comes at the nth call of a method of `Files`, before it is done or
(`late` 1) after. An empty one is a worker like any other, but that its fsync does nothing.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from asyncckpt_worker.config import WorkerConfig
from asyncckpt_worker.service.daemon import Daemon
from tests.storage_samples import RecordingFiles


class KillingFiles(RecordingFiles):
    """Sends its process a signal at the `nth` call that `wanted` picks: before it is done, or after."""

    def __init__(
        self,
        nth: int,
        *,
        late: bool,
        wanted: Callable[[str, Sequence[Any]], bool] = lambda *_: True,
        number: int = signal.SIGKILL,
    ) -> None:
        super().__init__()
        self._left, self._late, self._wanted, self._number = nth, late, wanted, number

    def before(self, name: str, args: Sequence[Any]) -> None:
        if not self._late:
            self._count(name, args)

    def after(self, name: str, args: Sequence[Any]) -> None:
        if self._late:
            self._count(name, args)

    def _count(self, name: str, args: Sequence[Any]) -> None:
        if self._wanted(name, args):
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), self._number)


def files_of(kill: str) -> RecordingFiles:
    """Return the storage that a command line asks for."""
    if not kill:
        return RecordingFiles()
    method, nth, number, late = kill.split(":")
    return KillingFiles(int(nth), late=late == "1", wanted=lambda name, _: name == method, number=int(number))


def serve(endpoint: str, kill: str) -> None:
    """Be that worker."""
    daemon = Daemon(WorkerConfig(endpoint=endpoint), files_of(kill))
    signal.signal(signal.SIGTERM, lambda *_: daemon.stop(immediately=True))
    daemon.run()


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2])
