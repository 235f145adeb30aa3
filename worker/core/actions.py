"""Actions of the core, as values: `service.daemon` performs them at once, or as jobs.

`Resources`, which never waits, supplies what the core needs before it can continue: a watch, a slot, a socket.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from asyncckpt.protocol.messages import Message
from asyncckpt.protocol.request import SaveRequest
from asyncckpt_worker.core.events import Peer, SaveKey


@dataclass(frozen=True, kw_only=True, slots=True)
class Send:
    """Send a message; it may get lost."""

    peer: Peer
    message: Message


@dataclass(frozen=True, kw_only=True, slots=True)
class SendStatus:
    """Complete the core's part of the status report with the process's figures, and send it."""

    peer: Peer
    id: int
    report: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Unwatch:
    """The session has ended."""

    session: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AdoptSlot:
    """Open a slot that a trainer still holds after its worker died. Job; answered by SlotCreated."""

    slot: int
    nbytes: int
    pid: int
    fd: int
    token: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class FreeSlot:
    """Unmap and close a slot that is no longer read or written. Job; answered by SlotFreed."""

    slot: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadSlot:
    """Read the sealed request. Job; answered by SlotRead."""

    slot: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepare:
    """Make the directory and look for what would make the save fail. Job; answered by Prepared.

    `resumed`: another worker may have begun to write, or have committed it, and is dead.
    """

    key: SaveKey
    path: str
    step: int | None
    nbytes: int
    umask: int
    fsync: bool
    overwrite: bool
    resumed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Write:
    """Write one rank's files. Job; answered by Written. `resumed`: as of Prepare. `early`: it is not sealed yet."""

    key: SaveKey
    slot: int
    generation: int
    request: SaveRequest
    resumed: bool = False
    early: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class CutOff:
    """Stop the Write of what will never be sealed. Performed at once; the Write is answered as ever."""

    slot: int
    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """Publish the manifest of a save whose ranks are all durable. Job; answered by Published."""

    save_id: str
    requests: tuple[SaveRequest, ...]
    results: tuple[Any, ...]
    remote: tuple[int, ...] = ()
    """Ranks whose files another worker has written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remove:
    """Remove the files of a save that failed after a rank had begun to write. Job; answered by Removed."""

    save_id: str
    path: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanLineage:
    """Find the next epoch in the parent directory of a path. Job; answered by LineageScanned."""

    run: str
    path: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Relay:
    """Send a message to another worker; it may get lost. `route`: of the follower; b"": to the leader of `run`."""

    run: str
    route: bytes
    message: Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Log:
    """A line of the log. `count` names a counter of the status report that goes up by one."""

    level: str
    text: str
    save_id: str | None = None
    session: str | None = None
    count: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Our own code has failed beside the event that was handled. Log it; answered at once by Broken of `save_id`."""

    save_id: str
    error: Exception


@dataclass(frozen=True, kw_only=True, slots=True)
class Exit:
    """End the process. `complete`: no save was left unfinished."""

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
    | Relay
    | Log
    | Fault
    | Exit
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """Where the worker that leads a run listens, and the keys of the run."""

    run: str
    address: str
    server_public: str
    client_public: str
    client_secret: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Listener:
    """Where this worker listens for followers, and its key pair."""

    address: str
    public: str
    secret: str


class Resources(Protocol):
    """Performed in the thread of the control loop."""

    def watch(self, session: str, pid: int, pid_start: int) -> bool:
        """Watch a process; return whether it is there, with that start time, and watched from now on.

        Raises:
            AsyncCkptError: Why that cannot be known.
        """

    def create_slot(self, number: int, nbytes: int, *, populate: bool) -> tuple[int, bytes]:
        """Check the memory and make a memfd; return its number and token.

        Raises:
            AsyncCkptError: `InsufficientMemoryError`, or why the system gives none.
        """

    def listen(self, port: int, secret: str) -> Listener:
        """Listen for followers. `port`: 0 takes the configured one. `secret`: of a key pair to take; "" makes one.

        Raises:
            AsyncCkptError: The port is taken, or there is no such address here.
        """

    def connect(self, connection: Connection) -> None:
        """Connect to the worker that leads a run.

        Raises:
            AsyncCkptError: There can be no connection.
        """

    def disconnect(self, run: str) -> None:
        """End the connection of a followed run, if there is one."""
