"""The slot is the file: layouts against safetensors itself, names, checksums, order of checkpoints."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import random
import warnings

import pytest
import torch
from format_samples import MANIFEST, SAVE_ID

from asyncckpt.dtypes import DTYPES, stored_as
from asyncckpt.errors import ConfigError, DuplicateNameError
from asyncckpt.format import checksums, layout, names
from asyncckpt.format.layout import BoxSpec, build_layout, save_id_bytes
from asyncckpt.format.manifest import newest
from asyncckpt.format.names import SaveId, owner_of

SHAPES = ((), (0,), (5,), (3, 0, 2), (2, 3), (1, 1, 7))


def _whole(fqn: str, dtype: str, sizes: tuple[int, ...]) -> BoxSpec:
    return BoxSpec(fqn=fqn, dtype=dtype, global_shape=sizes, offsets=(0,) * len(sizes), sizes=sizes)


def _specs() -> list[BoxSpec]:
    return [_whole(f"{d}.{'x'.join(map(str, s))}", d, s) for d in DTYPES if hasattr(torch, d) for s in SHAPES]


def _write(directory: pathlib.Path, specs: list[BoxSpec], payloads: list[bytes], n_parts: int) -> list[pathlib.Path]:
    placed = build_layout(specs, n_parts=n_parts)
    images = [bytearray(p.padded_nbytes) for p in placed.parts]
    for part, image in zip(placed.parts, images, strict=True):
        image[: len(part.header)] = part.header
        image[layout.SAVE_ID_OFFSET : layout.SAVE_ID_OFFSET + layout.SAVE_ID_NBYTES] = save_id_bytes(SAVE_ID)
    for chunk, payload in zip(placed.chunks, payloads, strict=True):
        assert chunk.nbytes == len(payload)
        images[chunk.part][chunk.offset_bytes : chunk.offset_bytes + chunk.nbytes] = payload
    paths = []
    for number, (part, image) in enumerate(zip(placed.parts, images, strict=True)):
        paths.append(directory / names.shard_name(SAVE_ID, 0, number))
        paths[-1].write_bytes(image[: part.nbytes])
    return paths


@pytest.mark.parametrize("n_parts", [1, 3])
def test_safetensors_opens_a_file_of_every_dtype_and_shape(
    tmp_path: pathlib.Path, rng: random.Random, n_parts: int
) -> None:
    safetensors = pytest.importorskip("safetensors")
    specs = _specs()
    payloads = [rng.randbytes(s.nbytes) for s in specs]
    paths = _write(tmp_path, specs, payloads, n_parts)
    assert len(paths) == n_parts
    found = {}
    for path in paths:
        with safetensors.safe_open(path, framework="pt") as file:
            assert file.metadata()["asyncckpt_save_id"] == str(SAVE_ID)
            assert set(json.loads(file.metadata()["DCP_SHARDING_INFO"])) == set(file.keys())
            found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    assert set(found) == {s.fqn for s in specs}
    for spec, payload in zip(specs, payloads, strict=True):
        stored, shape = stored_as(spec.dtype, spec.sizes)
        tensor = found[spec.fqn]
        assert tuple(tensor.shape) == shape
        assert stored == "U8" or str(tensor.dtype) == f"torch.{spec.dtype}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            raw = tensor.contiguous().reshape(-1).view(torch.uint8)
        assert bytes(raw.tolist()) == payload


def test_data_are_aligned_and_without_gaps() -> None:
    specs = _specs()
    (part,) = build_layout(specs).parts
    chunks = sorted(zip(build_layout(specs).chunks, specs, strict=True), key=lambda c: (c[0].offset_bytes, c[0].nbytes))
    assert len(part.header) % layout.PAGE_NBYTES == 0
    assert int.from_bytes(part.header[:8], "little") + 8 == len(part.header)
    end = len(part.header)
    for chunk, spec in chunks:
        assert chunk.offset_bytes == end
        assert chunk.nbytes == 0 or chunk.offset_bytes % DTYPES[spec.dtype].itemsize == 0
        end += chunk.nbytes
    assert part.nbytes == end
    assert part.padded_nbytes == layout.round_up(end)


def test_layout_depends_on_the_specs_only() -> None:
    assert build_layout(_specs(), n_parts=3) == build_layout(_specs(), n_parts=3)


def test_boxes_of_one_tensor_go_to_different_files() -> None:
    halves = [
        BoxSpec(fqn="w", dtype="float32", global_shape=(8,), offsets=(o,), sizes=(4,)) for o in (0, 4)
    ]  # fmt: skip
    placed = build_layout(halves)
    assert sorted(c.part for c in placed.chunks) == [0, 1]
    for part, offset in zip(placed.parts, ([0], [4]), strict=True):
        header = json.loads(part.header[8:])
        assert json.loads(header["__metadata__"]["DCP_SHARDING_INFO"]) == {"w": {"saved_offsets": offset}}


def test_parts_are_balanced_and_never_empty() -> None:
    specs = [_whole(f"t{i}", "uint8", (1000 + i,)) for i in range(40)]
    sizes = [p.nbytes - len(p.header) for p in build_layout(specs, n_parts=4).parts]
    assert max(sizes) - min(sizes) <= 1040
    assert len(build_layout(specs[:2], n_parts=8).parts) == 2
    assert len(build_layout([_whole(f"e{i}", "uint8", (0,)) for i in range(4)], n_parts=4).parts) == 4


def test_layout_of_nothing_is_empty() -> None:
    assert build_layout([]) == layout.Layout(parts=(), chunks=())


def test_header_that_safetensors_would_refuse_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "MAX_HEADER_NBYTES", 8192)
    placed = build_layout([_whole(f"tensor{i}", "uint8", (1,)) for i in range(200)])
    assert len(placed.parts) > 1
    assert max(len(p.header) for p in placed.parts) <= 8192


def test_name_that_safetensors_keeps_is_refused() -> None:
    with pytest.raises(DuplicateNameError, match="__metadata__"):
        build_layout([_whole("__metadata__", "uint8", (1,))])


@pytest.mark.parametrize(
    "name",
    [
        names.shard_name(SAVE_ID, 0, 0),
        names.shard_name(SAVE_ID, 99_999, 999),
        names.index_name(SAVE_ID, 12),
        names.objects_name(SAVE_ID, 12),
        names.temporary_manifest_name(SAVE_ID),
        names.temporary_manifest_name(SAVE_ID, "0123456789ab"),
    ],
)
def test_own_files_are_known_by_name(name: str) -> None:
    assert owner_of(name) == SAVE_ID


@pytest.mark.parametrize(
    "name",
    [
        "manifest.json",
        "model.safetensors",
        f"rank-00000.{SAVE_ID}.safetensors",
        f"rank-00000-part-000.{SAVE_ID}.index",
        f"rank-00000-part-000.{SAVE_ID}.objects.json",
        f"rank-0-part-000.{SAVE_ID}.safetensors",
        f"rank-00000-part-000.{SAVE_ID}.safetensors.bak",
        f"rank-00000-part-000.{SAVE_ID}.safetensors\n",
        f"x-rank-00000.{SAVE_ID}.index",
        f"rank-00000.{str(SAVE_ID).upper()}.index",
        f"rank-0000\u0661.{SAVE_ID}.index",
        f"manifest.{SAVE_ID}.json",
    ],
)
def test_foreign_files_are_nobodys(name: str) -> None:
    assert owner_of(name) is None


@pytest.mark.parametrize(
    "text", ["", "1-2-3", "000003-00000014-0123456789AB", "000003-00000014-0123456789ab\n", "x" * 28]
)
def test_save_id_of_no_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a save id"):
        SaveId.parse(text)


def test_save_id_comes_back_and_sorts_by_lineage() -> None:
    ids = [SaveId(1, 900, "f" * 12), SaveId(2, 0, "0" * 12), SaveId(2, 1, "0" * 12)]
    assert [SaveId.parse(str(i)) for i in ids] == ids
    assert sorted(ids) == ids
    assert sorted(map(str, ids)) == [str(i) for i in ids]


def test_newest_is_by_lineage_and_not_by_step() -> None:
    old = dataclasses.replace(MANIFEST, step=900, save_id=SaveId(1, 9, "f" * 12))
    new = dataclasses.replace(MANIFEST, step=150, save_id=SaveId(2, 0, "0" * 12))
    assert newest([("new", new), ("old", old)]) == ("new", new)
    assert newest([]) is None


def test_checksums_are_the_ones_of_the_spec() -> None:
    assert checksums.block_digest(b"") == (0x2D06800538D394C2).to_bytes(8, "little")
    assert checksums.file_checksum(b"") == "xxh3_128:99aa06d3014798d86001c324468d497f"
    assert checksums.is_file_checksum(checksums.file_checksum(b"x"))
    assert not checksums.is_file_checksum("xxh3_128:" + "0" * 31)
    assert [checksums.block_count(n, 4096) for n in (0, 1, 4096, 4097)] == [0, 1, 1, 2]


def test_parts_keep_a_limit_whatever_lies_in_them() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(100):
        limit = rng.choice([20_000, 65_536, 1_000_000])
        name = rng.choice(["w", "model.layers.weight", "ä", 'quo"te'])
        specs = []
        for n in range(rng.randint(1, 60)):
            shape = (rng.randint(0, 12_000 // 4),) + (1,) * rng.randint(0, 6)
            specs.append(_whole(f"{name}{n}", "float32", shape))
        layout = build_layout(specs, n_parts=rng.randint(1, 4), max_nbytes=limit)
        assert max(part.nbytes for part in layout.parts) <= limit
        assert all(len(part.header) > 0 for part in layout.parts)


def test_a_limit_that_would_need_too_many_parts_is_refused_by_its_setting() -> None:
    specs = [_whole(f"w{n}", "float32", (4000,)) for n in range(1001)]
    with pytest.raises(ConfigError, match="max_shard_bytes=20000"):
        build_layout(specs, max_nbytes=20_000)


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7])
def test_a_header_that_is_written_in_pieces_is_the_one_that_would_be_written_at_once(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    specs = [_whole(f'w.{n} é\n"', ("float32", "float8_e4m3fn", "complex64")[n % 3], (2, 3)) for n in range(count)]
    (whole,) = build_layout(specs).parts
    monkeypatch.setattr(layout, "HEADER_PIECE", 3)
    (pieces,) = build_layout(specs).parts
    assert pieces == whole
    text = whole.header[8:].rstrip().decode()
    assert json.dumps(json.loads(text), separators=(",", ":")) == text
