"""What a reader got from another rank although the ranks differ: said once per load, and who is refused altogether."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence

from asyncckpt.config import RankInfo
from asyncckpt.errors import PerRankUnavailableError
from asyncckpt.format.names import split_per_rank_name
from asyncckpt.format.state_tree import Node, fqn_of, leaves
from asyncckpt.loading.saved_objects import SavedObjects
from asyncckpt.loading.saved_tree import SavedTree
from asyncckpt.storage.contents import Contents
from asyncckpt.storage.files import Files

MAX_SHOWN = 8
_logger = logging.getLogger("asyncckpt.loading")


def unavailable(contents: Contents, saved: SavedTree, reader: RankInfo, fqns: Sequence[str]) -> PerRankUnavailableError:
    """Return the error for leaves that belong to other ranks than the reader."""
    path, n_ranks = contents.path, len(contents.ranks)
    shown = ", ".join(map(repr, fqns[:MAX_SHOWN])) + (
        f" and {len(fqns) - MAX_SHOWN} more" if len(fqns) > MAX_SHOWN else ""
    )
    if saved.own is None:
        why = f"were saved by each of {n_ranks} ranks for itself, this is rank {reader.rank} of {reader.world_size}"
    else:
        why = f"belong to other ranks than {saved.own}"
    return PerRankUnavailableError(
        f"{path}: {shown} {why}; nothing was changed. Load the rest by naming it, as in keys=['model', 'optim'], "
        "or read any rank's with "
        "open_checkpoint(path): .objects_of(rank), and .tensor(name + '@rank0')",
        path=path,
        keys=list(fqns),
        saved=n_ranks,
        wanted=reader.world_size,
    )


def report_differences(
    contents: Contents, saved: SavedTree, objects: SavedObjects, files: Files, found: Iterable[tuple[str, Node]]
) -> None:
    """Log which of `found` (FQN and leaf of `saved`) come from another rank, while ranks hold different values.

    Raises:
        CorruptCheckpointError, UnsupportedFormatError, OSError: An objects file cannot be compared.
    """
    differing: list[str] = []
    numbers: dict[str, int] = {}
    for fqn, node in found:
        if node[0] == "O":
            numbers[fqn] = node[1]
            continue
        own = split_per_rank_name(saved.tensors[node[1]].fqn)
        if own is not None and own[1] != saved.own:
            differing.append(fqn)
    differing += _differing_objects(contents, saved, objects, files, numbers)
    if differing:
        shown = ", ".join(differing[:MAX_SHOWN]) + (
            f" and {len(differing) - MAX_SHOWN} more" if len(differing) > MAX_SHOWN else ""
        )
        _logger.warning(
            "%s: %d values were stored for each of the %d ranks that saved them, and are taken from the lowest one: %s",
            contents.path,
            len(differing),
            len(contents.ranks),
            shown,
        )


def _differing_objects(
    contents: Contents, saved: SavedTree, objects: SavedObjects, files: Files, numbers: dict[str, int]
) -> list[str]:
    """Return the FQNs of objects that another rank than theirs holds with another value."""
    chosen: dict[str, str] = {}
    sources: set[int] = set()
    for fqn, number in numbers.items():
        rank, own_number = saved.object_at(number)
        if rank != saved.own:
            chosen[fqn] = json.dumps(objects.raw(rank)[own_number])
            sources.add(rank)
    if not chosen:
        return []
    differing: dict[str, None] = {}
    places: dict[Node, dict[str, int]] = {}
    # The files of one save that have one checksum are equal, and equal trees give them one meaning.
    known = {(contents.ranks[r].index.objects.checksum, contents.ranks[r].structure.tree) for r in sources}
    if len(sources) > 1:
        known = set()
    for rank, part in enumerate(contents.ranks):
        tree = part.structure.tree
        kind = (part.index.objects.checksum, tree)
        if kind in known:
            continue
        known.add(kind)
        if tree not in places:
            named = ((fqn_of(path), node) for path, node in leaves(tree))
            places[tree] = {fqn: node[1] for fqn, node in named if node[0] == "O" and fqn in chosen}
        if places[tree]:
            raw = SavedObjects(contents, files).raw(rank)
            for fqn, own_number in places[tree].items():
                if json.dumps(raw[own_number]) != chosen[fqn]:
                    differing[fqn] = None
    return [fqn for fqn in chosen if fqn in differing]
