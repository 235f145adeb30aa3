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

    Those that may be in progress are kept: to a path to which a worker writes, or changed within `rules.older_than_s`.

    Raises:
        UnsupportedByStoreError: The store may have some, and does not tell.
        OSError: The store was asked, and has not answered.
    """

    def is_wanted(object_name: str) -> bool:
        path, name = os.path.split(object_name)
        return owner_of(name) is not None and (recursive or root in (path, os.path.dirname(path)))

    for upload in store.unfinished_uploads(root, is_wanted):
        path, name = os.path.split(upload.name)
        owner, age_s = owner_of(name), rules.now - upload.changed_s
        kept = ""
        if path in rules.busy:
            kept = "the worker writes there"
        elif age_s < rules.older_than_s:
            kept = f"changed {max(0.0, age_s):.0f} s ago: it may be in progress"
        ids = () if owner is None else (owner,)
        garbage = Garbage(
            path=path, kind=UPLOAD, names=(name,), nbytes=upload.nbytes, age_s=age_s, save_ids=ids, kept=kept
        )
        yield garbage, upload
