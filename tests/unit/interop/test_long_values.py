"""Long bytes, texts and numpy arrays: the same values in every kind, and pickles read as far as they reach."""

from __future__ import annotations

import codecs
import pickle
import random
from typing import Any

import dcp_calls
import pytest
import torch
from conversions import Workdir, flip, torch_archive
from torch.distributed.checkpoint import FileSystemReader

from asyncckpt.errors import CorruptCheckpointError, UnsupportedFormatError, UnsupportedLeafError
from asyncckpt.interop import write_torch
from asyncckpt.interop.diff import compare
from asyncckpt.interop.sources import pickle_tree, unpickler
from asyncckpt.interop.sources.detect import read_any
from asyncckpt.interop.sources.pickle_globals import KNOWN
from asyncckpt.interop.sources.unpickler import PickleStream, UnpicklingError, unpickle_data
from asyncckpt.loading.fetch import read_tensor
from asyncckpt.state_dict.flatten import HOIST_NBYTES
from asyncckpt.storage.files import Files

np = pytest.importorskip("numpy")

LONG = random.Random(0).randbytes(pickle_tree.LONG_NBYTES + 77)

# ---- bytes ----------------------------------------------------------------------------------------------------------


def test_as_long_as_in_saves_of_ours() -> None:
    assert pickle_tree.LONG_NBYTES == HOIST_NBYTES


def written(kind: str, work: Workdir, name: str = "a") -> dict[str, Any]:
    """Save a state that has them, long and short, in lists and tuples; return it."""
    state = {"long": LONG, "short": LONG[:100], "list": [LONG, 1], "tuple": (LONG[::-1], {2}), "w": torch.ones(3)}
    if kind in ("2", "5"):
        work.torch(state, name, pickle_protocol=int(kind))
    else:
        (work.ours if kind == "ours" else work.dcp)(state, name)
    return state


@pytest.mark.parametrize("to", ["asyncckpt", "dcp", "torch"])
@pytest.mark.parametrize("kind", ["ours", "storage writer", "2", "5"])
def test_every_kind_holds_long_bytes(kind: str, to: str, work: Workdir) -> None:
    state = written(kind, work)
    work.convert(to)
    found = work.load()
    assert found.keys() == state.keys() and all(found[name] == state[name] for name in found if name != "w")
    if to == "torch":
        assert torch.load(work / "b", weights_only=True)["list"] == state["list"]
    if to == "dcp":
        target: dict[str, Any] = {"long": None, "list": [None, None], "w": torch.zeros(3)}
        dcp_calls.load(target, FileSystemReader(work / "b"))
        assert (target["long"], target["list"]) == (state["long"], state["list"])
    for other in ("ours", "storage writer", "2"):
        written(other, work, other)
        assert not compare(str(work / "b"), str(work / other)).differences
        assert not compare(str(work / other), str(work / "b"), data=False).differences


def test_bytes_that_stand_twice_are_written_once(work: Workdir) -> None:
    work.torch({"a": LONG, "b": [LONG, 1], "c": LONG[::-1]})
    work.convert("torch")
    found = torch.load(work / "b", weights_only=True)
    assert found["a"] is found["b"][0]
    assert (found["a"], found["c"]) == (LONG, LONG[::-1])
    assert (work / "b").stat().st_size < 2.1 * len(LONG.decode("latin1").encode())


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_other_bytes_in_the_target_are_found(to: str, work: Workdir, monkeypatch: pytest.MonkeyPatch) -> None:
    written("2", work)
    monkeypatch.setattr(write_torch, "bytes_at", lambda outline, node, files: LONG[:-1] + bytes([LONG[-1] ^ 1]))
    with pytest.raises(CorruptCheckpointError, match=r"has another value|on one side"):
        work.convert(to)
    assert work.names() == ["a"]


@pytest.mark.parametrize("limit", [300, len(LONG) * 3], ids=["the bytes", "their text, of two characters for some"])
def test_a_pickle_that_nobody_would_read_again_is_not_written(
    limit: int, work: Workdir, monkeypatch: pytest.MonkeyPatch
) -> None:
    written("ours", work)
    monkeypatch.setattr(write_torch, "MAX_NBYTES", limit)
    with pytest.raises(UnsupportedLeafError, match=f"readers accept at most {limit}"):
        work.convert("torch")
    assert work.names() == ["a"]
    if limit > 300:
        work.convert("torch", keys=["short", "w"])


def test_a_long_text_that_is_no_encoded_bytes_is_a_text_or_an_error() -> None:
    text = "é" * 5000
    long = pickle.dumps({"a": text, "b": text.encode("latin1")}, 2)
    assert unpickle_data(long, KNOWN)[0] == {"a": text, "b": text.encode("latin1")}

    def encoding(utf8: bytes) -> bytes:
        header = b"\x80\x02c_codecs\nencode\nX" + len(utf8).to_bytes(4, "little")
        return header + utf8 + b"X\x06\x00\x00\x00latin1\x86R."

    assert unpickle_data(encoding(b"a" * 2000), KNOWN)[0] == b"a" * 2000
    for wrong in ("€".encode() * 1000, b"\xff" * 2000, b"a" * 2000 + b"\xc3"):
        with pytest.raises(UnpicklingError):
            unpickle_data(encoding(wrong), KNOWN)
    again = (
        b"\x80\x02(c_codecs\nencode\nq\x00X\xd0\x07\x00\x00" + b"a" * 2000 + b"q\x01X\x06\x00\x00\x00latin1\x86q\x02R"
    )
    found = unpickle_data(again + b"h\x01t.", KNOWN)[0]
    assert found[0] == b"a" * 2000
    assert len(found[1]) == 2000, "which is nothing that a leaf may hold"
    many = again + b"h\x00h\x02R" * 1000 + b"t."
    with pytest.raises(UnpicklingError, match="out of proportion"):
        unpickle_data(many, KNOWN)


def test_a_long_text_beside_what_encodes_is_a_text(work: Workdir) -> None:
    long = "\u00e9" * (1 << 20)
    work.torch({"a": codecs.encode, "b": long, "c": [codecs.encode, long], "d": (codecs.encode, {"e": long})})
    assert work.convert("asyncckpt", partial=True).left_out == ("a", "c.0", "d.0")
    assert work.load() == {"b": long, "c": {1: long}, "d": {1: {"e": long}}}


# ---- pickles that are read from a file ------------------------------------------------------------------------------


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


# ---- arrays ---------------------------------------------------------------------------------------------------------


def saved(work: Workdir, protocol: int, *, older: bool = False) -> dict[str, Any]:
    """Save arrays, bytes and texts that are long, in a zip archive, or in a stream; return them."""
    rng = np.random.default_rng(0)
    state = {
        "bytes": rng.bytes(70_001),
        "matrix": rng.standard_normal((300, 50)),
        "odd": rng.integers(-9, 9, 40_001).astype(np.int16),
        "short": np.arange(5),
        "in": [(rng.bytes(66_000), {2: rng.bytes(90_000)})],
        "mutable": bytearray(rng.bytes(70_000)),
        "text": "x" * 70_000,
        "w": torch.ones(3),
    }
    work.torch(state, older=older, pickle_protocol=protocol)
    return state


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal; an array is also equal to the tensor that it became."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, np.ndarray):
        found = np.asarray(other)
        return bool(one.dtype == found.dtype and np.array_equal(one, found))
    return bool(torch.equal(one, other)) if isinstance(one, torch.Tensor) else bool(one == other)


@pytest.mark.parametrize("older", [False, True], ids=["zip", "older"])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_arrays_and_bytes_come_back(protocol: int, older: bool, work: Workdir) -> None:
    state = saved(work, protocol, older=older)
    assert same(state, work.load("a"))
    for to in ("asyncckpt", "torch", "dcp"):
        work.convert(to, target=to)
        found = work.load(to)
        assert same(state, found), to
        assert isinstance(found["matrix"], np.ndarray if to == "asyncckpt" else torch.Tensor)


@pytest.mark.parametrize("protocol", [2, 4])
def test_parts_of_an_array_are_read(protocol: int, work: Workdir) -> None:
    matrix = torch.from_numpy(saved(work, protocol)["matrix"])
    contents = read_any(str(work / "a"), Files())
    tensor = contents.tensors["matrix"]
    for chosen in [(slice(3, 7), slice(0, 50)), (slice(0, 300), slice(4, 6)), (slice(299, 300), slice(49, 50))]:
        found = read_tensor(contents, tensor, chosen, Files(), threads=2, verify=False)
        assert torch.equal(found, matrix[chosen])


@pytest.mark.parametrize("older", [False, True])
def test_a_pickle_that_is_too_large_is_refused_and_no_damage(
    older: bool, work: Workdir, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(work, 2, older=older)
    monkeypatch.setattr(unpickler, "WINDOW_NBYTES", 100)
    monkeypatch.setattr(unpickler, "MAX_NBYTES", 500)
    with pytest.raises(UnsupportedFormatError, match="the limit is"):
        work.load("a")


def dict_of(value: bytes) -> bytes:
    """Return the opcodes of a dict with one value."""
    return b"\x80\x04}X\x01\0\0\0v" + value + b"s."


@pytest.mark.parametrize("what", ["key", "member", "argument", "text", "leaf"])
def test_long_values_that_are_named_over_and_over_are_held_once_or_refused(what: str, work: Workdir) -> None:
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
    path = str(torch_archive(work / "a", dict_of(data)))
    if what in ("text", "leaf"):
        with pytest.raises(UnsupportedFormatError, match="out of proportion"):
            read_any(path, Files())
    else:
        read_any(path, Files())


@pytest.mark.parametrize("kind", ["itself", "keyed", "deep", "doubled"])
def test_leaves_without_an_end_are_refused_beside_long_bytes(
    kind: str, work: Workdir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickle_tree, "MAX_TENSORS", 10_000)
    first = b"]q\x00(B" + (70_000).to_bytes(4, "little") + bytes(70_000) + b"e"
    value = {
        "itself": first + b"h\x00a",
        "keyed": b"}q\x01(K\x01\x85" + first + b"K\x02h\x01u",
        "deep": first + b"\x85" * 3000,
        "doubled": first + b"".join(b"0](h%ch%ceq%c" % (n, n, n + 1) for n in range(39)),
    }[kind]
    path = str(
        torch_archive(work / "a", dict_of(b"}(K\x01K\x02\x86" + value + b"u"))
    )  # whose key makes an object of the dict
    with pytest.raises(UnsupportedFormatError, match=r"nested deeper|more than 10000 values|out of proportion"):
        read_any(path, Files())


@pytest.mark.parametrize(
    ("place", "at"), [(b"_codecs", 40_000), (b"_codecs", 0), (b"\x80\x02}", 2)], ids=["long", "name", "opcode"]
)
def test_a_damaged_pickle_is_said_to_be_damaged_whatever_it_says_now(place: bytes, at: int, work: Workdir) -> None:
    saved(work, 2)
    flip(work / "a", place, at, bit=2)
    with pytest.raises(CorruptCheckpointError, match="differs from its CRC-32"):
        work.load("a")
