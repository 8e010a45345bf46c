import os
import random
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
from job_tree import wait_for

from tests.support.runs import launch_plan, make_attempt
from tests.support.said import said
from trainkit.capabilities.drill import command
from trainkit.capabilities.drill.command import MIN_STEPS, NUM_SAVES
from trainkit.capabilities.drill.inject import flip_bytes
from trainkit.capabilities.drill.scenarios import NAMES, SCENARIOS, RunWatch, choose_target, skip_reason
from trainkit.config.schema import RunConfig
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.workload import Workload
from trainkit.run.end import read_end
from trainkit.run.files import write_json
from trainkit.run.manifest import MANIFEST_NAME, SEAL, file_hash, find_damage, published, seal
from trainkit.run.record import add_slurm_attempt, read_job
from trainkit.run.rundir import RunDir
from trainkit.slurm.client import SlurmUnreachable

LOCAL = launch_plan(backend="local")
SLURM = replace(LOCAL, backend="sbatch")


def not_here(plan: LaunchPlan, config: RunConfig = RunConfig()) -> set[str]:  # noqa: B008
    return {scenario.name for scenario in SCENARIOS if skip_reason(scenario, config, plan)}


def test_what_can_be_tried_where():
    assert not_here(LOCAL) == {"requeue"}
    assert not_here(SLURM) == set()
    assert not_here(replace(SLURM, workload=Workload(("train",)))) == {"mid-save", "damaged-checkpoint"}
    one_kept = RunConfig.model_validate({"checkpoint": {"keep_last": 1}})
    assert not_here(SLURM, one_kept) == {"damaged-checkpoint"}


@pytest.mark.parametrize("num_steps", [MIN_STEPS, 30, 200])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=NAMES)
def test_a_target_leaves_something_to_lose_before_and_something_to_do_after(scenario, num_steps):
    interval = num_steps // NUM_SAVES
    steps = set()
    for seed in range(200):
        target = choose_target(scenario, seed, num_steps, interval, 4, 2)
        assert target.step is not None
        assert interval * (2 if scenario.needs_checkpoints else 1) <= target.step <= num_steps * 2 // 3
        assert 0 <= target.rank < 4
        assert 0 <= target.node_rank < 2
        assert scenario.name != "mid-save" or target.step % interval == 0
        steps.add(target.step)
    assert len(steps) > 1 or num_steps == MIN_STEPS


def test_a_seed_decides_the_target():
    rank = SCENARIOS[1]
    targets = [choose_target(rank, seed, 200, 33, 4, 2) for seed in (1, 1, 2)]
    places = [(target.step, target.share, target.rank, target.node_rank) for target in targets]
    assert places[0] == places[1] != places[2]


def test_a_trainer_that_records_no_steps_is_interrupted_by_the_clock():
    target = choose_target(SCENARIOS[0], 0, None, None, 4, 2)
    assert target.step is None
    assert 0.3 <= target.share <= 0.6


@pytest.fixture
def run(tmp_path) -> RunDir:
    run = make_attempt(tmp_path / "run").run
    add_slurm_attempt(run, 1, "7", "submit", "sbatch")
    return run


def test_a_run_of_which_slurm_says_nothing_is_waited_for(run, monkeypatch):
    looks: list[None] = []

    def away(entry: object) -> None:
        raise SlurmUnreachable("Slurm does not answer")

    def over(watch: RunWatch) -> bool:
        looks.append(None)
        return len(looks) > 3

    monkeypatch.setattr("trainkit.backends.slurm.backend.query_jobs", away)
    monkeypatch.setattr(RunWatch, "over", over)
    lines: list[str] = []
    watch = RunWatch(run, poll_s=0.01, patience_s=0.0, log_line=lines.append)
    assert not watch.until(lambda: False)
    assert not watch.is_stuck
    said(lines[0])


def save(run: RunDir, step: int) -> None:
    """Write a checkpoint with one small and one large file."""
    folder = run.checkpoint_dir(step)
    folder.mkdir(parents=True)
    for name, size in (("small", 10), ("large", 10_000)):
        (folder / name).write_bytes(bytes(range(10)) * (size // 10))
    files = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": file_hash(folder / name)}
        for name in ("large", "small")
    }
    manifest = {"version": 1, "step": step, "files": files}
    write_json(folder / MANIFEST_NAME, {**manifest, SEAL: seal(manifest)})


def test_flipped_bytes_are_found_only_by_the_hash(tmp_path):
    run = RunDir(tmp_path)
    save(run, 5)
    save(run, 10)
    before = (run.checkpoint_dir(10) / "large").read_bytes()
    damaged = flip_bytes(run, random.Random(0))
    after = (run.checkpoint_dir(10) / "large").read_bytes()
    assert damaged.step == 10
    assert len(after) == len(before)
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 8
    intact, damage = [find_damage(checkpoint) for checkpoint in published(run.checkpoints_dir)]
    assert intact == ""
    said(damage)


def is_killed(run):
    wait_for(lambda: read_job(run).newest.alive() is False)
    return read_end(run.attempt(1)).state == "cancelled"


def test_of_a_drill(start_job, tmp_path, monkeypatch):
    def create_run(*args):
        run = start_job("time.sleep(600)").run
        return SimpleNamespace(run=run, job=read_job(run))

    monkeypatch.setattr(command, "create_run", create_run)
    monkeypatch.setattr(command, "print_created", lambda created: None)
    monkeypatch.setattr(command, "start_run", lambda *args: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        list(command.Drill(tmp_path, None, None, 0, None, print).run([]))
    assert is_killed(RunDir(tmp_path / "run"))
