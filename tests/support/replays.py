"""Provides the options of the runs in tests of replays, and functions that call the commands."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.json_outputs import checked
from trainkit.cli.main import main
from trainkit.run.files import write_json
from trainkit.run.rundir import RunDir

OPTIONS = ["train.steps=6", "checkpoint.every_steps=2", "model.dropout=0.1", "train.device_batch_size=2"]
DDP, FSDP = ["parallel.dp_replicate=2", "parallel.dp_shard=1"], ["parallel.dp_shard=2"]


def call(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, Any]:
    """Return the exit code and the JSON of a command."""
    code = main([*argv, "--json"])
    out, err = capsys.readouterr()
    assert out, err
    name = "data-show" if argv[0] == "data" else argv[0]
    return code, checked("error" if out.startswith('{"error"') else name, out.splitlines()[-1])


def files_of(run: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_mtime_ns for path in run.rglob("*")}


def add_job(run: Path) -> None:
    write_json(
        RunDir(run).job_file, {"backend": "local", "name": "t", "cwd": str(run.parent), "attempts": []}
    )
