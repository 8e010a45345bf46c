"""``trainkit init``: look at this cluster; write its profile and a first run config."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from datetime import date
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import click

from trainkit.cli.help import Command, examples
from trainkit.cli.options import json_option
from trainkit.errors import EXIT_OK, UsageError

if TYPE_CHECKING:
    from trainkit.cluster.model import Cluster

PROFILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@click.command(
    cls=Command,
    epilog=examples("trainkit init", "trainkit init --cluster big --dir experiments", "trainkit init --json"),
)
@click.option("--cluster", "name", metavar="NAME", help="Name of the profile; default: that of the cluster.")
@click.option("--dir", "folder", metavar="DIR", default=".", help="Folder of the run config; default: this.")
@json_option
def command(name: str | None, folder: str, as_json: bool) -> int:
    """Look at this cluster, and write its profile and a first run config; nothing is overwritten.

    The profile goes to the user's config folder, where every command finds it. Prints the files that were
    written. Without Slurm there is a run config only.
    """
    from trainkit.cluster.discovery import discover_cluster
    from trainkit.cluster.init_files import describe_cluster, first_run_text, profile_text, write_new
    from trainkit.cluster.profile import user_folder
    from trainkit.resources import FIRST_RUN

    cluster = discover_cluster()
    texts: dict[Path, str] = {}
    if cluster is not None:
        texts[user_folder() / f"{_profile_name(name or cluster.name)}.yaml"] = profile_text(
            cluster, date.today()
        )
    elif name is not None:
        raise UsageError(
            f"there is no Slurm here, so there is no cluster to describe as {name}",
            hint="type it on a login node of the cluster",
        )
    run_config = Path(folder) / FIRST_RUN
    texts[run_config] = first_run_text(cluster)
    click.echo("there is no Slurm here" if cluster is None else describe_cluster(cluster), err=True)
    written = [path for path, text in texts.items() if write_new(path, text)]
    kept = [path for path in texts if path not in written]
    for path in kept:
        click.echo(f"{path} is there already and stays as it is{_difference(path, cluster)}", err=True)
    if not written:
        one = len(kept) == 1
        places = "--dir DIR" if one else "--cluster NAME and --dir DIR"
        raise UsageError(
            f"nothing was written: {' and '.join(map(str, kept))} {'exists' if one else 'exist'} already",
            hint=f"move {'it' if one else 'them'} away, or choose another place: {places}",
        )
    if as_json:
        value = {
            "cluster": None if cluster is None else asdict(cluster),
            "written": list(map(str, written)),
            "kept": list(map(str, kept)),
        }
        click.echo(json.dumps(value, ensure_ascii=False))
    else:
        click.echo("\n".join(map(str, written)))
    click.echo(f"`trainkit check {quote(str(run_config))}` comes next", err=True)
    return EXIT_OK


def _profile_name(name: str) -> str:
    if not PROFILE_NAME.fullmatch(name):
        hint = "--cluster NAME: letters, digits, dots, dashes and underscores, at most 100"
        raise UsageError(f"a profile cannot be called {name!r}", hint=hint)
    return name


def _difference(path: Path, cluster: Cluster | None) -> str:
    """What a profile that is kept says otherwise."""
    from trainkit.cluster.init_files import differences
    from trainkit.cluster.profile import read_profile
    from trainkit.errors import ConfigError

    if cluster is None or path.parent.name != "clusters":
        return ""
    try:
        known = read_profile(path, str(path))[0].to_cluster()
    except ConfigError as error:
        return f", although it cannot be read: {error.message.splitlines()[0]}"
    found = differences(known, cluster)
    return f", although it is not what Slurm says now: {', '.join(found)}" if found else ""
