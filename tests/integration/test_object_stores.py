"""Checkpoints in an object store: what is saved there is found, read, listed and removed as on a disk."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from real_worker import RealWorker

from tests import object_servers

ROOT = f"s3://{object_servers.BUCKET}/runs/a"
DEADLINE_S = 120.0

TRAINER = """
import sys, torch, asyncckpt
from asyncckpt.errors import CheckpointExistsError, CheckpointNotFoundError, ConfigError

root = sys.argv[1]
state = {"w": torch.arange(3_000_000.0), "n": {"lr": 0.1}, "b": torch.ones(3, dtype=torch.bfloat16)}

def same(found):
    assert torch.equal(found["w"], state["w"]) and found["n"] == {"lr": 0.1} and torch.equal(found["b"], state["b"])

with asyncckpt.AsyncCheckpointer() as checkpointer:
    for step in (1, 2, 3):
        state["w"] += 1
        handle = checkpointer.save(state, f"{root}/step-{step}", step=step)
        handle.written.result(60)
    same(checkpointer.load(f"{root}/step-3"))
    assert checkpointer.latest_checkpoint(root) == f"{root}/step-3"
    handle = checkpointer.save(state, f"{root}/step-3", step=4)
    try:
        handle.written.result(60)
        raise SystemExit("a checkpoint was replaced")
    except CheckpointExistsError:
        pass
same(asyncckpt.load(f"{root}/step-3", source="disk"))
assert asyncckpt.latest_checkpoint(root) == f"{root}/step-3"
target = {"w": torch.zeros(3_000_000), "n": {"lr": 0.0}, "b": torch.zeros(3, dtype=torch.bfloat16)}
restored = asyncckpt.restore_latest(root, target)
assert restored is not None and restored.path == f"{root}/step-3"
same(target)
with asyncckpt.open_checkpoint(f"{root}/step-3") as opened:
    assert torch.equal(opened.tensor("w"), state["w"])
with asyncckpt.SyncCheckpointer() as checkpointer:
    state["w"] += 1
    checkpointer.save(state, f"{root}/step-5", step=5)
same(asyncckpt.load(f"{root}/step-5"))
for wrong in ({"overwrite": True}, {"layout": "dcp"}):
    with asyncckpt.SyncCheckpointer(**wrong) as checkpointer:
        try:
            checkpointer.save(state, f"{root}/step-6", step=6)
            raise SystemExit(f"{wrong} was taken")
        except ConfigError as error:
            assert "object store" in str(error)
assert asyncckpt.latest_checkpoint(f"{root}/nothing") is None
try:
    asyncckpt.load(f"{root}/nothing")
    raise SystemExit("nothing was loaded")
except CheckpointNotFoundError:
    pass
"""


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    with object_servers.s3():
        yield


@pytest.fixture(autouse=True)
def endpoint_is_known(worker: RealWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCCKPT_ENDPOINT", worker.endpoint)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    print(done.stdout, done.stderr)
    return done


def listed(*arguments: str) -> Any:
    done = run("-m", "asyncckpt", *arguments, "--json")
    assert done.returncode == 0
    return json.loads(done.stdout)


def test_what_is_saved_to_a_bucket_is_found_loaded_listed_verified_and_removed() -> None:
    done = run("-c", TRAINER, ROOT)
    assert done.returncode == 0
    rows = listed("ls", ROOT)
    assert [(row["step"], row["state"]) for row in rows] == [(s, "committed") for s in (1, 2, 3, 5)]
    assert run("-m", "asyncckpt", "verify", f"{ROOT}/step-3", f"{ROOT}/step-5").returncode == 0
    assert run("-m", "asyncckpt", "inspect", f"{ROOT}/step-3").returncode == 0
    assert run("-m", "asyncckpt", "du", ROOT).returncode == 0
    assert run("-m", "asyncckpt", "prune", ROOT, "--keep", "2", "--delete").returncode == 0
    rows = listed("ls", ROOT)
    assert [row["step"] for row in rows if row["state"] == "committed"] == [3, 5]
    assert run("-m", "asyncckpt", "gc", ROOT).returncode == 0
    assert run("-m", "asyncckpt", "ls", f"{ROOT}/nothing").returncode == 4
