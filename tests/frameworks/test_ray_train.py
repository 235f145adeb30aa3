"""Ray Train: a run one of whose workers is killed ends as one that nothing disturbed."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import types
from typing import Any

import object_servers
import pytest
import real_worker

from asyncckpt.errors import ConfigError, UnsupportedPathError
from asyncckpt.storage.catalog import scan
from asyncckpt.storage.locate import store_at, with_storage_options

pytest.importorskip("ray.train", reason="`make test-frameworks` installs ray", exc_type=ImportError)
pytestmark = pytest.mark.timeout(600)

STEPS, KILLED_AT, KEPT = 8, 5, 3

PROGRAM = pathlib.Path(__file__).with_name("ray_training.py")


def trained(root: pathlib.Path, s3: str = "", **options: Any) -> list[dict[str, Any]]:
    """Return the last metrics of both runs, which train in a process of their own with a cluster of Ray.

    Args:
        root: Directory for both.
        s3: Address of a server that speaks as S3 does and holds the checkpoints; empty: they are in `root`.
        **options: Of `RayCheckpointManager`.
    """
    short = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # Ray's sockets lie in it, and their paths must be short
    environ = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1"}
    child = subprocess.Popen(
        [sys.executable, str(PROGRAM), short, str(root), str(STEPS), str(KILLED_AT), s3, json.dumps(options)],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = child.communicate(timeout=550)
        assert child.returncode == 0, said
        found: list[dict[str, Any]] = json.loads(said.strip().splitlines()[-1])
        return found
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        shutil.rmtree(short, ignore_errors=True)


def test_killed_run_ends_as_an_undisturbed_one(worker: real_worker.RealWorker, tmp_path: pathlib.Path) -> None:
    whole, killed = trained(tmp_path, endpoint=worker.endpoint)
    assert killed.pop("began") == KILLED_AT, "what was staged when the rank died is restored"
    assert whole.pop("began") == 0
    assert killed == whole
    for run in ("whole", "killed"):
        found = sorted(one.name[:20] for one in (tmp_path / run / "run").glob("checkpoint_*_*") if one.is_dir())
        assert found == [f"checkpoint_{step:09d}" for step in range(STEPS - KEPT + 1, STEPS + 1)]


def test_killed_run_in_an_object_store_ends_as_an_undisturbed_one(
    worker: real_worker.RealWorker, tmp_path: pathlib.Path
) -> None:
    with object_servers.running("s3") as server:
        options = server.options()
        whole, killed = trained(tmp_path, server.url, endpoint=worker.endpoint, storage_options=options)
        assert killed.pop("began") == KILLED_AT and whole.pop("began") == 0
        assert killed == whole
        for run in ("whole", "killed"):
            with with_storage_options({**options, **object_servers.NO_CONNECTION_STAYS}):
                stored = scan(f"{server.root}/{run}/run", store_at(server.root))
            steps = sorted(one.manifest.step for one in stored if one.manifest is not None)
            assert steps == list(range(STEPS - KEPT + 1, STEPS + 1)), "Ray has removed the others"


@pytest.mark.parametrize("option", ["max_to_keep", "step_format", "shared", "mirror"])
def test_what_ray_decides_is_refused_as_an_option(option: str) -> None:
    from asyncckpt.integrations.ray import RayCheckpointManager

    with pytest.raises(ConfigError, match=f"{option} is not for RayCheckpointManager: Ray's RunConfig decides"):
        RayCheckpointManager(**{option: 1})


@pytest.mark.parametrize(
    ("type_name", "path"),
    [("local", "/runs/a/c"), ("s3", "s3://runs/a/c"), ("gcs", "gs://runs/a/c"), ("abfs", "az://runs/a/c")],
)
def test_checkpoint_of_ray_has_a_path_that_we_load(type_name: str, path: str) -> None:
    from asyncckpt.integrations.ray import load_path

    checkpoint = types.SimpleNamespace(
        filesystem=types.SimpleNamespace(type_name=type_name), path="runs/a/c" if path[0] != "/" else path
    )
    assert load_path(checkpoint) == path
    checkpoint.filesystem.type_name = "py::fsspec+hf"
    with pytest.raises(UnsupportedPathError, match=r"of type 'py::fsspec\+hf'; expected one of local, s3"):
        load_path(checkpoint)
