"""What may be copied behind the training: tensors that attached optimizers own, watched, where a core is idle."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from asyncckpt.errors import ConfigError, SnapshotTornError
from asyncckpt.format.names import SaveId
from asyncckpt.staging.mutation_check import MutationCheck, Source
from asyncckpt.staging.optimizer_ownership import AttachedOptimizers
from asyncckpt.staging.overlap import LOCAL_RANKS, has_idle_core, local_ranks
from asyncckpt.state_dict.flatten import flatten

SAVE_ID = SaveId(1, 2, "0123456789ab")


def stepped(*parameters: Any, **options: Any) -> Any:
    optimizer = torch.optim.Adam(parameters, lr=0.1, **options)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_parameters_and_state_are_owned_and_nothing_else() -> None:
    parameter, other = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    lr, weights = torch.tensor(0.1), torch.ones(3)
    optimizer = stepped(parameter)
    optimizer.param_groups[0]["lr"] = lr
    state = optimizer.state[parameter]
    state["nested"] = {"deep": [weights, "x"]}
    state["sparse"], state["empty"] = torch.eye(3).to_sparse(), torch.empty(0)
    owners = AttachedOptimizers()
    assert not owners
    assert owners.add(optimizer)
    assert not owners.add(optimizer)
    assert owners
    tensors = [parameter, other, lr, state["step"], weights, parameter.grad, torch.empty(0), state["exp_avg"][1:]]
    numbers, own = owners.owned(tensors)
    assert numbers == {0, 3, 4, 7}
    assert {id(t) for t in own} == {id(t) for t in (parameter, state["step"], weights, state["exp_avg"])}
    assert owners.owned(tensors)[0] is numbers, "the very same object, so that its owner recognises it at once"
    owners.clear()
    assert not owners


def test_an_optimizer_that_is_gone_owns_nothing() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    owners = AttachedOptimizers()
    owners.add(stepped(parameter))
    assert not owners
    assert owners.owned([parameter]) == (frozenset(), [])


def test_an_optimizer_whose_step_has_lost_its_hooks_owns_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = stepped(parameter)
    owners = AttachedOptimizers()
    owners.add(optimizer)
    assert owners.owned([parameter])[0] == {0}
    monkeypatch.setattr(torch.optim.Adam, "step", torch.optim.Adam.step.__wrapped__)  # as older compilers do
    for _ in range(2):
        assert owners.owned([parameter])[0] == frozenset()
    assert [r.message for r in caplog.records if "hooks of Adam.step()" in r.message] == [caplog.records[0].message]


def test_new_groups_and_state_and_storages_are_looked_up_every_time() -> None:
    parameter, added = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([parameter])
    owners = AttachedOptimizers()
    owners.add(optimizer)
    assert owners.owned([parameter, added])[0] == {0}
    optimizer.add_param_group({"params": [added]})
    assert owners.owned([parameter, added])[0] == {0, 1}
    old = parameter.detach()
    parameter.data = torch.zeros(3)
    assert owners.owned([old, parameter, added])[0] == {1, 2}


def owned_of(owners: AttachedOptimizers, *tensors: torch.Tensor) -> set[int]:
    return set(owners.owned(tensors)[0])


def test_state_is_owned_from_the_step_on_that_makes_it_and_what_a_load_replaces_no_more() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([parameter])
    owners = AttachedOptimizers()
    owners.add(optimizer)
    assert owned_of(owners, parameter.detach()) == {0}
    parameter.grad = torch.ones(3)
    optimizer.step()
    old = optimizer.state[parameter]["exp_avg"]
    assert owned_of(owners, parameter.detach(), old) == {0, 1}
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.state[parameter]["exp_avg"] = new = old.clone()
    assert owned_of(owners, parameter.detach(), old, new) == {0, 2}


def test_a_parameter_that_is_replaced_is_no_longer_owned() -> None:
    old, new = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([old])
    owners = AttachedOptimizers()
    owners.add(optimizer)
    assert owned_of(owners, old, new) == {0}
    optimizer.param_groups[0]["params"] = [new]
    assert owned_of(owners, old, new) == {1}


def test_a_tensor_that_reaches_beyond_its_owner_at_the_same_address_is_not_owned() -> None:
    base = torch.zeros(40)
    parameter = torch.nn.Parameter(base[:12].view(3, 4))
    owners = AttachedOptimizers()
    owners.add(optimizer := torch.optim.SGD([parameter]))
    longer, apart = base[:13], base[:24:2].view(3, 4)  # the same shape, but every other element
    inside, turned, shorter = base[4:8], parameter.detach().view(4, 3).t(), base[:5]
    assert owned_of(owners, longer, apart, inside, turned, shorter) == {2, 3, 4}
    parameter.data = base[:24:2].view(3, 4)
    assert owned_of(owners, longer, apart, base[:24]) == {0, 1}, "the gaps between its elements count as its own"
    assert optimizer.param_groups


def test_tied_and_flattened_parameters_are_owned_under_each_view() -> None:
    flat = torch.zeros(30)
    views = [torch.nn.Parameter(flat[n : n + 10]) for n in (0, 10)]
    tied = torch.nn.Parameter(flat[:10])
    strided = torch.nn.Parameter(torch.zeros(6, 5).t())
    owners = AttachedOptimizers()
    owners.add(optimizer := torch.optim.SGD([*views, tied, strided]))
    numbers, own = owners.owned([flat[:10], flat[10:20], flat[5:15], flat[:20], flat[15:25], strided.detach(), flat])
    assert numbers == {0, 1, 2, 3, 5}
    assert {id(tensor) for tensor in own} == {id(tensor) for tensor in (*views, tied, strided)}
    assert optimizer.param_groups


def test_tensors_without_elements_have_no_owner_by_their_address() -> None:
    full = torch.zeros(3)
    owners = AttachedOptimizers()
    owners.add(optimizer := torch.optim.SGD([torch.nn.Parameter(torch.empty(0)), torch.nn.Parameter(full[:0])]))
    assert owners.owned([torch.empty(0), torch.zeros(2)[:0], full]) == (frozenset(), [])
    assert optimizer.param_groups


def watch(state: dict[str, Any], *owners: Any) -> MutationCheck:
    flat = flatten(state)
    numbers = frozenset(range(len(flat.tensors)))
    return MutationCheck(flat, numbers, owners, save_id=SAVE_ID, step=4, path="/x")


def test_a_quiet_watch_says_nothing_and_a_write_is_named() -> None:
    state = {"a": torch.zeros(2), "b": {"c": torch.zeros(3)}}
    found = watch(state)
    found.check()
    state["b"]["c"][1:].add_(1)
    with pytest.raises(SnapshotTornError, match=r"step 4 to .*: tensor 'b\.c'") as caught:
        found.check()
    assert caught.value.facts() == {"fqn": "b.c", "save_id": str(SAVE_ID), "step": 4, "path": "/x"}


def test_tensors_without_a_counter_are_left_to_the_hashes() -> None:
    with torch.inference_mode():
        quiet = torch.zeros(3)
    loud = torch.zeros(3)
    found = watch({"quiet": quiet, "loud": loud})
    found.check()
    with torch.inference_mode():
        quiet.add_(1)
    found.check()
    loud.add_(1)
    with pytest.raises(SnapshotTornError, match="loud"):
        found.check()


@pytest.mark.parametrize("where", ["source", "target"])
def test_digests_see_what_counters_do_not(where: str) -> None:
    source, target = torch.arange(6.0).view(2, 3).t(), torch.zeros(3, 2)
    found = watch({"a": source})
    found.digest([Source(0, source, target)])
    target.copy_(source)
    found.check()
    (source if where == "source" else target).data[1, 1] = -1.0
    with pytest.raises(SnapshotTornError, match="no version counter"):
        found.check()


@pytest.mark.parametrize("how", ["share", "resize"])
def test_memory_that_is_swapped_or_resized_is_a_change(how: str) -> None:
    state = {"a": torch.zeros(2), "b": torch.zeros(3)}
    found = watch(state)
    found.check()
    state["b"].share_memory_() if how == "share" else state["b"].untyped_storage().resize_(0)
    with pytest.raises(SnapshotTornError, match="share_memory_") as caught:
        found.check()
    assert caught.value.facts()["fqn"] == "b"


# ---- which cores are to spare


@pytest.mark.parametrize(
    ("cores", "threads", "ranks", "spare"),
    [
        (2, 2, None, False),
        (2, 1, None, True),
        (2, 1, "2", False),
        (1, 1, None, False),
        (64, 64, "1", False),
        (64, 7, "8", True),
        (64, 8, "8", False),
    ],
)
def test_cores_that_no_rank_s_threads_use_are_to_spare(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: int, ranks: str | None, spare: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.delenv(LOCAL_RANKS, raising=False)
    if ranks is not None:
        monkeypatch.setenv(LOCAL_RANKS, ranks)
    assert has_idle_core() is spare


def test_where_a_gpu_computes_the_host_s_cores_are_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10_000)
    assert has_idle_core()


@pytest.mark.parametrize(
    ("text", "ranks"), [("3", 3), ("0", 1), ("", 1), ("-2", 1), ("many", 1), ("\u0663", 1), (None, 1)]
)
def test_what_a_launcher_says_of_the_node_s_ranks(text: str | None, ranks: int) -> None:
    assert local_ranks({} if text is None else {LOCAL_RANKS: text}) == ranks


def test_more_digits_than_python_reads_are_a_typed_error() -> None:
    with pytest.raises(ConfigError, match="LOCAL_WORLD_SIZE has 5000 digits") as caught:
        local_ranks({LOCAL_RANKS: "9" * 5000})
    assert caught.value.field == LOCAL_RANKS
