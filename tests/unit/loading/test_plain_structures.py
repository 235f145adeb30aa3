"""Structures of plain tensors are checked in columns: they come out as one by one, wrong ones are refused alike."""

from __future__ import annotations

import math
import random
from typing import Any

import msgpack
import pytest
from mutations import altered, packed

from asyncckpt.errors import AsyncCkptError, CorruptCheckpointError
from asyncckpt.format import state_tree, structure
from asyncckpt.format.structure import MAX_INT, decode_structure


def document(n: int = 6) -> dict[str, Any]:
    tensors: list[Any] = [[f"t{k}", "float32", [4, 2], [[0, 64 + 32 * k, 32]]] for k in range(n)]
    items = [member for k in range(n) for member in (f"t{k}", ["T", k])]
    return {"structure": 1, "parts": [64 + 32 * n], "tensors": tensors, "n_objects": 0, "tree": ["d", items]}


def decoded(raw: dict[str, Any]) -> Any:
    return decode_structure(bytes(msgpack.packb(raw)))


def one_by_one(raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patched:
        patched.setattr(structure, "_plain_tensors", lambda raw, parts: None)
        return decoded(raw)


WRONG: dict[str, tuple[tuple[Any, ...], Any]] = {
    "a dtype": (("tensors", 2, 1), "float33"),
    "a name": (("tensors", 2, 0), 7),
    "a name twice": (("tensors", 2, 0), "t1"),
    "a size that is no number": (("tensors", 2, 2), [True, 8]),
    "sizes that only look alike": (("tensors", 2, 2), [4.0, 2]),
    "a negative size": (("tensors", 2, 2), [-4, -2]),
    "a size beyond all": (("tensors", 2, 2), [MAX_INT, MAX_INT]),
    "a shape that is none": (("tensors", 2, 2), {"4": 2}),
    "too many dimensions": (("tensors", 2, 2), [1] * 65),
    "a length": (("tensors", 2, 3, 0, 2), 31),
    "a length of minus one": (("tensors", 2, 3, 0, 2), -1),
    "a length that is no number": (("tensors", 2, 3, 0, 2), 32.0),
    "a negative offset": (("tensors", 2, 3, 0, 1), -32),
    "an offset that is no number": (("tensors", 2, 3, 0, 1), None),
    "bytes of another": (("tensors", 2, 3, 0, 1), 65),
    "bytes behind the part": (("tensors", 2, 3, 0, 1), 64 + 32 * 6),
    "another part": (("tensors", 2, 3, 0, 0), 1),
    "a part below all": (("tensors", 2, 3, 0, 0), -1),
    "a part that is true": (("tensors", 2, 3, 0, 0), False),
    "a chunk of four": (("tensors", 2, 3, 0), [0, 64, 32, 0]),
    "a tensor of three": (("tensors", 2), ["t2", "float32", [4, 2]]),
    "no tensor": (("tensors", 2), None),
    "a key twice": (("tree", 1, 4), "t1"),
    "a number out of range": (("tree", 1, 5, 1), 6),
    "a number below all": (("tree", 1, 5, 1), -1),
    "a number that is true": (("tree", 1, 5, 1), True),
    "a key that is none": (("tree", 1, 4), 1.5),
    "a key that is too long": (("tree", 1, 4), "k" * 4097),
    "a node whose kind is a map": (("tree", 1, 5, 0), {}),
    "a node whose kind holds a map": (("tree", 1, 5, 0), [{}]),
    "a node of three": (("tree", 1, 5), ["T", 2, 2]),
}


def changed(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    raw = document()
    holder: Any = raw
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return raw


@pytest.mark.parametrize("what", WRONG)
def test_one_wrong_thing_among_plain_tensors_is_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = changed(*WRONG[what])
    with pytest.raises(CorruptCheckpointError) as found:
        decoded(raw)
    with pytest.raises(CorruptCheckpointError) as expected:
        one_by_one(raw, monkeypatch)
    assert found.value.message == expected.value.message


def test_altered_documents_end_as_one_by_one(monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    def end(raw: bytes) -> Any:
        try:
            return decode_structure(raw)
        except AsyncCkptError as error:
            return type(error), error.message

    for _ in range(400):
        raw: Any = mixed(rng)
        for _ in range(rng.choice((0, 1, 1, 1, 2))):
            raw = altered(raw, rng)
        data = packed(raw)
        found = end(data)
        with monkeypatch.context() as patched:
            patched.setattr(structure, "_plain_tensors", lambda raw, parts: None)
            patched.setattr(state_tree, "_are_tensors", lambda keys, nodes, n_tensors: False)
            expected = end(data)
        assert repr(found) == repr(expected)  # True is 1, but does not look like it


def mixed(rng: random.Random) -> dict[str, Any]:
    """Tensors of all kinds in several parts, a few with gaps, in no order; nested, some deeper than allowed."""
    ends = [64] * rng.choice((1, 1, 2, 3))
    tensors: list[Any] = []
    for n in range(rng.randrange(7)):
        part, (dtype, itemsize) = rng.randrange(len(ends)), rng.choice([("float32", 4), ("bool", 1), ("complex64", 8)])
        shape = rng.choice(([], [0], [4, 2], [8], [0, 3], [2, 2, 2]))
        nbytes = math.prod(shape) * itemsize
        box = [[0] * len(shape), shape] if rng.random() < 0.05 else []
        tensors.append([f"t{n}", dtype, shape, [[part, ends[part], nbytes, *box]]])
        ends[part] += nbytes + rng.choice((0, 0, 5))
    if rng.random() < 0.5:
        rng.shuffle(tensors)
    items = [member for n in range(len(tensors)) for member in (f"k{n}", ["T", n])]
    node: list[Any] = ["d", items] if rng.random() < 0.8 else ["o", items, 0]
    for _ in range(rng.choice((0, 1, 62, 63, 64, 65)) if rng.random() < 0.2 else 0):
        node = ["d", ["inner", node]]
    return {"structure": 1, "parts": ends, "tensors": tensors, "n_objects": 1, "tree": node}


def test_plain_tensors_come_out_as_one_by_one(monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    raw = document(40)
    rng.shuffle(raw["tensors"])
    for entry in rng.sample(raw["tensors"], 5):
        entry[2] = rng.choice([[8], [2, 2, 2]])
    found = decoded(raw)
    assert found == one_by_one(raw, monkeypatch)
    assert {type(entry).__name__ for entry in found.tensors} == {"TensorEntry"}
    assert {type(chunk).__name__ for entry in found.tensors for chunk in entry.chunks} == {"Chunk"}


def test_tensors_of_several_parts_and_without_elements_come_out_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = document(4)
    raw["parts"] = [128, 128]
    for n, (part, offset, shape) in enumerate([(1, 64, [8]), (0, 64, [8]), (1, 64, [0, 3]), (0, 96, [])]):
        raw["tensors"][n][2:] = [shape, [[part, offset, 32 if shape == [8] else 4 if not shape else 0]]]
    assert decoded(raw) == one_by_one(raw, monkeypatch)
