"""Long `bytes`, which are no tensors and lie where tensors do: the same value in every kind."""

from __future__ import annotations

import codecs
import pathlib
import pickle
import random
from typing import Any

import dcp_calls
import pytest
import torch
from in_process_writer import StorageWriter
from torch.distributed.checkpoint import FileSystemReader

import asyncckpt
from asyncckpt.errors import CorruptCheckpointError, UnsupportedLeafError
from asyncckpt.interop import write_torch
from asyncckpt.interop.diff import compare
from asyncckpt.interop.sources import pickle_tree
from asyncckpt.interop.sources.pickle_globals import KNOWN
from asyncckpt.interop.sources.unpickler import UnpicklingError, unpickle_data
from asyncckpt.state_dict.flatten import HOIST_NBYTES

pytest.importorskip("numpy")

LONG = random.Random(0).randbytes(pickle_tree.LONG_NBYTES + 77)


def test_as_long_as_in_saves_of_ours() -> None:
    assert pickle_tree.LONG_NBYTES == HOIST_NBYTES


def written(kind: str, path: pathlib.Path) -> dict[str, Any]:
    """Save a state that has them, long and short, in lists and tuples; return it."""
    state = {"long": LONG, "short": LONG[:100], "list": [LONG, 1], "tuple": (LONG[::-1], {2}), "w": torch.ones(3)}
    if kind == "ours":
        with asyncckpt.SyncCheckpointer() as checkpointer:
            checkpointer.save(state, path)
    elif kind == "storage writer":
        dcp_calls.save(state, StorageWriter(path))
    else:
        torch.save(state, path, pickle_protocol=int(kind))
    return state


@pytest.mark.parametrize("to", ["asyncckpt", "dcp", "torch"])
@pytest.mark.parametrize("kind", ["ours", "storage writer", "2", "5"])
def test_every_kind_holds_them(kind: str, to: str, tmp_path: pathlib.Path) -> None:
    state = written(kind, tmp_path / "a")
    asyncckpt.convert(tmp_path / "a", tmp_path / "b", to=to)
    found = asyncckpt.load(tmp_path / "b")
    assert {name: value for name, value in found.items() if name != "w"} == {
        name: value for name, value in state.items() if name != "w"
    }
    if to == "torch":
        assert torch.load(tmp_path / "b", weights_only=True)["list"] == state["list"]
    if to == "dcp":
        target: dict[str, Any] = {"long": None, "list": [None, None], "w": torch.zeros(3)}
        dcp_calls.load(target, FileSystemReader(tmp_path / "b"))
        assert (target["long"], target["list"]) == (state["long"], state["list"])
    for other in ("ours", "storage writer", "2"):
        written(other, tmp_path / other)
        assert not compare(str(tmp_path / "b"), str(tmp_path / other)).differences
        assert not compare(str(tmp_path / other), str(tmp_path / "b"), data=False).differences


def test_differences_are_told(tmp_path: pathlib.Path) -> None:
    changed = bytearray(LONG)
    changed[40_000] ^= 1
    with asyncckpt.SyncCheckpointer() as checkpointer:
        checkpointer.save({"a": LONG, "b": LONG, "c": LONG, "d": LONG}, tmp_path / "a")
    tensor = torch.frombuffer(bytearray(LONG), dtype=torch.uint8)
    torch.save({"a": bytes(changed), "b": LONG[:-1], "c": tensor, "d": "text"}, tmp_path / "b")
    found = compare(str(tmp_path / "a"), str(tmp_path / "b")).differences
    n = len(LONG)
    assert [(d.fqn, d.what, d.a, d.b) for d in found] == [
        ("a", "value", f"bytes[{n}]", f"bytes[{n}]"),
        ("b", "value", f"bytes[{n}]", f"bytes[{n - 1}]"),
        ("c", "kind", f"bytes[{n}]", f"uint8[{n}]"),
        ("d", "kind", f"bytes[{n}]", "'text'"),
    ]


def test_bytes_that_stand_twice_are_written_once(tmp_path: pathlib.Path) -> None:
    torch.save({"a": LONG, "b": [LONG, 1], "c": LONG[::-1]}, tmp_path / "a")
    asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="torch")
    found = torch.load(tmp_path / "b", weights_only=True)
    assert found["a"] is found["b"][0]
    assert (found["a"], found["c"]) == (LONG, LONG[::-1])
    assert (tmp_path / "b").stat().st_size < 2.1 * len(LONG.decode("latin1").encode())


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_other_bytes_in_the_target_are_found(to: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written("2", tmp_path / "a")
    monkeypatch.setattr(write_torch, "bytes_at", lambda outline, node, files: LONG[:-1] + bytes([LONG[-1] ^ 1]))
    with pytest.raises(CorruptCheckpointError, match=r"has another value|on one side"):
        asyncckpt.convert(tmp_path / "a", tmp_path / "b", to=to)
    assert not (tmp_path / "b").exists()


def test_a_pickle_that_nobody_would_read_again_is_not_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written("ours", tmp_path / "a")
    for limit in (
        300,
        len(LONG) * 3,
    ):  # which the bytes exceed; and which their text does, with two characters for some
        monkeypatch.setattr(write_torch, "MAX_NBYTES", limit)
        with pytest.raises(UnsupportedLeafError, match=f"no more than {limit} are read again"):
            asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="torch")
        assert not (tmp_path / "b").exists()
    asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="torch", keys=["short", "w"])


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


def test_a_long_text_beside_what_encodes_is_a_text(tmp_path: pathlib.Path) -> None:
    long = "\u00e9" * (1 << 20)
    state = {"a": codecs.encode, "b": long, "c": [codecs.encode, long], "d": (codecs.encode, {"e": long})}
    torch.save(state, tmp_path / "a")
    report = asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="asyncckpt", partial=True)
    assert report.left_out == ("a", "c.0", "d.0")
    found = asyncckpt.load(tmp_path / "b")
    assert found == {"b": long, "c": {1: long}, "d": {1: {"e": long}}}
