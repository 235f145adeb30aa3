"""A bug that one save meets at the end of every event ends that save at most, and stops nothing else."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from worker_bench import FIRST, OTHER_RUN, PATH, Bench

from asyncckpt.protocol import messages as m
from asyncckpt_worker.core import actions as ac
from asyncckpt_worker.core import events as ev

OTHER = f"000001-00000000-{OTHER_RUN}"
MAX_EVENTS = 10


class Loop(Bench):
    """A core whose faults are answered as the daemon does.

    Attributes:
        faults: How many there were.
    """

    faults = 0

    def feed(self, kind: Any, **fields: Any) -> list[Any]:
        """See `Bench`; the actions are those of all events that follow."""
        found, todo = list[Any](), [(kind, fields)]
        for _ in range(MAX_EVENTS):
            if not todo:
                self.actions = found
                return found
            kind, fields = todo.pop(0)
            found += super().feed(kind, **fields)
            faults = self.of(ac.LogFault)
            self.faults += len(faults)
            todo += [(ev.InternalFault, {"save_id": f.save_id, "reason": "a bug"}) for f in faults if f.save_id]
        raise AssertionError("a fault leads to itself, without end")

    def told(self, peer: bytes) -> list[str]:
        """Return the phases that the last event has told a trainer of."""
        said = [a.message for a in self.of(ac.Send) if a.peer == peer and isinstance(a.message, m.Saves)]
        return [row["phase"] for message in said for row in message.saves]


def commits(loop: Loop, save_id: str, slot: int, peer: bytes) -> list[str]:
    """Save from the first message to the commit, and return what the trainer was told."""
    loop.begin(slot, save_id, peer=peer, path=f"/ckpt/{save_id}")
    loop.feed(ev.Prepared, key=(save_id, 0))
    loop.submit(slot, save_id, peer=peer)
    loop.read(slot, save_id, path=f"/ckpt/{save_id}")
    loop.feed(ev.Written, key=(save_id, 0), result="files")
    told = loop.told(peer)
    loop.feed(ev.Published, save_id=save_id)
    return told + loop.told(peer)


def is_of_first(value: object) -> bool:
    return getattr(value, "save_id", None) == FIRST


def break_for_first(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    """Let a function of the core fail whenever it is called for FIRST."""
    owner: Any = importlib.import_module(f"asyncckpt_worker.core.{module}")
    *outer, name = name.split(".")
    for part in outer:
        owner = getattr(owner, part)
    real = getattr(owner, name)

    def broken(*args: Any, **kw: Any) -> Any:
        if any(map(is_of_first, args)):
            raise RuntimeError("a bug")
        return real(*args, **kw)

    monkeypatch.setattr(owner, name, broken)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("machine", "bring_deadline_forward"),
        ("save_admission", "SaveAdmission.abandon"),
        ("machine", "note_phase_change"),
        ("status", "row_of"),
        ("tables", "History.add"),
    ],
)
def test_a_bug_at_one_save_stops_neither_the_event_nor_other_saves(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    break_for_first(monkeypatch, module, name)
    loop = Loop()
    loop.hello(b"p")
    loop.hello(b"q", "2" * 16)
    slots = {peer: loop.slot(peer) for peer in (b"p", b"q")}
    loop.begin(slots[b"p"])
    loop.feed(ev.Prepared, key=(FIRST, 0))
    loop.say(m.Release, slot=slots[b"p"])
    loop.feed(ev.SlotRead, slot=slots[b"p"], reason="OPEN")
    faults = loop.faults
    assert commits(loop, OTHER, slots[b"q"], b"q") == ["durable", "committed"]
    save = loop.core.tables.find(FIRST)
    assert faults and (save is None or save.outcome is not None)
    assert loop.faults == faults, "it was met once"
    loop.feed(ev.StopRequested, immediately=True)
    assert [action.complete for action in loop.of(ac.Exit)] == [True], "nothing is unfinished"


def test_a_bug_at_one_adopted_slot_stops_neither_the_event_nor_other_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    break_for_first(monkeypatch, "slots", "part_of_request")
    loop = Loop()
    loop.hello()
    loop.read(loop.adopted(ended=4, committed=FIRST), generation=4)
    loop.read(loop.adopted(ended=4, committed=OTHER), OTHER, generation=4)
    reply = loop.say(m.Recall, path=PATH, hold=False)
    assert loop.faults == 1 and [part["save_id"] for part in reply.parts] == [OTHER]
