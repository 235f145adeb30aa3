"""Everything that reads bytes which somebody else may have made: how it is called, and what it may answer with.

A target's `read` returns or raises an error of our tree; whatever else leaves it is a bug. `seeds` are sound documents,
made from the golden checkpoints, the samples of the unit tests, and stock tools.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import io
import json
import os
import pathlib
import pickle
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgpack

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
CORPUS = ROOT / "tests" / "fuzz" / "corpus"
for _place in ("tests", "tests/unit"):
    if str(ROOT / _place) not in sys.path:
        sys.path.append(str(ROOT / _place))

import protocol_samples  # noqa: E402

from asyncckpt.errors import AsyncCkptError  # noqa: E402
from asyncckpt.format.checksums import FILE_CHECKSUM_PREFIX, file_checksum  # noqa: E402
from asyncckpt.format.index import decode_index, encode_index  # noqa: E402
from asyncckpt.format.manifest import decode_manifest  # noqa: E402
from asyncckpt.format.names import SaveId  # noqa: E402
from asyncckpt.format.objects import decode_objects, decode_value  # noqa: E402
from asyncckpt.format.structure import decode_structure, encode_structure  # noqa: E402
from asyncckpt.interop.sources.detect import read_any  # noqa: E402
from asyncckpt.interop.sources.pickle_globals import KNOWN, storage_of  # noqa: E402
from asyncckpt.interop.sources.safetensors_file import read_header  # noqa: E402
from asyncckpt.interop.sources.unpickler import PickleStream, UnpicklingError, unpickle_data  # noqa: E402
from asyncckpt.memory.slot import MIN_SLOT_NBYTES, PAGE_NBYTES, SlotControl, SlotError  # noqa: E402
from asyncckpt.planning.contributions import Contribution  # noqa: E402
from asyncckpt.protocol import codec  # noqa: E402
from asyncckpt.protocol.messages import (  # noqa: E402
    REPLIES,
    REQUESTS,
    Message,
)
from asyncckpt.protocol.node_tables import NODE_MESSAGES, Report  # noqa: E402
from asyncckpt.protocol.request import decode_request, encode_request  # noqa: E402
from asyncckpt.protocol.samples import decode_samples, encode_samples  # noqa: E402
from asyncckpt.storage.files import Files  # noqa: E402
from asyncckpt_worker.core.nodes.tables import unpack_result  # noqa: E402

SAVE_ID = SaveId.parse((GOLDEN / "format-v1" / "manifest.json").read_text().split('"save_id": "')[1][:28])


class Target(NamedTuple):
    """See the module."""

    read: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]


def _refusals(read: Callable[[bytes], object], *kinds: type[Exception]) -> Callable[[bytes], None]:
    def call(data: bytes) -> None:
        with contextlib.suppress(AsyncCkptError, *kinds):
            read(data)

    return call


def _golden(pattern: str) -> Callable[[], list[bytes]]:
    return lambda: [path.read_bytes() for path in sorted(GOLDEN.glob(pattern))]


# ---- the disk -------------------------------------------------------------------------------------------------------


def _resealed_manifest(data: bytes) -> None:
    """A manifest whose checksum is right, whatever it says: nothing but the checks of its fields is in the way."""
    head, middle, _ = data.rpartition(b'"checksum": "')
    blank = head + middle + f'{FILE_CHECKSUM_PREFIX}{"0" * 32}"\n}}\n'.encode()
    decode_manifest(head + middle + f'{file_checksum(blank)}"\n}}\n'.encode())


def _index(data: bytes) -> None:
    index = decode_index(data)
    assert decode_index(encode_index(index)) == index
    decode_structure(index.structure)


def _structure(data: bytes) -> None:
    structure = decode_structure(data)
    assert decode_structure(encode_structure(structure)) == structure


def _objects(data: bytes) -> None:
    n_objects = data.count(b",") + 1
    for count in {n_objects, 7}:
        with contextlib.suppress(AsyncCkptError):
            for form in decode_objects(data, SAVE_ID, count):
                with contextlib.suppress(ValueError):
                    decode_value(form)


def _safetensors_header(data: bytes) -> None:
    def read_at(offset: int, nbytes: int) -> bytes:
        if offset + nbytes > len(data):
            raise ValueError("beyond the end")
        return data[offset : offset + nbytes]

    read_header(read_at, len(data))


# ---- the wire, the relay and the slot -------------------------------------------------------------------------------


def _bodies(*known: Mapping[str, type[Message]]) -> list[bytes]:
    names = {name for table in known for name in table}
    messages = protocol_samples.MESSAGES + protocol_samples.BETWEEN_WORKERS
    return [codec.encode(m)[1] for m in messages if m.name in names]


def _message(known: Mapping[str, type[Message]]) -> Callable[[bytes], object]:
    def read(data: bytes) -> None:
        codec.request_id([b"", data])
        message = codec.unpack(data, known)
        again = codec.unpack(codec.pack(message, 1 << 30), known)
        assert type(again) is type(message)

    return read


def _result(data: bytes) -> None:
    found = msgpack.unpackb(data, use_list=False)
    if isinstance(found, dict):
        unpack_result(found, protocol_samples.SAVE_ID, 1)


def _results() -> list[bytes]:
    reports = [m for m in protocol_samples.BETWEEN_WORKERS if isinstance(m, Report)]
    return [msgpack.packb(row["result"]) for report in reports for row in report.parts]


def _request(data: bytes) -> None:
    request = decode_request(data, 1 << 20)
    assert decode_request(encode_request(request), 1 << 20) == request


def _samples() -> list[bytes]:
    return [encode_samples([(f"w{n}", n % 2 == 0, bytes([n]) * 8) for n in range(5)])]


class _Page:
    """A slot in memory of our own, whose pages are filled with what is being tried."""

    NBYTES = MIN_SLOT_NBYTES + PAGE_NBYTES

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(self.NBYTES + PAGE_NBYTES)
        self.address = -(-ctypes.addressof(self.buffer) // PAGE_NBYTES) * PAGE_NBYTES
        self.control = SlotControl(self.address, self.NBYTES)
        self.token = b"t" * 16


@functools.cache
def _page() -> _Page:
    return _Page()


def _slot(data: bytes) -> None:
    page = _page()
    ctypes.memset(page.address, 0, page.NBYTES)
    ctypes.memmove(page.address, data, min(len(data), page.NBYTES))
    with contextlib.suppress(SlotError):
        page.control.check(page.token)
    with contextlib.suppress(SlotError):
        _, request = page.control.read_request()
        decode_request(request, page.NBYTES - PAGE_NBYTES)


def _slots() -> list[bytes]:
    page = _page()
    ctypes.memset(page.address, 0, page.NBYTES)
    page.control.initialise(page.token)
    page.control.open(7)
    page.control.seal(encode_request(protocol_samples.REQUEST), PAGE_NBYTES)
    return [ctypes.string_at(page.address, page.NBYTES)]


# ---- other formats --------------------------------------------------------------------------------------------------


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="fuzzed-")


def _foreign(name: str) -> Callable[[bytes], None]:
    """Let the reader of whole files see `data` under a name; every tensor is located, none is read."""

    def read(data: bytes) -> None:
        root = pathlib.Path(_scratch().name, name.replace("/", "-"))
        path = root / pathlib.PurePath(name).name
        if not root.exists():
            root.mkdir()
            for file, content in _beside(name).items():
                (root / file).write_bytes(content)
        path.write_bytes(data)
        contents = read_any(str(root if "/" in name else path), Files())
        if contents.source is not None:
            for tensor in contents.tensors.values():
                for _, chunk in tensor.chunks:
                    contents.source.place(chunk.part, Files())

    return read


@functools.cache
def _stock() -> dict[str, bytes]:
    """Small files of every foreign format, by the tools that write them."""
    import torch
    import torch.distributed.checkpoint as dcp

    state = {"a": torch.arange(6.0), "s": [1, "x", b"y"], "d": {"k": torch.ones(2, 3).t()}}
    found = {}
    for name, zipped in (("torch.pt", True), ("legacy.pt", False)):
        stream = io.BytesIO()
        torch.save(state, stream, _use_new_zipfile_serialization=zipped)
        found[name] = stream.getvalue()
    shard = _golden("format-v1-ranks/*.safetensors")()[0]
    length = int.from_bytes(shard[:8], "little")
    names = [name for name in json.loads(shard[8 : 8 + length]) if name != "__metadata__"]
    found["hf/model-00001-of-00001.safetensors"] = shard
    weight_map = dict.fromkeys(names, "model-00001-of-00001.safetensors")
    found["hf/model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=directory, no_dist=True)
        for file in os.listdir(directory):
            found[f"dcp/{file}"] = pathlib.Path(directory, file).read_bytes()
    return found


def _beside(name: str) -> dict[str, bytes]:
    room = name.partition("/")[0]
    return {n.partition("/")[2]: data for n, data in _stock().items() if "/" in name and n.startswith(f"{room}/")}


def _pickle(data: bytes) -> None:
    found: list[Exception | None] = []
    for held in (True, False):  # in memory, and in a file: the same value, or an error either way
        pickled = data if held else PickleStream(lambda at, nbytes: data[at : at + nbytes], len(data))
        try:
            unpickle_data(pickled, KNOWN, storage_of, opaque=True)
            found.append(None)
        except UnpicklingError as error:
            found.append(error)
    assert (found[0] is None) == (found[1] is None), found
    unpickle_data(data, KNOWN, storage_of)


def _pickles() -> list[bytes]:
    """The pickles inside the files, so that what changes is not the archive around them; and long values."""
    found = [_stock()["dcp/.metadata"], _stock()["legacy.pt"]]
    with zipfile.ZipFile(io.BytesIO(_stock()["torch.pt"])) as archive:
        found.append(archive.read(next(n for n in archive.namelist() if n.endswith("data.pkl"))))
    long = [{"a": "\xe9" * 70_000, "b": ("\xe9" * 70_000).encode("latin1"), "c": bytearray(70_000)}]
    found += [pickle.dumps(long, protocol) for protocol in (2, 5)]
    return [*found, pickle.dumps({"a": argparse.Namespace(b=[1]), "c": {pathlib.PureWindowsPath("d")}}, 2)]


def _stock_seeds(name: str) -> Callable[[], list[bytes]]:
    return lambda: [_stock()[name]]


TARGETS: dict[str, Target] = {
    "manifest": Target(_refusals(decode_manifest), _golden("*/manifest.json")),
    "manifest-resealed": Target(_refusals(_resealed_manifest), _golden("*/manifest.json")),
    "index": Target(_refusals(_index), lambda: _golden("*/*.index")() + _golden("*/index.msgpack")()),
    "structure": Target(_refusals(_structure), _golden("*/structure*.msgpack")),
    "objects": Target(_objects, _golden("format-v1/objects.json")),
    "safetensors-header": Target(_refusals(_safetensors_header, ValueError), _golden("*/*.safetensors")),
    "message": Target(_refusals(_message(REQUESTS)), lambda: _bodies(REQUESTS)),
    "reply": Target(_refusals(_message(REPLIES)), lambda: _bodies(REPLIES)),
    "node-tables": Target(_refusals(_message(NODE_MESSAGES)), lambda: _bodies(NODE_MESSAGES)),
    "result": Target(_refusals(_result, ValueError, TypeError, KeyError, msgpack.UnpackException), _results),
    "request": Target(_refusals(_request), lambda: [encode_request(protocol_samples.REQUEST)]),
    "samples": Target(_refusals(decode_samples, ValueError, TypeError, KeyError), _samples),
    "slot": Target(_refusals(_slot), _slots),
    "contribution": Target(
        _refusals(Contribution.decode),
        lambda: [
            Contribution(tensors=(("w", "float32", (2, 3)),), own_nbytes=7, digests=(bytes(8),)).encode(),
        ],
    ),
    "pickle": Target(_refusals(_pickle, ValueError), _pickles),
    "torch-file": Target(_refusals(_foreign("torch.pt")), _stock_seeds("torch.pt")),
    "torch-legacy": Target(_refusals(_foreign("legacy.pt")), _stock_seeds("legacy.pt")),
    "safetensors-file": Target(_refusals(_foreign("model.safetensors")), _golden("format-v1-ranks/*.safetensors")),
    "hf-index": Target(
        _refusals(_foreign("hf/model.safetensors.index.json")), _stock_seeds("hf/model.safetensors.index.json")
    ),
    "dcp-metadata": Target(_refusals(_foreign("dcp/.metadata")), _stock_seeds("dcp/.metadata")),
    "dcp-data": Target(_refusals(_foreign("dcp/__0_0.distcp")), _stock_seeds("dcp/__0_0.distcp")),
}


@functools.cache
def corpus_of(name: str) -> list[bytes]:
    """Return the sound documents of a target, and those that broke it once."""
    kept = sorted((CORPUS / name).glob("*")) if (CORPUS / name).is_dir() else []
    return TARGETS[name].seeds() + [path.read_bytes() for path in kept]
