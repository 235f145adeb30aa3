"""Encode and decode the rows that leader and followers send each other (`protocol.node_tables`).

A rank's part in a save is one row. Its large fields, the request and the result of the write, are sent until the leader
has acknowledged them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields, replace
from typing import Any

import msgpack

from asyncckpt.format.coverage import KINDS_NBYTES, LANE_NBYTES, Tally
from asyncckpt.format.manifest import RankRecord
from asyncckpt.format.names import SaveId, index_name
from asyncckpt.protocol import fields as check
from asyncckpt.protocol.fields import MAX_TABLE
from asyncckpt.protocol.messages import Begin
from asyncckpt.protocol.node_tables import CONSENTED, PAGE_NBYTES
from asyncckpt.protocol.request import SaveRequest, decode_request, encode_request
from asyncckpt.protocol.save_phases import DURABLE, OPEN, SEALED
from asyncckpt.storage.rank_writer import RankResult
from asyncckpt.storage.shard_writer import PRINT_NBYTES
from asyncckpt_worker.core.model import RankSave

PHASE_ORDER = {"": 0, OPEN: 1, SEALED: 2, DURABLE: 3, CONSENTED: 4}
"""Phase of a row, or of `known` -> its order."""

PRESENT_S = 5.0
"""A worker counts as reachable for this long after its last message."""

MAX_SUMS_NBYTES = 1 << 20
"""Maximum size of a rank's sums in a row; the leader computes larger ones from the rank's index. Chosen."""

_ANY_OFFSET = 1 << 62
"""Size of the slot for the checks of a request: the leader does not know it."""

_TEXTS = ("index_name", "index_checksum")
_PRINTS = ("shards_print", "rest_print")

Row = Mapping[str, Any]


def reported_phase(part: RankSave) -> str:
    """Return the phase of a part's row: `sealed` for all phases from the seal until durable; "" once it has ended."""
    if part.ended:
        return ""
    return DURABLE if part.phase == DURABLE else OPEN if part.is_open else SEALED


def known_phase(part: RankSave) -> str:
    """Return what `known` says of a part once the leader has its row."""
    phase = reported_phase(part)
    return CONSENTED if phase == DURABLE and part.has_consented else phase


def part_row(save_id: str, part: RankSave, *, recovering: bool) -> dict[str, Any]:
    """Return the row of a rank's part in an open save.

    Args:
        save_id: ID of the save.
        part: The part.
        recovering: A dead worker or former leader may have written or committed it.
    """
    phase = reported_phase(part)
    row: dict[str, Any] = {
        "save_id": save_id,
        "rank": part.rank,
        "phase": phase,
        "step": part.step,
        "path": part.path,
        "nbytes": part.nbytes,
        "umask": part.umask,
        "overwrite": part.overwrite,
        "commit_timeout_s": part.commit_timeout_s,
        "recovering": recovering,
        "streamed": part.ring,
        "writing": part.ring and part.writing and phase == OPEN,
    }
    if PHASE_ORDER[phase] >= PHASE_ORDER[SEALED] > PHASE_ORDER[part.acknowledged]:
        assert part.request is not None
        slim = replace(part.request, structure=b"", objects=b"", metadata="{}")
        row["request"] = encode_request(slim)
    if PHASE_ORDER[phase] >= PHASE_ORDER[DURABLE] > PHASE_ORDER[part.acknowledged]:
        row["result"], row["report"] = pack_result(part.result), part.report
    if part.consent is not None:
        row["consent"], row["reason"] = part.consent
    return row


def begin_of(row: Row) -> Begin:
    """Return the Begin of a row, which has no `fsync`.

    The leader prepares a directory for a rank of another node only if a dead worker may have written there; then it
    flushes, whatever the setting.
    """
    return Begin(
        id=0,
        save_id=row["save_id"],
        step=row["step"],
        path=row["path"],
        slot=0,
        generation=0,
        nbytes=row["nbytes"],
        umask=row["umask"],
        fsync=True,
        overwrite=row["overwrite"],
        commit_timeout_s=row["commit_timeout_s"],
    )


def request_of(row: Row) -> SaveRequest | None:
    """Return the request of a row of a sealed part, without structure, objects and metadata.

    Raises:
        ValueError: It is of another save or rank.
        ProtocolError: It does not decode.
    """
    if "request" not in row:
        return None
    request = decode_request(row["request"], _ANY_OFFSET)
    if (request.save_id, request.rank) != (row["save_id"], row["rank"]):
        raise ValueError(f"its request is of rank {request.rank} in save {request.save_id}")
    return request


def pack_result(result: RankResult) -> dict[str, Any]:
    """Return the result of a rank's write as plain values, without the structure and sums that are too large."""
    tally = result.tally
    if tally is not None and len(tally.sums) > MAX_SUMS_NBYTES:
        tally = None
    return {**asdict(replace(result, tally=tally, dcp=None)), "record": asdict(result.record)}


def unpack_result(found: Row, save_id: str, rank: int) -> RankResult:
    """Decode the result of a rank's write.

    Raises:
        ValueError, TypeError, KeyError: It is not a valid result of this rank and save.
    """
    record = {f.name: found["record"][f.name] for f in fields(RankRecord)}
    for name, value in record.items():
        if not (check.text(value) if name in _TEXTS else check.uint(value)):
            raise ValueError(f"{name} of a result is not a valid value, but a {type(value).__name__}")
    seconds = dict(found["seconds"])
    if record["index_name"] != index_name(SaveId.parse(save_id), rank):
        raise ValueError(f"the index of a result must be named {index_name(SaveId.parse(save_id), rank)}")
    if record["rank"] != rank or not check.uint(found["nbytes"]) or not all(map(check.seconds, seconds.values())):
        raise ValueError(f"a result of rank {record['rank']}, expected {rank}")
    tally = found["tally"]
    if tally is not None:
        tally = Tally(kinds=tally["kinds"], sums=tally["sums"])
        if type(tally.kinds) is not bytes or type(tally.sums) is not bytes:
            raise ValueError("kinds and sums of a tally must be bytes")
        if len(tally.kinds) != KINDS_NBYTES or len(tally.sums) % LANE_NBYTES:
            raise ValueError(f"a tally of {len(tally.kinds)} and {len(tally.sums)} bytes")
    prints = {name: found.get(name, b"") for name in _PRINTS}
    if not all(type(value) is bytes and len(value) in (0, PRINT_NBYTES) for value in prints.values()):
        raise ValueError(f"digests of a result must have 0 or {PRINT_NBYTES} bytes")
    return RankResult(
        record=RankRecord(**record),
        nbytes=found["nbytes"],
        seconds=seconds,
        direct=bool(found["direct"]),
        **prints,
        tally=tally,
    )


def pages(tables: Mapping[str, Iterable[Row]]) -> Iterator[dict[str, tuple[Row, ...]]]:
    """Yield the rows of several tables in pages of about `PAGE_NBYTES`; at least one page, which may be empty."""
    page: dict[str, list[Row]] = {name: [] for name in tables}
    nbytes, any_yet = 0, False
    for name, rows in tables.items():
        for row in rows:
            size = len(msgpack.packb(row))
            if nbytes and (nbytes + size > PAGE_NBYTES or len(page[name]) >= MAX_TABLE):
                yield {n: tuple(some) for n, some in page.items()}
                page, nbytes, any_yet = {n: [] for n in tables}, 0, True
            page[name].append(row)
            nbytes += size
    if nbytes or not any_yet:
        yield {n: tuple(some) for n, some in page.items()}
