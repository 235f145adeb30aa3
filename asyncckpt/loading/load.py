"""`asyncckpt.load`, and the reader that every load goes through. No worker is needed."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch

from asyncckpt.basics.gc_control import gc_paused
from asyncckpt.basics.paths import checkpoint_path
from asyncckpt.components import CheckpointReader
from asyncckpt.config import RankInfo
from asyncckpt.distributed.process_group import find_rank_info
from asyncckpt.errors import (
    ConfigError,
    MissingKeysError,
    ReshardError,
    SharedLoadError,
)
from asyncckpt.format.state_tree import (
    ARRAY,
    BYTES,
    COMPOSITE,
    DICT,
    MAPPINGS,
    OBJECT,
    TENSOR,
    Node,
    Path,
    fqn_of,
    mapping_nodes,
)
from asyncckpt.loading.byte_ranges import SavedBox, whole_box
from asyncckpt.loading.fetch import Filler, bump_versions, thread_count
from asyncckpt.loading.key_selection import KeyMap, Selection, key_list, missing_hint, selected
from asyncckpt.loading.matching import Matches, Replacement, ReshardedMark, match_target
from asyncckpt.loading.module_targets import ModuleTarget
from asyncckpt.loading.read_source import ReadSource, RetryState, check_source, read_from_source
from asyncckpt.loading.saved_state import (
    NewValues,
    SavedObjects,
    SavedTree,
    per_rank_unavailable,
    refuse_incompatible_shards,
    report_rank_differences,
)
from asyncckpt.loading.shared.broadcast import SharedReads
from asyncckpt.loading.target_tensors import (
    ONE_OBJECT,
    Reused,
    Tie,
    alias_mismatch,
    converted_storages,
    placement_names,
    placements_of,
    refuse_read_only,
    refuse_without_memory,
)
from asyncckpt.loading.targets import ResultParts, Targets, load_object_state
from asyncckpt.loading.tensor_writers import MapLocation
from asyncckpt.state_dict.unflatten import has_lost_factory
from asyncckpt.storage.contents import SavedTensor, check_lengths
from asyncckpt.storage.files import Files
from asyncckpt.storage.locate import files_at, with_storage_options
from asyncckpt.torch_tensors import check_memory_is_real, torch_dtype


def load(
    path: str | os.PathLike[str],
    state_dict: MutableMapping[Any, Any] | None = None,
    *,
    keys: str | Iterable[str] | None = None,
    default_map_location: MapLocation = None,
    strict: bool = True,
    verify: bool = True,
    source: str = "auto",
    threads: int | None = None,
    low_memory: bool = True,
    redundant_reads: str = "each",
    key_map: KeyMap | None = None,
    allow_pickle: bool = False,
    storage_options: Mapping[str, str] | None = None,
) -> Any:
    """Load a committed checkpoint: into `state_dict`, or into a new one.

    All checks that need no tensor data come first: structure, shapes, types, file lengths, and that every element of
    every tensor was saved exactly once. If one of them fails, nothing has been changed. An error in the tensor data,
    found while reading, leaves some targets filled and others not. So may an error in a load hook of a module.

    A load hook of a module is a hook of `load_state_dict`, or an override of `_load_from_state_dict`, in the module or
    a submodule. As in a stock `load_state_dict`, it is given the saved names, values and versions, including names that
    the module does not have. Keys that are missing after it has run are missing keys of the load. If a load hook of a
    module may create an entry that was not saved, the module is filled first, and nothing else changes until it is
    known whether the entry is missing. Plain tensors for load hooks from outside torch are read into new memory, in
    addition to the limit of `low_memory`; sharded tensors are filled in place.

    Where the saving ranks had different values, a rank loads the values of its own rank number if the world size is the
    same. At another world size, or if that rank had none, it loads those of the lowest rank; this is logged. `PerRank`
    values are loaded by the same rank number only: a new dict holds the plain value, a `PerRank` in `state_dict` gets a
    new value. At another world size, a `PerRank` in `state_dict` that has a `reshard` gets the value that this makes of
    the values of all ranks; for it, and only for it, this rank reads the `PerRank` values of other ranks.

    Args:
        path: The checkpoint: a directory, or its URL in an object store. Or a file or directory of another format.
        state_dict: The target; only its own keys are read. None: a new dict, in which nesting, key types, aliases and
            objects are as they were saved, and states of modules and optimizers are dicts.
            Tensors are filled in place, on their devices and with their dtypes: plain tensors, DTensor, `ShardedSlice`,
            `FlatShard`, `ShardedTensor` and registered types; subclasses with `__tensor_flatten__` of the saved class
            and context; sparse and quantized tensors, as far as torch can. Only the parts that this process holds are
            read, however many ranks saved the tensor and however it was cut. A numpy array is filled in place if it is
            writable and has the saved dtype and shape, else replaced. Other objects are replaced.
            An empty dict or list (also `state_dict` itself) takes all members that were saved below its name, and None
            is replaced by the saved value. A list of objects that was saved with more members grows, which is logged;
            any other list or tuple must have the saved number of members.
            An object with a `load_state_dict()` is given the whole state that was saved under its name. The tensors of
            a module are filled in place before that, in the bare module. Entries that the module has and the checkpoint
            lacks are missing keys; so are entries of its own state that its `load_state_dict()` does not take. If
            something was saved for a parameter or buffer that is None, or for a submodule without members, a warning
            names it. A module whose state holds dicts or lists is given new values only. The state that an optimizer
            keeps for its parameters has the saved dtypes.
            Tensors that share memory hold the saved value of each of their names, or the load fails. Two names of one
            tensor are filled from one saved tensor, or from two with equal values; a name that was not saved is filled
            through the other one. Other views that share elements are read again and compared after they are filled.
            A `PerRank` with a `reshard` is loaded as a whole: `key_map` maps its FQN.
        keys: FQNs or prefixes: "model" selects "model" and everything below it. None selects everything. It is an error
            if none of the keys selects anything, also with `strict=False`.
        default_map_location: Device of tensors that have no target: a device, a string, a dict or a callable, as for
            `torch.load`; the saved location is always "cpu". None: the CPU.
        strict: Whether keys that the target has and the checkpoint lacks are an error. False logs them, and they keep
            their values. It is always an error if nothing was saved of a whole subtree: a container at the top level
            or, at any level, under a string key; an object with a `load_state_dict()`; a state that the `state_dict()`
            of a module or an optimizer returned; or the whole target, if several of its leaves are missing. With `keys`
            only selected leaves count.
        verify: Whether checksums are compared. False reads only the needed bytes, and gaps of less than a page between
            them: at most 1.1 times the needed bytes, counted in whole pages of 4 KiB. Of rows that are shorter than a
            page, the pages that hold them are read.
        source: "auto" reads from the memory of this node's worker what it still holds of this checkpoint, and the rest
            from disk; if no checkpoint is committed at `path`, it reads the newest snapshot that all ranks have staged
            for `path`. "memory" reads the newest such snapshot, committed or not, from memory only. "disk" asks no
            worker. No worker is started. Bytes from memory are verified like others. A snapshot that has no checksums
            yet cannot be verified; instead it is checked that nobody has written to it since it was staged.
        threads: Reading threads; None takes 4.
        low_memory: True needs at most 256 MB of host memory in addition to the targets, and to the values that a
            `reshard` gets. False first reads and verifies everything into one copy, which is pinned if a target is on a
            GPU. It is faster for targets on a GPU, and an error in the data is found before any target changes.
        redundant_reads: "each": every rank reads all that it needs. "broadcast": what several ranks of the default
            process group need is read by one of them and sent to the others, over gloo. Every rank must call it,
            whatever it needs. If one rank fails, all fail.
        key_map: Maps the target's FQNs to the saved ones: a dict (other names stay) or a callable. For an object that
            takes its state as a whole, the object's FQN is mapped.
        allow_pickle: Whether leaves that were saved with `allow_pickle=True` are unpickled, and classes of tensors are
            imported. DANGER: unpickling runs code from the checkpoint. Whoever can write to it can run code in this
            process.
        storage_options: Options of the object store that a URL leads to, by obstore's names; their values are never
            shown. None: those of the environment.

    Returns:
        `state_dict`, or the new one.

    Raises:
        CheckpointNotFoundError: There is nothing at `path`.
        CheckpointNotCommittedError: A save to `path` began and was never committed.
        CorruptCheckpointError: A file differs from what was saved; has file, FQN and byte range if they apply.
        UnsupportedFormatError: Written by a newer version. Or it is of another format, and requested leaves hold
            objects of classes that are not on the list of readable ones; names all of them. Leave them out by `keys`.
        SnapshotUnavailableError: `source="memory"`, and no worker holds the whole snapshot.
        MissingKeysError: `strict` and keys are missing; or none of `keys` selects anything; or a whole subtree is
            missing. Lists all of them. Names the wrapper's prefix if that explains it, and the `key_map` to pass. Or
            the checkpoint was overwritten during the load, by one that lacks what had been read.
        ShapeMismatchError: A tensor was saved with another shape; of sharded tensors the global shapes are compared. Or
            a list or tuple was saved with another length. Or a load hook of a module changed the shape of an entry.
        LeafTypeMismatchError: The saved leaf is an object and the target's a tensor, or the reverse; or one is a leaf
            and the other a container that cannot replace it.
        PerRankUnavailableError: Requested `PerRank` values belong to other ranks; at another world size, all of them
            do. Leave them out by `keys`, or give the `PerRank` in `state_dict` a `reshard`, for which every rank must
            have saved a value. At the same world size, a new dict silently lacks those of other ranks. Or this rank
            would join shards of a tensor subclass that the ranks have saved with different classes, contexts or
            components that are not sharded. Load these with as many ranks as saved them, into tensors that are sharded
            as they were, or leave them out by `keys`.
        ReshardError: The `reshard` of a `PerRank` raised, or its result lacks a part of the target.
        AliasMismatchError: Tensors of the target share memory, or two names are one object, and the values saved under
            their names differ.
        UnsupportedLeafError: The target holds a leaf that no checkpoint can hold, or tensors without memory (meta,
            fake). Or a new tensor is of a class that is not registered (`register_subclass`). Or the installed torch
            lacks a dtype, or FakeTensorMode is active.
        OverlappingShardsError: The shards of a target tensor share elements.
        SharedLoadError: `redundant_reads="broadcast"`, and another rank failed.
        PlanTimeoutError: `redundant_reads="broadcast"`, and some ranks have not called `load`.
        InsufficientMemoryError: There is no room for a tensor without a target, or for the copy of `low_memory=False`.
        UnsupportedPathError: `path` is not a path, or a URL whose store cannot be used.
        PickledLeafError: A leaf was pickled and `allow_pickle` is False, or it does not unpickle.
        StateLoadError: `load_state_dict()` of an object, `from_shards` of a registered type, or `__tensor_unflatten__`
            of a subclass raised; everything else has been filled.
        ConfigError: An argument is invalid; or elements of a target tensor share memory; or a value would have to be
            replaced in a container that cannot be changed; or `keys` selects a part of an object that takes its state
            as a whole, of a `PerRank` that is resharded, or of a list that is empty in the target.
        OSError: The files cannot be read.

    Blocks: for the reads.
    """
    with with_storage_options(storage_options):
        loaded, _ = DefaultReader().read(
            path,
            state_dict,
            map_location=default_map_location,
            keys=keys,
            strict=strict,
            verify=verify,
            source=source,
            threads=threads,
            low_memory=low_memory,
            redundant_reads=redundant_reads,
            key_map=key_map,
            allow_pickle=allow_pickle,
        )
    return loaded


_logger = logging.getLogger("asyncckpt.loading")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """The options of a load, with their defaults; `load` documents them. `plan_load` takes some of them."""

    map_location: MapLocation = None
    keys: str | Iterable[str] | None = None
    strict: bool = True
    verify: bool = True
    source: str = "auto"
    threads: int | None = None
    low_memory: bool = True
    redundant_reads: str = "each"
    key_map: KeyMap | None = None
    allow_pickle: bool = False

    def checked(self) -> LoadOptions:
        """Return the same options, with `keys` as a list.

        Raises:
            ConfigError: An option is invalid.
        """
        return replace(
            self,
            keys=key_list(self.keys),
            source=check_source(self.source),
            threads=None if self.threads is None else thread_count(self.threads),
            low_memory=_flag("low_memory", self.low_memory),
            allow_pickle=_flag("allow_pickle", self.allow_pickle),
        )


_OPTIONS = frozenset(one.name for one in fields(LoadOptions))


class DefaultReader(CheckpointReader):
    """Reads checkpoints in asyncckpt's own format, and in the formats that `asyncckpt.interop.sources` reads.

    Its only state is `retry_state`; without one, several threads may use it.

    Args:
        files: The storage seam.
        rank_info: The rank that reads; None: determined at each read, as a checkpointer does.
        allow_pickle: The default of `read`'s argument.
        endpoint: Endpoint of the worker that may hold snapshots in memory; None: of this user's worker of this job.
        retry_state: State that is kept between reads into one target, so that the target never holds values of two
            checkpoints: each read must fill everything that earlier ones have filled. None: each read has a target of
            its own.
    """

    def __init__(
        self,
        files: Files | None = None,
        rank_info: RankInfo | None = None,
        *,
        allow_pickle: bool = False,
        endpoint: str | None = None,
        retry_state: RetryState | None = None,
    ) -> None:
        self._files, self._endpoint = files, endpoint
        self._rank_info, self._allow_pickle, self._retry_state = rank_info, allow_pickle, retry_state

    def read(
        self,
        path: str | os.PathLike[str],
        state_dict: MutableMapping[Any, Any] | None = None,
        *,
        map_location: MapLocation = None,
        **options: Any,
    ) -> tuple[Any, list[str]]:
        """Read the checkpoint at `path`.

        Args:
            path: The checkpoint's directory.
            state_dict: The target; None: a new state dict is built.
            map_location: Device of tensors without a target.
            **options: The other options of `LoadOptions`. Arguments and errors are those of `asyncckpt.load`.

        Returns:
            The filled or new state dict; and the missing keys, by their FQNs in the target.
        """
        reader = find_rank_info(self._rank_info)
        retry_state = self._retry_state or RetryState()
        if options.get("allow_pickle") is None:
            options["allow_pickle"] = self._allow_pickle
        # From here on, an error is sent to the other ranks of a broadcast.
        with _broadcast(options.get("redundant_reads", "each"), reader) as shared, gc_paused():
            unknown = options.keys() - _OPTIONS
            if unknown:
                raise ConfigError(f"load has no arguments called {sorted(unknown)}", field=min(unknown))
            wanted = LoadOptions(map_location=map_location, **options)
            if wanted.key_map is not None and state_dict is None:
                raise ConfigError("key_map renames the keys of a target: pass a state_dict too", field="key_map")
            wanted, directory = wanted.checked(), checkpoint_path(path)
            check_memory_is_real("load")

            def use(found: ReadSource) -> tuple[Any, list[str]]:
                retry_state.manifest = found.contents.manifest
                retry_state.shrink_containers()
                one = _Load(found, wanted, reader, retry_state, shared)
                return one.into_new() if state_dict is None else one.into_target(state_dict)

            # IMPORTANT: no retry in a broadcast. One rank reads for others, so all would have to start again together.
            files = files_at(directory, files=self._files)
            return read_from_source(directory, wanted.source, self._endpoint, files, use, once=shared is not None)


def _flag(name: str, value: Any) -> bool:
    # `allow_pickle` allows code to run, so a value of another type must not count as true.
    if type(value) is not bool:
        raise ConfigError(f"{name}={value!r}: expected True or False", field=name)
    return value


def _broadcast(redundant_reads: str, reader: RankInfo) -> contextlib.AbstractContextManager[SharedReads | None]:
    if redundant_reads == "each":
        return contextlib.nullcontext()
    if redundant_reads == "broadcast":
        return SharedReads(reader)
    wrong = ConfigError(f"redundant_reads={redundant_reads!r}: expected 'each' or 'broadcast'", field="redundant_reads")
    with contextlib.suppress(ConfigError, SharedLoadError), SharedReads(reader):  # tells ranks that already wait
        raise wrong
    raise wrong


class _Load:
    """One load of one checkpoint.

    Args:
        source: The checkpoint.
        options: The options of the load, checked.
        reader: The rank that reads.
        retry_state: What earlier reads into the target have changed; this load adds its own changes.
        shared: The load that ranks share, so that each tensor is read once; None: each rank reads for itself.
    """

    def __init__(
        self,
        source: ReadSource,
        options: LoadOptions,
        reader: RankInfo,
        retry_state: RetryState,
        shared: SharedReads | None,
    ) -> None:
        self._contents, self._files, self._options, self._reader = source.contents, source.files, options, reader
        self._path, self._retry_state, self._touched = self._contents.path, retry_state, retry_state.touched
        self._touched_before = frozenset(retry_state.touched)
        self._saved = SavedTree(self._contents, reader)
        self._objects = SavedObjects(self._contents, self._files, allow_pickle=options.allow_pickle)
        self._saved.restore_parameter_numbers(self._object_at)
        self._verify = options.verify and source.has_checksums
        self._filler = Filler(
            self._contents,
            self._files,
            threads=options.threads,
            verify=self._verify,
            low_memory=options.low_memory,
            shared=shared,
        )
        check_lengths(self._contents, self._files)

    def _object_at(self, number: int) -> Any:
        return self._objects.value(*self._saved.object_at(number))

    def into_target(self, state_dict: MutableMapping[Any, Any]) -> tuple[Any, list[str]]:
        """Fill `state_dict`. Everything is checked before a tensor changes; objects are replaced last."""
        options = self._options
        selection = Selection(options.keys)
        matches = match_target(
            state_dict,
            self._saved,
            self._objects,
            selection,
            options.key_map,
            self._path,
            allow_pickle=options.allow_pickle,
        )
        self._check(matches, selection)
        results = [(one, self._resharded(one)) for one in matches.resharded]
        undecided = self._fill_undecided(matches)
        own = {new.path for module in matches.undecided for new in _below(matches.replaced, module)}
        replaced = [new for new in matches.replaced if new.path not in own]
        holders = [new for new in replaced if new.holder is not None]
        modules = [module for module in matches.targets.modules if module not in matches.undecided]
        values = self._new_values([new.node for new in [*replaced, *matches.extended_lists]], matches.reused)
        self._filler.fill(matches.tensors, values.fillings, matches.placements)
        early = [filling for module in matches.undecided for filling in module.tensors]
        converted = converted_storages([*early, *matches.tensors]) if holders else {}
        empty = self._record_growth(matches, [parts for _, parts in results])
        for new in replaced:
            if new.holder is None:
                matches.targets.replace_at(new.path, values.build(new.node))
        for new in matches.extended_lists:
            matches.targets.value_at(new.path).extend(values.build(new.node))
        for mark, parts in results:
            self._touched.update(mark.names)
            _fill_by_result(matches.targets, parts)
        late = self._load_modules(modules)
        self._touched |= {new.fqn for new in matches.replaced if new.path not in empty}
        for new in holders:
            load_object_state(new.holder, values.build(new.node), new.fqn, self._path, converted)
        for fqn, holder, state in (one for _, parts in results for one in parts.holders):
            load_object_state(holder, state, fqn, self._path)
        self._report_late(late, "the rest of the target has been filled")
        return state_dict, [*matches.report.missing, *undecided, *late]

    def _record_growth(self, matches: Matches, results: Iterable[ResultParts]) -> set[Path]:
        """Record how to take back what containers of the target get; return the paths of parts that are empty now."""
        targets, undo = matches.targets, self._retry_state.undo_growth
        for new in matches.extended_lists:
            members = targets.value_at(new.path)
            undo.append(partial(_cut, members, len(members)))
        replaced = [new.path for new in matches.replaced if new.holder is None]
        emptiers = {
            path: targets.emptier_of(path)
            for path in [*replaced, *(path for one in results for path, _ in one.replaced)]
        }
        undo += filter(None, emptiers.values())
        return {path for path, emptier in emptiers.items() if emptier is not None}

    def _check(self, matches: Matches, selection: Selection) -> None:
        """Raise if the load must fail, and log what it does that a user may not expect, such as conversions."""
        report = matches.report
        self._refuse_unavailable(report.unavailable)
        refuse_without_memory(matches.without_memory, self._path)
        fillings = [*matches.tensors, *(filling for module in matches.undecided for filling in module.tensors)]
        placements = [*matches.placements, *placements_of(fillings)]
        refuse_read_only(placements, lambda: placement_names(matches.placements, fillings), self._path)
        self._refuse_unequal(matches)
        self._refuse_mix(report.missing)
        self._touched.update(report.filled)
        present = [*report.filled, *(new.fqn for new in matches.replaced)]
        is_error = self._options.strict or selection.is_without_match or bool(report.absent_subtrees)
        self._report_missing(report.missing, selection, present, report.absent_subtrees, is_error=is_error)
        self._report_containers(matches)
        self._report_converted(report.converted)
        self._refuse_incompatible_shards(lambda: matches.boxes(self._saved))
        self._report_differences(report.read_leaves.items())
        self._report_factories((new.path, new.node) for new in [*matches.replaced, *matches.extended_lists])
        self._filler.check_ties(matches.ties)

    def _resharded(self, one: ReshardedMark) -> ResultParts:
        """Read the values of all ranks, call `reshard`, and return what its result does to the target.

        Raises:
            ReshardError: `reshard` raised, or its result lacks a part of the target.
        """
        rank, world_size, saved = self._reader.rank, self._reader.world_size, len(one.nodes)
        read = NewValues(one.nodes, self._saved, self._objects, self._path, "cpu", Reused({}, {}))
        self._filler.fill([], read.fillings, alone=True)
        values = [read.build(node) for node in one.nodes]
        where = f"{self._path}: reshard of the PerRank {one.fqn!r}, for rank {rank} of {world_size}"
        facts = {"path": self._path, "fqn": one.fqn, "saved": saved, "wanted": world_size}
        assert one.mark.reshard is not None
        try:
            result = one.mark.reshard(values, rank, world_size)
        except Exception as error:
            detail = error.message if isinstance(error, ReshardError) else f"{type(error).__name__}: {error}"
            text = f"{where}, raised on the values of {saved} ranks; nothing was changed: {detail}"
            raise ReshardError(text, **facts, detail=detail) from error
        parts = ResultParts()
        parts.add(one.path, one.mark.value, result)
        if parts.missing:
            detail = f"the result lacks {_shown(parts.missing)}"
            text = (
                f"{where}, returned a {type(result).__name__} that lacks {_shown(parts.missing)}, which the target has"
            )
            raise ReshardError(f"{text}; nothing was changed", **facts, detail=detail)
        return parts

    def _fill_undecided(self, matches: Matches) -> list[str]:
        """Fill the modules whose load hooks decide which keys are missing, before all others; return missing keys."""
        missing: list[str] = []
        for module in matches.undecided:
            replaced = _below(matches.replaced, module)
            values = self._new_values([new.node for new in replaced], matches.reused)
            self._filler.fill(module.tensors, values.fillings, alone=True)
            for new in replaced:
                matches.targets.replace_at(new.path, values.build(new.node))
            missing += self._load_modules([module])
            made = {f"{module.fqn}.{name}" for name in module.undecided}.difference(missing)
            self._touched |= made.union(new.fqn for new in replaced)
            self._report_late(missing, "values of this module have changed, those of nothing behind it in the target")
        return missing

    def _load_modules(self, modules: Iterable[ModuleTarget]) -> list[str]:
        """Call `load_state_dict()` of modules, and return the keys that they report as missing."""
        return [name for module in modules if module.was_found for name in module.load(self._path, self._object_at)]

    def _report_late(self, missing: list[str], state: str) -> None:
        if not missing:
            return
        self._refuse_mix(missing)
        if not self._options.strict:
            _logger.warning(
                "%s: %d keys are missing after load_state_dict() of their modules, and keep their values: %s",
                self._path,
                len(missing),
                _shown(missing),
            )
            return
        names = "\n  ".join(missing)
        raise MissingKeysError(
            f"{self._path}: {len(missing)} keys are missing after load_state_dict() of their module and its hooks have "
            f"run; {state}. Pass strict=False if they may keep their values:\n  {names}",
            path=self._path,
            keys=list(missing),
        )

    def into_new(self) -> tuple[Any, list[str]]:
        """Rebuild the nesting as it was saved, or the selected part of it."""
        selection = Selection(self._options.keys)
        tree = selected(self._saved.tree, selection) or (DICT, ())
        missing = selection.unused(lambda key: self._saved.node_at(key) is not None)
        # At the same world size, leaves that only other ranks have are left out, unless `keys` names them.
        wanted = Selection(missing if self._saved.reader_rank is not None else self._options.keys)
        self._refuse_unavailable([fqn for fqn in self._saved.other_ranks_only if fqn in wanted])
        is_error = self._options.strict or selection.is_without_match
        self._report_missing(missing, selection, is_error=is_error)
        tree = self._saved.without_other_ranks(tree)
        values = self._new_values([tree], Reused({}, {}))
        self._report_factories([((), tree)])
        found = [(fqn, node) for fqn, node in self._saved.leaves.items() if node in values.leaves]
        numbers = [node[1] for _, node in found if node[0] != OBJECT]
        self._refuse_incompatible_shards(lambda: [whole_box(self._saved.tensors[n]) for n in numbers])
        self._report_differences(found)
        self._filler.fill([], values.fillings)
        return values.build(tree), missing

    def _refuse_mix(self, missing: Iterable[str]) -> None:
        """Raise unless this load refills all that an abandoned read has filled. Else the target would mix two saves."""
        mixed = sorted(self._touched_before.intersection(missing))
        if mixed:
            raise MissingKeysError(
                f"{self._path} has no {mixed[0]!r}, which has been filled from another checkpoint (overwritten while "
                "it was read, or damaged): the target now holds values of both; load again, into a new state",
                path=self._path,
                keys=mixed,
            )

    def _refuse_unequal(self, matches: Matches) -> None:
        """Check that the values saved under two names of one container or object of the target are equal."""
        ties: list[Tie] = []
        for first, one, fqn, other in matches.same_object:
            pairs: list[tuple[SavedTensor, SavedTensor]] = []
            if not self._are_equal(one, other, pairs):
                raise alias_mismatch(first, fqn, self._path, ONE_OBJECT, "nothing was changed")
            for saved, again in pairs:
                shape = saved.global_shape
                like = torch.empty(shape, dtype=torch_dtype(saved.dtype), device="meta")
                ties.append(Tie(first, fqn, saved, again, [(like, (0,) * len(shape))]))
        self._filler.check_ties(ties, ONE_OBJECT)

    def _are_equal(self, one: Node, other: Node, pairs: list[tuple[SavedTensor, SavedTensor]]) -> bool:
        """Whether two nodes are equal, provided that the tensors of each pair in `pairs` are. Adds to `pairs`."""
        if one == other:
            return True
        if len(one) != len(other) or one[0] != other[0]:
            return False
        if one[0] in (TENSOR, ARRAY, BYTES):
            saved, again = (self._saved.tensors[node[1]] for node in (one, other))
            pairs.append((saved, again))
            return (saved.dtype, saved.global_shape) == (again.dtype, again.global_shape)
        if one[0] == OBJECT:
            return self._are_same_objects(one[1], other[1])
        if one[0] == COMPOSITE and (one[3] != other[3] or not self._are_same_objects(one[2], other[2])):
            return False
        members = zip(one[1], other[1], strict=False)
        return len(one[1]) == len(other[1]) and all(
            self._are_equal(a, b, pairs) if type(a) is tuple and type(b) is tuple else a == b for a, b in members
        )

    def _are_same_objects(self, one: int, other: int) -> bool:
        raws = [self._objects.raw(rank)[number] for rank, number in map(self._saved.object_at, (one, other))]
        return bool(raws[0] == raws[1])

    def _new_values(self, nodes: list[Node], reused: Reused) -> NewValues:
        return NewValues(nodes, self._saved, self._objects, self._path, self._options.map_location, reused)

    def _refuse_unavailable(self, fqns: list[str]) -> None:
        if fqns:
            raise per_rank_unavailable(self._contents, self._saved, self._reader, fqns)

    def _report_differences(self, found: Iterable[tuple[str, Node]]) -> None:
        if not self._saved.is_single_rank:
            report_rank_differences(self._contents, self._saved, self._objects, self._files, found)

    def _refuse_incompatible_shards(self, boxes: Callable[[], Iterable[SavedBox]]) -> None:
        doubtful = self._saved.doubtful_components
        if doubtful:
            refuse_incompatible_shards(doubtful, boxes(), self._reader, self._objects, verify=self._verify)

    def _report_missing(
        self,
        missing: Sequence[str],
        selection: Selection,
        present: Sequence[str] = (),
        absent_subtrees: Sequence[str] = (),
        *,
        is_error: bool,
    ) -> None:
        path = self._path
        if not missing:
            return
        hint = missing_hint(missing, self._saved.leaves, self._options.key_map, present)
        where = self._lacking(selection, missing)
        if is_error:
            names = "\n  ".join(missing)
            absent, advice = "", "Rename them by key_map, or pass strict=False if they may keep their values"
            kind, members = self._saved.tree[:2]  # a torch file may be a single leaf
            tops = _shown([str(key) for key in members[::2]] if kind in MAPPINGS else [])
            if selection.is_without_match:
                who = "It" if where == "the checkpoint" else "The target"
                advice = (
                    f"Correct keys: none of them selects anything, which is an error also with strict=False. The "
                    f"checkpoint has at its top level {tops}. {who} lacks"
                )
            elif absent_subtrees:
                advice = (
                    "Rename them by key_map, or leave them out of the target or by keys: a subtree of which nothing "
                    "was saved is an error also with strict=False"
                )
                parts = _shown([fqn or "the whole target" for fqn in absent_subtrees])
                absent = f", and nothing was saved of {parts} (its top level has {tops})"
            raise MissingKeysError(
                f"{path}: {len(missing)} keys are not in {where}{absent}{hint}; nothing was changed. {advice}:\n"
                f"  {names}",
                path=path,
                keys=list(missing),
            )
        _logger.warning(
            "%s: %d keys are not in %s and keep their values: %s%s",
            path,
            len(missing),
            where,
            _shown(missing),
            hint,
        )

    def _lacking(self, selection: Selection, missing: Sequence[str]) -> str:
        """Return where the missing keys are not: a key that is in the checkpoint may have no name in the target."""
        unused = set(selection.unused()).intersection(missing)
        n_saved = sum(self._saved.node_at(key) is not None for key in unused)
        if n_saved == len(missing):
            return "the target"
        return "the checkpoint or the target" if n_saved else "the checkpoint"

    def _report_containers(self, matches: Matches) -> None:
        empty, vacant = matches.report.staying_empty, matches.report.ignored_vacant
        if empty:
            _logger.warning("%s: nothing was saved for %s, which stays empty", self._path, _shown(empty))
        if vacant:
            _logger.warning(
                "%s: what was saved for %s is not loaded: the module has None or no members there",
                self._path,
                _shown(vacant),
            )
        if matches.extended_lists:
            longer = [f"{new.fqn} (by {len(new.node[1])})" for new in matches.extended_lists]
            _logger.warning("%s: lists of the target were extended by saved members: %s", self._path, _shown(longer))

    def _report_factories(self, parts: Iterable[tuple[Path, Node]]) -> None:
        """Log the defaultdicts among new values, given as (path, node), whose factory could not be stored."""
        found = [at for path, node in parts for at, inner in mapping_nodes(node, path) if has_lost_factory(inner)]
        if found:
            _logger.warning(
                "%s: %d defaultdicts, first %r, are loaded without default_factory, which could not be stored; load "
                "into a target whose defaultdicts have one",
                self._path,
                len(found),
                fqn_of(found[0]),
            )

    def _report_converted(self, names: Sequence[str]) -> None:
        if names:
            _logger.warning(
                "%s: %d tensors are converted to the dtype of their target, first %s", self._path, len(names), names[0]
            )


def _fill_by_result(targets: Targets, parts: ResultParts) -> None:
    bump_versions([old for old, _ in parts.tensors])
    with torch.no_grad():
        for old, new in parts.tensors:
            old.copy_(new)
    for path, value in parts.replaced:
        targets.replace_at(path, value)


def _cut(members: Any, length: int) -> None:
    while len(members) > length:
        members.pop()


def _below(replaced: Iterable[Replacement], module: ModuleTarget) -> list[Replacement]:
    return [new for new in replaced if new.path[: len(module.path)] == module.path]


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
