"""`asyncckpt.export_hf`: writes a model to a directory that `from_pretrained` opens."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from asyncckpt.basics.paths import absolute_path, checkpoint_path, is_url
from asyncckpt.config import RankInfo
from asyncckpt.distributed.meetings import all_or_none
from asyncckpt.distributed.process_group import find_exchange, find_rank_info
from asyncckpt.errors import (
    AsyncCkptError,
    ConfigError,
    SaveFailedError,
    ShapeMismatchError,
    UnmatchedTensorsError,
    UnsupportedPathError,
)
from asyncckpt.format.names import converting_name
from asyncckpt.format.state_tree import ARRAY, TENSOR
from asyncckpt.interop.conversion_losses import sentence
from asyncckpt.interop.convert import Conversion, ConversionReport, reshaped
from asyncckpt.interop.copy_pipeline import Progress
from asyncckpt.interop.hf.architectures import HUB_RULES
from asyncckpt.interop.hf.config_files import CONFIG_NAME, check_config, companion_files, config_of, model_type_of
from asyncckpt.interop.hf.model_outline import ModelOutline, bare_state_of, is_model, outline_of_model
from asyncckpt.interop.mapping.made_tensors import CAST_DTYPES
from asyncckpt.interop.mapping.tensor_rules import TensorRule, checked_rules, listed_lines
from asyncckpt.interop.outline import KeyMap, Outline, pruned, renamer
from asyncckpt.interop.publish import remove
from asyncckpt.state_dict.stateful import unwrapped
from asyncckpt.storage.files import conversion_failure
from asyncckpt.storage.locate import with_storage_options
from asyncckpt.sync_checkpointer import SyncCheckpointer

TIMEOUT_S = 1800.0
"""The default of `timeout_s`. That of gloo."""

_ARRIVE_TIMEOUT_S = 60.0
"""How long ranks wait for the last one to call. The default of `plan_timeout_s`."""

_CALL = "export_hf()"


def export_hf(
    source: Any,
    dst: str | os.PathLike[str],
    *,
    config: Any = None,
    generation_config: Any = None,
    tokenizer: Any = None,
    key: str | None = None,
    key_map: KeyMap | None = None,
    rules: Iterable[TensorRule] | None = None,
    dtype: Any = None,
    max_shard_bytes: int | None = None,
    overwrite: bool = False,
    threads: int | None = None,
    read_back: bool = True,
    progress: Progress | None = None,
    storage_options: Mapping[str, str] | None = None,
    rank_info: RankInfo | None = None,
    timeout_s: float = TIMEOUT_S,
) -> ConversionReport:
    """Write a model to a directory that `from_pretrained` of Hugging Face's transformers opens.

    The directory gets the weights as safetensors files with their index, config.json, generation_config.json and the
    files of the tokenizer. It is written by the same engine as that of `convert`: in bounded memory, verified, and
    renamed to `dst` when it is complete, so readers see a complete directory or none. A checkpoint is exported while
    the training that has saved it goes on.

    Every tensor of the source is written exactly once: as it is, or as a part of the tensors that a rule makes of it.
    If `config` or `source` is a model, its names and shapes must be those of the source, else the export fails and
    names all that differ. A tensor that the model ties to another one itself is then written once, under the name that
    transformers writes; without a model, under each of its names.

    Args:
        source: A checkpoint, as a path or URL, of any kind that `load` reads; or a model. On several ranks, the export
            of a model is a collective. The model's state dict is then saved beside `dst` first, and removed after the
            export; so there must be room for both, on a file system of all ranks.
        dst: The directory to write. Its parent directory must exist.
        config: The model's config: a config object of transformers, a model (also one on the meta device), a dict, or a
            path: a directory with config.json, or that file. None takes that of the model which is exported. The dtype
            of the weights replaces that in it.
        generation_config: An object with `save_pretrained` or `to_dict`, a dict, or a path. None takes that of the
            model, or of the directory that `config` names, if there is one.
        tokenizer: A tokenizer or processor with `save_pretrained`, or a directory, whose tokenizer files are copied.
            None writes none.
        key: FQN of the model's state dict in the checkpoint, such as "model": only what is below it is exported, and
            the prefix is removed from the names. None: the checkpoint is the model's state dict.
        key_map: From the names in the checkpoint, without `key`, to those of the model: a dict (names that it lacks
            stay) or a callable.
        rules: Which tensors are stacked, split or renamed, after `key_map`. None takes `hub_rules` of the config's
            `model_type`, if there are any: the experts that transformers 5 stacks in memory are written one by one, as
            on the hub, so that older versions and inference engines open them too. `()` writes them stacked, which
            transformers 5 opens too.
        dtype: Dtype, or its name, to which tensors of float64, float32, float16 and bfloat16 are cast. None: none is.
        max_shard_bytes: Limit of the tensors in one file, in bytes; a larger tensor gets its own. None: 5 GB.
        overwrite: Replace a checkpoint at `dst`, in one step; see `convert`.
        threads: How many threads may access the disk at once. None takes 4.
        read_back: Read every byte of the target from the disk and compare it with what was written.
        progress: Called with (bytes done, bytes in total).
        storage_options: Options of the object store that a URL leads to, by obstore's names; their values are never
            shown. None: those of the environment.
        rank_info: For a model: `RankInfo(0, 1)` exports in this process alone. None: torch.distributed's rank, else
            that of torchrun's environment, else 0 of 1.
        timeout_s: For a model on several ranks: how long the others wait for rank 0 to write, in seconds. For the last
            rank to call this they wait 60 s, if that is shorter.

    Returns:
        The report of `convert`; of a model, the same on all ranks.

    Raises:
        UnmatchedTensorsError: Tensors that the model or a rule needs are not there, or the model has no place for some;
            names all of them.
        ShapeMismatchError: A tensor has another shape than the model's, or does not fit a rule.
        UnsupportedLeafError: The source holds something else than tensors; give `key`.
        ConfigError: An argument is invalid; the config, generation config or tokenizer cannot be written.
        SaveFailedError: There is not enough space, or the file system failed; or rank 0 failed, on the other ranks.
        PlanTimeoutError: Some ranks do not export, or rank 0 takes too long; then `dst` may appear nevertheless.
        UnsupportedPathError: `dst` is a URL.
        AsyncCkptError, OSError: As `convert`; for a model as `SyncCheckpointer.save`.

    Blocks: until everything is read and written.
    """
    source, config = unwrapped(source), unwrapped(config)
    is_live = not isinstance(source, (str, os.PathLike))
    if is_live and not is_model(source):
        raise ConfigError(
            f"export_hf: source is a {type(source).__name__}: expected the path of a checkpoint, or a model (a "
            "torch.nn.Module)",
            field="source",
            value=type(source).__name__,
        )
    if key is not None and (is_live or not isinstance(key, str) or not key):
        why = "source is a model: leave it out" if is_live else "expected an FQN, such as 'model'"
        raise ConfigError(f"export_hf: key={key!r}: {why}", field="key", value=repr(key))
    if config is None and is_live:
        config = source
    check_config(config)
    options: dict[str, Any] = {
        "config": config,
        "generation_config": generation_config,
        "tokenizer": tokenizer,
        "rules": rules,
        "dtype": dtype,
        "max_shard_bytes": max_shard_bytes,
        "overwrite": overwrite,
        "threads": threads,
        "read_back": read_back,
        "progress": progress,
    }
    if is_live:
        job = _Export(dst, key_map=key_map, **options)
        return _export_model(source, job, find_rank_info(rank_info), timeout_s)
    keys, rename = below(key, key_map)
    return export_checkpoint(source, dst, keys=keys, key_map=rename, storage_options=storage_options, **options)


def below(key: str | None, key_map: KeyMap | None) -> tuple[list[str] | None, KeyMap | None]:
    """Return `keys` and `key_map` of a conversion that takes what is below `key`, without that prefix; None: all."""
    if key is None:
        return None, key_map
    rename, prefix = renamer(key_map or {}), key + "."
    return [key], lambda fqn: rename(fqn.removeprefix(prefix))


def export_checkpoint(
    source: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, str] | None = None,
    **options: Any,
) -> ConversionReport:
    """Export a checkpoint; as `export_hf`, but with `keys` and `key_map` as `convert` has them, and without `key`.

    Args:
        source, dst, storage_options: As of `export_hf`.
        **options: `keys` and `key_map`, further arguments of `export_hf`, and maybe `beside`: an `ExportCompanions` in
            the place of `config`, `generation_config` and `tokenizer`.
    """
    path, job = checkpoint_path(source), _Export(dst, **options)
    with with_storage_options(storage_options):
        return job.run(path)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportCompanions:
    """What an export needs beside the checkpoint, made from objects of transformers: bytes, for another process.

    Attributes:
        files: Contents of config.json, generation_config.json and the tokenizer's files, by name.
        model: Outline of the model; None: there is no model, and names and shapes are not compared.
    """

    files: dict[str, bytes]
    model: ModelOutline | None


class _Export:
    """One export. Arguments as of `export_checkpoint`; those that are not named here are those of `Conversion`.

    Raises:
        ConfigError: An argument is invalid.
        UnsupportedPathError: `dst` is a URL.
    """

    def __init__(
        self,
        dst: str | os.PathLike[str],
        *,
        rules: Iterable[TensorRule] | None = None,
        config: Any = None,
        generation_config: Any = None,
        tokenizer: Any = None,
        beside: ExportCompanions | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        if is_url(str(dst)):
            raise UnsupportedPathError(
                "export_hf: dst is a URL, and exports write files: export to a directory, and copy that with the "
                "store's own tools",
                path=str(dst).partition("://")[0] + "://",
            )
        self.path, self.conversion = absolute_path(dst), Conversion("hf", **options)
        self._rules = None if rules is None else checked_rules(rules)
        self._config, self._generation_config, self._tokenizer = config, generation_config, tokenizer
        self._beside, self._progress = beside, progress

    def run(self, source: str, model: Any = None, outline: ModelOutline | None = None) -> ConversionReport:
        """Export the checkpoint at `source`.

        Args:
            source: Its path or URL.
            model: The model that it was saved from; None: the one that was given as config, if it is one.
            outline: Outline of that model; None: it is taken from the model.
        """
        self.conversion.check_place(self.path)  # before code of the user runs
        try:
            companions = self._companions(model, outline) if self._beside is None else self._beside
        except OSError as error:
            raise conversion_failure(error, self.path) from error
        found, rules = companions.model, self._rules
        if rules is None:
            rules = list(HUB_RULES.get(model_type_of(companions.files), ()))

        def prepare(outline: Outline) -> tuple[Outline, list[str]]:
            outline, sentences = matched(outline, found) if found is not None else (outline, [])
            made, more = reshaped(outline, rules, self.conversion.dtype, all_must_match=self._rules is not None)
            return made, sentences + more

        def beside(outline: Outline) -> Mapping[str, bytes]:
            architecture = None if found is None else found.architecture
            config = config_of(companions.files, dtype=dtype_of(outline), architecture=architecture)
            return {**companions.files, CONFIG_NAME: config}

        return self.conversion.run(source, self.path, prepare=prepare, beside=beside, progress=self._progress)

    def _companions(self, model: Any, outline: ModelOutline | None) -> ExportCompanions:
        if model is None and is_model(self._config):
            model = self._config
        if outline is None and model is not None:
            outline = outline_of_model(model)
        files = companion_files(
            config=self._config, generation_config=self._generation_config, tokenizer=self._tokenizer, model=model
        )
        return ExportCompanions(files=files, model=outline)


def matched(outline: Outline, model: ModelOutline) -> tuple[Outline, list[str]]:
    """Compare the tensors of a checkpoint with those of a model; leave out what the model ties itself.

    Returns:
        The outline without the tied tensors; and a sentence that names them.

    Raises:
        UnmatchedTensorsError: A tensor is only in one of them; names all.
        ShapeMismatchError: A tensor has another shape.
    """
    path = outline.contents.path
    there = {fqn: node[1] for fqn, node in outline.leaves() if node[0] in (TENSOR, ARRAY)}  # both are written
    wanted, tied = {name: tuple(shape) for name, shape in model.shapes.items()}, model.tied
    missing = [name for name in wanted if name not in there and name not in tied]
    unused = [fqn for fqn in there if fqn not in wanted]
    if missing or unused:
        lacks = f"\nit lacks {len(missing)} tensors of the model:\n  {listed_lines(missing)}" if missing else ""
        has = f"\nthe model has no place for {len(unused)} of its tensors:\n  {listed_lines(unused)}" if unused else ""
        raise UnmatchedTensorsError(
            f"{path} does not fit {model.architecture}:{lacks}{has}\nNothing was written. Rename tensors with "
            "key_map, select the model's state dict with key, or give the config of the model that was saved",
            path=path,
            missing=missing,
            unused=unused,
        )
    for fqn, number in there.items():
        shape = outline.tensors[number].global_shape
        if shape != wanted[fqn]:
            raise ShapeMismatchError(
                f"{path}: tensor {fqn!r} has shape {list(shape)}, and {list(wanted[fqn])} in {model.architecture}: "
                "give the config of the model that was saved",
                path=path,
                fqn=fqn,
                saved=list(shape),
                wanted=list(wanted[fqn]),
            )
    again = {name: to for name, to in tied.items() if name in there and there[name] == there.get(to)}
    if not again:
        return outline, []
    pairs = [f"{name} (= {to})" for name, to in again.items()]
    return pruned(outline, lambda fqn: fqn not in again), sentence("stored once, as the model ties them", pairs)


def dtype_of(outline: Outline) -> str | None:
    """Return the dtype that most bytes of the weights have; None: there are no weights of a dtype for that."""
    nbytes: Counter[str] = Counter()
    for number, tensor in enumerate(outline.tensors):
        if tensor.dtype in CAST_DTYPES:
            nbytes[tensor.dtype] += outline.nbytes_of(number)
    return nbytes.most_common(1)[0][0] if nbytes else None


def _export_model(model: Any, job: _Export, rank: RankInfo, timeout_s: float) -> ConversionReport:
    """Save the model's state dict beside the target, export that on rank 0, and remove it."""
    with _meeting(rank, job.path) as on_rank_0:

        def begin() -> str:
            job.conversion.check_place(job.path)  # before the state dict is saved
            return converting_name(os.path.basename(job.path), secrets.token_hex(6))

        at = os.path.join(os.path.dirname(job.path), on_rank_0(begin, min(timeout_s, _ARRIVE_TIMEOUT_S)))
        try:
            with SyncCheckpointer(rank_info=rank) as checkpointer:
                # IMPORTANT: once, on all ranks: it may be a collective, which rank 0 alone would wait for in vain.
                state = bare_state_of(model)
                checkpointer.save(state, at)
            outline = outline_of_model(model, state)
            found = on_rank_0(lambda: asdict(job.run(at, model, outline)), timeout_s)
        finally:
            if rank.rank == 0:
                remove(at)
    fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}
    return ConversionReport(**fields)


@contextlib.contextmanager
def _meeting(rank: RankInfo, path: str) -> Iterator[Callable[[Callable[[], Any], float], Any]]:
    """Let the ranks export together: rank 0 works, and the others wait for its result.

    Yields:
        A function that calls its first argument on rank 0, and returns the result on every rank, within a timeout in
        seconds. It raises, on rank 0, the error of that function; on the others SaveFailedError if it failed or the
        connection to another rank is lost, and PlanTimeoutError if a rank does not come or rank 0 takes too long.
    """
    if rank.world_size == 1:
        yield lambda work, timeout_s: work()
        return
    exchange = find_exchange(rank)
    if exchange is None:
        raise ConfigError(
            f"export_hf: this is rank {rank.rank} of {rank.world_size}, and there is no process group of these ranks; "
            "initialise it, or pass rank_info=RankInfo(0, 1) if this rank has the whole model",
            field="rank_info",
            value=repr(rank),
        )
    meeting = exchange.meet_next("export_hf", _CALL)

    def failed(other: int, error: AsyncCkptError) -> SaveFailedError:
        return SaveFailedError(
            f"export_hf to {path} failed on rank {other}: {error}; nothing was published",
            code=str(getattr(error, "code", None) or error.wire_code),
            rank=other,
            path=path,
            detail=str(error),
        )

    def on_rank_0(work: Callable[[], Any], timeout_s: float) -> Any:
        deadline, mine = time.monotonic() + timeout_s, work if rank.rank == 0 else lambda: None
        return all_or_none(lambda payload: meeting.gather(payload, deadline), mine, failed)[0]

    try:
        yield on_rank_0
    except BaseException as error:
        meeting.refuse(repr(error))
        raise
    finally:
        meeting.close()
