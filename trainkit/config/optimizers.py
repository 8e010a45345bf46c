"""Lists the optimizers, the state that each keeps for an element of a weight, and the config keys of each."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import JsonValue


@dataclass(frozen=True)
class OptimizerKind:
    """The properties of an optimizer that do not depend on the values of its config keys."""

    state: tuple[str, ...]
    """Names of the tensors that the optimizer keeps for each weight, with one number per element.

    The names are part of the names of tensors in checkpoints.
    """
    keys: frozenset[str]
    """The keys of the config section `optimizer` that apply to this optimizer, but not to all optimizers."""
    has_8bit_state: bool = False
    """True if the state of large matrices is stored with 8 bits per element."""
    defaults: Mapping[str, JsonValue] = field(default_factory=dict)
    """The defaults of keys that differ from the defaults of `OptimizerConfig`."""


OPTIMIZERS = {
    "adamw": OptimizerKind(("exp_avg", "exp_avg_sq"), frozenset({"betas", "eps", "state_dtype"})),
    "adamw_8bit": OptimizerKind(("exp_avg", "exp_avg_sq"), frozenset({"betas", "eps"}), has_8bit_state=True),
    "lion": OptimizerKind(("exp_avg",), frozenset({"betas", "state_dtype"}), defaults={"betas": [0.9, 0.99]}),
    "muon": OptimizerKind(
        ("exp_avg", "exp_avg_sq"),
        frozenset({"betas", "eps", "momentum", "ns_precision"}),
        defaults={"momentum": 0.95},
    ),
    "sgd": OptimizerKind(("momentum_buffer",), frozenset({"momentum", "nesterov", "state_dtype"})),
}
"""Maps each value of `optimizer.name`, except FILE.py:CLASS, to the properties of the optimizer."""
OWN = OptimizerKind((), frozenset({"options"}))
"""The properties of a user's optimizer, whose state is known only after its first step."""


def kind_of(name: str) -> OptimizerKind:
    """Return the properties of the optimizer that `optimizer.name` specifies."""
    return OPTIMIZERS.get(name, OWN)


def is_own(name: str) -> bool:
    """Return whether `optimizer.name` is FILE.py:CLASS, a user's optimizer."""
    return name not in OPTIMIZERS
