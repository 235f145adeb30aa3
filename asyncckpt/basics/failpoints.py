"""Failpoints: named points in saves, commits, overwrites, loads and cleanup, at which tests kill, fail or pause.

Each step ends with a call `reach("name of the point")`: a point is the instant between two steps. It does nothing,
unless code in the same process has called `observed`; no variable, file or message can enable it, and a test checks
that only tests call `observed`. Disabled, a point costs a call and a comparison (21 ns; a save of one rank reaches
about 25, one more for each extent, or three for each streamed segment).

For a new step, add a line to `POINTS` and a call of `reach` at a place where an OSError may be raised. If a scenario of
tests/fault/test_failpoints.py reaches it, that test kills, fails and pauses there. Points that only some saves and
loads reach have scenarios of their own, listed in `tests/failpoint_groups.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

POINTS: Mapping[str, str] = {
    # ---- the trainer
    "trainer: slot taken": "a slot is lent, nothing is announced",
    "trainer: announced": "Begin is sent, nothing is copied",
    "slot: opened": "what the slot held before is void, nothing of the new snapshot is in it",
    "slot: streamed": "the request of a slot that is written while it is filled stands, and nobody has been told",
    "stream: more filled": "the worker may write some more of what is being copied",
    "slot: filled": "every byte is in the slot, the request is not",
    "slot: request written": "all but the seal is in the slot",
    "slot: sealed": "the snapshot outlives the trainer, nobody has been told",
    "trainer: withdrawing": "a copy has failed, the worker does not know",
    "trainer: seeking a worker": "a worker is dead, another one is about to be found or started",
    "trainer: handing over": "a worker is dead, the next one is about to be given one of its slots",
    "hook: called before the commit": "all files of this rank are durable, its hook is about to be asked",
    "device: snapshot made": "copies of the state on the device itself are in its stream, none to the host is",
    "device: copying": "what comes before is in a device's stream, no copy to the host is",
    "device: copies begun": "all copies of one more device are in its stream, none need have run",
    "device: samples fetched": "what the other ranks compare is here, out of devices, and in no request",
    "device: copied": "every copy from devices has ended, their sources are still held",
    "sync: copied": "without a worker: every byte is in this process's own memory",
    # ---- several ranks, among themselves
    "ranks: meeting": "a first save: this rank is about to meet the others, and to tell them what is in its state",
    "ranks: introduced": "it has heard everybody, nothing is compared",
    "ranks: exchanged": "a first save: this rank knows everybody's structure, and has not said that it does",
    "ranks: leading": "several workers: rank 0's is about to be asked to lead",
    "ranks: following": "several workers: this rank's is about to be asked to follow rank 0's",
    "ranks: linking again": "several workers: this rank's session is new, its worker has not heard of the others",
    "ranks: linked": "the workers are linked, where there are several, and nothing is agreed",
    "ranks: agreed": "this rank knows who writes what, and the others do not know that it does",
    "ranks: telling": "without a worker: a step is done, and the other ranks are about to be told",
    # ---- the worker, before storage
    "worker: lineage asked for": "a run's first save is about to learn its epoch",
    "worker: slot asked for": "a slot is about to be made",
    "worker: slot handed over": "a slot of a dead worker is about to be opened",
    "worker: filling pages": "a slot is lent, its pages are about to be faulted in",
    "worker: request found": "the request in a slot was read and not looked into",
    "worker: telling": "a message to a trainer is about to be sent: an answer, how far a save is, its end",
    "worker: preparing": "the job that makes the directory has begun",
    "worker: writing": "the job that writes a rank's files has begun",
    "stream: begun": "the job that writes what is being copied, or looks at what a dead worker has written, begins",
    "stream: segments freed": "more segments are written; of a ring, the trainer may fill their cells again",
    "worker: committing": "the job that commits has begun: all ranks are durable",
    # ---- a rank's files
    "directory: made": "the checkpoint's directory is there and its name flushed",
    "shard: created": "a shard file is there, empty",
    "shard: reserved": "its room is reserved",
    "shard: extent written": "one more extent is written, not flushed",
    "segment: written": "one more segment is given to the system, which nobody has been told",
    "shard: cut": "all bytes are written and the length is right, not flushed",
    "shard: flushed": "the file is durable and open",
    "shard: closed": "the file is durable and closed",
    "rank: items written": "layout dcp: the items are written and flushed, there are no objects",
    "rank: objects written": "the objects are written and flushed, there is no index",
    "rank: index written": "the index is written and flushed, its name is not",
    "rank: durable": "everything of this rank is durable",
    "failed: removing": "a save has failed, one of its files is about to be removed",
    "failed: removing directory": "a save has failed, a directory that it made is about to be removed",
    # ---- a save that a dead worker had begun
    "resumed: committed": "it had committed the save; whether that is flushed is not known",
    "resumed: whole": "a rank's shards are found whole, and are about to be flushed again",
    "resumed: shard kept": "one more of them is flushed",
    "resumed: removing": "a rank's files are not whole, one of them is about to be removed",
    "small file: replacing": "an index, or what is beside it, is durable under its temporary name, the old one stands",
    "small file: replaced": "it has taken the old one's place, which is not flushed",
    # ---- several workers
    "peers: listening": "a worker is about to listen for those of other nodes",
    "peers: connecting": "a worker is about to connect to the one that leads",
    "peers: parting": "a worker is about to close its connection to the one that leads",
    "peers: sending": "a message to another worker is about to be sent",
    "peers: heard": "a message of another worker has come, nothing was done with it",
    # ---- the commit
    "commit: begun": "nothing of the commit is done",
    "commit: others seen": "the indexes that other nodes' workers wrote are seen from this one",
    "lock: taken": "the lock of who replaces is held",
    "lock: removed": "the lock's file is gone, the lock is held",
    "commit: files checked": "every file that the manifest names was found in full",
    "commit: metadata written": "layout dcp: `.metadata` is durable under its temporary name",
    "commit: parent flushed": "the directory's own name is durable, the manifest is not written",
    "put: written": "a manifest or tombstone is durable under its temporary name",
    "put: flushed": "all names beside it are durable, nothing is published",
    "commit: put": "the manifest has its name, which is not flushed",
    "commit: metadata put": "layout dcp: `.metadata` has its name, which is not flushed",
    "commit: durable": "the manifest is durable",
    "leftovers: removing": "a checkpoint stands, a file of another save is about to be removed",
    # ---- what is left of saves that came to nothing
    "gc: tombstone put": "the tombstone has its name, which is not flushed",
    "gc: nothing removed": "nothing of the save can be published any more, and all of it is there",
    "gc: removing": "one more of its files is about to be removed",
    "retention: delisted": "a tombstone stands for the committed save that goes, and all its files are there",
    "retention: removing": "one more of its files is about to be removed",
    "retention: emptied": "none of its files is left, the tombstone stands",
    "retention: removing directory": "nothing of it is left, its directory is about to be removed",
    "quarantine: renaming": "another checkpoint is loaded, the broken one is about to be put aside",
    "quarantine: renamed": "it has its other name, which is not flushed",
    # ---- a load
    "load: manifest read": "the manifest was read and is one",
    "load: index read": "one more rank's index was read and checked",
    "load: foreign structure read": "what another library says of its files was read and checked",
    "load: shard opened": "one more shard is open",
    "load: bytes read": "bytes are in memory, not verified",
    "load: ranges read": "short ranges, of which no checksum is looked at, are where they go",
    "load: passing on": "those who want the same are connected, nothing is passed on",
    "load: copies verified": "everything is verified, no target that was there has changed",
    "load: tensors filled": "all tensors are filled, no object is replaced",
    "load: objects read": "one rank's objects were read and checked",
    "recall: held": "the worker holds a snapshot for this process, nothing of it is mapped",
    "recall: mapped": "all of it is mapped, nothing was read",
    "recall: read": "something was read from it, which may have been written to meanwhile",
}
"""Name -> what is true at that point."""

_observer: Callable[[str], None] | None = None


def reach(point: str) -> None:
    """Report that `point`, one of `POINTS`, is reached. Does nothing, except in tests; raises the observer's errors."""
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
