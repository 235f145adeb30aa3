"""The futures of copies to mirrors: how many are waited for, and which of them fail when there are too many."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from asyncckpt.client import awaited_mirrors
from asyncckpt.client.awaited_mirrors import AwaitedMirrors
from asyncckpt.client.pending_saves import StagedSnapshot
from asyncckpt.errors import AsyncCkptError
from asyncckpt.format.names import SaveId


def snapshot(number: int) -> StagedSnapshot:
    slot: Any = None
    where = {"path": f"/runs/{number}", "mirror": f"/mirror/{number}"}
    found = StagedSnapshot(
        save_id=SaveId(1, number, "b" * 12), step=number, slot=slot, nbytes=1, seconds={}, began=0.0, extra={}, **where
    )
    found.mirrored = Future()
    return found


def test_of_too_many_the_oldest_future_fails_also_after_all_were_asked_for_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(awaited_mirrors, "MAX_AWAITED", 4)
    monkeypatch.setattr(awaited_mirrors, "MAX_ASKED", 1)
    monkeypatch.setattr(awaited_mirrors, "ASK_EVERY_S", 0.0)
    awaited = AwaitedMirrors(lambda build: Future(), threading.RLock())
    waiting = [snapshot(number) for number in range(4)]
    for one in waiting:
        awaited.add(one)
    awaited.ask()
    waiting.append(snapshot(4))
    awaited.add(waiting[-1])
    done = [one.step for one in waiting if one.mirrored is not None and one.mirrored.done()]
    assert done == [0] and isinstance(waiting[0].mirrored.exception(), AsyncCkptError)  # type: ignore[union-attr]
