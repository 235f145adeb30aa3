"""What becomes of a checkpoint whatever its target: said in sentences with names."""

from __future__ import annotations

from collections.abc import Iterable

from asyncckpt.conversion.holding import listed
from asyncckpt.conversion.outline import Outline
from asyncckpt.conversion.sharing import sharing
from asyncckpt.format.manifest import PLANNER_KEY
from asyncckpt.loading.selection import Selection
from asyncckpt.storage.contents import Contents
from asyncckpt.storage.files import Files


def changes(chosen: Outline, written: Outline, to: str, keys: Iterable[str] | None, files: Files) -> list[str]:
    """Return what the target holds in another form than the source.

    Args:
        chosen: What was chosen of the source.
        written: What of that was written.
        to: The target's kind.
        keys: That chose.
        files: The storage seam.

    Raises:
        OSError: The source cannot be read.
    """
    found = _read_otherwise(chosen.contents, keys) + _metadata_lost(chosen.contents, to)
    if chosen.emptied:
        found.append(f"the _metadata of {listed(chosen.emptied)} is not kept: renaming left nothing there")
    if written.opened and to not in ("safetensors", "hf"):
        found.append(f"lists that lack members became dicts of their numbers: {listed(written.opened)}")
    names = sharing(written, files)
    if names:
        found.append(f"views of the same elements are stored apart: {listed(names)}")
    return found


def _read_otherwise(contents: Contents, keys: Iterable[str] | None) -> list[str]:
    """Return what was something else where it was saved, and is read as plain values."""
    selection = Selection(None if keys is None else list(keys))
    found = []
    for said, names in contents.source.changed.items() if contents.source is not None else ():
        chosen = [name + more for name, more in names.items() if keys is None or name in selection]
        if chosen:
            found.append(f"{said}: {listed(chosen)}")
    return found


def _metadata_lost(contents: Contents, to: str) -> list[str]:
    names = sorted(name for name in contents.manifest.metadata if name not in ("files", PLANNER_KEY))
    if not names or to not in ("dcp", "torch"):
        return []
    return [f"the checkpoint's metadata are not kept: {', '.join(names)}"]
