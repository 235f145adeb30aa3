"""Numpy arrays and bytes in pickles, and pickles that are read from a file as far as they reach."""

from __future__ import annotations

import pathlib
import pickle
import random
import zipfile
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from asyncckpt.interop.sources import pickle_tree, unpickler
from asyncckpt.interop.sources.detect import read_any
from asyncckpt.interop.sources.pickle_globals import KNOWN
from asyncckpt.interop.sources.unpickler import PickleStream, UnpicklingError, unpickle_data
from asyncckpt.loading.fetch import read_tensor
from asyncckpt.storage.files import Files

np = pytest.importorskip("numpy")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads of a few bytes, which cut everything."""
    monkeypatch.setattr(unpickler, "WINDOW_NBYTES", 3)


def in_a_file(data: bytes) -> PickleStream:
    return PickleStream(lambda at, nbytes: data[at : at + nbytes], len(data))


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_in_a_file_is_read_as_one_in_memory(protocol: int) -> None:
    rng = random.Random(protocol)
    long = [rng.randbytes(n) for n in (39, 40, 41, 300)]
    value = {
        "b": long,
        "again": long[3],
        "t": ("text", "é" * 50, (long[2], {1: long[1]})),
        "s": {long[1], b"x"},
        long[3]: 7,
        "n": [1, -5, 2**70, 1.5, None, True],
        "a": bytearray(long[3]),
        "f": frozenset({(1, long[0])}),
    }
    data = pickle.dumps("before", protocol) + pickle.dumps(value, protocol)
    stream = in_a_file(data + bytes(10_000_000))
    _, start = unpickle_data(stream, KNOWN)
    found, end = unpickle_data(stream, KNOWN, at=start)
    assert (found, end) == (value, len(data))
    assert len(stream.data) < 2 * len(data) + 9, "and not what lies behind it"
    for cut in range(start, len(data)):
        with pytest.raises(UnpicklingError):
            unpickle_data(in_a_file(data[:cut]), KNOWN, at=start)


@pytest.mark.usefixtures("tiny")
def test_long_names_have_an_end() -> None:
    long = b"c" + b"m" * 5000
    assert unpickle_data(in_a_file(b"\x80\x02" + long + b"\nx\n."), KNOWN, opaque=True)[0].name.startswith("mmm")
    with pytest.raises(UnpicklingError, match="ends early"):
        unpickle_data(in_a_file(b"\x80\x02" + long), KNOWN, opaque=True)


def saved(path: pathlib.Path, protocol: int | None) -> dict[str, Any]:
    """Save arrays and bytes that are long, in a zip archive, or in a stream; return them."""
    rng = np.random.default_rng(0)
    state = {
        "bytes": rng.bytes(70_001),
        "matrix": rng.standard_normal((300, 50)),
        "odd": rng.integers(-9, 9, 40_001).astype(np.int16),
        "short": np.arange(5),
        "in": [(rng.bytes(66_000), {2: rng.bytes(90_000)})],
        "mutable": bytearray(rng.bytes(70_000)),
        "w": torch.ones(3),
    }
    kw: dict[str, Any] = {"_use_new_zipfile_serialization": False} if protocol is None else {}
    torch.save(state, path, pickle_protocol=protocol or 2, **kw)
    return state


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and np.array_equal(one, other))
    return bool(torch.equal(one, other)) if isinstance(one, torch.Tensor) else bool(one == other)


@pytest.mark.parametrize("protocol", [None, 2, 3, 4, 5])
def test_arrays_and_bytes_come_back(protocol: int | None, tmp_path: pathlib.Path) -> None:
    state = saved(tmp_path / "a", protocol)
    assert same(state, asyncckpt.load(tmp_path / "a"))
    for to in ("asyncckpt", "torch", "dcp"):
        asyncckpt.convert(tmp_path / "a", tmp_path / to, to=to)
        found = asyncckpt.load(tmp_path / to)
        for name in ("matrix", "odd"):
            if to != "asyncckpt":
                found[name] = found[name].numpy()
        if to != "asyncckpt":
            found["short"] = found["short"].numpy()
        if to == "dcp":
            found["in"] = [found["in"][0]]
        assert same(state, found), to


@pytest.mark.parametrize("protocol", [2, 4])
def test_parts_of_an_array_are_read(protocol: int, tmp_path: pathlib.Path) -> None:
    matrix = torch.from_numpy(saved(tmp_path / "a", protocol)["matrix"])
    contents = read_any(str(tmp_path / "a"), Files())
    tensor = contents.tensors["matrix"]
    for chosen in [(slice(3, 7), slice(0, 50)), (slice(0, 300), slice(4, 6)), (slice(299, 300), slice(49, 50))]:
        found = read_tensor(contents, tensor, chosen, Files(), threads=2, verify=False)
        assert torch.equal(found, matrix[chosen])


@pytest.mark.parametrize("protocol", [None, 2])
def test_a_pickle_that_is_too_large_is_refused(
    protocol: int | None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "a", protocol)
    monkeypatch.setattr(unpickler, "WINDOW_NBYTES", 100)
    monkeypatch.setattr(unpickler, "MAX_NBYTES", 500)
    with pytest.raises(UnsupportedFormatError, match="more than are read"):
        asyncckpt.load(tmp_path / "a")


def archived(path: pathlib.Path, value: bytes) -> None:
    """Write an archive of a dict with one value, as its opcodes."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x04}X\x01\0\0\0v" + value + b"s.")
        archive.writestr("archive/version", "3")


@pytest.mark.parametrize("what", ["key", "member", "argument", "text", "leaf"])
def test_long_values_that_are_named_over_and_over_are_held_once_or_refused(what: str, tmp_path: pathlib.Path) -> None:
    n, times = 100_000, 20_000
    encode = b"c_codecs\nencode\nq\x00X" + n.to_bytes(4, "little") + b"a" * n + b"q\x01X\x06\0\0\0latin1\x86Rq\x02"
    data = {
        "key": b"}(" + encode + b"N" + b"h\x02N" * times + b"u",
        "member": b"\x8f(" + encode + b"h\x02" * times + b"\x90",
        "text": b"]q\x05(" + encode + b"h\x01" * times + b"e",
        "argument": b"](" + encode + b"c__builtin__\nbytearray\nq\x06" + b"h\x06h\x02\x85R0" * 9 + b"0e",
        "leaf": b"}(c__builtin__\ncomplex\nK\x01K\x02\x86R]("
        + encode
        + b"h\x02" * times
        + b"eu",  # whose key makes an object of the dict
    }[what]
    archived(tmp_path / "a", data)
    if what in ("text", "leaf"):
        with pytest.raises(UnsupportedFormatError, match="out of proportion"):
            read_any(str(tmp_path / "a"), Files())
    else:
        read_any(str(tmp_path / "a"), Files())


@pytest.mark.parametrize("kind", ["itself", "keyed", "deep", "doubled"])
def test_leaves_without_an_end_are_refused_beside_long_bytes(
    kind: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickle_tree, "MAX_TENSORS", 10_000)
    first = b"]q\x00(B" + (70_000).to_bytes(4, "little") + bytes(70_000) + b"e"
    value = {
        "itself": first + b"h\x00a",
        "keyed": b"}q\x01(K\x01\x85" + first + b"K\x02h\x01u",
        "deep": first + b"\x85" * 3000,
        "doubled": first + b"".join(b"0](h%ch%ceq%c" % (n, n, n + 1) for n in range(39)),
    }[kind]
    archived(tmp_path / "a", b"}(K\x01K\x02\x86" + value + b"u")  # whose key makes an object of the dict
    with pytest.raises(UnsupportedFormatError, match=r"nested deeper|more than 10000 values|out of proportion"):
        read_any(str(tmp_path / "a"), Files())


@pytest.mark.parametrize("where", ["long", "name", "opcode"])
def test_a_damaged_pickle_is_said_to_be_damaged_whatever_it_says_now(where: str, tmp_path: pathlib.Path) -> None:
    saved(tmp_path / "a", 2)
    data = bytearray((tmp_path / "a").read_bytes())
    at = {
        "long": data.index(b"_codecs") + 40_000,
        "name": data.index(b"_codecs"),
        "opcode": data.index(b"\x80\x02}") + 2,
    }
    data[at[where]] ^= 2
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="differs from its CRC-32"):
        asyncckpt.load(tmp_path / "a")
