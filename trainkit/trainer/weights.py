"""The parameters that a rank holds, by their names in the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

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


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(shard: Tensor, whole: Tensor) -> Tensor:
    """A shard, seen as part of a tensor that is split as `whole` is."""
    if not isinstance(whole, DTensor):
        return shard
    # Not `from_local`, which would copy what lives on the host to the device of the mesh.
    return DTensor(shard, whole._spec, requires_grad=False)  # type: ignore[no-untyped-call]
