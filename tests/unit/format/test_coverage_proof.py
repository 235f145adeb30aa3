"""The proof before a commit: holes, doubles and contradictions among the ranks' structures."""

from __future__ import annotations

import gc
import itertools
import time
from dataclasses import replace

import pytest
from protocol_samples import REQUEST
from simulated_workers import result_of

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format import layout
from asyncckpt.format.coverage import uncovered
from asyncckpt.format.structure import Structure, TensorEntry, encode_structure
from asyncckpt_worker.core.nodes.tables import pack_result, unpack_result
from asyncckpt_worker.io import coverage_check
from asyncckpt_worker.io.coverage_check import Prover, coverage_error

Piece = tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""FQN, dtype, global shape, offsets, sizes."""


def structure(*pieces: Piece) -> bytes:
    """Return one rank's structure."""
    specs = [layout.BoxSpec(fqn=f, dtype=d, global_shape=g, offsets=o, sizes=s) for f, d, g, o, s in pieces]
    placed = layout.build_layout(specs, n_parts=1)
    entries = tuple(
        TensorEntry(fqn=s.fqn, dtype=s.dtype, global_shape=s.global_shape, chunks=(c,))
        for s, c in zip(specs, placed.chunks, strict=True)
    )
    leaves = [part for n, p in enumerate(pieces) for part in (p[0], ("T", n))]
    parts = tuple(p.nbytes for p in placed.parts)
    return encode_structure(Structure(tree=("d", tuple(leaves)), tensors=entries, n_objects=0, part_nbytes=parts))


WHOLE = ("w", "float32", (4, 3), (0, 0), (4, 3))
TOP = ("w", "float32", (4, 3), (0, 0), (2, 3))
BOTTOM = ("w", "float32", (4, 3), (2, 0), (2, 3))
OTHER = ("v", "float32", (2,), (0,), (2,))


@pytest.mark.parametrize("ranks", [[[WHOLE]], [[TOP], [BOTTOM]], [[BOTTOM, OTHER], [TOP]], [[WHOLE], [OTHER]], []])
def test_tensors_that_are_covered_exactly_once_pass(ranks: list[list[Piece]]) -> None:
    assert uncovered([structure(*pieces) for pieces in ranks]) == []


@pytest.mark.parametrize(
    ("ranks", "word"),
    [
        ([[TOP], [OTHER]], "6 of 12"),
        ([[TOP, OTHER], [WHOLE]], "twice"),
        ([[WHOLE], [WHOLE]], "twice"),
        ([[WHOLE], [("w", "float64", (4, 3), (0, 0), (4, 3))]], "float64"),
        ([[TOP], [("w", "float32", (2, 3), (0, 0), (2, 3))]], "rank 1"),
    ],
)
def test_tensor_that_is_not_is_named_with_its_fault(ranks: list[list[Piece]], word: str) -> None:
    ((name, fault),) = uncovered([structure(*pieces) for pieces in ranks])
    assert name == "w" and word in fault


def test_every_fault_is_found() -> None:
    half = ("v", "float32", (2,), (0,), (1,))
    assert [name for name, _ in uncovered([structure(half, TOP), structure((*OTHER[:3], (1,), (1,)))])] == ["w"]
    assert [name for name, _ in uncovered([structure(TOP, half)])] == ["w", "v"]


def test_proof_is_made_once_and_a_fault_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(
        coverage_check, "uncovered", lambda found, *a, **k: calls.append(len(found)) or uncovered(found, *a, **k)
    )
    prover = Prover()
    good = [replace(REQUEST, structure=structure(piece)) for piece in (TOP, BOTTOM)]
    assert [prover.faults(good) for _ in range(3)] == [[], [], []] and calls == [2]
    for _ in range(2):
        error = coverage_error(good[0], prover.faults(good[:1]))
        assert (error.code, error.save_id) == ("coverage", REQUEST.save_id) and "'w'" in error.detail  # type: ignore[attr-defined]
    assert calls == [2, 1, 1]


def test_proofs_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage_check, "MAX_PROOFS", 3)
    prover = Prover()
    for n in range(6):
        prover.faults([replace(REQUEST, structure=structure((f"t{n}", "float32", (2,), (0,), (2,))))])
    assert len(prover._proved) == 3


def test_a_structure_is_decoded_before_its_files_are_written_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prover, calls = Prover(), []
    monkeypatch.setattr(coverage_check, "decode_structure", calls.append)
    for _ in range(3):
        prover.check(replace(REQUEST, structure=structure(WHOLE)))
    assert len(calls) == 1
    monkeypatch.undo()
    with pytest.raises(CorruptCheckpointError):
        prover.check(replace(REQUEST, structure=b"no structure"))


def test_the_collector_is_off_while_a_structure_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(coverage_check, "decode_structure", lambda data: seen.append(gc.isenabled()))
    Prover().check(replace(REQUEST, structure=structure(WHOLE)))
    assert seen == [False] and gc.isenabled()


@pytest.mark.parametrize("mesh", [(4096,), (64, 64), (16, 16, 16)])
def test_thousands_of_boxes_of_a_mesh_are_proved_in_a_moment(mesh: tuple[int, ...]) -> None:
    shape = tuple(2 * n for n in mesh)
    cells = [tuple(2 * c for c in cell) for cell in itertools.product(*map(range, mesh))]
    ranks = [structure(("w", "int8", shape, cell, (2,) * len(mesh))) for cell in cells]
    began = time.process_time()
    assert uncovered(ranks) == []
    assert time.process_time() - began < 2, "the pairs of boxes were compared"
    ((_, fault),) = uncovered(ranks[1:])
    assert "are stored" in fault


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_left_as_it_was(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        assert uncovered([]) == [] and gc.isenabled() is enabled
        with pytest.raises(CorruptCheckpointError):
            uncovered([b"\xc1"])
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_tallies_made_beside_the_ranks_are_all_that_a_commit_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [replace(REQUEST, rank=n, structure=structure(piece)) for n, piece in enumerate((TOP, BOTTOM))]
    tallies = [Prover().check(request) for request in requests]
    monkeypatch.setattr(coverage_check, "decode_structure", lambda data: pytest.fail("it was decoded again"))
    assert Prover().faults(requests, tallies) == []
    assert [name for name, _ in Prover().faults([requests[0]] * 2, [tallies[0]] * 2)] == ["w"]


def test_tallies_of_one_run_are_not_those_of_another() -> None:
    one, other = (replace(REQUEST, save_id=f"000001-00000001-{run * 12}", structure=structure(TOP)) for run in "ab")
    prover = Prover()
    assert prover.check(one) is prover.check(one) and prover.check(one) != prover.check(other)


def test_tallies_that_are_remembered_are_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage_check, "MAX_TALLIES_NBYTES", 25)
    prover = Prover()
    for n in range(6):
        prover.check(replace(REQUEST, structure=structure((f"t{n}", "float32", (2,), (0,), (2,)))))
    assert len(prover._decoded) == 2 and prover._nbytes == 20


def test_a_text_about_a_hole_names_the_missing_box_and_its_neighbours_and_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    middle = ("w", "float32", (4, 3), (2, 0), (1, 3))
    requests = [replace(REQUEST, rank=n, structure=structure(piece)) for n, piece in enumerate((TOP, middle))]
    error = coverage_error(requests[0], Prover().faults(requests))
    assert "[3:4,0:3] is missing (rank 1 holds [2:3,0:3] beside it)" in str(error)
    assert len(coverage_error(requests[0], [("w" * 100_000, "torn")]).detail) == coverage_check.MAX_DETAIL_CHARS


@pytest.mark.parametrize(
    "tally",
    [{"kinds": b"x" * 15, "sums": b""}, {"kinds": b"x" * 16, "sums": b"x"}, {"kinds": "x" * 16, "sums": b""}, {}, 7],
)
def test_a_tally_of_another_worker_that_cannot_be_is_refused(tally: object) -> None:
    result = {**pack_result(result_of(REQUEST.save_id, 0)), "tally": tally}
    with pytest.raises((ValueError, TypeError, KeyError)):
        unpack_result(result, REQUEST.save_id, 0)


def test_a_tally_travels_with_the_result_of_a_rank() -> None:
    tally = Prover().check(replace(REQUEST, structure=structure(TOP)))
    result = replace(result_of(REQUEST.save_id, 0), tally=tally)
    assert unpack_result(pack_result(result), REQUEST.save_id, 0).tally == tally
