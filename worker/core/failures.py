"""Errors with which the core ends saves or refuses requests."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from asyncckpt.errors import (
    CommitTimeoutError,
    CommitUnknownError,
    ProtocolError,
    RanksDisagreeError,
    ReplicaMismatchError,
    SaveFailedError,
    SaveSkippedError,
    WorkerUnavailableError,
    to_wire,
)
from asyncckpt.protocol.fields import MAX_MISSING
from asyncckpt.protocol.save_phases import NOT_AGREED
from asyncckpt.storage.files import step_and_rank
from asyncckpt_worker.core.events import Wire
from asyncckpt_worker.core.model import RankSave, Save

BOX = re.compile(r" \[[0-9:,]*\]\Z")
"""The box that follows the FQN in the name of a shard's sample."""

_DIFFERENCES = frozenset(error.wire_code for error in (CommitTimeoutError, RanksDisagreeError, ReplicaMismatchError))

_INCOMPLETE = frozenset({"coverage", "not_sealed"})
"""Codes of saves that lack a part. IMPORTANT: a rank that has not sealed may have made a new checkpointer, which has
agreed on nothing, and then waits in each of its saves for the others."""

_KIND = re.compile(r"\w{1,40}\Z", re.ASCII)

MAX_KINDS = 200
"""Maximum number of kinds of failures that are counted separately: other workers may report kinds unknown here."""

SHOWN = 20
"""Maximum number of ranks in a text; the error's field has more."""


def kind_of(error: Wire) -> str:
    """Return the kind of an error: the `code` in its fields (`ENOSPC`, `coverage`), else the code of its class."""
    own = (error.get("fields") or {}).get("code")
    kind = own if isinstance(own, str) and _KIND.match(own) else error.get("code")
    return kind if isinstance(kind, str) and _KIND.match(kind) else "other"


def count(failures: dict[str, int], error: Wire) -> None:
    """Count a save that has ended with `error`."""
    kind = kind_of(error)
    if kind not in failures and len(failures) >= MAX_KINDS:
        kind = "other"
    failures[kind] = failures.get(kind, 0) + 1


def requires_meeting(error: Wire) -> bool:
    """Whether the ranks must meet again after a save that ended with `error`: they disagreed, or one was missing."""
    fields = error.get("fields") or {}
    if error.get("code") in _DIFFERENCES or fields.get("code") in _INCOMPLETE:
        return True
    return fields.get("code") == "withdrawn" and str(fields.get("detail")).startswith(NOT_AGREED)


def failed(save: Save, part: RankSave, code: str, detail: str, **more: Any) -> Wire:
    """A rank has failed. `code`: field `code` of the error; `more`: further fields."""
    return to_wire(
        SaveFailedError(
            f"save {save.save_id} ({step_and_rank(part.step, part.rank)}) to {part.path}: {detail}; nothing was "
            "published",
            code=code,
            rank=part.rank,
            path=part.path,
            detail=detail,
            save_id=save.save_id,
            step=part.step,
            **more,
        )
    )


def path_in_use(save: Save, part: RankSave, other: str) -> Wire:
    """An open save uses the path."""
    return failed(save, part, "path_in_use", f"save {other} to the same path has not ended; wait for it")


def not_sealed(save: Save, rank: int, detail: str) -> Wire:
    """A rank has departed before it sealed its snapshot."""
    part = save.ranks.get(rank) or save.ranks[min(save.ranks)]
    which = f"save {save.save_id} ({step_and_rank(part.step, rank)}) to {part.path}"
    return to_wire(
        SaveFailedError(
            f"{which}: rank {rank} has not staged it: {detail}; nothing was published",
            code="not_sealed",
            rank=rank,
            path=part.path,
            detail=detail,
            save_id=save.save_id,
            step=part.step,
        )
    )


def withdrawn(save_id: str, rank: int, reason: str, *, skipped: bool) -> Wire:
    """A rank has withdrawn from a save."""
    if skipped:
        text = f"save {save_id} was skipped by rank {rank}: {reason}; nothing was published"
        return to_wire(SaveSkippedError(text, save_id=save_id, rank=rank))
    text = f"save {save_id}: rank {rank} has withdrawn: {reason}; nothing was published"
    return to_wire(SaveFailedError(text, code="withdrawn", rank=rank, detail=reason, save_id=save_id))


SAME_CALLS = "all ranks must call save() as often and in the same order, with the same path and step"
SAME_WORLD = "the ranks of one run must be of one world"
SAME_SETTINGS = "all ranks must save with the same settings"
SAME_PLANS = "the ranks meet again in one of the next saves"


def disagree(save_id: str, path: str, detail: str, ranks: Iterable[int], advice: str = SAME_CALLS) -> Wire:
    """The ranks of a save disagree."""
    return to_wire(
        RanksDisagreeError(
            f"save {save_id}: {detail}; nothing was published; {advice}",
            detail=detail,
            save_id=save_id,
            path=path,
            ranks=sorted(ranks),
        )
    )


def other_world(save_id: str, known: int, rank: int, world_size: int) -> Wire:
    """A rank of a world of another size uses the IDs of this run."""
    detail = f"rank {rank} has world size {world_size}; the other ranks of the run have world size {known}"
    return disagree(save_id, "", detail, [rank], SAME_WORLD)


def mismatch(save: Save, path: str, fqn: str, groups: list[list[int]], *, split: bool) -> Wire:
    """Replicas differ. `groups`: ranks with equal values; `split`: several ranks write parts of the tensor."""
    shown = " and ".join(str(g[:SHOWN]) for g in groups[:SHOWN])
    written = "several ranks write in parts" if split else "one rank writes for all"
    box = BOX.search(fqn)
    what_next = "the ranks meet again in one of the next saves, and from then on it is stored for each rank"
    if box is not None:
        fqn = fqn[: box.start()]
        what_next = f"its shard{box[0]} must be equal on all ranks that hold it: synchronise it, or give it other keys"
    return to_wire(
        ReplicaMismatchError(
            f"save {save.save_id} to {path}: tensor {fqn!r}, which {written}, was taken for a replica "
            f"but differs between ranks {shown}; nothing was published; {what_next}",
            fqn=fqn,
            ranks=sorted(r for g in groups for r in g),
            save_id=save.save_id,
            path=path,
        )
    )


def timed_out(save: Save, missing: list[int]) -> Wire:
    """Ranks have not sealed in time after the first one, or their worker has been silent for too long."""
    path = next(iter(save.ranks.values())).path
    what, since = ("written", "after the last message of their worker")
    if save.missing:
        what, since = ("staged", "after the first one")
    return to_wire(
        CommitTimeoutError(
            f"save {save.save_id} to {path}: ranks {missing[:SHOWN]} had not {what} it {save.timeout_s:g} s "
            f"{since}; nothing was published",
            missing_ranks=missing,
            timeout_s=save.timeout_s,
            save_id=save.save_id,
            path=path,
        )
    )


def worker_lost(save: Save, part: RankSave, why: str) -> Wire:
    """The worker of another node was lost before it had written a rank's files or reported the hook's answer."""
    return failed(save, part, "worker_lost", f"its worker was lost: {why}")


def leader_lost(save: Save, why: str, *, unknown: bool) -> Wire:
    """The leader was lost or is silent. `unknown`: it may have committed the save."""
    part = save.ranks[min(save.ranks)]
    detail = f"the worker of rank 0, which commits, was lost: {why}"
    missing = save.leader_missing
    if missing is not None:
        detail += f"; it waited for ranks {missing[:SHOWN]} at its last message" if missing else ""
    else:
        missing = [rank for rank in range(save.world_size) if rank not in save.ranks][:MAX_MISSING]
        detail += f"; ranks {missing[:SHOWN]} have other workers, and their state is unknown" if missing else ""
    if not unknown:
        return failed(save, part, "leader_lost", detail, missing_ranks=missing)
    return to_wire(
        CommitUnknownError(
            f"save {save.save_id} ({step_and_rank(part.step, part.rank)}) to {part.path}: {detail}; this node's "
            "ranks were written, so that it may have committed the checkpoint, or may still; check with `asyncckpt ls`",
            code="leader_lost",
            path=part.path,
            detail=detail,
            save_id=save.save_id,
            step=part.step,
            missing_ranks=missing,
        )
    )


def not_continued(save_id: str, unknown: Wire) -> Wire:
    """A node has ended the save as `unknown`, with error `unknown`, and does not continue it with another leader."""
    fields = unknown.get("fields") or {}
    path, step = fields.get("path"), fields.get("step")
    detail = f"a node has ended its ranks' parts when the worker of rank 0 was lost: {fields.get('detail')}"
    return to_wire(
        SaveFailedError(
            f"save {save_id} to {path}: {detail}; nothing was published",
            code="leader_lost",
            path=path,
            detail=detail,
            save_id=save_id,
            step=step,
        )
    )


def unchecked(save: Save, cause: Wire) -> Wire:
    """A dead worker may have committed the save, and its directory could not be checked. `cause`: why."""
    part = save.ranks[min(save.ranks)]
    found = (cause.get("fields") or {}).get("detail") or cause.get("text", "")
    detail = f"its worker died, and whether it had committed the save could not be checked: {found}"
    return to_wire(
        CommitUnknownError(
            f"save {save.save_id} ({step_and_rank(part.step, part.rank)}) to {part.path}: {detail}; check later "
            "with `asyncckpt ls`",
            code=kind_of(cause),
            path=part.path,
            detail=detail,
            save_id=save.save_id,
            step=part.step,
        )
    )


def part_rejected(save_id: str, rank: int) -> Wire:
    """The leader rejects a rank's part in a save."""
    detail = f"rank {rank} has another world size than the other ranks, or saves in two processes"
    return disagree(save_id, "", detail, [rank], SAME_WORLD)


def led_elsewhere(run_id: str) -> ProtocolError:
    """Another worker leads the run, so this one cannot."""
    return ProtocolError(f"run {run_id} is led by another worker; rank 0 must be beside that one", detail="leads")


def draining() -> WorkerUnavailableError:
    """The worker is draining."""
    return WorkerUnavailableError("this worker is shutting down; start another", detail="draining")


def busy() -> WorkerUnavailableError:
    """The worker is at its limit of outstanding jobs."""
    return WorkerUnavailableError("this worker has too many jobs waiting; try again later", detail="busy")
