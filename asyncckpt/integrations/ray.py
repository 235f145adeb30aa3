"""Ray Train: checkpoints that the worker writes into the run's `storage_path`, each reported to Ray when committed.

    def train_func(config):
        with RayCheckpointManager() as checkpoints:
            found = checkpoints.restore(state)
            for step in range(found.step + 1 if found else 0, config["steps"]):
                ...
                checkpoints.report({"loss": loss}, state, step=step)

Ray itself copies nothing: `report` stages the state and returns, and the thread that Ray uploads checkpoints with waits
for the commit. `RunConfig(checkpoint_config=CheckpointConfig(num_to_keep=...))` removes old checkpoints as usual.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping, MutableMapping
from types import TracebackType
from typing import Any

import ray.train
from ray.train.collective import broadcast_from_rank_zero

from asyncckpt.errors import AsyncCkptError, ConfigError, UnsupportedPathError
from asyncckpt.loading.open_checkpoint import open_checkpoint
from asyncckpt.maintenance.policy import metrics_in
from asyncckpt.manager.manager import CheckpointManager
from asyncckpt.restore import RestoredCheckpoint, look
from asyncckpt.save_handle import SaveHandle
from asyncckpt.storage.catalog import latest_checkpoint
from asyncckpt.storage.locate import with_storage_options

SCHEMES = {"local": "", "s3": "s3://", "gcs": "gs://", "abfs": "az://"}
"""PyArrow's `FileSystem.type_name` -> what makes its path one of ours."""

COMMIT_WAIT_S = 60.0
"""How long `restore` waits until a checkpoint that was read from memory is committed, so that Ray can be told of it."""

POLL_S = 0.1
_BY_RAY = ("root", "max_to_keep", "keep_period", "best_fn", "best_mode", "step_format", "shared", "mirror")
_log = logging.getLogger("asyncckpt")


class RayCheckpointManager:
    """Saves and restores the checkpoints of a run of Ray Train. Make one in the training function, on every rank.

    A checkpoint is a directory `checkpoint_<step>_<attempt>` in the run's directory, where Ray puts its own. A context
    manager.

    Args:
        **options: Arguments of `CheckpointManager`, except for those of which Ray decides: the directory and its names,
            and which checkpoints stay (`RunConfig.checkpoint_config`). So also fields of `CheckpointerConfig`, such as
            `storage_options` for a `storage_path` in an object store.

    Attributes:
        manager: The `CheckpointManager`; for example `manager.checkpointer.attach(optimizer)`.

    Raises:
        ConfigError: An option that Ray decides on, `on_busy` other than "wait", or another invalid one.
        UnsupportedPathError: The `storage_path` is on a file system that only PyArrow knows.
        WorkerUnavailableError: The endpoint that was given cannot be reached.
    """

    def __init__(self, **options: Any) -> None:
        for name in _BY_RAY:
            if name in options:
                raise ConfigError(f"{name} is not for RayCheckpointManager: Ray's RunConfig decides", field=name)
        storage = ray.train.get_context().get_storage()
        self._filesystem, self._run_path = storage.storage_filesystem, storage.experiment_fs_path
        # Each attempt has its own names: of two reports of one directory, Ray removes the first, and so the second too.
        self._step_format = f"checkpoint_{{step:09d}}_{broadcast_from_rank_zero(uuid.uuid4().hex[:8])}"
        self.manager = CheckpointManager(
            _our_path(self._filesystem, self._run_path),
            step_format=self._step_format,
            shared=True,  # Ray runs one attempt at a time, and this manager removes nothing
            **options,
        )
        self._config = self.manager.checkpointer.config
        if self._config.on_busy != "wait":
            self.manager.close()
            raise ConfigError(
                f"on_busy={self._config.on_busy!r}: expected 'wait', since all ranks must report the same checkpoints",
                field="on_busy",
                value=repr(self._config.on_busy),
            )

    def restore(self, state: MutableMapping[str, Any] | None = None, **options: Any) -> RestoredCheckpoint | None:
        """Load the newest sound checkpoint of the run into `state`, from the worker's memory if possible.

        That may be newer than `ray.train.get_checkpoint()`: Ray does not register what was committed after a rank has
        died. Such checkpoints are reported here, with the metrics that they were saved with.

        Args:
            state: State to fill in place, as it is given to `report`; None: a new dict is made.
            **options: Further arguments of `CheckpointManager.restore`.

        Returns:
            What was loaded; None on all ranks if the run has no checkpoint yet.

        Raises:
            AsyncCkptError, OSError: As `CheckpointManager.restore`.

        Blocks: as `CheckpointManager.restore`, and up to 60 s for the commit of what was read from memory.
        """
        found = self.manager.restore(state, **options)
        if found is not None:
            self._report_earlier(found)
        return found

    def report(
        self, metrics: Mapping[str, Any], state: Mapping[str, Any] | None = None, *, step: int | None = None
    ) -> SaveHandle | None:
        """Report metrics, and with a state also a checkpoint, as `ray.train.report` does. All ranks call it.

        Ray gets the checkpoint once it is committed. If the save fails, so does this attempt, as with a failed upload
        of Ray's own; `FailureConfig` says whether another one follows, which restores the checkpoint before.

        Args:
            metrics: Metrics of this step. With a state they are kept in the checkpoint, so they must be JSON values.
            state: State to save; see `CheckpointManager.save`. None: only report the metrics.
            step: Training step; required with a state.

        Returns:
            The save's handle; None without a state.

        Raises:
            ConfigError: There is a state and no step, or the metrics are not JSON.
            UnsupportedLeafError, ...: As `CheckpointManager.save`.

        Blocks: until all ranks report, and as `CheckpointManager.save`.
        """
        if state is None:
            ray.train.report(dict(metrics))
            return None
        if step is None:
            raise ConfigError("report() was given a state and no step", field="step")
        handle = self.manager.save(step, state, metrics)
        checkpoint = self._checkpoint(self._step_format.format(step=step))

        def committed(given: ray.train.Checkpoint, name: str) -> ray.train.Checkpoint:
            if handle is not None:  # None: a SyncCheckpointer has committed it
                handle.written.result()  # ends within the time limits of the save
            return given

        ray.train.report(
            dict(metrics),
            checkpoint=checkpoint,
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC,
            checkpoint_upload_fn=committed,
            delete_local_checkpoint_after_upload=False,
        )
        return handle

    def close(self) -> None:
        """Wait until all saves are committed. Idempotent. Raises and blocks as `CheckpointManager.close`."""
        self.manager.close()

    def __enter__(self) -> RayCheckpointManager:
        self.manager.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.manager.__exit__(kind, error, tb)

    def _checkpoint(self, name: str) -> ray.train.Checkpoint:
        return ray.train.Checkpoint(f"{self._run_path}/{name}", self._filesystem)

    def _report_earlier(self, found: RestoredCheckpoint) -> None:
        """Report committed checkpoints that Ray does not know, up to the restored one, so that it can remove them."""
        is_first = ray.train.get_context().get_world_rank() == 0
        unknown = self._unreported(found) if is_first else []
        for number in range(broadcast_from_rank_zero(len(unknown))):  # one by one: Ray broadcasts less than 1 kB
            name, metrics = unknown[number] if is_first else ("", {})
            ray.train.report(
                metrics,
                checkpoint=self._checkpoint(broadcast_from_rank_zero(name)),
                checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
            )

    def _unreported(self, found: RestoredCheckpoint) -> list[tuple[str, dict[str, Any]]]:
        """Return names and metrics of committed checkpoints that Ray does not know, the restored one last."""
        if not self._is_committed(found):
            return []
        known = ray.train.get_checkpoint()
        reported = None if known is None else known.path.rsplit("/", 1)[-1]
        names: list[tuple[str, dict[str, Any]]] = []
        with with_storage_options(self._config.storage_options):
            for one in look(self.manager.root):
                name = one.path.rsplit("/", 1)[-1]
                if name == reported:
                    break
                if one.save_id is not None and str(one.save_id) <= found.save_id:
                    names.append((name, self._metrics_of(one.path)))
        return names[::-1]

    def _metrics_of(self, path: str) -> dict[str, Any]:
        try:
            with open_checkpoint(path, source="disk") as opened:
                return dict(metrics_in(opened.metadata) or {})
        except AsyncCkptError:  # a broken one; it has no metrics that Ray could rank it by
            return {}

    def _is_committed(self, found: RestoredCheckpoint) -> bool:
        """Wait until what was restored is committed under its path: the worker may still be writing it."""
        until = time.monotonic() + COMMIT_WAIT_S
        while True:
            committed = latest_checkpoint(found.path, storage_options=self._config.storage_options)
            if committed is not None:
                return True
            if time.monotonic() > until:
                _log.warning(
                    "restored step %d from memory; %s was not committed within %.0f s, and Ray is not told of it",
                    found.step,
                    found.path,
                    COMMIT_WAIT_S,
                )
                return False
            time.sleep(POLL_S)


def _our_path(filesystem: Any, path: str) -> str:
    scheme = SCHEMES.get(filesystem.type_name)
    if scheme is None:
        raise UnsupportedPathError(
            f"{path} is on a file system of type {filesystem.type_name!r}; expected one of {', '.join(SCHEMES)}: a "
            "local path, or a URL that begins with s3://, gs:// or abfs://",
            path=path,
        )
    return scheme + path


def load_path(checkpoint: ray.train.Checkpoint) -> str:
    """Return the path or URL of a checkpoint of Ray, for `asyncckpt.load` and the commands.

    Raises:
        UnsupportedPathError: It is on a file system that only PyArrow knows.
    """
    return _our_path(checkpoint.filesystem, checkpoint.path)
