"""The only door to torch.distributed: which rank this process is."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch.distributed as dist

from asyncckpt.config import RankInfo
from asyncckpt.errors import ConfigError


def find_rank_info(given: RankInfo | None, environ: Mapping[str, str] | None = None) -> RankInfo:
    """Return `given`, else the default process group's rank, else torchrun's environment, else 0 of 1.

    Raises:
        ConfigError: An unreadable environment, or a rank outside its world.
    """
    info = RankInfo(*(given or _detected(os.environ if environ is None else environ)))
    if not 0 <= info.rank < info.world_size:
        raise ConfigError(
            f"RANK={info.rank} with WORLD_SIZE={info.world_size}: set both, as torchrun does, or neither",
            field="rank_info",
            value=repr(info),
        )
    return info


def find_only_rank(given: RankInfo | None) -> RankInfo:
    """Return what `find_rank_info` does, for those who cannot save from several ranks yet.

    Raises:
        ConfigError: More than one rank; or as `find_rank_info`.
    """
    info = find_rank_info(given)
    if info.world_size != 1:
        raise ConfigError(
            f"this is rank {info.rank} of {info.world_size}, and this version saves from one rank only; where "
            "only rank 0 saves, pass rank_info=RankInfo(0, 1) there",
            field="rank_info",
            value=repr(info),
        )
    return info


def _detected(environ: Mapping[str, str]) -> RankInfo:
    if dist.is_available() and dist.is_initialized():
        return RankInfo(dist.get_rank(), dist.get_world_size())
    try:
        return RankInfo(int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1")))
    except ValueError as error:
        raise ConfigError(f"RANK or WORLD_SIZE is no number: {error}", field="rank_info") from error
