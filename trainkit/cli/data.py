"""`trainkit data`: tokenise texts into shards, validate texts and shards, and show samples."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainkit.cli.help import Group, examples
from trainkit.cli.options import json_option, run_argument
from trainkit.errors import EXIT_FAILED, EXIT_OK, UsageError

if TYPE_CHECKING:
    from trainkit.replay.steps import StepSample

MAX_SHOWN = 20
"""Problems of a task that are listed."""
MAX_TEXT = 60
"""Characters of a text that are shown in its line."""
MAX_DOCUMENTS = 3

_tokenizer_option = click.option(
    "--tokenizer", default="bytes", metavar="bytes|PATH", help="bytes (default), or a tokenizer.json."
)
_text_key_option = click.option(
    "--text-key",
    default="text",
    metavar="KEY",
    help="Field of a .jsonl row, or column of a table, that contains the text (default: text).",
)


@click.group(
    cls=Group,
    epilog=examples(
        "trainkit data prepare stdlib --out shards",
        "trainkit data validate stdlib",
        "trainkit data show last --step 3",
    ),
)
def command() -> None:
    """Prepare and validate training data, and show that of a step."""


@command.command(
    epilog=examples(
        "trainkit data prepare stdlib --out shards",
        "trainkit data prepare stdlib --out shards-split --val-fraction 0.05 --workers 2 --json",
    )
)
@click.argument("sources", nargs=-1, required=True, metavar="SRC...")
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), metavar="DIR", help="Folder to create."
)
@_tokenizer_option
@click.option(
    "--val-fraction",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.01,
    metavar="F",
    help="Fraction of the text held out for validation (default: 0.01).",
)
@_text_key_option
@click.option("--workers", type=click.IntRange(min=1), metavar="N", help="Processes (default: one per core).")
@json_option
def prepare(
    sources: tuple[str, ...],
    out: Path,
    tokenizer: str,
    val_fraction: float,
    text_key: str,
    workers: int | None,
    as_json: bool,
) -> None:
    """Tokenise text files into the shards that training reads.

    SRC is a .txt, .jsonl, .txt.gz, .jsonl.gz or .parquet file, a Hugging Face dataset saved on disk, a
    folder of them, or stdlib for the Python sources of the interpreter. Run the same command again to resume
    an interrupted preparation. The result does not depend on interruptions or on the number of processes.
    """
    from trainkit.data.prepare import prepare as prepare_folder
    from trainkit.data.prepare import show_progress
    from trainkit.data.sources import DatasetSpec

    spec = DatasetSpec(
        tuple(_absolute(source) for source in sources),
        tokenizer=tokenizer if tokenizer == "bytes" else str(Path(tokenizer).absolute()),
        val_fraction=val_fraction,
        text_key=text_key,
    )
    num_workers = workers or len(os.sched_getaffinity(0))
    with show_progress("preparing data") as on_progress:
        done = prepare_folder(spec, out.absolute(), num_workers, on_progress)
    file = done.file
    if as_json:
        counts = {split: file.num_tokens(split) for split in file.splits}
        value = {
            "folder": str(done.folder),
            "was_there": done.was_there,
            "num_tokens": counts,
            "num_shards": file.num_shards(),
            "tokenizer": asdict(file.tokenizer),
            "fingerprint": file.fingerprint,
        }
        click.echo(json.dumps(value, ensure_ascii=False))
        return
    if done.was_there:
        click.echo(f"{out} already contains this dataset: nothing to do", err=True)
    used = file.tokenizer
    click.echo(
        f"tokenizer {used.name}: {used.vocab_size:,} tokens, {used.eos_token} ends a document", err=True
    )
    for split in file.splits:
        click.echo(f"{split}: {file.num_tokens(split):,} tokens", err=True)
    click.echo(out)


@command.command(
    short_help="Check every line of texts and every byte of shards.",
    epilog=examples(
        "trainkit data validate stdlib",
        "trainkit data validate stdlib --json",
    ),
)
@click.argument("sources", nargs=-1, required=True, metavar="SRC...")
@_tokenizer_option
@_text_key_option
@json_option
def validate(sources: tuple[str, ...], tokenizer: str, text_key: str, as_json: bool) -> int:
    """Read the texts completely and report every line or row that `prepare` would refuse.

    Also counts the rows that are empty or longer than 1 MiB, and lists the first of them. SRC is a source of
    `trainkit data prepare`, or a folder that it wrote, whose shards are checked against their hashes. Exits
    with 1 if there are problems.

    SRC can also be the config, a .yaml file, of the task multimodal_lm or of one of your own: every sample
    of its datasets is read, and the first 20 problems are listed.
    """
    if sources[0].endswith((".yaml", ".yml")):
        return _validate_task(sources, as_json)
    from trainkit.data.dataset_file import is_dataset
    from trainkit.data.sources import DatasetSpec, find_inputs
    from trainkit.data.tokenize import Tokenizer
    from trainkit.data.validate import LineProblem, validate_shards, validate_texts

    problems: list[LineProblem] = []

    def on_problem(problem: LineProblem) -> None:
        if as_json:
            problems.append(problem)
        else:
            click.echo(problem.render())

    paths = [_absolute(source) for source in sources]
    folders = [Path(path) for path in paths if is_dataset(Path(path))]
    texts = find_inputs(DatasetSpec(tuple(path for path in paths if Path(path) not in folders)))
    used = Tokenizer(tokenizer if tokenizer == "bytes" else str(Path(tokenizer).absolute()))
    summaries = [validate_shards(folder, on_problem) for folder in folders]
    for text in texts:
        summaries.append(validate_texts(text, text_key, used, on_problem))
        if not as_json:
            click.echo("".join(f"{note}\n" for note in summaries[-1].notes()), nl=False)
    if as_json:
        value = {"files": [asdict(one) for one in summaries], "problems": [asdict(one) for one in problems]}
        click.echo(json.dumps(value, ensure_ascii=False))
    num_problems = sum(one.problems for one in summaries)
    click.echo(
        f"{len(summaries):,} sources: {sum(one.lines for one in summaries):,} lines, "
        f"{sum(one.documents for one in summaries):,} documents, "
        f"{sum(one.tokens for one in summaries):,} tokens ({used.identity.name}), "
        f"{sum(one.empty for one in summaries):,} empty; {num_problems:,} problems",
        err=True,
    )
    return 1 if num_problems else 0


def _validate_task(sources: tuple[str, ...], as_json: bool) -> int:
    """Read every sample of the task of a config."""
    from trainkit.config import load_config
    from trainkit.submit.trainer_process import sample_problems

    if len(sources) > 1:
        raise UsageError(f"{sources[0]} is a config, which names its files", hint="validate it by itself")
    loaded = load_config(Path(sources[0]))
    name = loaded.config.task
    if not loaded.config.has_user_task:
        raise UsageError(f"{sources[0]} has the task {name}", hint="name the files of data.source instead")
    found = [f"{key} {message}" for key, message in sample_problems(loaded)]
    if as_json:
        click.echo(json.dumps({"task": name, "problems": found}, ensure_ascii=False))
    else:
        more = [f"{name}: {len(found) - MAX_SHOWN:,} more problems"] if len(found) > MAX_SHOWN else []
        click.echo("".join(f"{line}\n" for line in [*found[:MAX_SHOWN], *more]), nl=False)
    click.echo(f"every sample of {name} was read: {len(found):,} problems", err=True)
    return EXIT_FAILED if found else EXIT_OK


def _absolute(source: str) -> str:
    return source if source == "stdlib" else str(Path(source).absolute())


@command.command(
    short_help="Show the samples of a step of a run.",
    epilog=examples("trainkit data show last --step 3", "trainkit data show last --step 3 --rank 0 --json"),
)
@run_argument
@click.option("--step", type=click.IntRange(min=1), required=True, metavar="N", help="Step of the run.")
@click.option(
    "--rank", type=click.IntRange(min=0), metavar="R", help="Only the samples that this rank reads."
)
@json_option
def show(run_name: str, step: int, rank: int | None, as_json: bool) -> int:
    """Show the samples of a step of RUN, in the order of the global batch, without computing it.

    Each with its index in the dataset, the rank and microbatch that read it, the source file and position of
    its documents, and the beginning of its text. Any step can be shown, also one that is still to come.
    """
    from trainkit.replay.steps import find_step, step_samples
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
