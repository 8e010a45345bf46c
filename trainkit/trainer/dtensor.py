"""Between a split tensor and the part of it that this rank holds."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(shard: Tensor, whole: Tensor) -> Tensor:
    """A shard, seen as part of a tensor that is split as `whole` is."""
    if not isinstance(whole, DTensor):
        return shard
    # Not `from_local`, which would copy what lives on the host to the device of the mesh.
    return DTensor(shard, whole._spec, requires_grad=False)  # type: ignore[no-untyped-call]
