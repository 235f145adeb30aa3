"""layout="dcp": what stock `torch.distributed.checkpoint` reads with nothing of ours, and we verify byte by byte."""

from __future__ import annotations

import datetime
import errno
import importlib
import io
import json
import pathlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import states
import torch
from storage_samples import FailingFiles, RecordingFiles, flip_byte

import asyncckpt
from asyncckpt import CheckpointerConfig, RankInfo, SyncCheckpointer
from asyncckpt.commit_hooks import HookRunner
from asyncckpt.distributed.run_agreement import Coordination
from asyncckpt.dtypes import UNCONVERTED
from asyncckpt.errors import (
    AsyncCkptError,
    CheckpointExistsError,
    CheckpointNotCommittedError,
    CommitUnknownError,
    ConfigError,
    CorruptCheckpointError,
    UnsupportedFormatError,
    UnsupportedLeafError,
)
from asyncckpt.format import dcp as dcp_layout
from asyncckpt.format import layout
from asyncckpt.format.index import decode_index, encode_index
from asyncckpt.format.manifest import decode_manifest
from asyncckpt.storage import catalog, commit
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import LocalStore
from asyncckpt.storage.verification import leftovers, verify_checkpoint
from asyncckpt.sync.writer import SyncWriter

dcp = pytest.importorskip("torch.distributed.checkpoint")

try:
    import numpy
except ModuleNotFoundError:
    numpy = None  # type: ignore[assignment]

FILES = Files()
CODES = [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ESTALE, errno.EINTR]
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of a load without a process group

NO_COPY = set(UNCONVERTED)
"""Dtypes that stock DCP writes and cannot load: `copy_` has no kernel for them."""


def saver(files: Files | None = None, **fields: Any) -> SyncCheckpointer:
    config = CheckpointerConfig(**{"layout": "dcp", "rank_info": RankInfo(0, 1), **fields})
    ranks = Coordination(RankInfo(0, 1), config, lambda: pytest.fail("no ranks here"), package="test")
    return SyncCheckpointer(SyncWriter(config, ranks, HookRunner(None), files), rank_info=RankInfo(0, 1))


def save(state: Any, path: pathlib.Path, files: Files | None = None, **fields: Any) -> None:
    with saver(files, **fields) as checkpointer:
        checkpointer.save(state, path)


def plain_state(seed: int = 0) -> dict[str, Any]:
    """A training state as people have it: nested, with tied tensors, numbers for keys, and plain values."""
    torch.manual_seed(seed)
    weight = torch.randn(40, 30)
    return {
        "model": {"embed": weight, "head": weight, "bias": torch.arange(30, dtype=torch.int16)},
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(40, 30)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1], "foreach": None}],
        },
        "epoch": 3,
        "name": "run",
        "history": [1, "x", 2.5],
        "blob": b"123",
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "nothing": torch.empty(0, 4),
    }


def stock_loaded(path: pathlib.Path, tmp_path: pathlib.Path) -> Any:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(str(path), tmp_path / "all.pt")
    return torch.load(tmp_path / "all.pt", weights_only=False)  # b"" is not on torch's list


def texts(value: Any) -> Any:
    """Return it with keys as DCP has them."""
    if isinstance(value, dict):
        return {str(key): texts(member) for key, member in value.items()}
    return [texts(v) for v in value] if isinstance(value, list) else value


def assert_equal(found: Any, expected: Any, where: str = "state") -> None:
    """Compare without regard to which tensors are one, and to the order of keys: DCP keeps neither."""
    if isinstance(expected, dict):
        assert set(found) == set(expected), where
        for key in expected:
            assert_equal(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for n, member in enumerate(expected):
            assert_equal(found[n], member, f"{where}[{n}]")
    else:
        states.assert_same(found, expected, where)


def test_stock_tools_read_every_leaf(tmp_path: pathlib.Path) -> None:
    save(plain_state(), tmp_path / "a", files_per_rank=2)
    assert_equal(stock_loaded(tmp_path / "a", tmp_path), texts(plain_state()))


def test_items_are_called_as_stock_save_calls_them(tmp_path: pathlib.Path) -> None:
    state = {**plain_state(), "a.b": {"c": [torch.ones(2), {"d": [torch.ones(1)]}], "e": [[1], [2]]}}
    save(state, tmp_path / "ours")
    dcp.save(state, checkpoint_id=str(tmp_path / "stock"), no_dist=True)
    ours, stock = (dcp.FileSystemReader(str(tmp_path / name)).read_metadata() for name in ("ours", "stock"))
    assert ours.state_dict_metadata == stock.state_dict_metadata
    assert ours.planner_data == stock.planner_data
    assert set(ours.storage_data) == set(stock.storage_data)
    assert ours.version == stock.version


def test_nothing_of_ours_is_needed_to_read_it(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(plain_state(), tmp_path / "a")
    for path in (tmp_path / "a").iterdir():
        if path.suffix in (".json", ".index"):
            path.unlink()
    target: dict[str, Any] = {"model": {"embed": torch.zeros(40, 30)}, "epoch": 0}
    with monkeypatch.context() as patch:
        for name in [name for name in sys.modules if name.partition(".")[0].startswith("asyncckpt")]:
            patch.setitem(sys.modules, name, None)  # it cannot be imported, by what is unpickled either
        with pytest.raises(ImportError):
            importlib.import_module("asyncckpt.dcp")
        dcp.load(target, checkpoint_id=str(tmp_path / "a"), no_dist=True)
    assert target["epoch"] == 3 and target["model"]["embed"].any()
    found = asyncckpt.load(tmp_path / "a")  # and we take it for what it is then
    expected = texts(plain_state())
    expected["optimizer"]["state"] = {0: expected["optimizer"]["state"]["0"]}  # parameters have numbers, not texts
    assert_equal(found, expected)
    assert verify_checkpoint(str(tmp_path / "a"), FILES).faults  # no manifest: not one of ours any more


def test_every_dtype_is_read_bit_for_bit(tmp_path: pathlib.Path) -> None:
    shapes = {"t": (3, 5), "zero_dim": (), "none": (0, 2)}
    state = {
        f"{name}-{dtype}": states.tensor_of(dtype, shape)
        for name, shape in shapes.items()
        for dtype in states.ALL_DTYPES
    }
    save(state, tmp_path / "a")
    states.assert_same(asyncckpt.load(tmp_path / "a"), state)
    assert_items_equal(tmp_path / "a", state)
    loadable = {name: tensor for name, tensor in state.items() if name.rpartition(".")[2] not in NO_COPY}
    target = {name: torch.empty_like(t) for name, t in loadable.items()}
    dcp.load(target, checkpoint_id=str(tmp_path / "a"), no_dist=True)
    states.assert_same(target, loadable)


def items(path: pathlib.Path) -> dict[str, Any]:
    """Return what `torch.load` makes of every item that `.metadata` names."""
    metadata = dcp.FileSystemReader(str(path)).read_metadata()
    found = {}
    for index, info in metadata.storage_data.items():
        data = (path / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        assert len(data) == info.length
        found[index.fqn, index.offset] = torch.load(io.BytesIO(data), weights_only=True)
    return found


def assert_items_equal(path: pathlib.Path, state: dict[str, Any]) -> None:
    found = items(path)
    states.assert_same({name: found[name, torch.Size([0] * t.dim())] for name, t in state.items()}, state)


def test_views_and_parameters_are_read_with_their_values(tmp_path: pathlib.Path) -> None:
    every = states.every_tensor()
    state = {
        name: every[name] for name in ("transposed", "strided", "expanded", "narrowed", "conj", "neg", "parameter")
    }
    save(state, tmp_path / "a")
    for name, found in stock_loaded(tmp_path / "a", tmp_path).items():
        assert states.bits_of(found) == states.bits_of(state[name]), name


PLAIN = [None, True, -5, 1 << 200, 0.5, float("nan"), "text", "\ud800", b"", b"\x00\xff", bytearray(b"x"), 1j, {1, 2}]
PLAIN += [
    (1, (2, 3)),
    [],
    [[1], [None]],
    torch.Size([2, 3]),
    torch.float32,
    torch.device("cpu"),
    torch.device("cuda:1"),
]


def test_plain_values_are_read(tmp_path: pathlib.Path) -> None:
    state = {"a": {str(n): value for n, value in enumerate(PLAIN)}}
    save(state, tmp_path / "a")
    states.assert_same(stock_loaded(tmp_path / "a", tmp_path), state)
    states.assert_same(asyncckpt.load(tmp_path / "a"), state)


def refused_values() -> Iterator[tuple[str, Any, str]]:
    yield "tuple", (torch.ones(1), 2), "a tuple with tensors"
    yield "inside", [1, (torch.ones(1),)], "a tuple with tensors"
    yield "bytes", bytes(1 << 17), "bytes so long"
    yield "date", datetime.date(2026, 1, 1), "a date"
    yield "frozen", frozenset({1}), "a frozenset"
    yield "pickled", io.BytesIO(b"x"), "a pickle"
    yield "slice", slice(1, 2), "layout='dcp' cannot store a slice"
    if numpy is not None:
        yield "array", numpy.arange(3), "a numpy array"


@pytest.mark.parametrize(
    ("name", "value", "said"), list(refused_values()), ids=lambda v: v if isinstance(v, str) else ""
)
def test_what_stock_readers_have_no_form_for_is_refused_by_name(
    tmp_path: pathlib.Path, name: str, value: Any, said: str
) -> None:
    with pytest.raises(UnsupportedLeafError, match=said) as caught:
        save({"a": {name: value}}, tmp_path / "a", allow_pickle=True)
    assert caught.value.leaf == f"a.{name}"
    assert not (tmp_path / "a").exists()


def test_ours_reads_it_back_exactly_and_says_the_layout(tmp_path: pathlib.Path) -> None:
    state = plain_state()
    save(state, tmp_path / "a", files_per_rank=3)
    states.assert_same(asyncckpt.load(tmp_path / "a"), state)
    target = plain_state(1)
    asyncckpt.load(tmp_path / "a", target)
    states.assert_same(target, state)
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    assert (manifest["layout"], manifest["must"]) == ("dcp", ["layout"])
    assert manifest[".metadata"]["nbytes"] == (tmp_path / "a" / ".metadata").stat().st_size
    verdict = verify_checkpoint(str(tmp_path / "a"), FILES)
    assert verdict.state == "ok" and verdict.contents is not None
    assert leftovers(str(tmp_path / "a"), FILES, verdict.contents) == []
    assert len(list((tmp_path / "a").glob("rank-*-part-*.distcp"))) == 3


def test_payloads_are_aligned_and_no_file_is_larger_than_the_limit(tmp_path: pathlib.Path) -> None:
    state = {"a": torch.randn(500, 301), "b": torch.randn(3), "c": torch.randn(99, 77, dtype=torch.float64)}
    save(state, tmp_path / "a", max_shard_bytes=65536)
    shards = list((tmp_path / "a").glob("rank-*-part-*.distcp"))
    assert len(shards) > 8 and all(p.stat().st_size <= 65536 for p in shards)
    verdict = verify_checkpoint(str(tmp_path / "a"), FILES)
    assert verdict.contents is not None
    chunks = [c for t in verdict.contents.tensors.values() for _, c in t.chunks]
    assert all(c.offset_bytes % 64 == 0 for c in chunks)
    assert_equal(stock_loaded(tmp_path / "a", tmp_path), state)


def test_a_limit_that_needs_too_many_files_is_refused() -> None:
    specs = [
        layout.BoxSpec(fqn=f"t{n}", dtype="uint8", global_shape=(9000,), offsets=(0,), sizes=(9000,))
        for n in range(layout.MAX_PARTS + 1)
    ]
    with pytest.raises(ConfigError, match="max_shard_bytes"):
        dcp_layout.build_dcp_layout(specs, max_nbytes=10_000)
    assert dcp_layout.build_dcp_layout([]) == layout.Layout(parts=(), chunks=())


def test_any_flipped_byte_is_found(tmp_path: pathlib.Path, rng: random.Random) -> None:
    save(plain_state(), tmp_path / "a")
    for path in sorted((tmp_path / "a").iterdir()):
        data = path.read_bytes()
        for offset in {0, len(data) - 1, *(rng.randrange(len(data)) for _ in range(12))}:
            flip_byte(str(path), offset)
            verdict = verify_checkpoint(str(tmp_path / "a"), FILES)
            assert verdict.faults and verdict.state in ("corrupt", "unsupported"), (path.name, offset)
            path.write_bytes(data)
    assert verify_checkpoint(str(tmp_path / "a"), FILES).state == "ok"


def test_a_flipped_byte_of_a_tensor_fails_the_load(tmp_path: pathlib.Path) -> None:
    state = {"w": torch.randn(1000)}
    save(state, tmp_path / "a")
    (shard,) = (tmp_path / "a").glob("*-part-*.distcp")
    flip_byte(str(shard), shard.read_bytes().index(states.bits_of(state["w"])) + 100)
    with pytest.raises(CorruptCheckpointError, match="'w'"):
        asyncckpt.load(tmp_path / "a")


def stock_sees(path: pathlib.Path) -> int | None:
    """Return which state stock readers find whole at a path, None: none; fails for one that is not whole."""
    if not (path / ".metadata").exists():
        return None
    found = {fqn: value for (fqn, _), value in items(path).items()}
    assert set(found) == {"n", "w"} and bool((found["w"] == found["n"]).all())
    return int(found["n"])


def ours_sees(path: pathlib.Path) -> int | None:
    try:
        catalog.read_manifest(str(path), LocalStore(FILES))
    except AsyncCkptError:
        return None
    found = asyncckpt.load(path)
    assert bool((found["w"] == found["n"]).all())
    return int(found["n"])


def numbered(n: int) -> dict[str, Any]:
    return {"n": n, "w": torch.full((100,), n)}


class Watched(RecordingFiles):
    """Looks at the checkpoint after every call that changes something: a crash could come then."""

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__()
        self.path = path
        self.seen: list[tuple[int | None, int | None]] = []

    def note(self) -> None:
        found = (stock_sees(self.path), ours_sees(self.path))
        if not self.seen or self.seen[-1] != found:
            self.seen.append(found)


def _watching(name: str) -> Callable[..., Any]:
    def call(self: Watched, *arguments: Any, **options: Any) -> Any:
        result = getattr(Files, name)(self, *arguments, **options)
        self.note()
        return result

    return call


for _name in ("link", "rename", "rename_noreplace", "unlink", "close", "ftruncate"):
    setattr(Watched, _name, _watching(_name))


def run_of_saves(path: pathlib.Path, *layouts: str) -> list[tuple[int | None, int | None]]:
    """Save to one path again and again; return what stock readers and ours found on the way."""
    files = Watched(path)
    for number, kind in enumerate(layouts):
        config_files = files if number == len(layouts) - 1 else None
        save(numbered(number), path, config_files, layout=kind, overwrite=number > 0)
    return files.seen


@pytest.mark.parametrize(
    ("layouts", "expected"),
    [
        (["dcp"], [(None, None), (0, 0)]),
        (["dcp", "dcp"], [(0, 0), (0, 1), (1, 1)]),
        (["safetensors", "dcp"], [(None, 0), (1, 0), (1, 1)]),
        (["dcp", "safetensors"], [(0, 0), (0, 1), (None, 1)]),
    ],
    ids=["first", "dcp-dcp", "safetensors-dcp", "dcp-safetensors"],
)
def test_at_every_instant_both_kinds_of_readers_find_a_whole_checkpoint_or_none(
    tmp_path: pathlib.Path, layouts: list[str], expected: list[tuple[int | None, int | None]]
) -> None:
    assert run_of_saves(tmp_path / "a", *layouts) == expected
    assert verify_checkpoint(str(tmp_path / "a"), FILES).state == "ok"


@pytest.mark.parametrize("standing", ["", "dcp", "safetensors"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
@pytest.mark.parametrize("every", [59, pytest.param(1, marks=pytest.mark.soak)])
def test_whatever_call_fails_nobody_is_shown_half_a_checkpoint(
    tmp_path: pathlib.Path, standing: str, late: bool, code: int, every: int, rng: random.Random
) -> None:
    """The call number `nth` fails, before or after it was done; until none is left to fail."""
    for nth in range(rng.randint(1, every), 1000, every):
        path = tmp_path / str(nth)
        if standing:
            save(numbered(0), path, layout=standing, fsync=False)
        files = FailingFiles(code, nth=nth, wanted=lambda name, args: True, late=late)
        error: AsyncCkptError | None = None
        try:
            save(numbered(1), path, files, overwrite=bool(standing))
        except AsyncCkptError as caught:
            error = caught
        stock, ours = stock_sees(path), ours_sees(path)
        if error is None:
            assert (stock, ours) == (1, 1), files.failed
        elif standing:
            assert ours in (0, 1) and (stock in (0, 1) or standing == "safetensors"), (files.failed, nth)
        if not isinstance(error, CommitUnknownError | None):
            assert (stock, ours) == (0 if standing == "dcp" else None, 0 if standing else None), (files.failed, nth)
        if files.failed is None:
            break
    assert nth > 60, "few calls were reached"


@pytest.fixture
def half(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A directory whose writer died between its manifest and `.metadata`."""
    path = tmp_path / "root" / "half"
    with monkeypatch.context() as patch:
        patch.setattr(commit, "_put_dcp_metadata", _dies)
        with pytest.raises(CommitUnknownError):
            save(numbered(5), path)
    assert (path / "manifest.json").exists() and not (path / ".metadata").exists()
    return path


def _dies(path: str, *rest: Any) -> None:
    raise OSError(5, "died", path)


@pytest.mark.usefixtures("no_clock")
def test_what_died_between_manifest_and_metadata_is_no_checkpoint_for_anybody(half: pathlib.Path) -> None:
    with pytest.raises(CheckpointNotCommittedError, match=r"no \.metadata"):
        asyncckpt.load(half)
    with pytest.raises(dcp.api.CheckpointException, match=r"\.metadata"):
        dcp.load({"w": torch.zeros(100)}, checkpoint_id=str(half), no_dist=True)
    assert asyncckpt.latest_checkpoint(half.parent) is None
    found = catalog.found_at(str(half), LocalStore(FILES))
    assert found is not None and found.state == "incomplete"
    assert catalog.next_epoch_beside(str(half), LocalStore(FILES)) == 2


@pytest.mark.parametrize("kind", ["dcp", "safetensors"])
def test_the_next_save_there_takes_the_place_of_what_died(half: pathlib.Path, kind: str) -> None:
    save(numbered(6), half, layout=kind)
    assert ours_sees(half) == 6
    assert stock_sees(half) == (6 if kind == "dcp" else None)
    assert verify_checkpoint(str(half), FILES).state == "ok"
    assert len({name.split(".")[1] for name in (p.name for p in half.glob("rank-*"))}) == 1


def test_a_committed_one_is_not_replaced_unless_that_was_asked_for(tmp_path: pathlib.Path) -> None:
    save(numbered(1), tmp_path / "a")
    with pytest.raises(CheckpointExistsError):
        save(numbered(2), tmp_path / "a")
    assert (stock_sees(tmp_path / "a"), ours_sees(tmp_path / "a")) == (1, 1)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_directory_of_stock_dcp_is_left_alone(tmp_path: pathlib.Path, overwrite: bool) -> None:
    dcp.save(numbered(1), checkpoint_id=str(tmp_path / "a"), no_dist=True)
    before = {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()}
    with pytest.raises(CheckpointExistsError, match="asyncckpt did not write its"):
        save(numbered(2), tmp_path / "a", overwrite=overwrite)
    assert {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()} == before


def test_a_failed_save_over_another_layout_takes_its_metadata_back(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(numbered(0), tmp_path / "a", layout="safetensors")

    class Refusing(Files):
        def rename(self, source: str, target: str) -> None:
            if target.endswith("manifest.json"):
                raise OSError(28, "No space left on device", target)
            super().rename(source, target)

    with pytest.raises(AsyncCkptError, match="No space"):
        save(numbered(1), tmp_path / "a", Refusing(), overwrite=True)
    assert (stock_sees(tmp_path / "a"), ours_sees(tmp_path / "a")) == (None, 0)
    assert not list((tmp_path / "a").glob("*.distcp"))


def test_a_reader_that_does_not_know_the_layout_refuses_it(tmp_path: pathlib.Path) -> None:
    save(numbered(1), tmp_path / "a")
    from asyncckpt.format.manifest import check_version

    document = json.loads((tmp_path / "a" / "manifest.json").read_text())
    with pytest.raises(UnsupportedFormatError, match="layout"):
        check_version(document, "asyncckpt_manifest", 1, what="manifest")


@pytest.mark.parametrize("damage", ["layout", "items", "other"])
def test_an_index_of_another_layout_than_its_manifest_is_refused(tmp_path: pathlib.Path, damage: str) -> None:
    import msgpack

    save(numbered(1), tmp_path / "a")
    (file,) = (tmp_path / "a").glob("*.index")
    raw = msgpack.unpackb(file.read_bytes())
    if damage == "layout":
        raw["layout"] = "zarr"
    elif damage == "items":
        raw["items"][0] = "../../etc/passwd"
    else:
        del raw["layout"]
    with pytest.raises(CorruptCheckpointError):
        decode_index(msgpack.packb(raw))


def test_index_and_manifest_come_back_as_they_were(tmp_path: pathlib.Path) -> None:
    from asyncckpt.format.manifest import encode_manifest

    save(numbered(1), tmp_path / "a")
    (file,) = (tmp_path / "a").glob("*.index")
    assert encode_index(decode_index(file.read_bytes())) == file.read_bytes()
    data = (tmp_path / "a" / "manifest.json").read_bytes()
    assert encode_manifest(decode_manifest(data)) == data
