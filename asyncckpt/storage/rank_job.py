"""What one rank writes in one save, and what came of it: values only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from asyncckpt.format.manifest import RankRecord
from asyncckpt.format.names import SAFETENSORS, SaveId
from asyncckpt.storage.tally import Tally


def _unheard(nbytes: int) -> None:
    """Nobody asked for progress."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankJob:
    """What to write.

    Attributes:
        path: The checkpoint's directory; it exists.
        save_id, rank, world_size: Make the names.
        parts: One (offset in the image, exact length) per shard file; offsets are whole pages.
        structure, objects: Bytes to store as they are.
        n_tensors: For the manifest's totals.
        fsync: False leaves flushing to the kernel.
        overwrite: Whether an older checkpoint may stand there.
        umask: Of the files' mode 0666.
        threads: Threads that write; 0 takes `rank_files.DEFAULT_THREADS`.
        layout: What the parts look like, one of `names.LAYOUTS`.
        progress: Called with the bytes of each extent that was written, from several threads.
    """

    path: str
    save_id: SaveId
    rank: int
    world_size: int
    parts: tuple[tuple[int, int], ...]
    structure: bytes
    objects: bytes
    n_tensors: int
    fsync: bool = True
    overwrite: bool = False
    umask: int = 0o022
    threads: int = 0
    layout: str = SAFETENSORS
    progress: Callable[[int], None] = field(default=_unheard, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankResult:
    """What was written: the rank's line in the manifest, bytes, seconds per phase, whether O_DIRECT served all.

    `seconds` has `write` (shards, with their fsync), `fsync` (of shards, summed over files) and `index` (the rest).
    `shards_print`: of what the shards hold (`storage.prints`); `rest_print`: of all else, added by a worker.
    `dcp`: in layout "dcp" the rank's structure and the table of its items, for `format.dcp_metadata.metadata_of`.
    `tally`: of the structure, seeded by the run (`seed_of`), for the proof of coverage; None: not made.
    """

    record: RankRecord
    nbytes: int
    seconds: dict[str, float]
    direct: bool
    dcp: tuple[bytes, bytes] | None = None
    shards_print: bytes = b""
    rest_print: bytes = b""
    tally: Tally | None = None
