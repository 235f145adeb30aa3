"""What a save tells the worker of its structure: which plan it follows, samples, and whether the rank has changed."""

from __future__ import annotations

import torch
from simulated_ranks import Ranks

from asyncckpt.config import CheckpointerConfig
from asyncckpt.planning.planner import PlanCache
from asyncckpt.staging.save_request import NOTHING_TO_REPORT, StructureReporter

REPORTER = StructureReporter(CheckpointerConfig(), lambda tensor: False)
STATE = {"w": torch.arange(6.0)}


def test_a_rank_says_that_it_has_changed_until_the_ranks_have_met() -> None:
    ranks = Ranks(2)
    ranks.exchange([STATE, STATE])
    assert [REPORTER.report(*plans.plan_for(STATE), 0).changed for plans in ranks.plans] == [False, False]
    more = {**STATE, "m": torch.arange(4.0)}
    reports = [
        REPORTER.report(*plans.plan_for(state), 1) for plans, state in zip(ranks.plans, (STATE, more), strict=True)
    ]
    assert [report.changed for report in reports] == [False, True]
    ranks.exchange([STATE, more])
    assert [REPORTER.report(*plans.plan_for(more), 2).changed for plans in ranks.plans[1:]] == [False]


def test_a_rank_that_lacks_something_has_not_changed() -> None:
    """Full states and weights are saved in turn; what no rank writes fails the save by its coverage."""
    ranks, more = Ranks(2), {**STATE, "m": torch.arange(4.0)}
    ranks.exchange([more, more])
    assert [REPORTER.report(*plans.plan_for(STATE), 1).changed for plans in ranks.plans] == [False, False]


def test_a_rank_without_others_has_nothing_to_report() -> None:
    plan, flat = PlanCache(files_per_rank=1).plan_for(STATE)
    assert REPORTER.report(plan, flat, 0) == NOTHING_TO_REPORT
