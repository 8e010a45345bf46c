"""Tests `trainkit generate`: tokens are chosen and shown one by one, with the model of any run."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.hf_models import need, save_model
from tests.support.json_outputs import checked
from tests.support.parity import Case, run_cases
from tests.support.programs import run_program
from tests.support.said import said
from trainkit.capabilities.export.command import chosen_checkpoint
from trainkit.capabilities.generate import worker as generate_module
from trainkit.capabilities.generate.worker import choose_token, generate, main
from trainkit.config.schema import RunConfig
from trainkit.errors import UsageError
from trainkit.run.rundir import RunDir

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0])


def choices(**options: Any) -> set[int]:
    generator = torch.Generator().manual_seed(0)
    return {choose_token(LOGITS, generator=generator, **options) for _ in range(200)}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 0.0}, {1}),
        ({"temperature": 5.0}, {0, 1, 2, 3}),
        ({"temperature": 5.0, "top_k": 2}, {1, 2}),
        ({"temperature": 1.0, "top_p": 0.5}, {1}),
        ({"temperature": 1.0, "top_p": 0.7}, {1, 2}),
        ({"temperature": 5.0, "top_k": 9, "top_p": 1.0}, {0, 1, 2, 3}),
    ],
)
def test_tokens_are_chosen_among_the_allowed_ones(options, expected):
    assert choices(**options) == expected


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_config_json_of_something_else_ends_no_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 97}')
    assert generate_module._end_tokens(RunConfig()) == []


@pytest.mark.parametrize("is_terminal", [False, True])
def test_characters_are_shown_once_they_are_complete(tmp_path, monkeypatch, is_terminal):
    out = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    written, shown = [*"a\t€\x1b[2J".encode(), 0xE2], []

    def next_logits(tokens: list[int]) -> torch.Tensor:
        shown.append(out.getvalue())
        return torch.nn.functional.one_hot(torch.tensor(written[len(tokens) - 2]), 257).float()

    monkeypatch.setattr(generate_module, "_load", lambda *asked: None)
    monkeypatch.setattr(generate_module, "logits_of", lambda *asked: next_logits)
    file = tmp_path / "config.yaml"
    file.write_text("name: test\n")
    values = {**VALUES, "prompt": "> ", "max_tokens": len(written)}
    generate({**values, "run": str(tmp_path), "config_file": str(file)})
    assert [item.removeprefix("> ") for item in shown[:6]] == ["", "a", "a\t", "a\t", "a\t", "a\t€"]
    escape = "\ufffd" if is_terminal else "\x1b"
    assert out.getvalue() == f"> a\t€{escape}[2J\ufffd\n"


VALUES: dict[str, Any] = {
    **{"checkpoint": "", "prompt": "def ", "max_tokens": 8, "temperature": 0.0, "top_k": None, "top_p": None},
    **{"seed": 0, "device": "cpu", "dtype": None, "tokenizer": None, "as_json": False, "ema": False},
}


def request(run: Path, **changes: Any) -> dict[str, Any]:
    """Return the request for the process that `trainkit generate` starts."""
    folder = RunDir(run)
    paths = {"run": str(run), "config_file": str(folder.attempt(1).config_file)}
    return {**VALUES, **paths, "checkpoint": str(chosen_checkpoint(folder, None).path), **changes}


@pytest.mark.slow
def test_checkpoints_of_every_layout_continue_a_prompt(tmp_path, capsys, monkeypatch):
    cases = [Case("alone", 1, {}), Case("tp", 2, {"tp": 2})]
    run_cases(tmp_path, cases, ("train.steps=2", "train.eval_every=null", "data.seq_len=32"))
    alone, split = (tmp_path / case.name for case in cases)
    capsys.readouterr()

    def answer(asked: dict[str, Any]) -> str:
        generate(asked)
        return capsys.readouterr().out

    argv = ("generate", str(alone), "def ", "--temperature", "0", "--max-tokens", "8", "--json")
    done = run_program(sys.executable, "-m", "trainkit", *argv)
    assert done.returncode == 0, done.stderr
    expected = checked("generate", done.stdout)
    assert (expected["num_tokens"], expected["stopped_by"]) == (8, "max_tokens")
    assert json.loads(answer(request(split, as_json=True)))["text"] == expected["text"]
    shown = answer(request(alone, temperature=1.0, seed=1))
    assert shown.startswith("def ")
    assert shown == answer(request(alone, temperature=1.0, seed=1))
    generate(request(alone, max_tokens=1000))
    assert "stopped after 32 tokens" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(request(alone, prompt="x" * 40))))
    assert main() == 2
    said(capsys.readouterr().err)


@pytest.mark.slow
@pytest.mark.xdist_group("transformers")
def test_models_of_transformers_continue_a_prompt(tmp_path, capsys):
    need("transformers", "peft")
    folder = save_model(tmp_path / "model")
    common = ("train.steps=2", "data.tokenizer=bytes", f"model.hf={folder}", "model.preset=tiny")
    lora = "model.lora={r: 4, target_modules: [q_proj]}"
    cases = [
        Case("theirs", 1, {}, ("model.architecture=transformers",)),
        Case("ours", 1, {}, ("model.architecture=llama",)),
        Case("lora", 1, {}, ("model.architecture=transformers", lora)),
    ]
    run_cases(tmp_path, cases, common, keep_labels=True)
    texts = {}
    for case in cases:
        capsys.readouterr()
        generate(request(tmp_path / case.name, max_tokens=9, as_json=True))
        texts[case.name] = json.loads(capsys.readouterr().out)["text"]
    assert texts["theirs"] == texts["ours"]
    assert texts["lora"]


def test_only_language_models_continue_a_prompt(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("task: ring.py:Ring\n")
    with pytest.raises(UsageError, match=r"task is ring\.py:Ring, but only language models"):
        generate({**VALUES, "run": str(tmp_path), "config_file": str(file)})
