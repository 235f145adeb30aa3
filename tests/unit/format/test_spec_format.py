"""format/SPEC.md says what the code does."""

from __future__ import annotations

import importlib
import json
from dataclasses import MISSING, fields, replace

import msgpack
import pytest
from format_samples import INDEX, MANIFEST, SAVE_ID, STRUCTURE
from spec_markdown import spec, table, tables

from asyncckpt import dtypes
from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format import dcp, index, layout, manifest, names, objects, state_tree, structure

SPEC = spec("format")


@pytest.mark.parametrize(
    ("file", "made"),
    [
        ("manifest", names.MANIFEST_NAME),
        ("lock", names.LOCK_NAME),
        ("temporary manifest", names.temporary_manifest_name(SAVE_ID)),
        ("temporary manifest of a copy", names.temporary_manifest_name(SAVE_ID, "0123456789ab")),
        ("index", names.index_name(SAVE_ID, 7)),
        ("objects", names.objects_name(SAVE_ID, 7)),
        ("shard", names.shard_name(SAVE_ID, 7, 3)),
        ("shard of layout dcp", names.shard_name(SAVE_ID, 7, 3, "dcp")),
        ("items of layout dcp", names.items_name(SAVE_ID, 7)),
        ("temporary metadata", names.temporary_dcp_metadata_name(SAVE_ID)),
        ("temporary tombstone", names.temporary_tombstone_name(SAVE_ID)),
        ("probe", names.probe_name(names.temporary_manifest_name(SAVE_ID), "0123456789ab", 2)),
        ("temporary index", names.replacing_name(names.index_name(SAVE_ID, 7))),
    ],
)
def test_file_name_follows_the_pattern(file: str, made: str) -> None:
    pattern = {row[0]: row[1] for row in table(SPEC, "file", "name", "holds")}[file]
    assert pattern.format(save_id=SAVE_ID, rank=7, part=3, token="0123456789ab", number=2) == made


def test_patterns_are_all_that_is_ours() -> None:
    assert len(table(SPEC, "file", "name", "holds")) == 16


def test_the_name_of_what_was_put_aside_follows_the_spec() -> None:
    assert "`{name}.broken-{n}`".format(name="{name}", n="{n}") in SPEC
    assert names.quarantined_name("step-1", 3) == "step-1.broken-3" and names.is_quarantined("step-1.broken-3")
    assert not any(map(names.is_quarantined, ("step-1", "step-1.broken-0", ".broken-1", "step-1.broken-1x")))


def test_versions_are_those_of_the_spec() -> None:
    found = {
        "manifest": ("asyncckpt_manifest", str(manifest.MANIFEST_VERSION)),
        "index": ("asyncckpt_index", str(index.INDEX_VERSION)),
        "structure": ("structure", str(structure.STRUCTURE_VERSION)),
        "objects": ("asyncckpt_objects", str(objects.OBJECTS_VERSION)),
    }
    assert {row[0]: row[1:] for row in table(SPEC, "document", "field", "version")} == found


CONSTANTS = [r[:2] for r in (*table(SPEC, "limit", "value", "of"), *table(SPEC, "constant", "value", "of"))]


@pytest.mark.parametrize(("name", "value"), CONSTANTS)
def test_constant_equals_the_codes(name: str, value: str) -> None:
    module, _, constant = name.partition(".")
    assert getattr(importlib.import_module(f"asyncckpt.format.{module}"), constant) == int(value)


def test_every_limit_of_the_code_is_in_the_spec() -> None:
    named = {name.partition(".")[2] for name, _ in CONSTANTS} | {"MAX_EXACT_INT", "MAX_COLLISIONS"}
    for module in ("names", "manifest", "index", "structure", "state_tree", "objects", "layout", "checksums", "dcp"):
        loaded = importlib.import_module(f"asyncckpt.format.{module}")
        assert {n for n in vars(loaded) if n.startswith(("MAX_", "MIN_"))} <= named


def test_documents_have_the_fields_of_the_spec() -> None:
    """In the SPEC's order. `replace(MANIFEST, ...)` sets optional fields, which the golden MANIFEST lacks."""
    written = json.loads(manifest.encode_manifest(MANIFEST))
    documents = [
        written,
        written["ranks"][0],
        msgpack.unpackb(index.encode_index(INDEX)),
        msgpack.unpackb(structure.encode_structure(STRUCTURE)),
    ]
    described = [[row[0] for row in rows] for rows in tables(SPEC, "field", "type", "meaning")]
    assert described == [list(document) for document in documents]


OPTIONAL = {"mirror": "s3://bucket/a"}
"""A value for each optional field of a manifest."""


def test_optional_fields_of_a_manifest_are_those_of_the_spec() -> None:
    defaults = {one.name: one.default for one in fields(MANIFEST) if one.default is not MISSING}
    assert defaults == {**dict.fromkeys(OPTIONAL), "dcp": None}, "add a value of the new field to OPTIONAL"
    full = replace(MANIFEST, **OPTIONAL)
    written = json.loads(manifest.encode_manifest(full))
    described = [row[0] for row in table(SPEC, "optional field", "type", "meaning")]
    assert described == [name for name in written if name not in json.loads(manifest.encode_manifest(MANIFEST))]
    assert list(written)[-len(described) - 2 :] == [*described, "ranks", "checksum"]
    assert manifest.decode_manifest(manifest.encode_manifest(full)) == full


@pytest.mark.parametrize("field", OPTIONAL)
@pytest.mark.parametrize("wrong", [7, "", ["/a"], {}])
def test_an_optional_field_with_a_wrong_value_is_refused(field: str, wrong: object) -> None:
    document = json.loads(manifest.encode_manifest(MANIFEST))
    del document["checksum"]
    with pytest.raises(CorruptCheckpointError, match=field):
        manifest.decode_manifest(manifest.sealed({**document, field: wrong}))


def test_a_tombstone_has_the_fields_of_the_spec() -> None:
    data = manifest.encode_tombstone(manifest.Tombstone(save_id=SAVE_ID, created="", writer=""))
    written = json.loads(data)
    assert [row[0] for row in table(SPEC, "field", "type", "of a tombstone")] == list(written)
    assert (written["state"], written["asyncckpt_manifest"]) == ("abandoned", manifest.MANIFEST_VERSION)
    assert manifest.decode_tombstone(data) is not None


def test_layout_dcp_adds_the_fields_of_the_spec() -> None:
    record = index.ObjectsRecord(name=names.items_name(SAVE_ID, 0), nbytes=1, checksum=INDEX.objects.checksum)
    of_dcp = [
        json.loads(manifest.encode_manifest(replace(MANIFEST, dcp=manifest.DcpRecord(nbytes=1, checksum="xxh3_128:")))),
        msgpack.unpackb(index.encode_index(replace(INDEX, layout="dcp", items=record))),
    ]
    plain = [json.loads(manifest.encode_manifest(MANIFEST)), msgpack.unpackb(index.encode_index(INDEX))]
    found = [
        (name, field)
        for name, document, other in zip(("manifest", "index"), of_dcp, plain, strict=True)
        for field in document
        if field not in other
    ]
    assert [(row[0], row[1].strip("`")) for row in table(SPEC, "document", "additional field", "value")] == found
    assert list(of_dcp[0])[-1] == "checksum"


def test_shard_of_layout_dcp_begins_as_the_spec_says() -> None:
    spec = layout.BoxSpec(fqn="a", dtype="int8", global_shape=(3,), offsets=(0,), sizes=(3,))
    placed = dcp.build_dcp_layout([spec])
    header = placed.parts[0].header
    assert f"`{dcp.DCP_PREFIX.decode()}`" in SPEC
    assert header.startswith(dcp.DCP_PREFIX + b"0" * layout.SAVE_ID_NBYTES + b" ") and header[127:] == b"\n"
    assert placed.chunks[0].offset_bytes % dcp.ALIGNMENT == 0


def test_dtypes_are_those_of_the_spec() -> None:
    def stored(row: dtypes.DType) -> str:
        if row.safetensors is not None:
            return f"`{row.safetensors}`"
        return "`U8`" if row.itemsize == 1 else "`U8` with one more dimension"

    found = [(row.name, str(row.itemsize), stored(row).strip("`") if " " not in stored(row) else stored(row))
             for row in dtypes.DTYPES.values()]  # fmt: skip
    assert table(SPEC, "dtype", "bytes", "stored as") == found


def test_tags_are_those_of_the_spec() -> None:
    assert sorted(row[0] for row in table(SPEC, "tag", "payload")) == sorted((*objects.TAGS, *objects.LIBRARY_TAGS))


def test_tree_nodes_are_those_of_the_spec() -> None:
    kinds = [row[0][2] for row in table(SPEC, "node", "means")]
    assert kinds == [*state_tree.CONTAINERS, "T", "N", "B", "O", "E"]


def test_keys_with_a_tag_are_those_of_the_spec() -> None:
    made = [state_tree.key_of(value) for value in (None, True, 1.5, b"x", (1, "a"))]
    tags = [key[0] for key in made if isinstance(key, state_tree.TypedKey)]
    assert [row[0].split('"')[1] for row in table(SPEC, "key", "means")] == tags


def test_factories_of_defaultdicts_are_those_of_the_spec() -> None:
    listed = SPEC.partition("A reader MUST refuse any other: ")[2].partition(".\n\n")[0]
    assert tuple(name.strip().strip("`") for name in listed.split(",")) == state_tree.FACTORIES


def test_shard_begins_as_the_spec_says() -> None:
    assert f"`{layout.SAVE_ID_PREFIX.decode()}`" in SPEC
    assert f"byte {layout.SAVE_ID_OFFSET}" in SPEC
