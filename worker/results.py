"""What a rank's files came to, as a plain map: how it travels to the worker that commits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from asyncckpt.format.manifest import RankRecord
from asyncckpt.format.names import SaveId, index_name
from asyncckpt.protocol import fields as check
from asyncckpt.storage.prints import PRINT_NBYTES
from asyncckpt.storage.rank_job import RankResult
from asyncckpt.storage.tally import KINDS_NBYTES, LANE_NBYTES, Tally

_TEXTS = ("index_name", "index_checksum")
_PRINTS = ("shards_print", "rest_print")


def pack_result(result: RankResult) -> dict[str, Any]:
    """Return `result` as plain values; of `dcp` only the table, as the request has the structure."""
    return {**asdict(result), "record": asdict(result.record), "dcp": result.dcp and result.dcp[1]}


def unpack_result(found: Mapping[str, Any], save_id: str, rank: int) -> RankResult:
    """Read it back.

    Raises:
        ValueError, TypeError, KeyError: It is no result of this rank and save.
    """
    record = {f.name: found["record"][f.name] for f in fields(RankRecord)}
    for name, value in record.items():
        if not (check.text(value) if name in _TEXTS else check.uint(value)):
            raise ValueError(f"{name} of a result")
    seconds = dict(found["seconds"])
    if record["index_name"] != index_name(SaveId.parse(save_id), rank):
        raise ValueError("the name of an index")
    if record["rank"] != rank or not check.uint(found["nbytes"]) or not all(map(check.seconds, seconds.values())):
        raise ValueError(f"a result of rank {record['rank']}, expected {rank}")
    tally = found["tally"]
    if tally is not None:
        tally = Tally(kinds=tally["kinds"], sums=tally["sums"])
        if type(tally.kinds) is not bytes or type(tally.sums) is not bytes:
            raise ValueError("the tally of a result")
        if len(tally.kinds) != KINDS_NBYTES or len(tally.sums) % LANE_NBYTES:
            raise ValueError(f"a tally of {len(tally.kinds)} and {len(tally.sums)} bytes")
    table = found["dcp"]
    if table is not None and type(table) is not bytes:
        raise ValueError("the table of a result's items")
    prints = {name: found.get(name, b"") for name in _PRINTS}
    if not all(type(value) is bytes and len(value) in (0, PRINT_NBYTES) for value in prints.values()):
        raise ValueError("the prints of a result")
    return RankResult(
        record=RankRecord(**record),
        nbytes=found["nbytes"],
        seconds=seconds,
        direct=bool(found["direct"]),
        dcp=None if table is None else (b"", table),
        **prints,
        tally=tally,
    )
