"""Defines the interface of capabilities, which are features that only some runs need.

A capability is either a folder of `trainkit/capabilities/` with an entry in `shipped.py`, or a class that
another package declares in the entry-point group `trainkit.capabilities`. A capability is imported only if a
config, a plan or a command line refers to it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from trainkit.errors import KeyProblem

if TYPE_CHECKING:  # types from higher layers, imported only for type checkers
    from contextlib import AbstractContextManager
    from datetime import datetime

    from torch import Tensor

    from trainkit.config.loaded import LoadedConfig
    from trainkit.config.schema import RunConfig
    from trainkit.config.section import Section
    from trainkit.formats import JsonObject
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
    from trainkit.trainer.distributed import World
    from trainkit.trainer.metrics import TensorBoardLog
    from trainkit.trainer.models.model import Weight
    from trainkit.trainer.progress import Progress


@dataclass(frozen=True)
class Part:
    """Base class for the data that a capability stores in plan.json; read the data with `LaunchPlan.part`.

    Subclasses are frozen dataclasses. A field `files` in a subclass maps file names to text. The files are
    written next to plan.json, and compared with the plan when the job starts. A field `keys` in a subclass
    lists the config keys that the user set. These keys are copied to the config of a run that repeats this
    run.
    """

    CAPABILITY: ClassVar[str] = ""
    """The name of the capability."""


class Planned(NamedTuple):
    """The result of `Capability.plan` or `plan_command`: a part of the plan, with reasons and warnings."""

    part: Part | None = None
    """The part, or None if the run does not use the capability. A job does not import the code of a
    capability without a part."""
    reasons: Mapping[str, str] = {}
    """Maps each derived value to the reason for the value, as printed by a dry run."""
    warnings: tuple[str, ...] = ()
    """One sentence for each setting that has no effect or could not be checked."""
    env: Mapping[str, str] = {}
    """Environment variables for every worker (`plan_command` only); launch.env takes precedence."""
    keys: Collection[str] = ()
    """Config keys that take effect for a command because of this capability (`plan_command` only)."""
    follows: str | None = None
    """The derived value after which a dry run prints `reasons`; if None, `reasons` are printed last."""


class Ranks(NamedTuple):
    """The number of ranks and their device, both known before the run is planned."""

    world_size: int
    num_nodes: int
    workers_per_node: int
    device: str


class NodesChoice:
    """Explains why trainkit chose a certain number of nodes for a run."""

    def to_dict(self) -> dict[str, object]:
        """Return the keys that the explanation adds to a command's JSON output."""
        raise NotImplementedError

    def lines(self, plan: LaunchPlan, fit: int | None = None) -> Iterable[str]:
        """Return the reasons for the number of nodes, in lines of at most `fit` characters if possible."""
        raise NotImplementedError


class Companion:
    """A helper that runs alongside the ranks of a node, in a separate thread or process."""

    def poll(self) -> None:
        """Do a short piece of work.

        The agent calls this method every few seconds and waits until it returns.
        """

    def end(self, *, is_finished: bool) -> None:
        """Stop the companion.

        Unless all ranks of the agent have finished (`is_finished`), the companion must stop without delay.
        """


class Hosts(NamedTuple):
    """Hosts of a job, by their Slurm names; empty for an attempt that does not run on Slurm."""

    all: Sequence[str] = ()
    good: Sequence[str] = ()
    """The hosts that have failed neither in this job nor earlier in the run."""


class Watch:
    """A check that the supervisor repeats while an attempt runs."""

    while_stopping: ClassVar[bool] = True
    """True if polling continues after the ranks have received a stop signal."""

    def poll(self) -> PlannedStop | None:
        """Check the attempt. The supervisor calls this method every few seconds and waits until it returns.

        If the method returns a stop and the ranks are not already stopping, they save and exit, and the run
        restarts.
        """
        return None


class TimedRanks(NamedTuple):
    """The ranks of the built-in trainer, as described to a `RankObserver`.

    Ranks report their times at the end of each window, which is a fixed number of steps.
    """

    layout: Layout
    hosts: Sequence[str]
    """The host of each rank."""
    window: int
    """The number of steps in a window."""
    on_gpu: bool


NewEvent = tuple[str, Mapping[str, object]]
"""The name of an event to record, and the event's values."""


class RankObserver:
    """Receives the step times of all ranks. Only rank 0 has an observer."""

    values: Mapping[str, float | str] = {}
    """Values that the observer adds to each metrics record."""

    def add(self, step: int, times: Sequence[float], step_s: float) -> Iterable[NewEvent]:
        """Process the times of a step and return events for rank 0 to record. Rank 0 waits for this call.

        At the end of a window, `times` has the shape [ranks x 2]: for each rank, the mean seconds per step
        spent waiting for data, and the mean seconds per step spent computing before the rank waits for other
        ranks. At all other steps, `times` is empty. `step_s` is the duration of the step, excluding saves and
        validation.
        """
        return ()


class TrainedModel(NamedTuple):
    """A rank's part of the model in the built-in trainer, as described to a `TrainerHook`."""

    weights: Sequence[Weight]
    world: World
    weights_changed: Callable[[], None]
    """Discards everything that was derived from the weights; call this after changing weights."""


class GoBack(NamedTuple):
    """A request to go back to an earlier checkpoint, and to leave out the samples that followed it."""

    before_step: int
    """The run goes back to the newest checkpoint before this step."""
    why: str
    max_times: int
    """The number of times that the run may go back automatically."""
    limited_by: str
    """The config key of `max_times`."""


class TrainerHook:
    """Code of a capability that every rank of the built-in trainer runs at fixed points of the training loop.

    All ranks call each method at the same step, so the methods may run collectives. An error in a hook ends
    the attempt, because the state of the ranks could otherwise differ.
    """

    def state_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Return the name and tensor of each state; checkpoints are loaded into these tensors in place.

        The tensors are sharded like the weights, and have layout-independent names.
        """
        return ()

    def saved(self) -> JsonObject:
        """Return values that checkpoints contain as JSON; the values are equal on all ranks."""
        return {}

    def load(self, saved: Mapping[str, object]) -> None:
        """Restore the values of `saved` from a checkpoint; called before `begin`, if there are any."""

    def begin(self, step: int, *, is_loaded: bool) -> None:
        """Start with the weights of `step`; `is_loaded` is True if a checkpoint contained the state tensors.

        If `is_loaded` is False, the hook initializes its state tensors.
        """

    def after_step(self, step: int, *, has_updated: bool, loss: float) -> Iterable[NewEvent]:
        """Process a step, and return events for rank 0 to record; called before validation and saving.

        `has_updated` is False if the step was skipped because its loss or gradient was not finite. `loss` is
        the mean loss over all ranks. To end the run without saving the step's state, raise FatalError on all
        ranks.
        """
        return ()

    def go_back(self) -> GoBack | None:
        """Return a request to end the attempt and go back to an earlier checkpoint, or None.

        The trainer calls this method after `after_step`. All ranks must return the same request.
        """
        return None

    def other_weights(self) -> Mapping[str, Callable[[], AbstractContextManager[None]]]:
        """Map suffixes to context managers within which the model computes with other weights.

        Validation is repeated within each context, and the suffix is appended to the names of its metrics.
        """
        return {}


class Reading(NamedTuple):
    """Data from the files of a run, for capabilities that display something about the run."""

    history: RunHistory
    plan: PlanRecord
    attempt: int | None
    """The number of the newest attempt."""
    state: str
    """The state of the run, as shown by `status`."""
    lasting: Sequence[Event]
    """Events of capabilities that are still in effect, oldest first (see `owner_of`)."""


@dataclass(frozen=True)
class Notice:
    """A user-facing warning about a run. If `time` is None, the warning describes the present."""

    time: str | None
    text: str
    host: str | None = None
    rank: int | None = None


class HostView(NamedTuple):
    """Values and problems of a host that a capability shows in `watch`."""

    values: Mapping[str, object] = {}
    """Values for the host's row of the table, keyed as in `watch --json`."""
    problems: Sequence[tuple[int, str]] = ()
    """The severity and a short description of each problem."""


class Reader:
    """Reads a capability's files in a run incrementally, for a screen that is refreshed."""

    def __init__(self, run: RunDir) -> None:
        self.run = run

    def update(self) -> None:
        """Read only the lines written since the last call; raise OSError if reading fails."""


class Recorder:
    """Records images, histograms and texts that a rank logs.

    This base class, used on all ranks except rank 0, records nothing. `step` defaults to the current training
    step. All methods raise UsageError for values that cannot be recorded.
    """

    def image(self, name: str, image: object, step: int | None = None, caption: str | None = None) -> None:
        """Record a copy of a tensor, a numpy array or a PIL image."""

    def histogram(self, name: str, values: object, step: int | None = None) -> None:
        """Record the histogram of the numbers in a tensor, an array or a list."""

    def text(self, name: str, text: str, step: int | None = None) -> None:
        """Record a text under a name."""

    def written(self) -> Callable[[], None]:
        """Return a function that waits until everything logged before this call is on disk."""
        return lambda: None

    def close(self) -> None:
        """Wait until everything that was recorded is on disk."""


MakeRecorder = Callable[["AttemptDir", "Progress", "TensorBoardLog | None"], Recorder]
"""Creates the recorder of rank 0, which also writes to TensorBoard if the attempt uses TensorBoard."""


class Choice:
    """Values for the options that a capability adds to `trainkit run` or `trainkit check`."""

    has_terminal = False
    """True if a rank uses the terminal, so that the command prints no rank output to the terminal."""

    def check(self, workload: Workload, *, is_alone: bool) -> None:
        """Raise UsageError if these options cannot be used with the run.

        `is_alone` is False if other processes also start ranks of the same run.
        """

    def apply(self, plan: LaunchPlan) -> LaunchPlan:
        """Return the plan with these options applied; raise UsageError if the plan does not allow them."""
        return plan

    def try_out(self, config: RunConfig) -> str:
        """Try out what a run would do, and describe the result; raise TrainkitError on failure."""
        raise NotImplementedError


class Capability:
    """Base class of all capabilities.

    Subclasses override only the attributes and methods that they need. Each process has one instance of each
    capability.
    """

    name: ClassVar[str]
    """Name of the capability's folder or, for an external capability, of its entry point and config
    section."""
    Config: ClassVar[type[Section] | None] = None
    """The config section that an external capability adds. The docstring of the class describes the
    section."""
    at_start: ClassVar[str | None] = None
    """A file with a function `prepare`, which every Python interpreter in a rank calls before any other code;
    see `trainkit.job.python_start`."""
    commands: ClassVar[Mapping[str, str]] = {}
    """Maps a command name to the MODULE:NAME of a click command. The commands of an external capability are
    called NAME or NAME-…, where NAME is the name of the capability."""
    quiet: ClassVar[Mapping[str, str]] = {}
    """Maps each config key that is set to null in replays and short trainings to the reason for this.

    ``{what}`` in a reason is replaced with the command, such as a replay or a bench.
    """
    may_be_secret: ClassVar[tuple[str, ...]] = ()
    """Config keys whose values must not appear in error messages."""
    other_keys: ClassVar[Mapping[str, str]] = {}
    """Maps a config key of another program to a hint with the corresponding trainkit keys; only for built-in
    capabilities."""

    def contradictions(self, config: RunConfig) -> Iterable[KeyProblem]:
        """Return problems of the capability's config keys that can be found without `Facts`."""
        return ()

    def packages(self, config: RunConfig) -> Mapping[str, str]:
        """Map each package required in the ranks' Python to the config key that requires the package."""
        return {}

    def problems(self, loaded: LoadedConfig, facts: Facts) -> Iterable[KeyProblem]:
        """Return problems of the capability's config keys, given the machine, data and environment."""
        return ()

    def plan(self, loaded: LoadedConfig, facts: Facts, draft: LaunchPlan) -> Planned:
        """Return the capability's part of the plan for the run that `draft` describes."""
        return Planned()

    def plan_command(self, loaded: LoadedConfig, workload: Workload, ranks: Ranks) -> Planned:
        """Plan the config values for a COMMAND; raise ConfigError for values that a COMMAND cannot use."""
        return Planned()

    def without_hangs(self, plan: LaunchPlan) -> LaunchPlan:
        """Return the plan without hang detection, because a rank may wait for user input for hours."""
        return plan

    def size_independent(self, plan: LaunchPlan) -> object:
        """Return the part's values that must not depend on the number of nodes that the job gets."""
        return None

    def argv(self, plan: LaunchPlan, rank: RankEnv, run: RunDir) -> tuple[str, ...]:
        """Return the command line that starts a user's COMMAND through the capability's launcher."""
        raise NotImplementedError

    def environ(self, attempt: AttemptDir, plan: LaunchPlan) -> Mapping[str, str]:
        """Return environment variables for every rank."""
        return {}

    def in_trainer(
        self, plan: LaunchPlan, unwatched: Callable[[], AbstractContextManager[None]]
    ) -> Callable[[Exception], None] | None:
        """Prepare a rank of the trainer; called before torch is imported.

        Returns None, or a function to call with the exception that terminates the rank. Time spent inside the
        context manager `unwatched()` is not considered a hang.
        """
        return None

    def companion(self, attempt: AttemptDir, plan: LaunchPlan, node: Rendezvous) -> Companion | None:
        """Start the companion of an agent's ranks, or return None if the plan lacks the capability's part."""
        return None

    def bytes_per_param(self, config: RunConfig) -> float:
        """Return the bytes of state per parameter that the capability's `TrainerHook` adds to a run.

        The state is sharded like the weights, stays on the device of the weights, and is saved in
        checkpoints.
        """
        return 0

    def metrics(self, config: RunConfig) -> Collection[str]:
        """Return the names of metrics that the capability's `TrainerHook` adds to the task causal_lm."""
        return ()

    def trainer_hook(self, plan: LaunchPlan, model: TrainedModel) -> TrainerHook | None:
        """Return the hook of a rank of the trainer, or None if the plan lacks the capability's part.

        This method runs in every rank, before the weights have their values.
        """
        return None

    def rank_observer(self, plan: LaunchPlan, ranks: TimedRanks) -> RankObserver | None:
        """Return an observer for the step times of the trainer's ranks, or None if none is needed."""
        return None

    def recorder(self) -> MakeRecorder:
        """Return the function that creates rank 0's recorder for images, histograms and texts."""
        raise NotImplementedError

    def watch(self, attempt: AttemptDir, plan: LaunchPlan, hosts: Hosts) -> Watch | None:
        """Return the supervisor's watch for an attempt, or None if the plan lacks the capability's part."""
        return None

    def hosts_to_leave(self, attempt: AttemptDir, plan: LaunchPlan, hosts: Hosts) -> Collection[str]:
        """Return the hosts that the run must exclude from now on; called after each attempt."""
        return ()

    def on_event(self, attempt: AttemptDir, event: Event) -> None:
        """React to a new line in events.jsonl.

        The supervisor calls this method within seconds of the event.
        """

    def on_end(self, attempt: AttemptDir, plan: LaunchPlan, end: AttemptEnd) -> None:
        """React to the end of an attempt. `end` also records whether the run restarts."""

    def close(self) -> None:
        """Wait until all data has been sent; called before the supervisor's process exits."""

    def speeds(self, group: Path) -> Mapping[int, float | None]:
        """Map each run's index to its tokens per second; called for groups created by the capability."""
        return {}

    def waits(self, plan: PlanRecord) -> str:
        """Return the text shown by `status` while a rank waits, or may wait, for user input."""
        raise NotImplementedError

    def rows(self, reading: Reading) -> Mapping[str, str]:
        """Return lines that the capability adds to the `status` of a run, as a mapping from label to text."""
        return {}

    def status(self, reading: Reading) -> Mapping[str, object]:
        """Return the keys that the capability adds to the output of ``status --json``."""
        return {}

    def notices(self, reading: Reading) -> Sequence[Notice]:
        """Return warnings about a running attempt; called while an event of any capability is in effect."""
        return ()

    def past(self, event: Event) -> str:
        """Describe a past event of this capability in one sentence for the list of warnings."""
        return event.content

    def hosts(self, reading: Reading, now: datetime) -> Mapping[str, HostView]:
        """Map each host of the newest attempt to the values and problems shown for the host in `watch`."""
        return {}

    def advice(self, attempt: AttemptDir, host: str | None, lasting: Sequence[Event]) -> Mapping[str, str]:
        """Return values for placeholders in a diagnosis's advice. `host` is the first host that failed."""
        return {}

    def report(self, history: RunHistory) -> Mapping[str, object]:
        """Return the keys that the capability adds to ``report --json`` and to the report page's data."""
        return {}

    def sections(self, history: RunHistory) -> Mapping[str, str]:
        """Return the capability's sections of a report page, as a mapping from title to escaped HTML."""
        return {}
