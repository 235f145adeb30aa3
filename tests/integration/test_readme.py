"""README is short, its code and commands run, its links lead somewhere, its figures are the result file's."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from command_calls import Command
from documented_code import README, ROOT, blocks_in, commands_answer, environment, run, run_forked

from tests.warm_python import WarmPython


def test_it_is_short_and_shows_code_early() -> None:
    assert len(README.splitlines()) <= 150
    assert len(README.split()) <= 1200
    assert README.splitlines().index("```python") < 40
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= 60


def test_it_says_things_in_the_order_in_which_a_newcomer_asks() -> None:
    titles = [line.removeprefix("## ") for line in README.splitlines() if line.startswith("## ")]
    assert titles == [
        *("Install", "Save and resume", "Several ranks", "A manager", "Use it with", "Commands", "Guarantees"),
        *("Performance", "Limits", "More"),
    ]
    before, _, _ = README.partition("## Save and resume")
    assert before.count("\n- **") == 3 and "It is not" in before
    assert re.search(r"make demo .* minutes\nmake test .* minutes", before)
    first, *_ = blocks_in(README, "python")
    assert len(first.splitlines()) <= 20 and "restore_latest" in first and "attach" not in first
    assert README.partition("\n## Limits\n")[2].partition("\n## ")[0].count("\n- ") <= 6


def test_the_table_of_figures_is_explained_where_it_stands() -> None:
    said, _, table = README.partition("\n## Performance\n")[2].partition("<!-- front -->")
    assert "*stall*:" in said and "*lost*:" in said
    assert len(re.findall(r"^\| \S", table.partition("<!-- end -->")[0], re.MULTILINE)) == 6  # a head and five rows


def test_python_block_saves_resumes_and_the_commands_answer(
    tmp_path: Path, command: Command, warm_python: WarmPython
) -> None:
    environ = environment("readme")
    code = "\n".join(blocks_in(README, "python"))  # a training, and the same with a manager
    table = README.partition("\n## Commands\n")[2].partition("\n## ")[0]
    commands = re.findall(r"`(asyncckpt [^`]+)`", table)
    named = {"ls", "inspect", "verify", "du", "diff", "convert", "prune", "doctor", "gc", "report", "top", "worker"}
    assert {c.split()[1] for c in commands} == named
    run([sys.executable, "-c", code], tmp_path, environ)
    assert (tmp_path / "runs/a/step-300/manifest.json").exists()
    assert (tmp_path / "runs/managed/step-00000600/manifest.json").exists()
    run_forked(warm_python, code, tmp_path, environ)  # both resume
    assert (tmp_path / "runs/managed/step-00000900/manifest.json").exists()
    commands_answer(command, commands, tmp_path, environ)


def test_every_shell_block_runs_in_a_test_and_every_target_is_there() -> None:
    guide = (ROOT / "docs/guides/several-ranks.md").read_text()
    assert [
        block for block in blocks_in(README, "sh") if f"```sh\n{block}```" not in guide
    ] == []  # test_readme_launch runs those
    (targets,) = blocks_in(README, "")
    makefile = (ROOT / "Makefile").read_text()
    for line in targets.splitlines():
        assert f"\n{line.split()[1]}:" in makefile


def test_every_link_leads_to_a_file() -> None:
    for target in re.findall(r"\]\(([^)#]+)[)#]", README):
        assert (ROOT / target).exists(), f"README.md links to {target}, which does not exist"


def test_figures_are_those_of_the_result_file() -> None:
    run([sys.executable, "-m", "benchmarks.report", "--check"], ROOT, dict(os.environ))
