"""`trainkit replay`: compute steps of a run again, and compare."""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainkit.cli.help import Command, examples
from trainkit.cli.options import json_option, run_argument
from trainkit.errors import EXIT_FAILED, EXIT_OK, UsageError

if TYPE_CHECKING:
    from trainkit.replay.compare import ComparedStep, Comparison, JudgedSample
    from trainkit.replay.run_replay import ReplayPlan

MAX_SAMPLES = 10
"""Samples that are listed."""


@click.command(
    cls=Command,
    epilog=examples(
        "trainkit replay last --step 3",
        "trainkit replay last --step 3..5 --layout single",
        "trainkit replay last --step 3 --json",
    ),
)
@run_argument
@click.option("--step", "steps", required=True, metavar="N[..M]", help="Step, or range of steps.")
@click.option(
    "--layout",
    type=click.Choice(["same", "single"]),
    default="same",
    show_default=True,
    help="Ranks as in the run, or a single process.",
)
@click.option("--keep", is_flag=True, help="Keep the folder of the replay, with its logs.")
@json_option
def command(run_name: str, steps: str, layout: str, keep: bool, as_json: bool) -> int:
    """Compute steps of RUN again on this machine, from the checkpoint before them, and compare.

    If loss and gradient norm are equal to the last digit, a spike is due to the data or the optimisation: the
    samples of the steps follow, the worst loss first, with source file and position. If not, the hardware or
    a library computed something else: the rank and host follow, as far as the records of the ranks tell.
    Changes nothing in RUN. The exit code is 1 if a step differs.
    """
    from trainkit.control.run_registry import find_run
    from trainkit.replay.compare import DIFFERENT, compare, worst_samples
    from trainkit.replay.run_replay import plan_replay, run_replay
    from trainkit.replay.steps import find_step, step_samples

    first, last = _range(steps)
    what = plan_replay(find_run(run_name), first, last, layout)
    origin = f"checkpoint step-{what.start_step:08d}" if what.start_step else "the initial weights"
    count = f"{last - what.start_step:,} step{'s' * (last - what.start_step > 1)}"
    click.echo(
        f"computing {count} from {origin} on {what.plan.world_size} {what.plan.device} ranks", err=True
    )
    folder = Path(tempfile.mkdtemp(prefix="trainkit-replay-"))
    try:
        copy = run_replay(what, folder)
        found = compare(what, copy)
        samples = {}
        if found.verdict != DIFFERENT and not what.at.is_stream:
            samples = {step: step_samples(find_step(what.run, step)) for step in range(first, last + 1)}
        worst = worst_samples(copy, samples)
    finally:
        if keep:
            click.echo(f"kept {folder}", err=True)
        else:
            shutil.rmtree(folder)
    if as_json:
        from trainkit.cli.data_show import sample_fields

        judged = [
            {"step": item.step, "loss": finite(item.loss), **sample_fields(item.sample)} for item in worst
        ]
        click.echo(json.dumps({**found.to_dict(), "samples": judged}, ensure_ascii=False))
    else:
        click.echo("\n".join(_lines(what, found, worst)))
    return EXIT_FAILED if found.verdict == DIFFERENT else EXIT_OK


def finite(loss: float | None) -> float | None:
    """A loss as in metrics.jsonl: None if it is not finite."""
    return loss if loss is not None and math.isfinite(loss) else None


def _range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text)
    if match is None:
        raise UsageError(f"--step is {text}", hint="name a step, as 120, or a range, as 118..121")
    first, last = int(match[1]), int(match[2] or match[1])
    if not 1 <= first <= last:
        raise UsageError(f"--step is {text}", hint="steps are counted from 1, the smaller one first")
    return first, last


def _lines(what: ReplayPlan, found: Comparison, worst: list[JudgedSample]) -> Iterator[str]:
    from trainkit.cli.data_show import sample_lines
    from trainkit.replay.compare import DIFFERENT, EQUAL

    how = "equal to the last digit" if found.is_exact else "equal within rounding, on another layout"
    bad = found.first_different
    if found.verdict == EQUAL:
        yield f"{how}: the data or the optimisation, not the hardware"
    elif found.verdict == DIFFERENT and bad is not None:
        yield f"different since step {bad.step}: the hardware or a library, not the data"
        culprit = found.culprit
        if culprit is not None and culprit.ranks:
            ranks = "rank" + "s" * (len(culprit.ranks) > 1) + " " + ", ".join(map(str, culprit.ranks))
            yield f"{ranks} on {', '.join(culprit.hosts)} computed another value: {culprit.what}"
        elif culprit is not None:
            hosts = f"one of {', '.join(culprit.hosts)}" if culprit.hosts else "one of its hosts"
            yield f"which rank is not known, {hosts}: {culprit.what}"
    else:
        yield "unknown: the run recorded none of these steps (see train.log_every)"
    for step in found.steps:
        if step.step >= what.first or step is bad:
            yield _step_line(step)
    if worst:
        yield "samples:" if worst[0].loss is None else "samples, the worst loss first:"
        for item in worst[:MAX_SAMPLES]:
            loss = "" if item.loss is None else f" loss {item.loss:.4f}"
            yield from sample_lines(item.sample, note=f"  step {item.step}{loss}")
        if len(worst) > MAX_SAMPLES:
            yield f"and {len(worst) - MAX_SAMPLES:,} more; `trainkit data show` lists them all"


def _step_line(step: ComparedStep) -> str:
    if step.recorded is None:
        return f"  step {step.step}  not recorded; replayed {_shown(step.replayed)}"
    if step.is_equal:
        return f"  step {step.step}  {_shown(step.recorded)}"
    return f"  step {step.step}  recorded {_shown(step.recorded)}; replayed {_shown(step.replayed)}"


def _shown(values: dict[str, float | None]) -> str:
    return " ".join(f"{name}={'not finite' if value is None else value}" for name, value in values.items())
