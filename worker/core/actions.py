"""Actions, the output of the core: values that `service.daemon` performs, at once or as jobs.

`Resources` is called by the core directly, where it needs the result to continue. It never waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from asyncckpt.basics.storage_options import NO_OPTIONS
from asyncckpt.format.names import SaveId
from asyncckpt.protocol.messages import Message
from asyncckpt.protocol.request import SaveRequest
from asyncckpt_worker.core.events import Peer, SaveKey


@dataclass(frozen=True, kw_only=True, slots=True)
class Send:
    """Send a message to a trainer; it may be lost."""

    peer: Peer
    message: Message


@dataclass(frozen=True, kw_only=True, slots=True)
class SendStatus:
    """Add the figures of the process to the core's part of the status report, and send it."""

    peer: Peer
    id: int
    report: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Unwatch:
    """Stop watching the process of a session."""

    session: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AdoptSlot:
    """Open a slot that a trainer still maps after its worker died. A job; its result is SlotAdopted."""

    slot: int
    nbytes: int
    pid: int
    fd: int
    token: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class FreeSlot:
    """Unmap and close a slot that is no longer read or written. A job; its result is SlotFreed."""

    slot: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadSlot:
    """Read the request in a slot. A job; its result is SlotRead."""

    slot: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepare:
    """Create the directory, and check what would make the save fail. A job; its result is Prepared.

    `resumed`: a dead worker may have begun to write the save, or committed it.
    """

    key: SaveKey
    path: str
    step: int | None
    nbytes: int
    umask: int
    fsync: bool
    overwrite: bool
    resumed: bool = False
    storage: Mapping[str, str] = field(default=NO_OPTIONS, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Write:
    """Write one rank's files. A job; its result is Written. `resumed`: as in Prepare. `early`: not sealed yet."""

    key: SaveKey
    slot: int
    generation: int
    request: SaveRequest
    resumed: bool = False
    early: bool = False
    storage: Mapping[str, str] = field(default=NO_OPTIONS, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class CutOff:
    """Stop the Write of a slot that will not be sealed. Performed at once; the Write still ends with Written."""

    slot: int
    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """Publish the manifest of a save whose ranks are all durable. A job; its result is Published."""

    save_id: str
    requests: tuple[SaveRequest, ...]
    results: tuple[Any, ...]
    remote: tuple[int, ...] = ()
    """Ranks whose files were written by another worker."""

    storage: Mapping[str, str] = field(default=NO_OPTIONS, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Remove:
    """Remove the files of a failed save. A job; its result is Removed."""

    save_id: str
    path: str
    storage: Mapping[str, str] = field(default=NO_OPTIONS, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanLineage:
    """Find the next epoch in the parent directory of a path. A job; its result is LineageScanned."""

    run: str
    path: str
    storage: Mapping[str, str] = field(default=NO_OPTIONS, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyToMirror:
    """Copy a committed checkpoint to its mirror. A job; its result is Copied."""

    save_id: SaveId
    path: str
    mirror: str
    storage: Mapping[str, str] = field(default=NO_OPTIONS, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckMirrored:
    """Check whether another worker has copied a checkpoint to its mirror. A job; its result is Copied."""

    save_id: SaveId
    path: str
    mirror: str
    storage: Mapping[str, str] = field(default=NO_OPTIONS, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanUnmirrored:
    """Find the checkpoints in a directory that are still to be copied. A job; its result is UnmirroredFound."""

    root: str
    storage: Mapping[str, str] = field(default=NO_OPTIONS, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Relay:
    """Send a message to another worker; it may be lost. `route`: address of the follower; b"": the leader of `run`."""

    run: str
    route: bytes
    message: Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Log:
    """Write a log record. `count`: name of a counter of the status report, which is incremented."""

    level: str
    text: str
    save_id: str | None = None
    session: str | None = None
    count: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogFault:
    """Log a bug in the worker. Performed at once; its result is InternalFault of `save_id`."""

    save_id: str
    error: Exception


@dataclass(frozen=True, kw_only=True, slots=True)
class Draining:
    """Notify observers that a drain has begun."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exit:
    """End the process. `complete`: no save is unfinished."""

    complete: bool
    reason: str


Action = (
    Send
    | SendStatus
    | Unwatch
    | AdoptSlot
    | FreeSlot
    | ReadSlot
    | Prepare
    | Write
    | CutOff
    | Commit
    | Remove
    | ScanLineage
    | CopyToMirror
    | CheckMirrored
    | ScanUnmirrored
    | Relay
    | Log
    | LogFault
    | Draining
    | Exit
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaderAddress:
    """Address of the worker that leads a run, and the keys of the run."""

    run: str
    address: str
    server_public: str
    client_public: str
    client_secret: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Listener:
    """Address at which this worker listens for followers, and its key pair."""

    address: str
    public: str
    secret: str


class Resources(Protocol):
    """Calls of the core into the process, in the thread of the control loop."""

    def watch(self, session: str, pid: int, pid_start: int) -> bool:
        """Watch a process.

        Returns:
            False if there is no such process with that start time.

        Raises:
            AsyncCkptError: The process cannot be watched.
        """

    def create_slot(self, number: int, nbytes: int, *, populate: bool) -> tuple[int, bytes]:
        """Check the available memory and create a memfd; return its descriptor and token.

        Raises:
            InsufficientMemoryError: There is not enough memory.
            AsyncCkptError: The system call failed.
        """

    def listen(self, port: int, secret: str) -> Listener:
        """Listen for followers. `port`: 0 is the configured one. `secret`: secret key to use; "" creates a key pair.

        Raises:
            AsyncCkptError: The port is in use, or this machine does not have the address.
        """

    def connect(self, leader: LeaderAddress) -> None:
        """Connect to the worker that leads a run.

        Raises:
            AsyncCkptError: The connection cannot be created.
        """

    def disconnect(self, run: str) -> None:
        """Close the connection of a followed run, if there is one."""
