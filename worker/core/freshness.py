"""Whether a snapshot is bit for bit the one that its run committed before, although its step is another (P8).

Training that goes on changes something. A snapshot in which nothing has changed was taken of values that nobody trains,
a clone that was made once, say; or the copying is at fault.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from asyncckpt.protocol.request import SaveRequest
from asyncckpt.storage.rank_writer import RankResult


@dataclass(frozen=True, slots=True)
class Contents:
    """Prints of a whole checkpoint. `tensors`: of all shards; `rest`: of all else, but for the step."""

    tensors: bytes
    rest: bytes


@dataclass(frozen=True, slots=True)
class Committed:
    """What a run remembers of the save that it committed last."""

    sequence: int
    step: int
    contents: Contents


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


def unchanged(last: Committed, save: Committed) -> dict[str, Any]:
    """Return the figures that a report has of a save that equals the one before in its tensors; else none.

    Args:
        last: What the run committed before.
        save: What it has committed now.

    Returns:
        `same_tensors_as_step`: the step of the one before; `unchanged`, which is true: the rest is equal as well, but
        for the step.
    """
    if last.step == save.step or last.contents.tensors != save.contents.tensors:
        return {}
    same = {"same_tensors_as_step": last.step}
    return same | ({"unchanged": True} if last.contents.rest == save.contents.rest else {})


def _without_step(text: bytes, step: int | None) -> bytes:
    """Take every number that is the step out of JSON, also inside texts; zeros may stand before it."""
    if step is None:
        return text
    number = rb"(?<![0-9.])(?<![eE][+-])0*%d(?![0-9])(?!\.[0-9])(?![eE][0-9+-])" % abs(step)
    return re.sub(number, b"step", text)
