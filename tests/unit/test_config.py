"""Settings: what is refused and how, and which of argument, environment and default wins."""

from __future__ import annotations

import dataclasses
import logging
import math
import pathlib
import re
from typing import Any

import pytest

from asyncckpt import AsyncCheckpointer, SyncCheckpointer, config
from asyncckpt.checkpointer import refuse_unknown
from asyncckpt.config import CheckpointerConfig, RankInfo, endpoint_from_environment
from asyncckpt.errors import ConfigError

SECONDS = [f.name for f in dataclasses.fields(CheckpointerConfig) if f.name.endswith("_s")]
IMPOSSIBLE: dict[str, list[Any]] = {
    "staging": ["gpu", "", None, 1],
    "overlap_check": ["on", "", None, True],
    "slots": [0, 17, -1, 1.0, True, None, "2"],
    "on_busy": ["Wait", None, ""],
    "arena_limit_bytes": [0, -1, 1.5, (1 << 60) + 1, True],
    "on_worker_loss": ["again", None],
    "keep_in_memory": ["all", None, 1],
    "on_error": ["ignore", None],
    "events": [0, 1, None, "run"],
    "replicated": ["trust", None, True],
    "overwrite": [0, 1, None, "true"],
    "fsync": [0, 1, None, "true"],
    "allow_pickle": [0, 1, None, "true"],
    "use_pinned_memory": [0, 1, None, "true"],
    "use_non_blocking_copy": [0, 1, None, "true"],
    "layout": ["torch", None, "DCP"],
    "reuse": ["on", None, True, "Auto"],
    "files_per_rank": [0, 257, None, 1.0],
    "max_shard_bytes": [0, 65535, 1e6, True, "1GB"],
    "write_threads": [0, 1, 65, 2.0],
    "rank_info": [
        (0, 1),
        RankInfo(0, 0),
        RankInfo(1, 1),
        RankInfo(-1, 2),
        (0,),
        0,
        RankInfo(0.0, 1),
        RankInfo(False, True),
    ],
    "storage_options": [{"a": 1}, ["a"], "a"],
    **{name: [0, -1, math.nan, math.inf, None, "5", True, 1e9] for name in SECONDS},
}
POSSIBLE: dict[str, tuple[Any, str]] = {
    "staging": ("overlap", "overlap"),
    "overlap_check": ("hash", "hash"),
    "slots": (16, "16"),
    "on_busy": ("skip", "skip"),
    "arena_limit_bytes": (1 << 60, str(1 << 60)),
    "on_worker_loss": ("fail", "fail"),
    "keep_in_memory": ("latest", "latest"),
    "on_error": ("raise", "raise"),
    "events": (True, "on"),
    "replicated": ("assume", "assume"),
    "overwrite": (True, "1"),
    "fsync": (False, "no"),
    "allow_pickle": (True, "yes"),
    "use_pinned_memory": (False, "off"),
    "use_non_blocking_copy": (False, "0"),
    "layout": ("dcp", "dcp"),
    "reuse": ("auto", "auto"),
    "files_per_rank": (256, "256"),
    "max_shard_bytes": (65536, "65536"),
    "write_threads": (64, "64"),
    "rank_info": (RankInfo(3, 4), "3,4"),
    "storage_options": ({"region": "eu"}, '{"region": "eu"}'),
    **{name: (0.25, "0.25") for name in SECONDS},
}


def names() -> list[str]:
    return [f.name for f in dataclasses.fields(CheckpointerConfig)]


def test_these_tables_have_every_field() -> None:
    assert set(IMPOSSIBLE) == set(POSSIBLE) == set(names())


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in IMPOSSIBLE.items() for v in values])
def test_impossible_value_is_refused_by_field_and_value(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        CheckpointerConfig(**{name: value})
    assert caught.value.field == name
    is_shown = name != "storage_options"
    assert caught.value.value == (repr(value) if is_shown else None)
    assert str(caught.value).startswith(f"{name}={value!r}: expected " if is_shown else f"{name}: expected ")
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("name", sorted(POSSIBLE))
def test_environment_sets_a_field_and_an_argument_wins_over_it(name: str) -> None:
    value, text = POSSIBLE[name]
    environ = {f"ASYNCCKPT_{name.upper()}": text}
    default = getattr(CheckpointerConfig(), name)
    assert getattr(CheckpointerConfig.resolve(None, {}, environ), name) == value
    assert getattr(CheckpointerConfig.resolve(None, {name: default}, environ), name) == default
    assert getattr(CheckpointerConfig.resolve(None, {}, {}), name) == default


def test_a_config_is_taken_as_a_whole_and_single_arguments_win_over_it() -> None:
    config = CheckpointerConfig(slots=3)
    found = CheckpointerConfig.resolve(config, {"fsync": False}, {"ASYNCCKPT_ON_BUSY": "skip"})
    assert (found.slots, found.fsync, found.on_busy) == (3, False, "wait")
    assert CheckpointerConfig.resolve(config, {}) is config
    assert config.fsync


def test_the_environment_is_the_process_s_own_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCCKPT_SLOTS", "5")
    assert CheckpointerConfig.resolve(None, {}).slots == 5
    assert CheckpointerConfig.resolve(None, {}, {}).slots == 2, "an empty environment is an environment"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        *(("SLOTS", "two", "a plain integer"), ("ARENA_LIMIT_BYTES", "1e9", "a plain integer"), ("SLOTS", "0", "")),
        *(("FSYNC", "maybe", "one of 1, true"), ("ON_BUSY", "hope", "")),
        *(("SLOT_TIMEOUT_S", "1s", "a number of seconds"), ("SLOT_TIMEOUT_S", "nan", "")),
        *(("RANK_INFO", "3", "RANK,WORLD_SIZE"), ("RANK_INFO", "1,1", "")),
    ],
)
def test_unreadable_environment_is_refused_by_field_and_told_what_was_expected(name: str, text: str, said: str) -> None:
    with pytest.raises(
        ConfigError, match=f"ASYNCCKPT_{name}='{text}': expected {said}" if said else "expected"
    ) as caught:
        CheckpointerConfig.resolve(None, {}, {f"ASYNCCKPT_{name}": text})
    assert caught.value.field == name.lower()


@pytest.mark.parametrize("text", ["", "none", "None"])
def test_an_optional_field_can_be_none_in_the_environment(text: str) -> None:
    assert CheckpointerConfig.resolve(None, {}, {"ASYNCCKPT_WRITE_THREADS": text}).write_threads is None


def test_unknown_field_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown field 'slot'; the nearest is 'slots'; known are .*slots") as caught:
        CheckpointerConfig.resolve(None, {"slot": 1})
    assert caught.value.field == "slot"


def test_something_else_than_a_config_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected CheckpointerConfig"):
        CheckpointerConfig.resolve({"slots": 1}, {})  # type: ignore[arg-type]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What is logged, in a process that has not warned of anything yet."""
    monkeypatch.setattr(config, "_warned", set())
    caplog.set_level(logging.WARNING, logger="asyncckpt")
    return caplog


@pytest.mark.parametrize(
    ("name", "hint"), [("ASYNCCKPT_OVERWRTE", "ASYNCCKPT_OVERWRITE"), ("ASYNCCKPT_ENDPONT", "ASYNCCKPT_ENDPOINT")]
)
def test_a_misspelt_variable_is_warned_of_once_with_the_one_that_was_meant(
    log: pytest.LogCaptureFixture, name: str, hint: str
) -> None:
    for _ in range(2):
        CheckpointerConfig.resolve(None, {}, {name: "1", "ASYNCCKPT_SLOTS": "2"})
    (said,) = log.messages
    assert name in said and f"did you mean {hint}?" in said


def test_a_variable_like_no_other_is_warned_of_without_a_guess(log: pytest.LogCaptureFixture) -> None:
    CheckpointerConfig.resolve(None, {}, {"ASYNCCKPT_QQQQ": "1"})
    assert "ASYNCCKPT_QQQQ" in log.messages[0] and "did you mean" not in log.messages[0]


def test_no_variable_that_the_code_reads_is_warned_of(log: pytest.LogCaptureFixture) -> None:
    root = pathlib.Path(config.__file__).parents[1]
    text = "".join(p.read_text() for package in ("asyncckpt", "worker") for p in (root / package).rglob("*.py"))
    named = {*re.findall(r"ASYNCCKPT_[A-Z_]+[A-Z]", text), "ASYNCCKPT_TEST_SEED"}
    assert {"ASYNCCKPT_ENDPOINT", "ASYNCCKPT_JOB"} <= named
    fields = {f"ASYNCCKPT_{name.upper()}" for name in names()}
    CheckpointerConfig.resolve(None, {}, dict.fromkeys(named - fields, "1") | {"PATH": "/bin"})
    assert log.messages == []


@pytest.mark.parametrize(
    ("maker", "given", "said"),
    [
        (AsyncCheckpointer, CheckpointerConfig(), r"AsyncCheckpointer\(config=\.\.\.\)"),
        (AsyncCheckpointer, "ipc:///x/y", r"AsyncCheckpointer\(endpoint=\.\.\.\)"),
        (AsyncCheckpointer, 3, r"was given a int"),
        (SyncCheckpointer, CheckpointerConfig(), r"SyncCheckpointer\(config=\.\.\.\)"),
    ],
)
def test_an_argument_without_its_name_is_refused_with_the_name(maker: Any, given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        maker(given)


def test_a_config_cannot_be_changed_and_takes_keywords_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        CheckpointerConfig().slots = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        CheckpointerConfig("auto")  # type: ignore[misc]


def test_a_setting_given_to_save_is_told_where_it_belongs() -> None:
    with pytest.raises(ConfigError, match="'overwrite'; it is a setting of the checkpointer"):
        refuse_unknown({"overwrite": True})
    with pytest.raises(ConfigError, match=r"no argument called 'lr'$"):
        refuse_unknown({"lr": 1})


def test_every_field_is_described_with_its_default() -> None:
    assert CheckpointerConfig.__doc__ is not None
    text = " ".join(CheckpointerConfig.__doc__.split())
    for field in dataclasses.fields(CheckpointerConfig):
        default = repr(field.default).replace("'", '"')
        assert text.partition(f" {field.name}: ")[2].partition(" Default: ")[2].startswith(f"{default}."), (
            f"the docstring must say of {field.name}: `Default: {default}.`"
        )


def test_the_guide_to_saving_lists_every_field() -> None:
    guide = (pathlib.Path(config.__file__).parents[1] / "docs/guides/saving.md").read_text()
    assert [name for name in names() if f"`{name}`" not in guide] == []


def test_endpoint_comes_from_the_environment_unless_it_is_empty() -> None:
    assert endpoint_from_environment({"ASYNCCKPT_ENDPOINT": "ipc:///x/y"}) == "ipc:///x/y"
    assert endpoint_from_environment({"ASYNCCKPT_ENDPOINT": ""}) is None
    assert endpoint_from_environment({}) is None
