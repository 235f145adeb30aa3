"""Checkpointer: the base class of both checkpointers: checks arguments, numbers saves, loads."""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import fields
from types import TracebackType
from typing import Any

from asyncckpt.basics.paths import checkpoint_path
from asyncckpt.basics.urls import is_object_url, parent_of
from asyncckpt.components import CheckpointReader
from asyncckpt.config import CheckpointerConfig, RankInfo
from asyncckpt.distributed.checkpoint_vote import RESTORE, same_choice
from asyncckpt.distributed.meetings import Exchange, Meeting
from asyncckpt.distributed.process_group import Membership
from asyncckpt.distributed.run_agreement import Coordination
from asyncckpt.errors import (
    AsyncCkptError,
    CheckpointerClosedError,
    ConfigError,
    ForkedError,
    MissingKeysError,
    UnsupportedPathError,
    UnsupportedPlatformError,
)
from asyncckpt.format.names import SaveId, is_quarantined
from asyncckpt.loading.load import DefaultReader
from asyncckpt.loading.read_source import check_source
from asyncckpt.protocol.request import check_metadata
from asyncckpt.recall.newest import NewestCandidate, can_load, newest_candidates
from asyncckpt.restore import RestoredCheckpoint, finder, restore_first
from asyncckpt.storage.catalog import Candidate, latest_checkpoint
from asyncckpt.storage.locate import files_at, with_storage_options
from asyncckpt.training_step import checked_step, step_in

_log = logging.getLogger("asyncckpt")


def refuse_unknown(kw: Mapping[str, Any]) -> None:
    """Refuse extra arguments of `save()`: only custom parts and commit hooks take them.

    Raises:
        ConfigError: Naming the first.
    """
    if kw:
        first = min(kw)
        setting = first in {f.name for f in fields(CheckpointerConfig)}
        hint = f"; it is a setting of the checkpointer: give {first}= when you make it" if setting else ""
        raise ConfigError(f"save() has no argument called {first!r}{hint}", field=first)


def _save_path(path: str | os.PathLike[str]) -> str:
    directory = checkpoint_path(path)
    if directory == parent_of(directory):
        raise UnsupportedPathError(
            f"{directory} cannot be a checkpoint: every other one would be inside it", path=directory
        )
    if is_quarantined(os.path.basename(directory)):
        raise UnsupportedPathError(
            f"{directory} has the name of a quarantined checkpoint, which is not listed; save to another directory",
            path=directory,
        )
    return directory


def _refuse_in_object_store(path: str, config: CheckpointerConfig) -> None:
    """Refuse settings that need what only files have.

    Raises:
        ConfigError: Naming the setting, and what to do instead; or an option that the store does not take.
        UnsupportedPathError: There is no way to the store.
    """
    if not is_object_url(path):
        return
    if config.overwrite:
        raise ConfigError(
            f"save to {path}: overwrite=True replaces a checkpoint under a lock, which object stores do not have; save "
            "to a path of its own, and remove the older one with `asyncckpt prune`",
            field="overwrite",
            value=True,
        )
    if config.layout != "safetensors":
        raise ConfigError(
            f"save to {path}: layout={config.layout!r} has two commit records, which object stores cannot put at once; "
            'use layout="safetensors"',
            field="layout",
            value=config.layout,
        )
    with with_storage_options(config.storage_options):
        files_at(path)  # options that the store does not take


def mirror_path(mirror: str | os.PathLike[str], directory: str, config: CheckpointerConfig) -> str:
    """Return the absolute path, or URL, of a checkpoint's mirror.

    Args:
        mirror: As the user gave it.
        directory: Where the checkpoint is saved: an absolute path or URL.
        config: Settings of the save.

    Raises:
        UnsupportedPathError: It is no path or URL that a checkpoint can have.
        ConfigError: It is the checkpoint itself, lies inside it, or holds it; or the layout cannot be copied there.
    """
    place = mirror_root(_save_path(mirror), directory)
    if is_object_url(place) and config.layout != "safetensors":
        raise ConfigError(
            f"save to {directory}: layout={config.layout!r} has two commit records, which the object store of "
            f'mirror={place!r} cannot put at once; use layout="safetensors", or a mirror in a file system',
            field="mirror",
            value=place,
        )
    return place


def mirror_root(mirror: str | os.PathLike[str], directory: str) -> str:
    """Return the absolute path, or URL, of what holds the copies of what is saved to, or below, `directory`.

    Raises:
        UnsupportedPathError: It is no path or URL.
        ConfigError: It is that directory, lies inside it, or holds it.
    """
    place = checkpoint_path(mirror)
    if _is_within(place, directory) or _is_within(directory, place):
        raise ConfigError(
            f"save to {directory}: mirror={place!r} is the same place, or one is inside the other; give another place",
            field="mirror",
            value=place,
        )
    return place


def _is_within(inner: str, outer: str) -> bool:
    return inner == outer or inner.startswith(outer.rstrip("/") + "/")


class Checkpointer(ABC):
    """Saves and loads state dicts. A context manager."""

    def __init__(
        self, config: CheckpointerConfig, reader: CheckpointReader | None, endpoint: str | None = None
    ) -> None:
        if not sys.platform.startswith("linux"):
            raise UnsupportedPlatformError(f"asyncckpt needs Linux (memfd, pidfd, O_DIRECT); this is {sys.platform}")
        self.config, self._endpoint = config, endpoint
        self._member, self._rank_changes = Membership(config.rank_info), 0
        self._own_reader = reader
        self._reader = reader or self._default_reader()
        self._run_id = secrets.token_hex(6)
        self._coordination: Coordination | None = None
        self._await_saves_below: Callable[[str, float], None] = lambda root, deadline: None  # without a worker: none
        self._sequence = 0
        self._owner_pid = os.getpid()
        self._closed = False

    @property
    def _rank(self) -> RankInfo:
        return self._member.rank

    def _default_reader(self) -> DefaultReader:
        return DefaultReader(rank_info=self._rank, allow_pickle=self.config.allow_pickle, endpoint=self._endpoint)

    @property
    def rank_info(self) -> RankInfo:
        """This process's rank now.

        Raises:
            ConfigError: torchrun's environment has changed, and is invalid.
        """
        self._follow_ranks()
        return self._rank

    @property
    def rank_changes(self) -> int:
        """How often this process's rank or process group has changed since this checkpointer was made."""
        self._follow_ranks()
        return self._rank_changes

    def _follow_ranks(self) -> None:
        """Use this process's current rank; if it has changed, later saves belong to a new run."""
        if self._closed or os.getpid() != self._owner_pid:
            return
        if self._member.is_current():
            return
        now, before = Membership(self.config.rank_info), self._rank
        _log.info(
            "this process is now rank %d of %d in a new process group; it was rank %d of %d. The ranks agree anew "
            "in the next save",
            *now.rank,
            *before,
        )
        self._take_ranks(now)

    def _take_ranks(self, member: Membership) -> None:
        """Replace the parts that depend on the rank."""
        self._member, self._rank_changes = member, self._rank_changes + 1
        self._run_id, self._sequence = secrets.token_hex(6), 0
        self._reader = self._own_reader or self._default_reader()

    @property
    def exchange(self) -> Callable[[], Exchange] | None:
        """Returns the exchange for meetings of the ranks; None: with custom parts they do not meet."""
        self._follow_ranks()
        return None if self._coordination is None else self._coordination.find

    @abstractmethod
    def save(
        self,
        state_dict: Mapping[str, Any],
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        **kw: Any,
    ) -> Any:
        """Save `state_dict` at `path`; see the subclasses."""

    def load(
        self,
        path: str | os.PathLike[str],
        state_dict: Any = None,
        *,
        default_map_location: Any = None,
        strict: bool = True,
        **kw: Any,
    ) -> Any:
        """Load the checkpoint at `path`; as `asyncckpt.load`, through this checkpointer's reader.

        Args:
            path: The checkpoint, as for `asyncckpt.load`.
            state_dict: Filled in place and returned; None returns a new dict.
            default_map_location: Where to put new tensors: device, string, dict or callable as in `torch.load`.
            strict: Raise if the checkpoint lacks keys of `state_dict`; False logs them.
            **kw: Passed to the reader.

        Raises:
            CheckpointNotFoundError, CheckpointNotCommittedError, CorruptCheckpointError, MissingKeysError, ...: As
                `asyncckpt.load`.
        """
        self._check_usable()
        self._follow_ranks()
        directory = checkpoint_path(path)
        with with_storage_options(self.config.storage_options):
            found, missing = self._reader.read(
                directory, state_dict, map_location=default_map_location, strict=strict, **kw
            )
        if strict and missing:  # a custom reader may ignore `strict`
            raise MissingKeysError(
                f"{directory}: {len(missing)} keys are not in the checkpoint: {', '.join(map(str, missing))}",
                path=directory,
                keys=list(missing),
            )
        return found

    def latest_checkpoint(
        self,
        root: str | os.PathLike[str],
        *,
        mirror: str | os.PathLike[str] | None = None,
        timeout_s: float = 60.0,
        source: str = "auto",
    ) -> str | None:
        """Return the newest checkpoint below `root`, committed or complete in the worker's memory; None: there is none.

        For resuming after a crash: all ranks get the same answer, the newest that rank 0 finds and every rank can load.
        Waits for saves to `root` that the worker still writes for a run that has ended. On several ranks it is a
        collective. A snapshot that is in memory only, because it could not be written or is not written yet, can be
        loaded by this checkpointer's `load`. It does not count once the directory that it was saved to has been
        removed, unless `source="memory"`.

        Args:
            root: The directory, or URL, that holds the checkpoints.
            mirror: As for `asyncckpt.latest_checkpoint`.
            timeout_s: How long to wait for such saves, and for the other ranks.
            source: "disk": only committed ones count, as for `asyncckpt.latest_checkpoint`; "memory": only others.

        Raises:
            PlanTimeoutError: Not every rank has called it.
            UnsupportedPathError: `root` or `mirror` is not a path, or a URL whose store cannot be used.
            ConfigError: An unknown `source`.
            SaveFailedError: Rank 0 could not read `root` (raised on the other ranks).
            OSError: `root` cannot be read.
        """
        self._check_usable()
        self._follow_ranks()
        directory, deadline = checkpoint_path(root), time.monotonic() + timeout_s
        where = check_source(source)

        def look() -> list[NewestCandidate]:
            self._await_saves_below(directory, deadline)
            on_disk = None if where == "memory" else latest_checkpoint(directory, mirror=mirror)
            if where == "disk":
                return [] if on_disk is None else [NewestCandidate(on_disk)]
            return newest_candidates(directory, on_disk, where, self._endpoint)

        def usable(candidates: list[NewestCandidate]) -> list[bool]:
            return can_load(candidates, directory, self._endpoint)

        with with_storage_options(self.config.storage_options):
            if self._coordination is None:
                chosen = next(iter(look()), None)
            else:
                chosen = same_choice(self._coordination, look, usable, timeout_s, "latest_checkpoint()")
        return None if chosen is None else chosen.choose()

    def restore_latest(
        self,
        root: str | os.PathLike[str],
        state_dict: MutableMapping[Any, Any] | None = None,
        *,
        strict: bool = True,
        mirror: str | os.PathLike[str] | None = None,
        quarantine: bool = False,
        timeout_s: float = 60.0,
        **options: Any,
    ) -> RestoredCheckpoint | None:
        """Load the newest checkpoint below `root` that verifies, as `asyncckpt.restore_latest`.

        For resuming after a crash: waits for saves to `root` that the worker still writes for a run that has ended.

        Args:
            root, state_dict, strict, mirror, quarantine, **options: As for `asyncckpt.restore_latest`. Uses the default
                reader.
            timeout_s: How long to wait for such saves, and for the other ranks.

        Returns:
            As `asyncckpt.restore_latest`; None: there is no checkpoint.

        Raises:
            NoSoundCheckpointError, ...: As `asyncckpt.restore_latest`.
        """
        return self.restore_first(
            finder(mirror), root, state_dict, strict=strict, quarantine=quarantine, timeout_s=timeout_s, **options
        )

    def restore_first(
        self,
        find: Callable[[str], list[Candidate]],
        root: str | os.PathLike[str],
        state_dict: MutableMapping[Any, Any] | None = None,
        *,
        below: str | None = None,
        quarantine: bool = False,
        timeout_s: float = 60.0,
        **options: Any,
    ) -> RestoredCheckpoint | None:
        """As `restore_latest`, with other candidates, or another order of them.

        Args:
            find: Returns the candidates on disk. Called on rank 0 with the absolute path of `root`.
            root, state_dict, quarantine, timeout_s, **options: As for `restore_latest`.
            below: Wait for saves to this directory; None: to `root`.

        Returns:
            As `restore_latest`.

        Raises:
            NoSoundCheckpointError, ...: As `restore_latest`.
        """
        self._check_usable()
        self._follow_ranks()

        def candidates(directory: str) -> list[Candidate]:
            self._await_saves_below(below or directory, time.monotonic() + timeout_s)
            return find(directory)

        options.setdefault("allow_pickle", self.config.allow_pickle)
        with with_storage_options(self.config.storage_options):
            return restore_first(
                candidates,
                root,
                state_dict,
                quarantine=quarantine,
                rank_info=self._rank,
                timeout_s=timeout_s,
                meet=self._meet_to_restore,
                endpoint=self._endpoint,
                **options,
            )

    def _meet_to_restore(self) -> Meeting | None:
        ranks = self._coordination
        return None if ranks is None else ranks.meet_next("restore", RESTORE)

    def __repr__(self) -> str:
        facts = ", ".join(f"{name}={value!r}" for name, value in self._facts().items())
        return f"{type(self).__name__}({facts})"

    def _facts(self) -> dict[str, Any]:
        """Return what `repr` shows, by name. Must not take a lock or raise, so that `repr` is safe anywhere."""
        return {"rank": self._rank.rank, "world_size": self._rank.world_size, "closed": self._closed}

    @abstractmethod
    def close(self) -> None:
        """Free everything. Idempotent."""

    def _check_usable(self) -> None:
        self._check_owner()
        if self._closed:
            raise CheckpointerClosedError("the checkpointer is closed")

    def _check_owner(self) -> None:
        if os.getpid() != self._owner_pid:
            raise ForkedError(
                f"this checkpointer was made by process {self._owner_pid}, and this is its forked child "
                f"{os.getpid()}; make a new one here"
            )

    def _next_save_id(self) -> SaveId:
        sequence, self._sequence = self._sequence, self._sequence + 1
        return SaveId(0, sequence, self._run_id)

    def _number_of(self, save_id: SaveId) -> int:
        """Return the sequence that all ranks give a save of this rank."""
        ranks = self._coordination
        return save_id.sequence if ranks is None else ranks.aligned(save_id.sequence)

    @staticmethod
    def _path_if_any(path: Any) -> str:
        """Return the directory of a checkpoint, or "" if `path` is not valid."""
        try:
            return _save_path(path)
        except (AsyncCkptError, TypeError, ValueError, OSError):
            return ""

    def _arguments(
        self, state_dict: Any, path: Any, step: int | None, metadata: Mapping[str, Any] | None, save_id: SaveId
    ) -> dict[str, Any]:
        """Check the arguments of `save`; return the keywords that every part receives."""
        if step is None:
            found = step_in(state_dict)
            step = self._number_of(save_id) if found is None else found
        else:
            step = checked_step(step)
        try:
            text = json.dumps(dict(metadata or {}), allow_nan=False)
            check_metadata(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"metadata must be a dict of JSON values: {error}", field="metadata") from error
        metadata = json.loads(text)
        directory = _save_path(path)
        _refuse_in_object_store(directory, self.config)
        return {"path": directory, "step": step, "metadata": metadata, "save_id": save_id}

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
