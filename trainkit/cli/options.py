"""Options that several commands share, as decorators."""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from inspect import cleandoc
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypeVar

import click

from trainkit.cli.completion import complete_config, complete_profile, complete_run, complete_setting
from trainkit.cli.help import Command
from trainkit.errors import ConfigError, UsageError
from trainkit.formats import JsonObject

if TYPE_CHECKING:
    from trainkit.cluster.target import Target
    from trainkit.config import LoadedConfig
    from trainkit.job.node.rendezvous import HostPlace
    from trainkit.plan.workload import Workload
    from trainkit.submit.submission import ArraySpec, LoadedPoint

Function = TypeVar("Function", bound=Callable[..., Any])
_KEY = "trainkit.trailing_command"


@dataclass(frozen=True)
class ConfigRequest:
    """The config to load and what the command line changes in it."""

    path: str
    """A file or the name of a shipped config, as typed; the default CONFIG if it was omitted."""
    profile: str | None
    overrides: tuple[str, ...]
    flags: dict[str, tuple[str, object]]
    """Dotted key -> (the flag as typed, its value)."""

    def load(self, target: Target | None = None) -> LoadedConfig:
        """Load the config with all layers; ConfigError lists all problems.

        Hosts without Slurm do not look for a cluster, and its profile's defaults do not apply to them.
        """
        from trainkit.cluster.target import load_with_cluster
        from trainkit.config import load_config

        load = load_config if target is not None and target.backend == "hosts" else load_with_cluster
        return load(self.path, profile=self.profile, overrides=self.overrides, flags=self.flags)

    def load_to_plan(self, workload: Workload | None = None, target: Target | None = None) -> LoadedConfig:
        """Load the config for a command that plans a run of `workload`, by default the trainer.

        The ConfigError of an invalid config also lists the problems of planning a run with its valid part.
        """
        from trainkit.config import InvalidConfig

        try:
            return self.load(target)
        except InvalidConfig as error:
            from trainkit.plan.workload import TRAINER
            from trainkit.submit.plan_run import planning_error

            raise planning_error(error, workload or TRAINER, target=target) from None


def named_folder(text: str | None, option: str = "--run-dir") -> Path | None:
    """The folder of an option; UsageError if it is empty, as from an unset shell variable."""
    if text is not None and not text.strip():
        raise UsageError(f"{option} is empty", hint=f"name a folder, or omit {option} for runs/NAME")
    return None if text is None else Path(text)


def json_option(function: Function) -> Function:
    """``--json``, given as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")(function)


def shape_options(function: Function) -> Function:
    """``--nodes`` and ``--gpus-per-node``, given as `nodes` and `gpus_per_node`."""
    function = click.option(
        "--gpus-per-node",
        type=click.IntRange(min=1),
        metavar="N",
        help="GPUs per node; worker processes per node on a machine without GPUs.",
    )(function)
    return click.option("--nodes", type=click.IntRange(min=1), metavar="N", help="Number of nodes.")(function)


def set_option(function: Function) -> Function:
    """``--set KEY=VALUE``, repeatable, given as `overrides`."""
    return click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        shell_complete=complete_setting,
        help="Set one config value; repeatable.",
    )(function)


def host_options(function: Function) -> Function:
    """The place of this host among several without Slurm, given as `host: HostOptions`."""

    @functools.wraps(function)
    def wrapper(
        node_rank: int | None, master_addr: str | None, master_port: int | None, **others: Any
    ) -> Any:
        return function(host=HostOptions(node_rank, master_addr, master_port), **others)

    decorated: Any = wrapper
    for decorate in (
        click.option(
            "--master-port",
            type=click.IntRange(1, 65_535),
            metavar="PORT",
            help="Free port of that host, the same on every host.",
        ),
        click.option("--master-addr", metavar="HOST", help="Address of the host with --node-rank 0."),
        click.option(
            "--node-rank",
            type=click.IntRange(min=0),
            metavar="I",
            help="Node rank of this host, from 0; start the same command on every host.",
        ),
    ):
        decorated = decorate(decorated)
    return decorated  # type: ignore[no-any-return]


@dataclass(frozen=True)
class HostOptions:
    """The options of `host_options` as typed."""

    node_rank: int | None
    master_addr: str | None
    master_port: int | None

    def place(self, nodes: int | None) -> HostPlace | None:
        """The place of this host among `nodes` hosts; None without the options.

        Raises UsageError when some are missing or the node rank is not one of the nodes.
        """
        from trainkit.job.node.rendezvous import LOCAL_ADDR, HostPlace

        given = {
            "--nodes": nodes,
            "--node-rank": self.node_rank,
            "--master-addr": self.master_addr,
            "--master-port": self.master_port,
        }
        if all(value is None for name, value in given.items() if name != "--nodes"):
            return None
        missing = [name for name, value in given.items() if value is None]
        node_rank, addr, port = self.node_rank, self.master_addr, self.master_port
        if nodes is None or node_rank is None or not addr or port is None:
            typed = " ".join(f"{name} {value}" for name, value in given.items() if value is not None)
            raise UsageError(
                f"{typed}: {', '.join(missing) or '--master-addr'} is missing",
                hint="every host needs --nodes N --node-rank I --master-addr HOST --master-port PORT, "
                "with its own I from 0 to N-1",
            )
        if node_rank >= nodes:
            raise UsageError(
                f"--node-rank {node_rank} is not one of {nodes} nodes",
                hint=f"node ranks are numbered from 0 to {nodes - 1}; --nodes sets how many there are",
            )
        return HostPlace(node_rank, nodes, LOCAL_ADDR if addr == "localhost" else addr, port)


config_argument = click.argument(
    "config", type=click.Path(), metavar="[CONFIG]", required=False, shell_complete=complete_config
)
"""A file, or the name of a shipped config."""
CONFIG_HELP = (
    "CONFIG is a file or a shipped config such as quickstart or models/8b. Default: ./config.yaml, else the "
    "file that `trainkit init` wrote here, else quickstart."
)


def config_options(function: Function) -> Function:
    """CONFIG and all options that change its values, given together as `request: ConfigRequest`."""
    return _request_options(function, lambda command: shape_options(slurm_options(command)))


def config_options_unless(option: str) -> Callable[[Function], Function]:
    """Like `config_options`, for a command that needs no config if `option` is given.

    `request` is then None unless CONFIG was typed.
    """

    def decorate(function: Function) -> Function:
        return _request_options(
            function, lambda command: shape_options(slurm_options(command)), unless=option
        )

    return decorate


def one_node_config_options(function: Function) -> Function:
    """Like `config_options`, for a command that runs here: on one node, or on this node of several."""

    def shape(command: Any) -> Any:
        command = click.option(
            "--nodes", type=click.IntRange(min=1), metavar="N", help="Number of hosts, with --node-rank."
        )(command)
        # --procs is the former name, kept for scripts.
        for name, hidden in (("--procs", True), ("--gpus-per-node", False)):
            command = click.option(
                name,
                type=click.IntRange(min=1),
                metavar="N",
                hidden=hidden,
                help="GPUs to use; number of worker processes on a machine without GPUs.",
            )(command)
        return command

    return _request_options(function, shape, chooses_backend=False)


backend_option = click.option(
    "--backend",
    type=click.Choice(["auto", "sbatch", "submitit", "local"]),
    help="Where the run starts; auto: Slurm where there is one, else this machine.",
)


def choose_config() -> str:
    """The default config of a command without CONFIG, which is printed to stderr."""
    from trainkit.folders import default_config

    name, reason = default_config(Path.cwd())
    if os.environ.get("SLURM_PROCID", "0") == "0":  # print it once per srun step
        click.echo(f"config: {name} ({reason})", err=True)
    return name


def _request_options(
    function: Function,
    shape: Callable[[Any], Any],
    chooses_backend: bool = True,
    unless: str | None = None,
) -> Function:
    @functools.wraps(function)
    def wrapper(
        config: str | None,
        profile: str | None,
        overrides: tuple[str, ...],
        name: str | None,
        backend: str | None = None,
        nodes: int | None = None,
        gpus_per_node: int | None = None,
        procs: int | None = None,
        **others: Any,
    ) -> Any:
        flags = shape_flags(nodes, gpus_per_node or procs) | slurm_flags(others)
        if name is not None:
            flags["name"] = (f"--name {name}", name)
        flags |= backend_flag(backend)
        if config is None and (unless is None or others[unless] is None):
            config = choose_config()
        request = None if config is None else ConfigRequest(config, profile, overrides, flags)
        return function(request=request, **others)

    wrapper.__doc__ = f"{cleandoc(function.__doc__ or '')}\n\n{CONFIG_HELP}"
    decorated: Any = wrapper
    for decorate in (
        *([backend_option] if chooses_backend else []),
        click.option("--name", metavar="NAME", help="Name of the run."),
        shape,
        set_option,
        click.option(
            "--profile",
            metavar="NAME",
            shell_complete=complete_profile,
            help="Profile applied over the config.",
        ),
        config_argument,
    ):
        decorated = decorate(decorated)
    return decorated  # type: ignore[no-any-return]


SLURM_FLAGS = {
    "time": ("resources.time", "T", "Time limit of the job, in Slurm's format."),
    "partition": ("resources.partition", "P", "Slurm partition."),
    "account": ("resources.account", "A", "Slurm account."),
    "qos": ("resources.qos", "Q", "Slurm quality of service."),
    "constraint": ("resources.constraint", "C", "Required node features, in Slurm's syntax."),
    "cluster": ("launch.cluster", "NAME", "Cluster profile; default: the one for this cluster."),
}
"""Option -> its config key, metavar and help."""


def slurm_options(function: Function) -> Function:
    """The options of the Slurm job; `slurm_flags` removes their values from the command's arguments."""
    help_text = "Run the code in place instead of from a copy."
    return job_options(click.option("--no-snapshot", is_flag=True, help=help_text)(function))


def job_options(function: Function) -> Function:
    """The options of `slurm_options` for a job whose code is given."""
    function = click.option(
        "--per", type=click.Choice(["gpu", "node"]), help="One Slurm task per GPU, or one per node."
    )(function)
    for name, (_, metavar, help_text) in reversed(SLURM_FLAGS.items()):
        function = click.option(f"--{name}", metavar=metavar, help=help_text)(function)
    return function


def slurm_flags(arguments: dict[str, Any]) -> dict[str, tuple[str, object]]:
    """The config values of `slurm_options`, which are removed from `arguments`."""
    flags: dict[str, tuple[str, object]] = {}
    for name, (key, _, _) in (*SLURM_FLAGS.items(), ("per", ("launch.per", "", ""))):
        value = arguments.pop(name, None)
        if value is not None:
            flags[key] = (f"--{name} {value}", value)
    if arguments.pop("no_snapshot", False):
        flags["launch.snapshot"] = ("--no-snapshot", False)
    return flags


def launcher_option(function: Function) -> Function:
    """``--launcher``, given as `launcher`."""
    return click.option(
        "--launcher",
        type=click.Choice(["python", "torchrun", "accelerate", "deepspeed", "lightning", "megatron"]),
        default="python",
        help="How COMMAND starts: once per rank (python, lightning), or through a launcher once per node.",
    )(function)


def run_argument(function: Function) -> Function:
    """RUN, given as `run_name`: a job id, a run name, a run folder or `last`."""
    return click.argument("run_name", metavar="RUN", shell_complete=complete_run)(function)


def shape_flags(nodes: int | None, gpus_per_node: int | None) -> dict[str, tuple[str, object]]:
    """The config values of ``--nodes`` and ``--gpus-per-node``, each with the flag as typed."""
    flags: dict[str, tuple[str, object]] = {}
    if nodes is not None:
        flags["resources.nodes"] = (f"--nodes {nodes}", nodes)
    if gpus_per_node is not None:
        flags["resources.gpus_per_node"] = (f"--gpus-per-node {gpus_per_node}", gpus_per_node)
    return flags


def backend_flag(backend: str | None) -> dict[str, tuple[str, object]]:
    """The config value of ``--backend``."""
    return {} if backend is None else {"launch.backend": (f"--backend {backend}", backend)}


def refuse_other_options(name: str) -> None:
    """Raise UsageError if arguments without effect are given with the option `name`."""
    context = click.get_current_context()
    typed = [
        item.opts[0] if isinstance(item, click.Option) else str(item.metavar).strip("[]")
        for item in context.command.params
        if item.name not in (name, "as_json", "help")
        and context.get_parameter_source(str(item.name)) is click.core.ParameterSource.COMMANDLINE
    ]
    if typed:
        raise UsageError(f"{', '.join(typed)} would have no effect with --{name}", hint="remove it")


class WithTrailingCommand(Command):
    """A command whose own arguments end at ``--``; `trailing_workload` has the others."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            cut = args.index("--")
            command, args = args[cut + 1 :], args[:cut]
            if not command:
                raise UsageError(
                    "there is no command after --", hint="for example: -- python train.py --lr 0.1"
                )
            ctx.meta[_KEY] = tuple(command)
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND …]"]


def trailing_workload(launcher: str) -> Workload:
    """The command after ``--``, or the trainer without ``--``; UsageError for the trainer with a launcher."""
    from trainkit.plan.workload import workload_of

    argv: tuple[str, ...] | None = click.get_current_context().meta.get(_KEY)
    if argv is None and launcher != "python":
        raise UsageError(f"--launcher {launcher} needs a COMMAND", hint="add: -- train.py …")
    workload = workload_of(argv, launcher)
    if workload.has_launcher and PurePath(workload.argv[0]).name.startswith("python"):
        raise UsageError(
            f"--launcher {launcher} starts Python itself, but the COMMAND begins with {workload.argv[0]}",
            hint=f"leave it out: -- {shlex.join(workload.argv[1:]) or 'train.py …'}",
        )
    return workload


@dataclass(frozen=True)
class GroupRequest:
    """The points of a sweep or array."""

    sweeps: tuple[str, ...]
    array: str | None

    def __bool__(self) -> bool:
        return bool(self.sweeps) or self.array is not None

    def points(
        self, request: ConfigRequest, workload: Workload
    ) -> tuple[ArraySpec | None, Iterator[LoadedPoint]]:
        """The array, None for a run, and the config of every point; a group can have 100,000 points.

        A COMMAND may contain swept keys. Without --sweep the points of an array get consecutive seeds, unless
        they run a COMMAND. Raises UsageError for invalid options, and ConfigError for an invalid config.
        """
        from trainkit.plan.sweep import sweep_points
        from trainkit.submit.submission import ArraySpec, LoadedPoint, parse_array

        spec = None if self.array is None else parse_array(self.array)
        if self.sweeps:
            if spec is not None and spec.indices:
                raise UsageError(
                    f"--array {self.array}: --sweep numbers its points itself",
                    hint="with --sweep, --array only sets a limit, as in --array %4",
                )
            found = sweep_points(self.sweeps, workload.argv)
            limit = None if spec is None else spec.limit
            return ArraySpec(tuple(range(len(found))), limit), _swept(request, found)
        loaded = request.load_to_plan(workload)
        if spec is None:
            return None, iter([LoadedPoint(0, {}, loaded)])
        if not spec.indices:
            raise UsageError(
                f"--array {self.array} limits how many tasks run at once, but names no tasks",
                hint="for example --array 0-9%4",
            )
        if workload.is_command:
            return spec, (LoadedPoint(index, {}, loaded) for index in spec.indices)
        seeds = ((index, loaded.config.seed + index) for index in spec.indices)
        return spec, (
            LoadedPoint(index, {"seed": seed}, _with_seed(loaded, seed, "--array")) for index, seed in seeds
        )


def _swept(request: ConfigRequest, found: Sequence[JsonObject]) -> Iterator[LoadedPoint]:
    """The config of each point of a sweep; points that differ only in the seed are loaded once."""
    from trainkit.config.names import is_known
    from trainkit.formats import shown_value
    from trainkit.plan.sweep import key_without_seed
    from trainkit.submit.submission import LoadedPoint

    loaded: dict[str, LoadedConfig] = {}
    for index, values in enumerate(found):
        key = key_without_seed(values)
        try:
            if key in loaded:
                seed = values["seed"]
                own = _with_seed(loaded[key], seed, f"--sweep seed={shown_value(seed)}")
                yield LoadedPoint(index, values, own)
                continue
            flags = {
                key: (f"--sweep {key}={shown_value(value)}", value)
                for key, value in values.items()
                if is_known(tuple(key.split(".")))  # others are only in the command
            }
            loaded[key] = replace(request, flags={**request.flags, **flags}).load()
            yield LoadedPoint(index, values, loaded[key])
        except ConfigError as error:
            yield LoadedPoint(index, values, error)


def _with_seed(loaded: LoadedConfig, seed: int, origin: str) -> LoadedConfig | ConfigError:
    from trainkit.config.load import with_values

    try:
        return with_values(loaded, {"seed": seed}, origin)
    except ConfigError as error:
        return error


def sweep_option(help_text: str) -> Callable[[Function], Function]:
    """``--sweep KEY=V,V,…``, repeatable, given as `sweeps`."""
    return click.option("--sweep", "sweeps", multiple=True, metavar="KEY=V,V,…", help=help_text)


def group_options(function: Function) -> Function:
    """``--sweep`` and ``--array``, given together as `group: GroupRequest`."""

    @functools.wraps(function)
    def wrapper(sweeps: tuple[str, ...], array: str | None, **others: Any) -> Any:
        return function(group=GroupRequest(sweeps, array), **others)

    help_text = "One run per value, and per combination of several --sweep, as one Slurm array."
    decorated: Any = sweep_option(help_text)(wrapper)
    return click.option(  # type: ignore[no-any-return]
        "--array",
        metavar="SPEC",
        help="One run per index, as in 0-9 or 1,3,5, with consecutive seeds; %4 runs at most 4 at once.",
    )(decorated)


def after_option(function: Function) -> Function:
    """``--after RUN``, repeatable, given as `after`."""
    return click.option(
        "--after",
        multiple=True,
        metavar="RUN",
        shell_complete=complete_run,
        help="Start once RUN has finished successfully; repeatable.",
    )(function)
