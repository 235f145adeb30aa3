"""The commit record of a checkpoint: small, human-readable JSON that carries its own checksum.

IMPORTANT: a manifest is created last and never changed. All files that it names are durable before it is created.

A tombstone is the record of a save that was given up. It has the name of a manifest, so that the save can never be
committed: like a manifest, it is created only if no file has that name. Once a tombstone exists, the files of its save
and of all earlier saves to that path may be removed, because none of these can be committed any more. A later save may
replace the tombstone.

Each document of the format has its version and, in the field `must`, the names of fields that a reader has to know. A
reader ignores other fields that it does not know.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from asyncckpt.basics.limits import MAX_RANKS
from asyncckpt.errors import CheckpointNotCommittedError, CorruptCheckpointError, UnsupportedFormatError
from asyncckpt.format.checksums import FILE_CHECKSUM_PREFIX, file_checksum, is_file_checksum
from asyncckpt.format.names import (
    DCP,
    DCP_METADATA_NAME,
    SAFETENSORS,
    SaveId,
    index_name,
    layout_of,
)

MUST = "must"
"""The optional field of a document with the names of the fields that a reader has to know."""


def check_version(
    document: Mapping[str, Any], key: str, supported: int, *, what: str, known: Collection[str] = ()
) -> None:
    """Check that this package can read `document`.

    Args:
        document: The decoded map.
        key: Name of the field with the version.
        supported: The newest version that this package reads. It reads all older ones as well.
        what: Kind of document, for messages: "index", "manifest", ...
        known: Fields that `must` may name.

    Raises:
        UnsupportedFormatError: The version is newer, or `must` names a field that is not in `known`.
        ValueError: There is no valid version, or `must` is malformed.
    """
    found = document.get(key)
    if type(found) is not int or found < 1:
        raise ValueError(f"field `{key}` is {found!r}, expected a version number from 1 on")
    if found > supported:
        raise UnsupportedFormatError(
            f"{what} version {found} is newer than this package reads ({supported}); upgrade asyncckpt",
            found=found,
            supported=supported,
        )
    must = list_of(document.get(MUST, ()))
    if not all(type(n) is str for n in must):
        raise ValueError(f"field `{MUST}` is not a list of strings")
    unknown = sorted(set(must) - set(known))
    if unknown:
        raise UnsupportedFormatError(
            f"{what} requires the fields {unknown[:10]}, which this package does not know; upgrade asyncckpt",
            found=found,
            supported=supported,
        )


def list_of(value: Any) -> Sequence[Any]:
    """Return `value` if it is a list or a tuple. Maps and strings can be iterated as well, and are refused.

    Raises:
        ValueError: It is of another type.
    """
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"expected a list, found {type(value).__name__}")
    return value


MANIFEST_VERSION = 1
PLANNER_KEY = "torch.distributed.checkpoint"
"""Key of `Manifest.metadata`: metadata of a planner of `torch.distributed.checkpoint` that saved the checkpoint."""

MAX_MANIFEST_NBYTES = 64 << 20
SHORTEST_MANIFEST_NBYTES = 400
"""A shorter document commits nothing: no manifest of version 1 has fewer than 418 bytes. A tombstone has about 270."""
STATE_COMMITTED = "committed"
STATE_ABANDONED = "abandoned"
"""`state` of a tombstone, which commits nothing."""

_MAX_INT = (1 << 63) - 1
_ZERO_CHECKSUM = FILE_CHECKSUM_PREFIX + "0" * 32
_TRAILER = re.compile(rb'"checksum": "(xxh3_128:[0-9a-f]{32})"\n\}\n\Z')
_VERSION = re.compile(rb'\s*\{\s*"asyncckpt_manifest":\s*([0-9]{1,9})\b')
_TRAILER_NBYTES = len(f'"checksum": "{_ZERO_CHECKSUM}"\n}}\n')


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRecord:
    """One rank's entry in the manifest: name, length and checksum of its index, and totals for `ls` and `du`.

    Attributes:
        rank: The rank.
        index_name, index_nbytes, index_checksum: Name of the index, its exact length in bytes, its `file_checksum`.
        n_tensors: Number of tensors whose first element the rank stored.
        n_files: Number of files that the rank wrote, index included.
        nbytes: Bytes of these files.
    """

    rank: int
    index_name: str
    index_nbytes: int
    index_checksum: str
    n_tensors: int
    n_files: int
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DcpRecord:
    """The `.metadata` file beside a manifest of layout "dcp": exact length in bytes, `file_checksum` of its bytes."""

    nbytes: int
    checksum: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The commit record of a checkpoint.

    Attributes:
        save_id: ID of the save.
        step: The user's training step.
        world_size: Number of ranks.
        created: Time of the commit, ISO 8601, UTC.
        fsync: Whether files were fsynced; if not, a power cut may lose the checkpoint.
        writer: Package and version that wrote it.
        ranks: One entry per rank, in order.
        metadata: The user's JSON.
        timings: Seconds by phase of the save, such as `write`, `fsync` and `index`; each is the largest of all ranks.
            For `asyncckpt inspect` and `report`; a load does not use them. The field is required, and may be empty, as
            after a conversion.
        dcp: In layout "dcp" the record of `.metadata`; None in layout "safetensors".
        mirror: Path or URL of the place that the checkpoint is copied to after its commit; None: there is none.
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
    mirror: str | None = None

    @property
    def layout(self) -> str:
        """Layout of the shard files, one of `names.LAYOUTS`."""
        return SAFETENSORS if self.dcp is None else DCP

    @property
    def nbytes(self) -> int:
        """Bytes of all files that the ranks wrote, indexes included."""
        return sum(r.nbytes for r in self.ranks)


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of `manifest.json` (format/SPEC.md section 2).

    Raises:
        ValueError: The metadata cannot be stored as JSON, or are too large.
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
        **({} if manifest.mirror is None else {"mirror": manifest.mirror}),
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
    """Return the JSON of a manifest or tombstone with its checksum as the last member.

    Raises:
        ValueError: `document` cannot be stored as JSON, or is too large.
    """
    document["checksum"] = _ZERO_CHECKSUM
    blank = (json.dumps(document, indent=1, allow_nan=False) + "\n").encode()
    head, tail = blank[:-_TRAILER_NBYTES], blank[-_TRAILER_NBYTES:]
    if len(blank) > MAX_MANIFEST_NBYTES:  # readers refuse it
        raise ValueError(f"the manifest has {len(blank)} bytes, the limit is {MAX_MANIFEST_NBYTES}; save less metadata")
    return head + tail.replace(_ZERO_CHECKSUM.encode(), file_checksum(blank).encode())


def decode_manifest(data: bytes, path: str = "") -> Manifest:
    """Decode and check a manifest.

    Args:
        data: The file's bytes.
        path: The checkpoint's directory, for messages.

    Raises:
        UnsupportedFormatError: A newer version wrote it, or it requires a field that this version does not know.
        CheckpointNotCommittedError: It is a tombstone.
        CorruptCheckpointError: It is damaged, or not a manifest of asyncckpt.
    """
    try:
        raw = unsealed(data, path)
        _check_fields(raw, {"state": str})
        if raw["state"] == STATE_ABANDONED:
            what = "a save that was begun, never committed, and given up by a clean-up"
            what = "what is left of a checkpoint that was removed" if raw.get("was_committed") is True else what
            raise CheckpointNotCommittedError(f"{path} holds {what}; load another checkpoint", path=path)
        if raw["state"] != STATE_COMMITTED:
            raise ValueError(f"field `state` is {raw['state']!r}, expected {STATE_COMMITTED!r} or {STATE_ABANDONED!r}")
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
    """Check the checksum and the version of a manifest or tombstone, and return its fields.

    Args:
        data: The file's bytes.
        path: The checkpoint's directory, for messages.

    Raises:
        UnsupportedFormatError: A newer version wrote it, or it requires a field that this version does not know.
        ValueError, RecursionError: It is damaged.
    """
    _refuse_newer(data, path)
    trailer = _TRAILER.search(data[-_TRAILER_NBYTES:])
    if len(data) > MAX_MANIFEST_NBYTES:
        raise ValueError(f"it has {len(data)} bytes, the limit is {MAX_MANIFEST_NBYTES}")
    if trailer is None:
        raise ValueError("it does not end with a checksum")
    blank = data[:-_TRAILER_NBYTES] + data[-_TRAILER_NBYTES:].replace(trailer[1], _ZERO_CHECKSUM.encode())
    if file_checksum(blank) != trailer[1].decode():
        raise ValueError("its checksum does not match")
    raw: dict[str, Any] = json.loads(data)
    check_version(raw, "asyncckpt_manifest", MANIFEST_VERSION, what="manifest", known=("layout",))
    return raw


def is_sealed(data: bytes) -> bool:
    """Whether a document ends as a whole one of this version does. A part of one does not."""
    return _TRAILER.search(data[-_TRAILER_NBYTES:]) is not None


def _refuse_newer(data: bytes, path: str) -> None:
    """Check the version before the checksum, whose place may differ in a newer version."""
    found = _VERSION.match(data[:256])
    if found and int(found[1]) > MANIFEST_VERSION:
        raise UnsupportedFormatError(
            f"{path or 'checkpoint'}: manifest version {int(found[1])} is newer than this package reads "
            f"({MANIFEST_VERSION}); upgrade asyncckpt",
            path=path,
            found=int(found[1]),
            supported=MANIFEST_VERSION,
        )


Expected: TypeAlias = type | range
"""What the value of a field may be: one of a type (`object`: anything), or an integer of a range."""

_NUMBER = range(_MAX_INT + 1)
_MANIFEST_FIELDS: Mapping[str, Expected] = {
    "save_id": str,
    "step": range(-_MAX_INT, _MAX_INT + 1),
    "world_size": range(1, MAX_RANKS + 1),
    "created": object,
    "fsync": bool,
    "writer": object,
    "metadata": dict,
    "timings": dict,
    "ranks": list,
}
_RANK_FIELDS: Mapping[str, Expected] = {
    "rank": object,  # `_checked_rank` compares these two with the entry's number
    "index": object,
    "index_nbytes": _NUMBER,
    "index_checksum": str,
    "tensors": _NUMBER,
    "files": _NUMBER,
    "nbytes": _NUMBER,
}
_DCP_FIELDS: Mapping[str, Expected] = {"nbytes": _NUMBER, "checksum": str}

_JSON_TYPES = {
    bool: "true or false",
    dict: "an object",
    float: "a number",
    int: "an integer",
    list: "a list",
    str: "a string",
    type(None): "null",
}


def _check_fields(raw: Mapping[str, Any], fields: Mapping[str, Expected], where: str = "") -> None:
    """Check that `raw` has these fields, each with a value that it may have. Types are exact: True is no integer.

    Args:
        raw: The decoded object.
        fields: Each required field, and what it may be.
        where: What follows a field's name in messages, such as " of entry 3 of `ranks`".

    Raises:
        ValueError: A field is missing, or has another value.
    """
    for name, expected in fields.items():
        if name not in raw:
            raise ValueError(f"field `{name}`{where} is missing")
        value = raw[name]
        kind = int if isinstance(expected, range) else expected
        if kind is not object and type(value) is not kind:
            raise ValueError(f"field `{name}`{where} is {_JSON_TYPES[type(value)]}, expected {_JSON_TYPES[kind]}")
        if isinstance(expected, range) and value not in expected:
            raise ValueError(f"field `{name}`{where} is {value}, expected {expected.start} to {expected.stop - 1}")


def _checked_manifest(raw: dict[str, Any]) -> Manifest:
    _check_fields(raw, _MANIFEST_FIELDS)
    save_id, world_size, records = SaveId.parse(raw["save_id"]), raw["world_size"], raw["ranks"]
    if len(records) != world_size:
        raise ValueError(f"field `ranks` has {len(records)} entries, expected {world_size}, as `world_size` says")
    mirror = raw.get("mirror")
    if mirror is not None and (type(mirror) is not str or not mirror):
        raise ValueError(f"field `mirror` is {mirror!r}, expected a path or URL")
    return Manifest(
        save_id=save_id,
        step=raw["step"],
        world_size=world_size,
        created=str(raw["created"]),
        fsync=raw["fsync"],
        writer=str(raw["writer"]),
        ranks=tuple(_checked_rank(record, number, save_id) for number, record in enumerate(records)),
        metadata=raw["metadata"],
        timings=_checked_timings(raw["timings"]),
        dcp=_checked_dcp(raw) if layout_of(raw) == DCP else None,
        mirror=mirror,
    )


def _checked_timings(raw: dict[str, Any]) -> dict[str, float]:
    try:
        return {str(phase): float(seconds) for phase, seconds in raw.items()}
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"field `timings` has a value that is not a number of seconds: {error}") from error


def _checked_dcp(raw: dict[str, Any]) -> DcpRecord:
    _check_fields(raw, {DCP_METADATA_NAME: dict})
    record, where = raw[DCP_METADATA_NAME], f" of `{DCP_METADATA_NAME}`"
    _check_fields(record, _DCP_FIELDS, where)
    return DcpRecord(nbytes=record["nbytes"], checksum=_checked_checksum(record, "checksum", where))


def _checked_rank(raw: Any, number: int, save_id: SaveId) -> RankRecord:
    where, expected = f" of entry {number} of `ranks`", index_name(save_id, number)
    if type(raw) is not dict:
        raise ValueError(f"entry {number} of `ranks` is {_JSON_TYPES[type(raw)]}, expected an object")
    _check_fields(raw, _RANK_FIELDS, where)
    if type(raw["rank"]) is not int or raw["rank"] != number:
        raise ValueError(f"field `rank`{where} is {raw['rank']!r}, expected {number}")
    if raw["index"] != expected:
        raise ValueError(f"field `index`{where} is {raw['index']!r}, expected {expected!r}")
    return RankRecord(
        rank=number,
        index_name=expected,
        index_nbytes=raw["index_nbytes"],
        index_checksum=_checked_checksum(raw, "index_checksum", where),
        n_tensors=raw["tensors"],
        n_files=raw["files"],
        nbytes=raw["nbytes"],
    )


def _checked_checksum(raw: Mapping[str, Any], name: str, where: str) -> str:
    checksum: str = raw[name]
    if not is_file_checksum(checksum):
        raise ValueError(f"field `{name}`{where} is {checksum[:60]!r}, expected `xxh3_128:` and 32 hex digits")
    return checksum


@dataclass(frozen=True, kw_only=True, slots=True)
class Tombstone:
    """The record in place of a manifest: saves up to `save_id` can no longer be committed to its directory.

    Attributes:
        save_id: The latest save that was given up.
        created: Time at which it was written, ISO 8601, UTC.
        writer: Package and version that wrote it.
        was_committed: Whether that save had been committed, and retention then removed it.
    """

    save_id: SaveId
    created: str
    writer: str
    was_committed: bool = False


def encode_tombstone(tombstone: Tombstone) -> bytes:
    """Return the bytes of a tombstone's file (format/SPEC.md section 2)."""
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
    """Decode a tombstone.

    Args:
        data: The bytes of a file that has the name of a manifest.
        path: The checkpoint's directory, for messages.

    Returns:
        The tombstone, or None if `data` is a manifest or cannot be decoded.
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
    """Return the (path, manifest) pair with the largest save ID (by epoch, then sequence), or None if there is none."""
    return max(manifests, key=lambda pair: pair[1].save_id, default=None)
