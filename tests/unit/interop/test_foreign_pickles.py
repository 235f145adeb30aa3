"""Pickles of others are data: whatever they say, nothing is imported, called or changed, and the global is named."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import struct
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import foreign_samples
import pytest
import torch
from conversions import Workdir, ends_within_a_gigabyte, torch_archive

import asyncckpt
from asyncckpt.cli import main
from asyncckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from asyncckpt.format.objects import Record
from asyncckpt.interop.sources import pickle_globals, pickle_tree
from asyncckpt.interop.sources.pickle_globals import KNOWN, storage_of
from asyncckpt.interop.sources.unpickler import Maker, UnpicklingError, unpickle_data

CALLS: list[str] = []


def called(*_: Any) -> None:
    CALLS.append("called")


class Reduced:
    def __reduce__(self) -> Any:
        return called, ("x",)


class Evaluated:
    def __reduce__(self) -> Any:
        return eval, ("__import__('os').system('true')",)


class Executed:
    def __reduce__(self) -> Any:
        return os.system, ("touch hostile",)


HOSTILE: dict[str, bytes] = {
    "reduce": pickle.dumps({"a": Reduced()}, 2),
    "reduce protocol 4": pickle.dumps([Reduced()], 4),
    "eval": pickle.dumps(Evaluated(), 2),
    "os.system": pickle.dumps(Executed(), 2),
    "inst": b"\x80\x02(S'true'\nios\nsystem\n.",
    "obj": b"\x80\x02(cos\nsystem\nX\x04\x00\x00\x00trueo.",
    "dotted name": b"\x80\x04\x8c\x05torch\x8c\x12serialization.os.system\x93\x8c\x04true\x85R.",
    "dotted module": b"\x80\x02ctorch.serialization.os\nsystem\nX\x04\x00\x00\x00true\x85R.",
    "getattr chain": b"\x80\x02cbuiltins\ngetattr\ncos\nsystem\nX\x01\x00\x00\x00x\x86R.",
    "python 2 getattr": b"\x80\x02c__builtin__\ngetattr\n(ctorch\nTensor\nX\x01\x00\x00\x00xtR.",
    "build of a maker": b"\x80\x02ccollections\nOrderedDict\n}X\x04\x00\x00\x00makeK\x01sb.",
    "build of a dict": b"\x80\x02}}X\x01\x00\x00\x00aK\x01sb.",
    "build of a tensor class": b"\x80\x02ctorch\nTensor\n}X\x01\x00\x00\x00aK\x01sb.",
    "call of an inert class": b"\x80\x02ctorch\nTensor\n)R.",
    "call of a dtype": b"\x80\x02ctorch\nfloat32\n)R.",
    "call of a record": b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)R)R.",
    "call of a record's class with arguments": b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n"
    b"X\x01\x00\x00\x00x\x85R.",
    "call of a text": b"\x80\x02X\x01\x00\x00\x00x)R.",
    "new object with keywords": b"\x80\x04ccollections\nOrderedDict\n)}\x92.",
    "extension registry": b"\x80\x02\x82\x01.",
    "persistent text": b"\x80\x02Pos.system\n.",
    "storage of another class": b"\x80\x02(X\x07\x00\x00\x00storagecos\nsystem\n"
    b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQ.",
    "rebuild by another function": b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n"
    b"(cos\nsystem\nctorch\nTensor\n)NtR.",
    "append to a dict": b"\x80\x02}K\x01a.",
    "items of a list": b"\x80\x02]K\x01K\x02s.",
    "codec": b"\x80\x02c_codecs\nencode\n(X\x01\x00\x00\x00xX\x05\x00\x00\x00rot13tR.",
    "protocol 0": b"cos\nsystem\n(S'true'\ntR.",
    "unhashable key": b"\x80\x02}]K\x01s.",
    "huge memo number": b"\x80\x02K\x01r\xff\xff\xff\xff.",
    "bytes longer than the file": b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "bytearray longer than the file": b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "no end": b"\x80\x02K\x01",
    "nothing on the stack": b"\x80\x02.",
    "mark on the stack": b"\x80\x02(\x85.",
    "empty": b"",
}
NAMES = {"reduce": "test_foreign_pickles.called", "eval": "builtins.eval", "getattr chain": "builtins.getattr"}


@pytest.mark.parametrize("opaque", [False, True])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_is_refused_and_nothing_runs(
    name: str, opaque: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    CALLS.clear()
    modules = set(sys.modules)
    try:
        found, _ = unpickle_data(HOSTILE[name], KNOWN, storage_of, opaque=opaque)
    except UnpicklingError as error:
        if name in NAMES:
            assert str(error.name).endswith(NAMES[name].rpartition(".")[2])
    else:
        assert (name, found) == ("huge memo number", 1) or (opaque and "OpaqueGlobal" in repr(_types_in(found)))
    assert not CALLS
    assert not os.listdir(tmp_path)
    assert set(sys.modules) == modules


def _types_in(value: Any) -> list[type]:
    members = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return [type(value), *map(type, members)]


@pytest.mark.parametrize("where", ["torch", "legacy", "dcp metadata", "dcp item"])
def test_a_hostile_file_is_a_typed_error_that_names_the_global(
    where: str, work: Workdir, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("numpy")
    path, state = work / "a", {"x": torch.ones(2), "y": Reduced()}
    if where.startswith("dcp"):
        foreign_samples.save_dcp({"x": torch.ones(2)} if where == "dcp metadata" else state, path)
    else:
        work.torch(state, older=where == "legacy")
    if where == "dcp metadata":
        (path / ".metadata").write_bytes(pickle.dumps(Reduced()))
    CALLS.clear()
    reads = [asyncckpt.load, lambda _: work.convert("torch")]
    reads += [asyncckpt.open_checkpoint] if where == "dcp metadata" else []
    for read in reads:
        with pytest.raises(UnsupportedFormatError) as caught:
            read(path)
        assert str(caught.value.found).endswith(".called")  # type: ignore[attr-defined]
    code = 1 if where == "dcp metadata" else 0  # of a leaf that nobody asks for it is no fault
    assert main(["inspect", str(path)]) == code
    assert main(["verify", str(path)]) == code
    said = capsys.readouterr()
    assert ".called" in (said.err if code else said.out)
    assert not CALLS and work.names() == ["a"]


_TWICE = b"N" + b"2\x86" * 45
"""Tuples of the one before, twice: small, and without end for whoever looks at each member."""

ENDLESS: dict[str, bytes] = {
    "deep tuple as key": b"\x80\x02}N" + b"\x85" * 400_000 + b"Ns.",
    "deep tuple in a frozenset": b"\x80\x04(N" + b"\x85" * 400_000 + b"\x91.",
    "deep tuple in a set": b"\x80\x04\x8f(N" + b"\x85" * 400_000 + b"\x90.",
    "deep tuple in a set that is called": b"\x80\x02c__builtin__\nset\n]N" + b"\x85" * 400_000 + b"a\x85R.",
    "wide tuple as key": b"\x80\x02}" + _TWICE + b"Ns.",
    "wide tuple as key of pairs": b"\x80\x02ccollections\nOrderedDict\n](" + _TWICE + b"Nta\x85R.",
    "wide tuple in a counter": b"\x80\x02ccollections\nCounter\n](" + _TWICE + b"Nta\x85R.",
    "wide tuple is called": b"\x80\x02" + _TWICE + b")R.",
    "wide tuple as storage": b"\x80\x02" + _TWICE + b"Q.",
    "wide tuple as device": b"\x80\x02ctorch\ndevice\n" + _TWICE + b"\x85R.",
    "wide tuple as path": b"\x80\x02cpathlib\nPosixPath\n" + _TWICE + b"\x85R.",
    "wide tuple as numpy dtype": b"\x80\x02cnumpy\ndtype\n" + _TWICE + b"\x85R.",
    "wide tuple as shape": b"\x80\x02ctorch\nSize\n" + _TWICE + b"\x85\x85R.",
    "wide tuple as attribute": b"\x80\x02ccollections\nOrderedDict\n)R}(" + _TWICE + b"Ntb.",
    "text copied many times": b"\x80\x02X\x00\x00\x10\x00"
    + b"a" * (1 << 20)
    + b"q\x000X\x06\x00\x00\x00latin1q\x010("
    + b"c_codecs\nencode\n(h\x00h\x01tR" * 20_000
    + b"t.",
}


def test_a_pickle_takes_no_more_time_stack_or_memory_than_its_length_warrants(tmp_path: Path) -> None:
    for name, data in ENDLESS.items():
        (tmp_path / name).write_bytes(data)
    code = """
import os
from asyncckpt.interop.sources.pickle_globals import KNOWN, storage_of
from asyncckpt.interop.sources.unpickler import UnpicklingError, unpickle_data
for name in os.listdir(sys.argv[1]):
    print(name, flush=True)
    try:
        unpickle_data(open(os.path.join(sys.argv[1], name), "rb").read(), KNOWN, storage_of)
    except UnpicklingError as error:
        assert "MemoryError" not in str(error)
    else:
        raise AssertionError("it was read")
"""
    ends_within_a_gigabyte(code, tmp_path)


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x02]q\x00" + b"".join(b"](h%ch%ceq%c" % (n, n, n + 1) for n in range(40)) + b".",
        b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s.",
    ],
    ids=["doubled over and over", "inside itself"],
)
def test_a_container_without_an_end_is_refused(pickled: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle_tree, "MAX_TENSORS", 10_000)
    with pytest.raises(UnsupportedFormatError):
        asyncckpt.load(torch_archive(tmp_path / "a.pt", pickled))


def test_a_tensor_beyond_its_storage_is_refused(tmp_path: Path) -> None:
    stream = io.BytesIO()
    torch.save({"x": torch.ones(4)}, stream)
    data = stream.getvalue().replace(b"K\x04\x85", b"K\x09\x85")
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="beyond"):
        asyncckpt.load(tmp_path / "a.pt")


def test_everything_that_torch_s_own_list_makes_is_known_or_refused_by_name() -> None:
    from torch import _weights_only_unpickler as stock

    names = set(stock._get_allowed_globals())
    missing = {name for name in names if name not in KNOWN}
    accepted = ("Storage", "Tensor", "_rebuild_", "torch.int", "torch.uint", "torch.q", "torch.per_", "torch.bits")
    assert all(any(part in name for part in accepted) for name in missing), missing


def test_no_maker_of_the_table_is_anything_but_ours() -> None:
    plain, ours = {slice}, (pickle_globals.__name__,)
    for name, value in KNOWN.items():
        made = value.make if isinstance(value, Maker) else None
        assert made is None or made in plain or made.__module__ in ours, name


def test_attributes_of_an_ordered_dict_are_told_and_none_is_set() -> None:
    data = b"\x80\x02ccollections\nOrderedDict\n)R}(X\x0c\x00\x00\x00__setstate__K\x01X\x05\x00\x00\x00clearK\x02ub."
    found, _ = unpickle_data(data, KNOWN, storage_of)
    assert type(found) is OrderedDict
    assert vars(found) == {"_metadata": None, "_others": "'__setstate__', 'clear'"}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_stock_pickle_writes_of_plain_values_is_read_in_every_protocol(protocol: int) -> None:
    value = {
        "int": [0, 255, 256, 65535, 65536, -1, 1 << 40, -(1 << 99), 1 << 3000],
        "float": [0.0, -1.5, 1e300],
        "text": ["", "ü" * 300, "\ud800"],
        "tuple": ((), (1,), (1, 2), (1, 2, 3), tuple(range(9))),
        "set": {1, 2},
        "none": [None, True, False],
        "complex": 1j,
        "bytes": (b"\x00\xff", bytearray(b"\x00\xff")),
        (1, ("a", frozenset({2, (3, 4)}))): {frozenset({("x", 1)})},
        tuple(range(900)): {(5, 6)},
    }
    value["again"] = value["int"]
    found, end = unpickle_data(pickle.dumps(value, protocol), KNOWN)
    assert found == value and found["again"] is found["int"]
    assert end == len(pickle.dumps(value, protocol))


def test_random_bytes_raise_nothing_but_the_one_error(rng: Any) -> None:
    sound = pickle.dumps({"a": [1, (2, "x")], "b": {3: None}}, 4)
    for _ in range(3000):
        data = bytearray(sound)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        with contextlib.suppress(UnpicklingError):
            unpickle_data(bytes(data), KNOWN, storage_of)


def test_reading_a_pickle_imports_neither_pickle_nor_torch(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(2)}, tmp_path / "a.pt")
    code = (
        "import sys; from asyncckpt.cli import main; code = main(['inspect', sys.argv[1]]);"
        "assert not {'torch', 'numpy'} & set(sys.modules); sys.exit(code)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.pt")], check=True, timeout=60, capture_output=True)


def test_a_record_keeps_its_state_apart_from_itself() -> None:
    data = (
        struct.pack("<2s", b"\x80\x02")
        + b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}X\x03\x00\x00\x00getK\x01sb."
    )
    found, _ = unpickle_data(data, KNOWN)
    assert isinstance(found, Record)
    assert found.get("get") == 1
    assert callable(found.get)
