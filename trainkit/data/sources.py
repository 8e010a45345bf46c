"""List the sources in a config with their weights, and find the folders of their token shards.

Dry runs use this module, so it imports neither numpy nor tokenizers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import cast

from trainkit.config.training import DataConfig
from trainkit.data.dataset_file import VAL, check_made_by, identify, is_dataset, read_dataset_file
from trainkit.errors import UsageError
from trainkit.shipped import text_preparer

STDLIB = "stdlib"
"""A source available on every machine: the Python files of the interpreter's standard library."""


def prepared_folder(config: DataConfig) -> Path | None:
    """Return the prepared dataset that `data.source` refers to, or None for texts or a mixture."""
    sources = () if is_mixture(config) else listed(config.source)
    if len(sources) == 1 and sources[0] != STDLIB and is_dataset(Path(sources[0])):
        return Path(sources[0])
    return None


MAX_PERIOD = 100_000
"""Maximum period of the schedule that interleaves a mixture's sources; the weights are rounded
accordingly."""


def is_mixture(config: DataConfig) -> bool:
    """Return whether `data.source` maps sources to weights."""
    return isinstance(config.source, Mapping)


def components(config: DataConfig) -> list[DataConfig]:
    """Return one config per source of a mixture, in order; without a mixture, return only `config`.

    If `data.val_source` is set, it is prepared together with the first source that is not a prepared dataset,
    and no validation data is split off from any source. The configs of prepared datasets keep
    `data.val_source`, so that the key is rejected, as it is for a single dataset.
    """
    if not isinstance(config.source, Mapping):
        return [config]
    parts: list[DataConfig] = []
    is_prepared_with_texts = False
    for name in config.source:
        fraction = 0.0 if config.val_source else config.val_fraction
        part = config.model_copy(update={"source": name, "val_fraction": fraction})
        if prepared_folder(part) is None:
            if is_prepared_with_texts:
                part = part.model_copy(update={"val_source": None})
            is_prepared_with_texts = True
        parts.append(part)
    return parts


def integer_weights(config: DataConfig) -> tuple[int, ...]:
    """Return a mixture's weights in lowest terms, such as (7, 3) for 0.7 and 0.3.

    The sum of the weights is at most about `MAX_PERIOD`. Weights that would need a larger sum are rounded,
    but not below 1.
    """
    shares = [Fraction(str(weight)) for weight in cast(Mapping[str, float], config.source).values()]
    scale = math.lcm(*(share.denominator for share in shares))
    weights = [int(share * scale) for share in shares]
    for rounded in (weights, [max(1, round(MAX_PERIOD * share / sum(shares))) for share in shares]):
        divisor = math.gcd(*rounded)
        weights = [weight // divisor for weight in rounded]
        if sum(weights) <= MAX_PERIOD:
            break
    return tuple(weights)


def refuse_val_source(config: DataConfig, folder: Path) -> None:
    """Raise UsageError if `data.val_source` is set for a prepared dataset, which has its own `val` split."""
    if listed(config.val_source):
        raise UsageError(
            f"data.val_source is set, but {folder} is a prepared dataset with its own validation split",
            hint="remove data.val_source, or set data.source to the source texts of the dataset",
        )


def listed(source: str | Sequence[str] | Mapping[str, float] | None) -> tuple[str, ...]:
    """Return the sources in a config value as a tuple, which may be empty."""
    if source is None:
        return ()
    assert not isinstance(source, Mapping), "a mixture has one config per source"
    return (source,) if isinstance(source, str) else tuple(source)


def has_validation(config: DataConfig, checks_sizes: bool = True) -> bool:
    """Return whether a config's data has a `val` split, preparing the data first if necessary."""
    folders = [ensure_prepared(part, checks_sizes) for part in components(config)]
    return any(read_dataset_file(folder).num_tokens(VAL) > 0 for folder in folders)


def ensure_prepared(config: DataConfig, checks_sizes: bool = True) -> Path:
    """Return the folder that contains the token shards for a config that is not a mixture.

    If `data.source` is a prepared dataset, it is used directly, with its own tokenizer. Other sources are
    tokenized once and cached. If several processes call this function at the same time, one of them prepares
    the data while the others wait. If `checks_sizes` is True, a cached dataset with missing or truncated
    shards is prepared again. Raises UsageError if a source is unusable or the cache is not writable.
    """
    folder = prepared_folder(config)
    if folder is None:
        return text_preparer()(config, checks_sizes)
    refuse_val_source(config, folder)
    wanted, used = identify(config.tokenizer), read_dataset_file(folder).tokenizer
    check_made_by(config.tokenizer, wanted, folder, used)
    return folder
