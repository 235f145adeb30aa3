"""When a copy behind the training finds a core for itself."""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch")

from asyncckpt.errors import ConfigError  # noqa: E402
from asyncckpt.staging.overlap import LOCAL_RANKS, has_idle_core, local_ranks  # noqa: E402


@pytest.mark.parametrize(
    ("cores", "threads", "ranks", "spare"),
    [
        (2, 2, None, False),
        (2, 1, None, True),
        (2, 1, "2", False),
        (1, 1, None, False),
        (64, 64, "1", False),
        (64, 7, "8", True),
        (64, 8, "8", False),
    ],
)
def test_cores_that_no_rank_s_threads_use_are_to_spare(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: int, ranks: str | None, spare: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.delenv(LOCAL_RANKS, raising=False)
    if ranks is not None:
        monkeypatch.setenv(LOCAL_RANKS, ranks)
    assert has_idle_core() is spare


def test_where_a_gpu_computes_the_host_s_cores_are_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10_000)
    assert has_idle_core()


@pytest.mark.parametrize(("text", "ranks"), [("3", 3), ("0", 1), ("", 1), ("-2", 1), ("many", 1), ("\u0663", 1)])
def test_what_a_launcher_says_of_the_node_s_ranks(text: str, ranks: int) -> None:
    assert local_ranks({LOCAL_RANKS: text}) == ranks


def test_more_digits_than_python_reads_are_a_typed_error() -> None:
    with pytest.raises(ConfigError, match="LOCAL_WORLD_SIZE has 5000 digits") as caught:
        local_ranks({LOCAL_RANKS: "9" * 5000})
    assert caught.value.field == LOCAL_RANKS


def test_without_a_launcher_a_process_trains_alone() -> None:
    assert local_ranks({}) == 1
