"""Convert a checkpoint between asyncckpt, PyTorch DCP, torch.save, safetensors and Hugging Face files. Afterwards the
target is read back and compared with the source.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from asyncckpt.basics.quantities import human, parse_nbytes
from asyncckpt.cli.output import EXIT_OK, EXIT_SIGNAL, add_keys, path_argument, print_json, say
from asyncckpt.cli.progress import progress
from asyncckpt.errors import ConfigError
from asyncckpt.interop.sources.detect import KINDS

EXAMPLES = (
    "asyncckpt convert runs/a/step-300 model.safetensors --to safetensors --keys model",
    "asyncckpt convert dcp-dir runs/b/step-300 --to asyncckpt",
)
_SHOWN_CHARS = 4000
"""Maximum length of a printed list of names: a checkpoint may have a million of them."""


def configure(parser: argparse.ArgumentParser) -> None:
    text = "the checkpoint to convert, a directory or file; its format is detected"
    parser.add_argument("source", metavar="SRC", type=path_argument, help=text)
    parser.add_argument(
        "target",
        metavar="DST",
        type=path_argument,
        help="path to write: a directory for asyncckpt, dcp and hf, else a file",
    )
    parser.add_argument("--to", required=True, choices=KINDS, help="format of DST")
    add_keys(parser)
    parser.add_argument(
        "--rename",
        metavar="OLD=NEW",
        action="append",
        default=[],
        help="replace the prefix OLD of names with NEW; repeat for more, the first match is used",
    )
    parser.add_argument(
        "--key-map", metavar="FILE", help="JSON file with an object that maps names in SRC to names in DST"
    )
    parser.add_argument(
        "--max-shard-bytes", metavar="N", type=parse_nbytes, help="maximum size of one file, such as 5GB or 4.5GiB"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing checkpoint at DST")
    parser.add_argument(
        "--partial", action="store_true", help="leave out, and list, what the format of DST cannot store"
    )
    parser.add_argument(
        "--no-read-back",
        action="store_true",
        help="compare only names, types and positions afterwards, not the written data",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; exit codes: 4 no source, 3 the source is damaged, 1 the target cannot be written."""
    from asyncckpt.interop.convert import convert

    started = time.perf_counter()
    with progress(quiet=args.json) as shown, _terminates_like_interrupt():
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
            progress=shown,
        )
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
    for what in ("left_out", "copied", "not_copied", "carried_over"):
        for name in getattr(report, what):
            say(f"  {what.replace('_', ' ')}: {name}")
    return EXIT_OK


@contextlib.contextmanager
def _terminates_like_interrupt() -> Iterator[None]:
    """Handle SIGTERM and SIGHUP, which a scheduler sends, like Ctrl-C: remove the incomplete target."""

    def end(number: int, _: Any) -> None:
        raise SystemExit(EXIT_SIGNAL + number)

    is_main = threading.current_thread() is threading.main_thread()
    taken = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if is_main and signal.getsignal(number) == signal.SIG_DFL  # nohup ignores one
    ]
    for number in taken:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _key_map(args: argparse.Namespace) -> dict[str, str] | Callable[[str], str] | None:
    for text in args.rename:
        if text.find("=") < 1:
            raise ConfigError(f"--rename {text!r}: expected OLD=NEW", field="rename", value=text)
    pairs = [text.partition("=") for text in args.rename]
    table: dict[str, str] = _table(args.key_map) if args.key_map else {}

    def rename(fqn: str) -> str:
        renamed = (new + fqn[len(old) :] for old, _, new in pairs if fqn.startswith(old))
        return table[fqn] if fqn in table else next(renamed, fqn)

    return rename if pairs else table or None


def _table(path: str) -> dict[str, str]:
    try:
        with open(path, encoding="utf-8") as file:
            found: Any = json.load(file)
    except (ValueError, RecursionError) as error:  # RecursionError: nested thousands of levels deep
        raise ConfigError(f"--key-map {path}: not JSON: {error}", field="key_map", value=path) from error
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ConfigError(f"--key-map {path}: expected an object whose values are strings", field="key_map", value=path)
    return found
