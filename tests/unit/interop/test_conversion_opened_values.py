"""Values that are one leaf in one kind of checkpoint, and opened to several in another."""

from __future__ import annotations

import pathlib
from typing import Any

import dcp_calls
import pytest
import torch
from in_process_writer import StorageWriter

import asyncckpt
from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.state_tree import Node
from asyncckpt.interop import diff
from asyncckpt.interop.diff import alike_when_opened, compare, is_same_value
from asyncckpt.interop.selection import Outline
from asyncckpt.interop.sources.unread_leaves import UnreadLeaf

MIXED: tuple[Any, ...] = (1, {2, 30, 400}, ["a", (None, {True})], {"k": {5}, 7: 1.5})


@pytest.mark.parametrize("to", ["dcp", "torch", "asyncckpt"])
def test_a_tuple_that_holds_a_set_is_converted_from_a_save_through_the_storage_writer(
    to: str, tmp_path: pathlib.Path
) -> None:
    dcp_calls.save({"t": MIXED, "deep": {"t": (MIXED, 2)}, "x": torch.ones(3)}, StorageWriter(tmp_path / "a"))
    report = asyncckpt.convert(tmp_path / "a", tmp_path / "b", to=to)
    found = asyncckpt.load(tmp_path / "b")
    assert found["t"] == MIXED and found["deep"]["t"] == (MIXED, 2) and report.objects == 2
    assert not compare(str(tmp_path / "a"), str(tmp_path / "b")).differences
    asyncckpt.convert(tmp_path / "b", tmp_path / "c", to=to)
    assert not compare(str(tmp_path / "c"), str(tmp_path / "a")).differences


def test_a_value_that_became_another_is_found_when_opened(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    dcp_calls.save({"t": MIXED, "x": torch.ones(3)}, StorageWriter(tmp_path / "a"))
    asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="dcp")
    dcp_calls.save({"t": (1, {2, 30}, *MIXED[2:]), "x": torch.ones(3)}, StorageWriter(tmp_path / "c"))
    names = {d.fqn for d in compare(str(tmp_path / "b"), str(tmp_path / "c")).differences}
    assert "t" in names and "t.1" in names

    monkeypatch.setattr(diff, "is_same_value", lambda a, b: False)
    with pytest.raises(CorruptCheckpointError, match="on one side only"):
        asyncckpt.convert(tmp_path / "a", tmp_path / "d", to="dcp")


def test_values_are_told_apart_that_are_equal_and_of_other_types() -> None:
    for one, other in ((1, True), (1, 1.0), (0.0, -0.0), ([1], {"$": "tuple", "v": [1]}), ([1, 2], [2, 1])):
        assert not is_same_value(one, other) and is_same_value(one, one)
    assert is_same_value({"$": "set", "v": [1, 2]}, {"$": "set", "v": [2, 1]})
    assert not is_same_value(UnreadLeaf("a.B"), UnreadLeaf("a.B"))


def outline(tree: Node, objects: list[Any]) -> Outline:
    """Return an outline without tensors."""
    return Outline(contents=None, tree=tree, objects=objects)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("container", "objects", "raw", "alike"),
    [
        (("t", (("O", 0), ("O", 1))), [1, "a"], {"$": "tuple", "v": [1, "a"]}, {"n", "n.0", "n.1"}),
        (("l", (("O", 0), ("l", ()))), [1], [1, []], {"n", "n.0"}),
        (("d", (3, ("O", 0))), [None], {"$": "dict", "v": [[3, None]]}, {"n", "n.3"}),
        (("o", ("k", ("O", 0)), None), [2], {"$": "dict", "v": [["k", 2]]}, {"n", "n.k"}),
        (("t", (("O", 0),)), [1], [1], set()),  # a list is no tuple
        (("d", ("3", ("O", 0))), [None], {"$": "dict", "v": [[3, None]]}, set()),  # a text is no number
        (("t", (("O", 0),)), [1], {"$": "tuple", "v": [1, []]}, set()),  # an empty list was lost
        (("t", (("O", 0),)), [UnreadLeaf("a.B")], {"$": "tuple", "v": [1]}, set()),
        (("t", (("O", 0), ("T", 0))), [1], {"$": "tuple", "v": [1]}, set()),  # a tensor is no value
        (("o", ("k", ("O", 0)), 0), [2], {"$": "dict", "v": [["k", 2]]}, set()),  # it has versions
    ],
)
def test_a_leaf_is_alike_what_it_was_opened_to(container: Node, objects: list[Any], raw: Any, alike: set[str]) -> None:
    opened = outline(("d", ("n", container)), objects)
    closed = outline(("d", ("n", ("O", 0))), [raw])
    assert alike_when_opened(opened, closed) == alike_when_opened(closed, opened) == alike


def test_a_name_that_both_sides_have_is_compared_although_the_other_side_opens_a_value_to_it(
    tmp_path: pathlib.Path,
) -> None:
    dcp_calls.save({"t": (1, {2}), "t.0": 5, "x": torch.ones(3)}, StorageWriter(tmp_path / "a"))
    torch.save({"t": (1, {2}), "x": torch.ones(3)}, tmp_path / "b")
    found = compare(str(tmp_path / "a"), str(tmp_path / "b")).differences
    assert [(d.fqn, d.what) for d in found] == [("t.0", "value")]
