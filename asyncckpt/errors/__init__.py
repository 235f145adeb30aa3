"""Every exception that asyncckpt raises, and the code under which each crosses a process boundary.

    AsyncCkptError
    |   the caller's arguments
    +-- ConfigError                  (ValueError)         a field or argument has no such value
    +-- UnsupportedLeafError         (TypeError)          the state dict holds something that cannot be stored
    |   +-- ShardOutOfRangeError     (ValueError)         a shard does not lie in its tensor: fqn, boxes
    +-- DuplicateNameError           (ValueError)         two paths of the state dict join to one FQN
    +-- OverlappingShardsError       (ValueError)         two shards of a tensor share elements: fqn, boxes
    +-- UnsupportedPathError         (ValueError)         the path is a URL or otherwise no directory path
    +-- CheckpointerClosedError      (RuntimeError)       the checkpointer was closed
    +-- ForkedError                  (RuntimeError)       the checkpointer was inherited by a forked child
    +-- SignalHandlerError           (RuntimeError)       a signal handler was asked for outside the main thread
    +-- DirectoryInUseError          (RuntimeError)       another training is alive in this directory: pid, host
    +-- UnsupportedPlatformError     (RuntimeError)       not Linux, or a kernel without memfd
    |   one save
    +-- SaveSkippedError             (RuntimeError)       on_busy="skip", on this rank or another
    +-- SlotBusyError                (RuntimeError)       on_busy="error": no slot is free
    +-- SlotTimeoutError             (TimeoutError)       no slot became free in time
    +-- InsufficientMemoryError      (MemoryError)        the slot does not fit into memory or limit
    +-- StagingError                 (RuntimeError)       copying into the slot failed
    +-- SnapshotTornError            (RuntimeError)       a tensor changed while it was being copied: fqn
    +-- SaveFailedError              (OSError)            writing or committing failed: code, rank, path, detail
    +-- CommitUnknownError           (OSError)            the manifest may or may not be on disk
    +-- CheckpointExistsError        (FileExistsError)    a committed checkpoint is already there
    +-- PendingSavesError            (RuntimeError)       on_error="raise": the errors nobody fetched, as a list
    +-- WaitTimeoutError             (TimeoutError)       wait() ended with saves still pending
    +-- CommitTimeoutError           (TimeoutError)       not committed in time: missing_ranks
    +-- PlanTimeoutError             (TimeoutError)       ranks did not come to the first exchange: missing_ranks
    +-- RanksDisagreeError           (RuntimeError)       the ranks of one save differ in path, step, world or plan
    +-- ReplicaMismatchError         (ValueError)         what was taken for a replica differs: fqn, ranks
    +-- ReentrantCallError           (RuntimeError)       save() or close() from a callback in the client thread
    |   the worker
    +-- WorkerUnavailableError       (ConnectionError)    it cannot be reached, has died, or hangs
    |   +-- ProtocolVersionError                          it speaks another protocol version
    +-- EndpointError                (OSError)            the endpoint's directory is not safe to use, or is taken
    +-- ProtocolError                (ValueError)         a message that breaks the protocol
    +-- UnknownSaveError             (LookupError)        the worker has no such session, save or slot
    |   what is on disk or in a slot
    +-- CheckpointNotFoundError      (FileNotFoundError)  nothing is there
    +-- CheckpointNotCommittedError  (FileNotFoundError)  files are there, but no manifest: never committed
    +-- SnapshotUnavailableError     (LookupError)        source="memory": the worker does not hold it: missing_ranks
    +-- CorruptCheckpointError       (ValueError)         bytes differ from what was staged: file, fqn, offset
    |   +-- NoSoundCheckpointError                        restore_latest(): not one of a directory's verifies: tried
    +-- UnsupportedFormatError       (ValueError)         a newer format version, or no checkpoint of ours
    +-- MissingKeysError             (RuntimeError)       keys are absent: all of them
    +-- ShapeMismatchError           (ValueError)         fqn, saved, wanted
    +-- LeafTypeMismatchError        (TypeError)          a tensor where an object is wanted, or the reverse
    +-- AliasMismatchError           (ValueError)         one target tensor, two saved ones: fqn, other_fqn
    +-- PickledLeafError             (ValueError)         a pickle that may not be unpickled, or does not unpickle
    +-- StateLoadError               (RuntimeError)       load_state_dict() of an object in the target raised
    +-- PerRankUnavailableError      (LookupError)        values of other ranks than the reader: keys, saved, wanted
    +-- SharedLoadError              (RuntimeError)       a load of all ranks together: another one failed: rank, detail

An error travels as `code`, text and fields (`to_wire`, `from_wire`); nothing is pickled. The facts named in
`fields` are attributes of the instance; one that was not given is None.
"""

from __future__ import annotations

from asyncckpt.errors.leaves import DuplicateNameError as DuplicateNameError
from asyncckpt.errors.leaves import OverlappingShardsError as OverlappingShardsError
from asyncckpt.errors.leaves import ShardOutOfRangeError as ShardOutOfRangeError
from asyncckpt.errors.leaves import UnsupportedLeafError as UnsupportedLeafError
from asyncckpt.errors.root import ERRORS_BY_CODE as ERRORS_BY_CODE
from asyncckpt.errors.root import AsyncCkptError as AsyncCkptError
from asyncckpt.errors.root import from_wire as from_wire
from asyncckpt.errors.root import to_wire as to_wire


class ConfigError(AsyncCkptError, ValueError, code="config", fields=("field", "value")):
    """A configuration field, argument or environment variable has an impossible value."""


class UnsupportedPathError(AsyncCkptError, ValueError, code="unsupported_path", fields=("path",)):
    """The path is a URL, empty, or holds a NUL byte."""


class CheckpointerClosedError(AsyncCkptError, RuntimeError, code="closed"):
    """A method was called after `close()`."""


class ForkedError(AsyncCkptError, RuntimeError, code="forked"):
    """The checkpointer was made in a parent process; a forked child must make its own."""


class UnsupportedPlatformError(AsyncCkptError, RuntimeError, code="unsupported_platform"):
    """This is not Linux, or its kernel lacks what asyncckpt needs."""


class DirectoryInUseError(AsyncCkptError, RuntimeError, code="directory_in_use", fields=("path", "pid", "host")):
    """Another live training saves to this directory: process `pid` on `host`. Only one at a time may."""


class SignalHandlerError(AsyncCkptError, RuntimeError, code="signal_handler", fields=("signal",)):
    """A signal handler was asked for outside the main thread, where Python sets none."""


class SaveSkippedError(AsyncCkptError, RuntimeError, code="save_skipped", fields=("save_id", "step", "path", "rank")):
    """`on_busy="skip"`: an earlier save still holds every slot of `rank` (of this one, if that is None)."""


class SlotBusyError(AsyncCkptError, RuntimeError, code="slot_busy", fields=("save_id", "step", "path")):
    """`on_busy="error"`: an earlier save still holds every slot."""


class SlotTimeoutError(
    AsyncCkptError, TimeoutError, code="slot_timeout", fields=("save_id", "step", "path", "timeout_s")
):
    """No slot became free within `slot_timeout_s`."""


class InsufficientMemoryError(
    AsyncCkptError, MemoryError, code="insufficient_memory", fields=("nbytes", "available", "limit")
):
    """A slot of `nbytes` does not fit: `available` bytes are left, or `limit` forbids it."""


class StagingError(AsyncCkptError, RuntimeError, code="staging", fields=("save_id", "step", "path")):
    """Copying the state into the slot failed; the cause is chained."""


class SnapshotTornError(AsyncCkptError, RuntimeError, code="torn", fields=("fqn", "save_id", "step", "path")):
    """Overlap: `fqn` was written to between `save()` and the end of its copy, past the hooks; nothing was published."""


class SaveFailedError(
    AsyncCkptError,
    OSError,
    code="save_failed",
    fields=("code", "rank", "path", "detail", "save_id", "step", "missing_ranks"),
):
    """Writing or committing failed. `code` is an errno name such as "ENOSPC", or a word of ours.

    `missing_ranks`: of code "leader_lost", as of `CommitUnknownError`.
    """


class CommitUnknownError(
    AsyncCkptError,
    OSError,
    code="commit_unknown",
    fields=("code", "path", "detail", "save_id", "step", "missing_ranks"),
):
    """Publishing the manifest failed so that nobody knows whether it is on disk. Look again later.

    `missing_ranks`: of code "leader_lost", whom the worker that commits waited for when it was heard last, or, if it
    had not said that, the ranks of the other nodes.
    """


class CheckpointExistsError(
    AsyncCkptError, FileExistsError, code="checkpoint_exists", fields=("path", "save_id", "existing_save_id")
):
    """A committed checkpoint is already at this path; it was left untouched."""


class PendingSavesError(AsyncCkptError, RuntimeError, code="pending_saves", fields=("errors",)):
    """`on_error="raise"`: the errors of saves whose futures nobody looked at, in `errors`."""


class WaitTimeoutError(AsyncCkptError, TimeoutError, code="wait_timeout", fields=("save_ids", "timeout_s")):
    """`wait()` reached its timeout; `save_ids` are still pending."""


class CommitTimeoutError(
    AsyncCkptError, TimeoutError, code="commit_timeout", fields=("missing_ranks", "timeout_s", "save_id", "path")
):
    """The checkpoint was not committed within `commit_timeout_s`; `missing_ranks` had not delivered."""


class PlanTimeoutError(AsyncCkptError, TimeoutError, code="plan_timeout", fields=("missing_ranks", "timeout_s")):
    """The ranks did not meet within `plan_timeout_s` for the exchange before the first save."""


class RanksDisagreeError(
    AsyncCkptError, RuntimeError, code="ranks_disagree", fields=("detail", "save_id", "path", "ranks")
):
    """The ranks of one save differ in path, step, world or plan; nothing was published.

    Or those of one load have found different saves, one of which took the place of the other meanwhile.
    """


class ReplicaMismatchError(
    AsyncCkptError, ValueError, code="replica_mismatch", fields=("fqn", "ranks", "save_id", "path")
):
    """A tensor that was taken for a replica differs between the ranks that hold it; nothing was published."""


class ReentrantCallError(AsyncCkptError, RuntimeError, code="reentrant"):
    """A future's callback called what would wait for the very thread that it runs in; or one `dcp.StorageWriter` was
    asked for two saves at once."""


class WorkerUnavailableError(AsyncCkptError, ConnectionError, code="worker_unavailable", fields=("endpoint", "detail")):
    """The worker cannot be reached, has died, or does not answer.

    One that only hung may still commit the save, and one that has died may have done so just before.
    """


class ProtocolVersionError(
    WorkerUnavailableError, code="protocol_version", fields=("endpoint", "detail", "ours", "theirs")
):
    """The worker speaks another version of the protocol."""


class EndpointError(AsyncCkptError, OSError, code="endpoint", fields=("endpoint", "path", "detail")):
    """The endpoint's directory belongs to somebody else or is open to others, or the endpoint is taken."""


class ProtocolError(AsyncCkptError, ValueError, code="protocol", fields=("detail",)):
    """A message or request that breaks the protocol; it was ignored."""


class UnknownSaveError(AsyncCkptError, LookupError, code="unknown_save", fields=("detail", "save_id")):
    """The worker knows no such session, save or slot."""


class CheckpointNotFoundError(AsyncCkptError, FileNotFoundError, code="not_found", fields=("path",)):
    """There is no directory, or nothing of a checkpoint in it."""


class CheckpointNotCommittedError(AsyncCkptError, FileNotFoundError, code="not_committed", fields=("path",)):
    """The directory holds no valid commit: a save was begun there and never committed."""


class SnapshotUnavailableError(
    AsyncCkptError, LookupError, code="snapshot_unavailable", fields=("path", "save_id", "missing_ranks", "detail")
):
    """`source="memory"`: no worker holds this snapshot, or not the parts of `missing_ranks`; `detail` says why."""


class CorruptCheckpointError(
    AsyncCkptError, ValueError, code="corrupt", fields=("path", "file", "fqn", "offset", "nbytes", "detail")
):
    """What is stored differs from what was staged. `offset` and `nbytes` say which bytes of `file`."""


class NoSoundCheckpointError(
    CorruptCheckpointError,
    code="no_sound_checkpoint",
    fields=("path", "file", "fqn", "offset", "nbytes", "detail", "tried"),
):
    """Not one of the committed checkpoints in `path` verifies; `tried` has one text for each, the newest first."""


class UnsupportedFormatError(
    AsyncCkptError, ValueError, code="unsupported_format", fields=("path", "found", "supported")
):
    """A format version newer than this package, or required fields that it does not know."""


class MissingKeysError(AsyncCkptError, RuntimeError, code="missing_keys", fields=("path", "keys")):
    """The checkpoint lacks keys of the target, or all of a module, optimizer or named part; `keys` lists every one."""


class ShapeMismatchError(AsyncCkptError, ValueError, code="shape_mismatch", fields=("path", "fqn", "saved", "wanted")):
    """A tensor was saved with another shape than the target has, or a list with another length; nothing was changed.

    Or a load hook of a module made an entry of another shape; then values of that module may have changed.
    `saved`, `wanted`: shapes, or lists of one length each.
    """


class LeafTypeMismatchError(
    AsyncCkptError, TypeError, code="leaf_type_mismatch", fields=("path", "fqn", "saved", "wanted")
):
    """A leaf is a tensor on one side and an object or container on the other, or a tensor of another kind of numbers.

    Nothing was changed.
    """


class AliasMismatchError(AsyncCkptError, ValueError, code="alias_mismatch", fields=("path", "fqn", "other_fqn")):
    """One memory, container or object of the target has two names, and cannot hold what was saved under both.

    Nothing was changed, except for different views of one memory: then the target's tensors have been filled.
    """


class PickledLeafError(AsyncCkptError, ValueError, code="pickled_leaf", fields=("path", "fqn", "type_name", "detail")):
    """A leaf was stored as a pickle, and unpickling was not allowed, or failed (`detail` says how)."""


class StateLoadError(AsyncCkptError, RuntimeError, code="state_load", fields=("path", "fqn", "type_name", "detail")):
    """`load_state_dict()` of an object in the target raised; the cause is chained.

    Tensors and plain objects of the target have been filled. Objects that come later in the target have not been given
    their states. If load hooks of a module decide what is missing, nothing after that module has been filled.
    """


class PerRankUnavailableError(
    AsyncCkptError, LookupError, code="per_rank_unavailable", fields=("path", "keys", "saved", "wanted")
):
    """Values of other ranks than the reader; `keys` lists all. `saved`, `wanted`: the world sizes of both."""


class SharedLoadError(AsyncCkptError, RuntimeError, code="shared_load", fields=("path", "rank", "detail")):
    """A load of all ranks together (`redundant_reads="broadcast"`, `restore_latest`) failed on another rank, `rank`.

    None: the ranks lost each other.
    """
