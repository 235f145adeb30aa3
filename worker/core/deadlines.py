"""When a save ends of which nothing more is heard, and which save goes first."""

from __future__ import annotations

from collections.abc import Mapping, Set

from asyncckpt.protocol.save_phases import OPEN, SEALED, WRITING
from asyncckpt_worker.core.model import RankSave, Save
from asyncckpt_worker.core.tables import Tables


def _overdue(save: Save, since: float) -> float:
    """Return until when the ranks are waited for that have not sealed; infinity if there are none.

    One whose ring is being written makes progress, or its job ends it: that has the same time for each segment.
    """
    missing, timeout_s = save.missing, save.timeout_s
    if not missing:
        return float("inf")
    streaming = {rank: entry for rank, entry in save.ranks.items() if entry.streaming}
    if any(rank not in streaming for rank in missing):
        return since + timeout_s
    written = [streaming[rank] for rank in missing if not (streaming[rank].writing or streaming[rank].ringed)]
    idle = [entry.written_at for entry in written]
    return max(since, min(idle)) + timeout_s if idle else float("inf")


def deadline(t: Tables, save: Save) -> tuple[float, RankSave | None]:
    """Return when the save ends if nothing happens, and the rank whose hook that would be; else infinity."""
    since = save.sealed_since
    waits = save.outcome is None and not save.committing and not save.is_recovering
    if not waits or since is None or t.is_followed(save.save_id):
        return float("inf"), None
    found: tuple[float, RankSave | None] = (_overdue(save, since), None)
    for entry in save.ranks.values() if t.heard else ():  # only with followers
        awaited = entry.phase in (SEALED, WRITING) or (entry.phase == OPEN and entry.ringed) or entry.needs_consent
        if entry.link and awaited:
            heard = t.heard.get(entry.link, since)
            found = min(found, (max(since, heard) + save.timeout_s, None), key=lambda pair: pair[0])
    run, turn = t.run_of(save.save_id), save.turn_since
    spoke = run.spoke if run is not None else {}
    if save.waiting_since is not None and has_elder(save, t.saves):
        turn = save.waiting_since + save.timeout_s  # it waits no longer than that, as for its commit
    for entry in save.ranks.values():
        if entry.request is not None and entry.needs_consent and entry.durable_at is not None:
            asked_at = max(entry.durable_at, turn, spoke.get(entry.rank, 0.0))
            silent_until = asked_at + entry.request.hook_timeout_s
            found = min(found, (silent_until, entry), key=lambda pair: pair[0])
    return found


def look_sooner(save: Save, entry: RankSave, now: float) -> None:
    """A rank has moved: note that a deadline may pass sooner. `deadline` itself costs as much as there are ranks.

    IMPORTANT: never later than `deadline` would say. What is sooner costs a look.
    """
    if save.sealed_since is not None and (save.is_missed or entry.link):
        save.look_at = min(save.look_at, save.sealed_since + save.timeout_s)
    if entry.request is not None and entry.durable_at is not None and entry.needs_consent:
        save.look_at = min(save.look_at, max(entry.durable_at, save.turn_since) + entry.request.hook_timeout_s)


def forget_the_silent(t: Tables, links: Set[str]) -> None:
    """Forget of streams that are over when they were heard, once no open save has a rank that has begun it by them."""
    over = t.heard.keys() - links
    if over:
        for name in over - {e.link for s, e in t.entries() if s.outcome is None}:
            del t.heard[name]


def rival(path: str, save_id: str, saves: Mapping[str, Save]) -> Save | None:
    """Return another save to `path` that has not ended: the earlier one keeps the path."""
    for save in saves.values():
        if save.outcome is None and save.save_id != save_id and path in save.paths:
            return save
    return None


def has_elder(save: Save, saves: Mapping[str, Save]) -> bool:
    """Whether an earlier save of the same run has not ended.

    Whoever sees a checkpoint may rely on the ones before it: a small state must not overtake a large one. A save that
    is only being staged counts too; it ends with its session at the latest.
    """
    own = save.save_id
    return any(
        s.outcome is None and s.save_id.run_id == own.run_id and s.save_id.sequence < own.sequence
        for s in saves.values()
    )
