"""The retention policy: which checkpoints may be removed. Pure functions of values.

Checkpoints are ordered by lineage, not by step. Every checkpoint of a manager names, in its manifest's metadata, the
saves that its run and the runs before it have restored from. After `restore(step=100)` and a new save, what the old
branch saved after step 100 is not an ancestor of the newest checkpoint. It is abandoned, and removed first.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncckpt.errors import ConfigError
from asyncckpt.format.names import SaveId

BEST_MODES = ("min", "max")

METADATA_KEY = "asyncckpt_manager"
"""Key of a manager's own entry in a manifest's metadata; format/SPEC.md section 2."""

_FLOAT = "float"

MAX_ANCESTRY = 256
"""Number of restarts to remember; checkpoints of earlier runs count as ancestors. Chosen: 8 KiB of a manifest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredCheckpoint:
    """A committed checkpoint, as retention sees it.

    Attributes:
        name: Name of its directory in the root.
        step: Step in its manifest.
        save_id: Save id in its manifest.
        score: Score of its metrics by `best_fn`; with None, NaN or infinity it cannot be the best.
        is_abandoned: Whether it is on a branch that a rollback has abandoned: it is not an ancestor of the newest one.
        is_sound: False for a checkpoint that was found damaged; it does not count as the newest or the best.
        nbytes: Bytes of its files, by its manifest.
        is_unmirrored: Whether it is still to be copied to its mirror.
    """

    name: str
    step: int
    save_id: SaveId
    score: float | None = None
    is_abandoned: bool = False
    is_sound: bool = True
    nbytes: int = 0
    is_unmirrored: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionPolicy:
    """Which checkpoints to keep.

    Attributes:
        max_to_keep: How many checkpoints stay, the newest and the best among them; None: all. Pinned ones and those of
            `keep_period` come on top.
        keep_period: Checkpoints whose step is a multiple of this stay for ever; None: none.
        best_mode: Whether the best score is the smallest ("min") or the largest ("max").
        max_unmirrored: How many checkpoints beyond `max_to_keep` stay until they are in their mirrors; None: all, as
            long as there is room for two more checkpoints.

    Raises:
        ConfigError: An impossible value.
    """

    max_to_keep: int | None = None
    keep_period: int | None = None
    best_mode: str = "min"
    max_unmirrored: int | None = None

    def __post_init__(self) -> None:
        for field, least in (("max_to_keep", 1), ("keep_period", 1), ("max_unmirrored", 0)):
            value = getattr(self, field)
            if value is not None and (type(value) is not int or value < least):
                text = f"{field}={value!r}: expected None or an int from {least}"
                raise ConfigError(text, field=field, value=repr(value))
        if self.best_mode not in BEST_MODES:
            raise ConfigError(
                f"best_mode={self.best_mode!r}: expected one of {BEST_MODES}", field="best_mode", value=self.best_mode
            )


def newest_of(stored: Collection[StoredCheckpoint]) -> StoredCheckpoint | None:
    """Return the newest sound checkpoint by lineage; None: there is none."""
    return max((one for one in stored if one.is_sound), key=lambda one: one.save_id, default=None)


def best_of(stored: Collection[StoredCheckpoint], best_mode: str) -> StoredCheckpoint | None:
    """Return the sound checkpoint with the best score, the newest of equal ones; None: none has a score."""
    scored = [one for one in stored if one.is_sound and one.score is not None and math.isfinite(one.score)]
    sign = -1 if best_mode == "min" else 1
    return max(scored, key=lambda one: (sign * (one.score or 0.0), one.save_id), default=None)


def to_delete(
    stored: Sequence[StoredCheckpoint], policy: RetentionPolicy, pinned: Collection[str] = ()
) -> list[StoredCheckpoint]:
    """Return the checkpoints to remove, in the order of removal.

    They never include the newest sound one, the best, pinned ones and those of `keep_period`. If no checkpoint is
    sound, there are none.

    Args:
        stored: All committed checkpoints of a root.
        policy: What to keep.
        pinned: Names of pinned checkpoints.
    """
    newest, best = newest_of(stored), best_of(stored, policy.best_mode)
    if policy.max_to_keep is None or newest is None:
        return []
    counted = sorted((one for one in stored if not _is_exempt(one, policy, pinned)), key=_removal_order, reverse=True)
    room = policy.max_to_keep - sum(one in (newest, best) for one in counted)
    doomed = []
    for one in counted:
        if one in (newest, best):
            continue
        if room > 0:
            room -= 1
        else:
            doomed.append(one)
    return doomed[::-1]


def _is_exempt(one: StoredCheckpoint, policy: RetentionPolicy, pinned: Collection[str]) -> bool:
    return one.name in pinned or (policy.keep_period is not None and one.step % policy.keep_period == 0)


def _removal_order(one: StoredCheckpoint) -> tuple[bool, bool, SaveId]:
    """Return a sort key, smallest for what is removed first."""
    return one.is_sound, not one.is_abandoned, one.save_id


def ancestry_in(metadata: Mapping[str, Any]) -> tuple[SaveId, ...] | None:
    """Return the saves that a checkpoint's run and the runs before it have restored from, the latest first.

    Returns:
        None if the checkpoint does not say.
    """
    raw = _section(metadata).get("ancestry")
    if not isinstance(raw, Sequence) or isinstance(raw, str):
        return None
    try:
        return tuple(SaveId.parse(text) for text in raw)
    except (ValueError, TypeError):
        return None


def metrics_in(metadata: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the metrics that a checkpoint was saved with; None: there are none."""
    metrics = _section(metadata).get("metrics")
    return _from_json(metrics) if isinstance(metrics, Mapping) else None


def _section(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a manager has put into a manifest's metadata; empty if none has."""
    found = metadata.get(METADATA_KEY)
    return found if isinstance(found, Mapping) else {}


def manager_metadata(ancestry: Sequence[SaveId], metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what a manager adds to the metadata of a checkpoint.

    Args:
        ancestry: Saves that this run and those before it have restored from, the latest first.
        metrics: The user's metrics, as JSON values. Numbers may be of numpy or torch, and NaN or infinite, as a loss
            may be.
    """
    found: dict[str, Any] = {"ancestry": [str(one) for one in ancestry[:MAX_ANCESTRY]]}
    if metrics is not None:
        found["metrics"] = _to_json(dict(metrics))
    return {METADATA_KEY: found}


def _to_json(value: Any) -> Any:
    """JSON has no NaN and no infinities: they become `{"float": "nan"}`."""
    if isinstance(value, Mapping):
        return {key: _to_json(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(one) for one in value]
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        value = value.item()
    return {_FLOAT: repr(value)} if isinstance(value, float) and not math.isfinite(value) else value


def _from_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        if set(value) == {_FLOAT} and value[_FLOAT] in ("nan", "inf", "-inf"):
            return float(value[_FLOAT])
        return {key: _from_json(one) for key, one in value.items()}
    return [_from_json(one) for one in value] if isinstance(value, list) else value


def extended_ancestry(save_id: SaveId, metadata: Mapping[str, Any], times: int = 1) -> tuple[SaveId, ...]:
    """Return the ancestry of a run that has restored from a checkpoint.

    Args:
        save_id: ID of the checkpoint's save.
        metadata: Its metadata.
        times: How often the run has restored from it. It is named as often, so that what the run has saved after an
            earlier time has another ancestry.
    """
    return (*[save_id] * times, *(ancestry_in(metadata) or ()))[:MAX_ANCESTRY]


def is_ancestor(
    save_id: SaveId, own: Sequence[SaveId] | None, newest: SaveId, ancestry: Sequence[SaveId] | None
) -> bool:
    """Return whether a checkpoint is on the branch of the newest one.

    It is if it was saved before what the newest one's run, or an earlier one, has restored from, by the same run, and
    after the restore before that, if there was one in that run: then both have the same ancestry.

    Args:
        save_id: Save id of the checkpoint.
        own: Ancestry in its metadata; None: it has none, and all that its run has saved counts.
        newest: Save id of the newest checkpoint.
        ancestry: Ancestry in the newest one's metadata; None: it has none, and all older ones count as ancestors.
    """
    if ancestry is None:
        return True
    is_cut = len(ancestry) >= MAX_ANCESTRY
    if is_cut and save_id < ancestry[-1]:
        return True  # older than all that the newest one remembers
    for n, last in enumerate((newest, *ancestry)):
        if last.run_id == save_id.run_id and (n == 0 or save_id <= last):
            before = tuple(ancestry[n:])
            if own is None or before == tuple(own[: len(before)] if is_cut else own):
                return True
    return False
