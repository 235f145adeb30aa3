"""Replacing a checkpoint while somebody else is there: a save of ours, or whoever puts a file into the directory."""

from __future__ import annotations

import errno
import os
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt import RankInfo, SyncCheckpointer
from asyncckpt.basics.failpoints import observed
from asyncckpt.errors import CheckpointExistsError, SaveFailedError
from asyncckpt.format.names import LOCK_NAME
from asyncckpt.interop import publish
from asyncckpt.maintenance.pins import pin
from asyncckpt.storage.local import LocalStore

SAVES_FILE = "rank-00000-part-000.000900-00000000-0123456789ab.safetensors"


@pytest.fixture
def source(tmp_path: pathlib.Path) -> pathlib.Path:
    torch.save({"new": torch.arange(1000.0)}, tmp_path / "a.pt")
    return tmp_path / "a.pt"


def make(path: pathlib.Path, kind: str = "asyncckpt") -> pathlib.Path:
    torch.save({"old": torch.ones(3)}, path.with_suffix(".pt"))
    asyncckpt.convert(path.with_suffix(".pt"), path, to=kind)
    path.with_suffix(".pt").unlink()
    return path


def save(checkpointer: SyncCheckpointer, path: pathlib.Path, name: str) -> None:
    checkpointer.save({name: torch.full((100,), 7.0)}, path)


def exchange_by(call: Callable[[str, str], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchange names by `call`, but where it is only tried whether they can be."""
    real = publish.exchange

    def exchange(temporary: str, final: str) -> bool:
        return real(temporary, final) if final.endswith(".converting") else call(temporary, final)

    monkeypatch.setattr(publish, "exchange", exchange)


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
    point: str, layout: str, source: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    refused: list[SaveFailedError] = []
    monkeypatch.setattr(publish, "LOCK_TIMEOUT_S", 0.0)  # "commit: put" holds it

    def observer(reached: str) -> None:
        if reached == point and not begun:
            begun.append(reached)  # converting comes by here too
            with pytest.raises(SaveFailedError) as caught:
                asyncckpt.convert(source, tmp_path / "x", to="asyncckpt", overwrite=True)
            refused.append(caught.value)

    with SyncCheckpointer(rank_info=RankInfo(0, 1), layout=layout, fsync=False, overwrite=True) as checkpointer:
        save(checkpointer, tmp_path / "x", "first")
        with observed(observer):
            save(checkpointer, tmp_path / "x", "second")
    assert [error.code for error in refused] == ["EAGAIN"]
    assert list(asyncckpt.load(tmp_path / "x")) == ["second"]
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "x"]


def test_a_save_that_has_no_file_yet_learns_that_another_checkpoint_came(
    source: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    done: list[str] = []

    def observer(reached: str) -> None:
        if reached == "directory: made" and not done:
            done.append(reached)
            asyncckpt.convert(source, tmp_path / "x", to="asyncckpt", overwrite=True)

    make(tmp_path / "x")
    with (
        SyncCheckpointer(rank_info=RankInfo(0, 1), fsync=False, overwrite=True) as checkpointer,
        observed(observer),
        pytest.raises(CheckpointExistsError),
    ):
        save(checkpointer, tmp_path / "x", "second")
    assert done and list(asyncckpt.load(tmp_path / "x")) == ["new"]


def test_who_holds_the_lock_is_waited_for_and_then_said(
    source: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "LOCK_TIMEOUT_S", 0.05)
    path = make(tmp_path / "x")
    with (
        LocalStore().lock(str(path), 30.0),
        pytest.raises(SaveFailedError, match=LOCK_NAME) as caught,
    ):
        asyncckpt.convert(source, path, to="asyncckpt", overwrite=True)
    assert caught.value.code == "EAGAIN"
    assert list(asyncckpt.load(path)) == ["old"] and sorted(os.listdir(tmp_path)) == ["a.pt", "x"]
    assert LOCK_NAME not in os.listdir(path)


def test_the_lock_is_held_while_the_names_are_exchanged_and_gone_afterwards(
    source: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = make(tmp_path / "x"), []
    real = publish.exchange

    def exchange(temporary: str, final: str) -> bool:
        for held in (final, temporary):
            with (
                pytest.raises(BlockingIOError),
                LocalStore().lock(held, 0),
            ):
                pass
            seen.append(held)
            if held == final:
                assert real(temporary, final)
        return True

    exchange_by(exchange, monkeypatch)
    asyncckpt.convert(source, path, to="asyncckpt", overwrite=True)
    assert len(seen) == 2
    assert list(asyncckpt.load(path)) == ["new"] and LOCK_NAME not in os.listdir(path)
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "x"]


def test_a_pinned_checkpoint_is_not_replaced(source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    path = make(tmp_path / "x")
    pin(str(path), LocalStore())
    with pytest.raises(CheckpointExistsError, match="pinned"):
        asyncckpt.convert(source, path, to="asyncckpt", overwrite=True)
    assert list(asyncckpt.load(path)) == ["old"]


@pytest.mark.parametrize("standing", ["asyncckpt", "dcp"])
def test_files_of_a_save_that_may_be_under_way_are_refused_and_older_ones_are_not(
    standing: str, source: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    path = make(tmp_path / "x", standing)
    name = SAVES_FILE if standing == "asyncckpt" else SAVES_FILE.replace("safetensors", "distcp")
    (path / name).write_bytes(b"x")
    with pytest.raises(SaveFailedError, match="000900-00000000-0123456789ab") as caught:
        asyncckpt.convert(source, path, to=standing, overwrite=True)
    assert caught.value.code == "EAGAIN" and (path / name).exists()
    (path / name).unlink()
    if standing == "asyncckpt":
        (path / name.replace("000900", "000000")).write_bytes(b"x")
    asyncckpt.convert(source, path, to=standing, overwrite=True)
    assert list(asyncckpt.load(path)) == ["new"]


def test_files_of_an_earlier_call_of_the_same_run_are_in_nobodys_way(
    source: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "x"
    with asyncckpt.SyncCheckpointer(fsync=False, overwrite=True) as checkpointer:
        for _ in range(2):
            checkpointer.save({"old": torch.ones(3)}, path)
    (shard,) = path.glob("*.safetensors")
    assert "-00000001-" in shard.name
    shard.with_name(shard.name.replace("-00000001-", "-00000000-")).write_bytes(b"x")
    asyncckpt.convert(source, path, to="asyncckpt", overwrite=True)
    assert list(asyncckpt.load(path)) == ["new"]


def _foreign(path: pathlib.Path) -> str:
    (path / "thesis.tex").write_text("dear")
    return "thesis.tex"


def _weights(path: pathlib.Path) -> str:
    (path / "model-9.safetensors").write_text("dear")
    return "model-9.safetensors"


def _of_a_save(path: pathlib.Path) -> str:
    (path / SAVES_FILE).write_text("dear")
    return SAVES_FILE


def _directory(path: pathlib.Path) -> str:
    (path / "logs").mkdir()
    return "logs"


@pytest.mark.parametrize(("kind", "to"), [("asyncckpt", "asyncckpt"), ("dcp", "torch"), ("hf", "hf")])
@pytest.mark.parametrize("come", [_foreign, _weights, _of_a_save, _directory])
@pytest.mark.parametrize("when", ["before the exchange", "after it"])
def test_what_comes_between_the_look_and_the_exchange_is_not_removed(
    when: str,
    come: Callable[[pathlib.Path], str],
    kind: str,
    to: str,
    source: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, came = make(tmp_path / "x", kind), []
    real = publish.exchange

    def exchange(temporary: str, final: str) -> bool:
        if came:
            return real(temporary, final)
        if when == "before the exchange":
            came.append(come(path))
            return real(temporary, final)
        assert real(temporary, final)
        came.append(come(pathlib.Path(temporary)))  # by a directory that was opened before
        return True

    exchange_by(exchange, monkeypatch)
    with pytest.raises((CheckpointExistsError, SaveFailedError)) as caught:
        asyncckpt.convert(source, path, to=to, overwrite=True)
    assert came[0] in os.listdir(path)
    assert came[0] in str(caught.value) or "under way" in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "x"]
    (path / came[0]).rmdir() if (path / came[0]).is_dir() else (path / came[0]).unlink()
    assert list(asyncckpt.load(path)) == ["old"]


@pytest.mark.parametrize("kind", ["torch", "hf"])
def test_what_is_written_anew_between_the_look_and_the_exchange_is_not_removed(
    kind: str, source: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, came = make(tmp_path / "x", kind), []
    real = publish.exchange
    make(tmp_path / "other", kind)

    def exchange(temporary: str, final: str) -> bool:
        if not came:
            came.append(True)
            name = "" if kind == "torch" else "model.safetensors"
            os.replace(tmp_path / "other" / name, path / name)
        return real(temporary, final)

    exchange_by(exchange, monkeypatch)
    with pytest.raises(CheckpointExistsError, match="written meanwhile"):
        asyncckpt.convert(source, path, to=kind, overwrite=True)
    assert list(asyncckpt.load(path)) == ["old"]
    assert not [name for name in os.listdir(tmp_path) if "converting" in name]


def test_what_comes_into_the_new_one_for_an_instant_is_in_the_old_one_afterwards(
    source: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(tmp_path / "x")

    def failing(*_: Any) -> None:
        _foreign(path)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(publish, "_refuse_arrivals", failing)
    with pytest.raises(SaveFailedError):
        asyncckpt.convert(source, path, to="asyncckpt", overwrite=True)
    assert (path / "thesis.tex").read_text() == "dear" and list(asyncckpt.load(path)) == ["old"]
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "x"]


@pytest.mark.parametrize("renames", [True, False])
def test_what_cannot_be_put_back_is_kept_beside_it(
    renames: bool,
    source: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path, calls = make(tmp_path / "x"), []
    real = publish.exchange

    def exchange(temporary: str, final: str) -> bool:
        calls.append(temporary)
        if len(calls) > 1:
            if not renames:
                monkeypatch.setattr(os, "rename", failing)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        _foreign(path)
        return real(temporary, final)

    def failing(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    exchange_by(exchange, monkeypatch)
    with pytest.raises(CheckpointExistsError):
        asyncckpt.convert(source, path, to="asyncckpt", overwrite=True)
    monkeypatch.undo()
    aside = pathlib.Path(f"{calls[0]}.kept" if renames else calls[0])
    assert f"is at {aside} now, and could not be put back" in caplog.text
    assert ("Move it away" in caplog.text) == (not renames)
    assert (aside / "thesis.tex").read_text() == "dear" and list(asyncckpt.load(aside)) == ["old"]
    assert list(asyncckpt.load(path)) == ["new"]
    assert sorted(os.listdir(tmp_path)) == [aside.name, "a.pt", "x"]


@pytest.mark.parametrize("name", ["notes.txt", SAVES_FILE])
@pytest.mark.parametrize(("kind", "to"), [("asyncckpt", "asyncckpt"), ("dcp", "dcp"), ("hf", "hf")])
@pytest.mark.parametrize("check", ["_check_directory", "_refuse_pinned_or_saving"])
def test_what_comes_while_the_last_checks_look_is_not_removed(
    check: str,
    kind: str,
    to: str,
    name: str,
    source: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, calls = make(tmp_path / "x", kind), []
    real = getattr(publish, check)

    def checking(*arguments: Any, **kw: Any) -> Any:
        found = real(*arguments, **kw)
        calls.append(check)
        if len(calls) == 2:  # the first one is ahead of the writing
            (path / name).write_text("dear")
        return found

    monkeypatch.setattr(publish, check, checking)
    with pytest.raises((CheckpointExistsError, SaveFailedError)) as caught:
        asyncckpt.convert(source, path, to=to, overwrite=True)
    assert len(calls) == 2
    error = caught.value
    assert error.code == "EAGAIN" if isinstance(error, SaveFailedError) else name == "notes.txt"
    assert (path / name).read_text() == "dear"
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "x"]
    (path / name).unlink()
    assert list(asyncckpt.load(path)) == ["old"]
