"""Tests commands while Slurm's controller does not answer: they end soon, with exit code 3."""

import json
import time
from pathlib import Path

import pytest

from tests.support.fake_slurm import fake
from trainkit.cli.main import main
from trainkit.cluster import discovery
from trainkit.config import dump_effective, load_config
from trainkit.run.record import add_slurm_attempt, create_job, open_attempt
from trainkit.run.rundir import RunDir
from trainkit.slurm import client

__all__ = ["fake"]

PROGRAMS = ("sbatch", "squeue", "scontrol", "sinfo", "sacct", "sacctmgr", "scancel", "srun")
CPU = ("quickstart", "--set", "device=cpu")


@pytest.fixture
def away(fake, tmp_path, monkeypatch):
    """Make Slurm's commands hang, with a first query that has just timed out."""
    for program in PROGRAMS:
        fake.add(program, '[ "$1" = --version ] && echo slurm 22.05.8 && exit; exec /bin/sleep 60')
    monkeypatch.chdir(tmp_path)
    slurm = {"PATH": fake.environ["PATH"], "SLURM_CONF": str(tmp_path / "slurm.conf")}
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(client, "SHORT_TIMEOUT_S", 0.3)
    monkeypatch.setattr(discovery, "CLUSTER_TIMEOUT_S", 0.3)
    monkeypatch.setitem(client._last, (*slurm.values(), ""), (time.monotonic(), False))
    return fake


@pytest.fixture
def run(tmp_path):
    """Return a run whose job is in Slurm's queue."""
    run = RunDir(tmp_path / "run")
    run.checkpoints_dir.mkdir(parents=True)
    create_job(run, backend="sbatch", name="run", cwd=str(tmp_path), code=None)
    config = load_config(None, overrides=["device=cpu"], environ={}, cwd=tmp_path).config
    open_attempt(run, dump_effective(config), json.dumps({"backend": "sbatch"}))
    add_slurm_attempt(run, 1, "77", "submit", "sbatch")
    return run


@pytest.mark.parametrize(
    "args",
    [
        *(("submit", *CPU), ("submit", *CPU, "--test-only"), ("submit", *CPU, "--sweep", "seed=1,2")),
        *(("check", *CPU, "--estimate"), ("init",), ("cancel", "run"), ("cancel", "run", "--now")),
        *(("requeue", "run"), ("resume", "run"), ("stacks", "run")),
    ],
)
def test_a_controller_that_is_away(away, run, args, capsys):
    begin = time.monotonic()
    assert main(args) == 3, capsys.readouterr().err
    assert time.monotonic() - begin < 8
    assert "did not answer" in capsys.readouterr().err
    assert not Path("runs").exists()
    assert "sbatch" not in [call[0] for call in away.calls if "--version" not in call]


def test_the_state_of_a_run_is_shown_as_far_as_its_files_know(away, run, prints):
    shown = prints(["status", "run"])
    assert "unknown" in shown.out
    assert "did not answer" in shown.err


def test_the_dry_run_of_a_sweep_prints_the_script_and_apart_from_it_the_files_that_differ(
    away, prints, monkeypatch
):
    Path("p.py").touch()
    Path("lib/deepspeed").mkdir(parents=True)
    Path("lib/deepspeed/__init__.py").touch()
    monkeypatch.syspath_prepend("lib")
    sweep = ("--sweep", "train.device_batch_size=2,4", "--sweep", "launch.env.X=1,2")
    launch = ("--launcher", "deepspeed", "--nodes", "2", "--dry-run", "--", "p.py", "{ds_config}")
    shown = prints(("submit", *CPU, "--set", "train.global_batch_size=8", *sweep, *launch))
    assert shown.out.startswith("#!/bin/bash\n")
    assert "==>" not in shown.out
    for point, size in ((0, 2), (2, 4)):
        _, text = shown.err.split(f"runs/quickstart/{point}/ds_config.json <==\n", 1)
        assert json.JSONDecoder().raw_decode(text)[0]["train_micro_batch_size_per_gpu"] == size
    assert shown.err.count("==>") == 2
    assert not Path("runs").exists()
