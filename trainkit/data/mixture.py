"""Mixtures: several sources with weights, each tokenised or prepared as if it were the only one.

Imports neither numpy nor tokenizers: `trainkit.data.checks` uses it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import cast

from trainkit.config.training import DataConfig
from trainkit.data.sources import prepared_folder

MAX_PERIOD = 100_000
"""Samples after which the order of the sources repeats, at most: weights are rounded to parts of it."""


def is_mixture(config: DataConfig) -> bool:
    """Whether `data.source` maps sources to weights."""
    return isinstance(config.source, Mapping)


def components(config: DataConfig) -> list[DataConfig]:
    """One config per source of a mixture, in order; any other config is its own component.

    `data.val_source` is prepared with the first texts, and nothing is held out of the others. Prepared
    datasets keep the key too, so that it is refused as it is for a single one.
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
    """The weights of a mixture in lowest terms, such as (7, 3) for 0.7 and 0.3.

    Their sum is at most about `MAX_PERIOD`; weights that need a larger one are rounded, to at least 1.
    """
    weights = [Fraction(str(weight)) for weight in cast(Mapping[str, float], config.source).values()]
    scale = math.lcm(*(weight.denominator for weight in weights))
    exact = _lowest_terms([int(weight * scale) for weight in weights])
    if sum(exact) <= MAX_PERIOD:
        return exact
    return _lowest_terms([max(1, round(MAX_PERIOD * weight / sum(weights))) for weight in weights])


def _lowest_terms(weights: list[int]) -> tuple[int, ...]:
    divisor = math.gcd(*weights)
    return tuple(weight // divisor for weight in weights)


def describe_weights(config: DataConfig) -> str:
    """The normalised weights, as ``70% web.jsonl, 30% code``."""
    weights = integer_weights(config)
    return ", ".join(
        f"{100 * weight / sum(weights):.4g}% {name}"
        for name, weight in zip(config.source, weights, strict=True)
    )
