"""`trainkit bench settings` as it is typed, with small scripts as workers and once on a made-up Slurm."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from steering import Desk

from trainkit.cli.main import main
from trainkit.job.array_tasks import create_task_run
from trainkit.rundir import read_json
from trainkit.rungroup import RunGroup
from trainkit.submit import array_spec, sbatch_backend

CURVE = """
plan = json.load(open(f"{RUN_DIR}/attempts/001/plan.json"))
size = plan["batch"]["device_batch_size"]
if size == 8:
    sys.exit("no memory")
with open(f"{RUN_DIR}/metrics.jsonl", "w") as stream:
    for step in range(1, 11):
        record = {"step": step, "time": "2026-01-01T00:00:00Z", "attempt": 1, "loss": 1.0,
                  "tokens_per_s": 100.0 * size, "tokens_per_s_per_gpu": 100.0 * size, "mfu": None,
                  "step_s": 0.5, "data_wait_s": 0.0, "mem_gib_peak": 1.0, "samples_seen": step * 8}
        stream.write(json.dumps(record) + "\\n")
"""
"""A trainer that computes nothing, and has no memory for a batch of 8."""
BATCHES = ("--sweep", "train.device_batch_size=2,4,3,8", "--set", "train.global_batch_size=8")


def bench(desk: Desk, *args: str):
    return desk.trainkit("bench", "settings", *args)


def test_a_dry_run_lists_the_points_and_those_that_cannot_run(desk: Desk) -> None:
    done = bench(desk, str(desk.config), *BATCHES, "--sweep", "seed=1,2", "--dry-run")
    assert done.returncode == 0, done.stderr
    heading, *rows = [line.split() for line in done.stdout.splitlines()]
    assert heading == ["DEVICE_BATCH_SIZE", "SEED", "BATCH", "MICROBATCHES", "ACCUMULATION"]
    assert rows[:2] == [["2", "1", "2", "-", "4"], ["2", "2", "2", "-", "4"]]
    assert len(rows) == 6
    refused = [line for line in done.stderr.splitlines() if "not possible" in line]
    assert len(refused) == 2
    assert "train.device_batch_size=3, seed=1: train.global_batch_size is 8" in refused[0]
    assert not (desk.folder / "runs").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "no --sweep"),
        (["--sweep", "train.stepz=1"], "there is no key train.stepz"),
        (["--sweep", "train.steps=10,20"], "--sweep train.steps: a bench sets train.steps itself"),
        (
            ["--sweep", "requeue.on=[],[crash]"],
            "a bench sets requeue.on itself (a failed run is not restarted)",
        ),
        (["--sweep", "profiler.ranks=[0],[1]"], "a bench sets profiler.ranks itself"),
        (["--sweep", "train.device_batch_size=0,-1"], "train.device_batch_size"),
        (["--sweep", "seed=1,2", "--steps", "5"], "--steps 5: 5 warm-up steps"),
        (["--sweep", "seed=1,2", "--repeats", "0"], "--repeats"),
        (["--sweep", "seed=1,2", "--backend", "submitit"], "does not submit arrays through submitit"),
    ],
)
def test_what_was_typed_wrong(desk: Desk, args: list[str], message: str) -> None:
    done = bench(desk, str(desk.config), *args, "--json")
    assert (done.returncode, json.loads(done.stdout)["exit_code"]) == (2, 2)
    assert message in json.loads(done.stdout)["error"]
    assert not (desk.folder / "runs").exists()


def test_the_kind_of_bench_may_be_left_out(desk: Desk) -> None:
    typed = [str(desk.config), "--dry-run"]
    for kind, more in (
        ("settings", ["--sweep", "seed=1,2"]),
        ("settings", ["--sweep=seed=3,4"]),
        ("layouts", []),
    ):
        short, whole = (desk.trainkit(*words, *typed, *more) for words in (["bench"], ["bench", kind]))
        assert (short.returncode, short.stdout) == (0, whole.stdout), short.stderr
    typo = desk.trainkit("bench", "setings", str(desk.config), "--sweep", "seed=1,2")
    assert (typo.returncode, "settings" in typo.stderr) == (2, True)
    (desk.folder / "setings").write_text(desk.config.read_text())
    assert desk.trainkit("bench", "setings", "--sweep", "seed=1,2", "--dry-run").returncode == 0


@pytest.mark.slow
def test_points_run_in_rounds_and_one_that_fails_stays_in_the_table(desk: Desk) -> None:
    desk.works(CURVE)
    args = ["--steps", "10", "--warmup", "2", "--repeats", "2", "--out", "runs/mine", "--json"]
    done = bench(desk, str(desk.config), *BATCHES, *args)
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    assert [(row["train.device_batch_size"], row["status"]) for row in value["rows"]] == [
        (4, "finished"),
        (2, "finished"),
        (8, "failed (2 of 2)"),
    ]
    assert (value["fastest"]["name"], value["fastest"]["is_clear"]) == ("train.device_batch_size=4", True)
    said = [line.partition(":")[0] for line in done.stderr.splitlines() if line[1:3] == "/6"]
    batch = "train.device_batch_size"
    assert said == [
        f"{index}/6  {batch}={size} (repeat {repeat})"
        for index, (repeat, size) in enumerate(((1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (2, 8)), 1)
    ]
    with (desk.folder / "runs/mine/summary.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["tokens_per_s"] for row in rows] == ["400", "200", ""]
    assert rows[0]["run"] == "point-1.repeat-1 point-1.repeat-2"
    made = read_json(desk.folder / "runs/mine/bench.json")
    assert (made["kind"], made["repeats"]) == ("settings", 2)
    assert made["impossible"].keys() == {"train.device_batch_size=3"}
    collected = desk.trainkit("bench", "settings", "--collect", "runs/mine", "--json")
    assert json.loads(collected.stdout)["rows"] == value["rows"]


def test_on_slurm_the_rounds_are_one_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("line\n" * 1000)
    (tmp_path / "small.yaml").write_text("name: small\ndevice: cpu\ndata: {source: text.txt, seq_len: 32}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(array_spec, "show_config", dict)
    monkeypatch.setattr(sbatch_backend, "submit_script", lambda *args, **more: "77")
    typed = ["bench", "settings", "small.yaml", "--backend", "sbatch", "--no-snapshot", "--out", "out"]
    sweeps = ["--sweep", "train.device_batch_size=2,4", "--sweep", "resources.gpus_per_node=1,2"]
    assert main([*typed, *sweeps, "--repeats", "2"]) == 0
    group = RunGroup(tmp_path / "out")
    assert group.record["array"] == "0-3%1"
    size, gpus = "train.device_batch_size", "resources.gpus_per_node"
    assert [point.values for point in group.points.values()] == [
        {size: 2, gpus: 1, "repeat": 1},
        {size: 4, gpus: 1, "repeat": 1},
        {size: 2, gpus: 1, "repeat": 2},
        {size: 4, gpus: 1, "repeat": 2},
    ]
    run = group.run(1)
    create_task_run(run, "77_1")
    assert read_json(run.plan_file)["batch"]["device_batch_size"] == 4
    assert "needs another job than train.device_batch_size=2, resources.gpus_per_node=1" in (
        capsys.readouterr().err
    )
