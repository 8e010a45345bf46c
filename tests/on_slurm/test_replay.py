"""Tests `trainkit replay --submit` on two hosts: equal to the last digit up to the step of a host's error."""

import json
from typing import Any

import pytest

from tests.on_slurm.login import Login, settings
from tests.support.tasks import write_tutorial
from trainkit.run.files import read_json
from trainkit.run.rundir import RunDir

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


def collected(login: Login, job: RunDir) -> tuple[int, dict[str, Any]]:
    """Wait until the job of a replay has ended, and return its exit code and result."""
    done = login.trainkit("replay", "--collect", str(job.path), "--json")
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.slow(seconds=20)
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

    code, found = collected(login, job)
    assert (code, found["verdict"], found["is_exact"], found["start_step"]) == (1, "different", True, 2)
    steps = [(step["step"], step["recorded"] == step["replayed"]) for step in found["steps"]]
    assert steps == [(3, True), (4, False)]
    assert (found["culprit"]["ranks"], found["culprit"]["hosts"]) == ([1], [login.cluster.hosts[1]])
    assert "before the reduction" in found["culprit"]["what"]
    assert {path: path.lstat().st_mtime_ns for path in run.path.rglob("*")} == before

    # A replay is not a training run that could be resumed or replayed.
    for words in (("resume", str(job.path)), ("replay", str(job.path), "--step", "3")):
        refused = login.trainkit(*words)
        assert refused.returncode == 2, refused.stdout
        assert f" replay of runs/{run.name}\n" in refused.stderr
