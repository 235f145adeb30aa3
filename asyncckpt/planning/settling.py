"""The second half of a meeting: what several ranks hold is hashed, and compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from asyncckpt.format.checksums import DIGEST_NBYTES
from asyncckpt.planning.agreement import Agreement, by_shards
from asyncckpt.planning.contributions import Contribution, candidates, with_digests
from asyncckpt.planning.digests import digests_for, shard_digests_for
from asyncckpt.planning.flattened import Flattened
from asyncckpt.planning.shard_comparison import compare_shards


def settled_together(
    agreement: Agreement,
    contributions: Mapping[int, Contribution],
    flat: Flattened,
    rank: int,
    gather: Callable[[bytes], list[bytes]],
    *,
    compare: bool,
) -> Mapping[int, Contribution]:
    """Return contributions with digests of what looks like replicas.

    Args:
        agreement: As it is so far.
        contributions: Of all ranks, equal on all ranks.
        flat: This rank's state.
        rank: This rank.
        gather: Exchanges digests: this rank's for everybody's.
        compare: False takes what is called the same for the same; `gather` is called all the same.

    Raises:
        ReplicaMismatchError, RanksDisagreeError, OverlappingShardsError: About shards; on all ranks alike.
        ProtocolError: A rank gave another number of digests.
        AsyncCkptError: From `gather`.
    """
    book = agreement.shards.extended(by_shards(contributions), {})
    book.check()
    if not compare:
        gather(b"")
        return contributions
    wanted = candidates(contributions)
    mine = digests_for(flat, wanted[rank]) if wanted[rank] else b""
    gathered = gather(mine + shard_digests_for(flat, book.compared(contributions[rank].shards, rank)))
    ends = {one: DIGEST_NBYTES * len(positions) for one, positions in wanted.items()}
    compare_shards(book, contributions, {one: gathered[one][end:] for one, end in ends.items()})
    return with_digests(contributions, {one: gathered[one][:end] for one, end in ends.items()})
