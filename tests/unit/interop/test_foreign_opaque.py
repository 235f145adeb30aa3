"""Objects of classes that are not on the list: their leaves are named and not read, everything beside them is."""

from __future__ import annotations

import argparse
import codecs
import collections
import contextlib
import dataclasses
import enum
import io
import json
import pickle
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import foreign_samples
import pytest
import torch
from conversions import Workdir, ends_within_a_gigabyte, torch_archive

import asyncckpt
from asyncckpt.cli import main
from asyncckpt.errors import AsyncCkptError, CorruptCheckpointError, UnsupportedFormatError
from asyncckpt.interop.sources.pickle_globals import KNOWN, storage_of
from asyncckpt.interop.sources.torch_file import read_torch_file
from asyncckpt.interop.sources.unpickler import OpaqueGlobal, UnpicklingError, unpickle_data
from asyncckpt.interop.sources.unread_leaves import unread_leaves
from asyncckpt.storage.files import Files

HERE = __name__


@dataclasses.dataclass
class Options:
    lr: float = 0.1
    weights: Any = None


class Color(enum.Enum):
    RED = 1


class Names(dict[Any, Any]):
    """A dict of its own class: SETITEMS."""


class Members(list[Any]):
    """A list of its own class: APPENDS."""


class WithKeywords:
    """NEWOBJ_EX from protocol 4 on."""

    def __getnewargs_ex__(self) -> Any:
        return (1,), {"a": 2}


class Outer:
    class Inner:
        """Protocol 2 has no global for it: `getattr`."""


class Weights(torch.Tensor):
    """A tensor subclass."""


class LivingState:
    """`__setstate__` tells if it is called."""

    calls: ClassVar[list[Any]] = []

    def __getstate__(self) -> Any:
        return {"a": 1}

    def __setstate__(self, state: Any) -> None:
        self.calls.append(state)


def training_state() -> dict[str, Any]:
    return {
        "model": {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2)},
        "args": argparse.Namespace(lr=0.1),
        "options": Options(weights=torch.ones(3)),
        "buffer": io.BytesIO(b"abc"),
        "step": 7,
    }


def save(kind: str, state: Any, work: Workdir, name: str = "a") -> Path:
    if kind == "dcp":
        foreign_samples.save_dcp(state, work / name)
        return work / name
    return work.torch(state, name, older=kind == "legacy")


@pytest.fixture(params=["torch", "legacy", "dcp"])
def path(request: pytest.FixtureRequest, work: Workdir) -> Path:
    return save(request.param, training_state(), work)


UNREAD = {"args": "argparse.Namespace", "options": f"{HERE}.Options", "buffer": "_io.BytesIO"}


def test_what_stands_beside_objects_that_are_not_read_is_loaded_by_keys_and_into_a_target(path: Path) -> None:
    for keys in (["model"], ["model", "step"], "model.w"):
        found = asyncckpt.load(path, keys=keys)
        assert torch.equal(found["model"]["w"], torch.arange(6.0).reshape(2, 3))
    target: Any = {"model": {"w": torch.zeros(2, 3), "b": torch.zeros(2)}, "step": 0}
    assert asyncckpt.plan_load(path, target).fits
    asyncckpt.load(path, target)
    assert target["step"] == 7 and target["model"]["w"].sum() == 15
    plan = asyncckpt.plan_load(path, {"model": {"w": torch.zeros(2, 3)}, "args": None})
    assert [(leaf.fqn, leaf.saved) for leaf in plan.mismatched] == [("args", "argparse.Namespace, not read")]
    assert not plan.fits


def test_loading_everything_names_all_that_is_not_read_and_changes_nothing(path: Path) -> None:
    with pytest.raises(UnsupportedFormatError) as caught:
        asyncckpt.load(path)
    assert caught.value.found == "argparse.Namespace"  # type: ignore[attr-defined]
    assert all(f"{fqn}: {kind}, not read" in str(caught.value) for fqn, kind in UNREAD.items())
    target = {"model": {"w": torch.zeros(2, 3), "b": torch.zeros(2)}, "args": None, "step": 0}
    with pytest.raises(UnsupportedFormatError, match="args"):
        asyncckpt.load(path, target)
    assert not target["model"]["w"].any()  # type: ignore[index]
    assert target["step"] == 0


def test_an_open_checkpoint_lists_them_and_refuses_each_by_name(path: Path) -> None:
    with asyncckpt.open_checkpoint(path) as found:
        assert dict(found.unread) == UNREAD
        assert set(found.unread) < set(found.keys())
        assert found.objects["step"] == 7
        assert torch.equal(found.tensor("model.b"), torch.ones(2))
        for fqn, kind in UNREAD.items():
            for objects in (found.objects, found.objects_of(0)):
                with pytest.raises(UnsupportedFormatError, match=fqn) as caught:
                    objects[fqn]
                assert caught.value.found == kind  # type: ignore[attr-defined]


def test_inspect_and_verify_list_them_by_name(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["inspect"], ["verify"], ["verify", "--fast"]):
        assert main([*command, str(path)]) == 0
        said = capsys.readouterr().out
        assert all(f"{kind}, not read" in said and fqn in said for fqn, kind in UNREAD.items())
        assert "Options, not read: 1 tensor in it" in said
    assert main(["inspect", "--json", str(path)]) == 0
    objects = json.loads(capsys.readouterr().out)["objects"]
    assert {found["fqn"]: found["unread"] for found in objects if "unread" in found} == UNREAD
    assert main(["verify", "--json", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)[0]["unread"].keys() == UNREAD.keys()


def test_diff_compares_the_rest_and_says_of_what_it_knows_the_class_alone(
    path: Path, work: Workdir, capsys: pytest.CaptureFixture[str]
) -> None:
    state = training_state()
    state["options"] = {"lr": 0.1}
    changed = save("torch", state, work, "other")
    assert main(["diff", str(path), str(path)]) == 0
    assert "3 leaves cannot be read on either side" in capsys.readouterr().out
    assert main(["diff", "--json", str(path), str(changed)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["unread"].keys() == {"args", "buffer"}
    assert {row["fqn"] for row in found["differences"]} == {"options", "options.lr"}
    assert main(["diff", "--keys", "model", str(path), str(changed)]) == 0


@pytest.mark.parametrize(("kind", "to"), [("torch", "asyncckpt"), ("dcp", "torch"), ("legacy", "dcp")])
def test_a_conversion_refuses_them_all_by_name_or_leaves_them_out_if_told_so(kind: str, to: str, work: Workdir) -> None:
    save(kind, training_state(), work)
    with pytest.raises(UnsupportedFormatError, match="partial=True") as caught:
        work.convert(to)
    assert all(f"{fqn}: {kind}, not read" in str(caught.value) for fqn, kind in UNREAD.items())
    assert work.names() == ["a"]
    assert set(work.convert(to, partial=True).left_out) == UNREAD.keys()
    found = work.load()
    assert found.keys() == {"model", "step"}
    assert torch.equal(found["model"]["w"], torch.arange(6.0).reshape(2, 3))
    assert not work.convert(to, keys=["model"], overwrite=True).left_out


def unread(value: Any, directory: Path, kind: str = "torch", **options: Any) -> dict[str, str]:
    target = directory / f"{kind}.pt"
    torch.save(value, target, _use_new_zipfile_serialization=kind == "torch", **options)
    with asyncckpt.open_checkpoint(target) as found:
        return dict(found.unread)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"a": {"b": [1, Options(), torch.ones(1)]}}, {"a.b.1": f"{HERE}.Options"}),
        ({"a": {(1, 2): Options()}, "b": 1}, {"a.(1, 2)": f"{HERE}.Options"}),
        ({"a": {1j: Options()}, "b": 1}, {"a": f"{HERE}.Options"}),
        ({"a": {Color.RED: torch.ones(1)}, "b": 1}, {"a": f"{HERE}.Color"}),
        ({"a": {(Color.RED, 1): 1}, "b": 1}, {"a": f"{HERE}.Color"}),
        ({"a": {1, Color.RED}, "b": frozenset({Color.RED})}, {"a": f"{HERE}.Color", "b": f"{HERE}.Color"}),
        ({"a": {(1, 2): torch.ones(1)}, "b": 1}, {}),
        ({"a": {1j: torch.ones(1)}, "b": 1}, {"a": "tensor"}),
        ({"a": Names(x=1), "b": Members([1, 2])}, {"a": f"{HERE}.Names", "b": f"{HERE}.Members"}),
        ({"a": collections.deque([1, 2], 3)}, {"a": "collections.deque"}),
        ({"a": Options, "b": torch.Tensor}, {"a": f"{HERE}.Options", "b": "torch.Tensor"}),
        ({"a": LivingState(), "b": contextlib.suppress}, {"a": f"{HERE}.LivingState", "b": "contextlib.suppress"}),
        ({"a": collections.defaultdict(Options, {"x": 1})}, {}),
        (Options(), {"value": f"{HERE}.Options"}),
        ([1, Options()], {"1": f"{HERE}.Options"}),
    ],
)
@pytest.mark.parametrize(("kind", "protocol"), [("torch", 2), ("torch", 4), ("legacy", 2)])
def test_the_smallest_leaf_around_an_object_is_not_read(
    kind: str, protocol: int, value: Any, expected: dict[str, str], tmp_path: Path
) -> None:
    LivingState.calls.clear()
    assert unread(value, tmp_path, kind, pickle_protocol=protocol) == expected
    assert not LivingState.calls


def test_what_tells_of_its_class_in_another_way_is_named_by_it(tmp_path: Path) -> None:
    assert unread({"a": WithKeywords()}, tmp_path, pickle_protocol=4) == {"a": f"{HERE}.WithKeywords"}
    assert unread({"a": Outer.Inner()}, tmp_path) == {"a": f"{HERE}.Outer.Inner"}
    data = b"\x80\x02ctorch._utils\n_rebuild_wrapper_subclass\ncm\nC\nK\x01\x86R."
    assert unpickle_data(data, KNOWN, opaque=True)[0].name == "m.C"


def test_tensor_subclasses_and_tensors_of_unknown_sorts_are_not_read_one_by_one(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {
            "plain": torch.ones(2),
            "own": torch.ones(2).as_subclass(Weights),
            "sparse": torch.eye(3).to_sparse(),
            "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
            "module": torch.nn.Linear(2, 2),
        }
    found = unread(state, tmp_path)
    assert found.keys() == {"own", "sparse", "quantized", "module"}
    assert found["own"] == f"{HERE}.Weights"
    assert found["module"] == "torch.nn.modules.linear.Linear"
    assert torch.equal(asyncckpt.load(tmp_path / "torch.pt", keys=["plain"])["plain"], torch.ones(2))


def test_the_same_object_at_two_places_is_named_at_both(tmp_path: Path) -> None:
    options = Options()
    options.weights = options
    assert unread({"a": options, "b": [options, torch.ones(1)], "c": 1}, tmp_path).keys() == {"a", "b.0"}


def test_a_container_in_one_dcp_item_keeps_its_other_members(tmp_path: Path) -> None:
    foreign_samples.save_dcp({"a": {(1, 2): Options()}, "x": torch.ones(2), "groups": [Options(), 5]}, tmp_path / "d")
    with asyncckpt.open_checkpoint(tmp_path / "d") as found:
        assert set(found.unread.values()) == {f"{HERE}.Options"}
        assert "x" not in found.unread
        assert 5 in [found.objects[fqn] for fqn in found.objects if fqn not in found.unread]


@pytest.mark.filterwarnings("ignore")
def test_a_dcp_tensor_of_its_own_class_is_named_where_it_is_read(tmp_path: Path) -> None:
    foreign_samples.save_dcp({"w": torch.ones(2).as_subclass(Weights), "x": torch.ones(2)}, tmp_path / "d")
    assert torch.equal(asyncckpt.load(tmp_path / "d", keys=["x"])["x"], torch.ones(2))
    with pytest.raises(UnsupportedFormatError, match="'w'") as caught:
        asyncckpt.load(tmp_path / "d")
    assert caught.value.found == f"{HERE}.Weights"  # type: ignore[attr-defined]


def test_versions_of_a_module_that_cannot_be_read_cost_the_versions_alone(tmp_path: Path) -> None:
    weights: Any = collections.OrderedDict(w=torch.ones(2))
    weights._metadata = {"": Options()}
    torch.save({"model": weights}, tmp_path / "a.pt")
    found = asyncckpt.load(tmp_path / "a.pt")
    assert not hasattr(found["model"], "_metadata")
    report = asyncckpt.convert(tmp_path / "a.pt", tmp_path / "b", to="asyncckpt")
    assert any("versions, were not read" in said and "Options" in said for said in report.changed)


def test_arrays_of_objects_are_not_read(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    value = {"a": numpy.array([None, "x"], dtype=object), "b": numpy.ones(2)}
    assert unread(value, tmp_path) == {"a": "numpy.ndarray"}


def test_what_an_older_file_says_of_an_unknown_storage_is_named(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {"w": torch.ones(1), "q": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedFormatError) as caught:
        asyncckpt.open_checkpoint(tmp_path / "a.pt")
    assert caught.value.found == "torch.QInt8Storage"  # type: ignore[attr-defined]


def test_names_of_classes_are_fit_for_a_terminal_and_short(tmp_path: Path) -> None:
    for name in ("a\x1b[2Jb", "x" * 10_000, "\ud800", "a\nb"):
        found, _ = unpickle_data(b"\x80\x04\x8c\x01m" + pickled_text(name) + b"\x93.", KNOWN, opaque=True)
        assert isinstance(found, OpaqueGlobal)
        assert found.name.isprintable()
        assert len(found.name) <= 400


def pickled_text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return b"X" + len(data).to_bytes(4, "little") + data


_C = b"cm\nC\n"
_TWICE = b"N" + b"2\x86" * 45
ENDLESS: dict[str, bytes] = {
    "calls of calls": b"\x80\x02}X\x01\x00\x00\x00a" + _C + b")R" * 400_000 + b"s.",
    "arguments of arguments": b"\x80\x02}X\x01\x00\x00\x00a" + _C * 40_000 + b")R" + b"\x85R" * 39_999 + b"s.",
    "states of states": b"\x80\x02}X\x01\x00\x00\x00a" + _C * 40_000 + b"b" * 39_999 + b"s.",
    "a wide state": b"\x80\x02}X\x01\x00\x00\x00a" + _C + _TWICE + b"bs.",
    "itself": b"\x80\x02}X\x01\x00\x00\x00a" + _C + b"q\x00" + b"h\x00b" * 100_000 + b"s.",
    "items of one list": b"\x80\x02}X\x01\x00\x00\x00a](" + (_C + b")R") * 20_000 + b"es.",
    "one large state of many": b"\x80\x02}X\x01\x00\x00\x00a]("
    + b"N" * 20_000
    + b"eq\x000]("
    + (_C + b"h\x00b") * 5_000
    + b"es.",
    "long names over and over": b"\x80\x04}X\x01\x00\x00\x00a]X\x00\x00\x40\x00"
    + b"x" * (1 << 22)
    + b"q\x000("
    + b"h\x00h\x00\x93" * 20_000
    + b"es.",
    "long attributes over and over": b"\x80\x04}X\x01\x00\x00\x00a]X\x00\x00\x40\x00"
    + b"x" * (1 << 22)
    + b"q\x000cm\nC\nq\x010cbuiltins\ngetattr\nq\x020("
    + b"h\x02h\x01h\x00\x86R" * 20_000
    + b"es.",
    "keys": b"\x80\x02}X\x01\x00\x00\x00a}(" + (_C + b"N") * 100_000 + b"us.",
    "a long name": b"\x80\x02}X\x01\x00\x00\x00acm\n" + b"x" * (8 << 20) + b"\n)Rs.",
}


def test_opaque_globals_take_no_more_time_stack_or_memory_than_their_length_warrants(tmp_path: Path) -> None:
    for name, data in ENDLESS.items():
        torch_archive(tmp_path / name, data)
    code = """
import os
from asyncckpt.interop.sources.torch_file import read_torch_file
from asyncckpt.interop.sources.unread_leaves import unread_leaves
from asyncckpt.storage.files import Files
for name in os.listdir(sys.argv[1]):
    print(name, flush=True)
    found = unread_leaves(read_torch_file(os.path.join(sys.argv[1], name), Files()))
    assert found and all(len(what.described()) < 500 for what in found.values())
    assert "m" not in sys.modules and "torch" not in sys.modules
"""
    ends_within_a_gigabyte(code, tmp_path)


def test_a_function_of_ours_is_not_given_the_same_many_things_over_and_over() -> None:
    data = b"\x80\x02(" + b"N" * 100_000 + b"cm\nC\ntq\x000" + b"ctorch\nSize\nh\x00R0" * 20_000 + b"N."
    with pytest.raises(UnpicklingError, match="proportion"):
        unpickle_data(data, KNOWN, storage_of, opaque=True)


HOSTILE_ANYWHERE: tuple[bytes, ...] = (
    b"\x80\x02cos\nsystem\nX\x10\x00\x00\x00touch hostile.py\x85R.",
    b"\x80\x02cbuiltins\neval\nX\x04\x00\x00\x001/0 \x85R.",
    b"\x80\x02cantigravity\nfly\n)R}b.",
    b"\x80\x02cbuiltins\ngetattr\ncos\nsystem\nX\x01\x00\x00\x00x\x86R.",
    b"\x80\x04cos\nsystem\n)}\x92.",
    b"\x80\x02cos\nsystem\n(K\x01K\x02u(K\x03eK\x04a(\x90}b.",
    b"\x80\x02(X\x07\x00\x00\x00storagecos\nsystem\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQ.",
    b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(cos\nsystem\nctorch\nTensor\n)NtR.",
    b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(cos\nsystem\nK\x00))\x89NtR.",
    b"\x80\x02c__builtin__\nset\n](cos\nsystem\ne\x85R.",
    b"\x80\x02ccollections\nOrderedDict\n](cos\nsystem\nK\x01\x86e\x85R.",
)


@pytest.mark.parametrize("data", HOSTILE_ANYWHERE)
def test_whatever_is_done_to_an_opaque_global_nothing_is_imported_or_run(
    data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    codecs.lookup("cp437")  # zipfile decodes names by it, and so imports it with the first file
    modules = set(sys.modules)
    unpickle_data(data, KNOWN, storage_of, opaque=True)
    contents = read_torch_file(str(torch_archive(tmp_path / "a.pt", data)), Files())
    assert unread_leaves(contents)
    assert {p.name for p in tmp_path.iterdir()} == {"a.pt"}
    assert set(sys.modules) == modules


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02cos\nsystem\nK\x01R.",
        b"\x80\x04cos\nsystem\n)K\x01\x92.",
        b"\x80\x04ccollections\nOrderedDict\n)}\x92.",
        b"\x80\x02(iso\nsystem\n.",
        b"\x80\x02\x92.",
    ],
)
def test_what_no_pickler_writes_is_an_error_of_opaque_globals_too(data: bytes) -> None:
    with pytest.raises(UnpicklingError):
        unpickle_data(data, KNOWN, storage_of, opaque=True)


def mutated(sound: bytes, rng: Any) -> Iterator[bytes]:
    for _ in range(300):
        data = bytearray(sound)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        yield bytes(data)


def test_random_bytes_around_opaque_globals_raise_nothing_but_errors_of_ours(rng: Any, tmp_path: Path) -> None:
    sound = pickle.dumps({"a": Options(), "b": {Color.RED: [Names(x=1), {Color.RED}]}, "c": 1}, 4)
    for data in mutated(sound, rng):
        with contextlib.suppress(UnpicklingError):
            unpickle_data(data, KNOWN, storage_of, opaque=True)
        with contextlib.suppress(AsyncCkptError):
            unread_leaves(read_torch_file(str(torch_archive(tmp_path / "a.pt", data)), Files()))


def test_metadata_of_a_dcp_directory_hold_no_opaque_globals(tmp_path: Path) -> None:
    foreign_samples.save_dcp({"x": torch.ones(2)}, tmp_path / "d")
    metadata = pickle.loads((tmp_path / "d" / ".metadata").read_bytes())
    metadata.planner_data["x"] = Options()
    (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises((UnsupportedFormatError, CorruptCheckpointError), match="Options"):
        asyncckpt.open_checkpoint(tmp_path / "d")


@pytest.mark.parametrize("bit", ["conj", "neg"])
def test_a_tensor_with_a_bit_that_is_not_resolved_is_a_leaf_that_is_not_read(bit: str, tmp_path: Path) -> None:
    unresolved = torch.ones(3, dtype=torch.complex64).conj()
    unresolved = unresolved if bit == "conj" else unresolved.imag
    assert unresolved.is_conj() if bit == "conj" else unresolved.is_neg()
    torch.save({"a": torch.ones(2), "c": unresolved, "p": torch.nn.Parameter(unresolved)}, tmp_path / "a")
    assert torch.equal(asyncckpt.load(tmp_path / "a", keys=["a"])["a"], torch.ones(2))
    with asyncckpt.open_checkpoint(tmp_path / "a") as found:
        assert set(found.unread) == {"c", "p"} and "conj or neg" in found.unread["c"]
    with pytest.raises(UnsupportedFormatError, match="conj or neg"):
        asyncckpt.load(tmp_path / "a")
