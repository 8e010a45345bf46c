"""Tests that a training run survives usual failures of clusters, and resumes with the same curve.

`python -m benchmarks.survival` tests all of them for every backend and mode.
"""

from pathlib import Path

import pytest

from tests.on_slurm import survival
from tests.on_slurm.login import Login, settings, wait_for
from tests.on_slurm.survival import RESTART_S, Curve, wait_for_steps, wait_until_over
from tests.support.tasks import write_tutorial
from trainkit.errors import EXIT_NO_RESTART

pytestmark = pytest.mark.xdist_group("survive")
NUM_STEPS = 40
TUTORIAL = (
    *("device=cpu", "precision.dtype=fp32", "resources.gpus_per_node=1", "resources.cpus_per_gpu=1"),
    *("parallel.dp_shard=2", "data.num_workers=1", "train.device_batch_size=8", "train.global_batch_size=16"),
    *(f"train.steps={NUM_STEPS}", "train.log_every=1", "train.eval_every=null", "checkpoint.every_steps=10"),
    *("resources.time='10'", "requeue.grace_s=20", "logging.tensorboard=false"),
)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Curve:
    """Return the curve of an undisturbed training run of two ranks on this machine."""
    folder = tmp_path_factory.mktemp("whole")
    config = survival.survivor_config(folder, NUM_STEPS, batch_size=4)
    return survival.curve(survival.undisturbed(folder, config, num_procs=2))


@pytest.fixture
def config(login: Login) -> Path:
    login.script(survival.WAITS_IN_EACH_STEP, "sitecustomize.py")
    return survival.survivor_config(login.folder, NUM_STEPS, batch_size=4)


@pytest.mark.slow(seconds=70)
def test_a_task_with_its_own_data_is_preempted_twice(login, tmp_path_factory):
    """The run uses submitit. Slurm first requeues the job itself, and then cancels the job.

    `test_signals` preempts sbatch, whose run ends in the test of the time limit.
    """
    folder = tmp_path_factory.mktemp("whole")
    alone = survival.undisturbed(folder, write_tutorial(folder), 2, [*TUTORIAL, "data.num_workers=0"])
    login.script(survival.WAITS_IN_EACH_STEP, "sitecustomize.py")
    shape = ("--nodes", "2", "--partition", "low", "--backend", "submitit", "--per", "node")
    run = login.submit(*shape, *settings(*TUTORIAL), config=write_tutorial(login.folder))
    with survival.preemption(login.cluster):
        for attempt, mode in enumerate(("REQUEUE", "CANCEL"), 1):
            wait_for_steps(run, attempt, 5)
            survival.set_preemption(login.cluster, mode, grace_s=0)
            survival.preempt(login.cluster)
        assert wait_until_over(login, run, RESTART_S)["state"] == "finished", login.logs_and_attempts(run)
    assert run.attempt_numbers() == [1, 2, 3]
    assert survival.computed_twice(run) == []
    assert survival.curve(run) == survival.curve(alone)
    login.wait_until_idle()


@pytest.mark.slow(seconds=45)
def test_the_time_limit(login, config, expected):
    limits = settings("resources.time='1'", "requeue.grace_s=30")
    run = login.submit(*limits, config=config)
    wait_for(lambda: len(survival.steps_of(run)) > 10 or survival.events_of(run, "signal"), "some steps")
    # The ranks are suspended, as if their steps took longer, so that the run reaches its limit.
    ranks = survival.ranks_of(run)
    survival.pause(ranks.values())
    wait_for(lambda: survival.events_of(run, "signal"), "the signal before the limit")
    survival.go_on(ranks.values())
    wait_for(lambda: len(run.attempt_numbers()) > 1, "the next attempt")
    # If a start took the whole minute of the limit, the run would never finish.
    login.run(["scontrol", "update", f"jobid={login.job_id(run)}", "timelimit=10"], check=True)
    assert wait_until_over(login, run, 2 * RESTART_S)["state"] == "finished", login.logs_and_attempts(run)
    assert {e["cause"] for e in survival.events_of(run, "requeue_decision")} == {"timeout"}
    assert survival.computed_twice(run) == []
    assert survival.curve(run) == expected


@pytest.mark.slow(seconds=45)
def test_a_rank_and_then_a_host_die(login, config, expected):
    run = login.submit(*settings("resources.spare_nodes=1"), config=config)
    wait_for_steps(run, 1, 12)
    job_id = login.job_id(run)
    killed_s = survival.kill_rank(run, 1)
    wait_for_steps(run, 2, 12)
    first, again = (survival.time_of(event) for event in survival.events_of(run, "first_step"))
    # The queue is not counted. Other work on the machine slows a start down, but by less than this.
    assert again - killed_s < 10 + 2 * (first - survival.time_of(survival.events_of(run, "started")[0]))
    login.cluster.kill_host(2)
    wait_for_steps(run, 3, 1)
    assert wait_until_over(login, run, RESTART_S)["state"] == "finished", login.logs_and_attempts(run)
    assert login.job_id(run) == job_id
    assert login.cluster.job(job_id)["Restarts"] == "0"
    decisions = survival.events_of(run, "requeue_decision")
    assert [(e["cause"], e["action"]) for e in decisions] == [("crash", "restart"), ("node_fail", "restart")]
    assert survival.hosts_of(run, 3) == [login.cluster.hosts[0], login.cluster.hosts[2]]
    assert survival.curve(run) == expected


@pytest.mark.slow(seconds=20)
def test_what_must_not_start_again(login):
    config = survival.survivor_config(login.folder, batch_size=4)
    login.script(survival.WAITS_IN_EACH_STEP + survival.BUGS, "sitecustomize.py")
    login.script("import time\nimport no_such_module\n", "bad.py")
    one = ("--nodes", "1", "--name")
    runs = {
        bug: login.submit(*one, bug, *settings(f"launch.env.BUG={bug}"), config=config)
        for bug in ("raise", "nan", "none")
    }
    runs["import"] = login.submit(*one, "import", "--", "python", "bad.py", config=config)
    cancelled = runs.pop("none")
    wait_for_steps(cancelled, 1, 5)
    login.run(["scancel", login.job_id(cancelled)], check=True)
    ends = {bug: wait_until_over(login, run, RESTART_S) for bug, run in runs.items()}
    ends_by_bug = {bug: (end["state"], end["exit_code"], end["verdict"]["type"]) for bug, end in ends.items()}
    assert ends_by_bug == {
        "raise": ("failed", 1, "ValueError"),
        "nan": ("failed", EXIT_NO_RESTART, "DivergedError"),
        "import": ("failed", 1, "ModuleNotFoundError"),
    }
    assert (ends["raise"]["verdict"]["message"], ends["raise"]["verdict"]["step"]) == ("a bug of step 37", 37)
    assert "a bug of step 37" in login.trainkit("status", str(runs["raise"].path)).stdout
    assert wait_until_over(login, cancelled, RESTART_S)["state"] == "stopped"
    login.wait_until_idle()
    num_attempts = [len(run.attempt_numbers()) for run in (*runs.values(), cancelled)]
    assert num_attempts == [2, 1, 1, 1]
    assert survival.saved_step(cancelled) == survival.steps_of(cancelled)[-1]
