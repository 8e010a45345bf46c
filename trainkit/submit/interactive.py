"""Interactive shells: on the first node of a new allocation, and on a node of a running job."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from trainkit.cluster.machine import Machine
from trainkit.cluster.target import Target, make_target
from trainkit.config import LoadedConfig, RunConfig
from trainkit.errors import ConfigError, Problem
from trainkit.plan.facts import Facts
from trainkit.plan.make_plan import make_plan
from trainkit.plan.slurm_request import option_argv
from trainkit.plan.workload import Command
from trainkit.submit.interpreters import find_interpreter
from trainkit.submit.job_environment import make_job_environment
from trainkit.submit.templates import render

NOWHERE = Machine(0, 0, (), "this is a login node")
BATCH_ONLY_OPTIONS = ("signal", "requeue", "no-requeue", "no-kill", "ntasks-per-node", "cpus-per-task")


def shell_argv(loaded: LoadedConfig, start_file: str) -> list[str]:
    """The salloc command that requests the resources of a config and starts a shell on the first node.

    Raises ConfigError with every problem.
    """
    backend = "sbatch" if loaded.config.launch.backend in ("auto", "local") else loaded.config.launch.backend
    known = make_target(loaded, backend)
    facts = Facts(NOWHERE, Target("sbatch", "shell", known.cluster))
    plan = make_plan(loaded, facts, Command(("bash",)))
    assert plan.slurm is not None
    options = {name: value for name, value in plan.slurm.sbatch.items() if name not in BATCH_ONLY_OPTIONS}
    # One task per GPU, even with launch.per: node, so that `srun trainkit run` needs no flags.
    options |= {"nodes": plan.num_nodes, "ntasks-per-node": plan.workers_per_node}
    if plan.threads_per_worker is not None:
        options["cpus-per-task"] = plan.threads_per_worker
    shell = ["bash", "--rcfile", start_file, "-i"]
    # An interactive step uses no resources of the allocation: steps started from the shell can have all.
    return [
        "salloc",
        *option_argv(options),
        "srun",
        "--interactive",
        "--preserve-env",
        "--pty",
        *shell,
    ]


def shell_start_file(config: RunConfig, cwd: Path) -> str:
    """The start file of the shell: the user's own one, then the environment of a job.

    The shell runs outside of any container, like salloc and srun.
    """
    interpreter, problems = find_interpreter(config.launch, sys.executable, os.environ, cwd)
    if problems:
        raise ConfigError([Problem(key, message, hint) for key, message, hint in problems])
    launch = config.launch.model_copy(update={"container": None})
    environment = make_job_environment(launch, interpreter, run_dir=str(cwd), workdir=str(cwd))
    bin_folder = str(Path(sys.executable).parent)
    return render("shell.sh.j2", {**environment.context, "workdir": str(cwd), "bin": bin_folder}, cwd)


def attach_argv(job_id: str, host: str | None) -> list[str]:
    """The srun command that starts a shell on a node of a running job; `host` is optional."""
    where = [] if host is None else [f"--nodelist={host}"]
    return [
        *("srun", f"--jobid={job_id}", "--overlap", "--mpi=none"),
        *("--mem=0", "--nodes=1", "--ntasks=1"),
        *(*where, "--pty", "bash", "-i"),
    ]
