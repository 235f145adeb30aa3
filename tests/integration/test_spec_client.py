"""Who knows only the SPEC files can save: see `spec_client`."""

from __future__ import annotations

import os
import pathlib
import secrets
from typing import Any

import torch
from real_worker import RealWorker, running

import asyncckpt
from tests.spec_client import PAGE, SEALED, Slot, Worker, padded, request_of, shard_of

VALUES = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]


def stage(worker: Worker, path: str) -> tuple[str, Slot, dict[str, Any]]:
    """Begin a save and seal its slot; return the save id, the slot, and the fields of `submit`."""
    run = secrets.token_hex(6)
    epoch = worker.call("lineage", run=run, path=path, least_epoch=0)["epoch"]
    save_id = f"{epoch:06d}-{0:08d}-{run}"
    shard = shard_of(save_id, VALUES)
    request = request_of(save_id, path, shard, [2, 3], step=7)
    nbytes = PAGE + padded(len(shard)) + padded(len(request)) + PAGE
    slot = Slot(worker.welcome["pid"], worker.call("allocate", nbytes=nbytes, populate=False))
    worker.call(
        "begin", save_id=save_id, step=7, path=path, slot=slot.number, generation=1, nbytes=len(shard), umask=0o077,
        fsync=True, overwrite=False, commit_timeout_s=60,
    )  # fmt: skip
    slot.stage(1, shard, request)
    return save_id, slot, {"save_id": save_id, "slot": slot.number, "generation": 1}


def check(path: pathlib.Path) -> None:
    found = asyncckpt.load(path)
    assert found["step"] == 7 and torch.equal(found["w"], torch.tensor(VALUES))
    assert os.listdir(path.parent) == [path.name]


def test_a_client_that_was_written_from_the_documents_saves(worker: RealWorker, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "root" / "step-7"
    client = Worker(worker.endpoint)
    save_id, slot, doorbell = stage(client, str(path))
    client.call("submit", **doorbell)
    row = client.ended(save_id)
    assert row["phase"] == "committed", row
    (part,) = client.call("recall", path=str(tmp_path), hold=False)["parts"]
    assert (part["save_id"], part["slot"], part["committed"]) == (save_id, slot.number, True)
    slot.close()
    client.call("release", slot=slot.number)
    client.call("goodbye")
    client.close()
    check(path)


def test_what_it_has_sealed_is_committed_by_another_worker(
    worker: RealWorker, tmp_path: pathlib.Path, endpoint_dir: pathlib.Path
) -> None:
    path = tmp_path / "root" / "step-7"
    client = Worker(worker.endpoint)
    save_id, slot, _ = stage(client, str(path))  # no doorbell
    worker.kill()
    client.close()
    assert slot.word(64) == SEALED
    with running(f"ipc://{endpoint_dir}/next.sock") as other:
        heir = Worker(other.endpoint)
        granted = heir.call(
            "adopt", fd=slot.fd, nbytes=slot.nbytes, token=slot.token, generation=1, ended=0, committed=""
        )
        row = heir.ended(save_id)
        assert row["phase"] == "committed", row
        heir.call("release", slot=granted["slot"])
        heir.call("goodbye")
        heir.close()
    slot.close()
    check(path)
