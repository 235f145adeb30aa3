"""The step of a save: what is taken for one, wherever a step is given."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import asyncckpt  # noqa: E402
from asyncckpt import CheckpointManager, SyncCheckpointer  # noqa: E402
from asyncckpt.errors import ConfigError  # noqa: E402

STATE = {"w": torch.ones(2)}


def integers() -> dict[str, Any]:
    """Return the number 6 as every type that is taken for a step."""
    numpy = pytest.importorskip("numpy")
    return {
        "int": 6,
        "numpy int64": numpy.int64(6),
        "numpy int32": numpy.int32(6),
        "numpy uint8": numpy.uint8(6),
        "numpy uint64": numpy.uint64(6),
        "0-d array": numpy.array(6),
        "0-d tensor": torch.tensor(6),
        "0-d int32 tensor": torch.tensor(6, dtype=torch.int32),
        "0-d parameter": torch.nn.Parameter(torch.tensor(6), requires_grad=False),
    }


NAMES = (
    *("int", "numpy int64", "numpy int32", "numpy uint8", "numpy uint64", "0-d array"),
    *("0-d tensor", "0-d int32 tensor", "0-d parameter"),
)


def no_steps() -> dict[str, Any]:
    numpy = pytest.importorskip("numpy")
    return {
        "text": "5",
        "float": 5.0,
        "bool": True,
        "negative": -1,
        "too large": 1 << 63,
        "numpy float": numpy.float64(5),
        "numpy bool": numpy.bool_(True),
        "numpy negative": numpy.int64(-5),
        "array": numpy.array([5]),
        "float tensor": torch.tensor(5.0),
        "bool tensor": torch.tensor(True),
        "1-d tensor": torch.tensor([5]),
        "meta tensor": torch.tensor(5, device="meta"),
        "list": [5],
        "bytes": b"5",
        "object with another shape": SimpleNamespace(shape=5),
    }


NO_NAMES = (
    *("text", "float", "bool", "negative", "too large", "numpy float", "numpy bool", "numpy negative", "array"),
    *("float tensor", "bool tensor", "1-d tensor", "meta tensor", "list", "bytes", "object with another shape"),
)


@pytest.fixture
def manager(tmp_path: pathlib.Path) -> Iterator[CheckpointManager]:
    with (
        SyncCheckpointer() as checkpointer,
        CheckpointManager(
            tmp_path / "run", checkpointer=checkpointer, save_interval_steps=3, preemption_signal=()
        ) as made,
    ):
        yield made


def test_the_tables_name_every_value() -> None:
    assert (tuple(integers()), tuple(no_steps())) == (NAMES, NO_NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_integer_is_a_step(tmp_path: pathlib.Path, name: str) -> None:
    step = integers()[name]
    with SyncCheckpointer() as checkpointer:
        checkpointer.save(STATE, tmp_path / "argument", step=step)
        checkpointer.save({**STATE, "step": step}, tmp_path / "leaf")
    for place in ("argument", "leaf"):
        found = asyncckpt.open_checkpoint(tmp_path / place).step
        assert (found, type(found)) == (6, int)


@pytest.mark.parametrize("name", NAMES)
def test_a_manager_takes_every_integer_for_a_step(manager: CheckpointManager, name: str) -> None:
    step = integers()[name]
    assert manager.should_save(step)
    assert not manager.reached_preemption(step)
    manager.save(step, STATE)
    assert not manager.should_save(step), "it was saved last"
    assert manager.all_steps() == [6]
    found = manager.restore({"w": torch.zeros(2)}, step=step)
    assert found is not None and (found.step, type(found.step)) == (6, int)
    manager.pin(step)
    assert manager.unpin(step)


@pytest.mark.parametrize("name", NO_NAMES)
def test_what_is_no_step_is_refused_by_name_as_an_argument(tmp_path: pathlib.Path, name: str) -> None:
    step = no_steps()[name]
    with SyncCheckpointer() as checkpointer, pytest.raises(ConfigError, match=r"step=.*expected an int") as caught:
        checkpointer.save(STATE, tmp_path / "a", step=step)
    assert caught.value.field == "step"
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("name", NO_NAMES)
@pytest.mark.parametrize(
    "call",
    [
        lambda manager, step: manager.save(step, STATE),
        lambda manager, step: manager.should_save(step),
        lambda manager, step: manager.reached_preemption(step),
        lambda manager, step: manager.restore(step=step),
        lambda manager, step: manager.pin(step),
        lambda manager, step: manager.unpin(step),
    ],
    ids=["save", "should_save", "reached_preemption", "restore", "pin", "unpin"],
)
def test_a_manager_refuses_what_is_no_step_and_goes_on(
    manager: CheckpointManager, call: Callable[[CheckpointManager, Any], Any], name: str
) -> None:
    with pytest.raises(ConfigError, match="expected an int") as caught:
        call(manager, no_steps()[name])
    assert caught.value.field == "step"
    manager.save(3, STATE)
    assert manager.all_steps() == [3]


@pytest.mark.parametrize(
    "name", [name for name in NO_NAMES if name not in ("meta tensor", "object with another shape")]
)
def test_a_leaf_called_step_that_is_none_leaves_the_number_of_the_save(tmp_path: pathlib.Path, name: str) -> None:
    with SyncCheckpointer() as checkpointer:
        for n in range(2):
            checkpointer.save({**STATE, "step": no_steps()[name]}, tmp_path / str(n))
    assert asyncckpt.open_checkpoint(tmp_path / "1").step == 1


def test_intervals_and_lists_of_steps_take_numpy_s_integers(tmp_path: pathlib.Path) -> None:
    numpy = pytest.importorskip("numpy")
    with (
        SyncCheckpointer() as checkpointer,
        CheckpointManager(
            tmp_path,
            checkpointer=checkpointer,
            save_interval_steps=numpy.int64(4),
            save_on_steps=numpy.array([1, 3]),
            preemption_signal=(),
        ) as manager,
    ):
        assert [int(step) for step in numpy.arange(1, 9) if manager.should_save(step)] == [1, 3, 4, 8]


@pytest.mark.parametrize("setting", [{"save_interval_steps": "2"}, {"save_on_steps": ["2"]}, {"save_on_steps": [2.0]}])
def test_an_interval_or_a_list_of_what_is_no_step_is_refused(tmp_path: pathlib.Path, setting: dict[str, Any]) -> None:
    with SyncCheckpointer() as checkpointer, pytest.raises(ConfigError) as caught:
        CheckpointManager(tmp_path, checkpointer=checkpointer, **setting)
    assert caught.value.field == next(iter(setting))
