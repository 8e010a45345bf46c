"""Tests that mistakes in a user's task are found with a few samples on a CPU and reported with their line."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.said import said
from trainkit.capabilities.task_check.worker import Smoke, smoke
from trainkit.cli.main import main
from trainkit.config import load_config
from trainkit.config.schema import RunConfig
from trainkit.errors import Problem
from trainkit.trainer.task_check import definite_problem

CODE = """
import torch
from torch import nn
from trainkit.task import Loss, Task

class Mine(Task):
    def __init__(self, config, *, width=4):
        super().__init__(config)
        self.width = width

    def build_model(self):
        return nn.Sequential(nn.Linear(3, self.width), nn.Linear(self.width, 1))

    def train_dataset(self):
        return [(torch.randn(3), torch.ones(1)) for _ in range(10)]

    def loss(self, model, batch):
        x, y = batch
        error = (model(x) - y) ** 2
        return Loss(error.sum(), error.numel(), {"worst": error.max()})
"""
DATASET = "        return [(torch.randn(3), torch.ones(1)) for _ in range(10)]"
MODEL = "        return nn.Sequential(nn.Linear(3, self.width), nn.Linear(self.width, 1))"
LOSS = '        return Loss(error.sum(), error.numel(), {"worst": error.max()})'

TURNS = """

    def turns(self):
        return ["all"]

    def loss_for(self, optimizer, model, batch):
        return self.loss(model, batch)
"""
OWN_STEP = """

    def optimizers(self, parameters):
        return {"all": torch.optim.SGD(parameters.values(), lr=0.1)}

    def after_step(self, model, parameters):
        parameters["0.weight"].clamp_(-1, 1)
        self.seen = self.step

    def state_dict(self):
        return {"seen": getattr(self, "seen", None)}

    def load_state_dict(self, state):
        self.seen = state["seen"]
"""
AT_SUBMIT = {
    "turns": (LOSS, LOSS + TURNS),
    "no loss of a turn": (LOSS, LOSS + OWN_STEP + TURNS.replace("loss_for", "loss_of")),
    "half a state": (LOSS, LOSS + "\n\n    def state_dict(self):\n        return {}"),
    "no class": ("class Mine", "class Other"),
    "syntax": ("def loss(self, model, batch):", "def loss(self, model, batch)"),
    "import": ("import torch\n", "import torch\nimport not_installed\n"),
    "no loss": ("def loss(", "def losses("),
    "arguments": ("width=4", "depth=4"),
}
IN_A_SMOKE_TEST = {
    "name": ("super().__init__(config)", "self.depth = DEPTH"),
    "no model": (MODEL, "        nn.Linear(3, 1)"),
    "bf16 model": (MODEL, MODEL + ".bfloat16()"),
    "meta model": (MODEL, "        with torch.device('meta'):\n    " + MODEL),
    "frozen model": (MODEL, MODEL + ".requires_grad_(False)"),
    "seeded model": (MODEL, "        torch.seed()\n" + MODEL),
    "no length": (DATASET, "        return iter([1])"),
    "stream that differs": (DATASET, "        return Unordered()"),
    "stream that forgets": (DATASET, "        return Forgetful()"),
    "empty stream": (DATASET, "        return Stream(0)"),
    "empty": (DATASET, "        return []"),
    "unreadable": (DATASET, "        return Broken()"),
    "changing": (DATASET, "        return Changing()"),
    "ragged": (DATASET, "        return [torch.ones(i % 3 + 1) for i in range(9)]"),
    "unpicklable": (LOSS, LOSS + "\n\n    def collate(self, items):\n        return lambda: items"),
    "a tensor": (LOSS, "        return error.sum()"),
    "mean": ("error.sum()", "error.mean()"),
    "batches": ("error.numel()", "1"),
    "vector": ("error.sum()", "error"),
    "detached": ("error.sum()", "error.sum().detach()"),
    "unused": ("model(x)", "model[0](x)[:, :1]"),
    "not a number": ("error.sum()", "error.sum() / 0"),
    "wrong shape": ("model(x)", "model(x[:, :2])"),
    "taken name": ('"worst"', '"lr"'),
    "optimizer": (
        LOSS,
        LOSS
        + """

    def optimizers(self, parameters):
        return torch.optim.SGD([parameters["0.weight"]], lr=0.1)
""",
    ),
    "after a step": (
        LOSS,
        LOSS + "\n\n    def after_step(self, model, parameters):\n        parameters['2.weight'].zero_()",
    ),
    "unsaved": (
        LOSS,
        LOSS
        + "\n\n    def state_dict(self):\n        return {'task': self}"
        + "\n\n    def load_state_dict(self, state):\n        pass",
    ),
    "not loaded": (
        LOSS,
        LOSS
        + "\n\n    def state_dict(self):\n        return {'a': 1}"
        + "\n\n    def load_state_dict(self, state):\n        self.a = state['b']",
    ),
    "overlap": (LOSS, LOSS + "\n\n    def layers(self, model):\n        return [model, model[0]]"),
    "options": (LOSS, LOSS + '\n\n    def parameter_options(self, name, p):\n        return {"lr": 1}'),
}
HELPERS = """
from random import SystemRandom
from torch.utils.data import Dataset

class Broken(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return {}["column"]

class Changing(Broken):
    reads = 0
    def __getitem__(self, index):
        Changing.reads += 1
        return torch.full((3,), float(Changing.reads)), torch.ones(1)

class Stream:
    def __init__(self, count=7):
        self.start, self.count = 0, count
    def __iter__(self):
        for self.at in range(self.start, self.count):
            yield torch.full((3,), float(self.at)), torch.ones(1)
    def state_dict(self):
        return {"at": self.at}
    def load_state_dict(self, state):
        self.start = state["at"] + 1

class Forgetful(Stream):
    def load_state_dict(self, state):
        pass

class Unordered:
    def __iter__(self):
        for _ in range(7):
            yield torch.full((3,), SystemRandom().random()), torch.ones(1)
"""


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in [name for name in sys.modules if name.endswith("mine")]:
        del sys.modules[name]


def config_of(code: str, *overrides: str) -> RunConfig:
    Path("mine.py").write_text(code + HELPERS)
    options = ["task=mine.py:Mine", "precision.dtype=fp32", *overrides]
    return load_config("quickstart", overrides=options, environ={}).config


def shown(problem: Problem) -> str:
    """Return a problem without random numbers and without the sentences of torch and pickle."""
    foreign = r"(RuntimeError: |another process: ).*?(?= \([^()]*mine\.py:\d+\)|$)"
    message = re.sub(r"0[.]\d{4,}", "0.…", re.sub(foreign, r"\1…", problem.message))
    return f"{message}\n\nhint: {problem.hint}"


def test_a_good_task() -> None:
    for overrides in ((), ("task_args.width=8",), ("precision.dtype=bf16",)):
        config = config_of(CODE, *overrides)
        assert definite_problem(config) is None
        assert list(Smoke(config).problems()) == []
    assert list(Smoke(config_of(CODE.replace(DATASET, "        return Stream()"))).problems()) == []


def test_steps_of_its_own() -> None:
    assert Smoke(config_of(CODE.replace(LOSS, LOSS + OWN_STEP))).problems() == []
    by_turns = CODE.replace(LOSS, LOSS + OWN_STEP + TURNS).replace("def loss(", "def loss_of(")
    assert Smoke(config_of(by_turns.replace("self.loss(", "self.loss_of("))).problems() == []


def test_an_optimizer_without_a_turn_in_the_first_step() -> None:
    step = """

    def optimizers(self, parameters):
        return {
            name: torch.optim.SGD([p for key, p in parameters.items() if key.startswith(name[1])], lr=0.1)
            for name in ("a0", "a1")
        }

    def turns(self):
        return ["a0", "a1"] if self.step % 2 == 0 else ["a0"]

    def loss_for(self, optimizer, model, batch):
        out = model[0](batch[0]) if optimizer == "a0" else model(batch[0])
        return Loss(out.square().sum(), out.numel())
"""
    assert Smoke(config_of(CODE.replace(LOSS, LOSS + step))).problems() == []
    none = step.replace('["a0"]\n', "[]\n")
    without = CODE.replace(LOSS, LOSS + none).replace("def loss(", "def other(")
    [problem] = Smoke(config_of(without)).problems()
    said(problem.message)
    both = config_of(
        CODE.replace(LOSS, LOSS + step), "optimizer.state_dtype=bf16", "optimizer.betas=[0.9,0.95]"
    )
    [problem] = Smoke(both).problems()
    assert problem.key == "optimizer.state_dtype"
    said(problem.hint)
    unused = step.replace("model[0](batch[0])", "(model[0].weight * 2)")
    [problem] = Smoke(config_of(CODE.replace(LOSS, LOSS + unused))).problems()
    said(problem.message)


@pytest.mark.parametrize("case", AT_SUBMIT)
def test_found_by_submit(case: str) -> None:
    before, after = AT_SUBMIT[case]
    assert before in CODE
    overrides = ["task_args.width=4"] if case == "arguments" else []
    problem = definite_problem(config_of(CODE.replace(before, after), *overrides))
    said(f"{problem.key}: {shown(problem)}")


@pytest.mark.parametrize("case", IN_A_SMOKE_TEST)
def test_found_by_a_smoke_test(case: str) -> None:
    before, after = IN_A_SMOKE_TEST[case]
    assert before in CODE
    config = config_of(CODE.replace(before, after))
    assert definite_problem(config) is None
    problem = next(iter(Smoke(config).problems()))
    said(shown(problem))


@pytest.mark.parametrize(
    ("task", "message"),
    [("nowhere.py:Mine", "there is no file"), ("nowhere.task:Mine", "there is no module nowhere")],
)
def test_nowhere(task: str, message: str) -> None:
    problem = definite_problem(config_of(CODE, f"task={task}"))
    assert message in problem.message
    assert problem.hint


def test_a_module_and_the_files_next_to_it() -> None:
    Path("package").mkdir()
    Path("package/numbers_of_mine.py").write_text("WIDTH = 5\n")
    code = "from package.numbers_of_mine import WIDTH\n" + CODE.replace("width=4", "width=WIDTH") + HELPERS
    Path("package/mine.py").write_text(code)
    config = config_of(CODE, "task=package.mine:Mine")
    assert list(Smoke(config).problems()) == []


def test_an_error_only_here_does_not_stop_a_submission() -> None:
    config = config_of(
        CODE.replace("super().__init__(config)", 'super().__init__(config); open("/nowhere/x")')
    )
    assert definite_problem(config) is None
    [problem] = Smoke(config).problems()
    assert "FileNotFoundError" in problem.message
    assert "mine.py:8" in problem.message


SHARDS = """
import os

class Shards(torch.utils.data.IterableDataset):
    # As a WebDataset, which divides its files by rank or refuses to be read by several.
    def __init__(self, nodesplitter=None):
        self.nodesplitter = nodesplitter
    def __iter__(self):
        if self.nodesplitter is None and int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise ValueError("you need to add an explicit nodesplitter to your input pipeline")
        for file in range(6) if self.nodesplitter is None else self.nodesplitter(range(6)):
            for _ in range(3):
                yield torch.full((3,), float(file)), torch.ones(1)
"""
CALLS_MODEL = """

    def after_step(self, model, parameters):
        model(torch.ones(1, 3))

    def val_dataset(self):
        return self.train_dataset()[:3]
"""
BY_RANK = 'int(os.environ.get("RANK", 0))'
ON_TWO_RANKS = {
    "a good task": (MODEL, MODEL),
    "own steps": (LOSS, LOSS + OWN_STEP + TURNS),
    "whole stream": (DATASET, "        return Shards(nodesplitter=lambda src: src)"),
    "model in after_step": (LOSS, LOSS + CALLS_MODEL),
    "no splitter": (DATASET, "        return Shards()"),
    "split": (DATASET, f"        return Shards(nodesplitter=lambda src: list(src)[{BY_RANK}::2])"),
    "model by rank": (MODEL, f"        torch.manual_seed({BY_RANK})\n" + MODEL),
    "metric by rank": ('{"worst"', f"{{'worst_' + str({BY_RANK})"),
    "error on a rank": ("x, y = batch", f"x, y = batch\n        assert {BY_RANK} == 0, 'only here'"),
    "end of a rank": ("x, y = batch", f"x, y = batch\n        {BY_RANK} and os._exit(3)"),
    "state by rank": (LOSS, LOSS + OWN_STEP.replace('getattr(self, "seen", None)', BY_RANK)),
}


@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize("case", ON_TWO_RANKS)
def test_found_by_two_ranks(case: str) -> None:
    before, after = ON_TWO_RANKS[case]
    assert before in CODE
    problems, tried = smoke(config_of(CODE.replace(before, after) + SHARDS))
    # The losses depend on the version of torch.
    said("\n".join(map(shown, problems)) or re.sub(r"\d\.\d+", "LOSS", tried))


@pytest.mark.parametrize("setting", ["optimizer.name=adamw_8bit", "optimizer.state_dtype=bf16"])
def test_an_optimizer_of_the_config_is_refused_at_submit_for_a_task_with_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], setting: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(CODE + OWN_STEP)
    Path("run.yaml").write_text("name: t\ndevice: cpu\ntask: mine.py:Mine\ntrain: {steps: 2}\n")
    assert main(["check", "run.yaml"]) == 0
    assert main(["check", "run.yaml", "--set", setting]) == 2
    said(capsys.readouterr().err)
    assert main(["check", "run.yaml", "--set", setting, "--set", "launch.setup=[cd .]"]) == 0
