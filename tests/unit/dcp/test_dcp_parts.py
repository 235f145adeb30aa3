"""The small parts of `asyncckpt.dcp`: the streamed image, copies ahead, slices of files, trees from flat names."""

from __future__ import annotations

import io
import itertools
import random
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import dcp_calls
import pytest
import states
import torch
from in_process_writer import StorageWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import asyncckpt
from asyncckpt.dcp import SlicedBufferedReader, tensor_stream
from asyncckpt.dcp.saved_metadata import nested
from asyncckpt.dcp.tensor_stream import CopyAhead, LazyImage
from asyncckpt.format.layout import BoxSpec, build_layout, save_id_bytes
from asyncckpt.format.names import SaveId
from tests.simulated_device import SimulatedDevice

SAVE_ID = SaveId(1, 2, "0123456789ab")


def spec(fqn: str, tensor: torch.Tensor) -> BoxSpec:
    shape = tuple(tensor.shape)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return BoxSpec(fqn=fqn, dtype=dtype, global_shape=shape, offsets=(0,) * len(shape), sizes=shape)


@pytest.mark.parametrize("n_parts", [1, 3])
def test_pieces_of_an_image_are_the_file_s_bytes_wherever_they_are_cut(n_parts: int) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    tensors = [states.tensor_of(rng.choice(states.PICKLED_DTYPES), (rng.randrange(0, 4000),), n) for n in range(9)]
    specs = [spec(f"t{n}", tensor) for n, tensor in enumerate(tensors)]
    layout = build_layout(specs, n_parts=n_parts)
    whole = bytearray(sum(part.padded_nbytes for part in layout.parts))
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
    pieces = []
    with LazyImage(layout, [partial(flat.__getitem__, n) for n in range(9)], SAVE_ID) as image:
        for (start, nbytes), part in zip(image.parts, layout.parts, strict=True):
            whole[start : start + len(part.header)] = part.header
            whole[start + 46 : start + 74] = save_id_bytes(SAVE_ID)
            assert nbytes == part.nbytes
        for chunk, data in zip(layout.chunks, flat, strict=True):
            start = image.parts[chunk.part][0] + chunk.offset_bytes
            whole[start : start + chunk.nbytes] = bytes(data.tolist())
        cuts = sorted({0, len(image), *(rng.randrange(len(image)) for _ in range(30))})
        order = list(itertools.pairwise(cuts))
        rng.shuffle(order)
        pieces = [(low, bytes(image[low:high])) for low, high in order]
    assert b"".join(data for _, data in sorted(pieces)) == bytes(whole)


def test_a_tensor_is_resolved_once_late_and_let_go(tmp_path: Path) -> None:
    alive: list[str] = []
    seen: list[int] = []

    class Makes(DefaultSavePlanner):
        def lookup_object(self, index: Any) -> Any:
            found = super().lookup_object(index).clone()
            alive.append(index.fqn)
            weakref.finalize(found, alive.remove, index.fqn)
            seen.append(len(alive))
            return found

    saved = {f"t{n}": torch.full((5 << 20,), float(n)) for n in range(4)}  # 20 MiB each: more than an extent
    dcp_calls.save(saved, StorageWriter(tmp_path / "c", sync_files=False), planner=Makes())
    assert len(seen) == 4 and max(seen) <= 2 and not alive
    assert torch.equal(asyncckpt.load(tmp_path / "c")["t3"], saved["t3"])


def test_so_many_bytes_are_fetched_ahead_and_no_more() -> None:
    ahead = CopyAhead([10, 10, 10, 100, 10, 10], 25)
    assert ahead.begin(0) == [1, 2]
    assert ahead.begin(0) == []
    ahead.done(0)
    assert ahead.begin(1) == []
    ahead.done(1)
    assert ahead.begin(2) == []  # the large one is next, and never ahead
    ahead.done(2)
    assert ahead.begin(3) == [4, 5]
    assert CopyAhead([1, 1], 0).begin(0) == []


def test_threads_agree_on_what_is_fetched_ahead() -> None:
    ahead = CopyAhead([1] * 1000, 10_000)
    found: list[int] = []
    threads = [threading.Thread(target=lambda n=n: found.extend(ahead.begin(n))) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(set(found))


@pytest.mark.parametrize("ahead_nbytes", [0, 3000, 1 << 20])
def test_tensors_of_a_device_arrive_before_they_are_written(monkeypatch: pytest.MonkeyPatch, ahead_nbytes: int) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    device = SimulatedDevice(rng)
    kept: list[torch.Tensor] = []

    def pinned(like: torch.Tensor) -> torch.Tensor:
        kept.append(torch.zeros_like(like))
        device.registered[kept[-1].data_ptr()] = kept[-1].numel()
        return kept[-1]

    monkeypatch.setattr(tensor_stream, "pinned", pinned)
    values = [torch.randint(0, 250, (1000,), dtype=torch.uint8) for _ in range(8)]
    placed = [device.put(torch.zeros_like(value), n % 2) if n % 4 else value for n, value in enumerate(values)]

    def resolve(number: int) -> torch.Tensor:
        if number % 4:
            device.launch(number % 2, lambda: placed[number].copy_(values[number]))  # a planner's kernel
        return placed[number]

    specs = [spec(f"t{n}", value) for n, value in enumerate(values)]
    layout = build_layout(specs)
    resolves = [partial(resolve, n) for n in range(8)]
    with LazyImage(layout, resolves, SAVE_ID, ahead_nbytes, device) as image:
        found = b"".join(bytes(image[low : low + 700]) for low in range(0, len(image), 700))
    for chunk, value in zip(layout.chunks, values, strict=True):
        assert found[chunk.offset_bytes : chunk.offset_bytes + 1000] == states.bits_of(value)
    device.drain()
    assert not device.violations
    assert bool(kept) is (ahead_nbytes > 0)


def test_a_slice_of_a_file_is_a_file(tmp_path: Path) -> None:
    data = random.Random(3).randbytes(100_000)
    (tmp_path / "f").write_bytes(data)
    with open(tmp_path / "f", "rb") as file:
        one, other = SlicedBufferedReader(file, 1000, 50_000), SlicedBufferedReader(file, 60_000, 40_001)
        assert one.read(10) == data[1000:1010] and other.read(5) == data[60_000:60_005]
        assert one.tell() == 10 and one.read() == data[1010:51_000] and one.read() == b""
        assert one.seek(-4, io.SEEK_END) == 49_996 and one.read(100) == data[50_996:51_000]
        assert one.seek(5) == 5 and one.seek(2, io.SEEK_CUR) == 7 and one.read(1) == data[1007:1008]
        assert other.read() == data[60_005:], "the file ends before the slice does"
        buffer = bytearray(60_000)
        one.seek(0)
        assert one.readinto(buffer) == 50_000 and bytes(buffer[:50_000]) == data[1000:51_000]
        with pytest.raises(ValueError, match="before the slice"):
            one.seek(-1)
        one.close()
        other.close()
        assert not file.closed
    with pytest.raises(ValueError, match="no range"):
        SlicedBufferedReader(io.BytesIO(b""), -1, 2)


def hole() -> Any:
    return ("O", 99)


@pytest.mark.parametrize(
    ("paths", "tree"),
    [
        ({"a": ("a",)}, ("d", ("a", ("T", 0)))),
        ({"a.b": ("a", "b"), "a.c": ("a", "c")}, ("d", ("a", ("d", ("b", ("T", 0), "c", ("T", 1)))))),
        ({"a.1": ("a", 1), "a.0": ("a", 0)}, ("d", ("a", ("l", (("T", 1), ("T", 0)))))),
        ({"a.1": ("a", 1)}, ("d", ("a", ("l", (("O", 99), ("T", 0)))))),
        ({"a.5000": ("a", 5000)}, ("d", ("a", ("d", (5000, ("T", 0)))))),
        ({"a": ("a",), "a.b": ("a", "b")}, ("d", ("a", ("T", 0), "a.b", ("T", 1)))),
        ({"a": ("elsewhere",)}, ("d", ("a", ("T", 0)))),
        ({"a.b": "no path"}, ("d", ("a.b", ("T", 0)))),
        ({"a.b": ("a", 1.5)}, ("d", ("a.b", ("T", 0)))),
        (None, ("d", ("a.b", ("T", 0)))),
        ([1, 2], ("d", ("a.b", ("T", 0)))),
        ("text", ("d", ("a.b", ("T", 0)))),
    ],
)
def test_flat_names_become_a_tree_as_far_as_their_paths_go(paths: Any, tree: Any) -> None:
    leaves = {fqn: ("T", number) for number, fqn in enumerate(paths if isinstance(paths, dict) else ["a.b"])}
    assert nested(leaves, paths, hole) == tree
