"""The files beside the weights that `from_pretrained` needs: config, generation config, tokenizer.

They are taken from objects by `save_pretrained` or `to_dict`, from dicts, or from files. No class of transformers is
imported, and no file of a checkpoint is run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from asyncckpt.basics.paths import absolute_path
from asyncckpt.errors import AsyncCkptError, ConfigError
from asyncckpt.interop.checkpoint_files import holds_weights
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


class ConfigFiles:
    """Writes the files beside the weights into a directory.

    Args:
        directory: An existing, empty directory.
        files: The storage seam.

    Attributes:
        config: The content of config.json.
    """

    def __init__(self, directory: str, files: Files) -> None:
        self._directory, self._files = directory, files
        self.config: dict[str, Any] = {}

    def contents(self) -> dict[str, bytes]:
        """Return the contents of all files by name."""
        names = sorted(self._files.listdir(self._directory))
        return {name: read_small_file(self._files, os.path.join(self._directory, name), _MAX_NBYTES) for name in names}

    def take_contents(self, contents: Mapping[str, bytes]) -> None:
        """Take all files as `contents` has returned them."""
        for name, data in contents.items():
            self._put(name, data)
        self.config = self._read_json(os.path.join(self._directory, CONFIG_NAME), "config")

    def take_config(self, config: Any) -> None:
        """Take the config: an object, a dict, a file, or a directory with a config.json."""
        self._write_json("config", config, CONFIG_NAME)
        self.config = self._read_json(os.path.join(self._directory, CONFIG_NAME), "config")

    def take_generation_config(self, config: Any) -> None:
        """Take the generation config: an object, a dict, a file, or a directory with a generation_config.json."""
        self._write_json("generation_config", config, GENERATION_CONFIG_NAME)

    def take_generation_config_beside(self, config: Any) -> None:
        """Take the generation_config.json of the directory that was given as config, if it has one."""
        if _is_path(config):
            path = absolute_path(config)
            folder = path if os.path.isdir(path) else os.path.dirname(path)
            if os.path.isfile(os.path.join(folder, GENERATION_CONFIG_NAME)):
                self.take_generation_config(folder)

    def take_tokenizer(self, tokenizer: Any) -> None:
        """Take the tokenizer, or a processor: an object with `save_pretrained`, or a directory with its files.

        Raises:
            ConfigError: It is something else; or the directory has no such files.
        """
        if not _is_path(tokenizer):
            self._save_pretrained("tokenizer", tokenizer)
            return
        folder = absolute_path(tokenizer)
        names = sorted(self._files.listdir(folder)) if os.path.isdir(folder) else []
        found = [name for name in names if name in _TOKENIZER_NAMES or name.endswith(_TOKENIZER_ENDINGS)]
        if not found:
            raise ConfigError(
                f"tokenizer={folder!r}: expected a directory with the files of a tokenizer, such as tokenizer.json",
                field="tokenizer",
                value=folder,
            )
        for name in found:
            path = os.path.join(folder, name)
            try:
                data = read_small_file(self._files, path, _MAX_NBYTES)
            except OSError as error:
                raise ConfigError(
                    f"tokenizer: {path} cannot be read: {error}", field="tokenizer", value=path
                ) from error
            self._put(name, data)

    def paths(self, *, dtype: str | None, architecture: str | None) -> dict[str, str]:
        """Write config.json, and return the paths of all files by name.

        Args:
            dtype: Dtype of the weights; it replaces that in the config, to which `from_pretrained` would cast. None:
                the config is not changed.
            architecture: Name of the model's class. None: what the config says.
        """
        if dtype is not None:
            for key in [key for key in _DTYPE_KEYS if key in self.config] or _DTYPE_KEYS[:1]:
                self.config[key] = dtype
        if architecture is not None:
            self.config["architectures"] = [architecture]
        self._put(CONFIG_NAME, _json(self.config))
        return {name: os.path.join(self._directory, name) for name in sorted(self._files.listdir(self._directory))}

    def _write_json(self, field: str, given: Any, name: str) -> None:
        if isinstance(given, Mapping):
            self._put(name, self._encoded(field, lambda: dict(given)))
        elif _is_path(given):
            path = absolute_path(given)
            path = os.path.join(path, name) if os.path.isdir(path) else path
            self._put(name, _json(self._read_json(path, field)))
        elif callable(getattr(given, "save_pretrained", None)):
            self._save_pretrained(field, given)
            if not os.path.isfile(os.path.join(self._directory, name)):
                raise ConfigError(f"{field}: save_pretrained() of {_kind(given)} has written no {name}", field=field)
        elif callable(getattr(given, "to_dict", None)):
            self._put(name, self._encoded(field, given.to_dict))
        else:
            raise ConfigError(
                f"{field} is a {_kind(given)}: expected a config or model of transformers, a dict, or the path of a "
                f"directory with {name}",
                field=field,
                value=_kind(given),
            )

    def _save_pretrained(self, field: str, given: Any) -> None:
        save = getattr(given, "save_pretrained", None)
        if not callable(save):
            raise ConfigError(
                f"{field} is a {_kind(given)}: expected an object with save_pretrained(), or the path of a directory",
                field=field,
                value=_kind(given),
            )
        try:
            save(self._directory)
        except (AsyncCkptError, OSError):
            raise
        except Exception as error:
            raise ConfigError(f"{field}: save_pretrained() of {_kind(given)} failed: {error!r}", field=field) from error
        for name in sorted(self._files.listdir(self._directory)):
            if holds_weights(name) or not os.path.isfile(os.path.join(self._directory, name)):
                raise ConfigError(
                    f"{field}: save_pretrained() of {_kind(given)} has written {name!r}, which is a directory or holds "
                    "weights: save it to a directory of yours, and give the path of that",
                    field=field,
                    value=name,
                )

    def _encoded(self, field: str, value: Callable[[], Any]) -> bytes:
        try:
            return _json(value())
        except Exception as error:
            raise ConfigError(f"{field} cannot be written as JSON: {error!r}", field=field) from error

    def _put(self, name: str, data: bytes) -> None:
        with open(os.path.join(self._directory, name), "wb") as file:
            file.write(data)

    def _read_json(self, path: str, field: str) -> dict[str, Any]:
        try:
            found = json.loads(read_small_file(self._files, path, _MAX_NBYTES))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{field}: {path} cannot be read as JSON: {error}", field=field, value=path) from error
        if not isinstance(found, dict):
            raise ConfigError(f"{field}: {path} holds no JSON object", field=field, value=path)
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
