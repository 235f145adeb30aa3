"""What a checkpoint of ours says about the files that a framework wants: which bytes and tensors make which file.

Each rank has in its state, below `stock` and its rank, a text `plan`, one tensor of bytes `small`, and a list of
tensors of bytes, `tensors`. A plan is JSON: of every file its name, and of every piece either [offset, length] in
`small` or the number of a tensor. Imports no torch.
"""

from __future__ import annotations

import json
import os
import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from asyncckpt.conversion.pieces import OutputFile
from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.foreign.zip_directory import read_directory
from asyncckpt.format.archive import Payload
from asyncckpt.format.objects import decode_value
from asyncckpt.format.tree import Node, Path, leaves
from asyncckpt.storage.contents import Contents, SavedTensor, read_objects
from asyncckpt.storage.files import Files

STOCK_KEY, PLAN_KEY, SMALL_KEY, TENSORS_KEY = "stock", "plan", "small", "tensors"

Piece = int | list[int]
_DESCRIPTOR = b"PK\x07\x08"
_CRC_IN_DESCRIPTOR, _CRC_IN_ENTRY = 4, 16
_ENTRY = struct.Struct("<4s6H3L5H2L")


def rank_key(rank: int) -> str:
    """Return the key below which a rank has its part of the state."""
    return f"rank{rank:05d}"


def encode_plan(files: Sequence[tuple[str, Sequence[Piece]]]) -> str:
    """Return the text of a plan."""
    return json.dumps([[name, list(pieces)] for name, pieces in files], separators=(",", ":"))


class StockFiles:
    """The files in a committed checkpoint of ours.

    Args:
        contents: The checkpoint.
        files: The storage seam.

    Attributes:
        tensors: What the payloads of the outputs number.
        outputs: All files of all ranks; a name that several ranks have is taken from the lowest.

    Raises:
        CorruptCheckpointError: It holds no plan, or one that is not ours.
        OSError: The objects cannot be read.
    """

    def __init__(self, contents: Contents, files: Files) -> None:
        self._contents = contents
        self.tensors: list[SavedTensor] = []
        found: dict[str, list[Payload | tuple[int, int, int]]] = {}
        for rank in range(len(contents.ranks)):
            for name, pieces in self._of_rank(rank, files):
                found.setdefault(name, pieces)
        self._found = found

    def _of_rank(self, rank: int, files: Files) -> Iterator[tuple[str, list[Payload | tuple[int, int, int]]]]:
        """Yield (name, pieces): payloads, and (tensor, offset, length) of what is to be read into memory."""
        nodes: dict[Path, Node] = dict(leaves(self._contents.ranks[rank].structure.tree))
        base = (STOCK_KEY, rank_key(rank))
        at = (*base, PLAN_KEY)
        if at not in nodes or nodes[at][0] != "O":
            return
        text = decode_value(read_objects(self._contents, rank, files)[nodes[at][1]])
        small = self._number(rank, nodes, (*base, SMALL_KEY))
        try:
            for name, pieces in json.loads(text):
                _check_name(name)
                yield (
                    name,
                    [
                        (small, int(p[0]), int(p[1]))
                        if isinstance(p, list)
                        else self._payload(rank, nodes, (*base, TENSORS_KEY, int(p)))
                        for p in pieces
                    ],
                )
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise self._corrupt(rank, str(error)) from error

    def _number(self, rank: int, nodes: dict[Path, Node], path: Path) -> int:
        """Return the number that a tensor has here; a new one at every call."""
        node = nodes.get(path)
        if node is None or node[0] != "T":
            raise self._corrupt(rank, f"its plan names {path[-2:]}, which is no tensor")
        entry = self._contents.ranks[rank].structure.tensors[node[1]]
        self.tensors.append(self._contents.tensors[entry.fqn])
        return len(self.tensors) - 1

    def _payload(self, rank: int, nodes: dict[Path, Node], path: Path) -> Payload:
        number = self._number(rank, nodes, path)
        return Payload(number, self.tensors[number].global_shape[0])

    def _corrupt(self, rank: int, detail: str) -> CorruptCheckpointError:
        path = self._contents.path
        return CorruptCheckpointError(f"{path}: the plan of rank {rank}: {detail}", path=path, detail=detail)

    def small_tensors(self) -> set[int]:
        """Return the numbers of the tensors that are read into memory as a whole."""
        return {p[0] for pieces in self._found.values() for p in pieces if not isinstance(p, Payload)}

    def outputs(self, small: dict[int, bytes]) -> list[OutputFile]:
        """Return the files.

        Args:
            small: By number, the bytes of `small_tensors`.
        """
        made = []
        for name, pieces in self._found.items():
            whole = tuple(p if isinstance(p, Payload) else small[p[0]][p[1] : p[1] + p[2]] for p in pieces)
            made.append(OutputFile(name=name, pieces=whole, crc_at=crc_places(whole)))
        return made


def _check_name(name: str) -> None:
    if not isinstance(name, str) or os.path.isabs(name) or ".." in name.split("/") or "\0" in name or not name:
        raise ValueError(f"{name!r} is no name of a file below a directory")


def crc_places(pieces: Sequence[bytes | Payload]) -> tuple[tuple[int, int], ...]:
    """Return where the CRC-32 of each payload goes: (its number among the pieces, offset in the file).

    In an archive of `torch.save`: behind the elements, and in the directory. Any other file has none.
    """
    if not pieces or not isinstance(pieces[0], bytes) or not pieces[0].startswith(b"PK\x03\x04"):
        return ()
    starts, at = [], 0
    for piece in pieces:
        starts.append(at)
        at += piece.nbytes if isinstance(piece, Payload) else len(piece)
    payloads = [number for number, piece in enumerate(pieces) if isinstance(piece, Payload)]
    if not payloads:
        return ()
    tail, tail_start = pieces[-1], starts[-1]
    assert isinstance(tail, bytes)

    def read_at(offset: int, nbytes: int) -> bytes:
        inside = tail[max(offset - tail_start, 0) : max(offset + nbytes - tail_start, 0)]
        return bytes(nbytes - len(inside)) + inside

    entries = list(read_directory(read_at, at).values())
    headers = [entry.header_offset for entry in entries]
    order = sorted(range(len(headers)), key=headers.__getitem__)
    sorted_headers = [headers[n] for n in order]
    fields = _crc_fields(tail, entries[0].limit - tail_start, len(entries))
    places = []
    for number in payloads:
        after = pieces[number + 1]
        if isinstance(after, bytes) and after.startswith(_DESCRIPTOR):
            places.append((number, starts[number + 1] + _CRC_IN_DESCRIPTOR))
        entry = order[bisect_right(sorted_headers, starts[number]) - 1]
        places.append((number, tail_start + fields[entry]))
    return tuple(places)


def _crc_fields(tail: bytes, at: int, count: int) -> list[int]:
    """Return, in `tail`, the offset of the CRC-32 in each entry of the directory that begins at `at`."""
    found = []
    for _ in range(count):
        parts = _ENTRY.unpack_from(tail, at)
        found.append(at + _CRC_IN_ENTRY)
        at += _ENTRY.size + parts[10] + parts[11] + parts[12]
    return found
