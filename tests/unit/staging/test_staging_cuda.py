"""What CUDA is asked to do, as far as that can be seen without a GPU."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import states  # noqa: E402

from asyncckpt.staging.device import CudaDevice  # noqa: E402

KERNELS_KEEP = (
    *(torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)
"""What `torch._foreach_copy_` leaves as it is on a GPU. It takes other floats through float32; other integers raise."""


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", states.ALL_DTYPES, ids=str)
def test_a_copy_on_a_device_keeps_every_bit(monkeypatch: pytest.MonkeyPatch, dtype: Any) -> None:
    seen = []
    copy = torch._foreach_copy_

    def on_a_gpu(targets: Any, sources: Any, non_blocking: bool) -> None:
        seen.extend(tensor.dtype for tensor in (*targets, *sources))
        copy(targets, sources, non_blocking)

    monkeypatch.setattr(torch, "_foreach_copy_", on_a_gpu)
    source = states.tensor_of(dtype, (7, 64), 1)  # NaNs with every payload among them
    targets = [torch.empty_like(source), torch.empty_like(source).t().contiguous().t()]
    CudaDevice().copy(targets, [source, source], non_blocking=True)
    assert seen and set(seen) <= set(KERNELS_KEEP)
    assert [states.bits_of(target) for target in targets] == [states.bits_of(source)] * 2
