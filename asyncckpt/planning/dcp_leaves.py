"""What layout "dcp" cannot hold is refused by name before anything is begun."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncckpt.errors import UnsupportedLeafError
from asyncckpt.format.dcp import item_pickle, items_of, refusal_of
from asyncckpt.format.state_tree import Node, fqn_of
from asyncckpt.format.torch_pickle import NotPickledError


def check_dcp_items(tree: Node) -> None:
    """Prove that every leaf of a tree can be an item of `torch.distributed.checkpoint`, but for the objects' types.

    Raises:
        UnsupportedLeafError: Naming the first that cannot.
    """
    for item in items_of(tree):
        why = refusal_of(item.node)
        if why is not None:
            raise _refused(fqn_of(item.path), why)


def check_dcp_objects(tree: Node, objects: Sequence[Any]) -> None:
    """Prove that the objects of a tree have a form that `torch.load(weights_only=True)` reads.

    Args:
        tree: Of the state dict.
        objects: JSON forms by number.

    Raises:
        UnsupportedLeafError: Naming the first that has none.
    """
    for item in items_of(tree):
        if item.node[0] != "T" and not _is_plain(item.node, objects):
            try:
                item_pickle(item.node, objects)
            except NotPickledError as error:
                raise _refused(fqn_of(item.path), str(error)) from error


def _is_plain(node: Node, objects: Sequence[Any]) -> bool:
    """Whether it is one of the values that most of these leaves are."""
    return node[0] == "O" and type(objects[node[1]]) in (type(None), bool, int, float, str)


def _refused(leaf: str, what: str) -> UnsupportedLeafError:
    return UnsupportedLeafError(
        f"state dict leaf {leaf!r}: layout='dcp' has no form for {what}; layout='safetensors' holds it",
        leaf=leaf,
        type_name=what.removeprefix("a ").partition(",")[0],
    )
