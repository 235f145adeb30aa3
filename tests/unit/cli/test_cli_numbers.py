"""Numbers on the command line: sizes, durations and counts mean the same, and are refused the same, everywhere."""

from __future__ import annotations

import pytest

from asyncckpt import cli
from asyncckpt_worker import cli as worker_cli

SIZES = ("convert a b --to hf --max-shard-bytes", "doctor --state-bytes", "worker start --max-write-bandwidth")
DURATIONS = (
    *("gc x --older-than", "top --interval", "worker drain --timeout-s", "worker stop --timeout-s"),
    *("worker start --idle-exit-s", "worker start --keep-snapshots-s", "run --drain-timeout-s"),
)
POSITIVE = ("verify x --threads", "doctor --ranks", "prune x --keep", "prune x --keep 1 --keep-period")
COUNTS = ("worker start --while-pid", "worker start --port", "run --threads")


def value_of(option: str, text: str) -> object:
    parsed = cli.parser().parse_args([*f"{option}={text}".split(), *(["--", "true"] if option[:3] == "run" else [])])
    return getattr(parsed, option.rpartition("--")[2].replace("-", "_"))


@pytest.mark.parametrize("option", SIZES)
@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("5GiB", 5 << 30),
        ("5GB", 5 * 10**9),
        ("5g", 5 * 10**9),
        ("1.5TiB", 3 << 39),
        ("2000000b", 2_000_000),
        ("7MiB", 7 << 20),
    ],
)
def test_every_option_reads_sizes_the_same_way(option: str, text: str, nbytes: int) -> None:
    assert value_of(option, text) == nbytes


@pytest.mark.parametrize("option", DURATIONS)
@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("30m", 1800), ("1.5h", 5400), ("2d", 172800), ("0", 0)]
)
def test_every_option_reads_durations_the_same_way(option: str, text: str, seconds: float) -> None:
    assert value_of(option, text) == seconds


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "1e400", "9" * 5000, "much", "GB", ""])
@pytest.mark.parametrize("option", [*SIZES, *DURATIONS, *POSITIVE, *COUNTS])
def test_a_number_that_cannot_be_is_a_usage_error_that_says_what_is_expected(
    option: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        value_of(option, text)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "expected" in said and "invalid" not in said
    assert f"argument --{option.rpartition('--')[2]}" in said


@pytest.mark.parametrize("option", [*POSITIVE, *SIZES])
def test_zero_is_refused_where_one_is_the_least(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        value_of(option, "0")
    assert ended.value.code == 2 and "expected" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--idle-exit-s=nan", "--threads=x", "--port=65536", "--max-write-bandwidth=1"])
def test_the_worker_refuses_them_with_the_same_words(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        worker_cli.main([option])
    assert ended.value.code == 2 and "expected" in capsys.readouterr().err
