"""Ranks of other nodes, as their files are seen from this one: is the directory shared, and what do the indexes say?"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from asyncckpt.errors import SaveFailedError
from asyncckpt.format.dcp import encode_items
from asyncckpt.format.index import MAX_INDEX_NBYTES, RankIndex, decode_index
from asyncckpt.format.manifest import RankRecord
from asyncckpt.storage.contents import read_named_file
from asyncckpt.storage.files import Files

PATIENCE_S = 3.0
"""How long a name may take to be seen here. Chosen: listing a directory makes NFS look again (nfs(5), "Directory entry
caching"); what is not shared never comes."""

POLL_S = 0.1
SHOWN = 8


def await_shared(path: str, records: Sequence[RankRecord], files: Files) -> None:
    """Wait until the indexes of these ranks are in the directory, as this node sees it.

    Blocks: at most `PATIENCE_S`.

    Raises:
        SaveFailedError: They are not: code `not_shared`.
        OSError: The directory cannot be read.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        names = set(files.listdir(path))
        missing = [record for record in records if record.index_name not in names]
        if not missing:
            return
        if time.monotonic() >= deadline:
            raise _not_shared(path, missing)
        time.sleep(POLL_S)


def index_at(path: str, record: RankRecord, files: Files) -> RankIndex:
    """Return the index of a rank, as it lies in the directory.

    Raises:
        CorruptCheckpointError: It is missing, or not what was written.
        OSError: It cannot be read.
    """
    data = read_named_file(
        path,
        record.index_name,
        nbytes=record.index_nbytes,
        max_nbytes=MAX_INDEX_NBYTES,
        checksum=record.index_checksum,
        files=files,
    )
    return decode_index(data)


class Structures(Sequence[bytes]):
    """The structures of all ranks of a save, by rank; those of other nodes are read from their indexes when asked for.

    Args:
        own: Of every rank; b"" of those of other nodes.
        read: Returns the structure of a rank of another node.
    """

    def __init__(self, own: Sequence[bytes], read: Callable[[int], bytes]) -> None:
        self._found, self._read = list(own), read

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, rank: Any) -> Any:
        if not self._found[rank]:
            self._found[rank] = self._read(rank)
        return self._found[rank]


def dcp_part_at(path: str, record: RankRecord, files: Files) -> tuple[bytes, bytes]:
    """Return structure and table of items (`RankResult.dcp`) of a rank in layout "dcp", as its files say.

    Raises:
        CorruptCheckpointError, OSError: As `index_at`.
    """
    index = index_at(path, record, files)
    stored = index.objects
    objects = read_named_file(
        path, stored.name, nbytes=stored.nbytes, max_nbytes=stored.nbytes, checksum=stored.checksum, files=files
    )
    return index.structure, encode_items(index.structure, objects, index.save_id, index.rank)[1]


def _not_shared(path: str, missing: Sequence[RankRecord]) -> SaveFailedError:
    ranks = [record.rank for record in missing]
    detail = (
        f"ranks {ranks[:SHOWN]} were written by the workers of other nodes, but {missing[0].index_name} is not in the "
        "directory as the node of rank 0 sees it: it is not shared between the nodes, or mounted elsewhere"
    )
    return SaveFailedError(
        f"cannot commit {path}: {detail}; nothing was published; save to a directory that all nodes share",
        code="not_shared",
        rank=ranks[0],
        path=path,
        detail=detail,
    )
