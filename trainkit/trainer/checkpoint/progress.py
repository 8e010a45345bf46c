"""Where a training stands, apart from its tensors: a handful of numbers kept in the manifest."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Progress:
    """Counts what has been done; every number is the same on all ranks."""

    step: int = 0
    samples_seen: int = 0
    """Position in the data: samples consumed so far, over all epochs."""
    tokens_seen: int = 0
    last_eval_step: int = -1
    best_value: float | None = None
    best_step: int | None = None
    nonfinite_in_a_row: int = 0
    loss_scale: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Progress:
        return cls(**value)
