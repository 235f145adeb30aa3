"""`MadeTensor`: a tensor of a target whose elements are boxes of saved tensors, maybe in another dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from asyncckpt.storage.contents import SavedTensor

CAST_DTYPES = ("float64", "float32", "float16", "bfloat16")
"""Dtypes that a conversion casts from and to. Others are packed or scaled (float8, float4), or are no weights."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes, in elements."""


class MappedBox(NamedTuple):
    """A box of a saved tensor that is a box of a made tensor.

    All boxes have the dimensions of the stacked tensor of the two: where the other tensor lacks the stacked dimension,
    its box has offset 0 and size 1 there.

    Attributes:
        saved: The saved tensor.
        source_offsets: Offsets of the box in it.
        offsets: Offsets of the box in the made tensor.
        sizes: Sizes of the box.
        lacks: The dimension that the saved tensor lacks; None: it has all.
    """

    saved: SavedTensor
    source_offsets: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    lacks: int | None = None


class SourceBox(NamedTuple):
    """What `MadeTensor.sources_of` yields: a box of a saved tensor, and its place in the box that was asked for.

    Attributes:
        saved: The saved tensor.
        offsets: Offsets of the box in it, in its own dimensions.
        within: Offsets in the box that was asked for, in the dimensions of `MadeTensor.wide_shape`.
        sizes: Sizes of the box, in the dimensions of `MadeTensor.wide_shape`.
        lacks: The dimension of `sizes`, of size 1, that the saved tensor lacks.
    """

    saved: SavedTensor
    offsets: tuple[int, ...]
    within: tuple[int, ...]
    sizes: tuple[int, ...]
    lacks: int | None


class MadeTensor(NamedTuple):
    """A tensor that is made of others.

    Attributes:
        fqn: FQN of the first saved tensor of which it is made, for messages.
        dtype: Name of its dtype; elements are cast if the saved ones have another dtype.
        global_shape: Its shape in elements.
        wide_shape: The same with the stacked dimension, of size 1, if it lacks that.
        boxes: Boxes that hold each element once.
    """

    fqn: str
    dtype: str
    global_shape: tuple[int, ...]
    wide_shape: tuple[int, ...]
    boxes: tuple[MappedBox, ...]

    def sources_of(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[SourceBox]:
        """Yield the boxes of saved tensors that hold a box of this tensor, in the dimensions of `wide_shape`."""
        for box in self.boxes:
            low = tuple(map(max, offsets, box.offsets))
            end = tuple(min(o + n, p + m) for o, n, p, m in zip(offsets, sizes, box.offsets, box.sizes, strict=True))
            if any(e <= at for at, e in zip(low, end, strict=True)):
                continue
            source = [at - p + s for at, p, s in zip(low, box.offsets, box.source_offsets, strict=True)]
            if box.lacks is not None:
                del source[box.lacks]
            yield SourceBox(
                box.saved,
                tuple(source),
                tuple(at - o for at, o in zip(low, offsets, strict=True)),
                tuple(e - at for at, e in zip(low, end, strict=True)),
                box.lacks,
            )


AnyTensor = SavedTensor | MadeTensor


def cast(tensor: AnyTensor, dtype: str) -> AnyTensor:
    """Return a tensor with its elements cast to `dtype`; the tensor itself if it has that, or is not of `CAST_DTYPES`.

    Casts are those of `torch.Tensor.to`: to the nearest value, of two as near ones to the even one.
    """
    if tensor.dtype not in CAST_DTYPES or tensor.dtype == dtype:
        return tensor
    if isinstance(tensor, MadeTensor):
        return tensor._replace(dtype=dtype)
    shape = tensor.global_shape
    origin = (0,) * len(shape)
    return MadeTensor(tensor.fqn, dtype, shape, shape, (MappedBox(tensor, origin, origin, shape),))
