"""ls, inspect, verify and worker: what they print, their exit codes, and that they answer without torch."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_calls import Command
from real_worker import DEADLINE_S, RealWorker, running
from storage_samples import failing

import asyncckpt
from asyncckpt import SyncCheckpointer
from asyncckpt.cli.worker_requests import status_of
from asyncckpt.format.layout import PAGE_NBYTES

STATE = {"model": {"w": torch.arange(200_000.0), "b": torch.ones(3)}, "step": 7, "name": "grüße", "tied": [1, None]}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints, one that was never committed, and a directory that is none."""
    root = tmp_path_factory.mktemp("there") / "runs"
    root.mkdir()
    with SyncCheckpointer() as checkpointer:
        checkpointer.save(STATE, root / "b", metadata={"loss": 0.5})
        checkpointer.save(STATE, root / "a", step=5)
    (root / "incomplete").mkdir()
    for shard in (root / "a").glob("*.safetensors"):
        shutil.copy(shard, root / "incomplete")
    (root / "other").mkdir()
    (root / "other" / "notes.txt").write_text("x")
    return root


def damaged(root: Path, to: Path, offset: int = PAGE_NBYTES + 400_000) -> Path:
    """A copy of a checkpoint with one byte of one shard flipped."""
    shutil.copytree(root / "b", to)
    shard = next(to.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[offset] ^= 1
    shard.write_bytes(data)
    return shard


# ---- ls and inspect -------------------------------------------------------------------------------------------------


def test_ls_lists_by_lineage_and_shows_what_is_not_committed(root: Path, command: Command) -> None:
    code, out, _ = command("ls", root)
    lines = out.splitlines()
    assert code == 0
    assert lines[0].split() == ["STATE", "STEP", "SIZE", "RANKS", "CREATED", "PATH"]
    assert [line.split()[0] for line in lines[1:]] == ["committed", "committed", "incomplete"]
    assert [line.split()[-1] for line in lines[1:]] == [str(root / name) for name in ("b", "a", "incomplete")]
    code, rows = command.json("ls", root)
    assert code == 0
    assert [(r["state"], r["step"], r["metadata"]) for r in rows] == [
        ("committed", 7, {"loss": 0.5}), ("committed", 5, {}), ("incomplete", None, None)
    ]  # fmt: skip
    assert rows[0]["nbytes"] > 800_000


def test_ls_lists_what_a_restore_finds_behind_a_link(root: Path, tmp_path: Path, command: Command) -> None:
    shutil.copytree(root / "b", tmp_path / "old")
    (tmp_path / "newest").symlink_to(root / "a")
    (tmp_path / "latest").symlink_to("old")
    listed = [row["path"] for row in json.loads(command("ls", tmp_path, "--json")[1])]
    assert listed == [str(tmp_path / "old"), str(tmp_path / "newest")], "not twice what is there already"
    assert asyncckpt.latest_checkpoint(tmp_path) == listed[-1]


def test_ls_of_nothing(tmp_path: Path, command: Command) -> None:
    assert command("ls", tmp_path)[:2] == (0, f"no checkpoints in {tmp_path}; -r searches subdirectories\n")
    assert command.json("ls", tmp_path) == (0, [])
    (tmp_path / "file").write_text("x")
    for name in ("nothing", "file", "file/below"):
        for more in ((), ("--json",)):
            code, out, err = command("ls", tmp_path / name, *more)
            assert (code, out) == (4, "")
            assert "is not a directory" in err


def test_ls_of_a_checkpoint_itself_and_of_any_depth(root: Path, command: Command) -> None:
    assert [r["step"] for r in command.json("ls", root / "b")[1]] == [7]
    # Other tests keep checkpoints of other libraries beside the root.
    assert [r for r in command.json("ls", root.parent)[1] if r["state"] != "foreign"] == []
    assert {r["step"] for r in command.json("ls", "--recursive", root.parent)[1]} >= {7, 5}


def test_inspect_shows_tensors_objects_and_shards(root: Path, command: Command) -> None:
    code, found = command.json("inspect", root / "b")
    assert code == 0
    tensors = {t["fqn"]: (t["dtype"], t["shape"], t["nbytes"]) for t in found["tensors"]}
    assert tensors == {"model.w": ("float32", [200_000], 800_000), "model.b": ("float32", [3], 12)}
    assert {o["fqn"]: o["value"] for o in found["objects"]} == {
        "step": "7", "name": "'grüße'", "tied": "[1, None]"
    }  # fmt: skip
    assert (found["step"], found["metadata"], found["fsync"]) == (7, {"loss": 0.5}, True)
    assert [s["name"] for s in found["shards"]] == [p.name for p in (root / "b").glob("*.safetensors")]
    code, out, _ = command("inspect", root / "b")
    assert code == 0
    assert "model.w" in out
    assert "loss=0.5" in out


def test_inspect_says_by_exit_code_what_is_wrong(root: Path, tmp_path: Path, command: Command) -> None:
    assert command("inspect", root / "nothing")[0] == 4
    assert command("inspect", root / "other")[0] == 4
    code, _, err = command("inspect", root / "incomplete")
    assert code == 3
    assert "never committed" in err
    shutil.copytree(root / "b", tmp_path / "b")
    next((tmp_path / "b").glob("*.index")).write_bytes(b"x")
    assert command("inspect", tmp_path / "b")[0] == 3


def test_inspect_shows_an_integer_of_more_digits_than_python_prints(tmp_path: Path, command: Command) -> None:
    with SyncCheckpointer() as checkpointer:
        checkpointer.save({"n": 1 << 20_000, "x": torch.ones(1)}, tmp_path / "c")
    code, found = command.json("inspect", tmp_path / "c")
    assert code == 0
    assert found["objects"][0]["value"] == json.dumps({"$": "int", "v": hex(1 << 20_000)})


# ---- verify ---------------------------------------------------------------------------------------------------------


def test_verify_names_file_tensor_and_range_of_a_flipped_byte(root: Path, tmp_path: Path, command: Command) -> None:
    shard = damaged(root, tmp_path / "bad")
    code, rows = command.json("verify", tmp_path / "bad")
    assert code == 3
    assert rows[0]["state"] == "corrupt"
    (fault,) = rows[0]["faults"]
    assert (fault["file"], fault["fqn"]) == (shard.name, "model.w")
    assert fault["offset"] <= PAGE_NBYTES + 400_000 < fault["offset"] + fault["nbytes"]
    code, out, _ = command("verify", tmp_path / "bad")
    assert code == 3
    assert "CORRUPT" in out
    assert shard.name in out
    assert "model.w" in out
    with pytest.raises(asyncckpt.errors.CorruptCheckpointError):
        asyncckpt.load(tmp_path / "bad")


def test_verify_fast_skips_the_data_and_finds_wrong_sizes(root: Path, tmp_path: Path, command: Command) -> None:
    shard = damaged(root, tmp_path / "bad")
    code, rows = command.json("verify", "--fast", tmp_path / "bad")
    assert (code, rows[0]["state"]) == (0, "ok")
    assert rows[0]["read_nbytes"] < 100_000
    with shard.open("ab") as file:
        file.write(b"x")
    assert command("verify", "--fast", tmp_path / "bad")[0] == 3


@pytest.mark.parametrize("pattern", ["*.index", "*.objects.json", "*.safetensors"])
def test_verify_misses_no_file(root: Path, tmp_path: Path, command: Command, pattern: str) -> None:
    shutil.copytree(root / "b", tmp_path / "b")
    name = next((tmp_path / "b").glob(pattern))
    name.unlink()
    code, rows = command.json("verify", tmp_path / "b")
    assert code == 3
    assert name.name in json.dumps(rows)


@pytest.fixture
def one_of_each_state(root: Path, tmp_path: Path) -> dict[str, Path]:
    """A path for each state but unreadable."""
    damaged(root, tmp_path / "bad")
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / "manifest.json").write_text('{\n "asyncckpt_manifest": 99,\n}')
    return {
        "ok": root / "b", "other": root / "other", "absent": root / "nothing", "incomplete": root / "incomplete",
        "corrupt": tmp_path / "bad", "unsupported": tmp_path / "newer",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("states", "gravest"),
    [
        (["ok", "ok"], 0), (["absent"], 4), (["other"], 4), (["incomplete"], 3), (["corrupt", "ok"], 3),
        (["unsupported"], 1), (["unsupported", "corrupt"], 3), (["unsupported", "absent"], 1), (["absent", "ok"], 4),
        (["absent", "corrupt"], 3), (["absent", "incomplete", "unsupported", "ok"], 3), (["ok", "unsupported"], 1),
    ],
)  # fmt: skip
def test_verify_weighs_corrupt_over_failed_over_absent_in_any_order(
    one_of_each_state: dict[str, Path], command: Command, states: list[str], gravest: int
) -> None:
    for order in (states, states[::-1]):
        code, rows = command.json("verify", *(one_of_each_state[state] for state in order))
        assert (code, [r["state"] for r in rows]) == (gravest, ["absent" if s == "other" else s for s in order])
        assert all(
            (r["tensors"], r["faults"], r["read_nbytes"] > 800_000) == (2, [], True) for r in rows if r["state"] == "ok"
        )


def test_a_newer_version_is_unsupported_and_not_corrupt_for_every_command(
    one_of_each_state: dict[str, Path], command: Command
) -> None:
    path = one_of_each_state["unsupported"]
    code, out, _ = command("verify", path)
    assert code == 1
    assert out.startswith(f"{path}: UNSUPPORTED\n")
    assert "upgrade asyncckpt" in out
    code, out, err = command("inspect", path)
    assert (code, out) == (1, "")
    assert "upgrade asyncckpt" in err
    assert [r["state"] for r in command.json("ls", path)[1]] == ["unsupported"]


@pytest.mark.parametrize("at", ["manifest.json", ".index", ".objects.json", ".safetensors"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_a_refusal_by_the_file_system_is_unreadable_and_not_corrupt(
    root: Path, command: Command, monkeypatch: pytest.MonkeyPatch, at: str, number: int
) -> None:
    monkeypatch.setattr("asyncckpt.storage.locate.Files", lambda: failing("open", number, at=at))
    code, rows = command.json("verify", root / "b")
    assert (code, rows[0]["state"]) == (1, "unreadable")
    assert os.strerror(number) in rows[0]["faults"][0]["message"]
    code, out, _ = command("verify", root / "b")
    assert (code, out.splitlines()[0]) == (1, f"{root / 'b'}: UNREADABLE")
    monkeypatch.setattr("asyncckpt.storage.locate.Files", lambda: failing("open", number, at=at))
    if at != ".safetensors":
        code, _, err = command("inspect", root / "b")
        assert code == 1
        assert os.strerror(number) in err


def test_a_directory_that_cannot_be_listed_fails_ls_and_is_no_fault_of_a_checkpoint(
    root: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncckpt.storage.locate.Files", lambda: failing("listdir", errno.EACCES))
    code, out, err = command("ls", root)
    assert (code, out) == (1, "") and os.strerror(errno.EACCES) in err
    code, rows = command.json("verify", root / "b")
    assert (code, rows[0]["state"], rows[0]["other_files"]) == (0, "ok", None)


# ---- worker ---------------------------------------------------------------------------------------------------------


def test_worker_status_shows_sessions_slots_and_saves(
    shared_worker: RealWorker, tmp_path: Path, command: Command
) -> None:
    at = ("--endpoint", shared_worker.endpoint)
    with asyncckpt.AsyncCheckpointer(endpoint=shared_worker.endpoint) as checkpointer:
        checkpointer.save(STATE, tmp_path / "a").written.result(DEADLINE_S)
        code, report = command.json("worker", "status", *at)
        assert code == 0
        assert (report["endpoint"], report["pid"]) == (shared_worker.endpoint, shared_worker.pid)
        assert [s["pid"] for s in report["sessions"]] == [os.getpid()]
        assert len(report["slots"]) == 1
        assert [s["phase"] for s in report["saves"]][-1] == "committed"
        code, out, _ = command("worker", "status", *at)
        assert code == 0
        assert f"pid: {shared_worker.pid}" in out
        assert "sessions: 1" in out


@pytest.mark.parametrize("action", ["drain", "stop"])
def test_worker_ends_and_the_command_waits_for_it(endpoint: str, command: Command, action: str) -> None:
    with running(endpoint) as worker:
        with asyncckpt.AsyncCheckpointer(endpoint=endpoint):  # a trainer that does not save does not hold it back
            code, report = command.json("worker", action, "--endpoint", endpoint)
        assert (code, report) == (0, {"endpoint": endpoint, "pid": worker.pid, "exited": True})
        assert not worker.alive
        assert command("worker", action, "--endpoint", endpoint)[0] == 5


@pytest.mark.parametrize("action", ["status", "drain", "stop"])
def test_worker_that_cannot_be_reached_is_exit_code_5(
    endpoint: str, command: Command, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    code, _, err = command("worker", action, "--endpoint", endpoint)
    assert code == 5
    assert endpoint in err
    monkeypatch.setenv("ASYNCCKPT_ENDPOINT", endpoint)
    assert command("worker", action)[0] == 5


def test_worker_that_does_not_answer_is_exit_code_5(
    endpoint: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_of, "__defaults__", (0.3,))  # timeout_s
    with running(endpoint) as worker, worker.frozen():
        code, _, err = command("worker", "status", "--endpoint", endpoint)
    assert code == 5
    assert endpoint in err


# ---- usage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    ["", "nonsense", "ls", "verify", "inspect", "ls x --nonsense", "worker", "worker dance", "verify x --threads many"],
)
def test_wrong_usage_is_exit_code_2(command: Command, words: str) -> None:
    code, _, err = command(*words.split())
    assert code == 2 and "usage: asyncckpt" in err


def test_a_malformed_endpoint_is_wrong_usage(command: Command) -> None:
    code, _, err = command("worker", "status", "--endpoint", "tcp://x")
    assert code == 2 and "ipc://" in err


def test_quick_commands_and_the_package_itself_do_not_import_torch(root: Path) -> None:
    nobody = "ipc:///nonexistent/x.sock"
    calls = [
        ["ls", str(root)],
        ["inspect", str(root / "b")],
        ["verify", str(root / "b")],
        ["verify", "--newest", str(root)],
        ["gc", str(root)],
        ["du", str(root)],
        ["doctor"],
        ["pin", "--list", str(root)],
        ["prune", str(root / "other"), "--keep", "1"],
        ["report", str(root / "other")],
        ["top", "--once", "--endpoint", nobody],
        ["worker", "status", "--endpoint", nobody],
    ]
    page = (Path(__file__).parents[2] / "docs/cli.md").read_text()
    promised = re.search(r"([^.]+)start without importing torch", page)
    assert promised is not None
    assert set(re.findall(r"`(\w+)`", promised[1])) == {words[0] for words in calls}, "docs/make_cli.py, and the calls"
    script = f"""
import contextlib, io, sys
import asyncckpt
assert "torch" not in sys.modules, "import asyncckpt"
from asyncckpt import CheckpointerConfig, RankInfo, cli
for arguments in {calls!r}:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        cli.main(arguments)
    assert not {{"torch", "numpy"}} & set(sys.modules), arguments
assert asyncckpt.latest_checkpoint({str(root)!r}) == {str(root / "a")!r}
assert "torch" not in sys.modules, "latest_checkpoint"
dir(asyncckpt)
for name in asyncckpt.__all__:
    getattr(asyncckpt, name)
assert "torch" in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_has_had_enough_is_no_traceback(root: Path) -> None:
    command = f"{sys.executable} -m asyncckpt inspect {root / 'b'} | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == f"path: {root / 'b'}\n"
    assert "Traceback" not in done.stderr
