"""`trainkit check --simulate-world N`: a step as one rank of a job that need not fit here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainkit.cli.main import main

SHARDS = ("--set", "train.device_batch_size=1", "--set", "train.global_batch_size=64")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("extends: quickstart.yaml\n")
    return "run.yaml"


@pytest.mark.slow
def test_one_of_64_ranks(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["check", config, "--simulate-world", "64", "--rank", "63", *SHARDS, "--json"]
    assert main(argv) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["plan"]["layout"]["dp_shard"] == value["plan"]["world_size"] == 64
    assert value["plan"]["device"] == "cuda"
    assert value["simulation"]["rank"] == 63
    assert value["simulation"]["collectives"] == {"all_gather": 1, "all_reduce": 1, "reduce_scatter": 1}


@pytest.mark.slow
def test_for_a_person(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--set", "model.preset=nano", "--set", "data.seq_len=64", "--set", "train.global_batch_size=8")
    assert main(["check", config, "--simulate-world", "2", "--set", "parallel.tp=2", *small]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("layout: one replica on one group of 2 processes (2 tensor-parallel)")
    assert lines[1].startswith("rank 0 of 2: ")
    assert lines[2].startswith("peak memory 0.")
    assert lines[3].startswith("collectives per step: ")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--simulate-world", "12"], "is 12, which is not a multiple of 8 GPUs per node"),
        (["--simulate-world", "2", "--rank", "2"], "--rank is 2, but there are 2 ranks"),
        (["--rank", "1"], "--rank requires --simulate-world"),
        (["--simulate-world", "2", "--no-estimate"], "conflicts with --estimate and --show-origin"),
        (["--simulate-world", "64", *SHARDS, "--set", "parallel.tp=8"], "does not divide model.num_heads 4"),
    ],
)
def test_what_cannot_be(
    config: str, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert main(["check", config, *argv]) == 2
    assert message in capsys.readouterr().err
