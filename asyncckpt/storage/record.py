"""The commit record: what the manifest says of results that are durable. One place, for worker and synchronous path."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timezone

from asyncckpt.format.manifest import Manifest
from asyncckpt.format.names import SaveId
from asyncckpt.storage.rank_files import RankResult


def build_manifest(
    save_id: SaveId,
    results: Sequence[RankResult],
    *,
    step: int,
    world_size: int,
    fsync: bool,
    metadata: str,
    package: str,
) -> Manifest:
    """Return the manifest of a checkpoint whose ranks are all written.

    Args:
        save_id, step, world_size: Of the save.
        results: Of every rank, in order.
        fsync: Whether everything was flushed.
        metadata: The user's JSON as text.
        package: asyncckpt's version.

    Returns:
        The manifest; its timings are those of the slowest rank, in seconds.
    """
    phases = results[0].seconds
    return Manifest(
        save_id=save_id,
        step=step,
        world_size=world_size,
        created=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        fsync=fsync,
        writer=f"asyncckpt {package}",
        ranks=tuple(result.record for result in results),
        metadata=json.loads(metadata),
        timings={name: round(max(r.seconds.get(name, 0.0) for r in results), 6) for name in phases},
    )
