"""Implements the commands `trainkit replay` and `trainkit data show`."""

from __future__ import annotations

import math
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainkit.cli import options
from trainkit.cli.help import as_command, complete_run, option, warn
from trainkit.cli.output import json_text
from trainkit.errors import EXIT_FAILED, EXIT_OK, UsageError
from trainkit.formats import there_are

if TYPE_CHECKING:
    from trainkit.capabilities.replay.compare import ComparedStep, Comparison
    from trainkit.capabilities.replay.replay import Flags, ReplayPlan
    from trainkit.capabilities.replay.steps import StepSample
    from trainkit.run.rundir import RunDir

MAX_SAMPLES = 10
"""Maximum number of samples listed per step."""
MAX_TEXT = 60
"""Maximum number of characters of a sample's text shown on one line."""
MAX_DOCUMENTS = 3
SHAPE_KEYS = ("resources.nodes", "resources.gpus_per_node")


@as_command(
    "trainkit replay last --step 20",
    "trainkit replay last --step 18..22 --layout single",
    "trainkit replay last --step 20 --json",
    "trainkit replay last --step 20 --submit --time 10 --follow",
)
@click.argument("run_name", metavar="[RUN]", required=False, shell_complete=complete_run)
@option("--step N[..M]", "Step to recompute, or a range of steps.", name="steps")
@option(
    "--layout LAYOUT",
    "Layout of the replay: `same` for the layout of the run, `single` for one process, "
    "or degrees such as tp=2,dp_shard=2.",
    default="same",
    show_default=True,
)
@options.shape_options
@option("--submit", "Recompute the steps in a separate job, on Slurm if it is available.")
@options.job_options
@option("--run-dir DIR", "New or empty run folder for the job; default: runs/NAME-replay.")
@option("--follow", "Wait for the job, then compare its results; Ctrl-C detaches.")
@option("--collect JOB", "Compare the results of a finished replay job; JOB is the job's folder, name or id.")
@option("--keep", "Keep the temporary folder of the replay and its logs; cannot be combined with --submit.")
@options.trust_option
@options.json_option("trainkit.capabilities.replay.compare:ReplayedOrStarted")
def command(
    run_name: str | None,
    steps: str | None,
    layout: str,
    nodes: int | None,
    gpus_per_node: int | None,
    submit: bool,
    run_dir: str | None,
    follow: bool,
    collect: str | None,
    keep: bool,
    as_json: bool,
    **slurm: object,
) -> int:
    """Recompute steps of RUN from an earlier checkpoint, and compare the results with the recorded metrics.

    If the recomputed loss and gradient norm equal the recorded ones to the last digit, a spike in the loss is
    due to the data or the optimization. If the values are equal, the command lists the samples of the steps
    with their source files and positions, highest loss first. If the values differ, the hardware or a library
    is the cause, and the command prints the rank and the host that caused the difference, if the records show
    them.

    The steps are computed on this machine or, with --submit, in a job that has its own run folder. For a
    submitted job, --follow or --collect compares the results. RUN itself is not changed. The exit code is 1
    if any step differs.
    """
    flags = options.config_flags({"nodes": nodes, "gpus_per_node": gpus_per_node, **slurm})
    from trainkit.run.registry import find_run

    if collect is not None:
        from trainkit.capabilities.replay.replay import replay_of

        options.refuse_other_options("collect")
        copy = find_run(collect)
        return _report(replay_of(copy), copy, as_json)
    if run_name is None or steps is None:
        raise UsageError(
            f"{'RUN' if run_name is None else '--step'} is missing",
            hint="for example `trainkit replay last --step 3`",
        )
    _refuse_misfits(submit, keep, follow, run_dir, flags)

    from trainkit.capabilities.replay.replay import plan_replay

    first, last = _range(steps)
    run = find_run(run_name)
    options.refuse_untrusted(run.path)
    what = plan_replay(run, first, last, layout, flags, submits=submit)
    for text in what.warnings:
        warn(text)
    click.echo(what.cost, err=True)
    if submit:
        return _submit(what, options.named_folder(run_dir), follow, as_json)
    return _run_here(what, keep, as_json)


def _refuse_misfits(submit: bool, keep: bool, follow: bool, run_dir: str | None, flags: Flags) -> None:
    """Raise UsageError if an option has no effect in combination with the other given options."""
    of_job = [origin for key, (origin, _) in flags.items() if key not in SHAPE_KEYS]
    of_job += ["--follow"] * follow + ["--run-dir"] * (run_dir is not None)
    if of_job and not submit:
        raise UsageError(f"{', '.join(of_job)} has no effect without --submit", hint="add --submit")
    if keep and submit:
        raise UsageError(
            "--keep has no effect with --submit", hint="omit --keep: the folder of a job is always kept"
        )


def _run_here(what: ReplayPlan, keep: bool, as_json: bool) -> int:
    """Compute the steps on this machine in a temporary folder, and compare the results with the records."""
    from trainkit.capabilities.replay.replay import run_replay
    from trainkit.job.signals import exit_on_stop

    with exit_on_stop():
        folder = Path(tempfile.mkdtemp(prefix="trainkit-replay-"))
        try:
            return _report(what, run_replay(what, folder), as_json)
        except OSError as error:
            if not str(error.filename or "").startswith(str(folder)):
                raise
            hint = "free disk space, or set TMPDIR to another folder"
            raise UsageError(f"cannot write {folder}: {error.strerror or error}", hint) from error
        finally:
            if keep:
                click.echo(f"kept {folder}", err=True)
            else:
                shutil.rmtree(folder, ignore_errors=True)


def _submit(what: ReplayPlan, folder: Path | None, follow: bool, as_json: bool) -> int:
    """Submit a replay job; with --follow, wait for the job and compare its results with the records."""
    from trainkit.capabilities.replay.replay import submit_replay
    from trainkit.cli.logs import follow_detachable
    from trainkit.cli.started import print_started

    copy, entry = submit_replay(what, ["trainkit", *sys.argv[1:]], folder)
    collect = f"`trainkit replay --collect {copy.quoted}` compares the results"
    if not follow:
        print_started(copy, copy.name, entry, what.plan.backend, as_json)
        click.echo(f"{collect} after the job has finished", err=True)
        return EXIT_OK
    click.echo(f"{copy.shown}: job {entry.job_id}", err=True)
    code = follow_detachable(copy, entry.attempt, to_stderr=True)
    if code != EXIT_OK:
        click.echo(f"{collect} later", err=True)
        return code
    return _report(what, copy, as_json)


def _report(what: ReplayPlan, copy: RunDir, as_json: bool) -> int:
    """Compare the recomputed steps with the records, print the result, and return the exit code."""
    from trainkit.capabilities.replay.compare import DIFFERENT, compare, worst_samples
    from trainkit.capabilities.replay.steps import find_step, step_samples

    found = compare(what, copy)
    if found.start_step != what.start_step:
        click.echo(
            f"note: a checkpoint was damaged, so the replay began after step {found.start_step}", err=True
        )
    samples = {}
    if found.verdict != DIFFERENT and not what.at.is_stream:
        samples = {step: step_samples(find_step(what.run, step)) for step in range(what.first, what.last + 1)}
    worst = worst_samples(copy, samples)
    if as_json:
        judged = [  # Write non-finite losses as null, as in metrics.jsonl.
            {"step": step, "loss": loss if math.isfinite(loss or 0.0) else None, **sample_fields(sample)}
            for step, loss, sample in worst
        ]
        click.echo(json_text({**found.to_dict(), "samples": judged}))
    else:
        click.echo("\n".join(_lines(what, found, worst)))
    return EXIT_FAILED if found.verdict == DIFFERENT else EXIT_OK


def _range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        problem = f"--step {text} is neither a step nor a range of steps; steps are numbered from 1"
        raise UsageError(problem, hint="pass a step such as 120, or a range such as 118..121")
    return first, last


def _lines(
    what: ReplayPlan, found: Comparison, worst: Sequence[tuple[int, float | None, StepSample]]
) -> Iterator[str]:
    yield from _verdict_lines(found)
    bad = found.first_different
    has_several = len({step.attempt for step in found.steps}) > 1
    for step in found.steps:
        if step.step >= what.first or step is bad:
            yield _step_line(step, has_several)
    if worst:
        yield "samples:" if worst[0][1] is None else "samples, highest loss first:"
        for step_number, loss, sample in worst[:MAX_SAMPLES]:
            shown = "" if loss is None else f" loss {loss:.4f}"
            yield from sample_lines(sample, note=f"  step {step_number}{shown}")
        if len(worst) > MAX_SAMPLES:
            yield f"and {len(worst) - MAX_SAMPLES:,} more; `trainkit data show` lists all samples"


def _verdict_lines(found: Comparison) -> Iterator[str]:
    from trainkit.capabilities.replay.compare import DIFFERENT, EQUAL

    why = "; ".join(found.rounding)
    bad = found.first_different
    if found.verdict == EQUAL and found.is_exact:
        yield "equal to the last digit: a spike is due to the data or the optimization, not to the hardware"
    elif found.verdict == EQUAL:
        yield f"equal within {found.tolerance:g}: a larger spike is due to the data or the optimization"
        yield f"a smaller hardware error cannot be detected, because rounding differs: {why}"
    elif bad is None:
        yield "unknown: the run recorded none of these steps (see train.log_every)"
    elif found.verdict != DIFFERENT:
        yield f"unknown: different since step {bad.step}, possibly due to accumulated rounding errors"
        yield (
            f"`--layout same` on the same hardware allows an exact comparison, which is impossible "
            f"here: {why}"
        )
    else:
        more = "" if bad.is_exact else f" by more than {found.tolerance:g} within a single step"
        yield f"different since step {bad.step}{more}: the cause is the hardware or a library, not the data"
        if not bad.is_exact:
            yield f"the values were not compared to the last digit: {why}"
        culprit = found.culprit
        if culprit is not None and culprit.ranks:
            ranks = "rank" + "s" * (len(culprit.ranks) > 1) + " " + ", ".join(map(str, culprit.ranks))
            yield (
                f"{ranks} on {', '.join(culprit.hosts)} computed a different value in attempt {bad.attempt}: "
                f"{culprit.what}"
            )
        elif culprit is not None:
            hosts = f"one of {', '.join(culprit.hosts)}" if culprit.hosts else "one of the hosts of the run"
            yield f"the rank is unknown, but it ran on {hosts}: {culprit.what}"


def _step_line(step: ComparedStep, has_several: bool) -> str:
    name = f"  step {step.step}"
    if step.recorded is None:
        return f"{name}  not recorded; replayed {_shown(step.replayed)}"
    if has_several:
        name += f" of attempt {step.attempt}"
    if step.difference == 0.0:
        return f"{name}  {_shown(step.recorded)}"
    return f"{name}  recorded {_shown(step.recorded)}; replayed {_shown(step.replayed)}"


def _shown(values: dict[str, float | None]) -> str:
    return " ".join(f"{name}={'not finite' if value is None else value}" for name, value in values.items())


@as_command(
    "trainkit data show last --step 3",
    "trainkit data show last --step 3 --rank 0 --json",
    short_help="Show the samples of a step of a run.",
)
@options.run_argument
@option("--step N", "Step of RUN whose samples are shown.", type=click.IntRange(min=1), required=True)
@option("--rank R", "Show only the samples that this rank reads.", type=click.IntRange(min=0))
@options.trust_option
@options.json_option("trainkit.capabilities.replay.steps:StepJson")
def show(run_name: str, step: int, rank: int | None, as_json: bool) -> int:
    """Show the samples of a step of RUN, in the order of the global batch, without computing the step.

    For each sample, the output contains its index in the dataset, the rank and microbatch that read it, the
    source file and position of its documents, and the beginning of its text. The step may also be one that
    RUN has not reached yet.
    """
    from trainkit.capabilities.replay.steps import find_step, step_samples
    from trainkit.run.registry import find_run

    run = find_run(run_name)
    options.refuse_untrusted(run.path)
    at = find_step(run, step)
    num_ranks = at.plan.world_size
    if rank is not None and rank >= num_ranks:
        message = f"attempt {at.attempt.number} has no rank {rank}"
        raise UsageError(message, hint=there_are(range(num_ranks)))
    samples = [sample for sample in step_samples(at) if rank is None or rank in sample.ranks]
    if as_json:
        value = {
            "step": step,
            "attempt": at.attempt.number,
            "samples": [sample_fields(sample) for sample in samples],
        }
        click.echo(json_text(value))
        return EXIT_OK
    click.echo(
        f"step {step} of attempt {at.attempt.number}: samples {at.positions[0]:,} to "
        f"{at.positions[-1]:,} of the run",
        err=True,
    )
    for sample in samples:
        click.echo("\n".join(sample_lines(sample)))
    return EXIT_OK


def sample_fields(sample: StepSample) -> dict[str, object]:
    """Return the JSON object for a sample, with texts truncated to one line."""
    fields = asdict(sample)
    for document in fields["documents"]:
        document["text"] = document["text"][:1000]
    return fields


def sample_lines(sample: StepSample, note: str = "") -> Iterator[str]:
    """Yield a line that describes a sample, and one line for each of the first documents in the sample."""
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
    """Return the beginning of a text on one line, with control characters escaped."""
    cut = repr(text[:MAX_TEXT])[1:-1]
    return f"{cut}…" if len(text) > MAX_TEXT else cut
