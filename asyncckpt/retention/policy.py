"""Which checkpoints may go. Pure: values in, values out.

What counts is the order of lineage, not the step: what a rollback has left behind goes first (`retention.ancestry`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from asyncckpt.errors import ConfigError
from asyncckpt.format.names import SaveId
from asyncckpt.format.steps import lineage_key

BEST_MODES = ("min", "max")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """A committed checkpoint, as retention sees it.

    Attributes:
        name: Of its directory, which lies in the root.
        step: Of its manifest.
        save_id: Of its manifest.
        score: What `best_fn` made of its metrics; None, NaN or infinite: it is no candidate for the best.
        is_abandoned: The newest one does not come from it: it lies in a future that a rollback has given up.
        is_sound: False for one that was found damaged: it never counts as one to fall back to.
        nbytes: Of its files, by its manifest.
    """

    name: str
    step: int
    save_id: SaveId
    score: float | None = None
    is_abandoned: bool = False
    is_sound: bool = True
    nbytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionPolicy:
    """What is to be kept.

    Attributes:
        max_to_keep: How many checkpoints stay, the newest and the best among them; None: all. Those that are kept by
            `keep_period` or a pin come on top.
        keep_period: Each whose step is a multiple of it stays for ever; None: none for that reason.
        best_mode: Whether the best score is the smallest ("min") or the largest ("max").

    Raises:
        ConfigError: A value that makes no sense.
    """

    max_to_keep: int | None = None
    keep_period: int | None = None
    best_mode: str = "min"

    def __post_init__(self) -> None:
        for field in ("max_to_keep", "keep_period"):
            value = getattr(self, field)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{field}={value!r}: expected None or an int from 1", field=field, value=repr(value))
        if self.best_mode not in BEST_MODES:
            raise ConfigError(
                f"best_mode={self.best_mode!r}: expected one of {BEST_MODES}", field="best_mode", value=self.best_mode
            )


def newest_of(stored: Collection[Stored]) -> Stored | None:
    """Return the newest sound one by lineage; None: there is none."""
    return max((one for one in stored if one.is_sound), key=_age, default=None)


def best_of(stored: Collection[Stored], best_mode: str) -> Stored | None:
    """Return the sound one with the best score, of equal ones the newest; None: none has a score."""
    scored = [one for one in stored if one.is_sound and one.score is not None and math.isfinite(one.score)]
    sign = -1 if best_mode == "min" else 1
    return max(scored, key=lambda one: (sign * (one.score or 0.0), _age(one)), default=None)


def to_delete(stored: Sequence[Stored], policy: RetentionPolicy, pinned: Collection[str] = ()) -> list[Stored]:
    """Return what may go, in the order in which it goes.

    Never the newest sound one, the best, a pinned one or one of `keep_period`; nothing while not one is sound.

    Args:
        stored: All committed checkpoints of a root.
        policy: What is to be kept.
        pinned: Names of those that must not go.
    """
    newest, best = newest_of(stored), best_of(stored, policy.best_mode)
    if policy.max_to_keep is None or newest is None:
        return []
    counted = sorted((one for one in stored if not _is_kept_apart(one, policy, pinned)), key=_rank, reverse=True)
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


def _is_kept_apart(one: Stored, policy: RetentionPolicy, pinned: Collection[str]) -> bool:
    return one.name in pinned or (policy.keep_period is not None and one.step % policy.keep_period == 0)


def _age(one: Stored) -> tuple[int, int, str]:
    return lineage_key(one.save_id)


def _rank(one: Stored) -> tuple[bool, bool, tuple[int, int, str]]:
    """What is worth more is larger."""
    return one.is_sound, not one.is_abandoned, _age(one)
