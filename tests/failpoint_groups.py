"""Named instants that only some saves and loads come by: which test holds which.

Each case of those tests fails unless its point is reached, and test_failpoints.py sees to it that every point is in one
of these groups, or is reached by the plain scenarios there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Group = Mapping[str, Sequence[str]]
"""What is under way -> points that it comes by."""

STREAMED_BY_TRAINER: Group = {
    "early": ("slot: streamed", "early: more filled"),
    "ring": ("slot: streamed", "ring: segment filled"),
}
STREAMED_BY_WORKER: Group = {
    "early": ("early: begun", "segment: written"),
    "ring": ("ring: begun", "segment: written", "ring: segments freed"),
}
"""tests/fault/test_failpoints_streamed.py."""

RESUMED: Group = {
    "slot, whole": ("resumed: whole", "resumed: shard kept", "small file: replacing", "small file: replaced"),
    "slot, torn": ("resumed: removing",),
    "ring, whole": ("resumed: whole", "resumed: shard kept", "small file: replacing", "small file: replaced"),
    "committed": ("resumed: committed",),
}
HANDED_OVER: Group = {"trainer": ("trainer: handing over",), "worker": ("worker: slot handed over",)}
"""tests/fault/test_failpoints_takeover.py."""

LOADS: Group = {
    "ranges of ours": ("load: ranges read",),
    "read ahead": ("load: reading ahead",),
    "copied first": ("load: copies verified",),
    "another library's": ("load: foreign structure read",),
    "columns of another library's": ("load: bytes copied",),
}
RECALLS: Group = {"memory": ("recall: held", "recall: mapped", "recall: read")}
"""tests/fault/test_failpoints_loads.py."""

RANKS: Group = {
    "first save": ("ranks: exchanged",),
    "save without a worker": ("ranks: telling",),
    "load that is shared": ("load: passing on",),
}
WORKERS: Group = {"two nodes": ("peers: sending", "peers: heard", "commit: others seen")}
"""tests/fault/test_failpoints_ranks.py."""

GROUPS: Sequence[Group] = (
    STREAMED_BY_TRAINER, STREAMED_BY_WORKER, RESUMED, HANDED_OVER, LOADS, RECALLS, RANKS, WORKERS,
)  # fmt: skip


def cases(group: Group) -> list[tuple[str, str]]:
    """Return each pair of a group."""
    return [(way, point) for way, points in group.items() for point in points]


def grouped() -> set[str]:
    """Return the points of all groups."""
    return {point for group in GROUPS for _, point in cases(group)}
