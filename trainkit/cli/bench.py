"""``trainkit bench``: measures a config on several layouts."""

from __future__ import annotations

from textwrap import wrap
from typing import Any

import click

from trainkit.bench.summary import COLUMNS
from trainkit.cli.help import Group, examples
from trainkit.cli.options import ConfigRequest, config_options_unless, json_option, refuse_other_options

STEPS = 30
WARMUP = 5
WIDTH = 100


@click.group(
    cls=Group,
    epilog=examples(
        "trainkit bench layouts quickstart --gpus-per-node 2 --steps 20",
        "trainkit bench layouts quickstart --gpus-per-node 4 --dry-run",
    ),
)
def command() -> None:
    """Measure variants of a config for a few steps each."""


def _columns() -> str:
    """Return the help text about the columns of summary.csv."""
    width = max(map(len, COLUMNS)) + 4
    lines = []
    for name, text in COLUMNS.items():
        first, *rest = wrap(text, WIDTH - width - 2)
        lines += [f"  {name:<{width - 2}}{first}", *(" " * width + line for line in rest)]
    return "\b\nColumns of summary.csv:\n" + "\n".join(lines)


@command.command(
    epilog=_columns()
    + "\n\n"
    + examples(
        "trainkit bench layouts quickstart --gpus-per-node 4 --dry-run",
        "trainkit bench layouts quickstart --gpus-per-node 2 --steps 20 --out runs/two",
        "trainkit bench layouts --collect runs/two",
        "trainkit bench layouts quickstart --gpus-per-node 2 --steps 20 "
        "--layout tp=2 --layout dp_shard=2,zero=2",
    )
)
@config_options_unless("collect")
@click.option(
    "--layout",
    "layouts",
    multiple=True,
    metavar="KEY=N,KEY=N,…",
    help="Layout, as keys of the section parallel; repeatable. Default: all possible layouts.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=STEPS,
    metavar="N",
    help=f"Steps per layout; default: {STEPS}.",
)
@click.option(
    "--warmup",
    type=click.IntRange(min=0),
    default=WARMUP,
    metavar="K",
    help=f"Warm-up steps, not measured; default: {WARMUP}.",
)
@click.option("--out", metavar="DIR", help="Folder of the bench, new or empty; default: runs/NAME-layouts.")
@click.option(
    "--at-once",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="On Slurm: maximum layouts that run in parallel; default: 1, so that none disturbs another.",
)
@click.option("--follow", is_flag=True, help="On Slurm: wait for the runs and write the summary.")
@click.option("--dry-run", is_flag=True, help="Print the layouts that would run; start nothing.")
@click.option("--collect", metavar="DIR", help="Write the summary of the bench in DIR; start nothing.")
@json_option
def layouts(request: ConfigRequest | None, collect: str | None, as_json: bool, **typed: Any) -> int:
    """Run CONFIG on several layouts for a few steps each; write summary.csv and plots.

    Without --layout, runs all layouts that the number of processes, the model and the batch allow, simplest
    first; parallel.cp only if the config sets it or sequences are longer than 16,000 tokens.
    train.global_batch_size is the same for all; train.device_batch_size and parallel.pp_microbatches are
    adapted to the layout where necessary.

    On this machine the layouts run one after another, and Ctrl-C ends the current one. On Slurm they are one
    array; --follow, or --collect DIR later, writes the summary. Exits with 1 if nothing was measured.
    """
    from trainkit.cli.bench_layouts import LayoutsRequest, bench_layouts, summarize_folder

    if collect is not None:
        refuse_other_options("collect")
        return summarize_folder(collect, as_json)
    assert request is not None
    return bench_layouts(request, LayoutsRequest(**typed, as_json=as_json))
