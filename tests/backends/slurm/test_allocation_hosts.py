"""Tests which hosts of a job a step uses, and which hosts count as lost."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.support.said import said
from trainkit.backends.slurm import resubmit
from trainkit.backends.slurm.allocation import SlurmAllocation
from trainkit.backends.slurm.resubmit import lost_hosts
from trainkit.backends.slurm.step import step_argv
from trainkit.cluster.machine import Machine
from trainkit.cluster.model import Cluster
from trainkit.cluster.target import Target
from trainkit.config import load_config
from trainkit.errors import TrainkitError
from trainkit.job import processes
from trainkit.job.attempt import Attempt
from trainkit.plan.facts import Facts
from trainkit.plan.launch import LaunchPlan, option_argv
from trainkit.plan.make_plan import with_parts
from trainkit.plan.node_range import plan_nodes
from trainkit.run.files import append_jsonl
from trainkit.run.record import open_attempt, write_plan
from trainkit.run.rundir import RunDir
from trainkit.scheduler import JobState
from trainkit.slurm.client import SlurmUnreachable
from trainkit.slurm.jobs import JobDetails

HOSTS = ("h18", "h19", "h1", "h2")
NAMES = ("SRUN_CPUS_PER_TASK", "SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK")


def plan(*overrides: str) -> LaunchPlan:
    given = ["device=cpu", "train.global_batch_size=null", "resources.nodes=2", *overrides]
    loaded = load_config(None, overrides=given, environ={}, cwd=Path("/nowhere"))
    machine = Machine(2, 0, (), "a login node")
    facts = Facts(machine, Target("sbatch", "a test", Cluster("unknown")))
    return with_parts(plan_nodes(loaded, facts), loaded, facts)


def step(made: LaunchPlan, *before: str) -> list[str]:
    agent = ["python", "-m", "trainkit.job.node.agent", "/runs/srun"]
    return [*before, "srun", *option_argv(made.slurm.srun), *agent]


@pytest.mark.parametrize("per", ["gpu", "node"])
def test_with_spares_the_step_has_its_hosts(per):
    made = plan("resources.spare_nodes=1", "resources.gpus_per_node=4", f"launch.per={per}")
    argv = step_argv(step(made), made, ["h19", "h1", "h2"])
    assert argv[:2] == ["srun", "--nodelist=h19,h1"]
    assert [argv[0], *argv[2:]] == step(made)
    without = plan()  # without spare nodes, the step is the one in the script
    assert step_argv(step(without), without, ["h1", "h2"]) == step(without)
    assert {"--nodes=2", f"--ntasks={8 if per == 'gpu' else 2}"} < set(argv)


def test_of_a_range_the_step_has_what_is_there(tmp_path, monkeypatch):
    made = plan("resources.nodes=1-4", "train.global_batch_size=16", "train.device_batch_size=4")
    argv = step_argv(step(made), made.at(3), ["h19", "h1", "h2"])
    assert argv[1:4] == ["--nodelist=h19,h1", "--nodes=2", "--ntasks=2"]
    assert not {"--nodes=4", "--ntasks=4"} & set(argv)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "h[1-3]")
    monkeypatch.setenv("SLURM_JOB_PARTITION", "a")
    run = RunDir(tmp_path)
    attempt = open_attempt(run, "", made.to_text())
    allocation = SlurmAllocation(run, "7", step(made))
    fitted = allocation.fitted(Attempt(attempt, made))
    assert (fitted.num_nodes, LaunchPlan.read(attempt.plan_file)) == (2, fitted)
    assert allocation.place(fitted) == {"partition": "a"}
    several = replace(fitted, slurm=replace(fitted.slurm, gpu_types={"a": "a100", "h": "h100"}))
    assert allocation.place(several) == {"partition": "a", "gpu_type": "a100"}
    assert LaunchPlan.read(run.plan_file) == fitted
    allocation.bad.add("h2")
    assert allocation.fitted(Attempt(attempt, fitted)) is fitted
    allocation.bad.add("h1")
    allocation.job = JobDetails(JobState.RUNNING, "", False, 0, True, None)
    assert allocation.restart_options(Attempt(attempt, fitted)).restart
    assert allocation.fitted(Attempt(attempt, fitted)).num_nodes == 1
    allocation.bad.add("h3")
    assert not allocation.restart_options(Attempt(attempt, fitted)).restart


@pytest.mark.parametrize(("per", "of_task"), [("gpu", "32"), ("node", "128")])
def test_ranks_of_an_exclusive_job_use_the_cpus_of_its_nodes(tmp_path, monkeypatch, per, of_task):
    made = plan("resources.gpus_per_node=4", "resources.cpus_per_gpu=8", f"launch.per={per}")
    started: list[dict[str, str]] = []
    monkeypatch.setattr(processes, "start_child", lambda *args, environ, **more: started.append(environ))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "h[1-2]")
    run = RunDir(tmp_path)
    attempt = open_attempt(run, "", made.to_text())
    allocation = SlurmAllocation(run, "7", step(made))
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "192,128(x12)")
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    assert allocation.fitted(Attempt(attempt, made)) is made
    made = replace(made, slurm=replace(made.slurm, fills_nodes=True))
    write_plan(attempt, made.to_text())
    fitted = allocation.fitted(Attempt(attempt, made))
    assert (fitted.threads_per_worker, LaunchPlan.read(attempt.plan_file)) == (32, fitted)
    assert allocation.place(fitted) == {"threads_per_worker": 32}
    allocation.watch(Attempt(attempt, fitted)).start()
    assert [started[0].get(name) for name in NAMES] == [of_task, of_task, None]
    for written in ("cpu={}", "gres/gpu:1,cpu:{}"):  # different Slurm versions print different texts
        monkeypatch.setenv("SLURM_TRES_PER_TASK", written.format(8))
        allocation.watch(Attempt(attempt, fitted)).start()
        assert started[-1][NAMES[2]] == written.format(of_task)
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "64(x2)")  # the next start of the job has other hosts
    assert allocation.fitted(Attempt(attempt, fitted)).threads_per_worker == 16


def test_a_template_may_have_put_something_before_srun():
    made = plan("resources.spare_nodes=1")
    argv = step_argv(step(made, "nice"), made, ["h1", "h2"])
    assert argv[:3] == ["nice", "srun", "--nodelist=h1,h2"]
    with pytest.raises(TrainkitError, match="the step in the script does not use srun: mpirun x"):
        step_argv(["mpirun", "x"], made, ["h1", "h2"])


@pytest.mark.parametrize("spares", [0, 1])
def test_too_few_hosts(spares):
    made = plan(f"resources.spare_nodes={spares}")
    with pytest.raises(TrainkitError, match="needs 2 nodes, but only 1 of the job's hosts are usable: h1"):
        step_argv(step(made), made, ["h1"])


def test_lost_is_what_slurm_calls_so_or_has_taken_away(monkeypatch, capfd):
    states = {"h1": "allocated", "h2": "down*", "h3": "mixed*", "h4": "idle", "h5": "draining", "h6": "fail"}
    monkeypatch.setattr(resubmit, "hosts_of_job", lambda job_id: ["h1", "h2", "h3", "h5", "h6", "h7"])
    monkeypatch.setattr(resubmit, "node_states", lambda hosts: states)
    hosts = ["h1", "h2", "h3", "h4", "h5", "h6", "h7"]
    assert lost_hosts("7", hosts, is_running=True) == ("h2", "h3", "h4", "h6")
    # While a job ends, its hosts leave the job one by one.
    assert lost_hosts("7", hosts, is_running=False) == ("h2", "h3", "h6")
    assert lost_hosts("7", [], is_running=True) == ()
    # The job ended between the query of the job and the query of its hosts.
    monkeypatch.setattr(resubmit, "hosts_of_job", lambda job_id: [])
    assert lost_hosts("7", hosts, is_running=True) is None
    # A Slurm that does not answer has not lost any.
    away = Mock(side_effect=SlurmUnreachable("squeue cannot reach Slurm"))
    monkeypatch.setattr(resubmit, "hosts_of_job", away)
    assert lost_hosts("7", ["h1"], is_running=True) is None
    said(capfd.readouterr().out)


@pytest.mark.parametrize("policy", ["ignore", "exclude", "restart"])
def test_hosts_of_slow_ranks_are_avoided_where_the_config_says_so(tmp_path, policy):
    attempt = RunDir(tmp_path).attempt(1)
    attempt.create()
    for rank, host in enumerate(("h18", "h1", "elsewhere")):
        event = {"event": "slow_rank", "attempt": 1, "rank": rank, "host": host, "ratio": 1.7}
        append_jsonl(attempt.run.events_file, event)
    append_jsonl(attempt.run.events_file, {"event": "slow_rank_over", "attempt": 1, "rank": 0, "host": "h18"})
    of_job = SlurmAllocation.__new__(SlurmAllocation)
    of_job.hosts, of_job.bad = list(HOSTS), set()
    of_job.record_suspect(Attempt(attempt, plan(f"requeue.slow_hosts={policy}")), None)
    assert of_job.bad == (set() if policy == "ignore" else {"h1"})
