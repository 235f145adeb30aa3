"""storage.coverage: every element exactly once."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from asyncckpt.storage.coverage import Box, coverage_fault, located_fault


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


def count(shape: tuple[int, ...], boxes: list[Box]) -> set[int]:
    """Return how often elements occur, the slow way."""
    times = dict.fromkeys(itertools.product(*map(range, shape)), 0)
    for offsets, sizes in boxes:
        for element in itertools.product(*(range(o, o + s) for o, s in zip(offsets, sizes, strict=True))):
            times[element] += 1
    return set(times.values())


def test_random_partitions_are_sound_and_every_change_is_a_fault(rng: random.Random) -> None:
    for _ in range(300):
        shape = tuple(rng.randrange(1, 6) for _ in range(rng.randrange(1, 4)))
        boxes = partition(rng, (0,) * len(shape), shape, 3)
        rng.shuffle(boxes)
        assert coverage_fault(shape, boxes) is None
        assert coverage_fault(shape, boxes[1:]) is not None
        assert coverage_fault(shape, [*boxes, rng.choice(boxes)]) is not None


def test_any_boxes_are_judged_as_counting_does(rng: random.Random) -> None:
    for _ in range(500):
        shape = tuple(rng.randrange(1, 4) for _ in range(rng.randrange(1, 4)))
        boxes: list[Box] = []
        for _ in range(rng.randrange(1, 4)):
            offsets = tuple(rng.randrange(n) for n in shape)
            boxes.append((offsets, tuple(rng.randrange(1, n - o + 1) for n, o in zip(shape, offsets, strict=True))))
        assert (coverage_fault(shape, boxes) is None) == (count(shape, boxes) == {1})


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


def test_ten_thousand_columns_are_judged_quickly() -> None:
    boxes = [((0, i), (1000, 1)) for i in range(10_000)]
    assert coverage_fault((1000, 10_000), boxes) is None


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
    for sides in ((4096,), (64, 64), (16, 16, 16), (2, 2048)):
        shape = tuple(3 * side for side in sides)
        boxes = [(tuple(3 * i for i in at), (3,) * len(sides)) for at in itertools.product(*map(range, sides))]
        random.Random(0).shuffle(boxes)
        assert coverage_fault(shape, boxes) is None
        assert "twice" in str(coverage_fault(shape, [*boxes, boxes[7]]))
