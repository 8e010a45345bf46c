"""The contract through which a capability brings what not every run needs; the core names none of them.

A capability is a folder of `trainkit/capabilities/`, with a row in `shipped.py`, or a class of another
package whose metadata name it in the entry-point group `trainkit.capabilities`: it is imported only where a
config, a plan or a command line names it.
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
    """The base of what a capability keeps in plan.json, a frozen dataclass; read with `LaunchPlan.part`.

    A field `files`, name -> text, is written next to plan.json, and compared with it when the job starts. A
    field `keys` has keys of the config that the user had set: a run that repeats this one knows them then.
    """

    CAPABILITY: ClassVar[str] = ""
    """The name of the capability."""


class Planned(NamedTuple):
    """The result of `Capability.plan` and `plan_command`: a part of the plan, with reasons and warnings."""

    part: Part | None = None
    """None for a run that does not use it; of such a run its code is not imported."""
    reasons: Mapping[str, str] = {}
    """Derived value -> its reason, which a dry run prints."""
    warnings: tuple[str, ...] = ()
    """Messages about settings without effect, or that could not be checked, one sentence each."""
    env: Mapping[str, str] = {}
    """Environment variables of every worker, of `plan_command` only; launch.env comes before them."""
    keys: Collection[str] = ()
    """Keys of the config that have an effect on a command because of it, of `plan_command` only."""
    follows: str | None = None
    """The derived value after which the reasons of `plan` are printed; None for the last one."""


class Ranks(NamedTuple):
    """The number of ranks and their device, before there is a plan."""

    world_size: int
    num_nodes: int
    workers_per_node: int
    device: str


class NodesChoice:
    """Why a run gets its number of nodes, where that was not for the user to choose."""

    def to_dict(self) -> dict[str, object]:
        """The keys that it adds to the JSON of a command."""
        raise NotImplementedError

    def lines(self, plan: LaunchPlan, fit: int | None = None) -> Iterable[str]:
        """What it rests on, as lines of at most `fit` characters, if that is possible."""
        raise NotImplementedError


class Companion:
    """Something that runs next to the ranks of a node, in a thread or process of its own."""

    def poll(self) -> None:
        """Look around, every few seconds; the agent waits for it."""

    def end(self, *, is_finished: bool) -> None:
        """End it; `is_finished` if all ranks of the agent have finished: else the job cannot wait."""


class Hosts(NamedTuple):
    """The hosts of a job, as Slurm names them; none of an attempt on this machine."""

    all: Sequence[str] = ()
    good: Sequence[str] = ()
    """Without the hosts that have failed in this job, or earlier in the run."""


class Watch:
    """Something that the supervisor looks at while an attempt runs."""

    while_stopping: ClassVar[bool] = True
    """Whether it is polled after the ranks were asked to save and exit too."""

    def poll(self) -> PlannedStop | None:
        """Look around, every few seconds; the supervisor waits for it.

        What it returns makes the ranks save and exit, and the run restart, unless they are stopping already.
        """
        return None


class TimedRanks(NamedTuple):
    """The ranks of the built-in trainer, which report their times at the end of each window of steps."""

    layout: Layout
    hosts: Sequence[str]
    """The host of each rank."""
    window: int
    """Number of steps."""
    on_gpu: bool


NewEvent = tuple[str, Mapping[str, object]]
"""An event to record, and its values."""


class RankObserver:
    """Something that looks at the times of all ranks, on rank 0."""

    values: Mapping[str, float | str] = {}
    """What a record of the metrics gets from it."""

    def add(self, step: int, times: Sequence[float], step_s: float) -> Iterable[NewEvent]:
        """Take in a step; rank 0 waits for it, and records the events.

        At the end of a window, `times` has for each rank the mean seconds of a step that it waited for data,
        and that it computed before it waited for others, [ranks x 2]; else it is empty. `step_s` is the
        duration of the step, without saves and validation.
        """
        return ()


class Reading(NamedTuple):
    """What was read of a run, for what a capability shows of it."""

    history: RunHistory
    plan: PlanRecord
    attempt: int | None
    """The number of the newest attempt."""
    state: str
    """The state of the run, as `status` shows it."""
    lasting: Sequence[Event]
    """The events of capabilities that last, while the attempt runs, the newest last; see `owner_of`."""


@dataclass(frozen=True)
class Notice:
    """Something that needs attention; `time` is None for what holds now."""

    time: str | None
    text: str
    host: str | None = None
    rank: int | None = None


class HostView(NamedTuple):
    """What a capability says of a host in `watch`."""

    values: Mapping[str, object] = {}
    """Values of a row of the nodes, by the keys of `watch --json`."""
    problems: Sequence[tuple[int, str]] = ()
    """How bad each problem is, and the problem in a few words."""


class Reader:
    """Reads the files of a capability in a run, for a screen that is refreshed; see `RunHistory.reader`."""

    def __init__(self, run: RunDir) -> None:
        self.run = run

    def update(self) -> None:
        """Read what was written since the last call, and no more. Raises OSError."""


class Recorder:
    """Keeps the images, histograms and texts that a rank logs; this one keeps none, as on other ranks than 0.

    `step` is by default that of the training. Raises UsageError for what cannot be kept.
    """

    def image(self, name: str, image: object, step: int | None = None, caption: str | None = None) -> None:
        """Keep a tensor, an array of numpy or an image of PIL, as it is now."""

    def histogram(self, name: str, values: object, step: int | None = None) -> None:
        """Keep the histogram of the numbers in a tensor, an array or a list."""

    def text(self, name: str, text: str, step: int | None = None) -> None:
        """Keep a text."""

    def written(self) -> Callable[[], None]:
        """Return a function that waits until everything logged so far is on disk."""
        return lambda: None

    def close(self) -> None:
        """Wait for what is still being written."""


MakeRecorder = Callable[["AttemptDir", "Progress", "TensorBoardLog | None"], Recorder]
"""Makes the recorder of rank 0; what it keeps is in TensorBoard too, if the attempt writes to it."""


class Choice:
    """What was typed of the options that a capability adds to `trainkit run` or `trainkit check`."""

    has_terminal = False
    """Whether a rank gets the terminal, in which the command then prints no log."""

    def check(self, workload: Workload, *, is_alone: bool) -> None:
        """Raise UsageError for a run that cannot have it; `is_alone` unless others start ranks of it too."""

    def apply(self, plan: LaunchPlan) -> LaunchPlan:
        """The plan of the run with it; raises UsageError for one that cannot have it."""
        return plan

    def try_out(self, config: RunConfig) -> str:
        """Do once what a run would do, and say what has happened; raises TrainkitError if it fails."""
        raise NotImplementedError


class Capability:
    """The base of all capabilities: a subclass defines what it needs. A process has one object of each."""

    name: ClassVar[str]
    """The name of its folder, or of its entry point and section."""
    Config: ClassVar[type[Section] | None] = None
    """The section that a capability of another package adds to the config, described by its docstring."""
    at_start: ClassVar[str | None] = None
    """A file whose `prepare` every Python interpreter of a rank calls before any other code, as
    `trainkit.job.python_start` says."""
    commands: ClassVar[Mapping[str, str]] = {}
    """Command -> MODULE:NAME of a click command. Of another package it is named NAME or NAME-…."""
    quiet: ClassVar[Mapping[str, str]] = {}
    """Key that is null in a replay and in a short training, as of a bench -> why; ``{what}`` is its name."""
    may_be_secret: ClassVar[tuple[str, ...]] = ()
    """Keys whose values no error shows."""
    other_keys: ClassVar[Mapping[str, str]] = {}
    """Key of other programs -> a hint, which keys of the config replace it; of a shipped capability only."""

    def contradictions(self, config: RunConfig) -> Iterable[KeyProblem]:
        """The problems of the config keys of the capability, whatever the facts."""
        return ()

    def packages(self, config: RunConfig) -> Mapping[str, str]:
        """The packages that the Python of the ranks must have -> the key that asks for them."""
        return {}

    def problems(self, loaded: LoadedConfig, facts: Facts) -> Iterable[KeyProblem]:
        """The problems of the config keys of the capability, given the facts."""
        return ()

    def plan(self, loaded: LoadedConfig, facts: Facts, draft: LaunchPlan) -> Planned:
        """Plan its part of the run that `draft` describes."""
        return Planned()

    def plan_command(self, loaded: LoadedConfig, workload: Workload, ranks: Ranks) -> Planned:
        """Plan what a command gets from the config; raises ConfigError for values that it cannot get."""
        return Planned()

    def without_hangs(self, plan: LaunchPlan) -> LaunchPlan:
        """The plan of a run in which a rank may wait for a person for hours: its part reports no hang."""
        return plan

    def size_independent(self, plan: LaunchPlan) -> object:
        """The values of its part that must be equal for every number of nodes that the job may get."""
        return None

    def argv(self, plan: LaunchPlan, rank: RankEnv, run: RunDir) -> tuple[str, ...]:
        """The command line with which an agent starts a command, if its launcher is of the capability."""
        raise NotImplementedError

    def environ(self, attempt: AttemptDir, plan: LaunchPlan) -> Mapping[str, str]:
        """Variables of the environment of every rank."""
        return {}

    def in_trainer(
        self, plan: LaunchPlan, unwatched: Callable[[], AbstractContextManager[None]]
    ) -> Callable[[Exception], None] | None:
        """Prepare a rank of the trainer before it imports torch; what it returns gets the error that ends it.

        Within `unwatched()`, nothing that the rank waits for counts as a hang.
        """
        return None

    def companion(self, attempt: AttemptDir, plan: LaunchPlan, node: Rendezvous) -> Companion | None:
        """Start what runs next to the ranks of an agent, if its part is in the plan; None for nothing."""
        return None

    def rank_observer(self, plan: LaunchPlan, ranks: TimedRanks) -> RankObserver | None:
        """Begin to look at the times of the ranks in the trainer; None for nothing."""
        return None

    def recorder(self) -> MakeRecorder:
        """What makes the recorder of rank 0, if the capability keeps images, histograms and texts."""
        raise NotImplementedError

    def watch(self, attempt: AttemptDir, plan: LaunchPlan, hosts: Hosts) -> Watch | None:
        """Begin to watch an attempt from its supervisor, if its part is in the plan; None for nothing."""
        return None

    def hosts_to_leave(self, attempt: AttemptDir, plan: LaunchPlan, hosts: Hosts) -> Collection[str]:
        """The hosts of a job that the run is to leave out from now on, after an attempt has ended."""
        return ()

    def on_event(self, attempt: AttemptDir, event: Event) -> None:
        """React to a line of events.jsonl, in the supervisor, within seconds after it was written."""

    def on_end(self, attempt: AttemptDir, plan: LaunchPlan, end: AttemptEnd) -> None:
        """React to the end of an attempt; `end` says whether the run restarts."""

    def close(self) -> None:
        """Wait for what is still being sent, when the process of the supervisor ends."""

    def speeds(self, group: Path) -> Mapping[int, float | None]:
        """The tokens per second of the runs of a group that has its file, by their index."""
        return {}

    def waits(self, plan: PlanRecord) -> str:
        """What `status` says of a run in which a rank waits for a person, or may wait by its plan."""
        raise NotImplementedError

    def rows(self, reading: Reading) -> Mapping[str, str]:
        """The lines that it adds to `status` of a run: label -> text."""
        return {}

    def status(self, reading: Reading) -> Mapping[str, object]:
        """The keys that it adds to ``status --json``."""
        return {}

    def notices(self, reading: Reading) -> Sequence[Notice]:
        """The warnings about an attempt that runs, asked for where events of capabilities last."""
        return ()

    def past(self, event: Event) -> str:
        """One of its events that is over, as a sentence of the warnings."""
        return event.content

    def hosts(self, reading: Reading, now: datetime) -> Mapping[str, HostView]:
        """What it says of the hosts of the newest attempt, by name."""
        return {}

    def advice(self, attempt: AttemptDir, host: str | None, lasting: Sequence[Event]) -> Mapping[str, str]:
        """The values for the advice of a diagnosis, by placeholder; `host` is the one that failed first."""
        return {}

    def report(self, history: RunHistory) -> Mapping[str, object]:
        """The keys that it adds to ``report --json``, and to what the page shows."""
        return {}

    def sections(self, history: RunHistory) -> Mapping[str, str]:
        """The sections that it adds to the page of a report: title -> HTML, with all texts in it escaped."""
        return {}
