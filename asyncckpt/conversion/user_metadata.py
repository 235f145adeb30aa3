"""A checkpoint's metadata on their way through files that hold texts alone, and back."""

from __future__ import annotations

import json
from typing import Any

from asyncckpt.storage.contents import Contents

IN_ONE_TEXT = "asyncckpt_metadata"
"""Key of the header of a safetensors file: metadata that are not all texts, as JSON."""


def kept_metadata(contents: Contents) -> dict[str, Any]:
    """Return a source's metadata; of a Hugging Face directory without the list of its files, which are others now."""
    own = contents.source is not None and contents.source.kind == "hf"
    return {key: value for key, value in contents.manifest.metadata.items() if not (own and key == "files")}


def metadata_again(contents: Contents) -> dict[str, Any]:
    """Return the metadata that a checkpoint of ours gets: those that a conversion has put into one text are back."""
    found = kept_metadata(contents)
    text = found.get(IN_ONE_TEXT)
    if contents.source is None or not isinstance(text, str):
        return found
    try:
        inner = json.loads(text)
    except ValueError:
        return found
    if not isinstance(inner, dict):
        return found
    return {key: value for key, value in found.items() if key not in (IN_ONE_TEXT, "format")} | inner
