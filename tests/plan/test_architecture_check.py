"""Tests the checks of a user's architecture that are possible before its code runs."""

from pathlib import Path

import pytest

from tests.support.said import said
from trainkit.cli.main import main
from trainkit.config import load_config
from trainkit.launch import trainer_process

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def argv(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(
        "extends: quickstart.yaml\ndevice: cpu\nmodel: {architecture: 'mine.py:Mine'}\n"
    )
    return ["run.yaml", "--set", "parallel.tp=1"]


def test_its_file_must_be_there(argv, capsys):
    assert main(["check", *argv]) == 2
    said(capsys.readouterr().err)
    Path("mine.py").write_text("import nowhere")  # the package may exist only on the nodes
    assert main(["check", *argv]) == 0


@pytest.mark.parametrize(
    "words",
    [
        "check --set resources.gpus_per_node=2 --set parallel.cp=2 --set data.seq_len=10",
        *("plan --gpus 8 --gpu-type h100", "check --set model.architecture=gpt"),
    ],
    ids=["batch", "memory", "name"],
)
def test_what_is_known_without_its_code(argv, capsys, words):
    Path("mine.py").write_text("import nowhere")
    command, *options = words.split()
    assert main([command, *argv, *options]) == 2
    said(capsys.readouterr().err)


MODEL = "from tests.support.gpt import Gpt\nprint('loaded')\nimport atexit\natexit.register(print, 'over')\n"


def test_what_the_trainer_would_refuse(argv, monkeypatch, capsys):
    """`trainer/test_architecture_of_ones_own.py` tests everything that the trainer refuses."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    Path("mine.py").write_text(f"{MODEL}class Mine(Gpt):\n  attentions = ()")
    words = ["--set", "resources.gpus_per_node=2", "--set", "parallel.cp=2"]
    assert main(["check", *argv, *words]) == 2
    said(capsys.readouterr().err)


def test_a_file_that_takes_long_is_left_to_the_trainer(argv, monkeypatch, capsys):
    monkeypatch.setattr(trainer_process, "CHECK_TIMEOUT_S", 0.1)
    Path("mine.py").write_text("import time\ntime.sleep(100)")
    assert main(["check", *argv]) == 0
    said(capsys.readouterr().err)


@pytest.mark.parametrize("setting", ["launch.container=image.sqsh", "launch.setup=[cd /]"])
def test_the_environment_of_the_job_may_be_another(argv, setting):
    Path("mine.py").write_text("class Mine: ...")
    loaded = load_config("run.yaml", overrides=[setting], environ={})
    assert trainer_process.find_code_problems(loaded, Path()) == []


def test_files_of_a_copy_of_the_code(argv, tmp_path):
    """`submit RUN` tries the code that will run."""
    Path("mine.py").write_text("import nowhere")
    (tmp_path / "code").mkdir()
    loaded = load_config("run.yaml", environ={})
    (tmp_path / "code" / "mine.py").write_text("class Mine: ...")
    assert trainer_process.find_code_problems(loaded, tmp_path / "code") != []
