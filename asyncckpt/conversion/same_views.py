"""Whether a target holds values as the source's pickles had them, where it is to: views, Parameters, Counters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from asyncckpt.conversion.holding import TOP
from asyncckpt.conversion.outline import Outline
from asyncckpt.conversion.torch_image import TorchView
from asyncckpt.conversion.torch_views import as_it_was, pickles
from asyncckpt.dtypes import DTYPES
from asyncckpt.foreign.as_saved import SavedView
from asyncckpt.foreign.pickle_values import Defaulting, LayoutText, PathText, Tally
from asyncckpt.format.tree import Node, Path, fqn_of
from asyncckpt.planning.containers import is_counter
from asyncckpt.planning.keys import mappings

_PLAIN: dict[type, type] = {PathText: str, Defaulting: dict}
"""What becomes of types that no target keeps."""


def other_than_saved(
    outline: Outline, found: Outline, to: str, written: Mapping[int, set[tuple[str, int]]]
) -> str | None:
    """Return the name of something that a reader does not find as it was, or None.

    Args:
        outline: What was to be written.
        found: What a reader finds.
        to: The target's kind.
        written: By number of a tensor: (file, offset) of its elements, of one that is written twice both.
    """
    there = found.as_saved
    shards = found.contents.ranks[0].index.shards if outline.views else ()
    same: dict[int, int] = {}
    back: dict[int, int] = {}
    for fqn, view in outline.views.items():
        other = there.tensors.get(fqn)
        if other is None or not _is_same_view(view, other, shards[other.part].name, written[view.payload]):
            return fqn
        mine, its = id(view.saved.ref), id(other.ref)
        if to == "torch" and (same.setdefault(mine, its) != its or back.setdefault(its, mine) != mine):
            return fqn
    for path, first in outline.shared.items():
        if there.shared.get(path, path) != there.shared.get(first):
            return fqn_of(path)
    counters = {path for path, node in mappings(found.tree) if is_counter(node)}
    for path, node in pickles(outline, to):
        name = _other_value(as_it_was(outline, node, path), path, there.values, counters)
        if name is not None:
            return name
    return None


def _is_same_view(view: TorchView, other: SavedView, file: str, places: set[tuple[str, int]]) -> bool:
    ref, its = view.saved.ref, other.ref
    start = other.extent[0] - view.offset * DTYPES[ref.dtype].itemsize
    return (
        (ref.dtype, ref.size, view.stride) == (its.dtype, its.size, its.stride)
        and (ref.is_parameter, ref.requires_grad) == (its.is_parameter, its.requires_grad)
        and ((file, start) in places or 0 in ref.size)
    )


def _other_value(node: Node, path: Path, values: Mapping[str, Any], counters: set[Path]) -> str | None:
    """Return the name of the first Counter or value at or below `path` that is another one."""
    node = node[2] if node[0] == "S" else node
    kind = node[0]
    if is_counter(node) and path not in counters:
        return fqn_of(path) or TOP
    if kind == "P":
        fqn = fqn_of(path)
        return None if fqn in values and _shape(node[1]) == _shape(values[fqn]) else fqn
    if kind in ("d", "o"):
        pairs = list(zip(node[1][::2], node[1][1::2], strict=True))
    else:
        pairs = list(enumerate(node[1])) if kind in ("l", "t") else []
    names = (_other_value(child, (*path, key), values, counters) for key, child in pairs)
    return next((name for name in names if name is not None), None)


def _shape(value: Any) -> Any:
    """Return the types in a value, in the order of what has one; the rest of it is compared as a plain value."""
    kind = _PLAIN.get(type(value), type(value))
    if kind in (dict, OrderedDict, Tally):
        return kind, [(_shape(key), _shape(member)) for key, member in value.items()]
    if kind in (list, tuple):
        return kind, [_shape(member) for member in value]
    if kind in (set, frozenset):
        return kind, sorted(str(_shape(member)) for member in value)
    return kind, str(value) if kind is LayoutText else None
