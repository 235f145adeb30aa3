"""Which leaves of a checkpoint of several ranks have a value for each of them."""

from __future__ import annotations

import json

from asyncckpt.config import RankInfo
from asyncckpt.format.names import split_per_rank_name
from asyncckpt.format.tree import Node, fqn_of, leaves
from asyncckpt.loading.saved_tree import SavedTree
from asyncckpt.loading.selection import Selection
from asyncckpt.storage.contents import Contents, read_objects
from asyncckpt.storage.files import Files


def unequal(contents: Contents, selection: Selection, files: Files) -> list[str]:
    """Return the FQNs of the chosen leaves that ranks hold unequal, as far as is known.

    Tensors have a name for each rank where their elements differ, or where nobody could tell yet
    (`planning.agreement`). Objects are compared here, one rank's file after the other; a file is not read again for a
    rank that has the same one, and the same tree.

    Args:
        contents: A checkpoint of ours.
        selection: Of its leaves.
        files: The storage seam.

    Raises:
        CorruptCheckpointError, UnsupportedFormatError, OSError: An objects file cannot be read.
    """
    if len(contents.ranks) == 1:
        return []
    saved = SavedTree(contents, RankInfo(0, 1))
    chosen = {fqn: node for fqn, node in saved.leaves.items() if fqn in selection}
    named = {fqn for fqn, node in chosen.items() if node[0] != "O" and split_per_rank_name(saved.tensors[node[1]].fqn)}
    taken = {fqn: saved.object_at(node[1]) for fqn, node in chosen.items() if node[0] == "O"}
    values: dict[str, str] = {}
    for rank in sorted({rank for rank, _ in taken.values()}):
        raw = read_objects(contents, rank, files)
        values |= {fqn: json.dumps(raw[number]) for fqn, (source, number) in taken.items() if source == rank}
    named |= _of_other_value(contents, values, files)
    return [fqn for fqn in chosen if fqn in named]


def _of_other_value(contents: Contents, values: dict[str, str], files: Files) -> set[str]:
    """Return the names of `values`, in JSON, that some rank holds otherwise."""
    found: set[str] = set()
    known: set[tuple[str, Node]] = set()
    for rank, part in enumerate(contents.ranks):
        kind = (part.index.objects.checksum, part.structure.tree)
        if kind in known:
            continue
        known.add(kind)
        raw = read_objects(contents, rank, files)
        for path, node in leaves(part.structure.tree):
            fqn = fqn_of(path)
            if node[0] == "O" and fqn in values and json.dumps(raw[node[1]]) != values[fqn]:
                found.add(fqn)
    return found
