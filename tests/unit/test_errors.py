"""The exception tree: codes, facts, and the ways across a process boundary."""

from __future__ import annotations

import pathlib
import pickle
import re

import msgpack
import pytest

from asyncckpt import errors
from asyncckpt.errors import ERRORS_BY_CODE, AsyncCkptError, from_wire, to_wire

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
CLASSES = sorted(
    (c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, AsyncCkptError)),
    key=lambda c: c.__name__,
)
FACTS = {
    "keys": ["a", "b"],
    "errors": [ValueError("x")],
    "rank": 3,
    "offset": 4096,
    "saved": (2, 3),
    "missing_ranks": [1, 2],
    "save_ids": [],
    "timeout_s": 0.5,
    "value": True,
}


def _example(cls: type[AsyncCkptError]) -> AsyncCkptError:
    return cls("what happened; what to do", **{name: FACTS.get(name, f"the {name}") for name in cls.fields})


def test_every_class_has_a_code_of_its_own() -> None:
    assert {c.wire_code: c for c in CLASSES} == ERRORS_BY_CODE
    assert len(ERRORS_BY_CODE) == len(CLASSES)


@pytest.mark.parametrize("cls", CLASSES)
def test_error_crosses_the_wire_as_its_class(cls: type[AsyncCkptError]) -> None:
    error = _example(cls)
    found = from_wire(msgpack.unpackb(msgpack.packb(to_wire(error)), use_list=False))
    assert type(found) is cls
    assert str(found) == str(error)
    for name in cls.fields:
        sent = getattr(error, name)
        wanted = [v if isinstance(v, (str, int)) else str(v) for v in sent] if isinstance(sent, (list, tuple)) else sent
        assert getattr(found, name) == wanted and type(getattr(found, name)) is type(wanted)


@pytest.mark.parametrize("cls", CLASSES)
def test_error_survives_pickle_with_its_facts(cls: type[AsyncCkptError]) -> None:
    error = _example(cls)
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is cls
    assert (str(found), found.args) == (str(error), error.args)
    assert {n: repr(v) for n, v in found.facts().items()} == {n: repr(v) for n, v in error.facts().items()}


@pytest.mark.parametrize("cls", [c for c in CLASSES if c is not AsyncCkptError])
def test_error_is_a_fitting_builtin_too(cls: type[AsyncCkptError]) -> None:
    builtin = [b for b in cls.__mro__ if b.__module__ == "builtins" and b not in (Exception, BaseException, object)]
    assert builtin
    assert cls.__doc__


@pytest.mark.parametrize("cls", [c for c in CLASSES if c is not AsyncCkptError])
def test_tree_in_the_docstring_shows_the_class(cls: type[AsyncCkptError]) -> None:
    line = re.search(rf"^ .*\+-- {cls.__name__} +(?:\((\w+)\))?.*$", errors.__doc__ or "", re.MULTILINE)
    assert line, f"{cls.__name__} is not drawn"
    if line[1]:
        assert line[1] in [b.__name__ for b in cls.__bases__]
    else:
        assert cls.__bases__[0] is not AsyncCkptError


def test_unset_facts_are_none_and_unknown_ones_refused() -> None:
    error = errors.CorruptCheckpointError("x", file="f")
    assert (error.file, error.offset) == ("f", None)
    assert error.facts() == {"file": "f"}
    with pytest.raises(TypeError, match="colour"):
        errors.CorruptCheckpointError("x", colour="red")


def test_foreign_error_becomes_the_root_with_its_type_in_the_text() -> None:
    found = from_wire(to_wire(ZeroDivisionError("division by zero")))
    assert type(found) is AsyncCkptError
    assert str(found) == "ZeroDivisionError: division by zero"


def test_text_that_is_no_utf8_or_too_long_can_still_be_packed() -> None:
    error = errors.SaveFailedError("\udcff" + "x" * 100_000, path=pathlib.Path("/a/\udcff"), rank=1 << 70)
    packed = msgpack.packb(to_wire(error))
    assert len(packed) < 20_000
    assert from_wire(msgpack.unpackb(packed)).path == "/a/\\udcff"


@pytest.mark.parametrize("keys", [list(range(100_000)), ["k" * 3000] * 50, [["nested"] * 500, b"x", None]])
def test_long_list_is_cut_and_its_items_are_plain_when_it_travels(keys: list[object]) -> None:
    packed = msgpack.packb(to_wire(errors.MissingKeysError("x", keys=keys)))
    assert len(packed) < 20_000
    found = from_wire(msgpack.unpackb(packed, use_list=False)).keys
    assert isinstance(found, list) and 0 < len(found) <= len(keys)
    assert found == [k if isinstance(k, (int, str)) else str(k)[:4000] for k in keys][: len(found)]


@pytest.mark.parametrize(
    "wire",
    [
        {},
        {"code": None, "text": None, "fields": None},
        {"code": 7, "text": b"x", "fields": "abc"},
        {"code": "corrupt", "text": "t", "fields": [1, 2]},
        {"code": "corrupt", "text": "t", "fields": {1: 2, "file": "f", "unheard": 1}},
        {"code": "of a newer version", "text": "t", "fields": {"x": 1}},
    ],
)
def test_any_map_becomes_an_error(wire: dict[str, object]) -> None:
    assert isinstance(from_wire(wire), AsyncCkptError)


def test_troubleshooting_has_one_row_for_each_error_class() -> None:
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| [^|]+ \|$", (REPOSITORY / "docs/troubleshooting.md").read_text(), re.M)
    assert sorted(rows) == [cls.__name__ for cls in CLASSES]
