"""Verification: checks all checksums, lengths and the coverage of a checkpoint, and reports all faults."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from asyncckpt.errors import (
    AsyncCkptError,
    CheckpointNotCommittedError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedFormatError,
)
from asyncckpt.format.index import ObjectsRecord
from asyncckpt.format.layout import PAGE_NBYTES
from asyncckpt.format.names import DCP_METADATA_NAME, MANIFEST_NAME, mirror_record_name
from asyncckpt.format.objects import MAX_OBJECTS_NBYTES
from asyncckpt.format.structure import Chunk
from asyncckpt.storage.catalog import CORRUPT, INCOMPLETE, UNREADABLE, UNSUPPORTED
from asyncckpt.storage.contents import Contents, RankContents, read_contents, read_named_file, read_objects
from asyncckpt.storage.files import Files
from asyncckpt.storage.read_plan import ShardRequest, Wanted
from asyncckpt.storage.reader import DEFAULT_THREADS, ShardFile, read_shards

OK = "ok"
ABSENT = "absent"
_STATES: tuple[tuple[type[AsyncCkptError], str], ...] = (
    (CheckpointNotFoundError, ABSENT),
    (CheckpointNotCommittedError, INCOMPLETE),
    (CorruptCheckpointError, CORRUPT),
    (UnsupportedFormatError, UNSUPPORTED),
)
"""State for each class of fault, the most severe first. One of the first two is always the only fault."""


@dataclass(kw_only=True, slots=True)
class Verdict:
    """Result of a verification.

    Attributes:
        path: The checkpoint's directory.
        contents: Its contents; None: manifest, indexes or structures are damaged or missing.
        faults: All faults; empty if the checkpoint is sound.
        read_nbytes: Bytes of shard files that were read and compared.
        unchecked: For another format, what it gives no means to check; empty if everything was checked.
    """

    path: str
    contents: Contents | None = None
    faults: list[AsyncCkptError | OSError] = field(default_factory=list)
    read_nbytes: int = 0
    unchecked: str = ""

    @property
    def state(self) -> str:
        """`ok`, or the most severe of the faults: absent, incomplete, corrupt, unsupported, unreadable."""
        for kind, state in _STATES:
            if any(isinstance(fault, kind) for fault in self.faults):
                return state
        return UNREADABLE if self.faults else OK


def verify_checkpoint(path: str, files: Files, *, fast: bool = False, threads: int = DEFAULT_THREADS) -> Verdict:
    """Check the checkpoint at `path`.

    Args:
        path: Its directory.
        files: The `Files` to read with.
        fast: Check manifest, indexes, objects, coverage, and length and save ID of each shard, but not its data.
        threads: Number of threads that read and compare.

    Returns:
        The verdict, with all faults: none is raised.

    Blocks: for the reads.
    """
    verdict = Verdict(path=path)
    try:
        contents = read_contents(path, files)
    except (AsyncCkptError, OSError) as error:
        verdict.faults.append(error)
        return verdict
    verdict.contents = contents
    lock = threading.Lock()

    def report(fault: AsyncCkptError | OSError) -> None:
        with lock:
            verdict.faults.append(fault)

    dcp = contents.manifest.dcp
    if dcp is not None:
        _verify_small(
            contents, ObjectsRecord(name=DCP_METADATA_NAME, nbytes=dcp.nbytes, checksum=dcp.checksum), files, report
        )
    for rank, rank_contents in enumerate(contents.ranks):
        if rank_contents.index.items is not None:
            _verify_small(contents, rank_contents.index.items, files, report)
        _attempt(lambda rank=rank: read_objects(contents, rank, files), report)  # type: ignore[misc]
        for part in range(len(rank_contents.index.shards)):
            verdict.read_nbytes += _verify_shard(contents, rank_contents, part, files, fast, threads, report)
    verdict.faults.sort(key=lambda f: (str(getattr(f, "file", "")), getattr(f, "offset", None) or 0))
    return verdict


def _verify_shard(
    contents: Contents,
    rank: RankContents,
    part: int,
    files: Files,
    fast: bool,
    threads: int,
    report: Callable[[AsyncCkptError | OSError], None],
) -> int:
    shard, save_id = rank.index.shards[part], contents.manifest.save_id
    if fast:
        _attempt(lambda: ShardFile(contents.path, shard, save_id, files).close(), report)
        return 0
    chunks = [(c, t.fqn) for t in rank.structure.tensors for c in t.chunks if c.part == part]
    header_end = min([c.offset_bytes for c, _ in chunks] + [shard.nbytes])
    wanted = [Wanted(0, max(header_end, min(PAGE_NBYTES, shard.nbytes)), "(header)", None)]
    wanted += [Wanted(start, end - start, "(between tensors)", None) for start, end in _gaps(chunks, shard.nbytes)]
    wanted += [Wanted(c.offset_bytes, c.nbytes, fqn, None) for c, fqn in chunks]
    request = ShardRequest(shard=shard, block_nbytes=rank.index.block_nbytes, wanted=wanted)
    done = _attempt(
        lambda: read_shards(
            contents.path, save_id, [request], files=files, threads=threads, verify=True, on_corrupt=report
        ),
        report,
    )
    return shard.nbytes if done else 0


def _gaps(chunks: Sequence[tuple[Chunk, str]], nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the bytes of a shard between and after its chunks."""
    ends = sorted((c.offset_bytes, c.offset_bytes + c.nbytes) for c, _ in chunks)
    for (_, end), (start, _) in zip(ends, [*ends[1:], (nbytes, nbytes)], strict=True):
        if start > end:
            yield end, start


def _verify_small(
    contents: Contents, record: ObjectsRecord, files: Files, report: Callable[[AsyncCkptError | OSError], None]
) -> None:
    _attempt(
        lambda: read_named_file(
            contents.path,
            record.name,
            nbytes=record.nbytes,
            max_nbytes=MAX_OBJECTS_NBYTES,
            checksum=record.checksum,
            files=files,
        ),
        report,
    )


def _attempt(action: Callable[[], object], report: Callable[[AsyncCkptError | OSError], None]) -> bool:
    try:
        action()
    except (AsyncCkptError, OSError) as error:
        report(error)
        return False
    return True


def leftovers(path: str, files: Files, contents: Contents) -> list[str]:
    """Return the names in the directory that the checkpoint does not use: other files, or files of other saves."""
    if contents.source is not None:
        return []
    known = {MANIFEST_NAME, mirror_record_name(contents.manifest.save_id)}
    for rank in contents.manifest.ranks:
        known.add(rank.index_name)
    for rank_contents in contents.ranks:
        known.add(rank_contents.index.objects.name)
        if rank_contents.index.items is not None:
            known |= {rank_contents.index.items.name, DCP_METADATA_NAME}
        known.update(shard.name for shard in rank_contents.index.shards)
    return sorted(name for name in files.listdir(path) if name not in known)
