"""What a save asks of the worker, as it is written into the slot when that is sealed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from asyncckpt.client.slot import LentSlot
from asyncckpt.config import CheckpointerConfig, RankInfo
from asyncckpt.format.names import SaveId
from asyncckpt.planning.replica_checks import NO_SAMPLES, Samples, sample_digests
from asyncckpt.planning.save_plan import SavePlan
from asyncckpt.protocol.request import SaveRequest, encode_request
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
        return StructureReport(plan.fingerprint, samples, bool(plan.news))


NOTHING_TO_REPORT = StructureReport("", NO_SAMPLES, changed=False)
"""What a rank without others reports."""


class Requests:
    """Builds them.

    Args:
        rank: Of this process.
        config: For writing options.
        package: asyncckpt's version.
    """

    def __init__(self, rank: RankInfo, config: CheckpointerConfig, package: str) -> None:
        self._rank, self._config, self._package = rank, config, package

    def build(
        self,
        plan: SavePlan,
        objects: bytes,
        save_id: SaveId,
        umask: int,
        report: StructureReport,
        kw: Mapping[str, Any],
        *,
        asks_hooks: bool,
    ) -> SaveRequest:
        """Return the request of one save.

        Args:
            plan, objects, save_id, umask, report: Of the save.
            kw: `path`, `step` and `metadata`.
            asks_hooks: The commit waits for `pre_commit`.
        """
        return SaveRequest(
            save_id=str(save_id),
            step=kw["step"],
            path=kw["path"],
            rank=self._rank.rank,
            world_size=self._rank.world_size,
            parts=plan.part_ranges(),
            structure=plan.structure,
            objects=objects,
            n_tensors=plan.n_tensors,
            metadata=json.dumps(kw.get("metadata") or {}, allow_nan=False),
            fsync=self._config.fsync,
            overwrite=self._config.overwrite,
            umask=umask,
            write_threads=self._config.write_threads or 0,
            package=self._package,
            commit_timeout_s=self._config.commit_timeout_s,
            hook_timeout_s=self._config.hook_timeout_s if asks_hooks else 0.0,
            plan=report.plan,
            samples=report.samples.encode(),
            changed=report.changed,
            layout=self._config.layout,
        )


def seal_with(slot: LentSlot, offset: int, asked: SaveRequest, samples: Samples, transfer: Transfer) -> None:
    """Seal a slot whose request waits for what is compared on devices; it is as long as it was with zeros.

    Raises:
        RuntimeError: From a device.
    """
    request = encode_request(replace(asked, samples=samples.completed(transfer.fetch()).encode()))
    slot.memory.control.seal(request, offset)
