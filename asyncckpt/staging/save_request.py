"""What a save asks of who writes it: the worker, which finds it in the sealed slot, or this process."""

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
from asyncckpt.format.objects import encode_objects
from asyncckpt.planning.replica_checks import NO_SAMPLES, Samples, sample_digests
from asyncckpt.planning.save_plan import SavePlan
from asyncckpt.protocol.request import PartRange, SaveRequest, encode_request
from asyncckpt.staging.device_copy import Transfer
from asyncckpt.state_dict.flatten import Flattened


class StructureReport(NamedTuple):
    """What a rank tells the worker about replicas and structure: `SaveRequest`'s fields of the same names."""

    plan: str
    samples: Samples
    changed: bool


class StructureReporter:
    """Makes the reports.

    Args:
        config: For `replicated`.
        is_apart: Says of which tensors samples are left to the engine.
    """

    def __init__(self, config: CheckpointerConfig, is_apart: Callable[[torch.Tensor], bool]) -> None:
        self._checked, self._is_apart = config.replicated == "check", is_apart

    def report(self, plan: SavePlan, flat: Flattened, sequence: int) -> StructureReport:
        """Return what a save tells."""
        if plan.agreement is None:
            return NOTHING_TO_REPORT
        samples = sample_digests(plan, flat, sequence, self._is_apart) if self._checked else NO_SAMPLES
        return StructureReport(plan.fingerprint, samples, bool(plan.unagreed))


NOTHING_TO_REPORT = StructureReport("", NO_SAMPLES, changed=False)
"""What a rank without others reports."""


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
) -> SaveRequest:
    """Return the request of one rank's part of a save, with or without a worker.

    Args:
        config: For writing options.
        rank: Of this process in the save.
        save_id, path, step, parts, structure, n_tensors: As `SaveRequest` has them.
        leaves: What the objects file holds.
        metadata: The user's.
        report: About replicas and structure.
        asks_hooks: The commit waits for `pre_commit`.

    Raises:
        ValueError: The metadata are no JSON.
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
    )


def seal_with(slot: Slot, offset: int, asked: SaveRequest, samples: Samples, transfer: Transfer) -> None:
    """Seal a slot whose request waits for what is compared on devices; it is as long as it was with zeros.

    Raises:
        RuntimeError: From a device.
    """
    request = encode_request(replace(asked, samples=samples.completed(transfer.fetch_replica_windows()).encode()))
    slot.memory.control.seal(request, offset)
