"""Contributions: what each rank sends to the others about its state at a meeting, and its encoding. Pure; no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgpack

from asyncckpt.basics.limits import MAX_RANKS
from asyncckpt.basics.safe_msgpack import unpack_strict
from asyncckpt.dtypes import DTYPES
from asyncckpt.errors import ProtocolError
from asyncckpt.format.checksums import DIGEST_NBYTES
from asyncckpt.format.structure import MAX_DIMS, MAX_INT, MAX_TENSORS
from asyncckpt.sharding.shard_claims import ShardClaim, decode_claims, encode_claims

TensorKey = tuple[str, str, tuple[int, ...]]
"""(FQN by the first path, dtype name, shape in elements) of a whole tensor."""

_Memo = dict[bytes, Any]
_DECODE_ERRORS = (ValueError, TypeError, KeyError, IndexError, RecursionError, OverflowError, msgpack.UnpackException)


_TRIVIAL = b"\xff\xff\xff\xff"


def tag_digest(digest: bytes, *, trivial: bool) -> bytes:
    """Return an 8-byte digest whose first four bytes say whether the tensor has a trivial value.

    See `is_trivial_value`.
    """
    if trivial:
        return _TRIVIAL + digest[len(_TRIVIAL) :]
    return b"\xfe" + digest[1:] if digest.startswith(_TRIVIAL) else digest


def is_trivial_value(digest: bytes) -> bool:
    """Whether a tagged digest is that of a tensor of zeros only, or of ones only: common initial values.

    Tensors with equal trivial values need not be replicas: BatchNorm statistics at step 0, zero biases of hand-written
    tensor parallelism and LoRA's B are equal on all ranks and become different. Such tensors are compared once more, in
    a later save.
    """
    return digest.startswith(_TRIVIAL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Contribution:
    """What one rank sends to the others about one structure.

    Attributes:
        tensors: Every whole tensor that is not `PerRank`, in the order of the state dict; FQNs are unique.
        own_nbytes: Bytes of the `PerRank` tensors.
        digests: Aligned with `tensors`: the tagged 8-byte digest of the tensor's elements, or b"" without one.
        shards: Claims of the tensors of which this rank holds parts.
    """

    tensors: tuple[TensorKey, ...]
    own_nbytes: int
    digests: tuple[bytes, ...]
    shards: tuple[ShardClaim, ...] = ()

    def encode(self) -> bytes:
        """Return msgpack of [msgpack of tensors, own_nbytes, msgpack of digests]; with shards also `encode_claims`."""
        return _encode(self, {})

    @classmethod
    def decode(cls, data: bytes) -> Contribution:
        """Return the contribution that `encode` gave these bytes for.

        Raises:
            ProtocolError: The bytes are not an encoded contribution.
        """
        return decode_contributions({0: data})[0]


def encode_contributions(contributions: Mapping[int, Contribution]) -> bytes:
    """Encode contributions by rank as msgpack, to the same bytes on all ranks. Equal contributions are encoded once."""
    memo: dict[int, bytes] = {}
    first: dict[bytes, int] = {}
    found: dict[int, bytes | int] = {}
    for rank in sorted(contributions):
        data = _encode(contributions[rank], memo)
        found[rank] = data if first.setdefault(data, rank) == rank else first[data]
    return bytes(msgpack.packb(found))


def decode_contributions(raw: Mapping[int, bytes]) -> dict[int, Contribution]:
    """Return contributions by rank from their encoded bytes by rank. Equal parts are decoded, and kept, once.

    Raises:
        ProtocolError: The bytes of a rank are not an encoded contribution.
    """
    memos: tuple[_Memo, _Memo, _Memo] = {}, {}, {}
    found = {}
    rank: Any = None
    try:
        for rank, data in raw.items():
            if type(rank) is not int or not 0 <= rank < MAX_RANKS or type(data) is not bytes:
                raise ValueError("not a rank and its bytes")
            found[rank] = _decode(data, *memos)
    except _DECODE_ERRORS as error:
        text = f"the contribution of rank {rank} to the meeting of the ranks does not decode: {error}"
        raise ProtocolError(text, detail=str(error)) from error
    except AttributeError as error:
        raise ProtocolError("contributions are not a mapping by rank", detail=str(error)) from error
    return found


def _encode(contribution: Contribution, memo: dict[int, bytes]) -> bytes:
    tensors = memo.get(id(contribution.tensors))
    if tensors is None:
        tensors = memo[id(contribution.tensors)] = msgpack.packb(contribution.tensors)
    fields = [tensors, contribution.own_nbytes, msgpack.packb(contribution.digests)]
    if contribution.shards:
        shards = memo.get(id(contribution.shards))
        if shards is None:
            shards = memo[id(contribution.shards)] = encode_claims(contribution.shards)
        fields.append(shards)
    return bytes(msgpack.packb(fields))


def _decode(data: bytes, tensors_memo: _Memo, digests_memo: _Memo, shards_memo: _Memo) -> Contribution:
    raw_tensors, own_nbytes, raw_digests, *more = unpack_strict(data)
    tensors = tensors_memo.get(raw_tensors)
    if tensors is None:
        tensors = tensors_memo[raw_tensors] = tuple(_tensors(unpack_strict(raw_tensors)))
    digests = digests_memo.get(raw_digests)
    if digests is None:
        digests = digests_memo[raw_digests] = _digests(unpack_strict(raw_digests))
    if type(own_nbytes) is not int or own_nbytes < 0:
        raise ValueError(f"own_nbytes is {own_nbytes!r}")
    if len(digests) != len(tensors):
        raise ValueError(f"{len(digests)} digests of {len(tensors)} tensors")
    shards: tuple[ShardClaim, ...] = ()
    if more:
        shards = shards_memo.get(more[0], ())
        if not shards:
            shards = shards_memo[more[0]] = decode_claims(more[0])
    return Contribution(tensors=tensors, own_nbytes=own_nbytes, digests=digests, shards=shards)


def _tensors(raw: Any) -> Iterator[TensorKey]:
    if not isinstance(raw, tuple) or len(raw) > MAX_TENSORS:
        raise ValueError("tensors are not a list, or are too many")
    seen = set()
    for fqn, dtype, shape in raw:
        if type(fqn) is not str or fqn in seen:
            raise ValueError(f"FQN {fqn!r} is not a string, or occurs twice")
        if type(dtype) is not str or dtype not in DTYPES:
            raise ValueError(f"tensor {fqn!r} has the unknown dtype {dtype!r}")
        fits = isinstance(shape, tuple) and len(shape) <= MAX_DIMS
        if not fits or not all(type(n) is int and 0 <= n <= MAX_INT for n in shape):
            raise ValueError(f"tensor {fqn!r} has the invalid shape {shape!r}")
        seen.add(fqn)
        yield fqn, dtype, shape


def _digests(raw: Any) -> tuple[bytes, ...]:
    if not isinstance(raw, tuple) or not all(type(d) is bytes and len(d) in (0, DIGEST_NBYTES) for d in raw):
        raise ValueError(f"digests are not a list of {DIGEST_NBYTES}-byte digests")
    return raw


def replica_candidates(contributions: Mapping[int, Contribution]) -> dict[int, tuple[int, ...]]:
    """Return which tensors may be replicas, so that their digests must be compared.

    Returns:
        For each rank, positions in its `tensors`: of the tensors that several ranks hold, all with the same dtype and
        shape.
    """
    holders: dict[int, int] = {}  # by identity of `tensors`, which many ranks share after `decode_contributions`
    lists: dict[int, Sequence[TensorKey]] = {}
    for contribution in contributions.values():
        holders[id(contribution.tensors)] = holders.get(id(contribution.tensors), 0) + 1
        lists[id(contribution.tensors)] = contribution.tensors
    keys: dict[str, TensorKey | None] = {}
    counts: dict[str, int] = {}
    for number, tensors in lists.items():
        for key in tensors:
            fqn = key[0]
            counts[fqn] = counts.get(fqn, 0) + holders[number]
            if keys.setdefault(fqn, key) != key:
                keys[fqn] = None
    found = {
        number: tuple(n for n, (fqn, _, _) in enumerate(tensors) if counts[fqn] > 1 and keys[fqn] is not None)
        for number, tensors in lists.items()
    }
    return {rank: found[id(contribution.tensors)] for rank, contribution in contributions.items()}


def with_digests(contributions: Mapping[int, Contribution], digests: Mapping[int, bytes]) -> dict[int, Contribution]:
    """Return `contributions` with the digests of their replica candidates.

    Args:
        contributions: Contributions of all ranks by rank, without digests.
        digests: By rank, 8 bytes for each of its `replica_candidates`, in their order.

    Raises:
        ProtocolError: A rank sent a wrong number of digests.
    """
    memo: dict[tuple[int, bytes], tuple[bytes, ...]] = {}
    found = {}
    for rank, positions in replica_candidates(contributions).items():
        contribution, raw = contributions[rank], digests.get(rank)
        if type(raw) is not bytes or len(raw) != DIGEST_NBYTES * len(positions):
            sent = f"{len(raw)} bytes" if type(raw) is bytes else "nothing"
            detail = f"rank {rank} sent {sent} for the digests of {len(positions)} tensors"
            raise ProtocolError(detail, detail=detail)
        key = (id(contribution.tensors), raw)
        if key not in memo:
            aligned = [b""] * len(contribution.tensors)
            for n, position in enumerate(positions):
                aligned[position] = raw[DIGEST_NBYTES * n : DIGEST_NBYTES * (n + 1)]
            memo[key] = tuple(aligned)
        found[rank] = replace(contribution, digests=memo[key])
    return found
