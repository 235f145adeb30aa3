"""convert, diff, inspect and verify on checkpoints of any kind: what they print and their exit codes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import foreign_samples
import pytest
import torch
from command_calls import Command

import asyncckpt

pytest.importorskip("numpy")
pytest.importorskip("safetensors")


@pytest.fixture
def dcp(tmp_path: Path) -> Path:
    state = {"model": {"w": torch.arange(6.0).reshape(2, 3)}, "optim": {"lr": 0.1}, "step": 7}
    foreign_samples.save_dcp(state, tmp_path / "dcp")
    return tmp_path / "dcp"


def test_dcp_becomes_a_torch_file_and_back_by_command_whole_or_in_part(
    dcp: Path, tmp_path: Path, command: Command
) -> None:
    code, out, _ = command("convert", dcp, tmp_path / "a.pt", "--to", "torch")
    assert code == 0 and "dcp to torch, 1 tensors, 2 objects" in out
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    assert (found["step"], found["optim"]) == (7, {"lr": 0.1})
    code, out, _ = command("convert", tmp_path / "a.pt", tmp_path / "again", "--to", "dcp", "--no-read-back")
    assert code == 0 and "compared, not read back" in out
    target: Any = {"model": {"w": torch.zeros(2, 3)}, "optim": {"lr": 0}, "step": 0}
    foreign_samples.load_dcp(target, tmp_path / "again")
    assert torch.equal(target["model"]["w"], torch.arange(6.0).reshape(2, 3))
    assert (target["optim"]["lr"], target["step"]) == (0.1, 7)
    assert command("convert", dcp, tmp_path / "b.pt", "--to", "torch", "--keys", "model", "--keys", "step")[0] == 0
    assert set(torch.load(tmp_path / "b.pt", weights_only=True)) == {"model", "step"}


def test_ls_says_what_other_libraries_directories_are(tmp_path: Path, command: Command) -> None:
    state = {"x": torch.ones(2)}
    foreign_samples.save_dcp(state, tmp_path / "a")
    foreign_samples.save_dcp(state, tmp_path / "deep" / "b")
    with asyncckpt.SyncCheckpointer(rank_info=asyncckpt.RankInfo(0, 1)) as checkpointer:
        checkpointer.save(state, tmp_path / "ours")
    expected = {"ours": ("committed", "asyncckpt"), "a": ("foreign", "dcp")}
    for options, more in ((), {}), (("-r",), {"b": ("foreign", "dcp")}):
        code, rows = command.json("ls", tmp_path, *options)
        assert code == 0
        assert {os.path.basename(row["path"]): (row["state"], row["kind"]) for row in rows} == expected | more
    code, out, _ = command("ls", tmp_path / "a")
    assert code == 0 and "foreign: dcp" in out


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("absent", "x", "--to", "torch"), 4),
        (("dcp", "x", "--to", "zip"), 2),
        (("dcp", "x"), 2),
        (("dcp", "x", "--to", "torch", "--max-shard-bytes", "5GB"), 2),
        (("dcp", "x", "--to", "torch", "--rename", "a"), 2),
        (("dcp", "dcp", "--to", "torch"), 2),
        (("dcp", "taken", "--to", "torch"), 1),
        (("dcp", "x", "--to", "safetensors"), 1),
        (("damaged.pt", "x", "--to", "dcp"), 3),
        (("dcp", "no/where/x", "--to", "torch"), 4),
    ],
)
def test_exit_codes_say_what_went_wrong(
    arguments: tuple[str, ...],
    code: int,
    dcp: Path,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("x")
    torch.save({"x": torch.ones(1000)}, "damaged.pt")
    data = (tmp_path / "damaged.pt").read_bytes()
    (tmp_path / "damaged.pt").write_bytes(data[: len(data) // 2])
    found, _, err = command("convert", *arguments)
    assert found == code
    assert err
    assert not (tmp_path / "x").exists()


def test_names_are_renamed_from_the_command_line(dcp: Path, tmp_path: Path, command: Command) -> None:
    (tmp_path / "map.json").write_text(json.dumps({"step": "epoch"}))
    arguments = ("--rename", "model.=net.", "--key-map", tmp_path / "map.json", "--keys", "model", "--keys", "step")
    code, out, _ = command("convert", dcp, tmp_path / "a", "--to", "asyncckpt", *arguments, "--json")
    assert code == 0
    assert json.loads(out)["tensors"] == 1
    assert asyncckpt.open_checkpoint(tmp_path / "a").keys() == ["net.w", "epoch"]


def test_what_is_left_out_and_changed_is_printed(tmp_path: Path, command: Command) -> None:
    weight = torch.ones(3)
    torch.save({"w": weight, "tied": weight, "step": 3}, tmp_path / "a.pt")
    code, _, err = command("convert", tmp_path / "a.pt", tmp_path / "b", "--to", "safetensors")
    assert code == 1
    assert "step" in err
    code, out, _ = command("convert", tmp_path / "a.pt", tmp_path / "b", "--to", "safetensors", "--partial")
    assert code == 0
    assert "left out: step" in out
    assert "tied (= w)" in out


def test_a_sentence_with_very_many_names_is_cut_and_json_has_it_whole(tmp_path: Path, command: Command) -> None:
    names = [f"parameter-{n}" for n in range(1000)]
    torch.save({name: torch.nn.Parameter(torch.ones(1)) for name in names}, tmp_path / "a.pt")
    code, out, _ = command("convert", tmp_path / "a.pt", tmp_path / "b", "--to", "asyncckpt")
    assert code == 0
    (line,) = (line for line in out.splitlines() if "changed" in line)
    assert names[100] in line and names[999] not in line and line.endswith("... (--json prints all)")
    _, out, _ = command("convert", tmp_path / "a.pt", tmp_path / "c", "--to", "asyncckpt", "--json")
    (said,) = json.loads(out)["changed"]
    assert said.endswith(", ".join(names))


def test_diff_of_equal_and_of_different_checkpoints(dcp: Path, tmp_path: Path, command: Command) -> None:
    command("convert", dcp, tmp_path / "a", "--to", "asyncckpt")
    code, out, _ = command("diff", dcp, tmp_path / "a")
    assert (code, out) == (0, "equal: 3 leaves\n")
    state = {"model": {"w": torch.arange(6.0).reshape(2, 3) * 2}, "optim": {"lr": 0.1}, "step": 8}
    torch.save(state, tmp_path / "b.pt")
    code, out, _ = command("diff", dcp, tmp_path / "b.pt")
    assert code == 1
    assert "2 of 3 leaves differ" in out
    assert out.splitlines()[2].split() == ["model.w", "value", "float32[2,", "3]", "float32[2,", "3]", "5"]
    code, out, _ = command("diff", dcp, tmp_path / "b.pt", "--json", "--fast")
    assert [row["fqn"] for row in json.loads(out)["differences"]] == ["step"]
    assert command("diff", dcp, tmp_path / "b.pt", "--keys", "optim")[0] == 0
    assert command("diff", dcp, tmp_path / "absent")[0] == 4
    assert command("diff", dcp, tmp_path / "b.pt", "--keys", "absent")[0] == 1


def test_rules_dtype_and_config_files_are_given_by_options(dcp: Path, tmp_path: Path, command: Command) -> None:
    rules = [{"sources": "w", "targets": ["a.{n}", "b.{n}"], "stack_dim": 1}, {"sources": "a.x", "targets": "a.y"}]
    (tmp_path / "rules").write_text(json.dumps(rules[:1]))
    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    (tmp_path / "generation_config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    given = ("--keys", "model", "--rename", "model.=", "--rules", tmp_path / "rules", "--dtype", "float64")
    assert command("convert", dcp, tmp_path / "a.pt", "--to", "torch", *given)[0] == 0
    whole = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)
    expected = {f"{name}.{n}": whole[i : i + 1, n] for i, name in enumerate("ab") for n in range(3)}
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    beside = ("--config", tmp_path, "--tokenizer", tmp_path)
    code, report = command.json("convert", dcp, tmp_path / "hub", "--to", "hf", *given, *beside)
    assert code == 0 and report["tensors"] == 6
    assert report["copied"] == ["config.json", "generation_config.json", "tokenizer.json"]
    assert json.loads((tmp_path / "hub" / "config.json").read_text()) == {"model_type": "x", "dtype": "float64"}
    (tmp_path / "rules").write_text(json.dumps(rules))
    code, _, err = command("convert", dcp, tmp_path / "b.pt", "--to", "torch", *given)
    assert code == 1 and "rules need 1 tensors that are not there:\n  a.x" in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--to", "hf", "--tokenizer", "."), "--tokenizer is for exports to Hugging Face directories: give --config"),
        (("--to", "hf", "--generation-config", "."), "--generation-config is for exports"),
        (("--to", "torch", "--config", "."), "--config is for --to hf, of all tensors: leave out --to torch"),
        (("--to", "hf", "--config", ".", "--partial"), "leave out --partial"),
        (("--to", "hf", "--rules", "broken"), "--rules broken: not JSON"),
        (("--to", "hf", "--rules", "object"), "--rules object: expected a list of objects with sources and targets"),
        (("--to", "hf", "--rules", "unknown"), "--rules unknown: expected a list"),
    ],
)
def test_options_of_exports_that_do_not_go_together_are_refused(
    options: tuple[str, ...], said: str, dcp: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken").write_text("[")
    (tmp_path / "object").write_text("{}")
    (tmp_path / "unknown").write_text('[{"sources": "a", "targets": "b", "axis": 1}]')
    code, _, err = command("convert", dcp, tmp_path / "out", *options)
    assert code != 0 and said in err, err
    assert not (tmp_path / "out").exists()
