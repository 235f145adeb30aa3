"""What a disk may hold after a power cut, from a record of all that was written to it and when it was flushed.

What came before the last flush that had ended is there. Of what came after it, any part may be, in any order, and the
last write may be torn between sectors (of 4096 bytes: ext4 itself wants its superblock whole).
"""

from __future__ import annotations

import pathlib
import random
from typing import NamedTuple

from tests.fuse_memory import RECORD

SECTOR = 4096


class Entry(NamedTuple):
    """A write (W), a flush (F) or a mark (M)."""

    kind: bytes
    offset: int
    data: bytes


def read_log(path: pathlib.Path) -> list[Entry]:
    """Return the record of a `tests.fuse_memory`."""
    raw, entries, at = path.read_bytes(), [], 0
    while at + RECORD.size <= len(raw):
        kind, offset, nbytes = RECORD.unpack_from(raw, at)
        at += RECORD.size
        entries.append(Entry(kind, offset, raw[at : at + nbytes]))
        at += nbytes
    return entries


class Disk:
    """An image that is brought forward along a log: each point in time is reached once, in rising order."""

    def __init__(self, log: list[Entry], nbytes: int) -> None:
        self.log = log
        self._durable = bytearray(nbytes)
        self._flushed = 0

    def after_cut_at(self, position: int, rng: random.Random) -> tuple[bytearray, list[str]]:
        """Return one of the images after a power cut in front of entry `position`, and all marks before it."""
        last = max((n for n in range(self._flushed, position) if self.log[n].kind == b"F"), default=self._flushed)
        for entry in self.log[self._flushed : last]:
            if entry.kind == b"W":
                self._durable[entry.offset : entry.offset + len(entry.data)] = entry.data
        self._flushed = last
        image = bytearray(self._durable)
        loose = [entry for entry in self.log[last:position] if entry.kind == b"W"]
        kept = rng.choice([0.0, 0.5, 0.9, 1.0])
        loose = [entry for entry in loose if rng.random() < kept]
        rng.shuffle(loose)
        for number, entry in enumerate(loose):
            data = entry.data
            if number == len(loose) - 1 and rng.random() < 0.5:
                data = data[: rng.randrange(0, len(data) + 1, SECTOR)]
            image[entry.offset : entry.offset + len(data)] = data
        return image, [entry.data.decode() for entry in self.log[:position] if entry.kind == b"M"]
