"""`asyncckpt.load`."""

from __future__ import annotations

import os
from collections.abc import Iterable, MutableMapping
from typing import Any

from asyncckpt.loading.key_names import KeyMap
from asyncckpt.loading.map_location import MapLocation
from asyncckpt.loading.reader import DefaultReader


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
    leaves some targets filled and others not. So may an error in loading code of a module: see below.

    Loading code of a module is a hook of `load_state_dict`, or an override of `_load_from_state_dict`, in the module
    or a submodule. It is given the saved names, values and versions, as by a stock `load_state_dict`, including names
    that the module does not have. Keys that are missing after it has run are missing keys of the load. A module whose
    loading code may make an entry that was not saved is filled first, and nothing else changes until it is known
    whether the entry is missing. Plain tensors for loading code from outside torch are read into memory of their own,
    in addition to what `low_memory` allows; sharded ones are filled in place.

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
            list or tuple was saved with another length. Or loading code of a module made it of another shape.
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
