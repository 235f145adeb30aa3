"""Whether the ranks of a `dcp.load` read one save: each reads the metadata itself, before another rank or after.

What a rank has found goes with its plan to the coordinator, which compares before anything is read. Where a planner has
put other plans in the place of the ranks', the coordinator's goes to the ranks instead, and each compares for itself.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.planner import LoadPlan

from asyncckpt.distributed.process_group import machine
from asyncckpt.errors import RanksDisagreeError
from asyncckpt.format.checksums import file_checksum
from asyncckpt.format.names import DCP_METADATA_NAME
from asyncckpt.interop.sources.source import read_exactly
from asyncckpt.interop.sources.torch_file import read_directory
from asyncckpt.interop.sources.unpickler import MAX_NBYTES
from asyncckpt.storage.contents import Contents, corrupt
from asyncckpt.storage.files import Files, opened, read_small_file
from asyncckpt.storage.unread import Unread


@dataclass(frozen=True, slots=True)
class Found:
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

    def differs(self, other: Found) -> bool:
        """Whether the two are of different saves, of which one took the place of the other."""
        if self.path != other.path:
            return False
        return self.save != other.save or (self.machine == other.machine and self.stamps != other.stamps)


@dataclass(frozen=True, slots=True)
class Own:
    """With the plan of a rank: its load, and what it has found. A plan that a planner kept is of an earlier load."""

    load_id: str
    found: Found


@dataclass(frozen=True, slots=True)
class Coordinators:
    """With a plan that no longer says whose it was: what the coordinator has found."""

    found: Found


def found_in(contents: Contents, files: Files) -> Found:
    """Return what tells the save whose structure was read; of the same files the same in every process.

    Raises:
        CorruptCheckpointError: It was overwritten since.
        OSError: It cannot be read.
    """
    source, path, here = contents.source, contents.path, machine()
    if source is None:
        return Found(path, str(contents.manifest.save_id), here)
    stamps = repr(sorted((name, stamp[1:]) for name, stamp in source.stamps.items()))  # one mount's device is its own
    if source.kind == "dcp":
        data = read_small_file(files, os.path.join(source.directory, DCP_METADATA_NAME), MAX_NBYTES)
        source.check_unchanged(files, [DCP_METADATA_NAME])
        return Found(path, f".metadata of {file_checksum(data)}", here, "" if source.names_save else stamps)
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
    return Found(path, f"content of {content}", here, stamps)


def _settled(raw: Any) -> Any:
    """Return the JSON form of a leaf without what depends on this process: where its sets begin, and end."""
    if isinstance(raw, Unread):  # of what is in a set it names what it met first
        return "not read"
    if isinstance(raw, list):
        return [_settled(value) for value in raw]
    if not isinstance(raw, dict):
        return raw
    settled = {key: _settled(value) for key, value in raw.items()}
    if settled.get("$") in ("set", "frozenset"):
        settled["v"] = sorted(settled["v"], key=repr)
    return settled


def compared(plans: Sequence[LoadPlan], load_id: str, mine: Found) -> list[LoadPlan]:
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
    told = [plan.storage_data if isinstance(plan.storage_data, Own) else None for plan in plans]
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


def check(plan: LoadPlan, mine: Found) -> None:
    """Hold what this rank has found against what the coordinator has, if nobody has done so.

    Raises:
        RanksDisagreeError: They have found different saves.
    """
    if isinstance(plan.storage_data, Coordinators) and plan.storage_data.found.differs(mine):
        raise _disagree(plan.storage_data.found, mine, None)


def _disagree(one: Found, other: Found, ranks: list[int] | None) -> RanksDisagreeError:
    saves = sorted({one.save, other.save})
    detail = f"saves {saves[0]} and {saves[1]}" if len(saves) > 1 else "files of different times"
    return RanksDisagreeError(
        f"{one.path} was overwritten while the ranks began to load it: they have found {detail}",
        detail=detail,
        path=one.path,
        ranks=ranks,
    )
