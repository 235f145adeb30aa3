"""`asyncckpt.convert`: converts a checkpoint of any kind to any other kind, in bounded memory."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from asyncckpt.basics.paths import absolute_path, checkpoint_path, current_umask, is_url
from asyncckpt.config import RankInfo
from asyncckpt.errors import AsyncCkptError, ConfigError, UnsupportedPathError
from asyncckpt.format.checksums import BLOCK_NBYTES, block_nbytes_at
from asyncckpt.format.names import SaveId
from asyncckpt.format.state_tree import OBJECT, TENSOR
from asyncckpt.interop.checkpoint_files import copied_files, copy_file
from asyncckpt.interop.conversion_losses import ConversionLosses, changes, sentence, writable_part
from asyncckpt.interop.copy_pipeline import DuplexFiles, Progress, Target, write_files
from asyncckpt.interop.hf.config_files import CONFIG_NAME, config_with_dtype
from asyncckpt.interop.mapping.made_tensors import CAST_DTYPES, cast
from asyncckpt.interop.mapping.tensor_rules import TensorRule, apply_rules, checked_rules
from asyncckpt.interop.outline import KeyMap, Outline, outline_of, readable, without_composites
from asyncckpt.interop.publish import (
    TargetState,
    check_around,
    check_free_space,
    check_inside,
    check_not_nested,
    check_place,
    is_inside,
    put_into_directory,
    put_into_place,
    temporary_path,
)
from asyncckpt.interop.source_reader import SourceReader
from asyncckpt.interop.sources.detect import KINDS, read_any
from asyncckpt.interop.verify_target import verify_bytes, verify_structure
from asyncckpt.interop.write_asyncckpt import asyncckpt_target, check_asyncckpt
from asyncckpt.interop.write_object_store import write_to_object_store
from asyncckpt.interop.write_safetensors import check_safetensors, hf_target, safetensors_target
from asyncckpt.interop.write_torch import check_dcp, check_torch, dcp_target, torch_target
from asyncckpt.loading.byte_ranges import whole_box
from asyncckpt.loading.fetch import thread_count
from asyncckpt.loading.key_selection import key_list
from asyncckpt.loading.saved_state import SavedObjects, refuse_incompatible_shards
from asyncckpt.storage.catalog import next_epoch_beside
from asyncckpt.storage.contents import Contents
from asyncckpt.storage.files import (
    MODE_DIRECTORY,
    MODE_FILE,
    Files,
    conversion_failure,
    fsync_directory,
    write_new_file,
)
from asyncckpt.storage.local import LocalStore
from asyncckpt.storage.locate import files_at, with_storage_options
from asyncckpt.storage.read_plan import with_verifiers


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionReport:
    """The result of a conversion.

    Attributes:
        kind: Kind of the source.
        to: Kind of the target.
        tensors, objects: Numbers of leaves that are tensors and that are not; a tied tensor counts under each name.
        nbytes: Bytes of the files into which tensors were copied.
        changed: What the target holds in another form: one sentence for each change, with all names.
        left_out: FQNs of leaves that were left out, because the target cannot hold them (`partial=True`).
        copied: Names of the files beside the weights of a Hugging Face directory: companion files, such as config.json,
            that were copied from the source's directory or given to `export_hf`.
        not_copied: Names of everything else in the source's Hugging Face directory: directories, hidden files, weights
            in other formats. If the target is of another kind: of the companion files as well.
        carried_over: Names of the companion files of the Hugging Face directory that was replaced; they were kept.
    """

    kind: str
    to: str
    tensors: int
    objects: int
    nbytes: int
    changed: tuple[str, ...]
    left_out: tuple[str, ...]
    copied: tuple[str, ...]
    not_copied: tuple[str, ...]
    carried_over: tuple[str, ...]


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    to: str,
    keys: str | Iterable[str] | None = None,
    key_map: KeyMap | None = None,
    rules: Iterable[TensorRule] = (),
    dtype: Any = None,
    max_shard_bytes: int | None = None,
    overwrite: bool = False,
    partial: bool = False,
    threads: int | None = None,
    read_back: bool = True,
    progress: Progress | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> ConversionReport:
    """Convert a checkpoint of any kind to any other kind.

    The target is written under a hidden name in the directory of `dst`, opened by the reader of its kind and compared
    with the source, read back, and then renamed to `dst`: readers see a complete target or none. Needs no process group
    and no worker. Memory: 256 MB; plus the largest tensor whose elements are not row-major in the source; plus a few
    times all texts, `bytes` and numpy arrays in pickles.

    Tensors that are stored as their components (subclasses, sparse, quantized and jagged ones) stay so in `asyncckpt`,
    and are dicts of their components in all other kinds.

    Args:
        src: An asyncckpt checkpoint, also by a URL of an object store; a DCP directory, a file of `torch.save`, a
            safetensors file, or a directory of safetensors files.
        dst: The target: a directory for `asyncckpt`, `dcp` and `hf`, else a file. Its parent directory must exist. A
            file may be inside the source's directory. A directory for `asyncckpt` or `dcp` may contain the source if it
            holds no checkpoint; then the files of the target are added to it and nothing is replaced. For `asyncckpt`
            also a URL of an object store: the target is written to the directory for temporary files (`TMPDIR`), which
            needs room for all of it, and copied from there.
        to: `asyncckpt`, `dcp`, `torch`, `safetensors` or `hf`.
        keys: FQNs and prefixes in the source; only these leaves are converted. None converts everything.
        key_map: From the source's FQNs to the target's, the other way round than in `load`: a dict (names that it
            lacks stay) or a callable.
        rules: Which tensors are stacked, split, joined or renamed, after `key_map`; a tensor belongs to the first rule
            that matches its name.
        dtype: Dtype, or its name, to which tensors of float64, float32, float16 and bfloat16 are cast; a config.json
            that is copied then names it. None: none is.
        max_shard_bytes: Limit in bytes of the tensors in one file of a target that is a directory; for `asyncckpt` it
            includes the header of the file. A larger tensor gets a file of its own. None: one file; for `hf` 5 GB.
        overwrite: Replace a checkpoint at `dst`, in one step. If the file system cannot exchange two names, only a file
            can be replaced, and by a file. If both are Hugging Face directories, the companion files of the old one,
            such as config.json, are kept; a target of another kind does not replace a directory that has some.
        partial: Leave out, and report, leaves that the target cannot hold, and leaves that cannot be read (objects of
            classes that are not on the list). False: such leaves are an error.
        threads: How many threads may access the disk at once, half of them to read and half to write; others copy and
            compute checksums meanwhile. None takes 4.
        read_back: Read every byte of the target from the disk and compare it with what was written. False: names,
            types, shapes, file offsets and values of leaves are compared, but not the elements of tensors.
        progress: Called with (bytes done, bytes in total); bytes that are written, read back and copied all count.
        storage_options: Options of the object stores that `src` and `dst` lead to, by obstore's names; their values are
            never shown. None: those of the environment.

    Returns:
        Numbers of leaves and bytes, and what the target holds in another form.

    Raises:
        CheckpointNotFoundError: There is nothing at `src`, or no parent directory of `dst`.
        CheckpointNotCommittedError: An asyncckpt save was begun at `src` and never committed.
        CheckpointExistsError: There is something at `dst`, and `overwrite` is False, or it is pinned, or no checkpoint,
            or it cannot be replaced in one step.
        CorruptCheckpointError: The source is damaged, or the target differs when it is read back.
        PerRankUnavailableError: The ranks that shared a tensor of a subclass have stored parts that make no whole one:
            with unequal classes, contexts, or components that were not cut with it.
        UnsupportedFormatError: The source is of no known kind, or has leaves that cannot be read; names all of them.
        UnsupportedLeafError: The target cannot hold some leaves (names the first 1,000), or this torch lacks a dtype.
        MissingKeysError: A key in `keys` selects nothing.
        UnmatchedTensorsError: A rule needs tensors that are not there; names all of them.
        ShapeMismatchError: The shapes of tensors do not fit a rule.
        DuplicateNameError: Two leaves have the same name, or would have it in the target.
        SaveFailedError: There is not enough space, or the file system failed; nothing of the target is left. Code
            EAGAIN: an asyncckpt save may be running at `dst`, which would be replaced.
        CommitUnknownError: The request that commits the target in an object store failed; it may be there.
        ConfigError: An argument is invalid, or `overwrite` is True for a URL, or `max_shard_bytes` is so small that a
            rank would have too many files.
        UnsupportedPathError: `dst` is a URL, and `to` is not `asyncckpt`; or a URL's store cannot be used; or one is no
            path.
        OSError: The source cannot be read.

    Blocks: until everything is read and written; with `overwrite` also, for at most 30 seconds, while an asyncckpt save
        commits at `dst`.
    """
    source, found = checkpoint_path(src), checked_rules(rules) if rules else []
    conversion = Conversion(
        to,
        keys=keys,
        key_map=key_map,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        overwrite=overwrite,
        partial=partial,
        threads=threads,
        read_back=read_back,
    )
    if is_url(str(dst)) and to != "asyncckpt":
        scheme = str(dst).partition("://")[0]  # IMPORTANT: not the rest, which may hold a password
        raise UnsupportedPathError(
            f"convert: dst is a {scheme}:// URL, to which only to='asyncckpt' can write: convert to a directory, and "
            "copy that with the store's own tools",
            path=f"{scheme}://",
        )
    target = checkpoint_path(dst) if is_url(str(dst)) else absolute_path(dst)

    def write(path: str, save_id: SaveId | None = None) -> ConversionReport:
        return conversion.run(
            source,
            path,
            save_id=save_id,
            block_nbytes=block_nbytes_at(target),
            progress=progress,
            prepare=lambda outline: reshaped(outline, found, conversion.dtype),
        )

    with with_storage_options(storage_options):
        if is_url(target):
            return write_to_object_store(target, write, conversion.step, overwrite=overwrite)
        return write(target)


def _check_target(to: str, max_shard_bytes: int | None) -> None:
    if to not in KINDS:
        raise ConfigError(f"to={to!r}: expected one of {', '.join(KINDS)}", field="to", value=repr(to))
    if max_shard_bytes is not None:
        if type(max_shard_bytes) is not int or max_shard_bytes < 1:
            raise ConfigError(
                f"max_shard_bytes={max_shard_bytes!r}: expected a positive integer", field="max_shard_bytes"
            )
        if to in ("torch", "safetensors"):
            raise ConfigError(
                f"max_shard_bytes={max_shard_bytes} does not apply to to={to!r}, which is one file: leave it out, or "
                "convert to a directory (asyncckpt, dcp or hf)",
                field="max_shard_bytes",
            )


def _cast_dtype(dtype: Any) -> str | None:
    """Check the argument `dtype`; return its name."""
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in CAST_DTYPES:
        raise ConfigError(f"dtype={dtype!r}: expected {', '.join(CAST_DTYPES)}, or None", field="dtype", value=name)
    return name


def reshaped(
    outline: Outline, rules: Sequence[TensorRule], dtype: str | None, *, all_must_match: bool = True
) -> tuple[Outline, list[str]]:
    """Return the outline with the tensors that rules make, cast to `dtype`; and what has changed, in sentences.

    Raises:
        UnmatchedTensorsError, ShapeMismatchError, DuplicateNameError: As `apply_rules`.
    """
    sentences: list[str] = []
    if rules:
        outline, sentences = apply_rules(outline, rules, all_must_match=all_must_match)
    if dtype is None:
        return outline, sentences
    weights = {node[1] for _, node in outline.leaves() if node[0] == TENSOR}
    tensors = [cast(tensor, dtype) if n in weights else tensor for n, tensor in enumerate(outline.tensors)]
    names = [name for name, old, new in zip(outline.names, outline.tensors, tensors, strict=True) if old is not new]
    return replace(outline, tensors=tensors), sentences + sentence(f"tensors were cast to {dtype}", names)


class Conversion:
    """One conversion.

    Args:
        to: Kind of the target.
        keys, key_map, dtype, max_shard_bytes, overwrite, partial, threads, read_back: As of `convert`.

    Attributes:
        dtype: Name of the dtype to which tensors are cast; None: none is.

    Raises:
        ConfigError: An argument is invalid.
    """

    def __init__(
        self,
        to: str,
        *,
        keys: Any = None,
        key_map: KeyMap | None = None,
        dtype: Any = None,
        max_shard_bytes: int | None = None,
        overwrite: bool = False,
        partial: bool = False,
        threads: int | None = None,
        read_back: bool = True,
    ) -> None:
        _check_target(to, max_shard_bytes)
        if keys is not None and not isinstance(keys, Iterable):
            raise ConfigError(f"keys={keys!r}: expected FQNs and prefixes, such as ['model']", field="keys")
        self._to, self._keys, self._key_map, self._max_shard_nbytes = to, key_list(keys), key_map, max_shard_bytes
        self._overwrite, self._partial, self._read_back = overwrite, partial, read_back
        self.dtype, self._threads = _cast_dtype(dtype), thread_count(threads)
        self._files, self._umask = Files(), current_umask()
        self._done = self._total = 0

    def check_place(self, path: str) -> TargetState:
        """Check that the target may be written to `path`, and return what is there. Raises as `publish.check_place`."""
        return check_place(path, self._to, self._files, overwrite=self._overwrite)

    def run(
        self,
        source: str,
        path: str,
        *,
        prepare: Callable[[Outline], tuple[Outline, list[str]]],
        beside: Callable[[Outline], Mapping[str, bytes]] = lambda outline: {},
        save_id: SaveId | None = None,
        block_nbytes: int = BLOCK_NBYTES,
        progress: Progress | None = None,
    ) -> ConversionReport:
        """Convert.

        Args:
            source: Absolute path of the source, or a URL.
            path: Absolute path of the target.
            prepare: Returns what is converted of the selected leaves, and what it has changed in sentences.
            beside: Called with what is written; returns the contents of further files of a target of kind `hf`, by
                name. They take precedence over companion files of the source.
            save_id: Save ID of a target `asyncckpt` that the caller then uploads; None: a new one, newer than all
                checkpoints beside `path`.
            block_nbytes: Bytes of a shard file that have one checksum, in a target `asyncckpt`.
            progress: As of `convert`.
        """
        self._progress, source_files = progress, files_at(source)
        is_local = not is_url(source)
        if is_local and save_id is None:
            check_not_nested(path, source, self._to)
        contents = read_any(source, source_files)
        if is_local:
            check_inside(path, source, contents)
        is_around = is_local and is_inside(source, path)
        if is_around:
            check_around(path, self._files)
            existing, place = TargetState.NOTHING, os.path.join(path, os.path.basename(path))
        else:
            existing, place = self.check_place(path), path
        split: list[str] = []
        whole = outline_of(contents, source_files, keys=self._keys, key_map=self._key_map)
        if whole.doubtful_components:
            boxes, objects = (
                [whole_box(whole.saved(n)) for n in range(len(whole.tensors))],
                SavedObjects(contents, source_files),
            )
            refuse_incompatible_shards(whole.doubtful_components, boxes, RankInfo(0, 1), objects)
        if self._to != "asyncckpt":
            whole, split = without_composites(whole)
        whole, sentences = prepare(whole)
        losses = _CHECKS[self._to](readable(whole))
        outline = writable_part(whole, losses, to=self._to, partial=self._partial)
        target = self._target(outline, path, save_id, block_nbytes)
        companions, not_copied = self._companion_files(contents)
        extras = companions | self._written_beside(outline, companions, beside)
        room = sum(len(one) if isinstance(one, bytes) else os.path.getsize(one) for one in extras.values())
        check_free_space(place, target.nbytes + room, self._files)
        changed = losses.changed + sentence("tensors became dicts of their components", split) + sentences
        changed += changes(whole, outline, self._to, self._keys, source_files)
        times = 1 + self._read_back
        self._total = target.nbytes * (times + (save_id is not None))
        carried: tuple[str, ...] = ()
        with temporary_path(place) as temporary:
            try:
                self._write(temporary, target, outline, None if is_local else source_files, extras)
                if contents.source is not None:
                    contents.source.check_unchanged(source_files)
                if is_around:
                    put_into_directory(temporary, path, self._files)
                else:
                    carried = put_into_place(temporary, path, existing, self._to, self._files, self._umask)
            except AsyncCkptError:
                raise
            except OSError as error:
                raise conversion_failure(error, path) from error
        self._done = target.nbytes * times
        self.step(0)
        kinds = [node[0] for _, node in outline.leaves()]
        return ConversionReport(
            kind=contents.kind,
            to=self._to,
            tensors=len(kinds) - kinds.count(OBJECT),
            objects=kinds.count(OBJECT),
            nbytes=target.nbytes,
            changed=tuple(changed),
            left_out=(*losses.cannot, *whole.per_rank),
            copied=tuple(sorted(extras)),
            not_copied=tuple(not_copied),
            carried_over=carried,
        )

    def _target(self, outline: Outline, path: str, save_id: SaveId | None, block_nbytes: int) -> Target:
        if self._to != "asyncckpt":
            return _TARGETS[self._to](outline, self._files, self._max_shard_nbytes)
        if save_id is None:
            save_id = SaveId(next_epoch_beside(path, LocalStore(self._files)), 0, secrets.token_hex(6))
        return asyncckpt_target(outline, save_id, self._files, self._umask, self._max_shard_nbytes, block_nbytes)

    def _companion_files(self, contents: Contents) -> tuple[dict[str, str | bytes], list[str]]:
        """Return the files of a Hugging Face directory that are copied to the target: their paths by name; and the
        names of all others.
        """
        if contents.source is None or contents.kind != "hf":
            return {}, []
        folder = contents.source.directory
        names, others = copied_files(folder, contents, self._files)
        if self._to != "hf":
            return {}, sorted([*names, *others])
        return {name: os.path.join(folder, name) for name in names}, others

    def _written_beside(
        self,
        outline: Outline,
        companions: Mapping[str, str | bytes],
        beside: Callable[[Outline], Mapping[str, bytes]],
    ) -> dict[str, str | bytes]:
        """Return what `beside` does, and a config.json that says the dtype to which the weights are cast."""
        found: dict[str, str | bytes] = {**beside(outline)}
        is_cast = self.dtype is not None and any(tensor.dtype == self.dtype for tensor in outline.tensors)
        if is_cast and CONFIG_NAME in companions and CONFIG_NAME not in found:
            with open(companions[CONFIG_NAME], "rb") as file:
                data = config_with_dtype(file.read(), str(self.dtype))
            if data is not None:
                found[CONFIG_NAME] = data
        return found

    def _write(
        self,
        temporary: str,
        target: Target,
        outline: Outline,
        remote: Files | None,
        extras: Mapping[str, str | bytes],
    ) -> None:
        """Write and verify the target. `remote`: what reads a source in an object store."""
        mode = MODE_FILE & ~self._umask
        if target.is_directory:
            self._files.mkdir(temporary, MODE_DIRECTORY & ~self._umask)
        files, threads = DuplexFiles(self._threads), with_verifiers(self._threads)
        reader = SourceReader(outline.contents, outline.tensors, remote or files)
        blocks = write_files(temporary, target, reader, files, mode, self.step, threads=threads)
        reader.check_checksums(range(len(outline.tensors)), self._threads)
        for name, found in extras.items():
            if isinstance(found, bytes):
                write_new_file(self._files, os.path.join(temporary, name), found, mode=mode, fsync=True)
            else:
                copy_file(found, os.path.join(temporary, name), mode)
        if target.finish is not None:
            target.finish(temporary, blocks)
        if target.is_directory:
            fsync_directory(self._files, temporary)
        verify_structure(temporary, outline, self._to, target, self._files, self._threads)
        if self._read_back:
            verify_bytes(temporary, outline, target, blocks, self._files, self._threads, self.step)

    def step(self, nbytes: int) -> None:
        """Count bytes that were written, read back or copied, and show the progress."""
        self._done += nbytes
        if self._progress is not None:
            self._progress(min(self._done, self._total), self._total)


_CHECKS: dict[str, Callable[[Outline], ConversionLosses]] = {
    "asyncckpt": check_asyncckpt,
    "dcp": check_dcp,
    "torch": check_torch,
    "safetensors": check_safetensors,
    "hf": check_safetensors,
}

_TARGETS: dict[str, Callable[[Outline, Files, int | None], Target]] = {
    "dcp": dcp_target,
    "torch": lambda outline, files, _: torch_target(outline, files),
    "safetensors": lambda outline, files, _: safetensors_target(outline),
    "hf": lambda outline, files, max_shard_nbytes: hf_target(outline, max_shard_nbytes),
}
