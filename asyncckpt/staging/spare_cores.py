"""Is a core free while the training computes? On cores that are all busy a copy behind the training costs it more time
than one in front of it (docs/adr/0029)."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from asyncckpt.errors import ConfigError

LOCAL_RANKS = "LOCAL_WORLD_SIZE"
"""Set by torchrun: how many processes train on this node."""


def cores_to_spare() -> bool:
    """Whether copies behind the training find a core that it does not use.

    Where devices compute, the host's cores wait for them. Else torch's threads, of all ranks of the node, are counted
    against the cores that this process may use.

    Raises:
        ConfigError: As `local_ranks`.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return True
    return torch.get_num_threads() * local_ranks(os.environ) < len(os.sched_getaffinity(0))


def local_ranks(environ: Mapping[str, str]) -> int:
    """Return how many ranks the launcher says that the node has; 1 if it says nothing.

    Raises:
        ConfigError: More digits than Python reads.
    """
    text = environ.get(LOCAL_RANKS, "")
    try:
        return max(1, int(text)) if text.isascii() and text.isdecimal() else 1
    except ValueError as error:
        raise ConfigError(
            f"{LOCAL_RANKS} has {len(text)} digits: expected how many processes train on this node", field=LOCAL_RANKS
        ) from error
