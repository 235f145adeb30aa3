"""Unfinished uploads: parts of objects that a killed program has sent to an object store, which no listing shows."""

from __future__ import annotations

import os
from collections.abc import Iterator

from asyncckpt.format.names import owner_of
from asyncckpt.maintenance.gc import Garbage, GarbageRules
from asyncckpt.storage.store import Store, UnfinishedUpload

UPLOAD = "upload"


def uploads_in(
    root: str, store: Store, rules: GarbageRules, *, recursive: bool = False
) -> Iterator[tuple[Garbage, UnfinishedUpload]]:
    """Yield the unfinished uploads of our files in `root` and one level below it, or at any depth.

    Those that may be in progress are kept: to a path to which a worker writes, or begun within `rules.older_than_s`.

    Raises:
        UnsupportedByStoreError: The store may have some, and does not tell.
        OSError: The store was asked, and has not answered.
    """
    for upload in store.unfinished_uploads(root):
        path, name = os.path.split(upload.name)
        owner = owner_of(name)
        if owner is None or not (recursive or path == root or os.path.dirname(path) == root):
            continue
        age_s = rules.now - upload.begun_s
        kept = ""
        if path in rules.busy:
            kept = "the worker writes there"
        elif age_s < rules.older_than_s:
            kept = f"begun {max(0.0, age_s):.0f} s ago: it may be in progress"
        yield (
            Garbage(
                path=path, kind=UPLOAD, names=(name,), nbytes=upload.nbytes, age_s=age_s, save_ids=(owner,), kept=kept
            ),
            upload,
        )
