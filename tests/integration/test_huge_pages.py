"""Slots that are put on huge pages beside saves and loads: the same bits, whether the kernel can do it or not."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from real_worker import wait_until, written
from worker_here import Here

import asyncckpt
from asyncckpt import AsyncCheckpointer
from asyncckpt.memory.mapping import HUGE_NBYTES
from asyncckpt_worker import huge_pages

ROWS = 5 * HUGE_NBYTES // 4 // 1024


@pytest.fixture
def here(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    """A worker in this process that looks at its slots at every turn, and is everybody's default."""
    monkeypatch.setenv("ASYNCCKPT_ENDPOINT", endpoint)
    monkeypatch.setattr(huge_pages, "LOOK_EVERY_S", 0)
    found = Here(endpoint)
    try:
        yield found
    finally:
        found.close()


def state_of(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {"w": torch.randn(ROWS, 1024, generator=generator), "b": torch.full((7,), float(step))}


def is_state(found: dict[str, Any], step: int) -> bool:
    wanted = state_of(step)
    return all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("staging", ["blocking", "overlap"])
def test_slot_on_huge_pages_takes_later_saves_and_gives_them_back(
    here: Here, tmp_path: pathlib.Path, staging: str
) -> None:
    with AsyncCheckpointer(staging=staging, slots=1) as saver:
        for step in range(3):
            written(saver.save(state_of(step), tmp_path / str(step)))
            done = here.daemon.huge_pages.done
            wait_until(lambda done=done: done() == {1}, "the slot has been looked at to its end")
            for source in ("memory", "disk"):
                assert is_state(asyncckpt.load(tmp_path / str(step), source=source), step)


def test_saves_that_come_while_slots_are_put_on_huge_pages_are_whole(
    here: Here, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages, "REST", 0)
    monkeypatch.setattr(huge_pages, "is_busy", lambda *_: False)
    monkeypatch.setattr(huge_pages, "_is_still", lambda _: True)
    monkeypatch.setattr(here.daemon.huge_pages, "_at", _Forgetful())
    with AsyncCheckpointer() as saver:
        for step in range(8):
            handle = saver.save(state_of(step), tmp_path / str(step))
            saver.fence()
            written(handle)
            assert is_state(asyncckpt.load(tmp_path / str(step), source="auto" if step % 2 else "disk"), step)


class _Forgetful(dict[int, int]):
    """Every slot is done again and again."""

    def __setitem__(self, number: int, at: int) -> None:
        super().__setitem__(number, 0 if at < 0 else at)
