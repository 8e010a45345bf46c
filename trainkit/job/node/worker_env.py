"""The environment and argv of a worker."""

from __future__ import annotations

import base64
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath

from trainkit.job.node.rendezvous import Rendezvous
from trainkit.job.processes import module_argv
from trainkit.job.rank_env import ATTEMPT_VARIABLE, NONCE_VARIABLE, RANK_VARIABLES, RUN_DIR_VARIABLE, RankEnv
from trainkit.job.spare_children import AGENT_VARIABLE
from trainkit.job.work_folder import WORK_DIR_VARIABLE
from trainkit.plan.launch import ACCELERATE_CONFIG, DS_CONFIG, MEGATRON_ARGS, LaunchPlan
from trainkit.run.rundir import AttemptDir, RunDir

STARTUP_FOLDER = Path(__file__).parents[1] / "startup"
ALLOCATOR_VARIABLES = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"}
"""Where a user may have set up torch's allocator, under its present name and former ones."""
DONE_FILE_VARIABLE = "TRAINKIT_JOB_DONE_FILE"
"""Path of a file that a command creates when it is done: exit code 0 after a notice then means finished."""


def worker_rank(plan: LaunchPlan, rendezvous: Rendezvous, local_rank: int) -> RankEnv:
    """The rank environment of one worker; ranks are numbered node by node."""
    return RankEnv(
        rank=plan.first_rank_of(rendezvous.node_rank) + local_rank,
        local_rank=local_rank,
        world_size=plan.world_size,
        local_world_size=plan.workers_of(rendezvous.node_rank),
        node_rank=rendezvous.node_rank,
        num_nodes=plan.num_nodes,
        master_addr=rendezvous.master_addr,
        master_port=rendezvous.master_port,
        source="agent",
        nonce=rendezvous.nonce,
    )


def configured_environ(plan: LaunchPlan, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that is no rank yet: inherited, then `launch.env`."""
    environ = {name: value for name, value in inherited.items() if name not in RANK_VARIABLES}
    # On Slurm the script has set PYTHONPATH already, with the code snapshot in front.
    kept = {"PYTHONPATH"} if plan.slurm is not None else set()
    return environ | {name: value for name, value in plan.env.items() if name not in kept}


def worker_environ(
    plan: LaunchPlan,
    rank_env: RankEnv,
    attempt: AttemptDir,
    *,
    inherited: Mapping[str, str],
    network: Mapping[str, str],
) -> dict[str, str]:
    """The complete environment of one worker: inherited, `launch.env`, trainkit's defaults, then its rank."""
    environ = configured_environ(plan, inherited)
    environ.setdefault(
        "OMP_NUM_THREADS", str(plan.threads_per_worker or own_threads(plan, rank_env, inherited))
    )
    environ.setdefault("PYTHONUNBUFFERED", "1")
    for name, value in network.items():
        environ.setdefault(name, value)
    if plan.is_here and plan.device == "cuda" and plan.num_nodes > 1:
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        environ["CUDA_VISIBLE_DEVICES"] = gpu_slice(plan, rank_env.node_rank, visible)
    if not plan.workload.has_launcher:
        environ.update(rank_env.to_environ())
    if plan.venv is not None:
        # What its bin/activate does.
        environ["VIRTUAL_ENV"] = plan.venv
        environ["PATH"] = f"{plan.venv}/bin:{environ.get('PATH', os.defpath)}"
        environ.pop("PYTHONHOME", None)
    environ[AGENT_VARIABLE] = str(os.getpid())
    environ["PYTHONPATH"] = os.pathsep.join([str(STARTUP_FOLDER), *filter(None, [environ.get("PYTHONPATH")])])
    environ[RUN_DIR_VARIABLE] = str(attempt.run.path)
    environ[ATTEMPT_VARIABLE] = str(attempt.number)
    if plan.workload.is_command:
        _add_for_command(environ, plan, attempt)
        if WORK_DIR_VARIABLE in inherited:
            environ["PWD"] = inherited[WORK_DIR_VARIABLE]
        return environ
    if plan.device == "cuda" and not ALLOCATOR_VARIABLES & environ.keys():
        # Sizes that change, as those of the last batch of a validation, would otherwise split the memory into
        # pieces that nothing fits in.
        environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    return {**environ, NONCE_VARIABLE: rank_env.nonce} if rank_env.nonce else environ


def _add_for_command(environ: dict[str, str], plan: LaunchPlan, attempt: AttemptDir) -> None:
    environ[DONE_FILE_VARIABLE] = str(attempt.done_file)
    if not plan.workload.has_launcher:
        # As torchrun does, so that a framework takes these ranks and not those that Slurm's variables
        # suggest: Lightning, which would, also ignores SIGTERM then.
        environ["TORCHELASTIC_RUN_ID"] = f"{attempt.run.path.name}-{attempt.number}"
        return
    # How long torchrun waits for its ranks after SIGTERM; its default is 30 s.
    environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(math.ceil(plan.grace_s)))
    if plan.launcher == "accelerate" and plan.device == "cpu":
        # Without it, accelerate on a host without GPUs runs every rank as a single process.
        environ.setdefault("ACCELERATE_USE_CPU", "true")


def own_threads(plan: LaunchPlan, rank_env: RankEnv, inherited: Mapping[str, str]) -> int:
    """The number of CPU threads per worker, derived from this node's CPUs when the plan sets none."""
    given = inherited.get("SLURM_CPUS_PER_TASK", "")
    num_cpus = len(os.sched_getaffinity(0))
    if given.isdigit():
        workers_per_task = 1 if plan.per == "gpu" else rank_env.local_world_size
        return max(1, min(int(given), num_cpus) // workers_per_task)
    return max(1, num_cpus // rank_env.local_world_size)


def gpu_slice(plan: LaunchPlan, node_rank: int, visible: str | None) -> str:
    """CUDA_VISIBLE_DEVICES of one node of a local run, whose nodes share this machine's GPUs.

    `visible` is the inherited CUDA_VISIBLE_DEVICES; None means all GPUs, numbered from 0.
    """
    count = plan.workers_per_node
    names = visible.split(",") if visible else [str(index) for index in range(plan.world_size)]
    return ",".join(names[node_rank * count : (node_rank + 1) * count])


def worker_argv(plan: LaunchPlan, rank_env: RankEnv, run: RunDir) -> tuple[str, ...]:
    """The argv of an agent's child process: a rank, or the launcher of all ranks on a node."""
    if not plan.workload.is_command:
        trainer = module_argv("trainkit.trainer", str(run.path))
        return trainer if plan.python is None else (*plan.python, *trainer[trainer.index("-m") :])
    command = _filled_in(plan, run)
    if plan.launcher == "python":
        return command
    python = plan.python or (sys.executable,)
    if plan.launcher == "lightning":
        return (*python, *script_of(command))
    module = _LAUNCHERS[plan.launcher](rank_env)
    config = run.path / ACCELERATE_CONFIG
    if config.name in plan.launcher_files:
        # The file says which kind of processes: with --multi_gpu, accelerate would not read it.
        module = (*(word for word in module if word != "--multi_gpu"), f"--config_file={config}")
    flags = plan.launcher_files.get(MEGATRON_ARGS, "").split()
    return (*python, "-m", *module, *script_of(command), *flags)


def _filled_in(plan: LaunchPlan, run: RunDir) -> tuple[str, ...]:
    """The command of a plan with its placeholders filled in; any other text in braces stays."""
    command, values = plan.command or (), dict(plan.launcher_values)
    if DS_CONFIG in plan.launcher_files:
        values["ds_config"] = str(run.path / DS_CONFIG)
    for name, value in values.items():
        command = tuple(word.replace(f"{{{name}}}", value) for word in command)
    return command


def script_of(command: Sequence[str]) -> tuple[str, ...]:
    """A command without a leading Python interpreter: launchers use their own."""
    first = PurePath(command[0]).name
    if first.startswith("python") and len(command) > 1:
        return tuple(command[1:])
    return tuple(command)


def _torchrun(rank_env: RankEnv) -> tuple[str, ...]:
    return (
        "torch.distributed.run",
        f"--nnodes={rank_env.num_nodes}",
        f"--nproc-per-node={rank_env.local_world_size}",
        f"--node-rank={rank_env.node_rank}",
        f"--master-addr={rank_env.master_addr}",
        f"--master-port={rank_env.master_port}",
    )


def _accelerate(rank_env: RankEnv) -> tuple[str, ...]:
    return (
        "accelerate.commands.launch",
        *(("--multi_gpu",) if rank_env.world_size > 1 else ()),
        f"--num_machines={rank_env.num_nodes}",
        f"--num_processes={rank_env.world_size}",
        f"--machine_rank={rank_env.node_rank}",
        f"--main_process_ip={rank_env.master_addr}",
        f"--main_process_port={rank_env.master_port}",
    )


def _deepspeed(rank_env: RankEnv) -> tuple[str, ...]:
    # The `deepspeed` program starts this module on every node, by ssh and from a hostfile.
    gpus = list(range(rank_env.local_world_size))
    nodes = {f"node{index}": gpus for index in range(rank_env.num_nodes)}
    return (
        "deepspeed.launcher.launch",
        f"--world_info={base64.urlsafe_b64encode(json.dumps(nodes).encode()).decode()}",
        f"--node_rank={rank_env.node_rank}",
        f"--master_addr={rank_env.master_addr}",
        f"--master_port={rank_env.master_port}",
    )


_LAUNCHERS = {
    "torchrun": _torchrun,
    "accelerate": _accelerate,
    "deepspeed": _deepspeed,
    "megatron": _torchrun,
}
"""Launcher -> function that returns its module and options for the ranks of one node."""
