"""`trainkit bench settings` as it is typed, with small scripts as workers and once on a made-up Slurm."""

import csv
import json
import shutil
from pathlib import Path

import pytest
from steering import Desk

from tests.support.benches import train_made_up
from trainkit.bench import run_bench
from trainkit.bench.run_bench import read_bench
from trainkit.cli import control
from trainkit.cli.main import main
from trainkit.control.cancel import CancelResult
from trainkit.errors import UsageError
from trainkit.job import group_parts
from trainkit.run.files import read_json, write_json
from trainkit.run.group import RunGroup, create_task_run
from trainkit.run.registry import find_bench_folder
from trainkit.run.rundir import RunDir
from trainkit.slurm.client import SlurmRefused, SlurmUnreachable

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
        (["--sweep", "train.stepz=1"], "unknown key train.stepz"),
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
    assert message in desk.refused("bench", "settings", str(desk.config), *args)["error"]


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
    assert json.loads(desk.trainkit("status", "mine", "--json").stdout)["states"] == {
        "finished": 4,
        "failed": 2,
    }
    ended = desk.trainkit("cancel", "mine", "--json")
    assert (ended.returncode, json.loads(ended.stdout)["state"]) == (0, "ended")
    collected = desk.trainkit("bench", "settings", "--collect", "runs/mine", "--json")
    assert json.loads(collected.stdout)["rows"] == value["rows"]


SIZES = ("--sweep", "train.device_batch_size=2,4", "--sweep", "resources.gpus_per_node=1,2")
BATCH, GPUS = "train.device_batch_size", "resources.gpus_per_node"


class Sbatch:
    """Takes scripts as jobs 77, 78, …; refuses the one with the number `refused`, loses `unreachable`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken: list[list[str]] = []
        """The options of each."""
        self.refused: int | None = None
        self.unreachable: int | None = None
        monkeypatch.setattr(group_parts, "show_config", dict)
        monkeypatch.setattr(group_parts, "submit_script", self.submit)

    def submit(self, script: Path, *, extra_argv: list[str], **more: object) -> str:
        if len(self.taken) == self.refused:
            raise SlurmRefused("sbatch: error: Job violates accounting/QOS policy")
        if len(self.taken) == self.unreachable:
            raise SlurmUnreachable("Slurm does not answer", may_have_arrived=True)
        self.taken.append([script.parent.name, *extra_argv])
        return str(76 + len(self.taken))


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sbatch:
    """A folder with a config, and a Slurm that runs nothing."""
    (tmp_path / "text.txt").write_text("line\n" * 1000)
    (tmp_path / "small.yaml").write_text("name: small\ndevice: cpu\ndata: {source: text.txt, seq_len: 32}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_bench, "query_jobs_or_warn", lambda ids, warn: None)
    return Sbatch(monkeypatch)


def submit(*args: str) -> int:
    typed = ["bench", "settings", "small.yaml", "--backend", "sbatch", "--no-snapshot", "--out", "out"]
    return main([*typed, *args])


def test_on_slurm_the_rounds_are_one_array(tmp_path: Path, sbatch: Sbatch) -> None:
    assert submit("--sweep", f"{BATCH}=2,4", "--repeats", "2") == 0
    group = RunGroup(tmp_path / "out")
    assert group.record.array == "0-3%1"
    assert [point.values for point in group.points.values()] == [
        {BATCH: 2, "repeat": 1},
        {BATCH: 4, "repeat": 1},
        {BATCH: 2, "repeat": 2},
        {BATCH: 4, "repeat": 2},
    ]
    run = group.run(1)
    create_task_run(run, "77_1")
    assert read_json(run.plan_file)["batch"]["device_batch_size"] == 4
    assert sbatch.taken == [["out"]]


def test_on_slurm_jobs_that_differ_are_arrays_that_wait_for_each_other(
    tmp_path: Path, sbatch: Sbatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(*SIZES, "--repeats", "2", "--json") == 0
    out, err = capsys.readouterr()
    names = [f"array-{number}" for number in range(1, 5)]
    assert sbatch.taken == [
        [names[0]],
        *(
            [name, f"--dependency=afterany:{job_id}"]
            for name, job_id in zip(names[1:], (77, 78, 79), strict=True)
        ),
    ]
    assert json.loads(out) == {
        "folder": str(tmp_path / "out"),
        "arrays": [
            {"folder": str(tmp_path / "out" / name), "job_id": str(job_id), "array": "0-1%1"}
            for name, job_id in zip(names, (77, 78, 79, 80), strict=True)
        ],
    }
    assert "4, one after another, because the points need different jobs" in err
    made = read_bench(tmp_path / "out")
    assert [group.job_id for group in made.groups] == ["77", "78", "79", "80"]
    for item in made.runs:
        folder, index = item.run.split("/")
        point = RunGroup(tmp_path / "out" / folder).point(int(index))
        assert point.values == {**item.values, "repeat": item.repeat}
    assert [item.run for item in made.runs[:4]] == ["array-1/0", "array-2/0", "array-1/1", "array-2/1"]
    assert [(item.values, item.repeat) for item in made.points[1]] == [
        ({BATCH: 2, GPUS: 2}, 1),
        ({BATCH: 2, GPUS: 2}, 2),
    ], "in rounds, so that nothing disturbs all runs of one size"
    run = made.groups[1].run(0)
    create_task_run(run, "78_0")
    assert read_json(run.plan_file)["world_size"] == 2


def test_several_arrays_share_one_copy_of_the_code(tmp_path: Path, sbatch: Sbatch) -> None:
    (tmp_path / "mine.py").write_text("x = 1\n")
    typed = ["bench", "settings", "small.yaml", "--backend", "sbatch", "--out", "out", *SIZES]
    assert main([*typed, "--set", "launch.snapshot=true"]) == 0
    one, two = read_bench(tmp_path / "out").groups
    assert one.record.code == two.record.code != None  # noqa: E711
    assert (two.code_dir.is_symlink(), two.code_dir.resolve()) == (True, one.code_dir)
    create_task_run(two.run(0), "78_0")
    assert (two.run(0).code_dir / "mine.py").read_text() == "x = 1\n"
    assert two.provenance_file.read_bytes() == one.provenance_file.read_bytes()


def test_the_runs_of_several_arrays_have_one_status_and_one_summary(
    tmp_path: Path, sbatch: Sbatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(*SIZES, "--steps", "10", "--warmup", "2") == 0
    group = read_bench(tmp_path / "out").groups[1]
    source = RunDir(tmp_path / "made")
    train_made_up(source, step_s=0.5)
    create_task_run(group.run(0), "78_0")
    group.run(0).metrics_file.write_bytes(source.metrics_file.read_bytes())
    end = {"state": "finished", "action": "stopped", "exit_code": 0, "reason": "all ranks", "verdict": None}
    write_json(group.run(0).attempt(1).end_file, end)
    capsys.readouterr()
    assert main(["status", "out", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["states"] == {"unknown": 3, "finished": 1}
    assert [(point["values"], point["state"]) for point in value["points"]][1] == (
        {BATCH: 2, GPUS: 2},
        "finished",
    )
    for command in (["status", "out"], ["watch", "out", "--once"]):
        assert main(command) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [" ".join(line.split()) for line in lines[:4]] == [
            "bench out",
            f"folder {tmp_path / 'out'}",
            "jobs 77, 78",
            "runs 4: 3 unknown, 1 finished",
        ]
        assert lines[-1].split()[:4] == ["array-2/0", "finished", "2", "2"]
    assert main(["bench", "settings", "--collect", "out", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["rows"][0]
    assert (first[BATCH], first[GPUS], first["status"], first["run"]) == (2, 2, "finished", "array-2/0")
    assert main(["report", "out", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["best"]["values"] == {BATCH: 2, GPUS: 2}
    assert main(["logs", "out"]) == 2
    assert "unknown run 'out'" in capsys.readouterr().err


def cancelled_groups(monkeypatch: pytest.MonkeyPatch, unknown: str = "") -> list[str]:
    """The arrays that are cancelled, in order; Slurm says nothing of the one called `unknown`."""
    names: list[str] = []

    def cancel(group: RunGroup, *, now: bool, wait: bool) -> CancelResult:
        if group.path.name == unknown:
            raise UsageError(f"cannot tell whether {group.path} was submitted")
        names.append(group.path.name)
        facts = {"run_dir": str(group.path), "state": "cancelled"}
        return CancelResult("cancelled", "2 runs killed", facts)

    monkeypatch.setattr(control, "cancel_group", cancel)
    return names


def test_if_slurm_refuses_one_array_none_runs(
    tmp_path: Path, sbatch: Sbatch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cancelled = cancelled_groups(monkeypatch)
    sbatch.refused = 1
    assert submit(*SIZES, "--sweep", "resources.nodes=1,2") == 2
    assert cancelled == ["array-1"]
    err = capsys.readouterr().err
    assert f"not all arrays were submitted: the others are cancelled, and {tmp_path / 'out'} is kept" in err
    assert "accounting/QOS policy" in err
    assert [group.path.name for group in read_bench(tmp_path / "out").groups] == ["array-1"]
    assert main(["status", "out", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["states"] == {"unknown": 2, "not started": 6}
    assert [point["job_id"] for point in value["points"]][:2] == ["77_0", None]
    sbatch.refused, sbatch.taken = 0, []
    shutil.rmtree(tmp_path / "out")
    assert submit(*SIZES) == 2
    assert not (tmp_path / "out").exists()


def test_an_array_that_may_have_been_submitted_is_cancelled_too(
    tmp_path: Path, sbatch: Sbatch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cancelling the first one alone would start it."""
    cancelled = cancelled_groups(monkeypatch)
    sbatch.unreachable = 1
    assert submit(*SIZES) == 3
    assert cancelled == ["array-2", "array-1"]
    sbatch.taken = []
    cancelled_groups(monkeypatch, unknown="array-2")
    capsys.readouterr()
    shutil.rmtree(tmp_path / "out")
    assert submit(*SIZES) == 3
    assert "out may still run: cannot tell whether" in capsys.readouterr().err


def test_a_bench_is_cancelled_from_its_last_array_on(
    tmp_path: Path, sbatch: Sbatch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(*SIZES, "--sweep", "resources.nodes=1,2") == 0
    cancelled = cancelled_groups(monkeypatch)
    capsys.readouterr()
    assert main(["cancel", "out", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert cancelled == ["array-4", "array-3", "array-2", "array-1"]
    assert value["state"] == "cancelled"
    assert [Path(array["run_dir"]).name for array in value["arrays"]] == cancelled[::-1]
    cancelled = cancelled_groups(monkeypatch, unknown="array-3")
    assert main(["cancel", "out"]) == 2
    assert cancelled == ["array-4", "array-2", "array-1"], "the others are cancelled all the same"
    assert "cannot tell whether" in capsys.readouterr().err
    (tmp_path / "out/bench.json").write_text("garbage")
    assert main(["cancel", "out/array-2", "--json"]) == 0, "a damaged bench.json is not in the way"


def test_a_bench_that_runs_on_this_machine_is_ended_where_it_runs(
    tmp_path: Path, sbatch: Sbatch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit("--sweep", "seed=1,2") == 0
    (tmp_path / "out/sweep.json").unlink()
    for state in ("running", "not started"):
        monkeypatch.setattr(run_bench, "run_state", lambda bench, item, state=state: (state, ""))
        assert main(["cancel", "out"]) == 2
        assert "Ctrl-C ends it in the terminal where it runs" in capsys.readouterr().err


def test_a_bench_in_runs_is_not_taken_for_a_run_of_this_path(tmp_path: Path, sbatch: Sbatch) -> None:
    assert submit("--sweep", "seed=1,2") == 0
    assert main(["bench", "settings", "small.yaml", "--backend", "sbatch", "--no-snapshot",
                 "--out", "runs/out", *SIZES]) == 0  # fmt: skip
    assert find_bench_folder("out", with_groups=False) is None
    assert find_bench_folder("runs/out", with_groups=False) is not None
    assert find_bench_folder("out") == Path("out")
    assert find_bench_folder("x" * 300) is None
    (tmp_path / "out/bench.json").write_text("garbage")
    assert find_bench_folder("out", with_groups=False) is None, "its array is intact"


@pytest.mark.parametrize("key", ["launch.backend=sbatch,local", "launch.cluster=example"])
def test_all_points_of_a_bench_run_in_one_place(
    sbatch: Sbatch, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    assert submit("--sweep", key) == 2
    assert "run one bench for each" in capsys.readouterr().err
    assert sbatch.taken == []
