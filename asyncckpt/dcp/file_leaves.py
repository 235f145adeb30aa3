"""The tensors and leaves of a file, by FQN, as the rank sees them that reads them for others."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

import msgpack
import torch

from asyncckpt.config import RankInfo
from asyncckpt.format.state_tree import OBJECT, ORDERED_DICT, TENSOR, Node, leaves
from asyncckpt.interop.sources.detect import read_any
from asyncckpt.loading.fetch import SLAB_NBYTES, read_tensor, strided_view
from asyncckpt.loading.saved_state import SavedObjects, SavedTree
from asyncckpt.state_dict.flatten import mappings
from asyncckpt.state_dict.unflatten import Unflattener
from asyncckpt.storage.files import Files
from asyncckpt.torch_tensors import CARRIERS, dtype_name, torch_dtype


class Fact(NamedTuple):
    """What the file has under a name: a tensor's dtype and shape, or the bytes that `torch.save` makes of a leaf."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    data: bytes


def encode_facts(facts: Mapping[str, Fact]) -> bytearray:
    """Return facts as bytes: what has a length of its own comes behind a list of all."""
    listed = [
        [fqn, None if fact.dtype is None else dtype_name(fact.dtype), fact.shape, len(fact.data)]
        for fqn, fact in facts.items()
    ]
    head = msgpack.packb(listed, unicode_errors="surrogateescape")
    return bytearray(b"").join([len(head).to_bytes(8, "little"), head, *(fact.data for fact in facts.values())])


def decode_facts(data: bytearray) -> dict[str, Fact]:
    """Return the facts that `encode_facts` was given."""
    with memoryview(data) as view:
        end = 8 + int.from_bytes(view[:8], "little")
        found = {}
        for fqn, dtype, shape, nbytes in msgpack.unpackb(view[8:end], unicode_errors="surrogateescape", use_list=False):
            found[fqn] = Fact(None if dtype is None else torch_dtype(dtype), shape, bytes(view[end : end + nbytes]))
            end += nbytes
    return found


class FileLeaves:
    """Tensors and leaves of one file, by FQN. Only what is asked for is read; no file stays open in between.

    Args:
        path: A checkpoint of any kind; a file of `torch.save` as a rule.
        threads: Reading threads.

    Raises:
        AsyncCkptError, OSError: As `foreign.kinds.read_any`.
    """

    def __init__(self, path: str, threads: int) -> None:
        self._files, self._threads = Files(), threads
        self._contents = read_any(path, self._files)
        self._saved = SavedTree(self._contents, RankInfo(0, 1))
        self._objects = SavedObjects(self._contents, self._files)
        self._whole: tuple[str, torch.Tensor | None] = ("", None)

    def facts(self, names: Iterable[str]) -> dict[str, Fact]:
        """Return what the file has under these names; those that it lacks are left out.

        Raises:
            CorruptCheckpointError: A leaf does not decode.
            UnsupportedFormatError: A leaf holds what is not on the list of what may be read.
            UnsupportedLeafError: This torch lacks a dtype.
            OSError: It cannot be read.
        """
        found = {}
        for fqn in names:
            at = self._saved.node_at(fqn)
            if at is None:
                continue
            if at[1][0] == TENSOR:
                saved = self._saved.tensors[at[1][1]]
                found[fqn] = Fact(torch_dtype(saved.dtype), saved.global_shape, b"")
            else:
                data = io.BytesIO()
                torch.save(self._value(at[1]), data)
                found[fqn] = Fact(None, (), data.getvalue())
        return found

    def _value(self, node: Node) -> Any:
        below = [leaf for _, leaf in leaves(node)]
        numbers = {n for kind, n in below if kind == OBJECT}
        numbers |= {inner[2] for _, inner in mappings(node) if inner[0] == ORDERED_DICT and inner[2] is not None}
        objects = {n: self._objects.value(*self._saved.object_at(n)) for n in numbers}
        tensors = {
            n: read_tensor(
                self._contents, self._saved.tensors[n], None, self._files, threads=self._threads, verify=True
            )
            for n in {n for kind, n in below if kind != OBJECT}
        }
        return Unflattener(cast(Any, tensors), cast(Any, objects)).value_of(node)

    def read(self, fqn: str, region: tuple[slice, ...], room: torch.Tensor) -> None:
        """Read a box of a tensor, row-major, to the start of `room`.

        Args:
            fqn: Of a tensor that `facts` has found.
            region: One slice for each dimension.
            room: Bytes, aligned to 16.

        Raises:
            CorruptCheckpointError: The file is damaged.
            OSError: It cannot be read.
        """
        at = self._saved.node_at(fqn)
        assert at is not None
        saved = self._saved.tensors[at[1][1]]
        if self._whole[0] != fqn:
            itemsize = torch_dtype(saved.dtype).itemsize
            large = math.prod(saved.global_shape) * itemsize > SLAB_NBYTES
            self._whole = ("", None)  # its memory first
            view = strided_view(self._contents, saved, self._files, threads=self._threads) if large else None
            self._whole = (fqn, view)
        whole = self._whole[1]
        if whole is None:
            read_tensor(self._contents, saved, region, self._files, threads=self._threads, verify=True, out=room)
            return
        part = whole[region]
        room[: part.numel() * part.itemsize].view(CARRIERS[part.itemsize]).view(part.shape).copy_(part)
