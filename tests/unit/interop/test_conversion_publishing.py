"""The way of a target into its place, also where names can only be renamed, and Ctrl-C at each step of it."""

from __future__ import annotations

import ctypes
import errno
import os
import pathlib
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.basics.deferred_signals import signals_deferred
from asyncckpt.errors import CheckpointExistsError, CorruptCheckpointError, SaveFailedError
from asyncckpt.format.names import LOCK_NAME
from asyncckpt.interop import convert, publish
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import LocalStore

KINDS = ("asyncckpt", "dcp", "torch", "safetensors", "hf")
FILES = ("torch", "safetensors")


@pytest.fixture
def source(tmp_path: pathlib.Path) -> pathlib.Path:
    torch.save({"new": torch.arange(1000.0)}, tmp_path / "a.pt")
    return tmp_path / "a.pt"


def make(path: pathlib.Path, kind: str) -> pathlib.Path:
    torch.save({"old": torch.ones(3)}, path.parent / "old.pt")
    asyncckpt.convert(path.parent / "old.pt", path, to=kind)
    (path.parent / "old.pt").unlink()
    return path


class Renameat2:
    """A file system that knows no flags of renameat2(2)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int = errno.EINVAL) -> None:
        self.code = code
        self.before: list[Callable[[], None]] = []
        monkeypatch.setattr(Files, "rename_noreplace", self.refuse)
        monkeypatch.setattr(publish, "_libc", self)

    def refuse(self, *_: Any) -> None:
        raise OSError(self.code, os.strerror(self.code))

    def renameat2(self, *_: Any) -> int:
        for call in self.before:
            call()
        ctypes.set_errno(self.code)
        return -1


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Renameat2:
    return Renameat2(monkeypatch)


def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(self: Files, source: str, target: str) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Files, "link", none)


@pytest.mark.parametrize(
    ("code", "to"),
    [*((errno.EINVAL, kind) for kind in KINDS), (errno.ENOSYS, "dcp"), (errno.EOPNOTSUPP, "torch")],
)
def test_new_targets_where_names_can_only_be_renamed(
    code: int, to: str, source: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Renameat2(monkeypatch, code)
    asyncckpt.convert(source, tmp_path / "x", to=to)
    if to in FILES:
        no_links(monkeypatch)
        asyncckpt.convert(source, tmp_path / "y", to=to)
    else:
        (tmp_path / "y").mkdir()
        asyncckpt.convert(source, tmp_path / "y", to=to)
    assert list(asyncckpt.load(tmp_path / "x")) == list(asyncckpt.load(tmp_path / "y")) == ["new"]
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "x", "y"]


@pytest.mark.parametrize("to", FILES)
def test_a_file_replaces_a_file_where_names_cannot_be_exchanged(
    to: str, source: pathlib.Path, tmp_path: pathlib.Path, plain: Renameat2
) -> None:
    make(tmp_path / "x", "torch")
    asyncckpt.convert(source, tmp_path / "x", to=to, overwrite=True)
    assert list(asyncckpt.load(tmp_path / "x")) == ["new"]
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "x"]


@pytest.mark.parametrize(
    ("old", "to"),
    [("asyncckpt", "asyncckpt"), ("dcp", "hf"), ("torch", "dcp"), ("dcp", "torch"), ("empty", "torch")],
)
def test_a_directory_is_not_replaced_where_names_cannot_be_exchanged_and_nothing_is_written_first(
    old: str, to: str, source: pathlib.Path, tmp_path: pathlib.Path, plain: Renameat2, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").mkdir() if old == "empty" else make(tmp_path / "x", old)
    monkeypatch.setattr(convert, "write_files", None)
    with pytest.raises(CheckpointExistsError, match="Remove it first"):
        asyncckpt.convert(source, tmp_path / "x", to=to, overwrite=True)
    assert not os.listdir(tmp_path / "x") if old == "empty" else list(asyncckpt.load(tmp_path / "x")) == ["old"]
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "x"]


@pytest.mark.parametrize("to", ["dcp", "torch"])
def test_a_directory_beside_which_nothing_can_be_written_is_not_replaced(
    to: str, source: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "x", "dcp")

    def failing(*_: Any) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Files, "mkdir", failing)
    with pytest.raises(SaveFailedError) as caught:
        asyncckpt.convert(source, tmp_path / "x", to=to, overwrite=True)
    assert caught.value.code == "EACCES" and sorted(os.listdir(tmp_path)) == ["a.pt", "x"]


@pytest.mark.parametrize(("old", "to"), [("torch", "dcp"), ("dcp", "torch"), ("safetensors", "hf")])
def test_a_file_gives_way_to_a_directory_and_the_other_way_round(
    old: str, to: str, source: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    make(tmp_path / "x", old)
    asyncckpt.convert(source, tmp_path / "x", to=to, overwrite=True)
    assert list(asyncckpt.load(tmp_path / "x")) == ["new"]
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "x"]


@pytest.mark.parametrize("to", ["torch", "dcp"])
@pytest.mark.parametrize("way", ["links", "flags", "neither"])
@pytest.mark.parametrize("empty", [False, True])
def test_what_comes_to_the_name_in_the_last_instant_is_not_replaced(
    empty: bool,
    way: str,
    to: str,
    source: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if empty:
        (tmp_path / "x").mkdir()
    if way != "flags" and not (empty and to == "torch"):  # which needs them
        Renameat2(monkeypatch)
    if way != "links":
        no_links(monkeypatch)
    real = convert.verify_structure

    def come(*arguments: Any, **kw: Any) -> None:
        real(*arguments, **kw)
        (tmp_path / "x" / "dear" if empty else tmp_path / "x").write_text("dear")

    monkeypatch.setattr(convert, "verify_structure", come)
    with pytest.raises(CheckpointExistsError):
        asyncckpt.convert(source, tmp_path / "x", to=to)
    assert (tmp_path / "x" / "dear" if empty else tmp_path / "x").read_text() == "dear"
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "x"]


def test_a_file_that_is_written_in_the_last_instant_is_not_replaced_where_names_cannot_be_exchanged(
    source: pathlib.Path, tmp_path: pathlib.Path, plain: Renameat2
) -> None:
    make(tmp_path / "x", "torch")
    plain.before.append(lambda: os.utime(tmp_path / "x", ns=(0, 0)))
    with pytest.raises(CheckpointExistsError, match="written meanwhile"):
        asyncckpt.convert(source, tmp_path / "x", to="torch", overwrite=True)
    assert list(asyncckpt.load(tmp_path / "x")) == ["old"] and sorted(os.listdir(tmp_path)) == ["a.pt", "x"]


def test_the_old_one_is_removed_by_its_temporary_name_when_no_lock_is_held_any_more(
    source: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path / "x", "asyncckpt")
    removed: list[list[str]] = []
    real = shutil.rmtree

    def rmtree(path: str) -> None:
        if not os.listdir(path):  # made to see whether names can be exchanged
            return real(path)
        assert list(asyncckpt.load(path)) == ["old"] and list(asyncckpt.load(tmp_path / "x")) == ["new"]
        for one in (path, str(tmp_path / "x")):
            assert LOCK_NAME not in os.listdir(one)
            with LocalStore().lock(one, 0):
                pass
        removed.append(sorted(name[-11:] for name in os.listdir(tmp_path)))
        return real(path)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    asyncckpt.convert(source, tmp_path / "x", to="asyncckpt", overwrite=True)
    assert removed == [[".converting", "a.pt", "x"]]
    assert not caplog.records
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "x"]


# ---- Ctrl-C ---------------------------------------------------------------------------------------------------------


class Interrupts:
    """Sends this process SIGINT ahead of the given calls of those that are watched, and after them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at: set[int] = set()
        self.calls: list[str] = []
        for owner, name in (
            (os, "rename"),
            (os, "replace"),
            (shutil, "rmtree"),
            (publish, "exchange"),
            (publish, "fsync_directory"),
            (publish, "copy_file"),
            (publish, "publish"),
            (convert, "verify_structure"),
            (convert, "verify_bytes"),
            (convert, "put_into_place"),
        ):
            monkeypatch.setattr(owner, name, self._watched(name, getattr(owner, name)))

    def _watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **kw: Any) -> Any:
            self._now(f"ahead of {name}")
            found = real(*arguments, **kw)
            self._now(f"after {name}")
            return found

        return call

    def _now(self, what: str) -> None:
        self.calls.append(what)
        if len(self.calls) - 1 in self.at:
            signal.raise_signal(signal.SIGINT)


@pytest.fixture
def interrupts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interrupts]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield Interrupts(monkeypatch)
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("kind", "exchanges"), [("asyncckpt", True), ("hf", True), ("torch", True), ("torch", False)])
def test_ctrl_c_at_any_step_leaves_the_old_or_the_new_one_whole_and_nothing_else(
    kind: str,
    exchanges: bool,
    source: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    interrupts: Interrupts,
) -> None:
    if not exchanges:
        Renameat2(monkeypatch)
    found: list[tuple[str, str]] = []
    number, ended = 0, False
    while not ended:
        interrupts.at.clear()
        make(tmp_path / "x", kind)
        if kind == "hf":
            (tmp_path / "x" / "notes.txt").write_text("dear")
        interrupts.calls.clear()
        interrupts.at.update({number, number + 1})  # the second one while the first is heard
        try:
            asyncckpt.convert(source, tmp_path / "x", to=kind, overwrite=True)
            ended = True
        except KeyboardInterrupt:
            pass
        interrupts.at.clear()
        assert sorted(os.listdir(tmp_path)) == ["a.pt", "x"], interrupts.calls[number:]
        (name,) = asyncckpt.load(tmp_path / "x")
        found.append((interrupts.calls[number] if number < len(interrupts.calls) else "", name))
        if kind == "hf":
            assert (tmp_path / "x" / "notes.txt").read_text() == "dear"
        shutil.rmtree(tmp_path / "x") if (tmp_path / "x").is_dir() else (tmp_path / "x").unlink()
        number += 1
    assert ("ahead of verify_structure", "old") in found and found[-1][1] == "new"
    names = [name for _, name in found]
    assert names == sorted(names, reverse=True), "the new one, from some step on"


def test_a_second_ctrl_c_while_what_was_written_is_removed_waits(
    source: pathlib.Path, tmp_path: pathlib.Path, interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.rmtree

    def first(*_: Any) -> None:
        raise CorruptCheckpointError("no")

    def removing(path: str) -> None:
        signal.raise_signal(signal.SIGINT)
        real(path)

    monkeypatch.setattr(convert, "verify_bytes", first)
    monkeypatch.setattr(shutil, "rmtree", removing)
    with pytest.raises(KeyboardInterrupt):
        asyncckpt.convert(source, tmp_path / "x", to="dcp")
    assert os.listdir(tmp_path) == ["a.pt"]


def test_signals_are_put_off_and_handled_once_each_and_other_threads_are_as_they_were() -> None:
    heard: list[int] = []
    before = {n: signal.signal(n, lambda number, _: heard.append(number)) for n in (signal.SIGINT, signal.SIGTERM)}
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_deferred():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.raise_signal(number)
            assert not heard
            thread = threading.Thread(target=lambda: signals_deferred().__enter__())
            thread.start()
            thread.join(60)
        assert heard == [signal.SIGTERM, signal.SIGINT]
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert all(signal.getsignal(number) is not None for number in before)
    finally:
        signal.signal(signal.SIGHUP, ignored)
        for number, handler in before.items():
            signal.signal(number, handler)


def test_each_signal_is_handled_although_the_handler_of_another_raises() -> None:
    heard: list[int] = []

    def count(number: int, _: Any) -> None:
        heard.append(number)
        raise RuntimeError("the second one")

    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: count, signal.SIGHUP: count}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        with pytest.raises(KeyboardInterrupt) as caught, signals_deferred():
            for number in handlers:
                signal.raise_signal(number)
            raise ValueError("of the block")
        assert heard == [signal.SIGTERM, signal.SIGHUP]
        assert isinstance(caught.value.__context__, ValueError)
        assert {number: signal.getsignal(number) for number in handlers} == handlers
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_handlers_are_given_back_leaves_none_of_ours(
    first: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[int] = []

    def count(number: int, _: Any) -> None:
        heard.append(number)
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, count) for number in numbers}
    real, coming = signal.signal, [first]

    def giving_back(number: int, handler: Any) -> Any:
        found = real(number, handler)
        if handler is count and number == first and coming:
            signal.raise_signal(coming.pop())  # by a handler that is back, while others are not
        return found

    try:
        with pytest.raises(KeyboardInterrupt), signals_deferred():
            monkeypatch.setattr(signal, "signal", giving_back)
            signal.raise_signal(signal.SIGTERM)
        assert sorted(heard) == sorted([first, signal.SIGTERM])
        assert all(signal.getsignal(number) is count for number in numbers)
    finally:
        for number, handler in before.items():
            real(number, handler)
