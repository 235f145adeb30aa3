"""Named instants of saves, commits, overwrites, loads and of what cleans up, at which tests kill, fail or hold.

Each step of those ends in a call `reach("its point")`, so that a point is the instant between two steps: after the one
and before the next. Nothing happens there, unless code of this very process has called `observed`: no variable, file
or message can switch it on, and a test sees to it that only tests do. Off, a point costs a call and a comparison
(40 ns; a save of one rank reaches some 20, and one more for each extent).

A new step gets a line in `POINTS` and a call of `reach` where an OSError may be raised; then
tests/fault/test_failpoints.py kills, fails and holds it too, once a scenario there comes by.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

POINTS: Mapping[str, str] = {
    # ---- the trainer
    "trainer: slot taken": "a slot is lent, nothing is announced",
    "trainer: announced": "Begin is sent, nothing is copied",
    "slot: filled": "every byte is in the slot, the request is not",
    "slot: request written": "all but the seal is in the slot",
    "slot: sealed": "the snapshot outlives the trainer, nobody has been told",
    # ---- the worker, before storage
    "worker: slot asked for": "a slot is about to be made",
    "worker: preparing": "the job that makes the directory has begun",
    "worker: writing": "the job that writes a rank's files has begun",
    "worker: committing": "the job that commits has begun: all ranks are durable",
    # ---- a rank's files
    "directory: made": "the checkpoint's directory is there and its name flushed",
    "shard: created": "a shard file is there, empty",
    "shard: reserved": "its room is reserved",
    "shard: extent written": "one more extent is written, not flushed",
    "shard: cut": "all bytes are written and the length is right, not flushed",
    "shard: flushed": "the file is durable and open",
    "shard: closed": "the file is durable and closed",
    "rank: objects written": "the objects are written and flushed, there is no index",
    "rank: index written": "the index is written and flushed, its name is not",
    "rank: durable": "everything of this rank is durable",
    "failed: removing": "a save has failed, one of its files is about to be removed",
    # ---- the commit
    "commit: begun": "nothing of the commit is done",
    "lock: taken": "the lock of who replaces is held",
    "lock: removed": "the lock's file is gone, the lock is held",
    "commit: files checked": "every file that the manifest names was found in full",
    "commit: metadata written": "layout dcp: `.metadata` is durable under its temporary name",
    "commit: manifest written": "the manifest is durable under its temporary name",
    "commit: directories flushed": "all names are durable, nothing is published",
    "commit: put": "the manifest has its name, which is not flushed",
    "commit: metadata put": "layout dcp: `.metadata` has its name, which is not flushed",
    "commit: durable": "the manifest is durable",
    "leftovers: removing": "a checkpoint stands, a file of another save is about to be removed",
    # ---- what is left of saves that came to nothing
    "gc: tombstone written": "the tombstone is durable under its temporary name",
    "gc: tombstone put": "the tombstone has its name, which is not flushed",
    "gc: nothing removed": "nothing of the save can be published any more, and all of it is there",
    "gc: removing": "one more of its files is about to be removed",
    "retention: delisted": "a tombstone stands for the committed save that goes, and all its files are there",
    "retention: removing": "one more of its files is about to be removed",
    "retention: emptied": "none of its files is left, the tombstone stands",
    "quarantine: renaming": "another checkpoint is loaded, the broken one is about to be put aside",
    "quarantine: renamed": "it has its other name, which is not flushed",
    # ---- a load
    "load: manifest read": "the manifest was read and is one",
    "load: index read": "one more rank's index was read and checked",
    "load: shard opened": "one more shard is open",
    "load: bytes read": "bytes are in memory, not verified",
    "load: objects read": "one rank's objects were read and checked",
}
"""Name -> what is true at that instant."""

_observer: Callable[[str], None] | None = None


def reach(point: str) -> None:
    """Be at `point`, one of `POINTS`. Does nothing; raises what a test's observer raises."""
    if _observer is not None:
        _observer(point)


@contextlib.contextmanager
def observed(observer: Callable[[str], None]) -> Iterator[None]:
    """For tests: call `observer` with each point that any thread of this process reaches inside the block.

    Args:
        observer: May end the process, raise an OSError, or take its time. Called from several threads.
    """
    global _observer  # noqa: PLW0603
    before, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = before
