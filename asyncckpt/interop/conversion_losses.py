"""What a target cannot hold, and what it holds in another form. Both are reported by name, never dropped silently.

The module of each kind of target returns its own `ConversionLosses`; this module has what is common to all kinds.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from asyncckpt.config import RankInfo
from asyncckpt.errors import UnsupportedFormatError, UnsupportedLeafError
from asyncckpt.format.manifest import PLANNER_KEY
from asyncckpt.format.names import split_per_rank_name
from asyncckpt.format.objects import PICKLED_TAGS
from asyncckpt.format.state_tree import (
    ARRAY,
    DICT,
    LIST,
    MAX_KEY_CHARS,
    OBJECT,
    ORDERED_DICT,
    TENSOR,
    Node,
    Path,
    fqn_of,
    leaves,
    per_rank_nodes,
)
from asyncckpt.interop.outline import Outline, leaves_and_empty, pruned, rebuilt, versioned
from asyncckpt.interop.sources.safetensors_file import FILE_METADATA
from asyncckpt.loading.key_selection import Selection
from asyncckpt.loading.saved_state import SavedTree
from asyncckpt.storage.contents import Contents, read_objects
from asyncckpt.storage.files import Files

TOP = "the top level"
METADATA_TEXT_KEY = "asyncckpt_metadata"
"""Key in the header of a safetensors file, whose values must be texts: all metadata as one JSON text."""

_SHOWN = 1000
"""Leaves that an error names at most: a list of a million numbers has a million leaves."""


@dataclass(slots=True)
class ConversionLosses:
    """What a target cannot hold, and what it holds in another form.

    Attributes:
        cannot: By FQN of a leaf, the reason why the target cannot hold it.
        changed: What the target holds in another form, one sentence for each change.
        unversioned: FQNs of OrderedDicts that are written without `_metadata`, because the target cannot hold it.
    """

    cannot: dict[str, str] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    unversioned: set[str] = field(default_factory=set)


def writable_part(outline: Outline, losses: ConversionLosses, *, to: str, partial: bool) -> Outline:
    """Return the part of a checkpoint that the target can hold.

    Args:
        outline: The checkpoint.
        losses: The losses of the target; leaves that could not be read, or are pickles, are added to `cannot`.
        to: Kind of the target.
        partial: Whether leaves may be left out.

    Raises:
        UnsupportedLeafError: The target cannot hold some leaves, and `partial` is False; names them.
        UnsupportedFormatError: The same, and some of the leaves could not be read.
    """
    if losses.unversioned:
        tree = rebuilt(
            outline.tree, lambda _, leaf: leaf, lambda path, n: None if fqn_of(path) in losses.unversioned else n
        )
        outline = replace(outline, tree=tree)
    if to != "asyncckpt":  # the only kind that can hold a pickle
        losses.cannot |= dict.fromkeys(_pickled(outline), "it was stored as a pickle (allow_pickle=True)")
    unread = outline.unread()
    losses.cannot |= {fqn: found.described() for fqn, found in unread.items()}
    cannot = losses.cannot | dict.fromkeys(outline.per_rank, "it belongs to single ranks (PerRank)")
    if not cannot:
        return outline
    if partial:
        return pruned(outline, lambda fqn: fqn not in cannot)
    lines = [f"{fqn}: {why}" for fqn, why in list(cannot.items())[:_SHOWN]]
    more = f"\n  and {len(cannot) - _SHOWN} more" if len(cannot) > _SHOWN else ""
    path = outline.contents.path
    said = (
        f"{path}: {to} cannot hold {len(cannot)} of the leaves:\n  "
        + "\n  ".join(lines)
        + more
        + "\nSelect other leaves with keys, or leave these out with partial=True (--partial); the report names all"
    )
    if unread:
        raise UnsupportedFormatError(said, path=path, found=next(iter(unread.values())).kind)
    raise UnsupportedLeafError(said, leaf=next(iter(cannot)))


def _pickled(outline: Outline) -> list[str]:
    raws = ((fqn, outline.objects[node[1]]) for fqn, node in outline.leaves() if node[0] == OBJECT)
    return [fqn for fqn, raw in raws if isinstance(raw, dict) and raw.get("$") in PICKLED_TAGS]


def refuse_long_keys(outline: Outline, losses: ConversionLosses) -> None:
    """Add to `losses` the leaves with a key longer than `MAX_KEY_CHARS`, which readers refuse."""
    for path, _ in leaves_and_empty(outline.tree):
        if any(len(str(key)) > MAX_KEY_CHARS for key in path):
            losses.cannot[fqn_of(path)] = f"its key has more than {MAX_KEY_CHARS} characters"


def sentence(what: str, names: Collection[str]) -> list[str]:
    """Return the sentence that says `what` of these names; none, if there are none."""
    return [f"{what}: {', '.join(names)}"] if names else []


def container_types_lost(found: Iterable[tuple[Path, Node]], kept: Collection[str] = ()) -> list[str]:
    """Return a sentence for each type of container that a target does not keep, such as deque.

    Args:
        found: (path, node) of the containers.
        kept: Names of the types that the target keeps.
    """
    names: dict[str, list[str]] = {}
    for path, node in found:
        if node[0] in (DICT, LIST) and len(node) > 2 and node[2][0] not in kept:
            names.setdefault(node[2][0], []).append(fqn_of(path) or TOP)
    plain = {"deque": "list"}
    return [
        said
        for kind in sorted(names)
        for said in sentence(f"a {kind} became a {plain.get(kind, 'dict')}", sorted(names[kind]))
    ]


def ordered_dicts_lost(found: Iterable[tuple[Path, Node]]) -> list[str]:
    """Return sentences about OrderedDicts whose type, and maybe `_metadata`, a target does not keep.

    Args:
        found: (path, node) of the containers that the target flattens.
    """
    ordered = {fqn_of(path) or TOP: node for path, node in found if node[0] == ORDERED_DICT}
    versions = sorted(name for name, node in ordered.items() if node[2] is not None)
    return sentence("an OrderedDict became a dict", sorted(ordered)) + sentence(
        "the _metadata of modules' state dicts, their versions, are not kept", versions
    )


def kept_metadata(contents: Contents) -> dict[str, Any]:
    """Return a source's metadata; for a Hugging Face directory without the list of its files: the target has others."""
    metadata = contents.manifest.metadata
    return {key: value for key, value in metadata.items() if contents.kind != "hf" or key != "files"}


def restored_metadata(contents: Contents) -> dict[str, Any]:
    """Return the metadata for an asyncckpt checkpoint; a JSON text at `METADATA_TEXT_KEY` is decoded again."""
    found = kept_metadata(contents)
    text = found.get(METADATA_TEXT_KEY)
    if contents.source is None or not isinstance(text, str):
        return found
    try:
        inner = json.loads(text)
    except ValueError:
        return found
    if not isinstance(inner, dict):
        return found
    return {key: value for key, value in found.items() if key not in (METADATA_TEXT_KEY, "format")} | inner


def changes(chosen: Outline, written: Outline, to: str, keys: Iterable[str] | None, files: Files) -> list[str]:
    """Return what the target holds in another form, as far as that is the same for every kind: sentences with names.

    Args:
        chosen: The selected part of the source.
        written: The part of it that was written.
        to: Kind of the target.
        keys: The keys that selected `chosen`; None: everything.
        files: The storage seam.

    Raises:
        OSError: The source cannot be read.
    """
    selection = Selection(None if keys is None else list(keys))
    found = _read_otherwise(chosen.contents, selection) + _metadata_lost(chosen.contents, to)
    found += _of_ranks(chosen.contents, to, selection, files)
    found += _unread(chosen.contents, files)
    found += _step_lost(written, to)
    if chosen.lost_metadata:
        found.append(f"the _metadata of {', '.join(chosen.lost_metadata)} is not kept: renaming left nothing there")
    left_out = sorted(versioned(chosen.tree) - versioned(written.tree))
    if left_out and to not in ("safetensors", "hf", "dcp"):  # these report it for all OrderedDicts
        found.append(f"the _metadata of {', '.join(left_out)} is not kept: all of it was left out")
    if to not in ("safetensors", "hf"):
        numbers = "texts of their numbers" if to == "dcp" else "their numbers"
        found += sentence(f"lists that lack members became dicts of {numbers}", written.became_dicts)
    return found


def _read_otherwise(contents: Contents, selection: Selection) -> list[str]:
    """Return sentences about leaves that the source's reader has turned into plain values or tensors."""
    found = []
    for said, names in contents.source.changed.items() if contents.source is not None else ():
        chosen = [
            (name or TOP) + more
            for name, more in names.items()
            if not name or name in selection or selection.reaches_into(name)
        ]
        found += sentence(said, chosen)
    return found


def _of_ranks(contents: Contents, to: str, selection: Selection, files: Files) -> list[str]:
    """Return sentences about leaves that had one value for each rank, and have one value in the target."""
    if len(contents.ranks) > 1:
        return sentence(
            "what was stored for each rank is taken from the lowest one", _unequal(contents, selection, files)
        )
    only_tensors = to in ("safetensors", "hf")
    own = [
        fqn_of(path)
        for path, node in per_rank_nodes(contents.ranks[0].structure.tree)
        if not only_tensors or any(leaf[0] in (TENSOR, ARRAY) for _, leaf in leaves(node))
    ]
    own = [fqn for fqn in own if fqn in selection or selection.reaches_into(fqn)]
    return sentence("what was the only rank's own (PerRank) is everybody's", own)


def _unequal(contents: Contents, selection: Selection, files: Files) -> list[str]:
    """Return the FQNs of the selected leaves that differ between ranks, as far as is known.

    A tensor was saved under one name for each rank if its elements differ, or were not compared yet
    (`planning/write_agreement.py`). Objects are compared here, one rank's file after the other. If two ranks have the
    same tree and files with the same checksum, the file is read once.
    """
    saved = SavedTree(contents, RankInfo(0, 1))
    unequal = {
        fqn
        for fqn, node in saved.leaves.items()
        if node[0] != OBJECT and split_per_rank_name(saved.tensors[node[1]].fqn) is not None
    }
    values: dict[str, str] = {}
    known: set[tuple[str, Node]] = set()
    for rank, part in enumerate(contents.ranks):
        kind = (part.index.objects.checksum, part.structure.tree)
        if kind in known:
            continue
        known.add(kind)
        raw = read_objects(contents, rank, files)
        for path, node in leaves(part.structure.tree):
            fqn = fqn_of(path)
            if node[0] == OBJECT and fqn in selection:
                value = json.dumps(raw[node[1]])
                if values.setdefault(fqn, value) != value:
                    unequal.add(fqn)
    return [fqn for fqn in saved.leaves if fqn in unequal and fqn in selection]


def _metadata_lost(contents: Contents, to: str) -> list[str]:
    metadata = contents.manifest.metadata
    names = sorted(name for name in kept_metadata(contents) if name != PLANNER_KEY)
    if not names or to == "asyncckpt":
        return []
    if to in ("dcp", "torch"):
        return sentence("the checkpoint's metadata are not kept", names)
    found = []
    of_one_file = [name for name in names if name in FILE_METADATA]
    if of_one_file:
        found.append(f"a shard is written as if it were whole, without {', '.join(of_one_file)}")
    if metadata.get("format", "pt") != "pt":
        found.append(f"the metadata's format became 'pt'; it was {metadata['format']!r}")
    return found


def _step_lost(written: Outline, to: str) -> list[str]:
    """Return a sentence if the step of an asyncckpt checkpoint, which is in its manifest, is not in the target."""
    contents = written.contents
    if to == "asyncckpt" or contents.source is not None or contents.manifest.step <= 0:
        return []
    step = next(
        (written.objects[node[1]] for fqn, node in written.leaves() if fqn == "step" and node[0] == OBJECT), None
    )
    if step == contents.manifest.step and to in ("dcp", "torch"):
        return []
    return [f"the checkpoint's step, {contents.manifest.step}, is not kept"]


def _unread(contents: Contents, files: Files) -> list[str]:
    """Return a sentence about safetensors files in a Hugging Face directory that are not part of the model."""
    if contents.source is None or contents.kind != "hf":
        return []
    read = set(contents.source.metadata["files"])
    there = [name for name in files.listdir(contents.source.directory) if name.endswith(".safetensors")]
    return sentence("files that are not of the model were not read", sorted(set(there) - read))
