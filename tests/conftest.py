"""What every test gets: a guard against leaks, a private endpoint, and seeds that replay.

A random test takes its numbers from the fixture `rng`. Its seed is printed with the failure; run the test again with
`ASYNCCKPT_TEST_SEED=<seed>` to get the same numbers, whether in one process or spread over several (`pytest -n 2`).
It is that of hypothesis's examples, too.

A failure is printed when it happens: a run that is cut off would keep it to itself.
"""

from __future__ import annotations

import gc
import os
import pathlib
import random
import shutil
import signal
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from tests import fault_table
from tests.command_calls import Command
from tests.leak_guard import LeakGuard
from tests.warm_python import WarmPython

# Before torch is imported, here and in what is started from here. Threads of OpenMP that have nothing to do spin for a
# while, in the hope of more: with several processes on few cores that takes a third of the time away from the others.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

try:
    import hypothesis
except ModuleNotFoundError:  # the run with nothing but the required packages
    pass
else:
    hypothesis.settings.register_profile(
        "bounded",
        deadline=None,
        print_blob=True,
        database=None,
        max_examples=int(os.environ.get("ASYNCCKPT_TEST_EXAMPLES", "100")),
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.settings.load_profile("bounded")

SEED_VARIABLE = "ASYNCCKPT_TEST_SEED"
MEMORY_NBYTES = 8 << 30
"""What must be free in memory for files to be put there; several processes ask at once, each for a tenth of it."""

_SEED = pytest.StashKey[int]()


@pytest.hookimpl(tryfirst=True)  # hypothesis's plugin reads its seed in its own
def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed, also hypothesis's; a process that runs a part of the tests takes that of who has started it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell leaves it to what it runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    missing = [one for one in config.args if not (config.invocation_params.dir / one.partition("::")[0]).exists()]
    if missing:  # with pytest-xdist, pytest would only say that no tests ran
        raise pytest.UsageError(f"no such file or directory: {', '.join(missing)}")
    given = getattr(config, "workerinput", {}).get("seed") or os.environ.get(SEED_VARIABLE)
    config.stash[_SEED] = int(given or random.SystemRandom().getrandbits(32))
    if getattr(config.option, "hypothesis_seed", 0) is None:  # neither without hypothesis, nor given by hand
        config.option.hypothesis_seed = str(config.stash[_SEED])
    if os.environ.get(fault_table.RESULTS_VARIABLE):
        config.pluginmanager.register(fault_table)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hand the seed to a process that will run a part of the tests (pytest-xdist)."""
    node.workerinput["seed"] = node.config.stash[_SEED]


def pytest_collection_finish() -> None:
    """Let no collection of garbage visit what is there before the first test: 0.2 s each time."""
    gc.freeze()


def pytest_report_header(config: pytest.Config) -> str:
    """Name the seed once, so that even a killed run can be replayed."""
    return f"asyncckpt: {SEED_VARIABLE}={config.stash[_SEED]}"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a failure at once, with several processes from the one that gathers what the others report."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid} failed ({report.when}):\n{report.longreprtext}", flush=True)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed of this session; the same for a test whether it runs alone or among others."""
    found = request.config.stash[_SEED]
    print(f"{request.node.nodeid}: replay with {SEED_VARIABLE}={found}")
    return found


@pytest.fixture
def rng(seed: int, request: pytest.FixtureRequest) -> random.Random:
    """Random numbers from `seed`; others in each test, and in each case of a test with parameters."""
    return random.Random(f"{seed} {request.node.nodeid}")


def _private_directory() -> pathlib.Path:
    """Make a directory of mode 0700 with a short name: a Unix socket's path holds 107 bytes."""
    base = tempfile.gettempdir() if len(tempfile.gettempdir()) < 40 else "/tmp"
    return pathlib.Path(tempfile.mkdtemp(prefix="ackpt-", dir=base))


@pytest.fixture(scope="session", autouse=True)
def _default_endpoint_is_private() -> Iterator[pathlib.Path]:
    """Keep tests from meeting a worker that this user really runs."""
    directory = _private_directory()
    patch = pytest.MonkeyPatch()
    for name in [n for n in os.environ if n.startswith("ASYNCCKPT_") and not n.startswith("ASYNCCKPT_TEST_")]:
        patch.delenv(name)
    patch.setenv("XDG_RUNTIME_DIR", str(directory))
    yield directory
    patch.undo()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def warm_python(_default_endpoint_is_private: pathlib.Path) -> Iterator[WarmPython]:
    """Starts programs that need torch without importing it each time."""
    found = WarmPython()
    yield found
    found.close()


@pytest.fixture
def short_path() -> Iterator[pathlib.Path]:
    """As `tmp_path`, with a name that leaves room for sockets, however deep pytest's own directories lie."""
    directory = _private_directory()
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def unprobed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of any mount, since files of tests lie on one device; torn manifests are watched for 20 ms."""
    monkeypatch.setattr("asyncckpt.storage.mounts.probe._known", {})
    monkeypatch.setattr("asyncckpt.storage.checkpoint_dir.TORN_WAIT_S", 0.02)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the subclasses of `tests.composite_samples`, for one test."""
    from asyncckpt.state_dict import composite_tensors
    from tests import composite_samples as samples

    monkeypatch.setattr(composite_tensors, "_registered", {})
    for kind in (samples.Blocks, samples.OneScale, samples.Pair, samples.Settings, samples.Rounding, samples.Range):
        composite_tensors.register_subclass(kind)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """The command `asyncckpt`, in this process."""
    return Command(capsys)


@pytest.fixture
def memory_path(request: pytest.FixtureRequest) -> Iterator[pathlib.Path]:
    """As `tmp_path`, in memory where that has room: for hundreds of saves whose test fails their calls by itself."""
    memory = pathlib.Path("/dev/shm")
    if not memory.is_dir() or shutil.disk_usage(memory).free < MEMORY_NBYTES:
        yield request.getfixturevalue("tmp_path")
        return
    directory = pathlib.Path(tempfile.mkdtemp(prefix="ackpt-", dir=memory))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def endpoint_dir(_leak_guard: LeakGuard) -> Iterator[pathlib.Path]:
    """A private directory for sockets; what is left in it, or a worker that still serves it, fails the test."""
    directory = _private_directory()
    _leak_guard.watch(directory)
    yield directory


@pytest.fixture
def endpoint(endpoint_dir: pathlib.Path) -> str:
    """An endpoint at which nobody listens yet."""
    return f"ipc://{endpoint_dir}/w.sock"


@pytest.fixture(autouse=True)
def _leak_guard(_default_endpoint_is_private: pathlib.Path) -> Iterator[LeakGuard]:
    """Fail a test that leaves an fd, a thread, a child, a slot's mapping, a socket or a worker behind."""
    guard = LeakGuard(_default_endpoint_is_private)
    yield guard
    found = guard.settled_leaks()
    guard.clean_up()
    if found:
        pytest.fail("the test leaked " + "; ".join(found), pytrace=False)


@pytest.fixture
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Epochs that this process gives are counted from 1."""
    monkeypatch.setattr("asyncckpt.storage.catalog.epoch_by_clock", lambda now: 1)
