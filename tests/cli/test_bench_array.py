"""`trainkit bench layouts` on Slurm: what is submitted, and the summary of what has run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.benches import train_made_up
from trainkit.backends import slurm as slurm_backend
from trainkit.bench import run_bench
from trainkit.bench.run_bench import read_bench
from trainkit.cli.main import main
from trainkit.run.files import read_json, write_json
from trainkit.run.group import RunGroup, create_task_run
from trainkit.run.rundir import RunDir

CONFIG = """
name: small
device: cpu
data: {source: text.txt, seq_len: 32}
train: {device_batch_size: 2, global_batch_size: 8}
"""
TYPED = ["bench", "layouts", "small.yaml", "--backend", "sbatch", "--gpus-per-node", "2", "--no-snapshot"]
LENGTH = ["--steps", "10", "--warmup", "2", "--out", "out"]
END = {"state": "finished", "action": "stopped", "exit_code": 0, "reason": "all ranks", "verdict": None}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a config, and a Slurm that takes every script as job 77 and knows no job."""
    (tmp_path / "small.yaml").write_text(CONFIG)
    (tmp_path / "text.txt").write_text("line\n" * 1000)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trainkit.slurm.control.show_config", dict)
    monkeypatch.setattr(slurm_backend, "submit_script", lambda *args, **more: "77")
    monkeypatch.setattr(run_bench, "query_known_jobs", lambda ids, warn: None)
    monkeypatch.setattr(run_bench, "ASK_EVERY_S", 0.0)
    return tmp_path


def started(group: RunGroup, index: int) -> RunDir:
    """The run of a point, as its task makes it."""
    run = group.run(index)
    create_task_run(run, f"77_{index}")
    return run


def ended(group: RunGroup, index: int, step_s: float, **end: Any) -> None:
    """A run of a point that is over."""
    source = RunDir(group.path.parent / f"made-{index}")
    train_made_up(source, step_s=step_s)
    run = started(group, index)
    run.metrics_file.write_bytes(source.metrics_file.read_bytes())
    (run.checkpoints_dir / "step-00000010").mkdir()
    write_json(run.attempt(1).end_file, {**END, **end})


def test_the_layouts_are_one_array(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TYPED, *LENGTH, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    array = {"folder": str(place / "out"), "job_id": "77", "array": "0-3%1"}
    assert value == {**array, "arrays": [array]}
    group = RunGroup(place / "out")
    assert (group.name, group.job_id, group.record.keys) == ("small-layouts", "77", ["layout"])
    assert "#SBATCH --array=0-3%1\n" in group.script_file.read_text()
    layouts = [point.values["layout"] for point in group.points.values()]
    assert layouts == ["dp_shard=2", "dp_replicate=2", "tp=2", "pp=2"]
    assert [(item.name, item.run) for item in read_bench(group.path).runs] == [
        (layout, str(index)) for index, layout in enumerate(layouts)
    ]
    run = started(group, 2)
    plan = read_json(run.plan_file)
    assert (plan["layout"]["tp"], plan["layout"]["dp_shard"], plan["requeue"]["on"]) == (2, 1, [])
    assert "steps: 10" in run.config_file.read_text()


def test_so_many_run_at_once_as_was_asked_for(place: Path) -> None:
    assert main([*TYPED, *LENGTH, "--at-once", "3", "--layout", "tp=2", "--layout", "pp=2"]) == 0
    assert "#SBATCH --array=0-1%3\n" in RunGroup(place / "out").script_file.read_text()


def test_what_slurm_does_not_take_leaves_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainkit.slurm.control.show_config", lambda: {"MaxArraySize": "3"})
    assert main([*TYPED, *LENGTH]) == 2
    assert not (place / "out").exists()


def test_a_folder_that_is_taken_is_named_by_its_option(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TYPED, "--steps", "10", "--out", "."]) == 2
    assert "choose a new or empty folder with --out" in capsys.readouterr().err


def test_the_summary_of_an_array(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TYPED, *LENGTH]) == 0
    group = RunGroup(place / "out")
    ended(group, 0, step_s=1.0)
    ended(group, 2, step_s=0.5)
    verdict = {"rank": 1, "type": "OutOfMemoryError", "message": "no memory"}
    ended(group, 3, step_s=0.1, state="failed", verdict=verdict)
    capsys.readouterr()
    assert main(["bench", "layouts", "--collect", "out", "--json"]) == 0
    out, err = capsys.readouterr()
    rows = json.loads(out)["rows"]
    assert [(row["layout"], row["status"]) for row in rows] == [
        ("tp=2", "finished"),
        ("dp_shard=2", "finished"),
        ("pp=2", "failed"),
        ("dp_replicate=2", "unknown"),
    ]
    assert rows[2]["verdict"] == "rank 1 failed first: OutOfMemoryError: no memory"
    assert "1 of 4 runs have not ended" in err
    assert [path for index in (0, 2, 3) for path in group.run(index).checkpoints_dir.iterdir()] == []


def test_an_end_that_this_host_sees_late_is_waited_for(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slurm has forgotten the jobs before the files of the second one are seen."""
    group, looks = RunGroup(place / "out"), []

    def ask(ids: list[str], warn: Any) -> dict[str, Any]:
        looks.append(list(ids))
        if len(looks) == 1:
            ended(group, 0, step_s=1.0)
            started(group, 1)
        elif len(looks) == 3:
            write_json(group.run(1).attempt(1).end_file, END)
        return {}

    monkeypatch.setattr(run_bench, "query_known_jobs", ask)
    typed = [*TYPED, *LENGTH, "--layout", "tp=2", "--layout", "pp=2", "--follow", "--json"]
    assert main(typed) == 0
    out, err = capsys.readouterr()
    assert {row["status"] for row in json.loads(out)["rows"]} == {"finished"}
    assert "1 died, 1 finished" in err


def test_submitit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "layouts", "small.yaml", "--backend", "submitit"]) == 2
    assert "add --backend sbatch" in capsys.readouterr().err
