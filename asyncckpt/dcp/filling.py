"""How an image that is made piece by piece comes into a slot: segment by segment, in the order of the files."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from asyncckpt.dcp.streamed import StreamedImage
from asyncckpt.format.layout import round_up
from asyncckpt.memory.slot import PAGE_NBYTES
from asyncckpt.memory.streaming import StreamLayout
from asyncckpt.storage.rank_writer import EXTENT_NBYTES
from asyncckpt.uninterrupted import uninterrupted


class Piece(NamedTuple):
    """Bytes `start` to `end` of the image, and where they belong in the slot."""

    start: int
    end: int
    offset: int


def pieces_of(image: StreamedImage, ring: StreamLayout | None) -> list[Piece]:
    """Return the pieces of an image, for a slot that has room for all of it, or for the cells of a ring."""
    if ring is None:
        starts = range(0, len(image), EXTENT_NBYTES)
        return [Piece(at, min(at + EXTENT_NBYTES, len(image)), PAGE_NBYTES + at) for at in starts]
    found = []
    for number, segment in enumerate(ring.segments):
        first = image.parts[segment.part][0]
        found.append(Piece(first + segment.start, first + round_up(segment.end), ring.offset_of(number)))
    return found


def fill(
    image: StreamedImage,
    address: int,
    pieces: Sequence[Piece],
    *,
    threads: int,
    ready: Callable[[int], None],
    filled: Callable[[int], None],
) -> None:
    """Make all pieces where they belong.

    Args:
        image: See there.
        address: Of the slot.
        pieces: In the order in which they are begun.
        threads: With one, that is the calling thread: it makes them one after another.
        ready: Called before the piece of a number is made; waits until there is room for it, or raises.
        filled: Called with how many, from the first on, are done, as these become more. Under a lock.

    Raises:
        Exception: Whatever makes a tensor raises, or `ready`.

    Blocks: for all of them. No other thread is left when this returns or raises.
    """

    def make(number: int) -> None:
        ready(number)
        start, end, offset = pieces[number]
        image.copy_to(start, end, address + offset)

    if threads == 1 or len(pieces) < 2:
        for number in range(len(pieces)):
            make(number)
            filled(number + 1)
        return
    lock, done = threading.Lock(), [False] * len(pieces)
    errors: list[BaseException] = []
    taken = iter(range(len(pieces)))
    count = 0

    def work() -> None:
        nonlocal count
        while not errors:
            with lock:
                number = next(taken, None)
            if number is None:
                return
            try:
                make(number)
            except BaseException as error:
                errors.append(error)
                return
            with lock:
                done[number] = True
                before = count
                while count < len(done) and done[count]:
                    count += 1
                if count > before:
                    filled(count)

    with ThreadPoolExecutor(min(threads, len(pieces)), "asyncckpt-stage") as pool:
        running: list[Future[None]] = []
        while True:
            try:
                if not running:
                    with uninterrupted():
                        running = [pool.submit(work) for _ in range(min(threads, len(pieces)))]
                wait(running)
                break
            except BaseException as error:
                # IMPORTANT: nothing ends this early, not even a second Ctrl-C: they would write to memory that is
                # another save's by then.
                errors.append(error)
                if not running:
                    break
    for future in running:
        future.result()
    if errors:
        raise errors[0]
