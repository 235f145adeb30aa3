"""What a rank tells the others about its state, and the changes of the agreement that are made of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TensorKey = tuple[str, str, tuple[int, ...]]
"""FQN by the first path, dtype name, shape in elements."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contribution:
    """One structure of one rank.

    Attributes:
        tensors: Every tensor that is not `PerRank`, in the order of the state dict; FQNs are unique.
        own_nbytes: Bytes of the tensors that are `PerRank`.
        digests: Aligned with `tensors`: 8 bytes of the whole tensor's elements, or b"" where it was not given.
    """

    tensors: tuple[TensorKey, ...]
    own_nbytes: int
    digests: tuple[bytes, ...]

    def encode(self) -> bytes:
        """Return it as msgpack."""
        raise NotImplementedError

    @classmethod
    def decode(cls, data: bytes) -> Contribution:
        """Read `encode`'s bytes.

        Raises:
            ProtocolError: Anything else.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """What alters an agreement, the same on all ranks.

    Attributes:
        contributions: By rank.
        per_rank: FQNs that are stored for each rank from now on.
    """

    contributions: Mapping[int, Contribution]
    per_rank: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """Return it as msgpack: {"contributions": {rank: bytes}, "per_rank": [FQN]}; the same bytes on all ranks."""
        raise NotImplementedError

    @classmethod
    def decode(cls, data: bytes) -> Change:
        """Read `encode`'s bytes.

        Raises:
            ProtocolError: Anything else.
        """
        raise NotImplementedError


def decode_contributions(raw: Mapping[int, bytes]) -> dict[int, Contribution]:
    """Read the encoded contributions of many ranks; equal parts are read, and kept, once.

    Raises:
        ProtocolError: One of them is none.
    """
    raise NotImplementedError


def candidates(contributions: Mapping[int, Contribution]) -> dict[int, tuple[int, ...]]:
    """Say which tensors look like replicas, so that their digests must be compared.

    Returns:
        For each rank the positions in its `tensors`: those that several ranks hold, all with one dtype and shape.
    """
    raise NotImplementedError


def with_digests(contributions: Mapping[int, Contribution], digests: Mapping[int, bytes]) -> dict[int, Contribution]:
    """Return `contributions` with the digests of their candidates.

    Args:
        contributions: Of all ranks, without digests.
        digests: By rank, 8 bytes for each of its `candidates`, in their order.

    Raises:
        ProtocolError: A rank gave another number of digests.
    """
    raise NotImplementedError
