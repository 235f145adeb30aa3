"""`asyncckpt.open_checkpoint`: a checkpoint of which only what is asked for is read."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any

import torch

from asyncckpt.basics.paths import absolute_path
from asyncckpt.config import RankInfo
from asyncckpt.distributed.process_group import find_rank_info
from asyncckpt.errors import ConfigError, LeafTypeMismatchError, MissingKeysError, PerRankUnavailableError
from asyncckpt.format.state_tree import Node, fqn_of, leaves
from asyncckpt.interop.sources.detect import OURS
from asyncckpt.interop.sources.unread_leaves import unread_leaves
from asyncckpt.loading.byte_ranges import region_of
from asyncckpt.loading.fetch import bytes_of, read_tensor, thread_count
from asyncckpt.loading.read_source import HeldSnapshotReader, ReadSource, check_source, open_source
from asyncckpt.loading.saved_state import SavedObjects, SavedTree, kind_of, per_rank_unavailable
from asyncckpt.loading.tensor_writers import new_tensor
from asyncckpt.state_dict.numpy_values import array_of
from asyncckpt.storage.contents import Contents, Inline, SavedTensor, Strided, check_lengths
from asyncckpt.storage.files import Files, opened
from asyncckpt.storage.reader import DEFAULT_THREADS
from asyncckpt.torch_tensors import check_memory_is_real, torch_dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """A saved tensor: dtype, global shape in elements, bytes, and the name under which the shards have it."""

    dtype: torch.dtype | str
    shape: tuple[int, ...]
    nbytes: int
    stored_name: str


class OpenCheckpoint:
    """A committed checkpoint, seen by one rank as `load` would give it; made by `open_checkpoint`.

    Manifest and indexes were read and checked; files are open while something is read only. Safe to use from several
    threads. A context manager, for those who like to see where it ends.

    Attributes:
        path: Its directory, or file.
        kind: `asyncckpt`; or of another format `dcp`, `torch`, `safetensors`, `hf`.
        step: The training step, as the user counts; of another format its leaf `step`, -1 without one.
        save_id: Of the save, as text; zeros for another format.
        world_size: Ranks that saved it; 1 for another format.
        metadata: The JSON that was given to `save`, or what the format keeps beside its tensors.
    """

    def __init__(
        self, found: ReadSource, reader: RankInfo, *, allow_pickle: bool = False, held: HeldSnapshotReader | None = None
    ) -> None:
        contents, files = found.contents, found.files
        manifest = contents.manifest
        self.path, self.step, self.world_size = contents.path, manifest.step, manifest.world_size
        self.save_id = str(manifest.save_id)
        self.metadata: dict[str, Any] = dict(manifest.metadata)
        self.kind = contents.source.kind if contents.source is not None else OURS
        self._contents, self._reader, self._files = contents, reader, files
        self._held, self._has_checksums = held, found.has_checksums
        self._saved = SavedTree(contents, reader)
        self._objects = SavedObjects(contents, files, allow_pickle=allow_pickle)

    def keys(self) -> list[str]:
        """Return the FQNs of all leaves, tensors and objects, in the order of the state dict.

        Leaves that belong to other ranks are not among them.
        """
        return list(self._saved.leaves)

    def __contains__(self, fqn: object) -> bool:
        return fqn in self._saved.leaves

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Dtype, shape and size of each tensor by FQN, as this reader sees them; no tensor is read for it."""
        found = self._saved.leaves.items()
        return {fqn: _info(self._saved.tensors[node[1]]) for fqn, node in found if node[0] == "T"}

    @cached_property
    def stored_tensors(self) -> Mapping[str, TensorInfo]:
        """The same of every tensor in the shards, by stored name; those of one rank are called `fqn@rank3`."""
        return {saved.fqn: _info(saved) for saved in self._saved.tensors}

    def tensor(
        self,
        fqn: str,
        slices: Any = None,
        *,
        verify: bool = True,
        threads: int | None = None,
        mmap: bool = False,
    ) -> torch.Tensor:
        """Read a tensor or a numpy array, or a part of it.

        Args:
            fqn: Its FQN, or its stored name, such as `x@rank3`.
            slices: What indexing would take: ints, slices with positive steps, `...`, or a tuple of them. None: all.
            verify: False reads the needed pages only, and checks no checksum.
            threads: Reading threads; None takes 4.
            mmap: Map the file instead of reading it, where the tensor lies in one piece: pages come in when they are
                looked at, and no checksum is compared. What is written to the tensor stays in this process; the file
                must not be cut short while it lives. Otherwise the tensor is read.

        Returns:
            A new tensor on the CPU, of the saved dtype; contiguous unless it is mapped.

        Raises:
            MissingKeysError: There is none of this name.
            LeafTypeMismatchError: It is an object.
            PerRankUnavailableError: It belongs to other ranks; ask for their stored names.
            ConfigError: Slices or threads that make no sense.
            CorruptCheckpointError: The files differ from what was saved.
            SnapshotUnavailableError: It is in memory, and a living trainer has used that for another save; or closed.
            UnsupportedLeafError: This torch lacks the dtype; or makes no real tensors here, in FakeTensorMode.
            OSError: The files cannot be read.

        Blocks: for the reads.
        """
        count, saved = thread_count(threads), self._found(fqn)
        check_memory_is_real("OpenCheckpoint.tensor")
        if mmap:
            region_of(slices, saved.global_shape, fqn)  # refuses what reading would
            mapped = mapped_tensor(self._contents, saved, self._files) if self._held is None else None
            if mapped is not None:
                return mapped if slices is None else mapped[tuple(slices) if isinstance(slices, list) else slices]
        return self._read(saved, slices, threads=count, verify=verify)

    @cached_property
    def objects(self) -> Mapping[str, Any]:
        """The leaves that are not tensors, by FQN, as this reader sees them; each is read when it is asked for.

        Looking one up raises `CorruptCheckpointError` where the file is damaged, `PerRankUnavailableError` for one that
        belongs to other ranks, `PickledLeafError` for one that was pickled, `UnsupportedFormatError` for one of
        `unread`.
        """
        found = {fqn: node for fqn, node in self._saved.leaves.items() if node[0] != "T"}
        others = frozenset(self._saved.other_ranks_only)
        return _Objects(found, self._object, lambda fqn: self._unavailable(fqn) if fqn in others else None)

    @cached_property
    def unread(self) -> Mapping[str, str]:
        """Of another format, the objects that are not read, as their class is not on the list: FQN to class."""
        return {fqn: found.kind for fqn, found in unread_leaves(self._contents).items()}

    def objects_of(self, rank: int) -> Mapping[str, Any]:
        """Return the same of what one rank saved, that which belongs to it included.

        Raises:
            ConfigError: There was no such rank.
        """
        if type(rank) is not int or not 0 <= rank < self.world_size:
            raise ConfigError(f"rank={rank!r}: {self.world_size} ranks saved {self.path}", field="rank", value=rank)
        structure = self._contents.ranks[rank].structure
        found = {fqn_of(path): node for path, node in leaves(structure.tree) if node[0] != "T"}

        def value(node: Node) -> Any:
            if node[0] == "O":
                return self._objects.value(rank, node[1])
            return self._hoisted(node[0], self._contents.tensors[structure.tensors[node[1]].fqn])

        return _Objects(found, value, lambda fqn: None)

    def _found(self, fqn: str) -> SavedTensor:
        node = self._saved.leaves.get(fqn)
        if node is not None:
            if node[0] not in ("T", "N"):
                raise LeafTypeMismatchError(
                    f"{self.path}: {fqn!r} was saved as an object; read it by .objects[{fqn!r}]",
                    path=self.path,
                    fqn=fqn,
                    saved=kind_of(node),
                    wanted="tensor",
                )
            return self._saved.tensors[node[1]]
        if fqn in self._contents.tensors:
            return self._contents.tensors[fqn]
        if fqn in self._saved.other_ranks_only:
            raise self._unavailable(fqn)
        raise MissingKeysError(f"{self.path}: there is no tensor {fqn!r}; see .keys()", path=self.path, keys=[str(fqn)])

    def _unavailable(self, fqn: str) -> PerRankUnavailableError:
        return per_rank_unavailable(self._contents, self._saved, self._reader, [fqn])

    def _object(self, node: Node) -> Any:
        if node[0] == "O":
            return self._objects.value(*self._saved.object_at(node[1]))
        return self._hoisted(node[0], self._saved.tensors[node[1]])

    def _hoisted(self, kind: str, saved: SavedTensor) -> Any:
        check_memory_is_real("OpenCheckpoint.objects")
        found = self._read(saved, None, threads=DEFAULT_THREADS, verify=True)
        return bytes_of(found) if kind == "B" else array_of(found)

    def _read(self, saved: SavedTensor, slices: Any, *, threads: int, verify: bool) -> torch.Tensor:
        with self._held.reading() if self._held is not None else contextlib.nullcontext():
            checked = verify and self._has_checksums
            return read_tensor(self._contents, saved, slices, self._files, threads=threads, verify=checked)

    def close(self) -> None:
        """Let a snapshot in memory go, where it is one; of files none is open between reads. Twice is fine."""
        if self._held is not None:
            self._held.close()

    def __enter__(self) -> OpenCheckpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"OpenCheckpoint({self.path!r}, step={self.step}, world_size={self.world_size})"


class _Objects(Mapping[str, Any]):
    """Values by FQN, each made when it is asked for."""

    def __init__(
        self,
        nodes: Mapping[str, Node],
        value: Callable[[Node], Any],
        refusal: Callable[[str], PerRankUnavailableError | None],
    ) -> None:
        self._nodes, self._value, self._refusal = nodes, value, refusal

    def __getitem__(self, fqn: str) -> Any:
        refusal = None if fqn in self._nodes else self._refusal(fqn)
        if refusal is not None:
            raise refusal
        return self._value(self._nodes[fqn])

    def __contains__(self, fqn: object) -> bool:
        return fqn in self._nodes

    def __iter__(self) -> Iterator[str]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def __repr__(self) -> str:
        return f"<{len(self)} objects: {', '.join(list(self)[:8])}{', ...' if len(self) > 8 else ''}>"


def _info(saved: SavedTensor) -> TensorInfo:
    nbytes = sum(chunk.nbytes for _, chunk in saved.chunks)
    return TensorInfo(
        dtype=getattr(torch, saved.dtype, saved.dtype),
        shape=saved.global_shape,
        nbytes=nbytes,
        stored_name=saved.fqn,
    )


def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    rank_info: RankInfo | None = None,
    allow_pickle: bool = False,
    source: str = "auto",
) -> OpenCheckpoint:
    """Open a checkpoint for reading single tensors and objects of it.

    Args:
        path: The checkpoint's directory.
        rank_info: Whose values to give where ranks have their own; None: this process's.
        allow_pickle: Unpickles objects that were pickled, when they are looked up. DANGER: as for `load`.
        source: "disk" opens what is committed. "auto" opens, where nothing is, the newest snapshot of the path that
            all ranks have staged and this node's worker holds; it holds it until this is closed. "memory": only that.

    Raises:
        SnapshotUnavailableError: `source="memory"`, and no worker holds all of it.
        CheckpointNotFoundError: Nothing is there.
        CheckpointNotCommittedError: A save was begun there and never committed.
        CorruptCheckpointError: Manifest or an index is damaged; or a tensor is not there exactly once.
        UnsupportedFormatError: Written by a newer version.
        UnsupportedPathError: A URL, or no path at all.
        ConfigError: A rank outside its world; or no number in RANK or WORLD_SIZE.
        OSError: The files cannot be read.

    Blocks: for reading the indexes.
    """
    reader, where = find_rank_info(rank_info), check_source(source)
    found, held = open_source(absolute_path(path), where, None, Files())
    return OpenCheckpoint(found, reader, allow_pickle=allow_pickle, held=held)


def mapped_tensor(contents: Contents, saved: SavedTensor, files: Files) -> torch.Tensor | None:
    """Return a saved tensor as a private mapping of its file: nothing is read before it is looked at.

    The mapping is copy on write: what is written to the tensor stays in this process. The file must not be cut short
    while the tensor lives; a checkpoint of ours never is, only deleted, which a mapping survives.

    Returns:
        None if the tensor is not in one piece of one file, or not aligned there.

    Raises:
        CorruptCheckpointError: The file is not there in full.
        UnsupportedLeafError: This torch lacks the dtype.
        OSError: It cannot be mapped.
    """
    dtype = torch_dtype(saved.dtype)
    check_lengths(contents, files, saved)
    if len(saved.chunks) != 1:
        return None
    if 0 in saved.global_shape:
        return new_tensor(saved.global_shape, dtype, torch.device("cpu"))
    rank, chunk = saved.chunks[0]
    part, offset, span = chunk.part, chunk.offset_bytes, chunk.nbytes
    strides: tuple[int, ...] | None = None
    directory = contents.path
    if contents.source is not None:
        directory = contents.source.directory
        place = contents.source.place(part, files)
        if isinstance(place, Inline):
            return None
        part, offset = place.part, place.offset + offset
        if isinstance(place, Strided):
            span, strides = place.nbytes, place.strides
    if offset % dtype.itemsize:
        return None
    name = contents.ranks[rank].index.shards[part].name
    start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    with opened(files, os.path.join(directory, name), os.O_RDONLY) as fd:
        mapping = mmap.mmap(
            fd, offset - start + span, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE, offset=start
        )
    flat = torch.frombuffer(mapping, dtype=torch.uint8, count=span, offset=offset - start)  # keeps the mapping alive
    elements = flat.view(dtype)
    if strides is None:
        return elements.view(saved.global_shape).detach()
    return elements.as_strided(saved.global_shape, strides).detach()
