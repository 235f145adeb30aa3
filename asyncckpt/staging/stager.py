"""The two stagers.

`SlotStager` is the default: it flattens the state, finds the plan, takes a slot, copies and seals. `HostStager` clones
the state in host memory, for a custom `checkpoint_process`.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from asyncckpt.basics.failpoints import reach
from asyncckpt.basics.gc_control import collect_garbage, gc_paused
from asyncckpt.client.pending_saves import StagedSnapshot
from asyncckpt.client.save_outcomes import OUTCOME_TIMEOUT_S
from asyncckpt.client.slot import Slot, describe_save
from asyncckpt.client.slot_pool import NOWAIT_ANSWER_S, SlotPool
from asyncckpt.client.worker_client import WorkerClient
from asyncckpt.components import CheckpointStager
from asyncckpt.config import CheckpointerConfig
from asyncckpt.distributed.run_agreement import Coordination
from asyncckpt.errors import (
    AsyncCkptError,
    InsufficientMemoryError,
    SaveSkippedError,
    SlotBusyError,
    SlotTimeoutError,
    StagingError,
)
from asyncckpt.format.names import SaveId
from asyncckpt.memory.slot import PAGE_NBYTES
from asyncckpt.planning.contributions import Contribution
from asyncckpt.planning.planner import PlanCache, contribution_of
from asyncckpt.planning.save_plan import SavePlan
from asyncckpt.protocol.request import SaveRequest
from asyncckpt.sharding.shard_types import ShardedSlice
from asyncckpt.staging.copy_engine import CopyEngine
from asyncckpt.staging.deferred_copy import DeferredCopy
from asyncckpt.staging.mutation_check import SamplingRounds
from asyncckpt.staging.overlap import Overlap
from asyncckpt.staging.save_request import (
    NOTHING_TO_REPORT,
    ContextDigests,
    StructureReport,
    StructureReporter,
    build_request,
)
from asyncckpt.staging.slot_copy import (
    MANY_BOXES,
    FullSlotCopier,
    RingCopier,
    SlotCopier,
    SlotRequirement,
    required_slot,
)
from asyncckpt.state_dict.flatten import Flattened, flatten
from asyncckpt.state_dict.leaf_codecs import decode_leaf, encode_leaves
from asyncckpt.state_dict.pickling import unpickle
from asyncckpt.state_dict.stateful import StateDictCache
from asyncckpt.state_dict.unflatten import unflatten
from asyncckpt.torch_tensors import copyable

_prepare_numbers = itertools.count()
_OURS = frozenset({"path", "step", "save_id", "metadata", "mirror"})


class SlotStager(CheckpointStager):
    """Copies into slots of the worker.

    Args:
        process: The client of the worker, which lends slots and gets the announcement of each save.
        ranks: The ranks that save together.
        config: For layout and writing options.
        engine: Copies the tensors; default: one for CUDA devices.
        overlap: The `Overlap` of a stager that this one replaces, so that its optimizers stay attached.

    Attributes:
        plans: Plans by structure.
        overlap: The copies behind the training.
    """

    def __init__(
        self,
        process: WorkerClient,
        ranks: Coordination,
        config: CheckpointerConfig,
        *,
        engine: CopyEngine | None = None,
        overlap: Overlap | None = None,
    ) -> None:
        self._process, self._ranks, self._config = process, ranks, config
        self.plans = PlanCache(
            files_per_rank=config.files_per_rank,
            rank=ranks.rank.rank,
            allow_pickle=config.allow_pickle,
            max_shard_nbytes=config.max_shard_bytes,
            layout=config.layout,
            groups_by_role=config.reuse == "auto",
        )
        self.overlap = overlap or Overlap(config)
        self._engine = engine or CopyEngine(config)
        rounds = SamplingRounds()
        self._full_copier = FullSlotCopier(process, config, self._engine, self.overlap, rounds)
        self._ring_copier = RingCopier(process, config, self._engine, self.overlap, rounds)
        self._reporter = StructureReporter(config, self._engine.is_on_device)
        self._digests = ContextDigests()

    def stage(self, state_dict: Mapping[str, Any], **kw: Any) -> StagedSnapshot:
        """Take the snapshot into a slot and seal it. Blocks for a free slot (by policy) and for the copy.

        What may be copied behind the training (`Overlap.choose_deferred`), and the seal after it, are left to the
        result's `start_deferred`.

        Args:
            state_dict: The state.
            **kw: `path`, `step`, `save_id` (its epoch, and the run of several ranks, are filled in here), `metadata`,
                and `mirror` if there is one; others are kept for the commit hooks.

        Raises:
            UnsupportedLeafError, DuplicateNameError: The state cannot be stored; nothing was begun.
            StagingError: torch could not copy a tensor.
            PlanTimeoutError, RanksDisagreeError: In a save in which the ranks meet; see `Coordination.agree`.
            AsyncCkptError: No slot, no memory, no worker.

        Blocks: in a save in which the ranks meet, also for the other ranks, up to `plan_timeout_s`.
        """
        began = time.perf_counter()
        path, step = kw["path"], kw["step"]
        plan, flat, save_id = self._planned(state_dict, kw)
        leaves = encode_leaves(flat, self._config.layout)
        planned = time.perf_counter()
        self._process.connect()  # if the session is lost, open another one before a slot of the lost one is taken
        save_id = save_id.with_parts(epoch=self._process.epochs.epoch_for(path, save_id.run_id, kw.get("mirror") or ""))
        report = self._reporter.report(plan, flat, save_id.sequence)
        if report.changed:
            report = report._replace(changed=self._ranks.is_changed([flat.fqns[number] for number in plan.unagreed]))
        required = required_slot(self._config, plan, self._request(plan, leaves, save_id, report, kw))
        slot: Slot | None = None
        try:
            slot = self._process.pool.acquire(
                required.nbytes, plan, save_id, step=step, path=path, spare_nbytes=required.spare_nbytes
            )
            acquired = time.perf_counter()
            reach("trainer: slot taken")
            slot.generation += 1
            slot.is_ring = required.ring is not None
            nbytes = plan.file_nbytes + len(required.request)
            self._process.begin(save_id, slot, step=step, path=path, nbytes=nbytes, umask=required.asked.umask)
            reach("trainer: announced")
            slot.memory.control.open(slot.generation)
            copier = self._copier_for(required)
            started = copier.start(slot, required, plan, flat, report, save_id=save_id, step=step, path=path)
            copied = time.perf_counter()
            if not started.is_deferred:
                started.seal()
        except BaseException as error:
            if slot is not None:
                slot.settle()
            known = self._roll_back(save_id, error, step, path)
            if known is error or not isinstance(error, Exception):
                raise
            raise known from error
        seconds = {
            "plan": planned - began,
            "acquire": acquired - planned,
            "copy": copied - acquired,
            "seal": time.perf_counter() - copied,
        }
        deferred = DeferredCopy(
            started.job,
            started.check,
            started.transfer,
            seal=started.seal,
            roll_back_save=lambda error: self._roll_back(save_id, error, step, path),
            take_over_rollback=partial(self._process.handled.append, save_id.sequence),
            give_back_rollback=partial(self._give_back_rollback, save_id.sequence),
            seconds=seconds,
        )
        return StagedSnapshot(
            save_id=save_id,
            step=step,
            path=path,
            slot=slot,
            nbytes=plan.file_nbytes,
            seconds=seconds,
            began=began,
            extra={name: value for name, value in kw.items() if name not in _OURS},
            start_deferred=partial(self.overlap.copier.submit, deferred) if started.is_deferred else None,
            details={} if required.ring is None else {"ring_nbytes": required.ring.cells_nbytes},
            mirror=kw.get("mirror") or "",
        )

    def _copier_for(self, required: SlotRequirement) -> SlotCopier:
        return self._full_copier if required.ring is None else self._ring_copier

    def _roll_back(self, save_id: SaveId, error: BaseException, step: int, path: str) -> AsyncCkptError:
        """Withdraw a save whose copy has failed, and has ended; return the error for its futures."""
        reach("trainer: withdrawing")
        skipped = isinstance(error, SaveSkippedError)
        self._process.withdraw(save_id, str(error) if skipped else f"staging failed: {error!r}", skipped=skipped)
        if isinstance(error, AsyncCkptError):
            return error
        text = f"step {step}: copying the state into memory failed: {error}"
        found = StagingError(text, save_id=str(save_id), step=step, path=path)
        found.__cause__ = error
        return found

    def _give_back_rollback(self, sequence: int) -> None:
        """Let `save()`, not the copier, roll this save back."""
        with contextlib.suppress(ValueError):  # `take_over_rollback` was not called
            self._process.handled.remove(sequence)

    def prepare(self, state_dict: Mapping[str, Any], *, refused: AsyncCkptError | None = None) -> None:
        """Do the one-time work of the first save of `state_dict`: plan, slot, views, pages. Takes no save id.

        Args:
            state_dict: The state.
            refused: Why this rank cannot do so; it is raised once the other ranks have been told.

        Raises:
            UnsupportedLeafError, DuplicateNameError: The state cannot be stored.
            PlanTimeoutError, RanksDisagreeError: With several ranks; see `Coordination.prepare`.
            AsyncCkptError: No slot, no memory, no worker.

        Blocks: for the worker, for pages, for a slot as `on_busy` says, and for the other ranks.
        """
        ranks, state_dicts = self._ranks, StateDictCache()
        if ranks.alone:
            if refused is not None:
                raise refused
            self._process.connect()
        else:

            def contributed() -> tuple[Flattened, Contribution]:
                if refused is not None:
                    raise refused
                self._process.connect()
                flat = self.plans.flatten(state_dict, state_dicts)
                encode_leaves(flat, self._config.layout)
                return flat, contribution_of(flat)

            ranks.prepare(contributed)
            self.plans.agreement = ranks.agreement
        made = self.plans.n_plans_made
        with gc_paused():
            plan, flat = self.plans.plan_for(state_dict, state_dicts)
        save_id = SaveId(0, 0, ranks.run_id)
        leaves, kw = encode_leaves(flat, self._config.layout), {"step": 0, "path": "/"}
        required = required_slot(self._config, plan, self._request(plan, leaves, save_id, NOTHING_TO_REPORT, kw))
        ready = partial(self._copier_for(required).prepare, required=required, plan=plan, flat=flat)
        _prepare_slot(self._process.pool, plan, required, ready)
        if self.plans.n_plans_made > made and len(plan.boxes) >= MANY_BOXES:
            collect_garbage()

    def _request(
        self, plan: SavePlan, leaves: Sequence[Any], save_id: SaveId, report: StructureReport, kw: Mapping[str, Any]
    ) -> SaveRequest:
        return build_request(
            self._config,
            self._ranks.rank,
            save_id,
            path=kw["path"],
            step=kw["step"],
            parts=plan.part_ranges(),
            structure=self._digests.structure_of(plan, leaves),
            n_tensors=plan.n_tensors,
            leaves=leaves,
            metadata=kw.get("metadata"),
            report=report,
            asks_hooks=self._process.hooks.asks,
            mirror=kw.get("mirror") or "",
        )

    def _planned(self, state_dict: Mapping[str, Any], kw: Mapping[str, Any]) -> tuple[SavePlan, Flattened, SaveId]:
        """Return the plan, the flattened state, and the save's id, still without its epoch."""
        save_id: SaveId = kw["save_id"]
        ranks, own, state_dicts = self._ranks, save_id.sequence, StateDictCache()
        if not ranks.alone:
            save_id = save_id.with_parts(sequence=ranks.aligned(own))
            self._await_outcome(save_id, kw["step"], kw["path"])
            if ranks.must_meet:
                flat = self.plans.flatten(state_dict, state_dicts)
                ranks.agree(flat, contribution_of(flat), sequence=save_id.sequence, path=kw["path"], step=kw["step"])
                # `stage` asks again. Ask already here, since it makes this rank known to the worker.
                with contextlib.suppress(AsyncCkptError):
                    self._process.epochs.epoch_for(kw["path"], ranks.run_id, kw.get("mirror") or "")
            else:
                ranks.skip_meeting(save_id.sequence, kw["path"])
            if self.plans.agreement is not ranks.agreement:
                self.plans.agreement = ranks.agreement
            save_id = save_id.with_parts(sequence=ranks.aligned(own), run_id=ranks.run_id)
        with gc_paused():
            plan, flat = self.plans.plan_for(state_dict, state_dicts)
        return plan, flat, save_id

    def _await_outcome(self, save_id: SaveId, step: int, path: str) -> None:
        """Wait, as `on_busy` says, until it is known whether this save meets the other ranks.

        Raises:
            SlotTimeoutError, SaveSkippedError, SlotBusyError: As `on_busy` says.
            WorkerUnavailableError: There is no worker that could report it.
        """
        ranks, outcomes, config = self._ranks, self._ranks.outcomes, self._config
        deadline, losses = time.monotonic() + config.slot_timeout_s, outcomes.losses
        if ranks.agreement is not None or ranks.is_out_of_sync:
            self._process.connect()  # without a worker this rank gets no outcomes, and cannot refuse the save
        connected = time.monotonic()
        while (awaited := ranks.awaited_save(save_id.sequence)) is not None:
            limit = deadline
            if config.on_busy != "wait":  # without a slot of ours in use, the outcome only needs the worker's answer
                limit = connected if self._process.pool.is_in_use else min(deadline, connected + NOWAIT_ANSWER_S)
            left_s = limit - time.monotonic()
            # In steps: when the outcome counts as lost depends on when the worker first reports, during this wait.
            step_s = min(outcomes.resolve_after_timeout(ranks.run_id, awaited), OUTCOME_TIMEOUT_S)
            outcomes.wait(ranks.run_id, awaited, losses, max(0.0, min(step_s, left_s)))
            if ranks.awaited_save(save_id.sequence) != awaited:
                continue
            if outcomes.losses != losses and time.monotonic() < deadline:
                # With no save in flight, no failover finds another worker for this rank: connect here.
                losses = outcomes.losses
                self._process.connect()
                connected = time.monotonic()
            elif left_s <= step_s:
                raise _not_ended(save_id, awaited, ranks.max_in_flight, config, step=step, path=path)

    def close(self) -> None:
        """Cancel copies that still run, and remove the hooks. The slots belong to `process`."""
        self.overlap.close()


def _not_ended(
    save_id: SaveId, awaited: int, max_in_flight: int, config: CheckpointerConfig, *, step: int, path: str
) -> AsyncCkptError:
    """Return the error, as `on_busy` says, of a save that cannot begin before an earlier one has ended."""
    what, facts = describe_save(save_id, step), {"save_id": str(save_id), "step": step, "path": path}
    busy = (
        f"{what} was not saved: save {awaited} of this run has not ended on all ranks, and at most {max_in_flight} "
        "saves (the smallest `slots` of all ranks) may be in flight"
    )
    if config.on_busy == "skip":
        return SaveSkippedError(busy, **facts)
    if config.on_busy == "error":
        return SlotBusyError(busy, **facts)
    text = f"{busy}; waited slot_timeout_s={config.slot_timeout_s:g}"
    return SlotTimeoutError(text, timeout_s=config.slot_timeout_s, **facts)


def _prepare_slot(pool: SlotPool, plan: SavePlan, required: SlotRequirement, ready: Callable[[Slot], object]) -> None:
    """Make sure that the pool has a slot for saves with `plan`, its pages mapped and its views made.

    Args:
        pool: The pool of the checkpointer.
        plan: The plan.
        required: The slot that such a save needs.
        ready: `SlotCopier.prepare`, called with the slot once its pages are mapped.

    Raises:
        InsufficientMemoryError: There is no room for it, or there are no pages for it.
        AsyncCkptError: As `SlotPool.acquire`.

    Blocks: for an allocation and its pages; while every slot is in use and too small, as `on_busy` says.
    """
    if pool.fits(required.nbytes):
        return  # a slot in use is large enough, and its pages are mapped
    user = SaveId(0, next(_prepare_numbers), "prepare")
    slot = pool.acquire(required.nbytes, plan, user, step=0, path="(prepare)", spare_nbytes=required.spare_nbytes)
    try:
        if slot.views is None:
            _fault_in(slot)
        ready(slot)
    finally:
        pool.free(user)


def _fault_in(slot: Slot) -> None:
    """Map every page of a new slot into this process; the worker may still be allocating them."""
    mapping = slot.memory.mapping
    try:
        complete = mapping.populate(0, mapping.nbytes)
    except OSError as error:
        raise InsufficientMemoryError(
            f"there are no {mapping.nbytes} bytes of memory for the next save: {error}", nbytes=mapping.nbytes
        ) from error
    if not complete:  # a kernel before 5.14: touch them
        ctypes.memset(mapping.address + PAGE_NBYTES, 0, mapping.nbytes - 2 * PAGE_NBYTES)


class HostStager(CheckpointStager):
    """Returns a deep copy of the state dict whose tensors lie in host memory.

    A tensor of which this process holds only a part is replaced by a `ShardedSlice`; by a list of them if it holds no
    part, or several.

    Args:
        allow_pickle: Copy leaves of any type, through a pickle.
    """

    def __init__(self, *, allow_pickle: bool = False) -> None:
        self._allow_pickle = allow_pickle

    def stage(self, state_dict: Mapping[str, Any], **kw: Any) -> Any:
        """Copy `state_dict`. Blocks for the copy.

        Raises:
            UnsupportedLeafError: The state cannot be stored.
        """
        flat = flatten(state_dict, allow_pickle=self._allow_pickle)
        with torch.no_grad():
            tensors: list[Any] = [copyable(t.detach()).to("cpu", copy=True).view(t.dtype) for t in flat.tensors]
        for number, leaf in flat.shards.items():
            parts = zip(leaf.sources, leaf.boxes, strict=True)
            slices = [ShardedSlice(tensors[source], leaf.global_shape, box[0]) for source, box in parts]
            tensors[number] = slices[0] if len(slices) == 1 else slices
        objects = [decode_leaf(raw, lambda _, data: unpickle(data)) for raw in encode_leaves(flat)]
        return unflatten(flat.tree, tensors, objects, marks=True, type_of=flat.types.get)

    def close(self) -> None:
        """Nothing to free."""
