"""Elements that arrive in windows: where they go, and what is known of them then."""

from __future__ import annotations

import ctypes
import zlib
from random import Random

import pytest

from asyncckpt.conversion.arriving import Arriving
from asyncckpt.conversion.pieces import OutputFile
from asyncckpt.conversion.windows import Run, Window, windows_of
from asyncckpt.format.archive import Payload
from asyncckpt.format.checksum import BLOCK_NBYTES, block_digest
from asyncckpt.memory.mapping import Mapping

_WINDOW_NBYTES = 3 * BLOCK_NBYTES


def _deliver(arriving: Arriving, run: Run, elements: bytes, random: Random) -> None:
    """Hand a run on in pieces of any length."""
    sink, done, source = arriving.sink(run), 0, ctypes.create_string_buffer(elements, len(elements))
    while done < run.nbytes:
        count = min(run.nbytes - done, random.choice((1, 4096, 100_003, BLOCK_NBYTES, 1 << 20)))
        sink.deliver(done, ctypes.addressof(source) + done, count)
        done += count


def test_elements_go_to_their_places_and_every_sum_is_right(rng: Random) -> None:
    sizes = [rng.choice((1, 700, BLOCK_NBYTES, 2 * BLOCK_NBYTES + 77, 5 * BLOCK_NBYTES)) for _ in range(6)]
    contents = {n: rng.randbytes(size) for n, size in enumerate(sizes)}
    pieces = tuple(Payload(n, size) for n, size in enumerate(sizes))
    file, summed = OutputFile(name="", pieces=pieces), set(rng.sample(range(6), 3))
    whole = b"".join(contents.values())
    with Mapping(-1, _WINDOW_NBYTES) as memory, memory.view() as room:
        for window in windows_of(file, _WINDOW_NBYTES):
            arriving = Arriving(window, memory.address, room, summed)
            for run in window.runs:
                _deliver(arriving, run, contents[run.piece][run.start : run.start + run.nbytes], rng)
            assert bytes(room[: window.end - window.start]) == whole[window.start : window.end]
            assert arriving.crcs == {
                run.piece: zlib.crc32(whole[run.at : run.at + run.nbytes]) for run in window.runs if run.piece in summed
            }
            assert arriving.digests == {
                at // BLOCK_NBYTES: block_digest(whole[at : at + BLOCK_NBYTES])
                for run in window.runs
                for at in range(-(-run.at // BLOCK_NBYTES) * BLOCK_NBYTES, run.at + run.nbytes, BLOCK_NBYTES)
                if at + BLOCK_NBYTES <= run.at + run.nbytes
            }


def test_a_block_that_two_runs_fill_is_not_digested_by_either(rng: Random) -> None:
    first, second = BLOCK_NBYTES // 2, BLOCK_NBYTES + BLOCK_NBYTES // 2
    runs = [Run(0, 0, 0, first, 0, True), Run(1, 1, 0, second, first, True)]
    with Mapping(-1, 2 * BLOCK_NBYTES) as memory, memory.view() as room:
        arriving = Arriving(Window(0, 2 * BLOCK_NBYTES, [], runs), memory.address, room, ())
        for run in runs:
            _deliver(arriving, run, rng.randbytes(run.nbytes), rng)
        assert set(arriving.digests) == {1}
        assert not arriving.crcs


def test_the_sum_of_a_run_that_came_in_part_is_not_known(rng: Random) -> None:
    run = Run(0, 0, 0, 1000, 0, True)
    with Mapping(-1, BLOCK_NBYTES) as memory, memory.view() as room:
        arriving = Arriving(Window(0, 1000, [], [run]), memory.address, room, {0})
        source = ctypes.create_string_buffer(rng.randbytes(999), 999)
        arriving.sink(run).deliver(0, ctypes.addressof(source), 999)
        assert not arriving.crcs


def test_elements_out_of_order_are_a_bug() -> None:
    run = Run(0, 0, 0, 1000, 0, True)
    with Mapping(-1, BLOCK_NBYTES) as memory, memory.view() as room:
        sink = Arriving(Window(0, 1000, [], [run]), memory.address, room, {0}).sink(run)
        with pytest.raises(AssertionError):
            sink.deliver(1, memory.address, 10)
