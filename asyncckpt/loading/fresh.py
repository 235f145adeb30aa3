"""New values for parts of the saved tree: allocated, then read, then put together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from asyncckpt.format.state_tree import Node, leaves
from asyncckpt.loading.fetching import tensor_for
from asyncckpt.loading.map_location import MapLocation, device_of, relocated
from asyncckpt.loading.saved_objects import SavedObjects
from asyncckpt.loading.saved_tree import SavedTree
from asyncckpt.loading.target_tensors import Filling, TargetTensor, target_tensor
from asyncckpt.state_dict.unflatten import Rebuilding


class Fresh:
    """See the module. What is one tensor in the checkpoint is one in all that `build` returns.

    Args:
        nodes: What will be built.
        saved, objects: Of the checkpoint at `path`.
        map_location: Where the tensors go; arrays and bytes stay in host memory.
        standing: By number: what need not be made, since it stands where it belongs.

    Raises:
        CorruptCheckpointError, PickledLeafError, UnsupportedFormatError, UnsupportedLeafError, OSError: Something
            cannot be made.

    Attributes:
        fillings: What is to be read into what, before anything is built.
        used: The leaves of all nodes, and the `_metadata` of OrderedDicts.
    """

    def __init__(
        self,
        nodes: Iterable[Node],
        saved: SavedTree,
        objects: SavedObjects,
        path: str,
        map_location: MapLocation,
        standing: Mapping[int, TargetTensor],
    ) -> None:
        self.used: set[Node] = set()
        for node in nodes:
            self.used.update(leaf for _, leaf in leaves(node))
            self.used.update(("O", number) for number in _metadata_numbers(node))
        self._map_location = map_location
        wanted = {n: saved.object_at(n) for n in sorted(n for kind, n in self.used if kind == "O")}
        objects.refuse_unread(wanted.values())
        self._objects = _Sparse({n: objects.value(*at) for n, at in wanted.items()})
        found = {n: standing[n] for kind, n in self.used if kind == "T" and n in standing}
        self._tensors: dict[int, Any] = {n: target.value for n, target in found.items()}
        self._moved = sorted({n for kind, n in self.used if kind == "T"} - set(self._tensors))
        device, host = device_of(map_location), torch.device("cpu")
        self._tensors |= {n: tensor_for(saved.tensors[n], path, device=device) for n in self._moved}
        for n in sorted({n for kind, n in self.used if kind in ("B", "N")} - set(self._tensors)):
            self._tensors[n] = tensor_for(saved.tensors[n], path, device=host)
        self.fillings: list[Filling] = [
            (saved.tensors[n], found[n] if n in found else target_tensor(t, "")) for n, t in self._tensors.items()
        ]
        self._rebuilding: Rebuilding | None = None

    def build(self, node: Node) -> Any:
        """Return the value of one of the nodes, after `fillings` have been read."""
        if self._rebuilding is None:
            if callable(self._map_location):
                self._tensors |= {n: relocated(self._tensors[n], self._map_location) for n in self._moved}
            self._rebuilding = Rebuilding(_Sparse(self._tensors), self._objects)
        return self._rebuilding.of(node)


class _Sparse(Sequence[Any]):
    """Values by number, for those that are there."""

    def __init__(self, values: dict[int, Any]) -> None:
        self._values = values

    def __getitem__(self, number: Any) -> Any:
        return self._values[number]

    def __len__(self) -> int:
        return len(self._values)


def _metadata_numbers(node: Node) -> list[int]:
    """Object numbers of the `_metadata` of all OrderedDicts: they are no leaves."""
    kind = node[0]
    if kind not in ("d", "o", "l", "t"):
        return []
    children = node[1][1::2] if kind in ("d", "o") else node[1]
    own = [node[2]] if kind == "o" and node[2] is not None else []
    return own + [number for child in children for number in _metadata_numbers(child)]
