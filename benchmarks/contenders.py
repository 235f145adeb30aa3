"""Ways to checkpoint a training loop, ours and others', each as its documentation says it is used.

What does not fsync by itself is given one by `benchmarks.contest`, in a thread beside the training.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.contender import Contender, Saved, done
from benchmarks.ours import Ours, OursOverlap, OursPrepared
from benchmarks.training import Loop


class TorchSave(Contender):
    """`torch.save`; loaded as it is, and with `mmap=True`."""

    def save(self, path: Path, state: dict[str, Any]) -> Saved:
        path.mkdir()
        torch.save(state, path / "state.pt")
        return Saved(done(), done())

    def load(self, path: Path, *, mmap: bool = False) -> None:
        self.loop.take(torch.load(path / "state.pt", weights_only=True, mmap=mmap))

    def loads(self) -> dict[str, Callable[[Path], None]]:
        return {"": self.load, "mmap": partial(self.load, mmap=True)}


class Safetensors(Contender):
    """`safetensors.torch.save_file`; what is no tensor goes into a file beside it."""

    def save(self, path: Path, state: dict[str, Any]) -> Saved:
        from safetensors.torch import save_file

        path.mkdir()
        tensors: dict[str, torch.Tensor] = {}
        rest = _flatten(state, "", tensors)
        save_file(tensors, path / "state.safetensors")
        torch.save(rest, path / "rest.pt")
        return Saved(done(), done())

    def load(self, path: Path) -> None:
        from safetensors.torch import load_file

        tensors = load_file(path / "state.safetensors")
        self.loop.take(_nested(torch.load(path / "rest.pt", weights_only=True), "", tensors))


class Dcp(Contender):
    """`torch.distributed.checkpoint.save`, in the process group that is there, or else in one of its own."""

    fsyncs = True

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop)
        import torch.distributed as dist
        from torch._C._distributed_c10d import HashStore

        self.alone = not dist.is_initialized()
        if self.alone:
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)

    def save(self, path: Path, state: dict[str, Any]) -> Saved:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        save(state, storage_writer=FileSystemWriter(path, thread_count=2))
        return Saved(done(), done())

    def load(self, path: Path) -> None:
        from torch.distributed.checkpoint.state_dict_loader import load

        state = self.loop.state()
        load(state, checkpoint_id=path)
        self.loop.take(state)

    def close(self) -> None:
        import torch.distributed as dist

        if self.alone:
            dist.destroy_process_group()


class DcpAsync(Dcp):
    """`torch.distributed.checkpoint.async_save` with a thread, a stager that keeps its memory, and its own thread."""

    process = False

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop)
        import torch.distributed as dist
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        # IMPORTANT: not the group of the training: its thread meets the other ranks' while all-reduces go on there, and
        # collectives of one group that two ranks begin in another order are taken for one another.
        self.group = None if self.alone else dist.new_group(backend="gloo")
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=self.process,
                use_async_staging=True,
                use_non_blocking_copy=False,
            )
        )

    def save(self, path: Path, state: dict[str, Any]) -> Saved:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save

        response = async_save(
            state,
            storage_writer=FileSystemWriter(path, thread_count=2),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS if self.process else AsyncCheckpointerType.THREAD,
            async_stager=self.stager,
            process_group=self.group,
        )
        assert isinstance(response, AsyncSaveResponse)
        return Saved(response.staging_completion, response.upload_completion)

    def close(self) -> None:
        self.stager.close()
        super().close()


class DcpAsyncProcess(DcpAsync):
    """The same with a process."""

    process = True

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "0")


class TorchExperimental(Contender):
    """The asynchronous checkpointer of `torch.distributed.checkpoint._experimental`."""

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop)
        from torch.distributed.checkpoint import _experimental as experimental

        config = experimental.CheckpointerConfig(
            staging_config=experimental.CheckpointStagerConfig(
                use_pinned_memory=False,
                use_shared_memory=True,
                use_async_staging=True,
                use_non_blocking_copy=False,
            )
        )
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
            staging_config=staging.CheckpointStagerConfig(
                use_pinned_memory=False,
                use_shared_memory=True,
                use_async_staging=True,
                use_non_blocking_copy=False,
            )
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
    "asyncckpt, prepared": OursPrepared,
    "asyncckpt, overlap": OursOverlap,
    "torch.save": TorchSave,
    "safetensors": Safetensors,
    "dcp.save": Dcp,
    "dcp.async_save, thread": DcpAsync,
    "dcp.async_save, process": DcpAsyncProcess,
    "torch _experimental": TorchExperimental,
    "torch_checkpointing": TorchCheckpointing,
}


def _flatten(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Take the tensors out of a nested state; returns the rest, with None in their places."""
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach()
        return None
    if isinstance(value, dict):
        return {k: _flatten(v, f"{name}.{k}", tensors) for k, v in value.items()}
    return value


def _nested(rest: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Put the tensors back."""
    if isinstance(rest, dict):
        return {k: _nested(v, f"{name}.{k}", tensors) for k, v in rest.items()}
    return tensors.get(name, rest)
