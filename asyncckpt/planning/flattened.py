"""A state dict taken apart: a value, and the names of what is in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from asyncckpt.format.state_tree import Node, fqn_of, leaves, per_rank_nodes
from asyncckpt.planning.keys import mappings
from asyncckpt.planning.shard_leaves import ShardLeaf


class Flattened:
    """A state dict taken apart.

    Attributes:
        tree: The skeleton (`format.state_tree`).
        tensors: By tensor number; a tensor reachable by several paths is there once. Not copies. Of a shard the first
            part; the others follow behind the last number.
        objects: By object number: the leaves that are not tensors. Not copies.
        allow_pickle: Whether objects of any type may be stored.
        shards: By tensor number: those of which this process holds parts.
        n_numbers: How many tensor numbers there are.
    """

    __slots__ = ("allow_pickle", "n_numbers", "objects", "shards", "tensors", "tree")

    def __init__(
        self,
        tree: Node,
        tensors: list[torch.Tensor],
        objects_: list[Any],
        *,
        allow_pickle: bool = False,
        shards: Mapping[int, ShardLeaf] | None = None,
        n_numbers: int | None = None,
    ) -> None:
        self.tree, self.tensors, self.objects, self.allow_pickle = tree, tensors, objects_, allow_pickle
        self.shards: Mapping[int, ShardLeaf] = shards or {}
        self.n_numbers = len(tensors) if n_numbers is None else n_numbers

    @property
    def fqns(self) -> list[str]:
        """FQN of each tensor by its first path."""
        names: list[str | None] = [None] * len(self.tensors)
        for path, node in leaves(self.tree):
            if node[0] != "O" and names[node[1]] is None:
                names[node[1]] = fqn_of(path)
        return [n for n in names if n is not None]

    @property
    def per_rank(self) -> frozenset[int]:
        """Numbers of the tensors that belong to this rank: any of their paths lies in a `PerRank`."""
        return frozenset(leaf[1] for _, node in per_rank_nodes(self.tree) for _, leaf in leaves(node) if leaf[0] != "O")

    @property
    def common(self) -> list[int]:
        """Numbers of the tensors that are whole here and do not belong to this rank alone, ascending."""
        own = self.per_rank
        return [n for n in range(self.n_numbers) if n not in own and n not in self.shards]

    def name_of(self, source: int) -> str:
        """Return the FQN of what lies at `source` of `tensors`."""
        if source >= self.n_numbers:
            source = next(n for n, leaf in self.shards.items() if source in leaf.sources)
        return self.fqns[source]


def object_fqn(tree: Node, number: int) -> str:
    """Return the name of an object by its number: a leaf, or the `_metadata` of an OrderedDict."""
    for path, node in leaves(tree):
        if node == ("O", number):
            return fqn_of(path)
    return next((fqn_of((*path, "_metadata")) for path, node in mappings(tree) if node[2:] == (number,)), "")
