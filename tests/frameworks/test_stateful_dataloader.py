"""torchdata's StatefulDataLoader in checkpoints of ours, with and without worker processes."""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import warnings
from typing import Any

import pytest
import rank_processes
import real_worker
import torch
import trainings

import asyncckpt

pytest.importorskip("torchdata", reason="`make test-frameworks` installs torchdata")
pytestmark = pytest.mark.timeout(600)


def _resumed(rank: int, path: str, endpoint: str, workers: int) -> bool:
    warnings.simplefilter("ignore")
    os.environ.pop("RANK"), os.environ.pop("WORLD_SIZE")
    current: Any = multiprocessing.current_process()
    current._config["daemon"] = False  # else it may not have the loader's processes as children
    from torchdata.stateful_dataloader import StatefulDataLoader

    def loader() -> Any:
        return StatefulDataLoader(torch.arange(40), batch_size=4, shuffle=True, num_workers=workers)

    torch.manual_seed(7)
    first = loader()
    batches = iter(first)
    for _ in range(3):
        next(batches)
    with asyncckpt.AsyncCheckpointer(endpoint=endpoint) as checkpointer:
        state = {"loader": asyncckpt.PerRank(first.state_dict()), "random": torch.get_rng_state()}
        checkpointer.save(state, path).written.result(60)
    rest = [batch.tolist() for batch in batches]
    torch.manual_seed(8)
    second = loader()
    found = asyncckpt.load(path)
    second.load_state_dict(found["loader"])
    torch.set_rng_state(found["random"])
    return len(rest) == 7 and [batch.tolist() for batch in second] == rest


@pytest.mark.parametrize("workers", [0, 2])
def test_the_next_batch_after_a_resume_is_the_one_that_would_have_come(
    workers: int, worker: real_worker.RealWorker, tmp_path: pathlib.Path
) -> None:
    options: dict[str, Any] = {"group": False, "timeout_s": trainings.TIMEOUT_S}
    path = str(tmp_path / "one")
    assert rank_processes.run(1, _resumed, path, worker.endpoint, workers, **options) == [True]
