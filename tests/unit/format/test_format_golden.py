"""The bytes of format version 1, kept for ever: they are read, and they are what is written."""

from __future__ import annotations

import importlib.util
import json
import pathlib

import pytest
from format_samples import INDEX, MANIFEST, SAVE_ID, SHARDED_STRUCTURE, STRUCTURE, VALUES
from test_format_objects import same

from asyncckpt.format.index import decode_index
from asyncckpt.format.manifest import decode_manifest
from asyncckpt.format.objects import decode_objects, decode_value
from asyncckpt.format.structure import decode_structure

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "golden"
V1 = GOLDEN / "format-v1"


def test_golden_documents_are_read() -> None:
    assert decode_manifest((V1 / "manifest.json").read_bytes()) == MANIFEST
    assert decode_index((V1 / "index.msgpack").read_bytes()) == INDEX
    assert decode_structure((V1 / "structure.msgpack").read_bytes()) == STRUCTURE
    assert decode_structure((V1 / "structure-sharded.msgpack").read_bytes()) == SHARDED_STRUCTURE
    raw = decode_objects((V1 / "objects.json").read_bytes(), SAVE_ID, len(VALUES))
    assert same([decode_value(r) for r in raw], list(VALUES))


def test_package_still_writes_the_golden_bytes() -> None:
    spec = importlib.util.spec_from_file_location("make_format_v1", GOLDEN / "make_format_v1.py")
    assert spec
    assert spec.loader
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert {p.name: p.read_bytes() for p in V1.iterdir()} == made.documents(), (
        "version 1 does not change: a field that is added is optional, and absent where it is not set"
    )


def test_golden_shard_is_opened_by_safetensors() -> None:
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(V1 / "shard.safetensors", framework="pt") as file:
        assert file.metadata()["asyncckpt_save_id"] == str(SAVE_ID)
        assert json.loads(file.metadata()["DCP_SHARDING_INFO"])["model.bias"] == {"saved_offsets": [4]}
        assert {name: list(file.get_tensor(name).shape) for name in file.keys()} == {  # noqa: SIM118
            "model.weight": [4, 3],
            "model.bias": [4],
            "scale": [16],
            "empty": [0, 5],
        }
