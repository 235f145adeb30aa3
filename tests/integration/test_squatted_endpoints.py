"""Endpoints that somebody else has prepared: nobody is greeted, nothing is waited for, nothing is written there."""

from __future__ import annotations

import os
import pathlib
import socket
from collections.abc import Callable, Iterator

import pytest
from real_worker import running
from test_errors_session import FakeWorker, Trainer
from torch_free_client import Client, Snapshot
from warm_python import WarmPython

from asyncckpt.cli.worker_requests import status_of
from asyncckpt.client import launcher
from asyncckpt.errors import AsyncCkptError, EndpointError
from asyncckpt.protocol import messages as m
from asyncckpt.protocol.endpoint import socket_path
from asyncckpt_worker.config import WorkerConfig
from asyncckpt_worker.service.daemon import Daemon


@pytest.fixture
def squatter(endpoint_dir: pathlib.Path) -> Iterator[FakeWorker]:
    (endpoint_dir / "theirs").mkdir(mode=0o700)
    found = FakeWorker(f"ipc://{endpoint_dir}/theirs/w.sock")
    yield found
    found.close()


def open_to_all(directory: pathlib.Path) -> None:
    directory.chmod(0o777)


def given_away(directory: pathlib.Path) -> None:
    os.chown(directory, 12345, 12345)


AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
MADE_UNSAFE = [open_to_all, pytest.param(given_away, marks=[pytest.mark.root, AS_ROOT])]


@pytest.mark.parametrize("spoil", MADE_UNSAFE)
def test_a_socket_in_a_directory_that_others_can_enter_is_not_greeted(
    squatter: FakeWorker, spoil: Callable[[pathlib.Path], None]
) -> None:
    spoil(pathlib.Path(socket_path(squatter.endpoint)).parent)
    trainer = Trainer(squatter.endpoint)
    with pytest.raises(EndpointError, match="0700"):
        trainer.open()
    with pytest.raises(EndpointError, match="0700"):
        status_of(squatter.endpoint)
    with pytest.raises(EndpointError, match="0700"):
        launcher.start_worker(squatter.endpoint)
    with pytest.raises(EndpointError, match="0700"):
        Daemon(WorkerConfig(endpoint=squatter.endpoint))
    assert not squatter.heard


def test_a_directory_that_was_opened_while_somebody_answered_is_not_trusted(squatter: FakeWorker) -> None:
    directory = pathlib.Path(socket_path(squatter.endpoint)).parent

    def answer(message: m.Message) -> list[list[bytes]]:
        open_to_all(directory)
        return squatter.usual(message)

    squatter.answer = answer
    with pytest.raises(EndpointError, match="0700"):
        Trainer(squatter.endpoint).open()
    assert all(isinstance(message, (m.Hello, m.Heartbeat)) for message in squatter.heard)


def a_directory(path: pathlib.Path) -> None:
    path.mkdir()
    (path / "kept").touch()


def a_pipe(path: pathlib.Path) -> None:
    os.mkfifo(path)


def a_link(path: pathlib.Path) -> None:
    path.symlink_to(path.parent / "elsewhere")


def a_dead_socket(path: pathlib.Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


WORKER = "import sys; from asyncckpt_worker.cli import main; sys.exit(main(sys.argv[1:]))"
SQUATTERS = [a_directory, a_pipe, a_link, a_dead_socket]


@pytest.mark.parametrize("squat", SQUATTERS)
@pytest.mark.parametrize("ending", ["sock", "sock.lock", "log"])
def test_a_worker_at_a_squatted_name_serves_or_says_why_not_and_waits_for_nothing(
    endpoint: str,
    endpoint_dir: pathlib.Path,
    warm_python: WarmPython,
    squat: Callable[[pathlib.Path], None],
    ending: str,
) -> None:
    squatted = endpoint_dir / f"w.{ending}"
    squat(squatted)
    options = ["--endpoint", endpoint, "--idle-exit-s", "0.1", "--log-file", str(endpoint_dir / "w.log")]
    done = warm_python.run(WORKER, *options, timeout_s=60)
    assert done.returncode in (0, 1, 2), done.stderr
    assert "Traceback" not in done.stderr
    assert not (endpoint_dir / "elsewhere").exists(), "a link was followed"
    if squat is a_directory:
        assert done.returncode != 0 and (squatted / "kept").exists()
    else:
        squatted.unlink(missing_ok=True)


def test_a_trainer_that_finds_a_dead_socket_starts_a_worker_in_its_place(
    endpoint: str, endpoint_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    a_dead_socket(endpoint_dir / "w.sock")
    with running(endpoint), Client(endpoint) as client:
        client.hello()
        snapshot = Snapshot()
        slot = client.allocate(snapshot.slot_nbytes())
        assert client.save(slot, snapshot, str(tmp_path / "a"))["phase"] == "committed"


def test_an_endpoint_below_a_file_is_an_error_of_ours(endpoint_dir: pathlib.Path) -> None:
    (endpoint_dir / "file").touch()
    endpoint = f"ipc://{endpoint_dir}/file/below/w.sock"
    for act in (launcher.start_worker, status_of, lambda e: Trainer(e).open()):
        with pytest.raises(AsyncCkptError):
            act(endpoint)
