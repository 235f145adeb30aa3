"""Save ids, the file names that carry them, and the names of tensors that belong to one rank."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

MANIFEST_NAME = "manifest.json"
LOCK_NAME = "manifest.overwrite.lock"
"""Held by who replaces a manifest; empty, and removed by its holder."""

DCP_METADATA_NAME = ".metadata"
"""Where `torch.distributed.checkpoint` looks for what is in a directory."""

SAFETENSORS, DCP = "safetensors", "dcp"
LAYOUTS = (SAFETENSORS, DCP)
"""What the shard files look like."""

MAX_RANKS = 100_000
MAX_PARTS = 1_000
MAX_EPOCH = 999_999
MAX_SEQUENCE = 99_999_999

_SUFFIXES = {SAFETENSORS: "safetensors", DCP: "distcp"}
_SAVE_ID = re.compile(r"([0-9]{6})-([0-9]{8})-([0-9a-f]{12})\Z")
_PER_RANK = re.compile(r"(.*)@rank(0|[1-9][0-9]{0,5})\Z", re.DOTALL)
_RESERVED = re.compile(r"@rank[0-9]+\Z")
_QUARANTINED = re.compile(r"(?s).+\.broken-[1-9][0-9]{0,8}\Z")
_CONVERTING = re.compile(r"(?s)\..+\.[0-9a-f]{12}\.converting\Z")
_KEPT = re.compile(r"(?s)\..+\.[0-9a-f]{12}\.converting\.kept\Z")
_CONVERTED_NBYTES = 200
_OWN_FILES = (
    re.compile(r"rank-[0-9]{5}-part-[0-9]{3}\.([0-9]{6}-[0-9]{8}-[0-9a-f]{12})\.(?:safetensors|distcp)\Z"),
    re.compile(r"rank-[0-9]{5}\.([0-9]{6}-[0-9]{8}-[0-9a-f]{12})\.(?:index|objects\.json|items\.distcp)(?:\.tmp)?\Z"),
    re.compile(r"(?:manifest|dcp-metadata|tombstone)\.([0-9]{6}-[0-9]{8}-[0-9a-f]{12})\.tmp\Z"),
)


class SaveId(str):
    """Which save of which run: its text, whose parts are read by name. Equal on all ranks.

    Checkpoints of one root are ordered by it, as by its text: by epoch, then sequence; the run id only breaks ties. Not
    by step: after a rollback to step 100 the new branch's step 150 is newer than the old branch's step 900.

    Args:
        epoch: One more than the largest beside the first path of the run, committed or only begun.
        sequence: Counts the run's `save()` calls from 0.
        run_id: 12 hex digits, random per run, so that files of two attempts never share a name.
    """

    __slots__ = ("epoch", "run_id", "sequence")
    epoch: int
    sequence: int
    run_id: str

    def __new__(cls, epoch: int, sequence: int, run_id: str) -> SaveId:
        found = super().__new__(cls, f"{epoch:06d}-{sequence:08d}-{run_id}")
        found.epoch, found.sequence, found.run_id = epoch, sequence, run_id
        return found

    def __getnewargs__(self) -> tuple[int, int, str]:  # type: ignore[override]
        return self.epoch, self.sequence, self.run_id

    @property
    def call(self) -> str:
        """Sequence and run: two saves of one call differ in their epochs. Calls of one run are ordered as texts."""
        return self[7:]

    def with_parts(self, *, epoch: int | None = None, sequence: int | None = None, run_id: str | None = None) -> SaveId:
        """Return the ID with other parts."""
        return SaveId(
            self.epoch if epoch is None else epoch,
            self.sequence if sequence is None else sequence,
            self.run_id if run_id is None else run_id,
        )

    @classmethod
    def parse(cls, text: str) -> SaveId:
        """Check a text; a save ID is returned as it is.

        Raises:
            ValueError: `text` is not a save id.
        """
        if isinstance(text, SaveId):
            return text
        if not _SAVE_ID.match(text):
            raise ValueError(f"not a save id: {text!r} (expected EEEEEE-SSSSSSSS-rrrrrrrrrrrr)")
        return cls(int(text[:6]), int(text[7:15]), text[16:])


def shard_name(save_id: SaveId, rank: int, part: int, layout: str = SAFETENSORS) -> str:
    """Return the name of part `part` of `rank`'s tensors."""
    return f"rank-{rank:05d}-part-{part:03d}.{save_id}.{_SUFFIXES[layout]}"


def items_name(save_id: SaveId, rank: int) -> str:
    """Return the name of the file of `rank`'s non-tensor leaves as DCP's items, in layout "dcp"."""
    return f"rank-{rank:05d}.{save_id}.items.distcp"


def index_name(save_id: SaveId, rank: int) -> str:
    """Return the name of `rank`'s index."""
    return f"rank-{rank:05d}.{save_id}.index"


def objects_name(save_id: SaveId, rank: int) -> str:
    """Return the name of the file of `rank`'s non-tensor leaves."""
    return f"rank-{rank:05d}.{save_id}.objects.json"


def per_rank_name(fqn: str, rank: int) -> str:
    """Return the name under which `rank`'s own values of the tensor `fqn` are stored."""
    return f"{fqn}@rank{rank}"


def split_per_rank_name(stored: str) -> tuple[str, int] | None:
    """Return (FQN, rank) of a name that `per_rank_name` makes, else None."""
    found = _PER_RANK.match(stored)
    return (found[1], int(found[2])) if found else None


def is_reserved(fqn: str) -> bool:
    """Whether no tensor of a user's may be called so: it looks like a name of `per_rank_name`."""
    return _RESERVED.search(fqn) is not None


def layout_of(document: Mapping[str, Any]) -> str:
    """Return the layout that a manifest or an index names.

    Raises:
        ValueError: An unknown one.
    """
    layout = document.get("layout", SAFETENSORS)
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r}")
    return str(layout)


def temporary_dcp_metadata_name(save_id: SaveId) -> str:
    """Return the name under which DCP's metadata are written before they are renamed."""
    return f"dcp-metadata.{save_id}.tmp"


def temporary_manifest_name(save_id: SaveId) -> str:
    """Return the name under which a manifest is written before it is linked into place."""
    return f"manifest.{save_id}.tmp"


def quarantined_name(name: str, number: int) -> str:
    """Return what the directory `name` of a broken checkpoint is called once it was put aside."""
    return f"{name}.broken-{number}"


def is_quarantined(name: str) -> bool:
    """Whether a directory's name is one that `quarantined_name` makes."""
    return _QUARANTINED.match(name) is not None


def converting_name(name: str, token: str) -> str:
    """Return what a conversion's target `name` is called until it is complete; `token`: 12 random hex digits."""
    name = name[:_CONVERTED_NBYTES]
    while len(os.fsencode(name)) > _CONVERTED_NBYTES:
        name = name[:-1]
    return f".{name}.{token}.converting"


def is_converting(name: str) -> bool:
    """Whether a file or directory is called as `converting_name` has it: nobody takes it for a checkpoint."""
    return _CONVERTING.match(name) is not None


def kept_name(converting: str) -> str:
    """Return what a checkpoint is called that was to be replaced, was not, and could not be put back to its place."""
    return f"{converting}.kept"


def is_kept(name: str) -> bool:
    """Whether a file or directory is called as `kept_name` has it: nobody removes it but people."""
    return _KEPT.match(name) is not None


def replacing_name(name: str) -> str:
    """Return the name under which a rank's index, objects or items are written before they replace those that stand."""
    return f"{name}.tmp"


def temporary_tombstone_name(save_id: SaveId) -> str:
    """Return the name under which a tombstone is written: not that of a manifest, which its save might still link."""
    return f"tombstone.{save_id}.tmp"


def is_temporary(name: str) -> bool:
    """Whether the file called `name`, of a save, is one that is given another name once it is complete."""
    return name.endswith(".tmp") and owner_of(name) is not None


def owner_of(name: str) -> SaveId | None:
    """Return the save that wrote the file called `name`, or None when the name is not one of ours."""
    found = next(filter(None, (pattern.match(name) for pattern in _OWN_FILES)), None)
    return SaveId.parse(found[1]) if found else None
