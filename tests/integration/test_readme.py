"""The README's code and commands run, its links lead somewhere, its figures are the result file's."""

from __future__ import annotations

import ast
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
README = (REPOSITORY / "README.md").read_text()


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.fixture
def environment(endpoint: str) -> dict[str, str]:
    scripts = [str(pathlib.Path(sys.executable).parent), sysconfig.get_path("scripts"), os.environ["PATH"]]
    return {**os.environ, "ASYNCCKPT_JOB": "readme", "PATH": os.pathsep.join(scripts)}


def run(command: list[str], directory: pathlib.Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"


def test_python_block_saves_resumes_and_the_commands_answer(
    tmp_path: pathlib.Path, environment: dict[str, str]
) -> None:
    if shutil.which("asyncckpt", path=environment["PATH"]) is None:
        pytest.skip("the package is not installed, so there are no commands")
    code = "\n".join(blocks("python")[:2])  # a training, and the same with a manager
    commands = [line.removeprefix("$ ") for block in blocks("console") for line in block.splitlines()]
    named = [*("ls", "inspect", "verify", "verify", "du", "prune", "doctor", "gc", "report", "top", "worker", "worker")]
    assert [c.split()[1] for c in commands] == named
    run([sys.executable, "-c", code], tmp_path, environment)
    assert (tmp_path / "runs/a/step-300/manifest.json").exists()
    assert (tmp_path / "runs/m/step-00000300/manifest.json").exists()
    run([sys.executable, "-c", code], tmp_path, environment)  # resumes, and has nothing left to do
    for command in commands:
        run(command.split(), tmp_path, environment)


def test_every_link_leads_to_a_file_and_every_test_exists() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (REPOSITORY / target).exists(), f"README.md links to {target}, which does not exist"
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", README)
    assert named
    for file, name in named:
        functions = {
            n.name for n in ast.walk(ast.parse((REPOSITORY / file).read_text())) if isinstance(n, ast.FunctionDef)
        }
        assert name in functions, f"README.md names {file}::{name}, which does not exist"


def test_figures_are_those_of_the_result_file() -> None:
    run([sys.executable, "-m", "benchmarks.table", "--check"], REPOSITORY, dict(os.environ))


def test_every_configuration_field_is_named() -> None:
    from dataclasses import fields

    from asyncckpt import CheckpointerConfig

    assert [f.name for f in fields(CheckpointerConfig) if f"`{f.name}`" not in README] == []
