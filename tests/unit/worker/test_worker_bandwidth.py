"""How fast the worker writes when it is told to write slowly."""

from __future__ import annotations

import argparse
import os
import pathlib
import threading

import pytest

from asyncckpt.protocol.options import bandwidth
from asyncckpt_worker.bandwidth import RateLimitedFiles

MIB = 1 << 20


class Clock:
    """A time that only sleeping moves."""

    def __init__(self) -> None:
        self.now, self.lock = 100.0, threading.Lock()

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("text", "rate"), [("800M", 800_000_000), ("2.5G", 2_500_000_000), ("1048576", MIB), ("5GiB", 5120 * MIB)]
)
def test_rates_are_written_as_people_write_them(text: str, rate: int) -> None:
    assert bandwidth(text) == rate


@pytest.mark.parametrize("text", ["", "fast", "-1G", "0", "10K", "nan", "inf"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected"):
        bandwidth(text)


def test_writes_take_as_long_as_the_rate_says(tmp_path: pathlib.Path) -> None:
    clock = Clock()
    files = RateLimitedFiles(20 * MIB, lambda: clock.now, clock.sleep)
    fd = os.open(tmp_path / "a", os.O_CREAT | os.O_RDWR)
    data, done = memoryview(os.urandom(10 * MIB + 4096)), 0
    while done < len(data):
        done += files.pwrite(fd, data[done:], done)
    assert os.pread(fd, len(data), 0) == data
    os.close(fd)
    assert 0.5 - 0.1 <= clock.now - 100.0 <= 0.5 + 0.1, "10 MiB, and a piece is written before its time is over"


def test_pieces_are_short_and_aligned(tmp_path: pathlib.Path) -> None:
    clock = Clock()
    fd = os.open(tmp_path / "a", os.O_CREAT | os.O_RDWR)
    data = memoryview(bytes(64 * MIB))
    for rate, piece in ((MIB, MIB), (25 * MIB, 2 * MIB), (1000 * MIB, 64 * MIB)):
        assert RateLimitedFiles(rate, lambda: clock.now, clock.sleep).pwrite(fd, data, 0) == piece
    os.close(fd)


def test_threads_share_one_rate(tmp_path: pathlib.Path) -> None:
    slept: list[float] = []
    files = RateLimitedFiles(10 * MIB, lambda: 0.0, slept.append)
    fd = os.open(tmp_path / "a", os.O_CREAT | os.O_RDWR)
    data = memoryview(bytes(MIB))
    threads = [threading.Thread(target=files.pwrite, args=(fd, data, n * MIB)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(fd)
    assert sorted(slept) == pytest.approx([0.1 * n for n in range(1, 8)])
