"""The demo: it holds from end to end, whatever hangs is killed and said, and a crash at another moment is no proof."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncckpt.cli.commands import demo
from asyncckpt.cli.commands.demo import Crash, DemoFailedError
from asyncckpt.protocol.identity import start_ticks

ROOT = Path(__file__).parents[2]
HANGS = (sys.executable, "-c", "import time; time.sleep(600)")
DEAF_WITH_CHILD = (
    sys.executable,
    "-c",
    "import signal, subprocess, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "child = subprocess.Popen(['sleep', '600'], start_new_session=True); print(child.pid, flush=True); time.sleep(600)",
)


@pytest.mark.timeout(300)
def test_a_short_demo_holds_from_end_to_end(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    endpoint_dir: Path,
    tmp_path: Path,
) -> None:
    for name, value in (("STEPS", 6), ("EVERY", 2), ("CRASH_AT", 4), ("STALL_NBYTES", 4_000_000)):
        monkeypatch.setattr(demo, name, value)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(endpoint_dir))
    code = demo.run(argparse.Namespace(dir=str(tmp_path)))
    out, err = capfd.readouterr()
    assert code == 0, out + err
    assert (
        "written=False" in out
        and "all training processes are dead; the worker continues and commits step-000004" in out
    )
    assert "equal bit for bit" in out and "6 checkpoints verify" in out and "all checks hold" in out
    assert [p for p in endpoint_dir.rglob("*") if p.is_socket()] == []


def test_what_keeps_it_from_running_is_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "used" / "crashed").mkdir(parents=True)
    assert demo.run(argparse.Namespace(dir=str(tmp_path / "used"))) == 1
    assert "exists already" in capsys.readouterr().err
    monkeypatch.setattr(demo, "_play", lambda directory, environment: pytest.fail("it began"))
    monkeypatch.setattr(demo, "NEEDED_NBYTES", 1 << 60)
    assert demo.run(argparse.Namespace(dir=str(tmp_path))) == 1
    out, err = capsys.readouterr()
    assert "minutes" in out.splitlines()[0] and "loses nothing" in out
    assert f"the disk that holds {tmp_path} is full" in err and "--dir" in err


def test_a_failure_on_a_disk_that_has_become_full_names_the_disk_and_bytecode_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")

    def fails(directory: Path, environment: dict[str, str]) -> None:
        assert "PYTHONDONTWRITEBYTECODE" not in environment and environment["PATH"] == os.environ["PATH"]
        monkeypatch.setattr(demo, "FULL_DISK_NBYTES", 1 << 60)
        raise DemoFailedError("the worker did not commit")

    monkeypatch.setattr(demo, "_play", fails)
    assert demo.run(argparse.Namespace(dir=str(tmp_path))) == 1
    err = capsys.readouterr().err
    assert f"the disk that holds {tmp_path} is full" in err and "worker" not in err


# ---- children


def failed_check(line: str) -> None:
    raise DemoFailedError(line)


@pytest.mark.parametrize(
    ("code", "on_line", "match"),
    [
        ("import time; time.sleep(600)", print, r"longer than 1\.5 s, and was killed"),
        ("import time; print('weights', flush=True); time.sleep(600)", print, r"longer than 1\.5 s, and was killed"),
        ("import time; print('weights', flush=True); time.sleep(600)", failed_check, "weights"),
        ("raise SystemExit('the reason')", print, "exited with code 1"),
    ],
)
def test_a_training_that_hangs_or_fails_is_ended_and_shows_what_it_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: str, on_line: Any, match: str
) -> None:
    assert demo.SAY_EVERY_S < 5
    monkeypatch.setattr(demo, "SAY_EVERY_S", 0.05)
    monkeypatch.setattr(demo, "RUN_TIMEOUT_S", 1.5 if "longer" in match else 60.0)
    with pytest.raises(DemoFailedError, match=match):
        demo.child((sys.executable, "-c", code), os.environ, on_line=on_line)
    out, err = capsys.readouterr()
    assert "longer" not in match or out.count("   ... ") >= 2, "a line says every few seconds that it goes on"
    assert "exited" not in match or "the reason" in err


def test_what_a_deaf_training_has_started_is_killed_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "END_TIMEOUT_S", 0.2)
    seen = list[str]()
    for limit_s in (1.0, 5.0, 25.0):  # on a busy machine it may not have started anything after the first
        monkeypatch.setattr(demo, "RUN_TIMEOUT_S", limit_s)
        with pytest.raises(DemoFailedError, match="killed"):
            demo.child(DEAF_WITH_CHILD, os.environ, on_line=seen.append)
        if seen:
            break
    assert start_ticks(int(seen[0])) is None


def test_a_verify_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "ASYNCCKPT", HANGS)
    monkeypatch.setattr(demo, "RUN_TIMEOUT_S", 0.5)
    with pytest.raises(DemoFailedError, match="verify took longer"):
        demo.verify([], 0)


# ---- the crash


@pytest.fixture
def frozen() -> Iterator[subprocess.Popen[bytes]]:
    """A frozen process in the worker's place."""
    with subprocess.Popen(HANGS) as process:
        process.send_signal(signal.SIGSTOP)
        yield process
        process.kill()


def crash_of(checkpoint: Path, worker: int, *, pids: tuple[int, ...], said: str) -> None:
    crash = Crash(checkpoint)
    for rank, pid in enumerate(pids):
        crash.read(f"rank {rank}: process {pid}")
    crash.read(f"rank 1: freezes worker {worker}")
    crash.read(f"rank 1: crash after step 21, save of step 20 {said}")


NOBODY = (1 << 22, (1 << 22) + 1)
"""Above the largest process id: dead at all times."""


@pytest.mark.parametrize(
    ("pids", "said", "match"),
    [
        (NOBODY, "staged=True written=True", "between staged and written"),
        (NOBODY, "staged=False written=False", "between staged and written"),
        (NOBODY[:1], "staged=True written=False", "1 ranks have printed"),
        ((NOBODY[0], os.getpid()), "staged=True written=False", "the trainers did not end within 0.2 s"),
        (NOBODY, "staged=True written=False", "did not commit"),
    ],
)
def test_a_crash_that_proves_nothing_fails_the_demo(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    frozen: subprocess.Popen[bytes],
    pids: tuple[int, ...],
    said: str,
    match: str,
) -> None:
    monkeypatch.setattr(demo, "DEATH_TIMEOUT_S", 0.2)
    monkeypatch.setattr(demo, "COMMIT_TIMEOUT_S", 0.2)
    with pytest.raises(DemoFailedError, match=match):
        crash_of(tmp_path, frozen.pid, pids=pids, said=said)


def test_a_commit_before_the_crash_fails_the_demo(tmp_path: Path, frozen: subprocess.Popen[bytes]) -> None:
    (tmp_path / "manifest.json").touch()
    with pytest.raises(DemoFailedError, match="before the crash"):
        crash_of(tmp_path, frozen.pid, pids=NOBODY, said="staged=True written=False")
