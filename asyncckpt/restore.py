"""`asyncckpt.restore_latest`: loads the newest checkpoint that verifies, the same on all ranks.

Checkpoints are tried from the newest to the oldest. A target is filled while bytes are read, so a broken checkpoint may
fill a part of it. The checkpoint that is used must fill that part again: if it lacks a name, that is an error, since
the target would keep a value of another step. `low_memory=False` verifies everything that this rank reads before the
target changes; that takes memory for a second copy of the state.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from asyncckpt.basics.failpoints import reach
from asyncckpt.basics.paths import checkpoint_path
from asyncckpt.basics.seen_saves import newest_seen, note_seen
from asyncckpt.basics.urls import parent_of
from asyncckpt.config import RankInfo
from asyncckpt.distributed.checkpoint_vote import Broken, Ranks, ranks_that_restore
from asyncckpt.distributed.meetings import Meeting
from asyncckpt.distributed.process_group import find_rank_info
from asyncckpt.errors import ConfigError, NoSoundCheckpointError
from asyncckpt.loading.load import DefaultReader
from asyncckpt.loading.read_source import RetryState, check_source
from asyncckpt.maintenance.quarantine import quarantine_checkpoint
from asyncckpt.recall.newest import merged_candidates
from asyncckpt.storage.catalog import Candidate, candidates_in, look_at_mirror, newest_first
from asyncckpt.storage.locate import store_at, with_storage_options

ARRIVE_TIMEOUT_S = 60.0
"""How long to wait for the last rank to call `restore_latest`. The default of `plan_timeout_s`."""

_log = logging.getLogger("asyncckpt")


@dataclass(frozen=True, kw_only=True, slots=True)
class SkippedCheckpoint:
    """A checkpoint that was tried and is broken.

    Attributes:
        path: Its directory, when it was tried.
        step: Step in its manifest; None if that is damaged.
        error: Why it is broken. On a rank that could load it, a SharedLoadError that names a rank that could not.
        moved_to: Its quarantine directory; None: it was not moved.
    """

    path: str
    step: int | None
    error: Exception
    moved_to: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoredCheckpoint:
    """The checkpoint that `restore_latest` has loaded.

    Attributes:
        path: The checkpoint's directory.
        step: Its training step.
        state_dict: The target, or a new state dict.
        save_id: ID of the save that was loaded.
        metadata: The metadata of the save.
        skipped: Newer checkpoints that are broken, the newest first; empty if the newest one was sound.
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
    mirror: str | os.PathLike[str] | None = None,
    quarantine: bool = False,
    rank_info: RankInfo | None = None,
    storage_options: Mapping[str, str] | None = None,
    **options: Any,
) -> RestoredCheckpoint | None:
    """Load the newest checkpoint of a directory that verifies; skip broken ones, with a warning.

    Newest by lineage, as for `latest_checkpoint`. A snapshot of all ranks that is only in the worker's memory, because
    it could not be written or is not written yet, counts as well, unless `source="disk"`. A checkpoint is broken if it
    was committed and its bytes are not what was written: files are damaged or missing, or storage has lost bytes; and a
    snapshot is, if it is no longer in memory for all ranks. Any other error is raised: if a shape or a key does not
    fit, the caller asks for something else than was saved.

    In an initialised process group it is a collective: all ranks load the same checkpoint, and skip one that is broken
    for any of them.

    The target is filled while bytes are read. Containers that a broken checkpoint has filled are emptied again, and
    lists that it has extended are shortened. The checkpoint that is used fills again all else that broken ones have
    filled; it is an error if it lacks a part of that, so that no value of another step is left. With
    `low_memory=False` the target does not change before everything that this rank reads has been verified, which takes
    as much memory again.

    Args:
        root: The directory whose children are checkpoints.
        state_dict: A target, as for `load`; None: a new one is made.
        strict: Whether keys that the target has and the checkpoint lacks are an error; False logs them.
        mirror: Directory or URL that holds the copies of these checkpoints. The newest of both places is loaded; where
            both have it, from `root`. A mirror that cannot be listed is an error if there is no checkpoint in `root`,
            else it is logged; so is one that does not answer for two minutes.
        quarantine: Rename broken checkpoints to `<name>.broken-<n>`, so that they are not listed any more: only if
            another one has been loaded, and only directories of asyncckpt.
        rank_info: RankInfo(0, 1) restores in this process alone; None: torch.distributed's rank, else that of
            torchrun's environment, else 0 of 1.
        storage_options: Options of the object store that a URL leads to, by obstore's names; their values are never
            shown. None: those of the environment.
        **options: Further arguments of `load`. `source` also selects the checkpoints to try: those on disk, those in
            memory, or both.

    Returns:
        The loaded checkpoint, and the skipped ones. None, on all ranks: there is no checkpoint, neither on disk (no
        directory, or nothing committed in it) nor in memory; the target is unchanged. So a first run need not check
        beforehand; a check of the disk alone would miss snapshots that are only in memory.

    Raises:
        NoSoundCheckpointError: There are checkpoints, and none verifies; lists them. The target holds parts of them.
        MissingKeysError: The checkpoint lacks keys of the target, or keys that a broken one has filled; as `load`.
        SharedLoadError: Another rank failed.
        PlanTimeoutError: Some ranks do not restore.
        RanksDisagreeError: They restore from different directories; or the checkpoint was overwritten meanwhile.
        ConfigError: Several ranks without a process group; or as `load`.
        AsyncCkptError, OSError: As `load`, except CorruptCheckpointError.

    Blocks: until the slowest rank has read.
    """
    with with_storage_options(storage_options):
        return restore_first(
            finder(mirror),
            root,
            state_dict,
            strict=strict,
            quarantine=quarantine,
            rank_info=rank_info,
            timeout_s=ARRIVE_TIMEOUT_S,
            **options,
        )


def look(root: str) -> list[Candidate]:
    """Return the checkpoints on disk in `root` that may be restored, the newest first.

    Raises:
        OSError: `root` cannot be listed.
    """
    try:
        return candidates_in(root, store_at(root))
    except (FileNotFoundError, NotADirectoryError):
        return []


def finder(mirror: str | os.PathLike[str] | None) -> Callable[[str], list[Candidate]]:
    """Return a function that does as `look`, for a root and the mirror of its checkpoints.

    Args:
        mirror: Directory or URL; None: there is none.

    Raises:
        UnsupportedPathError: `mirror` is no path or URL.
    """
    if mirror is None:
        return look
    return partial(_look_at_both, mirror=checkpoint_path(mirror))


def _look_at_both(root: str, mirror: str) -> list[Candidate]:
    local = look(root)
    nothing: list[Candidate] = []
    copies = look_at_mirror(lambda: look(mirror), nothing, root=root, mirror=mirror, has_local=bool(local))
    return sorted([*local, *copies], key=newest_first, reverse=True)  # stable: of two with one ID the local one first


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
    """Load the first of several checkpoints that verifies; arguments and errors as `restore_latest`.

    Args:
        candidates: Returns the checkpoints on disk, the newest first. Called on rank 0 with the absolute path of
            `root`.
        root, state_dict, quarantine, rank_info, **options: As for `restore_latest`.
        timeout_s: How long `candidates` may take, and how long to wait for the last rank.
        meet: Returns a meeting for several ranks without a process group.
        endpoint: Endpoint of the worker that may hold snapshots in memory; None: this user's worker of this job.
    """
    if "map_location" in options:  # the reader's name of default_map_location, which would be overwritten below
        raise TypeError("restore got an unexpected keyword argument 'map_location': it is default_map_location")
    rank = find_rank_info(rank_info)
    options["map_location"] = options.pop("default_map_location", None)
    retry_state = RetryState()
    reader = DefaultReader(rank_info=rank, retry_state=retry_state, endpoint=endpoint)
    skipped: list[tuple[Candidate, Broken]] = []
    with ranks_that_restore(rank, meet) as ranks:
        if type(quarantine) is not bool:
            raise ConfigError(f"quarantine={quarantine!r}: expected True or False", field="quarantine")
        directory, source = checkpoint_path(root), check_source(options.get("source", "auto"))

        def look_at_both() -> list[Candidate]:
            return merged_candidates(directory, candidates(directory), source, endpoint)

        tried = ranks.same_candidates(directory, look_at_both, timeout_s)
        _note_seen(directory, tried, ranks)
        reach("restore: candidates listed")
        for candidate in tried:
            loaded, broken = _tried(candidate, reader, retry_state, state_dict, options, ranks)
            if broken is None:
                moved = _quarantined(skipped, ranks, quarantine=quarantine)
                return _restored(candidate.path, retry_state, loaded, skipped, moved)
            _log.warning("%s is broken and skipped: %s", candidate.path, broken.error)
            skipped.append((candidate, broken))
    if not skipped:
        _say_none(directory, is_first=rank.rank == 0)
        return None
    raise _none_left(directory, skipped, is_touched=bool(retry_state.touched))


def _note_seen(directory: str, tried: Sequence[Candidate], ranks: Ranks) -> None:
    """Record on each rank, whose next saves must have the same epoch, what there is to restore from.

    Rank 0 may have found more than the candidates: a manager lists all steps to restore one.
    """
    places = {directory, *(parent_of(one.path) for one in tried)}
    if any(os.path.basename(one.path) == os.path.basename(directory) for one in tried):  # `directory` is a checkpoint
        places.add(parent_of(directory))
    note_seen(places, (one.save_id for one in tried if one.save_id is not None))
    note_seen(places, filter(None, ranks.from_rank_0(lambda: [newest_seen(*places) or None])))


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
    """Quarantine damaged checkpoints, now that a sound one was loaded; return the new path of each, or None."""

    def move() -> list[str | None]:
        return [_moved(candidate) if quarantine and broken.is_damaged else None for candidate, broken in skipped]

    return ranks.from_rank_0(move) if skipped else []


def _moved(candidate: Candidate) -> str | None:
    if candidate.save_id is None:
        return None
    try:
        moved = quarantine_checkpoint(candidate.path, candidate.save_id, store_at(candidate.path))
    except OSError as error:
        _log.warning("%s cannot be quarantined: %s", candidate.path, error)
        return None
    if moved is None:
        _log.warning("%s is not quarantined: it is a link, or a newer save is under way there", candidate.path)
    else:
        _log.warning("%s was quarantined as %s", candidate.path, moved)
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
    note_seen([parent_of(path)], [manifest.save_id])  # one that was only in memory is not among the candidates' IDs
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
"""Suffixes of files in which other libraries store states."""


def _say_none(root: str, *, is_first: bool) -> None:
    """Log that there is no checkpoint; as a warning if `root` has other contents: it may be the wrong directory."""
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
            "nothing to restore: no checkpoint is committed in %s, nor in memory; its %d entries, such as %s, are not "
            "checkpoints of asyncckpt (load() reads a single one of another format)",
            root,
            len(names),
            min(names),
        )
    elif os.path.isfile(root):
        _log.warning("nothing to restore: %s is a file, not a directory of checkpoints; load() reads files", root)
    elif os.path.islink(root) and not os.path.exists(root):
        _log.warning("nothing to restore: %s is a broken symbolic link; is a disk not mounted?", root)
    else:
        _log.info("nothing to restore: no checkpoint is committed in %s, nor in memory", root)


def _none_left(root: str, skipped: Sequence[tuple[Candidate, Broken]], *, is_touched: bool) -> Exception:
    texts = [f"{candidate.path}: {broken.error}" for candidate, broken in skipped]
    target = "; the target holds parts of them and must not be used" if is_touched else ""
    listed = "".join(f"\n  {text}" for text in texts)
    return NoSoundCheckpointError(
        f"none of {len(texts)} checkpoints in {root} verifies{target}:{listed}",
        path=root,
        detail=texts[0],
        tried=texts,
    )
