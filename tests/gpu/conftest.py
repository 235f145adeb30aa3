"""What the tests on a GPU share. Without one they are skipped, and nothing here touches CUDA."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import rank_processes
import real_worker
import torch

REASON = "torch finds no CUDA device here: torch.cuda.is_available() is False"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is in this folder, and skip it where there is no GPU."""
    for item in items:
        if "tests/gpu/" in item.nodeid:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture(scope="session", autouse=True)
def _what_is_there_before_the_first_test() -> None:
    """What ranks are forked from, and what the driver opens and starts at first use: no test of ours has leaked it."""
    if torch.cuda.is_available():
        rank_processes.start_server()
        for index in range(torch.cuda.device_count()):
            torch.ones(1, device=f"cuda:{index}").cpu()
            torch.ones(1).pin_memory()


@pytest.fixture
def worker(endpoint: str) -> Iterator[real_worker.RealWorker]:
    """A worker of this test alone."""
    with real_worker.running(endpoint) as found:
        yield found
