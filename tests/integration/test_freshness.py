"""P8: a snapshot that is bit for bit the one before although the step advanced is reported, and no other is."""

from __future__ import annotations

import copy
import logging
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from real_worker import RealWorker, written
from torch_free_client import Client, Snapshot, new_save_id

import asyncckpt
from asyncckpt import AsyncCheckpointer

LARGE = 400_000
"""Elements: several blocks."""


def state() -> dict[str, Any]:
    """Return what a training loop would save."""
    model = torch.nn.Linear(30, 30)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 30)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "large": torch.arange(float(LARGE)),
        "rng": torch.get_rng_state(),
        "bytes": b"x" * 100_000,
        "lr": 0.1,
        "names": ["a", "b"],
        "step": 100,
    }


def figures(checkpointer: AsyncCheckpointer, path: pathlib.Path, found: Any, **options: Any) -> dict[str, Any]:
    """Save, and return what the report says of freshness."""
    details = written(checkpointer.save(found, path, **options)).details
    return {name: details[name] for name in ("same_tensors_as_step", "unchanged") if name in details}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "bit for bit" in r.message]


@pytest.mark.parametrize("layout", ["safetensors", "dcp"])
def test_a_snapshot_in_which_nothing_but_the_step_changed_is_reported(
    shared_worker: RealWorker, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, layout: str
) -> None:
    before = shared_worker.status()["counters"].get("saves_unchanged", 0)
    options: dict[str, Any] = {"files_per_rank": 2} if layout == "safetensors" else {}
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, layout=layout, **options) as checkpointer:
        found = state()
        if layout == "dcp":
            del found["bytes"]  # which it has no form for
        assert figures(checkpointer, tmp_path / "a", found) == {}
        again = {"same_tensors_as_step": 100, "unchanged": True}
        assert figures(checkpointer, tmp_path / "b", {**found, "step": 200}) == again
        assert figures(checkpointer, tmp_path / "c", {**copy.deepcopy(found), "step": 300}) == {
            **again,
            "same_tensors_as_step": 200,
        }
    first, second = warnings_of(caplog)
    assert "step 200" in first and "step 100" in first and "step 300" in second
    assert shared_worker.status()["counters"]["saves_unchanged"] == before + 2


def flip(tensor: torch.Tensor, at: int) -> None:
    """Change one bit."""
    tensor.view(-1).view(torch.uint8)[at] ^= 1


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "the first bit of a tensor": lambda s: flip(s["large"], 0),
    "the last bit of a tensor": lambda s: flip(s["large"], 4 * LARGE - 1),
    "a bit in the middle": lambda s: flip(s["large"], 2 * LARGE),
    "a small tensor": lambda s: flip(s["model"]["bias"], 5),
    "a step counter in a tensor": lambda s: s["optim"]["state"][0]["step"].add_(1),
    "the state of a generator": lambda s: flip(s["rng"], 7),
    "bytes": lambda s: s.update(bytes=b"y" + b"x" * 99_999),
}


@pytest.mark.parametrize("change", CHANGES)
def test_one_bit_that_changed_makes_a_snapshot_new(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    found = state()
    assert figures(checkpointer, tmp_path / "a", found) == {}
    CHANGES[change](found)
    assert figures(checkpointer, tmp_path / "b", {**found, "step": 200}) == {}
    assert not warnings_of(caplog)


@pytest.mark.parametrize(
    "change",
    [{"lr": 0.2}, {"names": ["a", "c"]}, {"names": ["a"]}, {"other": 1}, {"lr": "0.1"}],
    ids=["value", "text", "length", "key", "type"],
)
def test_equal_tensors_beside_another_object_are_told_and_not_warned_of(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, change: dict[str, Any]
) -> None:
    found = state()
    assert figures(checkpointer, tmp_path / "a", found) == {}
    assert figures(checkpointer, tmp_path / "b", {**found, "step": 200, **change}) == {"same_tensors_as_step": 100}
    assert not warnings_of(caplog)


def test_other_metadata_make_a_snapshot_new_and_those_with_the_step_do_not(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path
) -> None:
    found = state()
    same = {"same_tensors_as_step": 100}
    assert figures(checkpointer, tmp_path / "a", found, metadata={"at": "step-100", "loss": 0.5}) == {}
    assert figures(checkpointer, tmp_path / "b", found, step=200, metadata={"at": "step-200", "loss": 0.4}) == same
    same = {"same_tensors_as_step": 200, "unchanged": True}
    assert figures(checkpointer, tmp_path / "c", found, step=300, metadata={"at": "step-300", "loss": 0.4}) == same


def test_the_same_step_another_run_and_a_state_without_tensors_are_compared_with_nothing(
    shared_worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    found = state()
    with AsyncCheckpointer(endpoint=shared_worker.endpoint) as checkpointer:
        assert figures(checkpointer, tmp_path / "a", found) == {}
        assert figures(checkpointer, tmp_path / "b", found) == {}, "a copy elsewhere, say"
        assert figures(checkpointer, tmp_path / "c", {"n": 1}, step=200) == {}
        assert figures(checkpointer, tmp_path / "d", {"n": 1}, step=300) == {}
        assert figures(checkpointer, tmp_path / "e", found, step=400) == {}, "what was saved between was another state"
    with AsyncCheckpointer(endpoint=shared_worker.endpoint) as checkpointer:
        resumed = asyncckpt.load(tmp_path / "e")
        assert figures(checkpointer, tmp_path / "f", resumed, step=500) == {}


def test_a_save_that_failed_is_compared_with_nothing(checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path) -> None:
    found = state()
    assert figures(checkpointer, tmp_path / "a", found) == {}
    other = {**found, "large": found["large"] + 1}
    assert checkpointer.save(other, tmp_path / "a", step=200).written.exception(60) is not None
    assert figures(checkpointer, tmp_path / "b", found, step=300) == {"same_tensors_as_step": 100}
    assert figures(checkpointer, tmp_path / "c", other, step=400) == {}


def test_one_rank_that_changed_makes_the_snapshot_of_all_new(shared_worker: RealWorker, tmp_path: pathlib.Path) -> None:
    def snapshot(rank: int, seed: int) -> Snapshot:
        return Snapshot(nbytes=300_000, seed=seed, shard=(rank, 2))

    with (
        Client(shared_worker.endpoint, rank=0, world_size=2) as zero,
        Client(shared_worker.endpoint, rank=1, world_size=2) as one,
    ):
        slots = []
        for client in (zero, one):
            client.hello()
            slots.append(client.allocate(snapshot(0, 0).slot_nbytes()))
        first = new_save_id()
        told = []
        for number, seeds in enumerate([(0, 1), (0, 1), (0, 2), (3, 2), (3, 2)]):
            save_id = first.with_parts(sequence=number)
            for rank, client in enumerate((zero, one)):
                if number:
                    client.reopen(slots[rank])
                made = snapshot(rank, seeds[rank])
                client.stage(slots[rank], made, save_id, str(tmp_path / str(number)), step=10 * number)
                client.submit(slots[rank], save_id)
            rows = [client.wait(save_id) for client in (zero, one)]
            assert [row["phase"] for row in rows] == ["committed"] * 2
            reports = [row["report"].get("same_tensors_as_step") for row in rows]
            assert reports[0] == reports[1], "all ranks hear the same"
            told.append(reports[0])
        for client in (zero, one):
            client.goodbye()
        assert told == [None, 0, None, None, 30]
