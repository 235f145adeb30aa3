"""What `torch.distributed.checkpoint` has as items of a state dict, and the file of those that are no tensors.

Source: torch 2.13 `distributed/checkpoint/_traverse.py`, `traverse_state_dict`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgpack

from asyncckpt.format.archive import torch_archive
from asyncckpt.format.keys import Key, TypedKey, checked_key
from asyncckpt.format.names import per_rank_name
from asyncckpt.format.pickle_image import PickleImage
from asyncckpt.format.tree import Node, Path, fqn_of


class Item(NamedTuple):
    """A leaf as DCP sees it: a tensor, or all that stands at a path. `own`: it belongs to the rank that stored it."""

    path: Path
    node: Node
    own: bool


def items_of(tree: Node) -> Iterator[Item]:
    """Yield the items of a tree, also of one that was unpacked and not checked, in order; keys are texts, positions in
    lists numbers.
    """

    def visit(node: Node, path: Path, own: bool) -> Iterator[Item]:
        if node[0] == "r":
            yield from visit(node[1], path, True)
        elif node[0] in ("d", "o"):
            for key, child in zip(node[1][::2], node[1][1::2], strict=True):
                yield from visit(child, (*path, str(_key(key))), own)
        elif node[0] == "l" and not is_terminal(node):
            for n, child in enumerate(node[1]):
                yield from visit(child, (*path, n), own)
        else:
            yield Item(path, node, own)

    yield from visit(tree, (), False)


def _key(raw: Any) -> Key:
    """Return a key of a tree that was unpacked, or need not be: whether it is too long is for those who store it."""
    return raw if type(raw) in (str, int, TypedKey) else checked_key(raw)


def is_terminal(node: Node) -> bool:
    """Whether a list is one item: nothing in it but values and lists of them."""
    members = [child[1] if child[0] == "r" else child for child in node[1]]
    return not any(
        child[0] in ("d", "o", "T", "N") or (child[0] == "l" and not is_terminal(child)) for child in members
    )


def refusal_of(node: Node) -> str | None:
    """Return why an item cannot be written while its elements are still to come; None: it can."""
    kind = node[0]
    if kind in ("T", "O"):
        return None
    if kind == "r":
        return refusal_of(node[1])
    if kind == "N":
        return "a numpy array, which stock DCP would pickle: save a tensor instead"
    if kind == "B":
        return "bytes of this length: save a uint8 tensor instead"
    members = node[1] if kind in ("l", "t") else node[1][1::2]
    for member in members:
        if member[0] in ("T", "N"):
            return "a tuple with tensors in it, which stock DCP pickles as a whole: make it a list or a dict"
        why = refusal_of(member)
        if why is not None:
            return why
    return None


def name_of(item: Item, rank: int) -> tuple[str, Path]:
    """Return the name of an item of `rank`, and where DCP puts it back: what belongs to a rank is called so."""
    if item.own:
        name = per_rank_name(fqn_of(item.path), rank)
        return name, (name,)
    return fqn_of(item.path), item.path


def item_pickle(node: Node, objects: Sequence[Any]) -> bytes:
    """Return the pickle of an item that holds no tensor.

    Raises:
        NotPickledError: A value in it has no form that `torch.load(weights_only=True)` reads.
    """
    return PickleImage(_no_tensor, objects, _no_bytes).of_node(_without_ranks(node))


def _without_ranks(node: Node) -> Node:
    if node[0] == "r":
        return _without_ranks(node[1])
    if node[0] in ("l", "t"):
        return (node[0], tuple(map(_without_ranks, node[1])), *node[2:])
    if node[0] in ("d", "o"):
        members = tuple(_without_ranks(m) if n % 2 else _key(m) for n, m in enumerate(node[1]))
        return (node[0], members, *node[2:])
    return node


def _no_tensor(number: int) -> tuple[str, tuple[int, ...]]:
    raise AssertionError(f"tensor {number} inside of an item that holds none")


def _no_bytes(number: int) -> bytes:
    raise AssertionError(f"the bytes of tensor {number} inside of an item that holds none")


def encode_items(tree: Node, objects: Sequence[Any], rank: int) -> tuple[bytes, bytes]:
    """Return the file of a rank's items that are no tensors, and its table.

    Args:
        tree: The rank's.
        objects: JSON forms by number.
        rank: Of it.

    Returns:
        Archives back to back, each as `torch.save` writes it; and msgpack of [[name, path, offset, length], ...].

    Raises:
        NotPickledError: As `item_pickle`.
    """
    parts: list[bytes] = []
    table: list[Any] = []
    offset = 0
    for item in items_of(tree):
        if item.node[0] == "T":
            continue
        archive = torch_archive(item_pickle(item.node, objects), ())
        data = b"".join(piece for piece in archive.pieces if isinstance(piece, bytes))
        table.append((*name_of(item, rank), offset, len(data)))
        parts.append(data)
        offset += len(data)
    return b"".join(parts), bytes(msgpack.packb(table))
