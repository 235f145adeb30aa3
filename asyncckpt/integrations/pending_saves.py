"""Saves of a framework's checkpoints that are not published yet, and removals that wait for them."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
from dataclasses import dataclass

from asyncckpt.handle import SaveHandle
from asyncckpt.integrations.exporter_process import ExporterProcess
from asyncckpt.integrations.spool import AGAIN, Job, spool_of

MAX_TRIES = 3
"""Exporters for one save, each of which was killed before the next one started. Chosen."""

_log = logging.getLogger("asyncckpt.integrations")


@dataclass(slots=True, eq=False)
class PendingSave:
    """A save under way. `job`, `pid`: of its export, on the rank that has it."""

    target: str
    handle: SaveHandle
    job: Job | None
    pid: int | None
    is_discarded: bool = False
    is_published: bool = False
    tries: int = 1


class PendingSaves:
    """See the module.

    Attributes:
        saves: Oldest first.
    """

    def __init__(self, exporter: ExporterProcess) -> None:
        self._exporter = exporter
        self.saves: list[PendingSave] = []
        self._late: list[PendingSave] = []  # that could not be published yet; the exporter tries again
        self._removals: dict[str, list[PendingSave]] = {}

    def pending(self) -> list[str]:
        """Return the targets that are not published yet: those that are tried again, and those under way."""
        return [one.target for one in (*self._late, *self.saves)]

    def poll(self) -> list[str]:
        """Return the targets that were published since the last call; removes what nothing is awaited for any more."""
        ended = [one for one in self.saves if self._has_ended(one)]
        for one in ended:
            self.saves.remove(one)
            error = one.handle.written.peek()[1]
            if error is not None:
                _log.error("%s was not saved: %s", one.target, error)
            elif one.job is not None and one.job.is_open:
                said = _said(one.job)
                _log.error("%s was not published: %s", one.target, said)
                if said.endswith(AGAIN):
                    self._late.append(one)
            else:
                one.is_published = True
        for one in [one for one in self._late if one.job is not None and not one.job.is_open]:
            self._late.remove(one)
            ended.append(one)
            one.is_published = True
            _log.warning("%s is published now, or what was saved after it", one.target)
        self._remove_discarded()
        for one in ended:
            if one.is_published and one.is_discarded:
                self.discard(one.target)
        return [one.target for one in ended if one.is_published]

    def discard(self, target: str) -> None:
        """Remove a target, as `StockSaver.discard` says."""
        found = [one for one in self.saves if one.target == target]
        for one in found:
            one.is_discarded = True
        if not found and self.saves:
            self._removals[target] = list(self.saves)
        elif not found:
            remove(target)

    def keep(self, target: str) -> None:
        """Forget that a target was to be removed: it is saved again."""
        self._removals.pop(target, None)
        for one in self.saves:
            one.is_discarded = one.is_discarded and one.target != target

    def _has_ended(self, one: PendingSave) -> bool:
        if not one.handle.written.done():
            return False
        if one.job is None or not one.job.is_open:
            return True
        # In this order: it may be done between the two looks.
        is_alive = self._exporter.is_alive(one.pid)
        if os.path.exists(one.job.failure_path) or not one.job.is_open:
            return True
        return not is_alive and not self._tried_again(one)

    def _tried_again(self, one: PendingSave) -> bool:
        """Give a save whose exporter was killed to another one; False where that is of no use."""
        if one.tries >= MAX_TRIES or one.job is None:
            return False
        one.tries += 1
        try:
            one.pid = self._exporter.submit(one.job)
        except OSError as error:
            _log.warning("%s: no process can be started: %s", one.target, error)
            return False
        return True

    def _remove_discarded(self) -> None:
        for target, awaited in list(self._removals.items()):
            is_published = any(one.is_published for one in awaited)
            if any(one in self.saves or (one in self._late and not is_published) for one in awaited):
                continue
            del self._removals[target]
            if is_published:
                remove(target)


def remove(path: str) -> None:
    """Remove a published checkpoint, whatever it is: first its name, so that nobody finds a part of it.

    What a kill leaves of it lies among the jobs, and goes at the next start.
    """
    if not os.path.lexists(path):
        return
    if os.path.islink(path) or not os.path.isdir(path):
        os.unlink(path)
        return
    spool = spool_of(path)
    os.makedirs(spool, exist_ok=True)
    aside = os.path.join(spool, f"{os.path.basename(path)}.{secrets.token_hex(6)}.old")
    os.rename(path, aside)
    shutil.rmtree(aside, ignore_errors=True)
    with contextlib.suppress(OSError):  # something else is there
        os.rmdir(spool)


def _said(job: Job | None) -> str:
    try:
        with open(f"{job.native}.log" if job else "", encoding="utf-8", errors="replace") as file:
            return file.read().strip()[-2000:]
    except OSError:
        return "its exporter was killed; the next start of the training tries again"
