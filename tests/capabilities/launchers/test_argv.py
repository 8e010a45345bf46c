"""Tests the argv that an agent starts."""

import base64
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.runs import launch_plan
from tests.support.said import said
from trainkit.capabilities.launchers.argv import script_of
from trainkit.capabilities.launchers.launcher_plan import LauncherPlan
from trainkit.formats import JsonObject
from trainkit.job.node.worker_env import worker_argv
from trainkit.job.rank_env import RankEnv
from trainkit.plan.launch import WorkerEnvironment
from trainkit.plan.workload import Workload
from trainkit.run.files import to_json
from trainkit.run.rundir import RunDir

PLAN = launch_plan(workers_per_node=4, device="cuda")
PLACE = RankEnv(4, 0, 8, 4, 1, 2, "host0", 12345, "agent")
WORLD_INFO = base64.urlsafe_b64encode(b'{"node0": [0, 1, 2, 3], "node1": [0, 1, 2, 3]}').decode()
RUN = RunDir(Path("/runs/mine"))


def given(files: dict[str, str] | None = None, values: dict[str, str] | None = None) -> dict[str, JsonObject]:
    """Return the sections of a plan with these values for a launcher."""
    return {"launchers": to_json(LauncherPlan(files or {}, values or {}))}


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate", "deepspeed"])
def test_a_launcher_starts_the_ranks_of_its_node(launcher):
    """Launchers bring their own interpreter."""
    workload = Workload(("python", "train.py", "--x"), launcher)
    plan = replace(PLAN, workload=workload, environment=WorkerEnvironment(python=("/venv/bin/python",)))
    argv = [word.replace(WORLD_INFO, "WORLD_INFO") for word in worker_argv(plan, PLACE, RUN)]
    said("\n".join(argv))


def test_deepspeed_gets_the_gpus_of_the_run_and_the_path_of_its_file(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,GPU-f,6,7")
    here = replace(PLAN, backend="local", device="cuda", workload=Workload(("train.py",), "deepspeed"))
    (info,) = [word for word in worker_argv(here, PLACE, RUN) if word.startswith("--world_info=")]
    nodes = json.loads(base64.urlsafe_b64decode(info.partition("=")[2]))
    assert nodes["node1"] == [4, "GPU-f", 6, 7]
    plan = replace(PLAN, workload=Workload(("train.py", "--deepspeed_config={ds_config}"), "deepspeed"))
    said(worker_argv(plan, PLACE, RUN)[-1])
    plan = replace(plan, parts=given(files={"ds_config.json": "{}"}))
    said(worker_argv(plan, PLACE, RUN)[-1])


def test_script_of():
    assert script_of(("/usr/bin/python3.11", "a.py", "-x")) == ("a.py", "-x")
    assert script_of(("a.py", "-x")) == ("a.py", "-x")
    assert script_of(("python",)) == ("python",)


def test_lightning_starts_once_per_rank_with_the_values_that_the_command_asks_for():
    command = ("train.py", "--nodes={num_nodes}", "{other}")
    plan = replace(PLAN, workload=Workload(command, "lightning"), parts=given(values={"num_nodes": "2"}))
    plan = replace(plan, environment=WorkerEnvironment(python=("/venv/bin/python",)))
    assert worker_argv(plan, PLACE, RUN) == ("/venv/bin/python", "train.py", "--nodes=2", "{other}")
    assert not plan.workload.has_launcher


def test_accelerate_reads_the_kind_of_processes_from_its_file():
    plan = replace(PLAN, workload=Workload(("train.py",), "accelerate"))
    assert "--multi_gpu" in worker_argv(plan, PLACE, RUN)
    argv = worker_argv(replace(plan, parts=given(files={"accelerate.yaml": ""})), PLACE, RUN)
    assert "--multi_gpu" not in argv
    assert argv[-2:] == ("--config_file=/runs/mine/accelerate.yaml", "train.py")


def test_megatron_is_torchrun_with_flags_behind_the_command():
    files = {"megatron_args.txt": "--bf16\n--train-iters 5\n"}
    plan = replace(PLAN, workload=Workload(("python", "pretrain_gpt.py", "--x"), "megatron"))
    argv = worker_argv(replace(plan, parts=given(files=files)), PLACE, RUN)
    assert argv[1:3] == ("-m", "torch.distributed.run")
    assert argv[-5:] == ("pretrain_gpt.py", "--x", "--bf16", "--train-iters", "5")
