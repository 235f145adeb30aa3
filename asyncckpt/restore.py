"""`asyncckpt.restore_latest`: the newest checkpoint that verifies, the same on all ranks.

The checkpoints are tried from the newest to older ones. A target is filled as the bytes are read, so what a broken
checkpoint has filled must be filled again by the one that is used: a name that this one lacks is an error, not a value
of another step. In the good case this costs nothing; `low_memory=False` verifies all that this rank reads before the
target changes, for a second copy of the state in memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncckpt.basics.paths import absolute_path
from asyncckpt.config import RankInfo
from asyncckpt.distributed.checkpoint_vote import Broken, Ranks, ranks_that_restore
from asyncckpt.distributed.process_group import find_rank_info
from asyncckpt.distributed.rendezvous import Meeting
from asyncckpt.errors import ConfigError, NoSoundCheckpointError
from asyncckpt.loading.load import DefaultReader
from asyncckpt.loading.read_source import RetryState, check_source
from asyncckpt.maintenance.quarantine import quarantine_checkpoint
from asyncckpt.recall.newest import merged_candidates
from asyncckpt.storage.catalog import Candidate, candidates_in
from asyncckpt.storage.local import LocalStore

ARRIVE_TIMEOUT_S = 60.0
"""For the last rank to call `restore_latest`; as `plan_timeout_s` has it."""

_log = logging.getLogger("asyncckpt")


@dataclass(frozen=True, kw_only=True, slots=True)
class SkippedCheckpoint:
    """A checkpoint that was tried and is broken.

    Attributes:
        path: Its directory, when it was tried.
        step: Of its manifest; None where that is damaged.
        error: What is wrong with it. On a rank that could load it: SharedLoadError, with the rank that could not.
        moved_to: Where it was put; None: it is where it was.
    """

    path: str
    step: int | None
    error: Exception
    moved_to: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoredCheckpoint:
    """What `restore_latest` has loaded.

    Attributes:
        path: The checkpoint's directory.
        step: Its training step.
        state_dict: The target, or a new one.
        save_id: Of the save that was loaded.
        metadata: As it was saved with.
        skipped: Newer ones that are broken, the newest first; empty when the newest was sound.
    """

    path: str
    step: int
    state_dict: Any = field(repr=False)
    save_id: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False)
    skipped: tuple[SkippedCheckpoint, ...] = ()


def restore_latest(
    root: str | os.PathLike[str],
    state_dict: MutableMapping[Any, Any] | None = None,
    *,
    strict: bool = True,
    quarantine: bool = False,
    rank_info: RankInfo | None = None,
    **options: Any,
) -> RestoredCheckpoint | None:
    """Load the newest checkpoint of a directory that verifies; one that is broken is passed over, and that is said.

    Newest by lineage, as `latest_checkpoint` has it. What all ranks had staged and is in the worker's memory only, for
    it could not be written or is not yet, counts as well, unless `source="disk"`. Passed over, with a warning, is what
    was committed and is not what was written any more: damaged or missing files, storage that lost the bytes; and what
    is in memory no more, or not for all ranks. Whatever else goes wrong is raised: a shape or a key that does not fit
    says that the caller asks for something else than was saved.

    In an initialised process group it is a collective: all ranks take the same checkpoint, and what is broken for one
    is passed over by all.

    The target is filled as the bytes are read. What a broken checkpoint has filled is filled again by the one that is
    used, and if that one lacks it, it is an error: nothing of another step stays behind unnoticed. With
    `low_memory=False` nothing changes before all that this rank reads has been verified, for as much memory again.

    Args:
        root: The directory whose children are checkpoints.
        state_dict: A target, as for `load`; None: a new one is made.
        strict: Whether keys that the target has and the checkpoint lacks are an error; False logs them.
        quarantine: Rename broken ones to `<name>.broken-<n>`, which nobody takes for a checkpoint any more: only when
            another one has been loaded, and only directories that are ours.
        rank_info: RankInfo(0, 1) restores in this process alone, whatever others do; None takes torch.distributed's
            rank, else torchrun's environment, else 0 of 1.
        **options: Further arguments of `load`, with their meaning. `source` also says which checkpoints are tried:
            those on disk, those in memory, or both.

    Returns:
        What was loaded, and what was passed over. None, on all ranks: there is nothing to go on from, neither on disk
        (no directory, or nothing committed in it) nor in memory; the target is as it was. So a first run needs no
        look before it, and a look at the disk alone would hide what is in memory only.

    Raises:
        NoSoundCheckpointError: There are some, and not one verifies; lists them. A target holds parts of them.
        MissingKeysError: The checkpoint lacks what the target has, or what a broken one has filled; as `load`.
        SharedLoadError: Another rank failed.
        PlanTimeoutError: Some ranks do not restore.
        RanksDisagreeError: They restore from different directories; or the checkpoint was overwritten meanwhile.
        ConfigError: Several ranks without a process group; or as `load`.
        AsyncCkptError, OSError: As `load`, but CorruptCheckpointError.

    Blocks: for the reads, of the slowest rank.
    """
    return restore_first(
        look,
        root,
        state_dict,
        strict=strict,
        quarantine=quarantine,
        rank_info=rank_info,
        timeout_s=ARRIVE_TIMEOUT_S,
        **options,
    )


def look(root: str) -> list[Candidate]:
    """Return what may be restored of `root`, the newest first.

    Raises:
        OSError: `root` cannot be listed.
    """
    try:
        return candidates_in(root, LocalStore())
    except (FileNotFoundError, NotADirectoryError):
        return []


def restore_first(
    candidates: Callable[[str], list[Candidate]],
    root: str | os.PathLike[str],
    state_dict: MutableMapping[Any, Any] | None,
    *,
    quarantine: bool,
    rank_info: RankInfo | None,
    timeout_s: float,
    meet: Callable[[], Meeting | None] = lambda: None,
    endpoint: str | None = None,
    **options: Any,
) -> RestoredCheckpoint | None:
    """Load the first of several checkpoints that verifies; arguments and errors as `restore_latest` has them.

    Args:
        candidates: Called on rank 0 with the absolute path of `root`; returns what is on disk, the newest first.
        root, state_dict, quarantine, rank_info, **options: See there.
        timeout_s: How long `candidates` may take, and how long to wait for the last rank.
        meet: Where several ranks meet that have no process group.
        endpoint: Of the worker that may hold snapshots in memory; None: this user's of this job.
    """
    if "map_location" in options:  # the reader's word for it: it must not go unnoticed
        raise TypeError("restore got an unexpected keyword argument 'map_location': it is default_map_location")
    rank = find_rank_info(rank_info)
    options["map_location"] = options.pop("default_map_location", None)
    retry_state = RetryState()
    reader = DefaultReader(rank_info=rank, retry_state=retry_state, endpoint=endpoint)
    skipped: list[tuple[Candidate, Broken]] = []
    with ranks_that_restore(rank, meet) as ranks:
        if type(quarantine) is not bool:
            raise ConfigError(f"quarantine={quarantine!r}: expected True or False", field="quarantine")
        directory, source = absolute_path(root), check_source(options.get("source", "auto"))

        def look_at_both() -> list[Candidate]:
            return merged_candidates(directory, candidates(directory), source, endpoint)

        tried = ranks.same_candidates(directory, look_at_both, timeout_s)
        for candidate in tried:
            loaded, broken = _tried(candidate, reader, retry_state, state_dict, options, ranks)
            if broken is None:
                moved = _quarantined(skipped, ranks, quarantine=quarantine)
                return _restored(candidate.path, retry_state, loaded, skipped, moved)
            _log.warning("%s is broken and passed over: %s", candidate.path, broken.error)
            skipped.append((candidate, broken))
    if not skipped:
        _say_none(directory, is_first=rank.rank == 0)
        return None
    raise _none_left(directory, skipped, is_touched=bool(retry_state.touched))


def _tried(
    candidate: Candidate,
    reader: DefaultReader,
    retry_state: RetryState,
    state_dict: MutableMapping[Any, Any] | None,
    options: dict[str, Any],
    ranks: Ranks,
) -> tuple[Any, Broken | None]:
    loaded, failure, retry_state.manifest = None, None, None
    try:
        loaded, _ = reader.read(candidate.path, state_dict, **options)
    except Exception as error:
        failure = error
    save_id = retry_state.manifest.save_id if retry_state.manifest is not None else None
    return loaded, ranks.vote(candidate.path, save_id, failure)


def _quarantined(skipped: Sequence[tuple[Candidate, Broken]], ranks: Ranks, *, quarantine: bool) -> list[str | None]:
    """Put aside what is damaged, now that a sound one is known to be there. Returns the new paths."""

    def move() -> list[str | None]:
        return [_moved(candidate) if quarantine and broken.is_damaged else None for candidate, broken in skipped]

    return ranks.from_rank_0(move) if skipped else []


def _moved(candidate: Candidate) -> str | None:
    if candidate.save_id is None:
        return None
    try:
        moved = quarantine_checkpoint(candidate.path, candidate.save_id, LocalStore())
    except OSError as error:
        _log.warning("%s cannot be put aside: %s", candidate.path, error)
        return None
    if moved is None:
        _log.warning("%s is not put aside: it is a link, or a newer save is under way there", candidate.path)
    else:
        _log.warning("%s was put aside as %s", candidate.path, moved)
    return moved


def _restored(
    path: str,
    retry_state: RetryState,
    loaded: Any,
    skipped: Sequence[tuple[Candidate, Broken]],
    moved: Sequence[str | None],
) -> RestoredCheckpoint:
    assert retry_state.manifest is not None
    manifest = retry_state.manifest
    found = [
        SkippedCheckpoint(path=one.path, step=one.step, error=broken.error, moved_to=to)
        for (one, broken), to in zip(skipped, moved, strict=True)
    ]
    _log.info("restored step %d from %s", manifest.step, path)
    return RestoredCheckpoint(
        path=path,
        step=manifest.step,
        state_dict=loaded,
        save_id=str(manifest.save_id),
        metadata=manifest.metadata,
        skipped=tuple(found),
    )


_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".distcp")
"""Of files that others keep states in."""


def _say_none(root: str, *, is_first: bool) -> None:
    """Log it as a warning where other things lie at `root`: it may be the wrong directory."""
    if not is_first:
        return
    names = []
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        names = [
            one.name
            for one in entries
            if not one.name.startswith(".") and (one.is_dir() or one.name.endswith(_SUFFIXES))
        ]
    if names:
        _log.warning(
            "nothing to restore: no checkpoint is committed in %s, nor in memory; the %d entries in it, %s among them, "
            "are none of asyncckpt's (load() takes other formats, one by one)",
            root,
            len(names),
            min(names),
        )
    elif os.path.isfile(root):
        _log.warning("nothing to restore: %s is a file, and no directory with checkpoints: load() takes files", root)
    elif os.path.islink(root) and not os.path.exists(root):
        _log.warning("nothing to restore: %s is a symbolic link that leads nowhere; is a disk not mounted?", root)
    else:
        _log.info("nothing to restore: no checkpoint is committed in %s, nor in memory", root)


def _none_left(root: str, skipped: Sequence[tuple[Candidate, Broken]], *, is_touched: bool) -> Exception:
    texts = [f"{candidate.path}: {broken.error}" for candidate, broken in skipped]
    target = "; the target holds parts of them and must not be used" if is_touched else ""
    listed = "".join(f"\n  {text}" for text in texts)
    return NoSoundCheckpointError(
        f"not one of {len(texts)} checkpoints in {root} verifies{target}:{listed}",
        path=root,
        detail=texts[0],
        tried=texts,
    )
