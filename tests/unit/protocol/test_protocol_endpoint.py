"""Where a worker listens: names, directories, and the lock."""

from __future__ import annotations

import os
import pathlib
import stat
import subprocess
import sys

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
    return default_endpoint(environ, uid=os.geteuid(), package="0.1.0", interpreter="/usr/bin/python3")


TEMPORARY = f"asyncckpt-{os.geteuid()}"


def _directory(**environ: str) -> str:
    return os.path.dirname(socket_path(_default(**environ)))


def test_default_endpoint_lies_in_the_runtime_directory_else_in_the_temporary_one(short_path: pathlib.Path) -> None:
    runtime, temporary = short_path / "r", short_path / "t"
    runtime.mkdir(mode=0o700)
    temporary.mkdir()
    assert _directory(XDG_RUNTIME_DIR=str(runtime), TMPDIR=str(temporary)) == f"{runtime}/asyncckpt"
    assert _directory(TMPDIR=str(temporary)) == f"{temporary}/{TEMPORARY}"
    assert _directory(XDG_RUNTIME_DIR="", TMPDIR=f"{temporary}/") == f"{temporary}/{TEMPORARY}"
    assert not list(runtime.iterdir()) and not list(temporary.iterdir()), "asking makes nothing"


def _odd(where: pathlib.Path, how: str, name: str) -> str:
    """Make something in the place of a directory, and return the text for the variable."""
    path = where / "odd"
    if how == "relative":
        return "relative"
    if how == "a NUL byte":
        return f"{where}\0"
    if how == "too long":
        path = where / ("x" * 90)
        path.mkdir(mode=0o700)
    elif how == "a file":
        path.touch()
    elif how == "a dangling link":
        path.symlink_to("nowhere")
    elif how == "a link to itself":
        path.symlink_to("odd")
    elif how != "missing":
        path.mkdir(mode=0o700)
        ours = path / name
        if how == "ours is a file":
            ours.touch()
        elif how == "ours is a link":
            (path / "elsewhere").mkdir(mode=0o700)
            ours.symlink_to("elsewhere")
        elif how == "ours is a dangling link":
            ours.symlink_to("nowhere")
        elif how == "ours is open to others":
            ours.mkdir()
            ours.chmod(0o755)
        elif how == "ours is of another user":
            ours.mkdir(mode=0o700)
            os.chown(ours, 12345, 12345)
        elif how == "of another user":
            os.chown(path, 12345, 12345)
    return str(path)


ODD = [
    *("relative", "a NUL byte", "too long", "a file", "a dangling link", "a link to itself", "missing"),
    *("ours is a file", "ours is a link", "ours is a dangling link", "ours is open to others"),
    *(pytest.param(how, marks=pytest.mark.root) for how in ("ours is of another user", "of another user")),
]


@pytest.mark.parametrize("how", ODD)
@pytest.mark.parametrize("variable", ["XDG_RUNTIME_DIR", "TMPDIR"])
def test_a_place_that_is_not_fit_gives_way_to_the_next_which_is_said_once(
    short_path: pathlib.Path,
    variable: str,
    how: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if os.geteuid() and "another user" in how:
        pytest.skip("only root can give a directory away")
    for base in ("t", "tmp"):
        (short_path / base).mkdir()
    monkeypatch.setattr(endpoints, "_TEMPORARY", (f"{short_path}/tmp",))
    name = "asyncckpt" if variable == "XDG_RUNTIME_DIR" else TEMPORARY
    environ = {"TMPDIR": str(short_path / "t"), variable: _odd(short_path, how, name)}
    if (variable, how) == ("TMPDIR", "of another user"):  # /tmp is one as well
        assert _directory(**environ) == f"{short_path}/odd/{TEMPORARY}"
        return
    found = [_directory(**environ) for _ in range(3)]
    wanted = f"{short_path}/t/{TEMPORARY}" if variable == "XDG_RUNTIME_DIR" else f"{short_path}/tmp/{TEMPORARY}"
    assert found == [wanted] * 3
    (said,) = [record.getMessage() for record in caplog.records]
    assert (variable in said or "ours" in how) and wanted in said
    make_directory(_default(**environ))  # both sides agree that it is fit


@pytest.mark.parametrize("taken", [1, 2])
def test_a_name_that_somebody_else_took_in_the_temporary_directory_is_left_for_the_next_directory(
    short_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    bases = [short_path / name for name in "abc"]
    for number, base in enumerate(bases):
        base.mkdir()
        if number < taken:
            (base / TEMPORARY).mkdir(mode=0o777)
    monkeypatch.setattr(endpoints, "_TEMPORARY", tuple(map(str, bases)))
    assert _directory() == f"{bases[taken]}/{TEMPORARY}"


def test_without_any_fit_place_it_is_using_the_endpoint_that_fails(
    short_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (short_path / TEMPORARY).touch()
    monkeypatch.setattr(endpoints, "_TEMPORARY", (str(short_path),))
    endpoint = _default(TMPDIR="/does/not/exist")
    assert "/does/not/exist" in caplog.text and TEMPORARY in caplog.text
    with pytest.raises(EndpointError, match="directory of this user"):
        make_directory(endpoint)


OTHER_USER = """
import os, shutil, sys, time  # what argparse imports late too: it may lie where only root can read

from asyncckpt.client import launcher
from asyncckpt.cli.worker_requests import status_of
from asyncckpt.protocol.endpoint import make_directory
from asyncckpt.recall.snapshots import endpoint_of
from asyncckpt_worker import cli, process_limits
from asyncckpt_worker.service import daemon
from asyncckpt_worker.service import log

os.setgroups([]), os.setgid(12345), os.setuid(12345)
endpoint = endpoint_of(None)
worker = os.fork()
if not worker:
    sys.exit(cli.main(["--endpoint", endpoint]))
try:
    while True:
        try:
            print(os.path.dirname(endpoint.removeprefix("ipc://")), status_of(endpoint)["pid"] == worker)
            break
        except OSError:  # not yet
            assert not os.waitpid(worker, os.WNOHANG)[0], "the worker has ended"
            time.sleep(0.01)
finally:
    os.kill(worker, 15)
    os.waitpid(worker, 0)
"""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_a_run_as_root_with_the_runtime_directory_of_a_user_leaves_it_to_that_user(short_path: pathlib.Path) -> None:
    short_path.chmod(0o755)
    runtime = short_path / "r"
    runtime.mkdir(mode=0o700)
    os.chown(runtime, 12345, 12345)
    (short_path / "t").mkdir()
    (short_path / "t").chmod(0o1777)
    ours = {"XDG_RUNTIME_DIR": str(runtime), "TMPDIR": f"{short_path}/t"}
    assert os.path.dirname(make_directory(_default(**ours))) == f"{short_path}/t/asyncckpt-0"  # as `sudo -E` does
    assert not list(runtime.iterdir())

    def found_by_the_user() -> list[str]:
        command = [sys.executable, "-c", OTHER_USER]
        environ = {**os.environ, **ours, "HOME": "/"}
        ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100, check=False)
        assert not ran.returncode, ran.stderr
        return ran.stdout.split()

    assert found_by_the_user() == [f"{runtime}/asyncckpt", "True"]
    assert (runtime / "asyncckpt").stat().st_uid == 12345

    (runtime / "asyncckpt").chmod(0o700)  # and one that an earlier version let root make is passed over
    os.chown(runtime / "asyncckpt", 0, 0)
    assert found_by_the_user() == [f"{short_path}/t/asyncckpt-12345", "True"]


def test_default_endpoint_differs_by_job_version_and_interpreter() -> None:
    found = {
        _default(),
        _default(ASYNCCKPT_JOB="a"),
        _default(TORCHELASTIC_RUN_ID="b"),
        _default(SLURM_JOB_ID="c"),
        default_endpoint({}, uid=os.geteuid(), package="0.2.0", interpreter="/usr/bin/python3"),
        default_endpoint({}, uid=os.geteuid(), package="0.1.0", interpreter="/usr/bin/python3.12"),
    }
    assert len(found) == 6
    assert _default(ASYNCCKPT_JOB="a", SLURM_JOB_ID="c") == _default(ASYNCCKPT_JOB="a")
    assert _default() == _default()


def test_directory_is_made_for_its_user_only(endpoint_dir: pathlib.Path) -> None:
    path = make_directory(f"ipc://{endpoint_dir}/new/w.sock")
    assert path == f"{endpoint_dir}/new/w.sock"
    assert (endpoint_dir / "new").stat().st_mode & 0o777 == 0o700
    assert make_directory(f"ipc://{endpoint_dir}/new/w.sock") == path


@pytest.mark.parametrize(
    ("how", "word"),
    [
        ("ours is open to others", "0700"),
        ("ours is a link", "directory of this user"),
        ("ours is a file", "must be a directory"),
        pytest.param("ours is of another user", "12345", marks=pytest.mark.root),
    ],
)
def test_a_directory_that_is_not_of_this_user_alone_is_refused(endpoint_dir: pathlib.Path, how: str, word: str) -> None:
    if os.geteuid() and "another user" in how:
        pytest.skip("only root can give a directory away")
    place = _odd(endpoint_dir, how, "sockets")
    with pytest.raises(EndpointError, match=word):
        make_directory(f"ipc://{place}/sockets/w.sock")


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
