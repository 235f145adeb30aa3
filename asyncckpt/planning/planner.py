"""Plans one rank's saves: what it writes of a flattened state dict, and where in its slot and files."""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from operator import add
from typing import Any, NamedTuple

from asyncckpt.dtypes import DTYPES
from asyncckpt.errors import DuplicateNameError
from asyncckpt.format.dcp import build_dcp_layout, room_for_dcp
from asyncckpt.format.layout import BoxSpec, Layout, build_layout, room_for
from asyncckpt.format.names import DCP, SAFETENSORS, is_reserved, per_rank_name
from asyncckpt.format.state_tree import OBJECT, composite_nodes, fqn_of, leaves, with_empty_parts
from asyncckpt.format.structure import Box, Structure, TensorEntry, encode_structure
from asyncckpt.planning.contributions import Contribution, TensorKey
from asyncckpt.planning.file_groups import grouped_layout
from asyncckpt.planning.load_balancing import box_of_rows, row_dimension
from asyncckpt.planning.sample_schedule import SampleSchedule
from asyncckpt.planning.save_plan import SavePlan, SharedTensor, Signature, TensorBox
from asyncckpt.planning.shard_ownership import BoxAssignment, ShardAssignment, all_rows, contradiction
from asyncckpt.planning.write_agreement import Agreement, AssignmentKind
from asyncckpt.state_dict.flatten import Flattened, ShardLeaf, check_keys, flatten
from asyncckpt.state_dict.leaf_codecs import check_dcp_items
from asyncckpt.state_dict.stateful import StateDictCache
from asyncckpt.state_dict.structure_match import flatten_along
from asyncckpt.torch_tensors import check_memory_is_real, dtype_name


class TensorWrite(NamedTuple):
    """What a rank writes of one tensor.

    Attributes:
        key: FQN, dtype and global shape of the tensor.
        stored: Name under which it is written.
        boxes: Boxes to write, of the tensors that this rank holds.
        shared: The tensor, or its boxes, that are compared with other ranks.
        is_unagreed: Whether the ranks have not agreed on this tensor yet.
        origins: For a shard, aligned with `boxes`: offsets in the global tensor of the part that contains the box.
            Empty for a whole tensor.
        is_empty_part: Whether it is a part without elements of a sharded tensor, which this rank stores for itself.
    """

    key: TensorKey
    stored: str
    boxes: tuple[TensorBox, ...]
    shared: tuple[SharedTensor, ...] = ()
    is_unagreed: bool = False
    origins: tuple[tuple[int, ...], ...] = ()
    is_empty_part: bool = False


def shard_write(
    number: int,
    key: TensorKey,
    leaf: ShardLeaf,
    rank: int,
    agreement: Agreement | None,
    empty_shape: tuple[int, ...] | None = None,
) -> TensorWrite:
    """Return what `rank` writes of a tensor of which it holds shards.

    Args:
        number: Index of the tensor into `Flattened.tensors`.
        key: FQN, dtype and global shape of the tensor.
        leaf: Its parts.
        rank: Rank of this process.
        agreement: Agreement of the ranks; None: a single process.
        empty_shape: Shape of the tensor that this process has in place of parts, if it may store that for itself.

    Raises:
        RanksDisagreeError, OverlappingShardsError: The ranks contradict each other about this tensor.
    """
    fqn, dtype, _ = key
    if agreement is None or agreement.world_size == 1:
        assignments = tuple(BoxAssignment(all_rows(box)) for box in leaf.boxes)
        assignment = ShardAssignment(assignments, None, False)
    else:
        claim = leaf.claim(fqn, dtype)
        if claim.boxes_of_rank(rank) != leaf.boxes:
            text = f"rank {rank} of the checkpointer holds a shard of {fqn!r} that another rank of its mesh should hold"
            raise contradiction(text + "; give the checkpointer the rank numbers of torch.distributed", [rank])
        assignment = agreement.shards.assignment(rank, claim)
        if empty_shape is not None and agreement.shards.may_store_empty(rank, claim):
            whole = (TensorBox(number, _origin(len(empty_shape)), empty_shape),)
            return TensorWrite((fqn, dtype, empty_shape), per_rank_name(fqn, rank), whole, is_empty_part=True)
    boxes, origins, shared = [], [], []
    for box, source, assigned in zip(leaf.boxes, leaf.sources, assignment.boxes, strict=True):
        offsets, sizes = box
        for first, n_rows in assigned.rows:
            boxes.append(TensorBox(source, *box_of_rows(sizes, first, n_rows)))
            origins.append(offsets)
        if assigned.shared and assignment.schedule is not None:
            name, n_elements = box_name(fqn, box), math.prod(sizes)
            itemsize = DTYPES[dtype].itemsize
            shared.append(SharedTensor(name, source, assigned.split, assignment.schedule, n_elements, itemsize))
    return TensorWrite(key, fqn, tuple(boxes), tuple(shared), assignment.is_unagreed, tuple(origins))


def box_name(fqn: str, box: Box) -> str:
    """Return the name under which ranks compare a box of a tensor: `FQN [first:end,...]`."""
    offsets, sizes = box
    return f"{fqn} [{','.join(f'{o}:{o + s}' for o, s in zip(offsets, sizes, strict=True))}]"


def split_to_size(write: TensorWrite, max_nbytes: int) -> TensorWrite:
    """Return `write` with its boxes cut between rows, and inside of rows, into boxes of at most `max_nbytes`."""
    itemsize = DTYPES[write.key[1]].itemsize
    if all(math.prod(box.sizes) * itemsize <= max_nbytes for box in write.boxes):
        return write
    boxes: list[TensorBox] = []
    origins: list[tuple[int, ...]] = []
    for n, box in enumerate(write.boxes):
        pieces = list(_cuts(box, max(1, max_nbytes // itemsize)))
        boxes += pieces
        origins += write.origins[n : n + 1] * len(pieces)
    return write._replace(boxes=tuple(boxes), origins=tuple(origins))


def _cuts(box: TensorBox, max_elements: int) -> Iterator[TensorBox]:
    n_elements, dimension = math.prod(box.sizes), row_dimension(box.sizes)
    if n_elements <= max_elements or dimension is None:
        yield box
        return
    n_rows = box.sizes[dimension]
    step = max(1, max_elements * n_rows // n_elements)
    for first in range(0, n_rows, step):
        offsets, sizes = box_of_rows(box.sizes, first, min(step, n_rows - first))
        yield from _cuts(TensorBox(box.number, tuple(map(add, box.offsets, offsets)), sizes), max_elements)


def signature_of(flat: Flattened) -> Signature:
    """Return the signature of the structure of `flat`."""
    shards = tuple(flat.shards.get(n) for n in range(flat.n_numbers)) if flat.shards else ()
    kinds: dict[Any, Any] = {}  # one object for all tensors of a kind: there are few kinds, and many tensors
    found = ((t.dtype, t.shape) for t in flat.tensors)
    return flat.tree, tuple(kinds.setdefault(kind, kind) for kind in found), shards


def contribution_of(flat: Flattened) -> Contribution:
    """Return this rank's contribution for `flat`, without digests.

    Raises:
        DuplicateNameError: Two leaves have the same FQN, or a name is reserved for tensors of one rank.
        UnsupportedLeafError: The index cannot hold a key.
    """
    check_keys(flat.tree)
    _check_names(flat)
    keys, own = _keys(flat), flat.per_rank
    common = tuple(keys[number] for number in flat.common)
    return Contribution(
        tensors=common,
        own_nbytes=sum(flat.tensors[number].numel() * DTYPES[keys[number][1]].itemsize for number in own),
        digests=(b"",) * len(common),
        shards=tuple(leaf.claim(*keys[number][:2]) for number, leaf in flat.shards.items()),
    )


def make_plan(
    flat: Flattened,
    signature: Signature,
    *,
    files_per_rank: int,
    rank: int = 0,
    agreement: Agreement | None = None,
    max_shard_nbytes: int | None = None,
    known: SavePlan | None = None,
    layout: str = SAFETENSORS,
    groups_by_role: bool = False,
) -> SavePlan:
    """Lay out what this rank writes of `flat`.

    Args:
        flat: The flattened state dict.
        signature: `signature_of(flat)`.
        files_per_rank: Number of shard files to spread the tensors over.
        rank: Rank of this process.
        agreement: Agreement of the ranks; None: a single process.
        max_shard_nbytes: Maximum bytes of a shard file; None: no limit.
        known: A plan of the same structure under an earlier agreement. Its layout object is reused if it is unchanged.
        layout: Format of the shard files, one of `format.names.LAYOUTS`.
        groups_by_role: Whether tensors are grouped by `file_groups`, in `files_per_rank` files or more.

    Raises:
        ConfigError: No number of files is enough for `max_shard_nbytes`.
        DuplicateNameError: Two leaves have the same FQN, or a name is reserved for tensors of one rank.
        UnsupportedLeafError: The index cannot hold a key; or the layout cannot store a leaf.
        RanksDisagreeError, OverlappingShardsError: The ranks contradict each other about a shard.
    """
    check_keys(flat.tree)
    _check_names(flat)
    if layout == DCP:
        check_dcp_items(flat.tree)
    own = flat.per_rank
    writes = [
        shard_write(number, key, flat.shards[number], rank, agreement, _empty_shape(flat, number, layout))
        if number in flat.shards
        else _tensor_write(number, key, rank, None if number in own else agreement, is_own=number in own)
        for number, key in enumerate(_keys(flat))
    ]
    if max_shard_nbytes is not None:
        writes = [split_to_size(write, _room_for(write, max_shard_nbytes, layout)) for write in writes]
    boxes, names = tuple(box for write in writes for box in write.boxes), tuple(write.stored for write in writes)
    unagreed = tuple(number for number, write in enumerate(writes) if write.is_unagreed)
    shared = _by_schedule(shared for write in writes for shared in write.shared)
    specs = tuple(_spec(write, n) for write in writes for n in range(len(write.boxes)))
    if known is not None and (known.boxes, known.specs, known.names) == (boxes, specs, names):
        return replace(known, agreement=agreement, unagreed=unagreed, shared=shared)
    placed = _placed(specs, files_per_rank, max_shard_nbytes, layout, groups_by_role=groups_by_role)
    chunks = iter(placed.chunks)
    empty = {number for number, write in enumerate(writes) if write.is_empty_part}
    structure = Structure(
        tree=with_empty_parts(flat.tree, empty) if empty else flat.tree,
        tensors=tuple(
            TensorEntry(
                fqn=write.stored,
                dtype=write.key[1],
                global_shape=write.key[2],
                chunks=tuple(next(chunks) for _ in write.boxes),
            )
            for write in writes
        ),
        n_objects=len(flat.objects),
        part_nbytes=tuple(p.nbytes for p in placed.parts),
    )
    return SavePlan(
        signature=signature,
        layout=placed,
        boxes=boxes,
        specs=specs,
        names=names,
        structure=encode_structure(structure),
        n_tensors=sum(not any(spec.offsets) for spec in specs),
        tensor_nbytes=sum(s.nbytes for s in specs),
        agreement=agreement,
        unagreed=unagreed,
        shared=shared,
    )


def _empty_shape(flat: Flattened, number: int, layout: str) -> tuple[int, ...] | None:
    """Return the shape of the tensor in place of the parts of a shard.

    None: there are parts, or it is itself a component, or layout dcp, which has no such nodes.
    """
    tensor = flat.tensors[number]
    if flat.shards[number].boxes or tensor.numel() or layout == DCP:
        return None
    components = (leaf[1] for _, node in composite_nodes(flat.tree) for _, leaf in leaves(node))
    return None if number in components else tuple(tensor.shape)


def _placed(
    specs: Sequence[BoxSpec], n_files: int, max_nbytes: int | None, layout: str, *, groups_by_role: bool
) -> Layout:
    def build(members: Sequence[BoxSpec], header_unit: int) -> Layout:
        if layout == DCP:
            return build_dcp_layout(members, max_nbytes=max_nbytes)
        return build_layout(members, max_nbytes=max_nbytes, header_unit=header_unit)

    grouped = grouped_layout(specs, build, n_files) if groups_by_role else None
    if grouped is not None:
        return grouped
    return (build_dcp_layout if layout == DCP else build_layout)(specs, n_parts=n_files, max_nbytes=max_nbytes)


def _room_for(write: TensorWrite, max_nbytes: int, layout: str) -> int:
    return room_for_dcp(max_nbytes) if layout == DCP else room_for(write.stored, len(write.key[2]), max_nbytes)


def _by_schedule(shared: Iterable[SharedTensor]) -> dict[SampleSchedule, tuple[SharedTensor, ...]]:
    found: dict[SampleSchedule, list[SharedTensor]] = {}
    for tensor in shared:
        found.setdefault(tensor.schedule, []).append(tensor)
    return {schedule: tuple(tensors) for schedule, tensors in found.items()}


@functools.cache
def _origin(n_dims: int) -> tuple[int, ...]:
    return (0,) * n_dims


def _tensor_write(number: int, key: TensorKey, rank: int, agreement: Agreement | None, *, is_own: bool) -> TensorWrite:
    fqn, dtype, shape = key
    whole = (TensorBox(number, _origin(len(shape)), shape),)
    if agreement is None:
        return TensorWrite(key, per_rank_name(fqn, rank) if is_own else fqn, whole)
    assignment = agreement.assignment(rank, fqn, dtype, shape)
    if assignment.kind is AssignmentKind.SOLE:
        return TensorWrite(key, fqn, whole)
    if assignment.kind is not AssignmentKind.SHARED:
        return TensorWrite(key, per_rank_name(fqn, rank), whole, is_unagreed=assignment.kind is AssignmentKind.UNAGREED)
    boxes = tuple(TensorBox(number, *box_of_rows(shape, first, n_rows)) for first, n_rows in assignment.rows)
    schedule = agreement.schedule(fqn, dtype, shape)
    shared = SharedTensor(fqn, number, assignment.split, schedule, math.prod(shape), DTYPES[dtype].itemsize)
    return TensorWrite(key, fqn, boxes, (shared,))


def _spec(write: TensorWrite, n: int) -> BoxSpec:
    _, dtype, shape = write.key
    box, offsets = write.boxes[n], write.boxes[n].offsets
    if write.origins:
        offsets = tuple(map(add, offsets, write.origins[n]))
    return BoxSpec(fqn=write.stored, dtype=dtype, global_shape=shape, offsets=offsets, sizes=box.sizes)


def _keys(flat: Flattened) -> list[TensorKey]:
    found, shapes = [], dict[tuple[int, ...], tuple[int, ...]]()
    for number, (fqn, tensor) in enumerate(zip(flat.fqns, flat.tensors, strict=False)):
        dtype = dtype_name(tensor.dtype)
        assert dtype is not None
        leaf = flat.shards.get(number)
        shape = tuple(tensor.shape) if leaf is None else leaf.global_shape
        found.append((fqn, dtype, shapes.setdefault(shape, shape)))
    return found


def _check_names(flat: Flattened) -> None:
    seen: set[str] = set()
    for path, node in leaves(flat.tree):
        fqn = fqn_of(path)
        if fqn in seen:
            raise DuplicateNameError(
                f"two leaves of the state dict have the FQN {fqn!r}, in which dots join their keys (the second is at "
                f"{path!r}); rename a key",
                fqn=fqn,
            )
        if node[0] != OBJECT and is_reserved(fqn):
            raise DuplicateNameError(
                f"the name of tensor {fqn!r} ends in '@rank' and a number, which is reserved for tensors of one rank; "
                "rename the key",
                fqn=fqn,
            )
        seen.add(fqn)


class PlanCache:
    """Plans by structure: an LRU cache of `MAX_PLANS` plans. Not thread-safe.

    Attributes:
        agreement: Agreement of the ranks. After another one is set, each plan is updated when it is next used.
        n_plans_made: Number of layouts that were computed.
    """

    MAX_PLANS = 8
    """Chosen, not measured: full state, weights only, a second model, and a reserve."""

    def __init__(
        self,
        *,
        files_per_rank: int,
        rank: int = 0,
        agreement: Agreement | None = None,
        allow_pickle: bool = False,
        max_shard_nbytes: int | None = None,
        layout: str = SAFETENSORS,
        groups_by_role: bool = False,
    ) -> None:
        self._files_per_rank, self._rank, self.agreement = files_per_rank, rank, agreement
        self._allow_pickle, self._max_shard_nbytes, self._layout = allow_pickle, max_shard_nbytes, layout
        self._groups_by_role = groups_by_role
        self._plans: OrderedDict[int, SavePlan] = OrderedDict()
        self.n_plans_made = 0

    def flatten(self, state_dict: Any, state_dicts: StateDictCache) -> Flattened:
        """Flatten `state_dict` as `plan_for` does, without making a plan.

        Args:
            state_dict: The state.
            state_dicts: Cache of this save, so that `state_dict()` of each object is called once in it.

        Raises:
            UnsupportedLeafError: A leaf cannot be stored.
        """
        check_memory_is_real("save")
        flat = flatten(state_dict, state_dicts, allow_pickle=self._allow_pickle)
        if self._layout == DCP:  # raises before the ranks meet
            check_dcp_items(flat.tree)
        return flat

    def plan_for(self, state_dict: Any, state_dicts: StateDictCache | None = None) -> tuple[SavePlan, Flattened]:
        """Flatten `state_dict` and return the plan of its structure, which is made if the structure is new.

        Args:
            state_dict: The state.
            state_dicts: As for `flatten`; None: this is the only call of the save.

        Raises:
            UnsupportedLeafError: A leaf cannot be stored.
            AsyncCkptError: The same as from `make_plan`.
        """
        check_memory_is_real("save")
        state_dicts = state_dicts or StateDictCache()
        for key in reversed(self._plans):
            plan = self._plans[key]
            flat = flatten_along(*plan.signature, state_dict, state_dicts, allow_pickle=self._allow_pickle)
            if flat is not None:
                if plan.agreement is not self.agreement:
                    plan = self._make(flat, plan.signature, plan)
                    self._plans[key] = plan
                self._plans.move_to_end(key)
                return plan, flat
        flat = flatten(state_dict, state_dicts, allow_pickle=self._allow_pickle)
        signature = signature_of(flat)
        key = hash(signature)
        found = self._plans.get(key)
        if found is None or found.signature != signature or found.agreement is not self.agreement:
            known = found if found is not None and found.signature == signature else None
            found = self._make(flat, signature, known)
            self._plans[key] = found
            if len(self._plans) > self.MAX_PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return found, flat

    def _make(self, flat: Flattened, signature: Signature, known: SavePlan | None) -> SavePlan:
        made = make_plan(
            flat,
            signature,
            files_per_rank=self._files_per_rank,
            rank=self._rank,
            agreement=self.agreement,
            max_shard_nbytes=self._max_shard_nbytes,
            known=known,
            layout=self._layout,
            groups_by_role=self._groups_by_role,
        )
        self.n_plans_made += known is None or made.layout is not known.layout
        return made
