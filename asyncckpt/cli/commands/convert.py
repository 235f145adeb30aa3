"""Convert a checkpoint between asyncckpt, PyTorch DCP, torch.save, safetensors and Hugging Face files. Afterwards the
target is read back and compared with the source. With --config, the target is a directory that from_pretrained opens.
SRC may be a URL; DST too, with --to asyncckpt.
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
from asyncckpt.cli.output import (
    EXIT_OK,
    EXIT_SIGNAL,
    add_keys,
    add_storage_options,
    path_argument,
    print_json,
    say,
)
from asyncckpt.cli.progress import progress
from asyncckpt.errors import ConfigError
from asyncckpt.interop.mapping.made_tensors import CAST_DTYPES
from asyncckpt.interop.sources.detect import KINDS

EXAMPLES = (
    "asyncckpt convert runs/a/step-300 model.safetensors --to safetensors --keys model",
    "asyncckpt convert dcp-dir runs/b/step-300 --to asyncckpt",
    "asyncckpt convert runs/a/step-300 hub --to hf --keys model --rename model.= --config base --tokenizer base",
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
        "--rules",
        metavar="FILE",
        help="JSON file with a list of rules that stack, split, join or rename tensors: objects with the arguments of "
        "asyncckpt.TensorRule",
    )
    parser.add_argument("--dtype", choices=CAST_DTYPES, help="cast tensors of floating point numbers to this dtype")
    parser.add_argument(
        "--config",
        metavar="PATH",
        type=path_argument,
        help="with --to hf: config.json, or a directory with it; experts that are stacked in SRC are split as on the "
        "hub, unless --rules is given",
    )
    parser.add_argument(
        "--generation-config",
        metavar="PATH",
        type=path_argument,
        help="with --config: generation_config.json, or a directory with it; default: that beside config.json, if any",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="DIR",
        type=path_argument,
        help="with --config: directory of a tokenizer, whose files are copied",
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
    add_storage_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command; exit codes: 4 no source, 3 the source is damaged, 1 the target cannot be written."""
    from asyncckpt.interop.convert import convert
    from asyncckpt.interop.hf.export import export_checkpoint

    _check_options(args)
    given: dict[str, Any] = {
        "keys": args.keys,
        "key_map": _key_map(args),
        "dtype": args.dtype,
        "max_shard_bytes": args.max_shard_bytes,
        "overwrite": args.overwrite,
        "read_back": not args.no_read_back,
    }
    started = time.perf_counter()
    with progress(quiet=args.json) as shown, _terminates_like_interrupt():
        if args.config is None:
            given |= {"rules": _rules(args) or (), "partial": args.partial, "progress": shown}
            report = convert(args.source, args.target, to=args.to, **given)
        else:
            config_files = {
                "config": args.config,
                "generation_config": args.generation_config,
                "tokenizer": args.tokenizer,
            }
            given |= {"rules": _rules(args), "progress": shown}
            report = export_checkpoint(args.source, args.target, **config_files, **given)
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


def _check_options(args: argparse.Namespace) -> None:
    """Refuse options that need --config, or do not go with it.

    Raises:
        ConfigError: There are some.
    """
    if args.config is None:
        alone = [name for name in ("generation_config", "tokenizer") if getattr(args, name)]
        if alone:
            name = f"--{alone[0].replace('_', '-')}"
            raise ConfigError(f"{name} is for exports to Hugging Face directories: give --config too", field=alone[0])
    elif args.to != "hf" or args.partial:
        other = "--partial" if args.to == "hf" else f"--to {args.to}"
        raise ConfigError(f"--config is for --to hf, of all tensors: leave out {other}", field="config")


def _rules(args: argparse.Namespace) -> list[Any] | None:
    from asyncckpt.interop.mapping.tensor_rules import rules_from_json

    return None if args.rules is None else rules_from_json(_json_file("rules", args.rules), f"--rules {args.rules}")


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


def _json_file(option: str, path: str) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (ValueError, RecursionError) as error:  # RecursionError: nested thousands of levels deep
        said = f"--{option.replace('_', '-')} {path}: not JSON: {error}"
        raise ConfigError(said, field=option, value=path) from error


def _table(path: str) -> dict[str, str]:
    found = _json_file("key_map", path)
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ConfigError(f"--key-map {path}: expected an object whose values are strings", field="key_map", value=path)
    return found
