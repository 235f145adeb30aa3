"""`prepare()`, and several structures saved in turn: what is allocated when, and what stays warm."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import states
import torch
from overlapping import Gate
from real_worker import DEADLINE_S, RealWorker, slots_of, written

import asyncckpt
from asyncckpt import AsyncCheckpointer
from asyncckpt.components import CheckpointStager
from asyncckpt.errors import (
    CheckpointerClosedError,
    ConfigError,
    InsufficientMemoryError,
    UnsupportedLeafError,
)
from asyncckpt.memory.mapping import Mapping
from asyncckpt.planning import planner
from asyncckpt.staging import stager
from asyncckpt.staging.cpu_copy import SlotImage

FULL = {"model": {f"w{n}": torch.full((50_000,), float(n)) for n in range(6)}, "optim": torch.ones(600_000), "step": 1}
WEIGHTS = {"model": FULL["model"]}
OTHER = {"critic": torch.full((100_000,), 7.0), "names": ["a", "b"]}


class Made:
    """Counts what a checkpointer allocates, plans and lays out."""

    def __init__(self, checkpointer: AsyncCheckpointer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slots: list[int] = []
        self.images = self.plans = 0
        pool: Any = checkpointer._process.pool  # type: ignore[attr-defined]
        allocate, init, make_plan = pool._allocate, SlotImage.__init__, planner.make_plan

        def counted(nbytes: int, within_s: float | None) -> Any:
            self.slots.append(nbytes)
            return allocate(nbytes, within_s)

        def counted_image(image: SlotImage, *arguments: Any) -> None:
            self.images += 1
            init(image, *arguments)

        def counted_plan(*arguments: Any, **options: Any) -> Any:
            self.plans += 1
            return make_plan(*arguments, **options)

        monkeypatch.setattr(pool, "_allocate", counted)
        monkeypatch.setattr(SlotImage, "__init__", counted_image)
        monkeypatch.setattr(planner, "make_plan", counted_plan)

    def now(self) -> tuple[int, int, int]:
        return len(self.slots), self.images, self.plans


Count = Callable[[AsyncCheckpointer], Made]


@pytest.fixture
def made(checkpointer: AsyncCheckpointer, monkeypatch: pytest.MonkeyPatch) -> Made:
    return Made(checkpointer, monkeypatch)


# ---- prepare


def test_the_first_save_after_prepare_makes_nothing(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, made: Made
) -> None:
    checkpointer.prepare(FULL)
    assert made.now() == (1, 1, 1)
    assert slots_of(checkpointer)[0].user is None
    handle = checkpointer.save(FULL, tmp_path / "a")
    assert made.now() == (1, 1, 1)
    assert handle.save_id.sequence == 0, "prepare() takes no save id"
    written(handle)
    states.assert_same(asyncckpt.load(tmp_path / "a"), FULL)


@pytest.mark.parametrize("kernel", ["new", "old"])
def test_prepare_maps_every_page_of_the_slot(
    checkpointer: AsyncCheckpointer, monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    if kernel == "old":  # before 5.14
        monkeypatch.setattr(Mapping, "populate", lambda *_, **__: False)
    checkpointer.prepare(FULL)
    (slot,) = slots_of(checkpointer)
    assert mapped_nbytes(slot.memory.mapping.address) >= slot.memory.nbytes - 8192


def mapped_nbytes(address: int) -> int:
    """Return the resident bytes of the mapping that begins at `address`."""
    found = False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and not line.startswith(("VmFlags", "Rss")):
            found = int(line.split("-")[0], 16) == address
        elif found and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no such mapping")


def test_preparing_again_makes_nothing(checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, made: Made) -> None:
    checkpointer.prepare(FULL)
    checkpointer.prepare(FULL)
    assert made.now() == (1, 1, 1)
    written(checkpointer.save(FULL, tmp_path / "a"))
    checkpointer.prepare(FULL)
    assert made.now() == (1, 1, 1)
    states.assert_same(asyncckpt.load(tmp_path / "a"), FULL)


def test_a_plan_of_many_tensors_is_walked_by_the_collector_in_prepare_and_once(
    checkpointer: AsyncCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    walks: list[int] = []
    monkeypatch.setattr(stager, "collect_garbage", lambda: walks.append(1))
    checkpointer.prepare(WEIGHTS)
    assert not walks
    monkeypatch.setattr(stager, "MANY_BOXES", len(FULL["model"]) + 1)
    for _ in range(2):
        checkpointer.prepare(FULL)
    assert walks == [1]


def test_preparing_while_a_save_runs_disturbs_nothing(
    shared_worker: RealWorker, tmp_path: pathlib.Path, gate: Gate
) -> None:
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, staging="overlap") as checkpointer:
        handle = checkpointer.save(FULL, tmp_path / "a")
        checkpointer.prepare(FULL)
        checkpointer.prepare(WEIGHTS)
        assert len(slots_of(checkpointer)) == 1, "the slot in use is warm"
        larger = {"w": torch.zeros(2_000_000)}
        checkpointer.prepare(larger)
        assert len(slots_of(checkpointer)) == 2
        gate.open()
        written(handle)
        written(checkpointer.save(larger, tmp_path / "b"))
    states.assert_same(asyncckpt.load(tmp_path / "a"), FULL)
    states.assert_same(asyncckpt.load(tmp_path / "b"), larger)


def test_prepare_refuses_what_save_would(
    checkpointer: AsyncCheckpointer, shared_worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(UnsupportedLeafError):
        checkpointer.prepare({"f": print})
    with (
        AsyncCheckpointer(endpoint=shared_worker.endpoint, arena_limit_bytes=100_000) as small,
        pytest.raises(InsufficientMemoryError),
    ):
        small.prepare(FULL)
    written(checkpointer.save(WEIGHTS, tmp_path / "a"))
    checkpointer.close()
    with pytest.raises(CheckpointerClosedError):
        checkpointer.prepare(FULL)


def test_an_own_stager_prepares_and_attaches_itself(shared_worker: RealWorker) -> None:
    class Stager(CheckpointStager):
        def stage(self, state_dict: Any, **kw: Any) -> Any:
            raise NotImplementedError

        def close(self) -> None:
            pass

    with AsyncCheckpointer(endpoint=shared_worker.endpoint, checkpoint_stager=Stager()) as checkpointer:
        for call in (checkpointer.prepare, checkpointer.attach):
            with pytest.raises(ConfigError, match="leave out checkpoint_stager"):
                call({})
        checkpointer.fence()
        checkpointer.detach()


# ---- several structures in turn


@pytest.mark.parametrize("in_turn", ["written before the next", "overlapping"])
@pytest.mark.parametrize("fields", [{}, {"slots": 1}, {"slots": 3}, {"arena_limit_bytes": 5_500_000}])
def test_from_the_third_save_of_each_structure_on_nothing_is_allocated(
    shared_worker: RealWorker,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    in_turn: str,
    fields: dict[str, Any],
) -> None:
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, **fields) as checkpointer:
        made = Made(checkpointer, monkeypatch)
        for turn in range(6):
            if turn == 2:
                allocated = len(made.slots)
            for name, state in (("other", OTHER), ("weights", WEIGHTS), ("full", FULL)):
                handle = checkpointer.save({**state, "turn": turn}, tmp_path / f"{name}-{turn}")
                if in_turn == "written before the next":
                    written(handle)
                limit = checkpointer.config.arena_limit_bytes
                assert len(slots_of(checkpointer)) <= checkpointer.config.slots
                assert limit is None or sum(s.memory.nbytes for s in slots_of(checkpointer)) <= limit
        checkpointer.wait(DEADLINE_S)
        if in_turn == "written before the next":
            assert len(made.slots) == allocated
            assert made.plans == 3
            assert len(slots_of(checkpointer)) == 1, "while saves do not overlap, memory is the largest snapshot"
            assert made.images == 5, "the first two slots had one plan each, the last has three"
    for name, state in (("other", OTHER), ("weights", WEIGHTS), ("full", FULL)):
        for turn in range(6):
            states.assert_same(asyncckpt.load(tmp_path / f"{name}-{turn}"), {**state, "turn": turn})


def test_prepared_structures_share_the_largest_slot_and_keep_their_views(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, made: Made
) -> None:
    for state in (FULL, WEIGHTS, OTHER):
        checkpointer.prepare(state)
    assert made.now() == (1, 3, 3)
    for turn in range(3):
        for name, state in (("other", OTHER), ("weights", WEIGHTS), ("full", FULL)):
            written(checkpointer.save(state, tmp_path / f"{name}-{turn}"))
            states.assert_same(asyncckpt.load(tmp_path / f"{name}-{turn}"), state)
    assert made.now() == (1, 3, 3)
