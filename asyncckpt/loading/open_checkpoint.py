"""`asyncckpt.open_checkpoint`: reads single tensors and objects of a checkpoint."""

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

from asyncckpt.basics.paths import checkpoint_path
from asyncckpt.config import RankInfo
from asyncckpt.distributed.process_group import find_rank_info
from asyncckpt.errors import ConfigError, LeafTypeMismatchError, MissingKeysError, PerRankUnavailableError
from asyncckpt.format.state_tree import ARRAY, BYTES, EMPTY_PART, OBJECT, TENSOR, Node, composite_nodes, fqn_of, leaves
from asyncckpt.interop.sources.unread_leaves import unread_leaves
from asyncckpt.loading.byte_ranges import region_of
from asyncckpt.loading.fetch import bytes_of, read_tensor, thread_count
from asyncckpt.loading.read_source import HeldSnapshotReader, ReadSource, check_source, open_source
from asyncckpt.loading.saved_state import (
    SavedObjects,
    SavedTree,
    kind_of,
    per_rank_unavailable,
    refuse_incompatible_shards,
)
from asyncckpt.loading.tensor_writers import new_tensor
from asyncckpt.state_dict.numpy_values import array_of
from asyncckpt.storage.contents import Contents, Inline, SavedTensor, Strided, check_lengths
from asyncckpt.storage.files import Files, opened
from asyncckpt.storage.locate import files_at, with_storage_options
from asyncckpt.storage.reader import DEFAULT_THREADS
from asyncckpt.torch_tensors import check_memory_is_real, torch_dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """A saved tensor: dtype, global shape in elements, bytes, and its name in the shard files."""

    dtype: torch.dtype | str
    shape: tuple[int, ...]
    nbytes: int
    stored_name: str


class OpenCheckpoint:
    """A checkpoint as one rank sees it, with the values that `load` would give that rank. See `open_checkpoint`.

    Manifest and indexes have been read and checked; files are open only during reads. Safe to use from several threads.
    A context manager that closes itself.

    Attributes:
        path: Directory or file of the checkpoint.
        kind: `asyncckpt`; or for other formats `dcp`, `torch`, `safetensors`, `hf`.
        step: The training step that was given to `save`; for other formats the leaf `step`, or -1.
        save_id: ID of the save, as text; zeros for other formats.
        world_size: Number of ranks that saved it; 1 for other formats.
        metadata: The JSON metadata that was given to `save`; for other formats the metadata beside the tensors.
    """

    def __init__(
        self, found: ReadSource, reader: RankInfo, *, allow_pickle: bool = False, held: HeldSnapshotReader | None = None
    ) -> None:
        contents, files = found.contents, found.files
        manifest = contents.manifest
        self.path, self.step, self.world_size = contents.path, manifest.step, manifest.world_size
        self.save_id = str(manifest.save_id)
        self.metadata: dict[str, Any] = dict(manifest.metadata)
        self.kind = contents.kind
        self._contents, self._reader, self._files = contents, reader, files
        self._held, self._has_checksums = held, found.has_checksums
        self._saved = SavedTree(contents, reader)
        self._objects = SavedObjects(contents, files, allow_pickle=allow_pickle)

    def keys(self) -> list[str]:
        """Return the FQNs of all leaves, tensors and objects, in the order of the state dict.

        Leaves that belong to other ranks are left out.
        """
        return list(self._saved.leaves)

    def __contains__(self, fqn: object) -> bool:
        return fqn in self._saved.leaves

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Dtype, shape and size of each tensor by FQN. Reads no tensor data."""
        found = self._saved.leaves.items()
        return {fqn: _info(self._saved.tensors[node[1]]) for fqn, node in found if node[0] == TENSOR}

    @cached_property
    def composites(self) -> Mapping[str, str]:
        """What each tensor is that is stored as its components, by FQN: its class, or its layout or scheme.

        The components are in `tensors`, under the FQN, a dot and the component's name.
        """
        return {fqn_of(path): node[3] for path, node in composite_nodes(self._saved.tree)}

    @cached_property
    def stored_tensors(self) -> Mapping[str, TensorInfo]:
        """The same for every tensor in the shard files, by stored name. Tensors of one rank are named `fqn@rank3`."""
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
            slices: An index: ints, slices with positive steps, `...`, or a tuple of them. None: the whole tensor.
            verify: Whether checksums are compared; False reads only the needed pages.
            threads: Reading threads; None takes 4.
            mmap: Whether to map the file instead of reading it, if the tensor is contiguous in one file: pages are read
                when they are first accessed, and no checksum is compared. Writes to the tensor stay in this process.
                The file must not be truncated while the tensor exists. Any other tensor is read.

        Returns:
            A new tensor on the CPU, of the saved dtype; contiguous unless it is mapped.

        Raises:
            MissingKeysError: There is no tensor of this name.
            LeafTypeMismatchError: It is an object.
            PerRankUnavailableError: It belongs to other ranks; use their stored names. Or it is a component of a
                subclass in a DTensor, and its shards cannot be joined.
            ConfigError: `slices` or `threads` are invalid.
            CorruptCheckpointError: The files differ from what was saved.
            SnapshotUnavailableError: The snapshot is in memory, and its trainer has used the memory for another save;
                or this was closed.
            UnsupportedLeafError: The installed torch lacks the dtype; or FakeTensorMode is active.
            OSError: The files cannot be read.

        Blocks: for the reads.
        """
        count, saved = thread_count(threads), self._found(fqn)
        check_memory_is_real("OpenCheckpoint.tensor")
        self._refuse_incompatible_shards(fqn, saved, slices, verify=verify)
        if mmap:
            region_of(slices, saved.global_shape, fqn)  # for the same errors as when the tensor is read
            mapped = mapped_tensor(self._contents, saved, self._files) if self._held is None else None
            if mapped is not None:
                return mapped if slices is None else mapped[tuple(slices) if isinstance(slices, list) else slices]
        return self._read(saved, slices, threads=count, verify=verify)

    @cached_property
    def objects(self) -> Mapping[str, Any]:
        """The leaves that are not tensors, by FQN. Each is read when it is looked up.

        A lookup raises `CorruptCheckpointError` if the file is damaged, `PerRankUnavailableError` if the object belongs
        to other ranks, `PickledLeafError` if it was pickled, `UnsupportedFormatError` if it is in `unread`.
        """
        found = {fqn: node for fqn, node in self._saved.leaves.items() if node[0] != TENSOR}
        others = frozenset(self._saved.other_ranks_only)
        return _Objects(found, self._object, lambda fqn: self._unavailable(fqn) if fqn in others else None)

    @cached_property
    def unread(self) -> Mapping[str, str]:
        """Objects of another format that cannot be read, since their class is not on the list: FQN to class."""
        return {fqn: found.kind for fqn, found in unread_leaves(self._contents).items()}

    def objects_of(self, rank: int) -> Mapping[str, Any]:
        """Return the objects that one rank saved, including its `PerRank` values.

        Raises:
            ConfigError: There was no such rank.
        """
        if type(rank) is not int or not 0 <= rank < self.world_size:
            raise ConfigError(f"rank={rank!r}: {self.world_size} ranks saved {self.path}", field="rank", value=rank)
        structure = self._contents.ranks[rank].structure
        found = {fqn_of(path): node for path, node in leaves(structure.tree) if node[0] not in (TENSOR, EMPTY_PART)}

        def value(node: Node) -> Any:
            if node[0] == OBJECT:
                return self._objects.value(rank, node[1])
            return self._tensor_as_object(node[0], self._contents.tensors[structure.tensors[node[1]].fqn])

        return _Objects(found, value, lambda fqn: None)

    def _found(self, fqn: str) -> SavedTensor:
        node = self._saved.leaves.get(fqn)
        if node is not None:
            if node[0] not in (TENSOR, ARRAY):
                raise LeafTypeMismatchError(
                    f"{self.path}: {fqn!r} was saved as an object; read it with .objects[{fqn!r}]",
                    path=self.path,
                    fqn=fqn,
                    saved=kind_of(node),
                    wanted="tensor",
                )
            return self._saved.tensors[node[1]]
        if fqn in self._contents.tensors:
            return self._contents.tensors[fqn]
        if fqn in self.composites:
            names = [name for name in self._saved.leaves if name.startswith(f"{fqn}.")]
            raise LeafTypeMismatchError(
                f"{self.path}: {fqn!r} was saved as a {self.composites[fqn]}; read its components "
                f"{', '.join(map(repr, names))}, or load it",
                path=self.path,
                fqn=fqn,
                saved=self.composites[fqn],
                wanted="tensor",
            )
        if fqn in self._saved.other_ranks_only:
            raise self._unavailable(fqn)
        raise MissingKeysError(f"{self.path}: there is no tensor {fqn!r}; see .keys()", path=self.path, keys=[str(fqn)])

    def _refuse_incompatible_shards(self, fqn: str, saved: SavedTensor, slices: Any, *, verify: bool) -> None:
        doubtful = self._saved.doubtful_components
        if saved.fqn not in doubtful or fqn not in self._saved.leaves:  # under a stored name, that of one rank is read
            return
        region = region_of(slices, saved.global_shape, fqn)
        ends = zip(region.counts, region.steps, strict=True)
        box = saved, region.offsets, tuple((count - 1) * step + 1 if count else 0 for count, step in ends)
        with self._reading():
            checked = verify and self._has_checksums
            otherwise = "read what one rank has stored: a range of elements by slices, a component by its stored name"
            refuse_incompatible_shards(
                doubtful, [box], self._reader, self._objects, verify=checked, otherwise=otherwise
            )

    def _unavailable(self, fqn: str) -> PerRankUnavailableError:
        return per_rank_unavailable(self._contents, self._saved, self._reader, [fqn])

    def _object(self, node: Node) -> Any:
        if node[0] == OBJECT:
            return self._objects.value(*self._saved.object_at(node[1]))
        return self._tensor_as_object(node[0], self._saved.tensors[node[1]])

    def _tensor_as_object(self, kind: str, saved: SavedTensor) -> Any:
        """Return the bytes, or the numpy array, that is stored as a tensor."""
        check_memory_is_real("OpenCheckpoint.objects")
        found = self._read(saved, None, threads=DEFAULT_THREADS, verify=True)
        return bytes_of(found) if kind == BYTES else array_of(found)

    def _read(self, saved: SavedTensor, slices: Any, *, threads: int, verify: bool) -> torch.Tensor:
        with self._reading():
            checked = verify and self._has_checksums
            return read_tensor(self._contents, saved, slices, self._files, threads=threads, verify=checked)

    def _reading(self) -> contextlib.AbstractContextManager[None]:
        return self._held.reading() if self._held is not None else contextlib.nullcontext()

    def close(self) -> None:
        """Release the snapshot in the worker's memory, if this reads one. May be called twice."""
        if self._held is not None:
            self._held.close()

    def __enter__(self) -> OpenCheckpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"OpenCheckpoint({self.path!r}, step={self.step}, world_size={self.world_size})"


class _Objects(Mapping[str, Any]):
    """Values by FQN, each decoded when it is looked up."""

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
    storage_options: Mapping[str, str] | None = None,
) -> OpenCheckpoint:
    """Open a checkpoint, to read single tensors and objects of it.

    Args:
        path: The checkpoint, as for `load`.
        rank_info: The rank whose values are given where ranks have different ones; None: this process's.
        allow_pickle: Whether pickled objects are unpickled when they are looked up. DANGER: see `load`.
        source: "disk" opens the committed checkpoint. "auto" does too; if none is committed, it opens the newest
            snapshot for `path` that all ranks have staged and that this node's worker holds. The worker keeps it until
            this is closed. "memory" opens such a snapshot only.
        storage_options: Options of the object store that a URL leads to, by obstore's names; their values are never
            shown. None: those of the environment.

    Returns:
        The open checkpoint.

    Raises:
        SnapshotUnavailableError: `source="memory"`, and no worker holds the whole snapshot.
        CheckpointNotFoundError: There is nothing at `path`.
        CheckpointNotCommittedError: A save to `path` began and was never committed.
        CorruptCheckpointError: The manifest or an index is damaged; or elements of a tensor are missing or duplicate.
        UnsupportedFormatError: Written by a newer version.
        UnsupportedPathError: `path` is not a path, or a URL whose store cannot be used.
        ConfigError: The rank is not below its world size; or RANK or WORLD_SIZE is not a number.
        OSError: The files cannot be read.

    Blocks: for reading the indexes.
    """
    reader, where = find_rank_info(rank_info), check_source(source)
    directory = checkpoint_path(path)
    with with_storage_options(storage_options):
        files = files_at(directory)
    found, held = open_source(directory, where, None, files)
    return OpenCheckpoint(found, reader, allow_pickle=allow_pickle, held=held)


def mapped_tensor(contents: Contents, saved: SavedTensor, files: Files) -> torch.Tensor | None:
    """Return a saved tensor as a private mapping of its file: pages are read when they are first accessed.

    The mapping is copy on write: writes to the tensor stay in this process. The file must not be truncated while the
    tensor exists. asyncckpt never truncates a checkpoint's files; it deletes them, which a mapping survives.

    Returns:
        None if the tensor is not contiguous in one file, or not aligned there.

    Raises:
        CorruptCheckpointError: The file is missing or too short.
        UnsupportedLeafError: The installed torch lacks the dtype.
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
