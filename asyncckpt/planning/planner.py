"""From a flattened state dict to the plan of who writes what. Pure; one rank writes everything that it holds."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from asyncckpt.errors import DuplicateNameError
from asyncckpt.format.layout import BoxSpec, build_layout
from asyncckpt.format.structure import Structure, TensorEntry, encode_structure
from asyncckpt.format.tree import fqn_of, leaves
from asyncckpt.planning.agreement import Agreement
from asyncckpt.planning.contributions import Contribution
from asyncckpt.planning.match import match
from asyncckpt.planning.plan import Box, SavePlan, Signature
from asyncckpt.planning.state_dict import Flattened, check_keys, flatten
from asyncckpt.planning.torch_types import dtype_name


def signature_of(flat: Flattened) -> Signature:
    """Return the fingerprint of the structure of `flat`."""
    return flat.tree, tuple((t.dtype, t.shape) for t in flat.tensors)


def contribution_of(flat: Flattened) -> Contribution:
    """Return what the other ranks are told about `flat`, without digests.

    Raises:
        DuplicateNameError, UnsupportedLeafError: As `make_plan`.
    """
    raise NotImplementedError


def make_plan(
    flat: Flattened, signature: Signature, *, files_per_rank: int, rank: int = 0, agreement: Agreement | None = None
) -> SavePlan:
    """Lay out what this rank writes of `flat`.

    Args:
        flat: The state dict.
        signature: `signature_of(flat)`.
        files_per_rank: Shard files to spread over.
        rank: Of this process.
        agreement: With the other ranks; None: there are none.

    Raises:
        DuplicateNameError: Two paths join to one FQN, or a name is reserved for per-rank tensors.
        UnsupportedLeafError: A key that the index cannot hold.
    """
    check_keys(flat.tree)
    _check_names(flat)
    specs = []
    for fqn, tensor in zip(flat.fqns, flat.tensors, strict=True):
        shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
        assert dtype is not None
        specs.append(BoxSpec(fqn=fqn, dtype=dtype, global_shape=shape, offsets=(0,) * len(shape), sizes=shape))
    layout = build_layout(specs, n_parts=files_per_rank)
    structure = Structure(
        tree=flat.tree,
        tensors=tuple(
            TensorEntry(fqn=s.fqn, dtype=s.dtype, global_shape=s.global_shape, chunks=(c,))
            for s, c in zip(specs, layout.chunks, strict=True)
        ),
        n_objects=len(flat.objects),
        part_nbytes=tuple(p.nbytes for p in layout.parts),
    )
    return SavePlan(
        signature=signature,
        layout=layout,
        boxes=tuple(Box(n, s.offsets, s.sizes) for n, s in enumerate(specs)),
        structure=encode_structure(structure),
        n_tensors=len(specs),
        tensor_nbytes=sum(s.nbytes for s in specs),
    )


def _check_names(flat: Flattened) -> None:
    seen: set[str] = set()
    for path, _ in leaves(flat.tree):
        fqn = fqn_of(path)
        if fqn in seen:
            raise DuplicateNameError(
                f"two leaves of the state dict are both called {fqn!r} once their keys are joined by dots "
                f"(one of them is at {path!r}); rename a key",
                fqn=fqn,
            )
        seen.add(fqn)


class PlanCache:
    """The last few plans, by structure; the least recently used goes first. Not thread-safe: one trainer thread."""

    MAX_PLANS = 8
    """Chosen, not measured: full state, weights only, a second model, and room."""

    def __init__(self, *, files_per_rank: int, rank: int = 0, agreement: Agreement | None = None) -> None:
        self._files_per_rank, self._rank, self._agreement = files_per_rank, rank, agreement
        self._plans: OrderedDict[int, SavePlan] = OrderedDict()
        self.made = 0

    @property
    def agreement(self) -> Agreement | None:
        """With the other ranks; setting another one drops all plans."""
        return self._agreement

    @agreement.setter
    def agreement(self, agreement: Agreement | None) -> None:
        self._agreement = agreement
        self._plans.clear()

    def take(self, state_dict: Any) -> tuple[SavePlan, Flattened]:
        """Take `state_dict` apart and return the plan of its structure, making it when it is new.

        Raises:
            UnsupportedLeafError: Something in it cannot be stored.
            DuplicateNameError: As `make_plan`.
        """
        for key in reversed(self._plans):
            plan = self._plans[key]
            flat = match(*plan.signature, state_dict)
            if flat is not None:
                self._plans.move_to_end(key)
                return plan, flat
        flat = flatten(state_dict)
        signature = signature_of(flat)
        key = hash(signature)
        found = self._plans.get(key)
        if found is None or found.signature != signature:
            found = make_plan(flat, signature, files_per_rank=self._files_per_rank)
            self.made += 1
            self._plans[key] = found
            if len(self._plans) > self.MAX_PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return found, flat
