"""An object store that is busy, breaks connections, cuts answers short, loses them or lies about their length: never
damage, never silence.
"""

from __future__ import annotations

import pathlib
import re
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from real_worker import running

import asyncckpt
from asyncckpt.errors import (
    AsyncCkptError,
    CheckpointNotCommittedError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    SaveFailedError,
)
from asyncckpt.storage import locate
from asyncckpt.storage.cloud import retries
from tests import object_proxy, object_servers
from tests.object_proxy import (
    BUSY,
    CUT,
    LOST,
    PADDED,
    REFUSED,
    RESET,
    SAYS_LESS,
    SAYS_MORE,
    SILENT,
    SLOW,
    TRUNCATED,
    FaultyProxy,
)
from tests.object_servers import NO_CONNECTION_STAYS, Server
from tests.warm_python import WarmPython
from tests.worker_here import Here

object_servers.start_runtime()

DEADLINE_S = 150.0
LIES = (SAYS_MORE, SAYS_LESS, PADDED, CUT)
STORE_ERROR = "Generic (S3|GCS|MicrosoftAzure) error"
"""What obstore says before the words of a store."""

STATE = {"w": torch.arange(2_000_000.0), "n": 3}
PROGRAM = """
import sys, torch, asyncckpt
from asyncckpt.storage.cloud import retries

retries.RETRY_FOR_S = 5.0
what, path, *n = sys.argv[1:]
state = {"w": torch.arange(4_000_000.0), "n": int(n[0]) if n else 3}
try:
    if what == "save":
        with asyncckpt.SyncCheckpointer() as checkpointer:
            checkpointer.save(state, path, step=1)
    else:
        found = asyncckpt.load(path, source="disk")
        assert torch.equal(found["w"], state["w"]) and found["n"] == state["n"], "damaged"
except Exception as error:
    print(type(error).__name__, error)
    sys.exit(3)
"""


@pytest.fixture(scope="module", params=object_servers.SCHEMES)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with object_servers.running(request.param) as found:
        yield found


@pytest.fixture(scope="module")
def proxy(server: Server) -> Iterator[FaultyProxy]:
    """A proxy in front of the server; programs find it by the environment."""
    with object_proxy.running(server.url) as found, object_servers.in_environment(server, found.url):
        yield found


@pytest.fixture
def path(request: pytest.FixtureRequest, server: Server, proxy: FaultyProxy) -> str:
    proxy.fault = lambda method, path: ""
    return f"{server.root}/{abs(hash(request.node.name)):x}/step-1"


def run(python: WarmPython, what: str, path: str, *n: str) -> tuple[int, str]:
    done = python.run(PROGRAM, what, path, *n, timeout_s=DEADLINE_S)
    print(what, done.returncode, done.stdout, done.stderr)
    return done.returncode, done.stdout


@pytest.mark.parametrize("fault", [BUSY, RESET, LOST, SLOW])
def test_each_request_that_fails_once_is_repeated(
    path: str, proxy: FaultyProxy, fault: str, warm_python: WarmPython
) -> None:
    tried = Counter[tuple[str, str]]()

    def once(method: str, name: str) -> str:
        tried[method, name] += 1
        return fault if tried[method, name] == 1 else ""

    proxy.fault = once
    assert run(warm_python, "save", path) == (0, "")
    tried.clear()
    assert run(warm_python, "load", path) == (0, "")


def test_a_store_that_stays_busy_is_asked_until_the_time_is_over_however_often(
    path: str, server: Server, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(retries, "LAST_PAUSE_S", 0.01)
    tried = Counter[tuple[str, str]]()

    def busy(method: str, name: str) -> str:
        tried[method, name] += 1
        return BUSY if tried[method, name] <= 20 else ""

    proxy.fault = busy
    # A store that this process has not opened yet, so that it has these pauses.
    options = {**server.options(proxy.url), **NO_CONNECTION_STAYS, "connect_timeout": "30s"}
    save_here(path, options)
    tried.clear()
    found = asyncckpt.load(path, source="disk", storage_options=options)
    assert torch.equal(found["w"], STATE["w"]) and max(tried.values()) > 20


@pytest.mark.parametrize("where", ["path", "mirror"])
@pytest.mark.parametrize("fault", [BUSY, RESET, LOST, SLOW])
def test_a_worker_repeats_each_request_that_fails_once(
    path: str, proxy: FaultyProxy, endpoint: str, tmp_path: pathlib.Path, fault: str, where: str
) -> None:
    tried = Counter[tuple[str, str]]()

    def once(method: str, name: str) -> str:
        tried[method, name] += 1
        return fault if tried[method, name] == 1 else ""

    proxy.fault = once
    with running(endpoint, "--drain-timeout-s=1"), asyncckpt.AsyncCheckpointer(endpoint=endpoint) as checkpointer:
        if where == "path":
            checkpointer.save(STATE, path, step=1).written.result(DEADLINE_S)
        else:
            handle = checkpointer.save(STATE, tmp_path / "c", step=1, mirror=path)
            assert handle.mirrored is not None
            handle.mirrored.result(DEADLINE_S)
    assert tried
    proxy.fault = lambda method, name: ""
    found = asyncckpt.load(path, source="disk", storage_options=NO_CONNECTION_STAYS)
    assert torch.equal(found["w"], STATE["w"]) and found["n"] == 3


def test_answers_that_are_cut_short_do_no_damage(path: str, proxy: FaultyProxy, warm_python: WarmPython) -> None:
    assert run(warm_python, "save", path) == (0, "")
    proxy.fault = lambda method, name: TRUNCATED if method == "GET" and ".safetensors" in name else ""
    code, said = run(warm_python, "load", path)
    assert code == 3 and "AssertionError" not in said and "safetensors" in said


# ---- lies about a length


@pytest.fixture
def options(server: Server, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What leads calls of this process through the proxy. No store that a test before has opened is used."""
    monkeypatch.setattr(locate, "_stores", {})
    monkeypatch.setattr(retries, "RETRY_FOR_S", 1.0)
    return {**server.options(proxy.url), **NO_CONNECTION_STAYS}


def save_here(path: str, options: dict[str, str]) -> None:
    with asyncckpt.SyncCheckpointer(storage_options=options) as checkpointer:
        checkpointer.save(STATE, path, step=1)


def tell(proxy: FaultyProxy, lie: str, method: str, part: str) -> list[str]:
    """Let the proxy lie in answers to such requests; returns their paths, as they come."""
    lied: list[str] = []

    def fault(asked: str, name: str) -> str:
        if method not in ("", asked) or part not in name:
            return ""
        lied.append(name)
        return lie

    proxy.fault = fault
    return lied


@pytest.mark.parametrize(
    ("method", "part"),
    [("GET", "manifest.json"), ("GET", ".index"), ("GET", ".objects"), ("GET", ".safetensors"), ("HEAD", ""), ("", "")],
)
def test_a_load_of_lies_about_lengths_is_right_or_an_error(
    path: str, proxy: FaultyProxy, options: dict[str, str], method: str, part: str
) -> None:
    save_here(path, options)
    for lie in LIES:
        lied = tell(proxy, lie, method, part)
        began = time.monotonic()
        try:
            found = asyncckpt.load(path, source="disk", storage_options=options)
            assert torch.equal(found["w"], STATE["w"]) and found["n"] == 3, lie
        except (AsyncCkptError, OSError) as error:
            said = str(error)
            assert path in said and re.search(f"bytes|damaged|{STORE_ERROR}", said), said
        assert lied and time.monotonic() - began < DEADLINE_S / 5, lie


@pytest.mark.parametrize("lie", [PADDED, CUT])
def test_data_that_are_cut_on_their_way_are_not_called_damaged(
    path: str, proxy: FaultyProxy, options: dict[str, str], lie: str
) -> None:
    save_here(path, options)
    tell(proxy, lie, "GET", ".safetensors")
    with pytest.raises(OSError, match="bytes came") as caught:
        asyncckpt.restore_latest(path.rpartition("/")[0], source="disk", storage_options=options)
    assert not isinstance(caught.value, CorruptCheckpointError)


def test_answers_shorter_than_what_was_asked_for_are_completed(
    path: str, proxy: FaultyProxy, options: dict[str, str]
) -> None:
    save_here(path, options)
    lied = tell(proxy, SAYS_LESS, "GET", ".safetensors")
    assert torch.equal(asyncckpt.load(path, source="disk", storage_options=options)["w"], STATE["w"])
    assert len(lied) > 5


@pytest.mark.parametrize(
    ("method", "part"), [("GET", "prefix="), ("GET", ".index"), ("HEAD", ""), ("", ".safetensors?")]
)
def test_a_save_through_lies_about_lengths_is_right_or_an_error(
    path: str, proxy: FaultyProxy, options: dict[str, str], method: str, part: str
) -> None:
    for lie in LIES:
        place, failed = f"{path}/{lie.replace(' ', '-')}", ""
        lied = tell(proxy, lie, method, part)
        began = time.monotonic()
        try:
            save_here(place, options)
        except SaveFailedError as error:
            failed = str(error)
        assert lied and time.monotonic() - began < DEADLINE_S / 3, lie
        proxy.fault = lambda method, name: ""
        if failed:
            assert re.search(f"bytes|{STORE_ERROR}", failed) and "kernel" not in failed, lie
            with pytest.raises((CheckpointNotFoundError, CheckpointNotCommittedError)):
                asyncckpt.load(place, source="disk", storage_options=options)
        else:
            assert torch.equal(asyncckpt.load(place, source="disk", storage_options=options)["w"], STATE["w"]), lie


# ---- refusals and silence


def test_a_store_that_refuses_is_not_asked_again_and_its_words_are_told(
    path: str, proxy: FaultyProxy, warm_python: WarmPython
) -> None:
    proxy.fault = lambda method, name: REFUSED if method == "PUT" and name.endswith("manifest.json") else ""
    proxy.seen.clear()
    began = time.monotonic()
    code, said = run(warm_python, "save", path)
    assert code == 3 and "SaveFailedError" in said and "AccessDenied" in said and time.monotonic() - began < 30
    assert sum(method == "PUT" and name.endswith("manifest.json") for method, name in proxy.seen) == 1
    proxy.fault = lambda method, name: ""
    assert run(warm_python, "load", path)[1].startswith("Checkpoint"), "nothing is committed"


def test_a_store_that_says_nothing_is_an_error_in_time(path: str, proxy: FaultyProxy, options: dict[str, str]) -> None:
    proxy.fault = lambda method, name: SILENT
    began = time.monotonic()
    with pytest.raises(SaveFailedError, match=f"{STORE_ERROR}.*error sending request"):
        save_here(path, {**options, "timeout": "1s"})
    assert time.monotonic() - began < DEADLINE_S / 5


@pytest.mark.parametrize(("busy", "retry_for_s"), [("GET", retries.RETRY_FOR_S), ("PUT", 1.0)])
def test_a_save_by_a_worker_to_a_store_that_stays_busy_fails_in_time_with_its_words(
    path: str,
    proxy: FaultyProxy,
    options: dict[str, str],
    endpoint: str,
    busy: str,
    retry_for_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retries, "RETRY_FOR_S", retry_for_s)  # the first save's listing is given up earlier
    proxy.fault = lambda method, name: BUSY if method == busy else ""
    worker = Here(endpoint)  # in this process, so that it has these limits
    try:
        with asyncckpt.AsyncCheckpointer(endpoint=endpoint, storage_options=options) as checkpointer:
            began = time.monotonic()
            handle = checkpointer.save(STATE, path, step=1)
            with pytest.raises(SaveFailedError, match=f"{STORE_ERROR}.*SlowDown"):
                handle.written.result(DEADLINE_S)
            assert time.monotonic() - began < DEADLINE_S / 5
            proxy.fault = lambda method, name: ""
            checkpointer.save(STATE, path, step=1).written.result(DEADLINE_S)
    finally:
        worker.close()
    assert torch.equal(asyncckpt.load(path, source="disk", storage_options=options)["w"], STATE["w"])


@pytest.mark.parametrize(("fault", "word"), [(BUSY, "SlowDown"), (RESET, "error sending request")])
def test_a_store_that_stays_away_is_an_error_in_time(
    path: str, proxy: FaultyProxy, fault: str, word: str, warm_python: WarmPython
) -> None:
    proxy.fault = lambda method, name: fault
    code, said = run(warm_python, "save", path)
    assert code == 3 and word in said


def test_of_two_that_commit_one_wins_and_the_other_is_told(
    path: str, proxy: FaultyProxy, warm_python: WarmPython
) -> None:
    for n in range(2):
        with ThreadPoolExecutor(2) as pool:
            ends = list(pool.map(partial(run, warm_python, "save", f"{path}-{n}"), ("0", "1")))
        assert sorted(code for code, _ in ends) == [0, 3], ends
        winner = next(value for value, (code, _) in enumerate(ends) if code == 0)
        assert "CheckpointExistsError" in ends[1 - winner][1]
        assert run(warm_python, "load", f"{path}-{n}", str(winner)) == (0, "")
