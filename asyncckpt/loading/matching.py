"""Matches a target with a checkpoint: which saved leaf fills which leaf of the target. Nothing is changed here.

In most restarts the target has exactly the saved structure: the same tree of plain containers and tensors. It is
matched by `asyncckpt/loading/exact_matching.py`. All other targets, and all that are refused, are matched here: leaf by
leaf and by name, in one walk over the target's tree (`_Matcher`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from asyncckpt.errors import ConfigError, LeafTypeMismatchError, ShapeMismatchError, UnsupportedLeafError
from asyncckpt.format.state_tree import (
    ARRAY,
    BYTES,
    COMPOSITE,
    CONTAINERS,
    DICT,
    LIST,
    MAPPINGS,
    OBJECT,
    PER_RANK,
    SEQUENCES,
    SHARDED,
    TENSOR,
    TENSOR_KINDS,
    Key,
    Node,
    Path,
    fqn_of,
    leaves,
    members,
    python_key,
)
from asyncckpt.loading.byte_ranges import Placement, SavedBox, box_of, whole_box
from asyncckpt.loading.container_matching import (
    absent_subtrees,
    appended_members,
    composite_mismatch,
    container_mismatch,
    is_returned_state,
    leaf_mismatch,
    length_mismatch,
    selected_part,
    with_optimizer_state,
    without_per_rank,
)
from asyncckpt.loading.exact_matching import ObjectLeaves, exact_placements
from asyncckpt.loading.key_selection import OTHER_RANKS_ONLY, KeyMap, Selection, prefixes, renamer, selected
from asyncckpt.loading.module_targets import ModuleTarget, ReplacedEntry
from asyncckpt.loading.saved_state import (
    SavedObjects,
    SavedTree,
    all_nodes,
    kind_of,
    leaves_to_read,
    refuse_unknown_types,
    rest_of,
)
from asyncckpt.loading.target_tensors import (
    Filling,
    Reused,
    TargetTensor,
    Tie,
    check_fillable,
    placements_of,
    target_tensor,
)
from asyncckpt.loading.targets import Targets, is_empty_object, is_loadable, reuse_state_tensors, unwrap_per_rank
from asyncckpt.per_rank import PerRank
from asyncckpt.state_dict.composite_tensors import decompose, new_dtensor_like
from asyncckpt.state_dict.flatten import PLAIN_TENSORS, Flattened, flatten
from asyncckpt.state_dict.leaf_codecs import is_same_leaf
from asyncckpt.state_dict.numpy_values import view_of
from asyncckpt.state_dict.unflatten import has_lost_factory
from asyncckpt.storage.contents import SavedTensor
from asyncckpt.torch_tensors import torch_dtype, why_no_memory

Mismatch = ShapeMismatchError | LeafTypeMismatchError


def _raised(error: Mismatch) -> None:
    raise error


class Replacement(NamedTuple):
    """A part of the target that gets a new value.

    Attributes:
        path: Path of the part in the target.
        fqn: FQN of the part in the target.
        node: The part of the saved tree that the value is built from.
        holder: The object that is given the value by `load_state_dict`; None: the value replaces the part.
    """

    path: Path
    fqn: str
    node: Node
    holder: Any = None


class ReshardedMark(NamedTuple):
    """A `PerRank` of the target whose `reshard` gets the values of all ranks.

    Attributes:
        path: Path of the mark in the target.
        fqn: FQN of the mark in the target.
        saved_fqn: FQN under which the values were saved.
        mark: The mark.
        nodes: The value of each saving rank, by rank.
        names: FQNs of the mark and of the target's leaves in it.
    """

    path: Path
    fqn: str
    saved_fqn: str
    mark: PerRank
    nodes: list[Node]
    names: tuple[str, ...]


@dataclass(slots=True)
class MatchReport:
    """The result of a match for the caller. Names are FQNs of the target, unless stated otherwise.

    Attributes:
        missing: Leaves that were not saved; and keys that select nothing. A tensor that is filled under another name is
            not missing.
        absent_subtrees: Modules, other objects and subtrees of which nothing was saved; "" is the whole target.
        unavailable: Leaves that are `PerRank` values of other ranks than the reader.
        staying_empty: Empty dicts for which a checkpoint of another format has nothing.
        ignored_vacant: Parameters and buffers that are None, and submodules without members, for which something was
            saved.
        decided_by_hooks: Tensors with two names under which two tensors were saved, in a module whose load hooks may
            change the entries.
        converted: Tensors whose dtype differs from the saved one.
        filled: Tensors and arrays that are filled in place.
        read_leaves: Every leaf that is read, by its saved FQN.
    """

    missing: list[str] = field(default_factory=list)
    absent_subtrees: list[str] = field(default_factory=list)
    unavailable: list[str] = field(default_factory=list)
    staying_empty: list[str] = field(default_factory=list)
    ignored_vacant: list[str] = field(default_factory=list)
    decided_by_hooks: list[str] = field(default_factory=list)
    converted: list[str] = field(default_factory=list)
    filled: list[str] = field(default_factory=list)
    read_leaves: dict[str, Node] = field(default_factory=dict)


@dataclass(slots=True)
class Matches:
    """What a load into a state dict will do.

    Attributes:
        targets: The target.
        report: The result for the caller.
        placements: Placements of plain tensors that are filled whole and without conversion.
        tensors: Fillings of all other tensors; a tensor with several names occurs once.
        ties: Tensors with two names under which two tensors were saved: filled from the first, if both are equal.
        replaced: Parts that get a new value: object leaves, arrays of another shape, states of objects.
        extended_lists: Lists that are extended; their nodes hold the additional members.
        resharded: Marks whose values of all ranks are read and given to their `reshard`.
        reused: Existing tensors that parts of `replaced` are read into.
        same_object: For each container or object of the target that is filled under two names: FQN and saved node, FQN
            and saved node.
        undecided: Modules whose load hooks decide which entries are missing; their tensors are not in `tensors`.
        without_memory: FQN and tensor of each tensor that would be filled and has no memory.
    """

    targets: Targets
    report: MatchReport = field(default_factory=MatchReport)
    placements: list[Placement] = field(default_factory=list)
    tensors: list[Filling] = field(default_factory=list)
    ties: list[Tie] = field(default_factory=list)
    replaced: list[Replacement] = field(default_factory=list)
    extended_lists: list[Replacement] = field(default_factory=list)
    resharded: list[ReshardedMark] = field(default_factory=list)
    reused: Reused = field(default_factory=lambda: Reused({}, {}))
    same_object: list[tuple[str, Node, str, Node]] = field(default_factory=list)
    undecided: list[ModuleTarget] = field(default_factory=list)
    without_memory: list[tuple[str, torch.Tensor]] = field(default_factory=list)

    def boxes(self, saved: SavedTree) -> list[SavedBox]:
        """Return what is read of the checkpoint `saved`."""
        parts = (LIST, tuple(one.node for one in (*self.replaced, *self.extended_lists)))
        new = [leaf[1] for leaf in leaves_to_read(parts, self.reused) if leaf[0] != OBJECT]
        of_ranks = [leaf for one in self.resharded for node in one.nodes for _, leaf in leaves(node)]
        whole = [n for n in new if n not in self.reused.tensors] + [leaf[1] for leaf in of_ranks if leaf[0] != OBJECT]
        reused = [(saved.tensors[n], self.reused.tensors[n]) for n in new if n in self.reused.tensors]
        undecided = [filling for module in self.undecided for filling in module.tensors]
        ties = [Placement(tie.other, *shard) for tie in self.ties for shard in tie.shards]
        placed = [*self.placements, *placements_of([*self.tensors, *undecided, *reused]), *ties]
        return [*(whole_box(saved.tensors[n]) for n in whole), *map(box_of, placed)]


def match_target(
    state_dict: Mapping[Any, Any],
    saved: SavedTree,
    objects: SavedObjects,
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
        saved, objects: The checkpoint. An object is read only if the target holds a composite tensor.
        selection: Which of the target's leaves to fill.
        key_map: From the target's FQNs to the saved ones; names that a mapping lacks stay.
        path: The checkpoint's path, for messages.
        refuse: Called for every leaf that cannot be filled; raises, or records it so that matching continues.
        allow_pickle: Whether tensors that cannot be stored as such are objects.

    Raises:
        UnsupportedLeafError: The target holds something that a checkpoint cannot.
        OverlappingShardsError: The shards of a target tensor share elements.
        ShapeMismatchError: A tensor was saved with another global shape, or a list or tuple with another length.
        LeafTypeMismatchError: One leaf is a tensor and the other an object, or one is a container; or the target's
            dtype cannot hold the saved values, such as an integer dtype for floating point numbers.
        ConfigError: Elements of a target tensor share memory, so that it cannot be filled; or `selection` names a part
            of an object that takes its state as a whole.
    """
    targets = Targets(state_dict)
    if key_map is None and selection.everything:
        exact = exact_placements(state_dict, saved)
        if exact is not None:
            return _exact_matches(targets, saved, *exact)
    flat = flatten(state_dict, targets.state_of, allow_pickle=allow_pickle, is_target=True)
    rename = renamer(key_map) if key_map is not None else None
    return _Matcher(targets, saved, objects, selection, rename, path, refuse).match(flat)


def _exact_matches(targets: Targets, saved: SavedTree, placements: list[Placement], objects: ObjectLeaves) -> Matches:
    replaced = [Replacement(path, fqn_of(path), node) for path, node in objects]
    names = [fqn for fqn, node in saved.leaves.items() if node[0] == TENSOR]
    report = MatchReport(filled=names, read_leaves=dict(saved.leaves))
    return Matches(targets, report, placements=placements, replaced=replaced)


class TargetLeaf(NamedTuple):
    """A leaf of the target. A composite tensor is one leaf. An empty mapping is a leaf too, since it takes
    everything that was saved below its name.

    Attributes:
        path: Path of the leaf.
        fqn: FQN of the leaf.
        node: Its node in the target's tree.
        holder: The container that holds the value; the value may be in a `PerRank`.
        key: The key of the value in `holder`.
    """

    path: Path
    fqn: str
    node: Node
    holder: Any
    key: Any


class _TargetTree:
    """The tree of a target, walked once.

    Args:
        tree: The tree that `flatten` has made.
        targets: The target.
        reshards: Called with each `PerRank`; whether it is given to its `reshard`, so that nothing in it is a leaf.

    Attributes:
        leaves: All leaves, in the order of the target. An empty target has none.
        containers: The node of every container by path, without `PerRank` marks.
    """

    def __init__(self, tree: Node, targets: Targets, reshards: Callable[[TargetLeaf], bool]) -> None:
        self.leaves: list[TargetLeaf] = []
        self.containers: dict[Path, Node] = {}
        self._targets, self._reshards = targets, reshards
        self._walk(tree, (), "")

    def _walk(self, node: Node, path: Path, prefix: str) -> None:
        """`prefix`: prefix of the FQNs below `node`; empty, or with a dot at its end."""
        self.containers[path] = node
        holder = self._targets.value_at(path)
        for key, marked in members(node):
            child = without_per_rank(marked)
            at = (*path, key)
            if marked[0] == PER_RANK and self._reshards(
                TargetLeaf(at, f"{prefix}{key}", child, holder, python_key(key))
            ):
                continue
            is_container = child[0] in CONTAINERS and child[0] != COMPOSITE
            if is_container and (child[1] or child[0] not in MAPPINGS):
                self._walk(child, at, f"{prefix}{key}.")
                continue
            if is_container:
                self.containers[at] = child
            self.leaves.append(TargetLeaf(at, f"{prefix}{key}", child, holder, python_key(key)))

    def states(self) -> set[Path]:
        """Return the paths of the states that `state_dict()` of modules and optimizers has returned."""
        return {path for path, node in self.containers.items() if is_returned_state(node)}


class _Matcher:
    """Matches the leaves of a target, one after the other.

    Args:
        targets: The target.
        saved, objects, selection, path, refuse: The arguments of `match_target`.
        rename: Returns the saved FQN of an FQN of the target; None: all names are the same.
    """

    def __init__(
        self,
        targets: Targets,
        saved: SavedTree,
        objects: SavedObjects,
        selection: Selection,
        rename: Callable[[str], str] | None,
        path: str,
        refuse: Callable[[Mismatch], None],
    ) -> None:
        self._matches, self._targets = Matches(targets), targets
        self._report = self._matches.report
        self._saved, self._objects, self._selection, self._rename = saved, objects, selection, rename
        self._path, self._refuse = path, refuse
        # By number of a target tensor: the first FQN under which it is filled, and the numbers of the saved tensors.
        self._filled: dict[int, tuple[str, list[int]]] = {}
        # By ID of a value, its first number: a registered type may give copies as parts, which get new numbers.
        self._values: dict[int, int] = {}
        # By number of a target tensor: FQN, number of the saved tensor, and the module whose load hooks get it.
        self._made_new: dict[int, tuple[str, int, ModuleTarget]] = {}
        self._absent_tensors: list[TargetLeaf] = []
        self._absent_mappings: list[TargetLeaf] = []  # empty ones, which the format may not be able to store
        self._objects_of_target: list[Any] = []  # by number
        self._kept_alive: list[Any] = []
        self._claimed: set[int] = set()  # IDs of empty containers that another leaf already fills
        self._owners: dict[tuple[int, Any], tuple[str, Node]] = {}  # see `_record_owner`
        self._absent_paths: list[Path] = []  # of leaves that the checkpoint lacks
        self._empty_paths: list[Path] = []  # of empty containers that were saved as empty
        self._filled_paths: list[Path] = []
        self._read_nodes: list[tuple[Path, Node]] = []  # containers and composite tensors that are read as a whole

    def match(self, flat: Flattened) -> Matches:
        """Match the whole target; `flat` is what `flatten` has made of it."""
        tree, self._objects_of_target = _TargetTree(flat.tree, self._targets, self._reshard), flat.objects
        self._extend_lists(tree)
        if not flat.tree[1]:
            self._match_empty_target()
        for leaf in tree.leaves:
            self._match_leaf(leaf, flat.objects[leaf.node[1]] if leaf.node[0] == OBJECT else None)
        for module in self._targets.modules:
            self._finish_module(module)
        self._resolve_ties()
        if self._absent_paths or self._absent_mappings:
            self._report_absent(tree)
        self._report.missing += self._selection.unused(self._is_read)
        return self._matches

    def _report_absent(self, tree: _TargetTree) -> None:
        """Report of which subtrees of the target nothing was saved, and which empty containers stay empty."""
        found = [*self._filled_paths, *(new.path for new in self._matches.replaced), *self._empty_paths]
        found += [mark.path for mark in self._matches.resharded]
        found += [module.path for module in self._matches.undecided]  # `ModuleTarget.load` reports what they lack
        mappings = [leaf.fqn for leaf in self._absent_mappings]
        if found:
            self._report.staying_empty += mappings
        else:  # else the load would succeed and load nothing
            self._report.missing += mappings
            self._absent_paths += [leaf.path for leaf in self._absent_mappings]
        self._report.absent_subtrees += absent_subtrees(
            tree.states(), self._absent_paths, found, self._targets.is_module
        )

    def _is_read(self, fqn: str) -> bool:
        """Whether something that was saved under `fqn` is read; False if names are mapped."""
        return self._rename is None and fqn in self._read_names

    @cached_property
    def _read_names(self) -> set[str]:
        """Names of everything that is read, and the parts of them before each dot. Only for use after the matching."""
        names = {fqn_of(path) for at, node in self._read_nodes for path, _ in all_nodes(node, at)}
        names.update(self._report.read_leaves)
        return names.union(*map(prefixes, names))

    def _saved_name(self, fqn: str) -> str:
        return fqn if self._rename is None else self._rename(fqn)

    def _reshard(self, leaf: TargetLeaf) -> bool:
        """Record a `PerRank` of the target if its `reshard` gets the values of all ranks; return whether it does.

        Raises:
            ConfigError: The selection names a part of it.
        """
        path, fqn, node, holder, key = leaf
        mark = holder[key]
        if not isinstance(mark, PerRank) or mark.reshard is None or self._saved.reader_rank is not None:
            return False
        is_selected = fqn in self._selection
        if not is_selected and not self._selection.reaches_into(fqn):
            return False
        saved_fqn = self._saved_name(fqn)
        nodes = self._saved.nodes_of_ranks(saved_fqn)
        if nodes is None:
            return False
        if not is_selected:
            raise ConfigError(
                f"keys selects a part of {fqn!r}, a PerRank whose reshard makes its whole value; name {fqn!r} in keys",
                field="keys",
            )
        names = dict.fromkeys([fqn, *(fqn_of(inner) for inner, _ in leaves(node, path))])
        self._matches.resharded.append(ReshardedMark(path, fqn, saved_fqn, mark, nodes, tuple(names)))
        self._targets.leave_out(path)
        return True

    def _match_leaf(self, leaf: TargetLeaf, value: Any) -> None:
        """Match one leaf; `value`: the value of an object leaf."""
        path, fqn, node, _, _ = leaf
        selection, module = self._selection, self._targets.module_at(path)
        if module is not None and self._match_module_entry(module, leaf):
            return
        if node[0] == OBJECT and is_loadable(value):
            self._match_object(leaf, value, module)
            return
        if node[0] in MAPPINGS or (node[0] == OBJECT and is_empty_object(value)):
            if not self._targets.is_module(path) and (fqn in selection or selection.reaches_into(fqn)):
                self._match_container(leaf, value, self._saved_name(fqn))
            return
        if not selection.everything and fqn not in selection:
            return
        saved_fqn = self._saved_name(fqn)
        if node[0] == COMPOSITE:
            self._match_composite(leaf, saved_fqn)
            return
        found = self._saved.leaves.get(saved_fqn)
        if found is None and node[0] == TENSOR and self._match_empty_part(leaf, saved_fqn):
            return
        if found is None:
            self._match_container(leaf, value, saved_fqn)
            return
        self._report.read_leaves[saved_fqn] = found
        if _is_object(node, found):
            self._replace(leaf, found)
        elif OBJECT in (node[0], found[0]) or BYTES in (node[0], found[0]):
            self._refuse(leaf_mismatch(fqn, kind_of(found), kind_of(node), self._path))
        else:
            self._match_tensor(leaf, found[1])

    def _record_read(self, node: Node, at: Path) -> None:
        """Record that the saved `node` at path `at` is read."""
        self._read_nodes.append((at, node))
        self._report.read_leaves.update(
            (fqn_of(leaf), inner) for leaf, inner in leaves(node, at) if inner is not OTHER_RANKS_ONLY
        )

    def _record_owner(self, owner: tuple[int, Any], fqn: str, node: Node) -> None:
        """Record that `node` fills the part that is identified by the ID of an object and the keys below that."""
        first, other = self._owners.setdefault(owner, (fqn, node))
        if first != fqn:
            self._matches.same_object.append((first, other, fqn, node))

    def _replace(self, leaf: TargetLeaf, node: Node) -> None:
        """Record that a leaf is replaced by the value of `node`.

        Raises:
            ConfigError: The container of the leaf cannot be changed.
        """
        path, fqn, _, holder, key = leaf
        value = None if holder is None else holder[key]
        if type(holder) is not dict and type(holder) is not list:
            stays = isinstance(value, MutableMapping) and node[0] in MAPPINGS and id(value) not in self._claimed
            immutable = None if stays else self._targets.immutable_container_at(path)
            if immutable is not None:
                raise ConfigError(
                    f"target {fqn!r} is in a {immutable}, which cannot be changed, but its value must be replaced by "
                    "the saved one: pass a dict or a list",
                    field="state_dict",
                    value=fqn,
                )
        self._claimed.add(id(value))
        if has_lost_factory(node) and isinstance(unwrap_per_rank(value), MutableMapping):
            node = node[:2]  # a mapping of the target keeps its own factory
        is_inner = isinstance(holder, tuple) or isinstance(value, PerRank)
        self._record_owner(self._targets.owner_of(path) if is_inner else (id(holder), (key,)), fqn, node)
        self._matches.replaced.append(Replacement(path, fqn, node))

    def _extend_lists(self, tree: _TargetTree) -> None:
        """Record which lists of the target are extended by saved members; refuse all other differences in length."""
        for path, node in tree.containers.items():
            if node[0] not in SEQUENCES:
                continue
            fqn = fqn_of(path)
            if not self._selection.everything and fqn not in self._selection:
                continue
            found = self._saved.node_at(self._saved_list_name(fqn, node), path)
            if found is None or found[1][0] not in SEQUENCES or len(found[1][1]) == len(node[1]):
                continue
            at, saved = found
            appended = appended_members(node, saved, path[-1], tree.containers[path[:-1]])
            if appended is None:
                self._refuse(length_mismatch(fqn, len(saved[1]), len(node[1]), self._path))
                continue
            for n, member in enumerate(appended, len(node[1])):
                self._record_read(member, (*at, n))
            self._record_owner((id(self._targets.value_at(path)), None), fqn, (LIST, appended))
            self._matches.extended_lists.append(Replacement(path, fqn, (LIST, appended)))

    def _saved_list_name(self, fqn: str, node: Node) -> str:
        """Return the saved name of a list. Since `key_map` maps names of leaves only, its first leaf is mapped."""
        if self._rename is None:
            return fqn
        below = fqn_of(_first_leaf(node))
        renamed = self._rename(f"{fqn}.{below}")
        return renamed[: -len(below) - 1] if renamed.endswith("." + below) else fqn

    def _match_module_entry(self, module: ModuleTarget, leaf: TargetLeaf) -> bool:
        """Match a leaf of a module if the module's load hooks decide on it; False: match it like any other leaf."""
        path, fqn, node, _, _ = leaf
        if fqn not in self._selection:
            return False
        name, saved_fqn = module.name_of(fqn), self._saved_name(fqn)
        module.saved_fqns[name] = saved_fqn
        entry = self._saved.node_at(saved_fqn, path)
        own = module.own_value(name)
        if entry is None:
            if self._saved.is_other_ranks_only(saved_fqn) or not module.defer_to_hooks(name):
                return False
            self._record_without_memory(fqn, own)
            return True
        module.record_saved(name, saved_fqn)
        if node[0] != TENSOR or not module.needs_new_value(name, node, entry[1], self._saved):
            return False
        self._record_without_memory(fqn, own)
        self._give_new_value(module, Replacement(path, fqn, self._saved.without_other_ranks(entry[1])), entry)
        if entry[1][0] == TENSOR:
            self._tie_new_value(module, self._values.setdefault(id(own), node[1]), target_tensor(own, fqn), entry[1][1])
        return True

    def _tie_new_value(self, module: ModuleTarget, own: int, target: TargetTensor, found: int) -> None:
        """Record a tie between a tensor that a module's load hooks fill and its other names in the target."""
        tensor = self._saved.tensors[found]
        if target.global_shape != tensor.global_shape:
            return
        first, numbers = self._filled.get(own, ("", []))
        earlier, number, whose = self._made_new.setdefault(own, (target.fqn, found, module))
        pairs = [(first, numbers[0])] if numbers else []
        if whose is not module:
            pairs.append((earlier, number))
        elif number != found:
            self._report.decided_by_hooks += [earlier, target.fqn]
        self._matches.ties += [
            Tie(fqn, target.fqn, self._saved.tensors[n], tensor, target.shards) for fqn, n in pairs if n != found
        ]

    def _give_new_value(self, module: ModuleTarget, new: Replacement, entry: tuple[Path, Node]) -> None:
        at, node = entry
        self._record_read(node, at)
        self._matches.replaced.append(new)
        if node[0] == TENSOR:
            like = module.new_sharded_like(module.name_of(new.fqn), self._saved.tensors[node[1]])
            if like is not None:
                self._matches.reused.tensors.setdefault(node[1], like)

    def _record_without_memory(self, fqn: str, value: Any) -> None:
        if isinstance(value, torch.Tensor) and not torch.nn.parameter.is_lazy(value) and why_no_memory(value):
            self._matches.without_memory.append((fqn, value))

    def _finish_module(self, module: ModuleTarget) -> None:
        """Match saved entries that a module does not have, and record whether it is undecided."""
        matches, report = self._matches, self._report
        for name, saved_fqn, node in list(module.extra_saved_entries(self._saved, report.read_leaves)):
            fqn = f"{module.fqn}.{name}"
            entry = self._saved.node_at(saved_fqn)
            if entry is None or fqn not in self._selection:
                continue
            module.record_saved(name, saved_fqn)
            new = Replacement((*module.path, name), fqn, self._saved.without_other_ranks(node))
            self._give_new_value(module, new, entry)
        for name in module.vacant:
            fqn = f"{module.fqn}.{name}".removesuffix(".")
            saved_fqn = self._saved_name(fqn)
            entry = self._saved.node_at(saved_fqn) or self._saved.dict_of_prefix(saved_fqn)
            below = [] if entry is None or fqn not in self._selection else leaves(entry[1], entry[0])
            if any(inner is not OTHER_RANKS_ONLY and fqn_of(leaf) not in report.read_leaves for leaf, inner in below):
                report.ignored_vacant.append(fqn)
        module.resolve_ties()
        if not module.was_found:
            report.missing += [f"{module.fqn}.{name}" for name in module.undecided]
            self._absent_paths += [(*module.path, name) for name in module.undecided]
            module.undecided.clear()
        if module.undecided:
            matches.undecided.append(module)
        else:
            matches.tensors += module.tensors

    def _match_object(self, leaf: TargetLeaf, value: Any, module: ModuleTarget | None) -> None:
        """Match an object that takes its state as a whole; also such an entry of a module's state.

        Raises:
            ConfigError: `selection` names a part of it.
        """
        path, fqn, saved_fqn = leaf.path, leaf.fqn, self._saved_name(leaf.fqn)
        saved, matches = self._saved, self._matches
        if fqn not in self._selection:
            if self._selection.reaches_into(fqn):
                raise ConfigError(
                    f"keys selects a part of {fqn!r}, whose state is loaded as a whole; name {fqn!r} in keys",
                    field="keys",
                )
            return
        holder = None if isinstance(value, ReplacedEntry) else value
        others = [one for one in saved.other_ranks_only if one == saved_fqn or one.startswith(saved_fqn + ".")]
        found = saved.node_at(saved_fqn, path)
        if found is None and others:
            self._report.unavailable.append(fqn)
            return
        if found is None:
            self._report.missing.append(fqn)
            if holder is not None:
                self._report.absent_subtrees.append(fqn)
            self._absent_paths.append(path)
            return
        if saved.reader_rank is None:  # at the same world size, leaves of other ranks are left out, as in a new dict
            self._report.unavailable += others
        at, node = found
        self._record_read(node, at)
        if isinstance(holder, torch.optim.Optimizer) and not saved.keeps_empty_containers:
            node, bare = with_optimizer_state(node), node
            self._report.staying_empty += [f"{fqn}.state"] if node is not bare else []
        new = Replacement(path, fqn, saved.without_other_ranks(node), holder)
        matches.replaced.append(new)
        if isinstance(holder, torch.optim.Optimizer):  # it moves its state to its parameters' devices
            params = [param for group in holder.param_groups for param in group["params"]]
            matches.without_memory += [(fqn, param) for param in params if why_no_memory(param) is not None]
        # IMPORTANT: one `Reused` for all optimizers. A component that two of them share must be filled in both.
        reuse_state_tensors(matches.reused, holder, new.node, saved.tensors, self._fits, self._composite_like)
        owner = (id(value), None) if module is None else module.owner_of(module.name_of(fqn))
        self._record_owner(owner, fqn, new.node)

    def _record_absent(self, leaf: TargetLeaf, saved_fqn: str) -> None:
        """Record why a leaf of the target, saved as `saved_fqn`, is not in the checkpoint."""
        path, fqn, node, holder, key = leaf
        saved, report = self._saved, self._report
        self._targets.leave_as_is(unwrap_per_rank(holder[key]))
        self._claimed.add(id(holder[key]))
        above = next((prefix for prefix in prefixes(saved_fqn) if prefix in saved.leaves), None)
        if above is not None:
            self._refuse(leaf_mismatch(above, kind_of(saved.leaves[above]), "container", self._path))
        elif saved.is_other_ranks_only(saved_fqn):
            report.unavailable.append(fqn)
        elif node[0] in MAPPINGS and not saved.keeps_empty_containers:
            self._absent_mappings.append(leaf)
        else:
            report.missing.append(fqn)
            self._absent_paths.append(path)
            if node[0] in (TENSOR, ARRAY, COMPOSITE):
                self._absent_tensors.append(leaf)

    def _match_container(self, leaf: TargetLeaf, value: Any, saved_fqn: str) -> None:
        """Match a leaf with a saved container: an empty mapping, or the object `value`, may take all of it."""
        path, fqn, node, _, _ = leaf
        entry, is_whole = self._saved.node_at(saved_fqn, path), fqn in self._selection
        if entry is None and node[0] in (OBJECT, *MAPPINGS):
            entry = self._saved.dict_of_prefix(saved_fqn)
        if entry is None:
            if is_whole:
                self._record_absent(leaf, saved_fqn)
            return
        if node[0] in (OBJECT, *MAPPINGS):
            error = container_mismatch(node, value, entry[1], fqn, self._path)
        else:
            error = leaf_mismatch(fqn, kind_of(entry[1]), kind_of(node), self._path)
        if error is not None:
            self._refuse(error)
            return
        part = entry[1] if is_whole else selected_part(entry[1], self._selection, path, fqn)
        if part is not None:
            self._fill_empty(leaf, part, entry[0])

    def _match_empty_target(self) -> None:
        """Match a target that is an empty mapping."""
        whole = TargetLeaf((), "", (DICT, ()), None, None)
        self._fill_empty(whole, selected(self._saved.tree, self._selection) or (DICT, ()), ())

    def _fill_empty(self, leaf: TargetLeaf, node: Node, at: Path) -> None:
        """Record that an empty container of the target takes `node`, which was saved at path `at`."""
        fqn, saved, saved_fqn = leaf.fqn, self._saved, fqn_of(at)
        if saved.reader_rank is None:  # at the same world size, leaves of other ranks are left out, as in a new dict
            others = [one for one in saved.other_ranks_only if one.startswith(saved_fqn)]
            inside = [one[len(saved_fqn) :] for one in others if not at or one[len(saved_fqn) :].startswith(".")]
            self._report.unavailable += [fqn + name for name in inside if fqn + name in self._selection]
        self._record_read(node, at)
        if node[0] in MAPPINGS and not node[1]:
            self._empty_paths.append(leaf.path)
        self._replace(leaf, saved.without_other_ranks(node))

    def _match_tensor(self, leaf: TargetLeaf, found: int) -> None:
        """Match a leaf with saved tensor number `found`."""
        path, fqn, node, holder, key = leaf
        matches, value, tensor = self._matches, holder[key], self._saved.tensors[found]
        if type(value) not in PLAIN_TENSORS:
            value = unwrap_per_rank(value)
        if node[0] == ARRAY:
            value = view_of(value)
            if value is None or not target_tensor(value, fqn).takes(tensor):
                self._replace(leaf, (ARRAY, found))
                return
            own = node[1]
        else:
            own = self._values.setdefault(id(value), node[1])
        target = target_tensor(value, fqn)
        first, numbers = self._filled.setdefault(own, (fqn, []))
        self._record_filled(leaf)
        matches.without_memory += [(fqn, part) for part, _ in target.shards if why_no_memory(part) is not None]
        if found in numbers:
            return
        numbers.append(found)
        if found in self._saved.empty_parts and target.has_no_local_elements:
            return
        if target.global_shape != tensor.global_shape:
            self._refuse(_shape_mismatch(fqn, tensor, target, self._path))
            return
        check_fillable(target, fqn)
        if target.dtype != torch_dtype(tensor.dtype):
            if not target.holds_values_of(tensor):
                self._refuse(_kind_mismatch(fqn, tensor, target, self._path))
                return
            self._report.converted.append(fqn)
        if len(numbers) > 1:
            matches.ties.append(Tie(first, fqn, self._saved.tensors[numbers[0]], tensor, target.shards))
            return
        made_new = self._made_new.get(own)
        if made_new is not None and made_new[1] != found:
            matches.ties.append(Tie(made_new[0], fqn, self._saved.tensors[made_new[1]], tensor, target.shards))
        module = self._targets.module_at(path)
        (matches.tensors if module is None else module.tensors).append((tensor, target))

    def _match_composite(self, leaf: TargetLeaf, saved_fqn: str) -> None:
        """Match a composite tensor: a subclass is filled in place, any other one is replaced."""
        path, fqn, node, holder, key = leaf
        entry = self._saved.node_at(saved_fqn, path)
        if entry is None:
            self._record_absent(leaf, saved_fqn)
            return
        at, found = entry
        error = self._composite_mismatch(fqn, node, self._objects_of_target, found)
        if error is not None:
            self._refuse(error)
            return
        self._record_read(found, at)
        value = unwrap_per_rank(holder[key])
        if node[3] in TENSOR_KINDS:
            self._record_owner((id(value), None), fqn, found)
            self._replace(leaf, found)
            return
        for one, number in self._components(value, node, found):
            self._match_tensor(TargetLeaf((*path, *one.path), f"{fqn}.{fqn_of(one.path)}", *one[2:]), number)
        self._record_filled(leaf)

    def _match_empty_part(self, leaf: TargetLeaf, saved_fqn: str) -> bool:
        """Match a sharded tensor of which this process holds no elements with a composite one; it stays as it is.

        It may be plain here, and of the saved class on the ranks that hold elements.
        """
        entry, value = self._saved.node_at(saved_fqn, leaf.path), unwrap_per_rank(leaf.holder[leaf.key])
        if entry is None or entry[1][0] != COMPOSITE:
            return False
        target, rest = target_tensor(value, leaf.fqn), self._rest_of(entry[1])
        if not target.has_no_local_elements or rest.get(SHARDED) is None or rest["size"] != list(target.global_shape):
            return False
        self._record_read(entry[1], entry[0])
        self._record_filled(leaf)
        return True

    def _rest_of(self, node: Node) -> dict[str, Any]:
        return rest_of(node, self._objects.value(*self._saved.object_at(node[2])), self._saved, self._path)

    def _fits(self, node: Node, rests: Sequence[Any], found: Node) -> bool:
        return node[3] not in TENSOR_KINDS and self._composite_mismatch("", node, rests, found) is None

    def _composite_like(
        self, parameter: torch.Tensor, node: Node, existing: Mapping[int, TargetTensor]
    ) -> torch.Tensor | None:
        """Return a new composite tensor for the saved `node`, sharded like a parameter; None: it was not sharded.

        If this process holds no elements of the parameter, it is a plain one.

        Args:
            parameter: The parameter.
            node: The saved node.
            existing: By saved tensor number, tensors that are filled already: one may be a component of several.

        Raises:
            UnsupportedLeafError: Its type is not registered, or it cannot be sharded like the parameter.
        """
        saved, rest = self._saved, self._rest_of(node)
        if node[3] in TENSOR_KINDS or rest.get(SHARDED) is None:
            return None
        if rest["size"] == list(parameter.shape) and target_tensor(parameter, "").has_no_local_elements:
            with torch.no_grad():
                return torch.empty_like(parameter, requires_grad=False)
        refuse_unknown_types(node, rest, saved, self._path, self._objects.type_of)
        numbers = {str(name): inner[1] for name, inner in members(node)}
        tensors = {name: saved.tensors[number] for name, number in numbers.items()}
        forms = {name: (tensor.global_shape, torch_dtype(tensor.dtype)) for name, tensor in tensors.items()}
        filled = {name: existing[number].shards for name, number in numbers.items() if number in existing}
        known = {name: part for name, shards in filled.items() for part, _ in shards}
        try:
            if rest["size"] != list(parameter.shape):
                raise ValueError(f"it was saved with shape {rest['size']}, the parameter has {list(parameter.shape)}")
            if len(set(numbers.values())) != len(numbers):
                raise ValueError("two of its components are the same tensor")
            return new_dtensor_like(parameter, node[3], rest, forms, known, self._objects.type_of)
        except Exception as error:  # whatever torch, or the class, raises
            fqn = saved.fqn_of_node(node)
            raise UnsupportedLeafError(
                f"{self._path}: {fqn!r}, a {node[3]}, was saved sharded like its parameter, and no tensor can be made "
                f"that is sharded like the parameter of the target: {type(error).__name__}: {error}; nothing was "
                "changed. Load it with as many ranks as saved it",
                leaf=fqn,
                type_name=node[3],
            ) from error

    def _composite_mismatch(
        self, fqn: str, node: Node, rests: Sequence[Any], found: Node
    ) -> LeafTypeMismatchError | ShapeMismatchError | None:
        """Return the error if a tensor of the target does not have the saved components; None if it does.

        Args:
            fqn: FQN of the tensor in the target.
            node, rests: Its node in a flattened state, and the objects of that, among them its `Composite.rest`.
            found: The node that was saved under its name.
        """
        if found[0] != COMPOSITE or found[3] != node[3]:
            return leaf_mismatch(fqn, kind_of(found), kind_of(node), self._path)
        rest, is_subclass = rests[node[2]], node[3] not in TENSOR_KINDS
        names, own_names = (", ".join(map(str, one[1][::2])) for one in (found, node))
        if is_subclass and names != own_names:
            return composite_mismatch(fqn, node[3], f"the components {names}", own_names, self._path)
        saved = self._rest_of(found)
        size, wanted = saved.get("size"), rest.get("size")
        if size != wanted and type(size) is type(wanted) is list:  # jagged tensors have no size
            return ShapeMismatchError(
                f"{self._path}: {fqn!r}, a {node[3]}, was saved with shape {size}, the target has "
                f"{wanted}; nothing was changed",
                path=self._path,
                fqn=fqn,
                saved=size,
                wanted=wanted,
            )
        if not is_subclass:
            return None
        if not is_same_leaf(saved["context"], rest["context"]):
            was, own = (f"{one!r:.200}" for one in (saved["context"], rest["context"]))
            return composite_mismatch(fqn, node[3], f"the context {was}", own, self._path)
        inner = zip(members(node), members(found), strict=True)
        return next(
            (
                error
                for (name, mine), (_, other) in inner
                if COMPOSITE in (mine[0], other[0])
                and (error := self._composite_mismatch(f"{fqn}.{name}", mine, rests, other)) is not None
            ),
            None,
        )

    def _components(self, value: Any, node: Node, found: Node) -> Iterator[tuple[TargetLeaf, int]]:
        """Yield the tensors in a composite tensor, with the numbers of the saved ones; their paths begin in it.

        Args:
            value: The tensor.
            node, found: Its node, and the saved node; they have the same components.
        """
        described = decompose(value)
        assert described is not None
        self._kept_alive.append(described.tensors)  # the matcher compares IDs
        for (name, mine), (_, other) in zip(members(node), members(found), strict=True):
            if mine[0] != COMPOSITE:
                yield TargetLeaf((name,), str(name), mine, described.tensors, name), other[1]
                continue
            for leaf, number in self._components(described.tensors[str(name)], mine, other):
                yield leaf._replace(path=(name, *leaf.path)), number

    def _record_filled(self, leaf: TargetLeaf) -> None:
        self._filled_paths.append(leaf.path)
        self._report.filled.append(leaf.fqn)

    def _resolve_ties(self) -> None:
        """Count leaves that were not saved as filled if their tensor is filled under another name."""
        for leaf in self._absent_tensors:
            path, fqn, node, holder, key = leaf
            if node[0] == COMPOSITE:
                if any(inner[1] not in self._filled for _, inner in leaves(node)):
                    continue
                self._report.missing.remove(fqn)
                self._absent_paths.remove(path)
                self._record_filled(leaf)
                continue
            own = node[1] if node[0] == ARRAY else self._values.get(id(unwrap_per_rank(holder[key])), node[1])
            if own in self._filled or own in self._made_new:
                self._report.missing.remove(fqn)
                self._absent_paths.remove(path)
                self._record_filled(leaf)


def _first_leaf(node: Node) -> Path:
    """Return the path of the first leaf below `node`; an empty container counts as one."""
    path: tuple[Key, ...] = ()
    node = without_per_rank(node)
    while node[0] in CONTAINERS and node[1]:
        key, inner = next(iter(members(node)))
        path, node = (*path, key), without_per_rank(inner)
    return path


def _is_object(node: Node, found: Node) -> bool:
    """Whether the leaf is replaced: neither the target's nor the saved leaf is a tensor, and not both are arrays."""
    return TENSOR not in (node[0], found[0]) and (node[0], found[0]) != (ARRAY, ARRAY)


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
