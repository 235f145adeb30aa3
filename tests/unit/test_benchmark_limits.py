"""The limits of the machine: by which choices they are measured, how often, and what is left behind."""

from __future__ import annotations

import pathlib
import subprocess
from typing import Any

import pytest

pytest.importorskip("torch")

from benchmarks import kept, limits, quiet
from benchmarks.rounds import Rounds, Setting


class Disk:
    """Stands for a disk: what is written and read takes as long as it is told, and is noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.did: list[tuple[str, Any]] = []
        self.takes_s: dict[tuple[str, limits.Choice], list[float]] = {}
        self._read: set[pathlib.Path] = set()
        monkeypatch.setattr(limits, "write_s", self._write)
        monkeypatch.setattr(limits, "read_s", self._read_s)
        monkeypatch.setattr(quiet, "until_discarded", lambda place: self.did.append(("discarded", None)))

    def _took(self, kind: str, choice: limits.Choice) -> float:
        self.did.append((kind, choice))
        planned = self.takes_s.get((kind, choice), [1.0])
        return planned.pop(0) if len(planned) > 1 else planned[0]

    def _write(self, path: pathlib.Path, memory: memoryview, *choice: int) -> float:
        assert not path.exists(), "a new file"
        path.touch()
        self._read.discard(path)
        return self._took("writes", (choice[0], choice[1]))

    def _read_s(self, path: pathlib.Path, into: memoryview, nbytes: int, *choice: int) -> float:
        assert path.exists()
        kind = "reads_again" if path in self._read else "reads_fresh"
        self._read.add(path)
        return self._took(kind, (choice[0], choice[1]))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    monkeypatch.setattr(limits, "BLOCKS_NBYTES", (4096, 8192, 16384))
    monkeypatch.setattr(limits, "CHOICES", tuple((b, t) for b in limits.BLOCKS_NBYTES for t in limits.THREADS))
    return Disk(monkeypatch)


def test_choices_are_the_best_of_several_tries_and_one_lucky_try_is_not_enough(
    disk: Disk, tmp_path: pathlib.Path
) -> None:
    lucky, good = limits.CHOICES[0], limits.CHOICES[5]
    for kind in limits.KINDS:
        disk.takes_s[kind, lucky] = [0.1, 2.0, 2.0]
        disk.takes_s[kind, good] = [0.5, 0.5, 3.0]
    best = limits.choose(tmp_path, memoryview(bytearray(4096)))
    assert set(best) == set(limits.KINDS)
    for kind in limits.KINDS:
        assert best[kind][0] == good and lucky not in best[kind] and len(best[kind]) == limits.CANDIDATES
        tried = [choice for done, choice in disk.did if done == kind]
        assert {choice: tried.count(choice) for choice in limits.CHOICES} == dict.fromkeys(
            limits.CHOICES, limits.SAMPLES
        )
    assert disk.did[0][0] == disk.did[-1][0] == "discarded"
    assert not list(tmp_path.iterdir())


def test_a_round_reads_files_for_the_first_time_and_again_and_takes_the_best_of_all_choices(
    disk: Disk, tmp_path: pathlib.Path
) -> None:
    best = {kind: list(limits.CHOICES[n : n + 3]) for n, kind in enumerate(limits.KINDS)}
    for n, kind in enumerate(limits.KINDS, 1):
        disk.takes_s[kind, best[kind][-1]] = [0.1 * n]
    measured = limits.Limits(tmp_path, 8192, best)
    found = measured.measure()
    measured.close()
    assert {name: found[name] for name in ("write_s", "read_fresh_s", "read_again_s")} == {
        "write_s": pytest.approx(0.1),
        "read_fresh_s": pytest.approx(0.2),
        "read_again_s": pytest.approx(0.3),
    }
    assert found["copy_s"] > 0 and limits.fresh_s(found) == found["read_fresh_s"]
    assert [kind for kind, _ in disk.did] == ["discarded", *[*limits.KINDS, "discarded"] * 3]
    assert not list(tmp_path.iterdir())


def test_an_older_result_has_one_limit_of_reading() -> None:
    assert limits.fresh_s({"write_s": 1.0, "read_s": 0.5}) == 0.5


def _slow(command: list[str], **options: Any) -> Any:
    raise subprocess.TimeoutExpired(command, options["timeout"])


def _broken(command: list[str], **options: Any) -> Any:
    return subprocess.CompletedProcess(command, 1, "", "OSError: no room")


@pytest.mark.parametrize(("run", "said"), [(_slow, "not measured after 30 s"), (_broken, "OSError: no room")])
def test_limits_that_take_too_long_or_fail_end_the_rounds_and_no_more(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, run: Any, said: str
) -> None:
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(kept.NoLimitsError, match=said):
        Rounds(Setting("tiny", 2, 30.0), tmp_path, kept.Budget(60.0)).limits()
