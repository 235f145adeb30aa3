"""What `diff` finds between two checkpoints of any kinds: values, shapes, bits, and values that one of them opens."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from conversions import Workdir

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.state_tree import Node
from asyncckpt.interop import diff
from asyncckpt.interop.diff import compare, equal_to_containers, is_same_value
from asyncckpt.interop.outline import Outline
from asyncckpt.interop.sources.unread_leaves import UnreadLeaf
from asyncckpt.state_dict.flatten import HOIST_NBYTES

pytest.importorskip("numpy")

MIXED: tuple[Any, ...] = (1, {2, 30, 400}, ["a", (None, {True})], {"k": {5}, 7: 1.5})
LONG = random.Random(0).randbytes(HOIST_NBYTES + 77)


def differences(work: Workdir, first: str = "a", second: str = "b") -> list[Any]:
    return list(compare(str(work / first), str(work / second)).differences)


def test_what_differs_is_named_with_its_largest_difference(work: Workdir) -> None:
    nan = float("nan")
    first = {"same": torch.ones(3), "v": torch.arange(4.0), "d": torch.ones(2), "s": torch.ones(2), "n": 1, "only": 1}
    second = {"same": torch.ones(3), "v": torch.tensor([0.0, 1.0, 2.5, 3.0]), "d": torch.ones(2).half()}
    second |= {"s": torch.ones(3), "n": 2, "more": torch.ones(1), "z": torch.tensor([0.0])}
    work.ours(first | {"z": torch.tensor([-0.0]), "nans": torch.tensor([nan])})
    work.torch(second | {"nans": torch.tensor([nan])}, "b")
    found = compare(str(work / "a"), str(work / "b"))
    assert {(d.fqn, d.what, d.max_abs_difference) for d in found.differences} == {
        ("v", "value", 0.5),
        ("d", "dtype", 0.0),
        ("s", "shape", None),
        ("n", "value", 1.0),
        ("only", "only in A", None),
        ("more", "only in B", None),
        ("z", "bits", 0.0),
    }
    assert found.leaves == 9


def test_nan_on_one_side_is_a_difference(work: Workdir) -> None:
    work.torch({"x": torch.tensor([float("nan"), 1.0])})
    work.torch({"x": torch.tensor([2.0, 1.0])}, "b")
    (found,) = differences(work)
    assert found.fqn == "x" and found.max_abs_difference != found.max_abs_difference


def test_differences_of_long_bytes_are_told(work: Workdir) -> None:
    changed = bytearray(LONG)
    changed[40_000] ^= 1
    work.ours({"a": LONG, "b": LONG, "c": LONG, "d": LONG})
    tensor = torch.frombuffer(bytearray(LONG), dtype=torch.uint8)
    work.torch({"a": bytes(changed), "b": LONG[:-1], "c": tensor, "d": "text"}, "b")
    n = len(LONG)
    assert [(d.fqn, d.what, d.a, d.b) for d in differences(work)] == [
        ("a", "value", f"bytes[{n}]", f"bytes[{n}]"),
        ("b", "value", f"bytes[{n}]", f"bytes[{n - 1}]"),
        ("c", "kind", f"bytes[{n}]", f"uint8[{n}]"),
        ("d", "kind", f"bytes[{n}]", "'text'"),
    ]


# ---- values that are one leaf in one kind of checkpoint, and opened to several in another ---------------------------


@pytest.mark.parametrize("to", ["dcp", "torch", "asyncckpt"])
def test_a_tuple_that_holds_a_set_is_converted_from_a_save_through_the_storage_writer(to: str, work: Workdir) -> None:
    work.dcp({"t": MIXED, "deep": {"t": (MIXED, 2)}, "x": torch.ones(3)})
    report = work.convert(to)
    found = work.load()
    assert found["t"] == MIXED and found["deep"]["t"] == (MIXED, 2) and report.objects == 2
    work.convert(to, "b", "c")
    assert not differences(work) and not differences(work, "c", "a")


def test_a_value_that_became_another_is_found_when_opened(work: Workdir, monkeypatch: pytest.MonkeyPatch) -> None:
    work.dcp({"t": MIXED, "x": torch.ones(3)})
    work.convert("dcp")
    work.dcp({"t": (1, {2, 30}, *MIXED[2:]), "x": torch.ones(3)}, "c")
    assert {"t", "t.1"} <= {d.fqn for d in differences(work, "b", "c")}
    monkeypatch.setattr(diff, "is_same_value", lambda a, b: False)
    with pytest.raises(CorruptCheckpointError, match="in only one of source and target"):
        work.convert("dcp", target="d")


def test_a_name_that_both_sides_have_is_compared_although_the_other_side_opens_a_value_to_it(work: Workdir) -> None:
    work.dcp({"t": (1, {2}), "t.0": 5, "x": torch.ones(3)})
    work.torch({"t": (1, {2}), "x": torch.ones(3)}, "b")
    assert [(d.fqn, d.what) for d in differences(work)] == [("t.0", "value")]


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
    assert equal_to_containers(opened, closed) == equal_to_containers(closed, opened) == alike
