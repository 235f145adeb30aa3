"""Rounds of the benchmarks: who runs in which, what a budget does, and files to which a later run adds."""

from __future__ import annotations

import itertools
import json
import pathlib
import sys
from typing import Any

import pytest

pytest.importorskip("torch")

from benchmarks import compare, contest, kept, quiet, ranks
from benchmarks.rounds import Rounds, Setting

LIMITS = {"write_s": 0.4, "read_s": 0.7, "copy_s": 0.1}
OURS, PEER, OTHER = "asyncckpt", "torch.save", "dcp.save"


class Clocked(kept.Budget):
    """A budget with a clock of its own."""

    def __init__(self, budget_s: float) -> None:
        super().__init__(budget_s)
        self.now_s = 0.0

    def elapsed_s(self) -> float:
        return self.now_s


class Told(Rounds):
    """Rounds whose contenders take as long as they are told, and fail if that is too long."""

    def __init__(self, tmp_path: pathlib.Path, takes_s: list[float], budget: Clocked, **more: Any) -> None:
        super().__init__(Setting("tiny", 2, 30.0, **more), tmp_path, budget)
        self.clock, self.takes_s, self.ran = budget, iter(takes_s), list[tuple[str, list[str]]]()

    def limits(self) -> dict[str, float]:
        return LIMITS

    def _contest(self, name: str, deadline_s: float, options: list[str]) -> dict[str, Any]:
        self.ran.append((name, options))
        takes_s = next(self.takes_s)
        self.clock.now_s += min(takes_s, deadline_s)
        if takes_s > deadline_s:
            return {"error": f"not ended after {deadline_s:.0f} s"}
        return {} if "--saves-only" in options else {"load_cold_s": 1.0}


@pytest.fixture(autouse=True)
def _idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is as quiet as can be."""
    monkeypatch.setattr(quiet, "until_idle", lambda: {"busy_before": 0.0, "idle_wait_s": 0.0})


def head(asked: int = 3, **more: Any) -> dict[str, Any]:
    """Return what a result says besides its rounds."""
    machine = {"cpu": "CPU", "cores": 2, "date": "2026-01-02", "load_before": 0.1, "versions": {"torch": "2"}}
    code = {"asyncckpt": "a", "asyncckpt_worker": "b", "benchmarks": "c", "commit": "d"}
    found = {"benchmark": "compare", "state": "tiny", "saves": 2, "machine": machine, "code": code}
    return found | {"contenders": [OURS, PEER], "rounds_asked": asked, "budget_s": 9.0, "deadline_s": 3.0} | more


def grown(file: kept.Kept, rounds: Told, names: list[str]) -> str:
    return file.grow(rounds.clock, lambda: rounds.make(names, file.rounds, file.result["rounds_asked"]))


# ---- the budget


def test_a_round_that_would_not_end_in_time_is_not_begun(tmp_path: pathlib.Path) -> None:
    rounds = Told(tmp_path, [10.0] * 8, Clocked(55.0))
    file = kept.Kept(tmp_path / "f.json", head(4))
    assert grown(file, rounds, [OURS, PEER]) == "budget"
    assert len(file.rounds) == 2 and rounds.clock.now_s == 40.0
    assert [row["busy_before"] for row in file.rounds] == [0.0, 0.0]
    assert [name for name, _ in rounds.ran] == [OURS, PEER, OURS, PEER]


def test_the_first_round_is_finished_whatever_the_budget(tmp_path: pathlib.Path) -> None:
    file = kept.Kept(tmp_path / "f.json", head())
    grown(file, Told(tmp_path, [10.0, 10.0], Clocked(5.0)), [OURS, PEER])
    assert [set(row["contenders"]) for row in file.rounds] == [{OURS, PEER}]


def test_a_round_that_the_budget_ends_is_left_out(tmp_path: pathlib.Path) -> None:
    file = kept.Kept(tmp_path / "f.json", head(2))
    assert grown(file, Told(tmp_path, [5.0, 5.0, 5.0, 25.0], Clocked(32.0)), [OURS, PEER]) == "budget"
    assert len(file.rounds) == 1


def test_what_has_failed_once_is_not_run_again_and_says_the_same_in_every_round(tmp_path: pathlib.Path) -> None:
    rounds = Told(tmp_path, [40.0, 1.0, 1.0, 1.0], Clocked(1000.0))
    file = kept.Kept(tmp_path / "f.json", head(3))
    assert grown(file, rounds, [OURS, PEER]) == "done"
    assert [row["contenders"][OURS] for row in file.rounds] == [{"error": "not ended after 30 s"}] * 3
    assert sorted(name for name, _ in rounds.ran) == [OURS, PEER, PEER, PEER]


def test_each_contender_begins_a_round_where_there_are_as_many_rounds(tmp_path: pathlib.Path) -> None:
    rounds = Told(tmp_path, [1.0] * 9, Clocked(1000.0))
    grown(kept.Kept(tmp_path / "f.json", head(3)), rounds, [OURS, PEER, OTHER])
    assert [name for name, _ in rounds.ran][::3] == [OURS, PEER, OTHER]


def test_limits_that_cannot_be_measured_end_a_run_whose_rounds_are_kept(tmp_path: pathlib.Path) -> None:
    file = kept.Kept(tmp_path / "f.json", head(3))
    rounds = Told(tmp_path, [1.0, 1.0], Clocked(90.0))
    first = rounds.limits()
    answers = iter([first])

    def limits() -> dict[str, float]:
        for answer in answers:
            return answer
        raise kept.NoLimitsError("the limits cannot be measured")

    rounds.limits = limits  # type: ignore[method-assign]
    assert grown(file, rounds, [OURS, PEER]) == "limits"
    assert len(file.rounds) == 1


# ---- how much is measured


def test_loads_of_peers_are_measured_in_two_rounds_and_ours_in_all(tmp_path: pathlib.Path) -> None:
    rounds = Told(tmp_path, [1.0] * 8, Clocked(1000.0), peer_saves_s=7.5)
    grown(kept.Kept(tmp_path / "f.json", head(4)), rounds, [OURS, PEER])
    options = {name: [o for n, o in rounds.ran if n == name] for name in (OURS, PEER)}
    limited = ["--saves-s", "7.5"]
    assert options == {OURS: [[]] * 4, PEER: [limited, limited, [*limited, "--saves-only"], [*limited, "--saves-only"]]}


@pytest.mark.parametrize(("each_s", "made"), [(0.1, 6), (4.0, 4), (30.0, 3)])
def test_a_slow_peer_makes_fewer_saves_and_never_less_than_three(each_s: float, made: int) -> None:
    extent = contest.Extent(6, saves_s=15.0)
    assert next(n for n in itertools.count() if not extent.goes_on(n, n * each_s)) == made
    assert next(n for n in itertools.count() if not contest.Extent(6).goes_on(n, n * each_s)) == 6


# ---- files that grow


def test_each_round_is_in_the_file_as_soon_as_it_is_made(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "deep" / "f.json"
    file, seen = kept.Kept(path, head(2)), list[Any]()

    def make() -> dict[str, Any]:
        seen.append(json.loads(path.read_text()) if path.exists() else None)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return {"limits": LIMITS, "contenders": {}}

    with pytest.raises(KeyboardInterrupt):
        file.grow(Clocked(10.0), make)
    assert seen[0] is None and len(seen[1]["rounds"]) == 1
    found = json.loads(path.read_text())
    assert found["ended"] == "not" and len(found["rounds"]) == 1 and found["rounds"][0]["ended"]
    assert found["rounds"][0]["took_s"] == 0.0
    assert [one.name for one in path.parent.iterdir()] == ["f.json"], "nothing half written is left"


def test_a_later_run_adds_rounds_until_there_are_as_many_as_asked(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "f.json"
    first = kept.Kept(path, head(1))
    first.end(grown(first, Told(tmp_path, [2.0, 2.0], Clocked(90.0)), [OURS, PEER]))
    passing = {"date": "2026-01-03", "load_before": 7.0}
    later = kept.Kept(path, head(3, machine=head()["machine"] | passing, budget_s=60.0))
    later.resume()
    rounds = Told(tmp_path, [3.0] * 4, Clocked(90.0))
    later.end(grown(later, rounds, [OURS, PEER]))
    found = json.loads(path.read_text())
    assert [row["took_s"] for row in found["rounds"]] == [4.0, 6.0, 6.0] and found["took_s"] == 16.0
    assert found["ended"] == "done" and found["rounds_asked"] == 3 and found["budget_s"] == 60.0
    assert len(rounds.ran) == 4


def test_without_a_file_a_run_that_resumes_begins_anew(tmp_path: pathlib.Path) -> None:
    file = kept.Kept(tmp_path / "f.json", head())
    file.resume()
    assert not file.rounds


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"saves": 5}, "saves was 2 and is 5"),
        ({"contenders": [OURS]}, "contenders was"),
        ({"peer_saves_s": 15.0}, "peer_saves_s was null and is 15.0"),
        ({"code": head()["code"] | {"asyncckpt_worker": "x"}}, 'code.asyncckpt_worker was "b" and is "x"'),
        ({"machine": head()["machine"] | {"cores": 4}}, "machine.cores was 2 and is 4"),
        ({"machine": head()["machine"] | {"versions": {"torch": "3"}}}, "machine.versions was"),
    ],
)
def test_rounds_of_other_code_of_another_machine_or_with_other_options_are_refused(
    tmp_path: pathlib.Path, other: dict[str, Any], named: str
) -> None:
    path = tmp_path / "f.json"
    kept.Kept(path, head()).write()
    before = path.read_text()
    with pytest.raises(kept.NotTheSameError, match="no rounds can be added") as caught:
        kept.Kept(path, head(**other)).resume()
    assert named in str(caught.value)
    assert path.read_text() == before


def test_another_commit_with_the_same_code_adds_rounds(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "f.json"
    kept.Kept(path, head()).write()
    kept.Kept(path, head(code=head()["code"] | {"commit": "another"})).resume()


def test_a_file_of_an_older_kind_is_refused_and_says_so(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "f.json"
    path.write_text(json.dumps({name: value for name, value in head().items() if name != "code"} | {"rounds": []}))
    with pytest.raises(kept.NotTheSameError, match=r"code\.asyncckpt was null"):
        kept.Kept(path, head()).resume()


# ---- ranks


def test_ranks_that_have_failed_once_are_not_run_again_in_that_arrangement(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = list[tuple[str, str]]()

    def contend(name: str, arrangement: str, saves: int, directory: pathlib.Path) -> dict[str, Any]:
        ran.append((arrangement, name))
        return {"error": "no"} if (arrangement, name) == ("ddp", PEER) else {"ranks": []}

    monkeypatch.setattr(ranks, "_contest", contend)
    rows = list[Any]()
    for _ in range(2):
        rows.append(ranks._round(LIMITS, rows, [OURS, PEER], 3, tmp_path))
    assert ran == [
        ("ddp", OURS),
        ("ddp", PEER),
        ("fsdp2", OURS),
        ("fsdp2", PEER),
        ("ddp", OURS),
        ("fsdp2", PEER),
        ("fsdp2", OURS),
    ]
    assert rows[1]["ddp"][PEER] == {"error": "no"}


@pytest.mark.parametrize(
    ("state", "only", "asked"),
    [
        ("gpt", None, list(compare.CONTENDERS)),
        ("large", None, list(compare.BEST)),
        ("large", ["all"], list(compare.CONTENDERS)),
        ("small", ["best", "dcp.save"], [n for n in compare.CONTENDERS if n in (*compare.BEST, "dcp.save")]),
        ("gpt", ["torch.save"], ["torch.save"]),
    ],
)
def test_who_runs_unless_it_is_said_depends_on_the_state(state: str, only: list[str] | None, asked: list[str]) -> None:
    assert compare.asked_for(state, only) == asked


def test_every_state_has_a_number_of_saves_a_deadline_and_a_budget() -> None:
    for by_state in (compare.SAVES, compare.DEADLINES_S, compare.BUDGETS_S):
        assert set(by_state) == set(compare.STATES)


def test_the_best_peers_are_contenders_and_can_be_asked_for_together(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(compare.BEST) <= set(compare.CONTENDERS)
    asked = list[list[str]]()

    class Stopped(Exception):
        pass

    def make(self: Rounds, names: list[str], before: list[Any], count: int) -> None:
        asked.append(names)
        raise Stopped

    monkeypatch.setattr(Rounds, "make", make)
    monkeypatch.setenv("ASYNCCKPT_JOB", "a test")
    out = ["--dir", str(tmp_path), "--out", str(tmp_path / "f.json")]
    monkeypatch.setattr(sys, "argv", ["compare", "--state", "tiny", "--only", "best", *out])
    with pytest.raises(Stopped):
        compare.main()
    assert asked == [list(compare.BEST)] and not list(tmp_path.iterdir())
