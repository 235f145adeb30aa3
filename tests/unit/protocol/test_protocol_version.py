"""One number of the protocol, one wire: whoever changes what travels raises the version."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import wire_schema

from asyncckpt.protocol import fields as checks
from asyncckpt.protocol import messages, request

WHAT_TO_DO = (
    "what goes over the wire has changed. Raise PROTOCOL_VERSION in asyncckpt/protocol/messages.py and both numbers in "
    "asyncckpt/protocol/SPEC.md, then keep what it stands for: python tests/golden/make_wire.py"
)


def test_what_goes_over_the_wire_is_what_the_version_stands_for() -> None:
    kept, found = wire_schema.golden(), json.loads(json.dumps(wire_schema.document()))
    changed = [
        f"{part}: {sorted(k for k in {**old, **new} if old.get(k) != new.get(k))}"
        for part, new in found["schema"].items()
        if (old := kept["schema"].get(part, {})) != new
    ]
    assert kept == found, f"{WHAT_TO_DO} ({'; '.join(changed) or 'the version'})"


@pytest.mark.parametrize("change", ["field", "check", "message", "limit", "request"])
def test_any_change_of_the_wire_is_another_schema(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
    class Drain(messages.Message):
        id: int
        now: bool
        more: bool
        name = "drain"
        checks = {**messages.Drain.checks, "more": checks.flag}  # noqa: RUF012

    before = wire_schema.schema()
    if change == "field":
        monkeypatch.setattr(wire_schema, "REQUESTS", {**messages.REQUESTS, "drain": Drain})
    elif change == "check":
        monkeypatch.setitem(messages.Drain.checks, "now", checks.uint)
    elif change == "message":
        monkeypatch.setattr(wire_schema, "REPLIES", {n: c for n, c in messages.REPLIES.items() if n != "ok"})
    elif change == "limit":
        monkeypatch.setattr(checks, "MAX_TABLE", 7)
    else:
        monkeypatch.setitem(request._CHECKS, "layout", checks.text)
    assert wire_schema.schema() != before


def test_the_golden_wire_is_not_written_anew_under_the_same_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "wire.json"
    monkeypatch.setattr(wire_schema, "GOLDEN", kept)
    wire_schema.write()
    monkeypatch.setattr(wire_schema, "REPLIES", {n: c for n, c in messages.REPLIES.items() if n != "ok"})
    with pytest.raises(SystemExit, match="raise PROTOCOL_VERSION"):
        wire_schema.write()
    monkeypatch.setattr(wire_schema, "PROTOCOL_VERSION", messages.PROTOCOL_VERSION + 1)
    wire_schema.write()
    assert json.loads(kept.read_text())["version"] == messages.PROTOCOL_VERSION + 1
