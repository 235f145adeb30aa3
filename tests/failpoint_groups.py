"""Named instants that only some saves and loads come by: which test holds which.

Each case of those tests fails unless its point is reached, and test_failpoints.py sees to it that every point is in one
of these groups, or is reached by the plain scenarios there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Group = Mapping[str, Sequence[str]]
"""What is under way -> points that it comes by."""

STREAMED_BY_TRAINER: Group = {
    "early": ("slot: streamed", "stream: more filled"),
    "ring": ("slot: streamed", "stream: more filled"),
}
STREAMED_BY_WORKER: Group = {
    "early": ("stream: begun", "segment: written", "stream: segments freed"),
    "ring": ("stream: begun", "segment: written", "stream: segments freed"),
}
"""tests/fault/test_failpoints_streamed.py."""

RESUMED: Group = {
    "slot, whole": ("resumed: whole", "resumed: shard kept", "small file: replacing", "small file: replaced"),
    "slot, torn": ("resumed: removing",),
    "ring, whole": ("resumed: whole", "resumed: shard kept", "small file: replacing", "small file: replaced"),
    "committed": ("resumed: committed",),
}
SENT: Group = {"worker": ("worker: sending",)}
HANDED_OVER: Group = {
    "trainer": ("trainer: seeking a worker", "trainer: handing over"),
    "worker": ("worker: slot handed over",),
}
"""tests/fault/test_failpoints_takeover.py."""

LOADS: Group = {
    "ranges of ours": ("load: ranges read",),
    "copied first": ("load: copies verified",),
    "another library's": ("load: foreign structure read",),
}
RESTORES: Group = {"disk": ("restore: candidates listed",)}
"""tests/fault/test_restore_faults.py."""

RECALLS: Group = {"memory": ("recall: held", "recall: mapped", "recall: read")}
"""tests/fault/test_failpoints_loads.py."""

DEVICES: Group = {
    "overlap": ("device: copying", "device: copies begun", "device: copied"),
    "device": ("device: snapshot made", "device: copying", "device: copies begun", "device: copied"),
}
"""tests/unit/staging/test_staging_device_points.py."""

COMPARED: Group = {mode: ("device: samples fetched",) for mode in ("blocking", "overlap", "device")}
"""tests/unit/staging/test_staging_device_points.py."""

RANKS: Group = {
    "first save": ("ranks: meeting", "ranks: introduced", "ranks: exchanged", "ranks: linked", "ranks: agreed"),
    "first save of two nodes": ("ranks: leading", "ranks: following"),
    "save without a worker": ("ranks: telling",),
    "load that is shared": ("load: passing on",),
}
WORKERS: Group = {
    "two nodes": (
        "peers: sending", "peers: received", "peers: listening", "peers: connecting", "peers: disconnecting",
        "commit: others seen",
    ),
}  # fmt: skip
"""tests/fault/test_failpoints_ranks.py."""

LINKS: Group = {"another worker": ("ranks: linking again",)}
"""tests/fault/test_failpoints_links.py."""

MOUNTS: Group = {
    "save": ("mount: probed", "put: created", "put: filled"),
    "save after a torn one": ("torn: removing",),
    "gc after a torn one": ("torn: removing", "put: created", "put: filled"),
}
"""tests/fault/test_failpoints_mounts.py."""

MIRRORS: Group = {
    "copy": (
        "mirror: begun", "mirror: shard written", "mirror: file copied", "mirror: files copied", "mirror: committed",
    ),
}  # fmt: skip
"""tests/fault/test_mirror_kills.py."""

REUSED: Group = {"unchanged shards": ("shard: linking", "shard: linked")}
"""tests/fault/test_failpoints_reuse.py."""

GROUPS: Sequence[Group] = (
    STREAMED_BY_TRAINER, STREAMED_BY_WORKER, RESUMED, SENT, HANDED_OVER, LOADS, RESTORES, RECALLS, DEVICES, COMPARED,
    RANKS, WORKERS, LINKS, MOUNTS, MIRRORS, REUSED,
)  # fmt: skip


def cases(group: Group) -> list[tuple[str, str]]:
    """Return each pair of a group."""
    return [(way, point) for way, points in group.items() for point in points]


def grouped() -> set[str]:
    """Return the points of all groups."""
    return {point for group in GROUPS for _, point in cases(group)}
