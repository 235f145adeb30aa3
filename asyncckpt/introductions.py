"""What the ranks of a save say of it before anything else, and whether that is the same on all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgpack

from asyncckpt.config import CheckpointerConfig
from asyncckpt.errors import RanksDisagreeError
from asyncckpt.protocol.messages import PROTOCOL_VERSION

_AGREED = ("package", "protocol", "path", "step", "replicated", "fsync", "overwrite", "layout")
"""What must be equal on all ranks at the first save, as far as it is known."""

_KNOWN = ("run", "worker", "agreement", "sequence", "slots", "differ", "absent", "contribution")
"""What else a rank says: `Coordination._known` and its contribution."""


def introduced(config: CheckpointerConfig, *, package: str, path: str, step: int) -> dict[str, Any]:
    """Return what a rank says that must be equal on all of them."""
    return {
        "package": package,
        "protocol": PROTOCOL_VERSION,
        "path": path,
        "step": step,
        "replicated": config.replicated,
        "fsync": config.fsync,
        "overwrite": config.overwrite,
        "layout": config.layout,
    }


def check_equal(everybody: Sequence[Mapping[str, Any]]) -> None:
    """Prove that all ranks save the same.

    Raises:
        RanksDisagreeError: Naming what differs, and the ranks.
    """
    for name in _AGREED:
        known = [rank for rank, found in enumerate(everybody) if found[name] != ""]
        for rank in known:
            if everybody[rank][name] != everybody[known[0]][name]:
                raise RanksDisagreeError(
                    f"rank {rank} saves with {name} {everybody[rank][name]!r}, rank {known[0]} with "
                    f"{everybody[known[0]][name]!r}; every rank must save the same step to the same path, with the "
                    "same settings",
                    detail=name,
                    ranks=[known[0], rank],
                    path=everybody[0]["path"],
                )


def unpacked(data: bytes) -> dict[str, Any]:
    """Return one rank's part of the first meeting, or say that it is of another version.

    Raises:
        RanksDisagreeError: It lacks something.
    """
    try:
        found: Mapping[str, Any] = msgpack.unpackb(data)
        if not type(found["sequence"]) is type(found["slots"]) is int or found["slots"] < 1:
            raise ValueError("sequence and slots are no numbers")
        if not all(type(name) is str for name in found["differ"]):
            raise ValueError("names that are no texts")
        return {name: found[name] for name in (*_KNOWN, *_AGREED)}
    except (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException) as error:
        raise RanksDisagreeError(
            f"another rank speaks another version of asyncckpt: {error!r}", detail="version"
        ) from error
