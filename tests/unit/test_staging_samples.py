"""Samples of replicas that lie on devices: taken in the order of the streams, and brought over after the copies."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from overlapping import copy_all_behind  # noqa: E402
from simulated_ranks import Ranks  # noqa: E402
from simulated_saves import Saver, bits, two_devices  # noqa: E402

from asyncckpt.config import RankInfo  # noqa: E402
from asyncckpt.format.checksum import block_digest  # noqa: E402
from asyncckpt.planning.digests import sample_digests  # noqa: E402
from asyncckpt.protocol.samples import decode_samples  # noqa: E402
from tests.simulated_device import SimulatedDevice  # noqa: E402


@pytest.fixture(autouse=True)
def all_behind() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:  # of its own: tests undo theirs
        copy_all_behind(patch.setattr)
        yield


@pytest.fixture
def device(rng: random.Random) -> Iterator[SimulatedDevice]:
    with two_devices(rng) as made:
        yield made


def replicas(device: SimulatedDevice) -> dict[str, Any]:
    torch.manual_seed(3)
    return {
        "a": device.put(torch.randn(5000), 0),
        "b": device.put(torch.randn(40, 30), 1).t(),
        "c": torch.randn(200),
        "d": device.put(torch.randn(7), 0),
    }


def test_what_is_apart_is_completed_to_the_same_digests(device: SimulatedDevice) -> None:
    state = replicas(device)
    ranks = Ranks(2)
    ranks.exchange([state, state])
    plan, flat = ranks.plans[0].take(state)
    for sequence in range(4):
        whole = sample_digests(plan, flat, sequence)
        parts = sample_digests(plan, flat, sequence, lambda tensor: device.device_of(tensor) is not None)
        assert len(parts.apart) == 3 and len(parts.encode()) == len(whole.encode())
        assert parts.completed([bits(window) for _, window in parts.apart]).encode() == whole.encode()


def ranks_saver(device: SimulatedDevice, ranks: Ranks, **fields: Any) -> Saver:
    """Return a saver that is rank 0 of two, which have exchanged their structures."""
    saver = Saver(device, **fields)
    stager: Any = saver.stager
    stager._ranks = SimpleNamespace(
        rank=RankInfo(0, 2), alone=False, must_meet=False, run_id="0123456789ab", agreement=ranks.agreement,
        advance=lambda sequence: None,
    )  # fmt: skip
    stager._requests._rank = RankInfo(0, 2)
    return saver


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
