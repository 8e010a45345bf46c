"""The parameters that a rank holds, by their names in the whole model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from trainkit.frozen import dataclass
from trainkit.trainer.models.model import Model


@dataclass(frozen=True)
class Weight:
    """One parameter of a rank, or its shard of one."""

    name: str
    param: nn.Parameter
    is_copy: bool = False
    """It counts on another stage of the pipeline: the head, where it is the embedding."""


def weights_of(parts: Sequence[Model]) -> list[Weight]:
    """The weights of all parts of the model that this rank has."""
    found = []
    for part in parts:
        for name, param in part.named_parameters():
            whole = part.canonical(name)
            found.append(Weight(whole, param, is_copy=whole != name))
    return found
