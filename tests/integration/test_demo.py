"""The demo's own deadlines: whatever hangs is killed, and said."""

from __future__ import annotations

import argparse
import pathlib
import sys

import pytest

from asyncckpt.cli import demo

HANGS = (sys.executable, "-c", "import time; time.sleep(600)")
TALKS_AND_HANGS = (sys.executable, "-c", "import time; print('weights', flush=True); time.sleep(600)")


@pytest.mark.parametrize("crash_at", [-1, 20])
@pytest.mark.parametrize("command", [HANGS, TALKS_AND_HANGS])
def test_a_training_that_hangs_is_killed_and_its_end_taken_for_no_crash_that_was_ordered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, command: tuple[str, ...], crash_at: int
) -> None:
    monkeypatch.setattr(demo, "_TRAINING", command)
    monkeypatch.setattr(demo, "RUN_TIMEOUT_S", 0.5)
    with pytest.raises(demo.DemoFailedError, match=r"longer than 0\.5 s, and was killed"):
        demo._train(tmp_path, {}, crash_at=crash_at)


def test_a_verify_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_ASYNCCKPT", HANGS)
    monkeypatch.setattr(demo, "RUN_TIMEOUT_S", 0.5)
    with pytest.raises(demo.DemoFailedError, match="verify took longer"):
        demo._verify([], 0)


@pytest.mark.parametrize(
    ("command", "says"),
    [(HANGS, "did not end"), ((sys.executable, "-c", "raise SystemExit(1)"), "did not end"),
     ((sys.executable, "-c", "raise SystemExit(5)"), None), ((sys.executable, "-c", ""), None)],
)  # fmt: skip
def test_a_worker_that_does_not_end_fails_the_demo_and_is_named(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    command: tuple[str, ...],
    says: str | None,
) -> None:
    monkeypatch.setattr(demo, "_play", lambda directory, environment: None)
    monkeypatch.setattr(demo, "_ASYNCCKPT", command)
    monkeypatch.setattr(demo, "DRAIN_TIMEOUT_S", 0.5)
    code = demo.run(argparse.Namespace(dir=str(tmp_path)))
    err = capsys.readouterr().err
    if says:
        assert code == 1
        assert says in err
        assert "asyncckpt worker stop" in err
    else:
        assert (code, err) == (0, "")
