"""What a rank says of a save reaches the worker by its Begin, by the request in its slot, and from other nodes."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

from worker_bench import FIRST, REQUEST

from asyncckpt.protocol.messages import Begin
from asyncckpt.protocol.request import PartRange
from asyncckpt_worker.core.model import RankSave
from asyncckpt_worker.core.nodes.tables import begin_of, part_row
from asyncckpt_worker.core.save_admission import part_of_begin, part_of_request

BEGIN = Begin(
    id=7,
    save_id=FIRST,
    step=12,
    path="/other/place",
    slot=3,
    generation=4,
    nbytes=4321,
    umask=0o27,
    fsync=False,
    overwrite=True,
    commit_timeout_s=77.5,
)
"""Of each field a value that is no default."""

SESSION: Any = SimpleNamespace(name="s", rank=0, follower="", storage={})
SLOT: Any = SimpleNamespace(session="s", number=3, follower="", storage={}, adopted_generation=-1)

NOT_REPORTED = {"id", "slot", "generation", "fsync"}
"""Fields of a Begin that the leader of other nodes does not need: it lends no slot there, and flushes in any case."""


def test_the_leader_gets_every_field_of_a_begin() -> None:
    row = part_row(FIRST, part_of_begin(SESSION, BEGIN, 0.0), recovering=False)
    found = begin_of(row)
    names = {one.name for one in fields(Begin)} - NOT_REPORTED
    assert {name: getattr(found, name) for name in names} == {name: getattr(BEGIN, name) for name in names}


def test_a_lost_begin_is_made_up_for_by_the_request() -> None:
    names = {one.name for one in fields(Begin)} & {one.name for one in fields(RankSave)}
    shared = {name: getattr(BEGIN, name) for name in names & {one.name for one in fields(REQUEST)}}
    assert names - shared.keys() == {"slot", "generation", "nbytes"}, "the request has all other fields"
    request = replace(REQUEST, parts=(PartRange(offset=4096, nbytes=BEGIN.nbytes),), **shared)
    by_request, by_begin = part_of_request(SLOT, 4, request, 0.0), part_of_begin(SESSION, BEGIN, 0.0)
    assert {name: getattr(by_request, name) for name in names} == {name: getattr(by_begin, name) for name in names}
