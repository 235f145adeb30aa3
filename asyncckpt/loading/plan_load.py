"""`asyncckpt.plan_load`: what a load into a state dict would do, without reading tensor data."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from asyncckpt.basics.paths import checkpoint_path
from asyncckpt.config import RankInfo
from asyncckpt.distributed.process_group import find_rank_info
from asyncckpt.format.state_tree import OBJECT, fqn_of, leaves
from asyncckpt.interop.sources.unread_leaves import UnreadLeaf
from asyncckpt.loading.byte_ranges import needed_nbytes
from asyncckpt.loading.key_selection import KeyMap, Selection
from asyncckpt.loading.load import LoadOptions
from asyncckpt.loading.matching import Mismatch, Replacement, match_target
from asyncckpt.loading.read_source import read_from_source
from asyncckpt.loading.saved_state import SavedObjects, SavedTree, find_incompatible_shards, new_composites
from asyncckpt.loading.target_tensors import Reused, find_aliased, placement_names, placements_of
from asyncckpt.state_dict.composite_tensors import unknown_type
from asyncckpt.storage.contents import Contents
from asyncckpt.storage.locate import files_at, with_storage_options
from asyncckpt.torch_tensors import why_no_memory


class MismatchedLeaf(NamedTuple):
    """A leaf that a load would refuse: its saved shape and the target's shape, or descriptions of both."""

    fqn: str
    saved: tuple[int, ...] | str
    wanted: tuple[int, ...] | str


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadPlan:
    """What a load would do.

    Attributes:
        missing: FQNs of the target, and keys, that are not in the checkpoint.
        undecided: FQNs of module entries that are not in the checkpoint either, but that a load hook of the module may
            create; whether they are missing is known after the hook has run.
        unexpected: Saved FQNs that the target does not have, of those that `keys` select.
        mismatched: Leaves that a load would refuse, such as new tensors of a class that is not registered; in another
            format also requested leaves that cannot be read.
        unavailable: FQNs of the target that belong to other ranks, and saved ones of subclasses in DTensors whose
            shards cannot be joined, since their classes or contexts differ; a load raises `PerRankUnavailableError`. So
            does a load if components differ that are not sharded; the plan does not compare them.
        shared: FQNs of target tensors that share memory and were saved as separate tensors, and of parts of the target
            that are one container or object. If the saved values differ, a load raises `AliasMismatchError`; only a
            load compares them.
        nbytes: Bytes of the tensors, or of the parts that this process holds, that would be read; each counts once. The
            values of all ranks that a `PerRank(reshard=...)` gets are counted; the plan does not call `reshard`.
    """

    missing: tuple[str, ...]
    undecided: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[MismatchedLeaf, ...]
    unavailable: tuple[str, ...]
    shared: tuple[str, ...]
    nbytes: int

    @property
    def fits(self) -> bool:
        """Whether the load would succeed, `strict` or not, except for errors that only a load finds, as said above."""
        return not (self.missing or self.mismatched or self.unavailable)


def plan_load(
    path: str | os.PathLike[str],
    state_dict: Mapping[Any, Any],
    keys: str | Iterable[str] | None = None,
    key_map: KeyMap | None = None,
    *,
    rank_info: RankInfo | None = None,
    source: str = "auto",
    storage_options: Mapping[str, str] | None = None,
) -> LoadPlan:
    """Plan `load(path, state_dict)`: reads manifest and indexes, no tensor data; changes nothing.

    Args:
        path, state_dict, keys, key_map, source: The arguments of `load`. A committed checkpoint is planned with the
            indexes on disk.
        rank_info: The rank that loads; None: this process's.

    Returns:
        The plan.

    Raises:
        SnapshotUnavailableError: `source="memory"`, and no worker holds the whole snapshot.
        CheckpointNotFoundError: There is nothing at `path`.
        CheckpointNotCommittedError: A save to `path` began and was never committed.
        CorruptCheckpointError: The manifest or an index is damaged; or elements of a tensor are missing or duplicate.
        UnsupportedFormatError: Written by a newer version.
        UnsupportedLeafError: The target holds a leaf that no checkpoint can hold. Tensors without memory are accepted.
        UnsupportedPathError: `path` is not a path, or a URL whose store cannot be used.
        ConfigError: An argument is invalid; or elements of a target tensor share memory.
        OSError: The files cannot be read.

    Blocks: for reading the indexes.
    """
    options = LoadOptions(keys=keys, key_map=key_map, source=source).checked()
    reader = find_rank_info(rank_info)
    directory = checkpoint_path(path)
    with with_storage_options(storage_options):
        files = files_at(directory)
    contents = read_from_source(directory, options.source, None, files, lambda found: found.contents, once=True)
    saved, wanted = SavedTree(contents, reader), Selection(options.keys)
    objects = SavedObjects(contents, files)
    refused: list[Mismatch] = []
    matches = match_target(
        state_dict,
        saved,
        objects,
        Selection(options.keys),
        key_map,
        contents.path,
        refused.append,
    )
    report, replaced = matches.report, [*matches.replaced, *matches.extended_lists]
    mismatched = tuple(dict.fromkeys(_leaf(error) for error in refused)) + _unread(replaced, saved, contents)
    mismatched += _unregistered(replaced, saved, objects, matches.reused)
    taken = {*report.read_leaves, *(leaf.fqn for leaf in mismatched)}
    taken.update(fqn_of((one.saved_fqn, *at)) for one in matches.resharded for at, _ in leaves(one.nodes[0]))
    new = [node[1] for one in replaced for _, node in leaves(one.node) if node[0] != OBJECT]
    reused = [(saved.tensors[n], matches.reused.tensors[n]) for n in new if n in matches.reused.tensors]
    undecided = [filling for module in matches.undecided for filling in module.tensors]
    fillings = [*matches.tensors, *undecided, *reused]
    placed = [*matches.placements, *placements_of(fillings)]
    names = placement_names(matches.placements, fillings)
    real = [n for n, placement in enumerate(placed) if why_no_memory(placement.target) is None]
    aliased = [names[real[n]] for n in find_aliased([placed[n].target for n in real])]
    containers = [fqn for first, _, other, _ in matches.same_object for fqn in (first, other)]
    tied = [fqn for tie in matches.ties for fqn in (tie.fqn, tie.other_fqn)]
    boxes = matches.boxes(saved)
    unlike, _ = find_incompatible_shards(saved.doubtful_components, boxes, reader, objects)
    return LoadPlan(
        missing=tuple(report.missing),
        undecided=tuple(f"{module.fqn}.{name}" for module in matches.undecided for name in module.undecided),
        unexpected=tuple(fqn for fqn in saved.leaves if fqn not in taken and fqn in wanted),
        mismatched=mismatched,
        unavailable=tuple(dict.fromkeys([*report.unavailable, *(part.fqn for part, _ in unlike)])),
        shared=tuple(dict.fromkeys([*aliased, *tied, *report.decided_by_hooks, *containers])),
        nbytes=needed_nbytes(boxes),
    )


def _unread(replaced: Iterable[Replacement], saved: SavedTree, contents: Contents) -> tuple[MismatchedLeaf, ...]:
    """Return the requested leaves of another format that cannot be read."""
    if contents.source is None:
        return ()
    wanted = (leaf for new in replaced for leaf in leaves(new.node, new.path) if leaf[1][0] == OBJECT)
    found = ((fqn_of(path), contents.source.objects[saved.object_at(node[1])[1]]) for path, node in wanted)
    return tuple(MismatchedLeaf(fqn, raw.described(), "object") for fqn, raw in found if isinstance(raw, UnreadLeaf))


def _unregistered(
    replaced: Iterable[Replacement], saved: SavedTree, objects: SavedObjects, reused: Reused
) -> tuple[MismatchedLeaf, ...]:
    """Return the composite tensors that would be made new and whose class is not registered."""
    found = []
    for new in replaced:
        for path, node in new_composites(new.node, reused, new.path):
            rest = objects.value(*saved.object_at(node[2]))
            if unknown_type(node[3], rest, objects.type_of):
                found.append(MismatchedLeaf(fqn_of(path), node[3], "registered"))
    return tuple(found)


def _leaf(error: Mismatch) -> MismatchedLeaf:
    return MismatchedLeaf(error.fqn, _side(error.saved), _side(error.wanted))


def _side(value: Any) -> tuple[int, ...] | str:
    return tuple(value) if isinstance(value, list) else str(value)
