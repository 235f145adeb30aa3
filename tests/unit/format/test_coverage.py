"""format.coverage: every element exactly once, against counting; and where a tensor is not covered."""

from __future__ import annotations

import itertools
import random
import struct
import time
from typing import Any

import msgpack
import pytest
import xxhash

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format import coverage
from asyncckpt.format.coverage import (
    LANE_NBYTES,
    BoxSums,
    Tally,
    coverage_fault,
    located_fault,
    missing_boxes,
    seed_of,
    tally_of,
    tensors_with_wrong_sums,
    uncovered,
)
from asyncckpt.format.names import SaveId
from asyncckpt.format.structure import Box

SEED = seed_of(SaveId(1, 0, "0123456789ab"))


def raw(*tensors: tuple[str, str, tuple[int, ...], list[Box | None]]) -> bytes:
    """Return as much of a structure as the proof looks at; a box None is the whole tensor."""
    found = [[f, d, s, [[0, 0, 0] if box is None else [0, 0, 0, *box] for box in boxes]] for f, d, s, boxes in tensors]
    return bytes(msgpack.packb({"tensors": found}))


def partition(rng: random.Random, offsets: tuple[int, ...], sizes: tuple[int, ...], depth: int) -> list[Box]:
    """Cut a box into boxes at random."""
    cuttable = [d for d, size in enumerate(sizes) if size > 1]
    if not cuttable or depth == 0:
        return [(offsets, sizes)]
    d = rng.choice(cuttable)
    cut = rng.randrange(1, sizes[d])
    low = (*sizes[:d], cut, *sizes[d + 1 :])
    high = (*sizes[:d], sizes[d] - cut, *sizes[d + 1 :])
    moved = (*offsets[:d], offsets[d] + cut, *offsets[d + 1 :])
    return partition(rng, offsets, low, depth - 1) + partition(rng, moved, high, depth - 1)


def random_boxes(rng: random.Random, shape: tuple[int, ...]) -> list[Box]:
    """Return boxes that a tensor is cut into, and now and then not quite."""
    boxes = partition(rng, (0,) * len(shape), shape, 3)
    change = rng.randrange(6)
    if change == 0:
        boxes.pop(rng.randrange(len(boxes)))
    elif change == 1:
        boxes.append(rng.choice(boxes))
    elif change == 2:  # one moved: a hole and an overlap of one volume
        n = rng.randrange(len(boxes))
        sizes = boxes[n][1]
        boxes[n] = tuple(rng.randrange(g - s + 1) for g, s in zip(shape, sizes, strict=True)), sizes
    elif change == 3 and len(shape) > 1 and shape[0] == shape[1]:  # one transposed
        n = rng.randrange(len(boxes))
        boxes[n] = tuple((v[1], v[0], *v[2:]) for v in boxes[n])  # type: ignore[assignment]
    rng.shuffle(boxes)
    return boxes


def elements(box: Box) -> list[tuple[int, ...]]:
    """Return a box's elements."""
    return list(itertools.product(*(range(o, o + s) for o, s in zip(*box, strict=True))))


def test_boxes_are_judged_and_add_up_as_counting_says(rng: random.Random) -> None:
    verdicts = []
    for n in range(1200):
        shape = tuple(rng.choice((1, 2, 4, 4, 5)) for _ in range(rng.randrange(1, 4)))
        if n % 3:
            boxes = random_boxes(rng, shape)
        else:
            starts = [tuple(rng.randrange(n) for n in shape) for _ in range(rng.randrange(1, 4))]
            boxes = [(o, tuple(rng.randrange(1, n - i + 1) for n, i in zip(shape, o, strict=True))) for o in starts]
        times = dict.fromkeys(itertools.product(*map(range, shape)), 0)
        for element in itertools.chain(*map(elements, boxes)):
            times[element] += 1
        verdicts.append(set(times.values()) == {1})
        assert (coverage_fault(shape, boxes) is None) == verdicts[-1]
        box_sums = BoxSums(SEED)
        total = box_sums.chunks(shape, [[0, 0, 0, *box] for box in boxes])
        assert (total == box_sums.whole(shape)) == verdicts[-1]
        missing = [element for box in missing_boxes(shape, boxes) for element in elements(box)]
        assert sorted(missing) == sorted(element for element, n in times.items() if n == 0)
    assert 200 < sum(verdicts) < 1000


@pytest.mark.parametrize(
    ("shape", "boxes", "sound"),
    [
        ((), [((), ())], True),
        ((), [], False),
        ((), [((), ()), ((), ())], False),
        ((0, 3), [], True),
        ((0, 3), [((0, 0), (0, 3))], True),
        ((0, 3), [((0, 0), (0, 3)), ((0, 1), (0, 2))], True),
        ((2,), [((0,), (0,)), ((0,), (2,))], True),
        ((2,), [], False),
    ],
)
def test_scalars_and_empty_tensors(shape: tuple[int, ...], boxes: list[Box], sound: bool) -> None:
    assert (coverage_fault(shape, boxes) is None) == sound


def stairs(n: int) -> list[Box]:
    """A row, a column, a row, a column ...: each cut leaves one box and all others."""
    found: list[Box] = []
    for i in range(n):
        found.append(((i, i), (1, n - i)))
        if i + 1 < n:
            found.append(((i + 1, i), (n - i - 1, 1)))
    return found


def test_cuts_inside_cuts_without_end_are_judged_all_the_same() -> None:
    for n in (5, 100, 400):
        boxes = stairs(n)
        assert coverage_fault((n, n), boxes) is None
        assert "stored" in str(coverage_fault((n, n), boxes[:-1]))
        assert "twice" in str(coverage_fault((n, n), [*boxes[:-1], ((0, 0), (1, 1))]))


@pytest.mark.parametrize("is_whole", [True, False])
def test_boxes_that_were_thought_up_to_be_compared_with_each_other_are_refused_at_once(is_whole: bool) -> None:
    n, side = 60_000, 250
    boxes = [((i, i % side, i // side), (10**6, 1, 1)) for i in range(n)]
    shape = (10**6, side, n // side) if is_whole else (2 * 10**6, side, n // side)
    started = time.process_time()
    assert coverage_fault(shape, boxes) is not None
    assert located_fault(shape, boxes, [0] * n) is not None
    assert coverage_fault((4000, 4000), stairs(4000)) is not None
    assert time.process_time() - started < 10


def test_meshes_of_any_kind_are_compared_with_nothing() -> None:
    for sides in ((4096,), (64, 64), (16, 16, 16), (2, 2048), (1, 10_000)):
        shape = tuple(3 * side for side in sides)
        boxes = [(tuple(3 * i for i in at), (3,) * len(sides)) for at in itertools.product(*map(range, sides))]
        random.Random(0).shuffle(boxes)
        assert coverage_fault(shape, boxes) is None
        assert "twice" in str(coverage_fault(shape, [*boxes, boxes[7]]))


def test_boxes_spread_over_ranks_are_judged_as_all_of_them_at_once(rng: random.Random) -> None:
    for _ in range(150):
        shapes = {f"t{n}": tuple(rng.randrange(1, 5) for _ in range(rng.randrange(1, 3))) for n in range(3)}
        found = {fqn: random_boxes(rng, shape) for fqn, shape in shapes.items()}
        ranks: list[dict[str, list[Box | None]]] = [{fqn: [] for fqn in shapes} for _ in range(3)]
        for fqn, boxes in found.items():
            for box in boxes:
                rng.choice(ranks)[fqn].append(box)
        structures = [raw(*((f, "int8", shapes[f], boxes) for f, boxes in mine.items())) for mine in ranks]
        expected = [fqn for fqn, boxes in found.items() if coverage_fault(shapes[fqn], boxes)]
        assert [fqn for fqn, _ in uncovered(structures)] == expected
        tallies = [tally_of(data, rank, SEED) for rank, data in enumerate(structures)]
        assert tensors_with_wrong_sums(tallies, structures, SEED) == set(expected)


TOP, BOTTOM = ((0, 0), (2, 3)), ((2, 0), (2, 3))


def test_only_what_is_doubtful_is_looked_at_box_by_box(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[set[str] | None] = []
    exact = coverage._uncovered
    monkeypatch.setattr(coverage, "_uncovered", lambda s, names: looked.append(names) or exact(s, names))
    good = [raw(("w", "int8", (4, 3), [box]), ("v", "int8", (2,), [])) for box in (TOP, BOTTOM)]
    whole = raw(("v", "int8", (2,), [None]))
    assert uncovered([*good, whole]) == [] and looked == []
    ((name, _),) = uncovered([*good, raw(("v", "int8", (2,), [((0,), (1,))]))])
    assert name == "v" and looked == [{"v"}]


@pytest.mark.parametrize("other", [0, 1])
def test_a_tensor_of_one_rank_is_proved_beside_it_and_refused_from_another(other: int) -> None:
    own = raw(("rng@rank0", "int8", (4,), [None]))
    assert tally_of(own, 0, SEED).sums == b"" and uncovered([own]) == []
    assert len(tally_of(own, 1, SEED).sums) == LANE_NBYTES
    torn = raw(("rng@rank0", "int8", (4,), [((0,), (2,))]))
    assert [name for name, _ in uncovered([own, torn] if other else [torn])] == ["rng@rank0"]


@pytest.mark.parametrize(
    "tally",
    [Tally(kinds=b"x" * 16, sums=b""), Tally(kinds=b"x" * 16, sums=b"\0" * LANE_NBYTES)],
)
def test_a_tally_that_is_not_of_its_structure_counts_for_nothing(tally: Tally) -> None:
    half = raw(("w", "int8", (4, 3), [TOP]))
    assert tensors_with_wrong_sums([tally], [half], SEED) is None
    assert [name for name, _ in uncovered([half], [tally], seed=SEED)] == ["w"]
    whole = raw(("w", "int8", (4, 3), [None]))
    assert uncovered([whole], [tally], seed=SEED) == []


def test_tallies_of_one_kind_and_different_lengths_count_for_nothing() -> None:
    data = raw(("w", "int8", (2,), [None]))
    good = tally_of(data, 0, SEED)
    assert tensors_with_wrong_sums([good, Tally(kinds=good.kinds, sums=good.sums * 2)], [data, data], SEED) is None


def test_a_hole_is_named_with_its_box_and_the_ranks_beside_it() -> None:
    rows: list[Box] = [((n, 0), (1, 3)) for n in range(5)]
    text = located_fault((5, 3), [rows[0], rows[1], rows[3], rows[4]], [0, 1, 3, 4], [2])
    assert text == (
        "12 of 15 elements are stored: [2:3,0:3] is missing (rank 1 holds [1:2,0:3] and rank 3 holds [3:4,0:3] beside "
        "it); rank 2 names it without storing any of it"
    )


def test_an_overlap_is_named_with_both_boxes_and_ranks() -> None:
    text = located_fault((4, 3), [TOP, ((1, 0), (3, 3))], [4, 7])
    assert text == "rank 4 stores [0:2,0:3] and rank 7 [1:4,0:3]: elements of both are stored twice"


def test_a_text_about_thousands_of_holes_is_short_and_quick() -> None:
    cells: list[Box] = [((2 * n, 2 * m), (2, 2)) for n in range(64) for m in range(64) if (n + m) % 2]
    text = located_fault((128, 128), cells, range(len(cells)), range(5000))
    assert text is not None and text.startswith("8192 of 16384") and len(text) < 1000
    some = [((2 * n, 2 * m), (2, 2)) for n in range(64) for m in range(64) if (n, m) not in {(3, 5), (3, 6), (40, 2)}]
    text = located_fault((128, 128), some, range(len(some)))
    assert text is not None and "[6:8,10:14] is missing" in text and "[80:82,4:6] is missing" in text
    assert len(text) < 1000


def test_a_tally_is_what_the_spec_of_the_wire_says() -> None:
    """protocol/SPEC.md section 8, once more and otherwise."""
    seed = int("0123456789ab", 16)

    def h(d: int, x: int) -> int:
        return xxhash.xxh3_64_intdigest(struct.pack("<Q", x), seed + d)

    rows = (h(0, 2) - h(0, 4)) * (h(1, 0) - h(1, 3)) % (2**61 - 1)
    box = (h(0, 0) - h(0, 2)) * (h(1, 1) - h(1, 2)) % (2**61 - 1)
    found = tally_of(
        raw(("w", "int8", (4, 3), [BOTTOM, ((0, 1), (2, 1))]), ("rng@rank3", "int8", (2,), [None])), 3, SEED
    )
    assert int.from_bytes(found.sums, "little") == (rows + box) % (2**61 - 1) and len(found.sums) == 10
    assert found.kinds == xxhash.xxh3_128_digest(msgpack.packb([["w", "int8", [4, 3]]])) and len(found.kinds) == 16


@pytest.mark.parametrize("junk", [b"\xc1", b"\x01", raw()[:5], bytes(msgpack.packb({"tensors": [["w"]]}))])
def test_what_is_no_structure_is_corrupt(junk: bytes) -> None:
    with pytest.raises(CorruptCheckpointError):
        uncovered([raw(), junk])


@pytest.mark.parametrize("box", [(("a",), (1,)), ((-1,), (1,)), ((0, 0), (1,)), ((2**64 - 1,), (1,)), ((0.5,), (1,))])
def test_boxes_that_cannot_be_are_corrupt(box: Any) -> None:
    with pytest.raises(CorruptCheckpointError):
        uncovered([raw(("w", "int8", (1, 1)[: len(box[1])], [(box[0], box[1])]))])
