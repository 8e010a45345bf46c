"""The `trainkit` program: loads and runs a command, and reports its errors.

Only click is imported at module level, so that ``trainkit --help`` is fast. A command's module is imported
when the command runs, so this module contains the help lines of all commands.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainkit import __version__
from trainkit.cli.output import EscapedStream, colours, echo_error, echo_json, escaped_output
from trainkit.cli.usage import CommandGroup, as_typed, from_click
from trainkit.errors import EXIT_INTERRUPTED, EXIT_OK, ConfigError, ErrorJson, TrainkitError, UsageError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

SECTIONS = {
    "Start": {
        "init": "Inspect this cluster, and write its profile and a run config to start from.",
        "submit": "Submit a run to Slurm, or start it in the background on this machine.",
        "run": "Start a run in the foreground, on this node or in all tasks of an srun step.",
        "shell": "Open a shell in a new allocation, with the same environment as a job.",
    },
    "Watch": {
        "status": "Show the state of all runs, or one run in detail.",
        "watch": "Watch a run live in the terminal: curves, nodes, warnings.",
        "wait": "Wait until a run has started, reached a step or ended; for scripts.",
        "logs": "Print the output of a run.",
        "diagnose": "Find the rank of a run that failed first, explain the cause, and suggest a fix.",
        "replay": "Recompute steps of a run, to distinguish data problems from hardware problems.",
        "report": "Write an HTML report about the results of a run and how it spent its time.",
        "compare": "Compare the results and the configs of runs.",
        "stacks": "Print the Python stacks of every rank of a running job.",
        "attach": "Open a shell on a node of a running job.",
        "debug": "Debug a rank of a running job that is waiting at breakpoint().",
        "ui": "Plot the metrics of a run in a browser.",
        "sync": "Send the metrics of a run to MLflow and Weights & Biases.",
    },
    "Control": {
        "cancel": "Save a checkpoint of a run, then cancel the run.",
        "requeue": "Requeue a run with the same config; a running job first saves a checkpoint.",
        "resume": "Resume a run from its newest intact checkpoint, on any number of GPUs.",
    },
    "Check": {
        "check": "Validate a config and report all its problems.",
        "plan": "List the parallel layouts that fit into GPU memory, and recommend one.",
        "drill": "Test recovery: interrupt short runs and compare their losses with an uninterrupted run.",
        "bench": "Benchmark a config with several layouts or several settings.",
        "doctor": "Check whether a job can run on this machine or on the nodes of a cluster.",
        "env": "Print the rank, world size and rank 0 address that a process started here would use.",
    },
    "Tools": {
        "ckpt": "List, verify, prune and export checkpoints.",
        "eval": "Evaluate checkpoints of a run with a command, locally or in Slurm jobs.",
        "generate": "Generate a continuation of a prompt with the model of a run.",
        "data": "Prepare and validate training data, and show the samples of a training step.",
        "schema": "Print the JSON Schema of the config or of a command's output.",
        "completion": "Print the completion script for a shell.",
    },
}
"""Maps each heading of ``trainkit --help`` to its commands and their help lines."""
COMMANDS = {name: text for commands in SECTIONS.values() for name, text in commands.items()}
"""Maps every command to its help line."""
_IN_FILE = {
    **dict.fromkeys(("cancel", "requeue"), "control"),
    "completion": "help",
    "env": "run",
}
"""Maps each command whose module in `trainkit/cli/` has a different name to the name of the module."""


def load_command(name: str) -> click.Command:
    """Import and return a command from `COMMANDS` or from a built-in capability."""
    from trainkit.shipped import shipped_command  # imported here because --help does not need this module

    own = f"trainkit.cli.{_IN_FILE[name]}:{name}" if name in _IN_FILE else f"trainkit.cli.{name}:command"
    return _imported(*(shipped_command(name) or own).split(":"))


def _imported(module: str, name: str) -> click.Command:
    command = getattr(importlib.import_module(module), name)
    assert isinstance(command, click.Command)
    return command


class ReaderGone(Exception):
    """Raised if the program that reads stdout, such as `head`, has closed the pipe."""


class CommandTable(CommandGroup):
    """The top-level group of commands, which imports a command's module when the command runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in COMMANDS:
            return load_command(cmd_name)
        from trainkit.shipped import installed_command

        found = installed_command(cmd_name)
        return None if found is None else _imported(*found.split(":"))

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise ReaderGone from None  # Click itself would exit with code 1 on a broken pipe.

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for heading, commands in SECTIONS.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), text) for name, text in commands.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        found = [
            CompletionItem(name, help=text) for name, text in COMMANDS.items() if name.startswith(incomplete)
        ]
        return found + click.Command.shell_complete(self, ctx, incomplete)


@click.group(
    cls=CommandTable,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="\b\nExamples:\n"
    "  trainkit submit --nodes 2 --follow\n"
    "  trainkit status\n"
    "  trainkit logs last -f\n"
    "  trainkit resume last\n"
    "\n"
    "\b\nExit codes:\n"
    "  0    success\n"
    "  1    the command or the followed run failed\n"
    "  2    usage error or invalid config\n"
    "  3    Slurm cannot be reached; try again\n"
    "  75   `wait`: the run has stopped and can be resumed\n"
    "  124  `wait`: the timeout is over\n"
    "  130  interrupted with Ctrl-C",
)
@click.version_option(__version__, prog_name="trainkit", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, help="Show the traceback of errors.")
@click.option(
    "--no-color", is_flag=True, help="Disable coloured output, like the environment variable NO_COLOR."
)
@click.pass_context
def cli(ctx: click.Context, debug: bool, no_color: bool) -> None:
    """Train PyTorch models with one YAML config, from a laptop to a cluster."""
    if no_color:
        os.environ["NO_COLOR"] = "1"
    ctx.color = colours()
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UsageError("the current folder was deleted", hint="`cd` to an existing folder") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `trainkit --help` lists the exit codes."""
    # Click writes completions to the shell as bytes, which an `EscapedStream` does not support.
    with contextlib.nullcontext() if "_TRAINKIT_COMPLETE" in os.environ else escaped_output():
        return _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in itertools.takewhile(lambda arg: arg.startswith("-"), args)
    as_json = "--json" in itertools.takewhile(lambda arg: arg != "--", args)
    try:
        result = cli.main(args=args, prog_name="trainkit", standalone_mode=False, obj=args)
        sys.stdout.flush()
        return result if isinstance(result, int) else EXIT_OK
    except (KeyboardInterrupt, click.Abort):
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (ReaderGone, BrokenPipeError):
        _discard_stdout()
        return EXIT_OK
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return error.exit_code
    except (TrainkitError, click.ClickException) as error:
        if debug:
            raise
        if isinstance(error, click.ClickException):
            error = from_click(error, args)
        return _report(as_typed(error, args), as_json)
    except Exception as error:
        if debug:
            raise
        summary = str(error).strip().partition("\n")[0]
        message = f"{type(error).__name__}: {summary}" if summary else type(error).__name__
        hint = "an unexpected error: `trainkit --debug …` shows its traceback"
        if isinstance(error, OSError) and error.filename:
            message = f"{os.fsdecode(error.filename)}: {error.strerror}"
            hint = "check the path, its permissions and the disk; `trainkit --debug …` shows the failing code"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            message = f"{error.filename or 'a file'} cannot be written: {error.strerror}"
            hint = "free disk space or quota; `trainkit status` shows the state of your runs"
        if isinstance(error, OSError) and _is_from_output(error):
            _discard_stdout()
            as_json = False
            message = f"the output cannot be written: {error.strerror}"
            hint = "free disk space, or write to another disk; `trainkit status` shows the state of your runs"
        return _report(TrainkitError(message, hint), as_json)


def _report(error: TrainkitError, as_json: bool) -> int:
    if as_json:
        problems = error.problems if isinstance(error, ConfigError) else []
        message = problems[0].statement if len(problems) == 1 else error.message
        value: ErrorJson = {"error": message, "hint": error.hint, "exit_code": error.exit_code}
        if problems:
            value["problems"] = [item.to_dict() for item in problems]
        try:
            echo_json(value)
            return error.exit_code
        except OSError:
            _discard_stdout()
    with contextlib.suppress(OSError):  # stderr may also be redirected to the full disk.
        echo_error(error.render())
    return error.exit_code


def _is_from_output(error: OSError) -> bool:
    """Return whether an error was raised by writing to stdout or stderr, not by accessing another file."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    printing = (click.echo.__code__, EscapedStream.write.__code__, _main.__code__)
    return place is not None and place.tb_frame.f_code in printing


def _discard_stdout() -> None:
    """Discard buffered output, so that Python does not flush it at exit and raise the same error again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
