"""Few file descriptors are left: what can be done is done, the rest is a typed error, and no process is aborted.

libzmq ends its process where it finds none for what it makes at first. Each call is tried with every number of free
descriptors, in a fork of one process that has called everything before.
"""

from __future__ import annotations

import json
import os

import pytest
from real_worker import RealWorker
from warm_python import WarmPython

from asyncckpt.protocol.dealer import RESERVED

MOST = 24

PROGRAM = """
import contextlib, json, os, resource, sys
import torch
import asyncckpt
from asyncckpt.cli.worker_requests import status_of
from asyncckpt import AsyncCheckpointer, CheckpointManager, errors

torch.set_num_threads(1)  # its other threads do not live in a fork
endpoint, root, most = sys.argv[1], sys.argv[2], int(sys.argv[3])
os.environ["ASYNCCKPT_ENDPOINT"] = endpoint
small = {"w": torch.ones(1000), "step": 1}
large = {f"w{i}": torch.full((1 << 18,), float(i)) for i in range(24)}
many = {f"w{i}": torch.full((2,), float(i)) for i in range(8000)}
with AsyncCheckpointer() as warm:
    warm.save(small, f"{root}/small/1").written.result(100)
with AsyncCheckpointer(files_per_rank=6) as warm:
    warm.save(large, f"{root}/large/1").written.result(100)
with AsyncCheckpointer() as warm:
    warm.save(many, f"{root}/many/1").written.result(100)
for name in ("small", "large", "many"):
    asyncckpt.load(f"{root}/{name}/1"), asyncckpt.restore_latest(f"{root}/{name}"), asyncckpt.held_snapshots(root)
status_of(endpoint)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

@contextlib.contextmanager
def few(n):
    taken = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    for _ in range(n):
        os.close(taken.pop())
    yield
    for fd in taken:
        os.close(fd)

def load(name, wanted):
    def call(n):
        with few(n):
            found = asyncckpt.load(f"{root}/{name}/1")
        assert all(torch.equal(found[key], wanted[key]) for key in wanted if key != "step")
    return call

def restore(n):
    target = {"w": torch.zeros(1000), "step": 0}
    with few(n):
        assert asyncckpt.restore_latest(f"{root}/small", target) is not None
    assert target["step"] == 1 and target["w"].sum() == 1000

def held(n):
    with few(n):
        asyncckpt.held_snapshots(root)

def status(n):
    with few(n):
        assert status_of(endpoint)["pid"]

def named(n):
    with few(n):
        checkpointer = AsyncCheckpointer()
    checkpointer.close()

def saved(checkpointer, name):
    return checkpointer.save({"w": torch.ones(10)}, f"{root}/{name}").written.exception(100)

def and_again(checkpointer, error, n):
    # Whatever came of it, the next save works once there are descriptors.
    assert saved(checkpointer, f"{what}-again-{n}") is None
    checkpointer.close()
    if error is not None:
        raise error

def first_save(n):
    del os.environ["ASYNCCKPT_ENDPOINT"]
    from asyncckpt import async_checkpointer
    async_checkpointer.default_endpoint = lambda *_, **__: endpoint
    with few(n):
        checkpointer = AsyncCheckpointer()  # connects in the background, or with its first save
        error = saved(checkpointer, f"first-{n}")
    and_again(checkpointer, error, n)

def later_save(n):
    checkpointer = AsyncCheckpointer()
    assert saved(checkpointer, f"before-{n}") is None
    with few(n):
        error = saved(checkpointer, f"later-{n}")
    and_again(checkpointer, error, n)

def larger_save(n):
    checkpointer = AsyncCheckpointer()
    assert saved(checkpointer, f"before-larger-{n}") is None
    with few(n):  # needs another slot, whose memory is opened
        error = checkpointer.save({"w": torch.ones(1 << 20)}, f"{root}/larger-{n}").written.exception(100)
    and_again(checkpointer, error, n)

calls = {"load": load("small", small), "load of several files": load("large", large)}
calls |= {"load of many": load("many", many)}
calls |= {"restore_latest": restore, "held_snapshots": held, "status": status, "constructor": named}
calls |= {"first save": first_save, "later save": later_save, "larger save": larger_save}
told = {what: [] for what in calls}
for what, n in ((what, n) for what in calls for n in range(most + 1)):
    reads, writes = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reads)
        try:
            calls[what](n)
            said = "done"
        except (errors.AsyncCkptError, OSError) as error:
            typed = not type(error).__module__.startswith("zmq")
            said = f"{'typed' if typed else 'bare'}: {error!r}"
        except BaseException as error:
            said = f"bare: {error!r}"
        os.write(writes, said.encode()[:4000])
        os._exit(0)
    os.close(writes)
    with open(reads, "rb") as file:
        said = file.read().decode(errors="replace")
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    told[what].append(said if code == 0 else f"ended with {code}")
print(json.dumps(told))
"""

FROM = {
    "load": 1,
    "load of several files": 1,
    "load of many": 1,
    "restore_latest": 1,
    "held_snapshots": 0,
    "status": RESERVED,
    "constructor": RESERVED + 1,
    "first save": RESERVED + 2,
    "later save": 1,
    "larger save": 2,
}
"""From how many free descriptors on each call succeeds (docs/memory-budget.md); below it is a typed error."""


@pytest.mark.timeout(400)
def test_with_few_descriptors_a_call_succeeds_from_a_number_on_and_is_a_typed_error_below(
    worker: RealWorker, tmp_path: os.PathLike[str], warm_python: WarmPython
) -> None:
    done = warm_python.run(PROGRAM, worker.endpoint, str(tmp_path), str(MOST), timeout_s=350)
    assert not done.returncode, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told.keys() == FROM.keys()
    said = {(call, n): found for call, row in told.items() for n, found in enumerate(row)}
    assert {at: found for at, found in said.items() if found != "done" and not found.startswith("typed")} == {}
    assert {at: found for at, found in said.items() if at[1] >= FROM[at[0]] and found != "done"} == {}
    assert worker.alive
