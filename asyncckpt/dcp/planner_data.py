"""`Metadata.planner_data`: what a planner keeps with a checkpoint for the planners that will read it.

The default planner's, a path for each name, is in the tree. Anything else is kept in the manifest, as typed JSON where
it has a form there, else pickled, and then it is given back to those only who allow that.
"""

from __future__ import annotations

import base64
import io
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from asyncckpt.dcp.leaf_values import TAG, encode_exactly
from asyncckpt.dcp.nesting import path_of
from asyncckpt.format.manifest import PLANNER_KEY, Manifest
from asyncckpt.planning.leaves import decode_leaf
from asyncckpt.planning.pickles import unpickle

_IN_TREE = {"$": "paths"}
_logger = logging.getLogger("asyncckpt.dcp")


class _Refused(Exception):
    """It was pickled."""


def kept_planner_data(metadata: Metadata) -> Any:
    """Return the JSON form of a checkpoint's planner data."""
    found = metadata.planner_data
    if _is_in_tree(found, metadata):
        return _IN_TREE
    raw = encode_exactly(found)
    if raw is None and found is not None:
        data = io.BytesIO()
        torch.save(found, data)
        raw = {"$": TAG, "v": [type(found).__qualname__, base64.b64encode(data.getvalue()).decode()]}
    return raw


def _is_in_tree(found: Any, metadata: Metadata) -> bool:
    if not isinstance(found, Mapping) or found.keys() != metadata.state_dict_metadata.keys():
        return False
    return all(path_of(fqn, found) == path for fqn, path in found.items())


def was_saved_by_torch(manifest: Manifest) -> bool:
    """Whether the leaves are those of a planner's plan, by the names that it gave them."""
    return isinstance(manifest.metadata.get(PLANNER_KEY), dict)


def planner_data_of(manifest: Manifest, paths: dict[str, Any], *, allow_pickle: bool) -> Any:
    """Return the planner data of a checkpoint.

    Args:
        manifest: Its own.
        paths: By name, from the tree.
        allow_pickle: Whether what was pickled is unpickled; else it is None, and that is logged.
    """
    kept = manifest.metadata.get(PLANNER_KEY)
    raw = kept.get("planner_data") if isinstance(kept, dict) else _IN_TREE
    if raw == _IN_TREE:
        return paths

    def from_pickle(kind: str, data: bytes) -> Any:
        if not allow_pickle:
            raise _Refused(kind)
        return unpickle(data)

    try:
        return decode_leaf(raw, from_pickle)
    except _Refused as error:
        _logger.warning("the planner data were pickled (%s) and are left out; allow_pickle=True reads them", error)
        return None
