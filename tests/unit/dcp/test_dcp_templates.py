"""`.metadata` that is made from the one before: the same bytes as if it were made anew."""

from __future__ import annotations

import zlib
from typing import Any

import msgpack
import pytest

from asyncckpt.format import dcp
from asyncckpt.format.dcp import MetadataTemplates, metadata_of
from asyncckpt.format.names import SaveId

FIRST, SECOND = SaveId(1, 2, "a" * 12), SaveId(30, 4, "0123456789ab")


def rank(name: str = "w", item_nbytes: int = 100) -> tuple[bytes, bytes]:
    tree = ("d", (name, ("T", 0), "n", ("O", 0)))
    tensors = [(name, "float32", (4, 8), [(0, 192, 128)])]
    structure = msgpack.packb({"tree": tree, "tensors": tensors, "n_objects": 1, "parts": [400]})
    return structure, msgpack.packb([("n", ("n",), 0, item_nbytes)])


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[SaveId]:
    """The saves whose metadata were made, not taken from a template."""
    found: list[SaveId] = []

    def counted(save_id: SaveId, ranks: Any) -> bytes:
        found.append(save_id)
        return metadata_of(save_id, ranks)

    monkeypatch.setattr(dcp, "metadata_of", counted)
    return found


def test_a_second_save_of_a_structure_takes_the_first_one_s_metadata(made: list[SaveId]) -> None:
    templates = MetadataTemplates()
    for save_id in (FIRST, SECOND, FIRST):
        assert templates.metadata_of(save_id, [rank(), rank("v")]) == metadata_of(save_id, [rank(), rank("v")])
    assert made == [FIRST]


@pytest.mark.parametrize("other", [[rank("x")], [rank(item_nbytes=101)], [rank(), rank()]])
def test_another_structure_or_other_items_are_made_anew(other: list[tuple[bytes, bytes]], made: list[SaveId]) -> None:
    templates = MetadataTemplates()
    templates.metadata_of(FIRST, [rank()])
    assert templates.metadata_of(SECOND, other) == metadata_of(SECOND, other)
    assert made == [FIRST, SECOND]


@pytest.mark.parametrize("named", [FIRST, SECOND])
def test_a_tensor_that_is_called_as_a_save_is_keeps_its_name(named: SaveId, made: list[SaveId]) -> None:
    templates, ranks = MetadataTemplates(), [rank(f"x{named}")]
    for save_id in (FIRST, SECOND):
        assert templates.metadata_of(save_id, ranks) == metadata_of(save_id, ranks)


def test_templates_are_bounded_and_the_oldest_goes(made: list[SaveId]) -> None:
    nbytes = len(zlib.compress(metadata_of(FIRST, [rank("a")]), 1))
    templates = MetadataTemplates(2 * nbytes + 20)
    for name in "abac":  # b goes
        templates.metadata_of(FIRST, [rank(name)])
    made.clear()
    for name in "acb":
        templates.metadata_of(SECOND, [rank(name)])
    assert len(made) == 1
    MetadataTemplates(1).metadata_of(FIRST, [rank()])
