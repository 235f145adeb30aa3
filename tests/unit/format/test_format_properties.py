"""Properties of the format over generated values; a failure prints the value and how to replay it."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

hypothesis = pytest.importorskip("hypothesis")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from test_format_objects import same  # noqa: E402

from asyncckpt.dtypes import DTYPES  # noqa: E402
from asyncckpt.format.layout import PAGE_NBYTES, BoxSpec, build_layout  # noqa: E402
from asyncckpt.format.objects import decode_value, encode_value  # noqa: E402
from asyncckpt.format.structure import Structure, TensorEntry, decode_structure, encode_structure  # noqa: E402

HASHABLE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary(max_size=9) | st.floats(allow_nan=False),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
VALUES = st.recursive(
    HASHABLE | st.floats() | st.complex_numbers() | st.datetimes() | st.timedeltas() | st.dates() | st.times(),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(HASHABLE, inner, max_size=4),
    max_leaves=12,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4) | st.just("$"), inner, max_size=4),
    max_leaves=10,
)


@given(VALUES)
def test_any_value_comes_back_exactly(value: Any) -> None:
    assert same(decode_value(json.loads(json.dumps(encode_value(value), allow_nan=False))), value)


@given(JSON)
def test_any_json_is_a_value_or_refused(raw: Any) -> None:
    try:
        decode_value(raw)
    except ValueError:
        return


@st.composite
def box(draw: st.DrawFn) -> BoxSpec:
    """A box inside a tensor of up to three dimensions."""
    shape = draw(st.lists(st.integers(0, 9), max_size=3))
    offsets = [draw(st.integers(0, n)) for n in shape]
    sizes = [draw(st.integers(0, n - o)) for n, o in zip(shape, offsets, strict=True)]
    return BoxSpec(
        fqn=draw(st.text(max_size=6).filter(lambda t: t.isprintable())),
        dtype=draw(st.sampled_from(list(DTYPES))),
        global_shape=tuple(shape),
        offsets=tuple(offsets),
        sizes=tuple(sizes),
    )


@given(st.lists(box(), max_size=12), st.integers(1, 5))
def test_any_layout_gives_every_box_its_own_bytes(specs: list[BoxSpec], n_parts: int) -> None:
    placed = build_layout(specs, n_parts=n_parts)
    assert len(placed.chunks) == len(specs)
    ranges = sorted((c.part, c.offset_bytes, c.nbytes) for c in placed.chunks)
    end = {number: len(part.header) for number, part in enumerate(placed.parts)}
    for part, offset, nbytes in ranges:
        assert offset == end[part]
        end[part] += nbytes
    assert [end[n] for n in range(len(placed.parts))] == [p.nbytes for p in placed.parts]
    assert all(len(p.header) % PAGE_NBYTES == 0 for p in placed.parts)
    assert all(
        c.nbytes == math.prod(s.sizes) * DTYPES[s.dtype].itemsize for c, s in zip(placed.chunks, specs, strict=True)
    )
    in_file = [(c.part, s.fqn) for c, s in zip(placed.chunks, specs, strict=True)]
    assert len(set(in_file)) == len(in_file)


@given(st.lists(box(), max_size=8, unique_by=lambda s: s.fqn))
def test_any_structure_comes_back(specs: list[BoxSpec]) -> None:
    placed = build_layout(specs)
    structure = Structure(
        tree=("d", tuple(m for n in range(len(specs)) for m in (f"k{n}", ("T", n)))),
        tensors=tuple(
            TensorEntry(fqn=s.fqn, dtype=s.dtype, global_shape=s.global_shape, chunks=(c,))
            for s, c in zip(specs, placed.chunks, strict=True)
        ),
        n_objects=0,
        part_nbytes=tuple(p.nbytes for p in placed.parts),
    )
    assert decode_structure(encode_structure(structure)) == structure
