"""A target state dict: where its values are, how new values replace them, and how objects are given their state.

A module's tensors are filled in place, in the bare module; `module_targets` decides which. All other entries of its
state (the result of `get_extra_state`, parameters that are not initialised yet), and the whole state of any other
object, get new values: a new optimizer has no state yet that could be filled. If it has one, the tensors that fit are
filled, to save memory. Then each object is given its state by `load_state_dict`.

`torch.optim.Optimizer.load_state_dict` converts the state of a parameter to the parameter's dtype: a float32 moment of
a bfloat16 parameter would be rounded, an integer would change its type. It also turns all mappings into dicts, and
strings into lists. These conversions are undone: a converted value is replaced by the saved one, unless the optimizer
has changed it in another way. Other changes that an object makes to its state are kept; if a tensor has another dtype
afterwards, this is logged.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from asyncckpt.distributed.process_group import has_other_ranks
from asyncckpt.errors import UnsupportedLeafError
from asyncckpt.format.state_tree import COMPOSITE, TENSOR, Node, Path, fqn_of, members, python_keys, whole_leaves
from asyncckpt.loading.module_targets import ModuleTarget, ReplacedEntry, state_load_error, takes_strict
from asyncckpt.loading.target_tensors import Reused, TargetTensor, shares_own_memory, storages_of, target_tensor
from asyncckpt.per_rank import PerRank
from asyncckpt.sharding.registry import shards_of
from asyncckpt.state_dict.composite_tensors import decompose
from asyncckpt.state_dict.flatten import PLAIN_TENSORS, flatten, typed_key
from asyncckpt.state_dict.stateful import unwrapped
from asyncckpt.storage.contents import SavedTensor
from asyncckpt.torch_tensors import why_no_memory


class Targets:
    """A target state dict, and the modules in it.

    Args:
        state_dict: The target.
    """

    def __init__(self, state_dict: Any) -> None:
        self._root = state_dict
        self._modules: dict[Path, ModuleTarget] = {}
        self._claimed_containers: set[int] = set()
        """IDs of containers that are not filled in place any more: they were filled already, or stay as they are."""

    def state_of(self, value: Any, path: Path) -> Any:
        """Return the state of a module to fill; any other object with a `state_dict()` is returned itself.

        Raises:
            StateDictError: A module's `state_dict()` raised.
        """
        if not isinstance(value, torch.nn.Module) or not is_loadable(value):
            return value
        module = ModuleTarget(value, path)
        if module.state is None:
            return value
        self._modules[path] = module
        return module.state

    def value_at(self, path: Path) -> Any:
        """Return the value at a path; for a `PerRank`, the value in it."""
        return self._way_to(path)[1]

    def is_module(self, path: Path) -> bool:
        """Whether there is a module at a path whose state is filled."""
        return path in self._modules

    def immutable_container_at(self, path: Path) -> str | None:
        """Return the type name of the immutable container in which a value cannot be replaced; None if it can be."""
        for container, _ in reversed(self._way_to(path)[0]):
            if isinstance(container, (MutableSequence, MutableMapping, PerRank)):
                return None
            if not isinstance(container, tuple):
                return type(container).__name__
        return None if isinstance(self._root, MutableMapping) else type(self._root).__name__

    def owner_of(self, path: Path) -> tuple[int, Any]:
        """Return what changes when the value at a path is replaced: the ID of a container, and the keys below it."""
        depth = len(path)
        for container, _ in reversed(self._way_to(path)[0]):
            depth -= not isinstance(container, PerRank)
            if not isinstance(container, tuple):
                return id(container), path[depth:]
        return id(self._root), path

    def _way_to(self, path: Path) -> tuple[list[tuple[Any, Any]], Any]:
        """Walk to the value at a path.

        Returns:
            (container, key of what is next) from the outside in, where a `PerRank` is a container with the key None;
            and the value, outside any `PerRank`.
        """
        way = []
        value, rest = self._located(path)
        for key in python_keys(rest):
            while isinstance(value, PerRank):
                way.append((value, None))
                value = value.value
            way.append((value, key))
            value = value[key]
        while isinstance(value, PerRank):
            way.append((value, None))
            value = value.value
        return way, value

    def replace_at(self, path: Path, new: Any) -> None:
        """Put `new` at a path; an empty container there gets the members of `new` instead, see `_merged_into`."""
        way, old = self._way_to(path)
        _put(way, old, _merged_into(old, new, self._claimed_containers))

    def emptier_of(self, path: Path) -> Callable[[], None] | None:
        """Return a function that makes the value at a path empty again if the load fails; None: it is not empty now.

        None also in the state of a module, which is made anew for each load.
        """
        _, value = self._way_to(path)
        is_empty_mapping = isinstance(value, MutableMapping) and not value
        if not (is_empty_mapping or is_empty_object(value)) or self._located(path)[0] is not self._root:
            return None
        is_filled_in_place = is_empty_mapping or (value is not None and not value)

        def empty_again() -> None:
            if is_filled_in_place and not isinstance(value, tuple):
                value.clear()
            way, now = self._way_to(path)
            _put(way, now, value)

        return empty_again

    def leave_as_is(self, container: Any) -> None:
        """Keep an empty container empty: if it has other names, it is replaced there instead of filled."""
        self._claimed_containers.add(id(container))

    def _located(self, path: Path) -> tuple[Any, Path]:
        """Return what has the value at a path, and the rest of the path in it: the state of a module, or the target."""
        if self._modules:
            for length in range(len(path) + 1):
                module = self._modules.get(path[:length])
                if module is not None:
                    return module.state, path[length:]
        return self._root, path

    @property
    def modules(self) -> list[ModuleTarget]:
        """The modules whose tensors are filled in place."""
        return list(self._modules.values())

    def leave_out(self, path: Path) -> None:
        """Fill no module at or below a path in place; each gets a whole state instead."""
        self._modules = {at: module for at, module in self._modules.items() if at[: len(path)] != path}

    def module_at(self, path: Path) -> ModuleTarget | None:
        """Return the module that a leaf belongs to."""
        if self._modules:
            for length in range(len(path)):
                module = self._modules.get(path[:length])
                if module is not None:
                    return module
        return None


def is_loadable(value: Any) -> bool:
    """Whether an object leaf of a target is given a state by `load_state_dict`."""
    return isinstance(value, ReplacedEntry) or (
        hasattr(value, "state_dict") and callable(getattr(value, "load_state_dict", None))
    )


def is_empty_object(value: Any) -> bool:
    """Whether an object leaf of a target holds nothing: it is None, or a list, tuple or deque of such values."""
    return value is None or (isinstance(value, (list, tuple, deque)) and all(map(is_empty_object, value)))


def unwrap_per_rank(value: Any) -> Any:
    """Return what `PerRank` marks, or the value itself."""
    while isinstance(value, PerRank):
        value = value.value
    return value


@dataclass(slots=True)
class ResultParts:
    """What the result of a `reshard` does to the value of its `PerRank`.

    Attributes:
        replaced: Path and new value of parts that are replaced.
        tensors: Tensors that are filled in place, each with the tensor that it is filled from.
        holders: FQN, object and state of objects that take their state by `load_state_dict`.
        missing: FQNs of parts of the value that the result lacks.
    """

    replaced: list[tuple[Path, Any]] = field(default_factory=list)
    tensors: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    holders: list[tuple[str, Any, Any]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def add(self, path: Path, old: Any, new: Any) -> None:
        """Add what the result `new` does to the value `old` at `path`. Changes neither."""
        old, new = unwrap_per_rank(old), unwrap_per_rank(new)
        if is_loadable(old):
            self.holders.append((fqn_of(path), old, new))
        elif isinstance(old, MutableMapping) and old and isinstance(new, Mapping):
            for key, member in old.items():
                typed = typed_key(key)
                assert typed is not None  # else `flatten` would have refused the target
                at = (*path, typed)
                if key in new:
                    self.add(at, member, new[key])
                else:
                    self.missing.append(fqn_of(at))
        elif isinstance(old, (list, tuple)) and old and isinstance(new, (list, tuple)) and len(old) == len(new):
            for n, pair in enumerate(zip(old, new, strict=True)):
                self.add((*path, n), *pair)
        elif _holds_objects(old):
            self.missing.append(fqn_of(path))
        elif _is_filled_by(old, new):
            self.tensors.append((old, new))
        else:
            self.replaced.append((path, new))


def _holds_objects(value: Any) -> bool:
    """Whether a container of a target holds an object that takes its state by `load_state_dict`."""
    value = unwrap_per_rank(value)
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return is_loadable(value) or any(map(_holds_objects, inner))


def _is_filled_by(old: Any, new: Any) -> bool:
    """Whether the plain tensor `old` can be filled in place by `new`."""
    if type(old) not in PLAIN_TENSORS or not isinstance(new, torch.Tensor) or old.is_inference():
        return False
    if why_no_memory(old) is not None or old.layout is not torch.strided or shares_own_memory(old):
        return False
    return (old.dtype, old.shape) == (new.dtype, new.shape)


def _put(way: list[tuple[Any, Any]], old: Any, new: Any) -> None:
    """Put `new` in place of `old`, to which `way` leads: in the innermost container that is no tuple.

    The tuples inside that one are rebuilt. A `PerRank` stays one, and gets another value. If there are only tuples,
    nothing is replaced: see `Targets.immutable_container_at`.
    """
    if new is old:
        return
    for container, key in reversed(way):
        if isinstance(container, PerRank):
            container.value = new
            return
        if not isinstance(container, tuple):
            container[key] = new
            return
        items = [new if n == key else item for n, item in enumerate(container)]
        new = type(container)(*items) if hasattr(container, "_fields") else tuple(items)


def _merged_into(old: Any, new: Any, claimed: set[int]) -> Any:
    """Return the value that replaces `old`: `old` itself with the members of `new` if it is empty, else `new`.

    An empty dict, list or deque of the target is filled in place, so that other references to it see the members. If it
    has several names, it is filled under the first; under the others a new container replaces it. A sparse or quantized
    tensor is filled in place if torch can: the result has the new indices, scales and zero points.
    """
    if isinstance(old, torch.Tensor):
        return _copied_into(old, new)
    if id(old) in claimed:
        return new
    claimed.add(id(old))
    if isinstance(old, MutableMapping) and not old and isinstance(new, Mapping):
        for key, value in new.items():
            old[key] = value
        if isinstance(old, OrderedDict) and hasattr(new, "_metadata"):
            old._metadata = new._metadata  # type: ignore[attr-defined]
        return old
    if type(new) in (list, deque) and _can_hold(old, len(new)) and not old:
        old.extend(new)
        return old
    return new


def _copied_into(old: torch.Tensor, new: Any) -> Any:
    """Return `old` with the elements of `new`, or `new` if torch cannot copy them."""
    if not isinstance(new, torch.Tensor):
        return new
    is_alike = (old.layout, old.dtype, old.shape) == (new.layout, new.dtype, new.shape)
    if not is_alike or (old.layout is torch.strided and not old.is_quantized):
        return new
    if old.is_quantized and old.qscheme() != new.qscheme():
        return new
    try:
        with torch.no_grad():
            old.copy_(new)
    except RuntimeError:  # a sparse compressed tensor with another number of elements
        return new
    return old


def _can_hold(value: Any, n: int) -> bool:
    return type(value) is list or (type(value) is deque and (value.maxlen is None or value.maxlen >= n))


_log = logging.getLogger("asyncckpt.loading")

ConvertedStorages = Mapping[int, bool]
"""Whether the values of a tensor that the load fills were converted to its dtype, by the address of its storage."""


def load_object_state(value: Any, state: Any, fqn: str, path: str, converted: ConvertedStorages | None = None) -> None:
    """Call `load_state_dict` of `value`.

    Args:
        value: A module, an optimizer, or anything else.
        state: The state that was saved.
        fqn: Its name, for messages.
        path: The checkpoint's path, for messages.
        converted: The storages of tensors that this load has converted. The state of such a parameter stays converted,
            since the run resumes in another precision.

    Raises:
        StateLoadError: `load_state_dict` raised.
    """
    value = unwrapped(value)
    dtypes = {} if isinstance(value, torch.nn.Module) else _dtypes(state)
    entries = _entries(state) if isinstance(value, torch.optim.Optimizer) else []
    try:
        if isinstance(value, torch.nn.Module) and takes_strict(value):
            value.load_state_dict(state, strict=False)  # missing keys have been handled by `load`
        else:
            value.load_state_dict(state)
    except Exception as error:
        raise state_load_error(error, value, fqn, path) from error
    if entries:
        _undo_conversions(value, entries, converted or {})
    if dtypes:
        _report_dtypes(value, dtypes, fqn, path)


def may_call_state_dict(value: Any) -> bool:
    """Whether `state_dict()` of an object certainly runs no collective, for which a load on one rank would hang."""
    return not has_other_ranks() or getattr(type(value), "state_dict", None) is torch.optim.Optimizer.state_dict


def _entries(state: Any) -> list[dict[Any, Any]]:
    """Return each parameter's saved state, in the order of the groups; [] if it is not an optimizer's state."""
    try:
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        return [dict(state["state"].get(number) or {}) for number in numbers]
    except (TypeError, KeyError, ValueError, AttributeError):
        return []


def _undo_conversions(
    optimizer: torch.optim.Optimizer, entries: list[dict[Any, Any]], converted: ConvertedStorages
) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if len(parameters) != len(entries):
        return
    for parameter, saved in zip(parameters, entries, strict=True):
        state = optimizer.state.get(parameter)
        if not isinstance(state, dict) or any(converted.get(address) for address in storages_of(parameter)):
            continue
        for key in saved.keys() & state.keys():
            # A tensor `step` stays as the optimizer has converted it: its kernels need that dtype and device.
            if key != "step" or not isinstance(saved[key], torch.Tensor):
                state[key] = _as_saved(saved[key], state[key], parameter)


def _as_saved(saved: Any, loaded: Any, parameter: torch.Tensor) -> Any:
    """Return `saved` if `loaded` differs from it only by the conversions of torch's optimizers; else `loaded`."""
    if isinstance(saved, torch.Tensor):
        return saved.to(loaded.device) if _is_converted(saved, loaded, parameter.dtype) else loaded
    if isinstance(saved, (str, bytes)):
        return saved if type(loaded) is type(saved) else loaded
    if isinstance(saved, dict) and isinstance(loaded, dict) and saved.keys() == loaded.keys():
        made = copy.copy(saved)
        for key in saved:
            dict.__setitem__(made, key, _as_saved(saved[key], loaded[key], parameter))
        return made
    if isinstance(saved, (list, tuple, deque)) and type(loaded) is type(saved) and len(saved) == len(loaded):
        members = [_as_saved(*pair, parameter) for pair in zip(saved, loaded, strict=True)]
        return deque(members, saved.maxlen) if isinstance(saved, deque) else type(saved)(members)
    return loaded


def _is_converted(saved: torch.Tensor, loaded: Any, dtype: torch.dtype) -> bool:
    """Whether `loaded` is `saved` converted to `dtype`."""
    if not isinstance(loaded, torch.Tensor) or saved.shape != loaded.shape:
        return False
    if loaded.dtype != dtype or saved.dtype == dtype:
        return False
    if decompose(saved) is not None:  # the class alone knows what its dtype means
        return False
    there, made = _local(loaded).detach(), _local(saved).detach().to(device=loaded.device, dtype=dtype)
    return torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (there, made)))


def _local(tensor: Any) -> torch.Tensor:
    """Return the local part of a DTensor; other tensors are returned as they are."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


def _dtypes(state: Any, path: Path = ()) -> dict[Path, torch.dtype]:
    """Return the dtypes of the tensors of a state, by their path in it."""
    if isinstance(state, torch.Tensor):
        return {path: state.dtype}
    if isinstance(state, dict):
        pairs: Any = state.items()
    else:
        pairs = enumerate(state) if isinstance(state, (list, tuple, deque)) else ()
    return {at: dtype for key, value in pairs for at, dtype in _dtypes(value, (*path, key)).items()}


def _report_dtypes(value: Any, saved: Mapping[Path, torch.dtype], fqn: str, path: str) -> None:
    """Log which tensors of an object have another dtype than the saved one, according to its `state_dict()`."""
    if not may_call_state_dict(value):
        return
    try:
        now = _dtypes(value.state_dict())
    except Exception:  # raised by the object's own code; the load itself has succeeded
        return
    changed = [(at, dtype) for at, dtype in saved.items() if now.get(at, dtype) != dtype]
    if changed:
        at, dtype = changed[0]
        _log.warning(
            "%s: load_state_dict() of %r, a %s, has changed the dtype of %d tensors: %r was saved as %s and is %s now",
            path,
            fqn,
            type(value).__name__,
            len(changed),
            fqn_of((fqn, *at)),
            str(dtype).removeprefix("torch."),
            str(now[at]).removeprefix("torch."),
        )


Fits = Callable[[Node, Sequence[Any], Node], bool]
"""(node of a composite tensor, the objects of its flattened state, a saved node) -> whether it holds what was saved."""


MakeLike = Callable[[torch.Tensor, Node, Mapping[int, TargetTensor]], "torch.Tensor | None"]
"""(a sharded parameter, a saved node, existing tensors by number) -> a new composite tensor that is sharded like the
parameter; None: the saved one is not sharded."""


def reuse_state_tensors(
    reused: Reused, holder: Any, node: Node, saved: Sequence[SavedTensor], fits: Fits, make_like: MakeLike
) -> None:
    """Record into which existing tensors those of an optimizer's saved state are read.

    The tensors of an optimizer that has a state are filled in place, which saves the memory of a second state. An
    optimizer without a state gets a new one. Its tensors for sharded parameters must be sharded in the same way, so
    they are made here.

    They have the saved shape and dtype. Tensors that share memory with a parameter or another entry are left out.

    Args:
        reused: What is recorded already, also of other optimizers; what is found is added.
        holder: The object that takes the state. Nothing is recorded unless it is an optimizer.
        node: Its saved state.
        saved: The tensors of the checkpoint, by number.
        fits: Compares composite tensors.
        make_like: Makes composite tensors.

    Raises:
        UnsupportedLeafError: A component is shared with a tensor that is sharded differently.
        AsyncCkptError: As from `make_like`.
    """
    if not isinstance(holder, torch.optim.Optimizer):
        return
    try:
        state = holder.state_dict() if may_call_state_dict(holder) else {}
        flat = flatten(state, is_target=True)
        found = [(path, one, _value_at(state, path)) for path, one in whole_leaves(flat.tree) if one[0] in _TENSORS]
        own = _unaliased_tensors(holder, found)
    except Exception:  # raised by the optimizer's code; it gets a new state
        return
    parameters = [p for group in holder.param_groups for p in group["params"]]
    for path, one in whole_leaves(node):
        mine, value = own.get(path, (None, None))
        parameter = _parameter_at(path, parameters)
        if one[0] == COMPOSITE:
            is_alike = mine is not None and mine[0] == COMPOSITE and fits(mine, flat.objects, one)
            if is_alike and _reuse_composite(reused, one, value, saved):
                continue
            made = None if parameter is None else make_like(parameter, one, reused.tensors)
            if made is not None and not _reuse_composite(reused, one, made, saved):
                raise UnsupportedLeafError(
                    f"a component of {fqn_of(path)!r}, a {one[3]}, is shared with another tensor, which is sharded "
                    "differently; nothing was changed. Load it with as many ranks as saved it",
                    leaf=fqn_of(path),
                    type_name=str(one[3]),
                )
        elif mine is not None and mine[0] == one[0] == TENSOR:
            target = target_tensor(value, "")
            if target.takes(saved[one[1]]):
                reused.tensors.setdefault(one[1], target)
        elif mine is None and one[0] == TENSOR and parameter is not None:
            like = _sharded_like(parameter, saved[one[1]])
            if like is not None:
                reused.tensors.setdefault(one[1], like)


def _parameter_at(path: Path, parameters: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the parameter whose state has an entry at `path`, if the parameter is sharded."""
    index = path[1] if len(path) == 3 and path[0] == "state" else None
    if type(index) is not int or not 0 <= index < len(parameters) or shards_of(parameters[index]) is None:
        return None
    return parameters[index]


_TENSORS = (TENSOR, COMPOSITE)


def _reuse_composite(reused: Reused, node: Node, value: Any, saved: Sequence[SavedTensor]) -> bool:
    """Return whether the existing `value` is filled with what was saved as `node`, and record it."""
    found: dict[int, TargetTensor] = {}
    for number, tensor in _component_numbers(node, value):
        target, known = target_tensor(tensor, ""), reused.tensors.get(number) or found.get(number)
        if not target.takes(saved[number]) or (known is not None and not _are_one(target, known)):
            return False
        found[number] = target
    reused.tensors.update(found)
    reused.composites[node] = value
    return True


def _are_one(target: TargetTensor, other: TargetTensor) -> bool:
    """Whether two targets fill the same memory with the same elements."""
    places = [[(part.data_ptr(), part.shape, part.stride(), at) for part, at in one.shards] for one in (target, other)]
    return places[0] == places[1]


def _component_numbers(node: Node, value: Any) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the numbers of the saved components with those of `value`; none if it is plain, without elements here."""
    described = decompose(value)
    if described is None:
        return
    for name, child in members(node):
        if child[0] == COMPOSITE:
            yield from _component_numbers(child, described.tensors[str(name)])
        else:
            yield child[1], described.tensors[str(name)]


def _unaliased_tensors(
    holder: torch.optim.Optimizer, values: list[tuple[Path, Node, Any]]
) -> dict[Path, tuple[Node, Any]]:
    """Return those values (path in the state, node, value) that share no memory with a parameter or another value."""
    storages = [storages_of(value) for _, _, value in values]
    shared = {at for group in holder.param_groups for p in group["params"] for at in storages_of(p)}
    shared |= {at for at, n in Counter(at for memory in storages for at in memory).items() if n > 1}
    return {
        path: (node, value)
        for (path, node, value), memory in zip(values, storages, strict=True)
        if memory and not memory & shared
    }


def _value_at(state: Any, path: Path) -> Any:
    for key in python_keys(path):
        state = state[key]
    return state


def _sharded_like(parameter: torch.Tensor, saved: SavedTensor) -> TargetTensor | None:
    """Return a new tensor that is sharded like a parameter, if `saved` has its shape."""
    if tuple(parameter.shape) != saved.global_shape:
        return None
    dtype = getattr(torch, saved.dtype, None)
    if dtype is None:
        return None
    with torch.no_grad():
        return target_tensor(torch.empty_like(parameter, dtype=dtype, requires_grad=False), "")
