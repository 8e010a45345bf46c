"""The `trainkit` command: finds the command that was typed, runs it, and words whatever goes wrong.

Nothing but click is imported here, so that ``trainkit --help`` answers at once: a command's module is
loaded when that command is run, and the help texts of all commands live in the table below.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from trainkit import __version__
from trainkit.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, TrainkitError, UsageError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

COMMANDS = {
    "init": "Look at this cluster; write its profile and a first run config.",
    "check": "Every problem of a config, at once.",
    "plan": "The parallel layouts that fit, with memory, and which to choose.",
    "submit": "Start a run that goes on without this terminal.",
    "run": "Run right here, in the foreground.",
    "status": "What runs are doing, or one run in detail.",
    "logs": "What a run prints.",
    "stacks": "Where every rank of a running job is in the code.",
    "cancel": "End a run.",
    "requeue": "Same job again: save, stop and come back.",
    "resume": "Go on from the newest good checkpoint.",
    "drill": "A fire drill: interrupt a short run in every way, and compare its losses.",
    "bench": "Run a config in many ways for a few steps each, and compare them.",
    "ckpt": "List, verify and prune checkpoints.",
    "data": "Prepare and validate training data.",
    "shell": "An interactive allocation on the cluster, with the environment ready.",
    "attach": "A shell on a node of a running job.",
    "env": "The rank environment that a process started here would train with.",
    "schema": "JSON schema of the config, for editors.",
    "completion": "Print the completion script of a shell.",
}
"""Every command with its line in ``trainkit --help``; it lives in ``trainkit.cli.<name>:command``."""


class ReaderGone(Exception):
    """Whoever read our output (`| head`) has what it wanted."""


class CommandTable(click.Group):
    """The top-level group: commands by name, each loaded when it is run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"trainkit.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            raise UsageError(f"there is no command {name!r}", hint=_command_hint(name))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise ReaderGone from None  # click would end with 1

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        found = [
            CompletionItem(name, help=text) for name, text in COMMANDS.items() if name.startswith(incomplete)
        ]
        return found + click.Command.shell_complete(self, ctx, incomplete)


def _command_hint(name: str) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, COMMANDS, n=1)
    return f"did you mean `trainkit {close[0]}`?" if close else "`trainkit --help` lists the commands"


@click.group(
    cls=CommandTable,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="\b\nExamples:\n"
    "  trainkit submit --nodes 2 --follow\n"
    "  trainkit status\n"
    "  trainkit logs last -f\n"
    "  trainkit resume last",
)
@click.version_option(__version__, prog_name="trainkit", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.option("--no-color", is_flag=True, help="No colour, as with NO_COLOR in the environment.")
@click.pass_context
def cli(ctx: click.Context, debug: bool, no_color: bool) -> None:
    """Train PyTorch models with one YAML config, from a laptop to a cluster."""
    if no_color:
        os.environ["NO_COLOR"] = "1"
    if os.environ.get("NO_COLOR"):
        ctx.color = False


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and give its exit code: 0 ok, 1 failed, 2 usage or config, 3 try again, 130 Ctrl-C."""
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in itertools.takewhile(lambda arg: arg.startswith("-"), args)
    as_json = "--json" in itertools.takewhile(lambda arg: arg != "--", args)
    try:
        result = cli.main(args=args, prog_name="trainkit", standalone_mode=False)
        if sys.stdout is not None:  # closed by who started this
            sys.stdout.flush()
        return result if isinstance(result, int) else EXIT_OK
    except (KeyboardInterrupt, click.Abort):
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (ReaderGone, BrokenPipeError):
        # What is still buffered must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return error.exit_code
    except (TrainkitError, click.ClickException) as error:
        if debug:
            raise
        return _report(error if isinstance(error, TrainkitError) else _from_click(error), as_json)
    except Exception as error:
        if debug:
            raise
        summary = str(error).strip().partition("\n")[0]
        unexpected = TrainkitError(
            f"{type(error).__name__}: {summary}" if summary else type(error).__name__,
            hint="this was not expected: `trainkit --debug …` shows where it happened",
        )
        return _report(unexpected, as_json)


def _report(error: TrainkitError, as_json: bool) -> int:
    if as_json:
        value = {"error": error.message, "hint": error.hint, "exit_code": error.exit_code}
        print(json.dumps(value, ensure_ascii=False), flush=True)
    else:
        print(error.render(), file=sys.stderr)
    return error.exit_code


def _from_click(error: click.ClickException) -> TrainkitError:
    """Click's error in our words; most of them are about how the command was typed and exit with 2."""
    message = error.format_message().rstrip(".")
    hint = ""
    if isinstance(error, click.NoSuchOption) and error.possibilities:
        message = f"there is no option {error.option_name}"
        hint = f"did you mean {' or '.join(sorted(error.possibilities))}?"
    elif isinstance(error, click.UsageError) and error.ctx is not None:
        hint = f"`{error.ctx.command_path} --help` shows how it is used"
    return TrainkitError(message[:1].lower() + message[1:], hint, error.exit_code or EXIT_FAILED)
