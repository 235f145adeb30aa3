"""Long bytes in pickles stay in their file: found there, read in parts, and held against what they were."""

from __future__ import annotations

import os
import pathlib
import pickle
import random
import zipfile
import zlib
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.conversion import converter
from asyncckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from asyncckpt.foreign import growth, long_values, pickle_cursor, pickle_values, refusals
from asyncckpt.foreign.kinds import read_any
from asyncckpt.foreign.long_values import FilePickle, LongBytes
from asyncckpt.foreign.refusals import UnpicklingError
from asyncckpt.foreign.torch_globals import KNOWN
from asyncckpt.foreign.unpickling import unpickle_data
from asyncckpt.loading.slicing import read_tensor
from asyncckpt.storage import latin1
from asyncckpt.storage.files import Files

np = pytest.importorskip("numpy")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows and steps of a few bytes, which cut everything; what is called long begins at 40."""
    monkeypatch.setattr(latin1, "STEP_NBYTES", 17)
    monkeypatch.setattr(pickle_cursor, "WINDOW_NBYTES", 3)
    for module in (long_values, pickle_values, pickle_cursor):
        monkeypatch.setattr(module, "LONG_NBYTES", 40)


def in_a_file(data: bytes, start: int = 0) -> FilePickle:
    return FilePickle(lambda at, nbytes: data[at : at + nbytes], start, len(data) - start)


def whole(value: Any) -> Any:
    """Return a value with bytes in the place of what stands for them."""
    if isinstance(value, dict):
        return {key: whole(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(whole, value))
    return value.whole() if type(value) is LongBytes else value


@pytest.mark.parametrize("step", [1, 2, 5, 64])
@pytest.mark.parametrize("kind", ["ascii", "high", "mixed"])
def test_every_part_of_a_text_is_found(kind: str, step: int) -> None:
    rng = random.Random(f"{kind}{step}")
    low, high = {"ascii": (0, 127), "high": (128, 255), "mixed": (0, 255)}[kind]
    data = bytes(rng.randint(low, high) for _ in range(61))
    text = latin1.encoded(data)
    found = latin1.looked_through(text[at : at + step] for at in range(0, len(text), step))
    assert (found.nbytes, found.crc) == (len(data), zlib.crc32(data))
    for start in range(len(data)):
        for end in range(start + 1, len(data) + 1):
            low, high, first = latin1.span_of(found.firsts, step, len(text), start, end)
            assert high - low <= 2 * (end - start) + 2 * step + 2, "no more than it takes"
            assert latin1.decoded(text[low:high])[start - first :][: end - start] == data[start:end]


@pytest.mark.parametrize("wrong", ["€".encode(), b"\xff", b"a\xc3", b"\x80a"])
def test_what_is_no_such_text_is_refused(wrong: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        latin1.looked_through([b"abc", wrong])


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
    data = b"before" + pickle.dumps(value, protocol)
    there = in_a_file(data + b"after", 6)
    found, end = unpickle_data(there, KNOWN)
    assert 6 + end == len(data)
    assert (type(found["b"][3]), len(found["b"][3])) == (LongBytes, 300)
    assert found["again"] is found["b"][3], "one object"
    assert whole(found) == value
    there.read_up_to(there.nbytes)
    assert there.crc == zlib.crc32((data + b"after")[6:])
    for cut in range(6, len(data)):
        with pytest.raises(UnpicklingError):
            unpickle_data(in_a_file(data[:cut], 6), KNOWN)


@pytest.mark.usefixtures("tiny")
def test_long_names_have_an_end() -> None:
    long = b"c" + b"m" * 5000
    assert unpickle_data(in_a_file(b"\x80\x02" + long + b"\nx\n."), KNOWN, strangers=True)[0].name.startswith("mmm")
    with pytest.raises(UnpicklingError, match="ends early"):
        unpickle_data(in_a_file(b"\x80\x02" + long), KNOWN, strangers=True)


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


@pytest.mark.parametrize("step", [999, latin1.STEP_NBYTES])
@pytest.mark.parametrize("protocol", [None, 2, 3, 4, 5])
def test_arrays_and_bytes_come_back(
    protocol: int | None, step: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latin1, "STEP_NBYTES", step)
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
def test_parts_of_an_array_are_read(protocol: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latin1, "STEP_NBYTES", 1000)
    matrix = torch.from_numpy(saved(tmp_path / "a", protocol)["matrix"])
    contents = read_any(str(tmp_path / "a"), Files())
    tensor = contents.tensors["matrix"]
    for chosen in [(slice(3, 7), slice(0, 50)), (slice(0, 300), slice(4, 6)), (slice(299, 300), slice(49, 50))]:
        found = read_tensor(contents, tensor, chosen, Files(), threads=2, verify=False)
        assert torch.equal(found, matrix[chosen])


def test_only_what_is_not_long_counts_for_how_much_of_a_pickle_is_read(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = saved(tmp_path / "a", 2)
    monkeypatch.setattr(pickle_cursor, "WINDOW_NBYTES", 100)
    monkeypatch.setattr(refusals, "MAX_NBYTES", 120_000)  # with the bytearray, which is a value like any other
    assert same(state, asyncckpt.load(tmp_path / "a"))
    monkeypatch.setattr(refusals, "MAX_NBYTES", 500)
    with pytest.raises(UnsupportedFormatError, match="more than are read"):
        asyncckpt.load(tmp_path / "a")


def archived(path: pathlib.Path, value: bytes) -> None:
    """Write an archive of a dict with one value, as its opcodes."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x04}X\x01\0\0\0v" + value + b"s.")
        archive.writestr("archive/version", "3")


@pytest.mark.parametrize("what", ["key", "member", "argument", "text", "leaf"])
def test_long_values_that_are_named_over_and_over_are_read_once(
    what: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    reads: list[int] = []
    real = FilePickle.hold

    def hold(self: FilePickle, at: int, nbytes: int) -> bytes:
        reads.append(nbytes)
        return real(self, at, nbytes)

    monkeypatch.setattr(FilePickle, "hold", hold)
    if what in ("text", "leaf"):
        with pytest.raises(UnsupportedFormatError, match="out of proportion"):
            read_any(str(tmp_path / "a"), Files())
    else:
        read_any(str(tmp_path / "a"), Files())
    assert sum(reads) <= n, "however often it is named"


@pytest.mark.parametrize("kind", ["itself", "keyed", "deep", "doubled"])
def test_leaves_without_an_end_are_refused_beside_long_bytes(
    kind: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "MAX_TENSORS", 10_000)
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


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("to", ["asyncckpt", "torch"])
def test_bytes_that_change_after_they_were_looked_through_are_found(
    protocol: int, to: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"a": np.random.default_rng(0).bytes(100_000), "x": np.zeros(200_000, np.uint8)}
    torch.save(state, tmp_path / "a", pickle_protocol=protocol)
    data = (tmp_path / "a").read_bytes()
    at = data.index(bytes(5000)) + 1000
    before = os.stat(tmp_path / "a")
    real = converter.write_files

    def write_files(*arguments: Any, **kw: Any) -> dict[str, bytes]:
        with (tmp_path / "a").open("r+b") as file:
            file.seek(at)
            file.write(b"\x01")
        os.utime(tmp_path / "a", ns=(before.st_atime_ns, before.st_mtime_ns))
        return real(*arguments, **kw)

    monkeypatch.setattr(converter, "write_files", write_files)
    with pytest.raises(CorruptCheckpointError, match="not what they were when that was read"):
        asyncckpt.convert(tmp_path / "a", tmp_path / "b", to=to)
    assert not (tmp_path / "b").exists()


def test_a_text_that_is_none_any_more_is_an_error(tmp_path: pathlib.Path) -> None:
    saved(tmp_path / "a", 2)
    contents = read_any(str(tmp_path / "a"), Files())
    data = bytearray((tmp_path / "a").read_bytes())
    at = data.index(b"_codecs") + 100
    for wrong in (b"\xff" * 20, "é".encode() * 20_000):
        with (tmp_path / "a").open("r+b") as file:
            file.seek(at)
            file.write(wrong)
        with pytest.raises(CorruptCheckpointError, match=r"was changed|changed or replaced"):
            read_tensor(contents, contents.tensors["bytes"], (...,), Files(), threads=1, verify=False)
