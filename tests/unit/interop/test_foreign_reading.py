"""What PyTorch, DCP, safetensors and Hugging Face tools wrote is loaded as a checkpoint of ours is."""

from __future__ import annotations

import contextlib
import json
import pickle
import random
import shutil
import struct
import warnings
import zipfile
from pathlib import Path
from typing import Any

import foreign_samples
import pytest
import states
import torch
import torch.distributed.checkpoint as dcp
from conversions import Workdir, flip

import asyncckpt
from asyncckpt.errors import (
    AsyncCkptError,
    CheckpointNotCommittedError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DuplicateNameError,
    MissingKeysError,
    ShapeMismatchError,
    UnsupportedFormatError,
)
from asyncckpt.interop.sources.verify import verify_any
from asyncckpt.storage import read_plan
from asyncckpt.storage.files import Files

pytest.importorskip("numpy")
pytest.importorskip("safetensors")

FILES = Files()


# ---- whole ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", foreign_samples.KINDS)
def test_an_empty_target_gets_the_nesting_back(kind: str, samples: dict[str, Path]) -> None:
    found, expected = asyncckpt.load(samples[kind]), foreign_samples.expected(kind)
    if kind in ("torch", "legacy"):
        assert found["optim"]["param_groups"][0]["betas"] == (0.9, 0.999)
        assert found["model"]._metadata == {"": {"version": 1}, "bn": {"version": 2}}
        assert found["model"]["tied"] is found["model"]["large"]
    elif kind == "dcp":
        assert found["mixed"][2]["deep"][1] == "x"
        assert found["model"]["tied"] is not found["model"]["large"], "DCP stores tied tensors twice"
        expected["model"]["tied"] = expected["model"]["tied"].clone()
    torch.manual_seed(0)
    _same(found, expected)


def _same(found: Any, expected: Any, where: str = "") -> None:
    """Types, keys, bits; tensors that were random once are compared by shape."""
    assert type(found) is type(expected), where
    if isinstance(expected, dict):
        assert set(found) == set(expected), where
        for key in expected:
            _same(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for n, member in enumerate(expected):
            _same(found[n], member, f"{where}.{n}")
    elif isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        if "parameter" not in where and "exp_avg" not in where:
            assert states.bits_of(found) == states.bits_of(expected), where
    else:
        assert found == expected, where


def test_a_target_of_another_device_type_and_dtype_is_filled(samples: dict[str, Path]) -> None:
    model = foreign_samples.model()
    target = {"model": {"large": torch.zeros(300, 1000, dtype=torch.float64), "transposed": torch.zeros(6, 8).t()}}
    target["model"]["transposed"] = torch.zeros(8, 6).t()
    asyncckpt.load(samples["torch"], target)
    assert torch.equal(target["model"]["large"].nan_to_num(), model["large"].double().nan_to_num())
    states.assert_same(target["model"]["transposed"].contiguous(), model["transposed"].contiguous())


@pytest.mark.parametrize("kind", foreign_samples.KINDS)
def test_keys_choose_and_unknown_ones_are_named(kind: str, samples: dict[str, Path]) -> None:
    name = "large" if kind in ("safetensors", "hf") else "model.large"
    found = asyncckpt.load(samples[kind], keys=[name])
    assert list(found.get("model", found)) == ["large"]
    states.assert_same(found.get("model", found)["large"], foreign_samples.model()["large"])
    found = asyncckpt.load(samples[kind], default_map_location="meta", keys=[name])
    assert found.get("model", found)["large"].is_meta
    with pytest.raises(MissingKeysError) as caught:
        asyncckpt.load(samples[kind], {"absent": torch.zeros(1)}, strict=True)
    assert caught.value.keys == ["absent"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", foreign_samples.KINDS)
def test_an_empty_dict_for_which_nothing_was_saved_is_missing_unless_the_format_may_have_dropped_it(
    kind: str, samples: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(MissingKeysError) as caught:
        asyncckpt.load(samples[kind], {"absent": {}})
    assert caught.value.keys == ["absent"]
    beside: dict[str, Any] = {"large" if kind in ("safetensors", "hf") else "model": None, "absent": {}}
    if kind in ("torch", "legacy"):  # a pickle holds empty dicts
        with pytest.raises(MissingKeysError):
            asyncckpt.load(samples[kind], beside)
    else:
        asyncckpt.load(samples[kind], beside)
        assert beside["absent"] == {} and "nothing was saved for absent, which stays empty" in caplog.text


def test_key_map_and_mismatches_work_as_for_ours(samples: dict[str, Path]) -> None:
    target = {"module.large": torch.zeros(300, 1000)}
    asyncckpt.load(samples["safetensors"], target, key_map=lambda name: name.removeprefix("module."))
    states.assert_same(target["module.large"], foreign_samples.model()["large"])
    with pytest.raises(ShapeMismatchError):
        asyncckpt.load(samples["hf"], {"large": torch.zeros(3)})
    plan = asyncckpt.plan_load(samples["dcp"], {"model": {"large": torch.zeros(300, 1000)}, "no": 1})
    assert (plan.missing, plan.nbytes) == (("no",), 1_200_000)


@pytest.mark.parametrize("kind", foreign_samples.KINDS)
@pytest.mark.parametrize("low_memory", [True, False])
def test_a_sharded_target_is_filled_from_a_file_that_knows_no_shards(
    kind: str, low_memory: bool, samples: dict[str, Path]
) -> None:
    whole = foreign_samples.model()
    large = asyncckpt.ShardedSlice(torch.zeros(100, 500), (300, 1000), (50, 500))
    turned = asyncckpt.ShardedSlice(torch.zeros(2, 8), (6, 8), (3, 0))
    target: Any = {"large": large, "transposed": turned}
    asyncckpt.load(samples[kind], target if kind in ("safetensors", "hf") else {"model": target}, low_memory=low_memory)
    states.assert_same(large.tensor, whole["large"][50:150, 500:].contiguous())
    states.assert_same(turned.tensor, whole["transposed"][3:5].contiguous())


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.complex128])
def test_boxes_of_a_file_without_checksums_are_read_through_their_gaps_bit_for_bit(
    dtype: torch.dtype, tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_plan, "BUFFERED_STEP_NBYTES", 4096)
    raw = torch.randint(0, 256, (40 * 6 * 90 * dtype.itemsize,), dtype=torch.uint8)
    value = raw.view(dtype).view(40, 6, 90)
    torch.save({"x" * rng.randrange(1, 64): 0, "pad": torch.zeros(rng.randrange(9)), "w": value}, tmp_path / "t.pt")
    for _ in range(20):
        sizes = tuple(rng.randrange(1, n + 1) for n in value.shape)
        offsets = tuple(rng.randrange(n - size + 1) for n, size in zip(value.shape, sizes, strict=True))
        target = asyncckpt.ShardedSlice(torch.zeros(sizes, dtype=dtype), tuple(value.shape), offsets)
        asyncckpt.load(tmp_path / "t.pt", {"w": target}, threads=rng.randrange(1, 4))
        box = value[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))].contiguous()
        assert torch.equal(target.tensor.view(torch.uint8), box.view(torch.uint8))


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float64, torch.complex128])
def test_rows_of_a_dcp_directory_reach_scattered_targets_wherever_its_items_begin(
    dtype: torch.dtype, cached: bool, tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Files, "resident", lambda *_: cached)
    raw = torch.randint(0, 256, (400 * 512 * dtype.itemsize,), dtype=torch.uint8)
    value = raw.view(dtype).view(400, 512)
    foreign_samples.save_dcp({"note": "x" * rng.randrange(1, 99), "w": value}, tmp_path / "c")
    for _ in range(3):
        first, n = rng.randrange(10), rng.randrange(300, 390)
        target = asyncckpt.ShardedSlice(torch.zeros(512, n, dtype=dtype).t(), (400, 512), (first, 0))
        asyncckpt.load(tmp_path / "c", {"w": target}, threads=rng.randrange(1, 4))
        found = target.tensor.contiguous().view(torch.uint8)
        assert torch.equal(found, value[first : first + n].contiguous().view(torch.uint8))


def test_nothing_there_is_said_as_for_ours(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        asyncckpt.load(tmp_path / "absent.pt")
    (tmp_path / "notes").write_text("x")
    with pytest.raises(UnsupportedFormatError):
        asyncckpt.load(tmp_path / "notes")


# ---- parts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", foreign_samples.KINDS)
def test_slices_are_read_and_tensors_are_mapped_to_which_writes_stay_private(
    kind: str, samples: dict[str, Path]
) -> None:
    opened = asyncckpt.open_checkpoint(samples[kind])
    prefix = "" if kind in ("safetensors", "hf") else "model."
    model = foreign_samples.model()
    assert opened.kind == {"legacy": "torch"}.get(kind, kind)
    found = opened.tensor(f"{prefix}large", (slice(5, 9), slice(0, 999, 3)))
    states.assert_same(found, model["large"][5:9, 0:999:3].contiguous())
    states.assert_same(opened.tensor(f"{prefix}transposed", 2), model["transposed"][2].contiguous())
    assert opened.tensors[f"{prefix}dtype_bfloat16"].dtype == torch.bfloat16
    for name, tensor in foreign_samples.model().items():
        if name != "parameter":
            states.assert_same(opened.tensor(prefix + name, mmap=True).contiguous(), tensor.contiguous())
    mapped = opened.tensor(f"{prefix}large", mmap=True)
    with open("/proc/self/maps") as maps:
        is_mapped = any(str(samples[kind]) in line for line in maps)
    assert is_mapped or kind in ("legacy", "dcp"), "those two do not align what they write; what is misaligned is read"
    mapped.zero_()
    states.assert_same(opened.tensor(f"{prefix}large"), foreign_samples.model()["large"])


def test_objects_are_looked_up_by_name(samples: dict[str, Path]) -> None:
    opened = asyncckpt.open_checkpoint(samples["dcp"])
    assert opened.objects["optim.param_groups.0.betas"] == (0.9, 0.999)
    assert (opened.step, opened.world_size) == (7, 1)
    assert asyncckpt.open_checkpoint(samples["safetensors"]).metadata == {"format": "pt"}
    assert asyncckpt.open_checkpoint(samples["safetensors"]).step == -1


def test_a_tensor_of_our_own_shards_is_mapped(work: Workdir) -> None:
    work.ours({"x": torch.arange(100_000.0), "e": torch.zeros(0, 3), "s": torch.tensor(2)})
    opened = asyncckpt.open_checkpoint(work / "a")
    assert torch.equal(opened.tensor("x", slice(7, None), mmap=True), torch.arange(7.0, 100_000.0))
    assert opened.tensor("e", mmap=True).shape == (0, 3)
    assert opened.tensor("s", mmap=True).item() == 2
    opened.tensor("x", mmap=True).zero_()
    assert torch.equal(opened.tensor("x"), torch.arange(100_000.0))


# ---- sharded --------------------------------------------------------------------------------------------------------


def test_shards_of_dcps_hugging_face_writer_are_put_together(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(6, 4)
    from safetensors.torch import save_file

    for n, rows in enumerate((slice(0, 2), slice(2, 6))):
        info = {"w": {"saved_offsets": [rows.start, 0]}}
        save_file(
            {"w": whole[rows].clone()}, tmp_path / f"shard-{n}.safetensors", {"DCP_SHARDING_INFO": json.dumps(info)}
        )
    states.assert_same(asyncckpt.load(tmp_path), {"w": whole})
    states.assert_same(asyncckpt.open_checkpoint(tmp_path).tensor("w", slice(1, 4)), whole[1:4])


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_a_tensor_without_elements_may_have_no_chunk(tmp_path: Path) -> None:
    state = {"empty": torch.zeros(0, 3), "full": torch.arange(5)}
    dcp.save(state, checkpoint_id=tmp_path / "c")
    listing = tmp_path / "c" / ".metadata"
    found = pickle.loads(listing.read_bytes())
    found.state_dict_metadata["empty"].chunks.clear()
    found.storage_data = {index: where for index, where in found.storage_data.items() if index.fqn != "empty"}
    listing.write_bytes(pickle.dumps(found))
    target = {"empty": torch.zeros(0, 3), "full": torch.zeros(5, dtype=torch.int64)}
    asyncckpt.load(tmp_path / "c", target, strict=True)
    assert torch.equal(target["full"], state["full"])


@pytest.mark.parametrize(("value", "expected"), [(torch.ones(2), {"value": 0}), ([1, torch.ones(2)], {0: 1, 1: 0})])
def test_what_is_no_dict_becomes_one(value: Any, expected: dict[Any, Any], tmp_path: Path) -> None:
    torch.save(value, tmp_path / "a.pt")
    assert list(asyncckpt.load(tmp_path / "a.pt")) == list(expected)


# ---- refused --------------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_each_rank_without_collectives_is_refused_by_name(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "c", no_dist=True, use_collectives=False)
    for read in (asyncckpt.load, asyncckpt.open_checkpoint):
        with pytest.raises(UnsupportedFormatError, match="use_collectives=False") as caught:
            read(tmp_path / "c")
        assert caught.value.found == "__0.metadata"


def test_an_uncommitted_checkpoint_of_ours_is_no_hugging_face_directory(tmp_path: Path) -> None:
    with asyncckpt.SyncCheckpointer(rank_info=asyncckpt.RankInfo(0, 1)) as checkpointer:
        checkpointer.save({"x": torch.ones(3)}, tmp_path / "a")
    (tmp_path / "a" / "manifest.json").unlink()
    with pytest.raises(CheckpointNotCommittedError):
        asyncckpt.load(tmp_path / "a")


@pytest.mark.parametrize("kind", foreign_samples.KINDS)
@pytest.mark.parametrize("keep", [0.98, 0.5, 0.01])
def test_a_file_that_was_cut_short_is_an_error_of_ours(
    kind: str, keep: float, samples: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / samples[kind].name
    (shutil.copytree if samples[kind].is_dir() else shutil.copy)(samples[kind], path)
    victim = max(path.iterdir(), key=lambda f: f.stat().st_size) if path.is_dir() else path
    victim.write_bytes(victim.read_bytes()[: int(victim.stat().st_size * keep)])
    with pytest.raises((CorruptCheckpointError, UnsupportedFormatError)):
        asyncckpt.load(path)
    assert verify_any(str(path), FILES).state in ("corrupt", "unsupported")


def test_a_flipped_byte_anywhere_never_raises_anything_but_our_errors(
    samples: dict[str, Path], tmp_path: Path, rng: Any
) -> None:
    state = {"a": torch.arange(6.0), "s": [1, "x", b"y"], "d": {"k": torch.ones(2, 3).t()}}
    torch.save(state, tmp_path / "a.pt")
    torch.save(state, tmp_path / "b.pt", _use_new_zipfile_serialization=False)
    foreign_samples.save_safetensors({"a": torch.arange(6.0)}, tmp_path / "c.safetensors")
    foreign_samples.save_dcp(state, tmp_path / "d")
    for path in (tmp_path / "a.pt", tmp_path / "b.pt", tmp_path / "c.safetensors", tmp_path / "d" / ".metadata"):
        sound = path.read_bytes()
        for _ in range(150):
            data = bytearray(sound)
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
            with contextlib.suppress(AsyncCkptError):
                asyncckpt.load(path.parent if path.name == ".metadata" else path)
        path.write_bytes(sound)


@pytest.mark.parametrize(
    ("kind", "checked"), [("torch", "ok"), ("dcp", "ok"), *((k, "") for k in ("legacy", "safetensors", "hf"))]
)
def test_verify_finds_a_flipped_byte_by_its_crc_and_says_where_there_is_none(
    kind: str, checked: bool, samples: dict[str, Path], work: Workdir
) -> None:
    verdict = verify_any(str(samples[kind]), FILES)
    assert verdict.state == "ok" and ("no checksums" in verdict.unchecked) == (not checked)
    assert verify_any(str(samples[kind]), FILES, fast=True).unchecked
    if checked:
        state = {"a": torch.zeros(1000), "b": torch.ones(1000)}
        foreign_samples.save_dcp(state, work / "a") if kind == "dcp" else work.torch(state)
        file = work / ("a/__0_0.distcp" if kind == "dcp" else "a")
        flip(file, struct.pack("<f", 1.0) * 50, 40)
        (fault,) = verify_any(str(work / "a"), FILES).faults
        assert (fault.fqn, fault.file) == ("b", file.name)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", [b"archive/data/0", b"archive/data.pkl"])
def test_verify_finds_an_item_in_which_no_tensor_can_be_found(name: bytes, tmp_path: Path) -> None:
    """No checksum covers the names in the directory of an archive."""
    foreign_samples.save_dcp({"a": torch.zeros(10), "b": torch.ones(10)}, tmp_path / "d")
    file = tmp_path / "d" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[data.rfind(name) + 9] ^= 16
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpointError) as caught:
        asyncckpt.load(tmp_path / "d")
    verdict = verify_any(str(tmp_path / "d"), FILES)
    assert (verdict.state, [str(fault) for fault in verdict.faults]) == ("corrupt", [str(caught.value)])


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}},
        {"a": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [1 << 61, 4], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]}},
        {"a": [1]},
        {"__metadata__": {"x": 1}, "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
    ],
)
def test_a_safetensors_header_that_lies_is_refused(header: dict[str, Any], tmp_path: Path) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(CorruptCheckpointError):
        asyncckpt.load(tmp_path / "a.safetensors")


def test_two_leaves_of_one_name_are_refused(tmp_path: Path) -> None:
    torch.save({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, tmp_path / "a.pt")
    with pytest.raises(DuplicateNameError):
        asyncckpt.load(tmp_path / "a.pt")


def test_a_torchscript_archive_is_refused(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 3)), tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as file:
        assert {entry.compress_type for entry in file.infolist()} == {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
    with zipfile.ZipFile(tmp_path / "stored.pt", "w") as file:
        for name in ("data.pkl", "constants.pkl", "code/__torch__.py"):
            file.writestr(f"archive/{name}", b"\x80\x02}.")
    for name in ("a.pt", "stored.pt"):
        with pytest.raises(UnsupportedFormatError, match="TorchScript"):
            asyncckpt.load(tmp_path / name)


def test_an_archive_that_was_packed_again_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as file, zipfile.ZipFile(tmp_path / "b.pt", "w") as packed:
        for entry in file.infolist():
            packed.writestr(entry.filename, file.read(entry), zipfile.ZIP_DEFLATED)
    with pytest.raises(CorruptCheckpointError, match=r"entry .*data\.pkl. is compressed or encrypted"):
        asyncckpt.load(tmp_path / "b.pt")


def test_one_element_that_claims_to_be_terabytes_is_refused_and_smaller_ones_are_read(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(1).expand(1 << 45)}, tmp_path / "a")
    with pytest.raises(UnsupportedFormatError, match="repeats"):
        asyncckpt.load(tmp_path / "a")
    torch.save({"x": torch.arange(2.0)[:, None].expand(2, 5000)}, tmp_path / "a")
    assert torch.equal(asyncckpt.load(tmp_path / "a")["x"], torch.arange(2.0)[:, None].expand(2, 5000))
