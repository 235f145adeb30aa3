"""P13: a worker that hangs, on its disk say, holds no step of the training up longer than was configured."""

from __future__ import annotations

import pathlib
import time
from typing import Any

import pytest
import states
from overlapping import backward, linear, state_of
from real_worker import RealWorker, saved_at_last, wait_until, written

import asyncckpt
from asyncckpt import AsyncCheckpointer
from asyncckpt.errors import AsyncCkptError, SaveSkippedError, SlotTimeoutError

SLOT_TIMEOUT_S, WORKER_TIMEOUT_S = 0.3, 1.2
SLACK_S = 20.0
"""For a machine on which others work, and for looking whether the worker is back. A wait without end is longer."""


@pytest.mark.parametrize(("staging", "slots"), [("blocking", 1), ("auto", 2)])
@pytest.mark.parametrize("on_busy", ["wait", "skip", "error"])
def test_no_step_waits_longer_than_configured_while_the_worker_is_frozen(
    worker: RealWorker, tmp_path: pathlib.Path, staging: str, on_busy: str, slots: int
) -> None:
    model, optimizer = linear(16)
    options: dict[str, Any] = {"on_busy": on_busy, "slots": slots, "slot_timeout_s": SLOT_TIMEOUT_S}
    options |= {"staging": staging, "worker_timeout_s": WORKER_TIMEOUT_S}
    with AsyncCheckpointer(endpoint=worker.endpoint, **options) as checkpointer:
        checkpointer.attach(optimizer) if staging == "auto" else None
        saved_at_last(lambda name: checkpointer.save(state_of(model, optimizer), tmp_path / name))
        took_s, handles = [], []
        with worker.frozen():
            for step in range(4):
                began = time.monotonic()
                handles.append(checkpointer.save(state_of(model, optimizer), tmp_path / str(step)))
                backward(model)
                optimizer.step()
                took_s.append(time.monotonic() - began)
            # A slot that is in use is waited for; one that the worker has to make, no longer than for that.
            assert max(took_s) < SLOT_TIMEOUT_S + WORKER_TIMEOUT_S + SLACK_S, took_s
            assert handles[0].staged.exception(0) is None
            assert isinstance(handles[-1].written.exception(0), AsyncCkptError)
        wait_until(lambda: all(h.written.done() for h in handles), "every save ends once the worker goes on")
        state = state_of(model, optimizer)
        name = saved_at_last(lambda name: checkpointer.save(state, tmp_path / "after" / name))
    states.assert_same(asyncckpt.load(tmp_path / "after" / name), state)


def test_a_slot_that_a_worker_that_hangs_does_not_free_is_not_blamed_on_the_storage(
    worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    model, optimizer = linear(16)
    state = state_of(model, optimizer)
    options: dict[str, Any] = {"slots": 1, "slot_timeout_s": 2.5, "worker_timeout_s": 600.0}
    with AsyncCheckpointer(endpoint=worker.endpoint, **options) as checkpointer:
        written(checkpointer.save(state, tmp_path / "before"))
        with worker.frozen():
            first = checkpointer.save(state, tmp_path / "first")
            session: Any = checkpointer._process._connection.session  # type: ignore[attr-defined]
            wait_until(lambda: session.silent_s > 0, "it owes an answer")
            error = checkpointer.save(state, tmp_path / "second").written.exception(0)
            assert isinstance(error, SlotTimeoutError)
            assert f"the worker (pid {worker.pid}) at {worker.endpoint} has not answered for" in str(error)
            assert "storage" not in str(error)
        written(first)


@pytest.mark.parametrize("on_busy", ["wait", "skip"])
def test_a_second_slot_is_no_longer_waited_for_than_one_in_use_and_given_back_when_it_comes_late(
    worker: RealWorker, tmp_path: pathlib.Path, on_busy: str
) -> None:
    model, optimizer = linear(16)
    state = state_of(model, optimizer)
    options: dict[str, Any] = {"on_busy": on_busy, "slot_timeout_s": SLOT_TIMEOUT_S, "worker_timeout_s": 600.0}
    with AsyncCheckpointer(endpoint=worker.endpoint, **options) as checkpointer:
        written(checkpointer.save(state, tmp_path / "before"))
        with worker.frozen():
            first = checkpointer.save(state, tmp_path / "first")
            began = time.monotonic()
            second = checkpointer.save(state, tmp_path / "second")
            assert time.monotonic() - began < SLOT_TIMEOUT_S + SLACK_S, "and not worker_timeout_s, which is 600 s"
            expected = SlotTimeoutError if on_busy == "wait" else SaveSkippedError
            assert isinstance(second.written.exception(0), expected)
        written(first)
        wait_until(lambda: len(worker.status()["slots"]) == 1, "the late slot is given back")
        written(checkpointer.save(state, tmp_path / "after"))
