"""The argv that an agent starts."""

from __future__ import annotations

import base64
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from trainkit.job.node.worker_env import script_of, worker_argv
from trainkit.job.rank_env import RankEnv
from trainkit.plan.launch import Batch, LaunchPlan, Layout
from trainkit.rundir import RunDir

PLAN = LaunchPlan("sbatch", 2, 4, "cuda", Layout(dp_shard=8), Batch(1, 1, 8, 8), 0.1, 1, 60.0, {})
PLACE = RankEnv(4, 0, 8, 4, 1, 2, "host0", 12345, "agent")
WORLD_INFO = base64.urlsafe_b64encode(b'{"node0": [0, 1, 2, 3], "node1": [0, 1, 2, 3]}').decode()
RUN = RunDir(Path("/runs/mine"))


def test_the_built_in_trainer() -> None:
    argv = worker_argv(PLAN, PLACE, RUN)
    assert argv[0] == sys.executable
    assert argv[-3:] == ("-m", "trainkit.trainer", "/runs/mine")


def test_a_command_is_a_rank_as_it_stands() -> None:
    plan = replace(PLAN, command=("python", "train.py", "--name", "a b"))
    assert worker_argv(plan, PLACE, RUN) == ("python", "train.py", "--name", "a b")


@pytest.mark.parametrize(
    ("launcher", "module", "options"),
    [
        (
            "torchrun",
            "torch.distributed.run",
            [
                "--nnodes=2",
                "--nproc-per-node=4",
                "--node-rank=1",
                "--master-addr=host0",
                "--master-port=12345",
            ],
        ),
        (
            "accelerate",
            "accelerate.commands.launch",
            ["--num_machines=2", "--num_processes=8", "--machine_rank=1", "--main_process_port=12345"],
        ),
        (
            "deepspeed",
            "deepspeed.launcher.launch",
            [
                f"--world_info={WORLD_INFO}",
                "--node_rank=1",
                "--master_addr=host0",
                "--master_port=12345",
            ],
        ),
    ],
)
def test_a_launcher_starts_the_ranks_of_its_node(launcher: str, module: str, options: list[str]) -> None:
    plan = replace(
        PLAN, command=("python", "train.py", "--x"), launcher=launcher, python=("/venv/bin/python",)
    )
    argv = worker_argv(plan, PLACE, RUN)
    assert argv[:3] == ("/venv/bin/python", "-m", module)
    assert set(options) <= set(argv)
    assert argv[-2:] == ("train.py", "--x"), "launchers bring their own interpreter"


def test_script_of() -> None:
    assert script_of(("/usr/bin/python3.11", "a.py", "-x")) == ("a.py", "-x")
    assert script_of(("a.py", "-x")) == ("a.py", "-x")
    assert script_of(("python",)) == ("python",)
