"""State dicts for tests: every kind of leaf, random structures with mutations, and a comparison that is exact."""

from __future__ import annotations

import copy
import datetime
import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

from asyncckpt.dtypes import DTYPES, SUB_BYTE
from asyncckpt.state_dict.flatten import HOIST_NBYTES

ALL_DTYPES = [getattr(torch, name) for name in DTYPES if hasattr(torch, name)]
PICKLED_DTYPES = [dtype for dtype in ALL_DTYPES if str(dtype).removeprefix("torch.") not in SUB_BYTE]
"""Those that `torch.save` and the planners of `torch.distributed.checkpoint` know."""


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Return a tensor of random bits; every bit pattern may occur, NaNs with payloads included."""
    numel = math.prod(shape)
    data = bytearray(random.Random(seed).randbytes(numel * dtype.itemsize))
    if dtype is torch.bool:
        data = bytearray(b & 1 for b in data)
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(shape)


def resized(nbytes: int) -> torch.Tensor:
    """Return 1,000 float32 ones whose storage was made `nbytes` long afterwards: less than they take."""
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def every_tensor() -> dict[str, torch.Tensor]:
    """One tensor of every dtype, and every shape that is out of the ordinary."""
    found = {f"dtype_{str(d).removeprefix('torch.')}": tensor_of(d, (3, 5), n) for n, d in enumerate(PICKLED_DTYPES)}
    base = tensor_of(torch.float32, (8, 6), 1)
    complex_base = torch.complex(torch.arange(6.0), torch.arange(6.0) + 1)
    return {
        **found,
        "zero_dim": tensor_of(torch.bfloat16, (), 2),
        "one_byte": tensor_of(torch.uint8, (), 3),
        "empty": torch.empty(0, 4, dtype=torch.int16),
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "expanded": torch.arange(3.0).expand(4, 3),
        "narrowed": base[2:5],
        "conj": complex_base.conj(),
        "neg": complex_base.conj().imag,
        "parameter": torch.nn.Parameter(torch.randn(4, 4)),
        "special": torch.tensor([math.nan, math.inf, -math.inf, -0.0, 5e-324], dtype=torch.float64),
        "large": tensor_of(torch.float32, (300, 1000), 4),
    }


def every_object() -> dict[str, Any]:
    """One value of every type that is stored as an object."""
    return {
        "none": None,
        "true": True,
        "one": 1,
        "big": 1 << 200,
        "negative": -(1 << 63) - 1,
        "float": 0.1,
        "nan": math.nan,
        "inf": -math.inf,
        "minus_zero": -0.0,
        "text": "grüße\u2028\0\U0001f600",
        "surrogate": "\ud800x\udfff\ud800\udc00",
        "bytes": b"\x00\xff",
        "hoisted": random.Random(5).randbytes(HOIST_NBYTES + 3),
        "just_hoisted": bytes(HOIST_NBYTES),
        "just_not_hoisted": bytes(HOIST_NBYTES - 1),
        "bytearray": bytearray(b"abc"),
        "complex": complex(math.nan, -0.0),
        "set": {1, "a", (2, 3)},
        "frozenset": frozenset({None, 1.5}),
        "slice": slice(None, 5, -1),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 3),
        "size": torch.Size([2, 0, 3]),
        "empty_size": torch.Size([]),
        "offset": datetime.datetime(2024, 2, 29, tzinfo=datetime.timezone(datetime.timedelta(hours=5, minutes=45))),
        "datetime": datetime.datetime(2024, 2, 29, 1, 2, 3, 4),
        "utc": datetime.datetime(2024, 2, 29, tzinfo=datetime.timezone.utc),
        "date": datetime.date(1, 1, 1),
        "time": datetime.time(23, 59, 59, 999999),
        "timedelta": datetime.timedelta(-1, 2, 3),
        "flat_list": [1, 2.5, "x", None, True, [3, (4,)]],
        "flat_tuple": (0.9, 0.999),
        "deep_flat": [[[[[1], []], ()]]],
        "deque": deque([1, [2.5, (None,)]], 5),
    }


def every_array() -> dict[str, Any]:
    """One numpy array of every dtype that torch has too, and every layout; nothing where numpy is not installed."""
    if not _HAS_NUMPY:
        return {}
    np: Any = _numpy
    kinds = ("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16")
    random_bits = random.Random(6)
    found = {f"dtype_{kind}": np.frombuffer(random_bits.randbytes(48), dtype=kind).copy() for kind in kinds[1:]}
    base = np.arange(24.0).reshape(4, 6)
    frozen = np.arange(5)
    frozen.flags.writeable = False
    return {
        **found,
        "dtype_?": np.array([True, False]),
        "zero_dim": np.array(2.5),
        "empty": np.empty((0, 3), np.int16),
        "transposed": base.T,
        "reversed": base[::-1, ::2],
        "frozen": frozen,
        "broadcast": np.broadcast_to(np.float32(3), (2, 3)),
        "longlong": np.array([1], np.longlong),
    }


def every_scalar() -> dict[str, Any]:
    """One numpy scalar of every kind; nothing where numpy is not installed."""
    if not _HAS_NUMPY:
        return {}
    np: Any = _numpy
    kinds = ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16")
    found = {kind: np.frombuffer(random.Random(7).randbytes(16), dtype=kind)[0] for kind in kinds}
    signalling = np.frombuffer(bytes.fromhex("0100a07f"), np.float32)[0]
    return {
        **found,
        "bool": np.bool_(True),
        "nan": np.float64("nan"),
        "signalling": signalling,
        "text": np.str_("grüße\U0001f600"),
        "no_text": np.str_(""),
        "bytes": np.bytes_(b"\x00\xff"),
        "trailing": (np.str_("a\0"), np.bytes_(b"a\0")),
        "time": np.datetime64("2024-02-29T01:02:03.000000004", "ns"),
        "not_a_time": np.datetime64("NaT"),
        "duration": np.timedelta64(-3, "25s"),
        "in_list": [np.float64(0.5), 1, [np.int64(3)]],
        "in_set": {np.int32(5)},
    }


def every_leaf() -> dict[Any, Any]:
    """Everything that a checkpoint may hold, nested in every kind of container."""
    tensors = every_tensor()
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    tied = torch.randn(7, 3)
    ordered: OrderedDict[str, Any] = OrderedDict([("z", torch.ones(2)), ("a", 1)])
    return {
        "model": module.state_dict(),
        "tensors": tensors,
        "objects": every_object(),
        "arrays": every_array(),
        "scalars": every_scalar(),
        "ordered": ordered,
        "optim": {"state": {0: {"step": torch.tensor(3.0)}, -7: {}}, "param_groups": [{"lr": 1e-3, "params": [0, 1]}]},
        "nested": [torch.arange(4), (torch.zeros(()), {"deep": [b"x", torch.ones(1, dtype=torch.bool)]}), []],
        "counter": Counter({3: 2, "x": -1}),
        "default": defaultdict(list, {"a": [1], "b": [torch.ones(2)]}),
        "deque": deque([torch.ones(3), {"n": 1}], 4),
        "keys": {(0, ("a", None)): torch.ones(1), None: 1, 0.5: {}, True: 2, b"x": torch.zeros(1)},
        "empties": {"dict": {}, "list": [], "tuple": (), "ordered": OrderedDict(), "nested": [{}, ()]},
        "tied": {"first": tied, "second": tied, "view": tied[:], "row": tied[1:2]},
        "step": 12,
    }


def bits_of(tensor: torch.Tensor) -> bytes:
    """Return the elements' bytes in row-major order."""
    with torch.no_grad():
        flat = tensor.detach().resolve_conj().resolve_neg()
        flat = (flat.view(torch.uint8) if flat.itemsize == 1 else flat).cpu().contiguous()
        flat = flat.as_strided((flat.numel(),), (1,))  # also of a single element, whose stride may be any
        return flat.view(torch.uint8).numpy().tobytes() if _HAS_NUMPY else bytes(flat.view(torch.uint8).tolist())


try:
    import numpy as _numpy
except ModuleNotFoundError:
    _HAS_NUMPY = False
else:
    _HAS_NUMPY = True


def assert_same(found: Any, expected: Any, where: str = "state") -> None:
    """Compare exactly: types, order of keys, bits of tensors and floats, and which tensors are one."""
    _assert_same(found, expected, where, {}, {})


def _assert_same(found: Any, expected: Any, where: str, to: dict[Any, Any], back: dict[Any, Any]) -> None:
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), f"{where}: {type(found)}"
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        assert bits_of(found) == bits_of(expected), f"{where}: bits differ"
        key = _identity(expected)
        assert to.setdefault(key, id(found)) == id(found), f"{where}: an alias was broken"
        assert back.setdefault(id(found), key) == key, f"{where}: an alias was made"
    elif isinstance(expected, Mapping):
        kind = next((k for k in (OrderedDict, Counter, defaultdict) if isinstance(expected, k)), dict)
        assert type(found) is kind, f"{where}: {type(found)}"
        if isinstance(expected, defaultdict):
            assert found.default_factory is expected.default_factory, f"{where}: default_factory"
        assert [(type(k), k) for k in found] == [(type(k), k) for k in expected], f"{where}: keys"
        for key in expected:
            _assert_same(found[key], expected[key], f"{where}.{key}", to, back)
        metadata = getattr(expected, "_metadata", None)
        assert (getattr(found, "_metadata", None) or None) == (metadata or None), f"{where}: _metadata"
    elif isinstance(expected, (list, tuple, deque)) and type(expected) is not torch.Size:
        kind = next(k for k in (list, deque, tuple) if isinstance(expected, k))
        assert type(found) is kind, f"{where}: {type(found)}"
        assert getattr(found, "maxlen", None) == getattr(expected, "maxlen", None), f"{where}: maxlen"
        assert len(found) == len(expected), f"{where}: length"
        for n, (one, other) in enumerate(zip(found, expected, strict=True)):
            _assert_same(one, other, f"{where}[{n}]", to, back)
    elif _HAS_NUMPY and isinstance(expected, _numpy.ndarray):
        assert type(found) is _numpy.ndarray, f"{where}: {type(found)}"
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        assert found.tobytes() == expected.tobytes(), f"{where}: bits differ"
    else:
        assert type(found) is type(expected), f"{where}: {type(found)}, expected {type(expected)}"
        assert _value_key(found) == _value_key(expected), f"{where}: {found!r}, expected {expected!r}"


def _identity(tensor: torch.Tensor) -> Any:
    if not tensor.data_ptr():
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


def _value_key(value: Any) -> Any:
    """Return something whose equality is bit equality."""
    if _HAS_NUMPY and isinstance(value, _numpy.generic) and not isinstance(value, (str, bytes)):
        return value.dtype, value.tobytes()
    if isinstance(value, float):
        return struct.pack(">d", value)
    if isinstance(value, complex):
        return struct.pack(">dd", value.real, value.imag)
    return value


# ---- random structures ----------------------------------------------------------------------------------------------

SCALARS: tuple[Callable[[random.Random], Any], ...] = (
    lambda r: r.randrange(-(1 << 70), 1 << 70),
    lambda r: r.random(),
    lambda r: r.choice([True, False, None]),
    lambda r: "".join(chr(r.choice([65, 0x4E00, 0xD801, 0x1F600])) for _ in range(r.randrange(5))),
    lambda r: r.randbytes(r.randrange(20)),
    lambda r: slice(r.randrange(9), None),
    lambda r: torch.Size([r.randrange(4), 2]),
    lambda r: {r.randrange(100), "s"},
    lambda r: [r.randrange(10), [r.random()], ("t", None)],
    lambda r: (1, 2),
    lambda r: [],
    lambda r: deque([r.randrange(9), "x"], r.choice([None, 2, 7])),
    lambda r: torch.float16,
)
if _HAS_NUMPY:
    SCALARS += (
        lambda r: _numpy.float32(r.random()),
        lambda r: [_numpy.int64(r.randrange(9)), 1],
        lambda r: _numpy.arange(r.randrange(4), dtype=r.choice(["f4", "u2"])),
        lambda r: _numpy.ones((2, 3))[:, ::-1],
    )
DTYPES_USED = (torch.float32, torch.int64, torch.bfloat16, torch.complex64, torch.uint8, torch.bool)


class StateMaker:
    """Makes random states; `tensors` are those that may be used again, as aliases or through views."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.tensors = rng, [torch.zeros(2)]

    def state(self) -> dict[Any, Any]:
        """Return a random state dict."""
        return {"first": self.tensor(), **self.mapping(0)}

    def key(self) -> Any:
        rng = self.rng
        if rng.random() < 0.04:
            return rng.choice([None, True, False, -0.25, math.inf, b"raw", (rng.randrange(9), ("x", None)), ()])
        return rng.choice(["weight", "bias", "grüße", "x y", ""]) + str(rng.randrange(99)) if rng.random() < 0.8 else (
            rng.randrange(-50, 1 << 40)
        )  # fmt: skip

    def mapping(self, depth: int) -> dict[Any, Any]:
        """Return a dict, or another type of one."""
        made = {self.key(): self.value(depth + 1) for _ in range(self.rng.randrange(6))}
        draw = self.rng.random()
        if draw < 0.65:
            return made
        if draw < 0.7:
            return defaultdict(self.rng.choice([None, int, list, deque]), made)
        if draw < 0.75:
            counter: dict[Any, Any] = Counter()
            dict.update(counter, made)
            return counter
        ordered = OrderedDict(made)
        if self.rng.random() < 0.5:
            ordered._metadata = OrderedDict({"": {"version": self.rng.randrange(5)}})  # type: ignore[attr-defined]
        return ordered

    def value(self, depth: int) -> Any:
        """Return a leaf or a container."""
        draw = self.rng.random()
        if draw < 0.45:
            return self.tensor()
        if draw < 0.75 or depth > 4:
            return self.rng.choice(SCALARS)(self.rng)
        if draw < 0.77:
            return bytes(HOIST_NBYTES + self.rng.randrange(3))
        if draw < 0.9:
            return self.mapping(depth)
        members = [self.value(depth + 1) for _ in range(self.rng.randrange(4))]
        draw = self.rng.random()
        if draw < 0.1:
            return deque(members, self.rng.choice([None, 4]))
        return members if draw < 0.5 else tuple(members)

    def tensor(self) -> torch.Tensor:
        """Return a new tensor, one that was there already, or a view of one."""
        rng, draw = self.rng, self.rng.random()
        if draw < 0.15:
            return rng.choice(self.tensors)
        if draw < 0.3:
            base = rng.choice(self.tensors)
            return rng.choice((lambda: base[...], lambda: base.t() if base.ndim == 2 else base, base.detach))()
        shape = tuple(rng.randrange(4) for _ in range(rng.randrange(3)))
        made = torch.zeros(shape, dtype=rng.choice(DTYPES_USED))
        if rng.random() < 0.1:
            made = torch.nn.Parameter(torch.zeros(shape))
        self.tensors.append(made)
        return made

    def mutated(self, state: Any) -> Any:
        """Return a copy of `state`'s containers with one random change in one of them."""
        copied, containers = [], []

        def copy_of(value: Any) -> Any:
            if isinstance(value, Mapping):
                out: Any = copy.copy(value)
                for key in out:
                    out[key] = copy_of(out[key])
                containers.append(out)
                return out
            if isinstance(value, (list, tuple, deque)) and type(value) is not torch.Size:
                made = [copy_of(v) for v in value]
                containers.append(made)
                copied.append((made, value))
                return made
            return value

        root = copy_of(state)
        changed = self._change(root, self.rng.choice(containers))
        return _tuples_again(changed, {id(made): value for made, value in copied})

    def _change(self, root: Any, place: Any) -> Any:
        rng = self.rng
        keys = list(place) if isinstance(place, Mapping) else list(range(len(place)))
        change = rng.choice(["replace", "replace", "add", "remove", "rename", "reorder", "retype", "alias", "hoist"])
        if change == "add" or not keys:
            if isinstance(place, Mapping):
                place[self.key()] = self.value(3)
            else:
                place.append(self.value(3))
            return root
        key = rng.choice(keys)
        if change == "remove":
            del place[key]
        elif change == "replace":
            place[key] = self.value(3)
        elif change == "alias":
            place[key] = rng.choice(self.tensors)
        elif change == "hoist":
            place[key] = bytes(HOIST_NBYTES)
        elif change == "retype":
            value = place[key]
            if isinstance(value, torch.Tensor):
                other = torch.zeros_like(value, dtype=rng.choice(DTYPES_USED))
                place[key] = other if rng.random() < 0.5 else value.unsqueeze(0)
            elif isinstance(value, Mapping):
                place[key] = dict(value) if isinstance(value, OrderedDict) else OrderedDict(value)
            else:
                place[key] = [value]
        elif isinstance(place, Mapping):
            items = list(place.items())
            place.clear()
            if change == "reorder":
                rng.shuffle(items)
            for k, v in items:  # a Counter's own update would count
                place[self.key() if change == "rename" and k == key else k] = v
        else:
            rng.shuffle(place)
        return root


def _tuples_again(value: Any, kinds: dict[int, Any]) -> Any:
    if isinstance(value, Mapping):
        for key in list(value):
            value[key] = _tuples_again(value[key], kinds)  # type: ignore[index]
        return value
    if id(value) in kinds:
        before = kinds[id(value)]
        members = [_tuples_again(v, kinds) for v in value]
        if isinstance(before, deque):
            return deque(members, None if before.maxlen is None else max(before.maxlen, len(members)))
        return members if isinstance(before, list) else tuple(members)
    return value
