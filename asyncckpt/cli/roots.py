"""The argument of commands that look at all checkpoints below a directory."""

from __future__ import annotations

import argparse
import os

from asyncckpt.errors import CheckpointNotFoundError
from asyncckpt.storage.files import Files


def configure_root(parser: argparse.ArgumentParser) -> None:
    """Add ROOT, -r and --json."""
    parser.add_argument("root", metavar="ROOT", help="directory that holds checkpoints, or a checkpoint itself")
    parser.add_argument("-r", "--recursive", action="store_true", help="look at any depth")
    parser.add_argument("--json", action="store_true", help="print JSON")


def existing_root(given: str, files: Files) -> str:
    """Return the absolute path of a directory that is there.

    Raises:
        CheckpointNotFoundError: It is not.
        OSError: It cannot be read.
    """
    root = os.path.abspath(given)
    try:
        files.listdir(root)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointNotFoundError(f"{given} is no directory", path=root) from error
    return root


def no_checkpoints(given: str, *, recursive: bool) -> str:
    """Return what is said where there are none."""
    return f"no checkpoints in {given}" + ("" if recursive else "; -r looks further down")
