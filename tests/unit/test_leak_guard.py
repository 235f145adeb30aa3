"""The guard that watches all other tests notices each kind of leak, and nothing else."""

from __future__ import annotations

import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from asyncckpt.memory.arena import SlotMemory
from asyncckpt.protocol.endpoint import acquire_lock
from tests.leak_guard import LeakGuard


@contextmanager
def _fd(_: pathlib.Path) -> Iterator[None]:
    ends = os.pipe()
    yield
    for fd in ends:
        os.close(fd)


@contextmanager
def _thread(_: pathlib.Path) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    yield
    stop.set()
    thread.join()


@contextmanager
def _child(_: pathlib.Path) -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield
        child.communicate()


@contextmanager
def _mapping(_: pathlib.Path) -> Iterator[None]:
    slot = SlotMemory.create(1 << 16)
    slot.close_inherited_fd()
    yield
    slot.close()


@contextmanager
def _socket(directory: pathlib.Path) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "w.sock"))
    yield
    (directory / "w.sock").unlink()


@contextmanager
def _worker(directory: pathlib.Path) -> Iterator[None]:
    fd = acquire_lock(str(directory / "w.sock"))
    assert fd is not None
    yield
    os.close(fd)


@contextmanager
def _handler(_: pathlib.Path) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    yield
    signal.signal(signal.SIGUSR2, before)


@contextmanager
def _blocked(_: pathlib.Path) -> Iterator[None]:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    yield
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])


@pytest.mark.parametrize(
    ("kind", "leak"),
    [
        ("fd", _fd),
        ("thread", _thread),
        ("child process", _child),
        ("slot mapping", _mapping),
        ("socket", _socket),
        ("worker", _worker),
        ("signal", _handler),
        ("blocked signal", _blocked),
    ],
)
def test_guard_names_the_leak_and_forgets_it_when_it_is_gone(
    kind: str, leak: Callable[[pathlib.Path], Iterator[None]], endpoint_dir: pathlib.Path
) -> None:
    guard = LeakGuard(endpoint_dir)
    with leak(endpoint_dir):  # type: ignore[attr-defined]
        assert any(found.startswith(f"{kind}: ") for found in guard.settled_leaks(0.05))
    assert guard.settled_leaks() == []


def test_guard_puts_signals_back_for_the_next_test() -> None:
    guard, before = LeakGuard(), signal.getsignal(signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    guard.clean_up()
    assert signal.getsignal(signal.SIGUSR2) is before
    assert signal.SIGUSR2 not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
