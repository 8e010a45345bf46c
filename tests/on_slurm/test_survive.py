"""Tests that a training run survives usual failures of clusters, and resumes with the same curve.

`python -m benchmarks.survival` tests all of them for every backend and mode.
`test_node_range` has a time limit.
"""

import pytest

from tests.on_slurm import survival
from tests.on_slurm.login import Login, settings
from tests.on_slurm.survival import RESTART_S, Curve, wait_for_steps, wait_until_over
from tests.support.tasks import write_tutorial
from trainkit.run.rundir import RunDir

pytestmark = pytest.mark.xdist_group("survive")
TUTORIAL = (
    *("device=cpu", "precision.dtype=fp32", "resources.gpus_per_node=1", "resources.cpus_per_gpu=1"),
    *("parallel.dp_shard=2", "data.num_workers=1", "train.device_batch_size=8", "train.global_batch_size=16"),
    *("train.steps=40", "train.log_every=1", "train.eval_every=null", "checkpoint.every_steps=10"),
    *("resources.time='10'", "requeue.grace_s=20", "logging.tensorboard=false"),
)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Curve:
    """Return the curve of an undisturbed training run of two ranks on this machine."""
    folder = tmp_path_factory.mktemp("whole")
    more = [*TUTORIAL, "data.num_workers=0"]
    return survival.curve(survival.undisturbed(folder, write_tutorial(folder), 2, more))


def submit(login: Login, *args: str) -> RunDir:
    """Submit a task with its own data on two hosts."""
    login.script(survival.WAITS_IN_EACH_STEP, "sitecustomize.py")
    return login.submit("--nodes", "2", *settings(*TUTORIAL), *args, config=write_tutorial(login.folder))


@pytest.mark.slow(seconds=60)
def test_a_task_with_its_own_data_is_preempted_twice(login, expected):
    """Slurm first requeues the job itself, and then cancels the job."""
    run = submit(login, "--partition", "low", "--backend", "submitit", "--per", "node")
    with survival.preemption(login.cluster):
        for attempt, mode in enumerate(("REQUEUE", "CANCEL"), 1):
            wait_for_steps(run, attempt, 5)
            survival.set_preemption(login.cluster, mode, grace_s=0)
            survival.preempt(login.cluster)
        assert wait_until_over(login, run, RESTART_S)["state"] == "finished", login.logs_and_attempts(run)
    assert run.attempt_numbers() == [1, 2, 3]
    assert survival.computed_twice(run) == []
    assert survival.curve(run) == expected
    login.wait_until_idle()


@pytest.mark.slow(seconds=60)
def test_a_rank_and_then_a_host_die(login, expected):
    run = submit(login, *settings("resources.spare_nodes=1"))
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
