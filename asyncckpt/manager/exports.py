"""`ManagerExports`: which checkpoints of a manager are exported, and what has become of these exports."""

from __future__ import annotations

import functools
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from asyncckpt.basics.paths import absolute_path, is_url
from asyncckpt.errors import ConfigError, UnsupportedPathError
from asyncckpt.interop.convert import Conversion
from asyncckpt.interop.hf.config_files import check_config, companion_files
from asyncckpt.interop.hf.model_outline import ModelOutline, is_model, outline_of_model
from asyncckpt.interop.mapping.tensor_rules import TensorRule, checked_rules
from asyncckpt.interop.side_process import SideProcess
from asyncckpt.manager.export_queue import ExportQueue
from asyncckpt.manager.exporter import MAX_ATTEMPTS, ExportSettings, encoded_files
from asyncckpt.save_handle import SaveFuture, SaveHandle
from asyncckpt.state_dict.stateful import unwrapped

EXPORTS_NAME = "hf"
"""Name of the directory of the exports in the root."""

WAIT_S = 1800.0
"""How long `wait` waits where the caller gives no time. That of `export_hf`."""

END_S = 5.0
"""Seconds that an exporter without jobs may take to end. Chosen, as is the number below."""

_POLL_S = 0.05
_MAX_STARTS = MAX_ATTEMPTS + 1

_MAX_OPEN = 2
"""Checkpoints that retention keeps for exports: one that is read, and one that waits."""

_COMPANIONS = {"config", "generation_config", "tokenizer"}
_OPTIONS = {"key", "key_map", "rules", "dtype", "max_shard_bytes", "threads", "read_back"}

_log = logging.getLogger("asyncckpt")


class ManagerExports:
    """Requests the exports of a manager's checkpoints. For the training thread, unless a method says otherwise.

    Args:
        every: Steps between exports.
        root: Absolute path, or URL, of the root.
        to: Directory of the exports; None: `hf` in the root.
        options: Arguments of `export_hf`: `config`, `generation_config`, `tokenizer`, and those of `_OPTIONS`.
        is_leader: Whether this is rank 0, which alone exports.
        timeout_s: As of `ExportSettings`.
        storage_options: Options of the object store of the root.
        mirror: Absolute path, or URL, of the root's mirror; None: there is none.

    Raises:
        ConfigError: An argument is invalid.
        UnsupportedPathError: `to` is a URL.
    """

    def __init__(
        self,
        every: int,
        root: str,
        to: str | os.PathLike[str] | None,
        options: Mapping[str, Any] | None,
        *,
        is_leader: bool,
        timeout_s: float,
        storage_options: Mapping[str, str] | None,
        mirror: str | None = None,
    ) -> None:
        if type(every) is not int or every < 1:
            raise ConfigError(
                f"export_every={every!r}: expected None or an int from 1", field="export_every", value=repr(every)
            )
        self._every, self._is_leader, self._timeout_s = every, is_leader, timeout_s
        self._root, self._exports = root, _exports_of(root, to, mirror)
        self._storage_options = dict(storage_options or {})
        self._given = dict(options or {})
        self._options = _json_options(self._given)
        self._run = secrets.token_hex(4)
        self._queue = ExportQueue(self._exports, self._run, root=root)
        self._process = SideProcess("asyncckpt.manager.exporter")
        self._is_prepared = False
        self._resolve: Callable[[list[str]], ExportSettings] | None = None
        self._settings: bytes | None = None
        self._n_starts = 0
        self._open: dict[str, int] = {}  # steps by key of the jobs that are not known to have ended
        self._is_owed = False  # a request was not made, or not written
        self._latest: Any = None  # `written` of the save whose export was requested last
        self._last_names: set[str] = set()
        self._is_unreadable = False

    def is_due(self, step: int, last_step: int | None) -> bool:
        """Return whether `step` is to be exported.

        It is if it is the first one that is saved at, or after, a multiple of `every`; or if the last one that was to
        be exported could not be requested, or its save has failed.

        Args:
            step: The step to save.
            last_step: The step that was saved or restored before; None: there is none.
        """
        is_owed = self._is_owed or _has_failed(self._latest)
        return is_owed or step // self._every > (last_step or 0) // self._every

    def prepare(self, state: Mapping[str, Any], *, is_due: bool) -> None:
        """Before a save: learn what the exporter needs, and start it, in the first one. All ranks call it.

        If files cannot be written, that is logged, and tried again before the next save that `is_due`.

        Raises:
            ConfigError: There is no config for the model; from the keys of `state` alone, so it is raised on every
                rank.

        Blocks: in the first save, for `state_dict()` of the model, and until the exporter has been started.
        """
        is_first = not self._is_prepared
        if is_first:
            given, options = self._chosen(state)
            model = unwrapped(given["config"])
            outline = outline_of_model(model) if is_model(model) else None  # of all ranks: it may be a collective
            self._is_prepared = True
            if self._is_leader:
                self._resolve = functools.partial(self._resolved, given, options, outline)
        if self._resolve is not None and (is_first or is_due):
            try:
                self._begin(self._resolve)
            except Exception as error:  # on this rank alone, and maybe of a class of the user: the save goes on
                name = type(error).__name__
                _log.error("exports to %s are off until the next save that is due: %s: %s", self._exports, name, error)
        self.poll()

    def _chosen(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what the files beside the weights are made of, and the options, with `config` and `key` filled in."""
        models = {key: model for key, value in state.items() if is_model(model := unwrapped(value))}
        with_config = {key: model for key, model in models.items() if getattr(model, "config", None) is not None}
        given, options = {name: self._given.get(name) for name in _COMPANIONS}, dict(self._options)
        found = with_config if given["config"] is None else models
        if given["config"] is None:
            if len(found) != 1:
                raise ConfigError(
                    f"export_every: the state holds {len(found)} models that have a config, and one is needed: give "
                    "export_options={'config': ..., 'key': ...}, as export_hf has them",
                    field="export_options",
                )
            given["config"] = next(iter(found.values()))
        check_config(unwrapped(given["config"]))
        if "key" not in options and len(found) == 1:
            options["key"] = next(iter(found))
        return given, options

    def _resolved(
        self, given: dict[str, Any], options: dict[str, Any], outline: ModelOutline | None, adopted: list[str]
    ) -> ExportSettings:
        return ExportSettings(
            root=self._root,
            exports=self._exports,
            timeout_s=self._timeout_s,
            run=self._run,
            adopted=adopted,
            options=options,
            storage_options=self._storage_options,
            files=encoded_files(companion_files(**given)),
            model=None if outline is None else asdict(outline),
        )

    def _begin(self, resolve: Callable[[list[str]], ExportSettings]) -> None:
        """Start the exporter, also for the jobs that an earlier training has left."""
        self._queue.make()
        settings = resolve(self._queue.adopt())
        self._open |= {job.key: job.step for job in self._queue.jobs()}
        self._settings, self._resolve, self._n_starts = settings.encode(), None, 1
        self._start()

    def _start(self) -> None:
        assert self._settings is not None
        fd = os.memfd_create("asyncckpt-export", os.MFD_CLOEXEC)
        with open(fd, "wb") as file:
            file.write(self._settings)
            file.flush()
            file.seek(0)
            self._process.start(str(fd), str(os.getpid()), fds=[fd], log_path=self._queue.log_path)

    def request(self, name: str, step: int, handle: SaveHandle | None) -> None:
        """Request the export of a save that has begun. Rank 0 exports; does nothing on other ranks.

        Args:
            name: Name of its directory in the root.
            step: Its step.
            handle: Its handle; None: it is committed.
        """
        if not self._is_leader:
            return
        if self._settings is None:
            self._is_owed = True
            return
        is_save = isinstance(handle, SaveHandle)
        try:
            job = self._queue.add(name, step=step, call=handle.save_id.call if handle is not None and is_save else "")
        except (OSError, ConfigError) as error:
            self._is_owed = True
            _log.error("%s: the next checkpoint is exported instead: %s", self._said(name, step), error)
            return
        self._is_owed, self._latest = False, None
        self._open[job.key] = step
        if handle is None or not is_save:
            self._process.wake()
        else:
            self._latest = handle.written
            handle.written.add_done_callback(lambda done: self._ended(job.key, done))

    def _ended(self, key: str, written: Any) -> None:
        """Wake the exporter, or withdraw the job of a save that has failed. Called in any thread."""
        has_failed = _has_failed(written)
        if has_failed:
            self._open.pop(key, None)
        try:
            if has_failed:
                self._queue.end(key)
            else:
                self._queue.committed(key)
        except OSError as error:
            _log.warning("exports: a job in %s cannot be written: %s", self._exports, error)
        self._process.wake()

    def poll(self) -> bool:
        """Log what has become of exports, and start an exporter that was killed again. Return whether some are left.

        Never raises because of a file or process: a save must not fail because of exports.
        """
        if not self._is_leader or self._settings is None:
            return False
        try:
            self._look()
        except OSError as error:
            _log.warning("exports: %s cannot be read or written: %s", self._exports, error)
        return bool(self._open)

    def _look(self) -> None:
        if len(self._queue.open_keys()) > _MAX_OPEN:  # the exporter, which is at work, gives up none until it is done
            self._queue.give_up_older()
        left = self._queue.open_keys()
        failures = self._queue.take_failures()
        for key, reason in failures.items():
            _log.error("%s: %s", self._said(key.rpartition(".")[0], self._open.pop(key, None)), reason)
        for key in [key for key in self._open if key not in left]:
            step, name, self._n_starts = self._open.pop(key, None), key.rpartition(".")[0], 0
            if os.path.isdir(os.path.join(self._exports, name)):
                _log.info("exported step %s to %s", step, os.path.join(self._exports, name))
            else:
                _log.error("%s: it is not there; see %s", self._said(name, step), self._queue.log_path)
        if failures:
            self._n_starts = 0
        if left and not self._process.is_running:
            self._start_again(left)

    def _start_again(self, left: Iterable[str]) -> None:
        if self._n_starts < _MAX_STARTS:
            self._n_starts += 1
            self._start()
            return
        n_starts, self._n_starts = self._n_starts, 0
        for key in left:
            self._queue.fail(key, f"the exporter has ended {n_starts} times, see {self._queue.log_path}")

    def _said(self, name: str, step: int | None) -> str:
        checkpoint, target = os.path.join(self._root, name), os.path.join(self._exports, name)
        return f"export of step {'?' if step is None else step}, {checkpoint}, to {target} failed"

    def busy(self) -> set[str]:
        """Return the names of checkpoints that retention must keep for exports. May be called in any thread.

        While the queue cannot be read, these are the names that were known last, and those requested since.
        """
        try:
            self._last_names, self._is_unreadable = self._queue.names(), False
        except OSError as error:
            if not self._is_unreadable:
                _log.warning(
                    "exports: %s cannot be read; retention goes by what it knew last: %s", self._exports, error
                )
            self._is_unreadable = True
            return self._last_names | {key.rpartition(".")[0] for key in list(self._open)}
        return self._last_names

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until all requested exports have ended; return whether they have. Rank 0 waits, others do not.

        Blocks: at most `timeout_s`; None: `WAIT_S`.
        """
        deadline = time.monotonic() + (WAIT_S if timeout_s is None else timeout_s)
        while self.poll():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def close(self, timeout_s: float) -> None:
        """Let the exporter do what is left, and end. Waits at most `timeout_s` for one that has nothing to do."""
        has_left = self.poll()
        if has_left:
            _log.info("exports to %s go on: %d are left", self._exports, len(self._open))
        self._process.close(0.0 if has_left else timeout_s)


def _exports_of(root: str, to: str | os.PathLike[str] | None, mirror: str | None) -> str:
    if to is None and is_url(root):
        raise ConfigError(
            "export_every: the root is a URL, and exports write files: give export_to=, a directory", field="export_to"
        )
    if to is not None and is_url(str(to)):
        raise UnsupportedPathError(
            "export_to is a URL, and exports write files: export to a directory, and copy that with the store's tools",
            path=str(to).partition("://")[0] + "://",
        )
    found = os.path.join(root, EXPORTS_NAME) if to is None else absolute_path(to)
    for what, other in (("root", root), ("mirror", mirror)):
        if other is not None and not is_url(other) and os.path.realpath(found) == os.path.realpath(other):
            raise ConfigError(
                f"export_to={found!r} is the {what}, where the checkpoints have these names; give another directory",
                field="export_to",
                value=found,
            )
    return found


def _json_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Check the options of exports, and return those for the exporter as JSON values.

    Raises:
        ConfigError: One is unknown or invalid.
    """
    unknown = sorted(given.keys() - _COMPANIONS - _OPTIONS)
    if unknown:
        raise ConfigError(
            f"export_options has no {unknown[0]!r}; it takes {', '.join(sorted(_COMPANIONS | _OPTIONS))}",
            field="export_options",
            value=unknown[0],
        )
    found = {name: value for name, value in given.items() if name in _OPTIONS and value is not None}
    if not isinstance(found.get("key", "x"), str) or found.get("key") == "":
        raise ConfigError(f"export_options: key={found['key']!r}: expected an FQN, such as 'model'", field="key")
    if not isinstance(found.get("key_map", {}), Mapping):
        raise ConfigError(
            "export_options: key_map is a function, which another process cannot have: give a dict, or rules",
            field="key_map",
        )
    if "key_map" in found:
        found["key_map"] = dict(found["key_map"])
    if "rules" in found:
        found["rules"] = [_rule(rule) for rule in checked_rules(found["rules"])]
    dtype, threads, max_shard_bytes = map(found.get, ("dtype", "threads", "max_shard_bytes"))
    checked = Conversion("hf", dtype=dtype, threads=threads, max_shard_bytes=max_shard_bytes)
    return found | ({"dtype": checked.dtype} if "dtype" in found else {})


def _rule(rule: TensorRule) -> dict[str, Any]:
    return {"sources": rule.sources, "targets": rule.targets, "dim": rule.dim, "stack_dim": rule.stack_dim}


def _has_failed(written: Any) -> bool:
    return isinstance(written, SaveFuture) and written.done() and written.peek()[1] is not None
