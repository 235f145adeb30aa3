"""The benchmarks' command knows its questions and targets. `make bench-smoke` runs each question once."""

from __future__ import annotations

import pytest

from benchmarks import RESULTS, runner, targets
from benchmarks.__main__ import main


def test_every_question_is_listed_with_what_it_asks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in runner.names():
        (line,) = (line for line in lines if line.startswith(f"  {name} "))
        assert line.endswith("?")


def test_a_question_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no-question"]) == 2
    assert "save_load" in capsys.readouterr().out


def test_every_result_file_that_is_kept_has_the_figures_of_its_targets(capsys: pytest.CaptureFixture[str]) -> None:
    missing = [name for name, *_, said, file in targets.rows() if said == "not measured" and (RESULTS / file).exists()]
    assert not missing
    assert main(["--targets"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(targets.rows())
