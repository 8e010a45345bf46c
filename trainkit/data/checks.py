"""What can be said about a config's data before anything starts: names, sizes and a few lines.

Imports neither numpy nor tokenizers: `submit --dry-run` runs these checks.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from trainkit.data.cache import CACHE_HINT, cache_folder, cache_key, cannot_be_written
from trainkit.data.dataset_file import SPLITS, TRAIN, VAL, check_shard_sizes, is_dataset, read_dataset_file
from trainkit.data.recipe import DataConfig, Recipe, prepared_folder, recipe_of, refuse_val_source
from trainkit.data.sources import BOTH, ROWS, Input, find_inputs
from trainkit.data.tokenizer_identity import check_made_by, identify, vocab_size
from trainkit.data.units import PartReader, RowError, open_input, plan_units, row_text
from trainkit.errors import UsageError

DataProblem = tuple[str, str, str]
"""Dotted key, message with the value, hint."""
T = TypeVar("T")

_READ_IN_FULL = 2 << 20
"""Bytes of text that are looked at in full; of more, only sizes and the first rows of some files."""
_FILES_OPENED = 8
_ROWS_READ = 20
_LONGEST_ROW = 1 << 20


def data_problems(config: DataConfig) -> list[DataProblem]:
    """Everything that is certain to be wrong with the data of a config, as far as it can be told quickly.

    `trainkit data validate` reads all of it.
    """
    problems: list[DataProblem] = []
    folder = prepared_folder(config)
    if folder is not None:
        _try(problems, "data.source", lambda: _check_shards(folder))
        if not problems:
            file = read_dataset_file(folder)
            _try(problems, "data.tokenizer", lambda: check_made_by(config.tokenizer, folder, file.tokenizer))
            made = {split: file.num_tokens(split) for split in SPLITS}
            _try(problems, "data.val_source", lambda: refuse_val_source(config, folder))
            problems += _length_problems(config, made, made[VAL] > 0)
        return problems
    _try(problems, "data.tokenizer", lambda: identify(config.tokenizer))
    recipe = recipe_of(config)
    main = Recipe(recipe.sources, val_fraction=recipe.split_fraction)
    inputs = _try(problems, "data.source", lambda: find_inputs(main)) or []
    if recipe.val_sources:
        separate = Recipe((), val_sources=recipe.val_sources)
        inputs += _try(problems, "data.val_source", lambda: find_inputs(separate)) or []
    if problems:
        return problems
    counts = _try(problems, "data.source", lambda: _most_tokens(recipe, inputs))
    if counts is None:
        return problems
    cache = cache_folder(config)
    if not is_dataset(cache / cache_key(recipe, inputs)) and cannot_be_written(cache):
        problems.append(("data.cache_dir", f"{cache} cannot be written", CACHE_HINT))
    return problems + _length_problems(config, counts, bool(recipe.val_sources or recipe.val_fraction))


def tokenizer_vocab_size(config: DataConfig) -> int:
    """Rows that an embedding needs for the tokens of a config: the largest id plus one.

    Raises UsageError when the tokenizer or the prepared dataset cannot be read.
    """
    folder = prepared_folder(config)
    return vocab_size(config.tokenizer) if folder is None else read_dataset_file(folder).tokenizer.vocab_size


def _try(problems: list[DataProblem], key: str, look: Callable[[], T]) -> T | None:
    """The result of a look, or None and one problem more."""
    try:
        return look()
    except UsageError as error:
        problems.append((key, error.message, error.hint))
    except OSError as error:
        problems.append((key, f"{error.filename} cannot be read: {error.strerror}", ""))
    return None


def _check_shards(folder: Path) -> None:
    file = read_dataset_file(folder)
    for split in SPLITS:
        check_shard_sizes(folder, file, split)


def _most_tokens(recipe: Recipe, inputs: list[Input]) -> dict[str, float]:
    """Tokens of each split: no tokenizer makes more, the byte tokenizer makes as many of a small text.

    Raises UsageError for a row that cannot be used, among those that are looked at.
    """
    compressed = any(source.compressed for source in inputs)
    if not compressed and sum(source.size for source in inputs) <= _READ_IN_FULL:
        return _count_bytes(recipe, inputs)
    for source in [source for source in inputs if source.form == ROWS][:_FILES_OPENED]:
        _check_first_rows(source, recipe.text_key)
    if compressed:
        return {TRAIN: math.inf, VAL: math.inf}
    counts: dict[str, float] = {TRAIN: 0, VAL: 0}
    for source in inputs:
        if source.role != BOTH:
            counts[source.role] += source.size + 1
        elif source.form == ROWS:
            counts = {split: count + source.size for split, count in counts.items()}
        else:
            counts[TRAIN] += source.size + 1
            counts[VAL] += round(source.size * recipe.split_fraction) + 1
    return counts


def _count_bytes(recipe: Recipe, inputs: list[Input]) -> dict[str, float]:
    """Bytes and ends of documents in each split, counted by reading."""
    counts: dict[str, float] = {TRAIN: 0, VAL: 0}
    for unit in plan_units(inputs, recipe.split_fraction):
        for number, part in enumerate(unit.parts):
            source = inputs[part.input]
            for piece in PartReader(source, part, unit.index, number, recipe.split_fraction, recipe.text_key):
                counts[piece.split] += len(piece.text) + piece.ends_document
    return counts


def _check_first_rows(source: Input, text_key: str) -> None:
    try:
        with open_input(source) as stream:
            lines = [stream.readline(_LONGEST_ROW) for _ in range(_ROWS_READ)]
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{source.path} cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        if len(line) == _LONGEST_ROW:
            return
        try:
            if line.strip():
                row_text(line, text_key)
        except RowError as error:
            raise UsageError(
                f"{source.path}:{number}: {error}",
                hint=f"`trainkit data validate {source.path}` lists every such row",
            ) from None


def _length_problems(config: DataConfig, counts: Mapping[str, float], val_wanted: bool) -> list[DataProblem]:
    needed = config.seq_len + 1
    train, val = counts[TRAIN], counts[VAL]
    if train < 2:
        return [
            (
                "data.source",
                f"{_named(config.source)} holds no text to train on",
                "name a file with text in it",
            )
        ]
    if train < needed:
        message = f"{config.seq_len} is more than the data holds: at most {train:,} tokens to train on"
        hint = f"set data.seq_len to at most {train - 1:.0f}, or give more text"
        return [("data.seq_len", message, hint)]
    if not val_wanted or val >= needed:
        return []
    share = math.ceil(1000 * needed / (train + val)) / 1000
    message = f"at most {val:,} tokens are left for validation, fewer than data.seq_len {config.seq_len} + 1"
    if config.val_source:
        return [("data.val_source", f"{_named(config.val_source)}: {message}", "give more text there")]
    enough = f"set it to {share:g}, or to 0 to do without validation" if share <= 0.5 else "give more text"
    return [("data.val_fraction", f"{config.val_fraction:g}: {message}", enough)]


def _named(source: str | Sequence[str]) -> str:
    return source if isinstance(source, str) else ", ".join(source)
