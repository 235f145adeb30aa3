"""A rank that waits for how an earlier save has ended, while the worker that would tell it dies."""

from __future__ import annotations

import math
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from asyncckpt.client import save_outcomes  # noqa: E402
from asyncckpt.client.save_outcomes import SaveOutcomes  # noqa: E402
from asyncckpt.config import CheckpointerConfig  # noqa: E402
from asyncckpt.errors import SlotTimeoutError  # noqa: E402
from asyncckpt.format.names import SaveId  # noqa: E402
from asyncckpt.staging import stager  # noqa: E402
from asyncckpt.staging.stager import SlotStager  # noqa: E402
from asyncckpt_worker.core.nodes.follower import FOUND_S  # noqa: E402

RUN = "0" * 12


class Process:
    """Workers, of which the last tells how save 0 has ended."""

    def __init__(self, outcomes: SaveOutcomes, tells: int) -> None:
        self.outcomes, self.tells, self.connected = outcomes, tells, 0
        self.pool = SimpleNamespace(is_in_use=False)

    def connect(self) -> None:
        self.connected += 1
        if self.connected == self.tells:
            self.outcomes.update(RUN, [(0, False)])
        else:
            threading.Timer(0.05, self.outcomes.note_worker_lost).start()


def waits(process: Process, slot_timeout_s: float, **settings: Any) -> None:
    def awaited_save(sequence: int) -> int | None:
        known = process.outcomes.meets_after(RUN, 0) is not None or process.outcomes.is_lost(RUN, 0)
        return None if known else 0

    ranks = SimpleNamespace(
        agreement=object(),
        is_out_of_sync=False,
        outcomes=process.outcomes,
        run_id=RUN,
        max_in_flight=1,
        awaited_save=awaited_save,
    )
    waiting: Any = SimpleNamespace(
        _ranks=ranks, _process=process, _config=CheckpointerConfig(slot_timeout_s=slot_timeout_s, **settings)
    )
    SlotStager._await_outcome(waiting, SaveId(1, 1, RUN), 1, "/x")


@pytest.mark.parametrize("tells", [2, 4])
def test_a_rank_that_waits_with_nothing_in_flight_finds_another_worker(tells: int) -> None:
    process, began = Process(SaveOutcomes(), tells), time.monotonic()
    waits(process, 600.0)
    assert process.connected == tells and time.monotonic() - began < 60


def test_workers_that_die_one_after_the_other_do_not_make_it_wait_for_longer_than_for_a_slot() -> None:
    with pytest.raises(SlotTimeoutError):
        waits(Process(SaveOutcomes(), 1 << 30), 0.5)


def test_what_was_committed_is_taken_to_ask_for_no_meeting_if_all_have_died_that_knew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(save_outcomes, "OUTCOME_TIMEOUT_S", 0.3)
    found = SaveOutcomes()
    found.update(RUN, [(-1, False)])
    found.note_ended(RUN, 0, committed=True)
    assert found.resolve_after_timeout(RUN, 0) == math.inf, "its worker lives, and tells it"
    found.note_worker_lost()
    assert found.resolve_after_timeout(RUN, 0) == math.inf, "nobody is there who could know it"
    process = Process(found, tells=0)
    process.connect = lambda: found.update(RUN, [(-1, False)])  # type: ignore[method-assign]
    began = time.monotonic()
    waits(process, 600.0)
    assert 0.2 < time.monotonic() - began < 60
    found.update(RUN, [(0, True)])
    assert found.meets_after(RUN, 0) is False, "what was assumed holds: the others are told by refusals"


@pytest.mark.parametrize(("committed", "known"), [(True, False), (False, None)])
def test_the_next_worker_is_heard_only_after_a_while(
    monkeypatch: pytest.MonkeyPatch, committed: bool, known: bool | None
) -> None:
    for module in (save_outcomes, stager):
        monkeypatch.setattr(module, "OUTCOME_TIMEOUT_S", 0.3)
    found = SaveOutcomes()
    found.update(RUN, [(-1, False)])
    found.note_ended(RUN, 0, committed=committed)
    found.note_worker_lost()
    process = Process(found, tells=0)
    heard = threading.Timer(0.5, found.update, (RUN, [(-1, False)]))
    process.connect = heard.start  # type: ignore[method-assign]
    began = time.monotonic()
    waits(process, 600.0)
    assert 0.7 < time.monotonic() - began < 60
    assert found.meets_after(RUN, 0) is known and found.is_lost(RUN, 0) is not committed


def test_of_a_save_of_which_no_end_was_told_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_outcomes, "OUTCOME_TIMEOUT_S", 0.0)
    found = SaveOutcomes()
    found.update(RUN, [(-1, False)])
    found.note_worker_lost()
    found.update(RUN, [(-1, False)])
    assert found.resolve_after_timeout(RUN, 0) == math.inf and found.meets_after(RUN, 0) is None


def test_the_start_of_a_worker_does_not_count_as_waiting_for_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stager, "NOWAIT_ANSWER_S", 60.0)
    process, monotonic = Process(SaveOutcomes(), tells=0), time.monotonic

    def connect() -> None:
        monkeypatch.setattr(time, "monotonic", lambda: monotonic() + 90.0)  # the start has taken that long
        threading.Timer(0.05, process.outcomes.update, (RUN, [(0, False)])).start()

    process.connect = connect  # type: ignore[method-assign]
    waits(process, 600.0, on_busy="skip")
    assert process.outcomes.meets_after(RUN, 0) is False


def test_a_worker_that_follows_has_time_to_report_before_an_outcome_counts_as_lost() -> None:
    assert save_outcomes.OUTCOME_TIMEOUT_S > FOUND_S
