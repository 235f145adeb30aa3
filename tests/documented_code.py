"""The code in README.md and in docs/, and how it is run as it stands."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import sysconfig
from collections.abc import Mapping

import pytest
from command_calls import Command

from tests.warm_python import WarmPython

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def blocks_in(text: str, kind: str = "python") -> list[str]:
    """Return the blocks of code of a kind."""
    found = re.findall(r"^```([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [code for found_kind, code in found if found_kind == kind]


def blocks(page: str, kind: str = "python") -> list[str]:
    """Return the blocks of code of a page in docs/."""
    return blocks_in((ROOT / "docs" / f"{page}.md").read_text(), kind)


def environment(job: str) -> dict[str, str]:
    """Return an environment in which the commands of the package, if it is installed, are found by their names."""
    scripts = [str(pathlib.Path(sys.executable).parent), sysconfig.get_path("scripts"), os.environ["PATH"]]
    return {**os.environ, "ASYNCCKPT_JOB": job, "CUDA_VISIBLE_DEVICES": "", "PATH": os.pathsep.join(scripts)}


def run(command: list[str], directory: pathlib.Path, environ: Mapping[str, str], timeout_s: float = 120) -> str:
    """Run a command, which must go well; return what it has printed."""
    done = subprocess.run(
        command, cwd=directory, env=environ, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def run_forked(python: WarmPython, code: str, directory: pathlib.Path, environ: Mapping[str, str]) -> str:
    """As `run` with `python -c`, by a fork of a process that has torch imported."""
    done = python.run(code, cwd=directory, env=environ)
    assert done.returncode == 0, f"{code}: {done.stdout}{done.stderr}"
    return done.stdout


def commands_answer(command: Command, lines: list[str], directory: pathlib.Path, environ: Mapping[str, str]) -> None:
    """Call each `asyncckpt ...` in a directory, in this process; all must go well."""
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(directory)
        patched.setenv("ASYNCCKPT_JOB", environ["ASYNCCKPT_JOB"])
        for line in lines:
            program, *words = line.removeprefix("$ ").split()
            code, out, err = command(*words)
            assert (program, code) == ("asyncckpt", 0), f"{line}: {out}{err}"
