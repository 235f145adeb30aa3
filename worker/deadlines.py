"""When a save ends that nothing more is heard of."""

from __future__ import annotations

from collections.abc import Set

from asyncckpt.protocol.lifecycle import BEGUN, SUBMITTED, WRITING
from asyncckpt_worker.order import has_elder
from asyncckpt_worker.records import RankSave, Save
from asyncckpt_worker.tables import Tables


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
    if save.outcome is not None or save.committing or save.doubtful or since is None or t.is_followed(save.save_id):
        return float("inf"), None
    found: tuple[float, RankSave | None] = (_overdue(save, since), None)
    for entry in save.ranks.values() if t.heard else ():  # only with followers
        awaited = entry.phase in (SUBMITTED, WRITING) or (entry.phase == BEGUN and entry.ringed) or entry.needs_consent
        if entry.link and awaited:
            heard = t.heard.get(entry.link, since)
            found = min(found, (max(since, heard) + save.timeout_s, None), key=lambda pair: pair[0])
    run, turn = t.runs.get(save.save_id[-12:]), save.turn_since
    spoke = run.spoke if run is not None else {}
    if save.waiting_since is not None and has_elder(save, t.saves):
        turn = save.waiting_since + save.timeout_s  # it waits no longer than that, as for its commit
    for entry in save.ranks.values():
        if entry.request is not None and entry.needs_consent and entry.durable_at is not None:
            asked_at = max(entry.durable_at, turn, spoke.get(entry.rank, 0.0))
            silent_until = asked_at + entry.request.hook_timeout_s
            found = min(found, (silent_until, entry), key=lambda pair: pair[0])
    return found


def forget_the_silent(t: Tables, links: Set[str]) -> None:
    """Forget of streams that are over when they were heard, once no open save has a rank that has begun it by them."""
    over = t.heard.keys() - links
    if over:
        for name in over - {e.link for s, e in t.entries() if s.outcome is None}:
            del t.heard[name]
