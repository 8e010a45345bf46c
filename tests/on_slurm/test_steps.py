"""Tests `srun … trainkit run` in steps of every shape, and how a process in a job finds its rank."""

import json

import pytest

from tests.on_slurm.login import agents_of, log_of, wait_for
from tests.support.runs import losses
from trainkit.run.files import read_json
from trainkit.run.rundir import RunDir

NANO = """
name: nano
device: cpu
model: {preset: nano}
data: {seq_len: 64}
train: {steps: 2, device_batch_size: 4, global_batch_size: 16, log_every: 1, eval_every: null}
checkpoint: {every_steps: null}
precision: {dtype: fp32}
logging: {tensorboard: false}
requeue: {grace_s: 20}
"""


def env_of(printed: str) -> list[dict[str, object]]:
    """Return what every task of a step printed about itself, by rank."""
    found = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda one: one["rank"])


@pytest.mark.smoke
def test_srun_trainkit_run(login):
    (login.folder / "nano.yaml").write_text(NANO)
    done = login.run(["srun", "--nodes=2", "trainkit", "run", "nano.yaml"], 600.0)
    assert done.returncode == 0, done.stderr
    run = RunDir(done.stdout.splitlines()[0])
    assert run.path == login.folder / "runs/nano"
    assert "step=2/2" in done.stdout
    assert done.stdout.count("step=1/2") == 1
    assert list(losses(run.path)) == [1, 2]
    assert len(list(run.attempt(1).logs_dir.glob("rank-*.log"))) == 2
    assert read_json(run.attempt(1).end_file)["state"] == "finished"
    assert login.status(run)["state"] == "finished"
    assert list((login.folder / "runs/.steps").iterdir()) == []


def test_nodes_with_different_numbers_of_ranks_in_a_bigger_allocation(login):
    login.script("import os; print(os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])")
    step = ["srun", "-n", "3", "-N", "2", "trainkit", "run", "small.yaml", "--", "python", "script.py"]
    done = login.run(["salloc", "--nodes=3", "--ntasks=12", *step])
    assert done.returncode == 0, done.stderr
    run = RunDir(done.stdout.splitlines()[0])
    sizes = read_json(run.plan_file)["node_sizes"]
    assert sorted(sizes) == [1, 2]
    hosts = [(node, host) for node, host in enumerate(login.cluster.hosts[:2]) for _ in range(sizes[node])]
    assert agents_of(run) == hosts
    assert [log_of(run, rank) for rank in range(3)] == [f"{rank} of 3\n" for rank in range(3)]


def test_what_is_wrong_ends_all_tasks(login):
    argv = ["srun", "--ntasks=2", "--nodes=2", "trainkit", "run", "small.yaml"]
    done = login.run([*argv, "--set", "train.steps=none"])
    assert done.returncode == 2
    assert done.stderr.count("error: --set train.steps=none: ") == 1
    assert not RunDir(login.folder / "runs/small").exists()


def test_what_a_process_is_in_the_batch_shell_and_in_steps(login):
    job = login.script(
        """
        #SBATCH --nodes=3 --ntasks=6 --ntasks-per-node=2 --output=out
        trainkit env --json > batch
        srun trainkit env --json > all
        srun --nodes=2 --ntasks=2 --nodelist=$(scontrol show hostnames | tail -1) trainkit env --json > some
        srun --ntasks=1 --nodes=1 trainkit env --json > one
        srun --ntasks=5 --nodes=2 --overcommit trainkit env --json > uneven
        srun --distribution=cyclic trainkit env --json > cyclic
        touch done
        """
    )
    script = login.folder / job
    script.write_text("#!/bin/bash" + script.read_text())
    login.run(["sbatch", job], check=True)
    wait_for((login.folder / "done").exists, "the end of the job")
    read = lambda name: env_of((login.folder / name).read_text())  # noqa: E731
    [batch] = read("batch")
    assert (batch["is_rank"], batch["rank"]) == (False, None)
    assert "not a task" in str(batch["reason"])
    for name, sizes in (("all", [2, 2, 2]), ("some", [1, 1]), ("one", [1]), ("cyclic", [2, 2, 2])):
        found = read(name)
        assert [one["rank"] for one in found] == list(range(sum(sizes)))
        assert [one["node_rank"] for one in found] == [
            node for node, size in enumerate(sizes) for _ in range(size)
        ]
        first = found[0]["hosts"][0] if len(sizes) > 1 else "127.0.0.1"
        assert {one["master_addr"] for one in found} == {first}
        assert all(one["world_size"] == sum(sizes) and one["num_nodes"] == len(sizes) for one in found)
    assert login.cluster.hosts[2] in read("some")[0]["hosts"]
    uneven = read("uneven")
    assert [one["rank"] for one in uneven] == list(range(5))
    assert sorted(one["local_rank"] for one in uneven if one["node_rank"] == 0) in ([0, 1, 2], [0, 1, 2, 3])


def test_a_heterogeneous_step_is_refused_and_one_component_of_it_is_not(login):
    components = ["salloc", "--ntasks=1", ":", "--ntasks=2", "srun"]
    for command in (["env"], ["run", str(login.config)]):
        done = login.run([*components, "--het-group=0,1", "trainkit", *command])
        assert done.returncode == 2
        assert "heterogeneous job" in done.stderr.partition("\nhint: ")[0]
    done = login.run([*components, "--het-group=1", "trainkit", "env", "--json"])
    assert [one["world_size"] for one in env_of(done.stdout)] == [2, 2]
    assert not (login.folder / "runs").exists()
