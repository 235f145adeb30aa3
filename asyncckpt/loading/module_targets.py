"""Modules of the target: which of their tensors are filled in place, and which entries their load hooks are given.

A parameter or buffer that was saved under its name in the module, with the same shape, is filled in place. A load hook
of a module is a hook of `load_state_dict`, or an override of `_load_from_state_dict`. As in stock torch,
`load_state_dict` calls it with the saved names and versions. The entries that it is given are:

- New tensors for names that the module does not have, or has with another shape, if a load hook sees these names.
- New tensors for plain tensors that a load hook from outside torch sees. Such a hook may keep the module's own value,
  which must not have been overwritten then. Sharded tensors are filled in place, as stock `dcp.load` does.
- The module's own tensors, already filled, for everything else. `load_state_dict` copies them onto themselves, which
  costs nothing.

Load hooks may also create entries that were not saved from others that were. Whether these are missing is known only
after the hooks have run.
"""

from __future__ import annotations

import inspect
import re
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from asyncckpt.errors import ShapeMismatchError, StateLoadError
from asyncckpt.format.state_tree import MAPPINGS, ORDERED_DICT, TENSOR, Node, Path, fqn_of
from asyncckpt.loading.key_selection import OTHER_RANKS_ONLY, prefixes
from asyncckpt.loading.saved_state import SavedTree
from asyncckpt.loading.target_tensors import (
    ONE_TENSOR,
    TargetTensor,
    alias_mismatch,
    parts_of,
    storages_of,
    target_tensor,
)
from asyncckpt.sharding.registry import shards_of
from asyncckpt.state_dict.stateful import BareNames, StateDictError, unwrapped
from asyncckpt.storage.contents import SavedTensor
from asyncckpt.torch_tensors import flat_bytes, plain_parameter

_EXTRA_STATE = "_extra_state"  # torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX
_NORM = torch.nn.modules.batchnorm._NormBase
_ADDED_BY_NORM = "num_batches_tracked"
"""torch's normalisation modules change a state only by adding this name, which early versions of torch did not save."""

_COLLECTIONS = frozenset(
    getattr(torch.nn, name) for name in ("Sequential", "ModuleList", "ModuleDict", "ParameterList", "ParameterDict")
)
_OTHER_SIZE = re.compile(
    r"size mismatch for (\S+): copying a param with shape torch\.Size\(\[(.*?)\]\) from checkpoint, "
    r"the shape in current model is torch\.Size\(\[(.*?)\]\)"
)


class ReplacedEntry:
    """Marks an entry of a module's state that is replaced, not filled in place.

    Attributes:
        value: The module's current value of the entry.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class _LoadHook(NamedTuple):
    """A load hook of a submodule.

    Attributes:
        prefix: Prefix of the names that the hook sees, with a dot at its end; empty: it sees all.
        is_foreign: Whether the hook's code is outside torch.
        names: The names below the prefix that it may add; None: any.
    """

    prefix: str
    is_foreign: bool
    names: frozenset[str] | None

    def may_make(self, name: str) -> bool:
        """Whether the hook may create the entry `name` if it was not saved."""
        return name.startswith(self.prefix) and (self.names is None or name[len(self.prefix) :] in self.names)


class ModuleTarget:
    """One module of the target.

    Args:
        module: The module, or a wrapper around it.
        path: Path of the module in the target.

    Raises:
        StateDictError: The module's `state_dict()` raised.

    Attributes:
        bare: The module without wrappers.
        path, fqn: Path and FQN of the module in the target.
        state: The entries to fill, under the bare module's names; None: the state is not a flat mapping of names.
        tensors: The tensors that are filled in place, in the order of matching.
        undecided: Names that were not saved, and that the module's load hooks may create.
        saved_fqns: For each name of the module, the FQN under which it is looked up in the checkpoint.
    """

    def __init__(self, module: torch.nn.Module, path: Path) -> None:
        self.bare: torch.nn.Module = unwrapped(module)
        self.path, self.fqn = path, fqn_of(path)
        self._names = BareNames(self.bare)
        try:
            found = _live_state(self.bare)
        except Exception as error:
            raise StateDictError(f"its state_dict() raised {type(error).__name__}: {error}") from error
        self.state: dict[str, Any] | None = None
        self.tensors: list[tuple[SavedTensor, TargetTensor]] = []
        self.undecided: list[str] = []
        self.saved_fqns: dict[str, str] = {}
        self._recorded: dict[str, str] = {}
        self._looked_for: set[str] = set()
        self._metadata: list[tuple[str, str, int]] = []
        self._positions: dict[str, int] = {}
        if not isinstance(found, MutableMapping) or any(isinstance(v, (Mapping, list, tuple)) for v in _entries(found)):
            return
        self._own = {self._names.of(name): value for name, value in found.items()}
        self._real = {self._names.of(name): name for name in found}
        self.state = {self._names.of(name): _entry(name, value) for name, value in found.items()}
        self._hooks = _load_hooks_in(self.bare, self._names)

    def name_of(self, fqn: str) -> str:
        """Return the name in the bare module of an entry whose FQN in the target is `fqn`."""
        return fqn[len(self.fqn) + 1 :]

    def needs_new_value(self, name: str, node: Node, found: Node, saved: SavedTree) -> bool:
        """Whether a saved entry is read into a new value for the module's load hooks, instead of filled in place.

        Args:
            name: The entry's name.
            node, found: Node of the entry in the target, and the saved node.
            saved: The checkpoint.
        """
        reach = [hook for hook in self._hooks if name.startswith(hook.prefix)]
        if (node[0], found[0]) != (TENSOR, TENSOR):
            return bool(reach)
        target, tensor = target_tensor(self._own[name], name), saved.tensors[found[1]]
        if target.global_shape != tensor.global_shape:
            is_scalar_as_vector = (target.global_shape, tensor.global_shape) == ((), (1,))  # load_state_dict accepts it
            return bool(reach) or is_scalar_as_vector
        if not target.holds_values_of(tensor):
            return bool(reach)
        return target.is_whole and any(hook.is_foreign for hook in reach)

    def new_sharded_like(self, name: str, saved: SavedTensor) -> TargetTensor | None:
        """Return a new tensor that is sharded like the module's own, if that is sharded and has `saved`'s shape."""
        own = self._own.get(name)
        if not isinstance(own, torch.Tensor) or shards_of(own) is None or tuple(own.shape) != saved.global_shape:
            return None
        dtype = getattr(torch, saved.dtype, own.dtype)
        with torch.no_grad():
            return target_tensor(torch.empty_like(own, dtype=dtype, requires_grad=False), "")

    def record_saved(self, name: str, saved_fqn: str) -> None:
        """Record that an entry was saved, so that `load` passes it to the module."""
        assert self.state is not None
        self.state.setdefault(name, None)
        self._recorded[name] = saved_fqn
        self._looked_for.add(name)

    def defer_to_hooks(self, name: str) -> bool:
        """Return whether a load hook may create an entry that was not saved; if so, record the entry as undecided."""
        if not any(hook.may_make(name) for hook in self._hooks):
            return False
        self.undecided.append(name)
        self._looked_for.add(name)
        return True

    def resolve_ties(self) -> None:
        """Remove undecided names whose tensor was saved under another name."""
        found = {id(self._own.get(name)) for name in self._recorded}
        for name in [name for name in self.undecided if id(self._own[name]) in found]:
            self.undecided.remove(name)
            self._looked_for.discard(name)

    def own_value(self, name: str) -> Any:
        """Return the module's current value of an entry; None if it has no such entry."""
        return self._own.get(name)

    def owner_of(self, name: str) -> tuple[int, str]:
        """Return what identifies an entry under all its names: the ID of its submodule, and its name in that."""
        above, _, last = self._real[name].rpartition(".")
        try:
            return id(self.bare.get_submodule(above)), last
        except AttributeError:  # `state_dict()` uses names that are no attributes
            return id(self.bare), name

    @property
    def vacant(self) -> Iterator[str]:
        """Yield the names of parameters and buffers that are None, and of container modules without members.

        The name of the module itself is empty.
        """
        for above, module in self.bare.named_modules(remove_duplicate=False):
            prefix = f"{self._names.of(above)}." if above else ""
            if type(module) in _COLLECTIONS and not len(module):
                yield prefix.removesuffix(".")
            for name, value in (*module._parameters.items(), *module._buffers.items()):
                if value is None and name not in module._non_persistent_buffers_set:
                    yield f"{prefix}{name}"

    @property
    def was_found(self) -> bool:
        """Whether any entry of the module was saved."""
        return bool(self._recorded)

    def extra_saved_entries(self, saved: SavedTree, taken: Container[str]) -> Iterator[tuple[str, str, Node]]:
        """Yield (name, saved FQN, node) of saved entries that the module lacks and its load hooks see.

        Args:
            saved: The checkpoint.
            taken: Saved FQNs that already fill a part of the target.
        """
        if not self._hooks:
            return
        self._positions = saved.positions
        pairs = self.saved_fqns.items()
        roots = {fqn[: len(fqn) - len(name)] for name, fqn in pairs if f".{fqn}".endswith(f".{name}")}
        if not self._own:
            roots = {f"{self.fqn}."}
        for root in sorted(roots):
            self._metadata += _metadata_of(saved, root.removesuffix("."))
            for name, fqn, node in _entries_below(saved, root):
                if fqn in taken or name in self._own:
                    continue
                if any(name.startswith(hook.prefix) and hook.names is None for hook in self._hooks):
                    yield name, fqn, node

    def load(self, path: str, object_at: Callable[[int], Any]) -> list[str]:
        """Call `load_state_dict` of the module with its state.

        Args:
            path: The checkpoint's path, for messages.
            object_at: Returns the value of an object of the checkpoint, by number.

        Returns:
            FQNs that the module reports as missing and that were not reported before; and FQNs of entries that are in
            the module's own state and that `load_state_dict` has ignored.

        Raises:
            ShapeMismatchError: A load hook made an entry of another shape.
            AliasMismatchError: One of its tensors was given two values under two names.
            StateLoadError: `load_state_dict` raised.
        """
        given = self._state_to_load(object_at)
        options = {"strict": False} if takes_strict(self.bare) else {}
        if not options:  # without the argument it is strict, and would refuse an incomplete state
            for name, value in self._own.items():
                given.setdefault(self._real[name], value)
        reports: list[tuple[list[str], list[str]]] = []
        last: dict[str, torch.Tensor] = {}
        try:
            inference = torch.inference_mode() if self._is_inference() else nullcontext()
            with self._aliased_entries_copied(given, reports, last), inference:
                found = self.bare.load_state_dict(given, **options)
        except Exception as error:
            other = _OTHER_SIZE.search(str(error))
            if other is None:
                raise state_load_error(error, self.bare, self.fqn, path) from error
            fqn = f"{self.fqn}.{self._names.of(other[1])}"
            got, wanted = ([int(n) for n in other[i].split(",") if n.strip()] for i in (2, 3))
            raise ShapeMismatchError(
                f"{path}: a load hook of {self.fqn!r} gives tensor {fqn!r} the shape {got}, the target has {wanted}; "
                "values of this module may have changed. Build the module as it was when it was saved",
                path=path,
                fqn=fqn,
                saved=got,
                wanted=wanted,
            ) from error
        if last:
            self._refuse_ties(last, path)
        missing, unexpected = reports[-1] if reports else (None, getattr(found, "unexpected_keys", ()))
        names = self.undecided if missing is None else [self._names.of(name) for name in missing]
        lacking = [name for name in names if name in self._looked_for] if self._hooks else []
        return [f"{self.fqn}.{name}" for name in (*lacking, *self._entries_not_taken(given, unexpected))]

    def _tied(self) -> list[list[str]]:
        """Return the names of each tensor of the module that has several."""
        found: dict[int, list[str]] = {}
        for name, value in self._own.items():
            if isinstance(value, torch.Tensor):
                found.setdefault(id(value), []).append(name)
        return [names for names in found.values() if len(names) > 1]

    def _refuse_ties(self, last: Mapping[str, torch.Tensor], path: str) -> None:
        """Check that each tensor with several names was given the same value under all of them.

        A tensor that now has none of these values is not checked: the module has set it otherwise.

        Args:
            last: By name, the value that load hooks have left for it.
            path: The checkpoint's path, for messages.

        Raises:
            AliasMismatchError: It was given different values, of which only one is left.
        """
        for names in self._tied():
            own = self._own[names[0]]
            values = [(name, last[self._real[name]]) for name in names if self._real[name] in last]
            equal = [name for name, value in values if _is_equal(own, value)]
            other = next((name for name, _ in values if name not in equal), None)
            if equal and other is not None:
                one, two = sorted((equal[0], other), key=names.index)
                left = "values of this module have changed"
                raise alias_mismatch(f"{self.fqn}.{one}", f"{self.fqn}.{two}", path, ONE_TENSOR, left)

    def _entries_not_taken(self, given: Mapping[str, Any], unexpected: Iterable[str]) -> list[str]:
        """Return the names in the module's own state that it was given and whose values it did not take.

        `state_dict()` of a module may return names that its `load_state_dict()` does not know. A tensor of the module
        that was filled in place has its value nevertheless; a copy that `state_dict()` made is lost.
        """
        names = [name for name in map(self._names.of, unexpected) if name in self._own and name in self._recorded]
        if not names:
            return []
        try:
            now = {self._names.of(name): value for name, value in _live_state(self.bare).items()}
        except Exception:  # raised by the module's code: it is not known what it has taken
            return names
        return [name for name in names if not _is_same(given[self._real[name]], now.get(name))]

    def _state_to_load(self, object_at: Callable[[int], Any]) -> Any:
        """Return the state dict for `load_state_dict`, under the module's own names, with the saved versions."""
        assert self.state is not None
        names = list(self._recorded)
        if self._hooks:  # in the order in which they were saved
            names.sort(key=lambda name: self._positions.get(self._recorded[name], -1))
        given: OrderedDict[str, Any] = OrderedDict()
        for name in names:
            value = self.state[name]
            if isinstance(value, ReplacedEntry):
                value = value.value
            if self._hooks and value is self._own.get(name) and isinstance(value, torch.Tensor):
                plain = plain_parameter(value)
                value = value.detach() if plain is None else plain  # a load hook may calculate with it
            given[self._real.get(name) or self._names.wrapped(name)] = value
        if self._hooks:
            found: OrderedDict[str, Any] = OrderedDict()
            for cut, prefix, number in self._metadata:
                versions = object_at(number)
                for name, value in versions.items() if isinstance(versions, Mapping) else ():
                    below = name[len(cut) :] if cut and f"{name}.".startswith(cut) else None if cut else name
                    if below is not None:
                        key = ".".join(part for part in (prefix, below) if part)
                        found[self._names.wrapped(key)] = dict(value) if isinstance(value, Mapping) else value
            if self._metadata:
                given._metadata = found  # type: ignore[attr-defined]
        return given

    def _is_inference(self) -> bool:
        tensors = [value for value in self._own.values() if isinstance(value, torch.Tensor)]
        return bool(tensors) and all(t.is_inference() for t in tensors if not torch.nn.parameter.is_lazy(t))

    @contextmanager
    def _aliased_entries_copied(
        self, given: Mapping[str, Any], reports: list[tuple[list[str], list[str]]], last: dict[str, torch.Tensor]
    ) -> Iterator[None]:
        """Within the block, copy entries that load hooks have put under other names.

        Also collects (missing, unexpected) names in `reports`; and in `last`, for tensors with several names, the value
        that the hooks have left under each name.

        IMPORTANT: a tensor that shares memory with an entry of the module, and that a load hook has put under another
        name or made a view of, is copied before the first entry is written to. Otherwise two names that a load hook
        swaps would get the same value.
        """
        if not self._hooks:
            yield
            return
        in_place = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        live = {at for name, value in in_place.items() if self._is_own(name) for at in storages_of(value)}
        tied = {self._real[name] for names in self._tied() for name in names}

        def copy_shared(module: Any, state: Any, prefix: str, *_: Any) -> None:
            for name, value in list(state.items()):
                if not isinstance(value, torch.Tensor) or value is in_place.get(name):
                    continue
                own = self._own.get(self._names.of(name))
                if isinstance(own, torch.Tensor) and _goes_into_shards(own, value):
                    state[name] = _sharded_copy(own, value)
                elif live.intersection(storages_of(value)):
                    state[name] = value.detach().clone()
            for name in tied:
                if isinstance(state.get(name), torch.Tensor):
                    last[name] = state[name]
                elif name.startswith(prefix):
                    last.pop(name, None)

        def report_names(module: Any, keys: Any) -> None:
            reports.append((list(keys.missing_keys), list(keys.unexpected_keys)))

        hooked = [m for m in self.bare.modules() if m is self.bare or _load_hook_of(m) is not None]
        handles = [m.register_load_state_dict_pre_hook(copy_shared) for m in hooked]  # type: ignore[no-untyped-call]
        handles.append(self.bare.register_load_state_dict_post_hook(report_names))  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _is_own(self, real: str) -> bool:
        assert self.state is not None
        name = self._names.of(real)
        return name in self._own and self.state[name] is self._own[name]


def _is_same(given: Any, now: Any) -> bool:
    """Whether a module's value `now` is the one that it was given: the same memory, or equal."""
    if isinstance(given, torch.Tensor) and isinstance(now, torch.Tensor):
        return bool(storages_of(given) & storages_of(now)) or (given.dtype == now.dtype and _is_equal(now, given))
    try:
        return type(given) is type(now) and bool(given == now)
    except Exception:  # for example, it holds tensors
        return False


def _is_equal(own: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a tensor equals `value` converted to its dtype, bit by bit."""
    if own.shape != value.shape:
        return False
    pairs = zip(parts_of(own), parts_of(value), strict=False)
    return all(torch.equal(flat_bytes(a), flat_bytes(b.detach().to(a.device, a.dtype))) for a, b in pairs)


def _goes_into_shards(own: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether `value` is a whole tensor, and `own` a sharded one of the same shape."""
    return shards_of(own) is not None and shards_of(value) is None and own.shape == value.shape


def _sharded_copy(own: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is sharded like `own`, filled with this process's parts of a whole one."""
    with torch.no_grad():
        made = torch.empty_like(own, dtype=value.dtype, requires_grad=False)
        for part, offsets in target_tensor(made, "").shards:
            box = value.detach()
            for dim, (offset, size) in enumerate(zip(offsets, part.shape, strict=True)):
                box = box.narrow(dim, offset, size)
            part.copy_(box)
    return made


def _live_state(module: torch.nn.Module) -> Any:
    """Return a module's state with the parameters themselves, not detached: copying one onto itself costs nothing."""
    try:
        return module.state_dict(keep_vars=True)
    except TypeError:  # overridden with another signature
        return module.state_dict()


def _entries(state: Mapping[str, Any]) -> Iterator[Any]:
    return (value for name, value in state.items() if not name.endswith(_EXTRA_STATE))


def _entry(name: str, value: Any) -> Any:
    in_place = isinstance(value, torch.Tensor) and not torch.nn.parameter.is_lazy(value)
    return value if in_place and not name.endswith(_EXTRA_STATE) else ReplacedEntry(value)


def _load_hooks_in(bare: torch.nn.Module, names: BareNames) -> list[_LoadHook]:
    found: list[_LoadHook] = []
    for name, module in bare.named_modules(remove_duplicate=False):
        hook = _load_hook_of(module, is_root=module is bare)
        if hook is not None:
            prefix = f"{names.of(name)}." if name else ""
            # A post hook sees the missing names of the whole module.
            found.append(_LoadHook("" if module._load_state_dict_post_hooks else prefix, *hook))
    return found


def _load_hook_of(module: torch.nn.Module, *, is_root: bool = False) -> tuple[bool, frozenset[str] | None] | None:
    """Return whether a module's load hook is from outside torch, and the names that it adds; None: it has no hook."""
    hooks = [*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values()]
    where = [_defining_module(hook) for hook in hooks]
    if is_root and _function(module, "load_state_dict") is not torch.nn.Module.load_state_dict:
        where.append(_defining_module(module.load_state_dict))
    own = _function(module, "_load_from_state_dict")
    adds_count = isinstance(module, _NORM) and _defining_module(own).startswith("torch.nn.")
    if own is not torch.nn.Module._load_from_state_dict and not adds_count:
        where.append(_defining_module(own))
    # Hooks of torch.distributed (FSDP) prepare the module and do not change the state.
    where = [home for home in where if not home.startswith("torch.distributed.")]
    if where:
        return any(home != "torch" and not home.startswith("torch.") for home in where), None
    return (False, frozenset({_ADDED_BY_NORM})) if adds_count else None


def _function(module: torch.nn.Module, name: str) -> Any:
    method = getattr(module, name)
    return getattr(method, "__func__", method)


def _defining_module(hook: Any) -> str:
    """Return the name of the Python module in which a hook is defined."""
    hook = getattr(hook, "hook", hook)  # torch's wrapper of hooks that take the module
    hook = getattr(hook, "func", hook)  # functools.partial
    return getattr(hook, "__module__", None) or type(hook).__module__


def _entries_below(saved: SavedTree, root: str) -> Iterator[tuple[str, str, Node]]:
    """Yield (name, FQN, node) of a saved state; `root` is empty or ends in a dot."""
    at = saved.node_at(root.removesuffix("."))
    if at is not None and at[1][0] in MAPPINGS:
        yield from _walk(at[1], "", root)
        return
    for fqn, node in saved.leaves.items():
        if fqn.startswith(root):
            yield fqn[len(root) :], fqn, node


def _walk(node: Node, prefix: str, root: str) -> Iterator[tuple[str, str, Node]]:
    is_state = node[0] == ORDERED_DICT and node[2] is not None  # a module's state, in which a container is one entry
    for key, child in zip(node[1][::2], node[1][1::2], strict=True):
        name = f"{prefix}{key}"
        if child is OTHER_RANKS_ONLY:
            continue
        if child[0] in MAPPINGS and not is_state and not name.endswith(_EXTRA_STATE):
            yield from _walk(child, f"{name}.", root)
        else:
            yield name, f"{root}{name}", child


def _metadata_of(saved: SavedTree, root: str) -> list[tuple[str, str, int]]:
    """Return where the versions of a saved module are stored: (prefix to remove, prefix to add, object number)."""
    found = []
    for above in ("", *prefixes(root), *([root] if root else [])):
        at = saved.node_at(above)
        if at is not None and at[1][0] == ORDERED_DICT and at[1][2] is not None:
            below = root[len(above) :].removeprefix(".")
            found.append((f"{below}." if below else "", "", at[1][2]))
    at = saved.node_at(root)
    if at is not None:
        found += [("", name, number) for name, number in _versions_below(at[1], "")]
    return found


def _versions_below(node: Node, prefix: str) -> Iterator[tuple[str, int]]:
    if node[0] not in MAPPINGS:
        return
    for key, child in zip(node[1][::2], node[1][1::2], strict=True):
        name = f"{prefix}{key}"
        if child[0] == ORDERED_DICT and child[2] is not None:
            yield name, child[2]
        yield from _versions_below(child, f"{name}.")


def state_load_error(error: Exception, value: Any, fqn: str, path: str) -> StateLoadError:
    """Return the error for an object whose `load_state_dict()` raised."""
    kind, detail = type(value).__name__, f"{type(error).__name__}: {error}"
    return StateLoadError(
        f"{path}: load_state_dict() of {fqn!r}, a {kind}, raised {detail}",
        path=path,
        fqn=fqn,
        type_name=kind,
        detail=detail,
    )


def takes_strict(module: torch.nn.Module) -> bool:
    """Whether a module's `load_state_dict` has the argument `strict`."""
    parameters = inspect.signature(module.load_state_dict).parameters.values()
    return any(p.name == "strict" or p.kind is p.VAR_KEYWORD for p in parameters)
