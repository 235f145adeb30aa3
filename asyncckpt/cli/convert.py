"""`asyncckpt convert`: a checkpoint of any kind into any other."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from asyncckpt.cli.foreground import EXIT_SIGNAL
from asyncckpt.cli.output import EXIT_OK, print_json, say
from asyncckpt.cli.progress import Bar
from asyncckpt.errors import ConfigError
from asyncckpt.foreign.kinds import KINDS
from asyncckpt.sizes import human

HELP = "convert a checkpoint: asyncckpt, PyTorch DCP, torch.save, safetensors, Hugging Face"
EXAMPLES = (
    "asyncckpt convert runs/a/step-300 model.safetensors --to safetensors --keys model",
    "asyncckpt convert dcp-dir runs/b/step-300 --to asyncckpt",
)
_SHOWN_CHARS = 4000
"""Of a sentence with names, of which a checkpoint may have a million."""

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("source", metavar="SRC", help="a checkpoint: directory or file; its kind is recognised")
    parser.add_argument(
        "target", metavar="DST", help="what is written: a directory for asyncckpt, dcp, hf; else a file"
    )
    parser.add_argument("--to", required=True, choices=KINDS, help="the kind of DST")
    parser.add_argument("--keys", metavar="FQN", nargs="+", help="only these names, or what is below them")
    parser.add_argument(
        "--rename",
        metavar="OLD=NEW",
        action="append",
        default=[],
        help="put NEW in place of OLD at the start of names; again for more; the first that fits counts",
    )
    parser.add_argument("--key-map", metavar="FILE", help="JSON: an object from names in SRC to names in DST")
    parser.add_argument("--max-shard-bytes", metavar="N", type=_size, help="limit of one file, such as 5GB")
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint that stands at DST")
    parser.add_argument("--partial", action="store_true", help="leave out what DST cannot hold, and name it")
    parser.add_argument(
        "--no-read-back", action="store_true", help="compare names, types and places only, not the bytes on the disk"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _size(text: str) -> int:
    number = text.lower().removesuffix("b")
    unit = number[-1:] if number[-1:] in _UNITS else ""
    try:
        nbytes = int(float(number.removesuffix(unit)) * _UNITS[unit])
    except (ValueError, OverflowError):
        nbytes = 0
    if nbytes < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of bytes, such as 5GB")
    return nbytes


def run(args: argparse.Namespace) -> int:
    """Run the command; exit codes 4 when there is no source, 3 when it is damaged, 1 when the target cannot be made."""
    from asyncckpt.conversion.converter import convert

    bar = Bar() if sys.stderr.isatty() and not args.json else None
    started = time.perf_counter()
    try:
        with _ended_cleanly():
            report = convert(
                args.source,
                args.target,
                to=args.to,
                keys=args.keys,
                key_map=_key_map(args),
                max_shard_bytes=args.max_shard_bytes,
                overwrite=args.overwrite,
                partial=args.partial,
                read_back=not args.no_read_back,
                progress=bar,
            )
    finally:
        if bar is not None:
            bar.close()
    seconds = time.perf_counter() - started
    if args.json:
        print_json({**asdict(report), "seconds": round(seconds, 3)})
        return EXIT_OK
    say(
        f"{args.target}: {report.kind} to {report.to}, {report.tensors} tensors, {report.objects} objects, "
        f"{human(report.nbytes)} in {seconds:.1f} s, "
        + ("compared, not read back" if args.no_read_back else "read back and compared")
    )
    for line in report.changed:
        say(f"  changed: {line if len(line) <= _SHOWN_CHARS else line[:_SHOWN_CHARS] + ' ... (--json prints all)'}")
    for name in report.left_out:
        say(f"  left out: {name}")
    for name in report.copied:
        say(f"  copied: {name}")
    for name in report.not_copied:
        say(f"  not copied: {name}")
    for name in report.carried_over:
        say(f"  carried over: {name}")
    return EXIT_OK


@contextlib.contextmanager
def _ended_cleanly() -> Iterator[None]:
    """Make of SIGTERM and SIGHUP, which a scheduler sends, what Ctrl-C is: what is under way is removed."""

    def end(number: int, _: Any) -> None:
        raise SystemExit(EXIT_SIGNAL + number)

    old: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for found in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(found) == signal.SIG_DFL:  # nohup ignores one
                old[found] = signal.signal(found, end)
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _key_map(args: argparse.Namespace) -> dict[str, str] | Callable[[str], str] | None:
    pairs: list[tuple[str, str]] = []
    for text in args.rename:
        old, equals, new = text.partition("=")
        if not equals or not old:
            raise ConfigError(f"--rename {text!r}: expected OLD=NEW", field="rename", value=text)
        pairs.append((old, new))
    table: dict[str, str] = _table(args.key_map) if args.key_map else {}
    if not pairs:
        return table or None

    def rename(fqn: str) -> str:
        if fqn in table:
            return table[fqn]
        for old, new in pairs:
            if fqn.startswith(old):
                return new + fqn[len(old) :]
        return fqn

    return rename


def _table(path: str) -> dict[str, str]:
    try:
        with open(path, encoding="utf-8") as file:
            found: Any = json.load(file)
    except ValueError as error:
        raise ConfigError(f"--key-map {path}: no JSON: {error}", field="key_map", value=path) from error
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ConfigError(f"--key-map {path}: expected an object of texts", field="key_map", value=path)
    return found
