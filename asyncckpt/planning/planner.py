"""The plan of one rank: what it writes of a flattened state dict, and where that lies in its slot and files."""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from operator import add
from typing import Any, NamedTuple

from asyncckpt.dtypes import DTYPES
from asyncckpt.errors import DuplicateNameError
from asyncckpt.format.dcp import build_dcp_layout, room_for_dcp
from asyncckpt.format.layout import BoxSpec, build_layout, room_for
from asyncckpt.format.names import DCP, SAFETENSORS, is_reserved, per_rank_name
from asyncckpt.format.state_tree import fqn_of, leaves
from asyncckpt.format.structure import Structure, TensorEntry, encode_structure
from asyncckpt.planning.contributions import Contribution, TensorKey
from asyncckpt.planning.load_balancing import box_of_rows, row_dimension
from asyncckpt.planning.sample_schedule import Turn
from asyncckpt.planning.save_plan import SavePlan, SharedTensor, Signature, TensorBox
from asyncckpt.planning.shard_ownership import BoxDuty, ShardDuty, disagreement
from asyncckpt.planning.write_agreement import Agreement, DutyKind
from asyncckpt.sharding.mesh_layout import Box
from asyncckpt.state_dict.flatten import Flattened, ShardLeaf, check_keys, flatten
from asyncckpt.state_dict.leaf_codecs import check_dcp_items
from asyncckpt.state_dict.stateful import Openings
from asyncckpt.state_dict.structure_match import match
from asyncckpt.torch_tensors import check_memory_is_real, dtype_name


class Order(NamedTuple):
    """What is written of one tensor.

    Attributes:
        key: The tensor.
        stored: Under which name.
        boxes: What, in the tensors that are here.
        shared: What is compared with other ranks'.
        is_news: The other ranks are to be told.
        origins: Of a shard, aligned with `boxes`: where the part that a box is cut from begins in the whole tensor.
    """

    key: TensorKey
    stored: str
    boxes: tuple[TensorBox, ...]
    shared: tuple[SharedTensor, ...] = ()
    is_news: bool = False
    origins: tuple[tuple[int, ...], ...] = ()


def shard_order(number: int, key: TensorKey, leaf: ShardLeaf, rank: int, agreement: Agreement | None) -> Order:
    """Return what is written of a shard.

    Raises:
        RanksDisagreeError, OverlappingShardsError: The ranks contradict each other about this name.
    """
    fqn, dtype, _ = key
    if agreement is None or agreement.world_size == 1:
        duties = tuple(BoxDuty(((0, -1),)) for _ in leaf.boxes)
        duty = ShardDuty(duties, None, False)
    else:
        claim = leaf.claim(fqn, dtype)
        if claim.of_rank(rank) != leaf.boxes:
            text = f"rank {rank} of the checkpointer holds another shard of {fqn!r} than rank {rank} of its mesh"
            raise disagreement(text + "; number the ranks as torch.distributed does", [rank])
        duty = agreement.shards.duty(rank, claim)
    boxes, origins, shared = [], [], []
    for box, source, told in zip(leaf.boxes, leaf.sources, duty.boxes, strict=True):
        offsets, sizes = box
        for first, n_rows in told.rows:
            cut = ((0,) * len(sizes), sizes) if n_rows < 0 else box_of_rows(sizes, first, n_rows)
            boxes.append(TensorBox(source, *cut))
            origins.append(offsets)
        if told.shared and duty.turn is not None:
            name, n_elements = box_name(fqn, box), math.prod(sizes)
            itemsize = DTYPES[dtype].itemsize
            shared.append(SharedTensor(name, source, told.split, duty.turn, n_elements, itemsize))
    return Order(key, fqn, tuple(boxes), tuple(shared), duty.is_news, tuple(origins))


def box_name(fqn: str, box: Box) -> str:
    """Return what a box of a tensor is called where ranks compare it: `FQN [first:end,...]`."""
    offsets, sizes = box
    return f"{fqn} [{','.join(f'{o}:{o + s}' for o, s in zip(offsets, sizes, strict=True))}]"


def cut_to_size(order: Order, max_nbytes: int) -> Order:
    """Return `order` with boxes of at most `max_nbytes` where cuts between rows, and inside of them, can do that."""
    itemsize = DTYPES[order.key[1]].itemsize
    if all(math.prod(box.sizes) * itemsize <= max_nbytes for box in order.boxes):
        return order
    boxes: list[TensorBox] = []
    origins: list[tuple[int, ...]] = []
    for n, box in enumerate(order.boxes):
        pieces = list(_cuts(box, max(1, max_nbytes // itemsize)))
        boxes += pieces
        origins += order.origins[n : n + 1] * len(pieces)
    return order._replace(boxes=tuple(boxes), origins=tuple(origins))


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
    """Return the fingerprint of the structure of `flat`."""
    shards = tuple(flat.shards.get(n) for n in range(flat.n_numbers)) if flat.shards else ()
    kinds: dict[Any, Any] = {}  # one object for all tensors of a kind: there are few kinds, and many tensors
    found = ((t.dtype, t.shape) for t in flat.tensors)
    return flat.tree, tuple(kinds.setdefault(kind, kind) for kind in found), shards


def contribution_of(flat: Flattened) -> Contribution:
    """Return what the other ranks are told about `flat`, without digests.

    Raises:
        DuplicateNameError, UnsupportedLeafError: As `make_plan`.
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
) -> SavePlan:
    """Lay out what this rank writes of `flat`.

    Args:
        flat: The state dict.
        signature: `signature_of(flat)`.
        files_per_rank: Shard files to spread over.
        rank: Of this process.
        agreement: With the other ranks; None: there are none.
        max_shard_nbytes: No shard file is larger; None: as large as it gets.
        known: A plan of that structure under an earlier agreement; its very layout is kept where it is still the same.
        layout: What the shard files look like, one of `format.names.LAYOUTS`.

    Raises:
        ConfigError: No number of files is enough for `max_shard_nbytes`.
        DuplicateNameError: Two paths join to one FQN, or a name is reserved for tensors of one rank.
        UnsupportedLeafError: A key that the index cannot hold; or a leaf that the layout has no form for.
        RanksDisagreeError, OverlappingShardsError: What the ranks have said of a shard.
    """
    check_keys(flat.tree)
    _check_names(flat)
    if layout == DCP:
        check_dcp_items(flat.tree)
    own = flat.per_rank
    orders = [
        shard_order(number, key, flat.shards[number], rank, agreement)
        if number in flat.shards
        else _order(number, key, rank, None if number in own else agreement, is_own=number in own)
        for number, key in enumerate(_keys(flat))
    ]
    if max_shard_nbytes is not None:
        orders = [cut_to_size(order, _room_for(order, max_shard_nbytes, layout)) for order in orders]
    boxes, names = tuple(box for order in orders for box in order.boxes), tuple(order.stored for order in orders)
    news = tuple(number for number, order in enumerate(orders) if order.is_news)
    shared = _by_turn(shared for order in orders for shared in order.shared)
    specs = tuple(_spec(order, n) for order in orders for n in range(len(order.boxes)))
    if known is not None and (known.boxes, known.specs, known.names) == (boxes, specs, names):
        return replace(known, agreement=agreement, news=news, shared=shared)
    build = build_dcp_layout if layout == DCP else build_layout
    placed = build(specs, n_parts=files_per_rank, max_nbytes=max_shard_nbytes)
    chunks = iter(placed.chunks)
    structure = Structure(
        tree=flat.tree,
        tensors=tuple(
            TensorEntry(
                fqn=order.stored,
                dtype=order.key[1],
                global_shape=order.key[2],
                chunks=tuple(next(chunks) for _ in order.boxes),
            )
            for order in orders
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
        news=news,
        shared=shared,
    )


def _room_for(order: Order, max_nbytes: int, layout: str) -> int:
    return room_for_dcp(max_nbytes) if layout == DCP else room_for(order.stored, len(order.key[2]), max_nbytes)


def _by_turn(shared: Iterable[SharedTensor]) -> dict[Turn, tuple[SharedTensor, ...]]:
    found: dict[Turn, list[SharedTensor]] = {}
    for tensor in shared:
        found.setdefault(tensor.turn, []).append(tensor)
    return {turn: tuple(tensors) for turn, tensors in found.items()}


@functools.cache
def _origin(n_dims: int) -> tuple[int, ...]:
    return (0,) * n_dims


def _order(number: int, key: TensorKey, rank: int, agreement: Agreement | None, *, is_own: bool) -> Order:
    fqn, dtype, shape = key
    whole = (TensorBox(number, _origin(len(shape)), shape),)
    if agreement is None:
        return Order(key, per_rank_name(fqn, rank) if is_own else fqn, whole)
    duty = agreement.duty(rank, fqn, dtype, shape)
    if duty.kind is DutyKind.SOLE:
        return Order(key, fqn, whole)
    if duty.kind is not DutyKind.SHARED:
        return Order(key, per_rank_name(fqn, rank), whole, is_news=duty.kind is DutyKind.NEWS)
    boxes = tuple(TensorBox(number, *box_of_rows(shape, first, n_rows)) for first, n_rows in duty.pieces)
    turn = agreement.turn(fqn, dtype, shape)
    shared = SharedTensor(fqn, number, duty.split, turn, math.prod(shape), DTYPES[dtype].itemsize)
    return Order(key, fqn, boxes, (shared,))


def _spec(order: Order, n: int) -> BoxSpec:
    _, dtype, shape = order.key
    box, offsets = order.boxes[n], order.boxes[n].offsets
    if order.origins:
        offsets = tuple(map(add, offsets, order.origins[n]))
    return BoxSpec(fqn=order.stored, dtype=dtype, global_shape=shape, offsets=offsets, sizes=box.sizes)


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
                f"two leaves of the state dict are both called {fqn!r} once their keys are joined by dots "
                f"(one of them is at {path!r}); rename a key",
                fqn=fqn,
            )
        if node[0] != "O" and is_reserved(fqn):
            raise DuplicateNameError(
                f"the tensor {fqn!r} ends in '@rank' and a number: such names are reserved for tensors that belong to "
                "one rank; rename the key",
                fqn=fqn,
            )
        seen.add(fqn)


class PlanCache:
    """The last few plans, by structure; the least recently used goes first. Not thread-safe: one trainer thread."""

    MAX_PLANS = 8
    """Chosen, not measured: full state, weights only, a second model, and room."""

    def __init__(
        self,
        *,
        files_per_rank: int,
        rank: int = 0,
        agreement: Agreement | None = None,
        allow_pickle: bool = False,
        max_shard_nbytes: int | None = None,
        layout: str = SAFETENSORS,
    ) -> None:
        self._files_per_rank, self._rank, self._agreement = files_per_rank, rank, agreement
        self._allow_pickle, self._max_shard_nbytes, self._layout = allow_pickle, max_shard_nbytes, layout
        self._plans: OrderedDict[int, SavePlan] = OrderedDict()
        self.made = 0

    @property
    def agreement(self) -> Agreement | None:
        """With the other ranks; after another one is set, each plan is looked through when it is next taken."""
        return self._agreement

    @agreement.setter
    def agreement(self, agreement: Agreement | None) -> None:
        self._agreement = agreement

    def flatten(self, state_dict: Any, openings: Openings) -> Flattened:
        """Take `state_dict` apart as `take` does, without a plan.

        Args:
            state_dict: The state.
            openings: Of this save: `state_dict()` of each object is called once, whatever else looks at the state.

        Raises:
            UnsupportedLeafError: Something in it cannot be stored.
        """
        check_memory_is_real("save")
        flat = flatten(state_dict, openings, allow_pickle=self._allow_pickle)
        if self._layout == DCP:  # before the other ranks are met
            check_dcp_items(flat.tree)
        return flat

    def take(self, state_dict: Any, openings: Openings | None = None) -> tuple[SavePlan, Flattened]:
        """Take `state_dict` apart and return the plan of its structure, making it when it is new.

        Args:
            state_dict: The state.
            openings: As for `flatten`; None: nobody else looks at the state.

        Raises:
            UnsupportedLeafError: Something in it cannot be stored.
            DuplicateNameError: As `make_plan`.
        """
        check_memory_is_real("save")
        openings = openings or Openings()
        for key in reversed(self._plans):
            plan = self._plans[key]
            flat = match(*plan.signature, state_dict, openings, allow_pickle=self._allow_pickle)
            if flat is not None:
                if plan.agreement is not self._agreement:
                    plan = self._make(flat, plan.signature, plan)
                    self._plans[key] = plan
                self._plans.move_to_end(key)
                return plan, flat
        flat = flatten(state_dict, openings, allow_pickle=self._allow_pickle)
        signature = signature_of(flat)
        key = hash(signature)
        found = self._plans.get(key)
        if found is None or found.signature != signature or found.agreement is not self._agreement:
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
            agreement=self._agreement,
            max_shard_nbytes=self._max_shard_nbytes,
            known=known,
            layout=self._layout,
        )
        self.made += known is None or made.layout is not known.layout
        return made
