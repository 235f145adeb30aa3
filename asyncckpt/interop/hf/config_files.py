"""The files beside the weights that `from_pretrained` needs: config, generation config, tokenizer.

They are taken from objects by `save_pretrained` or `to_dict`, from dicts, or from files, as bytes that another process
can have too. No class of transformers is imported, and no file of a checkpoint is run.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from asyncckpt.basics.paths import absolute_path
from asyncckpt.errors import AsyncCkptError, ConfigError
from asyncckpt.interop.checkpoint_files import holds_weights
from asyncckpt.interop.hf.model_outline import is_model
from asyncckpt.state_dict.stateful import unwrapped
from asyncckpt.storage.files import Files, read_small_file

CONFIG_NAME, GENERATION_CONFIG_NAME = "config.json", "generation_config.json"

_TOKENIZER_NAMES = frozenset(
    {
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
        *("vocab.json", "vocab.txt", "merges.txt", "normalizer.json", "tekken.json"),
        *("chat_template.jinja", "chat_template.json"),
        *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    }
)
"""Names of the files of tokenizers and processors, as `save_pretrained` of transformers writes them."""

_TOKENIZER_ENDINGS = (".model", ".tiktoken")
_MAX_NBYTES = 256 << 20
"""Longest file that is read. Chosen: the largest tokenizers take 40 MB."""

_DTYPE_KEYS = ("dtype", "torch_dtype")
"""Keys of a config for the dtype of the weights; the second was used up to transformers 4."""


def check_config(config: Any) -> None:
    """Check that there is a config.

    Raises:
        ConfigError: It is None, or a model without one.
    """
    if config is None or (is_model(config) and getattr(config, "config", None) is None):
        raise ConfigError(
            "export_hf: from_pretrained needs a config: give config=, a config or model of transformers, a dict, or a "
            "directory with config.json",
            field="config",
        )


def companion_files(
    *, config: Any, generation_config: Any = None, tokenizer: Any = None, model: Any = None
) -> dict[str, bytes]:
    """Return the contents of the files of an export beside the weights, by name.

    Args:
        config, generation_config, tokenizer: As of `export_hf`.
        model: The model whose generation config is taken, unless one is given; None: `config`, if that is a model.

    Raises:
        ConfigError: Config, generation config or tokenizer are missing or cannot be written.
        OSError: The directory of a tokenizer cannot be read, or `save_pretrained` cannot write.
    """
    config = unwrapped(config)
    check_config(config)
    if model is None and is_model(config):
        model = config
    found = _json_files("config", config.config if is_model(config) else config, CONFIG_NAME)
    own = found[CONFIG_NAME]
    _parsed("config", lambda: own, CONFIG_NAME)
    if generation_config is None and model is not None and getattr(model, "can_generate", lambda: False)():
        generation_config = getattr(model, "generation_config", None)
    if generation_config is None and not is_model(config):
        generation_config = _generation_config_beside(config)
    if generation_config is not None:
        found |= _json_files("generation_config", generation_config, GENERATION_CONFIG_NAME)
    return {**found, **(_tokenizer_files(tokenizer) if tokenizer is not None else {}), CONFIG_NAME: own}


def model_type_of(files: Mapping[str, bytes]) -> str:
    """Return the `model_type` that the config.json of `companion_files` says."""
    return str(json.loads(files[CONFIG_NAME]).get("model_type"))


def config_of(files: Mapping[str, bytes], *, dtype: str | None, architecture: str | None) -> bytes:
    """Return the config.json of an export.

    Args:
        files: What `companion_files` has returned.
        dtype: Dtype of the weights; it replaces that in the config, to which `from_pretrained` would cast. None: the
            config is not changed.
        architecture: Name of the model's class. None: what the config says.
    """
    config = json.loads(files[CONFIG_NAME])
    if dtype is not None:
        config |= dict.fromkeys([key for key in _DTYPE_KEYS if key in config] or _DTYPE_KEYS[:1], dtype)
    if architecture is not None:
        config["architectures"] = [architecture]
    return _json(config)


def _generation_config_beside(config: Any) -> str | None:
    """Return the directory that was given as config, or that of the file, if it has a generation_config.json."""
    if not _is_path(config):
        return None
    path = absolute_path(config)
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    return folder if os.path.isfile(os.path.join(folder, GENERATION_CONFIG_NAME)) else None


def _tokenizer_files(tokenizer: Any) -> dict[str, bytes]:
    """Return the files of a tokenizer, or a processor: an object with `save_pretrained`, or a directory with them."""
    if not _is_path(tokenizer):
        return _saved_files("tokenizer", tokenizer)
    folder = absolute_path(tokenizer)
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    found = [name for name in names if name in _TOKENIZER_NAMES or name.endswith(_TOKENIZER_ENDINGS)]
    if not found:
        raise ConfigError(
            f"tokenizer={folder!r}: expected a directory with the files of a tokenizer, such as tokenizer.json",
            field="tokenizer",
            value=folder,
        )
    return {name: _read("tokenizer", os.path.join(folder, name)) for name in found}


def _json_files(field: str, given: Any, name: str) -> dict[str, bytes]:
    """Return the files of a config or generation config: an object, a dict, a file, or a directory with `name`."""
    if isinstance(given, Mapping):
        return {name: _encoded(field, lambda: dict(given))}
    if _is_path(given):
        path = absolute_path(given)
        path = os.path.join(path, name) if os.path.isdir(path) else path
        return {name: _json(_parsed(field, lambda: read_small_file(Files(), path, _MAX_NBYTES), path))}
    if callable(getattr(given, "save_pretrained", None)):
        found = _saved_files(field, given)
        if name not in found:
            raise ConfigError(f"{field}: save_pretrained() of {_kind(given)} has written no {name}", field=field)
        return found
    if callable(getattr(given, "to_dict", None)):
        return {name: _encoded(field, given.to_dict)}
    raise ConfigError(
        f"{field} is a {_kind(given)}: expected a config or model of transformers, a dict, or the path of a "
        f"directory with {name}",
        field=field,
        value=_kind(given),
    )


def _saved_files(field: str, given: Any) -> dict[str, bytes]:
    """Return the files that an object writes by `save_pretrained`."""
    save = getattr(given, "save_pretrained", None)
    if not callable(save):
        raise ConfigError(
            f"{field} is a {_kind(given)}: expected an object with save_pretrained(), or the path of a directory",
            field=field,
            value=_kind(given),
        )
    with tempfile.TemporaryDirectory(prefix="asyncckpt-export-") as directory:
        try:
            save(directory)
        except (AsyncCkptError, OSError):
            raise
        except Exception as error:
            raise ConfigError(f"{field}: save_pretrained() of {_kind(given)} failed: {error!r}", field=field) from error
        names = sorted(os.listdir(directory))
        for name in names:
            if holds_weights(name) or not os.path.isfile(os.path.join(directory, name)):
                raise ConfigError(
                    f"{field}: save_pretrained() of {_kind(given)} has written {name!r}, which is a directory or holds "
                    "weights: save it to a directory of yours, and give the path of that",
                    field=field,
                    value=name,
                )
        return {name: _read(field, os.path.join(directory, name)) for name in names}


def _encoded(field: str, value: Callable[[], Any]) -> bytes:
    try:
        return _json(value())
    except Exception as error:
        raise ConfigError(f"{field} cannot be written as JSON: {error!r}", field=field) from error


def _read(field: str, path: str) -> bytes:
    try:
        return read_small_file(Files(), path, _MAX_NBYTES)
    except OSError as error:
        raise ConfigError(f"{field}: {path} cannot be read: {error}", field=field, value=path) from error


def _parsed(field: str, read: Callable[[], bytes], where: str) -> dict[str, Any]:
    try:
        found = json.loads(read())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{field}: {where} cannot be read as JSON: {error}", field=field, value=where) from error
    if not isinstance(found, dict):
        raise ConfigError(f"{field}: {where} holds no JSON object", field=field, value=where)
    return found


def config_with_dtype(data: bytes, dtype: str) -> bytes | None:
    """Return a config.json that says a dtype of the weights; None: it says none, or that one, or is no config.

    Args:
        data: Content of a config.json.
        dtype: The dtype.
    """
    try:
        config = json.loads(data)
    except (ValueError, RecursionError):
        return None
    said = [key for key in _DTYPE_KEYS if config.get(key) not in (None, dtype)] if isinstance(config, dict) else []
    return _json({**config, **dict.fromkeys(said, dtype)}) if said else None


def _is_path(given: Any) -> bool:
    return isinstance(given, (str, os.PathLike))


def _kind(given: Any) -> str:
    return type(given).__name__


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"
