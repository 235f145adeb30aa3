"""Every exception that asyncckpt raises, and the code under which each crosses a process boundary.

    AsyncCkptError
    |   the caller's arguments
    +-- ConfigError                  (ValueError)         a field or argument has no such value
    +-- UnsupportedLeafError         (TypeError)          the state dict holds something that cannot be stored
    +-- DuplicateNameError           (ValueError)         two paths of the state dict join to one FQN
    +-- UnsupportedPathError         (ValueError)         the path is a URL or otherwise no directory path
    +-- CheckpointerClosedError      (RuntimeError)       the checkpointer was closed
    +-- ForkedError                  (RuntimeError)       the checkpointer was inherited by a forked child
    +-- UnsupportedPlatformError     (RuntimeError)       not Linux, or a kernel without memfd
    |   one save
    +-- SaveSkippedError             (RuntimeError)       on_busy="skip": nothing was staged
    +-- SlotBusyError                (RuntimeError)       on_busy="error": no slot is free
    +-- SlotTimeoutError             (TimeoutError)       no slot became free in time
    +-- InsufficientMemoryError      (MemoryError)        the slot does not fit into memory or limit
    +-- StagingError                 (RuntimeError)       copying into the slot failed
    +-- SaveFailedError              (OSError)            writing or committing failed: code, rank, path, detail
    +-- CommitUnknownError           (OSError)            the manifest may or may not be on disk
    +-- CheckpointExistsError        (FileExistsError)    a committed checkpoint is already there
    +-- PendingSavesError            (RuntimeError)       on_error="raise": the errors nobody fetched, as a list
    +-- WaitTimeoutError             (TimeoutError)       wait() ended with saves still pending
    +-- CommitTimeoutError           (TimeoutError)       not committed in time: missing_ranks
    +-- ReentrantCallError           (RuntimeError)       save() or close() from a callback in the client thread
    |   the worker
    +-- WorkerUnavailableError       (ConnectionError)    it cannot be reached, has died, or hangs
    |   +-- ProtocolVersionError                         it speaks another protocol version
    +-- EndpointError                (OSError)            the endpoint's directory is not safe to use, or is taken
    +-- ProtocolError                (ValueError)         a message that breaks the protocol
    +-- UnknownSaveError             (LookupError)        the worker has no such session, save or slot
    |   what is on disk or in a slot
    +-- CheckpointNotFoundError      (FileNotFoundError)  nothing is there
    +-- CheckpointNotCommittedError  (FileNotFoundError)  files are there, but no manifest: never committed
    +-- CorruptCheckpointError       (ValueError)         bytes differ from what was staged: file, fqn, offset
    +-- UnsupportedFormatError       (ValueError)         a newer format version, or no checkpoint of ours
    +-- MissingKeysError             (RuntimeError)       strict=True and keys are absent: all of them
    +-- ShapeMismatchError           (ValueError)         fqn, saved, wanted
    +-- LeafTypeMismatchError        (TypeError)          a tensor where an object is wanted, or the reverse

An error travels as `code`, text and fields (`to_wire`, `from_wire`); nothing is pickled. The facts named in
`fields` are attributes of the instance; one that was not given is None.
"""

from __future__ import annotations

import copyreg
from collections.abc import Mapping
from typing import Any, ClassVar


class AsyncCkptError(Exception):
    """Root of the tree; raised itself only for an error code that this version does not know."""

    wire_code: ClassVar[str] = "error"
    fields: ClassVar[tuple[str, ...]] = ()

    def __init__(self, message: str, **facts: Any) -> None:
        """Build the error.

        Args:
            message: What happened, to what, what was expected, what to do.
            **facts: Values for the names in `fields`.

        Raises:
            TypeError: A fact that the class does not name.
        """
        super().__init__(message)
        unknown = set(facts) - set(self.fields)
        if unknown:
            raise TypeError(f"{type(self).__name__} has no facts named {sorted(unknown)}")
        self.message = message
        for name in self.fields:
            setattr(self, name, facts.get(name))

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.facts()))

    def facts(self) -> dict[str, Any]:
        """Return the facts as a dict, unset ones left out."""
        return {n: v for n in self.fields if (v := getattr(self, n, None)) is not None}


def _rebuild(cls: type[AsyncCkptError], message: str, facts: dict[str, Any]) -> AsyncCkptError:
    return cls(message, **facts)


copyreg.constructor(_rebuild)


class ConfigError(AsyncCkptError, ValueError):
    """A configuration field, argument or environment variable has an impossible value."""

    wire_code = "config"
    fields = ("field", "value")


class UnsupportedLeafError(AsyncCkptError, TypeError):
    """The state dict holds something that cannot be stored; `leaf` is the path to it."""

    wire_code = "unsupported_leaf"
    fields = ("leaf", "type_name")


class DuplicateNameError(AsyncCkptError, ValueError):
    """Two different paths of the state dict join to the same FQN."""

    wire_code = "duplicate_name"
    fields = ("fqn",)


class UnsupportedPathError(AsyncCkptError, ValueError):
    """The path is a URL, empty, or holds a NUL byte."""

    wire_code = "unsupported_path"
    fields = ("path",)


class CheckpointerClosedError(AsyncCkptError, RuntimeError):
    """A method was called after `close()`."""

    wire_code = "closed"


class ForkedError(AsyncCkptError, RuntimeError):
    """The checkpointer was made in a parent process; a forked child must make its own."""

    wire_code = "forked"


class UnsupportedPlatformError(AsyncCkptError, RuntimeError):
    """This is not Linux, or its kernel lacks what asyncckpt needs."""

    wire_code = "unsupported_platform"


class SaveSkippedError(AsyncCkptError, RuntimeError):
    """`on_busy="skip"`: an earlier save still holds every slot, so nothing was staged."""

    wire_code = "save_skipped"
    fields = ("save_id", "step", "path")


class SlotBusyError(AsyncCkptError, RuntimeError):
    """`on_busy="error"`: an earlier save still holds every slot."""

    wire_code = "slot_busy"
    fields = ("save_id", "step", "path")


class SlotTimeoutError(AsyncCkptError, TimeoutError):
    """No slot became free within `slot_timeout_s`."""

    wire_code = "slot_timeout"
    fields = ("save_id", "step", "path", "timeout_s")


class InsufficientMemoryError(AsyncCkptError, MemoryError):
    """A slot of `nbytes` does not fit: `available` bytes are left, or `limit` forbids it."""

    wire_code = "insufficient_memory"
    fields = ("nbytes", "available", "limit")


class StagingError(AsyncCkptError, RuntimeError):
    """Copying the state into the slot failed; the cause is chained."""

    wire_code = "staging"
    fields = ("save_id", "step", "path")


class SaveFailedError(AsyncCkptError, OSError):
    """Writing or committing failed. `code` is an errno name such as "ENOSPC", or a word of ours."""

    wire_code = "save_failed"
    fields = ("code", "rank", "path", "detail", "save_id", "step")


class CommitUnknownError(AsyncCkptError, OSError):
    """Publishing the manifest failed so that nobody knows whether it is on disk. Look again later."""

    wire_code = "commit_unknown"
    fields = ("code", "path", "detail", "save_id", "step")


class CheckpointExistsError(AsyncCkptError, FileExistsError):
    """A committed checkpoint is already at this path; it was left untouched."""

    wire_code = "checkpoint_exists"
    fields = ("path", "save_id", "existing_save_id")


class PendingSavesError(AsyncCkptError, RuntimeError):
    """`on_error="raise"`: the errors of saves whose futures nobody looked at, in `errors`."""

    wire_code = "pending_saves"
    fields = ("errors",)


class WaitTimeoutError(AsyncCkptError, TimeoutError):
    """`wait()` reached its timeout; `save_ids` are still pending."""

    wire_code = "wait_timeout"
    fields = ("save_ids", "timeout_s")


class CommitTimeoutError(AsyncCkptError, TimeoutError):
    """The checkpoint was not committed within `commit_timeout_s`; `missing_ranks` had not delivered."""

    wire_code = "commit_timeout"
    fields = ("missing_ranks", "timeout_s", "save_id", "path")


class ReentrantCallError(AsyncCkptError, RuntimeError):
    """A future's callback called what would wait for the very thread that it runs in."""

    wire_code = "reentrant"


class WorkerUnavailableError(AsyncCkptError, ConnectionError):
    """The worker cannot be reached, has died, or does not answer."""

    wire_code = "worker_unavailable"
    fields = ("endpoint", "detail")


class ProtocolVersionError(WorkerUnavailableError):
    """The worker speaks another version of the protocol."""

    wire_code = "protocol_version"
    fields = ("endpoint", "detail", "ours", "theirs")


class EndpointError(AsyncCkptError, OSError):
    """The endpoint's directory belongs to somebody else or is open to others, or the endpoint is taken."""

    wire_code = "endpoint"
    fields = ("endpoint", "path", "detail")


class ProtocolError(AsyncCkptError, ValueError):
    """A message or request that breaks the protocol; it was ignored."""

    wire_code = "protocol"
    fields = ("detail",)


class UnknownSaveError(AsyncCkptError, LookupError):
    """The worker knows no such session, save or slot."""

    wire_code = "unknown_save"
    fields = ("detail", "save_id")


class CheckpointNotFoundError(AsyncCkptError, FileNotFoundError):
    """There is no directory, or nothing of a checkpoint in it."""

    wire_code = "not_found"
    fields = ("path",)


class CheckpointNotCommittedError(AsyncCkptError, FileNotFoundError):
    """The directory holds no valid commit: a save was begun there and never committed."""

    wire_code = "not_committed"
    fields = ("path",)


class CorruptCheckpointError(AsyncCkptError, ValueError):
    """What is stored differs from what was staged. `offset` and `nbytes` say which bytes of `file`."""

    wire_code = "corrupt"
    fields = ("path", "file", "fqn", "offset", "nbytes", "detail")


class UnsupportedFormatError(AsyncCkptError, ValueError):
    """A format version newer than this package, or required fields that it does not know."""

    wire_code = "unsupported_format"
    fields = ("path", "found", "supported")


class MissingKeysError(AsyncCkptError, RuntimeError):
    """`strict=True`: keys that were asked for are not in the checkpoint; `keys` lists every one."""

    wire_code = "missing_keys"
    fields = ("path", "keys")


class ShapeMismatchError(AsyncCkptError, ValueError):
    """A tensor was saved with another shape than the target has; nothing was changed."""

    wire_code = "shape_mismatch"
    fields = ("path", "fqn", "saved", "wanted")


class LeafTypeMismatchError(AsyncCkptError, TypeError):
    """A leaf is a tensor on one side and an object or container on the other; nothing was changed."""

    wire_code = "leaf_type_mismatch"
    fields = ("path", "fqn", "saved", "wanted")


def _subclasses(cls: type[AsyncCkptError]) -> list[type[AsyncCkptError]]:
    return [cls] + [s for c in cls.__subclasses__() for s in _subclasses(c)]


ERRORS_BY_CODE: dict[str, type[AsyncCkptError]] = {cls.wire_code: cls for cls in _subclasses(AsyncCkptError)}


def to_wire(error: BaseException) -> dict[str, Any]:
    """Return `error` as code, text and fields: plain values only.

    An exception that is not of our tree becomes the root's code with the type's name in the text.
    """
    if isinstance(error, AsyncCkptError):
        facts = {n: v if isinstance(v, (str, int, float, bool)) else str(v) for n, v in error.facts().items()}
        return {"code": error.wire_code, "text": error.message, "fields": facts}
    return {"code": AsyncCkptError.wire_code, "text": f"{type(error).__name__}: {error}", "fields": {}}


def from_wire(wire: Mapping[str, Any]) -> AsyncCkptError:
    """Rebuild an error from `to_wire`'s dict; facts that this version does not know are dropped."""
    cls = ERRORS_BY_CODE.get(str(wire.get("code")), AsyncCkptError)
    facts = {str(n): v for n, v in dict(wire.get("fields") or {}).items() if n in cls.fields}
    return cls(str(wire.get("text", "")), **facts)
