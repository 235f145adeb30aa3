"""Reading a committed checkpoint, into a state dict or into a new one; no worker is needed."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from asyncckpt.errors import ConfigError, CorruptCheckpointError, MissingKeysError
from asyncckpt.format.tree import Node, leaves
from asyncckpt.loading.matching import KeyMap, Matches, match, prefix_hint, replace_at
from asyncckpt.loading.saved_tree import SavedTree, Selection, selected
from asyncckpt.loading.sinks import new_tensor, tensor_over, wanted_ranges
from asyncckpt.parts import CheckpointReader
from asyncckpt.paths import absolute_path
from asyncckpt.planning.state_dict import unflatten
from asyncckpt.planning.torch_types import decode_object, torch_dtype
from asyncckpt.storage.block_reader import DEFAULT_THREADS, read_shards
from asyncckpt.storage.contents import Contents, SavedTensor, check_lengths, corrupt, read_contents, read_objects
from asyncckpt.storage.files import Files
from asyncckpt.storage.read_plan import ShardRequest, Wanted

MapLocation = (
    torch.device | str | Mapping[str, str] | Callable[[torch.UntypedStorage, str], torch.UntypedStorage | None] | None
)
"""As `torch.load` takes it. Checkpoints keep no devices: every saved location is "cpu"."""

_logger = logging.getLogger("asyncckpt.loading")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Options:
    """Of one load; the same names as `load`'s."""

    map_location: MapLocation
    keys: Sequence[str] | None
    strict: bool
    verify: bool
    threads: int
    key_map: KeyMap | None


class DefaultReader(CheckpointReader):
    """Reads checkpoints in asyncckpt's own format. Has no state; safe to use from several threads.

    Args:
        files: The storage seam.
    """

    def __init__(self, files: Files | None = None) -> None:
        self._files = files or Files()

    def read(
        self,
        path: str | os.PathLike[str],
        state_dict: MutableMapping[Any, Any] | None = None,
        *,
        map_location: MapLocation = None,
        keys: str | Iterable[str] | None = None,
        strict: bool = False,
        verify: bool = True,
        threads: int | None = None,
        key_map: KeyMap | None = None,
        **kw: Any,
    ) -> tuple[Any, list[str]]:
        """Read the checkpoint at `path`; arguments and errors as `asyncckpt.load` has them.

        Returns:
            The state dict that was filled, or a new one; and the missing keys, as the target names them.
        """
        if kw:
            raise ConfigError(f"load has no arguments called {sorted(kw)}", field=min(kw))
        options = _Options(
            map_location=map_location,
            keys=_key_list(keys),
            strict=strict,
            verify=verify,
            threads=_thread_count(threads),
            key_map=key_map,
        )
        if key_map is not None and state_dict is None:
            raise ConfigError("key_map renames the keys of a target: pass a state_dict too", field="key_map")
        directory = absolute_path(path)
        with _collector_paused():
            load = _Load(read_contents(directory, self._files), options, self._files)
            return load.new() if state_dict is None else load.into(state_dict)


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep the cyclic collector from walking what a load builds: a third of the time of 20,000 tensors."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _key_list(keys: str | Iterable[str] | None) -> list[str] | None:
    if keys is None:
        return None
    found = [keys] if isinstance(keys, str) else list(keys)
    wrong = [k for k in found if not isinstance(k, str)]
    if wrong:
        raise ConfigError(f"keys holds {wrong[0]!r}: FQNs and prefixes are str, such as 'model'", field="keys")
    return found


def _thread_count(threads: int | None) -> int:
    if threads is None:
        return DEFAULT_THREADS
    if type(threads) is not int or threads < 1:
        raise ConfigError(f"threads={threads!r}: a positive integer is wanted", field="threads", value=repr(threads))
    return threads


class _Load:
    """One load of one checkpoint."""

    def __init__(self, contents: Contents, options: _Options, files: Files) -> None:
        self._contents, self._options, self._files = contents, options, files
        self._path = contents.path
        self._saved = SavedTree(contents)
        self._objects: dict[int, list[Any]] = {}
        check_lengths(contents, files)

    def into(self, state_dict: MutableMapping[Any, Any]) -> tuple[Any, list[str]]:
        """Fill `state_dict`. Everything is checked before a tensor changes; objects are replaced last."""
        matches = match(state_dict, self._saved, Selection(self._options.keys), self._options.key_map, self._path)
        self._report_missing(matches.missing)
        self._report_converted(matches)
        hoisted = {node[1]: None for _, node in matches.objects if node[0] == "B"}
        buffers = {n: self._new_tensor(n, torch.device("cpu")) for n in hoisted}
        objects = [(path, node, self._object(node[1]) if node[0] == "O" else None) for path, node in matches.objects]
        self._read([*matches.tensors, *((self._saved.tensors[n], buffer) for n, buffer in buffers.items())])
        for path, node, value in objects:
            replace_at(state_dict, path, _to_bytes(buffers[node[1]]) if node[0] == "B" else value)
        return state_dict, matches.missing

    def new(self) -> tuple[Any, list[str]]:
        """Rebuild the nesting as it was saved, or the selected part of it."""
        selection = Selection(self._options.keys)
        tree = selected(self._saved.tree, selection) or ("d", ())
        missing = selection.unused()
        self._report_missing(missing)
        found = {node for _, node in leaves(tree)} | {("O", number) for number in _metadata_numbers(tree)}
        objects = _Sparse({node[1]: self._object(node[1]) for node in found if node[0] == "O"})
        device = _device_of(self._options.map_location)
        numbers = sorted({node[1] for node in found if node[0] == "T"})
        hoisted = {node[1] for node in found if node[0] == "B"} - set(numbers)
        tensors = {n: self._new_tensor(n, device) for n in numbers}
        tensors |= {n: self._new_tensor(n, torch.device("cpu")) for n in sorted(hoisted)}
        self._read([(self._saved.tensors[n], tensor) for n, tensor in tensors.items()])
        if callable(self._options.map_location):
            tensors |= {n: _relocated(tensors[n], self._options.map_location) for n in numbers}
        return unflatten(tree, _Sparse(tensors), objects), missing

    def _new_tensor(self, number: int, device: torch.device) -> torch.Tensor:
        saved = self._saved.tensors[number]
        try:
            return new_tensor(saved.global_shape, torch_dtype(saved.dtype), device)
        except RuntimeError as error:
            if 0 not in saved.global_shape:
                raise
            detail = f"torch makes no tensor of shape {list(saved.global_shape)}"
            raise CorruptCheckpointError(
                f"{self._path}: tensor {saved.fqn!r}: {detail}", path=self._path, fqn=saved.fqn, detail=detail
            ) from error

    def _object(self, number: int) -> Any:
        rank, own_number = self._saved.object_at(number)
        if rank not in self._objects:
            self._objects[rank] = read_objects(self._contents, rank, self._files)
        try:
            return decode_object(self._objects[rank][own_number])
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            name = self._contents.ranks[rank].index.objects.name
            raise corrupt(self._path, name, f"object {own_number} does not decode: {error}") from error

    def _read(self, tensors: list[tuple[SavedTensor, torch.Tensor]]) -> None:
        """Read every pair's bytes, and tell autograd which tensors changed."""
        by_file: dict[tuple[int, int], list[Wanted]] = {}
        for saved, target in tensors:
            for file, wanted in wanted_ranges(saved, target):
                by_file.setdefault(file, []).append(wanted)
        requests = []
        for (rank, part), ranges in sorted(by_file.items()):
            index = self._contents.ranks[rank].index
            requests.append(ShardRequest(shard=index.shards[part], block_nbytes=index.block_nbytes, wanted=ranges))
        read_shards(
            self._path,
            self._contents.manifest.save_id,
            requests,
            files=self._files,
            threads=self._options.threads,
            verify=self._options.verify,
        )
        for _, target in tensors:
            if not target.is_inference():
                torch.autograd.graph.increment_version(target)

    def _report_missing(self, missing: list[str]) -> None:
        if not missing:
            return
        hint = prefix_hint(missing, self._saved.leaves)
        if self._options.strict:
            names = "\n  ".join(missing)
            raise MissingKeysError(
                f"{self._path}: {len(missing)} keys are not in the checkpoint{hint}; nothing was changed:\n  {names}",
                path=self._path,
                keys=list(missing),
            )
        shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        _logger.warning(
            "%s: %d keys are not in the checkpoint and stay as they are: %s%s", self._path, len(missing), shown, hint
        )

    def _report_converted(self, matches: Matches) -> None:
        if matches.converted:
            names = matches.converted
            _logger.warning(
                "%s: %d tensors are converted to the dtype of their target, %s first", self._path, len(names), names[0]
            )


class _Sparse(Sequence[Any]):
    """Values by number, for those that are there."""

    def __init__(self, values: dict[int, Any]) -> None:
        self._values = values

    def __getitem__(self, number: Any) -> Any:
        return self._values[number]

    def __len__(self) -> int:
        return len(self._values)


def _metadata_numbers(node: Node) -> list[int]:
    """Object numbers of the `_metadata` of all OrderedDicts: they are no leaves."""
    kind = node[0]
    if kind not in ("d", "o", "l", "t"):
        return []
    children = node[1][1::2] if kind in ("d", "o") else node[1]
    own = [node[2]] if kind == "o" and node[2] is not None else []
    return own + [number for child in children for number in _metadata_numbers(child)]


def _to_bytes(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel()) if tensor.numel() else b""


def _device_of(map_location: MapLocation) -> torch.device:
    """Return where new tensors are made. A callable decides later, from the CPU."""
    if map_location is None or callable(map_location):
        return torch.device("cpu")
    if isinstance(map_location, Mapping):
        return torch.device(map_location.get("cpu", "cpu"))
    return torch.device(map_location)


def _relocated(
    tensor: torch.Tensor, move: Callable[[torch.UntypedStorage, str], torch.UntypedStorage | None]
) -> torch.Tensor:
    storage = move(tensor.untyped_storage(), "cpu")
    if storage is None or storage.data_ptr() == tensor.untyped_storage().data_ptr():
        return tensor
    return tensor_over(storage, tensor)
