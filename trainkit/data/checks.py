"""Check the data in a config before a run starts, using only names, file sizes and a few lines of data.

`submit --dry-run` runs the checks in this module, so the module imports neither numpy nor tokenizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from trainkit.config.training import DataConfig
from trainkit.data.dataset_file import (
    SPLITS,
    TRAIN,
    VAL,
    TokenizerIdentity,
    check_made_by,
    checked_dataset,
    identify,
    read_dataset_file,
    refuse_several,
)
from trainkit.data.sources import (
    components,
    integer_weights,
    is_mixture,
    listed,
    prepared_folder,
    refuse_val_source,
)
from trainkit.errors import KeyProblem, UsageError
from trainkit.shipped import text_inspector

ANY_VOCABULARY = 1
"""Vocabulary size assumed if the data cannot be read, so that other sizes can still be checked."""
T = TypeVar("T")


@dataclass(frozen=True)
class DataFacts:
    """Known properties of a config's data, determined without tokenizing any text."""

    problems: tuple[KeyProblem, ...] = ()
    vocab_size: int = ANY_VOCABULARY
    """Number of rows that the embedding needs: the largest token id plus one."""
    mixture: str | None = None
    """Description of each source's share in a mixture; None if the data is not a mixture."""


def inspect_data(config: DataConfig) -> DataFacts:
    """Return properties of the data that are quick to determine: the vocabulary size, and definite problems.

    Unlike this function, `trainkit data validate` reads all of the data.
    """
    unknown: list[KeyProblem] = []
    tokenizer = collect(unknown, "data.tokenizer", lambda: identify(config.tokenizer))
    found: list[KeyProblem] = []
    used: list[tuple[str, TokenizerIdentity]] = []
    for part in components(config):
        name = _named(part.source)
        problems, identity = _inspect_source(part, tokenizer, unknown)
        for key, message, hint in problems:
            about_source = is_mixture(config) and key in ("data.seq_len", "data.val_fraction")
            found.append((key, f"{name}: {message}" if about_source else message, hint))
        if identity is not None:
            used.append((name, identity))
    if not found:
        collect(found, "data.source", lambda: refuse_several(used))
    vocab_size = ANY_VOCABULARY if found else used[0][1].vocab_size
    mixture = None
    if is_mixture(config):
        weights = integer_weights(config)
        shares = (f"{100 * weight / sum(weights):.4g}%" for weight in weights)
        mixture = ", ".join(map(" ".join, zip(shares, config.source, strict=True)))
    return DataFacts(tuple(dict.fromkeys(found)), vocab_size, mixture)


def _inspect_source(
    config: DataConfig, tokenizer: TokenizerIdentity | None, unknown: Sequence[KeyProblem]
) -> tuple[list[KeyProblem], TokenizerIdentity | None]:
    """Return the problems with one source, and the tokenizer that produced its tokens.

    `tokenizer` is the tokenizer set in the config; if it is None, `unknown` contains the reasons why it is
    unknown.
    """
    problems: list[KeyProblem] = []
    folder = prepared_folder(config)
    if folder is not None:
        file = collect(problems, "data.source", lambda: checked_dataset(folder))
        if file is None:
            return problems, None
        if tokenizer is None:
            problems += unknown
        else:
            wanted, used = tokenizer, file.tokenizer
            collect(problems, "data.tokenizer", lambda: check_made_by(config.tokenizer, wanted, folder, used))
        made = {split: file.num_tokens(split) for split in SPLITS}
        collect(problems, "data.val_source", lambda: refuse_val_source(config, folder))
        return problems + _length_problems(config, made, made[VAL] > 0), file.tokenizer
    problems += unknown
    found, counts = text_inspector()(config, tokenizer)
    problems += found
    if counts is not None:
        has_val = bool(listed(config.val_source) or config.val_fraction)
        problems += _length_problems(config, counts, has_val)
    return problems, tokenizer


def tokenizer_vocab_size(config: DataConfig) -> int:
    """Return the vocabulary size for a config: the largest token id plus one.

    Raises UsageError if the tokenizer or the prepared dataset cannot be read.
    """
    folder = prepared_folder(components(config)[0])
    used = identify(config.tokenizer) if folder is None else read_dataset_file(folder).tokenizer
    return used.vocab_size


def collect(problems: list[KeyProblem], key: str, check: Callable[[], T]) -> T | None:
    """Return the result of a check; if it raises an error, add the problem to `problems` and return None."""
    try:
        return check()
    except UsageError as error:
        problems.append((key, error.message, error.hint))
    except OSError as error:
        problems.append((key, f"{error.filename} cannot be read: {error.strerror}", "check the path"))
    return None


def _length_problems(config: DataConfig, counts: Mapping[str, float], val_wanted: bool) -> list[KeyProblem]:
    needed = config.seq_len + 1
    train, val = counts[TRAIN], counts[VAL]
    if train < 2:
        message = f"{_named(config.source)} contains no text to train on"
        return [("data.source", message, "use a file that contains text")]
    if train < needed:
        message = f"{config.seq_len} is too long: the data contains at most {train:,} tokens for training"
        hint = f"set data.seq_len to at most {train - 1:.0f}, or add more text"
        return [("data.seq_len", message, hint)]
    if not val_wanted or val >= needed:
        return []
    message = f"at most {val:,} tokens remain for validation, fewer than data.seq_len {config.seq_len} + 1"
    if config.val_source:
        return [
            ("data.val_source", f"{_named(config.val_source)}: {message}", "add more text to data.val_source")
        ]
    hint = "increase data.val_fraction, set it to 0 to disable validation, or add more text"
    return [("data.val_fraction", f"{config.val_fraction:g}: {message}", hint)]


def _named(source: str | Iterable[str]) -> str:
    return source if isinstance(source, str) else ", ".join(source)
