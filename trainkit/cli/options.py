"""Defines decorators for options that several commands share."""

from __future__ import annotations

import functools
import importlib
import os
import re
import shlex
from collections.abc import Callable, Sequence
from inspect import cleandoc
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from trainkit.cli.help import (
    Command,
    complete_config,
    complete_profile,
    complete_run,
    complete_setting,
    option,
)
from trainkit.cli.usage import cut_setting
from trainkit.errors import ConfigError, Problem, UsageError
from trainkit.folders import QUICKSTART, default_config, typed_path
from trainkit.launch.config_request import FLAGS, ConfigRequest
from trainkit.plan.workload import Workload
from trainkit.run.owner import refuse_foreign
from trainkit.run.process import other_people
from trainkit.run.rundir import RUNS_FOLDER
from trainkit.shipped import launchers, shipped_options
from trainkit.trust import trust

Function = TypeVar("Function", bound=Callable[..., Any])
_KEY = "trainkit.trailing_command"
COUNT, INDEX = click.IntRange(min=1), click.IntRange(min=0)
AUTO = "auto"


def named_folder(text: str | None, option: str = "--run-dir") -> Path | None:
    """Return the folder that an option specifies; with --trust, mark the folder as trusted.

    Raises UsageError for an empty value, which may result from an unset shell variable.
    """
    if text is not None and not text.strip():
        raise UsageError(f"{option} is empty", hint=f"specify a folder, or omit {option} to use runs/NAME")
    folder = None if text is None else typed_path(text, Path(), is_literal=True)
    accept_trusted(folder)
    return folder


class TypedPath(click.ParamType):  # type: ignore[type-arg] # generic since click 8.2
    """Parameter type for a path, such as an output file; `~` is expanded, and URLs are rejected."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        return value if isinstance(value, Path) else typed_path(value, Path(), is_literal=True)


PATH = TypedPath()


class OutputOption(click.Option):
    """An option that makes a command print JSON; `output` names the type of the JSON value as MODULE:NAME."""

    def __init__(self, names: Sequence[str], output: str, version: int = 1, **rules: Any) -> None:
        super().__init__(names, **rules)
        self.output, self.version = output, version


def json_option(output: str, version: int = 1) -> Callable[[Function], Function]:
    """Return a decorator that adds ``--json`` to a command.

    `output` names the type of the printed value as MODULE:NAME. `trainkit schema --output` derives a JSON
    Schema from the type that `output` names. Increase `version` if a key is removed or renamed, or if its
    value gets another meaning or an additional type. Adding a key does not require a new version.
    """
    return option(
        "--json",
        "Print the result as one JSON value.",
        name="as_json",
        cls=OutputOption,
        output=output,
        version=version,
        is_flag=True,
    )


set_option = option(
    "--set KEY=VALUE",
    "Set the config key KEY to VALUE; repeatable.",
    name="overrides",
    multiple=True,
    shell_complete=complete_setting,
)
profile_option = option(
    "--profile NAME", "Profile that overrides values of the config.", shell_complete=complete_profile
)
backend_option = option(
    "--backend",
    "Where the run starts: auto uses Slurm if it is available, and this machine otherwise.",
    type=click.Choice(["auto", "sbatch", "submitit", "local"]),
)
launcher_option = option(
    "--launcher",
    "How COMMAND is started: once per rank (python, lightning), or once per node by a launcher.",
    type=click.Choice(["python", *launchers()]),
    default="python",
)
after_option = option(
    "--after RUN",
    "Start after RUN has finished successfully; repeatable.",
    multiple=True,
    shell_complete=complete_run,
)
now_option = option(
    "--now", "Do not wait for GPUs or cores that other runs use; only for runs on this machine."
)
run_argument = click.argument("run_name", metavar="RUN", shell_complete=complete_run)
"""The argument RUN: a job id, a run name, a run folder or `last`."""
trust_option = click.option(
    "--trust",
    is_flag=True,
    expose_value=False,
    help="Accept the run folder even if another user could have changed the files in it.",
)


def refuse_untrusted(folder: Path) -> None:
    """Raise UsageError if another user could replace a run's files, unless --trust is given."""
    if not accept_trusted(folder):
        refuse_foreign(folder, "use `--trust` to accept the folder anyway")


yes_option = click.option(
    "--yes",
    is_flag=True,
    expose_value=False,
    help="Open the port even if other users of this host can connect to it.",
)


def refuse_shared_host(what: str, instead: str) -> None:
    """Raise UsageError if other users on this host could connect to a port, unless --yes is given.

    `instead` is a hint that suggests an alternative without a port.
    """
    if click.get_current_context().get_parameter_source("yes") is ParameterSource.COMMANDLINE:
        return
    people = other_people()
    if people == []:
        return
    if people is None:
        who = "any user who is logged in"
    else:
        who = ", ".join(people[:3]) + (f" and {len(people) - 3} more" if len(people) > 3 else "")
    raise UsageError(
        f"{what} would listen on a port without password protection: {who} can connect to it",
        hint=f"{instead}; `--yes` opens the port anyway",
    )


def accept_trusted(folder: Path | None) -> bool:
    """Mark `folder` as trusted if --trust was given; return whether --trust was given.

    `folder` defaults to the folder that contains all runs.
    """
    is_given = click.get_current_context().get_parameter_source("trust") is ParameterSource.COMMANDLINE
    if is_given:
        trust(folder or Path(RUNS_FOLDER))
    return is_given


def _refuse_empty(context: click.Context, param: click.Parameter, text: str | None) -> str | None:
    if text is not None and not text.strip():
        raise UsageError("CONFIG is empty", hint="specify a file or a shipped config, or omit CONFIG")
    return text


config_argument = click.argument(
    "config",
    type=click.Path(),
    metavar="[CONFIG]",
    required=False,
    shell_complete=complete_config,
    callback=_refuse_empty,
)
"""The argument CONFIG: a file, or the name of a built-in config."""


def combined(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Combine several options into one decorator that keeps their order in the help."""
    return lambda function: functools.reduce(lambda made, option: option(made), reversed(options), function)


class NodesType(click.IntRange):
    """Parameter type for a number of nodes, or for several numbers such as 2-8 or 2,4,8.

    Ranges and lists of numbers are validated with the config.
    """

    config_key = ("resources", "nodes")

    def __init__(self, *others: str) -> None:
        super().__init__(min=1)
        self.others = others
        """Words that are accepted in addition to numbers."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        is_several = re.fullmatch(r"\d+-\d+|[1-9]\d*(,[1-9]\d*)+", str(value)) is not None
        return str(value) if is_several or value in self.others else super().convert(value, param, ctx)


NODES_HELP = (
    "Number of nodes; with a range such as 2-8 or a list such as 2,4,8, the largest number that Slurm can "
    "allocate"
)
gpus_per_node_option = click.option(
    "--gpus-per-node",
    "--nproc",
    type=COUNT,
    metavar="N",
    help="Number of GPUs per node or, on a machine without GPUs, of worker processes per node.",
)
shape_options = combined(option("--nodes N", f"{NODES_HELP}.", type=NodesType()), gpus_per_node_option)


choosing_shape_options = combined(
    option(
        "--nodes N",
        f"{NODES_HELP}; auto chooses the number that is expected to finish the run first, and may split the "
        "run into several jobs.",
        type=NodesType(AUTO),
    ),
    gpus_per_node_option,
)
shape_options_here = combined(
    click.option(
        "--gpus-per-node",
        "--nproc",
        type=COUNT,
        metavar="N",
        help="Number of GPUs to use or, on a machine without GPUs, of worker processes.",
    ),
    option(
        "--nodes N",
        "Number of nodes; if there is more than one, use torchrun or mpirun to start trainkit on every node.",
        type=COUNT,
    ),
)
"""The node and GPU options of a command that runs in the foreground, either on this node only or on several
nodes with torchrun or mpirun."""


CONFIG_HELP = (
    "CONFIG is a file, - for standard input, or a shipped config such as quickstart or models/8b. The "
    "default is ./config.yaml, else the file that `trainkit init` wrote in the current folder, else "
    "quickstart."
)


def config_options(
    shape: Callable[[Any], Any] = shape_options, *, submits: bool = True, unless: str = ""
) -> Callable[[Function], Function]:
    """Add CONFIG and all options that override its values; the command receives them as one `request`.

    `shape` is the decorator that adds the options for nodes and GPUs. Slurm job options are added if
    `submits` is True. `unless` names an option that makes CONFIG optional. If the user passes the option
    named by `unless`, but no CONFIG, `request` is None.
    """
    place = (shape, slurm_options, backend_option) if submits else (shape,)
    return lambda function: _request_options(function, *place, unless=unless)


def of_capabilities(command: str) -> Callable[[Function], Function]:
    """Add the options of capabilities to a command; the options that the user passes are in `choices`."""

    def add(function: Function) -> Function:
        for place in shipped_options(command):
            module, _, name = place.partition(":")
            function = getattr(importlib.import_module(module), name)(function)
        return function

    return add


def choose_config(argv: tuple[str, ...] = ()) -> str:
    """Return the config to use if CONFIG is omitted, and print its name to stderr.

    For a COMMAND, returns an empty string instead of the built-in quickstart config, because quickstart is
    unrelated to the COMMAND.
    """
    name, reason = default_config(Path.cwd())
    if argv and name == QUICKSTART:
        return ""
    if os.environ.get("SLURM_PROCID", "0") == "0":  # In an srun step, only rank 0 prints the config name.
        click.echo(f"config: {name} ({reason})", err=True)
    return name


def _request_options(function: Function, *place: Callable[[Any], Any], unless: str) -> Function:
    @functools.wraps(function)
    def wrapper(config: str | None, profile: str | None, overrides: tuple[str, ...], **others: Any) -> object:
        chooses = others["nodes"] == AUTO
        if chooses:
            others["nodes"] = None
        flags = config_flags(others)
        argv = click.get_current_context().meta.get(_KEY, ())
        if config is None and others.get(unless) is None:
            config = choose_config(argv)
        request = None
        if (error := cut_setting(click.get_current_context().find_root().obj or (), config)) is not None:
            raise error
        if config is not None and config.endswith(".py"):
            named = "run" if click.get_current_context().info_name == "run" else "submit"
            is_line = " " in config and not Path(config).exists()
            program = config if is_line else f"python {shlex.quote(config)}"
            hint = f"`trainkit {named} -- {program}` runs your own script"
            raise ConfigError([Problem("", "no such config", config, hint)])
        if config is not None:
            request = ConfigRequest(config, profile, overrides, flags, argv, chooses_nodes=chooses)
        return function(request=request, **others)

    wrapper.__doc__ = f"{cleandoc(function.__doc__ or '')}\n\n{CONFIG_HELP}"
    return combined(  # type: ignore[no-any-return]
        config_argument,
        profile_option,
        set_option,
        *place,
        option("--name NAME", "Name of the run; default: the name of its config or COMMAND."),
        option("--note TEXT", "Note to store with the run."),
        option("--tag TAG", "Tag of the run, for `status --tag`; repeatable.", name="tags", multiple=True),
    )(wrapper)


SLURM_FLAGS = {
    "time": ("T", "Time limit of the job in Slurm's format, such as 2-12:00:00."),
    "slice": (
        "T",
        "Time limit of each job, to split the run into several jobs; --time then limits the total time.",
    ),
    "time-min": (
        "T",
        "Minimum time limit; Slurm may reduce the job's time limit to this value to start the job sooner.",
    ),
    "partition": ("P", "Slurm partition."),
    "clusters": (
        "A,B",
        "Slurm cluster; if several are listed, the cluster that can start the job first is used.",
    ),
    "account": ("A", "Slurm account."),
    "qos": ("Q", "Slurm quality of service."),
    "constraint": ("C", "Required node features, in Slurm's syntax."),
    "cluster": ("NAME", "Name of the cluster profile; default: the profile of this cluster."),
}
"""Maps each option to its metavar and help text."""


job_options = combined(
    *(
        click.option(f"--{name}", metavar=metavar, help=help_text)
        for name, (metavar, help_text) in SLURM_FLAGS.items()
    ),
    option(
        "--per",
        "Whether Slurm starts one task per GPU or one task per node.",
        type=click.Choice(["gpu", "node"]),
    ),
)
"""The Slurm job options, excluding --no-snapshot."""
gpu_type_option = option(
    "--gpu-type TYPE",
    "GPU type; if several are listed, as in h100,a100, the job gets GPUs of one of these types.",
)
max_gpu_hours_option = option(
    "--max-gpu-hours N",
    "Reject the submission if its jobs could use more than N GPU-hours, including all restarts and runs.",
    type=click.FloatRange(min=0, min_open=True),
)
slurm_options = combined(
    job_options,
    option("--no-snapshot", "Run the original code instead of a copy in the run folder."),
)
"""All Slurm job options; `config_flags` removes their values from the command's arguments."""


def config_flags(arguments: dict[str, Any]) -> dict[str, tuple[str, object]]:
    """Remove config options from `arguments`; map each config key to the option as typed and its value."""
    given = {name: arguments.pop(name, None) for name in FLAGS}
    flags: dict[str, tuple[str, object]] = {
        FLAGS[name]: (f"--{name.replace('_', '-')} {value}", value)
        for name, value in given.items()
        if value is not None
    }
    if tags := arguments.pop("tags", ()):
        flags["tags"] = (" ".join(f"--tag {tag}" for tag in tags), list(tags))
    if arguments.pop("no_snapshot", False):
        flags["launch.snapshot"] = ("--no-snapshot", False)
    return flags


def refuse_other_options(name: str, what: str = "") -> None:
    """Raise UsageError if options are given that have no effect in combination with the parameter `name`.

    `what` describes the parameter in the message.
    """
    context = click.get_current_context()
    typed = [
        item.opts[0] if isinstance(item, click.Option) else str(item.metavar).strip("[]")
        for item in context.command.params
        if item.name not in (name, "as_json", "help")
        and context.get_parameter_source(str(item.name)) is ParameterSource.COMMANDLINE
    ]
    if typed:
        effect = f"would have no effect {what or f'with --{name}'}"
        raise UsageError(f"{', '.join(typed)} {effect}", hint="remove it")


class WithTrailingCommand(Command):
    """A command whose own arguments end at ``--``; `trailing_workload` returns the COMMAND that follows."""

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
    """Return the COMMAND after ``--``, or the built-in trainer if there is no COMMAND.

    Raises UsageError if --launcher is given without a COMMAND.
    """
    argv: tuple[str, ...] | None = click.get_current_context().meta.get(_KEY)
    if argv is None and launcher != "python":
        raise UsageError(f"--launcher {launcher} needs a COMMAND", hint="add: -- train.py …")
    workload = Workload(argv or (), launcher)
    if workload.has_two_pythons:
        raise UsageError(
            f"--launcher {launcher} starts Python itself, but the COMMAND begins with {workload.argv[0]}",
            hint=f"omit it: -- {shlex.join(workload.argv[1:]) or 'train.py …'}",
        )
    if workload.has_launcher and Path(workload.argv[0]).name == launcher:
        script = next((at for at, word in enumerate(workload.argv) if word.endswith(".py")), 0)
        rest = shlex.join(workload.argv[script:]) if script else "train.py …"
        raise UsageError(
            f"--launcher {launcher} starts {launcher} itself, but the COMMAND begins with {workload.argv[0]}",
            hint=f"write only the script: -- {rest}",
        )
    return workload
