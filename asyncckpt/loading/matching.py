"""A target that is exactly what was saved: the same tree of plain containers and tensors, as most restarts have it.

Then the numbers of the leaves are the same on both sides, and no name has to be looked up. Whatever is not so, and
everything that is refused, is left to `matching`, which looks at each leaf.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from asyncckpt.errors import ConfigError, LeafTypeMismatchError, ShapeMismatchError
from asyncckpt.format.state_tree import CONTAINERS, Node, Path, fqn_of, leaves, python_key
from asyncckpt.loading.byte_ranges import Placement
from asyncckpt.loading.container_matching import (
    MAPPINGS,
    absent_subtrees,
    appended_members,
    container_mismatch,
    is_empty_object,
    leaf_mismatch,
    length_mismatch,
    lists_of_other_lengths,
    selected_part,
)
from asyncckpt.loading.key_selection import OTHER_RANKS_ONLY, KeyMap, Selection, prefixes, renamer, selected
from asyncckpt.loading.module_targets import ModuleTarget, ReplacedEntry
from asyncckpt.loading.saved_state import SavedTree, kind_of
from asyncckpt.loading.target_tensors import (
    Filling,
    TargetTensor,
    Tie,
    check_fillable,
    shares_own_memory,
    target_tensor,
)
from asyncckpt.loading.targets import Targets, is_loadable, reusable_state_tensors, unwrap_per_rank
from asyncckpt.per_rank import PerRank
from asyncckpt.state_dict.flatten import PLAIN_TENSORS, SCALARS, flatten, is_flat
from asyncckpt.state_dict.numpy_values import view_of
from asyncckpt.state_dict.unflatten import has_lost_factory
from asyncckpt.storage.contents import SavedTensor
from asyncckpt.torch_tensors import NO_ADDRESS_BELOW, address_of, torch_dtype, why_no_memory

_KINDS = {"d": dict, "o": OrderedDict, "l": list, "t": tuple}


def exact_placements(state_dict: Any, saved: SavedTree) -> list[Placement] | None:
    """Return what is read into which tensor; None where the target is not exactly what was saved.

    Args:
        state_dict: The target.
        saved: The checkpoint.
    """
    numbers: list[int] = []
    values: list[torch.Tensor] = []
    if not _walk(saved.tree, state_dict, numbers, values, set()):
        return None
    if numbers != list(range(len(saved.tensors))):
        first = _first_ones(numbers, values)
        if len(first) != len(saved.tensors) or first.keys() != set(range(len(first))):
            return None
        values = [first[number] for number in range(len(first))]
    return _placements(values, saved)


def _walk(node: Node, value: Any, numbers: list[int], values: list[torch.Tensor], seen: set[int]) -> bool:
    """Collect the tensors of a target in step with the saved tree; says whether the two are the same.

    Args:
        node, value: The saved tree and the target, or a part of both.
        numbers, values: What is collected.
        seen: Ids of the containers of the target so far; one that stands in two places is looked at more closely.
    """
    kind = node[0]
    if kind == "T":
        numbers.append(node[1])
        values.append(value)
        return type(value) in PLAIN_TENSORS
    if kind == "O" and len(node) == 2:
        return type(value) in SCALARS or (type(value) in (list, tuple) and is_flat(value))
    if type(value) is not _KINDS.get(kind) or len(node) > (3 if kind == "o" else 2):
        return False  # a form of its own among them: `matching` asks no target for its type
    if id(value) in seen and value != ():
        return False
    seen.add(id(value))
    if kind in ("l", "t"):
        nodes, members = node[1], value
        if len(nodes) != len(members) or is_flat(value):
            return False
    else:
        nodes, members = node[1][1::2], value.values()
        if tuple(value) != node[1][::2] or not set(map(type, value)) <= {str, int}:
            return False
        if kind == "o" and (getattr(value, "_metadata", None) is None) is not (node[2] is None):
            return False
    if set(map(itemgetter(0), nodes)) == {"T"} and PLAIN_TENSORS.issuperset(map(type, members)):
        numbers += map(itemgetter(1), nodes)
        values += members
        return True
    return all(_walk(inner, member, numbers, values, seen) for inner, member in zip(nodes, members, strict=True))


def _first_ones(numbers: list[int], values: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return the tensors by number; none where one number has two of them."""
    found: dict[int, torch.Tensor] = {}
    for number, value in zip(numbers, values, strict=True):
        if found.setdefault(number, value) is not value:
            return {}
    return found


def _placements(values: list[torch.Tensor], saved: SavedTree) -> list[Placement] | None:
    """Look at each tensor once; None where one cannot be filled as it stands, or two of them are one."""
    dtypes = {name: torch_dtype(name) for name in {tensor.dtype for tensor in saved.tensors}}
    origins = {shape: (0,) * len(shape) for shape in {tensor.global_shape for tensor in saved.tensors}}
    placed = partial(tuple.__new__, Placement)  # as `Placement(...)`, for half of its time
    found: list[Placement] = []
    places: set[int] = set()
    empty: set[int] = set()
    for tensor, value in zip(saved.tensors, values, strict=True):
        _, name, shape, _ = tensor
        if value.layout is not torch.strided or value.is_nested or value.dtype is not dtypes[name]:
            return None
        if value.shape != shape or value.is_neg() or (value.dtype.is_complex and value.is_conj()):
            return None
        try:
            address, is_row_major = value.data_ptr(), value.is_contiguous()
        except RuntimeError:  # it has none, inside vmap, say
            return None
        if address < NO_ADDRESS_BELOW:
            address = address_of(value)
        if not is_row_major and shares_own_memory(value):
            return None
        if address:
            places.add(address)
            found.append(placed((tensor, value, origins[shape], address if is_row_major and value.is_cpu else None)))
        elif value.numel() or value.is_meta:
            return None
        else:
            empty.add(id(value))
    return found if len(places) + len(empty) == len(values) else None


def object_leaves(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Yield (typed path, node) of the leaves that are no tensors."""
    kind = node[0]
    if kind in ("d", "o"):
        items = node[1]
        for i in range(0, len(items), 2):
            if items[i + 1][0] != "T":
                yield from object_leaves(items[i + 1], (*path, items[i]))
    elif kind in ("l", "t"):
        for i, child in enumerate(node[1]):
            if child[0] != "T":
                yield from object_leaves(child, (*path, i))
    else:
        yield path, node


TargetLeaf = tuple[Path, str, Node, Any, Any]
"""Path, FQN, node, and the container and the key under which the value lies there, a `PerRank` marked as such."""


def target_leaves(tree: Node, targets: Targets) -> Iterator[TargetLeaf]:
    """Yield every leaf of a target in its order, empty mappings among them; not the target itself when it is empty.

    Args:
        tree: What `flatten` made of it.
        targets: The target.
    """
    return _below(tree, (), "", targets)


def _below(node: Node, path: Path, prefix: str, targets: Targets) -> Iterator[TargetLeaf]:
    """`prefix`: of the names below `node`: empty, or with a dot at its end."""
    kind, members = node[0], node[1]
    holder = targets.value_at(path)
    for key, child in zip(members[::2], members[1::2], strict=True) if kind in ("d", "o") else enumerate(members):
        while child[0] == "r":
            child = child[1]
        if child[0] in CONTAINERS and (child[1] or child[0] not in ("d", "o")):
            yield from _below(child, (*path, key), f"{prefix}{key}.", targets)
        else:
            yield (*path, key), f"{prefix}{key}", child, holder, python_key(key)


Mismatch = ShapeMismatchError | LeafTypeMismatchError


def _raised(error: Mismatch) -> None:
    raise error


class Replacement(NamedTuple):
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
        ties: Tensors with two names under which two tensors were saved: filled from the first, if both are equal.
        decided_by_hooks: FQNs of tensors with two names under which two were saved, in a module whose code may
            make others of them.
        filled: Paths of the target's tensors and arrays that are filled in place. May be incomplete where no module is
            in the target, since nothing uses it then.
        filled_fqns: Their FQNs.
        replaced: What is made new: object leaves, arrays of another shape, states of objects.
        extended_lists: Lists that take more members than they have; their nodes hold those.
        standing: By saved tensor number: where the tensors of those states are read to, if anywhere.
        missing: FQNs of the target, as the target names them, that were not saved; and keys that select nothing.
            A tensor that is filled under another name is not missing.
        lost: FQNs of modules, other objects and subtrees of which nothing was found at all; of the whole target: "".
        staying_empty: FQNs of empty dicts of the target that a checkpoint of another format has nothing for.
        ignored_vacant: FQNs of parameters and buffers that are None, and of submodules without members, in modules of
            the target, below which something was saved.
        shared: What fills one container or object of the target under two names: FQN and saved node of both.
        converted: FQNs whose dtype differs.
        unavailable: FQNs of the target that only other ranks than the reader have, as their own.
        found: Everything that is read, by its saved FQN.
        undecided: Modules whose own loading code decides what of them is missing; their tensors are not in `tensors`.
        without_memory: FQNs of what is filled and has no memory, with the tensors.
    """

    targets: Targets
    tensors: list[Filling] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)
    ties: list[Tie] = field(default_factory=list)
    decided_by_hooks: list[str] = field(default_factory=list)
    filled: list[Path] = field(default_factory=list)
    filled_fqns: list[str] = field(default_factory=list)
    replaced: list[Replacement] = field(default_factory=list)
    extended_lists: list[Replacement] = field(default_factory=list)
    standing: dict[int, TargetTensor] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    staying_empty: list[str] = field(default_factory=list)
    ignored_vacant: list[str] = field(default_factory=list)
    shared: list[tuple[str, Node, str, Node]] = field(default_factory=list)
    converted: list[str] = field(default_factory=list)
    unavailable: list[str] = field(default_factory=list)
    found: dict[str, Node] = field(default_factory=dict)
    undecided: list[ModuleTarget] = field(default_factory=list)
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
        refuse: Called for every leaf that cannot be filled; raises, or records it so that matching continues.
        allow_pickle: Tensors that cannot be stored as such are objects.

    Raises:
        UnsupportedLeafError: The target holds something that a checkpoint cannot.
        OverlappingShardsError: The shards of a target tensor share elements.
        ShapeMismatchError: A tensor was saved with another global shape, or a list or tuple with another length.
        LeafTypeMismatchError: A tensor meets an object, or a leaf a container; or the target's dtype is of a kind that
            cannot hold such values: integers for floating point numbers, say.
        ConfigError: A target tensor whose elements share memory, so that it cannot be filled; `selection`
            names a part of an object that takes its state as a whole.
    """
    targets = Targets(state_dict)
    if key_map is None and selection.everything:
        placements = exact_placements(state_dict, saved)
        if placements is not None:
            return _alike(targets, saved, placements)
    flat = flatten(state_dict, targets.open, allow_pickle=allow_pickle, is_target=True)
    matching = _Matcher(Matches(targets), saved, path, refuse)
    matches, rename, taken = matching.matches, renamer(key_map) if key_map is not None else None, saved.leaves
    for other in lists_of_other_lengths(flat.tree, saved, selection, rename):
        matching.extend_list(flat.tree, *other)
    if not flat.tree[1]:
        matching.match_empty_target(selection)
    for leaf in target_leaves(flat.tree, targets):
        leaf_path, fqn, node, _, _ = leaf
        value = flat.objects[node[1]] if node[0] == "O" else None
        module = targets.module_at(leaf_path)
        if module is not None and matching.match_module_entry(module, leaf, selection, rename):
            continue
        if node[0] == "O" and is_loadable(value):
            saved_fqn = fqn if rename is None else rename(fqn)
            place = Replacement(leaf_path, fqn, node, value)
            if not _match_state(matches, place, saved, selection, saved_fqn):
                matching.absent_paths.append(leaf_path)
            elif matches.replaced and matches.replaced[-1].path == leaf_path:
                owner = (id(value), None) if module is None else module.owner_of(module.name_of(fqn))
                matching.own(owner, fqn, matches.replaced[-1].node)
            continue
        if node[0] in MAPPINGS or (node[0] == "O" and is_empty_object(value)):
            if not targets.is_module(leaf_path) and (fqn in selection or selection.reaches_into(fqn)):
                matching.place(leaf, value, selection, fqn if rename is None else rename(fqn))
            continue
        if not selection.everything and fqn not in selection:
            continue
        saved_fqn = fqn if rename is None else rename(fqn)
        found = taken.get(saved_fqn)
        if found is None:
            matching.place(leaf, value, selection, saved_fqn)
            continue
        matches.found[saved_fqn] = found
        if _is_object(node, found):
            matching.replace(leaf, found)
        elif "O" in (node[0], found[0]) or "B" in (node[0], found[0]):
            refuse(leaf_mismatch(fqn, kind_of(found), kind_of(node), path))
        else:
            matching.tensor(leaf, found[1])
    for module in targets.modules:
        matching.end(module, selection, rename)
    matching.resolve_ties()
    if matching.absent_paths:
        found_paths = [*matches.filled, *(place.path for place in matches.replaced), *matching.empty_paths]
        found_paths += [module.path for module in matches.undecided]  # which say by themselves what they lack
        matches.lost += absent_subtrees(flat.tree, matching.absent_paths, found_paths, targets.is_module)
    matches.missing += selection.unused()
    return matches


def _alike(targets: Targets, saved: SavedTree, placements: list[Placement]) -> Matches:
    replaced = [Replacement(path, fqn_of(path), node) for path, node in object_leaves(saved.tree)]
    names = [fqn for fqn, node in saved.leaves.items() if node[0] == "T"]
    return Matches(targets, placements=placements, filled_fqns=names, replaced=replaced, found=dict(saved.leaves))


class _Matcher:
    """What is known while the leaves of a target are matched, one after the other.

    Attributes:
        matches: What was found so far.
        absent_paths: Leaves that the checkpoint lacks.
        empty_paths: Empty containers that were saved as such.
    """

    def __init__(self, matches: Matches, saved: SavedTree, path: str, refuse: Callable[[Mismatch], None]) -> None:
        self.matches = matches
        self._saved, self._path, self._refuse = saved, path, refuse
        # The target's tensor: by which FQN, and which saved tensors its names have. And of a registered type, whose
        # parts may be copies: the first number of each value.
        self._filled: dict[int, tuple[str, list[int]]] = {}
        self._values: dict[int, int] = {}
        self._made_new: dict[int, tuple[str, int, ModuleTarget]] = {}  # the target's tensor: by whose loading code
        self._absent_tensors: list[TargetLeaf] = []
        self._taking: set[int] = set()  # ids of empty containers that one place has already
        self._owners: dict[tuple[int, Any], tuple[str, Node]] = {}
        self.absent_paths: list[Path] = []
        self.empty_paths: list[Path] = []

    def own(self, owner: tuple[int, Any], fqn: str, node: Node) -> None:
        """Take note that `node` fills what is known by the id of an object and the keys below it."""
        first, other = self._owners.setdefault(owner, (fqn, node))
        if first != fqn:
            self.matches.shared.append((first, other, fqn, node))

    def replace(self, leaf: TargetLeaf, node: Node) -> None:
        """Let the new value of `node` take the place of a leaf.

        Raises:
            ConfigError: The container that the leaf lies in cannot be changed.
        """
        path, fqn, _, holder, key = leaf
        targets = self.matches.targets
        value = None if holder is None else holder[key]
        if type(holder) is not dict and type(holder) is not list:
            stays = isinstance(value, MutableMapping) and node[0] in MAPPINGS and id(value) not in self._taking
            fixed = None if stays else targets.immutable_container_at(path)
            if fixed is not None:
                raise ConfigError(
                    f"target {fqn!r} lies in a {fixed}, which cannot be changed, and what was saved takes its place: "
                    "pass a dict or a list",
                    field="state_dict",
                    value=fqn,
                )
        self._taking.add(id(value))
        if has_lost_factory(node) and isinstance(unwrap_per_rank(value), MutableMapping):
            node = node[:2]  # a mapping that stands there keeps its own
        is_inner = isinstance(holder, tuple) or isinstance(value, PerRank)
        self.own(targets.owner_of(path) if is_inner else (id(holder), (key,)), fqn, node)
        self.matches.replaced.append(Replacement(path, fqn, node))

    def extend_list(self, tree: Node, path: Path, node: Node, at: Path, found: Node) -> None:
        """Let a list of the target `tree` take the further members of a longer one that was saved at `at`."""
        fqn, further = fqn_of(path), appended_members(tree, path, node, found)
        if further is None:
            self._refuse(length_mismatch(fqn, len(found[1]), len(node[1]), self._path))
            return
        for n, member in enumerate(further, len(node[1])):
            self.matches.found.update((fqn_of(leaf), inner) for leaf, inner in leaves(member, (*at, n)))
        self.own((id(self.matches.targets.value_at(path)), None), fqn, ("l", further))
        self.matches.extended_lists.append(Replacement(path, fqn, ("l", further)))

    def match_module_entry(
        self, module: ModuleTarget, leaf: TargetLeaf, selection: Selection, rename: Callable[[str], str] | None
    ) -> bool:
        """Match a leaf of a module, if that is for the module's own code; else say that it is a leaf like others."""
        path, fqn, node, _, _ = leaf
        if fqn not in selection:
            return False
        name, saved_fqn = module.name_of(fqn), fqn if rename is None else rename(fqn)
        module.saved_fqns[name] = saved_fqn
        there = self._saved.node_at(saved_fqn)
        own = module.own_value(name)
        if there is None:
            if self._saved.is_other_ranks_only(saved_fqn) or not module.defer_to_hooks(name):
                return False
            self._record_without_memory(fqn, own)
            return True
        module.show(name, saved_fqn)
        if node[0] != "T" or not module.needs_new_value(name, node, there[1], self._saved):
            return False
        self._record_without_memory(fqn, own)
        self._give_new_value(module, Replacement(path, fqn, self._saved.without_other_ranks(there[1])), there)
        if there[1][0] == "T":
            self._tie_new_value(module, self._values.setdefault(id(own), node[1]), target_tensor(own, fqn), there[1][1])
        return True

    def _tie_new_value(self, module: ModuleTarget, own: int, target: TargetTensor, found: int) -> None:
        """Tie a tensor that a module's loading code fills to other places in the target where it is filled."""
        tensor = self._saved.tensors[found]
        if target.global_shape != tensor.global_shape:
            return
        first, numbers = self._filled.get(own, ("", []))
        earlier, number, whose = self._made_new.setdefault(own, (target.fqn, found, module))
        pairs = [(first, numbers[0])] if numbers else []
        if whose is not module:
            pairs.append((earlier, number))
        elif number != found:
            self.matches.decided_by_hooks += [earlier, target.fqn]
        self.matches.ties += [
            Tie(fqn, target.fqn, self._saved.tensors[n], tensor, target.shards) for fqn, n in pairs if n != found
        ]

    def _give_new_value(self, module: ModuleTarget, place: Replacement, there: tuple[Path, Node]) -> None:
        at, node = there
        self.matches.found.update(
            (fqn_of(leaf), inner) for leaf, inner in leaves(node, at) if inner is not OTHER_RANKS_ONLY
        )
        self.matches.replaced.append(place)
        if node[0] == "T":
            like = module.like(module.name_of(place.fqn), self._saved.tensors[node[1]])
            if like is not None:
                self.matches.standing.setdefault(node[1], like)

    def _record_without_memory(self, fqn: str, value: Any) -> None:
        if isinstance(value, torch.Tensor) and not torch.nn.parameter.is_lazy(value) and why_no_memory(value):
            self.matches.without_memory.append((fqn, value))

    def end(self, module: ModuleTarget, selection: Selection, rename: Callable[[str], str] | None) -> None:
        """Match what was saved of a module and it does not have, and say what of it is undecided."""
        matches = self.matches
        for name, saved_fqn, node in list(module.further(self._saved, matches.found)):
            fqn = f"{module.fqn}.{name}"
            there = self._saved.node_at(saved_fqn)
            if there is None or fqn not in selection:
                continue
            module.show(name, saved_fqn)
            self._give_new_value(
                module, Replacement((*module.path, name), fqn, self._saved.without_other_ranks(node)), there
            )
        for name in module.vacant:
            fqn = f"{module.fqn}.{name}".removesuffix(".")
            saved_fqn = fqn if rename is None else rename(fqn)
            there = self._saved.node_at(saved_fqn) or self._saved.gathered(saved_fqn)
            below = [] if there is None or fqn not in selection else leaves(there[1], there[0])
            if any(inner is not OTHER_RANKS_ONLY and fqn_of(leaf) not in matches.found for leaf, inner in below):
                matches.ignored_vacant.append(fqn)
        module.resolve_ties()
        if not module.was_found:
            names = [f"{module.fqn}.{name}" for name in module.undecided]
            matches.missing += names
            self.absent_paths += [(*module.path, name) for name in module.undecided]
            module.undecided.clear()
        if module.undecided:
            matches.undecided.append(module)
        else:
            matches.tensors += module.tensors

    def _absent(self, leaf: TargetLeaf, saved_fqn: str) -> None:
        """Say what there is in the place of `saved_fqn`, which the checkpoint does not have."""
        path, fqn, node, holder, key = leaf
        saved, matches = self._saved, self.matches
        matches.targets.leave_as_is(unwrap_per_rank(holder[key]))
        self._taking.add(id(holder[key]))
        above = next((prefix for prefix in prefixes(saved_fqn) if prefix in saved.leaves), None)
        if above is not None:
            self._refuse(leaf_mismatch(above, kind_of(saved.leaves[above]), "container", self._path))
        elif saved.is_other_ranks_only(saved_fqn):
            matches.unavailable.append(fqn)
        elif node[0] in MAPPINGS and not saved.keeps_empty_containers:
            matches.staying_empty.append(fqn)
        else:
            matches.missing.append(fqn)
            self.absent_paths.append(path)
            if node[0] in ("T", "N"):
                self._absent_tensors.append(leaf)

    def place(self, leaf: TargetLeaf, value: Any, selection: Selection, saved_fqn: str) -> None:
        """Match a leaf with a container that was saved: an empty mapping, or the object `value`, may take all of it."""
        path, fqn, node, _, _ = leaf
        there, is_whole = self._saved.node_at(saved_fqn), fqn in selection
        if there is None and (node[0] in MAPPINGS or node[0] == "O"):
            there = self._saved.gathered(saved_fqn)
        if there is None:
            if is_whole:
                self._absent(leaf, saved_fqn)
            return
        if node[0] in ("O", *MAPPINGS):
            error = container_mismatch(node, value, there[1], fqn, self._path)
        else:
            error = leaf_mismatch(fqn, kind_of(there[1]), kind_of(node), self._path)
        if error is not None:
            self._refuse(error)
            return
        part = there[1] if is_whole else selected_part(there[1], selection, path, fqn)
        if part is not None:
            self._fill(leaf, part, there[0], selection)

    def match_empty_target(self, selection: Selection) -> None:
        """Match a target that is empty as a whole."""
        whole: TargetLeaf = ((), "", ("d", ()), None, None)
        self._fill(whole, selected(self._saved.tree, selection) or ("d", ()), (), selection)

    def _fill(self, leaf: TargetLeaf, node: Node, at: Path, selection: Selection) -> None:
        """Let an empty place take `node`, which was saved at `at`."""
        path, fqn, _, _, _ = leaf
        saved, matches, saved_fqn = self._saved, self.matches, fqn_of(at)
        if saved.own is None:  # at equal world size, what only other ranks have is left out, as in a new dict
            away = [(leaf, fqn + leaf[len(saved_fqn) :]) for leaf in saved.away if leaf.startswith(saved_fqn)]
            matches.unavailable += [
                name for leaf, name in away if (not at or leaf[len(saved_fqn)] == ".") and name in selection
            ]
        matches.found.update((fqn_of(leaf), inner) for leaf, inner in leaves(node, at) if inner is not OTHER_RANKS_ONLY)
        if node[0] in MAPPINGS and not node[1]:
            self.empty_paths.append(path)
        self.replace(leaf, saved.without_other_ranks(node))

    def tensor(self, leaf: TargetLeaf, found: int) -> None:
        """Match a leaf with tensor number `found`."""
        path, fqn, node, holder, key = leaf
        matches, value, tensor = self.matches, holder[key], self._saved.tensors[found]
        if type(value) not in PLAIN_TENSORS:
            value = unwrap_per_rank(value)
        if node[0] == "N":
            value = view_of(value)
            if value is None or not target_tensor(value, fqn).takes(tensor):
                self.replace(leaf, ("N", found))
                return
            own = node[1]
        else:
            own = self._values.setdefault(id(value), node[1])
        target = target_tensor(value, fqn)
        first, numbers = self._filled.setdefault(own, (fqn, []))
        matches.filled.append(path)
        matches.filled_fqns.append(fqn)
        matches.without_memory += [(fqn, part) for part, _ in target.shards if why_no_memory(part) is not None]
        if found in numbers:
            return
        numbers.append(found)
        if target.global_shape != tensor.global_shape:
            self._refuse(_shape_mismatch(fqn, tensor, target, self._path))
            return
        check_fillable(target, fqn)
        if target.dtype != torch_dtype(tensor.dtype):
            if not target.holds_values_of(tensor):
                self._refuse(_kind_mismatch(fqn, tensor, target, self._path))
                return
            matches.converted.append(fqn)
        if len(numbers) > 1:
            matches.ties.append(Tie(first, fqn, self._saved.tensors[numbers[0]], tensor, target.shards))
            return
        made_new = self._made_new.get(own)
        if made_new is not None and made_new[1] != found:
            matches.ties.append(Tie(made_new[0], fqn, self._saved.tensors[made_new[1]], tensor, target.shards))
        module = matches.targets.module_at(path)
        (matches.tensors if module is None else module.tensors).append((tensor, target))

    def resolve_ties(self) -> None:
        """Count leaves that were not saved as filled where their tensor is filled under another name."""
        matches = self.matches
        for path, fqn, node, holder, key in self._absent_tensors:
            own = node[1] if node[0] == "N" else self._values.get(id(unwrap_per_rank(holder[key])), node[1])
            if own in self._filled or own in self._made_new:
                matches.missing.remove(fqn)
                self.absent_paths.remove(path)
                matches.filled.append(path)
                matches.filled_fqns.append(fqn)


def _is_object(node: Node, found: Node) -> bool:
    """Whether the leaf is replaced: on no side is a tensor; two arrays are looked at more closely."""
    return "T" not in (node[0], found[0]) and (node[0], found[0]) != ("N", "N")


def _match_state(matches: Matches, place: Replacement, saved: SavedTree, selection: Selection, saved_fqn: str) -> bool:
    """Match an object that takes its state as a whole, or an entry of a module's state that does.

    Returns:
        False where it was asked for and never saved.
    """
    fqn = place.fqn
    if fqn not in selection:
        if selection.reaches_into(fqn):
            raise ConfigError(f"keys names a part of {fqn!r}, whose state is loaded as a whole", field="keys")
        return True
    below = [leaf for leaf in saved.away if leaf == saved_fqn or leaf.startswith(saved_fqn + ".")]
    found = saved.node_at(saved_fqn)
    if found is None:
        (matches.unavailable if below else matches.missing).append(fqn)
        if not below and not isinstance(place.holder, ReplacedEntry):
            matches.lost.append(fqn)
        return bool(below)
    if saved.own is None:  # at equal world size, what only other ranks have is left out, as in a new dict
        matches.unavailable += below
    at, node = found
    matches.found.update((fqn_of(leaf), inner) for leaf, inner in leaves(node, at) if inner is not OTHER_RANKS_ONLY)
    holder = None if isinstance(place.holder, ReplacedEntry) else place.holder
    matches.replaced.append(Replacement(place.path, fqn, saved.without_other_ranks(node), holder))
    if isinstance(holder, torch.optim.Optimizer):  # it moves its state to its parameters
        params = [param for group in holder.param_groups for param in group["params"]]
        matches.without_memory += [(fqn, param) for param in params if why_no_memory(param) is not None]
    numbers = {leaf: inner[1] for leaf, inner in leaves(node) if inner[0] == "T"}
    standing = reusable_state_tensors(holder, [(leaf, saved.tensors[number]) for leaf, number in numbers.items()])
    for leaf, target in standing.items():
        matches.standing.setdefault(numbers[leaf], target)
    return True


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
