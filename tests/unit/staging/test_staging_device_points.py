"""At every named instant of copies from devices: an error, a long wait, the process's end. The device is simulated."""

from __future__ import annotations

import os
import pathlib
import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from overlapping import copy_all_behind
from simulated_ranks import Ranks
from simulated_saves import Saver, bits, note_seals, ranks_saver, two_devices, use_small_pieces

from asyncckpt.basics.failpoints import observed
from asyncckpt.errors import AsyncCkptError
from asyncckpt.format.checksums import block_digest
from asyncckpt.protocol.samples import decode_samples
from tests.failing_process import ACTIONS, At, fail, kill
from tests.failpoint_groups import COMPARED, DEVICES, cases
from tests.simulated_device import SimulatedDevice

CASES = cases(DEVICES) + cases(COMPARED)


@pytest.fixture(autouse=True)
def _small_and_behind() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        copy_all_behind(patch.setattr)
        use_small_pieces(patch)
        yield


def made(device: SimulatedDevice, staging: str) -> tuple[Saver, dict[str, Any]]:
    """Return a saver that is rank 0 of two, which compare samples of their replicas, and what it saves."""
    tensors = {"large": torch.randn(12_000), "d": torch.randn(7), **{f"small{n}": torch.randn(n + 1) for n in range(9)}}
    placed = {name: device.put(tensor, 0) for name, tensor in tensors.items()}
    state = {**placed, "other": device.put(torch.randn(5_000), 1), "host": torch.randn(1000)}
    ranks = Ranks(2)
    ranks.exchange([state, state])
    return ranks_saver(device, ranks, staging=staging, slots=1, slot_timeout_s=30), state


def assert_saved(saver: Saver, state: dict[str, Any]) -> None:
    """The next save holds what rank 0 writes of the state, and the digests of what was saved."""
    handle = saver.save(state)
    assert saver.ended(handle) is None
    saver.know(state)
    content = saver.content(handle)
    assert content and content == {name: bits(state[name]) for name in content}
    found = decode_samples(saver.process.asked[str(handle.save_id)].samples)
    assert found["d"].digest == block_digest(bits(state["d"]))


@pytest.mark.parametrize("action", ["raise", "refuse", "sleep"])
@pytest.mark.parametrize(("staging", "point"), CASES)
def test_an_error_or_a_wait_between_copies_costs_the_save_at_most(
    device: SimulatedDevice, staging: str, point: str, action: str
) -> None:
    def refuse() -> None:
        raise RuntimeError("CUDA error: simulated")

    saver, state = made(device, staging)
    for visit in (1, 2) if point == "device: copying" else (1,):  # of the two devices
        observer = At(point, {"raise": fail, "refuse": refuse, "sleep": ACTIONS["sleep"]}[action], visit)
        with observed(observer):
            handle = saver.save(state)
            error = saver.ended(handle)
        assert observer.met
        assert isinstance(error, AsyncCkptError | OSError) if action != "sleep" else error is None, error
        assert (str(handle.save_id) in saver.process.written) is (error is None), "what is not whole is not sealed"
        assert_saved(saver, state)
    assert device.current == 0
    device.drain()
    saver.close()


@pytest.mark.parametrize(("staging", "point"), CASES)
def test_a_process_that_ends_between_copies_has_sealed_nothing(
    tmp_path: pathlib.Path, rng: random.Random, staging: str, point: str
) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)  # torch's own do not live on in a forked child, which would wait for them
            with two_devices(rng) as device, pytest.MonkeyPatch.context() as patch:
                note_seals(device, patch)
                saver, state = made(device, staging)
                assert_saved(saver, state)

                def die() -> None:
                    (tmp_path / "seals").write_text(str([call.name for call in device.calls].count("seal")))
                    kill()

                with observed(At(point, die)):
                    saver.ended(saver.save(state))
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL, f"{point} was not reached"
    assert (tmp_path / "seals").read_text() == "1", "the first one alone"
