"""Writes the golden checkpoint of two ranks, format version 1, into tests/golden/format-v1-ranks.

Run once per format version: `python tests/golden/make_format_v1_ranks.py`. Its bytes are kept for ever, as those of
`make_format_v1.py` are.
"""

from __future__ import annotations

import pathlib
import sys
from collections import OrderedDict
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]

import torch  # noqa: E402
from many_ranks import checkpoint_files  # noqa: E402

from asyncckpt.format.names import SaveId  # noqa: E402
from asyncckpt.per_rank import PerRank  # noqa: E402

SAVE_ID = SaveId(2, 5, "89abcdef0123")


def state_of(rank: int) -> dict[str, Any]:
    """What `rank` saved: replicas in rows, tied ones, unequal ones, its own, and what one rank only has."""
    weight = torch.arange(30, dtype=torch.float32).reshape(6, 5)
    model = OrderedDict([("weight", weight), ("tied", weight), ("mean", torch.full((4,), rank, dtype=torch.bfloat16))])
    model._metadata = {"": {"version": 2}}  # type: ignore[attr-defined]
    return {
        "model": model,
        "empty": torch.empty(0, 3, dtype=torch.int64),
        "rng": PerRank({"cpu": torch.arange(rank, rank + 16, dtype=torch.uint8), "python": [3, rank]}),
        "position": PerRank(1000 + rank),
        "long": bytes(range(256)) * 256,
        "step": 40,
        "seen": rank / 4,
        "list": [torch.tensor(7, dtype=torch.int32), {"rank": rank}],
        f"only-{rank}": torch.full((2, 2), 0.5 + rank, dtype=torch.float64),
    }


def documents() -> dict[str, bytes]:
    """Return every golden file by name, as the package writes it today."""
    return checkpoint_files([state_of(rank) for rank in range(2)], save_id=SAVE_ID, step=40, block_nbytes=4096)


if __name__ == "__main__":
    (HERE / "format-v1-ranks").mkdir(exist_ok=True)
    for name, data in documents().items():
        (HERE / "format-v1-ranks" / name).write_bytes(data)
        print(f"{len(data):8} {name}")
