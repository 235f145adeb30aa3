"""Whether the ranks of a save agree: on path, step, settings, plan, and the samples of replicas."""

from __future__ import annotations

from asyncckpt.protocol.samples import decode_samples, unequal
from asyncckpt_worker.core.failures import SAME_CALLS, SAME_PLANS, SAME_SETTINGS
from asyncckpt_worker.core.model import RankSave, Save, Slot


def own_contradiction(part: RankSave, slot: Slot) -> str:
    """Return how a sealed request contradicts its session or its Begin; "" if it does not."""
    request = part.request
    assert request is not None
    wanted: dict[str, object] = {"rank": slot.rank, "world_size": slot.world_size, "path": part.path}
    if part.step is not None and request.step is not None:
        wanted["step"] = part.step
    wanted["overwrite"] = part.overwrite
    for name, value in wanted.items():
        if getattr(request, name) != value:
            return f"the sealed request has {name} {getattr(request, name)!r}, its session and Begin have {value!r}"
    if request.rank == 0 and request.step is None:
        return "the sealed request of rank 0 has no step"
    return ""


def disagreement(save: Save, part: RankSave) -> tuple[str, int, str] | None:
    """Return how a rank contradicts another one, that rank, and what to do; None if all agree."""
    for other in [*save.declarations.values()]:
        if other.path != part.path or (None not in (other.step, part.step) and other.step != part.step):
            text = f"rank {part.rank} saves {_step(part)}to {part.path}, "
            return text + f"rank {other.rank} {_step(other)}to {other.path}", other.rank, SAME_CALLS
        if other.overwrite != part.overwrite:
            text = f"rank {part.rank} saves with overwrite={part.overwrite}, "
            return text + f"rank {other.rank} with overwrite={other.overwrite}", other.rank, SAME_SETTINGS
        if other.request and part.request and other.request.layout != part.request.layout:
            text = f"rank {part.rank} saves with layout={part.request.layout!r}, "
            return text + f"rank {other.rank} with layout={other.request.layout!r}", other.rank, SAME_SETTINGS
        if other.request and part.request and other.request.mirror != part.request.mirror:
            text = f"rank {part.rank} saves with mirror={part.request.mirror!r}, "
            return text + f"rank {other.rank} with mirror={other.request.mirror!r}", other.rank, SAME_SETTINGS
        if other.request and part.request and other.request.plan != part.request.plan:
            text = f"rank {part.rank} follows plan {part.request.plan or 'none'}, "
            return text + f"rank {other.rank} {other.request.plan or 'none'}", other.rank, SAME_PLANS
    return None


def declare(save: Save, part: RankSave) -> None:
    """Record a rank's values that all ranks must share, for `disagreement`; equal values are recorded once."""
    request = part.request
    of_request = (request.layout, request.mirror, request.plan) if request is not None else None
    save.declarations.setdefault((part.path, part.step, part.overwrite, of_request), part)


def settle_step(save: Save, sealed: RankSave) -> None:
    """Copy the step of rank 0 to the ranks that leave the step to it, once rank 0 and they have sealed."""
    first = save.ranks.get(0)
    if first is None or first.request is None:
        return
    for part in save.ranks.values() if sealed is first else [sealed]:
        if part.step is None:
            part.step = first.step


def unequal_samples(save: Save) -> list[tuple[str, bool, list[list[int]]]]:
    """Compare the samples of a save that all ranks have sealed; the result is that of `protocol.samples.unequal`."""
    requests = {rank: part.request for rank, part in save.ranks.items() if part.request is not None}
    distinct = {request.samples for request in requests.values()}
    if len(distinct) == 1:  # the usual case; also fast for thousands of names and many ranks
        return []
    decoded = {samples: decode_samples(samples) for samples in distinct}
    return unequal({rank: decoded[request.samples] for rank, request in requests.items()})


def _step(part: RankSave) -> str:
    return "" if part.step is None else f"step {part.step} "
