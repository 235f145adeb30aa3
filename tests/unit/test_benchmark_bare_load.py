"""`benchmarks.bare_load`: its loops go through a whole file, and what the load is compared with."""

from __future__ import annotations

import os
import pathlib

import pytest

from asyncckpt.memory.mapping import Mapping
from benchmarks import bare_load
from benchmarks.bare_load import LOADS, LOOPS, MIB, Loop

COPYING = [name for name, loop in LOOPS.items() if loop.copy and loop.verify]


@pytest.mark.parametrize("loop", [*LOOPS.values(), Loop(3, MIB, 1, copy=True), Loop(1, MIB // 2, 1, copy=True)])
def test_a_loop_reads_all_whole_pages_of_a_file_and_copies_them_if_it_copies(
    loop: Loop, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = os.urandom(9 * MIB + 3 * 4096)
    (tmp_path / "f").write_bytes(content + b"beyond")
    read, real = [], os.preadv

    def counting(fd: int, buffers: list[memoryview], offset: int) -> int:
        found = real(fd, buffers, offset)
        read.append((offset, found))
        return found

    monkeypatch.setattr(os, "preadv", counting)
    with Mapping(-1, loop.threads * loop.block) as buffers, Mapping(-1, 12 * MIB) as target:
        assert bare_load.loop_s(loop, tmp_path / "f", buffers, target) > 0
        with target.view() as view:
            assert bytes(view) == ((content if loop.copy else b"").ljust(12 * MIB, b"\0"))
    ends = [0, *(offset + nbytes for offset, nbytes in sorted(read))]
    assert [offset for offset, _ in sorted(read)] == ends[:-1] and ends[-1] == len(content)


def test_a_loop_that_reads_less_than_it_asked_for_has_no_time(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f").write_bytes(bytes(MIB))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: 0)
    with Mapping(-1, MIB) as memory, pytest.raises(AssertionError):
        bare_load.loop_s(Loop(1, MIB, 1), tmp_path / "f", memory, memory)


def test_a_load_is_compared_with_the_quickest_loop_of_its_own_round_that_verifies_and_copies() -> None:
    slow = dict.fromkeys([*LOOPS, *LOADS], 9.0)
    rounds = [
        slow | {"read, 1 x 4 MiB": 1.0, COPYING[0]: 2.0, "asyncckpt.load": 3.0},
        slow | {"read, 4 x 16 MiB": 2.0, COPYING[1]: 8.0, "asyncckpt.load": 4.0, "read and copy, 4 x 16 MiB": 0.5},
    ]
    found = bare_load.summary({"rounds": rounds})
    assert found["asyncckpt.load / the quickest bare loop"] == [1.5, 0.5]
    assert found["the quickest bare loop / reading alone"] == [2.0, 4.0]
    assert found["asyncckpt.load"] == [3.0, 4.0]
