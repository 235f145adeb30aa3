"""What goes over the wire, as plain values: messages, records, the request in a slot, results, limits, phases."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from asyncckpt.format.coverage import Tally
from asyncckpt.format.manifest import RankRecord
from asyncckpt.protocol import fields as kinds
from asyncckpt.protocol import request, save_phases
from asyncckpt.protocol.messages import PROTOCOL_VERSION, REPLIES, REQUESTS, Message
from asyncckpt.protocol.node_tables import NODE_MESSAGES, PART_DETAILS, ROWS
from asyncckpt.storage.rank_writer import RankResult

GOLDEN = Path(__file__).parent.parent / "golden" / "wire.json"
_MODULES = ("codec", "fields", "request", "node_tables", "samples")


def schema() -> dict[str, Any]:
    """Return what PROTOCOL_VERSION stands for in the code that is here."""
    return {
        "requests": _messages(REQUESTS),
        "answers": _messages(REPLIES),
        "between workers": _messages(NODE_MESSAGES),
        "rows between workers": {
            name: {key: _name(fits) for key, fits in row.items()}
            for name, row in {**ROWS, "part details": PART_DETAILS}.items()
        },
        "request in the slot": {
            f.name: f"{f.type} {_name(request._CHECKS.get(f.name))}" for f in fields(request.SaveRequest)
        },
        "result": {cls.__name__: {f.name: str(f.type) for f in fields(cls)} for cls in (RankResult, RankRecord, Tally)},
        "patterns": {n: v.pattern for n, v in sorted(vars(kinds).items()) if isinstance(v, re.Pattern)},
        "limits": {f"{module}.{name}": value for module in _MODULES for name, value in _limits(module)},
        "phases": sorted(save_phases.PHASES),
    }


def document() -> dict[str, Any]:
    """Return what the golden file holds."""
    return {"version": PROTOCOL_VERSION, "schema": schema()}


def golden() -> dict[str, Any]:
    """Return the golden file."""
    found: dict[str, Any] = json.loads(GOLDEN.read_text())
    return found


def write() -> None:
    """Keep what the code says under a version that is new.

    Raises:
        SystemExit: The version is not new, and what it stands for would change.
    """
    if GOLDEN.exists() and golden() != document() and golden()["version"] >= PROTOCOL_VERSION:
        raise SystemExit(f"raise PROTOCOL_VERSION above {golden()['version']} first: asyncckpt/protocol/messages.py")
    GOLDEN.write_text(json.dumps(document(), indent=1) + "\n")


def _messages(known: dict[str, type[Message]]) -> dict[str, dict[str, str]]:
    return {
        name: {f.name: f"{f.type} {_name(cls.checks[f.name])}" for f in fields(cls)}  # type: ignore[arg-type]
        for name, cls in known.items()
    }


def _name(check: Any) -> str:
    return "" if check is None else str(check.__name__)


def _limits(module: str) -> list[tuple[str, Any]]:
    found = vars(importlib.import_module(f"asyncckpt.protocol.{module}"))
    return [(n, v) for n, v in sorted(found.items()) if re.fullmatch("[A-Z][A-Z_0-9]*", n) and type(v) in (int, float)]


if __name__ == "__main__":
    write()
