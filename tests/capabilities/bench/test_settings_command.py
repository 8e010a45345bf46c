"""Runs `trainkit bench settings` with small scripts as workers, and once on a made-up Slurm."""

import csv
import json

import pytest
from steering import Desk

from tests.support.said import cases, said
from trainkit.cli.main import main
from trainkit.run.files import read_json
from trainkit.run.group import RunGroup, create_task_run

CURVE = """
plan = json.load(open(f"{RUN_DIR}/attempts/001/plan.json"))
size = plan["batch"]["device_batch_size"]
if size == 8:
    os.makedirs(f"{RUN_DIR}/attempts/001/errors", exist_ok=True)
    with open(f"{RUN_DIR}/attempts/001/errors/rank-0000.json", "w") as stream:
        json.dump({"rank": 0, "type": "OutOfMemoryError", "message": "no memory", "step": 3}, stream)
    sys.exit(1)
os.makedirs(f"{RUN_DIR}/checkpoints/step-00000010")
with open(f"{RUN_DIR}/metrics.jsonl", "w") as stream:
    for step in range(1, 11):
        record = {"step": step, "time": "2026-01-01T00:00:00Z", "attempt": 1, "loss": 1.0,
                  "tokens_per_s": 100.0 * size, "tokens_per_s_per_gpu": 100.0 * size, "mfu": None,
                  "step_s": 0.5, "data_wait_s": 0.0, "mem_gib_peak": 1.0, "samples_seen": step * 8}
        stream.write(json.dumps(record) + "\\n")
"""
"""A script that computes nothing, and fails with a batch of 8 as if it had too little memory."""
BATCHES = ("--sweep", "train.device_batch_size=2,4,3,8", "--set", "train.global_batch_size=8")


def bench(desk: Desk, *args: str):
    return desk.typed("bench", "settings", *args)


def test_a_dry_run_lists_the_points_and_those_that_cannot_run(desk):
    done = bench(desk, str(desk.config), *BATCHES, "--sweep", "seed=1,2", "--dry-run")
    assert done.returncode == 0, done.stderr
    heading, *rows = [line.split() for line in done.stdout.splitlines()]
    assert heading == ["DEVICE_BATCH_SIZE", "SEED", "BATCH", "MICROBATCHES", "ACCUMULATION"]
    assert rows[:2] == [["2", "1", "2", "-", "4"], ["2", "2", "2", "-", "4"]]
    assert len(rows) == 6
    refused = [line for line in done.stderr.splitlines() if "not possible" in line]
    assert len(refused) == 2
    said(refused[0])
    assert not (desk.folder / "runs").exists()


@pytest.mark.parametrize("options", cases(__file__, "test_what_was_typed_wrong"))
def test_what_was_typed_wrong(desk, options):
    value = desk.refused("bench", "settings", str(desk.config), *options.split())
    said(f"{value['error']}\n\nhint: {value['hint']}")


def test_the_kind_of_bench_may_be_left_out(desk):
    typed = [str(desk.config), "--dry-run"]
    seeds = (["--sweep", "seed=1,2"], ["--sweep=seed=3,4"])
    for kind, more in (("settings", seeds[0]), ("settings", seeds[1]), ("layouts", [])):
        short, whole = (desk.typed(*words, *typed, *more) for words in (["bench"], ["bench", kind]))
        assert (short.returncode, short.stdout) == (0, whole.stdout), short.stderr
    typo = desk.typed("bench", "setings", str(desk.config), "--sweep", "seed=1,2")
    assert (typo.returncode, "settings" in typo.stderr) == (2, True)
    (desk.folder / "setings").write_text(desk.config.read_text())
    assert desk.typed("bench", "setings", "--sweep", "seed=1,2", "--dry-run").returncode == 0


@pytest.mark.slow
def test_points_run_in_rounds_and_one_that_fails_stays_in_the_table(desk):
    desk.works(CURVE)
    args = ["--steps", "10", "--warmup", "2", "--repeats", "2", "--out", "runs/mine", "--json"]
    done = desk.trainkit("bench", "settings", str(desk.config), *BATCHES, *args)
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    states = [(row["train.device_batch_size"], row["status"]) for row in value["rows"]]
    assert states == [(4, "finished"), (2, "finished"), (8, "failed (2 of 2)")]
    assert (value["fastest"]["name"], value["fastest"]["is_clear"]) == ("train.device_batch_size=4", True)
    shown = [line.partition(":")[0] for line in done.stderr.splitlines() if line[1:3] == "/6"]
    batch = "train.device_batch_size"
    assert shown == [
        f"{index}/6  {batch}={size} (repeat {repeat})"
        for index, (repeat, size) in enumerate(((1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (2, 8)), 1)
    ]
    with (desk.folder / "runs/mine/summary.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["tokens_per_s"] for row in rows] == ["400", "200", ""]
    assert [row["samples_per_s"] for row in rows] == ["16", "16", ""]
    assert [row["run"] for row in rows] == ["1 4", "0 3", "2 5"]
    assert rows[2]["verdict"].endswith("OutOfMemoryError: no memory")
    assert "2 failed, 4 finished" in done.stderr
    assert "exposed_comm_s" in done.stderr  # these workers wrote no profile
    for run in map(RunGroup(desk.folder / "runs/mine").run, range(6)):
        assert run.attempt_numbers() == [1]  # a failed run is not started again
        assert not any(run.checkpoints_dir.iterdir())
    made = read_json(desk.folder / "runs/mine/bench.json")
    assert (made["kind"], made["repeats"]) == ("settings", 2)
    assert made["impossible"].keys() == {"train.device_batch_size=3"}
    states = json.loads(desk.typed("status", "mine", "--json").stdout)["states"]
    assert states == {"finished": 4, "failed": 2}
    ended = desk.typed("cancel", "mine", "--json")
    assert (ended.returncode, json.loads(ended.stdout)["state"]) == (0, "ended")
    collected = bench(desk, "--collect", "runs/mine", "--json")
    assert json.loads(collected.stdout)["rows"] == value["rows"]


SIZES = ("--sweep", "train.device_batch_size=2,4", "--sweep", "resources.gpus_per_node=1,2")
BATCH, GPUS = "train.device_batch_size", "resources.gpus_per_node"


def submit(*args: str) -> int:
    typed = ["bench", "settings", "small.yaml", "--backend", "sbatch", "--no-snapshot", "--out", "out"]
    return main([*typed, *args])


def test_on_slurm_the_rounds_are_one_array(tmp_path, sbatch):
    assert submit("--sweep", f"{BATCH}=2,4", "--repeats", "2") == 0
    group = RunGroup(tmp_path / "out")
    assert group.record.array == "0-3%1"
    points = [(trial.values[BATCH], trial.values["repeat"]) for trial in group.trials.values()]
    assert points == [(2, 1), (4, 1), (2, 2), (4, 2)]
    run = group.run(1)
    create_task_run(run, "77_1")
    assert read_json(run.plan_file)["batch"]["device_batch_size"] == 4
    assert sbatch.taken == [["out"]]


def test_points_that_need_different_jobs_are_refused(tmp_path, sbatch, capsys):
    for more in ((), ("--dry-run",)):
        assert submit(*SIZES, *more) == 2
        said(capsys.readouterr().err)
    assert (sbatch.taken, (tmp_path / "out").exists()) == ([], False)


@pytest.mark.parametrize("key", ["launch.backend=sbatch,local", "launch.cluster=example"])
def test_all_points_of_a_bench_run_in_one_place(sbatch, capsys, key):
    assert submit("--sweep", key) == 2
    said(capsys.readouterr().err)
    assert sbatch.taken == []
