"""protocol/SPEC.md says what the code does."""

from __future__ import annotations

import importlib
from dataclasses import fields

import pytest
from spec_markdown import spec, table, tables

from asyncckpt.protocol import codec, endpoint, messages, save_phases
from asyncckpt.protocol import fields as checks
from asyncckpt.protocol.messages import REPLIES, REQUESTS
from asyncckpt.protocol.node_tables import NODE_MESSAGES, ROWS
from asyncckpt.protocol.request import SaveRequest
from asyncckpt_worker.core.model import TABLE

SPEC = spec("protocol")
IMPORTED = {
    *("MAX_PIECE_NBYTES", "MAX_TABLE", "MAX_JOBS", "MAX_MISSING", "MAX_RANKS", "MAX_TEXT_CHARS", "MAX_OUTCOMES"),
}
"""Limits that the worker's modules take from elsewhere."""


def _described(cls: type[messages.Message]) -> str:
    return ", ".join(f"{f.name}: {cls.checks[f.name].__name__}" for f in fields(cls))  # type: ignore[arg-type]


def test_requests_and_their_answers_are_those_of_the_spec() -> None:
    rows = table(SPEC, "request", "fields", "answer")
    assert [(name, described) for name, described, _ in rows] == [(n, _described(c)) for n, c in REQUESTS.items()]
    assert {answer for _, _, answer in rows} <= set(REPLIES)


def test_answers_are_those_of_the_spec() -> None:
    assert table(SPEC, "answer", "fields") == [(name, _described(cls)) for name, cls in REPLIES.items()]


def test_every_type_of_a_field_is_explained() -> None:
    used = {check.__name__ for cls in (*REQUESTS.values(), *REPLIES.values()) for check in cls.checks.values()}
    explained = [name for name, _ in table(SPEC, "type", "values")]
    assert set(explained) == used
    assert all(callable(getattr(checks, name)) for name in explained)


@pytest.mark.parametrize(("name", "value"), table(SPEC, "limit", "value"))
def test_limit_equals_the_codes(name: str, value: str) -> None:
    module, _, constant = name.partition(".")
    assert getattr(importlib.import_module(f"asyncckpt.protocol.{module}"), constant) == int(value)


WORKERS_LIMITS = [row for rows in tables(SPEC, "limit of the worker", "value") for row in rows]


def test_what_workers_say_to_each_other_is_that_of_the_spec() -> None:
    assert table(SPEC, "between workers", "fields") == [(name, _described(c)) for name, c in NODE_MESSAGES.items()]


def test_rows_of_what_workers_say_are_those_of_the_spec() -> None:
    described = [(n, ", ".join(f"{key}: {fits.__name__}" for key, fits in row.items())) for n, row in ROWS.items()]
    assert table(SPEC, "row", "keys") == described


def test_every_type_of_a_workers_field_is_explained() -> None:
    used = {check.__name__ for cls in NODE_MESSAGES.values() for check in cls.checks.values()}
    explained = {name for header in ("type", "type between workers") for name, _ in table(SPEC, header, "values")}
    assert used <= explained


@pytest.mark.parametrize(("name", "value"), WORKERS_LIMITS)
def test_limit_equals_the_workers(name: str, value: str) -> None:
    module, _, constant = name.rpartition(".")
    assert getattr(importlib.import_module(f"asyncckpt_worker.{module}"), constant) == int(value)


def test_every_limit_of_the_ranks_registries_is_in_the_spec() -> None:
    named = {name for name, _ in WORKERS_LIMITS}
    for name in ("runs", "exchange", "status", "nodes.leader", "nodes.follower", "nodes.tables"):
        module = f"core.{name}"
        loaded = importlib.import_module(f"asyncckpt_worker.{module}")
        own = {f"{module}.{n}" for n in vars(loaded) if n.startswith("MAX_")}
        assert {n for n in own if n.rpartition(".")[2] not in IMPORTED} <= named


def test_every_limit_of_the_code_is_in_the_spec() -> None:
    named = {name.partition(".")[2] for name, _ in table(SPEC, "limit", "value")}
    for module in ("messages", "codec", "fields", "request", "node_tables", "samples", "endpoint"):
        loaded = importlib.import_module(f"asyncckpt.protocol.{module}")
        assert {n for n in vars(loaded) if n.startswith("MAX_")} <= named


def test_header_has_the_shape_of_the_spec() -> None:
    rows = table(SPEC, "bytes", "header")
    header = codec.encode(messages.Ok(id=1))[0]
    assert rows[0] == ("0 to 3", header[:4].decode())
    assert header == b"ACKP" + messages.PROTOCOL_VERSION.to_bytes(2, "little")


def test_request_in_the_slot_has_the_fields_of_the_spec() -> None:
    assert [name for name, _ in table(SPEC, "field", "type")] == list(SaveRequest.__dataclass_fields__)


def test_life_of_a_save_is_the_table_of_the_spec() -> None:
    cells = [(phase or "(new)", event, after) for phase, row in TABLE.items() for event, (after, _) in row.items()]
    assert table(SPEC, "phase", "event", "next") == cells
    assert all(f"`{phase}`" in SPEC for phase in save_phases.PHASES)


def test_endpoint_is_named_as_the_spec_says() -> None:
    assert " else ".join(f"`{name}`" for name in endpoint.JOB_VARIABLES).replace(" else", ", else") in SPEC.replace(
        "\n", " "
    )
