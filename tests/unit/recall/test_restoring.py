"""restore_latest on one rank: the newest that verifies, what is said of the others, and what does not fall back."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from storage_samples import flip_byte, shard_paths  # noqa: E402

import asyncckpt  # noqa: E402
from asyncckpt.config import RankInfo  # noqa: E402
from asyncckpt.errors import (  # noqa: E402
    ConfigError,
    CorruptCheckpointError,
    MissingKeysError,
    NoSoundCheckpointError,
    ShapeMismatchError,
    UnsupportedFormatError,
)
from asyncckpt.storage import catalog  # noqa: E402
from asyncckpt.storage.local import LocalStore  # noqa: E402
from asyncckpt.storage.reader import read_shards  # noqa: E402

N = 70_000


def state(step: int, *more: str) -> dict[str, Any]:
    return {
        "w": torch.full((N,), float(step)),
        **{name: torch.full((N,), 100.0 + step) for name in more},
        "step": step,
        "note": f"of {step}",
    }


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sample = tmp_path_factory.mktemp("sample")
    save(sample, *(state(step) for step in (10, 20, 30)))
    return sample


@pytest.fixture
def root(tmp_path: Path, sample: Path) -> Path:
    """Three checkpoints: steps 10, 20, 30."""
    return Path(shutil.copytree(sample, tmp_path, dirs_exist_ok=True))


def save(root: Path, *states: dict[str, Any], **fields: Any) -> None:
    with asyncckpt.SyncCheckpointer(fsync=False, rank_info=RankInfo(0, 1), **fields) as checkpointer:
        for one in states:
            checkpointer.save(one, root / f"s{one['step']}")


def target(*more: str) -> dict[str, Any]:
    return {"w": torch.zeros(N), **{name: torch.zeros(N) for name in more}, "step": -1, "note": ""}


def damage(path: Path, how: str) -> None:
    shard = shard_paths(str(path))[0]
    index = next(str(file) for file in path.iterdir() if file.suffix == ".index")
    if how == "first byte of the data":
        flip_byte(shard, 4096)
    elif how == "last byte of the data":
        flip_byte(shard, os.path.getsize(shard) - 1)
    elif how == "no shard":
        os.unlink(shard)
    elif how == "short shard":
        os.truncate(shard, os.path.getsize(shard) - 1)
    elif how == "index":
        flip_byte(index, 100)
    elif how == "no index":
        os.unlink(index)
    elif how == "manifest":
        flip_byte(str(path / "manifest.json"), 60)
    elif how == "empty manifest":
        os.truncate(path / "manifest.json", 0)
    else:
        assert how == "objects"
        flip_byte(next(str(file) for file in path.iterdir() if file.name.endswith(".objects.json")), 40)


DAMAGES = (
    "first byte of the data",
    "last byte of the data",
    "no shard",
    "short shard",
    "index",
    "no index",
    "manifest",
    "empty manifest",
    "objects",
)


def test_the_newest_is_taken_and_nothing_is_said(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    wanted = target()
    with caplog.at_level(logging.WARNING):
        found = asyncckpt.restore_latest(root, wanted)
    assert (found.path, found.step, found.skipped) == (str(root / "s30"), 30, ())
    assert found.state_dict is wanted and wanted["note"] == "of 30" and bool((wanted["w"] == 30).all())
    assert not caplog.records


def test_newest_is_by_lineage_not_by_step(root: Path) -> None:
    save(root, state(15))  # a run that went back to step 10
    assert asyncckpt.restore_latest(root).step == 15


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("filled", [True, False], ids=["in place", "new"])
def test_a_damaged_one_is_passed_over_and_that_is_said(
    root: Path, how: str, filled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    damage(root / "s30", how)
    with caplog.at_level(logging.WARNING):
        found = asyncckpt.restore_latest(root, target() if filled else None)
    assert found.step == 20 and found.state_dict["step"] == 20 and found.state_dict["note"] == "of 20"
    assert bool((found.state_dict["w"] == 20).all())
    (skipped,) = found.skipped
    assert skipped.path == str(root / "s30") and isinstance(skipped.error, CorruptCheckpointError)
    assert skipped.moved_to is None and skipped.step == (None if "manifest" in how else 30)
    assert any("s30" in record.getMessage() and "skipped" in record.getMessage() for record in caplog.records)
    assert sorted(os.listdir(root)) == ["s10", "s20", "s30"]


def test_several_damaged_ones_are_passed_over_the_newest_first(root: Path) -> None:
    damage(root / "s30", "manifest")
    damage(root / "s20", "last byte of the data")
    found = asyncckpt.restore_latest(root, target())
    assert found.step == 10 and [one.path for one in found.skipped] == [str(root / "s30"), str(root / "s20")]


def test_none_that_verifies_is_an_error_that_lists_all_and_warns_of_the_target(root: Path) -> None:
    for step in (10, 20, 30):
        damage(root / f"s{step}", "last byte of the data")
    with pytest.raises(NoSoundCheckpointError, match="must not be used") as caught:
        asyncckpt.restore_latest(root, target(), quarantine=True)
    assert [text.partition(":")[0] for text in caught.value.tried] == [str(root / f"s{n}") for n in (30, 20, 10)]
    assert isinstance(caught.value, CorruptCheckpointError)
    assert sorted(os.listdir(root)) == ["s10", "s20", "s30"]  # the last ones are never put aside


@pytest.mark.parametrize("what", ["nothing", "a log", "other things", "never committed", "a file", "files of torch"])
def test_no_checkpoint_at_all_is_none_and_the_target_stays(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="asyncckpt")
    if what == "other things":
        (tmp_path / "logs").mkdir()
        (tmp_path / "web").mkdir()
        (tmp_path / "web" / "manifest.json").write_text('{"name": "an app"}')
    if what == "never committed":
        save(tmp_path, state(10))
        (tmp_path / "s10" / "manifest.json").unlink()
    if what == "a log":
        (tmp_path / "train.log").write_text("started")
    if what in ("a file", "files of torch"):
        torch.save(state(10), tmp_path / "last.pt")
    root = tmp_path / {"nothing": "none", "a file": "last.pt"}.get(what, "")
    target = state(77)
    assert asyncckpt.restore_latest(root, target) is None is asyncckpt.restore_latest(root)
    with asyncckpt.SyncCheckpointer() as checkpointer:
        assert checkpointer.restore_latest(root) is None
    assert target["step"] == 77 and torch.equal(target["w"], state(77)["w"])
    said = [one for one in caplog.records if "nothing to restore" in one.message]
    assert len(said) == 3 and {one.levelname for one in said} == {"INFO" if what in ("nothing", "a log") else "WARNING"}


def test_a_root_that_cannot_be_read_is_an_error_and_not_none(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="loop"):
        asyncckpt.restore_latest(tmp_path / "loop")


@pytest.mark.parametrize("to", ["another disk", "a neighbour"])
def test_a_link_to_a_checkpoint_counts_and_stays(root: Path, to: str) -> None:
    moved = root.parent / f"{root.name}-moved" / "s30"
    if to == "another disk":
        moved.parent.mkdir()
        os.rename(root / "s30", moved)
        (root / "s30").symlink_to(moved)
    else:
        (root / "latest").symlink_to("s30")
    assert asyncckpt.latest_checkpoint(root) == str(root / "s30")
    found = asyncckpt.restore_latest(root)
    assert (found.step, found.path, found.skipped) == (30, str(root / "s30"), ())
    with (
        asyncckpt.SyncCheckpointer(fsync=False, rank_info=RankInfo(0, 1)) as saves,
        asyncckpt.CheckpointManager(root, checkpointer=saves, max_to_keep=1, step_format="s{step}") as manager,
    ):
        assert manager.latest_step() == 30 and manager.all_steps() == [10, 20, 30]
        manager.restore(target())
        for step in (40, 50):
            manager.save(step, state(step))
        manager.wait()
    left = set(os.listdir(root))
    assert "s50" in left and "s10" not in left
    assert (moved.exists() and "s30" in left) if to == "another disk" else "latest" in left


@pytest.mark.parametrize("link", ["s30", "the root"])
def test_a_link_that_leads_nowhere_is_named(root: Path, link: str, caplog: pytest.LogCaptureFixture) -> None:
    """As where a disk is not mounted."""
    path = root / "s30" if link == "s30" else root.parent / f"{root.name}-link"
    if link == "s30":
        shutil.rmtree(path)
    path.symlink_to("not-mounted")
    found = asyncckpt.restore_latest(root if link == "s30" else path)
    assert (found and found.step) == (20 if link == "s30" else None)
    (said,) = [one for one in caplog.records if "broken symbolic link" in one.getMessage()]
    assert said.levelname == "WARNING" and str(path) in said.getMessage()


def test_one_that_was_never_committed_is_no_candidate(root: Path) -> None:
    (root / "s30" / "manifest.json").unlink()
    found = asyncckpt.restore_latest(root)
    assert found.step == 20 and not found.skipped


# ---- the target -----------------------------------------------------------------------------------------------------


def test_what_a_broken_one_filled_and_the_next_lacks_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, state(10), state(20, "added"))
    damage(tmp_path / "s20", "last byte of the data")
    with pytest.raises(MissingKeysError, match="holds values of both") as caught:
        asyncckpt.restore_latest(tmp_path, target("added"))
    assert caught.value.keys == ["added"]


class Migrated(torch.nn.Module):
    """Adds a parameter that older checkpoints lack, in a load hook."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.later, self.made, self.never = (torch.nn.Parameter(torch.zeros(3)) for _ in range(4))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        if f"{prefix}later" in state_dict:
            state_dict[f"{prefix}made"] = state_dict[f"{prefix}later"] + 1
        super()._load_from_state_dict(state_dict, prefix, *rest)


@pytest.mark.parametrize("lacks", ["later", ""])
def test_so_is_what_a_load_hook_was_given_before_the_data_was_found_to_be_broken(tmp_path: Path, lacks: str) -> None:
    names = [name for name in ("w", "later") if name != lacks]
    save(
        tmp_path,
        {**state(10), "model": {name: torch.ones(3) for name in names}},
        {**state(20), "model": {"w": torch.ones(3) * 2, "later": torch.ones(3) * 2}},
    )
    damage(tmp_path / "s20", "first byte of the data")
    model = Migrated()
    wanted = {"model": model, **target()}
    if lacks:
        with pytest.raises(MissingKeysError, match="holds values of both") as caught:
            asyncckpt.restore_latest(tmp_path, wanted, strict=False)
        assert caught.value.keys == ["model.later", "model.made"]
    else:
        assert asyncckpt.restore_latest(tmp_path, wanted, strict=False).step == 10
        assert [float(p.detach()[0]) for p in model.parameters()] == [1, 1, 2, 0]


def test_without_low_memory_a_broken_one_leaves_no_trace(tmp_path: Path) -> None:
    save(tmp_path, state(10))
    damage(tmp_path / "s10", "last byte of the data")
    wanted = target()
    with pytest.raises(NoSoundCheckpointError):
        asyncckpt.restore_latest(tmp_path, wanted, low_memory=False)
    assert not wanted["w"].any() and wanted["note"] == ""


def test_modules_and_optimizers_get_the_state_of_the_sound_one(tmp_path: Path) -> None:
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    kept = []
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
        for step in range(2):
            model(torch.ones(300)).sum().backward()
            optimizer.step()
            checkpointer.save({"model": model, "optim": optimizer, "step": step}, tmp_path / f"s{step}")
            kept.append([p.detach().clone() for p in model.parameters()])
    damage(tmp_path / "s1", "last byte of the data")
    assert asyncckpt.restore_latest(tmp_path, {"model": model, "optim": optimizer, "step": 9}).step == 0
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), kept[0], strict=True))
    assert all(int(s["step"]) == 1 for s in optimizer.state_dict()["state"].values())


# ---- what does not fall back ----------------------------------------------------------------------------------------


def test_a_shape_that_does_not_fit_is_raised(root: Path) -> None:
    save(root, {"w": torch.zeros(3), "step": 40})
    with pytest.raises(ShapeMismatchError):
        asyncckpt.restore_latest(root, target())


def _with_checkpointer(root: Path, state: Any, method: str = "restore_latest", **options: Any) -> Any:
    with asyncckpt.SyncCheckpointer() as checkpointer:
        return getattr(checkpointer, method)(root, state, **options)


def _with_manager(root: Path, state: Any, **options: Any) -> Any:
    checkpointer = asyncckpt.SyncCheckpointer()
    with (
        checkpointer,
        asyncckpt.CheckpointManager(
            root, checkpointer=checkpointer, step_format="s{step}", preemption_signal=None
        ) as manager,
    ):
        return manager.restore(state, **options)


RESTORERS: dict[str, Callable[..., Any]] = {
    "restore_latest": asyncckpt.restore_latest,
    "checkpointer": _with_checkpointer,
    "manager": _with_manager,
    "load": lambda root, state, **options: asyncckpt.load(root / "s30", state, **options),
    "checkpointer.load": lambda root, state, **options: _with_checkpointer(root / "s30", state, "load", **options),
}


@pytest.mark.parametrize("how", RESTORERS)
def test_missing_keys_are_raised_unless_told_otherwise(root: Path, how: str) -> None:
    state = target("more")
    with pytest.raises(MissingKeysError) as caught:
        RESTORERS[how](root, state)
    assert caught.value.keys == ["more"] and not state["w"].any() and state["step"] == -1
    RESTORERS[how](root, state, strict=False)
    assert state["step"] == 30 and not state["more"].any()


def test_one_of_a_newer_version_is_raised(root: Path) -> None:
    manifest = root / "s30" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"asyncckpt_manifest": 1', '"asyncckpt_manifest": 2'))
    with pytest.raises(UnsupportedFormatError):
        asyncckpt.restore_latest(root)


@pytest.mark.parametrize("arguments", [{"quarantine": 1}, {"threads": 0}, {"nonsense": 1}])
def test_arguments_that_make_no_sense_are_raised(root: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        asyncckpt.restore_latest(root, **arguments)


def test_several_ranks_without_a_place_to_meet_are_refused_and_one_may_go_alone(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="process group"):
        asyncckpt.restore_latest(root)
    assert asyncckpt.restore_latest(root, rank_info=RankInfo(0, 1)).step == 30


@pytest.mark.parametrize(("code", "falls_back"), [("EIO", True), ("EUCLEAN", True), ("EACCES", False)])
def test_storage_that_has_lost_the_bytes_is_broken_and_one_that_refuses_is_not(
    root: Path, monkeypatch: pytest.MonkeyPatch, code: str, falls_back: bool
) -> None:
    import errno

    from asyncckpt.loading import fetch

    def failing(path: str, *args: Any, **kw: Any) -> Any:
        if path.endswith("s30"):
            number = getattr(errno, code)
            raise OSError(number, os.strerror(number), path)
        return read_shards(path, *args, **kw)

    monkeypatch.setattr(fetch, "read_shards", failing)
    if not falls_back:
        with pytest.raises(PermissionError):
            asyncckpt.restore_latest(root, target())
        return
    found = asyncckpt.restore_latest(root, target(), quarantine=True)
    assert found.step == 20 and found.skipped[0].moved_to is None  # nothing shows that it is damaged


# ---- quarantine -----------------------------------------------------------------------------------------------------


def test_on_request_broken_ones_are_put_aside_and_offered_no_more(root: Path) -> None:
    damage(root / "s30", "last byte of the data")
    (root / "s30.broken-1").mkdir()
    found = asyncckpt.restore_latest(root, quarantine=True)
    assert found.skipped[0].moved_to == str(root / "s30.broken-2")
    assert sorted(os.listdir(root)) == ["s10", "s20", "s30.broken-1", "s30.broken-2"]
    assert asyncckpt.latest_checkpoint(root) == str(root / "s20")
    assert not asyncckpt.restore_latest(root).skipped
    save(root, state(30))
    assert asyncckpt.restore_latest(root).path == str(root / "s30")


@pytest.mark.parametrize("why", ["newer files", "a link", "not ours"])
def test_what_may_be_in_use_or_is_not_provably_ours_is_not_put_aside(root: Path, why: str) -> None:
    damage(root / "s30", "manifest" if why == "not ours" else "last byte of the data")
    if why == "newer files":  # somebody overwrites it right now
        (root / "s30" / "rank-00000.999999-00000099-0123456789ab.index").touch()
    if why == "a link":
        os.rename(root / "s30", root.parent / "elsewhere")
        os.symlink(root.parent / "elsewhere", root / "s30")
    if why == "not ours":
        for file in (root / "s30").iterdir():
            if file.name != "manifest.json":
                file.unlink()
    asyncckpt.restore_latest(root, quarantine=True)
    assert sorted(os.listdir(root)) == ["s10", "s20", "s30"]


def test_a_save_to_a_name_of_quarantine_is_refused(tmp_path: Path) -> None:
    refused = pytest.raises(asyncckpt.errors.UnsupportedPathError, match="broken")
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer, refused:
        checkpointer.save(state(1), tmp_path / "s1.broken-3")


# ---- the candidates -------------------------------------------------------------------------------------------------


def test_candidates_are_the_newest_first_and_a_damaged_manifest_counts_by_its_files(root: Path) -> None:
    damage(root / "s20", "manifest")
    found = catalog.candidates_in(str(root), LocalStore())
    assert [(os.path.basename(one.path), one.step) for one in found] == [("s30", 30), ("s20", None), ("s10", 10)]
    assert found[1].save_id is not None and found[1].save_id.sequence == 1


def test_somebody_else_s_manifest_beside_the_checkpoints_hides_none(root: Path) -> None:
    (root / "manifest.json").write_text('{"name": "an app"}')
    assert asyncckpt.latest_checkpoint(root) == str(root / "s30") == asyncckpt.restore_latest(root).path


def test_a_checkpointer_restores_too(root: Path) -> None:
    damage(root / "s30", "last byte of the data")
    with asyncckpt.SyncCheckpointer() as checkpointer:
        found = checkpointer.restore_latest(root, target())
    assert found.step == 20 and len(found.skipped) == 1


def test_the_readers_word_for_map_location_is_refused_and_not_ignored(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="default_map_location"):
        asyncckpt.restore_latest(tmp_path, map_location="cpu")
