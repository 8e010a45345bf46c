"""``trainkit cancel``: cancel a run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from trainkit.cli.help import Command, examples
from trainkit.cli.options import json_option, run_argument
from trainkit.errors import EXIT_FAILED, EXIT_OK

if TYPE_CHECKING:
    from trainkit.bench.bench_file import Bench


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
    from trainkit.bench.bench_file import find_bench
    from trainkit.control.cancel import cancel_group, cancel_run
    from trainkit.control.run_registry import find_run_or_group
    from trainkit.rungroup import RunGroup

    bench = find_bench(run_name)
    if bench is not None and bench.groups and not bench.is_group:
        return _cancel_bench(bench, now=now, wait=wait, as_json=as_json)
    found = find_run_or_group(run_name, to_change=True)
    if isinstance(found, RunGroup):
        result = cancel_group(found, now=now, wait=wait)
    else:
        result = cancel_run(found, now=now, wait=wait, warn=lambda text: click.echo(text, err=True))
    click.echo(result.message, err=True)
    if as_json:
        click.echo(json.dumps(result.facts, ensure_ascii=False))
    return EXIT_FAILED if wait and result.state == "cancelling" else EXIT_OK


def _cancel_bench(bench: Bench, *, now: bool, wait: bool, as_json: bool) -> int:
    from trainkit.control.cancel import cancel_group

    # The last array first: each of them starts when the one before has ended.
    results = [cancel_group(group, now=now, wait=wait) for group in reversed(bench.groups)]
    results.reverse()
    for group, result in zip(bench.groups, results, strict=True):
        click.echo(f"{group.path.name}: {result.message}", err=True)
    states = [result.state for result in results]
    state = next((one for one in ("cancelling", "cancelled") if one in states), "ended")
    if as_json:
        value = {
            "run_dir": str(bench.folder),
            "state": state,
            "arrays": [dict(result.facts) for result in results],
        }
        click.echo(json.dumps(value, ensure_ascii=False))
    return EXIT_FAILED if wait and state == "cancelling" else EXIT_OK
