"""strace puts errors and SIGKILL in the place of a real worker's system calls, below Python and every seam of ours.

Promises P1 to P4 and P9. `when=` counts in each thread by itself, so several saves may meet the fault; each of them
ends with a typed error or is there in full, and once all threads are past it saves work again.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
from collections.abc import Iterator

import pytest

from asyncckpt.errors import AsyncCkptError, from_wire
from tests.saving import Saver, is_listed, violations, worker_process

pytestmark = [
    pytest.mark.fault,
    pytest.mark.root,
    pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed"),
    pytest.mark.skipif(os.geteuid() != 0, reason="tracing needs root"),
]

QUIET = 6
"""So many saves in a row that work: all threads are past the fault."""
MIN_SAVES = 12
MAX_SAVES = 120


@contextlib.contextmanager
def injected(pid: int, what: str) -> Iterator[None]:
    """Inject into all threads of a process, those that are still to come too."""
    call = what.partition(":")[0]
    command = ["strace", "-f", "-p", str(pid), "-o", "/dev/null", "-e", f"trace={call}", "-e", f"inject={what}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
        assert tracer.stderr
        said = tracer.stderr.readline()
        if "attached" not in said:
            tracer.kill()
            pytest.skip(f"strace: {said.strip()}")
        try:
            yield
        finally:
            tracer.send_signal(signal.SIGINT)  # detaches


def ends(saver: Saver, root: pathlib.Path) -> list[str]:
    """Save until all is well for a while, and return how each save ended."""
    phases: list[str] = []
    while len(phases) < MIN_SAVES or (len(phases) < MAX_SAVES and phases[-QUIET:] != ["committed"] * QUIET):
        phases.append(saver.save(root / f"{len(phases)}", len(phases)))
    return phases


ERRORS = [
    *("fsync:error=EIO:when=1", "fsync:error=ENOSPC:when=2", "fsync:error=EDQUOT:when=3..5"),
    *("pwrite64:error=ENOSPC:when=1", "pwrite64:error=EIO:when=2", "pwrite64:retval=0:when=2"),
    *("fallocate:error=ENOSPC:when=1", "fallocate:error=EDQUOT:when=2", "ftruncate:error=EIO:when=1"),
    *("mkdir:error=EROFS:when=1", "mkdir:error=EDQUOT:when=2", "linkat:error=ENOSPC:when=1"),
    *("newfstatat:error=ESTALE:when=3", "newfstatat:error=EIO:when=5", "close:error=EIO:when=1"),
    *("close:error=ENOSPC:when=3", "openat:error=EMFILE:when=1", "openat:error=ENFILE:when=3"),
    "unlink:error=EIO:when=1..2",
]


@pytest.mark.parametrize("what", [ERRORS[0], *(pytest.param(e, marks=pytest.mark.soak) for e in ERRORS[1:])])
def test_an_error_in_the_place_of_a_call_ends_in_a_typed_error_and_in_saves_that_work(
    endpoint: str, tmp_path: pathlib.Path, what: str
) -> None:
    with worker_process(endpoint) as worker, Saver(endpoint) as saver:
        assert saver.save(tmp_path / "before", 99) == "committed"
        with injected(worker.pid, what):
            phases = ends(saver, tmp_path)
        assert "failed" in phases, "nothing met the fault"
        assert phases[-QUIET:] == ["committed"] * QUIET
        for path, error in saver.refused.items():
            assert str(from_wire(error)) and error["fields"]["code"] != "internal", path
            assert not is_listed(pathlib.Path(path)), path
        assert violations(saver.acknowledged, list(saver.refused)) == []
        assert saver.status()["counters"].get("internal_errors", 0) == 0


@pytest.mark.soak
@pytest.mark.parametrize(
    "what",
    ["linkat:error=EIO:when=1", "linkat:error=EPERM:when=1", "fsync:error=EINTR:when=1"],
)
def test_an_error_that_costs_nothing_or_whose_outcome_nobody_knows_is_never_told_as_a_failure_or_as_success(
    endpoint: str, tmp_path: pathlib.Path, what: str
) -> None:
    with worker_process(endpoint) as worker, Saver(endpoint) as saver:
        with injected(worker.pid, what):
            phases = ends(saver, tmp_path)
        assert set(phases) <= {"committed", "unknown"}
        assert phases[-QUIET:] == ["committed"] * QUIET
        assert ("unknown" in phases) == (what == "linkat:error=EIO:when=1")
        assert violations(saver.acknowledged, list(saver.refused)) == []


@pytest.mark.soak
@pytest.mark.parametrize("when", [1, 2])
@pytest.mark.parametrize("call", ["mkdir", "fallocate", "pwrite64", "ftruncate", "fsync", "linkat", "close", "unlink"])
def test_a_kill_in_the_place_of_a_call_lists_nothing_broken(
    endpoint: str, tmp_path: pathlib.Path, call: str, when: int
) -> None:
    with worker_process(endpoint) as worker, Saver(endpoint, timeout_s=2.0) as saver:
        assert saver.save(tmp_path / "before", 99) == "committed"
        with (
            injected(worker.pid, f"{call}:signal=SIGKILL:when={when}"),
            contextlib.suppress(AsyncCkptError, TimeoutError),
        ):
            for n in range(20):
                saver.save(tmp_path / f"{n}", n)
        assert worker.wait(60) == -signal.SIGKILL
    assert violations(saver.acknowledged, [*saver.refused, *saver.open]) == []
    assert saver.acknowledged
    with worker_process(endpoint), Saver(endpoint) as again:
        assert again.save(tmp_path / "after", 1) == "committed"
        assert violations(again.acknowledged) == []
