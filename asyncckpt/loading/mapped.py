"""One tensor of a checkpoint as a private mapping of its file: nothing is read before it is looked at.

The mapping is copy on write: what is written to the tensor stays in this process. The file must not be cut short while
the tensor lives; a checkpoint of ours never is, only deleted, which a mapping survives.
"""

from __future__ import annotations

import mmap
import os

import torch

from asyncckpt.loading.sinks import new_tensor
from asyncckpt.storage.contents import Contents, Inline, SavedTensor, Strided, check_lengths
from asyncckpt.storage.files import Files, opened
from asyncckpt.torch_tensors import torch_dtype


def mapped_tensor(contents: Contents, saved: SavedTensor, files: Files) -> torch.Tensor | None:
    """Return a tensor over a mapping of the file that holds it; None where it lies in several places, or misaligned.

    Raises:
        CorruptCheckpointError: The file is not there in full.
        UnsupportedLeafError: This torch lacks the dtype.
        OSError: It cannot be mapped.
    """
    dtype = torch_dtype(saved.dtype)
    check_lengths(contents, files, saved)
    if len(saved.chunks) != 1:
        return None
    if 0 in saved.global_shape:
        return new_tensor(saved.global_shape, dtype, torch.device("cpu"))
    rank, chunk = saved.chunks[0]
    part, offset, span = chunk.part, chunk.offset_bytes, chunk.nbytes
    strides: tuple[int, ...] | None = None
    directory = contents.path
    if contents.source is not None:
        directory = contents.source.directory
        place = contents.source.place(part, files)
        if isinstance(place, Inline):
            return None
        part, offset = place.part, place.offset + offset
        if isinstance(place, Strided):
            span, strides = place.nbytes, place.strides
    if offset % dtype.itemsize:
        return None
    name = contents.ranks[rank].index.shards[part].name
    start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    with opened(files, os.path.join(directory, name), os.O_RDONLY) as fd:
        mapping = mmap.mmap(
            fd, offset - start + span, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE, offset=start
        )
    flat = torch.frombuffer(mapping, dtype=torch.uint8, count=span, offset=offset - start)  # keeps the mapping alive
    elements = flat.view(dtype)
    if strides is None:
        return elements.view(saved.global_shape).detach()
    return elements.as_strided(saved.global_shape, strides).detach()
