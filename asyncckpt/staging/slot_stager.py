"""The default stager: flatten, find the plan, take a slot, copy, seal."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from asyncckpt.client import WorkerProcess
from asyncckpt.config import CheckpointerConfig
from asyncckpt.errors import AsyncCkptError, StagingError
from asyncckpt.format.names import SaveId
from asyncckpt.format.objects import encode_objects
from asyncckpt.memory.slot import slot_nbytes
from asyncckpt.parts import CheckpointStager
from asyncckpt.pending import StagedSnapshot
from asyncckpt.planning.leaves import encode_leaves
from asyncckpt.planning.plan import SavePlan
from asyncckpt.planning.planner import PlanCache
from asyncckpt.protocol.request import SaveRequest, encode_request
from asyncckpt.staging.copy_cpu import SlotImage
from asyncckpt.staging.slot_pool import LentSlot
from asyncckpt.staging.umask import current_umask

REQUEST_SLACK_NBYTES = 64 * 1024
"""Room for objects that grow between saves, so that a longer log line needs no new slot. Chosen, not measured."""


class SlotStager(CheckpointStager):
    """Copies into slots of the worker.

    Args:
        process: Lends slots and is told that a save begins.
        config: For layout and writing options.
        package: asyncckpt's version.
    """

    def __init__(self, process: WorkerProcess, config: CheckpointerConfig, *, package: str) -> None:
        self._process, self._config, self._package = process, config, package
        self.plans = PlanCache(files_per_rank=config.files_per_rank)

    def stage(self, state_dict: Mapping[str, Any], **kw: Any) -> StagedSnapshot:
        """Take the snapshot into a slot and seal it. Blocks for a free slot (by policy) and for the copy.

        Args:
            state_dict: The state.
            **kw: `path`, `step`, `save_id` (its epoch is filled in here), `metadata`; others are ignored.

        Raises:
            UnsupportedLeafError, DuplicateNameError: The state cannot be stored; nothing was begun.
            StagingError: torch could not copy a tensor.
            AsyncCkptError: No slot, no memory, no worker.
        """
        began = time.perf_counter()
        path, step, save_id = kw["path"], kw["step"], kw["save_id"]
        plan, flat = self.plans.take(state_dict)
        leaves = encode_leaves(flat)
        planned = time.perf_counter()
        self._process.connect()  # a session that is known to be lost is ended first, and its slots are given up
        save_id = save_id._replace(epoch=self._process.lineage.epoch_for(path, save_id.run_id))
        umask = current_umask()
        request = encode_request(self._request(plan, encode_objects(save_id, leaves), save_id, umask, kw))
        wanted = slot_nbytes(plan.body_nbytes, len(request))
        slot: LentSlot | None = None
        try:
            slot = self._process.pool.acquire(
                wanted, plan, save_id, step=step, path=path, spare_nbytes=REQUEST_SLACK_NBYTES
            )
            acquired = time.perf_counter()
            slot.generation += 1
            self._process.begin(
                save_id, slot, step=step, path=path, nbytes=plan.file_nbytes + len(request), umask=umask
            )
            slot.memory.control.open(slot.generation)
            image = _image_of(slot, plan)
            image.fill(flat.tensors, save_id)
            copied = time.perf_counter()
            slot.memory.control.seal(request, image.body_end)
        except BaseException as error:
            if slot is not None and isinstance(slot.views, SlotImage):
                slot.views.settle()
            self._process.withdraw(save_id, f"staging failed: {error!r}")
            if isinstance(error, AsyncCkptError) or not isinstance(error, Exception):
                raise
            raise StagingError(
                f"step {step}: copying the state into memory failed: {error}",
                save_id=str(save_id),
                step=step,
                path=path,
            ) from error
        sealed = time.perf_counter()
        seconds = {
            "plan": planned - began,
            "acquire": acquired - planned,
            "copy": copied - acquired,
            "seal": sealed - copied,
        }
        return StagedSnapshot(
            save_id=save_id, step=step, path=path, slot=slot, nbytes=plan.file_nbytes, seconds=seconds, began=began
        )

    def _request(
        self, plan: SavePlan, objects: bytes, save_id: SaveId, umask: int, kw: Mapping[str, Any]
    ) -> SaveRequest:
        return SaveRequest(
            save_id=str(save_id),
            step=kw["step"],
            path=kw["path"],
            rank=self._process.rank.rank,
            world_size=self._process.rank.world_size,
            parts=plan.part_ranges(),
            structure=plan.structure,
            objects=objects,
            n_tensors=plan.n_tensors,
            metadata=json.dumps(kw.get("metadata") or {}, allow_nan=False),
            fsync=self._config.fsync,
            umask=umask,
            write_threads=self._config.write_threads or 0,
            package=self._package,
            commit_timeout_s=self._config.commit_timeout_s,
            hook_timeout_s=0,
            plan="",
            samples=b"",
            contribution=b"",
        )

    def close(self) -> None:
        """Nothing to free: the slots belong to the process."""


def _image_of(slot: LentSlot, plan: SavePlan) -> SlotImage:
    """Return the slot's image of `plan`, made when the slot was last used for another."""
    if isinstance(slot.views, SlotImage) and slot.views.plan is plan:
        return slot.views
    image = slot.views = SlotImage(slot.memory.mapping.address, plan)
    return image
