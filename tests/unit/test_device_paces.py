"""What is learnt of a device from loads and saves, and what is made of the file that keeps it."""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncckpt.storage import pace_file
from asyncckpt.storage.pace import ENOUGH, GAIN, KEPT, SAMPLE_NBYTES, Pace, Sample, best_pace, kept_samples
from asyncckpt.storage.pace_file import EXPIRES_S, DevicePaces

DEFAULT, MORE, LARGER = PACES = (Pace(4, 16 << 20), Pace(8, 16 << 20), Pace(2, 64 << 20))
NOW = 1_000_000_000.0
GB = 1e9


def samples(*found: tuple[Pace, float]) -> list[Sample]:
    return [Sample(pace, rate, NOW) for pace, rate in found]


def after(n: int, speed: Callable[[Pace], float]) -> list[Pace]:
    """What `n` operations go at, on a device that reaches `speed`."""
    known: list[Sample] = []
    used = []
    for _ in range(n):
        used.append(best_pace(PACES, known))
        known = kept_samples([*known, Sample(used[-1], speed(used[-1]), NOW)])
    return used


def test_an_unknown_device_gets_the_default_first() -> None:
    assert after(ENOUGH, lambda pace: GB) == [DEFAULT] * ENOUGH


def test_where_all_are_alike_the_default_stays_and_each_other_has_been_tried_once() -> None:
    used = after(30, lambda pace: GB)
    assert [used.count(pace) for pace in PACES[1:]] == [1, 1]
    assert set(used[ENOUGH + 2 :]) == {DEFAULT}


@pytest.mark.parametrize("best", PACES[1:])
def test_what_is_clearly_faster_is_taken(best: Pace) -> None:
    used = after(30, lambda pace: GB * (1.5 if pace == best else 1.0))
    assert set(used[12:]) == {best}


def test_what_is_slower_is_tried_once_and_never_again() -> None:
    used = after(40, lambda pace: GB * (1.0 if pace == DEFAULT else 0.4))
    assert [used.count(pace) for pace in PACES[1:]] == [1, 1]


def test_a_gain_within_the_spread_is_none() -> None:
    used = after(40, lambda pace: GB * (1.0 if pace == DEFAULT else (1 + GAIN) / 2))
    assert set(used[10:]) == {DEFAULT}


def test_of_a_device_that_has_become_slow_for_it_the_choice_is_given_up() -> None:
    known = samples(*[(DEFAULT, GB)] * KEPT, *[(LARGER, 0.8 * GB)] * ENOUGH, *[(MORE, 2 * GB)] * KEPT)
    assert best_pace(PACES, known) == MORE
    assert best_pace(PACES, kept_samples([*known, *samples(*[(MORE, 0.5 * GB)] * KEPT)])) == DEFAULT


def test_only_the_latest_samples_count(rng: random.Random) -> None:
    known = [Sample(rng.choice(PACES), rng.random(), NOW + n) for n in range(200)]
    for pace in PACES:
        mine = [s for s in known if s.pace == pace]
        assert [s for s in kept_samples(known) if s.pace == pace] == mine[-KEPT:]


def own(tmp_path: Path, directory: str | None = "mine", now: float = NOW) -> DevicePaces:
    where = None if directory is None else str(tmp_path / directory)
    return DevicePaces(where, "read", PACES, lambda: now)


def file_of(tmp_path: Path) -> Path:
    (found,) = (tmp_path / "mine").iterdir()
    return found


def test_what_one_process_has_learnt_the_next_one_knows(tmp_path: Path) -> None:
    own(tmp_path).took(str(tmp_path), DEFAULT, SAMPLE_NBYTES, 0.5)
    assert own(tmp_path).samples(str(tmp_path)) == [Sample(DEFAULT, SAMPLE_NBYTES / 0.5, NOW)]
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o700
    assert file_of(tmp_path).stat().st_mode & 0o777 == 0o600


def test_the_directions_are_kept_apart(tmp_path: Path) -> None:
    own(tmp_path).took(str(tmp_path), DEFAULT, SAMPLE_NBYTES, 0.5)
    assert DevicePaces(str(tmp_path / "mine"), "write", PACES).samples(str(tmp_path)) == []


def test_devices_are_kept_apart(tmp_path: Path) -> None:
    own(tmp_path).took(str(tmp_path), DEFAULT, SAMPLE_NBYTES, 0.5)
    assert own(tmp_path).samples("/proc") == []


@pytest.mark.parametrize(
    ("pace", "nbytes", "seconds"),
    [(DEFAULT, SAMPLE_NBYTES - 1, 1.0), (DEFAULT, SAMPLE_NBYTES, 0.0), (Pace(3, 4096), SAMPLE_NBYTES, 1.0)],
)
def test_what_says_nothing_of_the_device_is_not_kept(tmp_path: Path, pace: Pace, nbytes: int, seconds: float) -> None:
    own(tmp_path).took(str(tmp_path), pace, nbytes, seconds)
    assert not (tmp_path / "mine").exists()


def test_old_samples_count_no_more(tmp_path: Path) -> None:
    own(tmp_path).took(str(tmp_path), DEFAULT, SAMPLE_NBYTES, 1.0)
    assert own(tmp_path, now=NOW + EXPIRES_S - 1).samples(str(tmp_path))
    assert own(tmp_path, now=NOW + EXPIRES_S).samples(str(tmp_path)) == []


def test_a_sample_of_the_future_is_none(tmp_path: Path) -> None:
    own(tmp_path).took(str(tmp_path), DEFAULT, SAMPLE_NBYTES, 1.0)
    assert own(tmp_path, now=NOW - 1).samples(str(tmp_path)) == []


def changed(**values: Any) -> Callable[[dict[str, Any]], bytes]:
    return lambda document: json.dumps(document | values).encode()


@pytest.mark.parametrize(
    "damage",
    [
        lambda document: b"",
        lambda document: b"{",
        lambda document: b"[" * 15_000,
        lambda document: b"\xff" * 100,
        lambda document: b"[]",
        lambda document: b"x" * (1 << 20),
        changed(asyncckpt_pace=2),
        changed(device="8:1 another"),
        changed(samples=3),
        changed(samples=[[4]]),
        changed(samples=[[4, 16 << 20, "fast", NOW]]),
        changed(samples=[[4, 16 << 20, -1.0, NOW]]),
        changed(samples=[[4, 16 << 20, float("inf"), NOW]]),
        changed(samples=[[4, 16 << 20, float("nan"), NOW]]),
        changed(samples=[[4, 16 << 20, 10**400, NOW]]),
        changed(samples=[[4, 16 << 20, 1.0, None]]),
        changed(samples=[[1_000_000, 1 << 60, 1e12, NOW]]),
        changed(samples=[[[], {}, 1e12, NOW]]),
        changed(samples=[[4, 16 << 20, 1.0, NOW]] * 65),
    ],
)
def test_a_file_that_is_not_as_it_was_written_is_as_good_as_none(
    tmp_path: Path, damage: Callable[[dict[str, Any]], bytes]
) -> None:
    paces = own(tmp_path)
    paces.took(str(tmp_path), DEFAULT, SAMPLE_NBYTES, 1.0)
    file = file_of(tmp_path)
    file.write_bytes(damage(json.loads(file.read_bytes())))
    assert paces.choose(str(tmp_path)) == DEFAULT
    assert paces.samples(str(tmp_path)) == []
    paces.took(str(tmp_path), MORE, SAMPLE_NBYTES, 1.0)
    assert [s.pace for s in paces.samples(str(tmp_path))] == [MORE]


def test_a_file_that_others_can_write_is_not_believed(tmp_path: Path) -> None:
    own(tmp_path).took(str(tmp_path), DEFAULT, SAMPLE_NBYTES, 1.0)
    file_of(tmp_path).chmod(0o622)
    assert own(tmp_path).samples(str(tmp_path)) == []


def test_a_directory_that_others_can_enter_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o755)
    own(tmp_path).took(str(tmp_path), DEFAULT, SAMPLE_NBYTES, 1.0)
    assert not list((tmp_path / "mine").iterdir())


def test_somebody_elses_directory_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    own(tmp_path).took(str(tmp_path), DEFAULT, SAMPLE_NBYTES, 1.0)
    assert not list((tmp_path / "mine").iterdir())


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_what_is_no_file_is_neither_read_nor_waited_for(tmp_path: Path, kind: str) -> None:
    paces = own(tmp_path)
    paces.took(str(tmp_path), DEFAULT, SAMPLE_NBYTES, 1.0)
    file = file_of(tmp_path)
    if kind == "link":
        file.rename(tmp_path / "moved")
        file.symlink_to(tmp_path / "moved")
    else:
        file.unlink()
        os.mkfifo(file, 0o600)
    assert paces.samples(str(tmp_path)) == []


def test_without_a_directory_nothing_is_learnt(tmp_path: Path) -> None:
    paces = own(tmp_path, None)
    paces.took(str(tmp_path), DEFAULT, SAMPLE_NBYTES, 1.0)
    assert paces.choose(str(tmp_path)) == DEFAULT


def test_a_path_that_is_not_there_gets_the_default(tmp_path: Path) -> None:
    paces = own(tmp_path)
    paces.took(str(tmp_path / "gone"), DEFAULT, SAMPLE_NBYTES, 1.0)
    assert paces.choose(str(tmp_path / "gone")) == DEFAULT


def test_a_file_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> int:
        raise OSError(28, "no space")

    paces = own(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(pace_file.os, "write", full)
        paces.took(str(tmp_path), DEFAULT, SAMPLE_NBYTES, 1.0)
    assert list((tmp_path / "mine").iterdir()) == []


def test_processes_that_learn_at_the_same_time_leave_a_whole_file(tmp_path: Path) -> None:
    def learn() -> None:
        for _ in range(50):
            own(tmp_path).took(str(tmp_path), DEFAULT, SAMPLE_NBYTES, 1.0)

    threads = [threading.Thread(target=learn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 <= len(own(tmp_path).samples(str(tmp_path))) <= KEPT
    assert file_of(tmp_path).name.endswith(".json")
