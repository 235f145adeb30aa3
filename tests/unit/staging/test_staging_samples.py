"""Samples of replicas that lie on devices: taken in the order of the streams, and brought over after the copies."""

from __future__ import annotations

import os
import pathlib
import random
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from overlapping import copy_all_behind  # noqa: E402
from simulated_ranks import Ranks  # noqa: E402
from simulated_saves import Saver, bits, note_seals, ranks_saver, two_devices  # noqa: E402

from asyncckpt.basics.failpoints import observed  # noqa: E402
from asyncckpt.errors import AsyncCkptError  # noqa: E402
from asyncckpt.format.checksums import block_digest  # noqa: E402
from asyncckpt.planning.replica_checks import sample_digests  # noqa: E402
from asyncckpt.protocol.samples import decode_samples  # noqa: E402
from tests.failing_process import ACTIONS, At, fail, kill  # noqa: E402
from tests.failpoint_groups import COMPARED, cases  # noqa: E402
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


# ---- the named instant when they have come over --------------------------------------------------------------------


def compared(device: SimulatedDevice, mode: str) -> tuple[Saver, dict[str, Any]]:
    """Return a saver that is rank 0 of two, and what it saves."""
    state = replicas(device)
    del state["b"]  # as above
    ranks = Ranks(2)
    ranks.exchange([state, state])
    return ranks_saver(device, ranks, staging=mode, slots=1, slot_timeout_s=30), state


def is_told(saver: Saver, state: dict[str, Any]) -> bool:
    """Save, and say whether the request has the digests of what was saved."""
    handle = saver.save(state)
    assert saver.ended(handle) is None
    found = decode_samples(saver.process.asked[str(handle.save_id)].samples)
    return bool(found["d"].digest == block_digest(bits(state["d"])))


@pytest.mark.parametrize("action", ["raise", "refuse", "sleep"])
@pytest.mark.parametrize(("mode", "point"), cases(COMPARED))
def test_an_error_or_a_wait_when_samples_have_come_over_costs_the_save_at_most(
    device: SimulatedDevice, mode: str, point: str, action: str
) -> None:
    def refuse() -> None:
        raise RuntimeError("CUDA error: simulated")

    saver, state = compared(device, mode)
    observer = At(point, {"raise": fail, "refuse": refuse, "sleep": ACTIONS["sleep"]}[action])
    with observed(observer):
        handle = saver.save(state)
        error = saver.ended(handle)
    assert observer.met
    assert isinstance(error, AsyncCkptError | OSError) if action != "sleep" else error is None, error
    assert (str(handle.save_id) in saver.process.written) is (error is None), "what is not whole is not sealed"
    assert is_told(saver, state)
    device.drain()
    saver.close()


@pytest.mark.parametrize(("mode", "point"), cases(COMPARED))
def test_a_process_that_ends_when_samples_have_come_over_has_sealed_nothing(
    tmp_path: pathlib.Path, rng: random.Random, mode: str, point: str
) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)
            with two_devices(rng) as device, pytest.MonkeyPatch.context() as patch:
                note_seals(device, patch)
                saver, state = compared(device, mode)
                assert is_told(saver, state)

                def die() -> None:
                    (tmp_path / "seals").write_text(str([call.name for call in device.calls].count("seal")))
                    kill()

                with observed(At(point, die)):
                    saver.ended(saver.save(state))
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL, f"{point} was not reached"
    assert (tmp_path / "seals").read_text() == "1", "the first one alone"
