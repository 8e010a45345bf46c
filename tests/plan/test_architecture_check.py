"""What can be known of an architecture of one's own before its code runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainkit.cli.main import main


@pytest.fixture
def argv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    (tmp_path / "run.yaml").write_text(
        "extends: quickstart.yaml\ndevice: cpu\nmodel: {architecture: 'mine.py:Mine'}\n"
    )
    return ["run.yaml", "--set", "parallel.tp=1"]


def test_its_file_must_be_there(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *argv]) == 2
    err = capsys.readouterr().err
    assert "run.yaml:3: model.architecture: is mine.py:Mine, but there is no file" in err
    Path("mine.py").write_text("")
    assert main(["check", *argv]) == 0


def test_how_the_batch_is_shared_is_known_of_any(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text("")
    split = ["resources.gpus_per_node=2", "parallel.cp=2", "data.seq_len=10"]
    assert main(["check", *argv, *(word for item in split for word in ("--set", item))]) == 2
    assert "data.seq_len 10 is not a multiple of 2 x 2" in capsys.readouterr().err


def test_its_memory_is_not_known(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *argv, "--gpus", "8", "--gpu-type", "h100"]) == 2
    assert "is mine.py:Mine, whose memory is unknown" in capsys.readouterr().err


def test_a_name_that_is_none(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *argv, "--set", "model.architecture=gpt"]) == 2
    assert "llama or FILE.py:CLASS" in capsys.readouterr().err
