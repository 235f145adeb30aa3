"""Ways to checkpoint a training loop, ours and others', each used as its documentation says.

What does not fsync by itself is given one: before the call returns or, if the training goes on meanwhile, in a thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.utils._pytree import tree_flatten, tree_unflatten

import asyncckpt
from asyncckpt.dcp import StorageReader, StorageWriter
from benchmarks.workloads import Loop, nothing

STAGING: dict[str, Any] = {"use_pinned_memory": False, "use_async_staging": True, "use_non_blocking_copy": False}
"""Options of torch's stagers on a machine without a GPU."""

State = dict[str, Any]


class Saved(NamedTuple):
    """A save that has begun: `staged` is done when the state may change, `written` when its files are on the disk."""

    staged: Future[Any]
    written: Future[Any]


DONE: Future[Any] = Future()
DONE.set_result(None)
SAVED = Saved(DONE, DONE)
"""By a call that returns when everything is on the disk."""


@dataclass(frozen=True)
class Contender:
    """One way to checkpoint. Made once in a process, before the loop's first save.

    Attributes:
        save: Begins to save the loop's state, which the caller has just made, to a path that is not there.
        load: Loads from the files into the loop's model and optimizer.
        prepare: Does the work of the first save in advance, if there is such a call.
        close: Releases what it has started.
        recall: As `load`, from the memory of a worker.
    """

    save: Callable[[Path, State], Saved]
    load: Callable[[Path], None]
    prepare: Callable[[], object] = nothing
    close: Callable[[], object] = nothing
    recall: Callable[[Path], None] | None = None


def flush(path: Path) -> None:
    """Flush the files and the directory of a checkpoint to the disk."""
    for place in (path, *path.rglob("*")):
        fd = os.open(place, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def flushed(written: Future[Any], path: Path) -> Future[None]:
    """Return a future of the flush of a checkpoint once it is written."""

    def end() -> None:
        written.result()
        flush(path)

    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(end)
    finally:
        pool.shutdown(wait=False)


def ours(loop: Loop, *, prepared: bool = False, **options: Any) -> Contender:
    """`AsyncCheckpointer`, with an attached optimizer unless it copies before `save()` returns."""
    checkpointer = asyncckpt.AsyncCheckpointer(**options)
    if options.get("staging", "overlap") == "overlap":
        loop.attach(checkpointer.attach)

    def prepare() -> None:
        if prepared:
            checkpointer.prepare(loop.state())

    def save(path: Path, state: State) -> Saved:
        return Saved(DONE, checkpointer.save(state, path).written)  # its hook makes the step wait

    def load(path: Path, source: str = "disk") -> None:
        state = loop.state()
        asyncckpt.load(path, state, strict=True, source=source)
        loop.steps = int(state["step"])
        torch.set_rng_state(state["rng"])

    return Contender(save, load, prepare, checkpointer.close, partial(load, source="auto"))


def torch_save(loop: Loop) -> Contender:
    """`torch.save`."""

    def save(path: Path, state: State) -> Saved:
        path.mkdir()
        torch.save(state, path / "state.pt")
        flush(path)
        return SAVED

    return Contender(save, lambda path: loop.take(torch.load(path / "state.pt", weights_only=True)))


def safetensors(loop: Loop) -> Contender:
    """`safetensors.torch.save_file`; what is no tensor goes into a file beside it."""
    from safetensors.torch import load_file, save_file

    def save(path: Path, state: State) -> Saved:
        path.mkdir()
        leaves, _ = tree_flatten(state)
        tensors = {str(n): leaf.detach() for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        save_file(tensors, path / "state.safetensors")
        torch.save([None if str(n) in tensors else leaf for n, leaf in enumerate(leaves)], path / "rest.pt")
        flush(path)
        return SAVED

    def load(path: Path) -> None:
        tensors = load_file(path / "state.safetensors")
        rest = torch.load(path / "rest.pt", weights_only=True)
        leaves = [tensors.get(str(n), leaf) for n, leaf in enumerate(rest)]
        loop.take(tree_unflatten(leaves, tree_flatten(loop.state())[1]))

    return Contender(save, load)


def dcp(loop: Loop) -> Contender:
    """`torch.distributed.checkpoint.save`, in the process group of the training or, without one, in a new one."""
    alone = not dist.is_initialized()
    if alone:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)

    def save(path: Path, state: State) -> Saved:
        state_dict_saver.save(state, storage_writer=FileSystemWriter(path, thread_count=2))
        return SAVED

    def load(path: Path) -> None:
        state = loop.state()
        state_dict_loader.load(state, checkpoint_id=path)
        loop.take(state)

    return Contender(save, load, close=dist.destroy_process_group if alone else nothing)


def dcp_ours(loop: Loop) -> Contender:
    """`torch.distributed.checkpoint.save` and `load` with `asyncckpt.dcp`."""
    stock, writer = dcp(loop), StorageWriter("unused")  # one for all saves: its memory is used again

    def save(path: Path, state: State) -> Saved:
        state_dict_saver.save(state, checkpoint_id=str(path), storage_writer=writer)
        return SAVED

    def load(path: Path) -> None:
        state = loop.state()
        state_dict_loader.load(state, checkpoint_id=str(path), storage_reader=StorageReader(path))
        loop.take(state)

    return replace(stock, save=save, load=load)


class KeptStager(DefaultStager):
    """A stager that keeps its memory until `end`.

    torch before 2.13 empties it after each save, what says how to copy a state included, so that the next save fails.
    """

    def __init__(self, options: StagingOptions) -> None:
        super().__init__(options)
        self._empty = self._state_dict_stager.close
        self._state_dict_stager.close = lambda: None  # type: ignore[method-assign]

    def close(self) -> None:
        """Leave everything as it is: torch before 2.13 closes also a stager that it was given, after each save."""

    def end(self) -> None:
        """Give the memory and the threads back."""
        super().close()
        self._empty()  # type: ignore[no-untyped-call]


def dcp_async(loop: Loop, *, process: bool = False) -> Contender:
    """`torch.distributed.checkpoint.async_save` in a thread or a process, with a stager that keeps its memory.

    On a GPU with pinned memory, and copies in a stream of their own. It does not order these after the kernels that are
    still to run at the call, so that it may copy the state before the last step; what it saved there is not loaded.
    """
    stock = dcp(loop)
    # IMPORTANT: not the group of the training. Its thread runs collectives while the training all-reduces; if two
    # ranks begin collectives of one group in different orders, gloo mixes them up.
    group = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
    if process:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "0")
    gpu = loop.device.type == "cuda"
    pinned = {"use_pinned_memory": gpu, "use_non_blocking_copy": gpu}
    stager = KeptStager(StagingOptions(use_shared_memory=process, **STAGING | pinned))

    def save(path: Path, state: State) -> Saved:
        response = state_dict_saver.async_save(
            state,
            storage_writer=FileSystemWriter(path, thread_count=2),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD,
            async_stager=stager,
            process_group=group,
        )
        assert isinstance(response, AsyncSaveResponse)
        return Saved(response.staging_completion, response.upload_completion)

    def close() -> None:
        stager.end()
        stock.close()

    return replace(stock, save=save, close=close)


def torch_experimental(loop: Loop) -> Contender:
    """The asynchronous checkpointer of `torch.distributed.checkpoint._experimental`."""
    from torch.distributed.checkpoint import _experimental as experimental

    staging = experimental.CheckpointStagerConfig(use_shared_memory=True, **STAGING)
    checkpointer = experimental.make_async_checkpointer(experimental.CheckpointerConfig(staging_config=staging))

    def save(path: Path, state: State) -> Saved:
        saved = checkpointer.save(str(path), state)
        assert saved is not None
        return Saved(saved[0], flushed(saved[1], path))

    return Contender(save, lambda path: loop.take(checkpointer.load(str(path), loop.state())), close=checkpointer.close)


def torch_checkpointing(loop: Loop) -> Contender:
    """The package `torch_checkpointing`, as its troubleshooting page says for machines without CUDA.

    Without direct I/O, with which its version 0.1.1 fails (EINVAL: what it writes is not aligned).
    """
    from torch_checkpointing import CheckpointManager, config, staging
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    stager = staging.CheckpointStagerConfig(use_shared_memory=True, **STAGING)
    saving, storage = config.AsyncCheckpointSaverConfig(staging_config=stager), LocalFileSystemStorageConfig
    manager = CheckpointManager(CheckpointManager.Config(save=saving, storage_config=storage(use_direct_io=False)))

    def save(path: Path, state: State) -> Saved:
        written = manager.save(str(path), state)
        assert written is not None
        return Saved(manager._staging_future or DONE, flushed(written, path))

    return Contender(
        save, lambda path: loop.take(dict(manager.load(str(path), into=loop.state()))), close=manager.close
    )


CONTENDERS: dict[str, Callable[[Loop], Contender]] = {
    "asyncckpt": ours,
    "asyncckpt, prepared": partial(ours, prepared=True),
    "asyncckpt, overlap": partial(ours, staging="overlap"),
    "asyncckpt.dcp": dcp_ours,
    "torch.save": torch_save,
    "safetensors": safetensors,
    "dcp.save": dcp,
    "dcp.async_save, thread": dcp_async,
    "dcp.async_save, process": partial(dcp_async, process=True),
    "torch _experimental": torch_experimental,
    "torch_checkpointing": torch_checkpointing,
}
OURS = tuple(name for name in CONTENDERS if name.startswith("asyncckpt"))
