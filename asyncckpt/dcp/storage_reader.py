"""`StorageReader`: stock `dcp.load` reads every format that `asyncckpt.load` reads, into any sharding."""

from __future__ import annotations

import dataclasses
import io
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as TorchStorageReader
from torch.futures import Future

from asyncckpt.basics.paths import checkpoint_path, is_checkpoint_path
from asyncckpt.basics.storage_options import StorageOptions
from asyncckpt.config import RankInfo, check_keywords
from asyncckpt.dcp.saved_metadata import CheckpointMetadata
from asyncckpt.dcp.write_plan import check_object_target, check_target, leaves_of
from asyncckpt.distributed.process_group import find_rank_info, machine
from asyncckpt.dtypes import DTYPES
from asyncckpt.errors import LeafTypeMismatchError, MissingKeysError, RanksDisagreeError, ShapeMismatchError
from asyncckpt.format.checksums import file_checksum
from asyncckpt.format.names import DCP_METADATA_NAME
from asyncckpt.interop.sources.source import read_exactly
from asyncckpt.interop.sources.torch_file import read_directory
from asyncckpt.interop.sources.unpickler import MAX_NBYTES
from asyncckpt.interop.sources.unread_leaves import UnreadLeaf
from asyncckpt.loading.byte_ranges import Placement, ranges_of
from asyncckpt.loading.fetch import read_ranges, thread_count
from asyncckpt.loading.read_source import read_consistent
from asyncckpt.loading.target_tensors import refuse_without_memory
from asyncckpt.storage.contents import Contents, SavedTensor, check_lengths, corrupt
from asyncckpt.storage.files import Files, opened, read_small_file
from asyncckpt.storage.locate import files_at, with_storage_options
from asyncckpt.storage.read_plan import Wanted
from asyncckpt.torch_tensors import check_memory_is_real


class _Slice(io.RawIOBase):
    """Reads `nbytes` bytes at `offset` of another stream, whose position it changes and which it never closes."""

    def __init__(self, stream: Any, offset: int, nbytes: int) -> None:
        self._stream, self._offset, self._nbytes, self._at = stream, offset, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        with memoryview(buffer).cast("B") as whole, whole[: max(0, self._nbytes - self._at)] as view:
            self._stream.seek(self._offset + self._at)
            count = self._stream.readinto(view) if len(view) else 0
        self._at += count or 0
        return count or 0

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}[whence]
        if start + offset < 0:
            raise ValueError(f"position {start + offset} is before the slice")
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at


class SlicedBufferedReader(io.BufferedReader):
    """Read a range of a binary stream as a stream of its own, whose positions begin at 0.

    Closing it does not close the base stream. Several readers may share a stream in one thread.

    Args:
        base_stream: A readable and seekable binary stream.
        offset: Offset of the range in bytes.
        len: Length of the range in bytes.

    Raises:
        ValueError: `offset` or `len` is negative.
    """

    def __init__(self, base_stream: Any, offset: int, len: int) -> None:
        if offset < 0 or len < 0:
            raise ValueError(f"offset={offset}, len={len} is no range of a stream: expected numbers from 0 on")
        super().__init__(_Slice(base_stream, offset, len))


@dataclass(frozen=True, slots=True)
class FoundSave:
    """Identifies the save that one rank has found at its path.

    Attributes:
        path: The path. Ranks with different paths load different checkpoints on purpose.
        save: The save ID of an asyncckpt checkpoint; for other formats a checksum of the structure and, if the files
            have checksums, of the content.
        machine: ID of the machine. `stamps` are compared only between ranks of one machine: each may have its own copy.
        stamps: Lengths and times of the files, if nothing in them identifies the save; else empty.
    """

    path: str
    save: str
    machine: str
    stamps: str = ""

    def differs(self, other: FoundSave) -> bool:
        """Whether the two are different saves at one path, so that one has replaced the other."""
        if self.path != other.path:
            return False
        return self.save != other.save or (self.machine == other.machine and self.stamps != other.stamps)


@dataclass(frozen=True, slots=True)
class OwnSave:
    """Added to the plan of a rank: the ID of its load and the save that it has found.

    A planner that caches plans returns a plan with the ID of an earlier load.
    """

    load_id: str
    found: FoundSave


@dataclass(frozen=True, slots=True)
class CoordinatorSave:
    """Added to a plan without a valid `OwnSave`: the save that the coordinator has found."""

    found: FoundSave


def found_in(contents: Contents, files: Files) -> FoundSave:
    """Return what identifies the save whose structure was read; for the same files it is equal in every process.

    Raises:
        CorruptCheckpointError: The files were overwritten since the structure was read.
        OSError: A file cannot be read.
    """
    source, path, here = contents.source, contents.path, machine()
    if source is None:
        return FoundSave(path, str(contents.manifest.save_id), here)
    stamps = repr(sorted((name, stamp[1:]) for name, stamp in source.stamps.items()))  # device numbers differ by mount
    if source.kind == "dcp":
        data = read_small_file(files, os.path.join(source.directory, DCP_METADATA_NAME), MAX_NBYTES)
        source.check_unchanged(files, [DCP_METADATA_NAME])
        return FoundSave(path, f".metadata of {file_checksum(data)}", here, "" if source.names_save else stamps)
    said, is_summed = [repr((list(contents.tensors.values()), source.metadata))], bool(source.archives)
    for name, offset, length in source.archives:
        try:
            with opened(files, os.path.join(source.directory, name), os.O_RDONLY) as fd:
                entries = read_directory(read_exactly(files, fd, length, offset), length)
        except ValueError as error:
            raise corrupt(path, name, f"it was changed while it was read: {error}") from error
        said.append(repr(sorted(entries.values())))  # has the CRC-32 of each tensor and of the pickle
        is_summed = is_summed and any(entry.crc for entry in entries.values())
    if not is_summed:
        said += [repr(_normalized(raw)) for raw in source.objects]
    content = file_checksum("\n".join(said).encode("utf-8", "surrogatepass"))
    return FoundSave(path, f"content of {content}", here, stamps)


def _normalized(raw: Any) -> Any:
    """Return the JSON form of a leaf with the members of sets sorted: their order differs between processes."""
    if isinstance(raw, UnreadLeaf):  # it describes the first member of a set
        return "not read"
    if isinstance(raw, list):
        return [_normalized(value) for value in raw]
    if not isinstance(raw, dict):
        return raw
    normalized = {key: _normalized(value) for key, value in raw.items()}
    if normalized.get("$") in ("set", "frozenset"):
        normalized["v"] = sorted(normalized["v"], key=repr)
    return normalized


def compare_saves(plans: Sequence[LoadPlan], load_id: str, mine: FoundSave) -> list[LoadPlan]:
    """Compare the saves that the ranks have found. Called on the coordinator.

    Args:
        plans: The plans of all ranks, after the planner's global step.
        load_id: ID of the coordinator's load.
        mine: The save that the coordinator has found.

    Returns:
        The plans for the ranks.

    Raises:
        RanksDisagreeError: The ranks have found different saves.
    """
    if len(plans) == 1:
        return list(plans)
    told = [plan.storage_data if isinstance(plan.storage_data, OwnSave) else None for plan in plans]
    if not any(own is not None and own.load_id == load_id for own in told):
        told = [None] * len(plans)  # the planner has created new plans, or cached those of an earlier load
    coordinator = next((rank for rank, own in enumerate(told) if own is not None and own.load_id == load_id), 0)
    for rank, own in enumerate(told):
        if own is not None and own.found.differs(mine):
            raise _disagree(mine, own.found, sorted([coordinator, rank]))
    return [
        plan if own is not None else dataclasses.replace(plan, storage_data=CoordinatorSave(mine))
        for plan, own in zip(plans, told, strict=True)
    ]


def check_same_save(plan: LoadPlan, mine: FoundSave) -> None:
    """Compare the save that this rank has found with the coordinator's, unless `compare_saves` has done it.

    Raises:
        RanksDisagreeError: They are different saves.
    """
    if isinstance(plan.storage_data, CoordinatorSave) and plan.storage_data.found.differs(mine):
        raise _disagree(plan.storage_data.found, mine, None)


def _disagree(one: FoundSave, other: FoundSave, ranks: list[int] | None) -> RanksDisagreeError:
    saves = sorted({one.save, other.save})
    detail = f"saves {saves[0]} and {saves[1]}" if len(saves) > 1 else "files of different times"
    return RanksDisagreeError(
        f"{one.path} was overwritten while the ranks began to load it: they found {detail}; nothing was changed. Load "
        "again",
        detail=detail,
        path=one.path,
        ranks=ranks,
    )


BATCH_NBYTES = 512 << 20
"""Bytes that are resolved, read and committed in one batch: a planner may allocate memory for each item. Chosen, not
measured."""


class StorageReader(TorchStorageReader):
    """Read committed checkpoints with stock `torch.distributed.checkpoint.load`, into any sharding.

    Reads all formats of `asyncckpt.load`: asyncckpt checkpoints, DCP directories, files of `torch.save`, safetensors
    files, Hugging Face directories.

    Only the needed blocks are read, each once, by several threads. They are verified, if the format has checksums,
    before any of their bytes is used. Leaves that are no tensors are given to the planner in the form of `torch.save`,
    which stock planners unpickle. DANGER: a leaf that a planner has pickled and that has no typed form is returned
    unchanged. Unpickling it runs code that it names, as with any checkpoint of stock torch.

    If the checkpoint is overwritten while the ranks begin to load it, they may find different saves; then all of them
    raise `RanksDisagreeError`. DANGER: safetensors files, and DCP directories that `convert` wrote, have no checksums.
    Ranks on different machines do not notice if two such saves have the same names and shapes.

    Args:
        path: The checkpoint: a directory, file or URL. The `checkpoint_id` of `dcp.load` takes precedence.
        threads: Number of reading threads; None takes 4.
        verify: Whether checksums are verified.
        allow_pickle: Unpickle leaves that AsyncCheckpointer pickled. DANGER: see `asyncckpt.load`.
        rank_info: The rank whose `PerRank` values are read; None: that of this process.
        storage_options: As for `asyncckpt.load`.

    Raises:
        ConfigError: `threads` is no positive integer, an unknown keyword was given, or the store does not take the
            options.
        UnsupportedPathError: `path` is not a path, or a URL of no object store.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        threads: int | None = None,
        verify: bool = True,
        allow_pickle: bool = False,
        rank_info: RankInfo | None = None,
        storage_options: Mapping[str, str] | None = None,
        **unknown: Any,
    ) -> None:
        check_keywords(StorageReader, unknown)
        super().__init__()
        self._storage_options = StorageOptions(storage_options)
        self._threads, self._verify, self._allow_pickle = thread_count(threads), verify, allow_pickle
        self._rank_info = rank_info
        self._take(path)
        self._begin()

    def _take(self, path: str | os.PathLike[str]) -> None:
        self.path = checkpoint_path(path)
        with with_storage_options(self._storage_options):
            self._files = files_at(self.path)

    def _begin(self) -> None:
        self.load_id = uuid.uuid4().hex
        self._described: CheckpointMetadata | None = None
        self._found: FoundSave | None = None
        self._failure: Exception | None = None

    @property
    def checkpoint_id(self) -> str:
        """Path of the checkpoint."""
        return self.path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare for another load, of `checkpoint_id` if one is given.

        Raises:
            UnsupportedPathError: `checkpoint_id` is not a path, or a URL of no object store.
        """
        if checkpoint_id is not None:
            self._take(checkpoint_id)
        self._begin()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the checkpoint's metadata, built from its indexes.

        Raises:
            CheckpointNotFoundError, CheckpointNotCommittedError: There is no committed checkpoint.
            CorruptCheckpointError: The manifest or an index is damaged, or an element is not stored exactly once.
            UnsupportedFormatError: The checkpoint has a newer version or no known format.
            OSError: A file cannot be read.
        """
        if "rank" in kwargs and self._failure is not None:
            # `dcp.load` has ignored the first error and asks for metadata of this rank alone, which do not exist.
            # IMPORTANT: do not raise here: `dcp.load` would raise an AssertionError without the cause.
            # `set_up_storage_reader` raises the first error.
            return Metadata({})
        self._begin()
        try:
            return self._read_described().metadata(self.load_id)
        except Exception as error:
            self._failure = error
            raise

    def _read_described(self) -> CheckpointMetadata:
        reader = find_rank_info(self._rank_info)
        options: Any = {"threads": self._threads, "verify": self._verify, "allow_pickle": self._allow_pickle}
        described, self._found = read_consistent(
            self.path,
            self._files,
            lambda contents: (
                CheckpointMetadata(contents, reader, self._files, **options),
                found_in(contents, self._files),
            ),
        )
        self._described = described
        return described

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a load.

        Raises:
            AsyncCkptError, OSError: The error of `read_metadata`.
        """
        if self._failure is not None:
            raise self._failure
        if self._described is None:
            self._read_described()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan; it holds the save that this rank has found."""
        if self._found is None:
            return plan
        return dataclasses.replace(plan, storage_data=OwnSave(self.load_id, self._found))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans, after a check that all ranks have found the same save.

        Raises:
            RanksDisagreeError: The checkpoint was overwritten after some ranks had read its structure and before others
                had. Nothing was changed on any rank.
        """
        return compare_saves(plans, self.load_id, self._found) if self._found is not None else plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors and leaves that the planner resolves for `plan`.

        Returns:
            A completed future.

        Raises:
            CorruptCheckpointError: Stored bytes differ from those that were saved.
            MissingKeysError, LeafTypeMismatchError, ShapeMismatchError: The plan does not match the checkpoint.
            PerRankUnavailableError: Shards of a subclass in a DTensor cannot be joined.
            PickledLeafError: AsyncCheckpointer pickled a leaf, and unpickling is not allowed.
            UnsupportedLeafError: A target is a tensor subclass whose elements are not in its memory.
            RanksDisagreeError: The coordinator has found another save; found out only now if the planner creates or
                caches plans itself.
            OSError: A file cannot be read.
            Exception: An error of the planner.

        Blocks: until everything is read.
        """
        check_memory_is_real("dcp.load")
        described = self._described if self._described is not None else self._read_described()
        if self._found is not None:
            check_same_save(plan, self._found)
        default: Any = planner
        named = leaves_of(default)
        for item in plan.items:
            if item.dest_index.fqn not in named:
                continue  # only the planner knows the target; `_read` checks it
            if item.type is LoadItemType.BYTE_IO:
                target, fqn = named[item.dest_index.fqn], item.storage_index.fqn
                check_object_target(self.path, item, target)
                if isinstance(target, torch.Tensor) and described.is_container(fqn):  # a dict would take its place
                    raise LeafTypeMismatchError(
                        f"{self.path}: {fqn!r} was saved as a container, the target has a tensor there; nothing was "
                        "changed",
                        path=self.path,
                        fqn=fqn,
                        saved="container",
                        wanted="tensor",
                    )
            else:
                check_target(self.path, item, default.lookup_tensor(item.dest_index))
        tensors = [(i, *self._located(described, i)) for i in plan.items if i.type is not LoadItemType.BYTE_IO]
        described.refuse_incompatible_shards(
            [(saved, offsets, tuple(item.lengths)) for item, saved, offsets in tensors]
        )
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, described.leaf_bytes(item.storage_index.fqn))
        for saved in {saved.fqn: saved for _, saved, _ in tensors}.values():
            check_lengths(described.contents, self._files, saved)
        for batch in _batches(tensors):
            self._read(described, planner, batch)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _located(self, described: CheckpointMetadata, item: ReadItem) -> tuple[SavedTensor, tuple[int, ...]]:
        """Return the tensor that an item reads, and the offsets of the item's box in it."""
        fqn, offset = item.storage_index.fqn, item.storage_index.offset
        saved = described.tensor(fqn)
        if saved is None:
            raise LeafTypeMismatchError(
                f"{self.path}: {fqn!r} was saved as an object, but the plan reads a tensor",
                path=self.path,
                fqn=fqn,
                saved="object",
                wanted="tensor",
            )
        start = tuple(offset) if offset is not None else (0,) * len(saved.global_shape)
        found = described.chunk_at(saved, start)
        if found is None:
            raise MissingKeysError(
                f"{self.path}: tensor {fqn!r} has no chunk at {list(start)}", path=self.path, keys=[fqn]
            )
        sizes, offsets, lengths = found[1].sizes, tuple(item.storage_offsets), tuple(item.lengths)
        if not len(offsets) == len(lengths) == len(sizes) or any(
            o < 0 or n < 0 or o + n > size for o, n, size in zip(offsets, lengths, sizes, strict=True)
        ):
            raise ShapeMismatchError(
                f"{self.path}: tensor {fqn!r}: offsets {list(offsets)} and lengths {list(lengths)} are outside the "
                f"chunk at {list(start)} of sizes {list(sizes)}",
                path=self.path,
                fqn=fqn,
                saved=list(sizes),
                wanted=list(lengths),
            )
        return saved, tuple(s + o for s, o in zip(start, offsets, strict=True))

    def _read(self, described: CheckpointMetadata, planner: LoadPlanner, batch: Sequence[_Located]) -> None:
        ranges: list[tuple[tuple[int, int], Wanted]] = []
        targets = []
        for item, saved, offsets in batch:
            target = planner.resolve_tensor(item)
            refuse_without_memory([(item.dest_index.fqn, target)], self.path)
            check_target(self.path, item, target)
            target = target.detach()
            if tuple(target.shape) != tuple(item.lengths):
                raise ShapeMismatchError(
                    f"{self.path}: tensor {saved.fqn!r}: the planner resolves a read of lengths {list(item.lengths)} "
                    f"to a tensor of shape {list(target.shape)}",
                    path=self.path,
                    fqn=saved.fqn,
                    saved=list(item.lengths),
                    wanted=list(target.shape),
                )
            targets.append((item, target))
            if target.numel():
                ranges += ranges_of(described.contents, Placement(saved, target, offsets), self._verify)
        read_ranges(described.contents, ranges, self._files, threads=self._threads, verify=self._verify)
        for item, target in targets:
            planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether `checkpoint_id` is a local path, or the URL of an object store."""
        return is_checkpoint_path(checkpoint_id)


_Located = tuple[ReadItem, SavedTensor, tuple[int, ...]]


def _batches(items: Sequence[_Located]) -> Iterator[list[_Located]]:
    """Cut the items into batches of about `BATCH_NBYTES`, in the order of their bytes in the files."""

    def place(located: _Located) -> Any:
        _, saved, offsets = located
        rank, chunk = (
            min(saved.chunks, key=lambda c: (c[0], c[1].part, c[1].offset_bytes)) if saved.chunks else (0, None)
        )
        return rank, chunk.part if chunk else 0, chunk.offset_bytes if chunk else 0, offsets

    batch: list[_Located] = []
    nbytes = 0
    for located in sorted(items, key=place):
        batch.append(located)
        nbytes += torch.Size(located[0].lengths).numel() * DTYPES[located[1].dtype].itemsize
        if nbytes >= BATCH_NBYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch
