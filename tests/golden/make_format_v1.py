"""Writes the golden documents of format version 1 into tests/golden/format-v1.

Run once per format version: `python tests/golden/make_format_v1.py`. The bytes that it wrote are kept for ever: a later
version of the package must still read them. A change that alters them is a new format version, not a new golden file.
"""

from __future__ import annotations

import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent / "unit")]

from format_samples import IMAGE, INDEX, LAYOUT, MANIFEST, OBJECTS, SAVE_ID, SHARDED_STRUCTURE, STRUCTURE  # noqa: E402

from asyncckpt.format.index import encode_index  # noqa: E402
from asyncckpt.format.layout import SAVE_ID_NBYTES, SAVE_ID_OFFSET, save_id_bytes  # noqa: E402
from asyncckpt.format.manifest import encode_manifest  # noqa: E402
from asyncckpt.format.structure import encode_structure  # noqa: E402


def documents() -> dict[str, bytes]:
    """Return every golden file by name, as the package writes it today."""
    header = bytearray(LAYOUT.parts[0].header)
    header[SAVE_ID_OFFSET : SAVE_ID_OFFSET + SAVE_ID_NBYTES] = save_id_bytes(SAVE_ID)
    return {
        "manifest.json": encode_manifest(MANIFEST),
        "index.msgpack": encode_index(INDEX),
        "structure.msgpack": encode_structure(STRUCTURE),
        "structure-sharded.msgpack": encode_structure(SHARDED_STRUCTURE),
        "objects.json": OBJECTS,
        "shard.safetensors": bytes(header) + IMAGE[len(header) :],
    }


if __name__ == "__main__":
    for name, data in documents().items():
        (HERE / "format-v1" / name).write_bytes(data)
        print(f"{len(data):8} {name}")
