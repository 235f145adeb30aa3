"""Which rank this process is."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from asyncckpt.config import RankInfo
from asyncckpt.distributed.process_group import find_rank_info
from asyncckpt.errors import ConfigError


def test_without_any_hint_it_is_rank_zero_of_one() -> None:
    assert find_rank_info(None, {}) == RankInfo(0, 1)


def test_what_was_given_wins_over_torchrun_s_environment() -> None:
    found = find_rank_info(RankInfo(0, 1), {"RANK": "3", "WORLD_SIZE": "4"})
    assert found == RankInfo(0, 1)
    assert type(found) is RankInfo


@pytest.mark.parametrize("given", [(0, 1), [0, 1], 3, "0,1", (0,), RankInfo(1, 1), RankInfo(True, 1)])
def test_what_is_no_rank_info_is_refused_by_name(given: Any) -> None:
    with pytest.raises(ConfigError, match="RankInfo"):
        find_rank_info(given, {})


def test_torchrun_s_environment_is_taken() -> None:
    assert find_rank_info(None, {"RANK": "3", "WORLD_SIZE": "4"}) == RankInfo(3, 4)


@pytest.mark.parametrize("environ", [{"RANK": "x"}, {"WORLD_SIZE": ""}])
def test_unreadable_environment_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="no number"):
        find_rank_info(None, environ)


def test_an_initialised_process_group_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    assert find_rank_info(None, {"RANK": "0", "WORLD_SIZE": "1"}) == RankInfo(1, 2)


def test_a_rank_outside_its_world_is_refused_by_the_variables_names() -> None:
    with pytest.raises(ConfigError, match="RANK=1 with WORLD_SIZE=1"):
        find_rank_info(None, {"RANK": "1"})
