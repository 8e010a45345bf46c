"""Builds help pages and shell completion for commands, and prints warnings."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from trainkit.cli.output import echo_error
from trainkit.cli.usage import CommandGroup
from trainkit.folders import shipped_config_names, shipped_configs
from trainkit.shipped import shipped_subcommands

SECTIONS = {
    "What": (
        "--set",
        "--from-step",
        "--skip-samples",
        "--profile",
        "--name",
        "--note",
        "--tag",
        "--where",
        "--metric",
        "--sort",
        "--sweep",
        "--array",
        "--step",
        "--for",
        "--steps",
        "--seed",
        "--only",
        "--layout",
        "--curves",
        "--x",
        "--smooth",
        "--by",
        "--collect",
        "--rank",
        "--node",
        "--attempt",
        "--all",
        "--here",
        "--list",
        "--keep-last",
        "--tokenizer",
        "--text-key",
        "--val-fraction",
        "--task",
        "--simulate-world",
        "--format",
        "--dtype",
        "--merge",
        "--tool",
        "--max-tokens",
        "--temperature",
        "--top-k",
        "--top-p",
    ),
    "Where": (
        "--nodes",
        "--gpus-per-node",
        "--gpus",
        "--gpu-type",
        "--backend",
        "--per",
        "--cluster",
        "--device",
        "--port",
        "--partition",
        "--clusters",
        "--account",
        "--qos",
        "--constraint",
        "--time",
        "--slice",
        "--time-min",
        "--max-gpu-hours",
        "--run-dir",
        "--dir",
        "--as",
    ),
    "How": (
        "--submit",
        "--launcher",
        "--debug",
        "--post-mortem",
        "--no-snapshot",
        "--new-code",
        "--trust",
        "--yes",
        "--after",
        "--workers",
        "--warmup",
        "--repeats",
        "--at-once",
        "--failures-per-node-day",
        "--restart-s",
        "--save-s",
        "--quick",
        "--now",
        "--wait",
        "--estimate",
        "--keep",
        "--task-smoke",
        "--test-only",
        "--dry-run",
    ),
    "Output": (
        "--follow",
        "--interval",
        "--timeout",
        "--once",
        "--lines",
        "--limit",
        "--show-origin",
        "--out",
        "--plot",
        "--output",
        "--json",
        "--csv",
        "--overwrite",
        "--help",
    ),
}
"""Maps each heading of a help page to its options; headings and options are in the order shown on the
page."""
ADDED_UNDER = "How"
"""The heading for options that a capability adds to a command of the core."""
UNLISTED_UNDER = "What"
"""The heading for other options that `SECTIONS` does not contain."""


class AddedOption(click.Option):
    """An option that a capability adds to a command."""


def by_heading(options: Sequence[click.Option]) -> Iterator[tuple[str, dict[str, click.Option]]]:
    """Yield the headings of a help page in order, each with a mapping from option names to options."""
    by_name = {name: item for item in options for name in item.opts}
    listed = {name for names in SECTIONS.values() for name in names}
    more: dict[str, list[str]] = {ADDED_UNDER: [], UNLISTED_UNDER: []}
    for item in options:
        if not listed & {*item.opts}:
            more[ADDED_UNDER if isinstance(item, AddedOption) else UNLISTED_UNDER].append(item.opts[0])
    for heading, names in SECTIONS.items():
        own = (*names, *more.get(heading, ()))
        yield heading, {name: by_name[name] for name in own if name in by_name}


def examples(*lines: str) -> str:
    """Return the last section of a command's help page: examples that can be run as shown."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def terminal_width() -> int | None:
    """Return the width of the terminal, or None if standard output is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def warn(text: str) -> None:
    """Print a warning to stderr."""
    echo_error(f"warning: {text}")


Function = Callable[..., Any]


class Command(click.Command):
    """A command whose help page groups options under headings such as What, Where, How and Output."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [item for item in self.get_params(ctx) if isinstance(item, click.Option)]
        for heading, found in by_heading(options):
            records = [item.get_help_record(ctx) for item in found.values()]
            shown = [record for record in records if record is not None]
            if shown:
                with formatter.section(heading):
                    formatter.write_dl(shown)


class Group(CommandGroup):
    """A command group whose help lists options under headings, and to which capabilities can add commands."""

    command_class = Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *shipped_subcommands(str(self.name))])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        from trainkit.cli.main import load_command

        if cmd_name in shipped_subcommands(str(self.name)):
            return load_command(f"{self.name} {cmd_name}")
        return super().get_command(ctx, cmd_name)


def as_command(
    *lines: str, cls: type[click.Command] = Command, **options: Any
) -> Callable[[Function], click.Command]:
    """Return a decorator that turns a function into a command whose help page shows `lines` as examples."""
    return click.command(cls=cls, epilog=examples(*lines), **options)


def as_group(name: str, *lines: str, cls: type[click.Group] = Group) -> Callable[[Function], click.Group]:
    """Return a decorator that turns a function into a group of commands; see `as_command`."""
    return click.group(name, cls=cls, epilog=examples(*lines))


def option(shown: str, text: str, name: str = "", **rules: Any) -> Callable[[Any], Any]:
    """Return a decorator that adds an option, like `click.option`.

    `shown` is the option as help pages show it: ``--step N`` for an option with a value, ``--merge`` for a
    flag. `name` is the parameter that receives the value; the default is the name of the option.
    """
    flag, _, metavar = shown.partition(" ")
    if metavar:
        rules["metavar"] = metavar
    elif not rules:
        rules["is_flag"] = True
    return click.option(*filter(None, (flag, name)), help=text, **rules)


Items = list[CompletionItem]
MAX_RUNS = 200
"""Maximum number of runs that shell completion offers, newest first. The limit keeps completion fast, because
the files of every offered run are read."""


@as_command(
    'eval "$(trainkit completion bash)"',
    "trainkit completion zsh > ~/.trainkit.zsh",
    "trainkit completion fish > ~/.config/fish/completions/trainkit.fish",
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]), metavar="SHELL")
def completion(shell: str) -> None:
    """Print the completion script for SHELL; source it from the shell's start-up file.

    The script completes commands, options, CONFIG, RUN, --profile and the keys of --set.
    """
    from click.shell_completion import get_completion_class

    from trainkit.cli.main import cli

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(cli, {}, "trainkit", "_TRAINKIT_COMPLETE").source())


def complete_run(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Complete RUN with `last`, the names of known runs, and folder paths."""
    from trainkit.run.registry import starts

    known = list(islice((start for start in starts() if start.read() is not None), MAX_RUNS))
    found = {"last": "the newest run"} if known else {}
    for start in known:
        found.setdefault(start.folder.name, str(start.folder))
        found.setdefault(start.config_name, str(start.folder))
    return [CompletionItem(incomplete, type="dir"), *_starting(found, incomplete)]


def complete_config(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Complete CONFIG with YAML files and folders in the current folder, and with built-in config names."""
    here = sorted(Path().glob(f"{incomplete}*")) if not Path(incomplete).is_absolute() else []
    found = {f"{path}/": "" for path in here if path.is_dir()}
    found |= {str(path): "" for path in here if path.suffix in (".yaml", ".yml")}
    found |= dict.fromkeys(shipped_config_names(), "shipped")
    return [CompletionItem(incomplete, type="file"), *_starting(found, incomplete)]


def complete_profile(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Complete --profile with the project's profiles and the built-in profiles."""
    folders = (Path("profiles"), Path("configs/profiles"), shipped_configs() / "profiles")
    names = sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})
    return _starting(dict.fromkeys(names, ""), incomplete)


def complete_setting(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Complete the keys of ``--set KEY=VALUE``."""
    from trainkit.config.schema import all_keys

    return _starting({f"{key}=": "" for key in all_keys()}, incomplete)


def _starting(found: dict[str, str], incomplete: str) -> Items:
    return [
        CompletionItem(value, help=text or None)
        for value, text in found.items()
        if value.startswith(incomplete)
    ]
