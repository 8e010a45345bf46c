"""Implements ``trainkit init``, which writes the profile of this cluster and a first run config."""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import TypedDict

import click

from trainkit.cli.help import as_command, option
from trainkit.cli.options import json_option
from trainkit.cli.output import echo_result
from trainkit.errors import UsageError
from trainkit.folders import FIRST_RUN

TASK_NAME = re.compile(r"[a-z][a-z0-9_]{0,60}")
PROFILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class _PathsJson(TypedDict):
    written: list[str]
    """The paths of the written files."""
    kept: list[str]
    """The paths of files that existed and were not changed."""


class WrittenJson(_PathsJson, total=False):
    """The files that a command has written."""

    cluster: Mapping[str, object] | None
    """The properties of this cluster; None without Slurm, and absent with `--task`."""


@as_command(
    "trainkit init",
    "trainkit init --task captions",
    "trainkit init --cluster big --dir experiments",
    "trainkit init --json",
)
@option("--cluster NAME", "Name of the cluster profile; default: the name of this cluster.", name="name")
@option(
    "--dir DIR", "Folder to write the run config to; default: the current folder.", name="folder", default="."
)
@option("--task NAME", "Write the template of a custom task to NAME.py, with a config and a test for it.")
@json_option("trainkit.capabilities.init.command:WrittenJson")
def command(name: str | None, folder: str, task: str | None, as_json: bool) -> None:
    """Write a profile of this cluster and a first run config, without overwriting existing files.

    With --task, write a template of a custom task instead: a model, data and a loss, which can be trained
    without changes.

    The profile is written to your config folder, where every trainkit command finds it. The run config,
    first-run.yaml, is the default CONFIG of commands in its folder; without Slurm, it is the only file
    written. The command prints the paths of the written files.
    """
    from trainkit.capabilities.init.init_files import (
        describe_cluster,
        first_run_text,
        profile_text,
        write_new,
    )
    from trainkit.cluster.discovery import discover_cluster
    from trainkit.cluster.profile import user_folder

    if task is not None:
        if name is not None:
            raise UsageError(
                "--task conflicts with --cluster",
                hint="run `trainkit init` separately for each of the two options",
            )
        _write_task(task, Path(folder), as_json)
        return
    cluster = discover_cluster()
    texts: dict[Path, str] = {}
    if cluster is not None:
        name = name or cluster.name
        if not PROFILE_NAME.fullmatch(name):
            hint = "--cluster NAME accepts at most 100 letters, digits, dots, dashes and underscores"
            raise UsageError(f"{name!r} is not a valid profile name", hint=hint)
        texts[user_folder() / f"{name}.yaml"] = profile_text(cluster, date.today())
    elif name is not None:
        raise UsageError(
            f"--cluster {name}: Slurm is not installed on this machine",
            hint="run `trainkit init` on a login node of the cluster",
        )
    run_config = Path(folder) / FIRST_RUN
    texts[run_config] = first_run_text(cluster)
    click.echo(
        "Slurm is not available on this machine" if cluster is None else describe_cluster(cluster), err=True
    )
    written = [path for path, text in texts.items() if write_new(path, text)]
    kept = [path for path in texts if path not in written]
    for path in kept:
        click.echo(f"kept the existing file {path}", err=True)
    if not written:
        raise UsageError(
            "nothing to write: every file already exists",
            hint="delete one of the files, or choose other paths with --cluster NAME and --dir DIR",
        )
    value: WrittenJson = {
        "cluster": None if cluster is None else asdict(cluster),
        "written": list(map(str, written)),
        "kept": list(map(str, kept)),
    }
    echo_result(value, "\n".join(value["written"]), as_json)
    click.echo(f"next: trainkit check {quote(str(run_config))}", err=True)


def _is_installed(name: str, folder: Path) -> bool:
    """Return whether Python finds a package with this name outside the given folder."""
    spec = find_spec(name)
    return (
        spec is not None
        and spec.origin is not None
        and not Path(spec.origin).is_relative_to(folder.absolute())
    )


def _write_task(name: str, folder: Path, as_json: bool) -> None:
    """Write the files of a new task: either all files or none."""
    from trainkit.capabilities.init.init_files import task_texts, write_new

    if not TASK_NAME.fullmatch(name) or keyword.iskeyword(name):
        meant = re.sub(r"\W+", "_", name.lower().removesuffix(".py")).lstrip("0123456789_")
        is_usable = TASK_NAME.fullmatch(meant) and not keyword.iskeyword(meant)
        hint = f"did you mean --task {meant}? " if is_usable else ""
        hint += f"{name} is a Python keyword; " if keyword.iskeyword(name) else ""
        hint += "use lower-case letters, digits and underscores: the name becomes NAME.py"
        raise UsageError(f"--task {name} is not a valid name for a Python module", hint=hint)
    if name in sys.stdlib_module_names or _is_installed(name, folder):
        message = f"--task {name}: Python already has a module of that name, which {name}.py would hide"
        raise UsageError(message, hint=f"for example --task my_{name}")
    texts = {folder / file: text for file, text in task_texts(name).items()}
    existing = [str(path) for path in texts if path.exists()]
    if existing:
        raise UsageError(
            f"{existing[0]} already exists", hint="choose another name, or use --dir to choose another folder"
        )
    for path, text in texts.items():
        write_new(path, text)
    written = list(map(str, texts))
    value: WrittenJson = {"written": written, "kept": []}
    echo_result(value, "\n".join(written), as_json)
    place = "" if folder == Path() else f"cd {quote(str(folder))} && "
    click.echo(f"next: {place}trainkit check {name}.yaml --task-smoke", err=True)
