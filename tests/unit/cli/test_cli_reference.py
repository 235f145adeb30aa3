"""docs/cli.md is what the parsers say, and every command's help is whole."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from asyncckpt import cli

REPOSITORY = Path(__file__).resolve().parents[3]
LISTING = sorted(set(cli.COMMANDS) - {"demo", "run"})
"""Commands that print data."""


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    """docs/make_cli.py, loaded."""
    spec = importlib.util.spec_from_file_location("make_cli", REPOSITORY / "docs" / "make_cli.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_up_to_date(maker: ModuleType) -> None:
    assert (REPOSITORY / "docs" / "cli.md").read_text() == maker.text(), "run python docs/make_cli.py"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help_and_examples_that_its_parser_takes(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module = cli.module_of(name)
    for example in module.EXAMPLES:
        program, command, *arguments = shlex.split(example.partition(" >> ")[0])
        assert (program, command) == ("asyncckpt", name)
        parsed = cli.parser().parse_args([command, *arguments])
        assert isinstance(parsed, argparse.Namespace) and parsed.command == name
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    out = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(f"\n  {example}" in out for example in module.EXAMPLES), "each on a line of its own"


@pytest.mark.parametrize("name", LISTING)
def test_commands_that_print_data_have_json(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [name, "status", "--help"] if name == "worker" else [name, "--help"]
    with pytest.raises(SystemExit):
        cli.main(words)
    out = capsys.readouterr().out
    assert "--json" in out and "examples:\n  asyncckpt" in out


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["no-such-command"]], ids=" ".join)
def test_what_no_command_is_called_for_loads_few_modules(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom asyncckpt.cli import main\ntry:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "ours = [name for name in sys.modules if name.partition('.')[0] in ('asyncckpt', 'asyncckpt_worker')]\n"
        "assert len(ours) < 40, ours\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_command_loads_no_other_command(tmp_path: Path) -> None:
    code = (
        f"import sys\nfrom asyncckpt import cli\ncli.main(['du', {str(tmp_path)!r}])\n"
        "print(*(name for name in cli.COMMANDS if f'asyncckpt.cli.commands.{name}' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "du"
