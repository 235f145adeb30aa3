"""Save IDs, names of files and directories, and names of tensors that belong to one rank."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

MANIFEST_NAME = "manifest.json"
LOCK_NAME = "manifest.overwrite.lock"
"""Lock file of a checkpoint's directory, held while its manifest is replaced. Empty; the holder removes it."""

DCP_METADATA_NAME = ".metadata"
"""The file with `torch.distributed.checkpoint`'s description of a checkpoint."""

SAFETENSORS, DCP = "safetensors", "dcp"
LAYOUTS = (SAFETENSORS, DCP)
"""Layouts of shard files: format/SPEC.md sections 6 and 7."""

MAX_EPOCH = 999_999
MAX_SEQUENCE = 99_999_999

_SUFFIXES = {SAFETENSORS: "safetensors", DCP: "distcp"}
_SAVE_ID = re.compile(r"([0-9]{6})-([0-9]{8})-([0-9a-f]{12})\Z")
_PER_RANK = re.compile(r"(.*)@rank(0|[1-9][0-9]{0,5})\Z", re.DOTALL)
_RESERVED = re.compile(r"@rank[0-9]+\Z")
_QUARANTINED = re.compile(r"(?s).+\.broken-[1-9][0-9]{0,8}\Z")
_CONVERTING = re.compile(r"(?s)\..+\.[0-9a-f]{12}\.converting\Z")
_KEPT = re.compile(r"(?s)\..+\.[0-9a-f]{12}\.converting\.kept\Z")
_TEMPORARY = re.compile(r"\.tmp(?:\.[0-9a-f]{12}-[12])?\Z")
_CONVERTED_NBYTES = 200
_OWN_FILES = (
    re.compile(
        r"rank-[0-9]{5}-part-[0-9]{3}\.([0-9]{6}-[0-9]{8}-[0-9a-f]{12})\.(?:safetensors|distcp)(?:\.[0-9a-f]{12}\.tmp)?\Z"
    ),
    re.compile(r"rank-[0-9]{5}\.([0-9]{6}-[0-9]{8}-[0-9a-f]{12})\.(?:index|objects\.json|items\.distcp)(?:\.tmp)?\Z"),
    re.compile(r"(?:manifest|dcp-metadata|tombstone)\.([0-9]{6}-[0-9]{8}-[0-9a-f]{12})\.tmp(?:\.[0-9a-f]{12}-[12])?\Z"),
    re.compile(r"manifest\.([0-9]{6}-[0-9]{8}-[0-9a-f]{12})\.[0-9a-f]{12}\.tmp\Z"),
    re.compile(r"mirrored\.([0-9]{6}-[0-9]{8}-[0-9a-f]{12})\.json(?:\.tmp)?\Z"),
)


class SaveId(str):
    """ID of a save, the same on all ranks: the string `EEEEEE-SSSSSSSS-rrrrrrrrrrrr` with its parts as attributes.

    The order of IDs is the lineage of the checkpoints of a root: by epoch, then by sequence; the run ID only breaks
    ties. The training step does not count: after a rollback to step 100, the new branch's step 150 is newer than the
    old branch's step 900.

    Args:
        epoch: One more than the largest epoch in the root at the run's first save, of committed and uncommitted saves;
            or what the clock gives, if that is larger (`storage.catalog.epoch_by_clock`).
        sequence: Number of the `save()` call in the run, from 0.
        run_id: 12 hex digits, random per run, so that files of two runs never have the same name.
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
        """Sequence and run ID as a string: it identifies a `save()` call, whose saves differ in their epochs.

        The strings of one run's calls sort in the order of the calls.
        """
        return self[7:]

    def with_parts(self, *, epoch: int | None = None, sequence: int | None = None, run_id: str | None = None) -> SaveId:
        """Return a copy of this ID with the given parts replaced."""
        return SaveId(
            self.epoch if epoch is None else epoch,
            self.sequence if sequence is None else sequence,
            self.run_id if run_id is None else run_id,
        )

    @classmethod
    def parse(cls, text: str) -> SaveId:
        """Return the ID in `text`, or `text` itself if it is a `SaveId`.

        Raises:
            ValueError: `text` is not a save ID.
        """
        if isinstance(text, SaveId):
            return text
        if not _SAVE_ID.match(text):
            raise ValueError(f"not a save id: {text!r} (expected EEEEEE-SSSSSSSS-rrrrrrrrrrrr)")
        return cls(int(text[:6]), int(text[7:15]), text[16:])


def shard_name(save_id: SaveId, rank: int, part: int, layout: str = SAFETENSORS) -> str:
    """Return the name of shard file number `part` of `rank`."""
    return f"rank-{rank:05d}-part-{part:03d}.{save_id}.{_SUFFIXES[layout]}"


def items_name(save_id: SaveId, rank: int) -> str:
    """Return the name of `rank`'s items file: in layout "dcp", its non-tensor leaves as DCP's items."""
    return f"rank-{rank:05d}.{save_id}.items.distcp"


def index_name(save_id: SaveId, rank: int) -> str:
    """Return the name of `rank`'s index file."""
    return f"rank-{rank:05d}.{save_id}.index"


def objects_name(save_id: SaveId, rank: int) -> str:
    """Return the name of `rank`'s objects file: its non-tensor leaves."""
    return f"rank-{rank:05d}.{save_id}.objects.json"


def per_rank_name(fqn: str, rank: int) -> str:
    """Return the name of a stored tensor that belongs to `rank`: its FQN and `@rank{n}`."""
    return f"{fqn}@rank{rank}"


def split_per_rank_name(stored: str) -> tuple[str, int] | None:
    """Return (FQN, rank) of a name of the form of `per_rank_name`, or None for any other name."""
    found = _PER_RANK.match(stored)
    return (found[1], int(found[2])) if found else None


def is_reserved(fqn: str) -> bool:
    """Whether a user's tensor may not have this FQN, because it ends in `@rank` and digits."""
    return _RESERVED.search(fqn) is not None


def layout_of(document: Mapping[str, Any]) -> str:
    """Return the layout of a decoded manifest or index.

    Raises:
        ValueError: It is unknown.
    """
    layout = document.get("layout", SAFETENSORS)
    if layout not in LAYOUTS:
        raise ValueError(f"field `layout` is {layout!r}, expected one of {LAYOUTS}")
    return str(layout)


def temporary_dcp_metadata_name(save_id: SaveId) -> str:
    """Return the name of the file that is written first and then renamed to `.metadata`."""
    return f"dcp-metadata.{save_id}.tmp"


def temporary_manifest_name(save_id: SaveId, token: str = "") -> str:
    """Return the name of the file that is written first and then linked to `manifest.json`.

    Args:
        save_id: ID of the save.
        token: In a mirror, 12 random hex digits of the copy: two processes may copy one checkpoint.
    """
    return f"manifest.{save_id}.{token}.tmp" if token else f"manifest.{save_id}.tmp"


def quarantined_name(name: str, number: int) -> str:
    """Return the name that the directory `name` of a damaged checkpoint gets when it is quarantined."""
    return f"{name}.broken-{number}"


def is_quarantined(name: str) -> bool:
    """Whether a directory's name has the form of `quarantined_name`."""
    return _QUARANTINED.match(name) is not None


def converting_name(name: str, token: str) -> str:
    """Return the temporary name of a conversion's target `name`; `token`: 12 random hex digits."""
    name = name[:_CONVERTED_NBYTES]
    while len(os.fsencode(name)) > _CONVERTED_NBYTES:
        name = name[:-1]
    return f".{name}.{token}.converting"


def is_converting(name: str) -> bool:
    """Whether a name has the form of `converting_name`. Searches for checkpoints skip it."""
    return _CONVERTING.match(name) is not None


def kept_name(converting: str) -> str:
    """Return the name for a checkpoint that a failed conversion moved away and could not rename back."""
    return f"{converting}.kept"


def is_kept(name: str) -> bool:
    """Whether a name has the form of `kept_name`. Only the user removes it; asyncckpt never does."""
    return _KEPT.match(name) is not None


def replacing_name(name: str) -> str:
    """Return the name of the file that is written first and then replaces a rank's index, objects or items file, or a
    mirror record.
    """
    return f"{name}.tmp"


def copied_shard_name(name: str, token: str) -> str:
    """Return the name of a shard that is being copied to a mirror.

    Args:
        name: Name of the shard.
        token: 12 random hex digits of the copy: two processes may copy one checkpoint.
    """
    return f"{name}.{token}.tmp"


def mirror_record_name(save_id: SaveId) -> str:
    """Return the name of the record that a checkpoint has been copied to its mirror."""
    return f"mirrored.{save_id}.json"


def temporary_tombstone_name(save_id: SaveId) -> str:
    """Return the name of the file that is written first and then becomes a tombstone.

    It differs from that of a temporary manifest, which the save may still link.
    """
    return f"tombstone.{save_id}.tmp"


def probe_name(temporary: str, token: str, number: int) -> str:
    """Return the name of a file by which a save finds out what a mount can do.

    Args:
        temporary: Of a manifest or tombstone.
        token: 12 random hex digits.
        number: 1 or 2.
    """
    return f"{temporary}.{token}-{number}"


def is_temporary_record(name: str) -> bool:
    """Whether the file called `name` is a manifest or tombstone under its temporary name."""
    return name.startswith(("manifest.", "tombstone.")) and name.endswith(".tmp") and owner_of(name) is not None


def is_temporary(name: str) -> bool:
    """Whether `name` is that of a file of a save that gets another name when it is complete, or of a probe."""
    return _TEMPORARY.search(name) is not None and owner_of(name) is not None


def owner_of(name: str) -> SaveId | None:
    """Return the ID of the save that wrote a file, by the file's name; None if it has no name of the format."""
    found = next(filter(None, (pattern.match(name) for pattern in _OWN_FILES)), None)
    return SaveId.parse(found[1]) if found else None
