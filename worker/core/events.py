"""Events, the input of the core: values only.

Every event has `now`, seconds of a monotonic clock; the core has no clock. Results of jobs name their save or slot.
Errors have the wire form of `asyncckpt.errors.to_wire`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncckpt.format.names import SaveId
from asyncckpt.maintenance.mirroring import Unmirrored
from asyncckpt.protocol.messages import Message
from asyncckpt.protocol.request import SaveRequest
from asyncckpt.storage.checkpoint_dir import NO_IDENTITY
from asyncckpt.storage.store import DirectoryIdentity

Wire = Mapping[str, Any]
"""A map of plain values as messages have it: an error (`asyncckpt.errors.to_wire`), or a row of a table."""

Peer = bytes
"""ZeroMQ identity of a trainer's connection; b"" for a rank of another node, which has none."""

SaveKey = tuple[str, int]
"""Save ID as text, and rank."""


@dataclass(frozen=True, slots=True)
class ContentDigests:
    """Digests of a checkpoint. `tensors`: of all shards; `rest`: of everything else, without the step."""

    tensors: bytes
    rest: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Received:
    """A message of a trainer was received and decoded."""

    now: float
    peer: Peer
    message: Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Died:
    """The session's process is proved dead: it cannot write to a slot any more."""

    now: float
    session: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotAdopted:
    """Result of AdoptSlot: number of the memfd and its token, or the error."""

    now: float
    slot: int
    fd: int = -1
    token: bytes = b""
    error: Wire | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotFreed:
    """Result of FreeSlot: the memory was returned to the system."""

    now: float
    slot: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotRead:
    """Result of ReadSlot: the request and its generation, or the reason why there is none."""

    now: float
    slot: int
    generation: int = -1
    request: SaveRequest | None = None
    reason: str = ""
    opened: bool = False
    """A trainer is staging into the slot."""

    streamed: bool = False
    """The slot is not sealed, and may be written as far as it is filled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """Result of Prepare. `committed`: the save's own manifest exists, and nothing is to be written.

    `known_uncommitted`: with an error of a resumed save: it came after the check had shown that no dead worker has
    committed the save. `directory_identity`: identity of the save's directory.
    """

    now: float
    key: SaveKey
    error: Wire | None = None
    committed: bool = False
    known_uncommitted: bool = False
    directory_identity: DirectoryIdentity = NO_IDENTITY


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """Result of Write. `result` is opaque to the core, which passes it to Commit."""

    now: float
    key: SaveKey
    result: Any = None
    error: Wire | None = None
    report: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """Result of Commit. `unknown`: the manifest could not be written without doubt; it may exist.

    `digests`: to compare the next save of the run with; None if there are none.
    """

    now: float
    save_id: str
    error: Wire | None = None
    unknown: bool = False
    digests: ContentDigests | None = None
    report: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Removed:
    """Result of Remove."""

    now: float
    save_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LineageScanned:
    """Result of ScanLineage: the next epoch by the clock and the checkpoints on disk, or the error."""

    now: float
    run: str
    path: str
    epoch: int = 0
    error: Wire | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Copied:
    """Result of CopyToMirror and CheckMirrored.

    `is_done`: the copy is committed. `is_final`: trying again cannot help.
    """

    now: float
    save_id: SaveId
    is_done: bool = False
    error: Wire | None = None
    is_final: bool = False
    report: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnmirroredFound:
    """Result of ScanUnmirrored: the checkpoints, the oldest first, or the error."""

    now: float
    root: str
    found: tuple[Unmirrored, ...] = ()
    error: Wire | None = None
    storage: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Relayed:
    """A message of another worker. `route`: address of the follower, which proved the key of `run`; b"": the leader."""

    now: float
    run: str
    route: bytes
    message: Message


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRequested:
    """A signal or `Daemon.stop()`. `immediately`: do not wait for saves."""

    now: float
    immediately: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class InternalFault:
    """A bug in the worker, at an event or action of this save, which ends. Nothing else ends."""

    now: float
    save_id: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """Time has passed.

    `has_owner`: the process that the worker was started for is alive, so the worker does not exit when idle.
    `memory_short`: the machine or the worker's cgroup is almost out of memory.
    """

    now: float
    has_owner: bool = False
    memory_short: bool = False


Event = (
    Received
    | Died
    | SlotAdopted
    | SlotFreed
    | SlotRead
    | Prepared
    | Written
    | Published
    | Removed
    | LineageScanned
    | Copied
    | UnmirroredFound
    | Relayed
    | StopRequested
    | InternalFault
    | Tick
)
