"""`benchmarks.overlap`: what `--also` names."""

from __future__ import annotations

import argparse

import pytest

pytest.importorskip("torch")

from asyncckpt.staging import deferred
from benchmarks import overlap
from benchmarks.overlap import Kind


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("worker=nice0", Kind(worker="nice0")),
        ("worker=idle,bandwidth=2.5G", Kind(worker="idle", bandwidth=2_500_000_000)),
        ("bandwidth=800M", Kind(bandwidth=800_000_000)),
        ("threads=1,worker=batch", Kind(pace=deferred.BEHIND._replace(threads=1), worker="batch")),
    ],
)
def test_another_kind_has_another_priority_bandwidth_or_pace(text: str, kind: Kind) -> None:
    assert overlap.kind_of(text) == kind


@pytest.mark.parametrize(
    "text", ["worker=nice20", "worker=rt", "worker=nice", "speed=1", "threads=x", "bandwidth=1", "bandwidth=fast", ""]
)
def test_what_is_no_kind_is_refused(text: str) -> None:
    with pytest.raises((ValueError, argparse.ArgumentTypeError)):
        overlap.kind_of(text)


def test_steps_beside_a_save_are_compared_with_quiet_ones_of_their_round() -> None:
    def save(*steps_s: float) -> dict[str, object]:
        phases = {"total": 1.0}
        return {"save_s": 0.1, "wait_s": 0.0, "steps_s": steps_s, "until_written_s": 5.0, "phases_s": phases}

    rounds = [
        {"quiet_step_s": [1.0, 1.0, 3.0], "overlap": [save(1.5, 1.5)], "worker=idle": [save(1.0)]},
        {"quiet_step_s": [2.0], "overlap": [save(3.0)], "worker=idle": [save(2.0)]},
    ]
    found = overlap.summary({"kinds": ["overlap", "worker=idle"], "rounds": rounds, "first_save": {}})
    assert found["step while saving over quiet, overlap, x"] == 1.5
    assert found["step while saving over quiet, worker=idle, x"] == 1.0
