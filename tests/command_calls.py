"""The command `asyncckpt`, called in the process of a test."""

from __future__ import annotations

import json
from typing import Any

import pytest


class Command:
    """Calls it: `command("ls", root)`. Arguments may be anything that has a text."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: object) -> tuple[int, str, str]:
        """Return the exit code, and what it printed on stdout and on stderr."""
        from asyncckpt import cli

        self._capsys.readouterr()
        try:
            code = cli.main([str(word) for word in words])
        except SystemExit as ended:
            code = int(ended.code or 0)
        out, err = self._capsys.readouterr()
        return code, out, err

    def json(self, *words: object) -> tuple[int, Any]:
        """Return the exit code, and what it printed with `--json`."""
        code, out, _ = self(*words, "--json")
        return code, json.loads(out)
