"""storage.gathering: many short ranges by one call, of memory and of a file, and what stops it."""

from __future__ import annotations

import ctypes
import os
import random
from pathlib import Path

import pytest

from asyncckpt.memory.mapping import Mapping
from asyncckpt.storage import gathering
from asyncckpt.storage.gathering import MAX_RANGES, gather, gather_from_file

PAGE = 4096


def test_random_ranges_of_memory_and_of_a_file_are_copied_one_behind_the_other(
    rng: random.Random, tmp_path: Path
) -> None:
    data = rng.randbytes(300_000)
    (tmp_path / "f").write_bytes(data)
    source = ctypes.create_string_buffer(data, len(data))
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    try:
        for _ in range(20):
            nbytes = rng.randint(1, 9000)
            every = nbytes + rng.choice((0, 1, 7, 5000))
            start = rng.randrange(100_000)
            times = rng.randint(1, max(1, (len(data) - start - nbytes) // every))
            expected = b"".join(data[start + n * every :][:nbytes] for n in range(times))
            for found in (ctypes.create_string_buffer(times * nbytes), ctypes.create_string_buffer(times * nbytes)):
                target = ctypes.addressof(found)
                assert gather(target, ctypes.addressof(source) + start, nbytes, every, times) == times
                assert found.raw == expected
                ctypes.memset(target, 0, len(found))
                assert gather_from_file(fd, target, start, nbytes, every, times) == times
                assert found.raw == expected
    finally:
        os.close(fd)


def test_more_ranges_than_one_call_takes_are_copied() -> None:
    times = 2 * MAX_RANGES + 3
    source = ctypes.create_string_buffer(bytes(n % 251 for n in range(3 * times)), 3 * times)
    found = ctypes.create_string_buffer(times)
    assert gather(ctypes.addressof(found), ctypes.addressof(source), 1, 3, times) == times
    assert found.raw == source.raw[::3]


def test_pages_that_cannot_be_read_end_it_and_not_the_process() -> None:
    found = ctypes.create_string_buffer(8 * 100)
    with Mapping(-1, 4 * PAGE) as memory:
        ctypes.memset(memory.address, 7, 2 * PAGE)
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(memory.address + 2 * PAGE), ctypes.c_size_t(2 * PAGE), 0) == 0
        copied = gather(ctypes.addressof(found), memory.address, 100, PAGE, 8)
    assert copied == 2
    assert found.raw[:200] == b"\x07" * 200


def test_a_file_that_was_cut_short_ends_it_and_not_the_process(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 3 * PAGE)
    found = ctypes.create_string_buffer(8 * 100)
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    try:
        assert gather_from_file(fd, ctypes.addressof(found), 0, 100, PAGE, 8) == 3
    finally:
        os.close(fd)
    assert found.raw[:300] == b"x" * 300


@pytest.mark.parametrize("answer", [-1, 0, 150])
def test_what_the_kernel_does_not_copy_whole_does_not_count(answer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def process_vm_readv(self, *args: object) -> int:
            return answer

    monkeypatch.setattr(gathering, "_libc", Refusing())
    found, source = ctypes.create_string_buffer(400), ctypes.create_string_buffer(400)
    assert gather(ctypes.addressof(found), ctypes.addressof(source), 100, 100, 4) == max(0, answer) // 100


def test_a_directory_is_not_gathered_from(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        found = ctypes.create_string_buffer(10)
        assert gather_from_file(fd, ctypes.addressof(found), 0, 1, 2, 5) == 0
    finally:
        os.close(fd)
