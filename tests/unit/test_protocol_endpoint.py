"""Where a worker listens: names, directories, and the lock."""

from __future__ import annotations

import os
import pathlib
import stat

import pytest

from asyncckpt.errors import ConfigError, EndpointError
from asyncckpt.protocol import endpoint as endpoints
from asyncckpt.protocol.endpoint import acquire_lock, default_endpoint, make_directory, socket_path


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "tcp://127.0.0.1:5555",
        "ipc://relative",
        "ipc://",
        "ipc:///",
        "ipc:///dir/",
        "ipc:///a\0b",
        "/no/scheme",
        "ipc:///" + "x" * 100,
        "ipc:///" + "\u20ac" * 34,
    ],
)
def test_endpoint_that_cannot_be_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        socket_path(endpoint)
    assert caught.value.field == "endpoint"


def test_path_of_an_endpoint_is_its_socket() -> None:
    assert socket_path("ipc:///run/x.sock") == "/run/x.sock"
    assert socket_path("ipc:///" + "x" * 99) == "/" + "x" * 99


def _default(**environ: str) -> str:
    return default_endpoint(environ, uid=1000, package="0.1.0", interpreter="/usr/bin/python3")


def test_default_endpoint_lies_in_the_runtime_directory(short_path: pathlib.Path) -> None:
    run = short_path / "r"
    run.mkdir()
    short = "/tmp" if len(str(run)) > 60 else str(run)
    assert _default(XDG_RUNTIME_DIR=short).startswith(f"ipc://{short}/asyncckpt/")
    assert _default(XDG_RUNTIME_DIR="/does/not/exist", TMPDIR="/tmp").startswith("ipc:///tmp/asyncckpt-1000/")
    assert _default(XDG_RUNTIME_DIR="relative", TMPDIR="/tmp").startswith("ipc:///tmp/asyncckpt-1000/")


def test_default_endpoint_differs_by_job_version_and_interpreter() -> None:
    found = {
        _default(),
        _default(ASYNCCKPT_JOB="a"),
        _default(TORCHELASTIC_RUN_ID="b"),
        _default(SLURM_JOB_ID="c"),
        default_endpoint({}, uid=1000, package="0.2.0", interpreter="/usr/bin/python3"),
        default_endpoint({}, uid=1000, package="0.1.0", interpreter="/usr/bin/python3.12"),
    }
    assert len(found) == 6
    assert _default(ASYNCCKPT_JOB="a", SLURM_JOB_ID="c") == _default(ASYNCCKPT_JOB="a")
    assert _default() == _default()


def test_directory_too_long_for_a_socket_gives_way_to_a_short_one(tmp_path: pathlib.Path) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    assert len(socket_path(_default(TMPDIR=str(deep)))) <= endpoints.MAX_SOCKET_PATH_BYTES


def test_directory_is_made_for_its_user_only(endpoint_dir: pathlib.Path) -> None:
    path = make_directory(f"ipc://{endpoint_dir}/new/w.sock")
    assert path == f"{endpoint_dir}/new/w.sock"
    assert (endpoint_dir / "new").stat().st_mode & 0o777 == 0o700
    assert make_directory(f"ipc://{endpoint_dir}/new/w.sock") == path


def test_directory_that_is_open_to_others_is_refused(endpoint_dir: pathlib.Path) -> None:
    (endpoint_dir / "open").mkdir()
    (endpoint_dir / "open").chmod(0o755)
    with pytest.raises(EndpointError, match="0700"):
        make_directory(f"ipc://{endpoint_dir}/open/w.sock")


def test_link_in_place_of_the_directory_is_refused(endpoint_dir: pathlib.Path) -> None:
    (endpoint_dir / "real").mkdir(mode=0o700)
    (endpoint_dir / "link").symlink_to("real")
    with pytest.raises(EndpointError, match="directory of this user"):
        make_directory(f"ipc://{endpoint_dir}/link/w.sock")


def test_file_in_place_of_the_directory_is_refused(endpoint_dir: pathlib.Path) -> None:
    (endpoint_dir / "file").touch()
    with pytest.raises(EndpointError, match="must be a directory"):
        make_directory(f"ipc://{endpoint_dir}/file/w.sock")


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_directory_of_somebody_else_is_refused(endpoint_dir: pathlib.Path) -> None:
    (endpoint_dir / "theirs").mkdir(mode=0o700)
    os.chown(endpoint_dir / "theirs", 12345, 12345)
    with pytest.raises(EndpointError, match="12345"):
        make_directory(f"ipc://{endpoint_dir}/theirs/w.sock")


def test_one_worker_holds_the_lock(endpoint_dir: pathlib.Path) -> None:
    path = f"{endpoint_dir}/w.sock"
    first = acquire_lock(path)
    assert first is not None
    assert acquire_lock(path) is None
    assert os.stat(f"{path}.lock").st_mode & 0o777 == 0o600
    assert not os.get_inheritable(first)
    os.close(first)
    again = acquire_lock(path)
    assert again is not None
    os.close(again)


def test_lock_through_a_link_is_refused(endpoint_dir: pathlib.Path) -> None:
    (endpoint_dir / "w.sock.lock").symlink_to("elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        acquire_lock(f"{endpoint_dir}/w.sock")


def test_missing_parents_are_not_open_to_others_whatever_the_umask(short_path: pathlib.Path) -> None:
    before = os.umask(0)
    try:
        make_directory(f"ipc://{short_path}/a/b/c/w.sock")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((short_path / name).stat().st_mode) for name in ("a", "a/b", "a/b/c")]
    assert modes == [0o755, 0o755, 0o700]
