"""The command `asyncckpt`: one module per command, each with `configure(parser)` and `run(args) -> exit code`.

Exit codes: 0 ok, 1 failed, 2 usage, 3 corrupt or incomplete, 4 not found, 5 worker unreachable. No module here imports
torch at the top, so that the quick commands answer at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from asyncckpt import __version__
from asyncckpt.cli import convert, demo, diff, doctor, gc, inspect, ls, report, run, top, verify, worker
from asyncckpt.cli.output import EXIT_FAILED, exit_code_of, say
from asyncckpt.errors import AsyncCkptError

COMMANDS = {
    "demo": demo,
    "run": run,
    "ls": ls,
    "inspect": inspect,
    "verify": verify,
    "diff": diff,
    "convert": convert,
    "gc": gc,
    "doctor": doctor,
    "top": top,
    "report": report,
    "worker": worker,
}


class _Formatter(argparse.HelpFormatter):
    """Breaks descriptions as usual, and keeps the lines of examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        kept = text.startswith("example")
        return text if kept else super()._fill_text(text, width, indent)


def _examples(module: ModuleType) -> str:
    return "examples:\n" + "\n".join(f"  {line}" for line in module.EXAMPLES)


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
            epilog=_examples(module),
            formatter_class=_Formatter,
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
    args = parser().parse_args(argv)
    try:
        code: int = COMMANDS[args.command].run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, `head` say, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except KeyboardInterrupt:
        return 130
    except (AsyncCkptError, OSError) as error:
        say(f"asyncckpt {args.command}: {error}", file=sys.stderr)
        return exit_code_of(error)
