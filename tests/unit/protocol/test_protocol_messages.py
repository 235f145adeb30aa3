"""The wire: every message there and back, every refusal, and bytes from a hostile sender."""

from __future__ import annotations

import random
from dataclasses import fields
from typing import Any

import msgpack
import pytest
from mutations import NASTY, altered, damaged, packed
from protocol_samples import BETWEEN_WORKERS, HEX, SAVE_ID
from protocol_samples import MESSAGES as OF_TRAINERS

from asyncckpt.basics.limits import MAX_RANKS
from asyncckpt.errors import ProtocolError, ProtocolVersionError, from_wire
from asyncckpt.protocol import codec, messages
from asyncckpt.protocol.messages import REPLIES, REQUESTS, Message
from asyncckpt.protocol.node_tables import NODE_MESSAGES, ROWS

KNOWN = {**REQUESTS, **REPLIES, **NODE_MESSAGES}
MESSAGES = OF_TRAINERS + BETWEEN_WORKERS
KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
HEADER = codec.encode(messages.Ok(id=1))[0]


def _body(message: Message) -> dict[str, Any]:
    return dict(msgpack.unpackb(codec.encode(message)[1], use_list=False))


def test_there_is_an_example_of_every_message() -> None:
    assert [type(m) for m in MESSAGES] == list(KNOWN.values())


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: m.name)
def test_message_comes_back_as_it_was_sent(message: Message) -> None:
    found = codec.decode(codec.encode(message), KNOWN)
    assert type(found) is type(message)
    assert _body(found) == _body(message)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: m.name)
def test_message_is_refused_without_any_one_of_its_fields(message: Message) -> None:
    for name in [f.name for f in fields(message)]:  # type: ignore[arg-type]
        body = {k: v for k, v in _body(message).items() if k != name}
        with pytest.raises(ProtocolError, match=name):
            codec.decode([HEADER, packed(body)], KNOWN)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: m.name)
def test_invalid_message_can_be_neither_built_nor_received(message: Message) -> None:
    body = _body(message)
    for name, fits in type(message).checks.items():
        for value in NASTY:
            if fits(value):
                continue
            with pytest.raises(ProtocolError, match=name):
                type(message)(**{f: value if f == name else v for f, v in body.items() if f != "m"})
            with pytest.raises(ProtocolError):
                codec.decode([HEADER, packed({**body, name: value})], KNOWN)


RECALLED: dict[str, Any] = dict(next(m.parts[0] for m in MESSAGES if isinstance(m, messages.Recalled)))
BAD_ERRORS: list[Any] = [
    None,
    "disk full",
    {},
    {"code": "error"},
    {"code": 7, "text": ""},
    {"code": "error", "text": None},
    {"code": "error", "text": "", "fields": None},
    {"code": "error", "text": "", "fields": {"rank": {}}},
    {"code": "error", "text": "", "fields": {"missing_ranks": [[1]]}},
]
BAD_REPORTS: list[Any] = [
    None,
    [],
    {1: 2},
    {"nbytes": "many"},
    {"nbytes": -1},
    {"nbytes": 1.5},
    {"seconds_write": "long"},
    {"seconds_write": None},
    {"seconds_write": float("nan")},
    {"direct": {}},
    {"direct": [1]},
]
BAD_VALUES = {
    "uint": [-1, 1 << 63, True, 1.0, "1", None],
    "sint_or_none": [1 << 63, -(1 << 63), False, 0.0, ""],
    "umask": [-1, 0o1000, True],
    "save_id": ["", SAVE_ID + "\n", SAVE_ID.upper(), SAVE_ID.encode(), None],
    "hex12": ["", HEX[:11], HEX[:13], HEX[:12].upper(), HEX[:12] + "\n", HEX[:12].encode(), None],
    "hex16": [HEX[:-1], HEX + "0", HEX.upper(), HEX + "\n", HEX.encode()],
    "save_id_or_none": [" ", SAVE_ID[:-1], SAVE_ID + "0", SAVE_ID.encode(), None, 0],
    "hex12_or_none": [" ", HEX, HEX[:11], None, 0, b""],
    "outcomes": [None, 7, {}, [7], [(1,)], [(1, True, 2)], [(-1, True)], [(1, 1)], [("1", True)], [(1, True)] * 25],
    "hex16_or_none": [" ", HEX[:-1], HEX.upper(), None, 0, b""],
    "curve_key": ["", KEY[1:], KEY + "0", KEY[:-1] + "\n", KEY[:-1] + '"', KEY.encode(), None],
    "curve_key_or_none": [" ", KEY[1:], KEY.encode(), None],
    "port": [-1, 65536, True, "7000", None],
    "address": ["", "ipc:///x", "tcp://h", "tcp://:1", "tcp://h:x", "tcp://a/b:1", "tcp://h:1\n", b"tcp://h:1", None],
    "error_or_none": [e for e in BAD_ERRORS if e != {}],
    "path": ["", "relative", "/a\0b", "/" + "x" * 4000, "/\ud800", "/" + "\u20ac" * 1400, b"/a", None],
    "figures": [None, [], {1: 2}, {"nbytes": -1}, {"seconds_write": "1"}, {"x": []}],
    "copy_phase": ["", "copied", b"done", None, 1],
    "text": ["x" * 201, "\ud800", b"x", None],
    "seconds": [-1, float("nan"), float("inf"), 1e9, "1", True, None],
    "timeout": [0, 0.0, -1, float("nan"), float("inf"), 1e9, "1", True, None],
    "piece": [bytes((512 << 10) + 1), "x", bytearray(1), None],
    "ranks": [[-1], [True], ["0"], [1.0], [None], [0] * 1025, {0: 1}, None, "0"],
    "token": [b"", bytes(15), bytes(17), "x" * 16, bytearray(16)],
    "flag": [0, 1, None, "true"],
    "mapping": [[], None, {1: 2}, {b"a": 1}],
    "storage_options": [
        [],
        None,
        {1: "a"},
        {"a": 1},
        {"": "a"},
        {"a": "b\0"},
        {"a": "\ud800"},
        {"a" * 65: "b"},
        {"a": "b" * (65536 + 1)},
        {str(n): "" for n in range(65)},
    ],
    "recall_rows": [
        [{}],
        [RECALLED] * 1025,
        [[]],
        {},
        None,
        *([{n: v for n, v in RECALLED.items() if n != left_out}] for left_out in RECALLED),
        *([{**RECALLED, name: None}] for name in RECALLED),
        [{**RECALLED, "token": b""}],
        [{**RECALLED, "generation": -1}],
    ],
    "save_ids": [[""], [None], SAVE_ID, [SAVE_ID] * 1025, {SAVE_ID: 1}, None],
    "save_rows": [
        [{}],
        [{"save_id": SAVE_ID}],
        [{"save_id": SAVE_ID, "phase": "lost"}],
        [{"save_id": SAVE_ID, "phase": {}}],
        [{"save_id": SAVE_ID, "phase": []}],
        [{"save_id": [], "phase": "open"}],
        [{"save_id": SAVE_ID, "phase": "open"}] * 1025,
        [SAVE_ID],
        None,
        *([{"save_id": SAVE_ID, "phase": "durable", "missing": n}] for n in (None, 3, ["1"], [-1], [0] * 65)),
        *([{"save_id": SAVE_ID, "phase": "failed", "error": e}] for e in BAD_ERRORS),
        *([{"save_id": SAVE_ID, "phase": "durable", "report": r}] for r in BAD_REPORTS),
    ],
}


CHECKS = {check.__name__: check for cls in KNOWN.values() for check in cls.checks.values()}
TABLES = {
    check.__name__: getattr(message, field)[0]
    for message in BETWEEN_WORKERS
    for field, check in type(message).checks.items()
    if check.__name__ in ROWS
}
"""Name of a table -> a valid row of it."""

BAD_KEYS: dict[str, list[Any]] = {
    "step": ["1", 1.0, [], b"x"],
    "rank": [-1, True, MAX_RANKS, "0", None],
    "phase": ["writing", "committed", "", None, []],
    "outcome": ["begun", "durable", None, []],
    "error": [e for e in BAD_ERRORS if e != {}],
    "missing": [[-1], ["1"], [0] * 65, None],
    "known": [None, [1], [[1]], [[1, "writing"]], [["1", "begun"]], [[1, "begun"]] * 1025],
    "request": ["x", bytearray(1), bytes((2 << 20) + 1), None],
    "result": [[], None],
    "report": BAD_REPORTS,
    "consent": [0, 1, None],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in BAD_VALUES.items() for v in values])
def test_check_refuses(name: str, value: Any) -> None:
    assert CHECKS[name](value) is False


@pytest.mark.parametrize("name", TABLES)
def test_table_with_a_row_that_is_none_is_refused(name: str) -> None:
    row, fits = TABLES[name], CHECKS[name]
    assert fits([row]) and fits([]) and not fits([row] * 1025)
    for value in (None, row, [None], [[]], "x", 3):
        assert fits(value) is False
    for key in ROWS[name]:
        assert fits([{k: v for k, v in row.items() if k != key}]) is False, f"without {key}"
    for key in row:
        for value in BAD_KEYS.get(key, [None, {}, [], b"x"]):
            if not (name == "outcome_rows" and key == "error" and value == {}):
                assert fits([{**row, key: value}]) is False, f"{key}: {value!r}"


def test_every_check_has_its_refusals() -> None:
    assert {*BAD_VALUES, *TABLES} == set(CHECKS)


def test_unknown_fields_are_dropped_unless_they_are_required() -> None:
    body = {**_body(messages.Ok(id=1)), "colour": "red"}
    assert codec.decode([HEADER, packed(body)], KNOWN) == messages.Ok(id=1)
    assert codec.decode([HEADER, packed({**body, "must": ["id"]})], KNOWN) == messages.Ok(id=1)
    with pytest.raises(ProtocolError, match="colour"):
        codec.decode([HEADER, packed({**body, "must": ["colour"]})], KNOWN)


@pytest.mark.parametrize("must", [7, "id", {"id": 1}, [{}], [["id"]], [None], [{"a": [1]}]])
def test_must_of_another_type_is_refused(must: Any) -> None:
    with pytest.raises(ProtocolError):
        codec.decode([HEADER, packed({"m": "ok", "id": 1, "must": must})], KNOWN)


BAD_FRAMES: dict[str, list[bytes]] = {
    "none": [],
    "one": [HEADER],
    "three": [HEADER, packed({"m": "ok", "id": 1}), b""],
    "short header": [HEADER[:5], packed({"m": "ok", "id": 1})],
    "long header": [HEADER + b"\0", packed({"m": "ok", "id": 1})],
    "another magic": [b"ACKQ" + HEADER[4:], packed({"m": "ok", "id": 1})],
    "empty body": [HEADER, b""],
    "no map": [HEADER, packed([1])],
    "keys of bytes": [HEADER, packed({b"m": "ok", "id": 1})],
    "keys of numbers": [HEADER, b"\x81\x01\x01"],
    "two bodies": [HEADER, packed({"m": "ok", "id": 1}) * 2],
    "no name": [HEADER, packed({"id": 1})],
    "unknown name": [HEADER, packed({"m": "reboot", "id": 1})],
    "name of another type": [HEADER, packed({"m": ["ok"], "id": 1})],
    "deep body": [HEADER, packed({"m": "ok", "id": 1, "x": [[[[[[[[[[1]]]]]]]]]]})],
    "depth beyond msgpack's": [HEADER, b"\x81\xa1x" + b"\x91" * 5000 + b"\x01"],
    "length that is not there": [HEADER, b"\xdf\xff\xff\xff\xff"],
    "text that is no UTF-8": [HEADER, b"\x81\xa1m\xa2\xff\xfe"],
    "body beyond the limit": [HEADER, bytes(codec.MAX_FRAME_NBYTES + 1)],
}


@pytest.mark.parametrize("frames", BAD_FRAMES.values(), ids=BAD_FRAMES)
def test_frames_that_are_no_message_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        codec.decode(frames, KNOWN)
    assert codec.request_id(frames) in (0, 1)


def test_message_of_the_other_direction_is_refused() -> None:
    for message in MESSAGES:
        with pytest.raises(ProtocolError, match="expected"):
            codec.decode(codec.encode(message), REPLIES if message.name in REQUESTS else REQUESTS)


def test_another_version_is_named() -> None:
    with pytest.raises(ProtocolVersionError, match=f"version {messages.PROTOCOL_VERSION + 1}") as caught:
        codec.decode([b"ACKP" + (messages.PROTOCOL_VERSION + 1).to_bytes(2, "little"), b"anything at all"], KNOWN)
    assert (caught.value.ours, caught.value.theirs) == (messages.PROTOCOL_VERSION, messages.PROTOCOL_VERSION + 1)


def test_message_too_large_for_any_peer_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="limit"):
        codec.encode(messages.StatusReport(id=1, report={"x": "y" * codec.MAX_FRAME_NBYTES}))


@pytest.mark.parametrize("value", [object(), 1 << 70, "\ud800"])
def test_message_that_msgpack_cannot_hold_is_not_sent(value: Any) -> None:
    with pytest.raises(ProtocolError, match="packed"):
        codec.encode(messages.StatusReport(id=1, report={"x": value}))


def test_the_longest_tables_fit_into_a_frame() -> None:
    codec.encode(messages.Heartbeat(id=1, saves=(SAVE_ID,) * messages.MAX_TABLE))


def test_damaged_and_altered_messages_are_refused_or_valid(rng: random.Random) -> None:
    for number in range(10_000):
        frames = codec.encode(rng.choice(MESSAGES))
        if number % 3 == 0:
            frames = [HEADER, packed(altered(msgpack.unpackb(frames[1]), rng))]
        else:
            at = number % 2
            frames[at] = damaged(frames[at], rng)
        try:
            found = codec.decode(frames, KNOWN)
        except (ProtocolError, ProtocolVersionError):
            codec.request_id(frames)
            continue
        if isinstance(found, messages.Refused):
            from_wire(found.error)
        again = codec.decode(codec.encode(found), KNOWN)
        assert repr(_body(again)) == repr(_body(found))  # NaN equals nothing
