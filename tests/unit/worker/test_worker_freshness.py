"""What is compared to find a snapshot that is the one before, and what the core makes of it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from simulated_workers import result_of
from worker_bench import FIRST, REQUEST, SECOND, Bench

from asyncckpt.format.layout import SAVE_ID_OFFSET, save_id_bytes
from asyncckpt.format.names import SaveId
from asyncckpt.format.objects import encode_objects
from asyncckpt.storage.shard_writer import PRINT_NBYTES, first_block_print
from asyncckpt_worker.core import actions as ac
from asyncckpt_worker.core import events as ev
from asyncckpt_worker.core.events import ContentDigests
from asyncckpt_worker.core.model import Committed
from asyncckpt_worker.core.nodes.tables import pack_result, unpack_result
from asyncckpt_worker.core.saves import unchanged
from asyncckpt_worker.io.content_digest import digests_of, rest_print

ONE, OTHER = b"1" * PRINT_NBYTES, b"2" * PRINT_NBYTES


def request(step: int, *values: Any, save_id: str = FIRST, metadata: Any = None) -> Any:
    """Return a rank's request that stores these objects."""
    objects = encode_objects(SaveId.parse(save_id), values)
    return replace(REQUEST, save_id=save_id, step=step, objects=objects, metadata=json.dumps(metadata or {}))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (100, 200),
        ("runs/step-100", "runs/step-200"),
        ("step_000100", "step_000200"),
        ({"global_step": 100}, {"global_step": 200}),
        ([100, "at 100."], [200, "at 200."]),
        (-100, -200),
    ],
)
def test_objects_that_differ_by_the_step_only_are_equal(before: Any, after: Any) -> None:
    assert rest_print(request(100, before, 7)) == rest_print(request(200, after, 7, save_id=SECOND))
    assert rest_print(request(100, metadata={"x": before})) == rest_print(request(200, metadata={"x": after}))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (100, 100),
        (100, 201),
        (1000, 2000),
        (1100, 1200),
        (100.5, 200.5),
        (0.1, 0.2),
        (1e100, 1e200),
        (True, False),
        ("100", 200),
        ("a", "b"),
        ([], [None]),
    ],
)
def test_objects_that_differ_otherwise_are_not(before: Any, after: Any) -> None:
    assert rest_print(request(100, before)) != rest_print(request(200, after, save_id=SECOND))


def test_a_structure_that_differs_is_not_equal() -> None:
    assert rest_print(request(1)) != rest_print(replace(request(1), structure=b"another"))


def test_a_first_block_is_equal_but_for_its_save_id() -> None:
    def block(save_id: str, tail: bytes = b"t" * 100) -> memoryview:
        return memoryview(b"h" * SAVE_ID_OFFSET + save_id_bytes(SaveId.parse(save_id)) + tail)

    assert first_block_print(block(FIRST)) == first_block_print(block(SECOND))
    assert first_block_print(block(FIRST)) != first_block_print(block(FIRST, b"t" * 99 + b"u"))
    assert first_block_print(block(FIRST)) != first_block_print(block(FIRST, b"u" + b"t" * 99))


@pytest.mark.parametrize(
    ("step", "tensors", "rest", "figures"),
    [
        (6, ONE, ONE, {"same_tensors_as_step": 5, "unchanged": True}),
        (4, ONE, ONE, {"same_tensors_as_step": 5, "unchanged": True}),
        (6, ONE, OTHER, {"same_tensors_as_step": 5}),
        (6, OTHER, ONE, {}),
        (5, ONE, ONE, {}),
    ],
)
def test_what_is_told_of_a_save(step: int, tensors: bytes, rest: bytes, figures: dict[str, Any]) -> None:
    before = Committed(0, 5, ContentDigests(ONE, ONE))
    assert unchanged(before, Committed(1, step, ContentDigests(tensors, rest))) == figures


def printed(rank: int, shards: bytes = ONE, rest: bytes = ONE) -> Any:
    return replace(result_of(FIRST, rank), shards_print=shards, rest_print=rest)


def test_every_rank_counts_and_one_that_told_nothing_makes_it_unknown() -> None:
    requests = [REQUEST, REQUEST]
    whole = digests_of(requests, [printed(0), printed(1)])
    assert whole is not None and whole == digests_of(requests, [printed(0), printed(1)])
    assert digests_of(requests, [printed(0), printed(1, OTHER)]) not in (None, whole)
    assert digests_of(requests, [printed(0), printed(1, ONE, OTHER)]) not in (None, whole)
    assert digests_of(requests, [printed(0), result_of(FIRST, 1)]) is None
    assert digests_of([replace(REQUEST, n_tensors=0)] * 2, [printed(0), printed(1)]) is None


def test_prints_travel_between_workers_and_an_older_one_tells_none() -> None:
    packed = pack_result(printed(1, ONE, OTHER))
    assert unpack_result(packed, FIRST, 1) == printed(1, ONE, OTHER)
    del packed["shards_print"]
    assert unpack_result(packed, FIRST, 1).shards_print == b""


@pytest.mark.parametrize("wrong", [b"short", "text", None, 7])
def test_a_print_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="digest"):
        unpack_result({**pack_result(printed(1)), "rest_print": wrong}, FIRST, 1)


# ---- the core


# ---- the core


def commits(bench: Bench, number: int, digests: ContentDigests | None) -> Any:
    """Let a save be committed; return what its row reports, and the warnings."""
    save_id, path = f"000001-{number:08d}-aaaaaaaaaaaa", f"/ckpt/{number}"
    bench.begin(1, save_id, number, path=path, step=number)
    bench.feed(ev.Prepared, key=(save_id, 0))
    bench.submit(1, save_id, number)
    bench.read(1, save_id, number, path=path, step=number)
    bench.feed(ev.Written, key=(save_id, 0), result=object())
    actions = bench.core.handle(ev.Published(now=0.0, save_id=save_id, digests=digests))
    return bench.row(save_id)["report"], [a for a in actions if isinstance(a, ac.Log) and a.level == "warning"]


def test_a_save_is_compared_with_the_one_before_and_warned_of_if_nothing_has_changed() -> None:
    bench = Bench()
    bench.hello()
    bench.slot()
    same = ContentDigests(ONE, ONE)
    assert commits(bench, 1, same) == ({}, [])
    report, (warning,) = commits(bench, 2, same)
    assert report == {"same_tensors_as_step": 1, "unchanged": True}
    assert warning.count == "saves_unchanged" and "step 2" in warning.text and "step 1" in warning.text
    assert commits(bench, 3, ContentDigests(ONE, OTHER)) == ({"same_tensors_as_step": 2}, [])
    assert commits(bench, 4, None) == ({}, [])
    assert commits(bench, 5, same) == ({}, []), "what nothing is known of is compared with nothing"
