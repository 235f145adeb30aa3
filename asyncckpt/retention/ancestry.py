"""Which checkpoints the newest one comes from. Pure.

Every checkpoint of a manager names, in its manifest's metadata, the saves that its run and the runs before it went on
from. After `restore(step=100)` and a new save, what the old branch saved after step 100 is no ancestor of the newest
checkpoint any more: it is abandoned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from asyncckpt.format.names import SaveId
from asyncckpt.format.steps import lineage_key

METADATA_KEY = "asyncckpt_manager"
"""Where a manager keeps what it must know, in a manifest's metadata; format/SPEC.md section 2."""

_FLOAT = "float"

MAX_ANCESTRY = 256
"""Restarts that are remembered; checkpoints of runs before those count as ancestors. Chosen: 8 KiB of a manifest."""


def ancestry_in(metadata: Mapping[str, Any]) -> tuple[SaveId, ...] | None:
    """Return the saves that a checkpoint's run and the runs before it went on from, the latest first.

    Returns:
        None: The checkpoint does not say.
    """
    told = metadata.get(METADATA_KEY)
    raw = told.get("ancestry") if isinstance(told, Mapping) else None
    if not isinstance(raw, Sequence) or isinstance(raw, str):
        return None
    try:
        return tuple(SaveId.parse(text) for text in raw)
    except (ValueError, TypeError):
        return None


def metrics_in(metadata: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the metrics that a checkpoint was saved with; None: there are none."""
    told = metadata.get(METADATA_KEY)
    metrics = told.get("metrics") if isinstance(told, Mapping) else None
    return _read(metrics) if isinstance(metrics, Mapping) else None


def told(ancestry: Sequence[SaveId], metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what a manager adds to the metadata of a checkpoint.

    Args:
        ancestry: What this run went on from, and those before it; the latest first.
        metrics: The user's: JSON values; numbers may be of numpy or torch, and NaN or infinite: a loss is so now and
            then, and a training must not fail for it.
    """
    found: dict[str, Any] = {"ancestry": [str(one) for one in ancestry[:MAX_ANCESTRY]]}
    if metrics is not None:
        found["metrics"] = _written(dict(metrics))
    return {METADATA_KEY: found}


def _written(value: Any) -> Any:
    """JSON has no NaN and no infinities: they become `{"float": "nan"}`."""
    if isinstance(value, Mapping):
        return {key: _written(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_written(one) for one in value]
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        value = value.item()
    return {_FLOAT: repr(value)} if isinstance(value, float) and not math.isfinite(value) else value


def _read(value: Any) -> Any:
    if isinstance(value, Mapping):
        if set(value) == {_FLOAT} and value[_FLOAT] in ("nan", "inf", "-inf"):
            return float(value[_FLOAT])
        return {key: _read(one) for key, one in value.items()}
    return [_read(one) for one in value] if isinstance(value, list) else value


def extended(save_id: SaveId, metadata: Mapping[str, Any]) -> tuple[SaveId, ...]:
    """Return the ancestry of a run that goes on from a checkpoint."""
    return (save_id, *(ancestry_in(metadata) or ()))[:MAX_ANCESTRY]


def is_ancestor(save_id: SaveId, newest: SaveId, ancestry: Sequence[SaveId] | None) -> bool:
    """Whether a checkpoint lies on the branch of the newest one.

    Args:
        save_id: Of the checkpoint.
        newest: Save id of the newest one.
        ancestry: What that one says; None: it says nothing, and all older ones are taken for its ancestors.
    """
    if ancestry is None or save_id.run_id == newest.run_id:
        return True
    if len(ancestry) >= MAX_ANCESTRY and lineage_key(save_id) < lineage_key(ancestry[-1]):
        return True  # forgotten
    return any(one.run_id == save_id.run_id and lineage_key(save_id) <= lineage_key(one) for one in ancestry)
