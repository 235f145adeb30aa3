"""Values of `torch.save` files that are no tensors: what comes back is what numpy and torch had, or it is said."""

from __future__ import annotations

import builtins
import collections
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.errors import MissingKeysError, UnsupportedFormatError
from asyncckpt.format.state_tree import FACTORIES

np = pytest.importorskip("numpy")

KEPT = {
    "texts": lambda: np.str_("a"),
    "texts that end in 1": lambda: np.str_("abcdefghijk"),
    "bytes": lambda: np.bytes_(b"x"),
    "uint8": lambda: np.uint8(3),
    "int8": lambda: np.int8(-3),
    "bool": lambda: np.bool_(True),
    "complex64": lambda: np.complex64(1j),
    "seconds": lambda: np.timedelta64(5, "s"),
    "multiples of a unit": lambda: np.timedelta64(5, "25us"),
    "no unit": lambda: np.timedelta64(5),
    "nanoseconds": lambda: np.datetime64("2020-02-03", "ns"),
    "a year": lambda: np.datetime64("2020"),
    "no bytes": lambda: b"",
    "an array of numbers in a tuple": lambda: ("MT19937", np.arange(5, dtype=np.uint32)),
    "a matrix of float16": lambda: np.ones((2, 3), np.float16),
    "a number of float64": lambda: np.float64(1.5),
    "an empty array": lambda: np.zeros((0, 3), dtype=np.float32),
}
UNREAD = {
    "longdouble": lambda: np.longdouble(1),
    "void": lambda: np.void(b"abc"),
    "fields": lambda: np.zeros(1, dtype=[("a", "i4")])[0],
}
protocols = pytest.mark.parametrize("protocol", [2, 4])


@protocols
@pytest.mark.parametrize("what", KEPT)
def test_a_value_comes_back_from_the_file_and_from_what_it_becomes(what: str, protocol: int, tmp_path: Path) -> None:
    value = KEPT[what]()
    torch.save({"x": value, "t": torch.ones(1)}, tmp_path / "a", pickle_protocol=protocol)
    report = asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="asyncckpt")
    assert report.changed == ()
    for path in (tmp_path / "a", tmp_path / "b"):
        found = asyncckpt.load(path)["x"]
        assert type(found) is type(value)
        assert getattr(found, "dtype", None) == getattr(value, "dtype", None)
        assert getattr(found, "shape", ()) == getattr(value, "shape", ())
        assert repr(found) == repr(value)


@protocols
@pytest.mark.parametrize("name", FACTORIES)
def test_a_defaultdict_keeps_what_makes_its_missing_values(name: str, protocol: int, tmp_path: Path) -> None:
    factory = getattr(builtins, name) if "." not in name else getattr(collections, name.partition(".")[2])
    torch.save({"x": collections.defaultdict(factory, a=1)}, tmp_path / "a", pickle_protocol=protocol)
    found = asyncckpt.load(tmp_path / "a")["x"]
    assert (found, found.default_factory) == ({"a": 1}, factory)


@pytest.mark.parametrize("key", [1 << 20_000, (1, 1 << 20_000)], ids=["a number", "a number in a tuple"])
def test_a_key_of_more_digits_than_python_writes_out_blocks_tensors_behind_it_alone(key: Any, tmp_path: Path) -> None:
    torch.save({"x": {key: 5}, "y": {key: torch.ones(1)}, "t": torch.ones(1)}, tmp_path / "a")
    assert asyncckpt.load(tmp_path / "a", keys=["x", "t"]) == {"x": {key: 5}, "t": torch.ones(1)}
    with pytest.raises(UnsupportedFormatError, match="y: tensor, not read"):
        asyncckpt.load(tmp_path / "a")


def test_a_dict_whose_keys_have_no_form_is_one_leaf_also_at_the_top_level(tmp_path: Path) -> None:
    torch.save({1j: 5, "t": 6}, tmp_path / "plain")
    assert asyncckpt.load(tmp_path / "plain") == {1j: 5, "t": 6}
    torch.save({1j: torch.ones(1), "t": torch.ones(1)}, tmp_path / "tensors")
    with pytest.raises(UnsupportedFormatError, match="the top level: tensor, not read: inside a dict, 2 tensors"):
        asyncckpt.load(tmp_path / "tensors")
    for options in ({"keys": ["t"]}, {"state_dict": {"t": 1}}):
        with pytest.raises(MissingKeysError):
            asyncckpt.load(tmp_path / "tensors", **options)


@protocols
@pytest.mark.parametrize("what", UNREAD)
def test_a_value_that_is_not_read_blocks_itself_alone(what: str, protocol: int, tmp_path: Path) -> None:
    torch.save({"x": UNREAD[what](), "t": torch.ones(1)}, tmp_path / "a", pickle_protocol=protocol)
    with pytest.raises(UnsupportedFormatError, match="numpy scalar"):
        asyncckpt.load(tmp_path / "a")
    assert list(asyncckpt.load(tmp_path / "a", keys=["t"])) == ["t"]
    with pytest.raises(UnsupportedFormatError, match="numpy scalar"):
        asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="asyncckpt")
    assert asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="asyncckpt", partial=True).left_out == ("x",)


@pytest.mark.parametrize("name", [b"npu", b"cuda"])
def test_a_device_that_this_torch_may_lack_blocks_itself_alone(name: bytes, tmp_path: Path) -> None:
    torch.save({"x": torch.device("cpu:1"), "t": torch.ones(1)}, tmp_path / "a", pickle_protocol=2)
    data = (tmp_path / "a").read_bytes()
    place = data.index(b"cdevice") if b"cdevice" in data else data.index(b"device")
    at = data.index(b"X\x03\x00\x00\x00cpu", place)
    index = data.index(b"K\x01", at)
    changed = data[:at] + b"X\x03\x00\x00\x00" + name[:3] + data[at + 8 : index] + b"K\xc8" + data[index + 2 :]
    old, new = (zlib.crc32(_pickle_of(found)).to_bytes(4, "little") for found in (data, changed))
    (tmp_path / "a").write_bytes(changed.replace(old, new))
    with pytest.raises(UnsupportedFormatError, match="device"):
        asyncckpt.load(tmp_path / "a")
    assert list(asyncckpt.load(tmp_path / "a", keys=["t"])) == ["t"]


def _pickle_of(archive: bytes) -> bytes:
    start = archive.index(b"\x80\x02", archive.index(b"data.pkl"))
    return archive[start : archive.index(b"PK\x07\x08", start)]


def test_arrays_that_are_one_stay_one(tmp_path: Path) -> None:
    array = np.arange(5)
    torch.save({"a": array, "b": array, "c": array.copy()}, tmp_path / "a")
    asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="asyncckpt")
    for path in (tmp_path / "a", tmp_path / "b"):
        found = asyncckpt.load(path)
        assert found["a"] is found["b"]
        assert found["a"] is not found["c"]
