"""Reads files of ranks of other nodes: checks that the directory is shared, and reads their indexes."""

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

VISIBLE_WITHIN_S = 3.0
"""How long a new name may take to be visible here. Chosen: listing a directory makes NFS revalidate it (nfs(5),
"Directory entry caching")."""

POLL_S = 0.1
SHOWN = 8


def wait_until_visible(path: str, records: Sequence[RankRecord], files: Files) -> None:
    """Wait until the indexes of these ranks are visible in the directory on this node.

    Blocks: at most `VISIBLE_WITHIN_S`.

    Raises:
        SaveFailedError: They are not visible in time; code `not_shared`.
        OSError: The directory cannot be read.
    """
    deadline = time.monotonic() + VISIBLE_WITHIN_S
    while True:
        names = set(files.listdir(path))
        missing = [record for record in records if record.index_name not in names]
        if not missing:
            return
        if time.monotonic() >= deadline:
            raise _not_shared(path, missing)
        time.sleep(POLL_S)


def index_at(path: str, record: RankRecord, files: Files) -> RankIndex:
    """Read the index of a rank.

    Raises:
        CorruptCheckpointError: It is missing, or differs from what was written.
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
    """The structures of all ranks of a save, by rank; those of other nodes are read from their indexes on access.

    Args:
        own: Structure of every rank; b"" for ranks of other nodes.
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
    """Read structure and table of items (`RankResult.dcp`) of a rank in layout "dcp" from its files.

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
        f"ranks {ranks[:SHOWN]} were written by the workers of other nodes, but {missing[0].index_name} is not "
        "visible on the node of rank 0: the directory is not shared between the nodes, or is another one there"
    )
    return SaveFailedError(
        f"cannot commit {path}: {detail}; nothing was published; save to a directory that all nodes share",
        code="not_shared",
        rank=ranks[0],
        path=path,
        detail=detail,
    )
