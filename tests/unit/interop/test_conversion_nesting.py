"""Containers, types of keys and ties: proved after a conversion that keeps them, whatever the state."""

from __future__ import annotations

import collections
import os
import random
from pathlib import Path
from typing import Any

import foreign_samples
import pytest
import states
import torch

import asyncckpt
from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.interop import convert
from asyncckpt.interop.outline import Outline, outline_of
from asyncckpt.interop.sources.detect import read_any
from asyncckpt.interop.verify_target import nesting_mismatch
from asyncckpt.storage.files import Files

pytest.importorskip("numpy")

KEEPING = ("asyncckpt", "torch")
N_STATES = int(os.environ.get("ASYNCCKPT_TEST_STATES", "12"))


def random_state(source: random.Random, depth: int = 0, tensors: list[torch.Tensor] | None = None) -> Any:
    """Return a dict; at `depth` 1 and on anything that a state may hold."""
    tensors = [] if tensors is None else tensors
    kind = source.choice(("d", "o", "l", "t", "T", "T", "O", "O")) if depth else source.choice("do")
    n = source.randrange(4) if depth < 4 else 0
    if kind in ("d", "o"):
        found: Any = {} if kind == "d" else collections.OrderedDict()
        for _ in range(n + (depth == 0) * 3):
            key = source.choice([source.randrange(5), source.choice("abcdefgh") + "." * source.randrange(2) + "z"])
            if str(key) not in map(str, found):
                found[key] = random_state(source, depth + 1, tensors)
        if kind == "o" and source.random() < 0.3:
            found._metadata = collections.OrderedDict({"": {"version": source.randrange(3)}})
        return found
    if kind in ("l", "t"):
        members = [random_state(source, depth + 1, tensors) for _ in range(n)]
        return members if kind == "l" else tuple(members)
    if kind == "T":
        if tensors and source.random() < 0.3:
            return source.choice(tensors)
        shape = [source.randrange(4) for _ in range(source.randrange(3))]
        tensors.append(torch.arange(float(torch.Size(shape).numel())).reshape(shape) + source.randrange(9))
        return tensors[-1]
    return source.choice([1, True, 0.5, None, "text", b"raw", bytes(70_000), (), [], {}, (1, 2), [1, [2]], {1, 2}])


@pytest.mark.parametrize("seed", range(N_STATES))
@pytest.mark.parametrize("source", ["asyncckpt", "torch", "dcp"])
def test_a_random_state_is_the_same_state_after_conversions(source: str, seed: int, tmp_path: Path) -> None:
    state = random_state(random.Random(seed))
    if source == "asyncckpt":
        with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
            checkpointer.save(state, tmp_path / "a")
    elif source == "torch":
        torch.save(state, tmp_path / "a")
    else:
        foreign_samples.save_dcp(state, tmp_path / "a")
    first = asyncckpt.load(tmp_path / "a")
    if source == "torch":
        states.assert_same(first, state)
    at = tmp_path / "a"
    for n, to in enumerate(("torch", "asyncckpt", "torch", "torch", "asyncckpt", "asyncckpt")):
        report = asyncckpt.convert(at, tmp_path / f"{n}", to=to)
        assert report.left_out == ()
        at = tmp_path / f"{n}"
        states.assert_same(asyncckpt.load(at), first)
        if to == "torch":
            states.assert_same(torch.load(at, weights_only=True), first)


STATE: dict[str, Any] = {
    "d": {"a": torch.ones(2), 1: torch.zeros(2)},
    "o": collections.OrderedDict(a=torch.ones(1)),
    "m": torch.nn.BatchNorm1d(2).state_dict(),
    "l": [torch.ones(3), {"x": 1}],
    "t": (torch.ones(4), {"x": 1}),
    "e": {},
}
STATE["tied"] = STATE["d"]["a"]
OTHERS: dict[str, Any] = {
    "a dict that was ordered": {"o": dict(STATE["o"])},
    "an ordered dict that was none": {"d": collections.OrderedDict(STATE["d"])},
    "a key that was a number": {"d": {"a": STATE["tied"], "1": torch.zeros(2)}},
    "another order": {"d": {1: torch.zeros(2), "a": STATE["tied"]}},
    "no versions": {"m": collections.OrderedDict(STATE["m"])},
    "a tuple that was a list": {"l": tuple(STATE["l"])},
    "a list that was a tuple": {"t": list(STATE["t"])},
    "an ordered dict that was empty, and none": {"e": collections.OrderedDict()},
    "no tie": {"tied": torch.ones(2)},
}


def outline(state: dict[str, Any], path: Path) -> Outline:
    torch.save(state, path)
    return outline_of(read_any(str(path), Files()), Files())


@pytest.mark.parametrize("what", OTHERS)
def test_what_has_another_nesting_is_noticed(what: str, tmp_path: Path) -> None:
    wanted = outline(STATE, tmp_path / "a")
    assert nesting_mismatch(wanted, outline(STATE, tmp_path / "b")) is None
    (changed,) = OTHERS[what]
    name = nesting_mismatch(wanted, outline({**STATE, **OTHERS[what]}, tmp_path / "c"))
    assert name == changed


def test_other_versions_are_noticed(tmp_path: Path) -> None:
    module = collections.OrderedDict(STATE["m"])
    module._metadata = {"": {"version": 99}}  # type: ignore[attr-defined]
    wanted, other = outline(STATE, tmp_path / "a"), outline({**STATE, "m": module}, tmp_path / "b")
    assert nesting_mismatch(wanted, other) == "m"


@pytest.mark.parametrize("to", KEEPING)
def test_a_target_with_another_nesting_is_not_put_into_place(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"d": collections.OrderedDict(a=1, b=torch.ones(2))}, tmp_path / "a")
    target_of = convert.Conversion._target

    def other(self: Any, outline: Outline, *arguments: Any) -> Any:
        right, wrong = outline.tree[1][1], ("d", outline.tree[1][1][1])
        assert right[0] == "o"
        outline.tree = ("d", ("d", wrong))
        made = target_of(self, outline, *arguments)
        outline.tree = ("d", ("d", right))  # what is written was made of the tree by now
        return made

    monkeypatch.setattr(convert.Conversion, "_target", other)
    with pytest.raises(CorruptCheckpointError, match="another container"):
        asyncckpt.convert(tmp_path / "a", tmp_path / "b", to=to)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


OPENED: dict[str, tuple[Any, ...]] = {
    "the top level and an empty key": ({"m": 1, "": [[], {}]}, {"m": 1, "": ([], {1})}),
    "a key with a dot": ({"a.b": {"c": 1}, "a": {"b": [[], {}]}}, {"a.b": [[], {}], "a": {"b": {"c": 1}}}),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("to", [*KEEPING, "dcp"])
@pytest.mark.parametrize("what", OPENED)
def test_containers_of_one_name_are_not_taken_for_each_other(what: str, to: str, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from in_process_writer import StorageWriter

    for n, state in enumerate(OPENED[what]):
        dcp.save(state, storage_writer=StorageWriter(tmp_path / f"{n}"), no_dist=True)
        asyncckpt.convert(tmp_path / f"{n}", tmp_path / f"{n}-to", to=to)
        if to != "dcp":
            states.assert_same(asyncckpt.load(tmp_path / f"{n}-to"), asyncckpt.load(tmp_path / f"{n}"))
