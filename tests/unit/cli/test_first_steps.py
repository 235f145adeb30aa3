"""What a new user trips over: it works, or says at once what was meant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import asyncckpt  # noqa: E402
from asyncckpt import AsyncCheckpointer, SyncCheckpointer, make_async_checkpointer, make_sync_checkpointer  # noqa: E402
from asyncckpt.errors import CheckpointExistsError, ConfigError, MissingKeysError, UnsupportedPathError  # noqa: E402

STATE = {"w": torch.ones(3), "b": torch.zeros(2)}


def save(path: Any, **fields: Any) -> None:
    with SyncCheckpointer(fsync=False, **fields) as checkpointer:
        checkpointer.save(STATE, path)


# ---- where to -------------------------------------------------------------------------------------------------------


def test_a_save_to_the_working_directory_works_beside_foreign_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("mine")
    monkeypatch.chdir(tmp_path)
    save(".")
    assert torch.equal(asyncckpt.load(".")["w"], STATE["w"]) and (tmp_path / "train.py").read_text() == "mine"
    assert asyncckpt.latest_checkpoint(".") == str(tmp_path)


def test_a_save_to_the_directory_that_holds_checkpoints_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "step-1")
    with pytest.raises(CheckpointExistsError, match="step-1"):
        save(tmp_path)
    with pytest.raises(CheckpointExistsError, match="not be found any more"):
        save(tmp_path, overwrite=True)
    assert asyncckpt.latest_checkpoint(tmp_path) == str(tmp_path / "step-1")
    (tmp_path / "step-1" / "manifest.json").unlink()  # one that was never committed hides nothing
    save(tmp_path)


def test_nothing_is_saved_to_the_root_of_all_directories() -> None:
    class Refusing(asyncckpt.CheckpointWriter):
        def write(self, *args: Any, **kw: Any) -> None:
            raise AssertionError("it would have been saved")

        def close(self) -> None: ...

    with SyncCheckpointer(writer=Refusing()) as checkpointer, pytest.raises(UnsupportedPathError, match="every other"):
        checkpointer.save(STATE, "/")


# ---- settings -------------------------------------------------------------------------------------------------------

MAKERS: list[Callable[..., Any]] = [
    AsyncCheckpointer,
    SyncCheckpointer,
    make_async_checkpointer,
    make_sync_checkpointer,
]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(("name", "value"), [("rank_info", (0, 1)), ("commit_hook", 3), ("commit_hook", lambda: None)])
def test_a_value_of_the_wrong_kind_is_refused_when_it_is_given(make: Callable[..., Any], name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        make(**{name: value})
    assert caught.value.field == name


@pytest.mark.parametrize("ask", [asyncckpt.open_checkpoint, asyncckpt.restore_latest])
def test_a_rank_of_the_wrong_kind_is_refused_by_readers_too(tmp_path: Path, ask: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="RankInfo"):
        ask(tmp_path, rank_info=(0, 1))


# ---- names ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(tmp_path / "c")
    return tmp_path / "c"


def test_a_target_of_which_nothing_matches_stays_and_is_logged_or_refused(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = {"other": torch.zeros(3)}
    assert asyncckpt.load(saved, target, strict=False) is target and not target["other"].any()
    assert "1 keys are not in the checkpoint and keep their values: other" in caplog.text
    with pytest.raises(MissingKeysError):
        asyncckpt.load(saved, target)


@pytest.mark.parametrize(
    ("key_map", "words"),
    [
        ({"x": "nowhere"}, "key_map maps 'x' to 'nowhere'"),
        (lambda fqn: "net." + fqn, "key_map maps 'x' to 'net.x'"),
        ({"w": "x"}, "is reversed: write 'x': 'w'"),
        ({}, "not in the checkpoint; nothing was changed"),
    ],
)
def test_keys_that_key_map_does_not_find_are_explained(saved: Path, key_map: Any, words: str) -> None:
    with pytest.raises(MissingKeysError, match=words) as caught:
        asyncckpt.load(saved, {"x": torch.zeros(3)}, strict=True, key_map=key_map)
    assert caught.value.keys == ["x"]


def test_keys_that_were_selected_in_vain_are_none_that_key_map_must_know(saved: Path) -> None:
    with pytest.raises(MissingKeysError, match="nowhere"):
        asyncckpt.load(saved, {"x": torch.zeros(3)}, keys="nowhere", key_map={"x": "w"}.__getitem__)


@pytest.mark.parametrize(("key_map", "words"), [(3, "key_map is a int"), (lambda fqn: 3, "key_map returns 3 for 'x'")])
@pytest.mark.parametrize("ask", [asyncckpt.load, asyncckpt.plan_load])
def test_a_key_map_that_is_none_is_refused(saved: Path, ask: Callable[..., Any], key_map: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ask(saved, {"x": torch.zeros(3)}, key_map=key_map)
