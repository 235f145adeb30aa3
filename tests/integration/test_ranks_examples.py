"""The examples of parallelism: what one arrangement saved, another goes on with as if it had never stopped."""

from __future__ import annotations

import contextlib
import importlib
import shutil
from pathlib import Path

import pytest
import rank_processes
import real_worker
import torch.distributed as dist


def _run(rank: int, example: str, arguments: list[str]) -> list[float]:
    with contextlib.redirect_stdout(None):
        return list(importlib.import_module(f"examples.{example}").main(arguments))


def run(endpoint: str, example: str, world_size: int, *arguments: object) -> list[float]:
    """Run an example as torchrun would start it; return its losses, the same on all ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # a port that is held, not found free
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "ASYNCCKPT_ENDPOINT": endpoint}
    environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    words = [str(argument) for argument in arguments]
    found = rank_processes.run(world_size, _run, example, words, group=False, environ=environ)
    assert all(losses == found[0] for losses in found)
    return list(found[0])


@pytest.mark.parametrize(
    ("example", "saved", "resumed"),
    [
        ("fsdp2", (2, ()), (3, ())),
        ("fsdp2_tp", (4, ("--tp", 2)), (2, ("--tp", 1))),
        ("pipeline_stages", (2, ()), (3, ())),
        ("hand_written_tp", (2, ()), (3, ())),
    ],
)
def test_an_example_goes_on_in_another_arrangement(
    shared_worker: real_worker.RealWorker,
    tmp_path: Path,
    example: str,
    saved: tuple[int, tuple[object, ...]],
    resumed: tuple[int, tuple[object, ...]],
) -> None:
    endpoint = shared_worker.endpoint
    whole = run(endpoint, example, saved[0], *saved[1], "--dir", tmp_path / "a", "--steps", 4)
    shutil.rmtree(tmp_path / "a/step-4")
    then = run(endpoint, example, resumed[0], *resumed[1], "--dir", tmp_path / "a", "--steps", 4)
    assert (len(whole), len(then)) == (4, 2)
    assert then == pytest.approx(whole[2:], rel=1e-3)
    assert then != pytest.approx(whole[:2], rel=1e-3)
