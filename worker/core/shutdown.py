"""When the worker ends: a drain, or nobody to work for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from asyncckpt_worker.core.actions import Exit
from asyncckpt_worker.core.part_jobs import stop_early
from asyncckpt_worker.core.slots import Lending
from asyncckpt_worker.core.tables import Tables


@dataclass(frozen=True, kw_only=True, slots=True)
class BrainConfig:
    """Identity and times (seconds; see `WorkerConfig`). `instance`: random, per process."""

    package: str
    pid: int
    pid_start: int
    instance: str
    heartbeat_s: float
    idle_exit_s: float
    drain_timeout_s: float
    staging_grace_s: float
    keep_snapshots_s: float = 0.0


class Ending:
    """Adds the action Exit, once.

    Args:
        tables: The brain's.
        lending: Looks into slots.
        config: For the times.
        is_telling: Whether another worker, which is there, has not heard everything yet.

    Attributes:
        kept: Somebody wants the worker to stay although it is idle.
    """

    def __init__(self, tables: Tables, lending: Lending, config: BrainConfig, is_telling: Callable[[], bool]) -> None:
        self._t, self._lending, self._config, self._is_telling = tables, lending, config, is_telling
        self._idle_since: float | None = tables.now
        self.kept = False
        self._drain_deadline: float | None = None
        self._why = "drain timeout"
        self._grace_deadline = tables.now
        self._looked_again = False
        self._exiting = False

    def times(self) -> Iterator[float]:
        """Yield when something is due."""
        if self._drain_deadline is not None:
            yield self._drain_deadline
        if self._t.draining:
            yield self._grace_deadline
        if self._idle_since is not None and self._config.idle_exit_s > 0:
            yield self._idle_since + self._config.idle_exit_s

    def drain(self, immediately: bool, why: str) -> None:
        t = self._t
        if self._drain_deadline is None:
            t.draining = True
            self._drain_deadline = t.now + self._config.drain_timeout_s
            t.begins_until = self._grace_deadline = min(self._drain_deadline, t.now + self._config.staging_grace_s)
            t.log(
                "info", f"draining: {why}", sessions=len(t.sessions), saves=sum(s.unfinished for s in t.saves.values())
            )
            self._lending.read_all_lent()
        if immediately:
            self._drain_deadline = t.now
            self._why = "stopped at once"

    def consider(self) -> None:
        t = self._t
        if self._exiting:
            return
        unfinished = [s for s in t.saves.values() if s.unfinished]
        reading = t.n_reading > 0
        idle = not self.kept and not t.sessions and not unfinished and not reading and not t.lineage_scans
        self._idle_since = (t.now if self._idle_since is None else self._idle_since) if idle else None
        if self._drain_deadline is not None:
            staging = self._staging(self._drain_deadline)
            if not staging:
                stop_early(t)
            working = bool(unfinished) or staging or self._is_telling()
            at_rest = not working and not reading
            self._looked_again = self._looked_again and not working
            if at_rest and not self._looked_again and t.now < self._drain_deadline and self._lending.read_all_lent():
                # IMPORTANT: what was sealed since the first look, its doorbell still under way, must not be lost.
                self._looked_again = True
            elif at_rest:
                self._leave(True, "drained")
            elif t.now >= self._drain_deadline:
                if unfinished:
                    text = f"{len(unfinished)} saves are unfinished and will not be committed"
                    t.log("error", text, facts_saves=[s.save_id for s in unfinished[:20]])
                self._leave(not unfinished, self._why)
        elif self._idle_since is not None and 0 < self._config.idle_exit_s <= t.now - self._idle_since:
            self._leave(True, "idle")

    def _staging(self, drain_deadline: float) -> bool:
        """Whether a drain waits for a trainer that copies: each save gets the grace from its own begin."""
        t = self._t
        begun = [e.begun_at for _, e in t.entries() if e.is_open]
        for begun_at in begun:
            until = min(drain_deadline, begun_at + self._config.staging_grace_s)
            self._grace_deadline = max(self._grace_deadline, until)
        opened = t.now < t.begins_until and any(s.opened and not s.closing for s in t.slots.values())
        return opened or (bool(begun) and t.now < self._grace_deadline)

    def _leave(self, complete: bool, reason: str) -> None:
        self._exiting = True
        self._t.actions.append(Exit(complete=complete, reason=reason))
