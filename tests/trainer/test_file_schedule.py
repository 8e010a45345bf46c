"""Tests the schedule of the docs in training, what is refused before a run starts, and errors in a run."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.own_code import write_schedule
from tests.support.parity import curve
from tests.support.runs import fork_workers, make_attempt, train, wait_for, wait_until
from tests.support.said import said
from trainkit.config import RunConfig, load_config
from trainkit.config.training import ScheduleConfig
from trainkit.control.changed_config import RunSoFar, learning_rate_change
from trainkit.launch.trainer_process import find_code_problems
from trainkit.plan.batch import learning_rate
from trainkit.run.events import read_metrics
from trainkit.run.files import read_json, write_json
from trainkit.run.manifest import published
from trainkit.run.rundir import RunDir
from trainkit.trainer.file_schedule import MAX_TRIED_STEPS, load_schedule, refuse_schedule
from trainkit.trainer.task_check import definite_problem
from trainkit.trainer.user_code import TaskError


def config_of(*overrides: str, steps: int | None = 20) -> RunConfig:
    length = [] if steps is None else [f"train.steps={steps}"]
    return load_config(None, overrides=["name=x", *length, *overrides], environ={}).config


def test_the_rate_of_each_step(tmp_path):
    """With `warmup_steps`, the function is called only for later steps."""
    config = config_of(f"schedule.name={write_schedule(tmp_path)}").schedule
    assert config.warmup_steps == 0
    own = load_schedule(config)
    found = [learning_rate(step, 100, 2.0, config, own) for step in range(1, 101)]
    assert found == pytest.approx([1.0, 2.0, *(2 * math.sqrt(2 / step) for step in range(3, 101))])
    warm = ScheduleConfig(name=config.name, warmup_steps=4)
    assert [learning_rate(step, 100, 2.0, warm, own) for step in (1, 4, 8)] == [0.5, 2.0, 1.0]
    assert load_schedule(ScheduleConfig()) is None


CODE = """\
import math
def no_number(step, total): return None if step == 7 else 1.0
def nan(step, total): return math.nan if step == total else 1.0
def negative(step, total): return 1 - step / 9
def infinite(step, total): return math.inf
def boolean(step, total): return True
def fails(step, total): return 1 / (3 - step)
def one_argument(step): return 1.0
class Schedule: ...
number = 1.0
def good(step, total): return 1 if step > 0 else -1
def last(step, total): return -1 if step == total else 1
def early(step, total): return -1 if step <= 5 else 1
"""
NAMES = ("no_number", "nan", "negative", "infinite", "boolean", "fails", "one_argument", "Schedule", "number")
REFUSED = {
    **{name: [f"schedule.name=mine.py:{name}"] for name in (*NAMES, "missing")},
    "file": ["schedule.name=nowhere.py:f"],
    "syntax": ["schedule.name=broken.py:f"],
    "long": ["schedule.name=mine.py:last"],
}


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(CODE)
    Path("broken.py").write_text("def f(\n")


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_starts(files, case):
    steps = 3 * MAX_TRIED_STEPS if case == "long" else 20
    problem = definite_problem(config_of(*REFUSED[case], steps=steps))
    assert problem is not None
    said(f"{problem.key}: {problem.message}\n  hint: {problem.hint}")


def test_steps_of_the_warmup_and_unknown_steps_are_not_tried(files):
    early = "schedule.name=mine.py:early"
    for overrides in (["schedule.name=mine.py:good"], [early, "schedule.warmup_steps=5"]):
        refuse_schedule(config_of(*overrides))
    refuse_schedule(config_of(early, "train.epochs=1", steps=None))
    with pytest.raises(TaskError):
        refuse_schedule(config_of(early, "schedule.warmup_steps=4"))


@pytest.mark.slow
def test_a_check_names_the_key_and_the_step(files, tmp_path):
    """`check` and `submit` call this function, which runs the schedule in another process."""
    for name, expected in (("good", []), ("nan", ["schedule.name"])):
        loaded = load_config("quickstart", overrides=[f"schedule.name=mine.py:{name}"], environ={})
        found = find_code_problems(loaded, tmp_path)
        assert [problem.key for problem in found] == expected
    assert "nan at step 200 of 200" in found[0].message
    assert found[0].origin == "--set schedule.name=mine.py:nan"


def test_a_run_has_the_code_that_it_was_submitted_with(tmp_path, monkeypatch):
    run, code = RunDir(tmp_path / "run"), tmp_path / "run" / "code"
    code.mkdir(parents=True)
    write_schedule(code)
    write_json(run.job_file, {"code": {"code": str(code), "workdir": str(code)}, "attempts": []})
    monkeypatch.chdir(tmp_path)
    Path("my_schedule.py").write_text("")  # the file was edited after the submission
    schedule = ScheduleConfig(name="my_schedule.py:inverse_sqrt")
    assert load_schedule(schedule, run)(1, 100) == 0.5
    with pytest.raises(TaskError, match="does not define inverse_sqrt"):
        load_schedule(schedule)


def test_a_resume_tells_which_schedule_replaces_which(files):
    """Only the trainer executes a schedule, so the message states no learning rate."""
    own, cosine = config_of("schedule.name=mine.py:good"), config_of(steps=30)
    saved = SimpleNamespace(step=7)

    def change(before: RunConfig, after: RunConfig) -> str | None:
        return learning_rate_change(RunSoFar(None, None, before, None, None, [saved]), after, 1.0)  # type: ignore[arg-type, list-item]

    assert change(own, own) is None
    said("\n".join(str(change(*pair)) for pair in ((own, cosine), (cosine, own))))


@pytest.mark.slow
@pytest.mark.parametrize("num_procs", [1, 2])
def test_killed_after_a_save(tmp_path, num_procs):
    """A resumed run has the learning rates and losses of an uninterrupted one."""
    options = [
        f"schedule.name={write_schedule(tmp_path)}",
        "train.steps=100",
        f"parallel.dp_shard={num_procs}",
    ]
    options += ["model.num_layers=1", "data.seq_len=8", "checkpoint.every_steps=10", "model.dropout=0.1"]
    train(tmp_path / "whole", options, num_procs)
    run = RunDir(tmp_path / "killed")
    workers = fork_workers(make_attempt(run.path, options, num_procs), num_procs)
    wait_until(lambda: any(item.step >= 30 for item in published(run.checkpoints_dir)))
    for worker in workers:
        worker.kill()
    wait_for(workers)
    train(run.path, options, num_procs)
    assert curve(run.path) == curve(tmp_path / "whole")
    for path in (run.path, tmp_path / "whole"):
        rates = [record["lr"] for record in read_metrics(RunDir(path))]
        assert rates == pytest.approx([3e-4 * min(step / 2, (2 / step) ** 0.5) for step in range(1, 101)])


@pytest.mark.slow
def test_an_error_in_a_run_names_the_step_and_ends_it(tmp_path, files):
    """The number of steps was unknown before the run started."""
    options = [f"schedule.name={tmp_path}/mine.py:negative", "train.steps=null", "train.epochs=1"]
    attempt = train(tmp_path / "run", options, 2, expect=78)
    assert len(curve(tmp_path / "run")) == 9
    for rank in range(2):
        record = read_json(attempt.rank_error(rank))
        assert "returned -0.11111111111111116 at step 10 of " in record["message"]
