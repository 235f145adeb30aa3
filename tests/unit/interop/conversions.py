"""What tests of conversions share: a directory in which checkpoints are made, converted and listed."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import dcp_calls
import torch
from in_process_writer import StorageWriter

import asyncckpt
from asyncckpt import RankInfo, SyncCheckpointer

KINDS = ("asyncckpt", "dcp", "torch", "safetensors", "hf")


class Workdir:
    """A directory of a test; checkpoints in it are called by their names: `a` becomes `b`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __truediv__(self, name: str) -> Path:
        return self.root / name

    def ours(self, state: Any, name: str = "a", **more: Any) -> Path:
        """Save by our own checkpointer."""
        with SyncCheckpointer(rank_info=RankInfo(0, 1), fsync=False) as checkpointer:
            checkpointer.save(state, self.root / name, **more)
        return self.root / name

    def torch(self, state: Any, name: str = "a", *, older: bool = False, **more: Any) -> Path:
        """Save by `torch.save`; an `older` one is no zip archive."""
        torch.save(state, self.root / name, _use_new_zipfile_serialization=not older, **more)
        return self.root / name

    def dcp(self, state: Any, name: str = "a") -> Path:
        """Save by `dcp.save`, through our storage writer."""
        dcp_calls.save(state, StorageWriter(self.root / name))
        return self.root / name

    def convert(self, to: str, source: str | Path = "a", target: str | Path = "b", **options: Any) -> Any:
        """Convert; return the report."""
        return asyncckpt.convert(self.root / source, self.root / target, to=to, **options)

    def changed(self, state: Any, to: str, **options: Any) -> set[str]:
        """Return what the report of a conversion from a file of `torch.save` says."""
        self.torch(state)
        return set(self.convert(to, overwrite=True, **options).changed)

    def load(self, name: str = "b", **options: Any) -> Any:
        return asyncckpt.load(self.root / name, **options)

    def names(self) -> list[str]:
        return sorted(os.listdir(self.root))


def read_by_stock_tools(to: str, path: Path) -> Any:
    """Return what the tools of a kind of checkpoint read."""
    if to == "torch":
        return torch.load(path, weights_only=True)
    if to == "dcp":
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp_to_torch_save(str(path), str(path) + ".pt")
        return torch.load(str(path) + ".pt", weights_only=True)
    if to == "asyncckpt":
        return asyncckpt.load(path)
    from safetensors.torch import load_file

    files = sorted(path.glob("*.safetensors")) if to == "hf" else [path]
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def torch_archive(path: Path, pickled: bytes) -> Path:
    """Write an archive as of `torch.save`, of these opcodes."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/version", b"3\n")
    return path


def flip(file: Path, found: bytes, at: int = 0, bit: int = 1) -> None:
    """Flip a bit of a file, so many bytes behind the first place where `found` is."""
    data = bytearray(file.read_bytes())
    place = data.find(found)
    assert place >= 0
    data[place + at] ^= bit
    file.write_bytes(data)


def ends_within_a_gigabyte(code: str, *arguments: object) -> None:
    """Run code in a process that has 1 GiB of addresses, and a minute; it must end in order."""
    limited = "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n" + code
    command = [sys.executable, "-c", limited, *map(str, arguments)]
    done = subprocess.run(command, check=False, timeout=120, capture_output=True)
    assert done.returncode == 0, (done.stdout, done.stderr[-1000:])
