"""What happens to the worker: values only.

Every event carries `now`, seconds of a monotonic clock: the core has none of its own. Results of jobs name the save or
slot that they belong to. An error travels as the wire form that `asyncckpt.errors.to_wire` gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncckpt.protocol.messages import Message
from asyncckpt.protocol.request import SaveRequest
from asyncckpt.storage.checkpoint_dir import NO_HOME
from asyncckpt.storage.store import DirectoryIdentity

Wire = Mapping[str, Any]
Peer = bytes
SaveKey = tuple[str, int]
"""Save id as text, and rank."""


@dataclass(frozen=True, slots=True)
class Contents:
    """Prints of a whole checkpoint. `tensors`: of all shards; `rest`: of all else, but for the step."""

    tensors: bytes
    rest: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Received:
    """A message arrived and decoded."""

    now: float
    peer: Peer
    message: Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Died:
    """Proof that the session's process is dead: it writes to no slot any more."""

    now: float
    session: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotCreated:
    """The answer to AdoptSlot: the memfd's number and token, or the error."""

    now: float
    slot: int
    fd: int = -1
    token: bytes = b""
    error: Wire | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotFreed:
    """The answer to FreeSlot: its memory is the system's again."""

    now: float
    slot: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotRead:
    """The answer to ReadSlot: the sealed request and its generation, or the reason why there is none."""

    now: float
    slot: int
    generation: int = -1
    request: SaveRequest | None = None
    reason: str = ""
    opened: bool = False
    """A trainer is staging into it."""

    streamed: bool = False
    """The slot is not sealed yet, and may be written as far as it is filled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """The answer to Prepare. `committed`: the save's own manifest stands; there is nothing to write.

    `home`: the save's directory, or the one that was to hold it.
    """

    now: float
    key: SaveKey
    error: Wire | None = None
    committed: bool = False
    home: DirectoryIdentity = NO_HOME


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """The answer to Write: `result` is opaque to the core and goes into Commit."""

    now: float
    key: SaveKey
    result: Any = None
    error: Wire | None = None
    report: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """The answer to Commit. `unknown`: an error at the manifest itself; it may or may not exist.

    `contents`: what it holds, to compare the next save of the run with; None where that cannot be said.
    """

    now: float
    save_id: str
    error: Wire | None = None
    unknown: bool = False
    contents: Contents | None = None
    report: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Removed:
    """The answer to Remove."""

    now: float
    save_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LineageScanned:
    """The answer to ScanLineage: the epoch by what is on disk."""

    now: float
    run: str
    path: str
    epoch: int = 0
    error: Wire | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Relayed:
    """A message from another worker. `route`: of a follower, whose key is that of `run`; b"": the run's leader."""

    now: float
    run: str
    route: bytes
    message: Message


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRequested:
    """A signal, or `Daemon.stop()`. `immediately`: do not wait for saves."""

    now: float
    immediately: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Broken:
    """Our own code failed at an event or action of this save: it ends, and nothing else does."""

    now: float
    save_id: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """Time has passed.

    `kept`: the process that the worker was started for lives, so it does not leave for idleness. `memory_short`: the
    machine, or our cgroup, has hardly any memory left.
    """

    now: float
    kept: bool = False
    memory_short: bool = False


Event = (
    Received
    | Died
    | SlotCreated
    | SlotFreed
    | SlotRead
    | Prepared
    | Written
    | Published
    | Removed
    | LineageScanned
    | Relayed
    | StopRequested
    | Broken
    | Tick
)
