"""What loads and saves have learnt of the device of a directory: how many threads, how much at a time, how fast."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping
from typing import Any

from asyncckpt.doctor.findings import Finding, ok
from asyncckpt.errors import EndpointError
from asyncckpt.protocol.endpoint import socket_path, users_directory
from asyncckpt.sizes import human
from asyncckpt.storage.pace import Pace
from asyncckpt.storage.pace_file import DevicePaces

_VERBS = {"read": "loads read", "write": "the worker writes"}


def learnt_paces(place: str, endpoint: str | None, environ: Mapping[str, str]) -> Finding:
    """Return what is known (ADR 0028). Reads two small files at most, and raises nothing.

    Args:
        place: A directory that is there.
        endpoint: Of the worker, beside which it keeps what it learns; None: this user's own directory.
        environ: For where that is.
    """
    own = users_directory(environ, os.geteuid())
    try:
        beside = own if endpoint is None else os.path.dirname(socket_path(endpoint))
    except EndpointError:
        beside = own
    facts = {name: _rows(directory, name, place) for name, directory in (("read", own), ("write", beside))}
    texts = [f"{_VERBS[name]} {_shown(rows)}" for name, rows in facts.items() if rows]
    if not texts:
        return ok("pace", "nothing was learnt of this device yet: large loads and saves go at the default", **facts)
    return ok("pace", "; ".join(texts), **facts)


def _rows(directory: str | None, direction: str, place: str) -> list[dict[str, Any]]:
    rates: dict[Pace, list[float]] = {}
    for sample in DevicePaces(directory, direction, None).samples(place):
        rates.setdefault(sample.pace, []).append(sample.bytes_per_s)
    rows = [
        {**pace._asdict(), "samples": len(found), "bytes_per_s": round(statistics.median(found))}
        for pace, found in rates.items()
    ]
    return sorted(rows, key=lambda row: -row["bytes_per_s"])


def _shown(rows: list[dict[str, Any]]) -> str:
    best, *others = rows
    return (
        f"{human(best['bytes_per_s'])}/s by {best['threads']} threads of {human(best['extent_nbytes'])} "
        f"(median of {best['samples']}"
        + (f"; {len(others)} more were tried, the slowest had {human(others[-1]['bytes_per_s'])}/s)" if others else ")")
    )
