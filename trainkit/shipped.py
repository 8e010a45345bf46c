"""The shipped capabilities, by what is known of one before it is imported, and those of other packages."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from trainkit.errors import TrainkitError, UsageError

if TYPE_CHECKING:  # the contract too: a command that needs no capability does not load it
    from importlib.metadata import EntryPoint

    from trainkit.capability import Capability, NodesChoice
    from trainkit.config.loaded import LoadedConfig
    from trainkit.config.section import Section
    from trainkit.config.training import DataConfig
    from trainkit.data.dataset_file import TokenizerIdentity
    from trainkit.errors import KeyProblem
    from trainkit.plan.launch import LaunchPlan

    NodeChooser = Callable[..., tuple[LoadedConfig, LaunchPlan, NodesChoice]]
    Tokens = Mapping[str, float] | None
    TextInspector = Callable[[DataConfig, TokenizerIdentity | None], tuple[list[KeyProblem], Tokens]]
    TextPreparer = Callable[[DataConfig, bool], Path]

T = TypeVar("T")
GROUP = "trainkit.capabilities"
"""The group of the entry points of other packages: the name of a section -> MODULE:CLASS."""
OF_THE_RUN = ("config.yaml", "plan.json", "job.json", "end.json", "submit.sbatch")
"""Files in the folders of a run and its attempts that no capability may write."""


class RestartCause(NamedTuple):
    """Why a capability has a run restart; the attempts that end so do not count as ends without progress."""

    words: str
    """What the list of the restarts says."""
    in_place: bool = False
    """Whether the run restarts in its allocation where it can; else the job returns to the queue."""


class Shipped(NamedTuple):
    """A folder of `trainkit/capabilities/`, by what is known of it before it is imported."""

    follows: str = ""
    """The key of plan.json after which its part is written; a second one is for plans without the first."""
    keys: Mapping[str, tuple[str, Any]] = {}
    """Key of plan.json -> the field of its part, and the value without a part or `LEFT_OUT`; or `WHOLE`."""
    within: tuple[str, ...] = ()
    """The fields of its part if they are the last ones of the record `follows`, which every plan has."""
    commands: Mapping[str, str] = {}
    """Command, or a group and its command -> MODULE:NAME of a click command in the folder."""
    options: Mapping[str, str] = {}
    """Command -> MODULE:NAME of a decorator in the folder, which adds options to it, and a `Choice` of them
    to its `choices`. Its module is imported for the help of the command too."""
    in_ranks: bool = False
    """Whether it acts in the ranks of every run, also of one without its part."""
    attends: str = ""
    """The field of its part with the rank that a person attends to, if a run has such a rank.

    The folder of an attempt then has a folder NAME while a rank waits for a person, with a ``rank-*.json``;
    once a person has come, its file ``rank`` says to which rank.
    """
    launchers: Mapping[str, tuple[str, ...]] = {}
    """Launcher of a command -> packages, one of which must be installed; `Capability.argv` starts it."""
    events: Mapping[str, bool] = {}
    """Its events that people see -> whether also among the past warnings; see `owner_of`."""
    shown: Mapping[str, Mapping[str, str]] = {}
    """Where it adds something: `status`, `rows` or `report` -> key -> the key that it follows."""
    causes: Mapping[str, RestartCause] = {}
    """Cause of its `PlannedStop` -> what is known of it."""
    group_file: str | None = None
    """A file that only its groups of runs have; None if it has none."""
    functions: Mapping[str, str] = {}
    """Function of which the core has no other one -> MODULE:NAME in the folder."""
    keeps_media: bool = False
    """Whether it keeps the images, histograms and texts that a rank logs."""
    without_keys: bool = False
    """Whether no key of a config is about it: a config is checked and planned without its class."""
    worker: str | None = None
    """The module whose `run_worker` the ranks of a run with its part call; None for the trainer's."""

    @property
    def has_class(self) -> bool:
        """Whether its module has a `CAPABILITY`, which one with commands alone does not need."""
        return bool(self.follows or self.group_file or self.keeps_media)


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
        without_keys=True,
        commands={"debug": "command:command"},
        options={"run": "run_options:run_options"},
    ),
    "bench": Shipped(commands={"bench": "command:command"}, group_file="bench.json", without_keys=True),
    "init": Shipped(commands={"init": "command:command"}),
    "shell": Shipped(commands={"shell": "command:shell", "attach": "command:attach"}),
    "stacks": Shipped(commands={"stacks": "command:command"}),
    "diagnose": Shipped(commands={"diagnose": "command:command"}),
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
        without_keys=True,
    ),
    "report": Shipped(commands={"report": "command:command", "compare": "compare:command"}),
    "simulation": Shipped(options={"check": "check_options:simulation_options"}),
    "texts": Shipped(
        commands={"data": "command:command"},
        functions={"inspect_texts": "checks:inspect_texts", "prepare_texts": "cache:prepare_texts"},
    ),
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
        functions={"choose_nodes": "earliest_end:choose_nodes"},
        events={"growth": False},
        shown={"status": {"growth": "gpu_type"}, "rows": {"growth": "used"}},
    ),
    "notifications": Shipped("requeue", {"notify": WHOLE}, options={"check": "check_option:check_option"}),
    "curves": Shipped("trackers", {"log_pattern": ("pattern", None)}),  # trackers get its end
    "health": Shipped(
        "log_pattern", {"health_every_s": ("every_s", None)}, shown={"report": {"nodes": "slowdowns"}}
    ),
    "media": Shipped(keeps_media=True, without_keys=True, shown={"report": {"media": "slowdowns"}}),
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


class ShippedTask(NamedTuple):
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
    from trainkit.capability import Capability

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
    """The shipped capabilities with a class that a config may ask for."""
    return [name for name, shipped in SHIPPED.items() if shipped.has_class and not shipped.without_keys]


def launchers() -> dict[str, tuple[str, ...]]:
    """The launchers of commands, each with the packages one of which must be installed."""
    return {name: needs for shipped in SHIPPED.values() for name, needs in shipped.launchers.items()}


def with_launcher(name: str) -> Capability:
    """The capability that a launcher is of; raises UsageError if there is none."""
    return load(next((folder for folder, shipped in SHIPPED.items() if name in shipped.launchers), name))


def _function(name: str) -> object:
    """The function of this name, which one of the shipped capabilities has."""
    folder, place = next(
        (folder, shipped.functions[name]) for folder, shipped in SHIPPED.items() if name in shipped.functions
    )
    module, _, own = place.partition(":")
    return getattr(importlib.import_module(f"trainkit.capabilities.{folder}.{module}"), own)


def node_chooser() -> NodeChooser:
    """The function that chooses the number of nodes of a run for `--nodes auto`.

    It gets the config and the workload, and by name `code_dir`, `facts` and, of a run that resumes, `before`,
    its plan so far, and `left`, the share of its steps that is left. It returns the config with all numbers
    of nodes, the plan for the chosen one, and why.
    """
    return cast("NodeChooser", _function("choose_nodes"))


def text_inspector() -> TextInspector:
    """The function for the problems of the texts of a config, and at most how many tokens each split has.

    It gets the config and its tokenizer, None if that cannot be read; its numbers are None if unknown.
    """
    return cast("TextInspector", _function("inspect_texts"))


def text_preparer() -> TextPreparer:
    """The function for the folder of token shards of the texts of a config, which it makes if necessary.

    It gets the config, and whether it compares the sizes of shards that are there.
    """
    return cast("TextPreparer", _function("prepare_texts"))


def of_media() -> Capability:
    """The capability that keeps the images, histograms and texts that a rank logs."""
    return load(next(name for name, shipped in SHIPPED.items() if shipped.keeps_media))


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
    # What another package calls as the core does would replace it.
    return {**in_order(own, following), **{key: added[key] for key in added if key not in own}}


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
