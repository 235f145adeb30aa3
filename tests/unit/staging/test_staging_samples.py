"""Samples of replicas that lie on devices: taken in the order of the streams, and brought over after the copies."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from simulated_ranks import Ranks
from simulated_saves import bits, ranks_saver, two_devices

from asyncckpt.format.checksums import block_digest
from asyncckpt.planning.replica_checks import sample_digests
from asyncckpt.protocol.samples import decode_samples
from tests.simulated_device import SimulatedDevice

pytestmark = pytest.mark.usefixtures("all_behind")


def replicas(device: SimulatedDevice) -> dict[str, Any]:
    torch.manual_seed(3)
    return {
        "a": device.put(torch.randn(5000), 0),
        "b": device.put(torch.randn(40, 30), 1).t(),
        "c": torch.randn(200),
        "d": device.put(torch.randn(7), 0),
    }


def test_windows_on_devices_are_completed_to_the_same_digests(device: SimulatedDevice) -> None:
    state = replicas(device)
    ranks = Ranks(2)
    ranks.exchange([state, state])
    plan, flat = ranks.plans[0].plan_for(state)
    for sequence in range(4):
        whole = sample_digests(plan, flat, sequence)
        parts = sample_digests(plan, flat, sequence, lambda tensor: device.device_of(tensor) is not None)
        assert len(parts.device_windows) == 3 and len(parts.encode()) == len(whole.encode())
        assert parts.completed([bits(window) for _, window in parts.device_windows]).encode() == whole.encode()


@pytest.mark.parametrize("mode", ["blocking", "overlap"])
@pytest.mark.parametrize("pinned", [True, False])
def test_a_save_tells_the_digests_of_what_the_replicas_were(device: SimulatedDevice, mode: str, pinned: bool) -> None:
    state = replicas(device)
    del state["b"]  # gathered by a kernel of torch, which the simulation does not hold up
    ranks = Ranks(2)
    ranks.exchange([state, state])
    saver = ranks_saver(device, ranks, staging=mode, use_pinned_memory=pinned)
    stager = saver.stager
    for name, value in (("a", 2.0), ("d", 3.0)):
        device.launch(0, partial(state[name].data.fill_, value))
    handle = saver.save(state)
    stager.overlap.fence.wait()
    for name in ("a", "d"):
        device.launch(0, partial(state[name].data.fill_, 9.0))
    assert saver.ended(handle) is None
    found = decode_samples(saver.process.asked[str(handle.save_id)].samples)
    assert found["d"].digest == block_digest(bits(torch.full((7,), 3.0)))
    assert found["a"].digest == block_digest(bits(torch.full((1024,), 2.0)))
    assert found["c"].digest == block_digest(bits(state["c"]))
    device.drain()
    saver.close()


class TrainingFirst(random.Random):
    """Lets the training's streams run as soon as they may, and the side streams when nothing else can."""

    def choice(self, ready: Any) -> Any:
        return next((stream for stream in ready if stream.name.startswith("default")), ready[0])


@pytest.mark.parametrize("pinned", [True, False])
def test_samples_of_what_no_optimizer_owns_are_of_the_save_whatever_comes_next(pinned: bool) -> None:
    with two_devices(TrainingFirst(0)) as device:
        state = {name: device.put(torch.randn(n), 0) for name, n in (("a", 1000), ("d", 7), ("w", 3000))}
        ranks = Ranks(2)
        ranks.exchange([state, state])
        saver = ranks_saver(device, ranks, staging="auto", use_pinned_memory=pinned)
        optimizer = torch.optim.SGD([torch.nn.Parameter(state["w"])], lr=1.0)
        saver.stager.overlap.attach(optimizer)
        expected = {name: block_digest(bits(state[name])) for name in ("a", "d")}
        device.frozen = pinned  # else `save()` waits for it
        handle = saver.save(state)
        for name in expected:  # as a forward pass changes the statistics of a BatchNorm: no hook is in between
            device.launch(0, partial(state[name].data.fill_, 9.0))
        device.frozen = False
        for _ in range(9):
            device.some()
        assert saver.ended(handle) is None
        found = decode_samples(saver.process.asked[str(handle.save_id)].samples)
        assert {name: found[name].digest for name in expected} == expected
        device.drain()
        saver.close()
