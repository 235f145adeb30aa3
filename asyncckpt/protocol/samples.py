"""Digests of replicas that the ranks of a save hold, so that the worker can compare what should be equal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgpack

from asyncckpt.basics.safe_msgpack import unpack_strict

MAX_SAMPLES = 4096
MAX_SAMPLES_NBYTES = 1 << 20
DIGEST_NBYTES = 8


@dataclass(frozen=True, slots=True)
class Sample:
    """What one rank says of a replica: `split`: several ranks write parts of it; `digest` of the window compared."""

    split: bool
    digest: bytes


def encode_samples(samples: Iterable[tuple[str, bool, bytes]]) -> bytes:
    """Return the request's field for (FQN, split, digest) triples; what exceeds the limits is left out.

    The worker compares each FQN among the ranks that name it, so that one rank may leave out what another does not.
    """
    kept: list[tuple[str, bool, bytes]] = []
    room = MAX_SAMPLES_NBYTES - 256  # the map around the lists
    for fqn, split, digest in samples:
        room -= len(fqn.encode()) + 5 + 1 + DIGEST_NBYTES
        if room < 0 or len(kept) == MAX_SAMPLES:
            break
        kept.append((fqn, split, digest))
    if not kept:
        return b""
    document = {
        "names": [fqn for fqn, _, _ in kept],
        "split": bytes(split for _, split, _ in kept),
        "digests": b"".join(digest for _, _, digest in kept),
    }
    return bytes(msgpack.packb(document))


def decode_samples(data: bytes) -> Mapping[str, Sample]:
    """Read a request's samples back, by FQN.

    Raises:
        ValueError, TypeError, KeyError: Anything that the SPEC forbids.
    """
    if not data:
        return {}
    if len(data) > MAX_SAMPLES_NBYTES:
        raise ValueError(f"samples of {len(data)} bytes, the limit is {MAX_SAMPLES_NBYTES}")
    raw = unpack_strict(data)
    names, split, digests = raw["names"], raw["split"], raw["digests"]
    if not (isinstance(names, tuple) and all(type(n) is str for n in names) and len(set(names)) == len(names)):
        raise ValueError("names of samples")
    if len(names) > MAX_SAMPLES or type(split) is not bytes or type(digests) is not bytes:
        raise ValueError("samples")
    if len(split) != len(names) or len(digests) != DIGEST_NBYTES * len(names) or not set(split) <= {0, 1}:
        raise ValueError("lengths of samples")
    return {
        name: Sample(bool(split[i]), digests[DIGEST_NBYTES * i : DIGEST_NBYTES * (i + 1)])
        for i, name in enumerate(names)
    }


def are_samples(value: Any) -> bool:
    """Whether a request's field decodes; never raises."""
    try:
        decode_samples(value)
    except (ValueError, TypeError, KeyError, RecursionError, msgpack.UnpackException):
        return False
    return type(value) is bytes


def unequal(samples: Mapping[int, Mapping[str, Sample]]) -> list[tuple[str, bool, list[list[int]]]]:
    """Return what differs between ranks that name the same replica.

    Args:
        samples: By rank.

    Returns:
        FQN, whether a rank says that it is split, and the ranks in groups of equal digests; FQNs in order.
    """
    found: dict[str, dict[bytes, list[int]]] = {}
    split: set[str] = set()
    for rank, named in sorted(samples.items()):
        for fqn, sample in named.items():
            found.setdefault(fqn, {}).setdefault(sample.digest, []).append(rank)
            if sample.split:
                split.add(fqn)
    return [(fqn, fqn in split, list(groups.values())) for fqn, groups in sorted(found.items()) if len(groups) > 1]
