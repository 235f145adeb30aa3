"""Retention: which checkpoints may go, how they go, and what every crash on the way leaves."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from storage_samples import RecordingFiles, Snapshot, failing, manifest_of, shard_paths

from asyncckpt.errors import CheckpointExistsError, CheckpointNotCommittedError, CheckpointNotFoundError, ConfigError
from asyncckpt.format.manifest import Manifest
from asyncckpt.format.names import LOCK_NAME, MANIFEST_NAME, SaveId, owner_of
from asyncckpt.maintenance import pins, policy, retention
from asyncckpt.maintenance.gc import QUIET_S
from asyncckpt.maintenance.policy import RetentionPolicy, StoredCheckpoint, best_of, newest_of, to_delete
from asyncckpt.maintenance.retention import Pruned, Scores, finish_removal, is_whole, prune, remove_checkpoint, survey
from asyncckpt.storage.catalog import ABANDONED, COMMITTED, found_at, next_epoch_beside, scan
from asyncckpt.storage.checkpoint_dir import prepare_directory, tombstone_if_readable
from asyncckpt.storage.commit import publish
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import LocalStore

FILES = RecordingFiles()
STORE = LocalStore(FILES)
RUN = "0123456789ab"


def stored(step: int, *, epoch: int = 1, score: float | None = None, **more: Any) -> StoredCheckpoint:
    """Return a checkpoint whose sequence is its step."""
    run = f"{epoch:012x}"
    return StoredCheckpoint(name=f"step-{step}", step=step, save_id=SaveId(epoch, step, run), score=score, **more)


def steps(found: list[StoredCheckpoint]) -> list[int]:
    return [one.step for one in found]


# ---- the policy -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("there", "policy", "gone"),
    [
        pytest.param([1, 2, 3], {}, [], id="without a number nothing goes"),
        pytest.param([1, 2, 3], {"max_to_keep": 3}, [], id="enough room"),
        pytest.param([1, 2, 3, 4], {"max_to_keep": 2}, [1, 2], id="the oldest first"),
        pytest.param([1, 2, 3, 4], {"max_to_keep": 1}, [1, 2, 3], id="the newest is left"),
        pytest.param([5, 10, 15, 16, 17], {"max_to_keep": 1, "keep_period": 5}, [16], id="a period comes on top"),
    ],
)
def test_so_many_stay(there: list[int], policy: dict[str, Any], gone: list[int]) -> None:
    assert steps(to_delete([stored(step) for step in there], RetentionPolicy(**policy))) == gone


@pytest.mark.parametrize(("mode", "best"), [("min", 2), ("max", 3)])
def test_the_best_stays_and_counts(mode: str, best: int) -> None:
    there = [stored(1), stored(2, score=0.5), stored(3, score=2.0), stored(4, score=float("nan")), stored(5), stored(6)]
    found = best_of(there, mode)
    assert found is not None and found.step == best
    gone = steps(to_delete(there, RetentionPolicy(max_to_keep=2, best_mode=mode)))
    assert gone == [step for step in (1, 2, 3, 4, 5) if step != best]


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf, None])
def test_what_has_no_finite_score_is_never_the_best(mode: str, score: float | None) -> None:
    found = best_of([stored(1, score=3.0), stored(2, score=score)], mode)
    assert found is not None and found.step == 1


class Scalar:
    """A number of numpy or torch."""

    shape = ()

    def __init__(self, value: float) -> None:
        self._value = value

    def item(self) -> float:
        return self._value


def test_metrics_survive_the_manifest_whatever_their_numbers_are() -> None:
    given = {"loss": math.nan, "top": [math.inf, -math.inf, 1.5], "more": {"at": Scalar(2.5), "n": 3}, "who": "inf"}
    text = json.dumps(policy.manager_metadata((), given), allow_nan=False)
    found = policy.metrics_in(json.loads(text))
    assert found is not None and math.isnan(found["loss"])
    del found["loss"]  # type: ignore[attr-defined]
    assert found == {"top": [math.inf, -math.inf, 1.5], "more": {"at": 2.5, "n": 3}, "who": "inf"}


def test_of_equally_good_ones_the_newest_is_the_best() -> None:
    found = best_of([stored(1, score=1.0), stored(2, score=1.0), stored(3, score=1.5)], "min")
    assert found is not None and found.step == 2


def test_a_pin_keeps_and_does_not_count() -> None:
    there = [stored(step) for step in range(1, 6)]
    assert steps(to_delete(there, RetentionPolicy(max_to_keep=2), {"step-1", "step-2"})) == [3]


def test_what_was_abandoned_goes_before_older_ancestors() -> None:
    there = [stored(1), stored(2), *(stored(step, is_abandoned=True) for step in (7, 8, 9)), stored(3, epoch=2)]
    assert steps(to_delete(there, RetentionPolicy(max_to_keep=3))) == [7, 8, 9]


def test_newest_is_by_lineage_not_by_step() -> None:
    newest = newest_of([stored(900), stored(150, epoch=2)])
    assert newest is not None and newest.step == 150


def test_broken_ones_go_first_and_never_count_as_the_newest() -> None:
    there = [stored(1), stored(2), stored(3, is_sound=False)]
    assert steps(to_delete(there, RetentionPolicy(max_to_keep=1))) == [3, 1]
    assert to_delete([dataclasses.replace(one, is_sound=False) for one in there], RetentionPolicy(max_to_keep=1)) == []


@pytest.mark.parametrize("fields", [{"max_to_keep": 0}, {"max_to_keep": True}, {"keep_period": -1}, {"best_mode": "x"}])
def test_nonsense_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        RetentionPolicy(**fields)
    assert caught.value.field in fields


def test_whatever_there_is_what_must_stay_stays_and_the_number_holds(rng: random.Random) -> None:
    for _ in range(300):
        there = [
            stored(
                step,
                epoch=rng.randint(1, 3),
                score=rng.choice([None, rng.random()]),
                is_abandoned=rng.random() < 0.3,
                is_sound=rng.random() < 0.9,
            )
            for step in rng.sample(range(1, 40), rng.randint(0, 12))
        ]
        policy = RetentionPolicy(
            max_to_keep=rng.randint(2, 5),
            keep_period=rng.choice([None, 4]),
            best_mode=rng.choice(["min", "max"]),
        )
        pinned = {one.name for one in there if rng.random() < 0.2}
        gone = to_delete(there, policy, pinned)
        left = [one for one in there if one not in gone]
        newest, best = newest_of(there), best_of(there, policy.best_mode)
        assert newest is None or newest in left
        assert best is None or best in left
        apart = [one for one in there if one.name in pinned or (policy.keep_period and one.step % 4 == 0)]
        assert all(one in left for one in apart)
        assert newest is None or len(left) - len(apart) <= (policy.max_to_keep or 0)
        assert not gone or len(left) - len(apart) == policy.max_to_keep  # not one more goes than has to


# ---- the branch of the newest ---------------------------------------------------------------------------------------


def test_after_a_rollback_the_old_future_is_no_ancestor() -> None:
    old, new = "aaaaaaaaaaaa", "bbbbbbbbbbbb"
    base, newest = SaveId(1, 5, old), SaveId(2, 0, new)
    for own in ((), None):
        for sequence, expected in ((4, True), (5, True), (6, False)):
            assert policy.is_ancestor(SaveId(1, sequence, old), own, newest, (base,)) is expected
        assert not policy.is_ancestor(SaveId(1, 0, "cccccccccccc"), own, newest, (base,)), "nobody went on from it"
        assert policy.is_ancestor(SaveId(1, 6, old), own, newest, None), "whoever says nothing abandons nothing"
    assert policy.is_ancestor(SaveId(2, 7, new), (base,), newest, (base,))


@pytest.mark.parametrize("most", [policy.MAX_ANCESTRY, 5])
def test_however_often_runs_go_back_also_without_a_restart_only_the_way_to_the_newest_is_its_branch(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(policy, "MAX_ANCESTRY", most)
    for _ in range(max(30, SCHEDULES)):
        saves: list[tuple[SaveId, tuple[SaveId, ...], int | None]] = []  # ID, ancestry, number of the one before
        epoch, sequence, line, at, restores = 1, 0, (), None, Counter[int]()
        for _ in range(30):
            if saves and rng.random() < 0.4:
                if rng.random() < 0.4:
                    epoch, sequence = epoch + 1, 0
                    restores.clear()
                at = rng.randrange(len(saves))
                restores[at] += 1
                metadata = policy.manager_metadata(saves[at][1], None)
                line = policy.extended_ancestry(saves[at][0], metadata, restores[at])
                continue
            saves.append((SaveId(epoch, sequence, f"{epoch:012x}"), line, at))
            at, sequence = len(saves) - 1, sequence + 1
        way, at = set(), len(saves) - 1
        while at is not None:
            way.add(at)
            at = saves[at][2]
        newest, ancestry, _ = saves[-1]
        found = {n for n, (one, own, _) in enumerate(saves) if policy.is_ancestor(one, own, newest, ancestry)}
        assert way <= found, "a checkpoint that the newest one goes back to is not abandoned"
        assert found == way or len(ancestry) == most, "all others are, as far as the newest one remembers"


def test_an_ancestry_survives_the_manifest_and_is_bounded() -> None:
    line: tuple[SaveId, ...] = ()
    for epoch in range(1, policy.MAX_ANCESTRY + 50):
        line = policy.extended_ancestry(SaveId(epoch, 3, f"{epoch:012x}"), policy.manager_metadata(line, {"loss": 1.0}))
        assert policy.ancestry_in(policy.manager_metadata(line, None)) == line
    assert len(line) == policy.MAX_ANCESTRY
    newest = SaveId(999, 0, RUN)
    assert policy.is_ancestor(SaveId(2, 9, f"{2:012x}"), (), newest, line), "forgotten: taken for one"
    assert not policy.is_ancestor(SaveId(300, 9, f"{300:012x}"), (), newest, line)


@pytest.mark.parametrize("metadata", [{}, {"asyncckpt_manager": 3}, {"asyncckpt_manager": {"ancestry": "x"}}])
def test_metadata_of_others_say_nothing(metadata: dict[str, Any]) -> None:
    assert policy.ancestry_in(metadata) is None and policy.metrics_in(metadata) is None


# ---- on disk --------------------------------------------------------------------------------------------------------


class Mortal(Files):
    """Files of a process that may die: ahead of one of its next calls, for good. Its fsync does nothing."""

    def __init__(self) -> None:
        self.left: int | None = None
        self.fds: set[int] = set()

    def die(self) -> None:
        """Close what a dead process has open, as the kernel does."""
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()

    def fsync(self, fd: int) -> None:
        self._live()

    def _live(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Killed

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        self._live()
        fd = super().open(path, flags, mode)
        self.fds.add(fd)
        return fd

    def close(self, fd: int) -> None:
        self._live()
        self.fds.discard(fd)
        super().close(fd)


class Killed(BaseException):
    """Nothing catches it."""


def _mortal(name: str) -> Callable[..., Any]:
    def call(self: Mortal, *args: Any, **kw: Any) -> Any:
        self._live()
        return getattr(Files, name)(self, *args, **kw)

    return call


for _name in ("unlink", "rename", "link", "rmdir", "mkdir", "listdir", "lstat", "preadv", "pwrite", "rename_noreplace"):
    setattr(Mortal, _name, _mortal(_name))


def save(root: Path, step: int, save_id: SaveId, *, metadata: dict[str, Any] | None = None) -> Manifest:
    """Commit a checkpoint, in the place of an older one."""
    manifest = begin(root, step, save_id, metadata=metadata)
    publish(str(root / f"step-{step}"), manifest, store=LocalStore(Mortal()), overwrite=True)
    return manifest


def begin(root: Path, step: int, save_id: SaveId, *, metadata: dict[str, Any] | None = None) -> Manifest:
    """Write all of a checkpoint but its manifest, which is returned."""
    path, files = str(root / f"step-{step}"), Mortal()
    with Snapshot({"w": 100}, save_id=save_id) as snapshot:
        prepare_directory(path, save_id=save_id, store=LocalStore(files), fsync=False, overwrite=True)
        record = snapshot.write(path, files, fsync=False, overwrite=True)
    manifest = manifest_of(record, step=step, save_id=save_id, fsync=False)
    return dataclasses.replace(manifest, metadata=metadata or {})


def rest(root: Path, step: int, seconds: float = 3600.0) -> None:
    """Let what lies in a checkpoint's directory have been changed so long ago."""
    directory = root / f"step-{step}"
    for path in [*directory.iterdir(), directory]:
        os.utime(path, (time.time() - seconds,) * 2)


def prune_all(root: Path, files: Files = FILES, **more: Any) -> list[Pruned]:
    policy = more.pop("policy", RetentionPolicy(max_to_keep=1))
    return prune(str(root), LocalStore(files), policy, package="test", **more)


def committed(root: Path) -> dict[int, Manifest]:
    """Return the committed checkpoints by step, each found whole."""
    found = {one.manifest.step: one for one in scan(str(root), STORE) if one.state == COMMITTED and one.manifest}
    for one in found.values():
        assert one.manifest is not None and is_whole(one.path, one.manifest, STORE), (
            f"{one.path} is listed, and not whole"
        )
    return {step: one.manifest for step, one in found.items() if one.manifest is not None}


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """Steps 1 to 3 of one run."""
    for step in (1, 2, 3):
        save(tmp_path, step, SaveId(1, step, RUN))
    return tmp_path


def test_what_the_policy_gives_up_is_gone_without_a_trace(three: Path) -> None:
    done = prune_all(three)
    assert [(one.stored.step, one.is_removed) for one in done] == [(1, True), (2, True)]
    assert os.listdir(three) == ["step-3"]


def test_without_delete_it_only_says_what_would_go(three: Path) -> None:
    assert [one.is_removed for one in prune_all(three, delete=False)] == [True, True]
    assert sorted(committed(three)) == [1, 2, 3]


def test_foreign_files_stay_and_so_does_their_directory(three: Path) -> None:
    (three / "step-1" / "notes.txt").write_text("mine")
    prune_all(three)
    assert os.listdir(three / "step-1") == ["notes.txt"]
    assert found_at(str(three / "step-1"), STORE) is None


def test_a_save_that_has_taken_the_place_is_left_alone(three: Path) -> None:
    path = str(three / "step-1")
    assert not remove_checkpoint(path, SaveId(1, 0, RUN), STORE, package="test")
    assert sorted(committed(three)) == [1, 2, 3]


def test_nothing_goes_while_the_newest_is_not_whole(three: Path) -> None:
    os.unlink(shard_paths(str(three / "step-3"))[0])
    assert all(not one.is_removed and "not whole" in one.kept for one in prune_all(three))
    assert {one.state for one in scan(str(three), STORE)} == {COMMITTED}


def test_nothing_goes_while_the_pins_cannot_be_read(three: Path) -> None:
    with pytest.raises(OSError, match="Input/output"):
        prune_all(three, failing("listdir", errno.EIO, at=pins.PINS_NAME))
    assert sorted(committed(three)) == [1, 2, 3]


def test_a_busy_directory_stays_for_now(three: Path) -> None:
    assert [one.is_removed for one in prune_all(three, busy={"step-1"})] == [False, True]
    assert sorted(committed(three)) == [1, 3]


def test_a_failing_removal_is_reported_and_done_the_next_time(three: Path) -> None:
    class Refusing(RecordingFiles):
        def before(self, name: str, args: Sequence[Any]) -> None:
            if name == "unlink" and "step-1/rank" in args[0]:
                raise OSError(errno.EACCES, "Permission denied")

    done = prune_all(three, Refusing())
    assert [one.error is not None for one in done] == [True, False]
    assert found_at(str(three / "step-1"), STORE).state == ABANDONED  # type: ignore[union-attr]
    prune_all(three)
    assert os.listdir(three) == ["step-3"]


def test_while_the_score_fails_on_all_metrics_those_of_earlier_runs_stay_for_one_may_be_the_best(
    tmp_path: Path,
) -> None:
    def saved(step: int, epoch: int, metrics: dict[str, Any] | None) -> None:
        save(tmp_path, step, SaveId(epoch, step, f"{epoch:012x}"), metadata=policy.manager_metadata((), metrics))

    saved(1, 1, {"loss": 0.1})
    saved(2, 1, None)
    saved(3, 2, {"loss": 0.2})
    saved(4, 2, {"loss": 0.3})
    mistaken = prune_all(tmp_path, score=Scores(lambda metrics: float(metrics["los"])))
    assert sorted(committed(tmp_path)) == [1, 4]
    assert [one.kept for one in mistaken if not one.is_removed] == [
        "best_fn fails for all metrics, so this may be the best"
    ]
    prune_all(tmp_path, policy=RetentionPolicy(max_to_keep=2), score=Scores(lambda metrics: float(metrics["loss"])))
    assert sorted(committed(tmp_path)) == [1, 4]
    prune_all(tmp_path)
    assert sorted(committed(tmp_path)) == [4]


def test_a_score_that_fails_is_none_and_that_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step, metrics in ((1, {"loss": 0.1}), (2, {"other": 1}), (3, None)):
        save(tmp_path, step, SaveId(1, step, RUN), metadata=policy.manager_metadata((), metrics))
    scores = Scores(lambda metrics: metrics["loss"])
    for _ in range(3):
        found = survey(str(tmp_path), STORE, score=scores)
        assert [(one.step, one.score) for one in found.stored] == [(3, None), (2, None), (1, 0.1)]
    assert caplog.text.count("step 2") == 1


def test_of_many_metrics_only_the_first_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    many = {f"task {n}": float(n) for n in range(3000)}
    save(tmp_path, 1, SaveId(1, 1, "0" * 12), metadata=policy.manager_metadata((), many))
    survey(str(tmp_path), STORE, score=Scores(lambda metrics: float(metrics["loss"])))
    assert "task 0" in caplog.text and "KeyError('loss')" in caplog.text and len(caplog.text) < 2000


@pytest.mark.parametrize("delisted", [False, True])
def test_after_a_kill_at_any_call_it_is_whole_or_no_checkpoint_and_goes_the_next_time(
    tmp_path: Path, delisted: bool
) -> None:
    """Each call of a removal is the last one of a process; `delisted`: of the one that goes on after such a death."""
    for nth in itertools.count():
        root, files = tmp_path / str(nth), Mortal()
        root.mkdir()
        save(root, 1, SaveId(1, 1, RUN))
        save(root, 2, SaveId(1, 2, RUN))
        if delisted:
            first = Mortal()
            with pytest.raises(OSError, match="Permission"):
                remove_checkpoint(
                    str(root / "step-1"),
                    SaveId(1, 1, RUN),
                    LocalStore(failing("unlink", errno.EACCES, at="/rank")),
                    package="test",
                )
            first.die()
        files.left = nth
        try:
            prune_all(root, files)
        except Killed:
            files.die()
        else:
            break
        assert set(committed(root)) in ({2}, {1, 2}), nth
        prune_all(root)
        assert sorted(committed(root)) == [2]
        left = os.listdir(root / "step-1") if (root / "step-1").exists() else []
        assert left in ([], [LOCK_NAME]), f"killed at call {nth}: {left}"  # nothing that takes room
    assert nth > 10


def test_a_tombstone_of_gc_is_not_taken_for_one_of_retention(tmp_path: Path) -> None:
    begin(tmp_path, 1, SaveId(1, 1, RUN))
    save(tmp_path, 2, SaveId(2, 0, "fedcba987654"))
    rest(tmp_path, 1)
    prune_all(tmp_path)  # what a dead run has left goes, and may never be committed
    found = tombstone_if_readable(str(tmp_path / "step-1"), STORE)
    assert found is not None and not found.was_committed and found.save_id == SaveId(1, 1, RUN)
    assert os.listdir(tmp_path / "step-1") == [MANIFEST_NAME]
    assert not finish_removal(str(tmp_path / "step-1"), STORE)


@pytest.mark.parametrize(("more", "stays"), [({}, True), ({"dead_after_s": -1e9}, False)])
def test_attempts_of_the_newest_run_stay_until_they_must_be_dead(
    tmp_path: Path, more: dict[str, Any], stays: bool
) -> None:
    begin(tmp_path, 1, SaveId(2, 1, RUN))
    save(tmp_path, 2, SaveId(2, 0, RUN))
    prune_all(tmp_path, **more)
    assert any(owner_of(name) for name in os.listdir(tmp_path / "step-1")) is stays


def test_what_a_worker_may_still_write_for_a_dead_run_is_not_given_up(tmp_path: Path) -> None:
    """All ranks had staged it: it is committed although its trainers are dead, and the next ones have been quicker."""
    staged = begin(tmp_path, 1, SaveId(1, 1, RUN))
    save(tmp_path, 2, SaveId(2, 0, "fedcba987654"))
    rest(tmp_path, 1, QUIET_S / 2)
    prune_all(tmp_path, policy=RetentionPolicy(max_to_keep=1, keep_period=1))
    publish(str(tmp_path / "step-1"), staged, store=LocalStore(Mortal()), overwrite=True)
    assert sorted(committed(tmp_path)) == [1, 2]


def test_a_save_that_begins_where_a_dead_run_left_files_is_not_taken_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins after the look at the directory, and before the removal."""
    begin(tmp_path, 5, SaveId(1, 5, RUN))
    rest(tmp_path, 5)
    save(tmp_path, 2, SaveId(2, 0, RUN))
    collected, begun = retention.collect, []

    def begun_first(path: str, *args: Any, **more: Any) -> Any:
        if path.endswith("step-5"):
            begun.append(begin(tmp_path, 5, SaveId(2, 1, RUN)))
        return collected(path, *args, **more)

    monkeypatch.setattr(retention, "collect", begun_first)
    prune_all(tmp_path)
    assert {owner_of(name) for name in os.listdir(tmp_path / "step-5")} >= {SaveId(2, 1, RUN)}
    assert tombstone_if_readable(str(tmp_path / "step-5"), STORE) is None
    publish(str(tmp_path / "step-5"), begun[0], store=STORE, overwrite=True)
    assert sorted(committed(tmp_path)) == [2, 5]


def test_a_save_that_begins_while_others_are_removed_keeps_its_directory(
    three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy: set[str] = set()
    retired = retention.remove_checkpoint

    def begun_then(path: str, *args: Any, **more: Any) -> bool:
        busy.add("step-2")
        return retired(path, *args, **more)

    monkeypatch.setattr(retention, "remove_checkpoint", begun_then)
    assert [(one.stored.step, one.is_removed) for one in prune_all(three, busy=busy)] == [(1, True), (2, False)]
    assert sorted(committed(three)) == [2, 3]


# ---- pins -----------------------------------------------------------------------------------------------------------


def test_a_pin_holds_until_it_is_taken_off(three: Path) -> None:
    for _ in range(2):
        pins.pin(str(three / "step-1"), STORE)
    assert pins.pinned_in(str(three), STORE) == {"step-1"}
    prune_all(three)
    assert sorted(committed(three)) == [1, 3]
    assert [pins.unpin(str(three / "step-1"), STORE) for _ in range(2)] == [True, False]
    prune_all(three)
    assert sorted(committed(three)) == [3]


def test_only_what_is_committed_can_be_pinned(three: Path) -> None:
    begin(three, 9, SaveId(1, 9, RUN))
    with pytest.raises(CheckpointNotCommittedError):
        pins.pin(str(three / "step-9"), STORE)
    with pytest.raises(CheckpointNotFoundError):
        pins.pin(str(three / "step-8"), STORE)
    assert pins.pinned_in(str(three), STORE) == frozenset()


def test_a_pinned_one_is_not_replaced_by_a_save_of_the_same_step_until_the_pin_is_off(three: Path) -> None:
    before = committed(three)[2].save_id
    pins.pin(str(three / "step-2"), STORE)
    later = SaveId(2, 0, "b" * len(RUN))
    with pytest.raises(CheckpointExistsError, match="pinned"):
        save(three, 2, later)
    assert committed(three)[2].save_id == before
    pins.unpin(str(three / "step-2"), STORE)
    save(three, 2, later)
    assert committed(three)[2].save_id == later


def test_a_pin_that_comes_while_another_save_replaces_it_holds(three: Path) -> None:
    """The last look is under the lock that who pins takes."""
    later = SaveId(2, 0, "b" * len(RUN))
    manifest = begin(three, 2, later)
    pins.pin(str(three / "step-2"), STORE)
    with pytest.raises(CheckpointExistsError, match="pinned"):
        publish(str(three / "step-2"), manifest, store=LocalStore(Mortal()), overwrite=True)
    assert committed(three)[2].save_id != later


def test_a_pin_on_a_link_protects_what_it_leads_to(three: Path) -> None:
    (three / "latest").symlink_to("step-1")
    pins.pin(str(three / "latest"), STORE)
    prune_all(three)
    assert sorted(committed(three)) == [1, 3]
    assert pins.unpin(str(three / "latest"), STORE)
    assert pins.pinned_in(str(three), STORE) == frozenset()


def test_a_pin_that_comes_right_before_the_removal_holds(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of pins was read before; under the lock each one is looked at again."""
    read = retention.pinned_in

    def then_pinned(root: str, files: Files) -> frozenset[str]:
        found = read(root, files)
        pins.pin(str(three / "step-1"), STORE)
        return found

    monkeypatch.setattr(retention, "pinned_in", then_pinned)
    assert [one.is_removed for one in prune_all(three)] == [False, True]
    assert sorted(committed(three)) == [1, 3]


# ---- any order of events --------------------------------------------------------------------------------------------


class Training:
    """A model of a training with its worker: saves, commits, prunes, is killed, goes on, rolls back.

    It knows what was ever committed, what it has in flight, and what retention may have taken.
    """

    def __init__(self, root: Path, rng: random.Random) -> None:
        self.root, self.rng = root, rng
        self.policy = RetentionPolicy(
            max_to_keep=rng.randint(2, 4), keep_period=rng.choice([None, 5]), best_mode=rng.choice(["min", "max"])
        )
        self.flying: list[tuple[int, Manifest]] = []
        self.there: dict[str, StoredCheckpoint] = {}
        self.pinned: set[str] = set()
        self.unsettled = 0
        self.line: tuple[SaveId, ...] = ()
        self._runs = itertools.count(1)
        self._start(0)

    def _start(self, step: int) -> None:
        self.run, self.sequence, self.step = f"{next(self._runs):012x}", 0, step
        self.epoch = next_epoch_beside(str(self.root / "x"), STORE)

    def save(self) -> None:
        if len(self.flying) == 2 or any(step == self.step + 1 for step, _ in self.flying):
            return
        self.step += 1
        metrics = {"loss": self.rng.random()} if self.rng.random() < 0.6 else None
        save_id = SaveId(self.epoch, self.sequence, self.run)
        self.sequence += 1
        told = policy.manager_metadata(self.line, metrics)
        if f"step-{self.step}" in self.pinned:  # it went back: that one is not replaced
            with pytest.raises(CheckpointExistsError):
                begin(self.root, self.step, save_id, metadata=told)
            return
        self.flying.append((self.step, begin(self.root, self.step, save_id, metadata=told)))
        self.unsettled += 1

    def commit(self) -> None:
        if self.flying:
            step, manifest = self.flying.pop(self.rng.randrange(len(self.flying)))
            options: dict[str, Any] = {"store": LocalStore(Mortal()), "overwrite": True}
            if f"step-{step}" in self.pinned:  # while it was under way
                with pytest.raises(CheckpointExistsError):
                    publish(str(self.root / f"step-{step}"), manifest, **options)
                return
            publish(str(self.root / f"step-{step}"), manifest, **options)
            metrics = policy.metrics_in(manifest.metadata)
            score = None if metrics is None else metrics["loss"]
            self.there[f"step-{step}"] = StoredCheckpoint(
                name=f"step-{step}", step=step, save_id=manifest.save_id, score=score
            )

    def prune(self) -> None:
        self._prune(Mortal())
        flying = {step for step, _ in self.flying}  # what is about to be replaced goes with the commit
        listed = [step for step in committed(self.root) if step not in flying]
        apart = [step for step in listed if self._is_apart(step)]
        assert len(listed) - len(apart) <= (self.policy.max_to_keep or 0)
        self.unsettled = len(self.flying)

    def _prune(self, files: Mortal) -> None:
        must = [newest_of(self.there.values()), best_of(self.there.values(), self.policy.best_mode)]
        must += [one for one in self.there.values() if self._is_apart(one.step)]
        busy = {f"step-{step}" for step, _ in self.flying}
        options = {"policy": self.policy, "score": Scores(lambda metrics: metrics["loss"]), "busy": busy}
        try:
            prune_all(self.root, files, **options, dead_after_s=-1e9)
        finally:
            files.die()
            listed = {f"step-{step}" for step in committed(self.root)}
            assert all(one.name in listed for one in must if one is not None), f"{must} of {listed}"
            self.there = {name: one for name, one in self.there.items() if name in listed}

    def prune_and_die(self) -> None:
        files = Mortal()
        files.left = self.rng.randrange(60)
        try:
            self._prune(files)
        except Killed:
            self.kill()

    def kill(self) -> None:
        """The trainer is gone. The worker may finish what is in flight, or be gone too. Another trainer goes on."""
        if self.rng.random() < 0.5:
            while self.flying:
                self.commit()
        self.flying.clear()
        self.resume()

    def resume(self, step: int | None = None) -> None:
        found = committed(self.root)
        if not found:
            self.line = ()
            return self._start(0)
        newest = max(found.values(), key=lambda one: one.save_id)
        base = newest if step is None else found[step]
        self.line = policy.extended_ancestry(base.save_id, base.metadata)
        return self._start(base.step)

    def roll_back(self) -> None:
        if not self.flying and self.there:
            self.resume(self.rng.choice(sorted(committed(self.root))))

    def pin(self) -> None:
        if self.there:
            one = self.rng.choice(sorted(self.there))
            pins.pin(str(self.root / one), STORE)
            self.pinned.add(one)

    def unpin(self) -> None:
        for one in sorted(self.pinned)[:1]:
            pins.unpin(str(self.root / one), STORE)
            self.pinned.discard(one)
            self.unsettled += 1

    def _is_apart(self, step: int) -> bool:
        return f"step-{step}" in self.pinned or (self.policy.keep_period is not None and step % 5 == 0)

    def check(self) -> None:
        listed = committed(self.root)
        newest = newest_of(self.there.values())
        assert newest is None or listed[newest.step].save_id == newest.save_id, "the newest is gone"
        full = [
            name
            for name in os.listdir(self.root)
            if name != pins.PINS_NAME and any(map(owner_of, os.listdir(self.root / name)))
        ]
        apart = sum(self._is_apart(int(name.partition("-")[2])) for name in full)
        assert len(full) <= (self.policy.max_to_keep or 0) + apart + self.unsettled, sorted(full)


EVENTS = [Training.save] * 6 + [Training.commit] * 6 + [Training.prune] * 3 + [Training.prune_and_die] * 2
EVENTS += [Training.kill, Training.roll_back, Training.pin, Training.unpin]
SCHEDULES = max(5, int(os.environ.get("ASYNCCKPT_TEST_SCHEDULES", "0")))


def test_in_any_order_of_events_and_crashes_newest_best_and_pins_stay_and_the_disk_is_bounded(
    tmp_path: Path, rng: random.Random
) -> None:
    for schedule in range(SCHEDULES):
        root = tmp_path / str(schedule)
        root.mkdir()
        training = Training(root, rng)
        for event in rng.choices(EVENTS, k=60):
            event(training)
            training.check()
