"""Files of tensors without reading the tensors: byte for byte what torch and safetensors write."""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import threading
import zipfile
import zlib
from typing import Any

import pytest
import torch

from asyncckpt.errors import UnsupportedLeafError
from asyncckpt.format.layout import Payload
from asyncckpt.integrations._capture import Pieces, capture_safetensors, capture_torch_save, recording
from asyncckpt.interop.write_torch import crc_places


def whole(captured: Pieces) -> bytes:
    """Return the file, as the exporter makes it: elements, and their checksums."""
    parts = [bytes(p.tolist()) if isinstance(p, torch.Tensor) else p for p in captured]
    pieces = [Payload(n, len(parts[n])) if isinstance(p, torch.Tensor) else p for n, p in enumerate(captured)]
    found = bytearray(b"".join(parts))
    for piece, offset in crc_places(pieces):
        found[offset : offset + 4] = zlib.crc32(parts[piece]).to_bytes(4, "little")
    return bytes(found)


def saved(value: Any) -> bytes:
    """Return what `torch.save` writes."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _trained() -> dict[str, Any]:
    model = torch.nn.Linear(40, 30)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 40)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "weight": model.weight, "module": model}


def entries(file: bytes) -> dict[str, bytes]:
    """Return an archive's entries, but for torch's number of it, which it derives from checksums of elements."""
    archive = zipfile.ZipFile(io.BytesIO(file))
    assert archive.testzip() is None
    return {name: archive.read(name) for name in archive.namelist() if not name.endswith("serialization_id")}


_BASE = torch.arange(100.0)

VALUES = {
    "a training": _trained(),
    "views of one storage": {"a": _BASE[10:20], "b": _BASE[::3], "c": _BASE.view(10, 10).t()},
    "no elements": {"e": torch.zeros(0, 3), "f": torch.zeros(2, 0)},
    "no tensors": [1, "two", {3: None}],
    "dtypes": [torch.ones(5).to(d) for d in (torch.bfloat16, torch.bool, torch.complex128, torch.float8_e4m3fn)],
    "one tensor": torch.randn(70_000),
    "many tensors": [torch.full((n,), float(n)) for n in range(300)],
}


@pytest.mark.parametrize("name", VALUES)
def test_captured_file_is_the_one_that_torch_saves(name: str) -> None:
    captured = capture_torch_save(VALUES[name])
    assert list(entries(whole(captured)).items()) == list(entries(saved(VALUES[name])).items())
    assert len(whole(captured)) == len(saved(VALUES[name]))


def test_pieces_share_memory_with_what_was_saved() -> None:
    tensor = torch.zeros(1000)
    captured = capture_torch_save({"x": tensor})
    tensor.fill_(7.0)
    assert entries(whole(captured)) == entries(saved({"x": tensor}))


def test_saves_of_other_threads_are_none_of_ours() -> None:
    done: list[bytes] = []
    other = threading.Thread(target=lambda: done.append(saved({"y": torch.ones(9)})))
    captured = []

    class Slow:
        def __reduce__(self) -> Any:
            other.start()
            other.join()
            return list, ()

    captured.append(capture_torch_save({"slow": Slow(), "x": torch.zeros(5)}))
    assert whole(captured[0]) and done == [saved({"y": torch.ones(9)})]
    assert sum(isinstance(p, torch.Tensor) for p in captured[0]) == 1


def test_captured_safetensors_are_those_of_the_library(tmp_path: pathlib.Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    dtypes = [
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16),
        *(torch.int8, torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.complex64),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
    ]
    tensors = {f"{letter}.{n}": torch.ones(n, 3).to(d) for letter in "bca" for n, d in enumerate(dtypes)}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "ünïcode": torch.ones(2)}
    for metadata in (None, {"format": "pt"}):
        library.save_file(tensors, tmp_path / "x", metadata)
        assert whole(capture_safetensors(tensors, metadata)) == (tmp_path / "x").read_bytes()


@pytest.mark.parametrize("tensor", [torch.zeros(2, dtype=torch.complex128), torch.zeros(3).to_sparse()])
def test_what_safetensors_lack_is_refused_by_name(tensor: torch.Tensor) -> None:
    with pytest.raises(UnsupportedLeafError, match="wrong"):
        capture_safetensors({"wrong": tensor})


def test_recording_takes_what_is_saved_below_its_directory_and_nothing_else(tmp_path: pathlib.Path) -> None:
    original = torch.save
    with recording("checkpoint-1") as found:
        inside = pathlib.Path(found.directory)
        assert inside.name == "checkpoint-1"
        torch.save({"x": torch.ones(3)}, inside / "a.pt")
        torch.save({"x": torch.ones(3)}, tmp_path / "outside.pt")
        other = threading.Thread(target=torch.save, args=(torch.ones(1), inside / "other.pt"))
        other.start()
        other.join()
        (inside / "deep").mkdir()
        (inside / "deep" / "b.json").write_text("{}")
    assert torch.save is original and not inside.parent.exists()
    assert [type(piece) for piece in found.files["a.pt"]] == [bytes, torch.Tensor, bytes]
    assert found.files[os.path.join("deep", "b.json")] == (b"{}",)
    assert [type(piece) for piece in found.files["other.pt"]] == [bytes]
    assert torch.load(tmp_path / "outside.pt")["x"].sum() == 3


def test_recording_puts_everything_back_when_the_framework_fails() -> None:
    original = torch.save
    with pytest.raises(ValueError, match="full"), recording("checkpoint-1") as found:
        raise ValueError("full")
    assert torch.save is original and not os.path.exists(found.directory)


class _Packed:
    """Pickles itself as bytes that `torch.save` makes, or pickle, as some libraries' objects do."""

    def __init__(self, tensor: torch.Tensor, how: str) -> None:
        self.tensor, self.how = tensor, how

    def __getstate__(self) -> dict[str, Any]:
        if self.how == "pickled":
            return {"how": self.how, "bytes": pickle.dumps(self.tensor)}
        return {"how": self.how, "bytes": saved(self.tensor)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        data, self.how = state["bytes"], state["how"]
        self.tensor = pickle.loads(data) if self.how == "pickled" else torch.load(io.BytesIO(data))


@pytest.mark.parametrize("how", ["saved", "pickled"])
@pytest.mark.parametrize("recorded", [False, True])
def test_an_object_that_saves_tensors_into_its_own_bytes_keeps_their_values(how: str, recorded: bool) -> None:
    tensor, torch_save = torch.arange(5.0), torch.save
    value = {"tensor": tensor, "packed": _Packed(tensor, how)}
    if recorded:
        with recording("run") as found:
            torch.save(value, os.path.join(found.directory, "x.pt"))
        captured = found.files["x.pt"]
    else:
        captured = capture_torch_save(value)
    assert torch.save is torch_save
    loaded = torch.load(io.BytesIO(whole(captured)), weights_only=False)
    assert torch.equal(loaded["packed"].tensor, tensor) and torch.equal(loaded["tensor"], tensor)


def test_after_a_value_that_cannot_be_pickled_torch_saves_as_before() -> None:
    torch_save = torch.save
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        capture_torch_save({"t": torch.ones(3), "lock": threading.Lock()})
    assert torch.save is torch_save
    assert torch.equal(torch.load(io.BytesIO(saved(torch.ones(3)))), torch.ones(3))
