"""Checks of message fields, one per type. A check accepts any value, returns whether it is valid, and never raises."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from asyncckpt.basics.limits import MAX_RANKS
from asyncckpt.basics.paths import MAX_PATH_BYTES
from asyncckpt.basics.storage_options import (
    MAX_NAME_CHARS,  # noqa: F401 - a limit of SPEC.md
    MAX_OPTIONS,  # noqa: F401
    MAX_VALUES_NBYTES,  # noqa: F401
    fits,
)
from asyncckpt.basics.urls import is_object_url
from asyncckpt.protocol.save_phases import PHASES

MAX_TEXT_CHARS = 200
MAX_TABLE = 1024
"""Maximum rows of a list in a message; a trainer has only a few saves pending."""

MAX_INT = (1 << 63) - 1
MAX_SECONDS = 1e9
MAX_UMASK = 0o777
MAX_PORT = 65535
TOKEN_NBYTES = 16
MAX_OUTCOMES = 24
"""Maximum outcomes in a message: the latest ones. A rank needs the outcome of the save that is
`max_in_flight` before its next one, which is at most 16 (`config.MAX_SLOTS`). The others are for saves that other ranks
skip meanwhile."""

MAX_MISSING = 64
"""Maximum ranks in one row of a Saves message, so that a full table fits into a frame."""

MAX_PIECE_NBYTES = 512 << 10
"""Maximum size of a piece in Share or Fetched: half a frame. Chosen, not measured."""

_SAVE_ID = re.compile(r"[0-9]{6}-[0-9]{8}-[0-9a-f]{12}\Z")
_HEX12 = re.compile(r"[0-9a-f]{12}\Z")
_HEX16 = re.compile(r"[0-9a-f]{16}\Z")
_CURVE_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}\Z")
_ADDRESS = re.compile(r"tcp://[^\s/]{1,180}:[0-9]{1,5}\Z")

Check = Callable[[Any], bool]


def uint(value: Any) -> bool:
    """An integer from 0 to 2**63 - 1; no bool."""
    return type(value) is int and 0 <= value <= MAX_INT


def rank(value: Any) -> bool:
    """A rank below `MAX_RANKS`."""
    return uint(value) and value < MAX_RANKS


def is_in_world(rank: int, world_size: int) -> bool:
    """Whether `rank` is one of `world_size` ranks, of which there are at most `MAX_RANKS`."""
    return 0 <= rank < world_size <= MAX_RANKS


def sint(value: Any) -> bool:
    """An integer from -2**63 + 1 to 2**63 - 1; no bool."""
    return type(value) is int and -MAX_INT <= value <= MAX_INT


def sint_or_none(value: Any) -> bool:
    """Whether `value` passes `sint` or is None."""
    return value is None or sint(value)


def _is_utf8(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def umask(value: Any) -> bool:
    """Permission bits."""
    return type(value) is int and 0 <= value <= MAX_UMASK


def save_id(value: Any) -> bool:
    """A save ID as text."""
    return isinstance(value, str) and _SAVE_ID.match(value) is not None


def save_id_or_none(value: Any) -> bool:
    """A save ID as text, or the empty text."""
    return value == "" or save_id(value)


def hex12(value: Any) -> bool:
    """12 hex digits: a run."""
    return type(value) is str and _HEX12.match(value) is not None


def hex12_or_none(value: Any) -> bool:
    """12 hex digits, or the empty text: no run."""
    return value == "" or hex12(value)


def hex16(value: Any) -> bool:
    """16 hex digits: a session or an instance."""
    return type(value) is str and _HEX16.match(value) is not None


def hex16_or_none(value: Any) -> bool:
    """16 hex digits, or the empty text: no session."""
    return value == "" or hex16(value)


def curve_key(value: Any) -> bool:
    """A CURVE key in Z85 (ZeroMQ RFC 32): 40 characters."""
    return type(value) is str and _CURVE_KEY.match(value) is not None


def curve_key_or_none(value: Any) -> bool:
    """A CURVE key, or the empty text."""
    return value == "" or curve_key(value)


def port(value: Any) -> bool:
    """A TCP port; 0: any."""
    return type(value) is int and 0 <= value <= MAX_PORT


def address(value: Any) -> bool:
    """`tcp://host:port`."""
    return type(value) is str and _ADDRESS.match(value) is not None


def path(value: Any) -> bool:
    """An absolute path that has a UTF-8 form, or the URL of an object store."""
    if type(value) is not str or "\0" in value or not _is_utf8(value):
        return False
    if not value.startswith("/") and not is_object_url(value):
        return False
    return len(value.encode()) <= MAX_PATH_BYTES


def path_or_none(value: Any) -> bool:
    """A path or URL as of `path`, or the empty text."""
    return value == "" or path(value)


def text(value: Any) -> bool:
    """A short text for people."""
    return type(value) is str and len(value) <= MAX_TEXT_CHARS and _is_utf8(value)


def seconds(value: Any) -> bool:
    """A duration."""
    return type(value) in (int, float) and 0 <= value < MAX_SECONDS


def timeout(value: Any) -> bool:
    """A duration that is not zero."""
    return seconds(value) and value > 0


COPY_PHASES = (WAITING, COPYING, DONE, FAILED) = ("waiting", "copying", "done", "failed")
"""Of the copy of a checkpoint to its mirror."""


def copy_phase(value: Any) -> bool:
    """One of `COPY_PHASES`."""
    return type(value) is str and value in COPY_PHASES


def token(value: Any) -> bool:
    """A slot's token."""
    return type(value) is bytes and len(value) == TOKEN_NBYTES


def piece(value: Any) -> bool:
    """At most `MAX_PIECE_NBYTES` bytes."""
    return type(value) is bytes and len(value) <= MAX_PIECE_NBYTES


def ranks(value: Any) -> bool:
    """A list of at most `MAX_TABLE` ranks."""
    return isinstance(value, (list, tuple)) and len(value) <= MAX_TABLE and all(map(uint, value))


def flag(value: Any) -> bool:
    """A bool."""
    return type(value) is bool


def mapping(value: Any) -> bool:
    """A map with text keys."""
    return isinstance(value, Mapping) and set(map(type, value)) <= {str}


def storage_options(value: Any) -> bool:
    """Options of object stores, within their limits."""
    return fits(value)


def error_or_none(value: Any) -> bool:
    """An error, or an empty map."""
    return mapping(value) and (not value or _error(value))


def figures(value: Any) -> bool:
    """A save's `report`."""
    return _report(value)


def save_ids(value: Any) -> bool:
    """A list of at most `MAX_TABLE` save IDs."""
    return isinstance(value, (list, tuple)) and len(value) <= MAX_TABLE and all(map(save_id, value))


def save_rows(value: Any) -> bool:
    """A list of at most `MAX_TABLE` maps with `save_id`, `phase`, and optionally `error`, `report` and `missing`."""
    return isinstance(value, (list, tuple)) and len(value) <= MAX_TABLE and all(map(_save_row, value))


def _save_row(value: Any) -> bool:
    if not mapping(value) or not save_id(value.get("save_id")):
        return False
    phase = value.get("phase")
    if type(phase) is not str or phase not in PHASES:
        return False
    missing = value.get("missing", ())
    if not ranks(missing) or len(missing) > MAX_MISSING:
        return False
    return ("error" not in value or _error(value["error"])) and ("report" not in value or _report(value["report"]))


def outcomes(value: Any) -> bool:
    """A list of at most `MAX_OUTCOMES` pairs of a sequence and a flag."""
    if not isinstance(value, (list, tuple)) or len(value) > MAX_OUTCOMES:
        return False
    if not {list, tuple}.issuperset(map(type, value)) or not {2}.issuperset(map(len, value)):
        return False
    sequences, meets = zip(*value, strict=True) if value else ((), ())
    return all(map(uint, sequences)) and {bool}.issuperset(map(type, meets))


def recall_rows(value: Any) -> bool:
    """A list of at most `MAX_TABLE` maps, each with the fields of `RECALL_ROW`."""
    return (
        isinstance(value, (list, tuple))
        and len(value) <= MAX_TABLE
        and all(map(mapping, value))
        and all(all(map(fits, [row.get(name) for row in value])) for name, fits in RECALL_ROW.items())
    )


RECALL_ROW: dict[str, Check] = {
    "save_id": save_id,
    "step": sint,
    "path": path,
    "rank": uint,
    "world_size": uint,
    "whole": flag,
    "committed": flag,
    "slot": uint,
    "fd": uint,
    "nbytes": uint,
    "token": token,
    "generation": uint,
    "inode": uint,
    "birth_ns": uint,
}
"""Keys of a row of Recalled."""


def _plain(value: Any) -> bool:
    return type(value) in (int, float, bool, str)


def _error(value: Any) -> bool:
    """The result of `asyncckpt.errors.to_wire`; `fields` may be absent."""
    if not mapping(value) or type(value.get("code")) is not str or type(value.get("text")) is not str:
        return False
    facts = value.get("fields", {})
    return mapping(facts) and all(
        all(map(_plain, fact)) if isinstance(fact, (list, tuple)) else _plain(fact) for fact in facts.values()
    )


def _report(value: Any) -> bool:
    """Plain values; `nbytes` must be a size and `seconds_...` durations, since readers compute with them."""
    return mapping(value) and all(
        uint(fact) if name == "nbytes" else seconds(fact) if name.startswith("seconds_") else _plain(fact)
        for name, fact in value.items()
    )
