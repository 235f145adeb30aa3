"""The save request in a sealed slot: everything that the worker needs to write and commit without the trainer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack

from asyncckpt.basics.limits import MAX_PARTS
from asyncckpt.basics.safe_msgpack import unpack_strict
from asyncckpt.errors import ProtocolError
from asyncckpt.protocol import fields as check
from asyncckpt.protocol.messages import PROTOCOL_VERSION
from asyncckpt.protocol.samples import are_samples

MAX_METADATA_NBYTES = 16 << 20
"""Maximum size, indented as in the manifest. Chosen: metadata and 100,000 ranks fit into a manifest."""

MAX_METADATA_NESTING = 64
MAX_THREADS = 1024
RING_UNIT_NBYTES = 262144
"""Unit of a ring's segments: a block of a file (format/SPEC.md section 3)."""

MIN_RING_SEGMENTS = 2
PAGE_NBYTES = 4096
LAYOUTS = ("safetensors", "dcp")


class PartRange(NamedTuple):
    """Position of a shard file in the slot, or in the stream through a ring: `offset`, a multiple of pages, and exact
    length."""

    offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveRequest:
    """One rank's part of a save. Synchronous saves use it too, without a worker and without a slot.

    Attributes:
        save_id: Save ID as text; part of file names.
        step: Step of the save; None: that of rank 0's sealed request.
        path: Absolute path of the checkpoint.
        rank, world_size: Rank of these files, and number of ranks.
        parts: One for each shard file, in order.
        structure: Encoded structure (`format.structure`).
        objects: Content of the objects file.
        n_tensors: Number of tensors.
        metadata: Metadata of the user, as JSON text.
        fsync: False skips all fsyncs, which the manifest records.
        overwrite: Whether an older checkpoint at `path` is replaced.
        umask: Umask of the trainer, for modes of files and directories.
        write_threads: Number of write threads; 0: the worker's default.
        package: asyncckpt version of the trainer.
        commit_timeout_s: How long the other ranks may take to seal after the first one.
        hook_timeout_s: How long the commit waits for this rank's consent after it is durable; 0: no hook.
        plan: Fingerprint of the plan (which rank writes what); "" if there is none.
        samples: Result of `samples.encode_samples`.
        changed: This rank has something that the plan does not contain: the ranks must meet again.
        layout: Layout of the shard files, one of `LAYOUTS`.
        ring_segments, ring_segment_nbytes: Number and size of the ring's cells (memory/SPEC.md section 5); 0: no ring.
        mirror: Where the checkpoint is copied to once it is committed; "": nowhere.
        reuse: Whether shards that are unchanged are linked to files of earlier saves instead of written.
    """

    save_id: str
    step: int | None
    path: str
    rank: int
    world_size: int
    parts: tuple[PartRange, ...]
    structure: bytes
    objects: bytes
    n_tensors: int
    metadata: str
    fsync: bool
    overwrite: bool
    umask: int
    write_threads: int
    package: str
    commit_timeout_s: float
    hook_timeout_s: float
    plan: str
    samples: bytes
    changed: bool
    layout: str = LAYOUTS[0]
    ring_segments: int = 0
    ring_segment_nbytes: int = 0
    mirror: str = ""
    reuse: bool = False


def encode_request(request: SaveRequest) -> bytes:
    """Return the msgpack of `request`."""
    document: dict[str, Any] = {name: getattr(request, name) for name in SaveRequest.__dataclass_fields__}
    document["v"] = PROTOCOL_VERSION
    return bytes(msgpack.packb(document))


def decode_request(data: bytes, body_end: int) -> SaveRequest:
    """Read and check a request.

    Args:
        data: The bytes from the slot.
        body_end: Parts must be in whole pages between the head page and this offset.

    Raises:
        ProtocolError: The request is not valid by SPEC.md.
    """
    try:
        raw = unpack_strict(data)
        if not isinstance(raw, dict) or raw.pop("v", None) != PROTOCOL_VERSION:
            raise ValueError("the version is another one")
        if not isinstance(raw["parts"], tuple):
            raise ValueError("parts are not a list")
        parts = tuple(PartRange(offset, nbytes) for offset, nbytes in raw["parts"])
        known = {name: raw[name] for name in SaveRequest.__dataclass_fields__}
        request = SaveRequest(**{**known, "parts": parts})
        _check(request)
        _check_parts(parts, check.MAX_INT if request.ring_segments else body_end)
        _check_ring(request, body_end)
        return request
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError, msgpack.UnpackException) as error:
        raise ProtocolError(f"the slot's request does not decode: {error!r}", detail=str(error)) from error


def check_metadata(text: str) -> None:
    """Check that the user's metadata can be stored in a manifest.

    Raises:
        ValueError: It is not a JSON object, is nested too deeply or too large, or has NaN or infinities.
    """
    if len(text) > MAX_METADATA_NBYTES:
        raise ValueError(f"metadata of {len(text)} characters, the limit is {MAX_METADATA_NBYTES} bytes")
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("metadata nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("metadata is not a JSON object")
    level: list[Any] = [found]
    for _ in range(MAX_METADATA_NESTING + 1):
        level = [m for v in level for m in (v.values() if isinstance(v, dict) else v) if isinstance(m, (dict, list))]
    if level:
        raise ValueError(f"metadata nested deeper than {MAX_METADATA_NESTING}")
    nbytes = len(json.dumps(found, indent=1, allow_nan=False))
    if nbytes > MAX_METADATA_NBYTES:
        raise ValueError(f"metadata of {nbytes} bytes, the limit is {MAX_METADATA_NBYTES}")


_CHECKS: dict[str, check.Check] = {
    "save_id": check.save_id,
    "step": check.sint_or_none,
    "path": check.path,
    "rank": check.uint,
    "world_size": check.uint,
    "structure": lambda value: type(value) is bytes,
    "objects": lambda value: type(value) is bytes,
    "n_tensors": check.uint,
    "metadata": lambda value: type(value) is str,
    "fsync": check.flag,
    "overwrite": check.flag,
    "umask": check.umask,
    "write_threads": lambda value: check.uint(value) and value <= MAX_THREADS,
    "package": check.text,
    "commit_timeout_s": check.timeout,
    "hook_timeout_s": check.seconds,
    "plan": check.hex16_or_none,
    "samples": are_samples,
    "changed": check.flag,
    "layout": lambda value: value in LAYOUTS,
    "ring_segments": check.uint,
    "ring_segment_nbytes": check.uint,
    "mirror": check.path_or_none,
    "reuse": check.flag,
}


def _check(request: SaveRequest) -> None:
    wrong = [name for name, fits in _CHECKS.items() if not fits(getattr(request, name))]
    if wrong:
        raise ValueError(f"fields with invalid values: {wrong}")
    if not check.is_in_world(request.rank, request.world_size):
        raise ValueError(f"rank {request.rank} of world {request.world_size}")
    check_metadata(request.metadata)


def _check_ring(request: SaveRequest, body_end: int) -> None:
    cells, nbytes = request.ring_segments, request.ring_segment_nbytes
    if (cells, nbytes) == (0, 0):
        return
    if cells < MIN_RING_SEGMENTS or nbytes == 0 or nbytes % RING_UNIT_NBYTES:
        raise ValueError(f"a ring of {cells} segments of {nbytes} bytes")
    if PAGE_NBYTES + cells * nbytes > body_end:
        raise ValueError(f"a ring of {cells} segments of {nbytes} bytes reaches beyond {body_end}")


def _check_parts(parts: tuple[PartRange, ...], body_end: int) -> None:
    if len(parts) > MAX_PARTS:
        raise ValueError(f"{len(parts)} parts, the limit is {MAX_PARTS}")
    end = PAGE_NBYTES
    for p in parts:
        if not check.uint(p.offset) or not check.uint(p.nbytes) or p.nbytes == 0:
            raise ValueError(f"part {p}")
        if p.offset % PAGE_NBYTES or p.offset < end:
            raise ValueError(f"part {p} begins inside a page or another part")
        end = p.offset + -(-p.nbytes // PAGE_NBYTES) * PAGE_NBYTES
        if end > body_end:
            raise ValueError(f"part {p} reaches beyond {body_end}")
