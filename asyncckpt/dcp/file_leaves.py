"""Tensors and other leaves of a file, by FQN, for the rank that reads them and sends them to others."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgpack
import torch

from asyncckpt.config import RankInfo
from asyncckpt.format.state_tree import OBJECT, ORDERED_DICT, TENSOR, Node, leaves, mapping_nodes
from asyncckpt.interop.sources.detect import read_any
from asyncckpt.loading.fetch import SLAB_NBYTES, read_tensor, strided_view
from asyncckpt.loading.saved_state import SavedObjects, SavedTree
from asyncckpt.state_dict.unflatten import Unflattener
from asyncckpt.storage.files import Files
from asyncckpt.torch_tensors import CARRIERS, dtype_name, torch_dtype


class LeafInfo(NamedTuple):
    """Description of a leaf of the file.

    Attributes:
        dtype: dtype of a tensor; None: the leaf is no tensor.
        shape: Shape of a tensor.
        data: For a leaf that is no tensor, its value as `torch.save` writes it.
    """

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    data: bytes


def encode_leaf_infos(facts: Mapping[str, LeafInfo]) -> bytearray:
    """Encode the descriptions of leaves: a list of all, then the `data` of each."""
    listed = [
        [fqn, None if fact.dtype is None else dtype_name(fact.dtype), fact.shape, len(fact.data)]
        for fqn, fact in facts.items()
    ]
    head = msgpack.packb(listed, unicode_errors="surrogateescape")
    return bytearray(b"").join([len(head).to_bytes(8, "little"), head, *(fact.data for fact in facts.values())])


def decode_leaf_infos(data: bytearray) -> dict[str, LeafInfo]:
    """Decode what `encode_leaf_infos` returned."""
    with memoryview(data) as view:
        end = 8 + int.from_bytes(view[:8], "little")
        found = {}
        for fqn, dtype, shape, nbytes in msgpack.unpackb(view[8:end], unicode_errors="surrogateescape", use_list=False):
            found[fqn] = LeafInfo(None if dtype is None else torch_dtype(dtype), shape, bytes(view[end : end + nbytes]))
            end += nbytes
    return found


class FileLeaves:
    """Tensors and other leaves of one file, by FQN. Only requested leaves are read; files are closed after each read.

    Args:
        path: A checkpoint of any kind, usually a file of `torch.save`.
        threads: Number of reading threads.

    Raises:
        AsyncCkptError, OSError: See `interop.sources.detect.read_any`.
    """

    def __init__(self, path: str, threads: int) -> None:
        self._files, self._threads = Files(), threads
        self._contents = read_any(path, self._files)
        self._saved = SavedTree(self._contents, RankInfo(0, 1))
        self._objects = SavedObjects(self._contents, self._files)
        self._whole: tuple[str, torch.Tensor | None] = ("", None)

    def facts(self, names: Iterable[str]) -> dict[str, LeafInfo]:
        """Return the descriptions of the leaves with these FQNs; FQNs that the file lacks are left out.

        Raises:
            CorruptCheckpointError: A leaf cannot be decoded.
            UnsupportedFormatError: A leaf holds an object of a class that is not on the list of what may be read.
            UnsupportedLeafError: This torch lacks a dtype.
            OSError: The file cannot be read.
        """
        found = {}
        for fqn in names:
            at = self._saved.node_at(fqn)
            if at is None:
                continue
            if at[1][0] == TENSOR:
                saved = self._saved.tensors[at[1][1]]
                found[fqn] = LeafInfo(torch_dtype(saved.dtype), saved.global_shape, b"")
            else:
                data = io.BytesIO()
                torch.save(self._value(at[1]), data)
                found[fqn] = LeafInfo(None, (), data.getvalue())
        return found

    def _value(self, node: Node) -> Any:
        below = [leaf for _, leaf in leaves(node)]
        numbers = {n for kind, n in below if kind == OBJECT}
        numbers |= {inner[2] for _, inner in mapping_nodes(node) if inner[0] == ORDERED_DICT and inner[2] is not None}
        objects = {n: self._objects.value(*self._saved.object_at(n)) for n in numbers}
        tensors = {
            n: read_tensor(
                self._contents, self._saved.tensors[n], None, self._files, threads=self._threads, verify=True
            )
            for n in {n for kind, n in below if kind != OBJECT}
        }
        return Unflattener(tensors, objects).value_of(node)

    def read(self, fqn: str, region: tuple[slice, ...], room: torch.Tensor) -> None:
        """Read a box of a tensor into the beginning of `room`, in row-major order.

        Args:
            fqn: FQN of a tensor that `facts` has returned.
            region: One slice for each dimension.
            room: A uint8 tensor, aligned to 16 bytes.

        Raises:
            CorruptCheckpointError: The file is damaged.
            OSError: The file cannot be read.

        Blocks: for the read.
        """
        at = self._saved.node_at(fqn)
        assert at is not None
        saved = self._saved.tensors[at[1][1]]
        if self._whole[0] != fqn:
            itemsize = torch_dtype(saved.dtype).itemsize
            large = math.prod(saved.global_shape) * itemsize > SLAB_NBYTES
            self._whole = ("", None)  # free its memory before the next tensor is read
            view = strided_view(self._contents, saved, self._files, threads=self._threads) if large else None
            self._whole = (fqn, view)
        whole = self._whole[1]
        if whole is None:
            read_tensor(self._contents, saved, region, self._files, threads=self._threads, verify=True, out=room)
            return
        part = whole[region]
        room[: part.numel() * part.itemsize].view(CARRIERS[part.itemsize]).view(part.shape).copy_(part)
