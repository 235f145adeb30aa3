"""One short text for all values of a state, so that two trainings can be compared by eye."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch


def digest_of(state: Mapping[str, torch.Tensor]) -> str:
    """Return the digest of names, dtypes, shapes and every bit of the elements."""
    found = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(bytes(tensor.reshape(-1).view(torch.uint8).tolist()))
    return found.hexdigest()[:16]
