"""Digests of what a checkpoint holds, without save ID and step: the core compares them with the commit before (P8)."""

from __future__ import annotations

import re
from collections.abc import Sequence

import xxhash

from asyncckpt.protocol.request import SaveRequest
from asyncckpt.storage.rank_writer import RankResult
from asyncckpt_worker.core.events import Contents


def rest_print(request: SaveRequest) -> bytes:
    """Return the print of what a rank saves beside its shards, but for save id and step."""
    digest = xxhash.xxh3_128(request.structure)
    digest.update(_without_step(request.objects.replace(request.save_id.encode(), b""), request.step))
    digest.update(_without_step(request.metadata.encode(), request.step))
    return digest.digest()


def contents_of(requests: Sequence[SaveRequest], results: Sequence[RankResult]) -> Contents | None:
    """Return the prints of a checkpoint from those of its ranks, in order.

    None when there is nothing to compare: no tensor, or a rank whose worker told no print.
    """
    known = all(result.shards_print and result.rest_print for result in results)
    if not known or not any(request.n_tensors for request in requests):
        return None
    tensors = xxhash.xxh3_128(b"".join(result.shards_print for result in results))
    return Contents(tensors.digest(), xxhash.xxh3_128(b"".join(result.rest_print for result in results)).digest())


def _without_step(text: bytes, step: int | None) -> bytes:
    """Take every number that is the step out of JSON, also inside texts; zeros may stand before it."""
    if step is None:
        return text
    number = rb"(?<![0-9.])(?<![eE][+-])0*%d(?![0-9])(?!\.[0-9])(?![eE][0-9+-])" % abs(step)
    return re.sub(number, b"step", text)
