"""Checkpoints of each kind from their own tools, and a directory to convert them in."""

from __future__ import annotations

from pathlib import Path

import foreign_samples
import pytest
import torch
from conversions import Workdir


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One checkpoint of each kind of `foreign_samples`, and one of ours; nobody changes them."""
    root = tmp_path_factory.mktemp("samples")
    found = {}
    for kind in foreign_samples.KINDS:
        torch.manual_seed(0)
        found[kind] = foreign_samples.write(kind, root)
    torch.manual_seed(0)
    found["asyncckpt"] = Workdir(root).ours(foreign_samples.training_state(), "ours")
    return found


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def work(tmp_path: Path) -> Workdir:
    """A directory of this test alone."""
    return Workdir(tmp_path)
