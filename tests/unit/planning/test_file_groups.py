"""planning.file_groups: tensors of one role share files, so that frozen ones lie apart from those that are trained."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.basics.limits import MAX_PARTS
from asyncckpt.format.layout import BoxSpec, Layout, build_layout
from asyncckpt.planning.file_groups import MAX_FILE_NBYTES, MAX_ROLES, MIN_FILE_NBYTES, group_by_role, grouped_layout

MIB = 1 << 20


def named(boxes: Sequence[tuple[str, int]], groups: Sequence[Sequence[int]]) -> list[list[str]]:
    return [[boxes[n][0] for n in group] for group in groups]


def test_tensors_of_one_role_share_files_and_small_roles_share_one() -> None:
    boxes = []
    for n in range(3):
        boxes += [(f"layers.{n}.q.weight", MIB), (f"layers.{n}.norm", 1024), (f"layers.{n}.q.lora", 2048)]
    boxes.append(("head.lora", 2048))
    assert named(boxes, group_by_role(boxes)) == [
        ["layers.0.norm", "layers.1.norm", "layers.2.norm", "head.lora"],
        ["layers.0.q.weight", "layers.1.q.weight", "layers.2.q.weight"],
        ["layers.0.q.lora", "layers.1.q.lora", "layers.2.q.lora"],
    ]


def test_tensors_of_one_name_and_other_sizes_are_of_other_roles() -> None:
    boxes = [("t0", MIB), ("t1", 2 * MIB), ("t2", MIB)]
    assert named(boxes, group_by_role(boxes)) == [["t0", "t2"], ["t1"]]


def test_a_role_is_cut_in_the_order_of_the_state_dict() -> None:
    boxes = [(f"layers.{n}.w", 6 * MIB) for n in range(7)]
    assert [len(group) for group in group_by_role(boxes)] == [2, 2, 2, 1]
    assert list(itertools.chain(*group_by_role(boxes))) == list(range(7))


def test_files_per_rank_is_a_lower_bound() -> None:
    boxes = [(f"layers.{n}.w", MIB) for n in range(8)]
    assert [len(group) for group in group_by_role(boxes, 4)] == [2, 2, 2, 2]
    assert len(group_by_role(boxes, 100)) == 8


def test_there_are_not_many_files_however_large_the_state_is() -> None:
    boxes = [(f"layers.{n}.w", 100 * MIB) for n in range(600)]
    assert len(group_by_role(boxes)) < 80
    larger = [(f"layers.{n}.w", 100 * MIB) for n in range(2000)]
    assert max(sum(larger[n][1] for n in group) for group in group_by_role(larger)) <= MAX_FILE_NBYTES


@pytest.mark.parametrize("sizes", ["equal", "similar"])
def test_of_too_many_roles_those_of_one_size_or_of_similar_ones_share_files(sizes: str) -> None:
    boxes = [(f"part_{chr(97 + n // 26)}{chr(97 + n % 26)}", 100_000 + n * (sizes == "similar")) for n in range(300)]
    assert len(boxes) > MAX_ROLES
    groups = group_by_role(boxes)
    assert len(groups) == 2 and list(itertools.chain(*groups)) == list(range(300))


def test_of_too_many_roles_those_below_64_kib_share_one_file() -> None:
    boxes = [(f"part_{chr(97 + n // 26)}{chr(97 + n % 26)}", 100_000 if n % 100 == 0 else 8192) for n in range(300)]
    small, *others = group_by_role(boxes)
    assert len(small) == 297 and [boxes[n][1] for (n,) in others] == [100_000] * 3
    assert len(group_by_role(boxes[:MAX_ROLES])) == MAX_ROLES


BOXES = st.lists(
    st.tuples(
        st.sampled_from([f"{role}.{n}" for role in "abc" for n in range(9)]),
        st.sampled_from([0, 1, 4096, 70_000, MIB, 20 * MIB, 3 << 30]),
    ),
    max_size=40,
)


@given(BOXES, st.integers(1, 20))
def test_each_box_is_in_one_group_and_no_group_is_larger_than_needed(boxes: list[tuple[str, int]], files: int) -> None:
    groups = group_by_role(boxes, files)
    assert sorted(itertools.chain(*groups)) == list(range(len(boxes))) and all(groups)
    total = sum(nbytes for _, nbytes in boxes)
    for group in groups:
        nbytes = sum(boxes[n][1] for n in group)
        assert len(group) == 1 or nbytes <= min(max(MIN_FILE_NBYTES, total / 64 + 1), MAX_FILE_NBYTES)


# ---- layouts --------------------------------------------------------------------------------------------------------


def spec(fqn: str, nbytes: int, first: int = 0) -> BoxSpec:
    return BoxSpec(fqn=fqn, dtype="uint8", global_shape=(first + nbytes,), offsets=(first,), sizes=(nbytes,))


def build(specs: Sequence[BoxSpec], header_unit: int) -> Layout:
    return build_layout(specs, header_unit=header_unit)


def test_the_layout_has_each_chunk_in_the_file_of_its_group() -> None:
    specs = [spec("a.0", MIB), spec("b.0", 70_000), spec("a.1", MIB), spec("tiny", 3), spec("b.0", 70_000, 70_000)]
    placed = grouped_layout(specs, build, 1)
    assert placed is not None
    assert [chunk.part for chunk in placed.chunks] == [1, 2, 1, 0, 3], "a file has one box of an FQN at most"
    for chunk, one in zip(placed.chunks, specs, strict=True):
        part = placed.parts[chunk.part]
        assert (chunk.nbytes, chunk.sizes, chunk.offsets) == (one.nbytes, one.sizes, one.offsets)
        assert len(part.header) <= chunk.offset_bytes and chunk.offset_bytes + chunk.nbytes <= part.nbytes
        assert one.fqn.encode() in part.header
    assert [len(part.header) % 4096 for part in placed.parts][1] == 0
    assert all(len(part.header) % 64 == 0 for part in placed.parts) and len(placed.parts[0].header) < 512


def test_there_is_no_such_layout_where_it_would_take_too_many_files() -> None:
    def one_each(specs: Sequence[BoxSpec], header_unit: int) -> Layout:
        return build_layout(specs, n_parts=len(specs), header_unit=header_unit)

    specs = [spec(f"t{n}", 100_000) for n in range(MAX_PARTS + 1)]
    assert grouped_layout(specs, one_each, 1) is None
    assert grouped_layout([], build, 1) == Layout(parts=(), chunks=())
