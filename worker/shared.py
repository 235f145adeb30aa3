"""Whether what the workers of other nodes have written is to be seen from this one: is the directory shared?"""

from __future__ import annotations

import time
from collections.abc import Sequence

from asyncckpt.errors import SaveFailedError
from asyncckpt.format.manifest import RankRecord
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
