"""A target state dict against what was saved: what fills what, decided and checked before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from asyncckpt.errors import AliasMismatchError, ConfigError, LeafTypeMismatchError, ShapeMismatchError
from asyncckpt.format.tree import Node, Path, fqn_of, leaves
from asyncckpt.loading.saved_tree import SavedTree, kind_of
from asyncckpt.loading.selection import Selection, prefixes
from asyncckpt.per_rank import PerRank
from asyncckpt.planning.state_dict import flatten
from asyncckpt.planning.torch_types import torch_dtype
from asyncckpt.storage.contents import SavedTensor

KeyMap = Mapping[str, str] | Callable[[str], str]
_WRAPPER_PREFIXES = ("module.", "_orig_mod.")


Mismatch = ShapeMismatchError | LeafTypeMismatchError | AliasMismatchError


def _raised(error: Mismatch) -> None:
    raise error


@dataclass(slots=True)
class Matches:
    """What a load into a state dict will do.

    Attributes:
        tensors: What is read into which tensor; a tensor with several names is there once.
        objects: Paths in the target and the saved leaf that goes there.
        missing: FQNs of the target, as the target names them, that were not saved; and keys that select nothing.
        converted: FQNs whose dtype differs.
        unavailable: FQNs of the target that only other ranks than the reader have, as their own.
        found: Everything that is read, by its saved FQN.
    """

    tensors: list[tuple[SavedTensor, torch.Tensor]] = field(default_factory=list)
    objects: list[tuple[Path, Node]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    converted: list[str] = field(default_factory=list)
    unavailable: list[str] = field(default_factory=list)
    found: dict[str, Node] = field(default_factory=dict)


def match(
    state_dict: Mapping[Any, Any],
    saved: SavedTree,
    selection: Selection,
    key_map: KeyMap | None,
    path: str,
    refuse: Callable[[Mismatch], None] = _raised,
) -> Matches:
    """Match every selected leaf of `state_dict` with a saved one.

    Args:
        state_dict: The target; not changed.
        saved: The checkpoint.
        selection: Which of the target's leaves to fill.
        key_map: From the target's FQNs to the saved ones; names that a mapping lacks stay.
        path: The checkpoint's, for messages.
        refuse: Called for every leaf that cannot be filled; raises, or takes note so that the next one is looked at.

    Raises:
        UnsupportedLeafError: The target holds something that a checkpoint cannot.
        ShapeMismatchError: A tensor was saved with another shape.
        LeafTypeMismatchError: A tensor meets an object, or a leaf a container.
        AliasMismatchError: One tensor of the target has two names, under which two tensors were saved.
        ConfigError: A target tensor whose elements share memory, so that it cannot be filled.
    """
    flat = flatten(state_dict)
    rename = _renamer(key_map)
    away = frozenset(saved.away)
    matches = Matches()
    filled: dict[int, tuple[str, int]] = {}  # the target's tensor: by which FQN, from which saved tensor
    for leaf_path, node in leaves(flat.tree):
        fqn = fqn_of(leaf_path)
        if fqn not in selection:
            continue
        saved_fqn = rename(fqn)
        found = saved.leaves.get(saved_fqn)
        if found is None:
            error = _container_there(fqn, saved_fqn, node, saved, path)
            if saved_fqn in away:
                matches.unavailable.append(fqn)
            elif error is not None:
                refuse(error)
            else:
                matches.missing.append(fqn)
            continue
        matches.found[saved_fqn] = found
        if kind_of(node) != kind_of(found):
            refuse(_leaf_mismatch(fqn, kind_of(found), kind_of(node), path))
        elif node[0] != "T":
            matches.objects.append((leaf_path, found))
        else:
            first, number = filled.setdefault(node[1], (fqn, found[1]))
            if first != fqn and number == found[1]:
                continue
            target, tensor = _value_at(state_dict, leaf_path), saved.tensors[found[1]]
            if tuple(target.shape) != tensor.global_shape:
                refuse(_shape_mismatch(fqn, tensor, target, path))
                continue
            _check_target(fqn, target)
            if first != fqn:
                if target.numel():
                    refuse(_alias_mismatch(first, fqn, path))
                continue
            if target.dtype != torch_dtype(tensor.dtype):
                matches.converted.append(fqn)
            matches.tensors.append((tensor, target))
    matches.missing += selection.unused()
    return matches


def _renamer(key_map: KeyMap | None) -> Callable[[str], str]:
    if key_map is None:
        return lambda fqn: fqn
    if isinstance(key_map, Mapping):
        table = key_map
        return lambda fqn: table.get(fqn, fqn)
    return key_map


def _value_at(state_dict: Mapping[Any, Any], path: Path) -> Any:
    value: Any = state_dict
    for key in path:
        value = _unmarked(value)[key]
    return _unmarked(value)


def _unmarked(value: Any) -> Any:
    while isinstance(value, PerRank):
        value = value.value
    return value


def _shape_mismatch(fqn: str, saved: SavedTensor, target: torch.Tensor, path: str) -> ShapeMismatchError:
    return ShapeMismatchError(
        f"{path}: tensor {fqn!r} was saved with shape {list(saved.global_shape)}, the target has "
        f"{list(target.shape)}; nothing was changed",
        path=path,
        fqn=fqn,
        saved=list(saved.global_shape),
        wanted=list(target.shape),
    )


def _check_target(fqn: str, target: torch.Tensor) -> None:
    if any(stride == 0 and size > 1 for stride, size in zip(target.stride(), target.shape, strict=True)):
        raise ConfigError(
            f"target tensor {fqn!r} is expanded: its elements share memory, so it cannot be filled; pass a clone()",
            field="state_dict",
            value=fqn,
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


def prefix_hint(missing: Iterable[str], saved_fqns: Iterable[str]) -> str:
    """Return advice when missing keys differ from saved ones by a wrapper's prefix only; else an empty string."""
    bare = {_unwrapped(fqn): fqn for fqn in saved_fqns}
    for key in missing:
        found = bare.get(_unwrapped(key))
        if found is not None and found != key:
            wrapper = next(p for p in _WRAPPER_PREFIXES if (p in key) != (p in found) or key.count(p) != found.count(p))
            where = "the target" if key.count(wrapper) > found.count(wrapper) else "the checkpoint"
            return (
                f"; only {where} has the prefix {wrapper!r} ({key!r} is wanted, {found!r} was saved): "
                "use the bare model's state_dict(), or pass key_map"
            )
    return ""


def _unwrapped(fqn: str) -> str:
    for prefix in _WRAPPER_PREFIXES:
        fqn = ("." + fqn).replace("." + prefix, ".")[1:]
    return fqn


def replace_at(value: Any, path: Path, new: Any) -> Any:
    """Put `new` at `path` inside `value`: in place where the container allows it, rebuilding tuples.

    Returns:
        `value`, or the tuple that stands for it now. A `PerRank` stays one, and gets another value.
    """
    if isinstance(value, PerRank):
        value.value = replace_at(value.value, path, new)
        return value
    if not path:
        return new
    key, old = path[0], value[path[0]]
    child = replace_at(old, path[1:], new)
    if isinstance(value, tuple):
        members = [child if n == key else member for n, member in enumerate(value)]
        return type(value)(*members) if hasattr(value, "_fields") else tuple(members)
    if child is not old:
        value[key] = child
    return value
