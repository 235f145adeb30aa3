"""Compares tensors that several ranks hold, by digests: of whole tensors at a meeting, of samples at every save."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
import xxhash

from asyncckpt.errors import ProtocolError, ReplicaMismatchError
from asyncckpt.format.checksums import DIGEST_NBYTES, block_digest
from asyncckpt.planning.contributions import Contribution, replica_candidates, tag_digest, with_digests
from asyncckpt.planning.load_balancing import row_dimension
from asyncckpt.planning.sample_schedule import Window, window_of
from asyncckpt.planning.save_plan import SavePlan
from asyncckpt.planning.shard_ownership import BoxSharding, MeshSharding, ShardOwnership
from asyncckpt.planning.write_agreement import Agreement, group_by_shards
from asyncckpt.protocol.samples import encode_samples
from asyncckpt.sharding.mesh_layout import position_in
from asyncckpt.sharding.shard_claims import ShardClaim
from asyncckpt.state_dict.flatten import Flattened
from asyncckpt.torch_tensors import flat_bytes

MAX_THREADS = 4
"""More threads do not help, since memory bandwidth is the limit, as for copies (`staging.memcopy`)."""

THREADED_NBYTES = 16 << 20
"""Minimum bytes for several threads. Chosen, not measured: one thread digests them in a millisecond or two."""

TEMPORARY_NBYTES = 64 << 20
"""A tensor that is on a device, or not row-major, is copied in parts of about this size and digested part by part."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By itemsize, the dtype that is used for copies: some torch versions lack copy kernels for rare dtypes."""


class Samples(NamedTuple):
    """Digests of windows of replicas at one save.

    Attributes:
        names: Name of each replica.
        split: One byte for each: 1 if several ranks write rows of it, else 0.
        digests: 8 bytes for each; zeros for windows on devices until `completed`.
        device_windows: (position in `names`, bytes of the window on its device) for windows that the caller copies to
            the host.
    """

    names: list[str]
    split: bytes
    digests: bytes
    device_windows: Sequence[tuple[int, torch.Tensor]] = ()

    def completed(self, windows: Sequence[bytes]) -> Samples:
        """Return these samples with the digests of the device windows. `windows`: their bytes, in the same order."""
        digests = bytearray(self.digests)
        for (n, _), raw in zip(self.device_windows, windows, strict=True):
            digests[DIGEST_NBYTES * n : DIGEST_NBYTES * (n + 1)] = block_digest(raw)
        return self._replace(digests=bytes(digests), device_windows=())

    def encode(self) -> bytes:
        """Return the samples as the field of a save request (protocol/SPEC.md); b"" without any."""
        each = range(0, len(self.digests), DIGEST_NBYTES)
        digests = (self.digests[i : i + DIGEST_NBYTES] for i in each)
        return encode_samples(zip(self.names, map(bool, self.split), digests, strict=True))


NO_SAMPLES = Samples([], b"", b"")


def replica_digests(flat: Flattened, positions: Sequence[int]) -> bytes:
    """Return the tagged 8-byte digest of each tensor at `positions` of `contribution_of(flat).tensors`.

    Blocks: while it reads those tensors, with several threads if they are large.

    Raises:
        RuntimeError: From torch, when a tensor cannot be read.
    """
    common = flat.common
    return _digests([flat.tensors[common[position]] for position in positions])


def shard_digests(flat: Flattened, compared: Sequence[tuple[int, int | None]]) -> bytes:
    """Return the 8-byte digest of each item of `ShardOwnership.compared_shards(contribution_of(flat).shards)`.

    Blocks: while it reads those shards, with several threads if they are large.

    Raises:
        RuntimeError: From torch, when a shard cannot be read.
    """
    leaves = list(flat.shards.values())
    sources = [leaves[at].sources if box is None else (leaves[at].sources[box],) for at, box in compared]
    raw = _digests([flat.tensors[source] for part in sources for source in part], tensor_digest)
    found, begin = [], 0
    for part in sources:
        end = begin + DIGEST_NBYTES * len(part)
        found.append(raw[begin:end] if len(part) == 1 else block_digest(raw[begin:end]))
        begin = end
    return b"".join(found)


def sample_digests(
    plan: SavePlan,
    flat: Flattened,
    sequence: int,
    is_on_device: Callable[[torch.Tensor], bool] = lambda tensor: False,
) -> Samples:
    """Digest the windows that every rank compares at save `sequence`.

    Args:
        plan: Plan of this rank. A plan for a single process has nothing to compare.
        flat: The state that `PlanCache.plan_for` returned with `plan`; not modified since.
        sequence: Sequence number of the save ID.
        is_on_device: Returns whether the windows of a tensor are left to the caller, since copying them waits for a
            device.

    Raises:
        RuntimeError: From torch, when a tensor cannot be read.
    """
    names: list[str] = []
    split, digests = bytearray(), []
    not_addressable: list[tuple[int, torch.Tensor]] = []
    left: list[tuple[int, torch.Tensor]] = []
    due = [shared for schedule, shared in plan.shared.items() if sequence % schedule.period == schedule.position]
    for shared in itertools.chain.from_iterable(due):
        window = window_of(shared.schedule, shared.n_elements, shared.itemsize, sequence)
        if window is None:
            continue
        tensor = flat.tensors[shared.number]
        if is_on_device(tensor):
            left.append((len(names), _elements(tensor, window)))
            digests.append(bytes(DIGEST_NBYTES))
        elif tensor.is_cpu and tensor.is_contiguous():
            address = tensor.data_ptr() + window.start * shared.itemsize
            digests.append(block_digest(_memory(address, window.n * shared.itemsize)))
        else:
            not_addressable.append((len(names), _elements(tensor, window)))
            digests.append(b"")
        names.append(shared.fqn)
        split.append(shared.split)
    for n, raw in _copied_to_host(not_addressable):
        digests[n] = block_digest(raw)
    return Samples(names, bytes(split), b"".join(digests), left)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of `tensor` as integers of the same width; the tensor itself if there are none."""
    integer = _INTEGERS.get(tensor.element_size())
    return tensor.detach() if integer is None else tensor.detach().view(integer)


_INITIALISED = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
_INITIALISED += [torch.float16, torch.bfloat16, torch.float32, torch.float64]
_ONES = {dtype: int(bits_of(torch.ones((), dtype=dtype, device="cpu"))) for dtype in _INITIALISED}
"""By dtype, the bits of the number one as an integer of the same width."""


def replica_digest(tensor: torch.Tensor) -> bytes:
    """Return the tagged digest of a tensor that may be a replica (`contributions.tag_digest`).

    Raises:
        RuntimeError: From torch, when the tensor cannot be read.
    """
    return tag_digest(tensor_digest(tensor), trivial=_is_all_zeros_or_ones(tensor))


def _is_all_zeros_or_ones(tensor: torch.Tensor) -> bool:
    """Whether all elements are zero, or all are one."""
    with torch.no_grad():
        if not tensor.numel():
            return False
        bits = bits_of(tensor)
        if bits.is_complex():
            return False
        first = int(bits[(0,) * bits.dim()])
        if first not in (0, _ONES.get(tensor.dtype, 0)):
            return False
        last = bits.select(0, bits.shape[0] - 1) if bits.dim() else bits  # a quick check that ends most comparisons
        return bool((last == first).all()) and bool((bits == first).all())


def _digests(tensors: Sequence[torch.Tensor], digest: Callable[[torch.Tensor], bytes] = replica_digest) -> bytes:
    nbytes = sum(t.numel() * t.element_size() for t in tensors)
    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    if nbytes < THREADED_NBYTES or threads < 2 or len(tensors) < 2:
        return b"".join(map(digest, tensors))
    with ThreadPoolExecutor(threads, thread_name_prefix="asyncckpt-digest") as pool:
        return b"".join(pool.map(digest, tensors))


def tensor_digest(tensor: torch.Tensor) -> bytes:
    """Return the 8-byte digest of all elements in row-major order, for any device and memory layout.

    Raises:
        RuntimeError: From torch, when they cannot be read.
    """
    with torch.no_grad():  # in each digest thread: it applies to one thread only
        bits = bits_of(tensor)
        if bits.device.type == "cpu" and bits.is_contiguous():
            return block_digest(_memory(bits.data_ptr(), bits.numel() * bits.element_size()))
        digest, dimension = xxhash.xxh3_64(), row_dimension(bits.shape)
        n_rows = 1 if dimension is None else bits.shape[dimension]
        step = max(1, TEMPORARY_NBYTES * n_rows // max(1, bits.numel() * bits.element_size()))
        for first in range(0, n_rows, step):
            rows = bits if dimension is None else bits.narrow(dimension, first, min(step, n_rows - first))
            here = rows.cpu().contiguous()
            digest.update(_memory(here.data_ptr(), here.numel() * here.element_size()))
    return digest.intdigest().to_bytes(DIGEST_NBYTES, "little")


def _memory(address: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * nbytes).from_address(address) if nbytes else (ctypes.c_char * 0)()


def _elements(tensor: torch.Tensor, window: Window) -> torch.Tensor:
    """Return the bytes of a window of a tensor, on the tensor's device."""
    with torch.no_grad():
        bits = bits_of(tensor)
        if bits.is_contiguous():
            found = bits.view(-1)[window.start : window.start + window.n]
        else:
            numbers = torch.arange(window.start, window.start + window.n, device=bits.device)
            found = bits[torch.unravel_index(numbers, bits.shape)]
        return flat_bytes(found)


def _copied_to_host(windows_by_position: Sequence[tuple[int, torch.Tensor]]) -> list[tuple[int, bytes]]:
    """Return (position, bytes) of windows. One transfer for each device, since each transfer waits for the device."""
    by_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for n, window in windows_by_position:
        by_device.setdefault(window.device, []).append((n, window))
    found = []
    for windows in by_device.values():
        here = torch.cat([window for _, window in windows]).cpu()
        at = 0
        for n, window in windows:
            found.append((n, ctypes.string_at(here.data_ptr() + at, window.numel())))
            at += window.numel()
    return found


def exchange_and_compare_digests(
    agreement: Agreement,
    contributions: Mapping[int, Contribution],
    flat: Flattened,
    rank: int,
    gather: Callable[[bytes], list[bytes]],
    *,
    compare: bool,
) -> Mapping[int, Contribution]:
    """Digest the tensors that several ranks hold, exchange the digests, and compare those of shards.

    Args:
        agreement: Agreement before this meeting.
        contributions: Contributions of all ranks by rank; equal on all ranks.
        flat: State of this rank.
        rank: Rank of this process.
        gather: Collective that takes this rank's digests and returns those of all ranks, by rank.
        compare: False assumes that tensors of the same name are equal; `gather` is then called with b"".

    Returns:
        `contributions` with the digests of the replica candidates.

    Raises:
        ReplicaMismatchError, RanksDisagreeError, OverlappingShardsError: About shards; the same error on all ranks.
        ProtocolError: A rank sent a wrong number of digests.
        AsyncCkptError: From `gather`.
    """
    ownership = agreement.shards.extended(group_by_shards(contributions), {})
    ownership.check()
    if not compare:
        gather(b"")
        return contributions
    wanted = replica_candidates(contributions)
    mine = replica_digests(flat, wanted[rank]) if wanted[rank] else b""
    gathered = gather(mine + shard_digests(flat, ownership.compared_shards(contributions[rank].shards, rank)))
    ends = {one: DIGEST_NBYTES * len(positions) for one, positions in wanted.items()}
    compare_shards(ownership, contributions, {one: gathered[one][end:] for one, end in ends.items()})
    return with_digests(contributions, {one: gathered[one][:end] for one, end in ends.items()})


_Compared = tuple[tuple[str, ...], tuple[int, ...] | int]
"""Key of the runs of digests that are compared with each other: (names, first holder on the grid; () for boxes)."""


def compare_shards(
    ownership: ShardOwnership, contributions: Mapping[int, Contribution], digests: Mapping[int, bytes]
) -> None:
    """Check that ranks that hold the same shard hold equal elements.

    The ranks declare by mesh or offsets that these are copies, so a difference is always an error.

    Args:
        ownership: Ownership that includes the claims of `contributions`.
        contributions: Contributions of all ranks by rank.
        digests: By rank, 8 bytes for each item of `ownership.compared_shards`, in its order.

    Raises:
        ReplicaMismatchError: Two ranks differ; the same error on all ranks.
        ProtocolError: A rank sent a wrong number of digests.
    """
    first: dict[_Compared, tuple[int, bytes]] = {}
    lists = {id(contribution.shards): contribution.shards for contribution in contributions.values()}
    mixed = {
        number for number, claims in lists.items() if any(_has_mixed_shardings(ownership, claim) for claim in claims)
    }
    runs: dict[tuple[int, int], list[_DigestRun]] = {}
    for rank, contribution in contributions.items():
        number = id(contribution.shards)
        key = number, rank if number in mixed else -1
        if key not in runs:
            runs[key] = _runs(ownership, contribution.shards, rank)
    runs = _split_unequal_runs(runs)
    for rank in sorted(contributions):
        number = id(contributions[rank].shards)
        known = runs[number, rank if number in mixed else -1]
        raw, end = digests[rank], known[-1].end if known else 0
        if len(raw) != end:
            detail = f"rank {rank} sent {len(raw)} bytes for the digests of its shards, expected {end}"
            raise ProtocolError(detail, detail=detail)
        for names, sharding, begin, stop in known:
            if isinstance(sharding, MeshSharding):
                at = position_in(sharding.grid, rank)
                if at is None:
                    continue
                holders: tuple[int, ...] | int = sharding.grid.replicas(at)[0]
            else:
                holders = ()
            other, expected = first.setdefault((names, holders), (rank, raw[begin:stop]))
            if expected != raw[begin:stop]:
                raise _mismatch(names, expected, raw[begin:stop], other, rank)


class _DigestRun(NamedTuple):
    """Consecutive digests of one rank for tensors on one grid, or a single digest of a box.

    Attributes:
        names: FQNs, or FQN and box.
        sharding: How these tensors are sharded.
        begin, end: Range of bytes in the rank's digests.
    """

    names: tuple[str, ...]
    sharding: MeshSharding | BoxSharding
    begin: int
    end: int


def _has_mixed_shardings(ownership: ShardOwnership, claim: ShardClaim) -> bool:
    """Whether a tensor is on a mesh in this claim, and on a different mesh or on none on other ranks."""
    return claim.grid is not None and isinstance(ownership.sharding_of(claim.fqn), BoxSharding)


def _split_unequal_runs(runs: dict[tuple[int, int], list[_DigestRun]]) -> dict[tuple[int, int], list[_DigestRun]]:
    """Split the runs that do not have the same names on all ranks into one run for each name.

    IMPORTANT: a run is compared only with runs of the same names. Otherwise ranks would not be compared at all if they
    hold the same tensors in another order, or if one has an additional tensor between them.
    """
    distinct = {run.names for known in runs.values() for run in known if isinstance(run.sharding, MeshSharding)}
    counts = Counter(name for names in distinct for name in names)
    broken = {names for names in distinct if len(names) > 1 and any(counts[name] > 1 for name in names)}
    if not broken:
        return runs
    return {
        key: [one for run in known for one in (_singles(run) if run.names in broken else (run,))]
        for key, known in runs.items()
    }


def _singles(run: _DigestRun) -> Iterator[_DigestRun]:
    for n, name in enumerate(run.names):
        begin = run.begin + n * DIGEST_NBYTES
        yield _DigestRun((name,), run.sharding, begin, begin + DIGEST_NBYTES)


def _runs(ownership: ShardOwnership, claims: Sequence[ShardClaim], rank: int) -> list[_DigestRun]:
    """Return the runs of a rank's digests."""
    found: list[_DigestRun] = []
    names: list[str] = []  # names of the current run
    last: MeshSharding | None = None
    begin = at = 0

    def end_run() -> None:
        if last is not None:
            found.append(_DigestRun(tuple(names), last, begin, at))
        names.clear()

    for position, box in ownership.compared_shards(claims, rank):
        fqn = claims[position].fqn
        sharding = ownership.sharding_of(fqn)
        assert sharding is not None
        if isinstance(sharding, BoxSharding):
            assert box is not None
            end_run()
            last = None
            found.append(
                _DigestRun((fqn, str(claims[position].boxes_of_rank(rank)[box])), sharding, at, at + DIGEST_NBYTES)
            )
        else:
            if last is None or sharding.grid is not last.grid:
                end_run()
                last, begin = sharding, at
            names.append(fqn)
        at += DIGEST_NBYTES
    end_run()
    return found


def _mismatch(names: Sequence[str], one: bytes, other: bytes, *ranks: int) -> ReplicaMismatchError:
    at = next(n for n in range(0, len(one), DIGEST_NBYTES) if one[n : n + 8] != other[n : n + 8]) // DIGEST_NBYTES
    fqn = names[min(at, len(names) - 1)] if len(one) > DIGEST_NBYTES else names[0]
    return ReplicaMismatchError(
        f"ranks {ranks[0]} and {ranks[1]} hold the same shard of {fqn!r} according to its mesh or its offsets, but its "
        "elements differ; nothing was saved. If they should be equal, synchronise them before saving. If they are "
        "different tensors, give them different keys, or put them into PerRank as plain tensors. replicated='assume' "
        "saves those of one rank without comparing",
        fqn=fqn,
        ranks=list(ranks),
    )
