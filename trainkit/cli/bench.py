"""``trainkit bench``: measures a config on several layouts, or with several settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from textwrap import wrap
from typing import Any

import click

from trainkit.bench.summary import COLUMNS, LAYOUT_COLUMN
from trainkit.cli.help import Group, examples
from trainkit.cli.options import (
    ConfigRequest,
    Function,
    GroupRequest,
    config_options_unless,
    json_option,
    refuse_other_options,
    sweep_option,
)
from trainkit.errors import UsageError

STEPS = 30
WARMUP = 5
WIDTH = 100


class BenchGroup(Group):
    """The kinds of benches; without one, `--sweep` tells which."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        is_kind = bool(get_close_matches(args[0], self.commands)) and not Path(args[0]).exists()
        if not args[0].startswith("-") and not is_kind:
            sweeps = any(word.partition("=")[0] == "--sweep" for word in args)
            args = ["settings" if sweeps else "layouts", *args]
        return super().resolve_command(ctx, args)


@click.group(
    cls=BenchGroup,
    epilog=examples(
        "trainkit bench layouts quickstart --gpus-per-node 2 --steps 20",
        "trainkit bench settings quickstart --sweep train.device_batch_size=4,8 --dry-run",
    ),
)
def command() -> None:
    """Measure variants of a config for a few steps each.

    `trainkit bench CONFIG` measures settings with --sweep, else layouts.
    """


def _columns(own: Mapping[str, str]) -> str:
    """The help text about the columns of summary.csv."""
    columns = {**own, **COLUMNS}
    width = max(map(len, columns)) + 4
    lines = []
    for name, text in columns.items():
        first, *rest = wrap(text, WIDTH - width - 2)
        lines += [f"  {name:<{width - 2}}{first}", *(" " * width + line for line in rest)]
    return "\b\nColumns of summary.csv:\n" + "\n".join(lines)


def _bench_options(what: str, folder: str) -> Callable[[Function], Function]:
    """The options of every bench; `what` names its points, `folder` the default folder."""

    def decorate(function: Function) -> Function:
        decorated: Any = function
        for option in reversed(
            (
                click.option(
                    "--steps",
                    type=click.IntRange(min=1),
                    default=STEPS,
                    metavar="N",
                    help=f"Steps per run; default: {STEPS}.",
                ),
                click.option(
                    "--warmup",
                    type=click.IntRange(min=0),
                    default=WARMUP,
                    metavar="K",
                    help=f"Warm-up steps, not measured; default: {WARMUP}.",
                ),
                click.option(
                    "--repeats",
                    type=click.IntRange(min=1),
                    default=1,
                    metavar="N",
                    help=f"Run all {what} N times, one round after another, to see how much they vary.",
                ),
                click.option(
                    "--out", metavar="DIR", help=f"Folder of the bench, new or empty; default: {folder}."
                ),
                click.option(
                    "--at-once",
                    type=click.IntRange(min=1),
                    default=1,
                    metavar="N",
                    help="On Slurm: maximum runs in parallel; default: 1, so that none disturbs another.",
                ),
                click.option(
                    "--follow", is_flag=True, help="On Slurm: wait for the runs and write the summary."
                ),
                click.option(
                    "--dry-run", is_flag=True, help=f"Print the {what} that would run; start nothing."
                ),
                click.option(
                    "--collect", metavar="DIR", help="Write the summary of the bench in DIR; start nothing."
                ),
                json_option,
            )
        ):
            decorated = option(decorated)
        return decorated  # type: ignore[no-any-return]

    return decorate


@command.command(
    epilog=_columns(LAYOUT_COLUMN)
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
@_bench_options("layouts", "runs/NAME-layouts")
def layouts(
    request: ConfigRequest | None, layouts: tuple[str, ...], collect: str | None, as_json: bool, **typed: Any
) -> int:
    """Run CONFIG on several layouts for a few steps each; write summary.csv and plots.

    Without --layout, runs all layouts that the number of processes, the model and the batch allow, simplest
    first; parallel.cp only if the config sets it or sequences are longer than 16,000 tokens.
    train.global_batch_size is the same for all; train.device_batch_size and parallel.pp_microbatches are
    adapted to the layout where necessary.

    On this machine the layouts run one after another, and Ctrl-C ends the current one. On Slurm they are one
    array; --follow, or --collect DIR later, writes the summary. Exits with 1 if nothing was measured.
    """
    from trainkit.cli.bench_start import BenchOptions, bench_layouts, summarize_folder

    if collect is not None:
        refuse_other_options("collect")
        return summarize_folder(collect, as_json)
    assert request is not None
    return bench_layouts(request, layouts, BenchOptions(**typed, as_json=as_json))


@command.command(
    epilog=_columns({"KEY": "value of a swept key, one column each"})
    + "\n\n"
    + examples(
        "trainkit bench settings quickstart --sweep train.device_batch_size=2,4,8 --dry-run",
        "trainkit bench settings quickstart --sweep train.device_batch_size=4,8 --sweep data.num_workers=0,2 "
        "--steps 12 --repeats 2 --out runs/batches",
        "trainkit bench settings --collect runs/batches",
    )
)
@config_options_unless("collect")
@sweep_option("Values to measure, and every combination of several --sweep; repeatable.")
@_bench_options("points", "runs/NAME-settings")
def settings(
    request: ConfigRequest | None, sweeps: tuple[str, ...], collect: str | None, as_json: bool, **typed: Any
) -> int:
    """Run CONFIG with every value of --sweep for a few steps each; write summary.csv and plots.

    Any config key can be swept, except those that a bench sets itself, such as train.steps. Points that
    cannot run are listed with the reason, and the others run.

    On this machine the points run one after another, and Ctrl-C ends the current one. On Slurm they are an
    array, or one for each size of job if the sweep changes it; --follow writes the summary, and so does
    --collect DIR later. Exits with 1 if nothing was measured.
    """
    from trainkit.cli.bench_start import BenchOptions, bench_settings, summarize_folder

    if collect is not None:
        refuse_other_options("collect")
        return summarize_folder(collect, as_json)
    if not sweeps:
        raise UsageError("no --sweep", hint="for example --sweep train.device_batch_size=4,8,16")
    assert request is not None
    return bench_settings(request, GroupRequest(sweeps, None), BenchOptions(**typed, as_json=as_json))
