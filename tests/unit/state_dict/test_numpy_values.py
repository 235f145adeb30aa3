"""numpy's arrays and scalars as leaves: with their types and bits, and what becomes of them where numpy is not."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import states
import torch

import asyncckpt
from asyncckpt import SyncCheckpointer
from asyncckpt.errors import LeafTypeMismatchError, UnsupportedLeafError
from asyncckpt.format.objects import decode_value
from asyncckpt.planning.planner import PlanCache, signature_of
from asyncckpt.state_dict import numpy_values
from asyncckpt.state_dict.flatten import flatten
from asyncckpt.state_dict.leaf_codecs import encode_leaves
from asyncckpt.state_dict.structure_match import flatten_along

np = pytest.importorskip("numpy")


def save(path: Path, state: Any) -> str:
    with SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save(state, path)
    return str(path)


def test_arrays_and_scalars_come_back_with_type_shape_and_bits(tmp_path: Path) -> None:
    state = {"arrays": states.every_array(), "scalars": states.every_scalar()}
    found = asyncckpt.load(save(tmp_path / "a", state))
    states.assert_same(found, state)
    assert all(array.flags.writeable and array.flags.c_contiguous for array in found["arrays"].values())


def test_an_array_mapped_from_a_file_comes_back_in_memory(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(7))
    for mode in ("r", "r+", "c"):
        value = np.load(tmp_path / "x.npy", mmap_mode=mode)
        found = asyncckpt.load(save(tmp_path / mode, {"x": value}))["x"]
        assert type(found) is np.ndarray and found.tolist() == list(range(7))


def test_what_is_one_array_comes_back_as_one(tmp_path: Path) -> None:
    array, tensor = np.arange(4.0), torch.arange(3)
    state = {"a": array, "b": [array], "view": array[:2], "copy": array.copy(), "t": tensor, "n": tensor.numpy()}
    assert len(flatten(state).tensors) == 4
    found = asyncckpt.load(save(tmp_path / "a", state))
    assert found["a"] is found["b"][0] and not np.shares_memory(found["a"], found["copy"])
    found["n"][0] = 7
    assert found["t"].tolist() == [7, 1, 2]


REFUSED = {
    "structured": np.zeros(2, dtype=[("a", "i4")]),
    "objects": np.array([None, "x"], dtype=object),
    "texts": np.array(["a", "bc"]),
    "times": np.array(["2024-01-01"], dtype="M8[D]"),
    "long double": np.zeros(2, np.longdouble),
    "other byte order": np.zeros(2, ">f4"),
    "masked": np.ma.masked_array([1, 2], [True, False]),
    "records": np.rec.array([(1, 2.0)]),
    "long double scalar": np.longdouble(1),
    "void scalar": np.void(b"abc"),
    "long doubles in a list": [np.longdouble(1), 2],
}


@pytest.mark.parametrize("what", sorted(REFUSED))
def test_what_torch_has_no_dtype_for_is_refused_by_name(what: str) -> None:
    _, flat = PlanCache(files_per_rank=1).plan_for({"a": {"x": REFUSED[what]}})
    with pytest.raises(UnsupportedLeafError, match=r"'a\.x'.*allow_pickle"):
        encode_leaves(flat)


def test_arrays_are_snapshots_and_take_the_quick_way(tmp_path: Path) -> None:
    state = {"x": np.arange(5.0), "t": np.ones((2, 3)).T, "frozen": states.every_array()["frozen"], "s": np.float32(1)}
    cache = PlanCache(files_per_rank=1)
    plan, flat = cache.plan_for(state)
    assert flat.tensors[0].data_ptr() == state["x"].ctypes.data, "it was copied on the way"
    assert flatten_along(*plan.signature, state) is not None
    for other in (np.arange(6.0), np.arange(5), torch.arange(5.0), [1.0], np.array(["a"]), None, np.float64(1)):
        assert flatten_along(*plan.signature, {**state, "x": other}) is None
    for other in (np.arange(2), np.longdouble(1)):
        found = flatten_along(*plan.signature, {**state, "s": other})
        assert found is None or found.objects == [other]
    path = save(tmp_path / "a", state)
    state["x"] += 1
    assert asyncckpt.load(path)["x"].tolist() == list(range(5))


def test_a_broken_alias_is_noticed() -> None:
    array = np.arange(3)
    one, two = {"a": array, "b": array}, {"a": array, "b": array.copy()}
    assert flatten_along(*signature_of(flatten(one)), one) is not None
    assert flatten_along(*signature_of(flatten(one)), two) is None
    assert flatten_along(*signature_of(flatten(two)), one) is None


# ---- into a target --------------------------------------------------------------------------------------------------


def test_an_array_of_the_saved_kind_is_filled_in_place_and_others_are_replaced(tmp_path: Path) -> None:
    saved = np.arange(6.0).reshape(2, 3)
    path = save(tmp_path / "a", {"x": saved})
    same, strided = np.zeros((2, 3)), np.zeros((4, 6))[::2, ::2]
    for target in (same, strided):
        state = {"x": target}
        asyncckpt.load(path, state, strict=True)
        assert state["x"] is target and (target == saved).all()
    frozen = np.zeros((2, 3))
    frozen.flags.writeable = False
    others = [
        np.zeros(4),
        np.zeros((2, 3), np.float32),
        frozen,
        np.zeros((2, 3))[:, ::-1],
        np.array(["a"]),
        None,
        5,
        [1],
    ]
    for other in others:
        state = {"x": other}
        asyncckpt.load(path, state, strict=True)
        states.assert_same(state["x"], saved)
    assert not frozen.any()


def test_arrays_and_tensors_fill_one_another(tmp_path: Path) -> None:
    path = save(tmp_path / "a", {"n": np.arange(3.0), "t": torch.arange(4), "b": torch.ones(2, dtype=torch.bfloat16)})
    target = {"n": torch.zeros(3), "t": np.zeros(4, np.int64), "b": np.zeros(2)}
    held = target["t"]
    asyncckpt.load(path, target, strict=True)
    assert target["n"].tolist() == [0, 1, 2] and held.tolist() == [0, 1, 2, 3]
    assert torch.equal(target["b"], torch.ones(2, dtype=torch.bfloat16)), "numpy has no such dtype"
    with pytest.raises(LeafTypeMismatchError):
        asyncckpt.load(save(tmp_path / "b", {"n": 5}), {"n": torch.zeros(1)})


def test_an_object_takes_the_place_of_an_array(tmp_path: Path) -> None:
    target = {"x": np.zeros(3), "h": np.zeros(2)}
    asyncckpt.load(save(tmp_path / "a", {"x": None, "h": bytes(1 << 17)}), target, strict=True)
    assert target == {"x": None, "h": bytes(1 << 17)}


def test_one_array_is_read_without_the_others(tmp_path: Path) -> None:
    opened = asyncckpt.open_checkpoint(save(tmp_path / "a", {"x": np.arange(9.0), "s": np.int8(3), "t": torch.ones(1)}))
    states.assert_same(opened.objects["x"], np.arange(9.0))
    assert opened.tensor("x", slice(2, 4)).tolist() == [2, 3]
    assert type(opened.objects["s"]) is np.int8
    assert list(opened.tensors) == ["t"] and "x" in opened.stored_tensors


# ---- where numpy is not ---------------------------------------------------------------------------------------------


@pytest.fixture
def no_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("asyncckpt.state_dict.numpy_values.importlib.import_module", missing)
    monkeypatch.setattr(numpy_values, "_imported", numpy_values.functools.cache(numpy_values._imported.__wrapped__))


def test_without_numpy_arrays_are_tensors_and_scalars_are_python_values(
    tmp_path: Path, no_numpy: None, caplog: pytest.LogCaptureFixture
) -> None:
    scalars = {"i": np.int16(-3), "f": np.float32(0.5), "c": np.complex128(1j), "b": np.bool_(True), "u": np.str_("ü")}
    scalars |= {"s": np.bytes_(b"x"), "t": np.timedelta64(7, "s"), "h": np.float16(2)}
    path = save(tmp_path / "a", {"x": np.arange(3), **scalars})
    for _ in range(2):
        with caplog.at_level(logging.WARNING, "asyncckpt"):
            found = asyncckpt.load(path)
    assert len([r for r in caplog.records if "numpy is not installed" in r.message]) == 1
    assert torch.equal(found.pop("x"), torch.arange(3))
    expected = {"i": -3, "f": 0.5, "c": 1j, "b": True, "u": "ü", "s": b"x", "t": 7, "h": 2.0}
    states.assert_same(found, expected)


def test_without_torchs_bridge_to_numpy_arrays_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("Numpy is not available")

    arrays = states.every_array()
    monkeypatch.setattr(torch, "from_numpy", broken)
    tensors = {name: numpy_values.tensor_of(value) for name, value in arrays.items()}
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "numpy", broken)
        found = {name: numpy_values.array_of(tensor) for name, tensor in tensors.items() if tensor is not None}
    states.assert_same(found, arrays)


# ---- what is on disk ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in sorted(states.every_scalar()) if not n.startswith(("in_", "trailing"))])
def test_stored_scalars_are_readable_without_any_library(name: str) -> None:
    value = states.every_scalar()[name]
    raw = json.loads(json.dumps(encode_leaves(flatten({"x": value}))[0]))
    found = decode_value(raw)
    assert type(found) in (bool, int, float, complex, str, bytes)
    if value.dtype.kind not in "mM" and value == value:
        assert found == value.item()


BAD = [
    *(None, [], ["<f4"], ["<f4", "00", 1], [4, "00000000"], ["<f4", 5], ["<f4", "0000"], ["<f4", "zz000000"]),
    *(["|O8", "00" * 8], ["<f16", "00" * 16], [">f4", "00" * 4], ["<M8[x]", "00" * 8], ["<U1", "ffffffff"]),
    *(["<U99999999", "00"], ["<f4,<f4", "00" * 8], ["<M8[0s]", "00" * 8], ["|V4", "00" * 4], ["<U-1", ""]),
    ["|b1", "02"],
]  # fmt: skip


@pytest.mark.parametrize("payload", BAD, ids=str)
def test_malformed_scalar_is_refused(payload: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_value({"$": "numpy.scalar", "v": payload})
    with pytest.raises(ValueError, match=r"."):
        numpy_values.decode_scalar(payload)
