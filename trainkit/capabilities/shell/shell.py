"""Opens interactive shells on the first node of a new allocation, and on a node of a running job."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from trainkit.backend import backend_of
from trainkit.cluster.machine import Machine
from trainkit.cluster.target import make_target
from trainkit.config import LoadedConfig, RunConfig
from trainkit.errors import ConfigError, Problem, UsageError, print_note
from trainkit.folders import ensure_folder
from trainkit.launch.environment import find_interpreter, make_job_environment
from trainkit.launch.script import render
from trainkit.plan.facts import Facts
from trainkit.plan.launch import option_argv
from trainkit.plan.make_plan import make_plan
from trainkit.plan.workload import Workload
from trainkit.run.record import AttemptRecord, read_job
from trainkit.run.rundir import RunDir
from trainkit.scheduler import JobState
from trainkit.slurm.environment import scrubbed

if TYPE_CHECKING:
    from trainkit.scheduler import JobInfo

NOWHERE = Machine(0, 0, (), "this is a login node")
BATCH_ONLY_OPTIONS = ("signal", "requeue", "no-requeue", "no-kill", "ntasks-per-node", "cpus-per-task")


def shell_argv(loaded: LoadedConfig, start_file: str) -> list[str]:
    """Return a salloc command that requests the resources set in a config and starts a shell.

    The shell runs on the first node of the allocation. Raises ConfigError with all problems found in the
    config.
    """
    plan = make_plan(loaded, Facts(NOWHERE, make_target(loaded, "sbatch")), Workload(("bash",)))
    assert plan.slurm is not None
    options = {name: value for name, value in plan.slurm.sbatch.items() if name not in BATCH_ONLY_OPTIONS}
    # Request one task per GPU, even with `launch.per: node`, so that `srun trainkit run` needs no options.
    options |= {"nodes": plan.num_nodes, "ntasks-per-node": plan.workers_per_node}
    if plan.threads_per_worker is not None:
        options["cpus-per-task"] = plan.threads_per_worker
    if plan.clusters:
        options["clusters"] = ",".join(plan.clusters)
    shell = ["bash", "--rcfile", start_file, "-i"]
    # `srun --interactive` does not consume the allocation's resources, so job steps started from the shell
    # can use all of them.
    return ["salloc", *option_argv(options), "srun", "--interactive", "--preserve-env", "--pty", *shell]


def shell_start_file(config: RunConfig, cwd: Path) -> str:
    """Return the shell's startup file: the user's own startup file and the setup of a job's environment.

    The shell runs outside of any container, just like salloc and srun.
    """
    interpreter, problems = find_interpreter(config.launch, cwd)
    if problems:
        raise ConfigError([Problem(key, message, hint=hint) for key, message, hint in problems])
    launch = config.launch.model_copy(update={"container": None})
    environment = make_job_environment(launch, interpreter, run_dir=str(cwd), workdir=str(cwd))
    bin_folder = str(Path(sys.executable).parent)
    return render("shell.sh.j2", {"environment": environment, "workdir": str(cwd), "bin": bin_folder}, cwd)


def open_shell(loaded: LoadedConfig, folder: Path) -> NoReturn:
    """Replace this process with a shell in a new allocation, and write the shell's startup file to `folder`.

    Raises UsageError if there is no terminal or no Slurm, and ConfigError with all problems found in the
    config.
    """
    start_file = shell_start_file(loaded.config, Path.cwd())
    require_terminal("without a terminal, use `trainkit submit`")
    ensure_folder(folder)
    with tempfile.NamedTemporaryFile("w", dir=folder, prefix=".shell-", suffix=".sh", delete=False) as file:
        file.write(start_file)
    path = Path(file.name).absolute()
    argv = shell_argv(loaded, str(path))
    try:
        os.execvpe(argv[0], argv, scrubbed(os.environ))
    except FileNotFoundError:
        path.unlink()
        message = "`salloc` is not on PATH, so Slurm is not available on this machine"
        raise UsageError(message, hint="run the command on a login node of a cluster") from None


def attach(run: RunDir, node: int) -> NoReturn:
    """Replace this process with a shell on a node of the run's job; raise UsageError if no job is running."""
    entry, job = running_job(run)
    hosts = job.hosts
    if node >= len(hosts):
        raise UsageError(f"the job has no node {node}", hint=f"the job's nodes are 0 to {len(hosts) - 1}")
    require_terminal("to see the output of the run, use `trainkit logs`")
    print_note(f"{run.shown}: a shell on {hosts[node]}")
    run_next_to(job, entry.other_cluster, hosts[node], ("bash", "-i"))


def running_job(run: RunDir) -> tuple[AttemptRecord, JobInfo]:
    """Return the newest attempt of a run and its job; raise UsageError unless a Slurm job is running."""
    entry = read_job(run).newest or AttemptRecord()
    if entry.backend is None:
        hint = "use a shell on the machine where the run is running"
        raise UsageError(f"{run.shown} is a local run, not a Slurm job", hint=hint)
    job = backend_of(entry).job(entry)
    if job is None or job.state is not JobState.RUNNING:
        state = "is no longer known to Slurm" if job is None else f"is {job.state.value}, not running"
        raise UsageError(f"{entry.job_id} {state}", hint="`trainkit status` shows more")
    return entry, job


def run_next_to(job: JobInfo, cluster: str | None, host: str, argv: Sequence[str]) -> NoReturn:
    """Replace this process with a program on a host of the job; the program uses this process's terminal."""
    argv = [
        "srun",
        *([f"--clusters={cluster}"] if cluster else []),
        f"--jobid={job.number or job.job_id}",
        "--overlap",
        "--mpi=none",
        "--mem=0",
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={host}",
        "--pty",
        *argv,
    ]
    os.execvpe(argv[0], argv, scrubbed(os.environ))


def require_terminal(hint: str) -> None:
    """Raise UsageError with a hint unless this process has an interactive terminal."""
    if not sys.stdin.isatty():
        raise UsageError("a shell needs a terminal", hint=hint)
