"""Targets whose tensors share memory: every name holds what was saved under it, or an error names two that cannot."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import states
import torch
import views

import asyncckpt
from asyncckpt import FlatShard, PerRank, RankInfo, ShardedSlice, SyncCheckpointer
from asyncckpt.errors import AliasMismatchError, AsyncCkptError, ConfigError
from asyncckpt.loading import fetch, target_tensors
from asyncckpt.sharding import registry

ALONE = RankInfo(0, 1)
State = dict[str, Any]


@pytest.fixture(autouse=True)
def types(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Registrations of this test alone."""
    monkeypatch.setattr(registry, "_registered", {})
    views.register_types()
    yield


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The names of what each load fills one after the other, and reads again."""
    found: list[list[str]] = []
    real = fetch.fill_aliased

    def noted(placements: Any, names: list[str], *args: Any) -> None:
        found.append(names)
        real(placements, names, *args)

    monkeypatch.setattr(fetch, "fill_aliased", noted)
    return found


def save(path: Path, state: State) -> Path:
    with SyncCheckpointer(fsync=False, rank_info=ALONE) as checkpointer:
        checkpointer.save(state, path)
    return path


def values_of(state: State) -> dict[str, torch.Tensor]:
    return {name: views.value_of(leaf) for name, leaf in state.items()}


def assert_holds(target: State, expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        found = views.value_of(target[name])
        assert (found.dtype, found.shape) == (value.dtype, value.shape), name
        assert states.bits_of(found) == states.bits_of(value), f"{name}: {found} is not {value}"


def bases(fill: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"square": fill(4, 4), "z": torch.complex(fill(3, 4), fill(3, 4)), "long": fill(24)}


def sliced(t: torch.Tensor, shape: tuple[int, ...], offsets: tuple[int, ...]) -> ShardedSlice:
    return ShardedSlice(t, shape, offsets)


SHARED: dict[str, Callable[[Any], State]] = {
    "transposed": lambda b: {"enc": b["square"], "dec": b["square"].t()},
    "reshaped": lambda b: {"a": b["long"], "b": b["long"].view(4, 6)},
    "slice": lambda b: {"qkv": b["square"], "q": b["square"][:2]},
    "three_slices": lambda b: {"qkv": b["long"], "q": b["long"][:8], "k": b["long"][8:16], "v": b["long"][16:]},
    "columns": lambda b: {"qkv": b["square"], "q": b["square"][:, 1:3]},
    "real_and_imag": lambda b: {"z": b["z"], "re": b["z"].real, "im": b["z"].imag},
    "bits": lambda b: {"f": b["long"], "i": b["long"].view(torch.int32)},
    "halves": lambda b: {"f": b["long"], "h": b["long"].view(torch.int16)},
    "overlapping": lambda b: {"a": b["long"][:16], "b": b["long"][8:]},
    "as_strided": lambda b: {"a": b["long"].as_strided((2, 5), (7, 1)), "b": b["long"].as_strided((4, 3), (5, 1), 2)},
    "conj": lambda b: {"z": b["z"], "c": b["z"].conj()},
    "neg": lambda b: {"x": b["long"], "n": torch._neg_view(b["long"])},
    "conj_of_neg": lambda b: {"z": b["z"], "c": torch._neg_view(b["z"]).conj(), "im": b["z"].conj().imag},
    "in_a_slice": lambda b: {"w": b["long"], "s": sliced(b["long"][6:12].view(2, 3), (5, 3), (2, 0))},
    "in_two_slices": lambda b: {"a": sliced(b["square"], (4, 4), (0, 0)), "b": sliced(b["square"].t(), (4, 4), (0, 0))},
    "in_a_flat_one": lambda b: {"w": b["long"][3:], "f": FlatShard(b["long"][:7], (3, 3), 1)},
    "conj_in_a_slice": lambda b: {"z": b["z"], "s": sliced(b["z"].conj(), (3, 4), (0, 0))},
    "in_a_mark": lambda b: {"w": b["square"], "m": PerRank(b["square"].t())},
    "registered": lambda b: {"w": b["long"], "p": views.Parts(b["long"][2:])},
    "one_of_more_dimensions": lambda b: {"w": b["long"], "w1": b["long"][None], "w2": b["long"][:, None]},
}
"""From some tensors to states in which names share their elements."""

LONELY: dict[str, Callable[[Any], State]] = {
    "rows": lambda b: {"q": b["square"][:1], "k": b["square"][1:2], "v": b["square"][2:]},
    "columns": lambda b: {"q": b["square"][:, :1], "k": b["square"][:, 1:2], "v": b["square"][:, 2:]},
    "blocks": lambda b: {f"{i}{j}": b["square"][i : i + 2, j : j + 2] for i in (0, 2) for j in (0, 2)},
    "transposed_columns": lambda b: {"q": b["square"].t()[:, :2], "k": b["square"].t()[:, 2:]},
    "flat": lambda b: {"a": b["long"][:6].view(2, 3), "b": b["long"][6:7], "none": b["long"][7:7], "c": b["long"][7:]},
    "every_other": lambda b: {"even": b["long"][::2], "odd": b["long"][1::2]},
    "parts_of_complex": lambda b: {"re": b["z"].real, "im": b["z"].imag, "lazy": torch._neg_view(b["long"])},
    "complex_columns": lambda b: {"re": b["z"].real[:, :2], "rest": b["z"][:, 2:], "im": b["z"].imag[:, :2]},
    "heads": lambda b: {str(n): b["long"].view(2, 3, 4)[:, n] for n in range(3)},
    "in_slices": lambda b: {str(n): sliced(b["square"][n:][:1], (1, 4), (0, 0)) for n in range(4)},
    "in_flat_ones": lambda b: {str(n): FlatShard(b["long"][6 * n :][:6], (2, 3), 0) for n in range(4)},
}
"""The same, in which they lie in one storage and share no element."""


def changed(value: torch.Tensor, at: int) -> torch.Tensor:
    """Return a copy with another value at one element."""
    found = value.clone().reshape(-1)
    found[at % found.numel()] += 1
    return found.view(value.shape)


@pytest.mark.parametrize("low_memory", [True, False])
@pytest.mark.parametrize("kind", SHARED)
def test_names_that_share_memory_each_hold_what_was_saved_where_that_agrees(
    tmp_path: Path, kind: str, low_memory: bool, checked: list[list[str]]
) -> None:
    expected = values_of(SHARED[kind](bases(torch.randn)))
    target = SHARED[kind](bases(torch.zeros))
    asyncckpt.load(save(tmp_path / "c", _whole(target, expected)), target, low_memory=low_memory)
    assert_holds(target, expected)
    assert [sorted(set(names)) for names in checked] == [sorted(target)]


def _whole(like: State, values: dict[str, torch.Tensor]) -> State:
    """Return values as they are saved so that they fill `like`: shards in larger tensors of other elements."""
    found: State = {}
    for name, value in values.items():
        leaf = like[name]
        if isinstance(leaf, ShardedSlice):
            whole = torch.full(leaf.global_shape, 7, dtype=value.dtype)
            whole[tuple(slice(o, o + n) for o, n in zip(leaf.offsets, value.shape, strict=True))] = value
        elif isinstance(leaf, FlatShard):
            whole = torch.full(leaf.global_shape, 7, dtype=value.dtype)
            whole.view(-1)[leaf.start : leaf.start + value.numel()] = value
        else:
            whole = value
        found[name] = PerRank(whole) if isinstance(leaf, PerRank) else whole
    return found


@pytest.mark.parametrize("low_memory", [True, False])
@pytest.mark.parametrize("kind", SHARED)
def test_names_that_share_memory_and_were_saved_with_other_values_are_named(
    tmp_path: Path, kind: str, low_memory: bool
) -> None:
    names = list(SHARED[kind](bases(torch.zeros)))
    for n, name in enumerate(names):
        expected = values_of(SHARED[kind](bases(torch.randn)))
        target = {**SHARED[kind](bases(torch.zeros)), "other": torch.zeros(2)}
        expected[name] = expected[name] + 1
        expected["other"] = torch.ones(2)
        path = save(tmp_path / str(n), _whole(target, expected))
        with pytest.raises(AliasMismatchError, match="have been filled") as caught:
            asyncckpt.load(path, target, low_memory=low_memory)
        assert caught.value.path == str(path)
        assert name in (caught.value.fqn, caught.value.other_fqn)
        assert caught.value.fqn != caught.value.other_fqn and "other" not in (caught.value.fqn, caught.value.other_fqn)
        assert names.index(caught.value.fqn) < names.index(caught.value.other_fqn)
        assert target["other"].tolist() == [1, 1]
        kept = [key for key in target if key != name]
        fresh = SHARED[kind](bases(torch.zeros))
        asyncckpt.load(path, fresh, keys=[name])
        assert_holds(fresh, {name: expected[name]})
        if kind != "in_a_mark":
            fresh = {**SHARED[kind](bases(torch.zeros)), "other": torch.zeros(2)}
            asyncckpt.load(path, fresh, keys=kept)
            assert_holds(fresh, {key: expected[key] for key in kept})


@pytest.mark.parametrize("kind", LONELY)
def test_slices_of_one_storage_without_a_common_element_are_filled_like_any_others(
    tmp_path: Path, kind: str, checked: list[list[str]]
) -> None:
    expected = values_of(LONELY[kind](bases(torch.randn)))
    target = LONELY[kind](bases(torch.zeros))
    path = save(tmp_path / "c", _whole(target, expected))
    assert asyncckpt.plan_load(path, target).shared == ()
    asyncckpt.load(path, target)
    assert_holds(target, expected)
    assert checked == []


def test_arrays_and_tensors_over_the_same_memory_hold_what_was_saved_or_are_named(tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    path = save(tmp_path / "c", {"a": matrix, "t": torch.from_numpy(matrix.T.copy()), "row": matrix[1].copy()})
    memory = np.zeros((3, 4), np.float32)
    target = {"a": memory, "t": torch.from_numpy(memory).t(), "row": memory[1]}
    asyncckpt.load(path, target)
    assert target["a"] is memory and memory.tolist() == matrix.tolist() and target["row"].tolist() == [4, 5, 6, 7]
    path = save(tmp_path / "d", {"a": matrix, "t": torch.zeros(4, 3), "row": matrix[1].copy()})
    with pytest.raises(AliasMismatchError) as caught:
        asyncckpt.load(path, target)
    assert "t" in (caught.value.fqn, caught.value.other_fqn)


def test_a_target_with_the_same_memory_in_all_its_elements_is_refused_as_ever(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"w": torch.ones(3, 3), "x": torch.ones(5)})
    memory = torch.zeros(5)
    with pytest.raises(ConfigError, match="'w'"):
        asyncckpt.load(path, {"x": memory, "w": memory.as_strided((3, 3), (1, 1))})
    assert not memory.any()


# ---- ties: one tensor with two names --------------------------------------------------------------------------------


class Tied(torch.nn.Module):
    """A model whose head is its embedding, as most language models have it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = torch.nn.Embedding(7, 4)
        self.body = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight


def same(one: Tied, other: Tied) -> bool:
    found, wanted = one.state_dict(), other.state_dict()
    return found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)


TARGETS: dict[str, Callable[[Tied], Any]] = {
    "state_dict": lambda m: m.state_dict(),
    "module": lambda m: {"model": m},
    "nested": lambda m: {"model": m.state_dict()},
    "dict": lambda m: {"model": {name: p.data for name, p in m.named_parameters(remove_duplicate=False)}},
}


def flat_or_not(kind: str, values: dict[str, torch.Tensor]) -> State:
    return dict(values) if kind == "state_dict" else {"model": dict(values)}


@pytest.mark.parametrize("way", ["load", "checkpointer", "manager", "restore_latest"])
@pytest.mark.parametrize("left_out", [None, "head.weight", "embedding.weight"])
@pytest.mark.parametrize("kind", TARGETS)
def test_a_tied_model_is_filled_from_equal_values_and_from_either_of_its_names(
    tmp_path: Path, kind: str, left_out: str | None, way: str
) -> None:
    original, model = Tied(0), Tied(1)
    apart = {name: value.clone() for name, value in original.state_dict().items() if name != left_out}
    target = TARGETS[kind](model)
    with SyncCheckpointer(fsync=False, rank_info=ALONE) as checkpointer:
        if way == "manager":
            with asyncckpt.CheckpointManager(tmp_path / "root", checkpointer=checkpointer) as manager:
                manager.save(1, flat_or_not(kind, apart))
                manager.wait()
                manager.restore(target)
        else:
            path = tmp_path / "root" / "step-1"
            checkpointer.save(flat_or_not(kind, apart), path, step=1)
            if way == "load":
                assert asyncckpt.plan_load(path, target).fits
                asyncckpt.load(path, target, strict=True)
            elif way == "checkpointer":
                checkpointer.load(path, target, strict=True)
            else:
                asyncckpt.restore_latest(tmp_path / "root", target, strict=True, rank_info=ALONE)
    assert same(model, original) and model.head.weight is model.embedding.weight


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("to", ["hf", "safetensors", "torch", "dcp", "asyncckpt"])
def test_a_tied_model_loads_what_convert_wrote_of_it(tmp_path: Path, to: str, kind: str) -> None:
    original, model = Tied(0), Tied(1)
    save(tmp_path / "own", TARGETS[kind](original))
    name = {"safetensors": "m.safetensors", "torch": "m.pt"}.get(to, "there")
    asyncckpt.convert(tmp_path / "own", tmp_path / name, to=to)
    target = TARGETS[kind](model)
    if to in ("hf", "safetensors") and kind != "state_dict":
        asyncckpt.load(
            tmp_path / name, target["model"] if kind != "module" else model.state_dict(), key_map=_below_model
        )
    else:
        asyncckpt.load(tmp_path / name, target)
    assert same(model, original)


def _below_model(fqn: str) -> str:
    return f"model.{fqn}"


def test_a_tied_model_loads_a_file_from_which_the_writer_left_one_name_out(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    original, model = Tied(0), Tied(1)
    safetensors.save_model(original, str(tmp_path / "model.safetensors"))
    asyncckpt.load(tmp_path / "model.safetensors", model.state_dict())
    assert same(model, original)


@pytest.mark.parametrize("kind", TARGETS)
def test_a_tied_model_saved_with_other_values_is_refused_by_both_names_before_anything_changes(
    tmp_path: Path, kind: str
) -> None:
    model, before = Tied(1), Tied(1)
    apart = {name: value + 1 for name, value in model.state_dict().items()}
    apart["head.weight"] = changed(apart["head.weight"], 27)
    path = save(tmp_path / "c", flat_or_not(kind, apart))
    target = TARGETS[kind](model)
    prefix = "" if kind == "state_dict" else "model."
    assert asyncckpt.plan_load(path, target).shared == (f"{prefix}embedding.weight", f"{prefix}head.weight")
    with pytest.raises(AliasMismatchError, match="nothing was changed") as caught:
        asyncckpt.load(path, target)
    assert (caught.value.fqn, caught.value.other_fqn) == (f"{prefix}embedding.weight", f"{prefix}head.weight")
    assert same(model, before)
    asyncckpt.load(path, target, keys=[f"{prefix}{name}" for name in apart if name != "head.weight"])
    assert torch.equal(model.head.weight, apart["embedding.weight"])
    asyncckpt.load(path, target, keys=[f"{prefix}{name}" for name in apart if name != "embedding.weight"])
    assert torch.equal(model.embedding.weight, apart["head.weight"])


@pytest.mark.parametrize("wrap", [*views.WRAPPERS.values()], ids=views.WRAPPERS)
@pytest.mark.parametrize("numel", [1, 9, 1000])
def test_ties_are_compared_in_windows_bit_by_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrap: Callable[[torch.Tensor], Any], numel: int
) -> None:
    monkeypatch.setattr(target_tensors, "BATCH_NBYTES", 64)
    value = torch.randn(numel)
    value[-1] = float("nan")
    for n, at in enumerate((None, 0, numel // 2, numel - 1)):
        other = value.clone()
        if at is not None:
            other.view(torch.int32)[at] ^= 1 << (n % 20)
        path = save(tmp_path / str(n), {"a": _marked(wrap, value), "b": _marked(wrap, other)})
        leaf = wrap(torch.zeros(numel))
        if at is None:
            asyncckpt.load(path, {"a": leaf, "b": leaf})
            assert states.bits_of(views.value_of(leaf)) == states.bits_of(value)
            continue
        with pytest.raises(AliasMismatchError, match=r"'a' and 'b'.*nothing was changed"):
            asyncckpt.load(path, {"a": leaf, "b": leaf})
        assert not views.value_of(leaf).any()


def _marked(wrap: Callable[[torch.Tensor], Any], value: torch.Tensor) -> Any:
    return PerRank(value) if wrap is PerRank else value


@pytest.mark.parametrize(
    ("dtype", "fits"),
    [(torch.float32, False), (torch.bfloat16, True), (torch.float64, False), (torch.complex64, False)],
)
def test_tied_values_are_compared_in_the_dtype_of_their_target(tmp_path: Path, dtype: torch.dtype, fits: bool) -> None:
    value = torch.randn(50, generator=torch.Generator().manual_seed(0))
    path = save(tmp_path / "c", {"a": value, "b": value.bfloat16()})
    tied = torch.zeros(50, dtype=dtype)
    if fits:
        asyncckpt.load(path, {"a": tied, "b": tied})
        assert torch.equal(tied, value.bfloat16())
    else:
        with pytest.raises(AliasMismatchError):
            asyncckpt.load(path, {"a": tied, "b": tied})


def test_several_names_of_one_tensor_are_compared_once_each(tmp_path: Path) -> None:
    one, two = torch.randn(5), torch.randn(5)
    path = save(tmp_path / "c", {"a": one, "b": one, "c": one.clone(), "d": two, "e": two})
    tied = torch.zeros(5)
    asyncckpt.load(path, {"b": tied, "a": tied, "c": tied, "f": tied, "more": {"g": tied.detach()}})
    assert torch.equal(tied, one)
    with pytest.raises(AliasMismatchError, match="'c' and 'e'"):
        asyncckpt.load(path, {"c": tied, "e": tied, "a": tied})


def test_a_name_that_was_not_saved_is_missing_where_its_other_name_is_not_filled_either(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"a": torch.ones(3), "z": torch.ones(2)})
    tied = torch.zeros(3)
    target = {"a": tied, "b": tied, "z": torch.zeros(2)}
    with pytest.raises(asyncckpt.errors.MissingKeysError) as caught:
        asyncckpt.load(path, target, keys=["b", "z"])
    assert caught.value.keys == ["b"] and not tied.any() and not target["z"].any()
    other = {"a": tied, "t": tied[:, None], "z": torch.zeros(2)}  # another view is not the other name
    with pytest.raises(asyncckpt.errors.MissingKeysError) as caught:
        asyncckpt.load(path, other)
    assert caught.value.keys == ["t"]


def test_an_optimizer_over_one_flat_buffer_is_filled_without_reading_twice(
    tmp_path: Path, checked: list[list[str]]
) -> None:
    """As ZeRO and FSDP have it: parameters, gradients and moments are slices of a few buffers."""

    def made(fill: Callable[..., torch.Tensor]) -> State:
        buffer, moments = fill(30), fill(2, 30)
        shapes = {"a": (2, 5), "b": (10,), "c": (5, 2)}
        cut = {name: slice(10 * n, 10 * n + 10) for n, name in enumerate(shapes)}
        return {
            "model": {name: torch.nn.Parameter(buffer[cut[name]].view(shape)) for name, shape in shapes.items()},
            "optim": {
                name: {"m": moments[0, cut[name]].view(shape), "v": moments[1, cut[name]].view(shape)}
                for name, shape in shapes.items()
            },
        }

    original, target = made(torch.randn), made(torch.zeros)
    asyncckpt.load(save(tmp_path / "c", original), target)
    states.assert_same(target, original)
    assert checked == []


def test_what_is_compared_takes_little_memory_whatever_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_tensors, "BATCH_NBYTES", 1 << 16)
    taken: list[int] = []
    real = target_tensors._values

    def noted(batch: Any, *args: Any) -> Any:
        found = real(batch, *args)
        taken.append(sum(t.nbytes for t in found))
        return found

    monkeypatch.setattr(target_tensors, "_values", noted)
    matrix = torch.randn(300, 500)
    path = save(tmp_path / "c", {"a": matrix, "b": matrix.clone(), "t": matrix.t().contiguous()})
    memory = torch.zeros(300, 500)
    asyncckpt.load(path, {"a": memory, "b": memory, "t": memory.t()})
    assert torch.equal(memory, matrix)
    assert max(taken) <= 1 << 16 and sum(taken) == 6 * matrix.nbytes


# ---- anything -------------------------------------------------------------------------------------------------------


def cloned(target: State) -> State:
    """Return a target that shares memory as another one does, with other elements."""
    made: dict[int, torch.UntypedStorage] = {}
    found: State = {}
    for name, leaf in target.items():
        view = leaf.tensor if isinstance(leaf, ShardedSlice) else leaf
        storage = view.untyped_storage()
        new = made.setdefault(storage.data_ptr(), torch.UntypedStorage(storage.nbytes()).fill_(0))
        plain = torch.empty(0, dtype=view.dtype).set_(new, view.storage_offset(), view.shape, view.stride())
        plain = plain.conj() if view.is_conj() else plain
        plain = torch._neg_view(plain) if view.is_neg() else plain
        found[name] = ShardedSlice(plain, leaf.global_shape, leaf.offsets) if isinstance(leaf, ShardedSlice) else plain
    return found


def put(leaf: Any, value: torch.Tensor) -> None:
    (leaf.tensor if isinstance(leaf, ShardedSlice) else leaf).copy_(value)


def disagree(target: State, values: dict[str, torch.Tensor], one: str, other: str) -> bool:
    """Whether no memory that is shared as the target's holds both values."""
    for first, second in ((one, other), (other, one)):
        fresh = cloned(target)
        put(fresh[first], values[first])
        put(fresh[second], values[second])
        if states.bits_of(views.value_of(fresh[first])) != states.bits_of(values[first]):
            return True
    return False


def test_random_targets_with_views_hold_what_was_saved_or_two_names_that_disagree_are_named(
    tmp_path: Path, rng: random.Random
) -> None:
    refused = 0
    for n in range(120):
        memory = [
            torch.randint(-2, 2, (4, 4)).float(),
            torch.complex(torch.ones(3, 4), torch.zeros(3, 4)),
            torch.ones(9),
        ]
        target: State = {}
        for number in range(rng.randrange(2, 7)):
            view = views.random_view(rng, rng.choice(memory))
            wrapped = rng.random() < 0.3
            target[str(number)] = ShardedSlice(view, tuple(view.shape), (0,) * view.dim()) if wrapped else view
        values = values_of(target)
        torn = rng.random() < 0.5
        if torn:
            name = rng.choice(list(values))
            if values[name].numel():
                values[name] = changed(values[name], rng.randrange(100))
        path = save(tmp_path / str(n), values)
        fresh = cloned(target)
        options = {"low_memory": rng.random() < 0.7, "threads": rng.choice([None, 1, 3]), "verify": rng.random() < 0.7}
        try:
            asyncckpt.load(path, fresh, **options)
        except AliasMismatchError as error:
            assert torn and disagree(target, values, error.fqn, error.other_fqn), (n, error)
            refused += 1
        else:
            assert_holds(fresh, values)
    assert refused > 10


def test_random_strides_are_told_apart_only_where_they_share_nothing(rng: random.Random) -> None:
    def places(tensor: torch.Tensor) -> set[int]:
        found = torch.zeros((), dtype=torch.int64)
        for step, n in zip(tensor.stride(), tensor.shape, strict=True):
            found = found.unsqueeze(-1) + torch.arange(n) * step
        starts = (found * tensor.itemsize + tensor.data_ptr()).flatten().tolist()
        return {start + byte for start in starts for byte in range(tensor.itemsize)}

    memory = torch.zeros(200, dtype=torch.float64)

    def made() -> torch.Tensor:
        while True:
            n_dims = rng.randrange(4)
            shape = [rng.randrange(1, 5) for _ in range(n_dims)]
            strides = [rng.choice([0, 1, 2, 3, 4, 6, 8, 12, 24]) for _ in range(n_dims)]
            start = rng.randrange(20)
            if start + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) < 100:
                return memory.view(rng.choice([torch.float64, torch.int32])).as_strided(shape, strides, start)

    decided = 0
    for _ in range(3000):
        one, other = made(), made()
        shares = bool(places(one) & places(other))
        said = target_tensors.find_aliased([one, other])
        assert said == [0, 1] or (said == [] and not shares), (one.shape, one.stride(), other.shape, other.stride())
        decided += said == []
        byte = memory.data_ptr() + rng.randrange(400)
        assert target_tensors._contains_byte(target_tensors.memory_extent_of(one), byte) == (byte in places(one))
    assert decided > 1000


def test_many_columns_of_one_matrix_are_told_apart_and_far_too_many_are_all_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    matrix = torch.zeros(8, 100)
    columns = [matrix[:, n] for n in range(100)]
    assert target_tensors.find_aliased(columns) == []
    monkeypatch.setattr(target_tensors, "MAX_PAIRS", 10)
    assert target_tensors.find_aliased(columns) == list(range(100))
    assert target_tensors.find_aliased([torch.zeros(3) for _ in range(100)]) == []


def test_an_error_while_shared_memory_is_filled_is_the_file_s(tmp_path: Path) -> None:
    matrix = torch.randn(200, 200)
    path = save(tmp_path / "c", {"a": matrix, "t": matrix.t().contiguous()})
    shard = next(file for file in path.iterdir() if file.suffix == ".safetensors")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    memory = torch.zeros(200, 200)
    with pytest.raises(AsyncCkptError) as caught:
        asyncckpt.load(path, {"a": memory, "t": memory.t()})
    assert type(caught.value) is asyncckpt.errors.CorruptCheckpointError
