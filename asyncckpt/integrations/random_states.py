"""The random generators of this process: Python's, numpy's, torch's on the CPU and on CUDA devices."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def random_states() -> dict[str, Any]:
    """Return the states of all generators, as plain values and tensors; numpy's only where it is in use."""
    kind, words, gauss = random.getstate()
    found: dict[str, Any] = {"python": [kind, list(words), gauss], "torch": torch.get_rng_state()}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        found["numpy"] = [name, torch.from_numpy(keys.astype("int64")), int(position), int(has_gauss), float(cached)]
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def restore_random_states(states: dict[str, Any]) -> None:
    """Put the generators into the states that `random_states` has returned; CUDA's if there are as many devices."""
    kind, words, gauss = states["python"]
    random.setstate((kind, tuple(words), gauss))
    torch.set_rng_state(states["torch"].cpu())
    if "numpy" in states:
        import numpy

        name, keys, position, has_gauss, cached = states["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), position, has_gauss, cached))
    if "cuda" in states and torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
