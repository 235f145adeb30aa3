"""The exporter: exports a manager's checkpoints to Hugging Face directories, behind the training.

It is a separate process, the only one that imports torch for an export; it has a low priority, and does one export at a
time. It takes the newest checkpoint of the queue that is committed. Older ones that still wait are given up then, so
that exports that are slower than saves are never more than one behind, and retention keeps no more than two checkpoints
for them. When the manager closes its socket, or dies, it does what is left in the queue, and ends.

IMPORTANT: an export is written under a hidden name, flushed and renamed (`interop.publish`): a kill at any instant
leaves no directory of that name, or a complete one.
"""

from __future__ import annotations

import base64
import json
import math
import os
import select
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from asyncckpt.basics.paths import current_umask
from asyncckpt.errors import CheckpointExistsError, CheckpointNotFoundError
from asyncckpt.manager.export_queue import ExportJob, ExportQueue, superseded
from asyncckpt.storage.checkpoint_dir import manifest_or_error
from asyncckpt.storage.files import Files
from asyncckpt.storage.locate import store_at, with_storage_options

if TYPE_CHECKING:
    from asyncckpt.interop.hf.export import ExportCompanions

POLL_S = 0.5
"""How often the exporter looks whether a requested checkpoint is committed. Chosen, as is the number below."""

MAX_ATTEMPTS = 3
"""How often an export is begun whose exporter was killed each time."""

NICENESS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportSettings:
    """What an exporter needs to know; its manager passes it on as JSON.

    Attributes:
        root: Absolute path, or URL, of the manager's root.
        exports: Absolute path of the directory of the exports.
        timeout_s: Seconds after which a checkpoint that is not committed is given up, if the training that has
            requested it has ended.
        run: Token of the training, which the jobs that it requests have.
        adopted: Keys of the jobs of earlier trainings that it makes.
        options: Arguments of `export_hf`, as JSON values: key, key_map, rules, dtype, max_shard_bytes, threads,
            read_back.
        storage_options: Options of the object store of the root.
        files: Contents of the files beside the weights, in base64.
        model: Fields of the `ModelOutline`; None: there is none.
    """

    root: str
    exports: str
    timeout_s: float
    run: str
    adopted: list[str]
    options: dict[str, Any]
    storage_options: dict[str, str]
    files: dict[str, str]
    model: dict[str, Any] | None

    def encode(self) -> bytes:
        """Return them as JSON."""
        return json.dumps(asdict(self)).encode()


def encoded_files(files: dict[str, bytes]) -> dict[str, str]:
    """Return contents of files in base64, for JSON."""
    return {name: base64.b64encode(data).decode() for name, data in files.items()}


class Exporter:
    """Exports the checkpoints of a queue.

    Args:
        settings: Its settings.
    """

    def __init__(self, settings: ExportSettings) -> None:
        self._settings = settings
        self._queue = ExportQueue(settings.exports, settings.run, settings.adopted)
        with with_storage_options(settings.storage_options):
            self._store = store_at(settings.root, umask=current_umask())

    def step(self, *, is_alone: bool = False) -> bool:
        """Export the newest checkpoint that is committed, if there is one; return whether jobs are left.

        Args:
            is_alone: Whether the training has ended, so that what is not committed in time never will be.

        Raises:
            OSError: The queue cannot be read.

        Blocks: to read and write that checkpoint.
        """
        jobs = self._queue.jobs()
        ready = next((job for job in reversed(jobs) if self._is_ready(job, is_alone)), None)
        if ready is not None:
            for job in jobs[: jobs.index(ready)]:
                self._queue.fail(job.key, superseded(ready.step))
            self._do(ready)
        return bool(self._queue.open_keys())

    def _is_ready(self, job: ExportJob, is_alone: bool) -> bool:
        try:
            manifest = manifest_or_error(os.path.join(self._settings.root, job.name), self._store)
        except OSError:  # asked again
            manifest, is_known = None, False
        else:
            is_known = True
        if manifest is not None and job.call in ("", manifest.save_id.call):
            return True
        is_ended = is_alone or job.key in self._settings.adopted
        if is_known and job.is_committed:
            self._queue.fail(job.key, "the checkpoint was removed or replaced before")
        elif is_ended and time.time_ns() - job.created_ns > self._settings.timeout_s * 1e9:
            self._queue.fail(job.key, "there is no committed checkpoint of that save")
        return False

    def _do(self, job: ExportJob) -> None:
        if job.n_attempts >= MAX_ATTEMPTS:
            self._queue.fail(job.key, f"its exporter was killed {job.n_attempts} times")
            return
        try:
            if not self._queue.begin(job):
                return
            self._queue.remove_leftovers(job.name)
            self._export(job)
        except Exception as error:  # the next ones must be exported nevertheless
            self._queue.fail(job.key, f"{type(error).__name__}: {error}")
        else:
            self._queue.end(job.key)

    def _export(self, job: ExportJob) -> None:
        from asyncckpt.interop.hf.export import below, export_checkpoint
        from asyncckpt.interop.mapping.tensor_rules import rules_from_json

        target = os.path.join(self._settings.exports, job.name)
        _check_replaceable(target)
        options = dict(self._settings.options)
        keys, key_map = below(options.pop("key", None), options.pop("key_map", None))
        rules = options.pop("rules", None)
        export_checkpoint(
            os.path.join(self._settings.root, job.name),
            target,
            keys=keys,
            key_map=key_map,
            rules=None if rules is None else rules_from_json(rules, "rules"),
            overwrite=True,
            beside=self._companions(),
            storage_options=self._settings.storage_options,
            **options,
        )

    def _companions(self) -> ExportCompanions:
        from asyncckpt.interop.hf.export import ExportCompanions
        from asyncckpt.interop.hf.model_outline import ModelOutline

        files = {name: base64.b64decode(text) for name, text in self._settings.files.items()}
        model = self._settings.model
        return ExportCompanions(files=files, model=None if model is None else ModelOutline(**model))


def _check_replaceable(target: str) -> None:
    """Raise unless there is nothing at `target`, or an empty directory, or an earlier export."""
    from asyncckpt.interop.sources.detect import kind_at

    try:
        kind = kind_at(target, Files())
    except CheckpointNotFoundError:
        return
    if kind != "hf" and not (os.path.isdir(target) and not os.listdir(target)):
        raise CheckpointExistsError(
            f"{target} is no export, but of kind {kind}; it was left unchanged. Give another export_to", path=target
        )


def main() -> None:
    """Run the exporter. Arguments: a file descriptor with the settings, and the process ID of the manager."""
    os.nice(NICENESS)
    parent = int(sys.argv[2])
    with open(int(sys.argv[1]), "rb") as file:
        settings = ExportSettings(**json.load(file))
    queue, is_alone, deadline = ExportQueue(settings.exports, settings.run, settings.adopted), False, math.inf
    exporter = Exporter(settings)
    while True:
        is_alone = is_alone or _waits(0.0, is_alone, parent)
        has_more = bool(queue.open_keys())
        # IMPORTANT: the lock is held for one step. An exporter that waits for a save that may never be committed must
        # not hold up those of later trainings, for whose jobs retention keeps checkpoints.
        if has_more and (lock := queue.lock()) is not None:
            with open(lock, "rb"):
                has_more = exporter.step(is_alone=is_alone)
            deadline = math.inf
        elif has_more and is_alone:  # another exporter is at work
            deadline = min(deadline, time.monotonic() + settings.timeout_s)
        if is_alone and (not has_more or time.monotonic() > deadline):
            return
        is_alone = _waits(POLL_S if has_more else None, is_alone, parent)


def _waits(timeout_s: float | None, is_alone: bool, parent: int) -> bool:
    """Wait for a byte of the manager; None: as long as it lives. Return whether the manager has ended."""
    if is_alone:
        time.sleep(timeout_s or 0.0)
        return True
    while not select.select([0], [], [], POLL_S if timeout_s is None else timeout_s)[0]:
        if os.getppid() != parent:  # a forked child of it may hold the other end of the socket
            return True
        if timeout_s is not None:
            return False
    return not os.read(0, 4096)
