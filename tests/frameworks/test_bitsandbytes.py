"""bitsandbytes' 8-bit optimizers and quantized layers: their states are plain tensors, and come back bit for bit."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import real_worker
import torch

import asyncckpt
from tests.composite_samples import same

bitsandbytes = pytest.importorskip("bitsandbytes", reason="`make test-frameworks` installs bitsandbytes")
pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]


def _job(name: str, seed: int) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.ReLU(), torch.nn.Linear(64, 128))
    return model, getattr(bitsandbytes.optim, name)(model.parameters(), lr=1e-2)


def _train(model: torch.nn.Module, optimizer: Any, seeds: range) -> None:
    for seed in seeds:
        x = torch.randn(8, 128, generator=torch.Generator().manual_seed(seed))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", ["AdamW8bit", "Adam8bit", "Lion8bit", "AdamW"])
def test_the_steps_after_a_resume_are_those_that_would_have_come(
    name: str, worker: real_worker.RealWorker, tmp_path: pathlib.Path
) -> None:
    model, optimizer = _job(name, 0)
    _train(model, optimizer, range(2))
    saved = {"model": model, "optim": optimizer}
    with asyncckpt.SyncCheckpointer() as checkpointer:
        checkpointer.save(saved, tmp_path / "sync")
    with asyncckpt.AsyncCheckpointer(endpoint=worker.endpoint) as checkpointer:
        handle = checkpointer.save(saved, tmp_path / "async")
        _train(model, optimizer, range(2, 4))
        handle.written.result(60)
    for path in ("sync", "async"):
        for has_state in (False, True):
            other, resumed = _job(name, 5)
            if has_state:
                _train(other, resumed, range(9, 10))
            asyncckpt.load(tmp_path / path, {"model": other, "optim": resumed})
            _train(other, resumed, range(2, 4))
            assert same(dict(other.state_dict()), dict(model.state_dict())), (path, has_state)
            assert same(resumed.state_dict()["state"], optimizer.state_dict()["state"]), (path, has_state)


@pytest.mark.parametrize("what", ["Linear8bitLt", "Linear4bit"])
def test_quantized_layers_come_back(what: str, tmp_path: pathlib.Path) -> None:
    def layer(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        plain = torch.nn.Linear(128, 64)
        options = {"has_fp16_weights": False} if what == "Linear8bitLt" else {}
        made = getattr(bitsandbytes.nn, what)(128, 64, **options)
        made.load_state_dict(plain.state_dict())
        return made.to("cpu")

    first, x = layer(0), torch.randn(2, 128)
    expected = first(x)
    with asyncckpt.SyncCheckpointer() as checkpointer:
        checkpointer.save({"layer": first}, tmp_path / "c")
    found = asyncckpt.load(tmp_path / "c")["layer"]
    assert same(dict(found), {name: value.detach() for name, value in first.state_dict().items()})
    assert expected.shape == (2, 64)
    if what == "Linear4bit":  # as transformers does it; bitsandbytes' own load_state_dict() takes no quantized weights
        stats = {name.removeprefix("weight."): value for name, value in found.items() if name.startswith("weight.")}
        second = layer(1)
        second.weight = bitsandbytes.nn.Params4bit.from_prequantized(
            found["weight"], stats, requires_grad=False, device="cpu", module=second
        )
        asyncckpt.load(tmp_path / "c", {"layer": {"bias": second.bias}})
        assert torch.equal(second(x), expected)
