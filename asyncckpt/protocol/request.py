"""The save request: what a trainer leaves in its sealed slot, enough to write and commit without the trainer."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import msgpack

from asyncckpt.errors import ProtocolError
from asyncckpt.protocol.messages import MAX_PATH_BYTES, PROTOCOL_VERSION

MAX_METADATA_NBYTES = 16 << 20
_SAVE_ID = re.compile(r"[0-9]{6}-[0-9]{8}-[0-9a-f]{12}\Z")
_TOP = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PartRange:
    """Where the image of one shard file lies in the slot: `offset` (whole pages) and the file's exact length."""

    offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveRequest:
    """See the module.

    Attributes:
        save_id: As text; file names are made from it.
        step, path: As the user gave them; the path absolute.
        rank, world_size: Whose files these are, and how many ranks make the checkpoint.
        parts: One per shard file, in order.
        structure: `format.structure`'s bytes, verbatim.
        objects: The objects file's bytes, verbatim.
        n_tensors: For reports.
        metadata: The user's JSON as text.
        fsync: False skips every fsync; the manifest then says so.
        umask: The trainer's, for the modes of files and directories.
        write_threads: Threads to write with; 0 leaves the choice to the worker.
        package: The trainer's asyncckpt version.
    """

    save_id: str
    step: int
    path: str
    rank: int
    world_size: int
    parts: tuple[PartRange, ...]
    structure: bytes
    objects: bytes
    n_tensors: int
    metadata: str
    fsync: bool
    umask: int
    write_threads: int
    package: str


def encode_request(request: SaveRequest) -> bytes:
    """Return the msgpack of `request`."""
    return bytes(
        msgpack.packb(
            {
                "v": PROTOCOL_VERSION,
                "save_id": request.save_id,
                "step": request.step,
                "path": request.path,
                "rank": request.rank,
                "world_size": request.world_size,
                "parts": [[p.offset, p.nbytes] for p in request.parts],
                "structure": request.structure,
                "objects": request.objects,
                "n_tensors": request.n_tensors,
                "metadata": request.metadata,
                "fsync": request.fsync,
                "umask": request.umask,
                "write_threads": request.write_threads,
                "package": request.package,
            }
        )
    )


def decode_request(data: bytes, body_end: int) -> SaveRequest:
    """Read and check a request.

    Args:
        data: The bytes from the slot.
        body_end: Parts must lie in whole pages between the head page and this offset.

    Raises:
        ProtocolError: Anything that the SPEC forbids.
    """
    try:
        raw = msgpack.unpackb(data, use_list=False, strict_map_key=True)
        if not isinstance(raw, dict) or raw.pop("v", None) != PROTOCOL_VERSION:
            raise ValueError("version")
        parts = tuple(PartRange(offset=o, nbytes=n) for o, n in raw["parts"])
        known = {name: raw[name] for name in SaveRequest.__dataclass_fields__}
        request = SaveRequest(**{**known, "parts": parts})
        _check(request)
        _check_parts(parts, body_end)
        return request
    except (ValueError, TypeError, KeyError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"the slot's request does not decode: {error!r}", detail=str(error)) from error


def _check(request: SaveRequest) -> None:
    types: dict[str, type] = {"structure": bytes, "objects": bytes, "metadata": str, "fsync": bool, "package": str}
    wrong = [n for n, t in types.items() if type(getattr(request, n)) is not t]
    wrong += [
        n
        for n in ("rank", "world_size", "n_tensors", "umask", "write_threads")
        if type(getattr(request, n)) is not int or not 0 <= getattr(request, n) <= _TOP
    ]
    path: Any = request.path
    if type(path) is not str or not path.startswith("/") or "\0" in path or len(path) > MAX_PATH_BYTES:
        wrong.append("path")
    if type(request.save_id) is not str or not _SAVE_ID.match(request.save_id):
        wrong.append("save_id")
    if type(request.step) is not int or not -_TOP <= request.step <= _TOP:
        wrong.append("step")
    if not wrong and not request.rank < request.world_size <= 100_000:
        wrong.append("rank")
    if wrong:
        raise ValueError(f"fields {wrong}")
    if len(request.metadata) > MAX_METADATA_NBYTES or not isinstance(json.loads(request.metadata), dict):
        raise ValueError("metadata is no JSON object")


def _check_parts(parts: tuple[PartRange, ...], body_end: int) -> None:
    end = 4096
    for p in parts:
        if type(p.offset) is not int or type(p.nbytes) is not int or p.offset % 4096 or p.offset < end or p.nbytes <= 0:
            raise ValueError(f"part {p}")
        end = p.offset + -(-p.nbytes // 4096) * 4096
        if end > body_end:
            raise ValueError(f"part {p} reaches beyond {body_end}")
