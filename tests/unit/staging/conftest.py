"""Saves of tensors on two simulated devices."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from overlapping import copy_all_behind
from simulated_saves import Saver, two_devices, use_small_pieces

from tests.simulated_device import SimulatedDevice


@pytest.fixture
def all_behind() -> Iterator[None]:
    """Copies run behind the training whatever they cost."""
    with pytest.MonkeyPatch.context() as patch:  # of its own: tests undo theirs
        copy_all_behind(patch.setattr)
        yield


@pytest.fixture
def device(rng: random.Random) -> Iterator[SimulatedDevice]:
    with two_devices(rng) as made:
        yield made


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_pieces(monkeypatch)


@pytest.fixture
def saver(device: SimulatedDevice, request: pytest.FixtureRequest) -> Iterator[Saver]:
    """One with `staging="overlap"`; a test's parameters are further settings."""
    made = Saver(device, **{"staging": "overlap", **getattr(request, "param", {})})
    yield made
    device.frozen = False
    device.failing.clear()
    device.drain()
    made.close()


@pytest.fixture
def state(device: SimulatedDevice) -> dict[str, Any]:
    """Tensors of two devices and of the host."""
    torch.manual_seed(1)
    return {
        "large": device.put(torch.randn(12_000), 0),
        **{f"small{n}": device.put(torch.randn(n + 1), 0) for n in range(30)},
        "empty": device.put(torch.empty(0, 3), 0),
        "columns": device.put(torch.randn(40, 30), 1).t(),
        "half": device.put(torch.randn(5_000).to(torch.bfloat16), 1),
        "float8": device.put(torch.randn(300).to(torch.float8_e4m3fn), 1),
        "other": device.put(torch.randn(5_000), 1),
        "host": torch.randn(30_000),
    }
