"""Make docs/cli.md from the parsers of the commands. Run as `python docs/make_cli.py`; a test holds it up to date.

Made from the parsers' parts, not from `--help`, whose layout differs between versions of Python.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Iterator

from asyncckpt.cli import HEADING, parser

TARGET = pathlib.Path(__file__).parent / "cli.md"
_INTRODUCTION = """\
# The command line

`asyncckpt COMMAND --help` shows the same. Every command has examples.

Exit codes: 0 ok, 1 failed, 2 usage, 3 corrupt or incomplete, 4 not found, 5 worker unreachable; `asyncckpt run` exits
as its command does. Commands that print data take `--json`, which prints strict JSON: NaN and infinities are the
strings `"NaN"`, `"Infinity"` and `"-Infinity"`. All commands read sizes as `40GB`, `1.5TiB` or `1000000` (bytes), and
durations as `90` (seconds), `90s`, `30m`, `12h` or `2d`. Commands that remove something list what they would remove;
with `--delete` they remove it. `ls`, `inspect` (without `--stats`), `du`, `verify`, `pin`, `prune`, `gc`, `doctor`,
`top`, `report` and `worker` start without importing torch.
"""


def text() -> str:
    """Return the document."""
    top = parser()
    commands = _subcommands(top)
    lines = [_INTRODUCTION, "| command | does |", "|---|---|"]
    helps = {action.dest: action.help or "" for action in _choices(top)}
    lines += [f"| [`{name}`](#{_anchor(sub)}) | {_cell(helps[name])} |" for name, sub in commands.items()]
    for sub in commands.values():
        lines += _section(sub, 2)
    return "\n".join(lines) + "\n"


def _section(one: argparse.ArgumentParser, level: int) -> Iterator[str]:
    yield f"\n{'#' * level} {one.prog}\n"
    yield f"{one.description or ''}\n"
    inner = _subcommands(one)
    shown = [a for a in one._actions if a.help != argparse.SUPPRESS and not isinstance(a, argparse._SubParsersAction)]
    yield f"```\n{_usage(one, shown, bool(inner))}\n```\n"
    rows = [(_named(a), _cell(_help(one, a))) for a in shown if not isinstance(a, argparse._HelpAction)]
    if rows:
        yield "| argument | meaning |\n|---|---|"
        yield from (f"| {name} | {meaning} |" for name, meaning in rows)
    examples = [line.strip() for line in (one.epilog or "").splitlines() if line.strip() not in ("", HEADING)]
    if examples:
        yield "\nExamples:\n\n```\n" + "\n".join(examples) + "\n```"
    for sub in inner.values():
        yield from _section(sub, level + 1)


def _usage(one: argparse.ArgumentParser, actions: list[argparse.Action], has_inner: bool) -> str:
    if one.usage:
        return one.usage
    words = [one.prog]
    for action in sorted(actions, key=lambda a: not a.option_strings):
        if isinstance(action, argparse._HelpAction):
            continue
        shown = " ".join([*action.option_strings[-1:], *_value(action)])
        words.append(shown if action.required else f"[{shown}]")
    return " ".join([*words, *(["ACTION"] if has_inner else [])])


def _value(action: argparse.Action) -> list[str]:
    if action.nargs == 0:
        return []
    if action.choices is not None:
        name = "{" + ",".join(map(str, action.choices)) + "}"
    else:
        name = str(action.metavar or action.dest.upper())
    return [f"{name}..." if action.nargs in ("+", "*", argparse.REMAINDER) and not name.endswith("...") else name]


def _named(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{_value(action)[0]}`"
    return "`" + " ".join([", ".join(action.option_strings), *_value(action)]).replace("|", "\\|") + "`"


def _help(one: argparse.ArgumentParser, action: argparse.Action) -> str:
    return (action.help or "") % {**vars(action), "prog": one.prog}


def _cell(found: str) -> str:
    return " ".join(found.split()).replace("|", "\\|")


def _anchor(one: argparse.ArgumentParser) -> str:
    return one.prog.replace(" ", "-")


def _subparsers(one: argparse.ArgumentParser) -> argparse._SubParsersAction[argparse.ArgumentParser] | None:
    return next((a for a in one._actions if isinstance(a, argparse._SubParsersAction)), None)


def _subcommands(one: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = _subparsers(one)
    return dict(found.choices) if found is not None else {}


def _choices(one: argparse.ArgumentParser) -> list[argparse.Action]:
    found = _subparsers(one)
    return list(found._choices_actions) if found is not None else []


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
    sys.exit(0)
