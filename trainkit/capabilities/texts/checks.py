"""Checks a config's texts before a run starts: their names, their sizes and a few lines.

This module imports neither numpy nor tokenizers, because `submit --dry-run` performs the checks.
"""

from __future__ import annotations

import math
import zlib
from contextlib import suppress
from itertools import islice

from trainkit.capabilities.texts.cache import CACHE_HINT, cache_folder, cache_key, cannot_be_written
from trainkit.capabilities.texts.inputs import BOTH, ROWS, TEXT, DatasetSpec, Input, dataset_spec, find_inputs
from trainkit.config.training import DataConfig
from trainkit.data.checks import collect
from trainkit.data.dataset_file import TRAIN, VAL, TokenizerIdentity, is_dataset
from trainkit.errors import KeyProblem

_READ_IN_FULL = 2 << 20
"""Texts up to this many bytes are read completely; for larger texts, only the size and the first rows are
read."""
_FILES_OPENED = 8
_ROWS_READ = 20
_LONGEST_ROW = 1 << 20


def inspect_texts(
    config: DataConfig, tokenizer: TokenizerIdentity | None
) -> tuple[list[KeyProblem], dict[str, float] | None]:
    """Return problems found in a config's texts, and an upper bound for the number of tokens in each split.

    The upper bounds are None if the texts or the tokenizer cannot be read.
    """
    problems: list[KeyProblem] = []
    spec = dataset_spec(config)
    main = DatasetSpec(spec.sources, val_fraction=spec.split_fraction)
    inputs = collect(problems, "data.source", lambda: find_inputs(main)) or []
    if spec.val_sources:
        separate = DatasetSpec((), val_sources=spec.val_sources)
        inputs += collect(problems, "data.val_source", lambda: find_inputs(separate)) or []
    if problems or tokenizer is None:
        return problems, None
    counts = collect(problems, "data.source", lambda: _max_tokens(spec, inputs))
    cache = cache_folder(config)
    if (
        counts is not None
        and cannot_be_written(cache)
        and not is_dataset(cache / cache_key(spec, inputs, tokenizer))
    ):
        problems.append(("data.cache_dir", f"{cache} cannot be written", CACHE_HINT))
    return problems, counts


def _max_tokens(spec: DatasetSpec, inputs: list[Input]) -> dict[str, float]:
    """Return upper bounds for the tokens per split; they are exact for small texts with the byte tokenizer.

    A bound is infinite if a file is compressed, or if not all of its rows are read. Raises UsageError for an
    unusable row.
    """
    compressed = any(source.compressed for source in inputs)
    counts: dict[str, float] = {TRAIN: 0, VAL: 0}
    if not compressed and sum(source.size for source in inputs) <= _READ_IN_FULL:
        from trainkit.capabilities.texts.units import plan_units

        for unit in plan_units(spec, inputs):
            for reader in unit.readers():
                for piece in reader:
                    counts[piece.split] += len(piece.text) + piece.ends_document
        return counts
    for source in [source for source in inputs if source.form != TEXT][:_FILES_OPENED]:
        if source.form != ROWS or not _begins_with_a_long_line(source):
            from trainkit.capabilities.texts.units import InputSpan, SpanReader

            rows = SpanReader(InputSpan(source, 0, 0, None, TRAIN, True), spec)
            for _ in islice(rows, _ROWS_READ):
                pass
    if compressed or any(source.form != TEXT for source in inputs):
        return {TRAIN: math.inf, VAL: math.inf}
    for source in inputs:
        if source.role != BOTH:
            counts[source.role] += source.size + 1
        else:
            counts[TRAIN] += source.size + 1
            counts[VAL] += round(source.size * spec.split_fraction) + 1
    return counts


def _begins_with_a_long_line(source: Input) -> bool:
    """Return whether the first line is too long to be a row, as in a JSON file of several gigabytes."""
    from trainkit.capabilities.texts.units import open_input

    # Errors that occur here are reported later, when the whole file is read.
    with suppress(OSError, EOFError, zlib.error), open_input(source) as stream:
        return len(stream.readline(_LONGEST_ROW)) == _LONGEST_ROW
    return False
