"""The synchronous save of several ranks: each step runs on all ranks, and succeeds on all or none; rank 0 commits."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from asyncckpt.basics.gc_control import gc_paused
from asyncckpt.distributed.meetings import SAVE, Meeting, Save, all_or_none
from asyncckpt.distributed.run_agreement import check_equal
from asyncckpt.errors import (
    AsyncCkptError,
    CommitUnknownError,
    OverlappingShardsError,
    PlanTimeoutError,
    RanksDisagreeError,
    ReplicaMismatchError,
    SaveFailedError,
)
from asyncckpt.format.coverage import Tally, seed_of, tally_of, uncovered
from asyncckpt.format.manifest import RankRecord
from asyncckpt.format.names import SaveId
from asyncckpt.planning.planner import contribution_of
from asyncckpt.planning.replica_checks import sample_digests
from asyncckpt.protocol.request import SaveRequest
from asyncckpt.protocol.samples import decode_samples, unequal
from asyncckpt.state_dict.flatten import Flattened
from asyncckpt.state_dict.leaf_codecs import encode_leaves
from asyncckpt.state_dict.stateful import StateDictCache
from asyncckpt.storage.rank_writer import RankResult
from asyncckpt.sync.local_save import LocalSave

_log = logging.getLogger("asyncckpt.sync")


def save_collectively(
    steps: LocalSave, state_dict: Mapping[str, Any], path: str, kw: Mapping[str, Any], extra: Mapping[str, Any]
) -> tuple[SaveId, RankResult]:
    """Save on all ranks.

    Args:
        steps: The steps of this rank.
        state_dict: The state.
        path: Directory of the checkpoint.
        kw: `step`, `save_id`, `metadata`.
        extra: Arguments for the commit hooks.

    Returns:
        The save's id, and what this rank wrote.

    Raises:
        AsyncCkptError: As `SyncWriter.write`; on every rank if the save fails on one.
    """
    given: SaveId = kw["save_id"]
    rank = steps.ranks.rank.rank
    given = given.with_parts(sequence=steps.ranks.aligned(given.sequence))
    save = Save(path, given.sequence)
    meeting, state_dicts = steps.ranks.meet_next(save.series, SAVE, save), StateDictCache()
    try:
        save_id = _agree(steps, meeting, state_dict, state_dicts, path, kw["step"], given)
        try:
            request, result, results = _write_all(steps, meeting, state_dict, state_dicts, save_id, path, kw, extra)
        except Exception:
            if rank == 0:  # no rank still writes: each has reported the end of its part
                steps.remove(path, save_id)
            raise
        _publish(steps, meeting, save_id, request, results)
        return save_id, result
    finally:
        meeting.close()


def _together(meeting: Meeting, work: Callable[[], Any], timeout_s: float) -> list[Any]:
    """Do one step of the save on all ranks; `timeout_s`: how long to wait for the other ranks after it."""
    return all_or_none(lambda data: meeting.gather(data, time.monotonic() + timeout_s), work, _failed_on)


def _failed_on(rank: int, error: AsyncCkptError) -> SaveFailedError:
    return SaveFailedError(
        f"the save failed on rank {rank}: {error}",
        code=str(error.facts().get("code") or error.wire_code),
        rank=rank,
        detail=str(error)[:1000],
    )


def _publish(
    steps: LocalSave, meeting: Meeting, save_id: SaveId, request: SaveRequest, results: list[RankResult]
) -> None:
    """Let rank 0 commit, and tell all ranks the outcome."""
    rank, path, published = request.rank, request.path, False

    def publish() -> None:
        nonlocal published
        if rank == 0:
            try:
                with steps.failures(save_id, path, request.step):
                    steps.publish(request, results)
            except CommitUnknownError:
                raise
            except Exception:
                steps.remove(path, save_id)
                raise
            published = True

    try:
        _together(meeting, publish, steps.config.commit_timeout_s)
    except (SaveFailedError, PlanTimeoutError) as error:
        lost = isinstance(error, PlanTimeoutError) or error.code == "exchange"
        if published:
            _log.warning(
                "save of step %d to %s is committed, but not every rank could be told: %s", request.step, path, error
            )
        elif error.code == CommitUnknownError.wire_code or (lost and rank != 0):
            raise CommitUnknownError(
                f"save of step {request.step} to {path}: it is not known whether rank 0 has committed it: {error}",
                path=path,
                save_id=str(save_id),
            ) from error
        else:
            raise


def _agree(
    steps: LocalSave,
    meeting: Meeting,
    state_dict: Mapping[str, Any],
    state_dicts: StateDictCache,
    path: str,
    step: int,
    given: SaveId,
) -> SaveId:
    """Agree on run, epoch, path, step, and on which rank writes what; return the save's id."""
    ranks, timeout_s = steps.ranks, steps.config.plan_timeout_s
    flattened: list[Flattened] = []

    def introduce() -> dict[str, Any]:
        mine, agreement = ranks.own_introduction(path, step), ranks.agreement
        # IMPORTANT: all ranks call `state_dict()` here, with or without an agreement: it may be a collective.
        if agreement is None:
            flattened.append(steps.plans.flatten(state_dict, state_dicts))
            is_changed = True
        else:
            with gc_paused():
                plan, _ = steps.plans.plan_for(state_dict, state_dicts)
            is_changed = bool(plan.unagreed)
        with steps.failures(given, path, step):
            epoch = steps.epoch_for(path, ranks.run_id) if ranks.rank.rank == 0 else 0
        fingerprint = "" if agreement is None else agreement.fingerprint
        return {**mine, "agreement": fingerprint, "changed": is_changed, "epoch": epoch, "sequence": given.sequence}

    introductions = _together(meeting, introduce, timeout_s)
    sequence = ranks.align(given.sequence, (found["sequence"] for found in introductions))
    check_equal(introductions)
    ranks.run_id = introductions[0]["run"]
    agreed = {found["agreement"] for found in introductions}
    if len(agreed) > 1:
        ranks.agreement = None
    if len(agreed) > 1 or any(found["changed"] for found in introductions):
        _meet(steps, meeting, lambda: flattened[0] if flattened else steps.plans.flatten(state_dict, state_dicts))
    if steps.plans.agreement is not ranks.agreement:
        steps.plans.agreement = ranks.agreement
    return given.with_parts(epoch=introductions[0]["epoch"], sequence=sequence, run_id=ranks.run_id)


def _meet(steps: LocalSave, meeting: Meeting, flatten: Callable[[], Flattened]) -> None:
    """Make a new agreement from the contributions of all ranks."""
    ranks, timeout_s = steps.ranks, steps.config.plan_timeout_s
    flattened: list[Flattened] = []

    def contribute() -> bytes:
        flattened.append(flatten())
        return contribution_of(flattened[0]).encode()

    contributed = _together(meeting, contribute, timeout_s)
    try:
        ranks.renew_agreement(
            dict(enumerate(contributed)),
            flattened[0],
            lambda digests: meeting.gather(digests, time.monotonic() + timeout_s),
        )
    except (OverlappingShardsError, RanksDisagreeError):  # raised on all ranks: their claims of shards may be outdated
        ranks.agreement = None
        raise


def _write_all(
    steps: LocalSave,
    meeting: Meeting,
    state_dict: Mapping[str, Any],
    state_dicts: StateDictCache,
    save_id: SaveId,
    path: str,
    kw: Mapping[str, Any],
    extra: Mapping[str, Any],
) -> tuple[SaveRequest, RankResult, list[RankResult]]:
    """Write every rank's files, run the hooks, and compare replicas.

    Returns:
        This rank's request, what this rank wrote, and what all ranks wrote.
    """
    rank = steps.ranks.rank.rank
    own: list[tuple[SaveRequest, RankResult]] = []

    def write() -> dict[str, Any]:
        with gc_paused():
            plan, flat = steps.plans.plan_for(state_dict, state_dicts)
        request, result = steps.write_files(plan, flat, encode_leaves(flat, steps.config.layout), save_id, path, kw)
        own.append((request, result))
        steps.ask_hook(path, save_id, kw["step"], extra)
        samples = sample_digests(plan, flat, save_id.sequence).encode() if steps.config.replicated == "check" else b""
        result = replace(result, tally=tally_of(plan.structure, rank, seed_of(save_id)))
        return {"result": asdict(result), "structure": plan.structure, "samples": samples}

    written = _together(meeting, write, steps.config.commit_timeout_s)
    differing = unequal({rank: decode_samples(found["samples"]) for rank, found in enumerate(written)})
    results = [_result_of(found["result"]) for found in written]
    tallies = [result.tally for result in results if result.tally is not None]
    holes = uncovered([found["structure"] for found in written], tallies, seed=seed_of(save_id))
    if differing or holes:  # all ranks have found the same, and store these per rank, so that the next save works
        whole = {found[0] for found in differing if not BOX.search(found[0])}
        steps.ranks.store_per_rank(sorted(whole | {found[0] for found in holes}))
    for name, _, groups in differing:
        fqn = BOX.sub("", name)
        raise ReplicaMismatchError(
            f"save {save_id} to {path}: tensor {fqn!r} was taken for a replica but differs between ranks {groups}; "
            f"nothing was published. {WHAT_NEXT}",
            fqn=fqn,
            ranks=sorted(rank for group in groups for rank in group),
            save_id=str(save_id),
            path=path,
        )
    if holes:
        raise hole_error(holes, save_id, path)
    return *own[0], results


BOX = re.compile(r" \[[0-9:,]*\]\Z")
"""In the name of a sample of a shard, the box that follows the FQN."""

WHAT_NEXT = (
    "From the next save on, a whole tensor is stored for each rank. A shard must be equal on all ranks that hold it, "
    "and all shards of a tensor must be saved: check offsets, global shape and mesh"
)


def hole_error(holes: Sequence[tuple[str, str]], save_id: SaveId, path: str) -> SaveFailedError:
    """Return the error for tensors that would not be stored exactly once: (name, what is wrong) of each."""
    return SaveFailedError(
        f"save {save_id} to {path}: tensor {holes[0][0]!r} would not be stored exactly once: {holes[0][1]}; nothing "
        f"was published. {WHAT_NEXT}",
        code="coverage",
        path=path,
        detail=f"{holes[0][0]}: {holes[0][1]}",
        save_id=str(save_id),
    )


def _result_of(found: Mapping[str, Any]) -> RankResult:
    dcp = None if found["dcp"] is None else (found["dcp"][0], found["dcp"][1])
    return RankResult(
        **{**found, "record": RankRecord(**found["record"]), "dcp": dcp, "tally": Tally(**found["tally"])}
    )
