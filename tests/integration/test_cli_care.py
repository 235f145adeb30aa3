"""gc, verify --newest, ls: what they print and what they leave; and that the worker replaces what gc leaves."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from command_calls import Command
from real_worker import RealWorker
from storage_samples import flip_byte, shard_paths
from torch_free_client import Client, Snapshot, new_save_id

import asyncckpt
from asyncckpt import AsyncCheckpointer, SyncCheckpointer
from asyncckpt.errors import CheckpointNotCommittedError
from asyncckpt.protocol.save_phases import DURABLE

STATE = {"w": torch.arange(50_000.0), "n": 1}


def save(root: Path, *names: str, **fields: Any) -> None:
    with SyncCheckpointer(fsync=False, **fields) as checkpointer:
        for step, name in enumerate(names):
            checkpointer.save(STATE, root / name, step=step)


@pytest.fixture(autouse=True)
def no_other_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCCKPT_ENDPOINT", f"ipc://{tmp_path}/none.sock")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A committed checkpoint, and an attempt of two days ago that never was."""
    root = tmp_path / "runs"
    save(root, "good", "attempt")
    (root / "attempt" / "manifest.json").unlink()
    for file in [*(root / "attempt").iterdir(), root / "attempt"]:
        os.utime(file, (time.time() - 2 * 86400,) * 2)
    return root


# ---- gc -------------------------------------------------------------------------------------------------------------


def test_gc_says_what_would_go_and_changes_nothing(root: Path, command: Command) -> None:
    before = sorted(os.listdir(root / "attempt"))
    code, out, _ = command("gc", root)
    assert code == 0 and "would go" in out and str(root / "attempt") in out and "--delete removes 205 kB" in out
    assert str(root / "good") not in out and "no worker answers" in out
    code, found = command.json("gc", root)
    (row,) = found["found"]
    assert (row["action"], row["kind"], sorted(row["files"]), row["removed"]) == ("would go", "attempt", before, [])
    assert sorted(os.listdir(root / "attempt")) == before


def test_gc_removes_on_request_and_the_next_save_takes_the_place(root: Path, command: Command) -> None:
    code, found = command.json("gc", root, "--delete")
    assert code == 0 and found["found"][0]["action"] == "removed" and os.listdir(root / "attempt") == ["manifest.json"]
    assert asyncckpt.latest_checkpoint(root) == str(root / "good")
    for ask in (asyncckpt.load, asyncckpt.open_checkpoint):
        with pytest.raises(CheckpointNotCommittedError, match="given up"):
            ask(root / "attempt")
    assert command("verify", root / "attempt")[0] == 3
    assert [row["state"] for row in command.json("ls", root)[1]] == ["committed", "abandoned"]
    assert command("gc", root, "--delete")[1].startswith("nothing to remove")
    save(root, "attempt")
    assert asyncckpt.latest_checkpoint(root) == str(root / "attempt")
    assert command("verify", root / "attempt", root / "good")[0] == 0


def test_gc_leaves_young_attempts_alone_unless_it_is_told_otherwise(root: Path, command: Command) -> None:
    next((root / "attempt").iterdir()).touch()
    code, found = command.json("gc", root, "--delete")
    assert (code, found["found"][0]["action"]) == (0, "kept") and "in progress" in found["found"][0]["why"]
    assert command.json("gc", root, "--delete", "--older-than", "0s")[1]["found"][0]["action"] == "removed"


def test_gc_asks_the_worker_what_is_under_way(root: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"path": str(root / "attempt"), "phase": "open"}, {"path": str(root / "good"), "phase": "committed"}]
    monkeypatch.setattr("asyncckpt.cli.worker_requests.status_of", lambda endpoint: {"saves": rows})
    code, found = command.json("gc", root, "--delete")
    assert (code, found["found"][0]["action"]) == (0, "kept") and "worker" in found["found"][0]["why"]
    rows[0]["phase"] = "failed"
    assert command.json("gc", root)[1]["found"][0]["action"] == "would go"


def test_gc_with_a_worker_that_was_named_and_does_not_answer_is_exit_code_5(root: Path, command: Command) -> None:
    (private := root / "private").mkdir(mode=0o700)
    code, _, err = command("gc", root, "--endpoint", f"ipc://{private}/nobody.sock")
    assert code == 5 and "no worker listens" in err


def test_gc_of_no_directory_is_exit_code_4_and_of_no_age_usage(root: Path, command: Command) -> None:
    assert command("gc", root / "nothing")[0] == 4
    code, _, err = command("gc", root, "--older-than", "soon")
    assert code == 2 and "90s, 30m" in err


def test_gc_says_by_exit_code_1_what_could_not_be_removed(
    root: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from storage_samples import failing

    monkeypatch.setattr("asyncckpt.storage.locate.Files", lambda: failing("link", 5))
    code, found = command.json("gc", root, "--delete")
    assert code == 1 and found["found"][0]["action"] == "failed" and found["found"][0]["removed"] == []


@pytest.mark.parametrize("missing", [".metadata", "manifest.json"])
def test_of_layout_dcp_gc_leaves_a_stock_reader_no_metadata_without_files(
    missing: str, tmp_path: Path, command: Command
) -> None:
    save(tmp_path / "runs", "a", layout="dcp")
    path = tmp_path / "runs" / "a"
    (path / missing).unlink()  # a commit that died between its two names
    code, found = command.json("gc", tmp_path / "runs", "--delete", "--older-than", "0")
    assert code == 0 and found["found"][0]["action"] == "removed" and os.listdir(path) == ["manifest.json"]
    save(tmp_path / "runs", "a", layout="dcp")
    torch.testing.assert_close(asyncckpt.load(path)["w"], STATE["w"])


def test_a_worker_replaces_a_tombstone_and_gc_knows_that_it_answers(
    root: Path, worker: RealWorker, command: Command
) -> None:
    command("gc", root, "--delete")
    with AsyncCheckpointer(endpoint=worker.endpoint) as checkpointer:
        checkpointer.save(STATE, root / "attempt", step=9).written.result(60)
    code, found = command.json("gc", root, "--endpoint", worker.endpoint)
    assert (code, found["worker"], found["found"]) == (0, worker.endpoint, [])
    assert asyncckpt.restore_latest(root).step == 9


def test_gc_leaves_alone_what_a_living_worker_writes_whatever_its_age(
    root: Path, worker: RealWorker, command: Command
) -> None:
    path, save_id = root / "under-way", new_save_id(epoch=7)
    with Client(worker.endpoint, rank=0, world_size=2) as client:  # the other rank never comes
        client.hello()
        snapshot = Snapshot()
        slot = client.allocate(snapshot.slot_nbytes())
        client.stage(slot, snapshot, save_id, str(path), commit_timeout_s=30.0)
        client.submit(slot, save_id)
        client.wait(save_id, frozenset({DURABLE}))
        before = sorted(os.listdir(path))
        code, found = command.json("gc", root, "--delete", "--older-than", "0", "--endpoint", worker.endpoint)
        rows = {row["path"]: row for row in found["found"]}
        assert code == 0 and rows[str(path)]["action"] == "kept" and "worker" in rows[str(path)]["why"]
        assert sorted(os.listdir(path)) == before and rows[str(root / "attempt")]["action"] == "removed"
        worker.signal(signal.SIGKILL)  # else it would wait for the other rank
    worker.wait_gone()
    found = command.json("gc", root, "--delete", "--older-than", "0")[1]["found"]
    assert [(row["path"], row["action"]) for row in found] == [(str(path), "removed")]


# ---- verify --newest ------------------------------------------------------------------------------------------------


def test_verify_newest_says_which_would_be_used(tmp_path: Path, command: Command) -> None:
    root = tmp_path / "runs"
    save(root, "a", "b", "c")
    code, out, _ = command("verify", "--newest", root)
    assert (
        code == 0 and out.splitlines()[-1] == f"restore_latest would load {root / 'c'}" and str(root / "b") not in out
    )
    for name in ("c", "b"):
        shard = shard_paths(str(root / name))[0]
        flip_byte(shard, os.path.getsize(shard) - 1)
    code, found = command.json("verify", "--newest", root)
    assert code == 3 and found["used"] == str(root / "a") == asyncckpt.restore_latest(root).path
    assert [(row["path"], row["state"]) for row in found["tried"]] == [
        (str(root / "c"), "corrupt"), (str(root / "b"), "corrupt"), (str(root / "a"), "ok")
    ]  # fmt: skip
    assert command.json("verify", "--newest", "--fast", root)[1]["used"] == str(root / "c")
    os.unlink(shard_paths(str(root / "a"))[0])
    code, out, _ = command("verify", "--newest", root)
    assert code == 3 and "none of" in out


def test_verify_newest_of_nothing_is_exit_code_4_and_of_several_usage(tmp_path: Path, command: Command) -> None:
    assert command("verify", "--newest", tmp_path)[0] == 4
    assert command("verify", "--newest", tmp_path / "nothing")[0] == 4
    assert command("verify", "--newest", tmp_path, tmp_path)[0] == 2


def test_verify_newest_stops_at_what_would_be_raised(tmp_path: Path, command: Command) -> None:
    save(tmp_path, "a", "b")
    manifest = tmp_path / "b" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"asyncckpt_manifest": 1', '"asyncckpt_manifest": 2'))
    code, found = command.json("verify", "--newest", tmp_path)
    assert (code, found["used"]) == (1, None)


# ---- ls -------------------------------------------------------------------------------------------------------------


def test_ls_lists_directory_by_directory_the_newest_of_each_last(tmp_path: Path, command: Command) -> None:
    save(tmp_path / "z", "two", "one")
    save(tmp_path / "a", "four", "three", "five")
    save(tmp_path / "a", "three2")
    (tmp_path / "a" / "four" / "manifest.json").unlink()
    os.rename(tmp_path / "a" / "five", tmp_path / "a" / "five.broken-1")
    rows = command.json("ls", "-r", tmp_path)[1]
    assert [(os.path.relpath(row["path"], tmp_path), row["state"]) for row in rows] == [
        ("a/three", "committed"),
        ("a/three2", "committed"),
        ("a/five.broken-1", "quarantined"),
        ("a/four", "incomplete"),
        ("z/two", "committed"),
        ("z/one", "committed"),
    ]
