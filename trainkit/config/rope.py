"""Defines how a rotary position embedding can be extended to longer contexts."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields

from trainkit.config.training import RopeType


@dataclass(frozen=True)
class LinearScaling:
    """Stretches all wavelengths of the rotary position embedding by `factor` (arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Stretches long wavelengths by `factor`, as in Llama 3.1; short wavelengths stay unchanged."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: float


@dataclass(frozen=True)
class YarnScaling:
    """Stretches long wavelengths by `factor` and sharpens attention (YaRN, arXiv 2309.00071).

    Wavelengths that fit into the original context more than `beta_fast` times stay unchanged, and wavelengths
    that fit fewer than `beta_slow` times are stretched by the whole factor.
    """

    factor: float
    original_max_position_embeddings: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """Factor applied to queries and keys; None computes the factor from `factor`, as in the paper."""


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling
ROPE_SCALINGS: dict[RopeType, type[RopeScaling]] = {
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
}


def scaling_keys(kind: RopeType) -> dict[str, bool]:
    """Map the keys of a scaling to whether they are required."""
    return {item.name: item.default is MISSING for item in fields(ROPE_SCALINGS[kind])}


def scaling_values(scaling: RopeScaling | None) -> dict[str, object] | None:
    """Return the value of `model.rope_scaling` for a scaling, or None without a scaling."""
    if scaling is None:
        return None
    [kind] = [kind for kind, each in ROPE_SCALINGS.items() if isinstance(scaling, each)]
    return {"type": kind, **{key: value for key, value in vars(scaling).items() if value is not None}}
