"""The command `asyncckpt`: the list of commands, their parser, and `main`. The commands are in `cli/commands`.

A command's module is imported only when the command runs, so that quick commands start quickly. Exit codes: 0 ok,
1 failed, 2 usage, 3 corrupt or incomplete, 4 not found, 5 worker unreachable.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType

from asyncckpt import __version__
from asyncckpt.cli import standard_streams
from asyncckpt.cli.output import EXIT_FAILED, exit_code_of, say
from asyncckpt.errors import AsyncCkptError
from asyncckpt.storage.locate import with_storage_options

COMMANDS = {
    "demo": "show on this machine that a killed training loses nothing",
    "run": "run a command, such as torchrun, together with a worker; exit with the command's exit code",
    "top": "show live what the worker is doing for each rank",
    "report": "make an HTML page with charts of the saves: stalls, writing, recovery points",
    "ls": "list the checkpoints in a directory, also damaged and unfinished ones",
    "inspect": "show the contents of a checkpoint: tensors, shards, objects, timings",
    "du": "show the disk usage of checkpoints",
    "verify": "check all checksums, sizes and shapes of checkpoints, and name damaged files and tensors",
    "diff": "compare two checkpoints: structure, tensors, objects; exit code 1 if they differ",
    "convert": "convert a checkpoint between asyncckpt, PyTorch DCP, torch.save, safetensors, Hugging Face",
    "pin": "pin checkpoints, so that retention does not remove them",
    "prune": "list the checkpoints that a retention policy removes; with --delete, remove them",
    "gc": "list files of unfinished saves; with --delete, remove them",
    "doctor": "check this machine and a directory before a run",
    "worker": "start a worker, show its status, drain it or stop it",
}
"""Help text by name. The module of a command is `asyncckpt.cli.commands.NAME`."""

WITHOUT_JSON = ("demo", "run", "worker")
"""Commands without --json; the actions of `worker` have it."""

HEADING = "examples:"


class ExampleFormatter(argparse.HelpFormatter):
    """Wraps descriptions as usual, but keeps the lines of examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(HEADING) else super()._fill_text(text, width, indent)


def describe(parser: argparse.ArgumentParser, text: str, examples: Sequence[str]) -> None:
    """Set the description and the examples that `--help` prints."""
    parser.formatter_class = ExampleFormatter
    parser.description, parser.epilog = " ".join(text.split()), "\n  ".join([HEADING, *examples])


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add --json."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def module_of(command: str) -> ModuleType:
    """Return the module of a command."""
    return importlib.import_module(f"{__name__}.commands.{command}")


def parser(only: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of all commands.

    Args:
        only: Name of the command whose arguments will be parsed: only its module is imported. None: import all.
    """
    top = argparse.ArgumentParser(
        prog="asyncckpt",
        description="Manage checkpoints written by asyncckpt, and the worker that writes them.",
        epilog="exit codes: 0 ok, 1 failed, 2 usage, 3 corrupt or incomplete, 4 not found, 5 worker unreachable",
    )
    top.add_argument("--version", action="version", version=f"asyncckpt {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        sub = commands.add_parser(name, help=text)
        if only in (None, name):
            module = module_of(name)
            describe(sub, module.__doc__ or "", module.EXAMPLES)
            module.configure(sub)
            if name not in WITHOUT_JSON:
                add_json(sub)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments; default: the process's.

    Returns:
        The exit code.
    """
    words = sys.argv[1:] if argv is None else argv
    with standard_streams.usable():
        try:  # options before the command take no values, so the first word without a dash is the command
            args = parser(only=next((word for word in words if not word.startswith("-")), "")).parse_args(words)
        except SystemExit as error:  # argparse has printed help, or an error
            code = error.code if isinstance(error.code, int) else 0
            raise SystemExit(standard_streams.exit_code(code)) from None
        return standard_streams.exit_code(_run(args))


class _Warnings(logging.Handler):
    """Prints warnings of the library as a command prints its errors."""

    def __init__(self, command: str) -> None:
        super().__init__(logging.WARNING)
        self._command = command

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        try:
            say(f"asyncckpt {self._command}: {self.format(record)}", file=sys.stderr)
        except Exception:
            self.handleError(record)


@contextlib.contextmanager
def _warnings_printed(command: str) -> Iterator[None]:
    """Print warnings of the library, unless the caller's program handles them."""
    logger = logging.getLogger("asyncckpt")
    if logger.hasHandlers():
        yield
        return
    handler = _Warnings(command)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _run(args: argparse.Namespace) -> int:
    try:
        with with_storage_options(dict(getattr(args, "storage_option", ()))), _warnings_printed(args.command):
            code: int = module_of(args.command).run(args)
        return code
    except KeyboardInterrupt:
        return 130
    except (AsyncCkptError, OSError) as error:
        if error is standard_streams.lost_output():
            return EXIT_FAILED
        with contextlib.suppress(OSError):
            say(f"asyncckpt {args.command}: {error}", file=sys.stderr)
        return exit_code_of(error)
