"""Snapshots that the worker of this node holds in memory, and where their parts are."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from asyncckpt import __version__
from asyncckpt.basics.paths import checkpoint_path
from asyncckpt.config import endpoint_from_environment
from asyncckpt.errors import AsyncCkptError
from asyncckpt.format.names import SaveId
from asyncckpt.protocol.endpoint import default_endpoint
from asyncckpt.recall.session import RecallSession
from asyncckpt.storage.checkpoint_dir import NO_IDENTITY
from asyncckpt.storage.store import DirectoryIdentity

ANSWER_S = 1.0
"""Seconds for the worker's answer, which takes milliseconds. A worker that hangs delays a load by at most this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotPart:
    """The slot of one rank's part of a snapshot: its file descriptor in the worker, size, token and generation."""

    rank: int
    fd: int
    nbytes: int
    token: bytes
    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldSnapshot:
    """A snapshot that all of its ranks have staged, and of which a worker holds parts in memory.

    Attributes:
        path: Directory of the checkpoint, as it was given to `save`.
        save_id: ID of the save.
        step: Training step.
        world_size: Number of ranks that staged it.
        ranks: Ranks whose parts this worker holds.
        committed: Whether the worker has committed it to disk.
        parts: Slots of the parts, by rank.
        homes: Identity of the directory to which it was saved, or of that directory's parent, as the ranks found it.
            There are two if a rank made the directory and removed it again because the disk was full.
    """

    path: str
    save_id: SaveId
    step: int
    world_size: int
    ranks: tuple[int, ...]
    committed: bool
    parts: Mapping[int, SnapshotPart]
    homes: tuple[DirectoryIdentity, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether this worker holds the parts of all ranks, so that it can be loaded without the disk."""
        return len(self.ranks) == self.world_size

    @property
    def missing(self) -> list[int]:
        """The ranks whose parts this worker does not hold."""
        return [rank for rank in range(self.world_size) if rank not in self.parts]


def snapshots_of(rows: Iterable[Mapping[str, Any]]) -> list[HeldSnapshot]:
    """Return the snapshots that the rows of a message `recalled` describe, newest first by lineage."""
    by_save: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["whole"] and row["rank"] < row["world_size"]:
            by_save.setdefault((row["path"], row["save_id"]), []).append(row)
    found = [
        HeldSnapshot(
            path=path,
            save_id=SaveId.parse(save_id),
            step=of[0]["step"],
            world_size=of[0]["world_size"],
            ranks=tuple(sorted({row["rank"] for row in of})),
            committed=of[0]["committed"],
            parts={row["rank"]: _part(row) for row in of},
            homes=tuple(
                {one: None for row in of if (one := DirectoryIdentity(row["inode"], row["birth_ns"])) != NO_IDENTITY}
            ),
        )
        for (path, save_id), of in by_save.items()
        if len({row["world_size"] for row in of}) == 1
    ]
    return sorted(found, key=lambda s: (s.save_id, s.path), reverse=True)


def _part(row: Mapping[str, Any]) -> SnapshotPart:
    return SnapshotPart(**{name: row[name] for name in SnapshotPart.__dataclass_fields__})


def endpoint_of(named: str | None) -> str:
    """Return `named`, else `$ASYNCCKPT_ENDPOINT`, else the default endpoint of this user's worker for this job."""
    named = named or endpoint_from_environment()
    return named or default_endpoint(os.environ, uid=os.geteuid(), package=__version__, interpreter=sys.prefix)


def held_snapshots(root: str | os.PathLike[str], *, endpoint: str | None = None) -> list[HeldSnapshot]:
    """Return the snapshots of checkpoints at `root` and below it in the memory of this node's worker, newest first.

    Returns only snapshots that all ranks have staged and no commit hook has vetoed: committed ones, those being
    written, and those that could not be written. The order is by lineage, as of `latest_checkpoint`. No worker is
    started; if there is none, or it does not answer, the list is empty.

    Args:
        root: Directory or URL that holds checkpoints, or one of these.
        endpoint: Endpoint of the worker; default: `$ASYNCCKPT_ENDPOINT`, else this user's worker for this job.

    Raises:
        UnsupportedPathError: `root` is not a path, or a URL of no object store.
        ConfigError: The endpoint is malformed.

    Blocks: at most `ANSWER_S`.
    """
    path, where = checkpoint_path(root), endpoint_of(endpoint)
    try:
        with RecallSession(where, __version__, ANSWER_S / 2) as worker:
            return snapshots_of(worker.recall(path, hold=False).parts)
    except AsyncCkptError:
        return []
