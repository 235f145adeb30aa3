"""Samples: digests of replicas in the requests of a save, which the worker compares between ranks."""

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
    """One rank's digest of a replica. `split`: several ranks write parts of it. `digest`: of the compared bytes."""

    split: bool
    digest: bytes


def encode_samples(samples: Iterable[tuple[str, bool, bytes]]) -> bytes:
    """Encode (FQN, split, digest) triples as a request's field; samples beyond the limits are omitted.

    The worker compares each FQN between the ranks that name it, so ranks may omit different samples.
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
    """Decode a request's samples, by FQN.

    Raises:
        ValueError, TypeError, KeyError: They are not valid by SPEC.md.
    """
    if not data:
        return {}
    if len(data) > MAX_SAMPLES_NBYTES:
        raise ValueError(f"samples of {len(data)} bytes, the limit is {MAX_SAMPLES_NBYTES}")
    raw = unpack_strict(data)
    names, split, digests = raw["names"], raw["split"], raw["digests"]
    if not (isinstance(names, tuple) and all(type(n) is str for n in names) and len(set(names)) == len(names)):
        raise ValueError("names of samples must be a list of different texts")
    if len(names) > MAX_SAMPLES or type(split) is not bytes or type(digests) is not bytes:
        raise ValueError(f"samples must be at most {MAX_SAMPLES} names, with split and digests as bytes")
    if len(split) != len(names) or len(digests) != DIGEST_NBYTES * len(names) or not set(split) <= {0, 1}:
        raise ValueError("samples must have one split and one digest for each name")
    return {
        name: Sample(bool(split[i]), digests[DIGEST_NBYTES * i : DIGEST_NBYTES * (i + 1)])
        for i, name in enumerate(names)
    }


def are_samples(value: Any) -> bool:
    """Whether a request's field is valid; never raises."""
    try:
        decode_samples(value)
    except (ValueError, TypeError, KeyError, RecursionError, msgpack.UnpackException):
        return False
    return type(value) is bytes


def unequal(samples: Mapping[int, Mapping[str, Sample]]) -> list[tuple[str, bool, list[list[int]]]]:
    """Return the replicas whose digests differ between ranks.

    Args:
        samples: Rank -> its samples by FQN.

    Returns:
        FQN, whether it is split on any rank, and the ranks in groups of equal digests; sorted by FQN.
    """
    found: dict[str, dict[bytes, list[int]]] = {}
    split: set[str] = set()
    for rank, named in sorted(samples.items()):
        for fqn, sample in named.items():
            found.setdefault(fqn, {}).setdefault(sample.digest, []).append(rank)
            if sample.split:
                split.add(fqn)
    return [(fqn, fqn in split, list(groups.values())) for fqn, groups in sorted(found.items()) if len(groups) > 1]
