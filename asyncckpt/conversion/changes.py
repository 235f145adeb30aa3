"""What becomes of a checkpoint whatever its target: said in sentences with names."""

from __future__ import annotations

from collections.abc import Container, Iterable

from asyncckpt.conversion.holding import TOP, listed
from asyncckpt.conversion.outline import Outline, versioned
from asyncckpt.conversion.shared_containers import containers_apart
from asyncckpt.conversion.sharing import sharing
from asyncckpt.conversion.torch_views import kept
from asyncckpt.conversion.unequal import unequal
from asyncckpt.conversion.user_metadata import kept_metadata
from asyncckpt.foreign.safetensors_files import OF_ONE_FILE
from asyncckpt.format.manifest import PLANNER_KEY
from asyncckpt.format.tree import Node, fqn_of, leaves, per_rank_nodes
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
    found = _read_otherwise(chosen.contents, keys, kept(written, to)) + _metadata_lost(chosen.contents, to)
    found += _of_ranks(chosen.contents, to, keys, files)
    found += _unread(chosen.contents, files)
    found += _step_lost(written, to)
    if chosen.emptied:
        found.append(f"the _metadata of {listed(chosen.emptied)} is not kept: renaming left nothing there")
    pruned = sorted(versioned(chosen.tree) - versioned(written.tree))
    if pruned and to not in ("safetensors", "hf", "dcp"):  # which say so of all
        found.append(f"the _metadata of {listed(pruned)} is not kept: all of it was left out")
    if written.opened and to not in ("safetensors", "hf"):
        numbers = "texts of their numbers" if to == "dcp" else "their numbers"
        found.append(f"lists that lack members became dicts of {numbers}: {listed(written.opened)}")
    names = sharing(written, to)
    if names:
        found.append(f"views of the same elements are stored apart: {listed(names)}")
    apart = containers_apart(written) if to not in ("safetensors", "hf") else []
    if apart:
        found.append(f"containers that were one object are stored apart: {listed(apart)}")
    return found


def _read_otherwise(contents: Contents, keys: Iterable[str] | None, kept: Container[tuple[str, str]]) -> list[str]:
    """Return what was something else where it was saved, is read as plain values, and is not `kept` all the same."""
    selection = Selection(None if keys is None else list(keys))
    found = []
    for said, names in contents.source.changed.items() if contents.source is not None else ():
        chosen = [
            (name or TOP) + more
            for name, more in names.items()
            if (not name or name in selection or selection.reaches_into(name)) and (said, name) not in kept
        ]
        if chosen:
            found.append(f"{said}: {listed(chosen)}")
    return found


def _of_ranks(contents: Contents, to: str, keys: Iterable[str] | None, files: Files) -> list[str]:
    """Return what had a value for each rank, and has one for all of them."""
    selection = Selection(None if keys is None else list(keys))
    names = unequal(contents, selection, files)
    found = [f"what was stored for each rank is taken from the lowest one: {listed(names)}"] if names else []
    if len(contents.ranks) == 1:
        own = [fqn_of(path) for path, node in per_rank_nodes(contents.ranks[0].structure.tree) if _is_held(node, to)]
        own = [fqn for fqn in own if fqn in selection or selection.reaches_into(fqn)]
        found += [f"what was the only rank's own (PerRank) is everybody's: {listed(own)}"] if own else []
    return found


def _is_held(node: Node, to: str) -> bool:
    """Whether a target holds anything of a node, which may be empty."""
    return to not in ("safetensors", "hf") or any(leaf[0] in ("T", "N") for _, leaf in leaves(node))


def _metadata_lost(contents: Contents, to: str) -> list[str]:
    metadata = contents.manifest.metadata
    names = sorted(name for name in kept_metadata(contents) if name != PLANNER_KEY)
    if not names or to == "asyncckpt":
        return []
    if to in ("dcp", "torch"):
        return [f"the checkpoint's metadata are not kept: {', '.join(names)}"]
    found = []
    of_one_file = [name for name in names if name in OF_ONE_FILE]
    if of_one_file:
        found.append(f"a shard is written as if it were whole, without {', '.join(of_one_file)}")
    if metadata.get("format", "pt") != "pt":
        found.append(f"the metadata's format became 'pt'; it was {metadata['format']!r}")
    return found


def _step_lost(written: Outline, to: str) -> list[str]:
    """Return that a step which only the manifest of a checkpoint of ours has is nowhere in the target."""
    contents = written.contents
    if to == "asyncckpt" or contents.source is not None or contents.manifest.step <= 0:
        return []
    step = next((written.objects[node[1]] for fqn, node in written.leaves() if fqn == "step" and node[0] == "O"), None)
    if step == contents.manifest.step and to in ("dcp", "torch"):
        return []
    return [f"the checkpoint's step, {contents.manifest.step}, is not kept"]


def _unread(contents: Contents, files: Files) -> list[str]:
    """Return what weights lie in a Hugging Face directory that are not those of its model."""
    if contents.source is None or contents.source.kind != "hf":
        return []
    read = set(contents.source.metadata["files"])
    there = [name for name in files.listdir(contents.source.directory) if name.endswith(".safetensors")]
    names = sorted(name for name in there if name not in read)
    return [f"files that are not of the model were not read: {listed(names)}"] if names else []
