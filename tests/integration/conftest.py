"""Real workers for the tests here."""

from __future__ import annotations

import pathlib
import shutil
import tempfile
from collections.abc import Iterator

import overlapping
import pytest
import rank_processes
import real_worker
import worker_here
import worker_pair

from asyncckpt import AsyncCheckpointer


@pytest.fixture(scope="session", autouse=True)
def rank_server(request: pytest.FixtureRequest) -> None:
    """Where a test runs several ranks: the process that they are forked from."""
    if any("test_ranks" in item.nodeid for item in request.session.items):
        rank_processes.start_server()


@pytest.fixture(autouse=True)
def all_behind() -> Iterator[None]:
    """Copies behind the training are tested with small tensors, on machines with any number of cores."""
    with pytest.MonkeyPatch.context() as patch:  # of its own: tests undo theirs
        overlapping.copy_all_behind(patch.setattr)
        yield


@pytest.fixture
def default_dir(endpoint_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The default endpoint lies here; a worker there is started by the checkpointer itself."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(endpoint_dir))
    return endpoint_dir


@pytest.fixture
def worker(endpoint: str) -> Iterator[real_worker.RealWorker]:
    """A worker of this test alone, at a private endpoint: it may be killed and frozen."""
    with real_worker.running(endpoint) as found:
        yield found


@pytest.fixture
def places() -> Iterator[worker_pair.Places]:
    """Two endpoints of this test alone; ranks that have them may lose the workers there, and start others."""
    with worker_pair.empty_places() as found:
        yield found


@pytest.fixture
def workers(places: worker_pair.Places) -> Iterator[list[real_worker.RealWorker]]:
    """A worker at each of `places`: they may be killed and frozen."""
    with worker_pair.both_running(places) as found:
        yield found


@pytest.fixture(scope="module")
def shared_worker() -> Iterator[real_worker.RealWorker]:
    """A worker of all tests of a module that do it no harm; at the end it must have given everything back."""
    directory = tempfile.mkdtemp(prefix="ackpt-", dir="/tmp")
    try:
        with real_worker.running(f"ipc://{directory}/w.sock") as found:
            pid = found.pid
            yield found
            assert found.alive, "a test has ended the shared worker"
            real_worker.wait_until(
                lambda: not found.status()["sessions"] and not found.status()["slots"], "sessions and slots are gone"
            )
            assert found.status()["pid"] == pid
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def here(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[worker_here.Here]:
    """A worker in this process, which is everybody's default."""
    monkeypatch.setenv("ASYNCCKPT_ENDPOINT", endpoint)
    found = worker_here.Here(endpoint)
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def checkpointer(shared_worker: real_worker.RealWorker) -> Iterator[AsyncCheckpointer]:
    """A checkpointer of this test alone, with the module's worker."""
    with AsyncCheckpointer(endpoint=shared_worker.endpoint) as found:
        yield found


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[overlapping.Gate]:
    """A closed gate in front of every copy that runs behind the training."""
    made = overlapping.Gate(monkeypatch)
    yield made
    made.open()
