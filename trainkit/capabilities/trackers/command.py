"""``trainkit sync``: send the metrics of a run to its trackers; ``trainkit ui``: show them in a browser."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import asdict
from importlib.util import find_spec

import click

from trainkit.cli.help import as_command, option
from trainkit.cli.options import (
    json_option,
    refuse_shared_host,
    refuse_untrusted,
    run_argument,
    trust_option,
    yes_option,
)
from trainkit.cli.output import json_text
from trainkit.errors import EXIT_FAILED, EXIT_OK, UsageError
from trainkit.extras import install_line
from trainkit.folders import user_name

HOST = "127.0.0.1"
PORTS = {"tensorboard": 6006, "mlflow": 5000}
# No module in the current folder is imported.
_START = "import sys; sys.path[:] = filter(None, sys.path); "
_MODULE = f"{_START}import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
_TENSORBOARD = (
    f"{_START}from tensorboard import default, program; page = program.TensorBoard(default.get_plugins()); "
    "page.configure(sys.argv); sys.exit(page.main())"
)
"""As its own program does, which first says that it finds no TensorFlow."""


@as_command("trainkit sync last", "trainkit sync last --json")
@run_argument
@trust_option
@json_option
def sync(run_name: str, as_json: bool) -> int:
    """Send to MLflow and Weights & Biases what RUN could not send from its nodes.

    Each step is sent once, as soon as a checkpoint covers it or the run has finished.
    """
    from trainkit.capabilities.trackers.sync import sync_run
    from trainkit.locks import LockBusy
    from trainkit.run.registry import find_run

    run = find_run(run_name, acts=True)
    refuse_untrusted(run.path)
    click.echo(run.shown, err=True)
    try:
        found = sync_run(run)
    except LockBusy as busy:
        raise UsageError(f"the job of the run is sending: {busy}", hint="there is nothing to do") from None
    except ModuleNotFoundError as error:
        name = str(error.name).partition(".")[0]
        hint = f"`{install_line('mlflow', 'wandb')}` installs the clients of all trackers"
        raise UsageError(f"the package {name} is not installed", hint=hint) from None
    for sent in found:
        click.echo(sent.describe(), err=True)
    if as_json:
        click.echo(json_text([asdict(sent) for sent in found]))
    return EXIT_FAILED if any(sent.problem for sent in found) else EXIT_OK


@as_command("trainkit ui last", "trainkit ui last --tool mlflow --port 5001")
@run_argument
@option("--tool", "The program to start.", type=click.Choice(list(PORTS)), default="tensorboard")
@option("--port", "Port; by default that of the program.", type=click.IntRange(1, 65535))
@yes_option
def ui(run_name: str, tool: str, port: int | None) -> None:
    """Show the curves of RUN in a browser.

    The page has no password, and other hosts cannot open it: the printed ssh line, run on your own, brings it
    there. Other users of this host can open it: where somebody else has processes, it takes --yes.
    """
    from trainkit.run.own_folders import own_environ
    from trainkit.run.registry import find_run

    run = find_run(run_name)
    port = port or PORTS[tool]
    if find_spec(tool) is None:
        raise UsageError(f"the package {tool} is not installed", hint=f"`{install_line(tool)}`")
    place = ["--host", HOST, "--port", str(port)]
    if tool == "tensorboard":
        if not run.tensorboard_dir.is_dir():
            from trainkit.config import read_effective
            from trainkit.run.history import read_plan

            hint = f"`trainkit report {run.word}` has its curves"
            why = "the built-in trainer writes it from its first record on, if it has tensorboard"
            if read_plan(run).is_command:
                why = "trainkit writes it for its own trainer only"
            elif (
                run.config_file.exists()
                and read_effective(run.config_file, executes=False).logging.tensorboard is False
            ):
                why = "logging.tensorboard is false"
            raise UsageError(f"{run.shown} has no tensorboard/: {why}", hint=hint)
        # The fast loader introduces itself in three lines.
        argv = ["--logdir", str(run.tensorboard_dir), "--load_fast", "false", *place]
        start = _TENSORBOARD
    else:
        from trainkit.capabilities.trackers.clients import local_store

        store = local_store(run)
        argv = ["mlflow", "server", "--backend-store-uri", store, "--workers", "1", *place]
        start = _MODULE
    refuse_shared_host(f"{tool}'s page", f"`trainkit report {run.word}` makes a file for you alone")
    _refuse_busy(port)
    click.echo(f"http://{HOST}:{port}")
    click.echo(f"ssh -L {port}:{HOST}:{port} {user_name()}@{socket.gethostname()}")
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-c", start, *argv], own_environ())


def _refuse_busy(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            hint = "choose another one with --port"
            raise UsageError(f"port {port} cannot be used: {error.strerror}", hint=hint) from None
