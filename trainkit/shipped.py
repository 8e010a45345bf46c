"""Describes the built-in capabilities without importing them, and finds capabilities of other packages."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from trainkit.errors import TrainkitError, UsageError

if (
    TYPE_CHECKING
):  # Import the interface only here, so that commands that need no capability do not import it.
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
"""Entry-point group where other packages declare capabilities as section name -> MODULE:CLASS."""
OF_THE_RUN = ("config.yaml", "plan.json", "job.json", "end.json", "submit.sbatch")
"""Files of a run and of its attempts that capabilities must not write."""


class RestartCause(NamedTuple):
    """A reason why a capability restarts a run.

    Attempts that end for this reason are ignored when trainkit checks whether a run makes progress.
    """

    words: str
    """The reason, as shown in the list of restarts."""
    in_place: bool = False
    """True if the run restarts inside its allocation if possible; False if the job is requeued."""


class Shipped(NamedTuple):
    """Describes a built-in capability (a folder in `trainkit/capabilities/`) without importing it."""

    follows: str = ""
    """Key of plan.json after which the capability's part is written; a second key is used if the plan lacks
    the first."""
    keys: Mapping[str, tuple[str, Any]] = {}
    """Maps a key of plan.json to `WHOLE`, or to a field of the part and the default value for plans without
    the part."""
    within: tuple[str, ...] = ()
    """Fields of the part that are stored at the end of the `follows` record, which is in every plan."""
    commands: Mapping[str, str] = {}
    """Maps a command (or a group and a command) to the MODULE:NAME of a click command in the capability's
    folder."""
    options: Mapping[str, str] = {}
    """Maps a command to the MODULE:NAME of a decorator in the capability's folder.

    The decorator adds options to the command, and passes their values to the command as a `Choice` in
    `choices`. The decorator's module is also imported when the help of the command is printed.
    """
    in_ranks: bool = False
    """True if the capability's code runs in the ranks of every run, even if the plan lacks the capability's
    part."""
    attends: str = ""
    """Field of the part that contains the rank to which a user may connect; empty if there is no such field.

    While a rank waits for user input, the attempt folder contains NAME/rank-*.json, where NAME is the
    capability's name. Once a user has connected to a rank, the file NAME/rank contains the number of this
    rank.
    """
    launchers: Mapping[str, tuple[str, ...]] = {}
    """Maps a launcher started by `Capability.argv` to packages; one of the packages must be installed."""
    events: Mapping[str, bool] = {}
    """Maps each event that is shown to users to True if the list of past warnings includes the event; see
    `owner_of`."""
    shown: Mapping[str, Mapping[str, str]] = {}
    """Maps an output (`status`, `rows` or `report`) to the keys added to the output, each with the key that
    precedes it."""
    causes: Mapping[str, RestartCause] = {}
    """Maps the cause of each `PlannedStop` that the capability may return to a description of the restart."""
    group_file: str | None = None
    """Name of the file that marks a group of runs as created by this capability; None if it creates no
    groups."""
    functions: Mapping[str, str] = {}
    """Maps the name by which the core calls a function to the function's MODULE:NAME in the capability's
    folder."""
    keeps_media: bool = False
    """True if the capability records the images, histograms and texts that a rank logs."""
    metrics_file: str | None = None
    """Path, in the run folder, of a file with metrics that are measured after their steps, such as the
    results of a job that reads a checkpoint. The lines have the form of metrics.jsonl, the names of the
    metrics have a prefix of the capability, and a later line of a step replaces an earlier one."""
    without_keys: bool = False
    """True if the capability has no config keys, so that checking and planning a config need not import its
    class."""
    worker: str | None = None
    """Module whose `run_worker` replaces the trainer's `run_worker` if the plan has the capability's part."""

    @property
    def has_class(self) -> bool:
        """Return whether the module defines `CAPABILITY`, unlike a capability that only adds commands."""
        return bool(self.follows or self.group_file or self.keeps_media)


LEFT_OUT = object()
"""Marks a key of plan.json that is omitted if the plan lacks the capability's part."""
WHOLE = ("", LEFT_OUT)
"""Describes a part that is the entire value of one key in plan.json; without a part, the key is omitted."""
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
    "average": Shipped(commands={"ckpt average": "command:command"}),
    "generate": Shipped(commands={"generate": "command:command"}),
    "layouts": Shipped(commands={"plan": "command:command"}),
    "replay": Shipped(
        "node_sizes",
        {"replay": ("steps", None)},
        commands={"replay": "command:command", "data show": "command:show"},
        worker="worker",
        without_keys=True,
    ),
    "programs": Shipped(commands={"wait": "wait_command:command", "schema": "command:schema"}),
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
    "ema": Shipped("requeue", {"ema": WHOLE}),
    "spike": Shipped(
        "requeue",
        {"spike": WHOLE},
        events={"loss_spike": False, "rollback": True},
        shown={
            "status": {"rollbacks": "diverged_since"},
            "rows": {"rollbacks": "used"},
            "report": {"rollbacks": "num_steps_lost"},
        },
    ),
    "replicas": Shipped("requeue", {"replicas": WHOLE}, events={"replica_differs": True}),
    "evaluations": Shipped(
        "requeue",
        {"on_checkpoint": WHOLE},
        commands={"eval": "command:command"},
        events={
            "evaluation_done": False,
            "evaluation_failed": True,
            "evaluation_skipped": True,
            "evaluation_not_submitted": True,
        },
        shown={
            "status": {"evaluations": "slowdowns"},
            "rows": {"evals": "used"},
            "report": {"evaluations": "slowdowns"},
        },
        metrics_file="evaluations/metrics.jsonl",
    ),
    "curves": Shipped(
        "trackers", {"log_pattern": ("pattern", None)}
    ),  # listed before trackers, which send the metrics that curves writes when it stops
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
"""The built-in capabilities, keyed by folder name. The companions of these capabilities are stopped in the
order of this mapping."""
ATTENDING = tuple(name for name, shipped in SHIPPED.items() if shipped.attends)
"""Names of the capabilities that let a user connect to a rank."""


class ShippedTask(NamedTuple):
    """Describes a task in `trainkit/capabilities/` without importing it."""

    place: str
    """The class of the task as MODULE:CLASS."""
    paths: Mapping[str, str | None]
    """Maps each key of `task_args` whose value is a path to the one value that is a name, not a path."""


TASKS = {
    "multimodal_lm": ShippedTask(
        "trainkit.capabilities.multimodal.task:MultimodalLM", {"train": "demo", "val": "demo"}
    ),
}
"""The built-in tasks, keyed by their names in a config."""
TASK_CHECK = "trainkit.capabilities.task_check.worker"
"""Module that is run in a separate process to try out a user's task or to read all of its samples."""
TRANSFORMERS_TASK = "trainkit.capabilities.transformers.task:HFCausalLM"
"""Task used for a `model.hf` that only the transformers library can build."""


def load(name: str) -> Capability:
    """Return this process's instance of a capability; raise UsageError if it is not installed."""
    found = _loaded(name)
    if found is None:
        raise UsageError(
            f"the run uses the capability {name}, which is not installed for {sys.executable}",
            hint="install the package that provides it, or remove its section from the config",
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
            hint="it must refer to a subclass of trainkit.capability.Capability whose `name` is this name",
        )
    return own


@cache
def entry_point(name: str) -> EntryPoint | None:
    """Return the entry point of an external capability, or None if the capability is not installed."""
    # entry_points() reads the metadata of every package, so call it only for a name that is not built in.
    from importlib.metadata import entry_points

    return next(iter(entry_points(group=GROUP, name=name)), None)


def installed_section(name: str) -> type[Section] | None:
    """Return the config section that an installed package declares under a name, or None."""
    return None if entry_point(name) is None else load(name).Config


def shipped_classes() -> list[str]:
    """Return the names of the built-in capabilities that have both a class and config keys."""
    return [name for name, shipped in SHIPPED.items() if shipped.has_class and not shipped.without_keys]


def launchers() -> dict[str, tuple[str, ...]]:
    """Map each launcher for commands to its packages; one of the packages must be installed."""
    return {name: needs for shipped in SHIPPED.values() for name, needs in shipped.launchers.items()}


def with_launcher(name: str) -> Capability:
    """Return the capability that provides a launcher; raise UsageError if there is none."""
    return load(next((folder for folder, shipped in SHIPPED.items() if name in shipped.launchers), name))


def _function(name: str) -> object:
    """Import and return a function from the built-in capability that provides it."""
    folder, place = next(
        (folder, shipped.functions[name]) for folder, shipped in SHIPPED.items() if name in shipped.functions
    )
    module, _, own = place.partition(":")
    return getattr(importlib.import_module(f"trainkit.capabilities.{folder}.{module}"), own)


def node_chooser() -> NodeChooser:
    """Return the function that chooses a run's number of nodes for `--nodes auto`.

    The returned function takes the config and the workload, and the keyword arguments `code_dir` and `facts`.
    For a run that resumes, the returned function also takes `before` (the previous plan) and `left` (the
    remaining fraction of steps). The returned function's result is the config with all possible numbers of
    nodes, the plan for the chosen number, and the reason for this choice.
    """
    return cast("NodeChooser", _function("choose_nodes"))


def text_inspector() -> TextInspector:
    """Return the function that finds problems in a config's texts and counts the tokens of each split.

    The returned function takes the config, and the tokenizer or None if the tokenizer cannot be read. The
    returned function returns None for token counts that are unknown.
    """
    return cast("TextInspector", _function("inspect_texts"))


def text_preparer() -> TextPreparer:
    """Return the function that prepares a config's texts if necessary, and returns the folder of the shards.

    The returned function takes the config, and whether to compare the sizes of existing shards with the
    recorded sizes.
    """
    return cast("TextPreparer", _function("prepare_texts"))


def of_media() -> Capability:
    """Return the capability that records the images, histograms and texts logged by a rank."""
    return load(next(name for name, shipped in SHIPPED.items() if shipped.keeps_media))


def metrics_files(run: Path) -> list[Path]:
    """Return the existing files of a run folder with metrics that capabilities measured after their steps."""
    names = (shipped.metrics_file for shipped in SHIPPED.values())
    return [run / name for name in names if name is not None and (run / name).is_file()]


def measured_speeds(group: Path) -> Mapping[int, float | None] | None:
    """Return the speeds that a capability measured for the runs of a group, or None if the group has none."""
    files = ((name, shipped.group_file) for name, shipped in SHIPPED.items())
    owner = next((name for name, file in files if file is not None and (group / file).is_file()), None)
    return None if owner is None else load(owner).speeds(group)


def worker_of(names: Iterable[str]) -> str | None:
    """Return the worker module that replaces the trainer if the plan has the parts `names`, or None."""
    modules = ((name, SHIPPED[name].worker) for name in names if name in SHIPPED)
    return next((f"trainkit.capabilities.{name}.{own}" for name, own in modules if own is not None), None)


def shipped_command(name: str) -> str | None:
    """Return the MODULE:NAME of a built-in capability's command, or None if there is no such command."""
    for folder, shipped in SHIPPED.items():
        if name in shipped.commands:
            return f"trainkit.capabilities.{folder}.{shipped.commands[name]}"
    return None


def in_ranks(parts: Iterable[str]) -> list[str]:
    """Return the capabilities with code that runs in ranks: built-in ones, and external ones in `parts`."""
    shipped = (name for name, shipped in SHIPPED.items() if shipped.in_ranks)
    return [*shipped, *(name for name in parts if name not in SHIPPED)]


def attended_in(parts: Collection[str]) -> str | None:
    """Return the capability in `parts` that lets a user connect to a rank, or None if there is none."""
    return next((name for name in ATTENDING if name in parts), None)


def shipped_subcommands(group: str) -> list[str]:
    """Return the commands that built-in capabilities add to a group, such as ``export`` to ``ckpt``."""
    names = (name.split(" ") for shipped in SHIPPED.values() for name in shipped.commands)
    return [words[1] for words in names if words[0] == group and len(words) > 1]


def shipped_options(command: str) -> list[str]:
    """Return the MODULE:NAME of each decorator that adds a built-in capability's options to a command."""
    found = ((folder, shipped.options.get(command)) for folder, shipped in SHIPPED.items())
    return [f"trainkit.capabilities.{folder}.{place}" for folder, place in found if place is not None]


def installed_command(name: str) -> str | None:
    """Return the MODULE:NAME of an external capability's command, or None if there is no such command."""
    owner = name.partition("-")[0]
    return None if entry_point(owner) is None else load(owner).commands.get(name)


def restart_cause(name: str) -> RestartCause:
    """Return the description of a restart cause; for an unknown cause, the description is its name."""
    known = (shipped.causes[name] for shipped in SHIPPED.values() if name in shipped.causes)
    return next(known, RestartCause(name))


def packages_of(names: Iterable[str]) -> dict[str, str]:
    """Map each external capability's name to the package that provides it, with the package's version."""
    entries = ((name, entry_point(name)) for name in names if name not in SHIPPED)
    return {
        name: f"{entry.dist.name} {entry.dist.version}"
        for name, entry in entries
        if entry is not None and entry.dist is not None
    }


def take_parts(plan: Mapping[str, object]) -> dict[str, object]:
    """Collect the capabilities' parts from a plan.json, by capability name."""
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
    """Return the files in a plan's parts, as a mapping from the name in the run folder to the content.

    Raises ValueError for a path outside the run folder, or for a name that the run uses for another file.
    """
    found: dict[str, str] = {}
    for owner, part in parts.items():
        files = part.get("files", {}) if isinstance(part, Mapping) else {}
        if not isinstance(files, Mapping):
            raise ValueError(f"the part of {owner} has invalid files: {str(files)[:100]!r}")
        for name, text in files.items():
            if not isinstance(text, str) or not name or PurePath(name).name != name or name in OF_THE_RUN:
                raise ValueError(f"{name!r} is not an allowed file of {owner}")
            found[name] = text
    return found


def keys_of(parts: Mapping[str, object]) -> set[str]:
    """Return the config keys listed by a plan's parts; raise ValueError if a part's `keys` is not a list."""
    found: set[str] = set()
    for owner, part in parts.items():
        keys = part.get("keys", ()) if isinstance(part, Mapping) else ()
        if not isinstance(keys, list | tuple) or not all(isinstance(key, str) for key in keys):
            raise ValueError(f"the part of {owner} has invalid keys: {str(keys)[:100]!r}")
        found.update(keys)
    return found


OVER = "_over"
"""Suffix in the name of an event that ends the effect of another event."""
_EVENTS = {event: name for name, shipped in SHIPPED.items() for event in shipped.events}
_EVENTS |= {f"{event}{OVER}": name for event, name in _EVENTS.items()}


def owner_of(event: str) -> str | None:
    """Return the name of the capability that defines an event, or None for an event of the core.

    An event NAME is in effect until the same attempt has an event NAME_over for the same rank or without a
    rank. Events of external capabilities are named CAPABILITY.NAME and are always included in the list of
    past warnings.
    """
    return _EVENTS.get(event) or event.rpartition(".")[0] or None


def is_notable(event: str) -> bool:
    """Return whether a capability's event is included in the list of past warnings."""
    owner = None if event.endswith(OVER) else owner_of(event)
    return owner is not None and (owner not in SHIPPED or SHIPPED[owner].events[event])


def shown_by(parts: Iterable[str]) -> list[str]:
    """Return the capabilities that can display something about a run whose plan has `parts`."""
    # List every built-in capability, because a run may have sent data to a tracker that is not in the run's
    # plan.
    shipped = (name for name, shipped in SHIPPED.items() if shipped.shown)
    return [*shipped, *(name for name in parts if name not in SHIPPED)]


def ask_each(
    parts: Iterable[str], ask: Callable[[Capability], T], failed: Callable[[str, str], T]
) -> dict[str, T]:
    """Query each capability that can display something about a run; return the non-empty answers by name.

    If a capability raises an error, its answer is `failed(name, text)`, so that other answers are not lost.
    """
    found = ((name, ask_one(name, ask, failed)) for name in shown_by(parts))
    return {name: answer for name, answer in found if answer}


def ask_one(name: str, ask: Callable[[Capability], T], failed: Callable[[str, str], T]) -> T:
    """Return the answer of a capability, or `failed(name, text)` if the capability raises an error."""
    try:
        return ask(load(name))
    except Exception as error:  # The code may belong to another package and raise any exception.
        text = error.message if isinstance(error, TrainkitError) else repr(error)
        return failed(name, f"unknown: {text}")


def placed(output: str, own: Mapping[str, T], added: Mapping[str, T]) -> dict[str, T]:
    """Insert the keys of capabilities into an output, each after its predecessor, or else at the end."""
    places = [shipped.shown.get(output, {}) for shipped in SHIPPED.values()]
    following = dict[str, dict[str, T]]()
    for key, before in ((key, before) for place in places for key, before in place.items()):
        if key in added:
            following.setdefault(before, {})[key] = added[key]
    # An external capability's key must not replace a core key with the same name.
    return {**in_order(own, following), **{key: added[key] for key in added if key not in own}}


def in_order(own: Mapping[str, T], following: Mapping[str, Mapping[str, T]]) -> dict[str, T]:
    """Return the items of `own`, with the items of `following[key]` inserted after each `key`."""
    found: dict[str, T] = {}

    def add(key: str, value: T) -> None:
        found[key] = value
        for item in following.get(key, {}).items():
            add(*item)

    for item in own.items():
        add(*item)
    return found


def put_parts(plan: dict[str, object], parts: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
    """Return a plan.json object that includes `parts`, in the form that `take_parts` reads."""
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
    """Calls the capabilities of a run, so that their errors do not terminate the run.

    Each distinct error is reported once.
    """

    def __init__(self, names: Iterable[str], report: Callable[[str], None]) -> None:
        self.capabilities = [load(name) for name in names]
        self._report, self._reported = report, set[str]()

    def each(self, what: Callable[[Capability], T | None]) -> list[tuple[str, T]]:
        """Call a function with each capability of the plan; return (name, result) for non-None results."""
        found = ((one.name, self.call(one.name, what, one)) for one in self.capabilities)
        return [(name, result) for name, result in found if result is not None]

    def call(self, name: str, what: Callable[..., T], *values: Any, **named: Any) -> T | None:
        """Return the result of a call to a capability, or None if the call raises an error."""
        try:
            return what(*values, **named)
        except (
            Exception
        ) as error:  # The code may belong to another package, whose errors must not stop the training.
            text = f"warning: the capability {name} failed: {type(error).__name__}: {error}"
            if text not in self._reported:
                self._reported.add(text)
                self._report(text)
            return None
