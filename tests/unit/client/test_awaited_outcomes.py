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
from asyncckpt.client.save_outcomes import Outcomes  # noqa: E402
from asyncckpt.config import CheckpointerConfig  # noqa: E402
from asyncckpt.errors import SlotTimeoutError  # noqa: E402
from asyncckpt.format.names import SaveId  # noqa: E402
from asyncckpt.staging.stager import SlotStager  # noqa: E402

RUN = "0" * 12


class Process:
    """Workers, of which the last tells how save 0 has ended."""

    def __init__(self, outcomes: Outcomes, tells: int) -> None:
        self.outcomes, self.tells, self.connected = outcomes, tells, 0
        self.pool = SimpleNamespace(is_in_use=False)

    def connect(self) -> None:
        self.connected += 1
        if self.connected == self.tells:
            self.outcomes.take(RUN, [(0, False)])
        else:
            threading.Timer(0.05, self.outcomes.worker_lost).start()


def waits(process: Process, slot_timeout_s: float) -> None:
    def awaits(sequence: int) -> int | None:
        return 0 if process.outcomes.get(RUN, 0) is None else None

    ranks = SimpleNamespace(
        agreement=object(), in_doubt=False, outcomes=process.outcomes, run_id=RUN, window=1, awaits=awaits
    )
    stager: Any = SimpleNamespace(
        _ranks=ranks, _process=process, _config=CheckpointerConfig(slot_timeout_s=slot_timeout_s)
    )
    SlotStager._await_outcome(stager, SaveId(1, 1, RUN), 1, "/x")


@pytest.mark.parametrize("tells", [2, 4])
def test_a_rank_that_waits_with_nothing_in_flight_finds_another_worker(tells: int) -> None:
    process, began = Process(Outcomes(), tells), time.monotonic()
    waits(process, 600.0)
    assert process.connected == tells and time.monotonic() - began < 60


def test_workers_that_die_one_after_the_other_do_not_make_it_wait_for_longer_than_for_a_slot() -> None:
    with pytest.raises(SlotTimeoutError):
        waits(Process(Outcomes(), 1 << 30), 0.5)


def test_what_was_committed_is_taken_to_ask_for_no_meeting_if_all_have_died_that_knew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(save_outcomes, "ASSUMED_AFTER_S", 0.3)
    found = Outcomes()
    found.take(RUN, [(-1, False)])
    found.committed(RUN, 0)
    assert found.assumed_in_s(RUN, 0) == math.inf, "its worker lives, and tells it"
    found.worker_lost()
    assert found.assumed_in_s(RUN, 0) == math.inf, "nobody is there who could know it"
    process = Process(found, tells=0)
    process.connect = lambda: found.take(RUN, [(-1, False)])  # type: ignore[method-assign]
    began = time.monotonic()
    waits(process, 600.0)
    assert 0.2 < time.monotonic() - began < 60
    found.take(RUN, [(0, True)])
    assert found.get(RUN, 0) is False, "what was assumed holds: the others are told by refusals"


def test_of_a_save_that_was_not_committed_nothing_is_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_outcomes, "ASSUMED_AFTER_S", 0.0)
    found = Outcomes()
    found.take(RUN, [(-1, False)])
    found.worker_lost()
    found.take(RUN, [(-1, False)])
    assert found.assumed_in_s(RUN, 0) == math.inf and found.get(RUN, 0) is None
