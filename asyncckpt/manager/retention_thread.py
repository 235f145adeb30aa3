"""The checkpoints in a manager's root: lists them on each rank, and removes old ones in a thread on rank 0."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections import ChainMap
from collections.abc import Callable, Collection
from concurrent import futures
from concurrent.futures import Future
from typing import Any

from asyncckpt import __version__
from asyncckpt.basics.paths import current_umask
from asyncckpt.basics.process_lifecycle import BackgroundThread
from asyncckpt.basics.seen_saves import note_seen
from asyncckpt.errors import AsyncCkptError, DirectoryInUseError
from asyncckpt.format.names import SaveId
from asyncckpt.maintenance.pins import pin, pinned_in, unpin
from asyncckpt.maintenance.policy import RetentionPolicy, StoredCheckpoint, best_of, newest_of
from asyncckpt.maintenance.retention import Score, Scores, Survey, abandoned_in, is_read_back, prune, survey, survey_of
from asyncckpt.manager.root_lock import RootLock
from asyncckpt.restore import RestoredCheckpoint, finder
from asyncckpt.storage.catalog import Candidate, candidates_of, look_at_mirror, newest_first, scan
from asyncckpt.storage.locate import store_at
from asyncckpt.storage.store import Store

POLL_S = 0.2
"""Seconds between checks of a waiting save whether preemption has begun. Chosen."""

_log = logging.getLogger("asyncckpt")


class RetentionThread:
    """Runs a function in a thread on request. Requests that come while it runs are served by one more run.

    The thread ends when there is nothing to do, so that it does not keep the objects alive that the function uses.

    Args:
        work: Function to run. Errors that it raises are logged; one of the storage that repeats, once.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._failure: tuple[object, ...] = ()
        self._changed = threading.Condition()
        self._wanted = self._done = 0
        self._ended = False
        self._thread: threading.Thread | None = None

    def request(self) -> None:
        """Request a run. Does not wait. Thread-safe; does nothing after `close`."""
        with self._changed:
            if self._ended:
                return
            if self._thread is None:
                thread = BackgroundThread(self._run, "asyncckpt-retention", end=self._end)
                try:
                    thread.start()
                except RuntimeError:  # can't start new thread: the next commit asks again
                    _log.warning("retention: no thread can be started; trying again after the next commit")
                    return
                self._thread = thread
            self._wanted += 1
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            while self._runs_once():
                pass
        except BaseException:  # of a handler of the log, say
            with self._changed:  # IMPORTANT: a save must not wait for a thread that has ended
                self._done, self._thread = self._wanted, None
                self._changed.notify_all()
            raise

    def _runs_once(self) -> bool:
        """Serve the requests that have come, and return True; or end, and return False."""
        with self._changed:
            if self._done == self._wanted:
                self._thread = None
                return False
            wanted = self._wanted
        try:
            self._work()
            self._failure = ()
        except (OSError, AsyncCkptError) as error:  # a storage that is away, maybe for days
            failure = type(error), getattr(error, "errno", None)
            if self._failure != failure:
                _log.warning("retention failed; it is tried again after each commit: %s", error)
            self._failure = failure
        except Exception:
            _log.exception("retention failed; it is tried again after each commit")
        with self._changed:
            self._done = wanted
            self._changed.notify_all()
        return True

    def wait(self, timeout_s: float, is_hurried: Callable[[], bool] = lambda: False) -> bool:
        """Wait until all requested runs have ended. Returns whether they have.

        Args:
            timeout_s: Seconds to wait at most.
            is_hurried: Ends the wait when it returns true; asked every `POLL_S`, as a signal does not end the wait.

        Blocks: at most `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._done != self._wanted:
                left = deadline - time.monotonic()
                if left <= 0 or is_hurried():
                    return False
                self._changed.wait(min(left, POLL_S))
        return True

    def _end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Finish the requested runs, and end the thread. Idempotent.

        If that takes longer than `timeout_s`, the next manager of the root removes the rest.

        Blocks: at most `timeout_s`.
        """
        self._end()
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
            if thread.is_alive():
                _log.warning(
                    "retention has not finished within %.0f s; the next manager of this directory continues", timeout_s
                )


WAIT_S = 60.0
"""Timeout for removals where the caller gives none. Chosen: removing a file takes seconds on the slowest storage."""


MIRROR_CLOSE_S = 5.0
"""How long `close` waits for removals in a mirror, which may not answer. The next manager goes on with them."""


class DirectoryHold:
    """Keeps retention from removing the directory `name` while a save to it is in progress. Compared by identity.

    Attributes:
        name: The directory's name.
        mirror: Path or URL that the checkpoint is copied to; None: it is not.
        restored: What the run had restored from when the save began, if the mirror had nothing of the run since.
    """

    def __init__(self, name: str, mirror: str | None = None) -> None:
        self.name, self.mirror = name, mirror
        self.restored: SaveId | None = None


class RootRetention:
    """The checkpoints in a root: lists them, and on rank 0 removes those that the retention policy gives up.

    `save_ended` and `copied` may be called in any thread, the other methods in the training thread.

    Args:
        root: Absolute path of the root.
        policy: What to keep.
        best_fn: The user's score of a checkpoint's metrics.
        is_leader: Whether this is rank 0.
        lock: On rank 0, the lock that keeps other managers out of the root; None: they may share it.
        dead_after_s: As for `maintenance.retention.prune`.
        mirror: Absolute path or URL of the root's mirror; None: there is none.
        mirror_policy: What to keep there.
        mirror_wait_s: Seconds that a save waits at most while the policy keeps no more checkpoints for the mirror.
        exporting: Returns the names of checkpoints that are to be exported, or are being exported: they stay.
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
        mirror: str | None = None,
        mirror_policy: RetentionPolicy | None = None,
        mirror_wait_s: float = 0.0,
        exporting: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._mirror_wait_s = mirror_wait_s
        self._root_lock, self._exporting = lock, exporting
        self._restored: dict[str, SaveId] = {}  # by root: until a checkpoint of this run is committed there
        self._verified: set[tuple[str, SaveId]] = set()
        self._is_verifying = False

        self._dead_after_s = dead_after_s
        self._root, self._policy, self._is_leader = root, policy, is_leader
        self._scores = Scores(best_fn) if best_fn is not None else None
        self._store, self._pid = store_at(root, umask=current_umask()), os.getpid()
        self._lock = threading.Lock()
        self._busy: dict[str, set[DirectoryHold]] = {}
        self._broken: set[str] = set()
        self._abandoned: frozenset[str] = frozenset()
        self._removal_thread = RetentionThread(self._prune)
        self._mirror, self._mirror_policy = mirror, mirror_policy or RetentionPolicy()
        # Made here, where the options of object stores are known.
        self._mirror_store = None if mirror is None else store_at(mirror, umask=current_umask())
        # IMPORTANT: a thread of its own. A mirror that hangs must not keep the local disk from being freed.
        self._mirror_thread = RetentionThread(self._prune_mirror)
        self._is_behind = self._is_mirror_behind = False
        self._awaited: list[Future[Any]] = []

    # ---- saves, and removals after them

    def save_begins(
        self, save: DirectoryHold, max_wait_s: float, is_hurried: Callable[[], bool] = lambda: False
    ) -> None:
        """Record that a save begins. Its directory is not removed until it has ended.

        Blocks: at most `max_wait_s`, until the checkpoints that are given up are removed, so that the disk does not
        fill up because saves are faster than removals. After a wait that timed out, later calls do not wait until a
        removal has succeeded. Before that, in the same way, at most `mirror_wait_s` for the mirror. Does not wait while
        `is_hurried` returns true.
        """
        if self._mirror_wait_s:
            self._await_copies(is_hurried)
        if self._is_behind:
            max_wait_s = 0.0

        def ends_wait() -> bool:  # verifying a checkpoint takes as long as writing it: no save waits for that
            return self._is_verifying or is_hurried()

        self._is_behind = not self._removal_thread.wait(max_wait_s, ends_wait) and not self._is_verifying
        if self._is_behind and max_wait_s and not is_hurried():
            _log.warning(
                "retention in %s cannot remove checkpoints as fast as new ones are saved; the disk may fill up",
                self._root,
            )
        with self._lock:
            save.restored = None if self._mirror is None else self._restored.get(self._mirror)
            self._busy.setdefault(save.name, set()).add(save)

    def follow_copy(self, mirrored: Future[Any]) -> None:
        """Count a save among those that wait for their mirror, until this future is done."""
        if self._mirror_wait_s:
            self._awaited.append(mirrored)

    def _await_copies(self, is_hurried: Callable[[], bool]) -> None:
        """Wait until there is room for one more checkpoint that waits for its mirror."""
        limit = (self._policy.max_to_keep or 0) + (self._policy.max_unmirrored or 0)
        deadline = time.monotonic() + (0.0 if self._is_mirror_behind else self._mirror_wait_s)
        while True:
            self._awaited = [one for one in self._awaited if not one.done()]
            left_s = deadline - time.monotonic()
            if len(self._awaited) < limit or left_s <= 0 or is_hurried():
                break
            futures.wait(self._awaited, min(left_s, POLL_S), futures.FIRST_COMPLETED)
        was_behind, self._is_mirror_behind = self._is_mirror_behind, len(self._awaited) >= limit and not is_hurried()
        if self._is_mirror_behind and not was_behind:
            _log.warning(
                "%d checkpoints in %s are not in the mirror %s after %.0f s: saves go on without waiting for it, and "
                "beyond max_unmirrored the oldest checkpoints are removed",
                len(self._awaited),
                self._root,
                self._mirror,
                self._mirror_wait_s,
            )

    def save_ended(self, save: DirectoryHold, *, is_committed: bool) -> None:
        """Record that a save was committed, has failed, or could not begin. Idempotent."""
        with self._lock:
            if is_committed:
                self._broken.discard(os.path.join(self._root, save.name))
                self._restored.pop(self._root, None)  # from now on it is in the metadata of the newest checkpoint
            holds = self._busy.get(save.name, set())
            holds.discard(save)
            if not holds:
                self._busy.pop(save.name, None)
        self.request_prune()

    def copied(self, save: DirectoryHold) -> None:
        """Record that the copy of a save is committed in its mirror."""
        if self._mirror is not None and save.mirror == os.path.join(self._mirror, save.name):
            with self._lock:
                self._broken.discard(save.mirror)
                if self._restored.get(self._mirror) == save.restored:  # else it is older than what was restored since
                    self._restored.pop(self._mirror, None)
        self.request_prune()

    @property
    def busy(self) -> set[str]:
        """Names of directories to which a save is in progress."""
        with self._lock:
            return set(self._busy)

    def request_prune(self) -> None:
        """Start the removal of the checkpoints that the policy gives up, in the thread."""
        if self._is_leader and self._policy.max_to_keep is not None:
            self._removal_thread.request()
        if self._is_leader and self._mirror_policy.max_to_keep is not None:
            self._mirror_thread.request()

    def _broken_in(self, root: str) -> set[str]:
        """Return the names of the checkpoints of a root that were found broken."""
        return {os.path.basename(path) for path in self._broken if os.path.dirname(path) == root}

    def _prune_mirror(self) -> None:
        if self._mirror is None or self._mirror_store is None or not self._has_root():
            return
        with self._lock:
            broken, restored = self._broken_in(self._mirror), self._restored.get(self._mirror)
        # IMPORTANT: what is still being copied there has not changed for a long time if the mirror was away.
        copying = {one.name for one in self._survey().stored if one.is_unmirrored}
        prune(
            self._mirror,
            self._mirror_store,
            self._mirror_policy,
            package=__version__,
            score=self._scores,
            broken=broken,
            restored=restored,
            busy=copying | self.busy,
            pinned=pinned_in(self._root, self._store),
            dead_after_s=self._dead_after_s,
            verifies=functools.partial(self._is_read_back, self._mirror, self._mirror_store),
            is_ours=self._is_ours,
            is_mirror=True,
        )

    def _prune(self) -> None:
        if not self._has_root():
            return
        with self._lock:
            broken, restored = self._broken_in(self._root), self._restored.get(self._root)
        # A later export is of a save that is busy now, or of the newest checkpoint.
        exporting: dict[str, set[DirectoryHold]] = {name: set() for name in self._exporting()}
        prune(
            self._root,
            self._store,
            self._policy,
            package=__version__,
            score=self._scores,
            broken=broken,
            busy=ChainMap(self._busy, exporting).keys(),  # a view, not a copy: a save may begin during the removals
            dead_after_s=self._dead_after_s,
            restored=restored,
            verifies=self._verifies,
            is_ours=self._is_ours,
        )

    def _is_ours(self) -> bool:
        return self._root_lock is None or not self._root_lock.is_lost

    def _has_root(self) -> bool:
        """Return whether the lock is held. Take it again if its file was removed."""
        if self._is_ours():
            return True
        assert self._root_lock is not None
        try:
            self._root_lock.take()
        except DirectoryInUseError as error:
            _log.error("the lock of this directory was lost, so retention removes no more checkpoints: %s", error)
        return self._is_ours()

    def _verifies(self, one: StoredCheckpoint) -> bool:
        self._is_verifying = True
        try:
            return self._is_read_back(self._root, self._store, one)
        finally:
            self._is_verifying = False

    def _is_read_back(self, root: str, store: Store, one: StoredCheckpoint) -> bool:
        """Return whether a checkpoint can be read back. If it could be once, it is not read again."""
        path = os.path.join(root, one.name)
        if (path, one.save_id) not in self._verified:
            if not is_read_back(path, one.save_id, store):
                return False
            self._verified.add((path, one.save_id))
        return True

    def wait(self, timeout_s: float | None) -> None:
        """Wait for removals in progress; log a warning if they take too long.

        Blocks: at most `timeout_s`; None: `WAIT_S`.
        """
        if not self._removal_thread.wait(WAIT_S if timeout_s is None else timeout_s):
            _log.warning("retention in %s has not yet removed all checkpoints that it gives up", self._root)

    def close(self, left_s: float | None) -> None:
        """Finish removals within `left_s` (None: `WAIT_S`), and release the lock of the root."""
        try:
            self._removal_thread.close(WAIT_S if left_s is None else left_s)
            self._mirror_thread.close(MIRROR_CLOSE_S if left_s is None else min(left_s, MIRROR_CLOSE_S))
        finally:
            if self._root_lock is not None:
                self._root_lock.release()

    def warn_of_others(self) -> None:
        """Log a warning if a training that has restored nothing saves to a root with checkpoints of an earlier one.

        Blocks: on rank 0, to read their manifests.
        """
        if not self._is_leader:
            return
        try:
            steps = sorted({one.step for one in self._survey().stored})  # not the mirror, which may not answer
        except OSError as error:
            _log.debug("cannot list the checkpoints in %s: %s", self._root, error)
            return
        if steps:
            _log.warning(
                "%s holds %d checkpoints, up to step %d, and restore() was not called, so this run begins a new "
                "branch. The old checkpoints count as abandoned: a step that is saved again replaces the old one%s. "
                "Use another directory for a new training, or pin the checkpoints that must stay",
                self._root,
                len(steps),
                steps[-1],
                "" if self._policy.max_to_keep is None else ", and retention removes them first",
            )

    # ---- listing

    def _survey(self) -> Survey:
        with self._lock:
            broken = self._broken_in(self._root)
        return survey(self._root, self._store, score=self._scores, broken=broken, links=True)

    def _stored(self) -> list[StoredCheckpoint]:
        """Return the committed checkpoints of the root and of its mirror, each once."""
        local = list(self._survey().stored)
        known = {one.save_id for one in local}
        return [*local, *(one for one in self._copies(has_local=bool(local)).stored if one.save_id not in known)]

    def _copies(self, *, has_local: bool) -> Survey:
        """Return what the mirror holds; nothing if it cannot be listed and the root has checkpoints."""
        if self._mirror is None or self._mirror_store is None:
            return Survey((), {})
        with self._lock:
            broken = self._broken_in(self._mirror)
        find = functools.partial(
            survey, self._mirror, self._mirror_store, score=self._scores, broken=broken, links=True
        )
        return look_at_mirror(find, Survey((), {}), root=self._root, mirror=self._mirror, has_local=has_local)

    def latest_step(self) -> int | None:
        """Return the step of the newest committed checkpoint, by lineage; None: there is none."""
        newest = newest_of(self._stored())
        return None if newest is None else newest.step

    def all_steps(self) -> list[int]:
        """Return the steps of all committed checkpoints, ascending."""
        return sorted({one.step for one in self._stored()})

    def best_step(self) -> int | None:
        """Return the step of the checkpoint with the best score; None: none has a score."""
        best = best_of(self._stored(), self._policy.best_mode)
        return None if best is None else best.step

    def _look(self, root: str, store: Store) -> tuple[list[Candidate], Survey]:
        """Return the checkpoints of a root that may be restored, the newest first, and all it holds, by one listing."""
        try:
            store = store.listed(root)
            found = scan(root, store, links=True)
        except (FileNotFoundError, NotADirectoryError):
            return [], Survey((), {})
        with self._lock:
            broken = self._broken_in(root)
        return candidates_of(found, store), survey_of(root, found, store, score=self._scores, broken=broken)

    def candidates(self, root: str) -> list[Candidate]:
        """Return the checkpoints to try in a restore: the newest first, abandoned ones last. Called on rank 0."""
        found, here = self._look(self._root, self._store)
        surveys = {self._root: here}
        if self._mirror is not None and self._mirror_store is not None:
            look = functools.partial(self._look, self._mirror, self._mirror_store)
            nothing: tuple[list[Candidate], Survey] = ([], Survey((), {}))
            has_local = bool(found)
            copies, there = look_at_mirror(look, nothing, root=self._root, mirror=self._mirror, has_local=has_local)
            found, surveys[self._mirror] = sorted([*found, *copies], key=newest_first, reverse=True), there
        if root != self._root:  # one step
            found = finder(None if self._mirror is None else os.path.join(self._mirror, os.path.basename(root)))(root)
        # Not only the step that is loaded: what is saved from now on must be newer than all of them.
        note_seen(surveys, (one.save_id for survey in surveys.values() for one in survey.stored))
        self._abandoned = abandoned_in(surveys)
        return sorted(found, key=lambda one: one.path in self._abandoned)  # stable: otherwise the order stays

    def restored(self, found: RestoredCheckpoint) -> None:
        """Record which checkpoint was loaded, and which were broken.

        Removes none: a manager that only restores has no lock.
        """
        with self._lock:
            places = [self._root] if self._mirror is None else [self._root, self._mirror]
            self._restored = dict.fromkeys(places, SaveId.parse(found.save_id))
            self._broken |= {one.path for one in found.skipped}
        if found.path in self._abandoned and found.skipped:
            _log.warning(
                "%s was restored although a rollback has abandoned its branch: no other checkpoint is sound", found.path
            )

    def pin(self, path: str) -> None:
        """Pin the checkpoint at `path`. Errors and Blocks: as `maintenance.pins.pin`."""
        pin(path, self._store)

    def unpin(self, path: str) -> bool:
        """Unpin the checkpoint at `path`. Errors: as `maintenance.pins.unpin`."""
        return unpin(path, self._store)

    @property
    def is_forked(self) -> bool:
        """Whether this process is a forked child of the one that made this."""
        return os.getpid() != self._pid
