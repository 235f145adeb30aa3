"""What is no file where a checkpoint has files, and documents that promise the sky: errors of ours, at once."""

from __future__ import annotations

import io
import json
import os
import pathlib
import pickle
import resource
import shutil
import socket
import stat
import struct
import time
import zipfile
from collections.abc import Callable, Iterator

import foreign_samples
import msgpack
import pytest
import torch
from format_samples import reseal

import asyncckpt
from asyncckpt.errors import AsyncCkptError, CorruptCheckpointError, InsufficientMemoryError, UnsupportedFormatError
from asyncckpt.format.objects import decode_objects
from asyncckpt.storage.catalog import next_epoch_beside, read_manifest, scan
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import LocalStore
from asyncckpt.storage.verification import verify_checkpoint

FILES = Files()
STORE = LocalStore()
ROOM_NBYTES = 512 << 20


@pytest.fixture(autouse=True)
def in_bounds() -> Iterator[None]:
    """No more memory than there is room for, and no hang: what waits for a pipe waits for ever."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + ROOM_NBYTES, before[1]))
    started = time.monotonic()
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)
    assert time.monotonic() - started < 30


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("strange") / "c"
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save({"a": torch.arange(3000.0), "n": 7}, path)
    return path


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """Checkpoints of other formats, by their own tools."""
    pytest.importorskip("numpy")
    pytest.importorskip("safetensors")
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("theirs")
    return {kind: foreign_samples.write(kind, root) for kind in foreign_samples.KINDS}


def a_pipe(path: pathlib.Path) -> None:
    os.mkfifo(path)


def a_socket(path: pathlib.Path) -> None:
    fd = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{fd}/s")
    os.close(fd)
    os.rename(path.parent / "s", path)


def a_device(path: pathlib.Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make devices")
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero: without end
    except PermissionError:
        pytest.skip("no devices may be made here")


def a_directory(path: pathlib.Path) -> None:
    path.mkdir()


def a_link_to_a_device(path: pathlib.Path) -> None:
    path.symlink_to("/dev/zero")


def a_link_to_itself(path: pathlib.Path) -> None:
    path.symlink_to(path.name)


STRANGE = [a_pipe, a_socket, a_device, a_directory, a_link_to_a_device, a_link_to_itself]


@pytest.mark.parametrize("make", STRANGE)
@pytest.mark.parametrize("pattern", ["manifest.json", "*.index", "*.objects.json", "*.safetensors"])
def test_what_is_no_file_in_a_checkpoint_of_ours_is_named_at_once(
    ours: pathlib.Path, tmp_path: pathlib.Path, pattern: str, make: Callable[[pathlib.Path], None]
) -> None:
    path = tmp_path / "c"
    shutil.copytree(ours, path)
    victim = next(path.glob(pattern))
    victim.unlink()
    make(victim)
    with pytest.raises(CorruptCheckpointError) as caught:
        asyncckpt.load(path)
    assert caught.value.file == victim.name
    assert verify_checkpoint(str(path), FILES).state == "corrupt"
    assert verify_checkpoint(str(path), FILES, fast=True).state == "corrupt"
    assert [f.state for f in scan(str(tmp_path), STORE)] == ["corrupt" if pattern == "manifest.json" else "committed"]
    assert next_epoch_beside(str(tmp_path / "next"), STORE) == read_manifest(str(ours), STORE).save_id.epoch + 1


@pytest.mark.parametrize("make", STRANGE)
@pytest.mark.parametrize("kind", foreign_samples.KINDS)
def test_what_is_no_file_in_another_format_is_an_error_of_ours_at_once(
    theirs: dict[str, pathlib.Path], tmp_path: pathlib.Path, kind: str, make: Callable[[pathlib.Path], None]
) -> None:
    path = tmp_path / theirs[kind].name
    (shutil.copytree if theirs[kind].is_dir() else shutil.copy)(theirs[kind], path)
    victims = [path] if path.is_file() else [p for p in path.iterdir() if p.name != "config.json"]
    for victim in victims:
        kept = victim.read_bytes()
        victim.unlink()
        make(victim)
        if make is a_directory and victim == path:
            pass  # an empty directory, which is no checkpoint either
        with pytest.raises((AsyncCkptError, OSError)):
            asyncckpt.load(path)
        (victim.rmdir if make is a_directory else victim.unlink)()
        victim.write_bytes(kept)
    assert asyncckpt.load(path)


# ---- bombs ----------------------------------------------------------------------------------------------------------


def zip_of(entries: dict[str, bytes], *, compressed: bool = False) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return stream.getvalue()


def _many_entries() -> bytes:
    """A directory of a hundred thousand entries, all of which are the same few bytes."""
    data = zip_of({"a/data.pkl": b"\x80\x02}."})
    end = data.rindex(b"PK\x05\x06")
    directory = data[data.rindex(b"PK\x01\x02") : end]
    count = 60_000
    tail = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, count, count, count * len(directory), end - len(directory), 0)
    return data[: end - len(directory)] + directory * count + tail


def _alike(after: bytes) -> bytes:
    """Numbers whose hashes are all 0, in a pickle."""
    numbers = (n * ((1 << 61) - 1) << 8 for n in range(1 << 8, 60_000))
    return b"".join(b"\x8a\x0b" + number.to_bytes(11, "little") + after for number in numbers)


def _safetensors(header: object, length: int | None = None) -> bytes:
    raw = json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw


def _tensor(shape: list[int], end: int) -> dict[str, object]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}


HUGE = (1 << 60).to_bytes(8, "little")
BOMBS: dict[str, Callable[[], bytes]] = {
    "zip that unpacks to gigabytes": lambda: zip_of({"a/data.pkl": bytes(50 << 20)}, compressed=True),
    "zip of one entry many times": _many_entries,
    "zip64 of 2**60 bytes": lambda: (
        zip_of({"a/data.pkl": b"\x80\x02}."})[:-22]
        + struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 1, 1, 1 << 60, 0)
        + struct.pack("<4sLQL", b"PK\x06\x07", 0, 0, 1)
        + struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    ),
    "pickle of a text of 2**60 bytes": lambda: zip_of({"a/data.pkl": b"\x80\x04\x8d" + HUGE}),
    "pickle of bytes of 2**60 bytes": lambda: zip_of({"a/data.pkl": b"\x80\x04\x8e" + HUGE}),
    "pickle of a bytearray of 2**60": lambda: zip_of({"a/data.pkl": b"\x80\x05\x96" + HUGE}),
    "pickle of a frame of 2**60": lambda: zip_of({"a/data.pkl": b"\x80\x04\x95" + HUGE}),
    "pickle of an int of 2**31 bytes": lambda: zip_of({"a/data.pkl": b"\x80\x02\x8b\xff\xff\xff\x7f"}),
    "pickle of keys of one hash": lambda: zip_of({"a/data.pkl": b"\x80\x02}(" + _alike(b"N") + b"u."}),
    "pickle of members of one hash": lambda: zip_of({"a/data.pkl": b"\x80\x04\x8f(" + _alike(b"") + b"\x90."}),
    "pickle of a frozenset of one hash": lambda: zip_of({"a/data.pkl": b"\x80\x04(" + _alike(b"") + b"\x91."}),
    "pickle of keys of one hash, one by one": lambda: zip_of({"a/data.pkl": b"\x80\x02}" + _alike(b"Ns") + b"."}),
    "pickle of pairs of one hash": lambda: zip_of(
        {"a/data.pkl": b"\x80\x02ccollections\nOrderedDict\n](" + _alike(b"N\x86") + b"e\x85R."}
    ),
    "pickle of lists inside lists": lambda: zip_of({"a/data.pkl": b"\x80\x02" + b"](" * 300_000 + b"e" * 300_000}),
    "safetensors header of 2**60 bytes": lambda: _safetensors({}, 1 << 60),
    "safetensors header of 2**63 bytes": lambda: _safetensors({}, (1 << 64) - 1),
    "safetensors tensor of 2**62 elements": lambda: _safetensors({"a": _tensor([1 << 62], 0)}),
    "safetensors shape that overflows": lambda: _safetensors({"a": _tensor([1 << 31] * 60, 0)}),
    "safetensors shape of a thousand": lambda: _safetensors({"a": _tensor([1] * 1000, 4)}) + b"aaaa",
    "safetensors number of many digits": lambda: (20_006).to_bytes(8, "little") + b'{"a":' + b"9" * 20_000 + b"}",
    "safetensors nested without end": lambda: (200_000).to_bytes(8, "little") + b'{"a":' * 40_000,
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_file_that_promises_the_sky_is_refused_in_little_memory_and_time(name: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "bomb").write_bytes(BOMBS[name]())
    started = time.process_time()
    with pytest.raises((CorruptCheckpointError, UnsupportedFormatError)):
        asyncckpt.load(tmp_path / "bomb")
    assert time.process_time() - started < 5


def test_dcp_metadata_that_names_files_elsewhere_read_nothing_there(
    theirs: dict[str, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    for n, name in enumerate(("../away/__0_0.distcp", "/dev/zero", "a\0b", "", ".", "..", "x" * 5000)):
        path = tmp_path / f"d{n}"
        shutil.copytree(theirs["dcp"], path)
        if n == 0:
            shutil.copytree(theirs["dcp"], tmp_path / "away")
        metadata = pickle.loads((path / ".metadata").read_bytes())
        for info in metadata.storage_data.values():
            info.relative_path = name
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(CorruptCheckpointError):
            asyncckpt.load(path)


@pytest.mark.parametrize("offset", [1 << 60, (1 << 63) - 1, 1 << 63, 1 << 70, -1])
def test_dcp_metadata_with_absurd_places_are_refused(
    theirs: dict[str, pathlib.Path], tmp_path: pathlib.Path, offset: int
) -> None:
    shutil.copytree(theirs["dcp"], tmp_path / "d")
    metadata = pickle.loads((tmp_path / "d" / ".metadata").read_bytes())
    for name in ("offset", "length"):
        for info in metadata.storage_data.values():
            setattr(info, name, offset)
        (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(CorruptCheckpointError):
            asyncckpt.load(tmp_path / "d")


@pytest.mark.parametrize(
    ("numel", "error"),
    [(1 << 38, InsufficientMemoryError), (1 << 60, InsufficientMemoryError), (1 << 61, CorruptCheckpointError)],
)
def test_a_tensor_that_no_memory_holds_is_an_error_of_ours(
    tmp_path: pathlib.Path, numel: int, error: type[AsyncCkptError]
) -> None:
    pytest.importorskip("numpy")
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    foreign_samples.save_dcp({"a": torch.arange(6.0)}, tmp_path / "d")
    metadata = pickle.loads((tmp_path / "d" / ".metadata").read_bytes())
    size = torch.Size([numel])
    metadata.state_dict_metadata["a"].size = size
    metadata.state_dict_metadata["a"].chunks = [ChunkStorageMetadata(offsets=torch.Size([0]), sizes=size)]
    (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(error):
        asyncckpt.load(tmp_path / "d")
    with pytest.raises(error), asyncckpt.open_checkpoint(tmp_path / "d") as found:
        found.tensor("a")


def test_a_checkpoint_of_ours_whose_shard_is_a_hole_of_terabytes_is_an_error_of_ours(tmp_path: pathlib.Path) -> None:
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save({"a": torch.zeros(2048)}, tmp_path / "c")
    shard, index_path = next((tmp_path / "c").glob("*.safetensors")), next((tmp_path / "c").glob("*.index"))
    nbytes = 1 << 40
    index = msgpack.unpackb(index_path.read_bytes())
    structure = msgpack.unpackb(index["structure"])
    offset = structure["tensors"][0][3][0][1]
    structure["tensors"][0][2], structure["tensors"][0][3][0][2] = [(nbytes - offset) // 4], nbytes - offset
    structure["parts"] = [nbytes]
    index["structure"], index["block_nbytes"] = msgpack.packb(structure), 64 << 20
    index["shards"][0][1:] = [nbytes, bytes(8 * (nbytes // (64 << 20)))]
    reseal(tmp_path / "c", msgpack.packb(index))
    os.truncate(shard, nbytes)
    with pytest.raises((InsufficientMemoryError, CorruptCheckpointError)):
        asyncckpt.load(tmp_path / "c")


OBJECT_BOMBS = {
    "lists inside lists": "[" * 100_000 + "]" * 100_000,
    "objects inside objects": '{"$":"tuple","v":[' * 20_000 + "]}" * 20_000,
    "a number of many digits": "9" * 1_000_000,
    "a float of many digits": "0." + "9" * 1_000_000,
    "an exponent": "1e999999999",
    "bytes that are none": '{"$":"bytes","v":"!!!!"}',
    "a time span beyond time": '{"$":"timedelta","v":[1e308,0,0]}',
    "keys of one hash": '{"$":"dict","v":['
    + ",".join(f'[{{"$":"int","v":"{n * ((1 << 61) - 1) << 8:x}"}},0]' for n in range(256, 40_000))
    + "]}",
    "members of one hash": '{"$":"set","v":['
    + ",".join(f'{{"$":"torch.device","v":"cuda:{n}"}}' for n in range(40_000))
    + "]}",
    "a set of what cannot be hashed": '{"$":"set","v":[[1]]}',
}


@pytest.mark.parametrize("name", OBJECT_BOMBS)
def test_an_objects_file_that_promises_the_sky_is_refused_or_plain(name: str) -> None:
    from asyncckpt.format.names import SaveId
    from asyncckpt.format.objects import decode_value

    save_id = SaveId(1, 0, "0" * 12)
    data = f'{{"asyncckpt_objects":1,"save_id":"{save_id}","values":[{OBJECT_BOMBS[name]}]}}'.encode()
    started = time.process_time()
    try:
        (form,) = decode_objects(data, save_id, 1)
        decode_value(form)
    except (AsyncCkptError, ValueError):
        pass
    assert time.process_time() - started < 5
