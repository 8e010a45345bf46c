"""A run whose job gets as many nodes as there are: fewer, then more, then one less, with one curve."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.on_slurm import survival
from tests.on_slurm.login import BACKENDS, Login, log_of, settings, wait_for
from tests.on_slurm.survival import RESTART_S, wait_for_steps, wait_until_over
from trainkit.plan.launch import LaunchPlan
from trainkit.run.events import read_metrics
from trainkit.run.group import RunGroup


@pytest.mark.slow(seconds=60)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_takes_what_there_is(login: Login, tmp_path: Path, backend: str) -> None:
    config = survival.range_config(login.folder)
    per, nodes = ("node", "1,2,4") if backend == "submitit" else ("gpu", "1-4")
    with login.other_job("--partition=high", "--nodes=2"):
        run = login.submit(
            *("--nodes", nodes, "--backend", backend, "--per", per),
            *settings("requeue.max_crashes=5"),
            config=config,
        )
        wait_for_steps(run, 1, 15)
        assert len(survival.hosts_of(run, 1)) == 2
        assert login.status(run)["num_nodes"] == 2
    wait_for(lambda: [*login.cluster.node_states().values()].count("idle") == 2, "two idle hosts")
    assert login.trainkit("requeue", str(run.path)).returncode == 0
    wait_for_steps(run, 2, 15)
    assert len(survival.hosts_of(run, 2)) == 4
    job_id = login.job_id(run)
    login.cluster.kill_host(2)
    wait_for_steps(run, 3, 1)
    assert wait_until_over(login, run, RESTART_S)["state"] == "finished", login.logs_and_attempts(run)
    assert (login.job_id(run), len(run.attempt_numbers())) == (job_id, 3)
    assert len(survival.hosts_of(run, 3)) == 2  # of three: the batch cannot be divided by three
    expected = survival.losses_on_one(tmp_path, config)
    assert [r["loss"] for r in read_metrics(run)] == pytest.approx(expected, rel=1e-5)
    before = survival.steps_of(run, 1)
    assert survival.steps_of(run, 2)[0] == before[-1] + 1  # asked: no step is lost


@pytest.mark.slow(seconds=90)
@pytest.mark.parametrize("seed", [14])
def test_a_seeded_variant_has_the_curve_of_one_process(login: Login, tmp_path: Path, seed: int) -> None:
    """`python -m benchmarks.survival --only sizes` tries twenty of them."""
    config = survival.range_config(login.folder)
    run = survival.Variant.of(seed).run(login, config, "variant")
    expected = survival.losses_on_one(tmp_path, config)
    assert [r["loss"] for r in read_metrics(run)] == pytest.approx(expected, rel=1e-5)
    assert not survival.computed_twice(run)


@pytest.mark.slow(seconds=20)
def test_each_point_of_a_sweep_takes_what_there_is(login: Login) -> None:
    login.script('import os; print(os.environ["WORLD_SIZE"], "ranks", os.environ["LR"])', "size.py")
    shape = ("--nodes", "1-4", "--gpus-per-node", "1", "--partition", "high")
    sweep = ("--sweep", "launch.env.LR=1,2,3", "--array", "%1", "--json", "--", "python", "size.py")
    with login.other_job("--partition=high", "--nodes=2"):
        done = login.trainkit("submit", str(login.config), *shape, *sweep)
        assert done.returncode == 0, done.stderr
        group = RunGroup(json.loads(done.stdout)["run_dir"])
        for index in range(3):
            run = group.run(index)
            login.wait_for_log(run, f" ranks {index + 1}")
            size = LaunchPlan.read(run.attempt(1).plan_file).num_nodes
            assert size in (1, 2)  # the last node of the point before may still be completing
            assert f"{size} ranks" in log_of(run)
