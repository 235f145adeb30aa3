"""What the worker of this node holds in memory: whole snapshots, and where their parts lie."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from asyncckpt import __version__
from asyncckpt.basics.paths import absolute_path
from asyncckpt.config import endpoint_from_environment
from asyncckpt.errors import AsyncCkptError
from asyncckpt.format.names import SaveId
from asyncckpt.protocol.endpoint import default_endpoint
from asyncckpt.recall.conversation import Conversation
from asyncckpt.storage.checkpoint_dir import NO_HOME
from asyncckpt.storage.store import DirectoryIdentity

ANSWER_S = 1.0
"""Where the disk has it too: a worker that hangs may not make a load slower than this. It takes milliseconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Where one rank's part of a snapshot lies: fd of the worker, size, token and generation of the slot."""

    rank: int
    fd: int
    nbytes: int
    token: bytes
    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldSnapshot:
    """A snapshot that all of its ranks have staged, and of which a worker holds parts in memory.

    Attributes:
        path: The checkpoint's directory, as it was given to `save`.
        save_id: Of the save.
        step: The training step, as the user counts.
        world_size: Ranks that staged it.
        ranks: Those whose parts this worker holds.
        committed: Whether the worker has committed it to disk.
        homes: The directory that it was saved to, or the one that was to hold that, as its ranks found it: two, if one
            of them made it and took it away again, since there was no room.
    """

    path: str
    save_id: SaveId
    step: int
    world_size: int
    ranks: tuple[int, ...]
    committed: bool
    parts: Mapping[int, Part]
    homes: tuple[DirectoryIdentity, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether all of it is here, so that it loads without the disk."""
        return len(self.ranks) == self.world_size

    @property
    def missing(self) -> list[int]:
        """The ranks whose parts are not here."""
        return [rank for rank in range(self.world_size) if rank not in self.parts]


def snapshots_of(rows: Iterable[Mapping[str, Any]]) -> list[HeldSnapshot]:
    """Return the snapshots that the rows of a `recalled` are about, newest first by lineage."""
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
                {home: None for row in of if (home := DirectoryIdentity(row["inode"], row["birth_ns"])) != NO_HOME}
            ),
        )
        for (path, save_id), of in by_save.items()
        if len({row["world_size"] for row in of}) == 1
    ]
    return sorted(found, key=lambda s: (s.save_id, s.path), reverse=True)


def _part(row: Mapping[str, Any]) -> Part:
    return Part(**{name: row[name] for name in Part.__dataclass_fields__})


def endpoint_of(named: str | None) -> str:
    """Return `named`, else the endpoint of the environment, else the one that this user's worker of this job has."""
    named = named or endpoint_from_environment()
    return named or default_endpoint(os.environ, uid=os.geteuid(), package=__version__, interpreter=sys.prefix)


def held_snapshots(root: str | os.PathLike[str], *, endpoint: str | None = None) -> list[HeldSnapshot]:
    """Return what the worker of this node holds in memory of the checkpoints at `root` and below it, newest first.

    Only snapshots that all ranks have staged, and against which no commit hook has spoken: committed ones, those that
    are being written, and those that could not be written. Newest by lineage, as `latest_checkpoint`. No worker is
    started; without one, or where it does not answer, there is nothing.

    Args:
        root: A directory that holds the checkpoints' directories, or one of these.
        endpoint: Of the worker; default: `$ASYNCCKPT_ENDPOINT`, else this user's worker of this job.

    Raises:
        UnsupportedPathError: A URL or no path.
        ConfigError: The endpoint is malformed.

    Blocks: at most `ANSWER_S`.
    """
    path, where = absolute_path(root), endpoint_of(endpoint)
    try:
        with Conversation(where, __version__, ANSWER_S / 2) as worker:
            return snapshots_of(worker.recall(path, hold=False).parts)
    except AsyncCkptError:
        return []
