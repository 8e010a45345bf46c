"""The interface for backends, which execute runs on Slurm or on this machine.

To support another scheduler, add a folder to `trainkit/backends/` and a class to `_CLASSES`. A backend's
class plans, starts and monitors jobs. A backend also provides the supervisor's `Allocation`, which monitors
the processes. Backend classes are imported only when needed, so that commands start quickly. `step_task`
determines which task in a scheduler's step this process is.
"""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from trainkit.errors import UsageError
from trainkit.run.files import utc_now
from trainkit.run.rundir import RunDir

if TYPE_CHECKING:  # types from higher layers, which only type checkers import
    from trainkit.cluster.machine import Machine
    from trainkit.cluster.model import Cluster
    from trainkit.cluster.target import Target
    from trainkit.config.loaded import LoadedConfig
    from trainkit.config.schema import RunConfig
    from trainkit.job.allocation import Allocation
    from trainkit.job.node.rendezvous import Task
    from trainkit.plan.launch import LaunchPlan, Options
    from trainkit.plan.launch_draft import LaunchDraft
    from trainkit.run.group import RunGroup
    from trainkit.run.record import AttemptRecord, JobRecord
    from trainkit.scheduler import JobInfo

SUPERVISOR_EXIT_S = 10.0
"""Seconds that a supervisor may take to exit after it has recorded the end of its job."""


class ScriptParts(NamedTuple):
    """The parts of a batch script that depend on the backend."""

    directives: Options
    """The `#SBATCH` options at the top of the script, by name. An option that takes no value maps to True."""
    step: tuple[str, ...]
    """The command line of the step that starts the ranks."""
    restarts: int
    """How many times in a row the script requeues a job whose supervisor did not start."""


class JobScript(NamedTuple):
    """A batch script and its parts."""

    text: str
    directives: Options
    """The options in the `#SBATCH` lines, by name. An option that takes no value maps to True."""
    setup: str
    """The backend's rendered template: the whole script, or only the lines before the step."""
    step: tuple[str, ...]
    """The command line of the step that starts the ranks."""
    host_python: tuple[str, ...]
    """The command prefix that runs Python for the supervisor."""


class NewAttempt(NamedTuple):
    """The next attempt of a run. `Backend.start` writes the attempt's files and starts it."""

    config_text: str
    plan_text: str
    plan: LaunchPlan
    reason: str
    """The command that starts the attempt: ``submit``, ``run``, ``requeue`` or ``resume``."""
    job: JobRecord
    """The content of job.json before the attempt."""
    script: JobScript | None = None
    """The batch script, or None if the backend uses none."""
    num_follow_ups: int = 0
    """The number of chained jobs to submit with the attempt. Chained jobs continue the run one after
    another."""
    now: bool = False
    """True if the attempt starts on this machine immediately, even if other processes use the GPUs."""

    @property
    def foreground(self) -> bool:
        """Return whether the attempt must save and exit when this process dies."""
        return self.reason == "run"


class JobStatus(NamedTuple):
    """The status of a run's newest job, as seen from this host."""

    alive: bool | None
    """True if the job is pending or running, False if it has ended, or None if its state cannot be determined
    on this host."""
    job: JobInfo | None = None
    """Slurm's data about the job, or None if the run is local or Slurm cannot be queried."""


class StartEstimates(ABC):
    """Estimates when a job would start in each place where it could run, such as a partition."""

    @abstractmethod
    def to_list(self) -> list[dict[str, object]]:
        """Return the estimates as JSON-serializable dicts."""

    @abstractmethod
    def lines(self, fit: int | None = None) -> Iterable[str]:
        """Yield the lines of a table, at most `fit` characters wide if possible."""

    @property
    @abstractmethod
    def refusal(self) -> str | None:
        """Return why the scheduler would reject the job, or None if it would accept the job."""


class Backend(ABC):
    """A way to execute attempts: starts, queries, signals and kills their jobs."""

    template: ClassVar[str | None] = None
    """The file name of the batch script's template, or None if the backend uses no script."""
    poll_s: ClassVar[float]
    """Interval in seconds between two queries about a job that is expected to end soon."""
    ask_every_s: ClassVar[float]
    """Interval in seconds between two queries about running jobs; long, because Slurm's controller serves the
    whole cluster."""

    @abstractmethod
    def draft(self, loaded: LoadedConfig, machine: Machine, target: Target) -> LaunchDraft:
        """Return a draft of the launch plan for a run that is started from this machine."""

    def in_one_job(self, plans: Sequence[LaunchPlan], cluster: Cluster) -> list[LaunchPlan]:
        """Return the plans, one per node count, largest first, adapted to share a single job."""
        raise NotImplementedError

    def job_options(self, plan: LaunchPlan) -> Options:
        """Return the job options in the plan, by name; empty if the run has no job."""
        return {}

    def gpus_per_node(self, plan: LaunchPlan) -> int:
        """Return the largest number of GPUs per node that a job may get, including GPUs without a rank."""
        return plan.gpus_per_node

    @abstractmethod
    def waiting_for(self, plan: LaunchPlan, names: Sequence[str], reason: str) -> LaunchPlan:
        """Return the plan for a run that starts only after other runs have finished successfully.

        `names` are the other runs' job ids, or their folders if they have no job. `reason` explains to users
        why the run waits.
        """

    def without_hosts(
        self, plan: LaunchPlan, hosts: Sequence[str], notify: Callable[[str], None]
    ) -> LaunchPlan:
        """Return the plan for a job that avoids `hosts`.

        `notify` is called with a message about hosts that cannot be avoided.
        """
        return plan

    def bad_hosts(self, run: RunDir, record: JobRecord, entry: AttemptRecord) -> list[str]:
        """Return the hosts that `note_bad_hosts` would record; raise SlurmUnreachable in the same cases."""
        return []

    def note_bad_hosts(
        self, run: RunDir, record: JobRecord, entry: AttemptRecord, warn: Callable[[str], None]
    ) -> list[str]:
        """Record and return the hosts where a job ended before its supervisor began.

        Later jobs avoid these hosts. `entry` is the run's newest attempt. Raises SlurmUnreachable if Slurm
        does not answer.
        """
        return []

    def require_reachable(self, plan: LaunchPlan) -> None:
        """Raise SlurmError if the scheduler that would receive the job does not answer."""
        return

    def expected_start(self, plan: LaunchPlan, script: str) -> str:
        """Return a sentence that says when the scheduler would start a job with this script."""
        raise NotImplementedError

    def start_estimates(self, plan: LaunchPlan, config: RunConfig, cluster: Cluster) -> StartEstimates:
        """Estimate when a job with this plan would start, as requested and, for example, in other partitions.

        Raises SlurmError if the scheduler does not answer.
        """
        raise NotImplementedError

    @abstractmethod
    def allocation(self, run: RunDir, arguments: Sequence[str]) -> Allocation:
        """Return the allocation that this process uses to supervise a run.

        `arguments` are the arguments that follow the first option of `python -m trainkit.job.supervisor`.
        Raises TrainkitError if this process cannot supervise the run.
        """

    @abstractmethod
    def start(self, run: RunDir, new: NewAttempt) -> AttemptRecord:
        """Start the next attempt of a run and return its record. The caller must hold the run's lock."""

    def start_group(self, group: RunGroup) -> str:
        """Start a group and return its job id. `array_problem` must have returned None.

        If it is known that the group did not start, its folder is removed.
        """
        raise NotImplementedError

    def script_parts(
        self, run: RunDir, attempt: int, plan: LaunchPlan, agent: Sequence[str], array: str | None
    ) -> ScriptParts:
        """Return the parts of an attempt's script that depend on the scheduler.

        `agent` is the command line that each task in the step runs. If `array` is given, such as ``0-9%4``,
        `run` is the folder of a group.
        """
        raise NotImplementedError

    def finish_script(self, run: RunDir, script: JobScript) -> JobScript:
        """Complete a script that was rendered from `template`, so that it can be submitted."""
        return script

    def array_problem(self) -> tuple[str, str] | None:
        """Return (message, hint) if the backend cannot run groups, or None if it can."""
        return None

    def stays_here(self, entry: AttemptRecord) -> str | None:
        """Return why a run must resume on this machine, or None if it may resume elsewhere.

        `entry` is the run's newest attempt.
        """
        return None

    def job(self, entry: AttemptRecord) -> JobInfo | None:
        """Query Slurm about an attempt's job, or return None if Slurm does not know it."""
        return None

    @abstractmethod
    def alive(self, run: RunDir, entry: AttemptRecord) -> bool | None:
        """Return whether an attempt's job is pending or running, or None if unknown on this host."""

    @abstractmethod
    def status(
        self, run: RunDir, entry: AttemptRecord, waiting: Sequence[str], jobs: Mapping[str, JobInfo] | None
    ) -> JobStatus:
        """Return the status of a run.

        `entry` is the run's newest attempt, and `waiting` lists the ids of its chained jobs. `jobs` is
        Slurm's answer, or None if Slurm did not answer. If a cluster does not answer, its jobs are missing
        from `jobs`.
        """

    @abstractmethod
    def live_entry(self, run: RunDir, job: JobRecord, command: str) -> AttemptRecord | None:
        """Return the newest attempt with its live job, or None if the job has ended or is about to end.

        `job` must contain at least one attempt. Raises UsageError if this host cannot determine whether the
        job is alive. The hint suggests running the subcommand `command` elsewhere.
        """

    @abstractmethod
    def signal(self, run: RunDir, entry: AttemptRecord, number: signal.Signals) -> str:
        """Ask a job to save and exit (SIGTERM), or to save and requeue (SIGUSR2).

        Returns ``signalled`` or, for a pending job, ``cancelled`` or ``waiting``.
        """

    @abstractmethod
    def kill(self, run: RunDir, entry: AttemptRecord) -> None:
        """Kill a job immediately, without saving, and record its end."""

    def query_interval_s(self, entry: AttemptRecord) -> float:
        """Return how many seconds `wait_until_gone` waits between two queries about an attempt's job.

        Raises ConfigError if the site's minimum interval is not a number.
        """
        return self.poll_s

    def wait_until_gone(self, run: RunDir, entry: AttemptRecord, timeout_s: float) -> bool:
        """Wait until a job has ended; return False if the job is still alive after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while self.alive(run, entry):
            if time.monotonic() > deadline_s:
                return False
            time.sleep(self.poll_s)
        return True


def write_cancelled(run: RunDir, entry: AttemptRecord, reason: str) -> None:
    """Record the end of an attempt whose supervisor can no longer record it."""
    from trainkit.run.end import AttemptEnd  # a dry run does not import these modules
    from trainkit.run.events import log_event

    attempt = run.attempt(entry.attempt)
    AttemptEnd("cancelled", "stopped", exit_code=137, reason=reason, time=utc_now()).write(attempt)
    log_event(run, attempt.number, "stopped", state="cancelled", exit_code=137, reason=reason)


_CLASSES = {
    "local": "local.backend.LocalBackend",
    "launcher": "launcher.LauncherBackend",
    "sbatch": "slurm.backend.SbatchBackend",
    "submitit": "slurm.submitit.SubmititBackend",
    "srun": "slurm.backend.StepBackend",
}
STARTED_WITH = {"--attempt": "local", "--step": "sbatch"}
"""Maps the first option of ``python -m trainkit.job.supervisor`` to the backend that passes this option."""
NEWER = "the run was created by a newer trainkit version: use that version"


@cache
def backend_named(name: str) -> Backend:
    """Return the backend that a plan names; raise UsageError if this trainkit version has no such backend."""
    if name not in _CLASSES:
        raise UsageError(f"unknown backend {name!r}", hint=NEWER)
    module, _, kind = _CLASSES[name].rpartition(".")
    found: Backend = getattr(import_module(f"trainkit.backends.{module}"), kind)()
    return found


def step_task() -> Task:
    """Return this process as a task in a scheduler's step; raise NotATask if it is not such a task."""
    # Do not import the backend's class here, because that would delay the start of every agent.
    found: Task = import_module("trainkit.backends.slurm.step").step_task()
    return found


def is_known(entry: AttemptRecord) -> bool:
    """Return whether this trainkit version provides an attempt's backend.

    Local attempts record no backend.
    """
    return entry.backend is None or entry.backend in _CLASSES


def backend_of(entry: AttemptRecord) -> Backend:
    """Return the backend that runs an attempt; raise UsageError if this trainkit version does not have it."""
    if not is_known(entry):
        where = "" if entry.folder is None else f" of {entry.folder}"
        raise UsageError(
            f"attempt {entry.attempt}{where} runs as {entry.job_id} on the unknown backend {entry.backend!r}",
            hint=NEWER,
        )
    return backend_named(entry.backend or "local")
