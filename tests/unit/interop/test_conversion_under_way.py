"""Converting while somebody else is there: a save of ours, whoever puts a file into the target or writes the source."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import Workdir

import asyncckpt
from asyncckpt import RankInfo, SyncCheckpointer
from asyncckpt.basics.failpoints import observed
from asyncckpt.errors import CheckpointExistsError, CorruptCheckpointError, SaveFailedError
from asyncckpt.format.checksums import BLOCK_NBYTES
from asyncckpt.format.names import LOCK_NAME
from asyncckpt.interop import convert, copy_pipeline, publish
from asyncckpt.maintenance.pins import pin
from asyncckpt.storage.local import LocalStore

SAVES_FILE = "rank-00000-part-000.999999-00000000-0123456789ab.safetensors"


@pytest.fixture(autouse=True)
def source(work: Workdir) -> None:
    """What is converted in every test is `a`."""
    work.torch({"new": torch.arange(1000.0)})


def standing(work: Workdir, kind: str = "asyncckpt", name: str = "b") -> Path:
    """Make the checkpoint that is to be replaced."""
    work.torch({"old": torch.ones(3)}, "old.pt")
    work.convert(kind, "old.pt", name)
    (work / "old.pt").unlink()
    return work / name


def save(checkpointer: SyncCheckpointer, path: Path, name: str) -> None:
    checkpointer.save({name: torch.full((100,), 7.0)}, path)


def exchange_by(call: Callable[[str, str], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchange names by `call`, but where it is only tried whether they can be."""
    real = publish.exchange

    def exchange(temporary: str, final: str) -> bool:
        return real(temporary, final) if final.endswith(".converting") else call(temporary, final)

    monkeypatch.setattr(publish, "exchange", exchange)


# ---- a save of ours -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("point", "layout"),
    [
        ("shard: created", "safetensors"),
        ("rank: durable", "dcp"),
        ("put: written", "safetensors"),
        ("commit: put", "dcp"),
    ],
)
def test_a_save_that_is_under_way_is_left_alone_and_goes_on(
    point: str, layout: str, work: Workdir, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    refused: list[SaveFailedError] = []
    monkeypatch.setattr(publish, "LOCK_TIMEOUT_S", 0.0)  # "commit: put" holds it

    def observer(reached: str) -> None:
        if reached == point and not begun:
            begun.append(reached)  # converting comes by here too
            with pytest.raises(SaveFailedError) as caught:
                work.convert("asyncckpt", overwrite=True)
            refused.append(caught.value)

    with SyncCheckpointer(rank_info=RankInfo(0, 1), layout=layout, fsync=False, overwrite=True) as checkpointer:
        save(checkpointer, work / "b", "first")
        with observed(observer):
            save(checkpointer, work / "b", "second")
    assert [error.code for error in refused] == ["EAGAIN"]
    assert list(work.load()) == ["second"] and work.names() == ["a", "b"]


def test_a_save_that_has_no_file_yet_learns_that_another_checkpoint_came(work: Workdir) -> None:
    done: list[str] = []

    def observer(reached: str) -> None:
        if reached == "directory: made" and not done:
            done.append(reached)
            work.convert("asyncckpt", overwrite=True)

    standing(work)
    with (
        SyncCheckpointer(rank_info=RankInfo(0, 1), fsync=False, overwrite=True) as checkpointer,
        observed(observer),
        pytest.raises(CheckpointExistsError),
    ):
        save(checkpointer, work / "b", "second")
    assert done and list(work.load()) == ["new"]


def test_who_holds_the_lock_is_waited_for_and_then_said(work: Workdir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "LOCK_TIMEOUT_S", 0.05)
    path = standing(work)
    with LocalStore().lock(str(path), 30.0), pytest.raises(SaveFailedError, match=LOCK_NAME) as caught:
        work.convert("asyncckpt", overwrite=True)
    assert caught.value.code == "EAGAIN"
    assert list(work.load()) == ["old"] and work.names() == ["a", "b"] and LOCK_NAME not in os.listdir(path)


def test_the_lock_is_held_while_the_names_are_exchanged_and_gone_afterwards(
    work: Workdir, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen, real = standing(work), list[str](), publish.exchange

    def exchange(temporary: str, final: str) -> bool:
        for held in (final, temporary):
            with pytest.raises(BlockingIOError), LocalStore().lock(held, 0):
                pass
            seen.append(held)
            if held == final:
                assert real(temporary, final)
        return True

    exchange_by(exchange, monkeypatch)
    work.convert("asyncckpt", overwrite=True)
    assert len(seen) == 2
    assert list(work.load()) == ["new"] and LOCK_NAME not in os.listdir(path) and work.names() == ["a", "b"]


def test_a_pinned_checkpoint_is_not_replaced(work: Workdir) -> None:
    pin(str(standing(work)), LocalStore())
    with pytest.raises(CheckpointExistsError, match="pinned"):
        work.convert("asyncckpt", overwrite=True)
    assert list(work.load()) == ["old"]


@pytest.mark.parametrize("kind", ["asyncckpt", "dcp"])
def test_files_of_a_save_that_may_be_under_way_are_refused_and_older_ones_are_not(kind: str, work: Workdir) -> None:
    file = standing(work, kind) / (SAVES_FILE if kind == "asyncckpt" else SAVES_FILE.replace("safetensors", "distcp"))
    file.write_bytes(b"x")
    with pytest.raises(SaveFailedError, match="999999-00000000-0123456789ab") as caught:
        work.convert(kind, overwrite=True)
    assert caught.value.code == "EAGAIN" and file.exists()
    file.unlink()
    if kind == "asyncckpt":
        file.with_name(file.name.replace("999999", "000000")).write_bytes(b"x")
    work.convert(kind, overwrite=True)
    assert list(work.load()) == ["new"]


def test_files_of_an_earlier_call_of_the_same_run_are_in_nobodys_way(work: Workdir) -> None:
    with SyncCheckpointer(fsync=False, overwrite=True) as checkpointer:
        for _ in range(2):
            save(checkpointer, work / "b", "old")
    (shard,) = (work / "b").glob("*.safetensors")
    assert "-00000001-" in shard.name
    shard.with_name(shard.name.replace("-00000001-", "-00000000-")).write_bytes(b"x")
    work.convert("asyncckpt", overwrite=True)
    assert list(work.load()) == ["new"]


# ---- files that come ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "to"), [("asyncckpt", "asyncckpt"), ("dcp", "torch"), ("hf", "hf")])
@pytest.mark.parametrize(
    ("when", "name"),
    [
        ("before the last look", "thesis.tex"),
        *itertools.product(
            ("before the exchange", "after it"), ("thesis.tex", "model-9.safetensors", SAVES_FILE, "logs/")
        ),
    ],
)
def test_what_comes_between_the_look_and_the_exchange_is_not_removed(
    when: str, name: str, kind: str, to: str, work: Workdir, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, came, real = standing(work, kind), list[str](), publish.exchange

    def come(into: Path) -> None:
        came.append(name.rstrip("/"))
        (into / name).mkdir() if name.endswith("/") else (into / name).write_text("dear")

    def exchange(temporary: str, final: str) -> bool:
        if came:
            return real(temporary, final)
        if when == "before the exchange":
            come(path)
            return real(temporary, final)
        assert real(temporary, final)
        come(Path(temporary))  # by a directory that was opened before
        return True

    if when == "before the last look":
        monkeypatch.setattr(convert, "verify_bytes", lambda *_: come(path))
    else:
        exchange_by(exchange, monkeypatch)
    with pytest.raises((CheckpointExistsError, SaveFailedError)) as caught:
        work.convert(to, overwrite=True)
    assert came[0] in os.listdir(path)
    assert came[0] in str(caught.value) or "may be running" in str(caught.value)
    assert work.names() == ["a", "b"]
    (path / name).rmdir() if name.endswith("/") else (path / name).unlink()
    assert list(work.load()) == ["old"]


@pytest.mark.parametrize("kind", ["torch", "hf"])
def test_what_is_written_anew_between_the_look_and_the_exchange_is_not_removed(
    kind: str, work: Workdir, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other, came, real = standing(work, kind), standing(work, kind, "other"), list[bool](), publish.exchange

    def exchange(temporary: str, final: str) -> bool:
        if not came:
            came.append(True)
            name = "" if kind == "torch" else "model.safetensors"
            os.replace(other / name, path / name)
        return real(temporary, final)

    exchange_by(exchange, monkeypatch)
    with pytest.raises(CheckpointExistsError, match="written meanwhile"):
        work.convert(kind, overwrite=True)
    assert list(work.load()) == ["old"] and set(work.names()) <= {"a", "b", "other"}


def test_what_comes_into_the_new_one_for_an_instant_is_in_the_old_one_afterwards(
    work: Workdir, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = standing(work)

    def failing(*_: Any) -> None:
        (path / "thesis.tex").write_text("dear")
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(publish, "_refuse_changes", failing)
    with pytest.raises(SaveFailedError):
        work.convert("asyncckpt", overwrite=True)
    assert (path / "thesis.tex").read_text() == "dear" and list(work.load()) == ["old"] and work.names() == ["a", "b"]


@pytest.mark.parametrize("renames", [True, False])
def test_what_cannot_be_put_back_is_kept_beside_it(
    renames: bool, work: Workdir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, calls, real = standing(work), list[str](), publish.exchange

    def failing(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def exchange(temporary: str, final: str) -> bool:
        calls.append(temporary)
        if len(calls) > 1:
            if not renames:
                monkeypatch.setattr(os, "rename", failing)
            failing()
        (path / "thesis.tex").write_text("dear")
        return real(temporary, final)

    exchange_by(exchange, monkeypatch)
    with pytest.raises(CheckpointExistsError):
        work.convert("asyncckpt", overwrite=True)
    monkeypatch.undo()
    aside = Path(f"{calls[0]}.kept" if renames else calls[0])
    assert f"is at {aside} now, and could not be moved back" in caplog.text
    assert ("Move it away" in caplog.text) == (not renames)
    assert (aside / "thesis.tex").read_text() == "dear" and list(asyncckpt.load(aside)) == ["old"]
    assert list(work.load()) == ["new"] and work.names() == [aside.name, "a", "b"]


# ---- the source -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["torch", "safetensors", "dcp"])
@pytest.mark.parametrize("by", ["rename", "rewrite"])
def test_a_source_that_is_replaced_meanwhile_is_never_mixed_with_what_replaces_it(
    kind: str, by: str, work: Workdir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_pipeline, "WINDOW_NBYTES", BLOCK_NBYTES)
    for name, value in (("first", 1.0), ("other", 2.0)):
        work.torch({f"t{n}": torch.full((1 << 15,), value) for n in range(60)}, "saved.pt")
        work.convert(kind, "saved.pt", name)
    source, other = work / "first", work / "other"
    if kind == "dcp":
        source, other = source / "__0_0.distcp", other / "__0_0.distcp"

    def progress(done: int, _: int) -> None:
        if done > 300_000 and other.exists():
            if by == "rewrite":
                source.write_bytes(other.read_bytes())
                other.unlink()
            else:
                os.replace(other, source)

    said = "while it was read" + ("|ends early|cut short|differ from their CRC-32" if by == "rewrite" else "")
    with pytest.raises(CorruptCheckpointError, match=said):
        work.convert("torch", "first", progress=progress)
    assert not any(name == "b" or name.endswith(".converting") for name in work.names())


def test_an_open_file_that_is_replaced_is_not_read_by_the_old_structure(work: Workdir) -> None:
    for name, value in (("x", 1.0), ("y", 2.0)):
        work.torch({"a": torch.full((9,), value), "b": torch.full((9,), value)}, name)
    with asyncckpt.open_checkpoint(work / "x") as opened:
        assert opened.tensor("a")[0] == 1
        os.replace(work / "y", work / "x")
        with pytest.raises(CorruptCheckpointError, match="while it was read"):
            opened.tensor("b")
