"""The code in docs/ runs: quickstart, concepts and guides; each migration page from what was to what is there now.

So do the examples in docstrings.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import documented_code
import pytest
from command_calls import Command
from documented_code import ROOT, blocks, commands_answer, run, run_forked

from tests.warm_python import WarmPython

LIGHTNING = """
import lightning, torch

class Network(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, number):
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

network, loader = Network(), torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2)
"""
TRANSFORMERS = """
import torch, transformers

model = transformers.GPT2LMHeadModel(
    transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8, bos_token_id=0, eos_token_id=0)
)
data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 64
"""
HUB = """
import pathlib, torch, transformers
import asyncckpt

small = {
    "vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small))
transformers.MixtralForCausalLM(transformers.MixtralConfig(**small)).save_pretrained("mixtral-hub")

class Tokenizer:
    def save_pretrained(self, directory):
        pathlib.Path(directory, "tokenizer.json").write_text("{}")

def opened(path):
    assert pathlib.Path(path, "tokenizer.json").exists()
    found = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in found.state_dict().items())

tokenizer = Tokenizer()
with asyncckpt.SyncCheckpointer() as checkpointer:
    checkpointer.save({"model": model.state_dict()}, "runs/saving/step-300", step=300)
"""


def examples() -> Iterator[tuple[str, str]]:
    """Yield the place and the code of each `Example:` in a docstring of the packages."""
    for path in sorted([*(ROOT / "asyncckpt").rglob("*.py"), *(ROOT / "worker").rglob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                for found in re.finditer(
                    r"^Examples?:\n((?: {4}.*\n|\n)+)", f"{ast.get_docstring(node)}\n", re.MULTILINE
                ):
                    yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", textwrap.dedent(found.group(1))


@pytest.fixture
def environment(_leak_guard: object) -> Iterator[dict[str, str]]:
    """A job of its own, whose worker ends with the test."""
    found = documented_code.environment("docs")
    yield found
    drain = [sys.executable, "-m", "asyncckpt", "worker", "drain"]
    subprocess.run(drain, env=found, capture_output=True, timeout=60, check=False)


def test_quickstart_concepts_and_what_comes_from_dcp_run(
    tmp_path: Path, environment: dict[str, str], command: Command
) -> None:
    first, *others = blocks("quickstart")
    pages = ("concepts", "migration/dcp", "migration/torch_checkpointing")
    code = [first, first, "assert step == 30", *others, *(block for page in pages for block in blocks(page))]
    assert len(code) == 9  # the first one twice: the second time it resumes, and has nothing left to do
    said = run([sys.executable, "-c", "\n".join(code)], tmp_path, environment)
    assert said.count("on disk:") == 3
    made = {str(path.parent.relative_to(tmp_path / "runs")) for path in tmp_path.glob("runs/*/*/manifest.json")}
    quick = {"quick/step-10", "quick/step-20", "quick/step-30"}
    managed = {"managed/step-00000020", "managed/step-00000030"}
    assert made == quick | managed | {"concepts/step-1", "new/step-200", "both/step-200", "here/step-100"}
    lines = "".join(blocks("quickstart", "console")).splitlines()
    commands_answer(command, lines, tmp_path, environment)


def test_the_examples_in_docstrings_run(tmp_path: Path, environment: dict[str, str], warm_python: WarmPython) -> None:
    found = dict(examples())
    assert "asyncckpt/dcp/__init__.py:1" in found
    for number, code in enumerate(found.values()):
        (tmp_path / str(number)).mkdir()
        run_forked(warm_python, code, tmp_path / str(number), environment)


def test_the_guides_for_one_process_run_one_after_the_other(
    tmp_path: Path, environment: dict[str, str], command: Command, warm_python: WarmPython
) -> None:
    pages = ("saving", "resuming", "overlap", "manager", "dcp", "unchanged-data")
    code = [block for page in pages for block in blocks(f"guides/{page}")]
    assert len(code) == 9
    said = run_forked(warm_python, "\n".join(code), tmp_path, environment)
    assert "resumes after step 300" in said
    made = {str(path.parent.relative_to(tmp_path / "runs")) for path in tmp_path.glob("runs/*/*/manifest.json")}
    assert made == {
        *(f"saving/step-{step}" for step in (100, 200, 300)),
        *(f"managed/step-{step:08d}" for step in (100, 200, 300)),
        *("overlap/step-10", "overlap/step-20", "dcp/step-300"),
        *(f"lora/step-{step}" for step in (1, 2, 3)),
    }
    (tmp_path / "base").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "base" / name).write_text("{}")
    lines = "".join(blocks("guides/converting", "console")).splitlines()
    commands_answer(command, lines, tmp_path, environment)


@pytest.mark.timeout(600)
def test_the_exports_of_the_guide_on_conversions_run(tmp_path: Path, environment: dict[str, str]) -> None:
    pytest.importorskip("transformers", reason="`make test-frameworks` installs transformers")
    code = blocks("guides/converting")
    assert len(code) == 3
    run([sys.executable, "-c", "\n".join([HUB, *code, "opened('hub')"])], tmp_path, environment, timeout_s=300)
    assert (tmp_path / "stacked" / "manifest.json").exists()


def test_what_comes_from_torch_checkpointing_is_what_its_page_says(tmp_path: Path, environment: dict[str, str]) -> None:
    pytest.importorskip("torch_checkpointing", reason="`make bench-compare` installs torch_checkpointing")
    (before,) = blocks("migration/torch_checkpointing", 'python title="before"')
    body = "".join(f"    {line}\n" for line in f"model = torch.nn.Linear(16, 4)\n{before}".splitlines())
    (tmp_path / "before.py").write_text(
        f"import torch\n\nif __name__ == '__main__':\n{body}    assert loaded['step'] == 100\n"
    )
    run([sys.executable, "before.py"], tmp_path, environment)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("page", "needs", "prelude", "made"),
    [
        ("lightning", ("lightning",), LIGHTNING, "runs/a/last.ckpt"),
        ("transformers", ("transformers", "accelerate"), TRANSFORMERS, "runs/hf/checkpoint-20"),
    ],
)
def test_a_training_begun_with_the_frameworks_own_checkpoints_goes_on_with_ours(
    page: str, needs: tuple[str, ...], prelude: str, made: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    for module in needs:
        pytest.importorskip(module, reason=f"`make test-frameworks` installs {module}")
    code = [*blocks(f"migration/{page}", 'python title="before"'), *blocks(f"migration/{page}", 'python title="after"')]
    assert len(code) == 2
    code[0] = code[0].replace("resume_from_checkpoint=True", "resume_from_checkpoint=False")
    check = "global_step = trainer.global_step if hasattr(trainer, 'global_step') else trainer.state.global_step\n"
    code = [re.sub(r"\b(\d+)00\b", r"\1", block) for block in code]  # in a hundredth of the steps
    text = f"{prelude}\n{code[0]}\n{check}assert global_step == 10\n{code[1]}\n{check}assert global_step == 20\n"
    run([sys.executable, "-c", text], tmp_path, environment, timeout_s=300)
    assert (tmp_path / made).exists()
