"""Digests of a checkpoint's contents, without save ID and step: the core compares them with the last commit (P8)."""

from __future__ import annotations

import re
from collections.abc import Sequence

import xxhash

from asyncckpt.protocol.request import SaveRequest
from asyncckpt.storage.rank_writer import RankResult
from asyncckpt_worker.core.events import ContentDigests


def rest_print(request: SaveRequest) -> bytes:
    """Return the digest of a rank's structure, objects and metadata, without save ID and step."""
    digest = xxhash.xxh3_128(request.structure)
    digest.update(_without_step(request.objects.replace(request.save_id.encode(), b""), request.step))
    digest.update(_without_step(request.metadata.encode(), request.step))
    return digest.digest()


def digests_of(requests: Sequence[SaveRequest], results: Sequence[RankResult]) -> ContentDigests | None:
    """Return the digests of a checkpoint from those of its ranks, in order.

    None if they cannot be compared: no tensor, or a rank whose result has no digest.
    """
    known = all(result.shards_print and result.rest_print for result in results)
    if not known or not any(request.n_tensors for request in requests):
        return None
    tensors = xxhash.xxh3_128(b"".join(result.shards_print for result in results))
    return ContentDigests(tensors.digest(), xxhash.xxh3_128(b"".join(result.rest_print for result in results)).digest())


def _without_step(text: bytes, step: int | None) -> bytes:
    """Replace every number that equals the step in JSON, inside texts too, and with leading zeros."""
    if step is None:
        return text
    number = rb"(?<![0-9.])(?<![eE][+-])0*%d(?![0-9])(?!\.[0-9])(?![eE][0-9+-])" % abs(step)
    return re.sub(number, b"step", text)
