"""Runs `trainkit bench layouts` with small scripts as workers, and once with the real trainer."""

import csv
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from steering import Desk, wait_for

from tests.support.benches import made_up_bench, profile_made_up, train_made_up
from tests.support.json_outputs import checked
from tests.support.programs import run_program
from tests.support.said import cases, said
from trainkit.capabilities.bench import command as bench_command
from trainkit.capabilities.bench import run_bench, summary
from trainkit.capabilities.bench.run_bench import read_bench
from trainkit.capabilities.bench.summary import COLUMNS
from trainkit.cli.main import main
from trainkit.errors import EXIT_INTERRUPTED
from trainkit.run.end import KILLED, AttemptEnd, read_end
from trainkit.run.files import read_json, write_json
from trainkit.run.group import RunGroup, create_task_run
from trainkit.run.record import read_job
from trainkit.run.rundir import RunDir
from trainkit.scheduler import JobState
from trainkit.slurm.jobs import SlurmJob

ROOT = Path(__file__).resolve().parents[3]
TWO = ("--gpus-per-node", "2")


def bench(desk: Desk, *args: str) -> subprocess.CompletedProcess[str]:
    return desk.typed("bench", "layouts", *args)


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "summary.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_a_dry_run_lists_what_would_be_run(desk):
    done = bench(desk, str(desk.config), *TWO, "--dry-run")
    assert done.returncode == 0, done.stderr
    heading, *rows = [line.split() for line in done.stdout.splitlines()]
    assert heading == ["LAYOUT", "BATCH", "MICROBATCHES", "ACCUMULATION"]
    assert [" ".join(row) for row in rows] == [
        *("dp_shard=2 1 - 2", "dp_replicate=2 1 - 2", "tp=2 1 - 4", "pp=2 1 1 4")
    ]
    said(done.stderr)
    assert not (desk.folder / "runs").exists()


def test_what_is_not_run_is_said(desk):
    done = bench(desk, str(desk.config), "--gpus-per-node", "16", "--set", "train.global_batch_size=64",
                 "--set", "model.num_layers=16", "--dry-run", "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    assert len(value["layouts"]) == 16
    names = [item["layout"] for item in value["layouts"]] + value["left_out"]
    assert len(names) == len(set(names)) > 20
    said(value["impossible"]["tp=16"])
    assert f"{len(value['left_out'])} other possible layouts" in done.stderr
    assert all(item["values"]["train.global_batch_size"] == 64 for item in value["layouts"])


@pytest.mark.parametrize("options", cases(__file__, "test_what_was_typed_wrong"))
def test_what_was_typed_wrong(desk, options):
    value = desk.refused("bench", "layouts", str(desk.config), *TWO, *shlex.split(options))
    said(f"{value['error']}\n\nhint: {value['hint']}")


@pytest.mark.parametrize(
    "args", [["nowhere"], [""], ["x", "small.yaml", "--steps", "9"]], ids=["nowhere", "empty", "more"]
)
def test_collect_takes_a_bench_and_nothing_else(desk, args):
    done = bench(desk, "--collect", *args)
    assert (done.returncode, "config: " in done.stderr) == (2, False)
    said(done.stderr)


@pytest.fixture
def no_matplotlib(monkeypatch):
    monkeypatch.setattr(summary, "find_spec", lambda name: None)


def test_the_summary_of_runs_that_were_made_elsewhere(desk, no_matplotlib):
    made = made_up_bench(desk.folder / "bench")
    first, second = (made.run_dir(item) for item in made.runs)
    train_made_up(first)
    for rank in range(2):
        profile_made_up(first, rank, (2.0, 2.5))
    verdict = {"rank": 1, "type": "OutOfMemoryError", "message": "no memory", "step": 3}
    train_made_up(second, 4, state="failed", reason="rank 1 failed", verdict=verdict)
    done = bench(desk, "--collect", "bench", "--json")
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    good, bad = rows_of(made.folder)
    assert list(good) == ["layout", *COLUMNS]
    layouts = [row["layout"] for row in value["rows"]]
    assert layouts == [good["layout"], bad["layout"]] == ["dp_shard=2", "tp=2"]
    assert (good["status"], good["tokens_per_s"], good["exposed_comm_s"]) == ("finished", "2048", "0.25")
    assert (bad["status"], bad["steps"], bad["exposed_comm_s"]) == ("failed", "2", "")
    said(bad["verdict"])
    assert list(first.checkpoints_dir.iterdir()) == []
    shown = bench(desk, "--collect", "bench")
    said(shown.stdout.splitlines()[-1])


def test_without_matplotlib_only_the_csv_is_written(desk, no_matplotlib):
    made = made_up_bench(desk.folder / "bench")
    done = bench(desk, "--collect", "bench")
    assert (done.returncode, "the command again" in done.stderr) == (1, False)  # nothing was measured
    assert {row["status"] for row in rows_of(made.folder)} == {"cancelled"}
    train_made_up(made.run_dir(made.runs[0]))
    done = bench(desk, "--collect", "bench")
    assert done.returncode == 0, done.stderr
    said(done.stderr)
    assert not (made.folder / "plots").exists()
    assert len(rows_of(made.folder)) == 2


def test_ctrl_c_ends_the_one_that_runs(desk):
    process = desk.start("bench", "layouts", str(desk.config), *TWO, "--out", "mine")
    run = RunDir(desk.folder / "mine" / "0")
    desk.wait_for_log(run, "attempt 1 rank 0")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (130, "")
    assert "--collect" in err
    entry = read_job(run).newest
    wait_for(lambda: entry.alive() is False)
    # Checkpoints are off at once, because a bench never resumes.
    assert (read_end(run.attempt(1)) or AttemptEnd()).reason == KILLED
    assert sorted(path.name for path in (desk.folder / "mine").glob("*/job.json")) == ["job.json"]


@pytest.mark.parametrize("is_here", [True, False])
def test_ctrl_c_while_it_starts(is_here, tmp_path, monkeypatch):
    def start_group(group: object) -> str:
        raise KeyboardInterrupt

    group, cancelled = SimpleNamespace(path=tmp_path, trials={}, exists=lambda: True), list[object]()
    made = SimpleNamespace(folder=tmp_path, kind="layouts")
    planned: Any = SimpleNamespace(plan=SimpleNamespace(is_here=is_here), create=lambda *args: made)
    for name, value in {
        "create_submission": lambda *args: SimpleNamespace(run=group),
        "print_created": lambda created: None,
        "RunGroup": lambda path: group,
        "start_group": start_group,
        "cancel_group": lambda group, **how: cancelled.append(how),
    }.items():
        monkeypatch.setattr(bench_command, name, value)
    submission: Any = None
    assert bench_command._run(planned, submission, None, False, False) == EXIT_INTERRUPTED
    assert cancelled == ([{"now": True, "wait": False}] if is_here else [])


@pytest.mark.slow
def test_a_layout_of_two_processes(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"line {n} says {n * n}\n" for n in range(1500)))
    (tmp_path / "small.yaml").write_text(
        "name: small\ndevice: cpu\nmodel: {preset: nano, num_layers: 2}\nprecision: {dtype: fp32}\n"
        "data: {source: text.txt, seq_len: 64}\ntrain: {device_batch_size: 2, global_batch_size: 4}\n"
    )
    home = {"XDG_STATE_HOME": str(tmp_path / "state"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    argv = ["bench", "layouts", "small.yaml", "--backend", "local", *TWO, "--steps", "10", "--warmup", "2"]
    done = run_program(
        *(sys.executable, "-m", "trainkit", *argv, "--layout", "tp=2", "--out", "out", "--json"),
        cwd=tmp_path,
        env={**os.environ, **home, "PYTHONPATH": str(ROOT)},
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    [row] = json.loads(done.stdout)["rows"]
    assert (row["layout"], row["status"], row["steps"], row["mfu"]) == ("tp=2", "finished", 5, None)
    assert row["samples_per_s"] * row["step_s"] == pytest.approx(4, rel=0.3)
    assert row["tokens_per_s"] == pytest.approx(row["samples_per_s"] * 64, rel=0.01)
    assert row["mem_gib_peak"] > 0.05
    assert 0 < row["exposed_comm_s"] < 60
    run = RunDir(tmp_path / "out" / row["run"])
    assert read_json(run.plan_file)["batch"]["global_batch_size"] == 4
    assert list(run.checkpoints_dir.iterdir()) == []
    assert run.attempt(1).rank_profile(1).exists()


TYPED = ["bench", "layouts", "small.yaml", "--backend", "sbatch", "--gpus-per-node", "2", "--no-snapshot"]
LENGTH = ["--steps", "10", "--warmup", "2", "--out", "out"]
END = {"state": "finished", "action": "stopped", "exit_code": 0, "reason": "all ranks", "verdict": None}


def started(group: RunGroup, index: int) -> RunDir:
    """Return the run of a trial as its task creates it."""
    run = group.run(index)
    create_task_run(run, f"77_{index}")
    return run


def ended(group: RunGroup, index: int, step_s: float, **end: Any) -> None:
    """Create a run of a trial that has ended."""
    source = RunDir(group.path.parent / f"made-{index}")
    train_made_up(source, step_s=step_s)
    run = started(group, index)
    run.metrics_file.write_bytes(source.metrics_file.read_bytes())
    (run.checkpoints_dir / "step-00000010").mkdir()
    write_json(run.attempt(1).end_file, {**END, **end})


def test_the_layouts_are_one_array(tmp_path, sbatch, capsys):
    assert main([*TYPED, *LENGTH, "--at-once", "3", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value == {"folder": str(tmp_path / "out"), "job_id": "77", "array": "0-3%3"}
    group = RunGroup(tmp_path / "out")
    assert (group.name, group.job_id, group.record.keys) == ("small-layouts", "77", ["layout"])
    assert "#SBATCH --array=0-3%3\n" in group.script_file.read_text()
    layouts = [trial.values["layout"] for trial in group.trials.values()]
    assert layouts == ["dp_shard=2", "dp_replicate=2", "tp=2", "pp=2"]
    assert [(item.name, item.run) for item in read_bench(group.path).runs] == [
        (layout, str(index)) for index, layout in enumerate(layouts)
    ]
    run = started(group, 2)
    plan = read_json(run.plan_file)
    assert (plan["layout"]["tp"], plan["layout"]["dp_shard"], plan["requeue"]["on"]) == (2, 1, [])
    assert "steps: 10" in run.config_file.read_text()


def test_the_summary_of_an_array(tmp_path, sbatch, capsys):
    assert main([*TYPED, *LENGTH]) == 0
    group = RunGroup(tmp_path / "out")
    ended(group, 0, step_s=1.0)
    ended(group, 2, step_s=0.5)
    verdict = {"rank": 1, "type": "OutOfMemoryError", "message": "no memory"}
    ended(group, 3, step_s=0.1, state="failed", verdict=verdict)
    capsys.readouterr()
    assert main(["bench", "layouts", "--collect", "out", "--json"]) == 0
    out, err = capsys.readouterr()
    rows = checked("bench-layouts", out)["rows"]
    assert [row["layout"] for row in rows] == ["tp=2", "dp_shard=2", "pp=2", "dp_replicate=2"]
    assert [row["status"] for row in rows] == ["finished", "finished", "failed", "unknown"]
    said(rows[2]["verdict"])
    said(err)
    assert [path for index in (0, 2, 3) for path in group.run(index).checkpoints_dir.iterdir()] == []


def test_an_end_that_this_host_sees_late_is_waited_for(tmp_path, sbatch, monkeypatch, capsys):
    group, looks = RunGroup(tmp_path / "out"), []

    def ask(ids: list[str], warn: Any) -> dict[str, Any]:
        looks.append(list(ids))
        if len(looks) == 1:
            ended(group, 0, step_s=1.0)
            started(group, 1)
        elif len(looks) == 3:
            write_json(group.run(1).attempt(1).end_file, END)
        return {job_id: SlurmJob(job_id, JobState.UNKNOWN) for job_id in ids}

    monkeypatch.setattr(run_bench, "query_jobs_or_warn", ask)
    typed = [*TYPED, *LENGTH, "--layout", "tp=2", "--layout", "pp=2", "--follow", "--json"]
    assert main(typed) == 0
    out, err = capsys.readouterr()
    assert {row["status"] for row in json.loads(out)["rows"]} == {"finished"}
    assert "1 died, 1 finished" in err
