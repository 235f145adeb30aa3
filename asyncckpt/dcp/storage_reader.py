"""`StorageReader`: stock `dcp.load` reads whatever `asyncckpt.load` reads, resharding as it needs."""

from __future__ import annotations

import dataclasses
import io
import os
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as TorchStorageReader
from torch.futures import Future

from asyncckpt.basics.paths import absolute_path, is_local_path
from asyncckpt.config import RankInfo, check_keywords
from asyncckpt.dcp.saved_metadata import CheckpointMetadata
from asyncckpt.dcp.write_plan import check_target
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
from asyncckpt.storage.read_plan import Wanted
from asyncckpt.torch_tensors import check_memory_is_real


class _Slice(io.RawIOBase):
    """Reads `nbytes` from `offset` on of another stream, whose position it moves and which it never closes."""

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
            raise ValueError(f"position {start + offset} lies before the slice")
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at


class SlicedBufferedReader(io.BufferedReader):
    """A range of a binary stream, read as if there were nothing else: its positions count from the range's start.

    The stream stays open when this is closed. Several may share a stream, though not from several threads.

    Args:
        base_stream: Readable and seekable.
        offset: Where the range begins, in bytes.
        len: How long it is, in bytes.

    Raises:
        ValueError: A negative offset or length.
    """

    def __init__(self, base_stream: Any, offset: int, len: int) -> None:
        if offset < 0 or len < 0:
            raise ValueError(f"bytes {offset} to {offset + len} are no range of a file")
        super().__init__(_Slice(base_stream, offset, len))


@dataclass(frozen=True, slots=True)
class SaveRead:
    """What tells the save that one rank has found at its path.

    Attributes:
        path: Where it is. Ranks that are given different paths are to load different checkpoints.
        save: Of ours the save id; of other formats what their files say of their content.
        machine: On which alone `stamps` can be compared: each node may have a copy of its own.
        stamps: Of the files, where nothing in them names the save; else empty.
    """

    path: str
    save: str
    machine: str
    stamps: str = ""

    def differs(self, other: SaveRead) -> bool:
        """Whether the two are of different saves, of which one took the place of the other."""
        if self.path != other.path:
            return False
        return self.save != other.save or (self.machine == other.machine and self.stamps != other.stamps)


@dataclass(frozen=True, slots=True)
class OwnSave:
    """With the plan of a rank: its load, and what it has found. A plan that a planner kept is of an earlier load."""

    load_id: str
    found: SaveRead


@dataclass(frozen=True, slots=True)
class Coordinators:
    """With a plan that no longer says whose it was: what the coordinator has found."""

    found: SaveRead


def found_in(contents: Contents, files: Files) -> SaveRead:
    """Return what tells the save whose structure was read; of the same files the same in every process.

    Raises:
        CorruptCheckpointError: It was overwritten since.
        OSError: It cannot be read.
    """
    source, path, here = contents.source, contents.path, machine()
    if source is None:
        return SaveRead(path, str(contents.manifest.save_id), here)
    stamps = repr(sorted((name, stamp[1:]) for name, stamp in source.stamps.items()))  # one mount's device is its own
    if source.kind == "dcp":
        data = read_small_file(files, os.path.join(source.directory, DCP_METADATA_NAME), MAX_NBYTES)
        source.check_unchanged(files, [DCP_METADATA_NAME])
        return SaveRead(path, f".metadata of {file_checksum(data)}", here, "" if source.names_save else stamps)
    said, is_summed = [repr((list(contents.tensors.values()), source.metadata))], bool(source.archives)
    for name, offset, length in source.archives:
        try:
            with opened(files, os.path.join(source.directory, name), os.O_RDONLY) as fd:
                entries = read_directory(read_exactly(files, fd, length, offset), length)
        except ValueError as error:
            raise corrupt(path, name, f"it was changed while it was read: {error}") from error
        said.append(repr(sorted(entries.values())))  # with a CRC-32 of each tensor, and of the pickle of all else
        is_summed = is_summed and any(entry.crc for entry in entries.values())
    if not is_summed:
        said += [repr(_settled(raw)) for raw in source.objects]
    content = file_checksum("\n".join(said).encode("utf-8", "surrogatepass"))
    return SaveRead(path, f"content of {content}", here, stamps)


def _settled(raw: Any) -> Any:
    """Return the JSON form of a leaf without what depends on this process: where its sets begin, and end."""
    if isinstance(raw, UnreadLeaf):  # of what is in a set it names what it met first
        return "not read"
    if isinstance(raw, list):
        return [_settled(value) for value in raw]
    if not isinstance(raw, dict):
        return raw
    settled = {key: _settled(value) for key, value in raw.items()}
    if settled.get("$") in ("set", "frozenset"):
        settled["v"] = sorted(settled["v"], key=repr)
    return settled


def compare_saves(plans: Sequence[LoadPlan], load_id: str, mine: SaveRead) -> list[LoadPlan]:
    """Hold what the ranks have found against each other; on the coordinator.

    Args:
        plans: Of all ranks, as the planner has left them.
        load_id, mine: The coordinator's own.

    Returns:
        The plans for the ranks.

    Raises:
        RanksDisagreeError: They have found different saves.
    """
    if len(plans) == 1:
        return list(plans)
    told = [plan.storage_data if isinstance(plan.storage_data, OwnSave) else None for plan in plans]
    if not any(own is not None and own.load_id == load_id for own in told):
        told = [None] * len(plans)  # the planner made these plans, or keeps them from an earlier load
    coordinator = next((rank for rank, own in enumerate(told) if own is not None and own.load_id == load_id), 0)
    for rank, own in enumerate(told):
        if own is not None and own.found.differs(mine):
            raise _disagree(mine, own.found, sorted([coordinator, rank]))
    return [
        plan if own is not None else dataclasses.replace(plan, storage_data=Coordinators(mine))
        for plan, own in zip(plans, told, strict=True)
    ]


def check_same_save(plan: LoadPlan, mine: SaveRead) -> None:
    """Hold what this rank has found against what the coordinator has, if nobody has done so.

    Raises:
        RanksDisagreeError: They have found different saves.
    """
    if isinstance(plan.storage_data, Coordinators) and plan.storage_data.found.differs(mine):
        raise _disagree(plan.storage_data.found, mine, None)


def _disagree(one: SaveRead, other: SaveRead, ranks: list[int] | None) -> RanksDisagreeError:
    saves = sorted({one.save, other.save})
    detail = f"saves {saves[0]} and {saves[1]}" if len(saves) > 1 else "files of different times"
    return RanksDisagreeError(
        f"{one.path} was overwritten while the ranks began to load it: they have found {detail}",
        detail=detail,
        path=one.path,
        ranks=ranks,
    )


BATCH_NBYTES = 512 << 20
"""What is resolved, read and handed over at once: a planner may make room for each piece. Chosen, not measured."""


class StorageReader(TorchStorageReader):
    """Reads with stock `torch.distributed.checkpoint`: whatever asyncckpt has committed, in any arrangement.

    Other formats that `asyncckpt.load` takes too: DCP directories, `torch.save` files, safetensors, Hugging Face.

    Only the blocks that are needed are read, each once, in the files' order, by several threads, and verified (as far
    as the format allows) before any of their bytes is handed on. Leaves that are no tensors are given to the planner as
    `torch.save` has them, which stock planners unpickle. DANGER: those that a planner made and that have no typed form
    are given as they are, so unpickling them runs what they say, as with any checkpoint of stock torch.

    Ranks that load together from one path load one save, or none: if it was overwritten between their first looks at
    it, that is `RanksDisagreeError` on all of them. DANGER: files of safetensors, and DCP directories that `convert`
    wrote, say nothing of their values, so ranks on different machines cannot tell two of the same names and shapes.

    Args:
        path: The checkpoint's directory, or file; `checkpoint_id` of `dcp.load` takes its place.
        threads: Reading threads; None takes 4.
        verify: False checks no checksum.
        allow_pickle: Unpickles leaves that AsyncCheckpointer pickled. DANGER: as for `asyncckpt.load`.
        rank_info: Whose values to give where ranks have their own; None: this process's.

    Raises:
        ConfigError: Threads that are no positive integer, or another keyword.
        UnsupportedPathError: A URL, or no path at all.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        threads: int | None = None,
        verify: bool = True,
        allow_pickle: bool = False,
        rank_info: RankInfo | None = None,
        **unknown: Any,
    ) -> None:
        check_keywords(StorageReader, unknown)
        super().__init__()
        self.path = absolute_path(path)
        self._threads, self._verify, self._allow_pickle = thread_count(threads), verify, allow_pickle
        self._rank_info = rank_info
        self._files = Files()
        self._begin()

    def _begin(self) -> None:
        self.load_id = uuid.uuid4().hex
        self._described: CheckpointMetadata | None = None
        self._found: SaveRead | None = None
        self._failure: Exception | None = None

    @property
    def checkpoint_id(self) -> str:
        """Where the checkpoint lies."""
        return self.path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin anew, at `checkpoint_id` if one is given.

        Raises:
            UnsupportedPathError: A URL, or no path at all.
        """
        if checkpoint_id is not None:
            self.path = absolute_path(checkpoint_id)
        self._begin()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the checkpoint's metadata, built from its indexes.

        Raises:
            CheckpointNotFoundError, CheckpointNotCommittedError: There is none.
            CorruptCheckpointError: Manifest or an index is damaged, or a tensor is not there exactly once.
            UnsupportedFormatError: Written by a newer version.
            OSError: It cannot be read.
        """
        if "rank" in kwargs and self._failure is not None:
            # `dcp.load` has swallowed the error and looks for a rank's own metadata, of which there is none here.
            # IMPORTANT: an error here, and it would raise an AssertionError instead: `set_up_storage_reader` says it.
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
            AsyncCkptError, OSError: Why `read_metadata` failed.
        """
        if self._failure is not None:
            raise self._failure
        if self._described is None:
            self._read_described()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan, with which save it was made for."""
        if self._found is None:
            return plan
        return dataclasses.replace(plan, storage_data=OwnSave(self.load_id, self._found))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans, if they are for one save.

        Raises:
            RanksDisagreeError: The checkpoint was overwritten after some ranks had read what it holds, and before
                others had. Nothing was changed on any rank.
        """
        return compare_saves(plans, self.load_id, self._found) if self._found is not None else plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what `plan` names into what the planner resolves.

        Raises:
            CorruptCheckpointError: The files differ from what was saved.
            MissingKeysError, LeafTypeMismatchError, ShapeMismatchError: The plan does not fit the checkpoint.
            PickledLeafError: A leaf was pickled by AsyncCheckpointer, and may not be unpickled.
            UnsupportedLeafError: A target is a tensor subclass whose elements do not lie in its memory.
            RanksDisagreeError: The coordinator has found another save, and a planner of its own plans kept it from
                telling before.
            OSError: The files cannot be read.
            Exception: Whatever the planner raises.

        Blocks: for the reads.
        """
        check_memory_is_real("dcp.load")
        described = self._described if self._described is not None else self._read_described()
        if self._found is not None:
            check_same_save(plan, self._found)
        tensors = []
        for item in plan.items:
            if item.type is not LoadItemType.BYTE_IO and isinstance(planner, DefaultLoadPlanner):
                check_target(self.path, item, planner.lookup_tensor(item.dest_index))
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, described.leaf_bytes(item.storage_index.fqn))
            else:
                tensors.append((item, *self._located(described, item)))
        for saved in {saved.fqn: saved for _, saved, _ in tensors}.values():
            check_lengths(described.contents, self._files, saved)
        for batch in _batches(tensors):
            self._read(described, planner, batch)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _located(self, described: CheckpointMetadata, item: ReadItem) -> tuple[SavedTensor, tuple[int, ...]]:
        """Return the tensor that an item reads, and where in it the item's box begins."""
        fqn, offset = item.storage_index.fqn, item.storage_index.offset
        saved = described.tensor(fqn)
        if saved is None:
            raise LeafTypeMismatchError(
                f"{self.path}: {fqn!r} was saved as an object", path=self.path, fqn=fqn, saved="object", wanted="tensor"
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
                f"{self.path}: tensor {fqn!r}: offsets {list(offsets)} and lengths {list(lengths)} lie outside the "
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
        """Whether it is a path of this machine's file systems."""
        return is_local_path(checkpoint_id)


_Located = tuple[ReadItem, SavedTensor, tuple[int, ...]]


def _batches(items: Sequence[_Located]) -> Iterator[list[_Located]]:
    """Cut into batches of about `BATCH_NBYTES`, in the order in which the bytes lie in the files."""

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
