"""Tests that one file defines an architecture for every layout."""

import shutil
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from tests.support import gpt
from tests.support.models import SEQ_LEN, fake_mesh, nano_shape
from tests.support.parity import Case, assert_same_curves, run_cases
from tests.support.said import said
from trainkit.config import load_config
from trainkit.config.running import ParallelConfig
from trainkit.errors import EXIT_NO_RESTART, TrainkitError
from trainkit.run.files import write_json
from trainkit.run.rundir import RunDir
from trainkit.trainer import causal_lm
from trainkit.trainer.__main__ import exit_code_of
from trainkit.trainer.build import build_task
from trainkit.trainer.models import load_architecture, refuse_unsupported_layout
from trainkit.trainer.models.model import Role
from trainkit.trainer.parallel.tensor import apply_tensor_parallel
from trainkit.trainer.progress import Progress
from trainkit.trainer.user_code import TaskError

FILE = Path(gpt.__file__)
CASES = [
    Case("tp", 2, {"tp": 2}),
    Case("pp", 2, {"pp": 2, "pp_schedule": "interleaved_1f1b"}),
    Case("cp-shard", 2, {"cp": 2, "activation_checkpointing": "full"}),
]


@pytest.mark.slow
def test_layouts(tmp_path):
    common = [
        f"model.architecture={FILE}:Gpt",
        "model.tie_embeddings=true",
        "model.dropout=0.1",
        "train.steps=3",
    ]
    run_cases(tmp_path, [Case("alone", 1, {}), *CASES], common)
    assert_same_curves(tmp_path, CASES)


@pytest.mark.parametrize(
    "name", ["nowhere.py:Gpt", f"{FILE}:Nothing", f"{FILE}:Mlp"], ids=["file", "class", "kind"]
)
def test_what_is_none(name):
    with pytest.raises(TrainkitError) as error:
        load_architecture(name)
    assert error.value.exit_code == EXIT_NO_RESTART
    said(error.value.message)


GPT = "from tests.support.gpt import Gpt\n"
INIT = f"{GPT}class Mine(Gpt):\n  def __init__(self, shape, seq_len, stage=None):\n    super().__init__(shape"
REFUSED = {
    "no-model": ([], "class Mine: ..."),
    "incomplete": ([], "from trainkit.trainer.models.model import Model\nclass Mine(Model): ..."),
    "no-attention": (["parallel.cp=2"], f"{GPT}class Mine(Gpt):\n  attentions = ()"),
    "some-attention": (
        ["parallel.cp=2"],
        f"{GPT}class Mine(Gpt):\n  attentions = property(lambda self: [self.layers[0].attention])",
    ),
    "no-attend": (
        ["parallel.cp=2"],
        f"{GPT}class Mine(Gpt):\n  attentions = property(lambda self: [layer.mlp for layer in self.layers])",
    ),
    "whole-in-each-stage": (["parallel.pp=2"], f"{INIT}, seq_len)"),
    "head-in-each-stage": (
        ["parallel.pp=2"],
        f"from dataclasses import replace\n{INIT}, seq_len, stage and replace(stage, has_head=True))",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_the_data_is_prepared(tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(causal_lm, "open_dataset", lambda *args: pytest.fail("the data was opened"))
    settings, code = REFUSED[case]
    Path("mine.py").write_text(code)
    settings = ["model.architecture=mine.py:Mine", *settings]
    with pytest.raises(TaskError) as caught:
        build_task(load_config("quickstart", overrides=settings, environ={}).config)
    said(f"{caught.value.message}\n{caught.value.hint}")
    assert exit_code_of(caught.value, Progress().current) == EXIT_NO_RESTART


@pytest.mark.parametrize("is_tied", ["true", "false"])
def test_every_layout_is_supported(is_tied):
    for schedule in ("1f1b", "zbv"):
        settings = ["parallel.cp=2", "parallel.pp=2", f"parallel.pp_schedule={schedule}"]
        settings += [f"model.architecture={FILE}:Gpt", f"model.tie_embeddings={is_tied}"]
        config = load_config("quickstart", overrides=settings, environ={}).config
        refuse_unsupported_layout(config, gpt.Gpt)


def test_a_run_has_the_code_that_it_was_submitted_with(tmp_path, monkeypatch):
    """`launch/test_snapshot.py` tests which file of a copy a path names."""
    run, code = RunDir(tmp_path / "run"), tmp_path / "run" / "code"
    code.mkdir(parents=True)
    shutil.copy(FILE, code / "gpt.py")
    write_json(run.job_file, {"code": {"code": str(code), "workdir": str(code)}, "attempts": []})
    monkeypatch.chdir(tmp_path)
    Path("gpt.py").write_text("")  # the file was edited after the submission
    assert load_architecture("gpt.py:Gpt", run).__name__ == "Gpt"
    with pytest.raises(TrainkitError, match="does not define Gpt as a subclass of Model"):
        load_architecture("gpt.py:Gpt")


class Forgetful(gpt.Gpt):
    """Does not declare how the position embedding is split."""

    TENSOR_PLAN: ClassVar[dict[str, Role]] = {
        name: role for name, role in gpt.Gpt.TENSOR_PLAN.items() if name != "places"
    }


def test_a_plan_with_a_gap_is_refused():
    with torch.device("meta"):
        model = Forgetful(nano_shape(), SEQ_LEN)
    with fake_mesh() as mesh, pytest.raises(TrainkitError) as caught:
        apply_tensor_parallel(model, mesh, ParallelConfig())
    said(caught.value.message)
