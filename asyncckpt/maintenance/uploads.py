"""Incomplete multipart uploads: parts that a killed program has left in an object store, which no listing shows."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from asyncckpt.format.names import SaveId, owner_of
from asyncckpt.maintenance.gc import Garbage, GarbageRules
from asyncckpt.storage.store import IncompleteUpload, Store

UPLOAD = "upload"


def uploads_in(
    root: str, store: Store, rules: GarbageRules, *, recursive: bool = False
) -> Iterator[tuple[Garbage, IncompleteUpload]]:
    """Yield the incomplete uploads of saves' files in `root` and one level below it, or at any depth.

    Those that may be in progress are kept: if a worker writes to their path, or if a part or an object of their save
    came within `rules.older_than_s`.

    Raises:
        UnsupportedByStoreError: The store may hold incomplete uploads, but cannot list them.
        OSError: The request failed.
    """

    def is_wanted(object_name: str) -> bool:
        path, name = os.path.split(object_name)
        return owner_of(name) is not None and (recursive or root in (path, os.path.dirname(path)))

    found = list(store.incomplete_uploads(root, is_wanted))
    changed_s = dict[tuple[str, SaveId | None], float]()
    for upload in found:
        key = _save_of(upload.name)
        changed_s[key] = max(upload.changed_s, changed_s.get(key, 0.0))
    for path in {path for path, _ in changed_s}:
        with contextlib.suppress(FileNotFoundError):
            for entry in store.entries(path):
                key = path, owner_of(entry.name)
                if key in changed_s:
                    changed_s[key] = max(entry.mtime_s, changed_s[key])
    for upload in found:
        path, owner = key = _save_of(upload.name)
        age_s, kept = rules.now - changed_s[key], ""
        if path in rules.busy:
            kept = "the worker writes there"
        elif age_s < rules.older_than_s:
            kept = f"changed {max(0.0, age_s):.0f} s ago: it may be in progress"
        garbage = Garbage(
            path=path,
            kind=UPLOAD,
            names=(os.path.basename(upload.name),),
            nbytes=upload.nbytes,
            age_s=age_s,
            save_ids=() if owner is None else (owner,),
            kept=kept,
        )
        yield garbage, upload


def _save_of(object_name: str) -> tuple[str, SaveId | None]:
    path, name = os.path.split(object_name)
    return path, owner_of(name)
