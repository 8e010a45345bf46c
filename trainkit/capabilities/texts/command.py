"""Implements `trainkit data`: tokenizes texts into shards, validates texts and shards, and shows samples."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import click

from trainkit.cli.help import as_group, examples, option
from trainkit.cli.options import PATH, json_option
from trainkit.cli.output import json_text
from trainkit.errors import EXIT_FAILED, EXIT_OK, UsageError
from trainkit.formats import plural

MAX_SHOWN = 20
"""Maximum number of problems listed for a task."""

_tokenizer_option = option(
    "--tokenizer bytes|PATH", "Tokenizer: `bytes` (default) or the path of a tokenizer.json.", default="bytes"
)
_text_key_option = option(
    "--text-key KEY",
    "Field of each .jsonl row, or column of each table, that contains the text (default: text).",
    default="text",
)


@as_group(
    "data",
    "trainkit data prepare stdlib --out shards",
    "trainkit data validate stdlib",
    "trainkit data show last --step 3",
)
def command() -> None:
    """Prepare and validate training data, and show the samples of a step."""


@command.command(
    epilog=examples(
        "trainkit data prepare stdlib --out shards",
        "trainkit data prepare stdlib --out shards-split --val-fraction 0.05 --workers 2 --json",
    )
)
@click.argument("sources", nargs=-1, required=True, metavar="SRC...")
@option("--out DIR", "Folder to create.", required=True, type=PATH)
@_tokenizer_option
@option(
    "--val-fraction F",
    "Fraction of the text that is held out for validation (default: 0.01).",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.01,
)
@_text_key_option
@option("--workers N", "Number of processes (default: one per core).", type=click.IntRange(min=1))
@json_option("trainkit.capabilities.texts.prepare:PreparedJson")
def prepare(
    sources: tuple[str, ...],
    out: Path,
    tokenizer: str,
    val_fraction: float,
    text_key: str,
    workers: int | None,
    as_json: bool,
) -> None:
    """Tokenize text files into shards for training.

    SRC is a .txt, .jsonl, .txt.gz, .jsonl.gz or .parquet file, a Hugging Face dataset saved to disk, a folder
    that contains any of these, or the word stdlib, which stands for the source files of Python's standard
    library. Run the same command again to resume an interrupted preparation. Interruptions and the number of
    processes do not affect the result.
    """
    from trainkit.capabilities.texts.inputs import DatasetSpec
    from trainkit.capabilities.texts.prepare import prepare as prepare_folder
    from trainkit.capabilities.texts.prepare import progress_lines

    spec = DatasetSpec(
        tuple(_absolute(source) for source in sources),
        tokenizer=tokenizer if tokenizer == "bytes" else str(Path(tokenizer).absolute()),
        val_fraction=val_fraction,
        text_key=text_key,
    )
    num_workers = workers or len(os.sched_getaffinity(0))
    folder = out.absolute()
    file, was_there = prepare_folder(spec, folder, num_workers, progress_lines("preparing data"))
    if as_json:
        counts = {split: file.num_tokens(split) for split in file.splits}
        value = {
            "folder": str(folder),
            "was_there": was_there,
            "num_tokens": counts,
            "num_shards": sum(map(len, file.splits.values())),
            "tokenizer": asdict(file.tokenizer),
            "fingerprint": file.fingerprint,
        }
        click.echo(json_text(value))
        return
    if was_there:
        click.echo(f"{out} already contains this dataset: nothing to do", err=True)
    used = file.tokenizer
    click.echo(
        f"tokenizer {used.name}: {used.vocab_size:,} tokens, {used.eos_token} marks the end of a document",
        err=True,
    )
    for split in file.splits:
        click.echo(f"{split}: {file.num_tokens(split):,} tokens", err=True)
    click.echo(out)


@command.command(
    short_help="Check every line of texts, or every byte of shards.",
    epilog=examples("trainkit data validate stdlib", "trainkit data validate stdlib --json"),
)
@click.argument("sources", nargs=-1, required=True, metavar="SRC...")
@_tokenizer_option
@_text_key_option
@json_option("trainkit.capabilities.texts.validate:ValidatedJson")
def validate(sources: tuple[str, ...], tokenizer: str, text_key: str, as_json: bool) -> int:
    """Read the texts completely, and report each line or row that `trainkit data prepare` would reject.

    The report also counts rows that are empty or longer than 1 MiB, and lists the first of these rows. SRC is
    a source for `trainkit data prepare`, or a folder written by that command; shards in such a folder are
    compared with their recorded hashes. The exit code is 1 if there are problems.

    SRC can also be the .yaml config for a task other than causal_lm. For a config, every sample in the task's
    datasets is read, and the first 20 problems are listed.
    """
    if sources[0].endswith((".yaml", ".yml")):
        return _validate_task(sources, as_json)
    from trainkit.capabilities.texts.inputs import DatasetSpec, find_inputs
    from trainkit.capabilities.texts.tokenize import Tokenizer
    from trainkit.capabilities.texts.validate import LineProblem, validate_shards, validate_texts
    from trainkit.data.dataset_file import is_dataset

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
        click.echo(json_text(value))
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
    """Read every sample of the task in a config, and report problems."""
    from trainkit.config import load_config
    from trainkit.launch.trainer_process import task_problems

    if len(sources) > 1:
        raise UsageError(
            f"{sources[0]} is a config, which already specifies its data files", hint="validate it separately"
        )
    loaded = load_config(Path(sources[0]))
    name = loaded.config.task
    found = [f"{key} {message}" for key, message, _ in task_problems(loaded, "--samples")[0]]
    if as_json:
        click.echo(json_text({"task": name, "problems": found}))
    else:
        more = [f"{name}: {len(found) - MAX_SHOWN:,} more problems"] if len(found) > MAX_SHOWN else []
        click.echo("".join(f"{line}\n" for line in [*found[:MAX_SHOWN], *more]), nl=False)
    click.echo(f"every sample of {name} was read: {plural(len(found), 'problem')}", err=True)
    return EXIT_FAILED if found else EXIT_OK


def _absolute(source: str) -> str:
    return source if source == "stdlib" else str(Path(source).absolute())
