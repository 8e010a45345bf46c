"""The contract through which a capability brings what not every run needs; the core names none of them.

A capability is a folder of `trainkit/capabilities/`, listed in `SHIPPED`, or a class of another package whose
metadata name it in the entry-point group `trainkit.capabilities`: it is imported only where a config, a plan
or a command line names it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from trainkit.errors import KeyProblem, TrainkitError, UsageError

if TYPE_CHECKING:  # the nouns of the floors above, for type checkers alone
    from contextlib import AbstractContextManager
    from datetime import datetime
    from importlib.metadata import EntryPoint

    from trainkit.config.loaded import LoadedConfig
    from trainkit.config.schema import RunConfig
    from trainkit.config.section import Section
    from trainkit.config.training import DataConfig
    from trainkit.data.dataset_file import TokenizerIdentity
    from trainkit.job.decision import Departure
    from trainkit.job.node.rendezvous import Rendezvous
    from trainkit.job.rank_env import RankEnv
    from trainkit.plan.facts import Facts
    from trainkit.plan.launch import LaunchPlan, Layout
    from trainkit.plan.workload import Workload
    from trainkit.run.end import AttemptEnd
    from trainkit.run.events import Event
    from trainkit.run.history import PlanRecord, RunHistory
    from trainkit.run.rundir import AttemptDir, RunDir

GROUP = "trainkit.capabilities"
"""The group of the entry points of other packages: the name of a section -> MODULE:CLASS."""
OF_THE_RUN = ("config.yaml", "plan.json", "job.json", "end.json", "submit.sbatch")
"""Files in the folders of a run and its attempts that no capability may write."""
T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """The base of what a capability keeps in plan.json, a frozen dataclass; read with `LaunchPlan.part`.

    A field `files`, name -> text, is written next to plan.json, and compared with it when the job starts. A
    field `keys` has keys of the config that the user had set: a run that repeats this one knows them then.
    """

    CAPABILITY: ClassVar[str] = ""
    """The name of the capability."""


@dataclass(frozen=True)
class Planned:
    """The result of `Capability.plan` and `plan_command`: a part of the plan, with reasons and warnings."""

    part: Part | None = None
    """None for a run that does not use it; of such a run its code is not imported."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Derived value -> its reason, which a dry run prints."""
    warnings: tuple[str, ...] = ()
    """Messages about settings without effect, or that could not be checked, one sentence each."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of every worker, of `plan_command` only; launch.env comes before them."""
    keys: Collection[str] = ()
    """Keys of the config that have an effect on a command because of it, of `plan_command` only."""
    follows: str | None = None
    """The derived value after which the reasons of `plan` are printed; None for the last one."""


@dataclass(frozen=True)
class Ranks:
    """The number of ranks and their device, before there is a plan."""

    world_size: int
    num_nodes: int
    workers_per_node: int
    device: str


class Companion:
    """Something that runs next to the ranks of a node, in a thread or process of its own."""

    def poll(self) -> None:
        """Look around, every few seconds; the agent waits for it."""

    def end(self, *, is_finished: bool) -> None:
        """End it; `is_finished` if all ranks of the agent have finished: else the job cannot wait."""


@dataclass(frozen=True)
class Hosts:
    """The hosts of a job, as Slurm names them; none of an attempt on this machine."""

    all: Sequence[str] = ()
    good: Sequence[str] = ()
    """Without the hosts that have failed in this job, or earlier in the run."""


class Watch:
    """Something that the supervisor looks at while an attempt runs."""

    while_stopping: ClassVar[bool] = True
    """Whether it is polled after the ranks were asked to save and exit too."""

    def poll(self) -> Departure | None:
        """Look around, every few seconds; the supervisor waits for it.

        What it returns makes the ranks save and exit, and the run restart, unless they are stopping already.
        """
        return None


@dataclass(frozen=True)
class TimedRanks:
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


@dataclass(frozen=True)
class Reading:
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


@dataclass(frozen=True)
class HostView:
    """What a capability says of a host in `watch`."""

    values: Mapping[str, object] = field(default_factory=dict)
    """Values of a row of the nodes, by the keys of `watch --json`."""
    problems: Sequence[tuple[int, str]] = ()
    """How bad each problem is, and the problem in a few words."""


class Reader:
    """Reads the files of a capability in a run, for a screen that is refreshed; see `RunHistory.reader`."""

    def __init__(self, run: RunDir) -> None:
        self.run = run

    def update(self) -> None:
        """Read what was written since the last call, and no more. Raises OSError."""


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
    """Key that is null in a short training, such as one of a bench -> why; ``{what}`` is its name there."""
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

    def inspect_texts(
        self, config: DataConfig, tokenizer: TokenizerIdentity | None
    ) -> tuple[list[KeyProblem], Mapping[str, float] | None]:
        """The problems of the texts of a config, and at most how many tokens each split has; None if unknown.

        `tokenizer` is None if that of the config cannot be read.
        """
        raise NotImplementedError

    def prepare_texts(self, config: DataConfig, checks_sizes: bool) -> Path:
        """The folder of token shards of a config's texts, made first if necessary."""
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


@dataclass(frozen=True)
class RestartCause:
    """Why a capability has a run restart; the attempts that end so do not count as ends without progress."""

    words: str
    """What the list of the restarts says."""
    in_place: bool = False
    """Whether the run restarts in its allocation where it can; else the job returns to the queue."""


@dataclass(frozen=True)
class Shipped:
    """A folder of `trainkit/capabilities/`, by what is known of it before it is imported."""

    follows: str = ""
    """The key of plan.json after which its part is written; a second one is for plans without the first."""
    keys: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    """Key of plan.json -> the field of its part, and the value without a part or `LEFT_OUT`; or `WHOLE`."""
    within: tuple[str, ...] = ()
    """The fields of its part if they are the last ones of the record `follows`, which every plan has."""
    commands: Mapping[str, str] = field(default_factory=dict)
    """Command, or a group and its command -> MODULE:NAME of a click command in the folder."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Command -> MODULE:NAME of a decorator in the folder, which adds options to it, and a `Choice` of them
    to its `choices`. Its module is imported for the help of the command too."""
    in_ranks: bool = False
    """Whether it acts in the ranks of every run, also of one without its part."""
    attends: str = ""
    """The field of its part with the rank that a person attends to, if a run has such a rank.

    The folder of an attempt then has a folder NAME while a rank waits for a person, with a ``rank-*.json``;
    once a person has come, its file ``rank`` says to which rank.
    """
    launchers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Launcher of a command -> packages, one of which must be installed."""
    events: Mapping[str, bool] = field(default_factory=dict)
    """Its events that people see -> whether also among the past warnings; see `owner_of`."""
    shown: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Where it adds something: `status`, `rows` or `report` -> key -> the key that it follows."""
    causes: Mapping[str, RestartCause] = field(default_factory=dict)
    """Cause of its `Departure` -> what is known of it."""
    group_file: str | None = None
    """A file that only its groups of runs have; None if it has none."""
    reads_texts: bool = False
    """Whether it makes the data of a training from texts."""
    worker: str | None = None
    """The module whose `run_worker` the ranks of a run with its part call; None for the trainer's."""

    @property
    def has_class(self) -> bool:
        """Whether its module has a `CAPABILITY`, which one with commands alone does not need."""
        return bool(self.follows or self.group_file or self.reads_texts)


LEFT_OUT = object()
"""The value without a part of a key that is left out then."""
WHOLE = ("", LEFT_OUT)
"""A part that is the value of a single key, which is left out without it."""
SHIPPED = {
    "debugger": Shipped(
        "after replay",
        {"debug": WHOLE},
        in_ranks=True,
        attends="rank",
        commands={"debug": "command:command"},
        options={"run": "run_options:run_options"},
    ),
    "bench": Shipped(commands={"bench": "command:command"}, group_file="bench.json"),
    "doctor": Shipped(commands={"doctor": "command:command"}),
    "drill": Shipped(commands={"drill": "command:command"}),
    "export": Shipped(commands={"ckpt export": "command:command"}),
    "generate": Shipped(commands={"generate": "command:command"}),
    "layouts": Shipped(commands={"plan": "command:command"}),
    "replay": Shipped(
        "node_sizes",
        {"replay": ("steps", None)},
        commands={"replay": "command:command", "data show": "command:show"},
        worker="worker",
    ),
    "report": Shipped(commands={"report": "command:command", "compare": "compare:command"}),
    "simulation": Shipped(options={"check": "check_options:simulation_options"}),
    "texts": Shipped(commands={"data": "command:command"}, reads_texts=True),
    "watch": Shipped(commands={"watch": "command:command"}),
    "launchers": Shipped(
        "launcher",
        {"launcher_files": ("files", {}), "launcher_values": ("values", {}), "launcher_keys": ("keys", [])},
        launchers={
            "torchrun": ("torch",),
            "accelerate": ("accelerate",),
            "deepspeed": ("deepspeed",),
            "lightning": ("lightning", "pytorch_lightning"),
            "megatron": ("torch",),
        },
    ),
    "slow_ranks": Shipped(
        "requeue",
        within=("inspect_s", "silence_s", "slow_hosts", "slow_after_s"),
        events={"slow_rank": True, "slow_run": True, "silent": False},
        shown={"status": {"slowdowns": "diverged_since"}, "report": {"slowdowns": "num_steps_lost"}},
        causes={"slow_host": RestartCause("slow host", in_place=True)},
    ),
    "growth": Shipped(
        "sizes checkpoint_bytes",
        {"grow": ("grow", LEFT_OUT)},
        events={"growth": False},
        shown={"status": {"growth": "gpu_type"}, "rows": {"growth": "used"}},
    ),
    "notifications": Shipped("requeue", {"notify": WHOLE}, options={"check": "check_option:check_option"}),
    "curves": Shipped("trackers", {"log_pattern": ("pattern", None)}),  # trackers get its end
    "health": Shipped(
        "log_pattern", {"health_every_s": ("every_s", None)}, shown={"report": {"nodes": "slowdowns"}}
    ),
    "trackers": Shipped(
        "slurm",
        {"trackers": ("names", [])},
        shown={"status": {"trackers": "slowdowns"}},
        commands={"sync": "command:sync", "ui": "command:ui"},
    ),
}
"""The shipped capabilities by the name of their folder; companions end in this order."""
ATTENDING = tuple(name for name, shipped in SHIPPED.items() if shipped.attends)
"""The capabilities in which a person attends to a rank."""


@dataclass(frozen=True)
class ShippedTask:
    """A task of `trainkit/capabilities/`, by what is known of it before it is imported."""

    place: str
    """MODULE:CLASS."""
    paths: Mapping[str, str | None]
    """The keys of `task_args` whose values are paths, each with the value that is a name instead."""


TASKS = {
    "multimodal_lm": ShippedTask(
        "trainkit.capabilities.multimodal.task:MultimodalLM", {"train": "demo", "val": "demo"}
    ),
}
"""The shipped tasks, by their names in a config."""
TASK_CHECK = "trainkit.capabilities.task_check.worker"
"""The module whose process tries a user's task, or reads all of its samples."""
TRANSFORMERS_TASK = "trainkit.capabilities.transformers.task:HFCausalLM"
"""The task of a `model.hf` that only the transformers library can build; it can `check` itself."""


def load(name: str) -> Capability:
    """The capability of a plan, of which each process has one; raises UsageError if it is not installed."""
    found = _loaded(name)
    if found is None:
        raise UsageError(
            f"the run uses the capability {name}, which {sys.executable} does not have",
            hint="install the package that has it, or remove its section from the config",
        )
    return found


@cache
def _loaded(name: str) -> Capability | None:
    if name in SHIPPED:
        if not SHIPPED[name].has_class:
            return None
        found = importlib.import_module(f"trainkit.capabilities.{name}").CAPABILITY
    elif (entry := entry_point(name)) is not None:
        found = entry.load()
    else:
        return None
    own: Capability = found()
    if not isinstance(own, Capability) or own.name != name:
        raise UsageError(
            f"the entry point {name} of {GROUP} is not a Capability of that name: {found!r}",
            hint="it must name a subclass of trainkit.capability.Capability with this `name`",
        )
    return own


@cache
def entry_point(name: str) -> EntryPoint | None:
    """The entry point of a capability of another package; None if none is installed."""
    # This reads the metadata of every package: only for an unknown name.
    from importlib.metadata import entry_points

    return next(iter(entry_points(group=GROUP, name=name)), None)


def installed_section(name: str) -> type[Section] | None:
    """The section that a package which is installed adds to the config; None without one."""
    return None if entry_point(name) is None else load(name).Config


def shipped_classes() -> list[str]:
    """The shipped capabilities that have a class."""
    return [name for name, shipped in SHIPPED.items() if shipped.has_class]


def launchers() -> dict[str, tuple[str, ...]]:
    """The launchers of commands, each with the packages one of which must be installed."""
    return {name: needs for shipped in SHIPPED.values() for name, needs in shipped.launchers.items()}


def with_launcher(name: str) -> Capability:
    """The capability that a launcher is of; raises UsageError if there is none."""
    return load(next((folder for folder, shipped in SHIPPED.items() if name in shipped.launchers), name))


def of_texts() -> Capability:
    """The capability that makes the data of a training from texts."""
    return load(next(name for name, shipped in SHIPPED.items() if shipped.reads_texts))


def measured_speeds(group: Path) -> Mapping[int, float | None] | None:
    """The speeds that a capability has measured of the runs of a group; None for any other group."""
    files = ((name, shipped.group_file) for name, shipped in SHIPPED.items())
    owner = next((name for name, file in files if file is not None and (group / file).is_file()), None)
    return None if owner is None else load(owner).speeds(group)


def worker_of(names: Iterable[str]) -> str | None:
    """The module that the ranks of a run with these parts run in place of the trainer's; None without one."""
    modules = ((name, SHIPPED[name].worker) for name in names if name in SHIPPED)
    return next((f"trainkit.capabilities.{name}.{own}" for name, own in modules if own is not None), None)


def shipped_command(name: str) -> str | None:
    """MODULE:NAME of a command of a capability that is shipped; None without one."""
    for folder, shipped in SHIPPED.items():
        if name in shipped.commands:
            return f"trainkit.capabilities.{folder}.{shipped.commands[name]}"
    return None


def in_ranks(parts: Iterable[str]) -> list[str]:
    """The capabilities that act in the ranks of a run with these parts."""
    shipped = (name for name, shipped in SHIPPED.items() if shipped.in_ranks)
    return [*shipped, *(name for name in parts if name not in SHIPPED)]


def attended_in(parts: Collection[str]) -> str | None:
    """The capability of these in which a person attends to a rank; None without one."""
    return next((name for name in ATTENDING if name in parts), None)


def shipped_subcommands(group: str) -> list[str]:
    """The commands that the capabilities which are shipped add to a group, such as ``export`` to ``ckpt``."""
    names = (name.split(" ") for shipped in SHIPPED.values() for name in shipped.commands)
    return [words[1] for words in names if words[0] == group and len(words) > 1]


def shipped_options(command: str) -> list[str]:
    """MODULE:NAME of the decorators with which shipped capabilities add options to a command."""
    found = ((folder, shipped.options.get(command)) for folder, shipped in SHIPPED.items())
    return [f"trainkit.capabilities.{folder}.{place}" for folder, place in found if place is not None]


def installed_command(name: str) -> str | None:
    """MODULE:NAME of a command of a capability of another package; None without one."""
    owner = name.partition("-")[0]
    return None if entry_point(owner) is None else load(owner).commands.get(name)


def restart_cause(name: str) -> RestartCause:
    """The cause of a restart; with its name as its words if nothing else is known of it."""
    known = (shipped.causes[name] for shipped in SHIPPED.values() if name in shipped.causes)
    return next(known, RestartCause(name))


def packages_of(names: Iterable[str]) -> dict[str, str]:
    """Of each name that is not shipped, the package and version that has it."""
    entries = ((name, entry_point(name)) for name in names if name not in SHIPPED)
    return {
        name: f"{entry.dist.name} {entry.dist.version}"
        for name, entry in entries
        if entry is not None and entry.dist is not None
    }


def take_parts(plan: Mapping[str, object]) -> dict[str, object]:
    """The parts of a plan.json by the name of their capability, from the keys in which they lie."""
    parts: dict[str, object] = {}
    for name, shipped in SHIPPED.items():
        record = plan.get(shipped.follows)
        record = record if isinstance(record, Mapping) else {}
        own: dict[str, object] = {key: record[key] for key in shipped.within if key in record}
        is_used = bool(own)
        for key, (inner, absent) in shipped.keys.items():
            value = plan.get(key)
            own[inner] = absent if value is None else value
            is_used |= own[inner] != absent
        if is_used:
            parts[name] = own.get("", own)
    others = plan.get("capabilities", {})
    if not isinstance(others, Mapping):
        raise TypeError(f"capabilities is {str(others)[:100]!r}")
    return {**parts, **others}


def files_of(parts: Mapping[str, object]) -> dict[str, str]:
    """The files that the parts of a plan have: name in the run folder -> text.

    Raises ValueError for one that would lie elsewhere, or replace a file of the run.
    """
    found: dict[str, str] = {}
    for owner, part in parts.items():
        files = part.get("files", {}) if isinstance(part, Mapping) else {}
        if not isinstance(files, Mapping):
            raise ValueError(f"the files of {owner} are {str(files)[:100]!r}")
        for name, text in files.items():
            if not isinstance(text, str) or not name or PurePath(name).name != name or name in OF_THE_RUN:
                raise ValueError(f"{name!r} is no file of {owner}")
            found[name] = text
    return found


def keys_of(parts: Mapping[str, object]) -> set[str]:
    """The keys of the config that the parts of a plan have. Raises ValueError for what is no list of them."""
    found: set[str] = set()
    for owner, part in parts.items():
        keys = part.get("keys", ()) if isinstance(part, Mapping) else ()
        if not isinstance(keys, list | tuple) or not all(isinstance(key, str) for key in keys):
            raise ValueError(f"the keys of {owner} are {str(keys)[:100]!r}")
        found.update(keys)
    return found


OVER = "_over"
"""The end of the name of the event after which another one no longer lasts."""
_EVENTS = {event: name for name, shipped in SHIPPED.items() for event in shipped.events}
_EVENTS |= {f"{event}{OVER}": name for event, name in _EVENTS.items()}


def owner_of(event: str) -> str | None:
    """The capability whose event people see, by its name; None for an event of the core.

    It lasts until NAME_over of the same rank, or without a rank, in the same attempt. One of another package
    is named CAPABILITY.NAME, and is always among the past warnings.
    """
    return _EVENTS.get(event) or event.rpartition(".")[0] or None


def is_notable(event: str) -> bool:
    """Whether an event of a capability is shown among the past warnings."""
    owner = None if event.endswith(OVER) else owner_of(event)
    return owner is not None and (owner not in SHIPPED or SHIPPED[owner].events[event])


def shown_by(parts: Iterable[str]) -> list[str]:
    """The capabilities that show something of a run, of which `parts` are in the plan."""
    # A run may have been sent to a tracker that its plan lacks.
    shipped = (name for name, shipped in SHIPPED.items() if shipped.shown)
    return [*shipped, *(name for name in parts if name not in SHIPPED)]


def ask_each(
    parts: Iterable[str], ask: Callable[[Capability], T], failed: Callable[[str, str], T]
) -> dict[str, T]:
    """What each capability that shows something says of a run, by its name; without what is empty.

    The answer of one that fails is that of `failed`, by its name and a text: the others are known.
    """
    found = ((name, ask_one(name, ask, failed)) for name in shown_by(parts))
    return {name: answer for name, answer in found if answer}


def ask_one(name: str, ask: Callable[[Capability], T], failed: Callable[[str, str], T]) -> T:
    """What a capability says; the answer of `failed`, by its name and a text, if it fails."""
    try:
        return ask(load(name))
    except Exception as error:  # of code that may be of another package
        text = error.message if isinstance(error, TrainkitError) else repr(error)
        return failed(name, f"unknown: {text}")


def placed(output: str, own: Mapping[str, T], added: Mapping[str, T]) -> dict[str, T]:
    """An output with what capabilities add: each key after the one that it follows, or last."""
    places = [shipped.shown.get(output, {}) for shipped in SHIPPED.values()]
    following = dict[str, dict[str, T]]()
    for key, before in ((key, before) for place in places for key, before in place.items()):
        if key in added:
            following.setdefault(before, {})[key] = added[key]
    return {**in_order(own, following), **added}


def in_order(own: Mapping[str, T], following: Mapping[str, Mapping[str, T]]) -> dict[str, T]:
    """The items of a mapping, each before those that follow its key."""
    found: dict[str, T] = {}

    def add(key: str, value: T) -> None:
        found[key] = value
        for item in following.get(key, {}).items():
            add(*item)

    for item in own.items():
        add(*item)
    return found


def put_parts(plan: dict[str, object], parts: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
    """The content of a plan.json with its parts: what `take_parts` reads."""
    own: dict[str, dict[str, object]] = {}
    for name, shipped in SHIPPED.items():
        follows, _, other = shipped.follows.partition(" ")
        follows = other if other and follows not in plan else follows
        part, written = parts.get(name), own.setdefault(follows, {})
        if shipped.within:
            record = plan[shipped.follows]
            assert isinstance(record, dict)
            plan = {**plan, shipped.follows: {**record, **(part or {})}}
        for key, (inner, absent) in shipped.keys.items():
            value = absent if part is None else part[inner] if inner else part
            if value is not LEFT_OUT:
                written[key] = value
    found = in_order(plan, own)
    others = {name: part for name, part in parts.items() if name not in SHIPPED}
    return {**found, "capabilities": others} if others else found


class Guard:
    """Calls the capabilities of a run: an error of one is reported once, and the run continues."""

    def __init__(self, names: Iterable[str], report: Callable[[str], None]) -> None:
        self.capabilities = [load(name) for name in names]
        self._report, self._reported = report, set[str]()

    def each(self, what: Callable[[Capability], T | None]) -> list[tuple[str, T]]:
        """The results of a call for each capability of the plan, by its name; without those that are None."""
        found = ((one.name, self.call(one.name, what, one)) for one in self.capabilities)
        return [(name, result) for name, result in found if result is not None]

    def call(self, name: str, what: Callable[..., T], *values: Any, **named: Any) -> T | None:
        """The result of a call; None after an error, which is reported once."""
        try:
            return what(*values, **named)
        except Exception as error:  # of code that may be of another package: it must not end the training
            text = f"warning: the capability {name} has failed: {type(error).__name__}: {error}"
            if text not in self._reported:
                self._reported.add(text)
                self._report(text)
            return None
