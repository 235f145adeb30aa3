"""The report: a history put together from events and manifests, and a page that shows it and fetches nothing."""

from __future__ import annotations

import html.parser
import json
import random
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from asyncckpt.cli import main
from asyncckpt.cli.output import EXIT_NOT_FOUND, EXIT_OK
from asyncckpt.format.manifest import Manifest, RankRecord
from asyncckpt.format.names import SaveId, index_name
from asyncckpt.maintenance.event_log import EVENTS_NAME
from asyncckpt.reporting.history import history_of, recovery_ages, recovery_points
from asyncckpt.reporting.page import page

RUN = "aabbccddeeff"
HOSTILE = "</style><script>alert(1)</script><img src=http://x/y>'\""


def save_id(n: int) -> str:
    return str(SaveId(1, n, RUN))


def events_of(n: int, at: float, *, ranks: int = 2, outcome: str = "committed", **rest: Any) -> list[dict[str, Any]]:
    known = {"save_id": save_id(n), "step": n * 10, "name": f"step-{n * 10}", **rest}
    found: list[dict[str, Any]] = []
    for rank in range(ranks):
        for name, after in (("begun", 0.0), ("sealed", 1.0), ("durable", 3.0)):
            found.append({"t": at + after + rank * 0.1, "event": name, "rank": rank, "nbytes": 1000, **known})
    found.append({"t": at + 4, "event": outcome, "ranks": ranks, "seconds_total": 4.0, **known})
    found.append({"t": at + 4, "event": "save", "rank": 0, "stall_s": 0.05, "outcome": "written", **known})
    if n:
        steps = {"from_step": n * 10 - 10, "steps": 10, "seconds": 5.0, "longest_s": 0.9, "waited_s": 0.02}
        found.append({"t": at, "event": "steps", "rank": 0, "step": n * 10, **steps})
    return found


def run(n: int = 5, **rest: Any) -> list[dict[str, Any]]:
    return [event for i in range(n) for event in events_of(i, 1e9 + i * 20, **rest)]


def manifest(n: int) -> Manifest:
    parsed = SaveId(1, n, RUN)
    record = RankRecord(
        rank=0,
        index_name=index_name(parsed, 0),
        index_nbytes=1,
        index_checksum="xxh3_128:" + "0" * 32,
        n_tensors=1,
        n_files=1,
        nbytes=5000,
    )
    return Manifest(
        save_id=parsed,
        step=n * 10,
        world_size=1,
        created="2026-01-02T03:04:05.000+00:00",
        fsync=True,
        writer="t",
        ranks=(record,),
        timings={"write": 2.0},
    )


def test_lines_of_one_save_are_put_together_in_whatever_order_they_come(rng: random.Random) -> None:
    lines = run(3)
    rng.shuffle(lines)
    history = history_of(lines)
    assert [save.step for save in history.saves] == [0, 10, 20] and len(history.committed) == 3
    save = history.saves[1]
    assert (save.begun, save.sealed, save.ended) == (1e9 + 20, 1e9 + 21.1, 1e9 + 24)
    assert save.write_s == pytest.approx(2.1) and save.stall_s == 0.05 and save.nbytes == 2000
    assert [(span.mean_s, span.longest_s, span.waited_s) for span in history.spans] == [(0.5, 0.9, 0.02)] * 2


def test_a_save_without_an_end_is_open_unless_its_manifest_stands() -> None:
    lines = [event for event in events_of(1, 1e9) if event["event"] in ("begun", "sealed", "durable")]
    assert history_of(lines).saves[0].outcome == "open"
    assert history_of(lines, [("step-10", manifest(1))]).saves[0].outcome == "committed"


def test_manifests_alone_tell_of_steps_sizes_and_timings() -> None:
    (save,) = history_of([], [("a", manifest(4))]).saves
    assert (save.begun, save.sealed, save.write_s) == (None, None, None)
    assert (save.step, save.nbytes, save.seconds, save.outcome) == (40, 5000, {"write": 2.0}, "committed")
    assert save.ended == 1767323045.0


def test_the_recovery_point_never_goes_back_and_memory_is_never_older_than_disk(rng: random.Random) -> None:
    lines = []
    for n in range(30):
        lines += events_of(n, 1e9 + n * rng.uniform(1, 10), outcome=rng.choice(["committed", "failed", "abandoned"]))
    saves = history_of(lines).saves
    disk, memory = recovery_points(saves, memory=False), recovery_points(saves, memory=True)
    for points in (disk, memory):
        assert points == sorted(points) and [p[1] for p in points] == sorted({p[1] for p in points})
    for since, taken in disk:
        assert max((t for s, t in memory if s <= since), default=0.0) >= taken


def of_run(number: int, starts: list[float], **rest: Any) -> list[dict[str, Any]]:
    """Saves of a run of its own that begin at these times."""
    events = []
    for n, at in enumerate(starts):
        known = {**rest, "save_id": str(SaveId(1, n, f"{number:012x}"))}
        events += [{**event, **({} if event["event"] == "steps" else known)} for event in events_of(n, at)]
    return events


@pytest.mark.parametrize("memory", [False, True])
def test_time_in_which_nothing_was_trained_does_not_count_as_training_that_would_be_lost(memory: bool) -> None:
    evening, morning = [1e9 + 60 * n for n in range(5)], [1e9 + 40_000 + 60 * n for n in range(5)]
    saves = history_of(of_run(1, evening) + of_run(2, morning)).saves
    line = recovery_ages(saves, memory=memory)
    assert 60 <= max(age for _, age in line) < 70, "as long as saves are apart, and no night"
    assert line == sorted(line, key=lambda point: point[0])
    asleep = [age for at, age in line if evening[-1] + 10 < at < morning[0] - 10]
    assert set(asleep) == {0.0}
    text = page("x", history_of(of_run(1, evening) + of_run(2, morning)), now=1e9, package="t")
    assert "64 s</b><span>oldest recovery point" in text


def test_a_pause_within_a_run_counts_and_so_does_a_run_that_goes_on_at_once() -> None:
    stalled = history_of(of_run(1, [1e9, 1e9 + 60, 1e9 + 4000, 1e9 + 4060])).saves
    assert max(age for _, age in recovery_ages(stalled, memory=False)) > 3900, "a disk that hung, say"
    joined = history_of(of_run(1, [1e9, 1e9 + 60]) + of_run(2, [1e9 + 120, 1e9 + 180])).saves
    assert 60 <= max(age for _, age in recovery_ages(joined, memory=False)) < 70
    alone = history_of(
        [e for n in range(5) for e in of_run(n, [1e9 + 60 * n])]  # each save a run of its own, as of stock dcp.save
    ).saves
    assert 60 <= max(age for _, age in recovery_ages(alone, memory=False)) < 70


class Tags(html.parser.HTMLParser):
    """Collects what a browser would fetch or run, and checks that tags are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.fetches: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.fetches += [
            f"{tag} {name}"
            for name, value in attrs
            if name in ("src", "href", "data")
            or name.startswith("on")
            or (":href" in name and (value or "")[:1] != "#")
        ]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("lines", [[], run(1), run(30), run(2, ranks=40)], ids=["none", "one", "many", "ranks"])
def test_a_page_is_well_formed_and_fetches_and_runs_nothing(lines: list[dict[str, Any]]) -> None:
    text = page(HOSTILE, history_of(lines), now=1e9, package=HOSTILE)
    tags = Tags()
    tags.feed(text)
    assert not tags.open and not tags.fetches and not tags.seen & {"script", "img", "link", "iframe", "object"}
    assert not re.search(r"url\((?!#)", text) and "@import" not in text
    for picture in re.findall(r"<svg.*?</svg>", text, re.S):
        ElementTree.fromstring(picture)


def test_what_saves_are_called_and_fail_with_is_shown_as_text() -> None:
    lines = events_of(1, 1e9, outcome="failed", error=HOSTILE)
    for line in lines:
        line["name"] = HOSTILE
    text = page("x", history_of(lines), now=1e9, package="t")
    assert "<script" not in text and text.count("&lt;script&gt;") >= 2


_STRANGE = (
    *("\ud800", "</script>", None, True, -1, 1.5, 1e308, 10**17, 5e-324, float("nan"), [[1, 2]], {"a": 1}, "\x1b"),
    *([], {}),
)


def test_whatever_lines_say_there_is_a_page_or_nothing_to_show(
    rng: random.Random, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(40):
        lines = run(rng.randint(1, 4))
        for line in lines:
            for key in rng.sample(sorted(line), rng.randint(0, 2)):
                line[key] = rng.choice(_STRANGE)
        (tmp_path / EVENTS_NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert main(["report", str(tmp_path), "--json"]) in (EXIT_OK, EXIT_NOT_FOUND)
        with monkeypatch.context() as patched:
            if number % 5:  # drawing takes its time
                patched.setitem(sys.modules, "matplotlib", None)
                patched.setitem(sys.modules, "matplotlib.figure", None)
            assert main(["report", str(tmp_path)]) in (EXIT_OK, EXIT_NOT_FOUND)
    capsys.readouterr()


@pytest.mark.parametrize("name", ["file", "file/below", "missing"])
def test_what_is_no_directory_is_not_found(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["report", str(tmp_path / name)]) == EXIT_NOT_FOUND
    assert capsys.readouterr().err == f"asyncckpt report: {tmp_path / name} is not a directory\n"


def test_a_text_that_utf_8_has_no_form_for_costs_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = events_of(1, 1e9, outcome="failed", error="disk \ud800")
    (tmp_path / EVENTS_NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["report", str(tmp_path)]) == EXIT_OK
    assert "disk ?" in (tmp_path / "report.html").read_text(encoding="utf-8")
    capsys.readouterr()


def test_a_size_and_a_step_beyond_all_others_are_drawn() -> None:
    pytest.importorskip("matplotlib")
    text = page("x", history_of([{**line, "step": 10**17} for line in run(2)]), now=1e9, package="t")
    assert "Speed of writing" in text and text.count("<svg") == 5


def test_a_long_run_has_a_page_of_a_size_that_a_browser_shows() -> None:
    pytest.importorskip("matplotlib")
    text = page("x", history_of(run(5000)), now=1e9, package="t")
    assert len(text) < 1_000_000


def test_a_page_is_light_and_dark_and_its_pictures_say_what_they_are_however_the_user_draws() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    text = page("x", history_of(run(3)), now=1e9, package="t")
    assert "color-scheme: light dark" in text and "prefers-color-scheme: dark" in text
    assert set(re.findall(r"var\(--(\w+)\)", text)) <= set(re.findall(r"--(\w+):", text))
    titles = re.findall("<title>(.*?)</title>", text)
    assert {"step 10: save() took 50.0 ms", "step 10, rank 1: writing 1 kB, 2.000 s"} <= set(titles)
    with matplotlib.rc_context({"axes.facecolor": "black", "lines.linewidth": 9.0, "svg.fonttype": "path"}):
        assert page("x", history_of(run(3)), now=1e9, package="t") == text


def test_without_matplotlib_the_page_has_its_table_and_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    (tmp_path / EVENTS_NAME).write_text("".join(json.dumps(line) + "\n" for line in run(2)))
    assert main(["report", str(tmp_path)]) == EXIT_OK
    assert "asyncckpt[report]" in capsys.readouterr().out
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "asyncckpt[report]" in text and "<svg" not in text and "<td>step-10</td>" in text
