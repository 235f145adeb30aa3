"""What is in a manager's root, and what goes: rank 0 removes, every rank looks."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from asyncckpt import __version__
from asyncckpt.basics.paths import current_umask
from asyncckpt.basics.process_lifecycle import BackgroundThread
from asyncckpt.errors import DirectoryInUseError
from asyncckpt.format.names import SaveId
from asyncckpt.maintenance.pins import pin, unpin
from asyncckpt.maintenance.policy import RetentionPolicy, Stored, best_of, newest_of
from asyncckpt.maintenance.retention import Score, Survey, is_read_back, prune, survey
from asyncckpt.manager.root_lock import RootLock
from asyncckpt.restore import RestoredCheckpoint, look
from asyncckpt.storage.catalog import Candidate
from asyncckpt.storage.local import LocalStore

LOOK_S = 0.2
"""How often who waits looks whether there is a hurry. Chosen."""

_log = logging.getLogger("asyncckpt")


class Pruner:
    """Does a piece of work in a thread of its own, once more for all requests that came meanwhile.

    The thread ends when there is nothing to do: who drops this, and what the work refers to, drops all of it.

    Args:
        work: What it does. What it raises is logged.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._changed = threading.Condition()
        self._wanted = self._done = 0
        self._ended = False
        self._thread: threading.Thread | None = None

    def request(self) -> None:
        """Ask for it. Does not wait. Thread-safe; after `close` it does nothing."""
        with self._changed:
            if self._ended:
                return
            if self._thread is None:
                thread = BackgroundThread(self._run, "asyncckpt-retention", end=self._end)
                try:
                    thread.start()
                except RuntimeError:  # can't start new thread: the next commit asks again
                    _log.warning("there is no thread for retention now; it is tried again after the next commit")
                    return
                self._thread = thread
            self._wanted += 1
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._done == self._wanted:
                    self._thread = None
                    return
                wanted = self._wanted
            try:
                self._work()
            except Exception:
                _log.exception("retention failed; it is tried again after the next commit")
            with self._changed:
                self._done = wanted
                self._changed.notify_all()

    def wait(self, timeout_s: float, is_hurried: Callable[[], bool] = lambda: False) -> bool:
        """Wait until all that was asked for is done. Returns whether it is.

        Args:
            timeout_s: Seconds.
            is_hurried: Ends the wait; a signal does not wake who waits.

        Blocks: at most `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._done != self._wanted:
                left = deadline - time.monotonic()
                if left <= 0 or is_hurried():
                    return False
                self._changed.wait(min(left, LOOK_S))
        return True

    def _end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Finish what was asked for, and end. Twice is fine.

        Blocks: at most `timeout_s`; what is not done by then ends with the process, and is done by the next manager.
        """
        self._end()
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
            if thread.is_alive():
                _log.warning(
                    "retention is not done after %.0f s; the next manager of this directory goes on", timeout_s
                )


WAIT_S = 60.0
"""For removals, where the caller names no time. Chosen: removing a file takes seconds on the slowest storage."""


class Hold:
    """One save's hold on the directory `name`."""

    def __init__(self, name: str) -> None:
        self.name = name


class Housekeeping:
    """See the module. `ended` from any thread, the rest from the training's.

    Args:
        root: Absolute path.
        policy: What is to be kept.
        best_fn: Of the user.
        is_leader: This is rank 0.
        lock: On rank 0: keeps other managers out of the root; None: it is shared with them.
        dead_after_s: As of `maintenance.retention.prune`.
    """

    def __init__(
        self,
        root: str,
        policy: RetentionPolicy,
        best_fn: Score | None,
        *,
        is_leader: bool,
        dead_after_s: float,
        lock: RootLock | None = None,
    ) -> None:
        self._root_lock = lock
        self._restored: SaveId | None = None
        self._verified: set[SaveId] = set()
        self._is_verifying = False

        self._dead_after_s = dead_after_s
        self._root, self._policy, self._best_fn, self._is_leader = root, policy, best_fn, is_leader
        self._store, self._pid = LocalStore(umask=current_umask()), os.getpid()
        self._lock = threading.Lock()
        self._busy: dict[str, set[Hold]] = {}
        self._broken: set[str] = set()
        self._abandoned: frozenset[str] = frozenset()
        self._pruner = Pruner(self._prune)
        self._is_behind = False

    # ---- saves, and what goes after them

    def begins(self, save: Hold, patience_s: float, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """A save begins: nothing is removed from its directory until it has ended.

        Blocks: at most `patience_s`, until what earlier commits have made superfluous is gone: the disk must not fill
        up because saves are faster than removals. Once that was in vain, it waits no more until something is removed.
        Nor does it while there is a hurry.
        """
        if self._is_behind:
            patience_s = 0.0

        def waits_no_more() -> bool:  # reading a checkpoint back takes as long as writing it: no save waits for that
            return self._is_verifying or is_hurried()

        self._is_behind = not self._pruner.wait(patience_s, waits_no_more) and not self._is_verifying
        if self._is_behind and patience_s and not is_hurried():
            _log.warning("what retention gives up in %s is not removed as fast as new steps are saved", self._root)
        with self._lock:
            self._busy.setdefault(save.name, set()).add(save)

    def ended(self, save: Hold, *, is_committed: bool) -> None:
        """A save has been committed, has failed, or could not begin. Twice is fine."""
        with self._lock:
            if is_committed:
                self._broken.discard(save.name)
                self._restored = None  # from here on the newest checkpoint names it
            holds = self._busy.get(save.name, set())
            holds.discard(save)
            if not holds:
                self._busy.pop(save.name, None)
        self.tidy()

    @property
    def busy(self) -> set[str]:
        """Names of directories to which a save is under way."""
        with self._lock:
            return set(self._busy)

    def tidy(self) -> None:
        """Have removed what has to go, behind the training."""
        if self._is_leader and self._policy.max_to_keep is not None:
            self._pruner.request()

    def _prune(self) -> None:
        if not self._has_root():
            return
        with self._lock:
            broken, restored = set(self._broken), self._restored
        prune(
            self._root,
            self._store,
            self._policy,
            package=__version__,
            score=self._best_fn,
            broken=broken,
            busy=self._busy.keys(),  # as it is when each is about to go: a save may begin meanwhile
            dead_after_s=self._dead_after_s,
            restored=restored,
            verifies=self._verifies,
            is_ours=self._is_ours,
        )

    def _is_ours(self) -> bool:
        return self._root_lock is None or not self._root_lock.is_lost

    def _has_root(self) -> bool:
        """Whether the lock is held; one whose file somebody has removed is taken again."""
        if self._is_ours():
            return True
        assert self._root_lock is not None
        try:
            self._root_lock.take()
        except DirectoryInUseError as error:
            _log.error("the lock of this directory was lost, and no checkpoint is removed any more: %s", error)
        return self._is_ours()

    def _verifies(self, one: Stored) -> bool:
        if one.save_id not in self._verified:
            self._is_verifying = True
            try:
                if not is_read_back(os.path.join(self._root, one.name), one.save_id, self._store):
                    return False
            finally:
                self._is_verifying = False
            self._verified.add(one.save_id)
        return True

    def wait(self, timeout_s: float | None) -> None:
        """Wait until it is removed, with a warning if that takes too long.

        Blocks: at most `timeout_s`; None: `WAIT_S`.
        """
        if not self._pruner.wait(WAIT_S if timeout_s is None else timeout_s):
            _log.warning("what retention gives up in %s is not removed yet", self._root)

    def close(self, left_s: float | None) -> None:
        """Finish, and let others have the root; `left_s` as what is left of a time of grace."""
        try:
            self._pruner.close(WAIT_S if left_s is None else left_s)
        finally:
            if self._root_lock is not None:
                self._root_lock.release()

    def warn_of_others(self) -> None:
        """Say it when a training that has restored nothing begins to save beside another one's checkpoints.

        Blocks: on rank 0, for the manifests that are there.
        """
        if not self._is_leader:
            return
        try:
            steps = self.all_steps()
        except OSError as error:
            _log.debug("cannot look at %s: %s", self._root, error)
            return
        if steps:
            _log.warning(
                "%s holds %d checkpoints, up to step %d, and restore() was not called: what is saved from here on is a "
                "new branch. The old ones count as abandoned: a step that is saved again takes the old one's place%s. "
                "For a new training use another directory; pin what must stay",
                self._root,
                len(steps),
                steps[-1],
                "" if self._policy.max_to_keep is None else ", and retention removes them first",
            )

    # ---- what is there

    def _survey(self) -> Survey:
        with self._lock:
            broken = set(self._broken)
        return survey(self._root, self._store, score=self._best_fn, broken=broken, links=True)

    def latest_step(self) -> int | None:
        """Of the newest committed one by lineage."""
        newest = newest_of(self._survey().stored)
        return None if newest is None else newest.step

    def all_steps(self) -> list[int]:
        """Of all committed ones, ascending."""
        return sorted({one.step for one in self._survey().stored})

    def best_step(self) -> int | None:
        """Of the one with the best score."""
        best = best_of(self._survey().stored, self._policy.best_mode)
        return None if best is None else best.step

    def candidates(self, root: str) -> list[Candidate]:
        """Return what may be restored, the newest first, what a rollback has left behind last. On rank 0."""
        found = look(root)
        self._abandoned = frozenset(
            os.path.join(self._root, one.name) for one in self._survey().stored if one.is_abandoned
        )
        return sorted(found, key=lambda one: one.path in self._abandoned)  # the order is kept otherwise

    def restored(self, found: RestoredCheckpoint) -> None:
        """Take note of what was loaded, and of what was broken. Nothing is removed: who only reads has not the root."""
        with self._lock:
            self._restored = SaveId.parse(found.save_id)
            self._broken |= {os.path.basename(one.path) for one in found.skipped}
        if found.path in self._abandoned and found.skipped:
            _log.warning("%s is of a branch that a rollback had left behind: nothing else is sound", found.path)

    def pin(self, path: str) -> None:
        """As `maintenance.pins.pin`."""
        pin(path, self._store)

    def unpin(self, path: str) -> bool:
        """As `maintenance.pins.unpin`."""
        return unpin(path, self._store)

    # ---- whose it is

    @property
    def is_forked(self) -> bool:
        """This process is a child of the one that made it."""
        return os.getpid() != self._pid
