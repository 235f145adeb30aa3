"""What a target cannot hold, and what it holds in another form: named, and refused or reported, never dropped silently.

A target of a kind says both of its own (`Losses`, in the modules of the targets); here is what is the same for all.
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
from asyncckpt.interop.selection import Outline, leaves_and_empty, pruned, rebuilt, versioned
from asyncckpt.interop.sources.safetensors_file import OF_ONE_FILE
from asyncckpt.loading.key_selection import Selection
from asyncckpt.loading.saved_state import SavedTree
from asyncckpt.storage.contents import Contents, read_objects
from asyncckpt.storage.files import Files

TOP = "the top level"
IN_ONE_TEXT = "asyncckpt_metadata"
"""Key of the header of a safetensors file: metadata that are not all texts, as JSON."""

_SHOWN = 1000
"""Leaves that an error names: a list of a million numbers has a million leaves."""


@dataclass(slots=True)
class Losses:
    """What a target says of the leaves.

    Attributes:
        cannot: By FQN: why the target cannot hold it.
        changed: What it holds in another form, one sentence each.
        unversioned: FQNs of OrderedDicts whose `_metadata` the target cannot hold; they are written without.
    """

    cannot: dict[str, str] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    unversioned: set[str] = field(default_factory=set)


def settled(outline: Outline, losses: Losses, *, to: str, partial: bool) -> Outline:
    """Return what is written: everything, or with `partial` what the target can hold.

    What was not read of the source, and what is a pickle there, is added to what `losses` has.

    Raises:
        UnsupportedLeafError: Something cannot be held, and `partial` is False; names all of it.
        UnsupportedFormatError: The same, and some of it was not even read.
    """
    if losses.unversioned:
        tree = rebuilt(
            outline.tree, lambda _, leaf: leaf, lambda path, n: None if fqn_of(path) in losses.unversioned else n
        )
        outline = replace(outline, tree=tree)
    if to != "asyncckpt":  # which alone keeps a pickle as one
        losses.cannot |= dict.fromkeys(_pickled(outline), "it was stored as a pickle (allow_pickle=True)")
    unread = outline.unread()
    losses.cannot |= {fqn: found.described() for fqn, found in unread.items()}
    cannot = losses.cannot | dict.fromkeys(outline.away, "it belongs to single ranks (PerRank)")
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
        + "\nChoose others by keys, or leave them out by partial=True (--partial), whose report names all"
    )
    if unread:
        raise UnsupportedFormatError(said, path=path, found=next(iter(unread.values())).kind)
    raise UnsupportedLeafError(said, leaf=next(iter(cannot)))


def _pickled(outline: Outline) -> list[str]:
    raws = ((fqn, outline.objects[node[1]]) for fqn, node in outline.leaves() if node[0] == OBJECT)
    return [fqn for fqn, raw in raws if isinstance(raw, dict) and raw.get("$") in PICKLED_TAGS]


def refuse_long_keys(outline: Outline, losses: Losses) -> None:
    """Add the leaves with a key that is longer than readers of structures take."""
    for path, _ in leaves_and_empty(outline.tree):
        if any(len(str(key)) > MAX_KEY_CHARS for key in path):
            losses.cannot[fqn_of(path)] = f"its key has more than {MAX_KEY_CHARS} characters"


def listed(names: list[str]) -> str:
    """Return names for a sentence: all of them."""
    return ", ".join(names)


def forms_lost(found: Iterable[tuple[Path, Node]], kept: Collection[str] = ()) -> list[str]:
    """Return which types of containers a target does not keep.

    Args:
        found: (path, node) of containers.
        kept: Names of the types that it does.
    """
    names: dict[str, list[str]] = {}
    for path, node in found:
        if node[0] in (DICT, LIST) and len(node) > 2 and node[2][0] not in kept:
            names.setdefault(node[2][0], []).append(fqn_of(path) or TOP)
    plain = {"deque": "list"}
    return [f"a {kind} became a {plain.get(kind, 'dict')}: {listed(sorted(names[kind]))}" for kind in sorted(names)]


def ordered_lost(found: Iterable[tuple[Path, Node]]) -> list[str]:
    """Return what a target does not keep of OrderedDicts: their type, and the `_metadata` of some.

    Args:
        found: (path, node) of the containers that the target takes apart.
    """
    ordered = {fqn_of(path) or TOP: node for path, node in found if node[0] == ORDERED_DICT}
    lost = [f"an OrderedDict became a dict: {listed(sorted(ordered))}"] if ordered else []
    versions = sorted(name for name, node in ordered.items() if node[2] is not None)
    if versions:
        lost.append(f"the _metadata of modules' state dicts, their versions, are not kept: {listed(versions)}")
    return lost


def is_text(name: str) -> bool:
    """Whether UTF-8 has a name: lone surrogates, which a pickle may hold, it has not."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def kept_metadata(contents: Contents) -> dict[str, Any]:
    """Return a source's metadata; of a Hugging Face directory without the list of its files, which are others now."""
    own = contents.source is not None and contents.source.kind == "hf"
    return {key: value for key, value in contents.manifest.metadata.items() if not (own and key == "files")}


def metadata_again(contents: Contents) -> dict[str, Any]:
    """Return the metadata that a checkpoint of ours gets: those that a conversion has put into one text are back."""
    found = kept_metadata(contents)
    text = found.get(IN_ONE_TEXT)
    if contents.source is None or not isinstance(text, str):
        return found
    try:
        inner = json.loads(text)
    except ValueError:
        return found
    if not isinstance(inner, dict):
        return found
    return {key: value for key, value in found.items() if key not in (IN_ONE_TEXT, "format")} | inner


def changes(chosen: Outline, written: Outline, to: str, keys: Iterable[str] | None, files: Files) -> list[str]:
    """Return what every target holds in another form than the source: one sentence each, with names.

    Args:
        chosen: What was chosen of the source.
        written: What of that was written.
        to: The target's kind.
        keys: That chose.
        files: The storage seam.

    Raises:
        OSError: The source cannot be read.
    """
    selection = Selection(None if keys is None else list(keys))
    found = _read_otherwise(chosen.contents, selection) + _metadata_lost(chosen.contents, to)
    found += _of_ranks(chosen.contents, to, selection, files)
    found += _unread(chosen.contents, files)
    found += _step_lost(written, to)
    if chosen.emptied:
        found.append(f"the _metadata of {listed(chosen.emptied)} is not kept: renaming left nothing there")
    left_out = sorted(versioned(chosen.tree) - versioned(written.tree))
    if left_out and to not in ("safetensors", "hf", "dcp"):  # which say so of all
        found.append(f"the _metadata of {listed(left_out)} is not kept: all of it was left out")
    if written.opened and to not in ("safetensors", "hf"):
        numbers = "texts of their numbers" if to == "dcp" else "their numbers"
        found.append(f"lists that lack members became dicts of {numbers}: {listed(written.opened)}")
    return found


def _read_otherwise(contents: Contents, selection: Selection) -> list[str]:
    """Return what was something else where it was saved, and is read as plain values and tensors."""
    found = []
    for said, names in contents.source.changed.items() if contents.source is not None else ():
        chosen = [
            (name or TOP) + more
            for name, more in names.items()
            if not name or name in selection or selection.reaches_into(name)
        ]
        if chosen:
            found.append(f"{said}: {listed(chosen)}")
    return found


def _of_ranks(contents: Contents, to: str, selection: Selection, files: Files) -> list[str]:
    """Return what had a value for each rank, and has one for all of them."""
    if len(contents.ranks) > 1:
        names = _unequal(contents, selection, files)
        return [f"what was stored for each rank is taken from the lowest one: {listed(names)}"] if names else []
    only_tensors = to in ("safetensors", "hf")
    own = [
        fqn_of(path)
        for path, node in per_rank_nodes(contents.ranks[0].structure.tree)
        if not only_tensors or any(leaf[0] in (TENSOR, ARRAY) for _, leaf in leaves(node))
    ]
    own = [fqn for fqn in own if fqn in selection or selection.reaches_into(fqn)]
    return [f"what was the only rank's own (PerRank) is everybody's: {listed(own)}"] if own else []


def _unequal(contents: Contents, selection: Selection, files: Files) -> list[str]:
    """Return the FQNs of the chosen leaves that ranks hold unequal, as far as is known.

    Tensors have a name for each rank where their elements differ, or where nobody could tell yet
    (`planning.agreement`). Objects are compared here, one rank's file after the other; a file is not read again for a
    rank that has the same one, and the same tree.
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
    step = next(
        (written.objects[node[1]] for fqn, node in written.leaves() if fqn == "step" and node[0] == OBJECT), None
    )
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
