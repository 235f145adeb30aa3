"""Checkpoints in an object store: what is saved there is found, read, listed and removed as on a disk."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import rank_processes
import real_worker
import torch
from real_worker import RealWorker
from worker_pair import empty_places

import asyncckpt
from asyncckpt.protocol.endpoint import socket_path
from asyncckpt.storage.cloud.object_store import ObjectStore
from tests import object_servers
from tests.object_servers import Server
from tests.warm_python import WarmPython

object_servers.start_runtime()

Run = Callable[..., subprocess.CompletedProcess[str]]
DEADLINE_S = 120.0
SECRETS = {"s3": "secret_access_key", "gs": "bearer_token", "az": "account_key"}
"""The option whose value nobody may see."""

VARIABLES = ("ASYNCCKPT_ENDPOINT", "AWS_", "GOOGLE_", "AZURE_")
"""What ranks need: they are forked from a server that was started earlier."""

TRAINER = """
import sys, torch, asyncckpt
from asyncckpt.errors import CheckpointExistsError, CheckpointNotFoundError, ConfigError

root = sys.argv[1]
state = {"w": torch.arange(2_000_000.0), "n": {"lr": 0.1}, "b": torch.ones(3, dtype=torch.bfloat16)}

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
target = {"w": torch.zeros(2_000_000), "n": {"lr": 0.0}, "b": torch.zeros(3, dtype=torch.bfloat16)}
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


def sharded(world_size: int, dim: int, fill: bool) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.arange(3_600_000.0).reshape(3000, 1200)
    mesh = init_device_mesh("cpu", (world_size,))
    w = distribute_tensor(whole if fill else torch.zeros_like(whole), mesh, [Shard(dim)])
    return {"w": w, "same": torch.arange(5.0) * fill, "step": 3 * fill}


def save_on_a_rank(rank: int, root: str) -> None:
    with asyncckpt.AsyncCheckpointer() as checkpointer:
        checkpointer.save(sharded(2, 0, True), f"{root}/step-3", step=3).written.result(DEADLINE_S)


def restore_on_a_rank(rank: int, root: str, world_size: int) -> None:
    state = sharded(world_size, 1, False)
    restored = asyncckpt.restore_latest(root, state)
    assert restored is not None and restored.path == f"{root}/step-3" and state["step"] == 3
    assert torch.equal(state["w"].full_tensor(), torch.arange(3_600_000.0).reshape(3000, 1200))
    assert torch.equal(state["same"], torch.arange(5.0))


OPTIONS_TRAINER = """
import json, sys, torch, asyncckpt
from asyncckpt.errors import ConfigError

root, options = sys.argv[1], json.loads(sys.argv[2])
state = {"w": torch.arange(2_000_000.0)}
for make in (asyncckpt.AsyncCheckpointer, asyncckpt.SyncCheckpointer):
    with make(storage_options=options) as checkpointer:
        path = f"{root}/{make.__name__}"
        handle = checkpointer.save(state, path, step=1)
        if handle is not None:
            handle.written.result(60)
        assert torch.equal(checkpointer.load(path)["w"], state["w"])
        assert checkpointer.restore_latest(root) is not None
        assert checkpointer.latest_checkpoint(root) == path
    with make(storage_options={**options, "nonsense": "x"}) as checkpointer:
        try:
            checkpointer.save(state, f"{root}/wrong", step=2)
            raise SystemExit("an unknown option was taken")
        except ConfigError as error:
            assert error.field == "storage_options", error
with asyncckpt.CheckpointManager(f"{root}/managed", storage_options=options, max_to_keep=1) as manager:
    for step in (1, 2):
        manager.save(step, state)
    manager.wait()
    assert manager.restore(dict(state)) is not None and manager.latest_step() == 2
assert torch.equal(asyncckpt.load(path, source="disk", storage_options=options)["w"], state["w"])
assert asyncckpt.latest_checkpoint(root, storage_options=options) == path
assert asyncckpt.restore_latest(root, storage_options=options).path == path
assert asyncckpt.plan_load(path, state, storage_options=options).fits
with asyncckpt.open_checkpoint(path, storage_options=options) as opened:
    assert torch.equal(opened.tensor("w"), state["w"])
"""


COMMAND = "import sys; from asyncckpt.cli import main; sys.exit(main(sys.argv[1:]))"

LOSING_TRAINER = """
import json, os, signal, sys, torch, asyncckpt

root, options, pid = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
state = {"w": torch.arange(4_000_000.0)}
with asyncckpt.AsyncCheckpointer(storage_options=options) as checkpointer:
    handle = checkpointer.save(state, f"{root}/step-1", step=1)
    handle.staged.result(60)
    os.kill(pid, signal.SIGKILL)
    handle.written.result(60)
assert torch.equal(asyncckpt.load(f"{root}/step-1", source="disk", storage_options=options)["w"], state["w"])
"""

DYING_TRAINER = """
import json, os, signal, sys, torch, asyncckpt

root, options = sys.argv[1], json.loads(sys.argv[2])
checkpointer = asyncckpt.AsyncCheckpointer(storage_options=options)
checkpointer.save({"w": torch.arange(4_000_000.0)}, f"{root}/step-2", step=2).staged.result(60)
os.kill(os.getpid(), signal.SIGKILL)
"""

MEMORY_NBYTES, MOST_NBYTES = 192 << 20, 64_000_000
"""Of a checkpoint, and of what the worker may need for it besides the slot."""

LARGE_TRAINER = """
import pathlib, re, sys, threading, torch, asyncckpt

root, disk, pid, nbytes = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])

def own_nbytes():
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"^RssAnon:\\s+(\\d+) kB", status, re.MULTILINE)[1]) << 10

ended, before, most = threading.Event(), own_nbytes(), [0]

def watch():
    while not ended.wait(0.005):
        most[0] = max(most[0], own_nbytes())

watching = threading.Thread(target=watch)
watching.start()
try:
    with asyncckpt.AsyncCheckpointer() as checkpointer:
        small = [torch.full((1 << 16,), float(n)) for n in range(nbytes >> 19)]
        state = {"large": torch.arange(nbytes // 16), "small": small}
        checkpointer.save(state, f"{root}/large", step=1).written.result(60)
        state = {"large": torch.arange(nbytes // 16)}
        copies = [
            checkpointer.save(state, f"{disk}/{n}/large", step=2 + n, mirror=f"{root}/{n}/copied") for n in range(4)
        ]
        for copy in copies:
            copy.mirrored.result(60)
    with asyncckpt.AsyncCheckpointer(files_per_rank=4) as checkpointer:
        checkpointer.save(state, f"{root}/four", step=9).written.result(60)
finally:
    ended.set()
    watching.join()
print("grown by", most[0] - before)
assert 0 < most[0] - before <= int(sys.argv[5]), most[0] - before
"""

DCP_LOADER = """
import sys, torch, asyncckpt, asyncckpt.dcp
import torch.distributed.checkpoint as dcp

state = {"w": torch.zeros(2_000_000), "b": torch.zeros(3, dtype=torch.bfloat16)}
dcp.load(state, storage_reader=asyncckpt.dcp.StorageReader(sys.argv[1]), no_dist=True)
found = asyncckpt.load(sys.argv[1], source="disk")
assert torch.equal(state["w"], found["w"]) and torch.equal(state["b"], found["b"])
"""


@pytest.fixture(scope="module", params=object_servers.SCHEMES)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with object_servers.running(request.param) as found:
        yield found


@pytest.fixture
def root(server: Server) -> Iterator[str]:
    """Where checkpoints of a run lie in a store that programs find by the environment."""
    with object_servers.in_environment(server):
        yield f"{server.root}/runs"


@pytest.fixture(autouse=True)
def endpoint_is_known(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker is started after the environment is set, where a test has `root`."""
    if "root" in request.fixturenames:
        request.getfixturevalue("root")
    worker: RealWorker = request.getfixturevalue("worker")
    monkeypatch.setenv("ASYNCCKPT_ENDPOINT", worker.endpoint)


def called(*words: str) -> subprocess.CompletedProcess[str]:
    """Call a command that does without torch."""
    command = [sys.executable, "-m", "asyncckpt", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    print(done.stdout, done.stderr)
    return done


@pytest.fixture
def run(warm_python: WarmPython) -> Run:
    """Runs a program, or a command that needs torch."""

    def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        done = warm_python.run(program, *arguments, timeout_s=DEADLINE_S)
        print(done.stdout, done.stderr)
        return done

    return run


def listed(*arguments: str) -> Any:
    done = called(*arguments, "--json")
    assert done.returncode == 0
    return json.loads(done.stdout)


MIRRORED = """
import sys, pathlib, torch, asyncckpt

disk, mirror = pathlib.Path(sys.argv[1]), sys.argv[2]
state = {"w": torch.arange(2_000_000.0)}
with asyncckpt.CheckpointManager(disk / "a", max_to_keep=1, mirror=mirror, mirror_max_to_keep=2) as manager:
    for step in range(4):
        state["w"] += 1
        manager.save(step, state).mirrored.result(60)
with asyncckpt.CheckpointManager(disk / "new", mirror=mirror) as manager:
    found = manager.restore(step=None)
    assert found.step == 3 and found.path.startswith(mirror) and torch.equal(found.state_dict["w"], state["w"])
    assert manager.save(3, state, metrics={}).mirrored.result(60).nbytes > 8_000_000, "an earlier copy is replaced"
assert torch.equal(asyncckpt.load(f"{mirror}/step-00000003")["w"], state["w"])
"""


def test_a_bucket_is_the_mirror_of_a_disk(root: str, tmp_path: pathlib.Path, run: Run) -> None:
    mirror = f"{root}/mirror"
    assert run(MIRRORED, str(tmp_path), mirror).returncode == 0
    committed = [row["step"] for row in listed("ls", mirror) if row["state"] == "committed"]
    assert committed[-1] == 3 and len(committed) <= 3


def test_what_is_saved_to_a_bucket_is_found_loaded_listed_verified_and_removed(
    server: Server, root: str, run: Run
) -> None:
    root = f"{root}/a"
    store = ObjectStore(server.root, {**server.options(), **object_servers.NO_CONNECTION_STAYS})
    done = run(TRAINER, root)
    assert done.returncode == 0
    rows = listed("ls", root)
    assert [(row["step"], row["state"]) for row in rows] == [(s, "committed") for s in (1, 2, 3, 5)]
    assert called("verify", f"{root}/step-3", f"{root}/step-5").returncode == 0
    assert called("inspect", f"{root}/step-3").returncode == 0
    assert called("du", root).returncode == 0
    assert run(COMMAND, "diff", f"{root}/step-3", f"{root}/step-3").returncode == 0
    assert run(COMMAND, "diff", f"{root}/step-3", f"{root}/step-5").returncode == 1
    assert run(DCP_LOADER, f"{root}/step-3").returncode == 0
    for refused in (
        ("pin", f"{root}/step-3"),
        ("diff", f"{root}/step-3", "."),
        ("convert", f"{root}/step-3", f"{root}/x", "--to", "hf"),
    ):
        done = run(COMMAND, *refused)
        assert done.returncode == 1 and "Traceback" not in done.stderr and "copy" in done.stderr
    assert called("prune", root, "--keep", "2", "--delete").returncode == 0
    rows = listed("ls", root)
    assert [row["step"] for row in rows if row["state"] == "committed"] == [3, 5]
    assert called("gc", root).returncode == 0
    left = f"{root}/step-9/rank-00000.000001-00000009-{'a' * 12}.index"
    store.put(left, b"of a save that was killed")
    assert called("gc", root, "--older-than", "0s", "--delete").returncode == 0
    with pytest.raises(FileNotFoundError):
        store.stat(left)
    rows = listed("ls", root)
    assert [row["step"] for row in rows if row["state"] == "committed"] == [3, 5]
    assert called("ls", f"{root}/nothing").returncode == 4


def test_a_checkpoint_in_a_bucket_is_exported(server: Server, root: str, tmp_path: pathlib.Path, run: Run) -> None:
    state = {"model": {"w": torch.randn(1500, 1000), "e": torch.randn(2, 3)}, "step": 3}
    with asyncckpt.SyncCheckpointer() as checkpointer:
        checkpointer.save(state, f"{root}/export", step=3)
    (tmp_path / "config.json").write_text("{}")
    options = [word for name, value in server.options().items() for word in ("--storage-option", f"{name}={value}")]
    for name, given in (("a", []), ("b", [*options, "--dtype", "bfloat16"])):
        done = run(
            *(COMMAND, "convert", f"{root}/export", str(tmp_path / name), "--to", "hf"),
            *("--keys", "model", "--rename", "model.=", "--config", str(tmp_path), *given),
        )
        assert done.returncode == 0, done.stderr
        found = asyncckpt.load(tmp_path / name)
        for key, tensor in state["model"].items():
            assert torch.equal(found[key], tensor.bfloat16() if given else tensor)
    made = asyncckpt.export_hf(
        f"{root}/export", tmp_path / "c", config={}, key="model", storage_options=server.options()
    )
    assert made.tensors == 2


@pytest.mark.parametrize("to", ["asyncckpt", "dcp", "torch", "safetensors"])
def test_a_checkpoint_in_a_bucket_is_converted(
    server: Server, root: str, tmp_path: pathlib.Path, to: str, run: Run
) -> None:
    state = {"w": torch.randn(1500, 1000), "e": torch.randn(2, 3)}
    with asyncckpt.SyncCheckpointer() as checkpointer:
        checkpointer.save(state, f"{root}/convert-{to}", step=3)
    options = [word for name, value in server.options().items() for word in ("--storage-option", f"{name}={value}")]
    arguments = (f"{root}/convert-{to}", str(tmp_path / "converted"), "--to", to, *options)
    done = run(COMMAND, "convert", *arguments)
    assert done.returncode == 0, done.stderr
    found = asyncckpt.load(tmp_path / "converted")
    assert all(torch.equal(found[key], tensor) for key, tensor in state.items())


def test_files_of_others_are_converted_into_a_bucket(
    server: Server, root: str, tmp_path: pathlib.Path, run: Run
) -> None:
    state = {"w": torch.randn(1500, 1000), "e": torch.randn(2, 3), "n": {"lr": 0.1}}
    torch.save(state, tmp_path / "state.pt")
    options = [word for name, value in server.options().items() for word in ("--storage-option", f"{name}={value}")]
    arguments = str(tmp_path / "state.pt"), f"{root}/made", "--to", "asyncckpt", *options
    assert run(COMMAND, "convert", *arguments).returncode == 0
    found = asyncckpt.load(f"{root}/made", source="disk")
    assert torch.equal(found["w"], state["w"]) and torch.equal(found["e"], state["e"]) and found["n"] == {"lr": 0.1}
    asyncckpt.convert(f"{root}/made", f"{root}/copy", to="asyncckpt", storage_options=server.options())
    assert torch.equal(asyncckpt.load(f"{root}/copy", source="disk")["w"], state["w"])
    with pytest.raises(asyncckpt.errors.CheckpointExistsError):
        asyncckpt.convert(tmp_path / "state.pt", f"{root}/made", to="asyncckpt")


def test_ranks_one_and_three_restore_what_two_have_saved(root: str, worker: RealWorker) -> None:
    environ = {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}
    rank_processes.run(2, save_on_a_rank, f"{root}/ranks", environ=environ, timeout_s=DEADLINE_S)
    for world_size in (1, 3):
        arguments = (f"{root}/ranks", world_size)
        rank_processes.run(world_size, restore_on_a_rank, *arguments, environ=environ, timeout_s=DEADLINE_S)
    assert called("verify", f"{root}/ranks/step-3").returncode == 0


def save_on_a_node(rank: int, places: tuple[str, str], homes: tuple[str, str], root: str) -> None:
    os.chdir(homes[rank])
    with asyncckpt.AsyncCheckpointer(endpoint=places[rank]) as checkpointer:
        for step in (2, 3):
            checkpointer.save(sharded(2, 0, True), f"{root}/step-{step}", step=step).written.result(DEADLINE_S)
        state = sharded(2, 1, False)
        checkpointer.load(f"{root}/step-3", state, source="disk")
        assert torch.equal(state["w"].full_tensor(), torch.arange(3_600_000.0).reshape(3000, 1200))


def test_ranks_of_two_workers_with_no_directory_in_common_save_to_one_bucket(root: str, tmp_path: pathlib.Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}
    homes = str(tmp_path / "first"), str(tmp_path / "second")
    for home in homes:
        os.mkdir(home)
    with contextlib.ExitStack() as stack:
        # Each with a socket in a directory of its own, and no directory that it may write to but the bucket.
        places = tuple(stack.enter_context(empty_places())[0] for _ in homes)
        workers = [stack.enter_context(real_worker.running(place, "--root", root)) for place in places]
        arguments = (places, homes, f"{root}/nodes")
        rank_processes.run(2, save_on_a_node, *arguments, environ=environ, timeout_s=DEADLINE_S)
        leader, follower = (worker.status() for worker in workers)
        assert leader["counters"]["followers_linked"] == 1 and follower["counters"]["runs_followed"] == 1
        assert leader["counters"]["written_nbytes"] > 1e6 and follower["counters"]["written_nbytes"] > 1e6
    assert os.listdir(homes[0]) == os.listdir(homes[1]) == []
    rank_processes.run(3, restore_on_a_rank, f"{root}/nodes", 3, environ=environ, timeout_s=DEADLINE_S)
    assert called("verify", f"{root}/nodes/step-3").returncode == 0


def test_uploads_and_copies_need_little_memory_beside_the_slot(
    root: str, worker: RealWorker, tmp_path: pathlib.Path, run: Run
) -> None:
    arguments = root, str(tmp_path), str(worker.pid), str(MEMORY_NBYTES), str(MOST_NBYTES)
    assert run(LARGE_TRAINER, *arguments).returncode == 0


def seen_of(worker: RealWorker) -> bytes:
    """Return all that others could see of a worker: its files, slots, arguments and environment."""
    found = (
        pathlib.Path(f"/proc/{worker.pid}/cmdline").read_bytes()
        + pathlib.Path(f"/proc/{worker.pid}/environ").read_bytes()
    )
    for fd in pathlib.Path(f"/proc/{worker.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += fd.read_bytes() if os.readlink(fd).startswith("/memfd:") else b""
    for file in pathlib.Path(socket_path(worker.endpoint)).parent.iterdir():
        found += file.read_bytes() if file.is_file() else b""
    return found


def test_options_do_what_the_environment_does_and_are_shown_nowhere(
    server: Server, worker: RealWorker, run: Run
) -> None:
    options, root = server.options(), f"{server.root}/options"
    if server.scheme == "s3":
        options["secret_access_key"] = "0123-unlike-any-other-text"  # moto takes every key
    secret = options[SECRETS[server.scheme]]
    done = run(OPTIONS_TRAINER, root, json.dumps(options))
    assert done.returncode == 0
    given = [word for name, value in options.items() for word in ("--storage-option", f"{name}={value}")]
    rows = listed("ls", root, "--recursive", *given)
    assert [row["step"] for row in rows if row["state"] == "committed"] == [1, 1, 2]
    assert called("verify", f"{root}/AsyncCheckpointer", *given).returncode == 0
    assert called("ls", root).returncode != 0, "without options there is no way to the store"
    status = called("worker", "status", "--json").stdout
    store = ObjectStore(server.root, {**options, **object_servers.NO_CONNECTION_STAYS})
    stored = store.read_whole(f"{root}/AsyncCheckpointer/manifest.json", 1 << 20)
    seen = seen_of(worker)
    assert b"AsyncCheckpointer" in seen, "its log, and the request in a slot"
    assert secret.encode() not in seen + stored + (done.stdout + done.stderr + status).encode()
    directory = pathlib.Path(socket_path(worker.endpoint)).parent
    assert directory.stat().st_mode & 0o077 == 0, "nobody else reads the socket"


def test_the_doctor_says_what_a_store_can_do_and_leaves_nothing_behind(root: str) -> None:
    done = called("doctor", f"{root}/none-yet", "--json")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert [checks[name]["status"] for name in ("listing", "commit", "reading", "uploads", "removal")] == ["ok"] * 5
    assert "lifecycle rule" in checks["uploads"]["text"]
    assert called("ls", f"{root}/none-yet").returncode == 4


def test_the_worker_that_takes_over_hears_the_options_again(server: Server, worker: RealWorker, run: Run) -> None:
    options = json.dumps(server.options())
    assert run(LOSING_TRAINER, f"{server.root}/lost", options, str(worker.pid)).returncode == 0


def test_a_worker_whose_trainer_has_died_still_has_the_options(server: Server, worker: RealWorker, run: Run) -> None:
    options = server.options()
    assert run(DYING_TRAINER, f"{server.root}/dead", json.dumps(options)).returncode == -9
    given = [word for name, value in options.items() for word in ("--storage-option", f"{name}={value}")]

    def is_committed() -> bool:
        return called("verify", f"{server.root}/dead/step-2", *given).returncode == 0

    real_worker.wait_until(is_committed, "what the dead trainer has staged is committed")
