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
    "trainer: slot taken": "a slot is acquired, the save is not announced",
    "trainer: announced": "Begin is sent, nothing is copied",
    "slot: opened": "the old snapshot is void, no byte of the new one is in the slot",
    "slot: streamed": "the request of a streamed slot is written, the worker has not been told",
    "stream: more filled": "the worker may write more bytes of a streamed slot",
    "slot: filled": "every byte is in the slot, the request is not",
    "slot: request written": "everything but the seal is in the slot",
    "slot: sealed": "the snapshot outlives the trainer, the worker has not been told",
    "trainer: withdrawing": "a copy has failed, the worker has not been told",
    "trainer: seeking a worker": "a worker is dead, another one is about to be found or started",
    "trainer: handing over": "a worker is dead, one of its slots is about to be handed over to the next one",
    "hook: called before the commit": "all files of this rank are durable, `pre_commit` is about to run",
    "device: snapshot made": "copies of the state on the device are in its stream, no copy to the host is",
    "device: copying": "earlier work is in a device's stream, no copy to the host is",
    "device: copies begun": "all deferred copies of one more device are in its stream, they need not have run",
    "device: samples fetched": "samples that other ranks compare are copied from devices, no request has them",
    "device: copied": "every copy from devices has ended, their sources are still kept alive",
    "sync: copied": "without a worker: every byte is in this process's own memory",
    # ---- several ranks, among themselves
    "ranks: meeting": "this rank is about to come to a meeting",
    "ranks: introduced": "this rank has the introductions of all ranks, nothing is compared",
    "ranks: exchanged": "this rank knows the workers of all ranks, none is linked",
    "ranks: leading": "several workers: rank 0's is about to get Lead",
    "ranks: following": "several workers: this rank's is about to get Follow",
    "ranks: linking again": "several workers: this rank has a new session, whose worker is not linked",
    "ranks: linked": "the workers are linked, if there are several, and nothing is agreed on",
    "ranks: agreed": "this rank has the agreement, and the others do not know that it has",
    "ranks: telling": "a step of all ranks is done here, and the other ranks are about to be told",
    # ---- the worker, before storage
    "worker: lineage asked for": "a run's first save is about to learn its epoch",
    "worker: slot asked for": "a slot is about to be made",
    "worker: slot handed over": "a slot of a dead worker is about to be opened",
    "worker: filling pages": "a slot is lent, its pages are about to be faulted in",
    "worker: request found": "the request in a slot was read, not decoded",
    "worker: sending": "a message to a trainer is about to be sent: an answer, or the progress or end of a save",
    "worker: preparing": "the job that makes the directory has begun",
    "worker: writing": "the job that writes a rank's files has begun",
    "stream: begun": "the job that writes a streamed slot, or checks what a dead worker has written of it, begins",
    "stream: segments freed": "more segments are written; the trainer may fill their cells again, if it is a ring",
    "worker: committing": "the job that commits has begun: all ranks are durable",
    # ---- a rank's files
    "directory: made": "the checkpoint's directory is there and its name flushed",
    "mount: probed": "what a mount can do is known, and the files that found it out are about to be removed",
    "shard: created": "a shard file is there, empty",
    "shard: linking": "the bytes of a shard are those of a file of an earlier save, it has no name in this save",
    "shard: linked": "that file has a name in this save too, which is not flushed",
    "shard: reserved": "its disk space is reserved",
    "shard: extent written": "one more extent is written, not flushed",
    "segment: written": "one more segment is written, the counter does not say so",
    "shard: cut": "all bytes are written and the file has its length, not flushed",
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
    "peers: disconnecting": "a worker is about to close its connection to the one that leads",
    "peers: sending": "a message to another worker is about to be sent",
    "peers: received": "a message of another worker was received, and nothing was done with it",
    # ---- the commit
    "commit: begun": "nothing of the commit is done",
    "commit: others seen": "the indexes that other nodes' workers wrote are seen from this one",
    "lock: taken": "the lock for replacing a checkpoint is held",
    "lock: removed": "the lock's file is gone, the lock is held",
    "commit: files checked": "every file that the manifest names was found in full",
    "commit: metadata written": "layout dcp: `.metadata` is durable under its temporary name",
    "commit: parent flushed": "the directory's own name is durable, the manifest is not written",
    "put: written": "a manifest or tombstone is durable under its temporary name",
    "put: flushed": "all names beside it are durable, nothing is published",
    "put: created": "a mount without links: the manifest or tombstone has its name, and is empty",
    "put: filled": "a mount without links: it has its name, and is whole, which is not checked",
    "torn: removing": "what a dead process left of a manifest or tombstone is about to be removed, under the lock",
    "commit: put": "the manifest has its name, which is not flushed",
    "commit: metadata put": "layout dcp: `.metadata` has its name, which is not flushed",
    "commit: durable": "the manifest is durable",
    "leftovers: removing": "a checkpoint stands, a file of another save is about to be removed",
    # ---- the copy of a committed checkpoint to its mirror
    "mirror: begun": "nothing of the copy is done, or another process has died while it copied",
    "mirror: shard written": "all of one more shard is written; if it is a file, under a temporary name",
    "mirror: file copied": "one more file has its name in the mirror",
    "mirror: files copied": "all files are in the mirror, its manifest is not",
    "mirror: committed": "the mirror's manifest stands, the local record of that does not",
    # ---- what is left of saves that came to nothing
    "gc: tombstone put": "the tombstone has its name, which is not flushed",
    "gc: nothing removed": "nothing of the save can be published any more, and all of it is there",
    "gc: removing": "one more of its files is about to be removed",
    "retention: delisted": "a tombstone stands for the committed save that goes, and all its files are there",
    "retention: removing": "one more of its files is about to be removed",
    "retention: emptied": "none of its files is left, the tombstone stands",
    "retention: removing directory": "nothing of it is left, its directory is about to be removed",
    "quarantine: renaming": "another checkpoint is loaded, the broken one is about to be renamed",
    "quarantine: renamed": "it has its new name, which is not flushed",
    # ---- a load
    "restore: candidates listed": "`restore_latest` knows which checkpoints it tries, none of them is read",
    "load: manifest read": "the manifest was read and checked",
    "load: index read": "one more rank's index was read and checked",
    "load: foreign structure read": "another library's description of its files was read and checked",
    "load: shard opened": "one more shard is open",
    "load: bytes read": "bytes are in memory, not verified",
    "load: ranges read": "short ranges, whose checksums are not verified, are in their targets",
    "load: passing on": "ranks that need the same bytes are connected, nothing is sent",
    "load: copies verified": "everything is verified, no existing target has changed",
    "load: tensors filled": "all tensors are filled, no object is replaced",
    "load: objects read": "one rank's objects were read and checked",
    "recall: held": "the worker keeps a snapshot for this process, which is not mapped",
    "recall: mapped": "it is mapped, nothing was read",
    "recall: read": "bytes were read from it, which may have been overwritten meanwhile",
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
