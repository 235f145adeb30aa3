"""Ways to checkpoint a training loop, ours and others', each used as its documentation says.

What does not fsync by itself is given one by `benchmarks.training_cost`, in a thread beside the training.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
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
from benchmarks.workloads import Loop

STAGING: dict[str, Any] = {"use_pinned_memory": False, "use_async_staging": True, "use_non_blocking_copy": False}
"""Options of torch's stagers on a machine without a GPU."""


class Saved(NamedTuple):
    """A save that has begun: `staged` is done when the state may change, `written` when its files are written."""

    staged: Future[Any]
    written: Future[Any]


def done() -> Future[Any]:
    """Return a future that is done."""
    future: Future[Any] = Future()
    future.set_result(None)
    return future


class Contender:
    """One way to checkpoint. Made once in a process, before the loop's first save.

    Attributes:
        fsyncs: Whether what it reports as written has been flushed to the disk.
    """

    fsyncs = False

    def __init__(self, loop: Loop) -> None:
        self.loop = loop

    def prepare(self) -> None:
        """Do the work of the first save in advance, if there is such a call."""

    def save(self, path: Path, state: dict[str, Any]) -> Saved:
        """Begin to save the loop's state, which the caller has just made."""
        raise NotImplementedError

    def load(self, path: Path) -> None:
        """Load from the files into the loop's model and optimizer."""
        raise NotImplementedError

    def loads(self) -> dict[str, Callable[[Path], None]]:
        """Return the ways to load what it saves, by name; "disk" reads the files, and comes first."""
        return {"disk": self.load}

    def close(self) -> None:
        """Release what it has started."""


class Ours(Contender):
    """`AsyncCheckpointer`, with an attached optimizer unless it copies before `save()` returns."""

    fsyncs = True

    def __init__(self, loop: Loop, *, prepared: bool = False, **options: Any) -> None:
        super().__init__(loop)
        self.prepared = prepared
        self.checkpointer = asyncckpt.AsyncCheckpointer(**options)
        if options.get("staging", "overlap") == "overlap":
            loop.attach(self.checkpointer.attach)

    def prepare(self) -> None:
        if self.prepared:
            self.checkpointer.prepare(self.loop.state())

    def save(self, path: Path, state: dict[str, Any]) -> Saved:
        return Saved(done(), self.checkpointer.save(state, path).written)  # its hook makes the step wait

    def load(self, path: Path, *, source: str = "disk") -> None:
        state = self.loop.state()
        asyncckpt.load(path, state, strict=True, source=source)
        self.loop.steps = int(state["step"])
        torch.set_rng_state(state["rng"])

    def loads(self) -> dict[str, Callable[[Path], None]]:
        return {"disk": self.load, "memory": partial(self.load, source="auto")}

    def close(self) -> None:
        self.checkpointer.close()


class TorchSave(Contender):
    """`torch.save`."""

    def save(self, path: Path, state: dict[str, Any]) -> Saved:
        path.mkdir()
        torch.save(state, path / "state.pt")
        return Saved(done(), done())

    def load(self, path: Path) -> None:
        self.loop.take(torch.load(path / "state.pt", weights_only=True))


class Safetensors(Contender):
    """`safetensors.torch.save_file`; what is no tensor goes into a file beside it."""

    def save(self, path: Path, state: dict[str, Any]) -> Saved:
        from safetensors.torch import save_file

        path.mkdir()
        leaves, _ = tree_flatten(state)
        tensors = {str(n): leaf.detach() for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        save_file(tensors, path / "state.safetensors")
        torch.save([None if str(n) in tensors else leaf for n, leaf in enumerate(leaves)], path / "rest.pt")
        return Saved(done(), done())

    def load(self, path: Path) -> None:
        from safetensors.torch import load_file

        tensors = load_file(path / "state.safetensors")
        rest = torch.load(path / "rest.pt", weights_only=True)
        leaves = [tensors.get(str(n), leaf) for n, leaf in enumerate(rest)]
        self.loop.take(tree_unflatten(leaves, tree_flatten(self.loop.state())[1]))


class Dcp(Contender):
    """`torch.distributed.checkpoint.save`, in the process group of the training or, without one, in a new one."""

    fsyncs = True

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop)
        self.alone = not dist.is_initialized()
        if self.alone:
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)

    def save(self, path: Path, state: dict[str, Any]) -> Saved:
        state_dict_saver.save(state, storage_writer=FileSystemWriter(path, thread_count=2))
        return Saved(done(), done())

    def load(self, path: Path) -> None:
        state = self.loop.state()
        state_dict_loader.load(state, checkpoint_id=path)
        self.loop.take(state)

    def close(self) -> None:
        if self.alone:
            dist.destroy_process_group()


class DcpOurs(Dcp):
    """`torch.distributed.checkpoint.save` and `load` with `asyncckpt.dcp`."""

    writer: StorageWriter | None = None

    def save(self, path: Path, state: dict[str, Any]) -> Saved:
        self.writer = self.writer or StorageWriter(path)  # one for all saves: its memory is used again
        state_dict_saver.save(state, checkpoint_id=str(path), storage_writer=self.writer)
        return Saved(done(), done())

    def load(self, path: Path) -> None:
        state = self.loop.state()
        state_dict_loader.load(state, checkpoint_id=str(path), storage_reader=StorageReader(path))
        self.loop.take(state)


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


class DcpAsync(Dcp):
    """`torch.distributed.checkpoint.async_save` in a thread or a process, with a stager that keeps its memory.

    On a GPU with pinned memory, and copies in a stream of their own. It does not order these after the kernels that are
    still to run at the call, so that it may copy the state before the last step; what it saved there is not loaded.
    """

    def __init__(self, loop: Loop, *, process: bool = False) -> None:
        super().__init__(loop)
        # IMPORTANT: not the group of the training. Its thread runs collectives while the training all-reduces; if two
        # ranks begin collectives of one group in different orders, gloo mixes them up.
        self.group = None if self.alone else dist.new_group(backend="gloo")
        self.kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        if process:
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
            os.environ.setdefault("MASTER_PORT", "0")
        gpu = loop.device.type == "cuda"
        pinned = {"use_pinned_memory": gpu, "use_non_blocking_copy": gpu}
        self.stager = KeptStager(StagingOptions(use_shared_memory=process, **STAGING | pinned))

    def save(self, path: Path, state: dict[str, Any]) -> Saved:
        response = state_dict_saver.async_save(
            state,
            storage_writer=FileSystemWriter(path, thread_count=2),
            async_checkpointer_type=self.kind,
            async_stager=self.stager,
            process_group=self.group,
        )
        assert isinstance(response, AsyncSaveResponse)
        return Saved(response.staging_completion, response.upload_completion)

    def close(self) -> None:
        self.stager.end()
        super().close()


class TorchExperimental(Contender):
    """The asynchronous checkpointer of `torch.distributed.checkpoint._experimental`."""

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop)
        from torch.distributed.checkpoint import _experimental as experimental

        staging = experimental.CheckpointStagerConfig(use_shared_memory=True, **STAGING)
        config = experimental.CheckpointerConfig(staging_config=staging)
        self.checkpointer = experimental.make_async_checkpointer(config)

    def save(self, path: Path, state: dict[str, Any]) -> Saved:
        saved = self.checkpointer.save(str(path), state)
        assert saved is not None
        return Saved(*saved)

    def load(self, path: Path) -> None:
        self.loop.take(self.checkpointer.load(str(path), self.loop.state()))

    def close(self) -> None:
        self.checkpointer.close()


class TorchCheckpointing(Contender):
    """The package `torch_checkpointing`, as its troubleshooting page says for machines without CUDA.

    Without direct I/O, with which its version 0.1.1 fails (EINVAL: what it writes is not aligned).
    """

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop)
        from torch_checkpointing import CheckpointManager, config, staging
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        saving = config.AsyncCheckpointSaverConfig(
            staging_config=staging.CheckpointStagerConfig(use_shared_memory=True, **STAGING)
        )
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self.manager = CheckpointManager(CheckpointManager.Config(save=saving, storage_config=storage))

    def save(self, path: Path, state: dict[str, Any]) -> Saved:
        written = self.manager.save(str(path), state)
        return Saved(self.manager._staging_future or done(), written)

    def load(self, path: Path) -> None:
        self.loop.take(self.manager.load(str(path), into=self.loop.state()))

    def close(self) -> None:
        self.manager.close()


CONTENDERS: dict[str, Callable[[Loop], Contender]] = {
    "asyncckpt": Ours,
    "asyncckpt, prepared": partial(Ours, prepared=True),
    "asyncckpt, overlap": partial(Ours, staging="overlap"),
    "asyncckpt.dcp": DcpOurs,
    "torch.save": TorchSave,
    "safetensors": Safetensors,
    "dcp.save": Dcp,
    "dcp.async_save, thread": DcpAsync,
    "dcp.async_save, process": partial(DcpAsync, process=True),
    "torch _experimental": TorchExperimental,
    "torch_checkpointing": TorchCheckpointing,
}
OURS = tuple(name for name in CONTENDERS if name.startswith("asyncckpt"))
