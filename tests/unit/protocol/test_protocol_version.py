"""One number of the protocol, one wire: whoever changes what travels raises the version."""

from __future__ import annotations

import json

import wire_schema

WHAT_TO_DO = (
    "what goes over the wire has changed. Raise PROTOCOL_VERSION in asyncckpt/protocol/messages.py and both numbers in "
    "asyncckpt/protocol/SPEC.md and that in tests/spec_client.py, then keep what it stands for: "
    "python tests/golden/make_wire.py"
)


def test_what_goes_over_the_wire_is_what_the_version_stands_for() -> None:
    kept, found = wire_schema.golden(), json.loads(json.dumps(wire_schema.document()))
    changed = [
        f"{part}: {sorted(k for k in {**old, **new} if old.get(k) != new.get(k))}"
        for part, new in found["schema"].items()
        if (old := kept["schema"].get(part, {})) != new
    ]
    assert kept == found, f"{WHAT_TO_DO} ({'; '.join(changed) or 'the version'})"
