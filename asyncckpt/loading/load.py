"""`asyncckpt.load`, and the reader that every load goes through. No worker is needed."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from asyncckpt.basics.gc_control import gc_paused
from asyncckpt.basics.paths import absolute_path
from asyncckpt.components import CheckpointReader
from asyncckpt.config import RankInfo
from asyncckpt.distributed.process_group import find_rank_info
from asyncckpt.errors import ConfigError, MissingKeysError, SharedLoadError
from asyncckpt.format.state_tree import Node, Path, fqn_of
from asyncckpt.loading.broadcast import SharedReads
from asyncckpt.loading.fetch import Filler, thread_count
from asyncckpt.loading.key_selection import KeyMap, Selection, key_list, missing_hint, selected
from asyncckpt.loading.matching import Matches, MatchReport, Replacement, match_target
from asyncckpt.loading.module_targets import ModuleTarget
from asyncckpt.loading.read_source import ReadSource, RetryState, check_source, read_from_source
from asyncckpt.loading.saved_state import (
    NewValues,
    SavedObjects,
    SavedTree,
    per_rank_unavailable,
    report_rank_differences,
)
from asyncckpt.loading.target_tensors import (
    ONE_OBJECT,
    TargetTensor,
    Tie,
    alias_mismatch,
    converted_storages,
    placement_names,
    placements_of,
    refuse_read_only,
    refuse_without_memory,
)
from asyncckpt.loading.targets import load_object_state
from asyncckpt.loading.tensor_writers import MapLocation
from asyncckpt.state_dict.flatten import mappings
from asyncckpt.state_dict.unflatten import has_lost_factory
from asyncckpt.storage.contents import SavedTensor, check_lengths
from asyncckpt.storage.files import Files
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
) -> Any:
    """Load a committed checkpoint: into `state_dict`, or into a new one.

    Everything but the data is checked before anything is changed: structure, shapes, types, that every element of
    every tensor is there exactly once, lengths of the files. An error in the data themselves, found while reading,
    leaves some targets filled and others not. So may an error in a load hook of a module: see below.

    A load hook of a module is a hook of `load_state_dict`, or an override of `_load_from_state_dict`, in the module or
    a submodule. It is given the saved names, values and versions, as by a stock `load_state_dict`, including names that
    the module does not have. Keys that are missing after it has run are missing keys of the load. A module whose load
    hooks may make an entry that was not saved is filled first, and nothing else changes until it is known whether the
    entry is missing. Plain tensors for load hooks from outside torch are read into memory of their own, in addition to
    what `low_memory` allows; sharded ones are filled in place.

    Of values that differ between the ranks that saved them, a rank gets its own number's at equal world size; else, or
    where its number has none, the lowest rank's, which is logged. `PerRank` values go to the same rank number only; a
    new dict has them bare, a `PerRank` in `state_dict` stays one.

    Args:
        path: The checkpoint's directory.
        state_dict: The target; only its own keys are read. None: a new dict, in which nesting, key types, aliases and
            objects are as they were saved, and states of modules and optimizers are dicts.
            Tensors are filled in place, on their devices and with their dtypes: plain ones, DTensor, `ShardedSlice`,
            `FlatShard`, `ShardedTensor` and registered types. Only what this process holds is read, however many ranks
            saved it, in whatever pieces. numpy arrays are filled in place if they are writable and dtype and shape are
            the saved ones, else replaced. Other objects are replaced.
            Empty places take all that was saved below their name: an empty dict or list (also `state_dict` itself) the
            members, None a new value. A list of objects that was saved with more members grows, which is logged; any
            other list or tuple must have as many members as were saved.
            Objects with a `load_state_dict()` are given the whole state that was saved under their name. The tensors of
            a module are filled in place before that, in the bare module, and what the module has and the checkpoint
            lacks is missing; so is what its own state names and it does not take. Where something was saved for a
            parameter or buffer that is None, or for a submodule without members, a warning names it. A module whose
            state holds dicts or lists is given new values only. The state that an optimizer keeps for its parameters
            has the dtypes that were saved.
            Tensors that share memory hold what was saved under each of their names, or the load fails. Two names of one
            tensor are filled from one saved tensor, or from two with equal values; a name that was not saved is filled
            by the other one. Other views that share elements are read again and compared after they were filled.
        keys: FQNs, or prefixes: "model" selects "model" and everything below it. None takes everything. Keys of which
            not one selects anything are an error, `strict` or not.
        default_map_location: Where tensors that have no target go: a device, a string, a dict or a callable, as
            `torch.load` takes them; the saved location is always "cpu". None: the CPU.
        strict: Whether keys that the target has and the checkpoint lacks are an error; False logs them, and they stay
            as they are. Either way it is an error if nothing was saved of a whole part: of a container at the top level
            or, at any level, under a string key; of an object with a `load_state_dict()`, or what the `state_dict()` of
            a module or an optimizer returned; or of the target, if several of its leaves are missing. With `keys` only
            what they select counts.
        verify: False reads only the bytes that are needed, and gaps of less than a page between them, and checks no
            checksum. What is read is at most 1.1 times what is needed, counted in whole pages of 4 KiB: of rows that
            are shorter than a page, the pages that they lie in.
        source: "auto" takes what this node's worker still holds of this very checkpoint from its memory, and the rest
            from disk; where nothing was committed yet, or could not be, the newest snapshot that all ranks have staged
            there. "memory": from memory only; the newest such snapshot, committed or not. "disk": asks no worker.
            No worker is started. Bytes from memory are verified like others, but for a snapshot that has no checksums
            yet: of that it is proven that nobody wrote to it since it was staged.
        threads: Reading threads. None takes 4, or what earlier loads of this user found to be faster on the device.
        low_memory: True takes at most 256 MB of host memory beside the targets. False reads and verifies everything
            into one piece of memory first, pinned where something goes to a GPU, and then copies: faster to a GPU,
            and an error in the data is found before any target changes.
        redundant_reads: "each": every rank reads what it wants. "broadcast": what several ranks of the default process
            group want is read by one of them and passed on, over gloo. Every rank must call it, whatever it wants; one
            that fails ends it on all.
        key_map: From the target's FQNs to the saved ones: a dict (other names stay) or a callable. Of an object that
            takes its state whole, its own FQN is looked up.
        allow_pickle: Unpickles leaves that were saved with `allow_pickle=True`. DANGER: unpickling runs whatever the
            checkpoint says; whoever could write there gets your process.

    Returns:
        `state_dict`, or the new one.

    Raises:
        CheckpointNotFoundError: Nothing is there.
        CheckpointNotCommittedError: A save was begun there and never committed.
        CorruptCheckpointError: Something differs from what was saved; file, FQN and byte range where they apply.
        UnsupportedFormatError: Written by a newer version. Or of another format, and leaves that are wanted hold
            objects of classes that are not on the list of what may be read: names all. Leave them out by `keys`.
        SnapshotUnavailableError: `source="memory"`, and no worker holds all of it.
        MissingKeysError: `strict` and keys are missing, or no key of `keys` or nothing of a whole part is there; lists
            all of them, and says which wrapper's prefix explains it, and what `key_map` to pass. Or the checkpoint was
            overwritten meanwhile, by one that lacks what had been read.
        ShapeMismatchError: A tensor was saved with another shape; of sharded ones the global shapes are compared. Or a
            list or tuple was saved with another length. Or a load hook of a module made it of another shape.
        LeafTypeMismatchError: A tensor meets an object, or a leaf a container that cannot take its place.
        PerRankUnavailableError: `PerRank` values were asked for, and their ranks are others than this one: at another
            world size, all of them. Leave them out by `keys`. At equal world size a new dict is silently without those
            of other ranks.
        AliasMismatchError: Tensors of the target share memory, or objects are one, and the values that were saved under
            their names differ.
        UnsupportedLeafError: The target holds something that no checkpoint can, or tensors without memory (meta, fake);
            or this torch lacks a dtype, or makes no real tensors here, in FakeTensorMode.
        OverlappingShardsError: The shards of a target tensor share elements.
        SharedLoadError: `redundant_reads="broadcast"`, and another rank failed.
        PlanTimeoutError: `redundant_reads="broadcast"`, and some ranks do not load.
        InsufficientMemoryError: There is no room for a tensor without a target, or for what `low_memory=False` copies.
        UnsupportedPathError: A URL, or no path at all.
        PickledLeafError: A leaf was pickled, and `allow_pickle` is False, or it does not unpickle.
        StateLoadError: An object of the target did not take its state, or a registered type its shards; everything else
            has been filled.
        ConfigError: An argument that makes no sense; a target tensor whose elements lie upon each other; a place that
            would have to be replaced in a mapping that cannot be changed; `keys` that name a part of an object that
            takes its state whole, or of a list that is empty in the target.
        OSError: The files cannot be read.

    Blocks: for the reads.
    """
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
    """The options of a load, with their defaults; `load` says what they mean. `plan_load` takes a part of them."""

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
            ConfigError: One makes no sense.
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
    """Reads checkpoints in asyncckpt's own format, and in those that `asyncckpt.interop.sources` knows.

    It has no state but `retry_state`; without that, several threads may use it.

    Args:
        files: The storage seam.
        rank_info: Which rank reads; None finds out at each read, as a checkpointer does.
        allow_pickle: The default of `read`'s argument.
        endpoint: The endpoint of the worker that may hold snapshots in memory; None: that of this user's worker of
            this job.
        retry_state: What earlier reads have left in the one target that this reader is for: each read must fill all of
            that, and adds its own. None: every read is for a target of its own.
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
        self._files, self._endpoint = files or Files(), endpoint
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
            path: Its directory.
            state_dict: The target; None: a new state dict is built.
            map_location: Where tensors without a target go.
            **options: The other options of `LoadOptions`. Arguments and errors are those of `asyncckpt.load`.

        Returns:
            The state dict that was filled, or a new one; and the missing keys, as the target names them.
        """
        reader = find_rank_info(self._rank_info)
        retry_state = self._retry_state or RetryState()
        if options.get("allow_pickle") is None:
            options["allow_pickle"] = self._allow_pickle
        # From here on the other ranks of a broadcast are told of an error.
        with _broadcast(options.get("redundant_reads", "each"), reader) as shared, gc_paused():
            unknown = options.keys() - _OPTIONS
            if unknown:
                raise ConfigError(f"load has no arguments called {sorted(unknown)}", field=min(unknown))
            wanted = LoadOptions(map_location=map_location, **options)
            if wanted.key_map is not None and state_dict is None:
                raise ConfigError("key_map renames the keys of a target: pass a state_dict too", field="key_map")
            wanted, directory = wanted.checked(), absolute_path(path)
            check_memory_is_real("load")

            def use(found: ReadSource) -> tuple[Any, list[str]]:
                retry_state.manifest = found.contents.manifest
                one = _Load(found, wanted, reader, retry_state.touched, shared)
                return one.into_new() if state_dict is None else one.into_target(state_dict)

            # In a broadcast all ranks would have to start again together, and one of them reads for all.
            return read_from_source(directory, wanted.source, self._endpoint, self._files, use, once=shared is not None)


def _flag(name: str, value: Any) -> bool:
    if type(value) is not bool:  # what lets code in is not guessed
        raise ConfigError(f"{name}={value!r}: expected True or False", field=name)
    return value


def _broadcast(redundant_reads: str, reader: RankInfo) -> contextlib.AbstractContextManager[SharedReads | None]:
    if redundant_reads == "each":
        return contextlib.nullcontext()
    if redundant_reads == "broadcast":
        return SharedReads(reader)
    wrong = ConfigError(
        f"redundant_reads={redundant_reads!r}: 'each' or 'broadcast' is wanted", field="redundant_reads"
    )
    with contextlib.suppress(ConfigError, SharedLoadError), SharedReads(reader):  # where the others may wait
        raise wrong
    raise wrong


class _Load:
    """One load of one checkpoint.

    Args:
        source: The checkpoint.
        options: What is wanted of it, checked.
        reader: The rank that reads.
        touched: FQNs of the target that hold values of another checkpoint by now; added to.
        shared: The ranks that read once what several of them want; None: each reads for itself.
    """

    def __init__(
        self,
        source: ReadSource,
        options: LoadOptions,
        reader: RankInfo,
        touched: set[str],
        shared: SharedReads | None,
    ) -> None:
        self._contents, self._files, self._options, self._reader = source.contents, source.files, options, reader
        self._path, self._touched = self._contents.path, touched
        self._saved = SavedTree(self._contents, reader)
        self._objects = SavedObjects(self._contents, self._files, allow_pickle=options.allow_pickle)
        self._saved.restore_parameter_numbers(self._object_at)
        self._filler = Filler(
            self._contents,
            self._files,
            threads=options.threads,
            verify=options.verify and source.has_checksums,
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
            state_dict, self._saved, selection, options.key_map, self._path, allow_pickle=options.allow_pickle
        )
        self._check(matches, selection)
        undecided = self._fill_undecided(matches)
        own = {new.path for module in matches.undecided for new in _below(matches.replaced, module)}
        replaced = [new for new in matches.replaced if new.path not in own]
        holders = [new for new in replaced if new.holder is not None]
        modules = [module for module in matches.targets.modules if module not in matches.undecided]
        values = self._new_values([new.node for new in [*replaced, *matches.extended_lists]], matches.reused_tensors)
        self._filler.fill(matches.tensors, values.fillings, matches.placements)
        early = [filling for module in matches.undecided for filling in module.tensors]
        converted = converted_storages([*early, *matches.tensors]) if holders else {}
        for new in replaced:
            if new.holder is None:
                matches.targets.replace_at(new.path, values.build(new.node))
        for new in matches.extended_lists:
            matches.targets.value_at(new.path).extend(values.build(new.node))
        late = self._load_modules(modules)
        self._touched |= {new.fqn for new in matches.replaced}
        for new in holders:
            load_object_state(new.holder, values.build(new.node), new.fqn, self._path, converted)
        self._report_late(late, "the rest of the target is filled")
        return state_dict, [*matches.report.missing, *undecided, *late]

    def _check(self, matches: Matches, selection: Selection) -> None:
        """Refuse what cannot be loaded, and log what a load changes in another way than one may expect."""
        report = matches.report
        self._refuse_unavailable(report.unavailable)
        refuse_without_memory(matches.without_memory, self._path)
        fillings = [*matches.tensors, *(filling for module in matches.undecided for filling in module.tensors)]
        placements = [*matches.placements, *placements_of(fillings)]
        refuse_read_only(placements, lambda: placement_names(matches.placements, fillings), self._path)
        self._refuse_unequal(matches)
        self._refuse_mix(report)
        present = [*report.filled, *(new.fqn for new in matches.replaced)]
        is_error = self._options.strict or selection.in_vain or bool(report.absent_subtrees)
        self._report_missing(report.missing, selection, present, report.absent_subtrees, is_error=is_error)
        self._report_containers(matches)
        self._report_converted(report.converted)
        self._report_differences(report.read_leaves.items())
        self._report_factories((new.path, new.node) for new in [*matches.replaced, *matches.extended_lists])
        self._filler.check_ties(matches.ties)

    def _fill_undecided(self, matches: Matches) -> list[str]:
        """Fill the modules whose load hooks decide what is missing, before anything else; return missing keys."""
        missing: list[str] = []
        for module in matches.undecided:
            replaced = _below(matches.replaced, module)
            values = self._new_values([new.node for new in replaced], matches.reused_tensors)
            self._filler.fill(module.tensors, values.fillings, alone=True)
            for new in replaced:
                matches.targets.replace_at(new.path, values.build(new.node))
            missing += self._load_modules([module])
            self._report_late(missing, "values of this module have changed, and nothing after it in the target")
        return missing

    def _load_modules(self, modules: Iterable[ModuleTarget]) -> list[str]:
        """Call `load_state_dict()` of modules, and return what they say is missing."""
        return [name for module in modules if module.was_found for name in module.load(self._path, self._object_at)]

    def _report_late(self, missing: list[str], state: str) -> None:
        if not missing:
            return
        if not self._options.strict:
            _logger.warning(
                "%s: %d keys are missing after modules have loaded what was saved: %s",
                self._path,
                len(missing),
                _shown(missing),
            )
            return
        names = "\n  ".join(missing)
        raise MissingKeysError(
            f"{self._path}: {len(missing)} keys are missing after load_state_dict() of their module, with its hooks, "
            f"has taken what was saved; {state}. Pass strict=False if they may stay as they are:\n  {names}",
            path=self._path,
            keys=list(missing),
        )

    def into_new(self) -> tuple[Any, list[str]]:
        """Rebuild the nesting as it was saved, or the selected part of it."""
        selection = Selection(self._options.keys)
        tree = selected(self._saved.tree, selection) or ("d", ())
        missing = selection.unused()
        # At equal world size, what only other ranks have is left out, unless it was asked for by name.
        wanted = Selection(missing if self._saved.reader_rank is not None else self._options.keys)
        self._refuse_unavailable([fqn for fqn in self._saved.other_ranks_only if fqn in wanted])
        is_error = self._options.strict or selection.in_vain
        self._report_missing(missing, selection, is_error=is_error)
        tree = self._saved.without_other_ranks(tree)
        values = self._new_values([tree], {})
        self._report_factories([((), tree)])
        self._report_differences((fqn, node) for fqn, node in self._saved.leaves.items() if node in values.leaves)
        self._filler.fill([], values.fillings)
        return values.build(tree), missing

    def _refuse_mix(self, report: MatchReport) -> None:
        """What was read of a checkpoint that was given up must be read again, or the target is of two saves."""
        mixed = sorted(self._touched.intersection(report.missing))
        if mixed:
            raise MissingKeysError(
                f"{self._path} has no {mixed[0]!r}, which was filled from a checkpoint that was given up (it was "
                "overwritten while it was read, or is broken): the target now holds values of both; load again, into a "
                "fresh state",
                path=self._path,
                keys=mixed,
            )
        self._touched.update(report.filled)

    def _refuse_unequal(self, matches: Matches) -> None:
        """Check that what was saved under two names of one container or object of the target is equal."""
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
        """Whether two nodes have one value, if each of `pairs`, which are added to, has one."""
        if one == other:
            return True
        if len(one) != len(other) or one[0] != other[0]:
            return False
        if one[0] in ("T", "N", "B"):
            saved, again = (self._saved.tensors[node[1]] for node in (one, other))
            pairs.append((saved, again))
            return (saved.dtype, saved.global_shape) == (again.dtype, again.global_shape)
        if one[0] == "O":
            raws = [self._objects.raw(rank)[number] for rank, number in map(self._saved.object_at, (one[1], other[1]))]
            return bool(raws[0] == raws[1])
        members = zip(one[1], other[1], strict=False)
        return len(one[1]) == len(other[1]) and all(
            self._are_equal(a, b, pairs) if type(a) is tuple and type(b) is tuple else a == b for a, b in members
        )

    def _new_values(self, nodes: list[Node], reused: Mapping[int, TargetTensor]) -> NewValues:
        return NewValues(nodes, self._saved, self._objects, self._path, self._options.map_location, reused)

    def _refuse_unavailable(self, fqns: list[str]) -> None:
        if fqns:
            raise per_rank_unavailable(self._contents, self._saved, self._reader, fqns)

    def _report_differences(self, found: Iterable[tuple[str, Node]]) -> None:
        if not self._saved.is_single_rank:
            report_rank_differences(self._contents, self._saved, self._objects, self._files, found)

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
        if is_error:
            names = "\n  ".join(missing)
            absent, advice = "", "Rename them by key_map, or pass strict=False if they may stay as they are"
            kind, members = self._saved.tree[:2]  # of a torch file all may be one leaf
            tops = _shown([str(key) for key in members[::2]] if kind in ("d", "o") else [])
            if selection.in_vain:
                advice = (
                    f"Correct keys: none of them selects anything, which is an error with strict=False too. The "
                    f"checkpoint has at its top level {tops}. It lacks"
                )
            elif absent_subtrees:
                advice = (
                    "Rename them by key_map, or leave them out of the target or by keys: a part of which nothing is "
                    "found is an error with strict=False too"
                )
                parts = _shown([fqn or "the whole target" for fqn in absent_subtrees])
                absent = f", nothing at all of {parts} (at its top level it has {tops})"
            raise MissingKeysError(
                f"{path}: {len(missing)} keys are not in the checkpoint{absent}{hint}; nothing was changed. {advice}:\n"
                f"  {names}",
                path=path,
                keys=list(missing),
            )
        _logger.warning(
            "%s: %d keys are not in the checkpoint and stay as they are: %s%s",
            path,
            len(missing),
            _shown(missing),
            hint,
        )

    def _report_containers(self, matches: Matches) -> None:
        empty, vacant = matches.report.staying_empty, matches.report.ignored_vacant
        if empty:
            _logger.warning("%s: nothing was saved for %s, which stays empty", self._path, _shown(empty))
        if vacant:
            _logger.warning(
                "%s: something was saved for %s, where the module has None or no members; it stays so",
                self._path,
                _shown(vacant),
            )
        if matches.extended_lists:
            longer = [f"{new.fqn} (by {len(new.node[1])})" for new in matches.extended_lists]
            _logger.warning(
                "%s: lists of the target were extended by members that were saved: %s", self._path, _shown(longer)
            )

    def _report_factories(self, parts: Iterable[tuple[Path, Node]]) -> None:
        """Log what is made new, by its path in `parts`, and lacks the factory of its defaultdicts."""
        found = [at for path, node in parts for at, inner in mappings(node, path) if has_lost_factory(inner)]
        if found:
            _logger.warning(
                "%s: %d defaultdicts come back with no default_factory, %r first: theirs could not be stored; fill a "
                "target that has its own",
                self._path,
                len(found),
                fqn_of(found[0]),
            )

    def _report_converted(self, names: Sequence[str]) -> None:
        if names:
            _logger.warning(
                "%s: %d tensors are converted to the dtype of their target, %s first", self._path, len(names), names[0]
            )


def _below(replaced: Iterable[Replacement], module: ModuleTarget) -> list[Replacement]:
    return [new for new in replaced if new.path[: len(module.path)] == module.path]


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
