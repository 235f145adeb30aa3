"""From the flat names of torch.distributed.checkpoint to a tree, and the paths it takes to them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from asyncckpt.format.state_tree import MAX_DEPTH, Node, Path, fqn_of, tree_of


def path_of(fqn: str, planner_data: Any) -> Path:
    """Return the path of a leaf: the planner's, if it kept one that leads to this name, else the name as one key."""
    found = planner_data.get(fqn) if isinstance(planner_data, Mapping) else None
    if not isinstance(found, tuple) or not 0 < len(found) < MAX_DEPTH or fqn_of(found) != fqn:
        return (fqn,)
    return found if type(found[0]) is str and all(type(key) in (str, int) for key in found) else (fqn,)


def ordered(fqns: Iterable[str], planner_data: Any) -> list[str]:
    """Return `fqns` in the order of the state dict, as far as the planner kept it."""
    if not isinstance(planner_data, Mapping):
        return list(fqns)
    places = {fqn: place for place, fqn in enumerate(planner_data)}
    return sorted(fqns, key=lambda fqn: places.get(fqn, len(places)))


def nested(leaves: Mapping[str, Node], planner_data: Any, hole: Callable[[], Node]) -> Node:
    """Return the tree of `leaves`, by FQN.

    Args:
        leaves: Leaf nodes.
        planner_data: Of the checkpoint's metadata: the paths of DefaultSavePlanner, or anything.
        hole: Makes a leaf for a member of a list that nobody has.
    """
    try:
        return tree_of([(path_of(fqn, planner_data), leaves[fqn]) for fqn in ordered(leaves, planner_data)], hole)
    except ValueError:  # paths that contradict
        return "d", tuple(part for pair in leaves.items() for part in pair)
