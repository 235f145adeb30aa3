"""A target state dict against what was saved: what fills what, decided and checked before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from asyncckpt.errors import AliasMismatchError, ConfigError, LeafTypeMismatchError, ShapeMismatchError
from asyncckpt.format.tree import Node, Path, fqn_of, leaves
from asyncckpt.loading.alike import alike_placements, object_leaves
from asyncckpt.loading.key_names import KeyMap, renamer
from asyncckpt.loading.placements import Placement
from asyncckpt.loading.saved_tree import SavedTree, kind_of
from asyncckpt.loading.selection import HOLE, Selection, prefixes
from asyncckpt.loading.standing import standing_tensors
from asyncckpt.loading.target_leaves import TargetLeaf, target_leaves
from asyncckpt.loading.target_tensors import Filling, TargetTensor, check_fillable, target_tensor
from asyncckpt.loading.targets import Targets, Whole, is_loadable, unmarked
from asyncckpt.planning.numpy_values import view_of
from asyncckpt.planning.state_dict import PLAIN_TENSORS, flatten
from asyncckpt.planning.torch_types import torch_dtype, why_no_memory
from asyncckpt.storage.contents import SavedTensor

Mismatch = ShapeMismatchError | LeafTypeMismatchError | AliasMismatchError


def _raised(error: Mismatch) -> None:
    raise error


class Replaced(NamedTuple):
    """What gets a new value: its path in the target, its FQN there, and the saved part.

    Attributes:
        holder: The object that is given the value by `load_state_dict`; None: the value takes the place.
    """

    path: Path
    fqn: str
    node: Node
    holder: Any = None


@dataclass(slots=True)
class Matches:
    """What a load into a state dict will do.

    Attributes:
        targets: The target.
        tensors: What is read into which value; a tensor with several names is there once.
        placements: The same of plain tensors that are filled whole, as they stand.
        filled: Paths of the target's tensors and arrays that are filled in place; where no module is in the target,
            nobody asks for them, and they may be left out.
        filled_fqns: Their FQNs.
        replaced: What is made new: object leaves, arrays of another shape, states of objects.
        standing: By saved tensor number: where the tensors of those states are read to, if anywhere.
        missing: FQNs of the target, as the target names them, that were not saved; and keys that select nothing.
        converted: FQNs whose dtype differs.
        unavailable: FQNs of the target that only other ranks than the reader have, as their own.
        found: Everything that is read, by its saved FQN.
        without_memory: FQNs of what is filled and has no memory, with the tensors.
    """

    targets: Targets
    tensors: list[Filling] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)
    filled: list[Path] = field(default_factory=list)
    filled_fqns: list[str] = field(default_factory=list)
    replaced: list[Replaced] = field(default_factory=list)
    standing: dict[int, TargetTensor] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    converted: list[str] = field(default_factory=list)
    unavailable: list[str] = field(default_factory=list)
    found: dict[str, Node] = field(default_factory=dict)
    without_memory: list[tuple[str, torch.Tensor]] = field(default_factory=list)


def match(
    state_dict: Mapping[Any, Any],
    saved: SavedTree,
    selection: Selection,
    key_map: KeyMap | None,
    path: str,
    refuse: Callable[[Mismatch], None] = _raised,
    *,
    allow_pickle: bool = False,
) -> Matches:
    """Match every selected leaf of `state_dict` with a saved one.

    Args:
        state_dict: The target; not changed.
        saved: The checkpoint.
        selection: Which of the target's leaves to fill.
        key_map: From the target's FQNs to the saved ones; names that a mapping lacks stay.
        path: The checkpoint's, for messages.
        refuse: Called for every leaf that cannot be filled; raises, or takes note so that the next one is looked at.
        allow_pickle: Tensors that cannot be stored as such are objects.

    Raises:
        UnsupportedLeafError: The target holds something that a checkpoint cannot.
        OverlappingShardsError: The shards of a target tensor share elements.
        ShapeMismatchError: A tensor was saved with another global shape.
        LeafTypeMismatchError: A tensor meets an object, or a leaf a container; or the target's dtype is of a kind that
            cannot hold such values: integers for floating point numbers, say.
        AliasMismatchError: One tensor of the target has two names, under which two tensors were saved.
        ConfigError: A target tensor whose elements share memory, so that it cannot be filled; `selection`
            names a part of an object that takes its state as a whole.
    """
    targets = Targets(state_dict)
    if key_map is None and selection.everything:
        placements = alike_placements(state_dict, saved)
        if placements is not None:
            return _alike(targets, saved, placements)
    flat = flatten(state_dict, targets.open, allow_pickle=allow_pickle, is_target=True)
    matching = _Matching(Matches(targets), saved, path, refuse)
    matches, rename, taken = matching.matches, renamer(key_map) if key_map is not None else None, saved.leaves
    for leaf in target_leaves(flat.tree, targets):
        leaf_path, fqn, node, _, _ = leaf
        if node[0] == "O" and is_loadable(flat.objects[node[1]]):
            saved_fqn = fqn if rename is None else rename(fqn)
            _match_state(matches, Replaced(leaf_path, fqn, node, flat.objects[node[1]]), saved, selection, saved_fqn)
            continue
        if not selection.everything and fqn not in selection:
            continue
        saved_fqn = fqn if rename is None else rename(fqn)
        found = taken.get(saved_fqn)
        if found is None:
            error = _container_there(fqn, saved_fqn, node, saved, path)
            if error is not None:
                refuse(error)
            else:
                (matches.unavailable if saved.is_away(saved_fqn) else matches.missing).append(fqn)
            continue
        matches.found[saved_fqn] = found
        if _is_object(node, found):
            matches.replaced.append(Replaced(leaf_path, fqn, found))
        elif "O" in (node[0], found[0]) or "B" in (node[0], found[0]):
            refuse(_leaf_mismatch(fqn, kind_of(found), kind_of(node), path))
        else:
            matching.tensor(leaf, found[1])
    matches.missing += selection.unused()
    return matches


def _alike(targets: Targets, saved: SavedTree, placements: list[Placement]) -> Matches:
    replaced = [Replaced(path, fqn_of(path), node) for path, node in object_leaves(saved.tree)]
    names = [fqn for fqn, node in saved.leaves.items() if node[0] == "T"]
    return Matches(targets, placements=placements, filled_fqns=names, replaced=replaced, found=dict(saved.leaves))


class _Matching:
    """What is known while the tensors of a target are matched, one after the other."""

    def __init__(self, matches: Matches, saved: SavedTree, path: str, refuse: Callable[[Mismatch], None]) -> None:
        self.matches = matches
        self._saved, self._path, self._refuse = saved, path, refuse
        # The target's tensor: by which FQN, from which saved tensor. And of a registered type, whose parts may be
        # copies: the first number of each value.
        self._filled: dict[int, tuple[str, int]] = {}
        self._values: dict[int, int] = {}

    def tensor(self, leaf: TargetLeaf, found: int) -> None:
        """Match a leaf with tensor number `found`."""
        path, fqn, node, holder, key = leaf
        matches, value, tensor = self.matches, holder[key], self._saved.tensors[found]
        if type(value) not in PLAIN_TENSORS:
            value = unmarked(value)
        if node[0] == "N":
            value = view_of(value)
            if value is None or not target_tensor(value, fqn).takes(tensor):
                matches.replaced.append(Replaced(path, fqn, ("N", found)))
                return
            own = node[1]
        else:
            own = self._values.setdefault(id(value), node[1])
        target = target_tensor(value, fqn)
        first, number = self._filled.setdefault(own, (fqn, found))
        matches.filled.append(path)
        matches.filled_fqns.append(fqn)
        matches.without_memory += [(fqn, part) for part, _ in target.shards if why_no_memory(part) is not None]
        if first != fqn and number == found:
            return
        if target.global_shape != tensor.global_shape:
            self._refuse(_shape_mismatch(fqn, tensor, target, self._path))
            return
        check_fillable(target, fqn)
        if first != fqn:
            if 0 not in target.global_shape:  # also where none of its elements are: alike on all ranks
                self._refuse(_alias_mismatch(first, fqn, self._path))
            return
        if target.dtype != torch_dtype(tensor.dtype):
            if not target.holds_values_of(tensor):
                self._refuse(_kind_mismatch(fqn, tensor, target, self._path))
                return
            matches.converted.append(fqn)
        matches.tensors.append((tensor, target))


def _is_object(node: Node, found: Node) -> bool:
    """Whether the leaf is replaced: on no side is a tensor; two arrays are looked at more closely."""
    return "T" not in (node[0], found[0]) and (node[0], found[0]) != ("N", "N")


def _match_state(matches: Matches, place: Replaced, saved: SavedTree, selection: Selection, saved_fqn: str) -> None:
    """Match an object that takes its state as a whole, or an entry of a module's state that does."""
    fqn = place.fqn
    if fqn not in selection:
        if selection.reaches_into(fqn):
            raise ConfigError(f"keys names a part of {fqn!r}, whose state is loaded as a whole", field="keys")
        return
    below = [leaf for leaf in saved.away if leaf == saved_fqn or leaf.startswith(saved_fqn + ".")]
    found = saved.node_at(saved_fqn)
    if found is None:
        (matches.unavailable if below else matches.missing).append(fqn)
        return
    if saved.own is None:  # at equal world size, what only other ranks have is left out, as in a new dict
        matches.unavailable += below
    at, node = found
    matches.found.update((fqn_of(leaf), inner) for leaf, inner in leaves(node, at) if inner is not HOLE)
    holder = None if isinstance(place.holder, Whole) else place.holder
    matches.replaced.append(Replaced(place.path, fqn, saved.without_holes(node), holder))
    if isinstance(holder, torch.optim.Optimizer):  # it moves its state to its parameters
        params = [param for group in holder.param_groups for param in group["params"]]
        matches.without_memory += [(fqn, param) for param in params if why_no_memory(param) is not None]
    numbers = {leaf: inner[1] for leaf, inner in leaves(node) if inner[0] == "T"}
    standing = standing_tensors(holder, [(leaf, saved.tensors[number]) for leaf, number in numbers.items()])
    for leaf, target in standing.items():
        matches.standing.setdefault(numbers[leaf], target)


def _shape_mismatch(fqn: str, saved: SavedTensor, target: TargetTensor, path: str) -> ShapeMismatchError:
    kind = "global shape" if not target.is_whole else "shape"
    return ShapeMismatchError(
        f"{path}: tensor {fqn!r} was saved with {kind} {list(saved.global_shape)}, the target has "
        f"{list(target.global_shape)}; nothing was changed",
        path=path,
        fqn=fqn,
        saved=list(saved.global_shape),
        wanted=list(target.global_shape),
    )


def _kind_mismatch(fqn: str, saved: SavedTensor, target: TargetTensor, path: str) -> LeafTypeMismatchError:
    wanted = str(target.dtype).removeprefix("torch.")
    return LeafTypeMismatchError(
        f"{path}: tensor {fqn!r} was saved as {saved.dtype}, the target is {wanted}, which cannot hold such values; "
        "nothing was changed",
        path=path,
        fqn=fqn,
        saved=saved.dtype,
        wanted=wanted,
    )


def _container_there(fqn: str, saved_fqn: str, node: Node, saved: SavedTree, path: str) -> LeafTypeMismatchError | None:
    """A name that is missing as a leaf must not be a container there, nor lie below a leaf."""
    if saved_fqn in saved.containers:
        return _leaf_mismatch(fqn, "container", kind_of(node), path)
    above = next((prefix for prefix in prefixes(saved_fqn) if prefix in saved.leaves), None)
    return None if above is None else _leaf_mismatch(above, kind_of(saved.leaves[above]), "container", path)


def _leaf_mismatch(fqn: str, saved: str, wanted: str, path: str) -> LeafTypeMismatchError:
    return LeafTypeMismatchError(
        f"{path}: {fqn!r} was saved as {_article(saved)}, the target has {_article(wanted)} there; nothing was changed",
        path=path,
        fqn=fqn,
        saved=saved,
        wanted=wanted,
    )


def _alias_mismatch(first: str, fqn: str, path: str) -> AliasMismatchError:
    return AliasMismatchError(
        f"{path}: {first!r} and {fqn!r} are one tensor in the target and were saved as two, whose values may differ; "
        "nothing was changed. Untie them in the target, or leave one of them out by keys",
        path=path,
        fqn=first,
        other_fqn=fqn,
    )


def _article(kind: str) -> str:
    return f"an {kind}" if kind == "object" else f"a {kind}"
