"""Implements ``trainkit sync``, which sends metrics, and ``trainkit ui``, which shows curves in a browser."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

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
from trainkit.cli.output import json_text, masked
from trainkit.errors import EXIT_FAILED, EXIT_OK, UsageError
from trainkit.extras import install_line
from trainkit.folders import user_name
from trainkit.formats import short_keys, shown

if TYPE_CHECKING:
    from trainkit.run.group import RunGroup
    from trainkit.run.rundir import RunDir

HOST = "127.0.0.1"
PORTS = {"tensorboard": 6006, "mlflow": 5000}
# Keep Python from importing modules from the working directory.
_START = "import sys; sys.path[:] = filter(None, sys.path); "
_MODULE = f"{_START}import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
_TENSORBOARD = (
    f"{_START}from tensorboard import default, program; page = program.TensorBoard(default.get_plugins()); "
    "page.configure(sys.argv); sys.exit(page.main())"
)
"""Code that starts TensorBoard without the message about missing TensorFlow."""
_OF_LINKS = (
    f"import atexit, shutil; {_START}atexit.register(shutil.rmtree, sys.argv[2], True); "
    f"from trainkit.capabilities.trackers.board import follow; follow(sys.argv[2]); {_TENSORBOARD}"
)
"""Code that starts TensorBoard like `_TENSORBOARD`, but also writes TensorBoard files for scripts, and
deletes the temporary folder at exit."""
MAX_NAME = 60
"""Maximum number of characters of a run's name in a file name, which can have at most 255 bytes."""


@as_command("trainkit sync last", "trainkit sync last --json")
@run_argument
@trust_option
@json_option("trainkit.capabilities.trackers.sync:SyncedJson")
def sync(run_name: str, as_json: bool) -> int:
    """Send RUN's metrics to MLflow and Weights & Biases if RUN's nodes could not send them.

    Each step is sent once, after a checkpoint covers the step or the run has finished.
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
        raise UsageError(
            f"the run's job is sending the metrics itself: {busy}", hint="no action is needed"
        ) from None
    except ModuleNotFoundError as error:
        name = str(error.name).partition(".")[0]
        hint = f"`{install_line('mlflow', 'wandb')}` installs the clients of all trackers"
        raise UsageError(f"the package {name} is not installed", hint=hint) from None
    for sent in found:
        click.echo(sent.describe(), err=True)
    if as_json:
        click.echo(json_text([asdict(sent) for sent in found]))
    return EXIT_FAILED if any(sent.problem for sent in found) else EXIT_OK


@as_command("trainkit ui last", "trainkit ui lr-sweep", "trainkit ui last --tool mlflow --port 5001")
@run_argument
@option("--tool", "Viewer to start.", type=click.Choice(list(PORTS)), default="tensorboard")
@option(
    "--port",
    "Port of the server; default: 6006 for tensorboard, 5000 for mlflow.",
    type=click.IntRange(1, 65535),
)
@yes_option
def ui(run_name: str, tool: str, port: int | None) -> None:
    """Show the curves of RUN, or of all runs of a group, in a browser.

    Only this host can access the page. To open the page on your own computer, run the printed ssh command on
    that computer. The page has no password, so other users of this host can also open it; if other users have
    processes on this host, --yes is required.
    """
    from trainkit.run.own_folders import own_environ
    from trainkit.run.registry import find_run_or_group
    from trainkit.run.rundir import RunDir

    found = find_run_or_group(run_name)
    port = port or PORTS[tool]
    if find_spec(tool) is None:
        raise UsageError(f"the package {tool} is not installed", hint=f"`{install_line(tool)}`")
    place = ["--host", HOST, "--port", str(port)]
    runs = [found] if isinstance(found, RunDir) else [found.run(index) for index in found.created()]
    if tool == "mlflow":
        from trainkit.capabilities.trackers.clients import local_store

        if not runs:
            raise UsageError(
                f"{found.shown}: no run of the group has started", hint="wait until the first run has started"
            )
        store = local_store(runs[0])
        argv = ["mlflow", "server", "--backend-store-uri", store, "--workers", "1", *place]
    elif not any(run.tensorboard_dir.is_dir() or _is_script(run) for run in runs):
        raise _no_tensorboard(found, runs)
    refuse_shared_host(
        f"{tool}'s page", f"`trainkit report {found.quoted}` creates a file that only you can read"
    )
    _refuse_busy(port)
    environ, start = own_environ(), _MODULE
    if tool == "tensorboard":
        start = _OF_LINKS
        if not isinstance(found, RunDir):
            folder = link_runs(found, Path(environ["TMPDIR"]))
        elif found.tensorboard_dir.is_dir():
            start, folder = _TENSORBOARD, found.tensorboard_dir
        else:
            folder = _new_folder(Path(environ["TMPDIR"]))
            _link(folder / found.name, found, is_script=True)
        # TensorBoard's fast loader would print three lines about itself, so disable it.
        argv = ["--logdir", str(folder), "--load_fast", "false", *place]
    click.echo(f"http://{HOST}:{port}")
    click.echo(f"ssh -L {port}:{HOST}:{port} {user_name()}@{socket.gethostname()}")
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-c", start, *argv], environ)


def _no_tensorboard(found: RunDir | RunGroup, runs: Sequence[RunDir]) -> UsageError:
    """Return the UsageError for a run or group that has no TensorBoard files."""
    from trainkit.config import read_effective
    from trainkit.run.history import read_plan

    what = f"{found.shown} has no folder tensorboard/"
    if not runs or runs[0].path != found.path:
        what = f"none of the runs of {found.shown} has a folder tensorboard/"
    why = "the built-in trainer writes this folder if the package tensorboard is installed"
    if any(read_plan(run).is_command for run in runs):
        why = "the output of the script contains no metrics"
    elif any(
        run.config_file.exists()
        and read_effective(run.config_file, executes=False).logging.tensorboard is False
        for run in runs
    ):
        why = "logging.tensorboard is false"
    return UsageError(f"{what}: {why}", hint=f"`trainkit report {found.quoted}` shows the curves")


def link_runs(group: RunGroup, temporary: Path) -> Path:
    """Create a folder with links to the runs' TensorBoard files, each named after the values of a trial.

    TensorBoard shows a run as soon as the run has started.
    """
    folder, trials = _new_folder(temporary), group.trials
    is_script = any(map(_is_script, map(group.run, group.created())))
    keys = list(dict.fromkeys(key for trial in trials.values() for key in trial.values))
    short = dict(zip(keys, short_keys(keys), strict=True))
    names = set[str]()
    for index, trial in sorted(trials.items()):
        values = {short[key]: masked(value, key) for key, value in trial.values.items()}
        # A slash in a file name would create a subfolder.
        name = re.sub(r"[/\0]", "_", shown(values)).lstrip(".")[:MAX_NAME] or str(index)
        name = name if name not in names else f"{index} {name}"
        names.add(name)
        _link(folder / name, group.run(index), is_script=is_script)
    return folder


def _new_folder(temporary: Path) -> Path:
    return Path(mkdtemp(prefix="trainkit-ui-", dir=temporary))


def _link(place: Path, run: RunDir, *, is_script: bool) -> None:
    """Link to a run's TensorBoard files or, for a script that has none, to its metrics.jsonl."""
    if is_script and not run.tensorboard_dir.is_dir():
        place.mkdir()
        (place / run.metrics_file.name).symlink_to(run.metrics_file.absolute())
    else:
        place.symlink_to(run.tensorboard_dir.absolute())


def _is_script(run: RunDir) -> bool:
    """Return whether a run executes a COMMAND and has logged metrics."""
    from trainkit.run.history import read_plan

    return run.metrics_file.is_file() and read_plan(run).is_command


def _refuse_busy(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            hint = "choose another port with --port"
            raise UsageError(f"port {port} cannot be used: {error.strerror}", hint=hint) from None
