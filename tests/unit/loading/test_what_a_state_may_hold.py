"""What a state may hold: all that the guide to saving and README name is built here, and comes back or is refused.

Each text is compared word by word with what is built from it, in both directions.
"""

from __future__ import annotations

import datetime
import math
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import states
import torch
from documented_code import README, ROOT

import asyncckpt
from asyncckpt.dtypes import DTYPES, SUB_BYTE
from asyncckpt.errors import UnsupportedLeafError
from tests.composite_samples import blocks, contexts, pair, parts

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantize"),
    pytest.mark.filterwarnings("ignore:Failed to initialize NumPy:UserWarning"),
]

SECTION = (ROOT / "docs/guides/saving.md").read_text().partition("## What a state may hold")[2].partition("\n## ")[0]
ITEMS = SECTION.partition("\n- ")[2].partition("\n\n")[0]
(LOADED_AS, KEYS) = re.findall(r"^(`dict`.*?same types\.|Keys may be.*?\.)", SECTION, re.MULTILINE | re.DOTALL)
(SENTENCE,) = (line for line in README.splitlines() if line.startswith("- [What a state may hold]"))


def assert_all_is_built(text: str, phrases: set[str], other_words: str) -> None:
    """Check that a text has each phrase, and but for `other_words` nothing else."""
    plain = " ".join(re.sub(r"\]\([^)]*\)", "]", text).replace("`", "").replace("[", "").replace("]", "").split())
    for phrase in sorted(phrases, key=len, reverse=True):
        assert phrase in plain, f"{phrase!r} is built, but not named in: {text}"
        plain = plain.replace(phrase, "", 1)
    left = {*re.findall(r"[^\s,;:.()-]+", plain)} - {*other_words.split()}
    assert not left, f"named, but not built: {left}: add a row to the table of this file"


# ---- the guide: leaves ----------------------------------------------------------------------------------------------


def _dense() -> torch.Tensor:
    return torch.arange(24.0).reshape(4, 6)


def _sparse(name: str) -> torch.Tensor:
    size = {"blocksize": (2, 2)} if name.startswith("BS") else {}
    return _dense().to_sparse(layout=getattr(torch, f"sparse_{name.lower()}"), **size)  # type: ignore[arg-type]


def _dtype(name: str) -> torch.Tensor:
    return states.tensor_of(getattr(torch, name), (3, 5))


def _quantized() -> dict[str, Any]:
    scales, zeros = torch.rand(4), torch.arange(4)
    return {
        "per tensor": torch.quantize_per_tensor(_dense(), 0.5, 1, torch.qint8),
        "per channel": torch.quantize_per_channel(_dense(), scales, zeros, 0, torch.quint8),
        "float parameters": torch.quantize_per_channel(_dense(), scales, torch.rand(4), 0, torch.quint8),
    }


def _in_training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


class Meter:
    """An object with a `state_dict()`."""

    def state_dict(self) -> dict[str, Any]:
        return {"mean": torch.ones(2), "count": 3}


def _dtensor(local: torch.Tensor) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(local, init_device_mesh("cpu", (1,)), [Shard(0)], run_check=False)


WRAPPED: dict[str, Callable[[torch.nn.Module], Any]] = {
    "DDP": torch.nn.parallel.DistributedDataParallel,
    "torch.compile": lambda model: torch.compile(model, backend="eager"),
}

Made = Callable[[], tuple[Any, Any]]


def _kept(make: Callable[[], Any]) -> Made:
    def made() -> tuple[Any, Any]:
        value = make()
        return value, value

    return made


def _with_state_dict(make: Callable[[], Any]) -> Made:
    def made() -> tuple[Any, Any]:
        value = make()
        return value, value.state_dict()

    return made


def _wrapped(name: str) -> Made:
    def made() -> tuple[Any, Any]:
        model = torch.nn.Linear(2, 2)
        return WRAPPED[name](model), model.state_dict()

    return made


def _sharded(locals_: Callable[[], dict[str, torch.Tensor]]) -> Made:
    def made() -> tuple[Any, Any]:
        found = locals_()
        return {name: _dtensor(one) for name, one in found.items()}, found

    return made


LEAVES: dict[str, Made] = {
    "tensors of any shape": _kept(lambda: [torch.ones(shape) for shape in [(), (0,), (1,), (2, 0, 3), (2, 3, 4, 5)]]),
    "every dtype": _kept(lambda: {name: _dtype(name) for name in DTYPES if hasattr(torch, name)}),
    "integers of fewer than 8 bits": _kept(lambda: {name: _dtype(name) for name in SUB_BYTE if hasattr(torch, name)}),
    "any device": lambda: (
        [torch.ones(2, device=one) for one in ("cpu", *("cuda",) * torch.cuda.is_available())],
        [torch.ones(2) for _ in ("cpu", *("cuda",) * torch.cuda.is_available())],
    ),
    "DTensors": _sharded(
        lambda: {str(one): states.tensor_of(one, (4, 8)) for one in states.ALL_DTYPES} | {"none": torch.ones(0, 2)}
    ),
    "shard types": lambda: (
        {
            "slice": asyncckpt.ShardedSlice(torch.ones(2, 3), (2, 3), (0, 0)),
            "flat": asyncckpt.FlatShard(torch.ones(6), (2, 3), 0),
        },
        {"slice": torch.ones(2, 3), "flat": torch.ones(2, 3)},
    ),
    "sparse tensors (COO, CSR, CSC, BSR, BSC)": _kept(
        lambda: {name: _sparse(name) for name in ("COO", "CSR", "CSC", "BSR", "BSC")}
    ),
    "quantized tensors of torch": _kept(_quantized),
    "nested tensors of layout torch.jagged": _kept(
        lambda: torch.nested.nested_tensor_from_jagged(_dense(), torch.tensor([0, 1, 4]))
    ),
    "tensor subclasses that implement __tensor_flatten__ and __tensor_unflatten__": _kept(lambda: blocks(0)),
    "in one another": _kept(lambda: pair(1)),
    "as Parameters": lambda: (torch.nn.Parameter(pair(1), requires_grad=False), pair(1)),
    "as local tensors of DTensors": _sharded(lambda: {"blocks": blocks(0)}),
    "modules": _with_state_dict(lambda: torch.nn.BatchNorm1d(3)),
    "optimizers": _with_state_dict(lambda: _in_training()[1]),
    "schedulers": _with_state_dict(lambda: torch.optim.lr_scheduler.StepLR(_in_training()[1], 3)),
    "all other objects with a state_dict()": _with_state_dict(Meter),
    **{name: _wrapped(name) for name in WRAPPED},
    "numbers": _kept(lambda: [0, -1, 1 << 200, True, 0.1, -0.0, math.nan, -math.inf]),
    "strings": _kept(lambda: ["", "grüße\0\U0001f600", "\ud800"]),
    "bytes": _kept(lambda: [b"", b"\x00\xff", bytes(1 << 17), bytearray(b"abc")]),
    "None": _kept(lambda: None),
    "complex numbers": _kept(lambda: [1j, complex(math.nan, -0.0)]),
    "sets": _kept(lambda: [set(), {1, "a", (2, 3)}, frozenset({None, 1.5})]),
    "slices": _kept(lambda: [slice(1, 2), slice(None, 5, -1)]),
    "dates": _kept(
        lambda: [
            datetime.date(2026, 1, 2),
            datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.timezone.utc),
            datetime.time(1, 2),
            datetime.timedelta(-1, 2, 3),
        ]
    ),
    "torch.dtype": _kept(lambda: [torch.float32, torch.bfloat16]),
    "torch.device": _kept(lambda: [torch.device("cpu"), torch.device("cuda", 3)]),
    "torch.Size": _kept(lambda: [torch.Size([]), torch.Size([2, 0, 3])]),
    "numpy scalars": _kept(states.every_scalar),
    "arrays": _kept(states.every_array),
}
"""What the guide names -> what is saved, and what comes back."""

REFUSED: dict[str, Callable[[], Any]] = {
    "torch's bits dtypes (torch.bits8 and the like)": lambda: torch.zeros(2, dtype=torch.uint8).view(torch.bits8),
    "there only such as consist of plain tensors": lambda: _dtensor(pair(0)),
}

ELSEWHERE = {"torchao's optimizer states and quantized weights": "tests/frameworks/test_torchao.py"}


@pytest.fixture
def group() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def comparable(value: Any) -> Any:
    """Return the same with tensors of other layouts and of subclasses as what they consist of."""
    if isinstance(value, dict):
        for key in value:
            value[key] = comparable(value[key])
        return value
    if isinstance(value, list):
        return [comparable(one) for one in value]
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout is torch.jagged:
        return ["jagged", value.values(), value.offsets()]
    if value.layout is not torch.strided:
        return [str(value.layout), value.to_dense()]
    if value.is_quantized:
        return [value.qscheme(), value.dtype, value.int_repr(), value.dequantize()]
    if hasattr(value, "__tensor_flatten__"):
        return [str(contexts(value)), *parts(value)]
    return value


def test_all_leaves_that_the_guide_names_are_built() -> None:
    words = "including except on and the such as also The wrappers of are removed so that names those model itself"
    assert_all_is_built(ITEMS, {*LEAVES, *REFUSED, *ELSEWHERE}, words)
    assert all((ROOT / path).exists() for path in ELSEWHERE.values())


@pytest.mark.parametrize("name", LEAVES)
def test_each_leaf_comes_back(name: str, tmp_path: Path, registered: None, group: None) -> None:
    saved, expected = LEAVES[name]()
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save({"leaf": saved}, tmp_path / "c")
    states.assert_same(comparable(asyncckpt.load(tmp_path / "c")["leaf"]), comparable(expected))


def test_modules_optimizers_and_schedulers_are_filled_in_place(tmp_path: Path) -> None:
    def made() -> dict[str, Any]:
        model, optimizer = _in_training()
        return {"model": model, "optim": optimizer, "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 3)}

    saved, target = made(), made()
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save(saved, tmp_path / "c")
    asyncckpt.load(tmp_path / "c", target)
    for name, one in saved.items():
        states.assert_same(target[name].state_dict(), one.state_dict())


@pytest.mark.parametrize(
    "make",
    [
        *REFUSED.values(),
        lambda: torch.ones(2).as_subclass(type("Plain", (torch.Tensor,), {})),
        object,
        lambda: print,
    ],
)
def test_any_other_leaf_is_refused_by_its_path(make: Any, tmp_path: Path, group: None) -> None:
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer, pytest.raises(UnsupportedLeafError) as caught:
        checkpointer.save({"a": [{"b": make()}]}, tmp_path / "c")
    assert caught.value.leaf.startswith("a.0.b") and not (tmp_path / "c").exists()


# ---- the guide: containers and keys ---------------------------------------------------------------------------------

CONTAINERS: dict[str, Any] = {
    "dict": {"a": 1},
    "OrderedDict": OrderedDict(b=2),
    "Counter": Counter("aab"),
    "defaultdict": defaultdict(list, c=[]),
    "list": [torch.ones(1)],
    "tuple": (torch.ones(1), 2),
    "deque": deque([1, {}], 3),
}

SOME_KEYS: dict[str, list[Any]] = {
    "strings": ["a", ""],
    "numbers": [7, -(1 << 62), 0.5, -math.inf],
    "bools": [True, False],
    "bytes": [b"", b"x"],
    "None": [None],
    "tuples of these": [(), (0, ("a", None)), (0.5, True, b"y")],
}


def test_all_containers_and_keys_that_the_guide_names_are_built_and_come_back(tmp_path: Path) -> None:
    assert_all_is_built(LOADED_AS, {*CONTAINERS}, "and are loaded as the same types")
    assert_all_is_built(KEYS, {*SOME_KEYS, "NaN"}, "Keys may be except and")
    state = {**CONTAINERS, "keys": {key: n for keys in SOME_KEYS.values() for n, key in enumerate(keys)}}
    assert len(state["keys"]) == sum(map(len, SOME_KEYS.values()))
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save(state, tmp_path / "c")
        with pytest.raises(UnsupportedLeafError):
            checkpointer.save({math.nan: 1}, tmp_path / "refused")
    states.assert_same(asyncckpt.load(tmp_path / "c"), state)


# ---- README ---------------------------------------------------------------------------------------------------------

REFUSED_BY_DCP: dict[str, Callable[[], Any]] = {
    "most of these": lambda: blocks(0),
    "sparse": lambda: _sparse("CSR"),
    "nested": lambda: torch.nested.nested_tensor_from_jagged(_dense(), torch.tensor([0, 1, 4])),
    "quantized": lambda: _quantized()["per channel"],
    "sub-byte tensors": lambda: torch.zeros(2, dtype=torch.uint8).view(torch.uint4),
}


def test_readme_names_nothing_else() -> None:
    needed = "tensor subclasses need __tensor_flatten__ and __tensor_unflatten__"
    assert_all_is_built(SENTENCE, {needed, *REFUSED_BY_DCP}, "What a state may hold asyncckpt dcp refuses and")


@pytest.mark.parametrize("lacks", ["__tensor_flatten__", "__tensor_unflatten__"])
def test_a_tensor_subclass_needs_both_functions(lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = blocks(0)
    monkeypatch.delattr(next(kind for kind in type(sample).__mro__ if lacks in vars(kind)), lacks)
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer, pytest.raises(UnsupportedLeafError):
        checkpointer.save({"a": sample}, tmp_path / "c")


@pytest.mark.parametrize("name", REFUSED_BY_DCP)
def test_stock_dcp_with_our_writer_refuses_them_by_name(name: str, tmp_path: Path) -> None:
    pytest.importorskip("numpy", reason="torch.distributed.checkpoint needs numpy")
    import dcp_calls

    from asyncckpt.dcp import StorageWriter

    error = dcp_calls.failed_save({"a": REFUSED_BY_DCP[name]()}, StorageWriter(tmp_path / "c"))
    assert isinstance(error, UnsupportedLeafError) and error.leaf == "a"
