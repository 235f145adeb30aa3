"""`.metadata` that is made from the one before: the same bytes as if it were made anew."""

from __future__ import annotations

import zlib

import msgpack
import pytest

from asyncckpt.format import dcp
from asyncckpt.format.dcp import MetadataTemplates, metadata_of
from asyncckpt.format.names import SaveId

Ranks = list[tuple[bytes, bytes]]
FIRST, SECOND = SaveId(1, 2, "a" * 12), SaveId(30, 4, "0123456789ab")


def rank(name: str = "w", item_nbytes: int = 100) -> tuple[bytes, bytes]:
    tree = ("d", (name, ("T", 0), "n", ("O", 0)))
    tensors = [(name, "float32", (4, 8), [(0, 192, 128)])]
    structure = msgpack.packb({"tree": tree, "tensors": tensors, "n_objects": 1, "parts": [400]})
    return structure, msgpack.packb([("n", ("n",), 0, item_nbytes)])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([rank(), rank("v")], [rank(), rank("v")]),
        ([rank()], [rank("x")]),
        ([rank()], [rank(item_nbytes=101)]),
        ([rank()], [rank(), rank()]),
        ([rank(f"x{FIRST}")], [rank(f"x{FIRST}")]),  # a tensor that is called as a save is keeps its name
        ([rank(f"x{SECOND}")], [rank(f"x{SECOND}")]),
    ],
)
@pytest.mark.parametrize("limit", [1, 1 << 20])
def test_metadata_of_a_later_save_are_as_if_made_anew(first: Ranks, second: Ranks, limit: int) -> None:
    templates = MetadataTemplates(limit)
    for save_id, ranks in ((FIRST, first), (SECOND, second), (FIRST, first)):
        assert templates.metadata_of(save_id, ranks) == metadata_of(save_id, ranks)


def test_templates_are_bounded_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Ranks] = []
    monkeypatch.setattr(dcp, "metadata_of", lambda save_id, ranks: made.append(ranks) or metadata_of(save_id, ranks))
    nbytes = len(zlib.compress(metadata_of(FIRST, [rank("a")]), 1))
    templates = MetadataTemplates(2 * nbytes + 20)
    for name in "abac":  # b goes
        templates.metadata_of(FIRST, [rank(name)])
    made.clear()
    for name in "acb":
        templates.metadata_of(SECOND, [rank(name)])
    assert made == [[rank("b")]]
