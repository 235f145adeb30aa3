"""Every exception that asyncckpt raises.

    AsyncCkptError
    |   arguments, and the process that calls
    +-- ConfigError                  (ValueError)         an argument, setting or environment variable is invalid
    +-- UnsupportedLeafError         (TypeError)          the state dict holds a value that cannot be stored
    |   +-- ShardOutOfRangeError     (ValueError)         a shard is not inside its tensor
    +-- DuplicateNameError           (ValueError)         two paths of the state dict give the same FQN
    +-- OverlappingShardsError       (ValueError)         two shards of a tensor have elements in common
    +-- UnsupportedPathError         (ValueError)         the path is a URL that is not supported here, or no path
    +-- CheckpointerClosedError      (RuntimeError)       the checkpointer was closed
    +-- ForkedError                  (RuntimeError)       the checkpointer was created before a fork
    +-- SignalHandlerError           (RuntimeError)       a signal handler can only be set in the main thread
    +-- DirectoryInUseError          (RuntimeError)       another running training saves to this directory
    +-- UnsupportedPlatformError     (RuntimeError)       not Linux, or a kernel without memfd
    |   a save
    +-- SaveSkippedError             (RuntimeError)       on_busy="skip": no slot is free on some rank
    +-- SlotBusyError                (RuntimeError)       on_busy="error": no slot is free
    +-- SlotTimeoutError             (TimeoutError)       no slot became free in time
    +-- InsufficientMemoryError      (MemoryError)        no memory for the slot, or a limit forbids it
    +-- StagingError                 (RuntimeError)       copying the state into the slot failed
    +-- SnapshotTornError            (RuntimeError)       a tensor was changed while it was being copied
    +-- SaveFailedError              (OSError)            writing or committing failed
    +-- CommitUnknownError           (OSError)            the manifest may or may not be on disk
    +-- CheckpointExistsError        (FileExistsError)    a committed checkpoint is already at the path
    +-- MirrorError                  (RuntimeError)       a committed checkpoint was not copied to its mirror: mirror
    +-- PendingSavesError            (RuntimeError)       on_error="raise": earlier saves failed
    +-- WaitTimeoutError             (TimeoutError)       wait() reached its timeout before all saves ended
    +-- CommitTimeoutError           (TimeoutError)       the checkpoint was not committed in time
    +-- PlanTimeoutError             (TimeoutError)       some ranks did not join the meeting in time
    +-- RanksDisagreeError           (RuntimeError)       the ranks of one save differ in path, step, world or plan
    +-- ReplicaMismatchError         (ValueError)         a replicated tensor differs between ranks
    +-- ReentrantCallError           (RuntimeError)       a blocking call from a callback would wait for itself
    |   the worker
    +-- WorkerUnavailableError       (ConnectionError)    it cannot be reached, has died, or hangs
    |   +-- ProtocolVersionError                          it uses another version of the protocol
    +-- EndpointError                (OSError)            the endpoint's directory is not private, or is in use
    +-- ProtocolError                (ValueError)         a message violates the protocol
    +-- UnknownSaveError             (LookupError)        the worker has no such session, save or slot
    |   a checkpoint that is read
    +-- CheckpointNotFoundError      (FileNotFoundError)  there is no checkpoint at the path
    +-- CheckpointNotCommittedError  (FileNotFoundError)  a save was begun at the path and never committed
    +-- SnapshotUnavailableError     (LookupError)        source="memory": the worker does not hold the snapshot
    +-- CorruptCheckpointError       (ValueError)         bytes differ from those that were saved
    |   +-- NoSoundCheckpointError                        restore_latest(): no checkpoint of the directory is intact
    +-- UnsupportedFormatError       (ValueError)         a newer version of the format, or an unknown format
    +-- MissingKeysError             (RuntimeError)       keys of the target are not in the checkpoint
    +-- UnmatchedTensorsError        (ValueError)         an export lacks tensors of the model, or has no place for some
    +-- ShapeMismatchError           (ValueError)         the target's tensor or list has another shape or length
    +-- LeafTypeMismatchError        (TypeError)          a tensor where an object is expected, or the reverse
    +-- AliasMismatchError           (ValueError)         one memory of the target would have to hold two values
    +-- PickledLeafError             (ValueError)         unpickling a leaf is not allowed, or failed
    +-- StateLoadError               (RuntimeError)       load_state_dict() of an object in the target raised
    +-- PerRankUnavailableError      (LookupError)        the checkpoint has no such value for the rank that reads
    +-- ReshardError                 (RuntimeError)       values of ranks cannot be brought to another world size
    +-- SharedLoadError              (RuntimeError)       a collective load failed on another rank

The builtin in parentheses is the second base class. The names in `fields` of a class are attributes of its instances;
one that was not given is None. Between processes an error is sent as code, text and fields (`to_wire`, `from_wire`);
nothing is pickled.
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
    """An argument, setting or environment variable is invalid: `field` is its name, `value` its value."""


class UnsupportedPathError(AsyncCkptError, ValueError, code="unsupported_path", fields=("path",)):
    """`path` is a URL that is not supported here, is empty, or holds a NUL byte."""


class CheckpointerClosedError(AsyncCkptError, RuntimeError, code="closed"):
    """A method was called after `close()`."""


class ForkedError(AsyncCkptError, RuntimeError, code="forked"):
    """The checkpointer was created, or an object store was used, before this process was forked."""


class UnsupportedPlatformError(AsyncCkptError, RuntimeError, code="unsupported_platform"):
    """The system is not Linux, or its kernel lacks a system call that asyncckpt needs."""


class DirectoryInUseError(AsyncCkptError, RuntimeError, code="directory_in_use", fields=("path", "pid", "host")):
    """Another running training, process `pid` on `host`, saves to `path`; only one training at a time may."""


class SignalHandlerError(AsyncCkptError, RuntimeError, code="signal_handler", fields=("signal",)):
    """A handler of `signal` was requested outside the main thread; Python sets handlers only in the main thread."""


class SaveSkippedError(AsyncCkptError, RuntimeError, code="save_skipped", fields=("save_id", "step", "path", "rank")):
    """`on_busy="skip"`: an earlier save still holds every slot of `rank`; None means this rank."""


class SlotBusyError(AsyncCkptError, RuntimeError, code="slot_busy", fields=("save_id", "step", "path")):
    """`on_busy="error"`: an earlier save still holds every slot."""


class SlotTimeoutError(
    AsyncCkptError, TimeoutError, code="slot_timeout", fields=("save_id", "step", "path", "timeout_s")
):
    """No slot became free, or an earlier save did not end on all ranks, within `slot_timeout_s`."""


class InsufficientMemoryError(
    AsyncCkptError, MemoryError, code="insufficient_memory", fields=("nbytes", "available", "limit")
):
    """A slot of `nbytes` does not fit: `available` bytes are left, or `limit` forbids it."""


class StagingError(AsyncCkptError, RuntimeError, code="staging", fields=("save_id", "step", "path")):
    """Copying the state into the slot failed; `__cause__` is the error of the copy."""


class SnapshotTornError(AsyncCkptError, RuntimeError, code="torn", fields=("fqn", "save_id", "step", "path")):
    """Tensor `fqn` was changed after `save()` had returned and before its copy ended; nothing was published.

    Possible with `staging="overlap"`, if something else changes it than an attached optimizer, whose `step()` waits.
    """


class SaveFailedError(
    AsyncCkptError,
    OSError,
    code="save_failed",
    fields=("code", "rank", "path", "detail", "save_id", "step", "missing_ranks"),
):
    """Writing or committing failed; nothing was published.

    Attributes:
        code: The name of an errno, such as "ENOSPC", or a code of asyncckpt, such as "coverage" or "leader_lost".
        rank: The rank that failed, if it is one.
        detail: The cause as text.
        missing_ranks: With code "leader_lost": as in `CommitUnknownError`.
    """


class CommitUnknownError(
    AsyncCkptError,
    OSError,
    code="commit_unknown",
    fields=("code", "path", "detail", "save_id", "step", "missing_ranks"),
):
    """It is not known whether the manifest is on disk: publishing it failed, or a dead worker may have published it.

    Look at `path` again later.

    Attributes:
        code: The name of an errno, or a code of asyncckpt.
        detail: The cause as text.
        missing_ranks: With code "leader_lost" (the worker that commits does not answer): the ranks for which that
            worker waited when it last reported; if it never did, the ranks of the other nodes.
    """


class CheckpointExistsError(
    AsyncCkptError, FileExistsError, code="checkpoint_exists", fields=("path", "save_id", "existing_save_id")
):
    """A committed checkpoint, of save `existing_save_id`, is already at `path`; it was left unchanged."""


class MirrorError(AsyncCkptError, RuntimeError, code="mirror", fields=("save_id", "path", "mirror", "detail")):
    """A committed checkpoint was not copied to its mirror, or this process cannot know. `path` holds it as before."""


class PendingSavesError(AsyncCkptError, RuntimeError, code="pending_saves", fields=("errors",)):
    """`on_error="raise"`: earlier saves failed and nobody read their futures; `errors` are their errors, a list."""


class WaitTimeoutError(AsyncCkptError, TimeoutError, code="wait_timeout", fields=("save_ids", "timeout_s")):
    """`wait()` reached its timeout; `save_ids` are still pending."""


class CommitTimeoutError(
    AsyncCkptError, TimeoutError, code="commit_timeout", fields=("missing_ranks", "timeout_s", "save_id", "path")
):
    """The checkpoint was not committed within `commit_timeout_s`; the files of `missing_ranks` were not complete."""


class PlanTimeoutError(AsyncCkptError, TimeoutError, code="plan_timeout", fields=("missing_ranks", "timeout_s")):
    """`missing_ranks` did not join the meeting, in which all ranks agree on a plan, within `plan_timeout_s`."""


class RanksDisagreeError(
    AsyncCkptError, RuntimeError, code="ranks_disagree", fields=("detail", "save_id", "path", "ranks")
):
    """The ranks of one save differ in path, step, world or plan; nothing was published.

    Also raised by a load: the ranks found different saves at one path, because one replaced the other meanwhile.
    """


class ReplicaMismatchError(
    AsyncCkptError, ValueError, code="replica_mismatch", fields=("fqn", "ranks", "save_id", "path")
):
    """Tensor `fqn` was treated as replicated, but differs between `ranks`; nothing was published."""


class ReentrantCallError(AsyncCkptError, RuntimeError, code="reentrant"):
    """A callback of a future called a method that would wait for the callback's own thread.

    Also raised when a second save uses a `dcp.StorageWriter` before its first save has ended.
    """


class WorkerUnavailableError(AsyncCkptError, ConnectionError, code="worker_unavailable", fields=("endpoint", "detail")):
    """The worker cannot be reached, has died, or does not answer.

    The save may be committed nevertheless: a worker that hangs may go on, and one that died may have committed before.
    """


class ProtocolVersionError(
    WorkerUnavailableError, code="protocol_version", fields=("endpoint", "detail", "ours", "theirs")
):
    """The worker uses version `theirs` of the protocol, this process version `ours`."""


class EndpointError(AsyncCkptError, OSError, code="endpoint", fields=("endpoint", "path", "detail")):
    """The endpoint's directory belongs to another user or is accessible to others, or the endpoint is in use."""


class ProtocolError(AsyncCkptError, ValueError, code="protocol", fields=("detail",)):
    """A message or request violates the protocol; it was ignored."""


class UnknownSaveError(AsyncCkptError, LookupError, code="unknown_save", fields=("detail", "save_id")):
    """The worker knows no such session, save or slot."""


class CheckpointNotFoundError(AsyncCkptError, FileNotFoundError, code="not_found", fields=("path",)):
    """There is no directory at `path`, or no file of a checkpoint in it."""


class CheckpointNotCommittedError(AsyncCkptError, FileNotFoundError, code="not_committed", fields=("path",)):
    """`path` holds files of a save, but no manifest: the save was begun and never committed."""


class SnapshotUnavailableError(
    AsyncCkptError, LookupError, code="snapshot_unavailable", fields=("path", "save_id", "missing_ranks", "detail")
):
    """`source="memory"`: no worker holds the snapshot, or the parts of `missing_ranks`; `detail` is the reason."""


class CorruptCheckpointError(
    AsyncCkptError, ValueError, code="corrupt", fields=("path", "file", "fqn", "offset", "nbytes", "detail")
):
    """`nbytes` bytes at `offset` of `file`, of tensor `fqn`, differ from what was saved."""


class NoSoundCheckpointError(
    CorruptCheckpointError,
    code="no_sound_checkpoint",
    fields=("path", "file", "fqn", "offset", "nbytes", "detail", "tried"),
):
    """No committed checkpoint in `path` is intact; `tried` has one text for each, from the newest to the oldest."""


class UnsupportedFormatError(
    AsyncCkptError, ValueError, code="unsupported_format", fields=("path", "found", "supported")
):
    """The checkpoint has a newer version of the format, fields that this version does not know, or no known format."""


class MissingKeysError(AsyncCkptError, RuntimeError, code="missing_keys", fields=("path", "keys")):
    """The checkpoint lacks keys of the target; `keys` are all of them.

    A key may name a module, an optimizer or a part of the target of which nothing was saved.
    """


class UnmatchedTensorsError(AsyncCkptError, ValueError, code="unmatched_tensors", fields=("path", "missing", "unused")):
    """Tensors of a checkpoint and those of the model that it is exported for do not correspond; nothing was written.

    Attributes:
        missing: Names that the model, or a `TensorRule`, needs and the checkpoint lacks.
        unused: Names in the checkpoint for which the model has no place.
    """


class ShapeMismatchError(AsyncCkptError, ValueError, code="shape_mismatch", fields=("path", "fqn", "saved", "wanted")):
    """A tensor was saved with another shape than the target has, or a list with another length; nothing was changed.

    Also raised when a load hook of a module returns an entry of another shape; then values of that module may have
    changed.

    Attributes:
        fqn: The tensor or list.
        saved, wanted: The shape in the checkpoint and in the target; of a list, its length, as a list of one number.
    """


class LeafTypeMismatchError(
    AsyncCkptError, TypeError, code="leaf_type_mismatch", fields=("path", "fqn", "saved", "wanted")
):
    """The types of a leaf in checkpoint and target do not fit together; nothing was changed.

    One is a tensor and the other an object or container, or the target's dtype cannot hold the saved values, such as an
    integer dtype for floating point numbers.
    """


class AliasMismatchError(AsyncCkptError, ValueError, code="alias_mismatch", fields=("path", "fqn", "other_fqn")):
    """One memory, container or object of the target has two names, under which different values were saved.

    Nothing was changed. Exception: two tensors of the target are different views of one memory; then the tensors of
    the target have been filled.
    """


class PickledLeafError(AsyncCkptError, ValueError, code="pickled_leaf", fields=("path", "fqn", "type_name", "detail")):
    """Leaf `fqn` was stored as a pickle, and unpickling is not allowed, or failed; `detail` is the reason."""


class StateLoadError(AsyncCkptError, RuntimeError, code="state_load", fields=("path", "fqn", "type_name", "detail")):
    """`load_state_dict()` of an object in the target raised, or the class of a new tensor; `__cause__` is its error.

    Tensors and plain objects of the target have been filled; objects that come later in the target have not got their
    states. If a module with load hooks is filled first, because its hooks decide which keys are missing, then nothing
    after that module has been filled.
    """


class PerRankUnavailableError(
    AsyncCkptError, LookupError, code="per_rank_unavailable", fields=("path", "keys", "saved", "wanted")
):
    """The values at `keys` cannot be given to this rank.

    They are `PerRank` values of other ranks, or shards of a tensor subclass that differ between ranks in the class, in
    its context, or in a component that is not sharded.

    `saved` and `wanted` are the world sizes of the save and of the load.
    """


class ReshardError(AsyncCkptError, RuntimeError, code="reshard", fields=("path", "fqn", "saved", "wanted", "detail")):
    """`reshard` of the `PerRank` at `fqn` raised, or its result does not fit the target; nothing was changed.

    `saved` and `wanted` are the world sizes of the save and of the load; `__cause__` is the error of `reshard`. A
    function for `reshard` raises it without `path` and `fqn` if it cannot reshard what was saved.
    """


class SharedLoadError(AsyncCkptError, RuntimeError, code="shared_load", fields=("path", "rank", "detail")):
    """A load of all ranks together (`redundant_reads="broadcast"`, `restore_latest`) failed on another rank, `rank`.

    `rank` is None if the ranks could no longer communicate.
    """
