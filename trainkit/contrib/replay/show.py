"""`trainkit data show`: the samples of a step, and how `trainkit replay` prints them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from trainkit.cli.help import Command, examples
from trainkit.cli.options import json_option, run_argument
from trainkit.errors import EXIT_OK, UsageError

if TYPE_CHECKING:
    from trainkit.contrib.replay.steps import StepSample

MAX_TEXT = 60
"""Characters of a text that are shown in its line."""
MAX_DOCUMENTS = 3


@click.command(
    cls=Command,
    short_help="Show the samples of a step of a run.",
    epilog=examples("trainkit data show last --step 3", "trainkit data show last --step 3 --rank 0 --json"),
)
@run_argument
@click.option("--step", type=click.IntRange(min=1), required=True, metavar="N", help="Step of the run.")
@click.option(
    "--rank", type=click.IntRange(min=0), metavar="R", help="Only the samples that this rank reads."
)
@json_option
def command(run_name: str, step: int, rank: int | None, as_json: bool) -> int:
    """Show the samples of a step of RUN, in the order of the global batch, without computing it.

    Each with its index in the dataset, the rank and microbatch that read it, the source file and position of
    its documents, and the beginning of its text. Any step can be shown, also one that is still to come.
    """
    from trainkit.contrib.replay.steps import find_step, step_samples
    from trainkit.run.registry import find_run

    at = find_step(find_run(run_name), step)
    num_ranks = at.plan.world_size
    if rank is not None and rank >= num_ranks:
        raise UsageError(
            f"attempt {at.attempt.number} has no rank {rank}", hint=f"its ranks are 0 to {num_ranks - 1}"
        )
    samples = [sample for sample in step_samples(at) if rank is None or rank in sample.ranks]
    if as_json:
        value = {
            "step": step,
            "attempt": at.attempt.number,
            "samples": [sample_fields(sample) for sample in samples],
        }
        click.echo(json.dumps(value, ensure_ascii=False))
        return EXIT_OK
    click.echo(
        f"step {step} of attempt {at.attempt.number}: samples {at.start:,} to {at.stop - 1:,} of the run",
        err=True,
    )
    for sample in samples:
        click.echo("\n".join(sample_lines(sample)))
    return EXIT_OK


def sample_fields(sample: StepSample) -> dict[str, Any]:
    """A sample as JSON, with texts of bounded length."""
    fields = asdict(sample)
    for document in fields["documents"]:
        document["text"] = document["text"][:1000]
    return fields


def sample_lines(sample: StepSample, note: str = "") -> Iterator[str]:
    """A sample as text: one line for it, and one for each of its first documents."""
    ranks = (
        f"rank {sample.ranks[0]}" if len(sample.ranks) == 1 else f"ranks {sample.ranks[0]}-{sample.ranks[-1]}"
    )
    text = f"  {one_line(sample.text)}" if sample.text else ""
    yield f"sample {sample.index}  {ranks} microbatch {sample.microbatch}{note}{text}"
    for document in sample.documents[:MAX_DOCUMENTS]:
        inside = f" (token {document.skipped_tokens:,})" if document.skipped_tokens else ""
        yield f"  {document.where}{inside}: {document.num_tokens:,} tokens  {one_line(document.text)}"
    if len(sample.documents) > MAX_DOCUMENTS:
        yield f"  and {len(sample.documents) - MAX_DOCUMENTS:,} more documents"


def one_line(text: str) -> str:
    """The beginning of a text on one line, with control characters escaped."""
    cut = repr(text[:MAX_TEXT])[1:-1]
    return f"{cut}…" if len(text) > MAX_TEXT else cut
