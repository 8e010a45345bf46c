"""Implements ``trainkit run --debug`` and ``--post-mortem``: debugs one rank in the terminal or an editor."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

import click

from trainkit.capabilities.debugger import DebugPlan
from trainkit.capability import Choice
from trainkit.cli.help import option
from trainkit.cli.options import refuse_shared_host
from trainkit.errors import UsageError
from trainkit.folders import user_name
from trainkit.formats import there_are

if TYPE_CHECKING:  # `trainkit run --help` imports this module, so avoid slow imports
    from trainkit.plan.launch import LaunchPlan
    from trainkit.plan.workload import Workload

EXAMPLES = "--debug 1, --debug=debugpy or --debug=debugpy:1"


def run_options(function: Callable[..., int]) -> Callable[..., int]:
    """Add the debugger options to a command."""

    @functools.wraps(function)
    def command(
        debug: str | None, post_mortem: bool, choices: Sequence[Choice] = (), **others: object
    ) -> int:
        if debug is not None or post_mortem:
            choices = (*choices, Debugging(debug or "0", post_mortem))
        return function(choices=choices, **others)

    debug_option = click.option(
        "--debug",
        is_flag=False,
        flag_value="0",
        metavar="[RANK|debugpy]",
        help="Let this rank (default: 0) use the terminal at breakpoint(). With debugpy, the rank "
        "waits until an editor connects.",
    )
    post_mortem_option = option(
        "--post-mortem",
        "Open the debugger if an exception terminates the rank that --debug selects (default: 0).",
    )
    typed: Callable[..., int] = debug_option(post_mortem_option(command))
    return typed


class Debugging(Choice):
    """The user's choice to debug one rank of a run."""

    plan: DebugPlan
    """The debug plan, which `check` creates from the options."""

    def __init__(self, text: str, post_mortem: bool) -> None:
        self.text, self.post_mortem = text, post_mortem

    def check(self, workload: Workload, *, is_alone: bool) -> None:
        self.plan = self._plan(workload)
        self.has_terminal = self.plan.port is None
        if not is_alone:
            raise UsageError(
                "--debug supports only runs on a single machine",
                hint="for other runs, use `trainkit debug RUN --rank N` once the rank waits at breakpoint()",
            )

    def _plan(self, workload: Workload) -> DebugPlan:
        text, post_mortem, words = self.text, self.post_mortem, workload.argv
        mode, _, rank = text.rpartition(":") if ":" in text or text.isdecimal() else (text, "", "0")
        if mode not in ("", "debugpy") or not rank.isdecimal() or (mode and post_mortem):
            raise UsageError(
                f"--debug {text}: the value is neither a rank nor debugpy",
                hint=f"for example {EXAMPLES}; CONFIG comes before --debug",
            )
        if not mode and not sys.stdin.isatty():
            raise UsageError("--debug needs a terminal", hint="use --debug=debugpy to debug in an editor")
        is_python = workload.launcher != "python" or not words or PurePath(words[0]).name.startswith("python")
        if post_mortem and not is_python and not any(word.endswith(".py") for word in words):
            raise UsageError(
                f"--post-mortem supports only Python programs, but the COMMAND is {words[0]}",
                hint="-- python SCRIPT.py …",
            )
        if not mode:
            return DebugPlan(int(rank), "post-mortem" if post_mortem else "pdb")
        refuse_shared_host("debugpy", "use `--debug` to debug a rank in this terminal")
        with socket.create_server(("127.0.0.1", 0)) as free:
            return DebugPlan(int(rank), mode, free.getsockname()[1])

    def apply(self, plan: LaunchPlan) -> LaunchPlan:
        debug, reason = self.plan, self._reason(plan)
        if debug.rank >= plan.world_size:
            message = f"the run has no rank {debug.rank}"
            raise UsageError(message, hint=there_are(range(plan.world_size)))
        plan = plan.without_hangs().with_part(debug)
        return replace(plan, reasons={**plan.reasons, "debug": reason})

    def _reason(self, plan: LaunchPlan) -> str:
        """Describe how to access the rank's debugger; raise UsageError if debugpy is not installed."""
        from trainkit.launch.packages import NoAnswer, find_packages

        debug = self.plan
        if debug.port is None:
            return f"rank {debug.rank} uses the terminal; hang detection is disabled"
        work, environment = plan.workload, plan.environment
        named = shutil.which(work.argv[0]) if work.is_command and work.launcher == "python" else None
        python = (named,) if named else environment.python or (sys.executable,)
        with contextlib.suppress(NoAnswer):
            if "debugpy" not in find_packages(python, ("debugpy",), environment.variables, Path.cwd()).files:
                raise UsageError(
                    f"{python[0]} has no debugpy",
                    hint=f"install it with `{python[0]} -m pip install debugpy`",
                )
        return (
            f"rank {debug.rank} waits for an editor at 127.0.0.1:{debug.port}, where debugpy lets any "
            f"user of this "
            f"machine connect; on another computer, first run `ssh -L {debug.port}:127.0.0.1:{debug.port} "
            f"{user_name()}@{os.uname().nodename}` to forward the port"
        )
