"""The contract of a capability: a feature that only some runs need, and that the core never names.

A capability is a folder of `trainkit/capabilities/` with a row in `shipped.py`, or a class of another
package that declares it in the entry-point group `trainkit.capabilities`. It is imported only if a config, a
plan or a command line names it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from trainkit.errors import KeyProblem

if TYPE_CHECKING:  # the nouns of the floors above, for type checkers alone
    from contextlib import AbstractContextManager
    from datetime import datetime

    from trainkit.config.loaded import LoadedConfig
    from trainkit.config.schema import RunConfig
    from trainkit.config.section import Section
    from trainkit.job.decision import PlannedStop
    from trainkit.job.node.rendezvous import Rendezvous
    from trainkit.job.rank_env import RankEnv
    from trainkit.plan.facts import Facts
    from trainkit.plan.launch import LaunchPlan, Layout
    from trainkit.plan.workload import Workload
    from trainkit.run.end import AttemptEnd
    from trainkit.run.events import Event
    from trainkit.run.history import PlanRecord, RunHistory
    from trainkit.run.rundir import AttemptDir, RunDir
    from trainkit.trainer.metrics import TensorBoardLog
    from trainkit.trainer.progress import Progress


@dataclass(frozen=True)
class Part:
    """Base class of the data that a capability keeps in plan.json; read it with `LaunchPlan.part`.

    Subclasses are frozen dataclasses. The files in a field `files` (name -> text) are written next to
    plan.json and compared with it when the job starts. A field `keys` lists the config keys that the user had
    set, so that a run that repeats this one knows them.
    """

    CAPABILITY: ClassVar[str] = ""
    """The name of the capability."""


class Planned(NamedTuple):
    """The result of `Capability.plan` and `plan_command`: a part of the plan, with reasons and warnings."""

    part: Part | None = None
    """None if the run does not use the capability; its code is then not imported."""
    reasons: Mapping[str, str] = {}
    """Derived value -> its reason, which a dry run prints."""
    warnings: tuple[str, ...] = ()
    """One sentence for each setting that has no effect or could not be checked."""
    env: Mapping[str, str] = {}
    """Environment variables of every worker, from `plan_command` only; launch.env overrides them."""
    keys: Collection[str] = ()
    """Config keys that take effect in a command because of this capability, from `plan_command` only."""
    follows: str | None = None
    """The derived value after which a dry run prints the reasons of `plan`; None prints them last."""


class Ranks(NamedTuple):
    """The number of ranks and their device, known before the run is planned."""

    world_size: int
    num_nodes: int
    workers_per_node: int
    device: str


class NodesChoice:
    """Explains the number of nodes that trainkit chose for a run."""

    def to_dict(self) -> dict[str, object]:
        """Return the keys that this choice adds to the JSON of a command."""
        raise NotImplementedError

    def lines(self, plan: LaunchPlan, fit: int | None = None) -> Iterable[str]:
        """Return the reasons for the choice, in lines of at most `fit` characters if possible."""
        raise NotImplementedError


class Companion:
    """A helper that runs next to the ranks of a node, in its own thread or process."""

    def poll(self) -> None:
        """Do a short piece of work; the agent calls this every few seconds and waits for it."""

    def end(self, *, is_finished: bool) -> None:
        """End the companion, without delay unless `is_finished`: all ranks of the agent have finished."""


class Hosts(NamedTuple):
    """The hosts of a job by their names in Slurm; empty for an attempt without Slurm."""

    all: Sequence[str] = ()
    good: Sequence[str] = ()
    """The hosts that have not failed, neither in this job nor earlier in the run."""


class Watch:
    """A check that the supervisor repeats while an attempt runs."""

    while_stopping: ClassVar[bool] = True
    """Whether polling continues after the ranks have received a stop signal."""

    def poll(self) -> PlannedStop | None:
        """Check the attempt; the supervisor calls this every few seconds and waits for it.

        A returned stop makes the ranks save and exit and the run restart, unless the ranks already stop.
        """
        return None


class TimedRanks(NamedTuple):
    """The ranks of the built-in trainer. They report their times at the end of each window of steps."""

    layout: Layout
    hosts: Sequence[str]
    """The host of each rank."""
    window: int
    """The number of steps in a window."""
    on_gpu: bool


NewEvent = tuple[str, Mapping[str, object]]
"""An event to record, and its values."""


class RankObserver:
    """Receives the step times of all ranks, on rank 0."""

    values: Mapping[str, float | str] = {}
    """The values that it adds to each record of the metrics."""

    def add(self, step: int, times: Sequence[float], step_s: float) -> Iterable[NewEvent]:
        """Process the times of a step and return the events that rank 0 shall record; rank 0 waits meanwhile.

        At the end of a window, `times` contains two mean durations per step and rank, [ranks x 2]: the
        seconds that the rank waited for data, and the seconds that it computed before it waited for other
        ranks. At other steps `times` is empty. `step_s` is the duration of the step without saves and
        validation.
        """
        return ()


class Reading(NamedTuple):
    """The files of a run as they were read, for the capabilities that show something of the run."""

    history: RunHistory
    plan: PlanRecord
    attempt: int | None
    """The number of the newest attempt."""
    state: str
    """The state of the run, as `status` shows it."""
    lasting: Sequence[Event]
    """The events of capabilities that are still in effect, oldest first; see `owner_of`."""


@dataclass(frozen=True)
class Notice:
    """A warning to a person about a run; its `time` is None if it describes the present."""

    time: str | None
    text: str
    host: str | None = None
    rank: int | None = None


class HostView(NamedTuple):
    """The values and problems that a capability shows of a host in `watch`."""

    values: Mapping[str, object] = {}
    """The values of the host's row, by the keys of `watch --json`."""
    problems: Sequence[tuple[int, str]] = ()
    """The severity of each problem, and the problem in a few words."""


class Reader:
    """Reads the files of a capability in a run, for a screen that is refreshed. See `RunHistory.reader`."""

    def __init__(self, run: RunDir) -> None:
        self.run = run

    def update(self) -> None:
        """Read only the lines that were written since the last call. Raises OSError."""


class Recorder:
    """Records the images, histograms and texts that a rank logs; this base class records nothing (ranks > 0).

    `step` defaults to the step of the training. The methods raise UsageError for values that cannot be
    recorded.
    """

    def image(self, name: str, image: object, step: int | None = None, caption: str | None = None) -> None:
        """Record a copy of a tensor, a numpy array or a PIL image."""

    def histogram(self, name: str, values: object, step: int | None = None) -> None:
        """Record the histogram of the numbers in a tensor, an array or a list."""

    def text(self, name: str, text: str, step: int | None = None) -> None:
        """Record a text."""

    def written(self) -> Callable[[], None]:
        """Return a function that waits until everything logged so far is on disk."""
        return lambda: None

    def close(self) -> None:
        """Wait until everything that was recorded is written."""


MakeRecorder = Callable[["AttemptDir", "Progress", "TensorBoardLog | None"], Recorder]
"""Makes the recorder of rank 0, which also writes to TensorBoard if the attempt does."""


class Choice:
    """The values of the options that a capability adds to `trainkit run` or `trainkit check`."""

    has_terminal = False
    """Whether a rank gets the terminal. The command then prints no log there."""

    def check(self, workload: Workload, *, is_alone: bool) -> None:
        """Raise UsageError if the run cannot have these options.

        `is_alone` is false if other processes start ranks of the same run too.
        """

    def apply(self, plan: LaunchPlan) -> LaunchPlan:
        """Return the plan with these options applied; raises UsageError if the plan cannot have them."""
        return plan

    def try_out(self, config: RunConfig) -> str:
        """Do once what a run would do and describe the result; raises TrainkitError on failure."""
        raise NotImplementedError


class Capability:
    """Base class of all capabilities. A subclass overrides what it needs; a process has one object of it."""

    name: ClassVar[str]
    """The name of the capability's folder, or of its entry point and config section."""
    Config: ClassVar[type[Section] | None] = None
    """The config section that a capability of another package adds; its docstring describes it."""
    at_start: ClassVar[str | None] = None
    """A file whose function `prepare` every Python interpreter of a rank calls before any other code; see
    `trainkit.job.python_start`."""
    commands: ClassVar[Mapping[str, str]] = {}
    """Command -> MODULE:NAME of a click command. Other packages name their commands NAME or NAME-…."""
    quiet: ClassVar[Mapping[str, str]] = {}
    """Config key that is set to null in replays and short trainings -> the reason.

    ``{what}`` in the reason stands for the command, such as a replay or a bench.
    """
    may_be_secret: ClassVar[tuple[str, ...]] = ()
    """Config keys whose values no error message may show."""
    other_keys: ClassVar[Mapping[str, str]] = {}
    """Key of another program -> a hint that names trainkit's keys for it; for shipped capabilities only."""

    def contradictions(self, config: RunConfig) -> Iterable[KeyProblem]:
        """Return the problems of the capability's config keys that do not depend on the facts."""
        return ()

    def packages(self, config: RunConfig) -> Mapping[str, str]:
        """Return the packages that the ranks' Python must have -> the config key that needs them."""
        return {}

    def problems(self, loaded: LoadedConfig, facts: Facts) -> Iterable[KeyProblem]:
        """Return the problems of the capability's config keys, given the facts."""
        return ()

    def plan(self, loaded: LoadedConfig, facts: Facts, draft: LaunchPlan) -> Planned:
        """Plan the capability's part of the run that `draft` describes."""
        return Planned()

    def plan_command(self, loaded: LoadedConfig, workload: Workload, ranks: Ranks) -> Planned:
        """Plan what a command gets from the config; raises ConfigError for values that no command can get."""
        return Planned()

    def without_hangs(self, plan: LaunchPlan) -> LaunchPlan:
        """Return the plan without reports of hangs, since a rank may wait for a person for hours."""
        return plan

    def size_independent(self, plan: LaunchPlan) -> object:
        """Return the values of its part that must be equal for every number of nodes that the job may get."""
        return None

    def argv(self, plan: LaunchPlan, rank: RankEnv, run: RunDir) -> tuple[str, ...]:
        """Return the command line with which an agent starts a command through the capability's launcher."""
        raise NotImplementedError

    def environ(self, attempt: AttemptDir, plan: LaunchPlan) -> Mapping[str, str]:
        """Return environment variables for every rank."""
        return {}

    def in_trainer(
        self, plan: LaunchPlan, unwatched: Callable[[], AbstractContextManager[None]]
    ) -> Callable[[Exception], None] | None:
        """Prepare a rank of the trainer before it imports torch.

        Returns a function that is called with the error that ends the rank, or None. A wait inside the
        context `unwatched()` does not count as a hang.
        """
        return None

    def companion(self, attempt: AttemptDir, plan: LaunchPlan, node: Rendezvous) -> Companion | None:
        """Start the companion of an agent's ranks if the plan has the capability's part, else return None."""
        return None

    def rank_observer(self, plan: LaunchPlan, ranks: TimedRanks) -> RankObserver | None:
        """Return an observer of the step times of the trainer's ranks, or None."""
        return None

    def recorder(self) -> MakeRecorder:
        """Return the function that makes the recorder of images, histograms and texts on rank 0."""
        raise NotImplementedError

    def watch(self, attempt: AttemptDir, plan: LaunchPlan, hosts: Hosts) -> Watch | None:
        """Return a watch of an attempt for its supervisor if the plan has the capability's part, or None."""
        return None

    def hosts_to_leave(self, attempt: AttemptDir, plan: LaunchPlan, hosts: Hosts) -> Collection[str]:
        """Return the hosts of a job that the run must exclude from now on; called after an attempt."""
        return ()

    def on_event(self, attempt: AttemptDir, event: Event) -> None:
        """React to a new line of events.jsonl; the supervisor calls this within seconds."""

    def on_end(self, attempt: AttemptDir, plan: LaunchPlan, end: AttemptEnd) -> None:
        """React to the end of an attempt. `end` says whether the run restarts."""

    def close(self) -> None:
        """Wait until everything is sent; called when the supervisor's process ends."""

    def speeds(self, group: Path) -> Mapping[int, float | None]:
        """Return the tokens per second of a group's runs by index; the group has the capability's file."""
        return {}

    def waits(self, plan: PlanRecord) -> str:
        """Return the text of `status` for a run in which a rank waits, or may wait, for a person."""
        raise NotImplementedError

    def rows(self, reading: Reading) -> Mapping[str, str]:
        """Return the lines that the capability adds to `status` of a run: label -> text."""
        return {}

    def status(self, reading: Reading) -> Mapping[str, object]:
        """Return the keys that the capability adds to ``status --json``."""
        return {}

    def notices(self, reading: Reading) -> Sequence[Notice]:
        """Return warnings about a running attempt; called while events of capabilities are in effect."""
        return ()

    def past(self, event: Event) -> str:
        """Describe one of its past events in a sentence for the list of warnings."""
        return event.content

    def hosts(self, reading: Reading, now: datetime) -> Mapping[str, HostView]:
        """Return what `watch` shows of the hosts of the newest attempt, by host name."""
        return {}

    def advice(self, attempt: AttemptDir, host: str | None, lasting: Sequence[Event]) -> Mapping[str, str]:
        """Return values for the advice of a diagnosis by placeholder; `host` is the first one that failed."""
        return {}

    def report(self, history: RunHistory) -> Mapping[str, object]:
        """Return the keys that the capability adds to ``report --json`` and to the data of the page."""
        return {}

    def sections(self, history: RunHistory) -> Mapping[str, str]:
        """Return the sections that it adds to the page of a report: title -> HTML, with all texts escaped."""
        return {}
