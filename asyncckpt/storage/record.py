"""The commit record: what the manifest says of results that are durable. One place, for worker and synchronous path."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timezone

from asyncckpt.format.checksum import file_checksum
from asyncckpt.format.dcp_templates import MetadataTemplates
from asyncckpt.format.manifest import DcpRecord, Manifest
from asyncckpt.format.names import SaveId
from asyncckpt.storage.rank_job import RankResult

_templates = MetadataTemplates()


def build_manifest(
    save_id: SaveId,
    results: Sequence[RankResult],
    *,
    step: int,
    world_size: int,
    fsync: bool,
    metadata: str,
    package: str,
    dcp_metadata: bytes | None = None,
) -> Manifest:
    """Return the manifest of a checkpoint whose ranks are all written.

    Args:
        save_id, step, world_size: Of the save.
        results: Of every rank, in order.
        fsync: Whether everything was flushed.
        metadata: The user's JSON as text.
        package: asyncckpt's version.
        dcp_metadata: As `dcp_metadata_of` returns them.

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
        dcp=None if dcp_metadata is None else DcpRecord(nbytes=len(dcp_metadata), checksum=file_checksum(dcp_metadata)),
    )


def dcp_metadata_of(save_id: SaveId, results: Sequence[RankResult], structures: Sequence[bytes]) -> bytes | None:
    """Return the `.metadata` of a save in layout "dcp"; None in another one.

    Args:
        save_id: Of the save.
        results, structures: Of every rank, in order.

    Raises:
        CorruptCheckpointError: A rank's structure does not decode.
    """
    tables = [result.dcp[1] for result in results if result.dcp is not None]
    if len(tables) != len(results):
        return None
    return _templates.metadata_of(save_id, list(zip(structures, tables, strict=True)))
