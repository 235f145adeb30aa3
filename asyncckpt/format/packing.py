"""Which box goes into which part, where parts may not exceed a size. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from asyncckpt.errors import ConfigError
from asyncckpt.format.names import MAX_PARTS

PAGE_NBYTES = 4096
"""Alignment of headers, parts and O_DIRECT I/O."""

_FIRST_NBYTES = 512
"""A header's members that are there whatever it holds, and the braces around."""


def header_nbytes(fqn: str, n_dims: int) -> int:
    """Return at least what a tensor takes of a part's header: it is named twice, and escaped when it is not ASCII."""
    return 2 * (12 * len(fqn) if not fqn.isascii() or "\\" in fqn or '"' in fqn else len(fqn)) + 50 * n_dims + 160


def room_for(fqn: str, n_dims: int, max_nbytes: int) -> int:
    """Return how many bytes of a tensor fit into a part that holds nothing else."""
    header = _FIRST_NBYTES + header_nbytes(fqn, n_dims)
    return max(1, max_nbytes - -(-header // PAGE_NBYTES) * PAGE_NBYTES)


def packed(boxes: Sequence[tuple[str, int, int]], n_parts: int, max_nbytes: int) -> list[list[int]]:
    """Spread boxes over parts, largest first to the least loaded one where it fits; more parts where it fits nowhere.

    Args:
        boxes: (FQN, number of dimensions, bytes of data).
        n_parts: At least so many parts, if there are as many boxes.
        max_nbytes: Of a part with its header. One that holds a single box may be larger.

    Returns:
        The numbers of the boxes of each part; two of one FQN are never in the same.

    Raises:
        ConfigError: More parts than a rank may have would be needed.
    """
    members: list[list[int]] = [[] for _ in range(n_parts)]
    names: list[set[str]] = [set() for _ in range(n_parts)]
    loads = [0] * n_parts
    headers = [_FIRST_NBYTES] * n_parts
    for n in sorted(range(len(boxes)), key=lambda n: (-boxes[n][2], n)):
        fqn, n_dims, nbytes = boxes[n]
        more = header_nbytes(fqn, n_dims)
        part = min(
            (
                p
                for p in range(len(members))
                if not members[p]
                or (fqn not in names[p] and loads[p] + nbytes + _pages(headers[p] + more) <= max_nbytes)
            ),
            key=lambda p: (loads[p], p),
            default=len(members),
        )
        if part == len(members):
            if part == MAX_PARTS:
                raise ConfigError(
                    f"max_shard_bytes={max_nbytes} is too small: this rank's part of the state needs more than "
                    f"{MAX_PARTS} files",
                    field="max_shard_bytes",
                    value=str(max_nbytes),
                )
            members.append([])
            names.append(set())
            loads.append(0)
            headers.append(_FIRST_NBYTES)
        members[part].append(n)
        names[part].add(fqn)
        loads[part] += nbytes
        headers[part] += more
    return members


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
