"""Training by real frameworks, in processes that are forked from one that has them imported already."""

from __future__ import annotations

from collections.abc import Iterator

import object_servers
import pytest
import rank_processes
import real_worker

PRELOADED = [
    "numpy",
    "safetensors.torch",
    "transformers.trainer",
    "transformers.models.gpt2.modeling_gpt2",
    "accelerate",
    "lightning",
    "lightning.pytorch.strategies",
    "torchdata.stateful_dataloader",
    "torchao.optim",
    "torchao.quantization",
    "bitsandbytes",
    "asyncckpt.integrations.transformers",
    "asyncckpt.integrations.accelerate",
    "asyncckpt.integrations.lightning",
]
"""What is not installed is passed over."""


@pytest.fixture(scope="session", autouse=True)
def rank_server() -> None:
    """Where the trainings are forked from."""
    object_servers.start_runtime()
    rank_processes.preload(PRELOADED)
    rank_processes.start_server()


@pytest.fixture
def worker(endpoint: str) -> Iterator[real_worker.RealWorker]:
    """A worker of this test alone; it outlives every training."""
    with real_worker.running(endpoint) as found:
        yield found
