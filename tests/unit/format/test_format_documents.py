"""Manifest, index and structure: what is written is read back, and everything else is refused by name."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from format_samples import INDEX, MANIFEST, SAVE_ID, STRUCTURE
from mutations import altered, damaged, packed

from asyncckpt.basics.limits import MAX_PARTS
from asyncckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from asyncckpt.format import manifest as manifests
from asyncckpt.format.checksums import file_checksum
from asyncckpt.format.index import decode_index, encode_index
from asyncckpt.format.manifest import (
    SHORTEST_MANIFEST_NBYTES,
    Tombstone,
    decode_manifest,
    encode_manifest,
    encode_tombstone,
)
from asyncckpt.format.names import SaveId, index_name
from asyncckpt.format.state_tree import TypedKey
from asyncckpt.format.structure import decode_structure, encode_structure, encoded_with_digests

TYPED = (CorruptCheckpointError, UnsupportedFormatError)
N_DAMAGED = 5000


def _index(**changes: Any) -> bytes:
    return packed({**msgpack.unpackb(encode_index(INDEX)), **changes})


def _structure(**changes: Any) -> bytes:
    return packed({**msgpack.unpackb(encode_structure(STRUCTURE)), **changes})


def sealed_manifest(document: Any) -> bytes:
    """Return `document` as a manifest with a valid checksum, whatever else it says."""
    zero = manifests._ZERO_CHECKSUM
    rest = {k: v for k, v in document.items() if k != "checksum"}
    blank = (json.dumps({**rest, "checksum": zero}, indent=1) + "\n").encode()
    at = blank.rindex(zero.encode())
    return blank[:at] + file_checksum(blank).encode() + blank[at + len(zero) :]


def _manifest(**changes: Any) -> bytes:
    return sealed_manifest({**json.loads(encode_manifest(MANIFEST)), **changes})


def _manifest_rank(**changes: Any) -> bytes:
    raw = json.loads(encode_manifest(MANIFEST))
    return sealed_manifest({**raw, "ranks": [{**raw["ranks"][0], **changes}]})


def _tensor(*, fqn: Any = "w", dtype: Any = "float32", shape: Any = (4,), chunks: Any = ((0, 4096, 16),)) -> bytes:
    return _structure(tensors=[[fqn, dtype, shape, chunks]], tree=["T", 0], parts=[8192], n_objects=0)


def _composite(*more: Any) -> bytes:
    return _structure(tree=["s", ["codes", ["T", 0], "scale", ["T", 1]], 0, *more])


def _nested(depth: int) -> list[Any]:
    return ["l", [_nested(depth - 1)]] if depth else ["O", 0]


def test_documents_come_back_as_they_were_written() -> None:
    assert decode_manifest(encode_manifest(MANIFEST)) == MANIFEST
    assert decode_index(encode_index(INDEX)) == INDEX
    assert decode_structure(encode_structure(STRUCTURE)) == STRUCTURE
    assert decode_manifest(_manifest()) == MANIFEST
    assert decode_structure(_tensor()).tensors[0].fqn == "w"
    assert decode_structure(_composite("module.Class", b"12345678")).tree[2:] == (0, "module.Class", b"12345678")
    assert decode_structure(_composite("module.Class")).tree[2:] == (0, "module.Class")


def test_a_structure_is_packed_as_one_value_would_be() -> None:
    data = encode_structure(STRUCTURE)
    assert msgpack.packb(msgpack.unpackb(data)) == data


def test_manifest_is_text_that_people_read() -> None:
    text = encode_manifest(MANIFEST).decode()
    assert json.loads(text)["step"] == 300
    assert text.endswith('"\n}\n')


@pytest.mark.parametrize(
    ("made", "decode"), [(_manifest, decode_manifest), (_index, decode_index), (_structure, decode_structure)]
)
def test_unknown_field_is_ignored_unless_it_is_required(
    made: Callable[..., bytes], decode: Callable[[bytes], object]
) -> None:
    assert decode(made(colour="red", must=[])) == decode(made())
    with pytest.raises(UnsupportedFormatError, match="colour"):
        decode(made(colour="red", must=["colour"]))
    with pytest.raises(CorruptCheckpointError):
        decode(made(must="colour"))


@pytest.mark.parametrize(
    ("data", "decode"),
    [
        (_manifest(asyncckpt_manifest=2), decode_manifest),
        (b'{\n "asyncckpt_manifest": 17, of another shape', decode_manifest),
        (_index(asyncckpt_index=2), decode_index),
        (_structure(structure=99), decode_structure),
    ],
)
def test_newer_version_is_refused_by_number(data: bytes, decode: Callable[[bytes], object]) -> None:
    with pytest.raises(UnsupportedFormatError, match="upgrade") as caught:
        decode(data)
    assert caught.value.found > caught.value.supported == 1


def test_digests_are_put_into_an_encoded_structure() -> None:
    def tree(*digest: bytes) -> Any:
        parts = ("codes", ("T", 0), "inner", ("s", ("w", ("T", 1)), 1, "module.Inner"))
        tensor = ("s", parts, 0, "module.Class", *digest)
        key = TypedKey(("f", "3ff0000000000000"))
        deep = ("l", (tensor, ("t", (("T", 2),))), ("deque", None))
        return ("o", ("a", deep, key, ("r", ("d", (1, tensor, TypedKey(("n",)), ("O", 2)), ("Counter",)))), 2)

    plain, expected = (encode_structure(dataclasses.replace(STRUCTURE, tree=tree(*d))) for d in ((), (b"12345678",)))
    assert encoded_with_digests(plain, {0: b"12345678"}) == expected != plain
    assert decode_structure(expected).tree == tree(b"12345678")
    assert encoded_with_digests(plain, {}) == plain


BAD_MANIFESTS = {
    "empty": b"",
    "no object": b"[]\n",
    "version 0": _manifest(asyncckpt_manifest=0),
    "version as text": _manifest(asyncckpt_manifest="1"),
    "another state": _manifest(state="forgotten"),
    "no save id": _manifest(save_id=None),
    "a save id with a line feed": _manifest(save_id=f"{SAVE_ID}\n"),
    "step as text": _manifest(step="300"),
    "step beyond 63 bits": _manifest(step=1 << 63),
    "fsync as number": _manifest(fsync=1),
    "metadata as list": _manifest(metadata=[]),
    "timings as list": _manifest(timings=[]),
    "timing beyond a double": _manifest(timings={"write": 10**400}),
    "world of another size": _manifest(world_size=2),
    "world as bool": _manifest(world_size=True),
    "world too large": _manifest(world_size=100_001),
    "no ranks": _manifest(ranks=[], world_size=0),
    "ranks as object": _manifest(ranks={"0": 1}),
    "rank of another number": _manifest_rank(rank=1),
    "index of another name": _manifest_rank(index="../../etc/passwd"),
    "index of another save": _manifest_rank(index=f"rank-00000.{SaveId(9, 9, 'f' * 12)}.index"),
    "negative length": _manifest_rank(index_nbytes=-1),
    "length beyond 63 bits": _manifest_rank(index_nbytes=1 << 63),
    "length as float": _manifest_rank(nbytes=1.0),
    "checksum of another kind": _manifest_rank(index_checksum="md5:0"),
    "nested beyond reason": sealed_manifest({}).replace(b"{", b'{"a":' + b"[" * 100_000, 1),
}


@pytest.mark.parametrize("data", BAD_MANIFESTS.values(), ids=BAD_MANIFESTS)
def test_bad_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptCheckpointError) as caught:
        decode_manifest(data, "/some/path")
    assert caught.value.file == "manifest.json"
    assert caught.value.path == "/some/path"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"no JSON", "it does not end with a checksum"),
        (_manifest(asyncckpt_manifest="1"), "field `asyncckpt_manifest` is '1', expected a version number from 1 on"),
        (_manifest(state="forgotten"), "field `state` is 'forgotten', expected 'committed' or 'abandoned'"),
        (_manifest(step="300"), "field `step` is a string, expected an integer"),
        (_manifest(fsync=1), "field `fsync` is an integer, expected true or false"),
        (_manifest(world_size=True), "field `world_size` is true or false, expected an integer"),
        (_manifest(world_size=2), "field `ranks` has 1 entries, expected 2, as `world_size` says"),
        (_manifest(timings=[]), "field `timings` is a list, expected an object"),
        (_manifest(timings={"write": "soon"}), "field `timings` has a value that is not a number of seconds: .*'soon'"),
        (_manifest(ranks=[1]), "entry 0 of `ranks` is an integer, expected an object"),
        (_manifest_rank(rank=1), "field `rank` of entry 0 of `ranks` is 1, expected 0"),
        (_manifest_rank(files=None), "field `files` of entry 0 of `ranks` is null, expected an integer"),
        (_manifest_rank(nbytes=-1), "field `nbytes` of entry 0 of `ranks` is -1, expected 0 to 9223372036854775807"),
        (_manifest_rank(index_checksum="md5:0"), "field `index_checksum` of entry 0 of `ranks` is 'md5:0', expected"),
    ],
)
def test_message_about_a_bad_manifest_names_the_field_and_what_was_found_and_expected(data: bytes, said: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=said):
        decode_manifest(data, "/some/path")


@pytest.mark.parametrize("field", sorted(json.loads(encode_manifest(MANIFEST)).keys() - {"checksum"}))
def test_message_about_a_manifest_without_a_field_names_the_field(field: str) -> None:
    without = {name: value for name, value in json.loads(encode_manifest(MANIFEST)).items() if name != field}
    with pytest.raises(CorruptCheckpointError, match=f"field `{field}` is "):
        decode_manifest(sealed_manifest(without), "/some/path")


def test_manifest_that_no_reader_would_take_is_not_written() -> None:
    for metadata in ({"x": "y" * (65 << 20)}, {"x": float("nan")}):
        with pytest.raises(ValueError, match=r"bytes|JSON|float"):
            encode_manifest(dataclasses.replace(MANIFEST, metadata=metadata))


SHARD = list(msgpack.unpackb(encode_index(INDEX))["shards"][0])
BAD_INDEXES = {
    "empty": b"",
    "no map": packed([]),
    "two documents": _index() + _index(),
    "version 0": _index(asyncckpt_index=0),
    "rank outside its world": _index(rank=1),
    "rank as bool": _index(rank=False),
    "save id of no form": _index(save_id="1-2-3"),
    "block of no pages": _index(block_nbytes=5000),
    "block of nothing": _index(block_nbytes=0),
    "block too large": _index(block_nbytes=128 << 20),
    "shard of another name": _index(shards=[["../x", *SHARD[1:]]]),
    "shard of another rank": _index(shards=[[SHARD[0].replace("00000-part", "00001-part"), *SHARD[1:]]]),
    "shards out of order": _index(shards=[[SHARD[0].replace("part-000", "part-001"), *SHARD[1:]]]),
    "a checksum too few": _index(shards=[[*SHARD[:2], SHARD[2][:-8]]]),
    "a checksum too many": _index(shards=[[*SHARD[:2], SHARD[2] + bytes(8)]]),
    "checksums as text": _index(shards=[[*SHARD[:2], "x" * len(SHARD[2])]]),
    "negative length": _index(shards=[[SHARD[0], -1, b""]]),
    "length beyond 63 bits": _index(shards=[[SHARD[0], 1 << 63, b""]]),
    "shards as map": _index(shards={}),
    "too many shards": _index(shards=[SHARD] * (MAX_PARTS + 1)),
    "objects of another name": _index(objects=["x", 1, file_checksum(b"")]),
    "objects without checksum": _index(objects=[INDEX.objects.name, 1, "xxh3_128:"]),
    "structure as text": _index(structure="x"),
    "no structure": packed({k: v for k, v in msgpack.unpackb(_index()).items() if k != "structure"}),
}


@pytest.mark.parametrize("data", BAD_INDEXES.values(), ids=BAD_INDEXES)
def test_bad_index_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptCheckpointError):
        decode_index(data)


TWO = [["a", "float32", (4,), [(0, 4096, 16)]], ["b", "float32", (4,), [(0, 4104, 16)]]]
BAD_STRUCTURES = {
    "empty": b"",
    "version as float": _structure(structure=1.0),
    "unknown dtype": _tensor(dtype="float33"),
    "dtype that cannot be hashed": _tensor(dtype={}),
    "FQN as bytes": _tensor(fqn=b"w"),
    "FQN twice": _structure(tensors=[TWO[0], TWO[0]], tree=["T", 0], parts=[8192], n_objects=0),
    "chunks that overlap": _structure(tensors=TWO, tree=["T", 0], parts=[8192], n_objects=0),
    "chunk beyond its part": _tensor(chunks=[(0, 8192 - 15, 16)]),
    "chunk of a part that is not there": _tensor(chunks=[(1, 4096, 16)]),
    "chunk shorter than its shape": _tensor(chunks=[(0, 4096, 12)]),
    "chunk longer than its shape": _tensor(chunks=[(0, 4096, 20)]),
    "chunk at a negative offset": _tensor(chunks=[(0, -4, 16)]),
    "chunk outside its tensor": _tensor(chunks=[(0, 4096, 8, (3,), (2,))]),
    "chunk of other dimensions": _tensor(chunks=[(0, 4096, 16, (0, 0), (4, 1))]),
    "chunk of four members": _tensor(chunks=[(0, 4096, 16, (0,))]),
    "shape that overflows": _tensor(shape=(1 << 62, 1 << 62), chunks=[(0, 4096, 0)]),
    "shape as bool": _tensor(shape=(True,), chunks=[(0, 4096, 4)]),
    "shape of 65 dimensions": _tensor(shape=(1,) * 65, chunks=[]),
    "tensors as map": _structure(tensors={}),
    "tree of an unknown node": _structure(tree=["X", 0]),
    "tree with a tensor too many": _structure(tree=["T", 4]),
    "tree with a negative number": _structure(tree=["O", -1]),
    "tree with a bool for a number": _structure(tree=["O", False]),
    "tree with a key twice": _structure(tree=["d", ["a", ["O", 0], "a", ["O", 0]]]),
    "tree with a float for a key": _structure(tree=["d", [0.5, ["O", 0]]]),
    "tree with a bool for a key": _structure(tree=["d", [True, ["O", 0]]]),
    "tree with a key too long": _structure(tree=["d", ["k" * 4097, ["O", 0]]]),
    "tree with a key and no value": _structure(tree=["d", ["a"]]),
    "tree without members": _structure(tree=["l"]),
    "tree with metadata that is no object": _structure(tree=["o", [], 99]),
    "tree too deep": _structure(tree=_nested(66)),
    "digest as text": _composite("module.Class", "12345678"),
    "digest of 7 bytes": _composite("module.Class", b"1234567"),
    "digest of 9 bytes": _composite("module.Class", b"123456789"),
    "digest that is nil": _composite("module.Class", None),
    "two digests": _composite("module.Class", b"12345678", b"12345678"),
    "digest of what is no class": _composite("sparse_coo", b"12345678"),
}


@pytest.mark.parametrize("data", BAD_STRUCTURES.values(), ids=BAD_STRUCTURES)
def test_bad_structure_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptCheckpointError):
        decode_structure(data)


def test_damaged_manifest_is_always_refused(rng: random.Random) -> None:
    good = encode_manifest(MANIFEST)
    for _ in range(N_DAMAGED):
        bad = damaged(good, rng)
        with pytest.raises(TYPED):
            decode_manifest(bad)


def test_every_flipped_bit_of_a_manifest_is_noticed() -> None:
    good = encode_manifest(MANIFEST)
    for at in range(len(good)):
        for bit in range(8):
            with pytest.raises(TYPED):
                decode_manifest(good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :])


def test_damaged_index_is_refused_or_at_least_not_vouched_for(rng: random.Random) -> None:
    good = encode_index(INDEX)
    for _ in range(N_DAMAGED):
        bad = damaged(good, rng)
        assert file_checksum(bad) != MANIFEST.ranks[0].index_checksum
        try:
            found = decode_index(bad)
        except TYPED:
            continue
        assert decode_index(encode_index(found)) == found


@pytest.mark.parametrize(
    ("good", "decode", "encode"),
    [
        (encode_index(INDEX), decode_index, encode_index),
        (encode_structure(STRUCTURE), decode_structure, encode_structure),
    ],
    ids=["index", "structure"],
)
def test_altered_document_is_refused_or_consistent(
    rng: random.Random, good: bytes, decode: Callable[[bytes], Any], encode: Callable[[Any], bytes]
) -> None:
    for _ in range(N_DAMAGED):
        try:
            found = decode(packed(altered(msgpack.unpackb(good), rng)))
        except TYPED:
            continue
        assert decode(encode(found)) == found


def test_altered_manifest_with_a_valid_checksum_is_refused_or_consistent(rng: random.Random) -> None:
    good = json.loads(encode_manifest(MANIFEST))
    del good["checksum"]
    for _ in range(N_DAMAGED):
        try:
            found = decode_manifest(sealed_manifest(altered(good, rng)))
        except TypeError as error:  # bytes and other values that JSON has not
            assert "JSON serializable" in str(error)
        except TYPED:
            continue
        else:
            assert found.save_id == SAVE_ID


def test_no_manifest_is_as_short_as_a_tombstone() -> None:
    blank = "xxh3_128:" + "0" * 32
    save_id = SaveId(1, 1, "0123456789ab")
    record = {"rank": 0, "index": index_name(save_id, 0), "index_nbytes": 0, "index_checksum": blank}
    fields = {"asyncckpt_manifest": 1, "state": "committed", "save_id": str(save_id), "step": 0, "world_size": 1}
    fields |= {"created": 0, "fsync": True, "writer": 0, "metadata": {}, "timings": {}}
    fields |= {"ranks": [{**record, "tensors": 0, "files": 0, "nbytes": 0}]}
    text = json.dumps(fields, separators=(",", ":"))[:-1] + f',"checksum": "{blank}"\n}}\n'
    head, _, tail = text.rpartition(blank)
    shortest = f"{head}{file_checksum(text.encode())}{tail}".encode()
    assert decode_manifest(shortest).save_id == save_id and len(shortest) >= SHORTEST_MANIFEST_NBYTES
    ours = Tombstone(
        save_id=save_id, created="2026-01-01T00:00:00.000+00:00", writer="asyncckpt 1.20.300.dev4+g0123456789"
    )
    assert len(encode_tombstone(ours)) < SHORTEST_MANIFEST_NBYTES
