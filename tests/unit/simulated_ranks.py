"""Several ranks in one process: they exchange what they hold, plan, stage, and their structures are joined."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from asyncckpt.format.layout import PAGE_NBYTES
from asyncckpt.format.names import SaveId
from asyncckpt.format.structure import decode_structure
from asyncckpt.memory.mapping import Mapping as Memory
from asyncckpt.planning.contributions import decode_contributions, replica_candidates, with_digests
from asyncckpt.planning.planner import PlanCache, contribution_of
from asyncckpt.planning.replica_checks import Samples, compare_shards, replica_digests, sample_digests, shard_digests
from asyncckpt.planning.save_plan import SavePlan
from asyncckpt.planning.write_agreement import Agreement, group_by_shards
from asyncckpt.staging.cpu_copy import SlotImage
from asyncckpt.state_dict.flatten import flatten
from asyncckpt.storage.contents import SavedTensor, join
from asyncckpt.torch_tensors import torch_dtype

SAVE_ID = SaveId(1, 2, "0123456789ab")
State = Mapping[str, Any]


class Ranks:
    """All ranks of a job."""

    def __init__(self, world_size: int, *, files_per_rank: int = 1) -> None:
        start = Agreement.start(world_size)
        self.plans = [PlanCache(files_per_rank=files_per_rank, rank=r, agreement=start) for r in range(world_size)]
        self.made: list[SavePlan] = []
        self.tensors: dict[str, SavedTensor] = {}

    @property
    def agreement(self) -> Agreement:
        """What all of them agreed upon."""
        assert len({plans.agreement.fingerprint for plans in self.plans if plans.agreement}) == 1
        assert self.plans[0].agreement is not None
        return self.plans[0].agreement

    def meet(self, states: Sequence[State], *, compare: bool = True) -> None:
        """Let all ranks meet with what they hold, in two rounds."""
        flats = [flatten(state) for state in states]
        given = decode_contributions({rank: contribution_of(flat).encode() for rank, flat in enumerate(flats)})
        ownership = self.agreement.shards.extended(group_by_shards(given), {})
        ownership.check()
        if compare:
            wanted = replica_candidates(given)
            shards = {r: shard_digests(flats[r], ownership.compared_shards(given[r].shards, r)) for r in given}
            compare_shards(ownership, given, shards)
            given = with_digests(given, {rank: replica_digests(flats[rank], wanted[rank]) for rank in wanted})
        self.agree(self.agreement.after(given))
        self.agreement.shards.check()

    def agree(self, agreement: Agreement) -> None:
        """Give every rank this agreement."""
        for plans in self.plans:
            plans.agreement = agreement

    def exchange(self, states: Sequence[State], *, compare: bool = True) -> None:
        """Let the ranks meet, and meet again if that left something open: tensors as they were initialised."""
        self.meet(states, compare=compare)
        if any(self.changed(states)):
            self.meet(states, compare=compare)

    def changed(self, states: Sequence[State]) -> list[bool]:
        """Return whether each rank holds something that is not agreed upon."""
        return [bool(plans.plan_for(state)[0].unagreed) for plans, state in zip(self.plans, states, strict=True)]

    def samples(self, states: Sequence[State], sequence: int) -> list[Samples]:
        """What every rank gives for comparison."""
        return [
            sample_digests(*plans.plan_for(state), sequence) for plans, state in zip(self.plans, states, strict=True)
        ]

    def save(self, states: Sequence[State]) -> dict[str, torch.Tensor]:
        """Stage on every rank, prove coverage as a reader does, and return the stored tensors by stored name."""
        images, ranks, memories = [], [], []
        self.made = []
        try:
            for plans, state in zip(self.plans, states, strict=True):
                plan, flat = plans.plan_for(state)
                memory = Memory(-1, PAGE_NBYTES + plan.body_nbytes)
                memories.append(memory)
                memory.view()[:] = b"\xa5" * memory.nbytes
                SlotImage(memory.address, plan).fill(flat.tensors, SAVE_ID)
                starts = [where.offset for where in plan.part_ranges()]
                images.append((ctypes.string_at(memory.address, memory.nbytes), starts))
                structure: Any = decode_structure(plan.structure)
                ranks.append(SimpleNamespace(structure=structure, index=SimpleNamespace(rank=len(ranks))))
                self.made.append(plan)
        finally:
            for memory in memories:
                memory.close()
        self.structures = [r.structure for r in ranks]
        self.tensors = join("/x", tuple(ranks))  # type: ignore[arg-type]
        return {name: _assembled(saved, images) for name, saved in self.tensors.items()}


def _assembled(saved: SavedTensor, images: list[tuple[bytes, list[int]]]) -> torch.Tensor:
    dtype = torch_dtype(saved.dtype)
    whole = torch.empty((*saved.global_shape, dtype.itemsize), dtype=torch.uint8)
    for rank, chunk in saved.chunks:
        image, starts = images[rank]
        at = starts[chunk.part] + chunk.offset_bytes
        if not chunk.nbytes:
            continue
        piece = torch.frombuffer(bytearray(image[at : at + chunk.nbytes]), dtype=torch.uint8)
        box = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
        whole[box] = piece.view(*chunk.sizes, dtype.itemsize)
    return whole.view(-1).view(dtype).view(saved.global_shape)
