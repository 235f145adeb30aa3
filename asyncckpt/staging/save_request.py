"""Builds the request of a save: what to write, and how. The worker reads it from the sealed slot."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from asyncckpt import __version__
from asyncckpt.basics.paths import current_umask
from asyncckpt.client.slot import Slot
from asyncckpt.config import CheckpointerConfig, RankInfo
from asyncckpt.format.names import SaveId
from asyncckpt.format.objects import context_digest, encode_objects, sharded_names
from asyncckpt.format.state_tree import composite_nodes
from asyncckpt.format.structure import encoded_with_digests
from asyncckpt.planning.replica_checks import NO_SAMPLES, Samples, sample_digests
from asyncckpt.planning.save_plan import SavePlan
from asyncckpt.protocol.request import PartRange, SaveRequest, encode_request
from asyncckpt.staging.device_copy import Transfer
from asyncckpt.state_dict.flatten import Flattened


class StructureReport(NamedTuple):
    """What a rank reports about replicas and structure: the fields of `SaveRequest` of the same names."""

    plan: str
    samples: Samples
    changed: bool


class StructureReporter:
    """Makes the structure reports of a checkpointer's saves.

    Args:
        config: For `replicated`.
        is_on_device: Whether a tensor lies on a device: its samples are read with the copy.
    """

    def __init__(self, config: CheckpointerConfig, is_on_device: Callable[[torch.Tensor], bool]) -> None:
        self._checked, self._is_on_device = config.replicated == "check", is_on_device

    def report(self, plan: SavePlan, flat: Flattened, sequence: int) -> StructureReport:
        """Return the report of a save."""
        if plan.agreement is None:
            return NOTHING_TO_REPORT
        samples = sample_digests(plan, flat, sequence, self._is_on_device) if self._checked else NO_SAMPLES
        return StructureReport(plan.fingerprint, samples, bool(plan.unagreed))


MAX_STRUCTURES = 8
"""Of how many structures `ContextDigests` knows the digests: as many as `PlanCache` keeps plans."""


class _KnownStructure(NamedTuple):
    """What is known of a plan's structure.

    Attributes:
        components: By number of the object of each of its composite tensors, the names of the tensor's components.
        text: JSON text of these objects, of the latest save.
        encoded: The structure with the digests of their contexts.
    """

    components: Mapping[int, tuple[str, ...]]
    text: str
    encoded: bytes


class ContextDigests:
    """Puts the digests of the contexts of sharded composite tensors into the structures of a checkpointer's saves.

    A plan does not depend on values, so its structure has none. They are computed again when a context has changed.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, _KnownStructure] = {}

    def structure_of(self, plan: SavePlan, leaves: Sequence[Any]) -> bytes:
        """Return the structure of a save with `plan`, whose objects are `leaves` in JSON, by number."""
        plain = plan.structure
        known = self._known.get(plain)
        if known is None:
            if len(self._known) >= MAX_STRUCTURES:
                self._known.clear()
            components = {node[2]: node[1][::2] for _, node in composite_nodes(plan.signature[0])}
            known = self._known[plain] = _KnownStructure(components, "", plain)
        objects = [leaves[n] for n in known.components]
        text = json.dumps(objects)  # the values are not enough: 1, 1.0 and True are equal
        if text != known.text:
            found = zip(known.components.items(), objects, strict=True)
            digests = {n: context_digest(raw, names) for (n, names), raw in found if sharded_names(raw)}
            encoded = encoded_with_digests(plain, digests) if digests else plain
            known = self._known[plain] = _KnownStructure(known.components, text, encoded)
        return known.encoded


NOTHING_TO_REPORT = StructureReport("", NO_SAMPLES, changed=False)
"""The report of a single rank."""


def build_request(
    config: CheckpointerConfig,
    rank: RankInfo,
    save_id: SaveId,
    *,
    path: str,
    step: int | None,
    parts: tuple[PartRange, ...],
    structure: bytes,
    n_tensors: int,
    leaves: Sequence[Any] = (),
    metadata: Mapping[str, Any] | None = None,
    report: StructureReport = NOTHING_TO_REPORT,
    asks_hooks: bool = False,
    mirror: str = "",
) -> SaveRequest:
    """Return the request of one rank's part of a save, with or without a worker.

    Args:
        config: For writing options.
        rank: Rank of this process in the save.
        save_id, path, step, parts, structure, n_tensors: The fields of `SaveRequest`.
        leaves: Contents of the objects file.
        metadata: The user's metadata.
        report: Report about replicas and structure.
        asks_hooks: Whether the commit waits for `pre_commit`.
        mirror: Where the checkpoint is copied to; "": nowhere.

    Raises:
        ValueError: The metadata cannot be encoded as JSON.
    """
    return SaveRequest(
        save_id=str(save_id),
        step=step,
        path=path,
        rank=rank.rank,
        world_size=rank.world_size,
        parts=parts,
        structure=structure,
        objects=encode_objects(save_id, leaves),
        n_tensors=n_tensors,
        metadata=json.dumps(metadata or {}, allow_nan=False),
        fsync=config.fsync,
        overwrite=config.overwrite,
        umask=current_umask(),
        write_threads=config.write_threads or 0,
        package=__version__,
        commit_timeout_s=config.commit_timeout_s,
        hook_timeout_s=config.hook_timeout_s if asks_hooks else 0.0,
        plan=report.plan,
        samples=report.samples.encode(),
        changed=report.changed,
        layout=config.layout,
        mirror=mirror,
        reuse=config.reuse == "auto",
    )


def seal_with(slot: Slot, offset: int, asked: SaveRequest, samples: Samples, transfer: Transfer) -> None:
    """Complete a request with the samples of tensors on devices, and seal the slot with it.

    The request had zeros in their place, so its length does not change.

    Args:
        slot: The slot.
        offset: Offset of the request in the slot.
        asked: The request.
        samples: Its samples; those of tensors on devices are missing.
        transfer: The copies by devices, which have read these samples.

    Raises:
        RuntimeError: From a device.
    """
    request = encode_request(replace(asked, samples=samples.completed(transfer.fetch_replica_windows()).encode()))
    slot.memory.control.seal(request, offset)
