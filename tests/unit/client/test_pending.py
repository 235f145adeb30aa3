"""The trainer's table of saves: which news completes which future, and when a slot is free."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from asyncckpt.client.pending_saves import PendingSaves, StagedSnapshot, WriteFuture
from asyncckpt.errors import (
    AsyncCkptError,
    CheckpointExistsError,
    CommitTimeoutError,
    SaveFailedError,
    WorkerUnavailableError,
    to_wire,
)
from asyncckpt.format.names import SaveId
from asyncckpt.protocol import save_phases

NAME = SaveId(1, 2, "0" * 12)
LOST = WorkerUnavailableError("the worker has died")


class Table(PendingSaves):
    """A table that remembers which slots were freed."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.freed: list[SaveId] = []
        super().__init__(threading.RLock(), commit_timeout_s=timeout_s, free=self.freed.append)

    def stage(self, name: SaveId = NAME, lost: AsyncCkptError | None = None) -> tuple[WriteFuture, bool]:
        snapshot = StagedSnapshot(
            save_id=name,
            step=3,
            path="/x",
            slot=None,  # type: ignore[arg-type]
            nbytes=100,
            seconds={"copy": 0.5},
            began=time.perf_counter(),
            extra={},
        )
        future = WriteFuture()
        return future, self.staged(snapshot, future, lost)


def row(phase: str, error: AsyncCkptError | None = None, **report: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"save_id": str(NAME), "phase": phase, "report": report}
    return found if error is None else {**found, "error": to_wire(error)}


def test_a_save_goes_from_begin_to_commit() -> None:
    table = Table()
    table.begin(NAME)
    future, goes_on = table.stage()
    assert goes_on
    assert table.names() == [str(NAME)]
    for phase in (save_phases.SEALED, save_phases.WRITING):
        table.update(row(phase))
        assert not future.durable.done()
    table.update(row(save_phases.DURABLE, nbytes=123, seconds_write=0.25))
    assert future.durable.result(0).nbytes == 123
    assert not future.done()
    assert table.freed == []
    table.update(row(save_phases.COMMITTED, nbytes=123, seconds_write=0.25, seconds_commit=0.125, direct=1))
    report = future.result(0)
    assert (report.nbytes, report.details) == (123, {"direct": 1})
    assert {k: v for k, v in report.seconds.items() if k != "total"} == {"copy": 0.5, "write": 0.25, "commit": 0.125}
    assert report.seconds["total"] > 0
    assert table.freed == [NAME]
    assert table.names() == []


def test_a_commit_whose_durable_was_missed_completes_both() -> None:
    table = Table()
    table.begin(NAME)
    future, _ = table.stage()
    table.update(row(save_phases.COMMITTED, nbytes=5))
    assert future.durable.result(0).nbytes == future.result(0).nbytes == 5


def test_news_may_come_twice_and_of_saves_that_nobody_knows() -> None:
    table = Table()
    table.update(row(save_phases.COMMITTED))
    table.begin(NAME)
    future, _ = table.stage()
    for _ in range(2):
        table.update(row(save_phases.DURABLE))
    for _ in range(2):
        table.update(row(save_phases.COMMITTED))
    table.update(row(save_phases.FAILED, SaveFailedError("late")))
    assert future.exception(0) is None
    assert table.freed == [NAME]


@pytest.mark.parametrize("phase", [save_phases.FAILED, save_phases.UNKNOWN, save_phases.ABANDONED])
@pytest.mark.parametrize("error", [SaveFailedError("no space", code="ENOSPC", rank=0), None])
def test_every_other_end_fails_both_futures_with_what_the_worker_said(phase: str, error: AsyncCkptError | None) -> None:
    table = Table()
    table.begin(NAME)
    future, _ = table.stage()
    table.update(row(phase, error))
    found = future.exception(0)
    assert found is future.durable.exception(0)
    assert type(found) is (SaveFailedError if error else AsyncCkptError)
    assert error is None or getattr(found, "code", None) == "ENOSPC"
    assert phase in str(found) or error
    assert table.freed == [NAME]


def test_durable_stands_when_the_commit_fails() -> None:
    table = Table()
    table.begin(NAME)
    future, _ = table.stage()
    table.update(row(save_phases.DURABLE))
    table.update(row(save_phases.FAILED, SaveFailedError("x")))
    assert future.durable.exception(0) is None
    assert isinstance(future.exception(0), SaveFailedError)


def test_a_failure_during_staging_is_told_when_it_ends() -> None:
    table = Table()
    table.begin(NAME)
    table.update(row(save_phases.FAILED, CheckpointExistsError("there")))
    assert table.freed == [], "the training thread still copies into the slot"
    future, goes_on = table.stage()
    assert not goes_on
    assert isinstance(future.exception(0), CheckpointExistsError)
    assert table.freed == [NAME]
    assert table.names() == []


def test_a_commit_that_is_heard_of_before_staging_has_returned_is_not_lost() -> None:
    """A draining worker takes up a sealed slot before the doorbell."""
    table = Table()
    table.begin(NAME)
    table.update(row(save_phases.COMMITTED))
    future, goes_on = table.stage()
    assert goes_on
    assert table.names() == [str(NAME)], "the next heartbeat asks again"
    table.update(row(save_phases.COMMITTED))
    assert future.exception(0) is None


def test_a_lost_worker_fails_what_was_staged_now_and_what_is_being_staged_later() -> None:
    table, other = Table(), SaveId(1, 3, "0" * 12)
    table.begin(NAME)
    table.begin(other)
    future, _ = table.stage()
    table.fail_all(LOST)
    assert future.exception(0) is future.durable.exception(0) is LOST
    assert table.freed == [NAME]
    late, goes_on = table.stage(other)
    assert not goes_on
    assert late.exception(0) is LOST
    assert table.freed == [NAME, other]


def test_a_loss_that_is_noticed_at_the_doorbell_fails_the_save() -> None:
    table = Table()
    table.begin(NAME)
    future, goes_on = table.stage(lost=LOST)
    assert not goes_on
    assert future.exception(0) is LOST
    assert table.freed == [NAME]


def test_a_withdrawn_save_is_forgotten() -> None:
    table = Table()
    table.begin(NAME)
    table.withdraw(NAME)
    assert table.freed == []  # the pool gives the slot up: what it holds is void
    assert table.names() == []
    table.update(row(save_phases.ABANDONED))
    assert table.freed == []


def test_a_late_save_fails_and_its_slot_stays_in_use_until_the_worker_says_the_end() -> None:
    table = Table(timeout_s=1e-9)
    table.begin(NAME)
    table.expire()
    future, _ = table.stage()
    table.expire()
    error = future.exception(0)
    assert isinstance(error, CommitTimeoutError)
    assert isinstance(error, TimeoutError)
    assert (error.save_id, error.missing_ranks) == (str(NAME), [])
    assert table.freed == [], "the worker may still read it"
    assert table.names() == [str(NAME)]
    table.update(row(save_phases.COMMITTED))
    assert table.freed == [NAME]
    assert future.exception(0) is error


def test_closing_fails_what_is_left() -> None:
    table, other = Table(), SaveId(1, 3, "0" * 12)
    table.begin(NAME)
    table.begin(other)
    future, _ = table.stage()
    table.close(LOST)
    assert future.exception(0) is LOST
    assert table.names() == []


def test_a_save_that_was_never_begun_fails() -> None:
    future, goes_on = Table().stage()
    assert not goes_on
    assert "never begun" in str(future.exception(0))
