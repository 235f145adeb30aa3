"""Writes a checkpoint in this process, without a worker: same format and durability, while the caller waits."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from asyncckpt.basics.gc_control import gc_paused
from asyncckpt.commit_hooks import HookRunner
from asyncckpt.components import CheckpointWriter
from asyncckpt.config import CheckpointerConfig
from asyncckpt.distributed.run_agreement import Coordination
from asyncckpt.errors import CommitUnknownError
from asyncckpt.format.coverage import uncovered
from asyncckpt.format.names import SaveId
from asyncckpt.save_handle import SaveReport
from asyncckpt.state_dict.leaf_codecs import encode_leaves
from asyncckpt.storage.files import Files
from asyncckpt.storage.rank_writer import RankResult
from asyncckpt.sync.collective_save import hole_error, save_collectively
from asyncckpt.sync.local_save import LocalSave

_OURS = frozenset({"step", "save_id", "metadata"})


class SyncWriter(CheckpointWriter):
    """The default writer of `SyncCheckpointer`; arguments as `LocalSave`."""

    def __init__(
        self, config: CheckpointerConfig, ranks: Coordination, hooks: HookRunner, files: Files | None = None
    ) -> None:
        self._steps = LocalSave(config, ranks, hooks, files)

    def write(self, state_dict: Mapping[str, Any], path: str, **kw: Any) -> SaveReport:
        """Write and commit. Blocks until the checkpoint of all ranks is durable.

        Args:
            state_dict: The state.
            path: Absolute path of the checkpoint's directory.
            **kw: `step`, `save_id` (its epoch, and the run of several ranks, are filled in here), `metadata`; others
                are passed to the commit hooks.

        Raises:
            UnsupportedLeafError, DuplicateNameError: The state cannot be stored.
            InsufficientMemoryError: The snapshot does not fit into memory.
            CheckpointExistsError, SaveFailedError, CommitUnknownError: Storage; see `asyncckpt.errors`.
            PlanTimeoutError, RanksDisagreeError, ReplicaMismatchError: With several ranks.
        """
        began = time.perf_counter()
        extra = {name: value for name, value in kw.items() if name not in _OURS}
        if self._steps.ranks.alone:
            save_id, result = self._write_alone(state_dict, path, kw, extra)
        else:
            save_id, result = save_collectively(self._steps, state_dict, path, kw, extra)
        self._steps.hooks.after(path, extra)
        if self._steps.ranks.rank.rank == 0:
            self._steps.clean_up(path, save_id)
        seconds = {**result.seconds, "total": time.perf_counter() - began}
        details: dict[str, Any] = {"direct": result.direct}
        if self._steps.config.reuse != "off":
            details["reused_nbytes"] = result.reused_nbytes
        return SaveReport(save_id=str(save_id), nbytes=result.nbytes, seconds=seconds, details=details)

    def _write_alone(
        self, state_dict: Mapping[str, Any], path: str, kw: Mapping[str, Any], extra: Mapping[str, Any]
    ) -> tuple[SaveId, RankResult]:
        with gc_paused():
            plan, flat = self._steps.plans.plan_for(state_dict)
        leaves = encode_leaves(flat, self._steps.config.layout)
        save_id: SaveId = kw["save_id"]
        holes = uncovered([plan.structure]) if flat.shards else []
        if holes:
            raise hole_error(holes, save_id, path)
        with self._steps.failures(save_id, path, kw["step"]):
            save_id = save_id.with_parts(epoch=self._steps.epoch_for(path, save_id.run_id))
        try:
            request, result = self._steps.write_files(plan, flat, leaves, save_id, path, kw)
            self._steps.ask_hook(path, save_id, kw["step"], extra)
            with self._steps.failures(save_id, path, kw["step"]):
                self._steps.publish(request, [result])
        except CommitUnknownError:
            raise
        except Exception:
            self._steps.remove(path, save_id)
            raise
        return save_id, result

    def close(self) -> None:
        """Free memory and threads. Idempotent."""
        self._steps.close()
