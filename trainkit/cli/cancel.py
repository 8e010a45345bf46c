"""``trainkit cancel``: cancel a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from trainkit.cli.help import Command, examples
from trainkit.cli.options import json_option, run_argument
from trainkit.errors import EXIT_FAILED, EXIT_OK, TrainkitError, UsageError

if TYPE_CHECKING:
    from trainkit.bench.run_bench import Bench
    from trainkit.run.group import RunGroup


@click.command(
    cls=Command,
    epilog=examples("trainkit cancel last", "trainkit cancel last --wait", "trainkit cancel last --now"),
)
@run_argument
@click.option("--now", is_flag=True, help="Kill the run immediately, without saving.")
@click.option("--wait", is_flag=True, help="Wait until the run has ended.")
@json_option
def command(run_name: str, now: bool, wait: bool, as_json: bool) -> int:
    """Cancel RUN: it saves and exits, or is killed after the grace time.

    For a group, and for a bench on Slurm, cancels all of its runs. Succeeds if RUN has already ended.
    """
    from trainkit.control.cancel import cancel_group, cancel_run
    from trainkit.run.group import RunGroup
    from trainkit.run.registry import find_bench_folder, find_run_or_group

    folder = find_bench_folder(run_name, with_groups=False)
    if folder is not None:
        return cancel_bench(folder, now=now, wait=wait, as_json=as_json)
    found = find_run_or_group(run_name, to_change=True)
    if isinstance(found, RunGroup):
        result = cancel_group(found, now=now, wait=wait)
    else:
        result = cancel_run(found, now=now, wait=wait, warn=lambda text: click.echo(text, err=True))
    click.echo(result.message, err=True)
    if isinstance(found, RunGroup):
        _note_other_arrays(found)
    if as_json:
        click.echo(json.dumps(result.facts, ensure_ascii=False))
    return EXIT_FAILED if wait and result.state == "cancelling" else EXIT_OK


def cancel_bench(folder: Path, *, now: bool, wait: bool, as_json: bool = False) -> int:
    """Cancel all arrays of a bench on Slurm; one on this machine can only have ended."""
    from trainkit.bench.run_bench import read_bench
    from trainkit.control.cancel import cancel_group

    bench = read_bench(folder)
    groups, problems, facts = bench.groups, list[TrainkitError](), list[Mapping[str, Any]]()
    if not groups:
        _require_ended(bench)
        click.echo(f"{bench.folder} has already ended", err=True)
    # The last array first: each of them starts when the one before has ended.
    for group in reversed(groups):
        try:
            result = cancel_group(group, now=now, wait=wait)
        except TrainkitError as error:
            problems.append(error)
            continue
        facts.append(result.facts)
        click.echo(f"{group.path.name}: {result.message}", err=True)
    if problems:
        for other in problems[1:]:
            click.echo(other.render(), err=True)
        raise problems[0]
    states = [fact["state"] for fact in facts]
    state = next((one for one in ("cancelling", "cancelled") if one in states), "ended")
    if as_json:
        value = {"run_dir": str(bench.folder), "state": state, "arrays": [dict(fact) for fact in facts[::-1]]}
        click.echo(json.dumps(value, ensure_ascii=False))
    return EXIT_FAILED if wait and state == "cancelling" else EXIT_OK


def _require_ended(bench: Bench) -> None:
    """Raise UsageError if a bench on this machine has not ended: a command in a terminal starts its runs."""
    from trainkit.bench.run_bench import have_ended, query_bench_status

    if not have_ended(query_bench_status(bench, lambda text: None).states):
        raise UsageError(
            f"{bench.folder} is a bench on this machine, and not all of its runs have ended",
            hint="Ctrl-C ends it in the terminal where it runs",
        )


def _note_other_arrays(group: RunGroup) -> None:
    """Say that the other arrays of a bench continue, if the group is one of several."""
    from trainkit.run.registry import find_bench_folder

    folder = find_bench_folder(str(group.path.parent), with_groups=False)
    if folder is not None and len(list(folder.glob("*/sweep.json"))) > 1:
        whole = f"`trainkit cancel {quote(str(folder))}` cancels all"
        click.echo(f"note: this was one array of a bench with several: {whole}", err=True)
