"""P9: the worker counts every failure by its kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from worker_bench import COMMIT_TIMEOUT_S, FIRST, RUN, Bench

from asyncckpt.errors import CheckpointExistsError, CommitUnknownError, SaveFailedError, to_wire
from asyncckpt.protocol import messages as m
from asyncckpt_worker.core import events as ev
from asyncckpt_worker.core.failures import MAX_KINDS, count, kind_of
from asyncckpt_worker.core.status import report

FULL = to_wire(SaveFailedError("no room", code="ENOSPC"))
EXISTS = to_wire(CheckpointExistsError("it stands", path="/a"))
UNKNOWN = to_wire(CommitUnknownError("nobody knows", code="EIO"))


def failures(bench: Bench) -> Mapping[str, int]:
    found: Mapping[str, int] = report(bench.core.tables, "x")["failures"]
    return found


def bench_of(world_size: int = 1) -> tuple[Bench, int]:
    bench = Bench()
    bench.hello(world_size=world_size)
    return bench, bench.slot()


def cannot_prepare(bench: Bench, slot: int) -> None:
    bench.begin(slot)
    bench.feed(ev.Prepared, key=(FIRST, 0), error=EXISTS)


def cannot_write(bench: Bench, slot: int) -> None:
    bench.at_writing(slot)
    bench.feed(ev.Written, key=(FIRST, 0), error=FULL)


def cannot_commit(bench: Bench, slot: int) -> None:
    bench.at_writing(slot)
    bench.feed(ev.Written, key=(FIRST, 0), result=object())
    bench.feed(ev.Published, save_id=FIRST, error=FULL)


def commit_unknown(bench: Bench, slot: int) -> None:
    bench.at_writing(slot)
    bench.feed(ev.Written, key=(FIRST, 0), result=object())
    bench.feed(ev.Published, save_id=FIRST, error=UNKNOWN, unknown=True)


def withdrawn(bench: Bench, slot: int) -> None:
    bench.begin(slot)
    bench.say(m.Withdraw, save_id=FIRST, reason="x", skipped=False)


def skipped(bench: Bench, slot: int) -> None:
    bench.begin(slot)
    bench.say(m.Withdraw, save_id=FIRST, reason="x", skipped=True)


def rank_is_missing(bench: Bench, slot: int) -> None:
    bench.at_writing(slot)
    bench.now += COMMIT_TIMEOUT_S
    bench.feed(ev.Tick)


def broken(bench: Bench, slot: int) -> None:
    bench.at_writing(slot)
    bench.feed(ev.InternalFault, save_id=FIRST, reason="a bug")


@pytest.mark.parametrize(
    ("fails", "world_size", "kind"),
    [
        (cannot_prepare, 1, "checkpoint_exists"),
        (cannot_write, 1, "ENOSPC"),
        (cannot_commit, 1, "ENOSPC"),
        (commit_unknown, 1, "EIO"),
        (withdrawn, 1, "withdrawn"),
        (skipped, 1, "save_skipped"),
        (rank_is_missing, 2, "commit_timeout"),
        (broken, 1, "internal"),
    ],
)
def test_each_kind_of_failure_has_its_counter(fails: Callable[[Bench, int], None], world_size: int, kind: str) -> None:
    bench, slot = bench_of(world_size)
    assert failures(bench) == {}
    fails(bench, slot)
    assert failures(bench) == {kind: 1}


def test_failures_add_up_and_a_commit_is_none() -> None:
    bench, slot = bench_of()
    for number, end in enumerate(({"error": FULL}, {"error": FULL}, {"result": object()}), 1):
        save_id = f"000001-{number:08d}-{RUN}"
        bench.at_writing(slot, save_id, number)
        bench.feed(ev.Written, key=(save_id, 0), **end)
    bench.feed(ev.Published, save_id=save_id)
    assert bench.phase(save_id) == "committed" and failures(bench) == {"ENOSPC": 2}


@pytest.mark.parametrize("strange", [{}, {"code": 7}, {"code": "a b"}, {"code": "x" * 50}, {"fields": {"code": []}}])
def test_what_another_worker_tells_is_counted_whatever_it_is(strange: dict[str, Any]) -> None:
    assert kind_of(strange) == "other"


def test_kinds_are_bounded() -> None:
    found: dict[str, int] = {}
    for n in range(2 * MAX_KINDS):
        count(found, {"code": f"k{n}"})
    assert len(found) == MAX_KINDS + 1 and found["other"] == MAX_KINDS
