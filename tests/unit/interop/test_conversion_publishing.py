"""The way of a target into its place: what it may replace, what a failure or a Ctrl-C leaves, and no room."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import KINDS, Workdir

import asyncckpt
from asyncckpt.basics.deferred_signals import signals_deferred
from asyncckpt.errors import CheckpointExistsError, SaveFailedError
from asyncckpt.format.names import LOCK_NAME
from asyncckpt.interop import convert, publish
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import LocalStore

FILES = ("torch", "safetensors")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def source(work: Workdir) -> None:
    """What is converted in every test is `a`; what stands in the way is `b`."""
    work.torch({"new": torch.arange(1000.0)})


def standing(work: Workdir, kind: str) -> None:
    """Make what stands at the name of the target."""
    if kind == "empty":
        (work / "b").mkdir(0o750)
    elif kind != "nothing":
        work.torch({"old": torch.ones(3)}, "old.pt")
        work.convert(kind, "old.pt")
        (work / "old.pt").unlink()


def fails_with(code: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


class Renameat2:
    """A file system that knows no flags of renameat2(2)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int = errno.EINVAL) -> None:
        self.code = code
        self.before: list[Callable[[], None]] = []
        monkeypatch.setattr(Files, "rename_noreplace", fails_with(code))
        monkeypatch.setattr(publish, "_libc", self)

    def renameat2(self, *_: Any) -> int:
        for call in self.before:
            call()
        ctypes.set_errno(self.code)
        return -1


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Renameat2:
    return Renameat2(monkeypatch)


# ---- what is replaced, and what never is ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "to"),
    [*((kind, kind) for kind in KINDS), ("torch", "dcp"), ("dcp", "torch"), ("safetensors", "hf")],
)
def test_an_existing_target_is_left_alone_unless_told(old: str, to: str, work: Workdir) -> None:
    standing(work, old)
    with pytest.raises(CheckpointExistsError):
        work.convert(to)
    assert list(work.load()) == ["old"]
    work.convert(to, overwrite=True)
    assert list(work.load()) == ["new"] and work.names() == ["a", "b"]


@pytest.mark.parametrize("to", KINDS)
def test_an_empty_directory_gives_way(to: str, work: Workdir) -> None:
    standing(work, "empty")
    work.convert(to)
    assert list(work.load()) == ["new"] and work.names() == ["a", "b"]


def archive(*names: str, cut: int = 0) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as file:
            for name in names:
                file.writestr(name, b"dear" * 100)
        path.write_bytes(path.read_bytes()[: -cut or None])

    return write


def directory(*names: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        for name in names:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text("dear")

    return write


@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.write_text("dear"),
        *(archive("thesis.tex"), archive("a/data.pkl", "a/constants.pkl"), archive("a/data.pkl", cut=30), archive()),
        *(directory("letter.txt"), directory("manifest.json", "src/a.js"), directory("manifest.json", "index.html")),
        directory(".metadata/x", "notes.txt"),
        directory(".metadata", "__0_0.distcp", "thesis.tex"),
        directory(".metadata", "__0_0.distcp", "logs/a"),
        directory("model.safetensors", "thesis.tex"),
        directory("model.safetensors", "config.json", "other/precious"),
    ],
)
def test_overwrite_never_replaces_what_is_no_checkpoint_or_holds_more(
    write: Callable[[Path], None], work: Workdir
) -> None:
    write(work / "b")
    before = {path: path.read_bytes() for path in work.root.rglob("*") if path.is_file()}
    for to in KINDS:
        with pytest.raises(CheckpointExistsError):
            work.convert(to, overwrite=True)
    with pytest.raises(CheckpointExistsError):
        asyncckpt.dcp.torch_save_to_dcp(work / "a", work / "b")
    assert {path: path.read_bytes() for path in work.root.rglob("*") if path.is_file()} == before


def test_overwrite_of_a_link_names_what_it_leads_to(work: Workdir) -> None:
    standing(work, "asyncckpt")
    (work / "latest").symlink_to("b")
    with pytest.raises(CheckpointExistsError, match=f"symbolic link.*{work / 'b'}$"):
        work.convert("asyncckpt", target="latest", overwrite=True)
    assert os.readlink(work / "latest") == "b" and list(work.load()) == ["old"]


# ---- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", KINDS)
def test_too_little_room_is_said_before_anything_is_written(
    to: str, work: Workdir, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = os.statvfs(work.root)
    small = os.statvfs_result((*found[:3], 0, 0, *found[5:]))
    monkeypatch.setattr(Files, "statvfs", lambda self, path: small)
    monkeypatch.setattr(Files, "mkdir", None)
    with pytest.raises(SaveFailedError) as caught:
        work.convert(to)
    assert caught.value.code == "ENOSPC" and work.names() == ["a"]


@pytest.mark.parametrize("to", KINDS)
@pytest.mark.parametrize("fails", [("pwrite",), ("fsync",), ("link", "rename"), ("open",)])
def test_a_failing_call_leaves_nothing_behind(
    to: str, fails: tuple[str, ...], work: Workdir, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Files.open

    def failing(self: Files, *arguments: Any, **kw: Any) -> Any:
        if fails != ("open",) or arguments[1] & os.O_CREAT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(self, *arguments, **kw)

    for call in fails:
        monkeypatch.setattr(Files, call, failing)
    with pytest.raises(SaveFailedError) as caught:
        work.convert(to)
    assert caught.value.code == "ENOSPC" and work.names() == ["a"]


@pytest.mark.parametrize("to", KINDS)
@pytest.mark.parametrize(
    ("old", "owner", "step"),
    [
        ("nothing", publish, "fsync_directory"),
        ("empty", publish, "_replace"),
        ("empty", publish, "fsync_directory"),
        ("same", convert, "verify_structure"),
        ("same", publish, "fsync_directory"),
    ],
)
def test_a_failure_leaves_what_stood_there(
    old: str, owner: Any, step: str, to: str, work: Workdir, monkeypatch: pytest.MonkeyPatch
) -> None:
    standing(work, to if old == "same" else old)
    monkeypatch.setattr(owner, step, fails_with(errno.EIO))
    with pytest.raises(SaveFailedError):
        work.convert(to, overwrite=old == "same")
    assert work.names() == (["a"] if old == "nothing" else ["a", "b"])
    if old == "empty":
        assert not os.listdir(work / "b") and (work / "b").stat().st_mode & 0o777 == 0o750
    elif old == "same":
        assert list(work.load()) == ["old"]


@pytest.mark.parametrize("to", ["dcp", "torch"])
def test_a_directory_beside_which_nothing_can_be_written_is_not_replaced(
    to: str, work: Workdir, monkeypatch: pytest.MonkeyPatch
) -> None:
    standing(work, "dcp")
    monkeypatch.setattr(Files, "mkdir", fails_with(errno.EACCES))
    with pytest.raises(SaveFailedError) as caught:
        work.convert(to, overwrite=True)
    assert caught.value.code == "EACCES" and work.names() == ["a", "b"]


# ---- where names can only be renamed --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "to"),
    [*((errno.EINVAL, kind) for kind in KINDS), (errno.ENOSYS, "dcp"), (errno.EOPNOTSUPP, "torch")],
)
def test_new_targets_where_names_can_only_be_renamed(
    code: int, to: str, work: Workdir, monkeypatch: pytest.MonkeyPatch
) -> None:
    Renameat2(monkeypatch, code)
    work.convert(to)
    if to in FILES:
        monkeypatch.setattr(Files, "link", fails_with(errno.EPERM))
    else:
        (work / "c").mkdir()
    work.convert(to, target="c")
    assert list(work.load()) == list(work.load("c")) == ["new"]
    assert work.names() == ["a", "b", "c"]


@pytest.mark.parametrize("to", FILES)
def test_a_file_replaces_a_file_where_names_cannot_be_exchanged(to: str, work: Workdir, plain: Renameat2) -> None:
    standing(work, "torch")
    work.convert(to, overwrite=True)
    assert list(work.load()) == ["new"] and work.names() == ["a", "b"]


@pytest.mark.parametrize(
    ("old", "to"),
    [("asyncckpt", "asyncckpt"), ("dcp", "hf"), ("torch", "dcp"), ("dcp", "torch"), ("empty", "torch")],
)
def test_a_directory_is_not_replaced_where_names_cannot_be_exchanged_and_nothing_is_written_first(
    old: str, to: str, work: Workdir, plain: Renameat2, monkeypatch: pytest.MonkeyPatch
) -> None:
    standing(work, old)
    monkeypatch.setattr(convert, "write_files", None)
    with pytest.raises(CheckpointExistsError, match="Remove it first"):
        work.convert(to, overwrite=True)
    assert not os.listdir(work / "b") if old == "empty" else list(work.load()) == ["old"]
    assert work.names() == ["a", "b"]


@pytest.mark.parametrize("to", ["torch", "dcp"])
@pytest.mark.parametrize("way", ["links", "flags", "neither"])
@pytest.mark.parametrize("empty", [False, True])
def test_what_comes_to_the_name_in_the_last_instant_is_not_replaced(
    empty: bool, way: str, to: str, work: Workdir, monkeypatch: pytest.MonkeyPatch
) -> None:
    if empty:
        standing(work, "empty")
    if way != "flags" and not (empty and to == "torch"):  # which needs them
        Renameat2(monkeypatch)
    if way != "links":
        monkeypatch.setattr(Files, "link", fails_with(errno.EPERM))
    real = convert.verify_structure
    came = work / "b" / "dear" if empty else work / "b"

    def come(*arguments: Any, **kw: Any) -> None:
        real(*arguments, **kw)
        came.write_text("dear")

    monkeypatch.setattr(convert, "verify_structure", come)
    with pytest.raises(CheckpointExistsError):
        work.convert(to)
    assert came.read_text() == "dear" and work.names() == ["a", "b"]


def test_a_file_that_is_written_in_the_last_instant_is_not_replaced_where_names_cannot_be_exchanged(
    work: Workdir, plain: Renameat2
) -> None:
    standing(work, "torch")
    plain.before.append(lambda: os.utime(work / "b", ns=(0, 0)))
    with pytest.raises(CheckpointExistsError, match="written meanwhile"):
        work.convert("torch", overwrite=True)
    assert list(work.load()) == ["old"] and work.names() == ["a", "b"]


def test_the_old_one_is_removed_by_its_temporary_name_when_no_lock_is_held_any_more(
    work: Workdir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    standing(work, "asyncckpt")
    removed: list[list[str]] = []
    real = shutil.rmtree

    def rmtree(path: str) -> None:
        if not os.listdir(path):  # made to see whether names can be exchanged
            return real(path)
        assert list(asyncckpt.load(path)) == ["old"] and list(work.load()) == ["new"]
        for one in (path, str(work / "b")):
            assert LOCK_NAME not in os.listdir(one)
            with LocalStore().lock(one, 0):
                pass
        removed.append([name[-11:] for name in work.names()])
        return real(path)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    work.convert("asyncckpt", overwrite=True)
    assert removed == [[".converting", "a", "b"]]
    assert not caplog.records and work.names() == ["a", "b"]


# ---- Ctrl-C ---------------------------------------------------------------------------------------------------------


class Interrupts:
    """Sends this process SIGINT ahead of the given calls of those that are watched, and after them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at: set[int] = set()
        self.calls: list[str] = []
        watched = {
            os: ("rename", "replace"),
            shutil: ("rmtree",),
            publish: ("exchange", "fsync_directory", "copy_file", "publish"),
            convert: ("verify_structure", "verify_bytes", "put_into_place"),
        }
        for owner, names in watched.items():
            for name in names:
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
    kind: str, exchanges: bool, work: Workdir, monkeypatch: pytest.MonkeyPatch, interrupts: Interrupts
) -> None:
    if not exchanges:
        Renameat2(monkeypatch)
    found: list[tuple[str, str]] = []
    ended = False
    while not ended:
        number = len(found)
        interrupts.at.clear()
        standing(work, kind)
        if kind == "hf":
            (work / "b" / "notes.txt").write_text("dear")
        interrupts.calls.clear()
        interrupts.at.update({number, number + 1})  # the second one while the first is heard
        try:
            work.convert(kind, overwrite=True)
            ended = True
        except KeyboardInterrupt:
            pass
        interrupts.at.clear()
        assert work.names() == ["a", "b"], interrupts.calls[number:]
        (name,) = work.load()
        found.append((interrupts.calls[number] if number < len(interrupts.calls) else "", name))
        if kind == "hf":
            assert (work / "b" / "notes.txt").read_text() == "dear"
        shutil.rmtree(work / "b") if (work / "b").is_dir() else (work / "b").unlink()
    assert ("ahead of verify_structure", "old") in found and found[-1][1] == "new"
    names = [name for _, name in found]
    assert names == sorted(names, reverse=True), "the new one, from some step on"


@pytest.fixture
def handled() -> Iterator[Callable[[Any], None]]:
    """Sets one handler for every signal of `SIGNALS`; afterwards they are as they were."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    set_handler = signal.signal
    yield lambda handler: [set_handler(number, handler) for number in SIGNALS] and None
    for number, handler in before.items():
        set_handler(number, handler)


def test_signals_are_put_off_and_handled_once_each_and_other_threads_are_as_they_were(handled: Any) -> None:
    heard: list[int] = []
    handled(lambda number, _: heard.append(number))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals_deferred():
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(number)
        assert not heard
        thread = threading.Thread(target=lambda: signals_deferred().__enter__())
        thread.start()
        thread.join(60)
    assert heard == [signal.SIGTERM, signal.SIGINT]
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_each_signal_is_handled_although_the_handler_of_another_raises(handled: Any) -> None:
    heard: list[int] = []

    def count(number: int, _: Any) -> None:
        heard.append(number)
        raise RuntimeError("the second one")

    handled(count)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt) as caught, signals_deferred():
        for number in SIGNALS:
            signal.raise_signal(number)
        raise ValueError("of the block")
    assert heard == [signal.SIGTERM, signal.SIGHUP]
    assert isinstance(caught.value.__context__, ValueError)
    assert [signal.getsignal(number) for number in SIGNALS] == [signal.default_int_handler, count, count]


@pytest.mark.parametrize("first", SIGNALS)
def test_a_signal_while_the_handlers_are_given_back_leaves_none_of_ours(
    first: signal.Signals, handled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[int] = []

    def count(number: int, _: Any) -> None:
        heard.append(number)
        raise KeyboardInterrupt

    handled(count)
    real, coming = signal.signal, [first]

    def giving_back(number: int, handler: Any) -> Any:
        found = real(number, handler)
        if handler is count and number == first and coming:
            signal.raise_signal(coming.pop())  # by a handler that is back, while others are not
        return found

    with pytest.raises(KeyboardInterrupt), signals_deferred():
        monkeypatch.setattr(signal, "signal", giving_back)
        signal.raise_signal(signal.SIGTERM)
    assert sorted(heard) == sorted([first, signal.SIGTERM])
    assert all(signal.getsignal(number) is count for number in SIGNALS)
