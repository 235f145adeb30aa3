"""The command `asyncckpt`: one module per command, each with `configure(parser)` and `run(args) -> exit code`.

Exit codes: 0 ok, 1 failed, 2 usage, 3 corrupt or incomplete, 4 not found, 5 worker unreachable. No module here imports
torch at the top, so that the quick commands answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence

from asyncckpt import __version__, standard_streams
from asyncckpt.cli import (
    convert,
    demo,
    diff,
    doctor,
    du,
    gc,
    inspect,
    ls,
    pin,
    prune,
    report,
    run,
    top,
    verify,
    worker,
)
from asyncckpt.cli.help_text import ExampleFormatter, examples
from asyncckpt.cli.output import EXIT_FAILED, exit_code_of, say
from asyncckpt.errors import AsyncCkptError

COMMANDS = {
    "demo": demo,
    "run": run,
    "top": top,
    "report": report,
    "ls": ls,
    "inspect": inspect,
    "du": du,
    "verify": verify,
    "diff": diff,
    "convert": convert,
    "pin": pin,
    "prune": prune,
    "gc": gc,
    "doctor": doctor,
    "worker": worker,
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    top = argparse.ArgumentParser(
        prog="asyncckpt",
        description="Look after checkpoints written by asyncckpt, and the worker that writes them.",
        epilog="exit codes: 0 ok, 1 failed, 2 usage, 3 corrupt or incomplete, 4 not found, 5 worker unreachable",
    )
    top.add_argument("--version", action="version", version=f"asyncckpt {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=module.HELP,
            description=getattr(module, "DESCRIPTION", module.HELP[0].upper() + module.HELP[1:] + "."),
            epilog=examples(module.EXAMPLES),
            formatter_class=ExampleFormatter,
        )
        module.configure(sub)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments; default: the process's.

    Returns:
        The exit code.
    """
    with standard_streams.usable():
        try:
            args = parser().parse_args(argv)
        except SystemExit as error:  # it has printed its help, or what is wrong
            code = error.code if isinstance(error.code, int) else 0
            raise SystemExit(standard_streams.exit_code(code)) from None
        return standard_streams.exit_code(_run(args))


def _run(args: argparse.Namespace) -> int:
    try:
        code: int = COMMANDS[args.command].run(args)
        return code
    except KeyboardInterrupt:
        return 130
    except (AsyncCkptError, OSError) as error:
        if error is standard_streams.lost_output():
            return EXIT_FAILED
        with contextlib.suppress(OSError):
            say(f"asyncckpt {args.command}: {error}", file=sys.stderr)
        return exit_code_of(error)
