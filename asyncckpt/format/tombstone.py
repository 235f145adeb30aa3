"""The record of a save that was given up: it stands where the manifest would, so that the save can never be committed.

IMPORTANT: like a manifest it is put if none is there. Whoever finds it may remove the files of its save and of all
earlier ones at that path, because none of them can be published any more; later saves may take its place.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncckpt.errors import UnsupportedFormatError
from asyncckpt.format.manifest import MANIFEST_VERSION, STATE_ABANDONED, sealed, unsealed
from asyncckpt.format.names import SaveId


@dataclass(frozen=True, kw_only=True, slots=True)
class Tombstone:
    """See the module.

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
