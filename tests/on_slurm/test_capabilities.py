"""Tests capabilities on several hosts: drill, notifications, replay, ports, growth and diagnosis."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.cluster_256 import Opens, Table, idle, lose_host, new_login, start
from tests.on_slurm.broken_runs import BROKEN, diagnosed, make
from tests.on_slurm.login import agents_of, log_of, settings, wait_for
from tests.on_slurm.survival import events_of
from tests.on_slurm.test_script import files_with
from tests.support.tasks import write_tutorial
from tests.support.two_lines import two_lines
from tests.support.webhooks import SECRET, webhook
from tools.slurm_cluster.cluster import Cluster, running
from tools.slurm_cluster.network import MACHINE_INDEX
from trainkit.run.files import read_json
from trainkit.run.rundir import RunDir


@pytest.mark.slow(seconds=65)
def test_a_command_survives_all_that_can_be_tried(login):
    """With a range of nodes, the drill interrupts only ranks that every number of nodes has."""
    command = ("--", "python", login.script(two_lines(steps=100), "train.py"))
    shape = ("--nodes", "1-2", "--gpus-per-node", "1", "--seed", "7")  # the seed of the second of two ranks
    done = login.trainkit("drill", str(login.config), "--json", *shape, *command, timeout_s=1200.0)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {result["scenario"]: result for result in json.loads(done.stdout)["scenarios"]}
    tried = {name: result for name, result in found.items() if result["state"] != "skipped"}
    assert {result["state"] for result in tried.values()} == {"passed"}
    assert {result["curve"] for result in tried.values()} == {"equal"}
    assert [tried[name]["action"][-1] for name in ("rank", "node")] == ["0", "0"]
    assert (tried["signal"]["num_recomputed"], tried["requeue"]["num_recomputed"]) == (0, 0)
    ends = {
        name: [(e["action"], e["cause"]) for e in events_of(RunDir(result["run_dir"]), "requeue_decision")]
        for name, result in tried.items()
    }
    assert ends == {
        "signal": [("requeue", "asked")],
        "requeue": [("requeue", "preempted")],
        # The ranks of the other node wait for the dead ranks, and only Slurm reports that these are dead.
        "rank": [("restart", "crash")],
        "node": [("restart", "crash")],
    }
    assert not (login.folder / ".state").exists()  # the user's list of runs


LISTENS_ONCE = """
import json, os, signal, socket, sys, time
run, attempt = os.environ["TRAINKIT_JOB_RUN_DIR"], int(os.environ["TRAINKIT_JOB_ATTEMPT"])
asked = []
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, lambda n, f: asked.append(n))
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
open(f"{run}/listens-{rank}", "w").close()
if attempt == 1 and rank == world_size - 1:
    while not all(os.path.exists(f"{run}/listens-{other}") for other in range(world_size)):
        time.sleep(0.02)
    event = {"event": "slow_rank", "attempt": 1, "rank": rank, "ratio": 2.0}
    event |= {"host": socket.gethostname(), "since_step": 1200, "phase": "compute"}
    with open(run + "/events.jsonl", "a") as f:
        f.write(json.dumps(event) + "\\n")
print("attempt", attempt, flush=True)
while attempt == 1 and not asked:
    time.sleep(0.02)
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, signal.SIG_IGN)  # the second of Slurm's and the agent's may come during the exit
sys.exit(75 if attempt == 1 else 0)
"""
"""A script whose last rank reports itself as slow once all ranks listen.

The ranks save on a stop signal, and attempt 2 finishes.
"""


def test_runs_restart_without_a_slow_host_and_report_it(login):
    script, hosts = login.script(LISTENS_ONCE), login.cluster.hosts
    policy = settings("requeue.slow_hosts=restart", "requeue.slow_after_s=1")
    command = ["--", "python", script]
    with webhook(login.cluster.address(MACHINE_INDEX)) as found:
        spare = login.submit("--nodes", "2", *policy, *settings("resources.spare_nodes=1"), *command)
        login.wait_for_log(spare, "attempt 1")
        reports = settings("notify.webhook=MY_HOOK", "notify.mail=me@example.org")
        alone = login.submit(*policy, *reports, *command, env={"MY_HOOK": found.url})
        login.wait_for_log(alone, "attempt 1")
        login.trainkit("requeue", str(alone.path))
        ends = [login.wait_for_end(run) for run in (spare, alone)]
        assert [end["action"] for end in ends] == ["restart", "requeue"], login.logs_and_attempts(alone)
        for run in (spare, alone):
            assert login.wait_for_end(run, attempt=2)["state"] == "finished", login.logs_and_attempts(run)
            assert log_of(run, attempt=2) == "attempt 2\n"
        wait_for(lambda: len(found.messages) == 2, "two reports")
    assert ends[0]["reason"].startswith(f"restarts without {hosts[1]}: rank 1 ")
    assert [host for _, host in agents_of(spare, attempt=2)] == [hosts[0], hosts[2]]
    [(_, before)], [(_, after)] = agents_of(alone), agents_of(alone, attempt=2)
    assert before != after
    job = login.cluster.job(login.job_id(alone))
    assert (job["ExcNodeList"], job["MailUser"]) == (before, "me@example.org")
    assert "1 (1 slow host)" in login.trainkit("status", str(spare.path)).stdout
    first, last = found.messages
    assert first["text"].startswith(f"{alone.name} is requeued: ")
    assert [(one["event"], one["attempt"]) for one in (first, last)] == [("requeued", 1), ("finished", 2)]
    assert last["job_id"] == login.job_id(alone)
    text = alone.script_file.read_text()
    assert "#SBATCH --mail-type=END,FAIL,REQUEUE\n" in text
    assert files_with(alone.path, SECRET) == []


OPTIONS = settings(
    *("device=cpu", "precision.dtype=fp32", "parallel.dp_replicate=2", "parallel.dp_shard=1"),
    *("resources.cpus_per_gpu=1", "data.num_workers=0", "train.steps=4", "train.log_every=1"),
    *("train.eval_every=null", "checkpoint.every_steps=2", "logging.tensorboard=false"),
)
FAULTY = """
import os, pathlib, torch
from curves import Frequency

class Faulty(Frequency):
    '''Its eighth backward pass, the second one of step 4, flips a bit on the host that is named in a file.'''

    def build_model(self):
        model, file, count = super().build_model(), pathlib.Path("faulty-host"), 0

        def flip(grad):
            nonlocal count
            count += 1
            if count != 8 or not file.exists() or file.read_text() != os.uname().nodename:
                return grad
            flipped = grad.clone()
            flipped.view(torch.int32).view(-1)[7] ^= 1 << 28
            return flipped

        model.embed.weight.register_hook(flip)
        return model
"""


@pytest.mark.slow(seconds=50)
def test_a_job_names_the_host_that_flipped_a_bit(login):
    config = write_tutorial(login.folder)
    login.script(FAULTY, "faulty.py")
    config.write_text(config.read_text().replace("curves.py:Frequency", "faulty.py:Faulty"))
    faulty = login.folder / "faulty-host"
    faulty.write_text(login.cluster.hosts[1])
    run = login.finish(login.submit("--nodes", "2", "--gpus-per-node", "1", *OPTIONS, config=config))
    faulty.unlink()
    before = {path: path.lstat().st_mtime_ns for path in run.path.rglob("*")}
    done = login.trainkit("replay", str(run.path), "--step", "3..4", "--submit", "--time", "10", "--json")
    assert done.returncode == 0, done.stderr
    job = RunDir(json.loads(done.stdout)["run_dir"])
    assert job.path.parent == run.path.parent
    plan = read_json(login.finish(job).plan_file)
    assert (plan["num_nodes"], plan["slurm"]["sbatch"]["time"]) == (2, "10")

    done = login.trainkit("replay", "--collect", str(job.path), "--json")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert (found["verdict"], found["is_exact"], found["start_step"]) == ("different", True, 2)
    steps = [(step["step"], step["recorded"] == step["replayed"]) for step in found["steps"]]
    assert steps == [(3, True), (4, False)]
    assert (found["culprit"]["ranks"], found["culprit"]["hosts"]) == ([1], [login.cluster.hosts[1]])
    assert "before the reduction" in found["culprit"]["what"]
    assert {path: path.lstat().st_mtime_ns for path in run.path.rglob("*")} == before

    # A replay is not a training run that could be resumed.
    refused = login.trainkit("resume", str(job.path))
    assert (refused.returncode, f" replay of runs/{run.name}\n" in refused.stderr) == (2, True)


CAMPAIGN = Path(__file__).resolve().parents[2] / "benchmarks/port_clashes.py"


def test_two_jobs_and_two_steps_of_one_job_at_once(login):
    """Half of the ports are taken, as in the longer campaign in benchmarks/."""
    argv = [sys.executable, str(CAMPAIGN), "--starts", "1", "--seed", "7", "--folder", str(login.folder)]
    done = login.run(argv, timeout_s=150)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert (figures["sets_of_ranks"], figures["clashes"]) == (4, 0)
    assert done.stdout.count("13384 of 26768 ") == 2


NUM_HOSTS = 8
"""Large enough that a Slurm step is a tree, where a host waits a minute for a lost one."""


@pytest.fixture
def eight_hosts(clusters_possible: None, slurm_version: str | None) -> Iterator[Cluster]:
    with running(slurm_version, num_hosts=NUM_HOSTS) as made:
        yield made


@pytest.mark.slow(seconds=30)
def test_a_run_costs_little_and_goes_on_without_a_lost_host(eight_hosts):
    with Opens(eight_hosts.folder / "home") as opens:
        table, login = Table(NUM_HOSTS), new_login(eight_hosts, opens.folder)
        job = start(login, table, opens, "shrink", f"2-{NUM_HOSTS}")
        idle(job, table, opens, seconds=3)
        lose_host(job, table, "shrink", 2)
    assert table.missed == []


@pytest.mark.slow(seconds=10)
def test_the_cause_and_the_first_rank(cluster, tmp_path):
    """`python -m tests.on_slurm.broken_runs` makes the others."""
    login, run = make("data-on-one-host", cluster, tmp_path)
    found = diagnosed(login, run, 1)
    assert BROKEN["data-on-one-host"].is_right(found, cluster.hosts), found
