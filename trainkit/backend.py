"""Where runs execute, on Slurm or this machine: the interface of a backend; its classes are imported late.

Another scheduler is another folder of `trainkit/backends/`, with a class in `_CLASSES`: it plans, starts and
watches jobs, and gives the supervisor an `Allocation` and its watch. `step_task` finds tasks of its steps.
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

if TYPE_CHECKING:  # the nouns of the floors above, for type checkers alone
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
"""How long a supervisor may take to exit after it has recorded the end of its job."""


class ScriptParts(NamedTuple):
    """The parts of a batch script that depend on the backend."""

    directives: Options
    """The options of its first lines by name; True for an option without a value."""
    step: tuple[str, ...]
    """The argv of the step that starts the ranks."""
    restarts: int
    """How often in a row the script requeues a job that ended before its supervisor began."""


class JobScript(NamedTuple):
    """A batch script and its parts."""

    text: str
    directives: Options
    """The options of the `#SBATCH` lines by name; True for an option without a value."""
    setup: str
    """The rendered template of the backend: the whole script, or the lines before the step."""
    step: tuple[str, ...]
    """The argv of the step that starts the ranks."""
    host_python: tuple[str, ...]
    """The argv prefix of Python for the supervisor."""


class NewAttempt(NamedTuple):
    """The next attempt of a run, which `Backend.start` opens and starts."""

    config_text: str
    plan_text: str
    plan: LaunchPlan
    reason: str
    """The command that starts it: ``submit run requeue resume``."""
    job: JobRecord
    """What job.json says before it."""
    script: JobScript | None = None
    """The batch script; None for a backend without one."""
    num_follow_ups: int = 0
    """The number of jobs to submit with it that continue the run."""
    now: bool = False
    """Whether it starts on this machine while others use its GPUs, as one in the foreground does."""

    @property
    def foreground(self) -> bool:
        """Whether it saves and ends when this process dies."""
        return self.reason == "run"


class JobStatus(NamedTuple):
    """The newest job of a run, as far as this host can see it."""

    alive: bool | None
    """None when this host cannot tell."""
    job: JobInfo | None = None
    """Slurm's information; None for a local run, and when Slurm cannot be queried."""


class StartEstimates(ABC):
    """When a job would start, by the place in which it would run."""

    @abstractmethod
    def to_list(self) -> list[dict[str, object]]:
        """The estimates as JSON."""

    @abstractmethod
    def lines(self, fit: int | None = None) -> Iterable[str]:
        """The lines of a table of at most `fit` characters, if that is possible."""

    @property
    @abstractmethod
    def refusal(self) -> str | None:
        """Why the scheduler would reject the job; None if it would not."""


class Backend(ABC):
    """A way to execute attempts: it starts them, says how their jobs are, and signals or kills them."""

    template: ClassVar[str | None] = None
    """The template of its batch script; None if it has no script."""
    poll_s: ClassVar[float]
    """Seconds between two looks at a job that is about to end."""
    ask_every_s: ClassVar[float]
    """Seconds between two looks at runs that continue: Slurm's controller serves the whole cluster."""

    @abstractmethod
    def draft(self, loaded: LoadedConfig, machine: Machine, target: Target) -> LaunchDraft:
        """The draft of the plan of a run that starts here."""

    def in_one_job(self, plans: Sequence[LaunchPlan], cluster: Cluster) -> list[LaunchPlan]:
        """The plans for several numbers of nodes, the most first, as one job has them."""
        raise NotImplementedError

    def job_options(self, plan: LaunchPlan) -> Options:
        """The options of its job by name; empty for a run without one."""
        return {}

    @abstractmethod
    def waiting_for(self, plan: LaunchPlan, names: Sequence[str], reason: str) -> LaunchPlan:
        """The plan of a run that starts once others have finished successfully, for this `reason`.

        `names` are the ids of their jobs, or for a run without a job their folders.
        """

    def without_hosts(
        self, plan: LaunchPlan, hosts: Sequence[str], notify: Callable[[str], None]
    ) -> LaunchPlan:
        """The plan of a job that avoids these hosts; `notify` gets why it cannot avoid some."""
        return plan

    def note_bad_hosts(
        self, run: RunDir, record: JobRecord, entry: AttemptRecord, warn: Callable[[str], None]
    ) -> list[str]:
        """Have the next starts of a run avoid hosts on which a job ended too early; returns these.

        `entry` is the newest attempt. Raises SlurmUnreachable.
        """
        return []

    def require_reachable(self, plan: LaunchPlan) -> None:
        """Raise SlurmError if the scheduler that a job would be submitted to does not answer."""
        return

    def expected_start(self, plan: LaunchPlan, script: str) -> str:
        """The scheduler's sentence about when a job with this script would start."""
        raise NotImplementedError

    def start_estimates(self, plan: LaunchPlan, config: RunConfig, cluster: Cluster) -> StartEstimates:
        """When a job of this plan would start, in what it asks for and elsewhere. Raises SlurmError."""
        raise NotImplementedError

    @abstractmethod
    def allocation(self, run: RunDir, words: Sequence[str]) -> Allocation:
        """The place in which this process supervises a run; raises TrainkitError where it cannot.

        `words` are those that `python -m trainkit.job.supervisor` has got, without its first option.
        """

    @abstractmethod
    def start(self, run: RunDir, new: NewAttempt) -> AttemptRecord:
        """Open and start a run's next attempt; returns its record. Call with the run's lock held."""

    def start_group(self, group: RunGroup) -> str:
        """Start a group that `array_problem` allows; returns its job id.

        A group that certainly was not started is removed.
        """
        raise NotImplementedError

    def script_parts(
        self, run: RunDir, attempt: int, plan: LaunchPlan, agent: Sequence[str], array: str | None
    ) -> ScriptParts:
        """What the script of an attempt has of its scheduler; `agent` is the argv of the tasks of the step.

        With an `array`, such as ``0-9%4``, `run` is the folder of a group.
        """
        raise NotImplementedError

    def finish_script(self, run: RunDir, script: JobScript) -> JobScript:
        """The script as it is submitted, from the text of `template`."""
        return script

    def array_problem(self) -> tuple[str, str] | None:
        """(message, hint) if it cannot run a group."""
        return None

    def stays_here(self, entry: AttemptRecord) -> str | None:
        """Why a run whose newest attempt this is resumes on this machine; None if nothing keeps it here."""
        return None

    def job(self, entry: AttemptRecord) -> JobInfo | None:
        """Slurm's information about the job of an attempt; None when Slurm does not know it."""
        return None

    @abstractmethod
    def alive(self, run: RunDir, entry: AttemptRecord) -> bool | None:
        """Whether the job of an attempt is running or pending; None when this host cannot tell."""

    @abstractmethod
    def status(
        self, run: RunDir, entry: AttemptRecord, waiting: Sequence[str], jobs: Mapping[str, JobInfo] | None
    ) -> JobStatus:
        """The status of a run with this newest attempt and these `waiting` follow-ups.

        `jobs` is Slurm's answer, None without one; jobs of a cluster that does not answer are missing.
        """

    @abstractmethod
    def live_entry(self, run: RunDir, job: JobRecord, command: str) -> AttemptRecord | None:
        """The newest attempt with its live job; None if that has ended or is about to exit.

        `job` has an attempt. `command` is the subcommand to suggest in the UsageError that is raised when
        this host cannot tell.
        """

    @abstractmethod
    def signal(self, run: RunDir, entry: AttemptRecord, number: signal.Signals) -> str:
        """Ask a job to save and exit (SIGTERM) or to save and requeue (SIGUSR2).

        Returns ``signalled``, or for a pending job ``cancelled`` or ``waiting``.
        """

    @abstractmethod
    def kill(self, run: RunDir, entry: AttemptRecord) -> None:
        """Kill a job immediately, without saving, and record its end."""

    def is_gone(self, run: RunDir, entry: AttemptRecord) -> bool:
        return not self.alive(run, entry)

    def wait_until_gone(self, run: RunDir, entry: AttemptRecord, timeout_s: float) -> bool:
        """Wait until the job has ended; False if it is still alive after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while not self.is_gone(run, entry):
            if time.monotonic() > deadline_s:
                return False
            time.sleep(self.poll_s)
        return True


def write_cancelled(run: RunDir, entry: AttemptRecord, reason: str) -> None:
    """Record the end of an attempt whose supervisor cannot do so itself."""
    from trainkit.run.end import AttemptEnd  # which a dry run does not need
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
"""The first option of ``python -m trainkit.job.supervisor`` -> the backend that has started it so."""
NEWER = "a newer trainkit made it: use that version"


@cache
def backend_named(name: str) -> Backend:
    """The backend of a plan; raises UsageError for one that this version does not have."""
    if name not in _CLASSES:
        raise UsageError(f"unknown backend {name!r}", hint=NEWER)
    module, _, kind = _CLASSES[name].rpartition(".")
    found: Backend = getattr(import_module(f"trainkit.backends.{module}"), kind)()
    return found


def step_task() -> Task:
    """The task of a scheduler's step that this process is; raises NotATask if it is none."""
    # Not by the class of a backend, whose imports every agent would wait for.
    found: Task = import_module("trainkit.backends.slurm.step").step_task()
    return found


def is_known(entry: AttemptRecord) -> bool:
    """Whether this version has the backend of an attempt: without Slurm none is recorded."""
    return entry.backend is None or entry.backend in _CLASSES


def backend_of(entry: AttemptRecord) -> Backend:
    """The backend that runs an attempt; raises UsageError for one that this version does not have."""
    if not is_known(entry):
        where = "" if entry.folder is None else f" of {entry.folder}"
        raise UsageError(
            f"attempt {entry.attempt}{where} runs as {entry.job_id} on the unknown backend {entry.backend!r}",
            hint=NEWER,
        )
    return backend_named(entry.backend or "local")
