"""The state that a rank saves for a framework's files: a plan, small bytes, tensors of bytes (`stock_files`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from asyncckpt.integrations.capturing import Captured, pieces_of
from asyncckpt.integrations.stock_files import PLAN_KEY, SMALL_KEY, TENSORS_KEY, Piece, encode_plan

SMALL_QUANTUM_NBYTES = 256 << 10
"""What is known as bytes is padded to a multiple of it, so that a log that grows makes no new plan at every save."""


def state_of(files: Mapping[str, Captured | bytes]) -> dict[str, Any]:
    """Return what a rank saves for its files (`stock_files`)."""
    plan: list[tuple[str, list[Piece]]] = []
    small, tensors = bytearray(), list[torch.Tensor]()
    for name, content in files.items():
        pieces: list[Piece] = []
        for piece in pieces_of(content):
            if isinstance(piece, torch.Tensor):
                pieces.append(len(tensors))
                tensors.append(piece)
            else:
                pieces.append([len(small), len(piece)])
                small += piece
        plan.append((name, pieces))
    small += bytes(-len(small) % SMALL_QUANTUM_NBYTES or SMALL_QUANTUM_NBYTES * (not small))
    return {
        PLAN_KEY: encode_plan(plan),
        SMALL_KEY: torch.frombuffer(small, dtype=torch.uint8),
        TENSORS_KEY: tensors,
    }
