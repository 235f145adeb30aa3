"""Leaves of any type, for those who ask: pickled when saved, unpickled only on demand, else refused by name."""

from __future__ import annotations

import base64
import datetime
import fractions
import io
import json
import pathlib
import pickle
import zoneinfo
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import states
import torch
from torch.testing._internal.two_tensor import TwoTensor

import asyncckpt
from asyncckpt import PerRank, SyncCheckpointer
from asyncckpt.cli import main
from asyncckpt.errors import ConfigError, CorruptCheckpointError, PickledLeafError, UnsupportedLeafError
from asyncckpt.format.objects import Opaque, decode_value
from asyncckpt.planning.planner import PlanCache
from asyncckpt.staging.stager import HostStager
from asyncckpt.state_dict import pickling

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


class Holder:
    """An object with tensors in it, by name."""

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)


class Wrapping(torch.Tensor):
    """A tensor that is computed from another one: it has no memory of its own."""

    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Wrapping, (self.inner,)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called")


def savable_dtypes() -> list[torch.dtype]:
    """Return every dtype of a tensor that torch.save writes and torch.load reads."""
    found = []
    for dtype in sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str):
        try:
            torch.load(stock(torch.empty(4, dtype=dtype)), weights_only=False)
        except Exception:
            continue
        found.append(dtype)
    return found


def stock(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def elements(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().untyped_storage().tolist())


DTYPES = savable_dtypes()


def test_the_dtypes_that_torch_pickles_without_a_typed_storage_are_among_those_tried() -> None:
    assert {torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64, torch.bits8} <= {*DTYPES}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_any_dtype_in_a_pickled_object_come_back(tmp_path: pathlib.Path, dtype: torch.dtype) -> None:
    whole = torch.empty(6, dtype=dtype)
    whole.untyped_storage().copy_(torch.arange(whole.untyped_storage().nbytes(), dtype=torch.uint8).untyped_storage())
    leaf = Holder(t=whole, inside=[{"p": whole[2:]}])
    path = save(tmp_path / "a", {"x": leaf, "step": 1})
    with SyncCheckpointer(allow_pickle=True) as checkpointer:
        for found in (
            asyncckpt.load(path, allow_pickle=True)["x"],
            asyncckpt.load(path, {"x": Holder()}, allow_pickle=True, strict=True)["x"],
            asyncckpt.open_checkpoint(path, allow_pickle=True).objects["x"],
            checkpointer.load(path)["x"],
        ):
            assert found.t.dtype == dtype and elements(found.t) == elements(whole)
            view = found.inside[0]["p"]
            assert view.untyped_storage().data_ptr() == found.t.untyped_storage().data_ptr(), "one memory stays one"
            assert (view.shape, view.storage_offset()) == ((4,), 2)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.filterwarnings("ignore:.*quantiz")
def test_quantized_tensors_parameters_and_subclasses_in_a_pickled_object_come_back(tmp_path: pathlib.Path) -> None:
    parameter = torch.nn.Parameter(torch.randn(3))
    leaf = Holder(
        quantized=torch.quantize_per_tensor(torch.arange(4.0), 0.5, 3, torch.qint8),
        parameter=parameter,
        tied=parameter,
        frozen=torch.nn.Parameter(torch.randn(2).to(torch.float8_e4m3fn), requires_grad=False),
        subclass=torch.ones(2).as_subclass(Subclass),
        wrapping=Wrapping(torch.arange(3).to(torch.uint16)),
        conjugated=torch.randn(3, dtype=torch.complex64).conj(),
        meta=torch.empty(3, device="meta"),
    )
    found = asyncckpt.load(save(tmp_path / "a", {"x": leaf}), allow_pickle=True)["x"]
    assert torch.equal(found.quantized.int_repr(), leaf.quantized.int_repr()) and found.quantized.q_scale() == 0.5
    assert type(found.parameter) is torch.nn.Parameter and torch.equal(found.parameter, parameter)
    assert found.tied is found.parameter and found.parameter.requires_grad
    assert type(found.frozen) is torch.nn.Parameter and not found.frozen.requires_grad
    assert torch.equal(found.frozen.float(), leaf.frozen.float())
    assert type(found.subclass) is Subclass and type(found.wrapping) is Wrapping
    assert torch.equal(found.wrapping.inner.int(), leaf.wrapping.inner.int())
    assert torch.equal(found.conjugated, leaf.conjugated) and found.meta.is_meta


@pytest.mark.parametrize("inside", [False, True])
def test_a_tensor_that_stands_for_others_comes_back_alone_and_in_an_object(
    tmp_path: pathlib.Path, inside: bool
) -> None:
    two = TwoTensor(torch.arange(3.0), torch.ones(3))
    path = save(tmp_path / "a", {"x": Holder(tensor=two) if inside else two})
    found = asyncckpt.load(path, allow_pickle=True)["x"]
    found = found.tensor if inside else found
    assert type(found) is TwoTensor and torch.equal(found.a, two.a) and torch.equal(found.b, two.b)


def test_a_pickle_with_tensors_is_the_same_every_time_and_without_them_is_pythons() -> None:
    leaf = Holder(t=torch.arange(4).to(torch.uint16))
    assert pickling.encode_pickle(leaf) == pickling.encode_pickle(leaf), "ranks compare them"
    assert pickling.encode_pickle(Custom(3))[1][1] == base64.b64encode(pickle.dumps(Custom(3), protocol=4)).decode()


def test_a_pickled_tensor_of_a_device_that_is_not_here_comes_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():  # then the device is here
        assert pickling.unpickle(stock(torch.ones(2, device="cuda")).getvalue()).is_cuda
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:77")
    data = stock(torch.ones(2)).getvalue()
    assert torch.equal(pickling.unpickle(data), torch.ones(2))


def test_a_pickled_object_with_a_float8_tensor_is_carried_along_by_conversions(tmp_path: pathlib.Path) -> None:
    path = save(tmp_path / "a", {"x": Holder(t=torch.arange(4).to(torch.float8_e5m2)), "w": torch.ones(2)})
    asyncckpt.convert(path, tmp_path / "b", to="asyncckpt")
    found = asyncckpt.load(tmp_path / "b", allow_pickle=True)
    assert torch.equal(found["x"].t.float(), torch.arange(4.0)) and torch.equal(found["w"], torch.ones(2))
    asyncckpt.convert(path, tmp_path / "t.pt", to="torch", partial=True)
    assert "x" not in torch.load(tmp_path / "t.pt", weights_only=True)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_have_no_place_in_a_shard_are_pickled(tmp_path: pathlib.Path, name: str) -> None:
    tensor, other = TENSORS[name](), torch.ones(3)
    cache = PlanCache(files_per_rank=1, allow_pickle=True)
    assert cache.plan_for({"x": tensor})[0] is cache.plan_for({"x": tensor})[0]
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


@pytest.mark.parametrize("state", [{frozenset((1, 2)): 1}, {Custom(1): None}])
def test_keys_are_never_pickled(tmp_path: pathlib.Path, state: Any) -> None:
    with pytest.raises(UnsupportedLeafError, match="a key must be a str"):
        save(tmp_path / "a", state)


def test_a_tensor_without_memory_is_refused_all_the_same(tmp_path: pathlib.Path) -> None:
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedLeafError, match="no memory"):
        save(tmp_path / "a", {"x": tensor})


def test_by_default_nothing_is_pickled_and_the_way_out_is_said(tmp_path: pathlib.Path) -> None:
    with (
        SyncCheckpointer() as checkpointer,
        pytest.raises(
            UnsupportedLeafError, match=r"type Custom cannot be stored; with allow_pickle=True in save and load"
        ),
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
    tag, payload = pickling.encode_pickle(Custom(1))
    assert decode_value([{"$": tag, "v": payload}]) == [Opaque("pickle", f"{__name__}.Custom")]


def test_bytes_that_are_no_pickle_are_refused_by_name(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickling._Pickler, "dump", lambda self, value: self.file.write(b"rubbish"))
    path = save(tmp_path / "a", {"x": Custom(1)})
    with pytest.raises(PickledLeafError, match="UnpicklingError"):
        asyncckpt.load(path, allow_pickle=True)
    monkeypatch.setattr("asyncckpt.state_dict.leaf_codecs.encode_pickle", lambda value: ("pickle", ["no base64", "?"]))
    path = save(tmp_path / "b", {"x": Custom(1)})
    with pytest.raises(CorruptCheckpointError, match="object 0 does not decode"):
        asyncckpt.load(path, allow_pickle=True)


def test_a_zone_with_rules_needs_a_pickle(tmp_path: pathlib.Path) -> None:
    try:
        value = datetime.datetime(2024, 1, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"))
    except zoneinfo.ZoneInfoNotFoundError:
        pytest.skip("no time zones are installed here")
    assert asyncckpt.load(save(tmp_path / "a", {"x": value}), allow_pickle=True)["x"] == value
