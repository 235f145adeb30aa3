"""What a manager keeps of the state that it was given last: enough to prove a step, and no longer than that."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks

from asyncckpt.manager import last_state
from asyncckpt.manager.last_state import LastState


class Copy(dict[str, Any]):
    """A mapping that tells when nobody has it any more."""


def made(step: int) -> tuple[Copy, weakref.ref[Any]]:
    """A state that was made for one save: copies."""
    state = Copy(weights=torch.ones(3), step=step)
    return state, weakref.ref(state["weights"])


@pytest.fixture
def last(monkeypatch: pytest.MonkeyPatch) -> LastState:
    monkeypatch.setattr(last_state, "had_dataloader_workers", lambda: True)
    return LastState(is_enabled=True)


def test_copies_that_were_made_for_a_save_are_let_go_once_they_prove_nothing(last: LastState) -> None:
    state, copied = made(4)
    last.record_state(state, 4)
    del state
    assert last.why_unproven(4) == ""
    last.record_step(5)
    last.record_step(6)
    assert copied() is None
    assert "'weights'" in last.why_unproven(6) and "earlier step" in last.why_unproven(6)
    last.record_step(7)
    state, copied = made(8)
    last.record_state(state, 8)
    assert last.why_unproven(8) == ""
    last.close()


@pytest.mark.parametrize("when", ["before it is asked", "after it is asked"])
def test_a_state_that_is_kept_current_stays(last: LastState, when: str) -> None:
    model = torch.nn.Linear(2, 2)
    state: dict[str, Any] = {"model": model, "loss": 1.0}
    last.record_state(state, None)
    for step in range(1, 6):
        if when == "before it is asked":
            state["step"] = step
        last.record_step(step)
        state["step"] = step
        assert last.why_unproven(step) == ""
    with torch.no_grad():
        model.weight.add_(1)
    assert "in the middle of a step" in last.why_unproven(5)
    last.close()


def test_objects_of_their_own_are_kept_however_long_no_save_comes(last: LastState) -> None:
    model = torch.nn.Linear(2, 2)
    last.record_state({"model": model}, 0)
    for step in range(1, 10):
        last.record_step(step)
        assert last.why_unproven(step) == ""
    last.close()


def test_asked_again_at_a_step_it_is_looked_at_again_only_if_an_optimizer_has_stepped(last: LastState) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    last.record_state({"model": model, "optim": optimizer}, 0)
    last.record_step(1)
    model(torch.ones(1, 2)).sum().backward()
    last.record_step(1)
    assert "in the middle of a step" in last.why_unproven(1), "it is in the middle of step 2"
    optimizer.step()
    last.record_step(1)
    assert last.why_unproven(1) == ""
    last.close()


def test_where_no_loader_has_workers_no_step_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_state, "had_dataloader_workers", lambda: False)
    last = LastState(is_enabled=True)
    last.record_state({"model": torch.nn.Linear(2, 2)}, 0)
    for step in (1, 2, 3):
        last.record_step(step)
    assert "no DataLoader had started workers" in last.why_unproven(3)
    last.close()


def test_one_that_is_dropped_without_a_close_keeps_no_state() -> None:
    hooks = len(_global_optimizer_post_hooks)
    last, model = LastState(is_enabled=True), torch.nn.Linear(2, 2)
    last.record_state({"model": model}, 1)
    kept = weakref.ref(model)
    del last, model
    gc.collect()
    assert kept() is None
    assert len(_global_optimizer_post_hooks) == hooks
