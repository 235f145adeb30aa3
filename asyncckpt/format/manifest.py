"""The commit record of a checkpoint: small, human-readable JSON that carries its own checksum.

IMPORTANT: a manifest is created last and never changed. Whatever it names was durable before it existed.

A tombstone is the record of a save that was given up: it stands where the manifest would, so that the save can never be
committed. Like a manifest it is put if none is there. Whoever finds it may remove the files of its save and of all
earlier ones at that path, because none of them can be published any more; later saves may take its place.

Every document of the format says its version and, in `must`, the fields that a reader must know; a reader ignores other
fields that it does not know.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncckpt.errors import CheckpointNotCommittedError, CorruptCheckpointError, UnsupportedFormatError
from asyncckpt.format.checksums import FILE_CHECKSUM_PREFIX, file_checksum, is_file_checksum
from asyncckpt.format.names import (
    DCP,
    DCP_METADATA_NAME,
    MAX_RANKS,
    SAFETENSORS,
    SaveId,
    index_name,
    layout_of,
)

MUST = "must"


def check_version(
    document: Mapping[str, Any], key: str, supported: int, *, what: str, known: Collection[str] = ()
) -> None:
    """Prove that this package can read `document`.

    Args:
        document: The decoded map.
        key: The field that holds the version.
        supported: The newest version that this package reads; older ones it reads too.
        what: For messages: "index", "manifest", ...
        known: Fields that a document may demand.

    Raises:
        UnsupportedFormatError: A newer version, or a required field that this version does not know.
        ValueError: No version at all.
    """
    found = document.get(key)
    if type(found) is not int or found < 1:
        raise ValueError(f"{what} version {found!r}")
    if found > supported:
        raise UnsupportedFormatError(
            f"{what} version {found} is newer than this package reads ({supported}); upgrade asyncckpt",
            found=found,
            supported=supported,
        )
    must = list_of(document.get(MUST, ()))
    if not all(type(n) is str for n in must):
        raise ValueError(f"{what}: `{MUST}` is no list of names")
    unknown = sorted(set(must) - set(known))
    if unknown:
        raise UnsupportedFormatError(
            f"{what} needs {unknown[:10]}, which this package does not know; upgrade asyncckpt",
            found=found,
            supported=supported,
        )


def list_of(value: Any) -> Sequence[Any]:
    """Return `value` if it is a list; a map or a text iterates too, and must not pass for one.

    Raises:
        ValueError: It is none.
    """
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{type(value).__name__} in place of a list")
    return value


MANIFEST_VERSION = 1
PLANNER_KEY = "torch.distributed.checkpoint"
"""In `metadata`: what a planner of stock torch, which saved the checkpoint, keeps with it."""

MAX_MANIFEST_NBYTES = 64 << 20
STATE_COMMITTED = "committed"
STATE_ABANDONED = "abandoned"
"""Of a tombstone, which commits nothing."""


_MAX_INT = (1 << 63) - 1
_ZERO_CHECKSUM = FILE_CHECKSUM_PREFIX + "0" * 32
_TRAILER = re.compile(rb'"checksum": "(xxh3_128:[0-9a-f]{32})"\n\}\n\Z')
_VERSION = re.compile(rb'\s*\{\s*"asyncckpt_manifest":\s*([0-9]{1,9})\b')
_TRAILER_NBYTES = len(f'"checksum": "{_ZERO_CHECKSUM}"\n}}\n')


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRecord:
    """What one rank contributed: its index with checksum, and totals for `ls` and `du`."""

    rank: int
    index_name: str
    index_nbytes: int
    index_checksum: str
    n_tensors: int
    n_files: int
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DcpRecord:
    """The `.metadata` beside a manifest: exact length, `file_checksum` of its bytes."""

    nbytes: int
    checksum: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The commit record of a checkpoint.

    Attributes:
        step: The training step, as the user counts.
        created: ISO 8601, UTC.
        fsync: False when the user switched fsync off; then a power cut may lose the checkpoint.
        metadata: The user's JSON.
        timings: Seconds per phase of the save, for reports; no reader depends on it.
        writer: Package and version.
        dcp: In layout "dcp" what belongs beside it; None: layout "safetensors".
    """

    save_id: SaveId
    step: int
    world_size: int
    created: str
    fsync: bool
    writer: str
    ranks: tuple[RankRecord, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)
    dcp: DcpRecord | None = None

    @property
    def layout(self) -> str:
        """What the shard files look like, one of `names.LAYOUTS`."""
        return SAFETENSORS if self.dcp is None else DCP

    @property
    def nbytes(self) -> int:
        """Bytes of all files that the ranks wrote, indexes included."""
        return sum(r.nbytes for r in self.ranks)


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the file's bytes (format/SPEC.md section 2).

    Raises:
        ValueError: The metadata are no JSON, or too large.
    """
    document: dict[str, Any] = {
        "asyncckpt_manifest": MANIFEST_VERSION,
        "state": STATE_COMMITTED,
        "save_id": str(manifest.save_id),
        "step": manifest.step,
        "world_size": manifest.world_size,
        "created": manifest.created,
        "fsync": manifest.fsync,
        "writer": manifest.writer,
        "metadata": dict(manifest.metadata),
        "timings": dict(manifest.timings),
        # An optional field that is added goes here, and is left out if it is None.
        "ranks": [
            {
                "rank": r.rank,
                "index": r.index_name,
                "index_nbytes": r.index_nbytes,
                "index_checksum": r.index_checksum,
                "tensors": r.n_tensors,
                "files": r.n_files,
                "nbytes": r.nbytes,
            }
            for r in manifest.ranks
        ],
    }
    if manifest.dcp is not None:
        record = {"nbytes": manifest.dcp.nbytes, "checksum": manifest.dcp.checksum}
        document |= {MUST: ["layout"], "layout": DCP, DCP_METADATA_NAME: record}
    return sealed(document)


def sealed(document: dict[str, Any]) -> bytes:
    """Return a document's bytes, with its checksum as the last member.

    Raises:
        ValueError: It is no JSON, or too large.
    """
    document["checksum"] = _ZERO_CHECKSUM
    blank = (json.dumps(document, indent=1, allow_nan=False) + "\n").encode()
    head, tail = blank[:-_TRAILER_NBYTES], blank[-_TRAILER_NBYTES:]
    if len(blank) > MAX_MANIFEST_NBYTES:  # no reader would take it
        raise ValueError(f"a manifest of {len(blank)} bytes, the limit is {MAX_MANIFEST_NBYTES}; save less metadata")
    return head + tail.replace(_ZERO_CHECKSUM.encode(), file_checksum(blank).encode())


def decode_manifest(data: bytes, path: str = "") -> Manifest:
    """Read and check a manifest.

    Args:
        data: The file's bytes.
        path: The checkpoint's directory, for messages.

    Raises:
        UnsupportedFormatError: Written by a newer version.
        CheckpointNotCommittedError: It is a tombstone.
        CorruptCheckpointError: Damaged, or not a manifest of ours.
    """
    try:
        raw = unsealed(data, path)
        if raw["state"] == STATE_ABANDONED:
            raise CheckpointNotCommittedError(
                f"{path} holds a save that was begun, never committed, and given up by `asyncckpt gc`; load another "
                "checkpoint",
                path=path,
            )
        if raw["state"] != STATE_COMMITTED:
            raise ValueError(f"state {raw['state']!r}")
        return _checked_manifest(raw)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        if isinstance(error, (UnsupportedFormatError, CorruptCheckpointError)):
            raise
        raise CorruptCheckpointError(
            f"{path or 'checkpoint'}: manifest.json is damaged: {error}",
            path=path,
            file="manifest.json",
            detail=str(error),
        ) from error


def unsealed(data: bytes, path: str) -> dict[str, Any]:
    """Return a document whose checksum and version were checked.

    Raises:
        UnsupportedFormatError: Written by a newer version.
        ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError: Damaged.
    """
    _refuse_newer(data, path)
    trailer = _TRAILER.search(data[-_TRAILER_NBYTES:])
    if len(data) > MAX_MANIFEST_NBYTES or trailer is None:
        raise ValueError("no checksum at its end")
    blank = data[:-_TRAILER_NBYTES] + data[-_TRAILER_NBYTES:].replace(trailer[1], _ZERO_CHECKSUM.encode())
    if file_checksum(blank) != trailer[1].decode():
        raise ValueError("its checksum does not match")
    raw: dict[str, Any] = json.loads(data)
    check_version(raw, "asyncckpt_manifest", MANIFEST_VERSION, what="manifest", known=("layout",))
    return raw


def _refuse_newer(data: bytes, path: str) -> None:
    """A newer version may end otherwise than ours, so its number is looked at before its checksum."""
    found = _VERSION.match(data[:256])
    if found and int(found[1]) > MANIFEST_VERSION:
        raise UnsupportedFormatError(
            f"{path or 'checkpoint'}: manifest version {int(found[1])} is newer than this package reads "
            f"({MANIFEST_VERSION}); upgrade asyncckpt",
            path=path,
            found=int(found[1]),
            supported=MANIFEST_VERSION,
        )


def _checked_manifest(raw: dict[str, Any]) -> Manifest:
    save_id, world_size = SaveId.parse(raw["save_id"]), raw["world_size"]
    if not _is_step(raw["step"]) or type(raw["fsync"]) is not bool or not isinstance(raw["metadata"], dict):
        raise ValueError("a field has another type than the SPEC says")
    if type(world_size) is not int or not 1 <= world_size <= MAX_RANKS or len(list_of(raw["ranks"])) != world_size:
        raise ValueError(f"{len(raw['ranks'])} ranks of world {world_size!r}")
    ranks = tuple(_checked_rank(r, number, save_id) for number, r in enumerate(raw["ranks"]))
    return Manifest(
        save_id=save_id,
        step=raw["step"],
        world_size=world_size,
        created=str(raw["created"]),
        fsync=raw["fsync"],
        writer=str(raw["writer"]),
        ranks=ranks,
        metadata=raw["metadata"],
        timings={str(k): float(v) for k, v in raw["timings"].items()},
        dcp=_checked_dcp(raw[DCP_METADATA_NAME]) if layout_of(raw) == DCP else None,
    )


def _checked_dcp(raw: dict[str, Any]) -> DcpRecord:
    record = DcpRecord(nbytes=raw["nbytes"], checksum=raw["checksum"])
    if type(record.nbytes) is not int or not 0 <= record.nbytes <= _MAX_INT or not is_file_checksum(record.checksum):
        raise ValueError(f"malformed record of {DCP_METADATA_NAME}")
    return record


def _is_step(value: Any) -> bool:
    return type(value) is int and -_MAX_INT <= value <= _MAX_INT


def _checked_rank(raw: dict[str, Any], number: int, save_id: SaveId) -> RankRecord:
    record = RankRecord(
        rank=raw["rank"],
        index_name=raw["index"],
        index_nbytes=raw["index_nbytes"],
        index_checksum=raw["index_checksum"],
        n_tensors=raw["tensors"],
        n_files=raw["files"],
        nbytes=raw["nbytes"],
    )
    numbers = (record.index_nbytes, record.n_tensors, record.n_files, record.nbytes)
    if record.rank != number or record.index_name != index_name(save_id, number):
        raise ValueError(f"entry {number} of ranks is rank {record.rank!r} with index {record.index_name!r}")
    if any(type(n) is not int or not 0 <= n <= _MAX_INT for n in numbers) or not is_file_checksum(
        record.index_checksum
    ):
        raise ValueError(f"malformed numbers of rank {number}")
    return record


@dataclass(frozen=True, kw_only=True, slots=True)
class Tombstone:
    """A record in the place of a manifest: saves up to `save_id` can no longer be committed there.

    Attributes:
        save_id: The latest save that was given up there.
        created: ISO 8601, UTC.
        writer: Package and version.
        was_committed: The save had been committed, and retention has removed it.
    """

    save_id: SaveId
    created: str
    writer: str
    was_committed: bool = False


def encode_tombstone(tombstone: Tombstone) -> bytes:
    """Return the file's bytes (format/SPEC.md section 2)."""
    return sealed(
        {
            "asyncckpt_manifest": MANIFEST_VERSION,
            "state": STATE_ABANDONED,
            "save_id": str(tombstone.save_id),
            "created": tombstone.created,
            "writer": tombstone.writer,
            "was_committed": tombstone.was_committed,
        }
    )


def decode_tombstone(data: bytes, path: str = "") -> Tombstone | None:
    """Return the tombstone in `data`; None: it is a manifest, or nothing that can be read.

    Args:
        data: The bytes of a file called as a manifest is.
        path: The checkpoint's directory, for messages.
    """
    try:
        raw = unsealed(data, path)
        if raw["state"] != STATE_ABANDONED:
            return None
        return Tombstone(
            save_id=SaveId.parse(raw["save_id"]),
            created=str(raw["created"]),
            writer=str(raw["writer"]),
            was_committed=raw.get("was_committed") is True,
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError, UnsupportedFormatError):
        return None


def newest(manifests: Iterable[tuple[str, Manifest]]) -> tuple[str, Manifest] | None:
    """Return the (path, manifest) pair that is newest by lineage, or None."""
    return max(manifests, key=lambda pair: pair[1].save_id, default=None)
