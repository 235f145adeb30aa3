"""Leaves of any type, for those who ask: pickled when saved, unpickled only on demand, else refused by name."""

from __future__ import annotations

import datetime
import fractions
import io
import json
import pathlib
import zoneinfo
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import states
import torch

import asyncckpt
from asyncckpt import PerRank, SyncCheckpointer
from asyncckpt.cli import main
from asyncckpt.errors import ConfigError, CorruptCheckpointError, PickledLeafError, UnsupportedLeafError
from asyncckpt.format.objects import Opaque, decode_value
from asyncckpt.planning import pickles
from asyncckpt.planning.planner import PlanCache
from asyncckpt.staging.host_stager import HostStager

Pair = namedtuple("Pair", "left right")
CALLS: list[str] = []


class Custom:
    """A type that nobody knows."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)


def boom() -> str:
    CALLS.append("boom")
    return "boom"


class Bomb:
    """Leaves a trace when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return boom, ()


class Named(str):
    """A kind of str."""

    __slots__ = ()


def save(path: pathlib.Path, state: Any) -> str:
    with SyncCheckpointer(fsync=False, allow_pickle=True) as checkpointer:
        checkpointer.save(state, path)
    return str(path)


VALUES: dict[str, Any] = {
    "custom": Custom(1),
    "in a set": {Custom(2), 3},
    "in a list": [1, [Custom(3)], torch.ones(1)],
    "fraction": fractions.Fraction(1, 3),
    "range": range(5),
    "function": json.dumps,
    "type": OrderedDict,
    "subclass of str": Named("x"),
    "path": pathlib.PurePosixPath("/a"),
    "zone": datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=1), "CET")),
}


@pytest.mark.parametrize("name", VALUES)
def test_any_leaf_comes_back_when_both_sides_allow_it(tmp_path: pathlib.Path, name: str) -> None:
    path = save(tmp_path / "a", {"x": VALUES[name]})
    states.assert_same(asyncckpt.load(path, allow_pickle=True), {"x": VALUES[name]})
    with SyncCheckpointer(allow_pickle=True) as checkpointer:
        states.assert_same(checkpointer.load(path), {"x": VALUES[name]})
        with pytest.raises(PickledLeafError):
            checkpointer.load(path, allow_pickle=False)
    target = {"x": [0, [Custom(0)], torch.zeros(1)] if name == "in a list" else None}
    asyncckpt.load(path, target, allow_pickle=True, strict=True)
    states.assert_same(target, {"x": VALUES[name]})


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "compressed": lambda: torch.eye(3).to_sparse_csr(),
    "subclass": lambda: torch.ones(2).as_subclass(Subclass),
}


class Subclass(torch.Tensor):
    """A tensor of another kind."""


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_have_no_place_in_a_shard_are_pickled(tmp_path: pathlib.Path, name: str) -> None:
    tensor, other = TENSORS[name](), torch.ones(3)
    cache = PlanCache(files_per_rank=1, allow_pickle=True)
    assert cache.take({"x": tensor})[0] is cache.take({"x": tensor})[0]
    path = save(tmp_path / "a", {"x": tensor, "t": other})
    for found in (asyncckpt.load(path, allow_pickle=True), {"x": TENSORS[name](), "t": torch.zeros(3)}):
        asyncckpt.load(path, found, allow_pickle=True, strict=True)
        assert type(found["x"]) is type(tensor) and found["x"].layout is tensor.layout
        assert torch.equal(found["x"].to_dense(), tensor.to_dense()) and torch.equal(found["t"], other)


def test_what_has_a_form_of_its_own_is_not_pickled(tmp_path: pathlib.Path) -> None:
    state = {**states.every_leaf(), "pair": Pair(1, 2), "module": torch.nn.Linear(2, 2)}
    del state["tensors"]
    path = save(tmp_path / "a", state)
    found = asyncckpt.load(path)
    assert type(found["pair"]) is tuple and "weight" in found["module"]
    (objects,) = pathlib.Path(path).glob("*.objects.json")
    assert '"pickle"' not in objects.read_text()


def test_a_leaf_that_was_pickled_is_refused_by_name_and_not_touched(tmp_path: pathlib.Path) -> None:
    path = save(tmp_path / "a", {"ok": torch.ones(2), "a": {"b": Bomb()}})
    target = {"ok": torch.zeros(2), "a": {"b": 5}}
    for load in (lambda: asyncckpt.load(path), lambda: asyncckpt.load(path, target)):
        with pytest.raises(
            PickledLeafError, match=r"'a\.b' was stored as a pickle of .*Bomb.*allow_pickle=True"
        ) as caught:
            load()
        assert (caught.value.fqn, caught.value.path) == ("a.b", path)
        assert caught.value.type_name == f"{__name__}.Bomb" and isinstance(caught.value, ValueError)
    assert not target["ok"].any() and target["a"]["b"] == 5  # type: ignore[attr-defined, index]
    assert torch.equal(asyncckpt.load(path, keys=["ok"], allow_pickle=True)["ok"], torch.ones(2))
    asyncckpt.plan_load(path, target)
    opened = asyncckpt.open_checkpoint(path)
    assert opened.keys() == ["ok", "a.b"] and opened.tensor("ok").tolist() == [1, 1]
    for found in (opened.objects, opened.objects_of(0)):
        with pytest.raises(PickledLeafError):
            found["a.b"]
    assert not CALLS
    asyncckpt.load(path, allow_pickle=True)
    assert CALLS.pop() == "boom" and not CALLS


def test_opening_may_unpickle_when_told_to(tmp_path: pathlib.Path) -> None:
    path = save(tmp_path / "a", {"x": Custom(3)})
    assert asyncckpt.open_checkpoint(path, allow_pickle=True).objects["x"] == Custom(3)


def test_commands_never_unpickle(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path / "a", {"x": Bomb(), "r": PerRank([Bomb(), torch.ones(1)])})
    for command in (["ls", str(tmp_path)], ["inspect", path], ["inspect", "--json", path], ["verify", path]):
        assert main(command) == 0
    assert not CALLS
    printed = capsys.readouterr().out
    assert f"pickle('{__name__}.Bomb')" in printed and "boom" not in printed


def test_a_pickle_that_does_not_unpickle_is_named(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "a", {"x": Custom(1), "t": torch.ones(1)})
    target = {"x": 0, "t": torch.zeros(1)}
    monkeypatch.delattr(f"{__name__}.Custom")
    with pytest.raises(PickledLeafError, match=r"'x'.*unpickling it failed: AttributeError") as caught:
        asyncckpt.load(path, target, allow_pickle=True)
    assert "AttributeError" in caught.value.detail and isinstance(caught.value.__cause__, AttributeError)
    assert not target["t"].any()  # type: ignore[union-attr]


def test_what_cannot_be_pickled_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    def local() -> None:
        pass

    for value in (local, [io.BytesIO().getbuffer()], (n for n in [1]), {lambda: 1}):
        with pytest.raises(UnsupportedLeafError, match=r"'a\.x.*cannot be pickled") as caught:
            save(tmp_path / "a", {"a": {"x": value}})
        assert caught.value.leaf.startswith("a.x") and caught.value.__cause__ is not None


@pytest.mark.parametrize("state", [{(1, 2): 1}, {None: Custom(1)}])
def test_keys_are_never_pickled(tmp_path: pathlib.Path, state: Any) -> None:
    with pytest.raises(UnsupportedLeafError, match="keys are str or int"):
        save(tmp_path / "a", state)


def test_a_tensor_without_memory_is_refused_all_the_same(tmp_path: pathlib.Path) -> None:
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedLeafError, match="no memory"):
        save(tmp_path / "a", {"x": tensor})


def test_by_default_nothing_is_pickled_and_the_way_out_is_said(tmp_path: pathlib.Path) -> None:
    with (
        SyncCheckpointer() as checkpointer,
        pytest.raises(UnsupportedLeafError, match=r"type Custom cannot be stored; allow_pickle=True on both sides"),
    ):
        checkpointer.save({"x": Custom(1)}, tmp_path / "a")


def test_a_pickle_is_a_snapshot(tmp_path: pathlib.Path) -> None:
    value = Custom([1])
    copied = HostStager(allow_pickle=True).stage({"x": value})
    value.value.append(2)
    assert copied["x"].value == [1]
    with pytest.raises(UnsupportedLeafError):
        HostStager().stage({"x": value})


@pytest.mark.parametrize("value", [1, "yes", None, 0])
def test_only_true_lets_pickles_in(tmp_path: pathlib.Path, value: Any) -> None:
    path = save(tmp_path / "a", {"x": Bomb()})
    with pytest.raises((ConfigError, PickledLeafError)):
        asyncckpt.load(path, allow_pickle=value)
    assert not CALLS


@pytest.mark.parametrize("payload", [None, 5, "x", ["a"], ["a", "b", "c"], [1, "AA=="], ["a", 5], ["a", "?"], {"a": 1}])
def test_malformed_payload_is_refused(payload: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_value({"$": "pickle", "v": payload})


def test_without_leave_a_pickle_shows_the_name_of_its_type() -> None:
    tag, payload = pickles.encode_pickle(Custom(1))
    assert decode_value([{"$": tag, "v": payload}]) == [Opaque("pickle", f"{__name__}.Custom")]


def test_bytes_that_are_no_pickle_are_refused_by_name(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickles.pickle, "dumps", lambda *_, **__: b"rubbish")
    path = save(tmp_path / "a", {"x": Custom(1)})
    with pytest.raises(PickledLeafError, match="UnpicklingError"):
        asyncckpt.load(path, allow_pickle=True)
    monkeypatch.setattr("asyncckpt.planning.leaves.encode_pickle", lambda value: ("pickle", ["no base64", "?"]))
    path = save(tmp_path / "b", {"x": Custom(1)})
    with pytest.raises(CorruptCheckpointError, match="object 0 does not decode"):
        asyncckpt.load(path, allow_pickle=True)


def test_a_zone_with_rules_needs_a_pickle(tmp_path: pathlib.Path) -> None:
    try:
        value = datetime.datetime(2024, 1, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"))
    except zoneinfo.ZoneInfoNotFoundError:
        pytest.skip("no time zones are installed here")
    assert asyncckpt.load(save(tmp_path / "a", {"x": value}), allow_pickle=True)["x"] == value
