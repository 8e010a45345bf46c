"""The interface with which every layout can split a model, and access to parameters by name.

An architecture is one file with a subclass of `Model`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainkit.plan.model_shape import ModelShape
from trainkit.task import ParameterOptions
from trainkit.trainer.torch_private import shard_like, shard_offset

Role = Literal["embedding", "norm", "stream", "whole_input", "column", "row", "head"]
"""Names how tensor parallelism splits a module.

``column`` and ``row`` split a matrix by its outputs and by its inputs. ``whole_input`` gathers the whole
sequence. A ``norm``, or another position-wise module of the ``stream``, gets only this rank's slice of the
sequence. Every module with its own parameters needs a role other than ``whole_input``.
"""


DEFAULT_OPTIONS = ParameterOptions()
HeadLoss = Callable[[Tensor, Tensor], Tensor]
"""Computes the loss, float32 [], of hidden states [B, T, D] and the weight [vocab, D] of the head."""


ReadWeight = Callable[[str, Sequence[slice]], Tensor]
"""Returns a slice of the initial value of a parameter, given its name and one slice per dimension."""


@dataclass(frozen=True)
class StageSpec:
    """The modules of one pipeline stage."""

    layers: range
    has_embedding: bool = True
    has_head: bool = True

    @classmethod
    def whole(cls, num_layers: int) -> StageSpec:
        return cls(range(num_layers))


@dataclass(frozen=True)
class PositionSlice:
    """The positions of a sequence that a rank processes, as int64 tensors."""

    attention: Tensor
    """Positions of the rank's queries."""
    stream: Tensor
    """Positions of the rank's residual stream; fewer with sequence parallelism."""

    @classmethod
    def all(cls, seq_len: int) -> PositionSlice:
        positions = torch.arange(seq_len, device="cpu")  # on the CPU even if the default device is meta
        return cls(positions, positions)


class Model(nn.Module):
    """A model, or one pipeline stage of a model.

    A parameter has the same name in every stage. `forward(x, sample_keys)` takes token ids [B, T] if the
    stage has the embedding, else the residual stream [B, T, D]. `forward` returns logits [B, T, vocab] if the
    stage has the head, else the residual stream.
    """

    TENSOR_PLAN: ClassVar[dict[str, Role]]
    """Maps module names to roles; ``*`` matches one component of a name."""
    TIED: ClassVar[dict[str, str]]
    """Maps the later to the first name of parameters that share a weight if embeddings are tied."""
    COMPUTES_LOSS: ClassVar[bool] = False
    """True if `forward` takes a `HeadLoss` as `loss` and returns the loss, which saves memory for logits."""

    def __init__(self, shape: ModelShape, seq_len: int, stage: StageSpec | None = None) -> None:
        """Create the modules of `stage`, or of the whole model if `stage` is None."""
        super().__init__()
        self.shape = shape
        self.is_tied = shape.tie_embeddings

    @staticmethod
    @abstractmethod
    def num_params(shape: ModelShape) -> int:
        """Return the number of parameters; tied parameters count once."""

    @staticmethod
    @abstractmethod
    def flops_per_token(shape: ModelShape, seq_len: int) -> float:
        """Return the FLOPs per token of a training step, forward and backward, without recomputation."""

    @property
    @abstractmethod
    def layers(self) -> list[nn.Module]:
        """Return the repeated layers in order, which are units of compilation, recomputation and sharding."""

    @property
    def ends(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """Return the modules before and after the `layers`, which are units of sharding if they are large.

        Modules in neither list are gathered and reduced with the whole model.
        """
        return [], []

    @property
    @abstractmethod
    def attentions(self) -> list[nn.Module]:
        """Return the modules whose `attend(q, k, v)` gets full sequences; context parallelism replaces it."""

    @property
    @abstractmethod
    def stream_shape(self) -> tuple[int, int]:
        """Return (positions, width) of this rank's residual stream for one sample."""

    @abstractmethod
    def set_positions(self, position_slice: PositionSlice) -> None:
        """Restrict the model to some positions of each sequence."""

    @abstractmethod
    def rebuild_buffers(self) -> None:
        """Recompute the buffers and tie the weights again, because `to_empty` loses both."""

    @abstractmethod
    def init_std(self, name: str) -> float | None:
        """Return the standard deviation of a parameter's initial values; None for ones (norm weights)."""

    def tie(self) -> None:
        """Tie parameters that are both in this stage; call this again after parameters are replaced."""
        if not self.is_tied:
            return
        params = dict(self.named_parameters(remove_duplicate=False))
        for later, first in self.TIED.items():
            if later in params and first in params:
                set_tensor(self, later, params[first])

    def canonical(self, name: str) -> str:
        """Return the name under which a parameter is saved, which is the first name of tied parameters."""
        return self.TIED.get(name, name) if self.is_tied else name

    @property
    def tied_names(self) -> set[str]:
        """Return the canonical names of tied weights."""
        return set(self.TIED.values()) if self.is_tied else set()


@dataclass(frozen=True)
class Weight:
    """One parameter, or this rank's shard of a parameter."""

    name: str
    param: nn.Parameter
    """The float32 parameter that the optimizer updates and a checkpoint contains."""
    is_copy: bool = False
    """True if the parameter is tied to a parameter of another stage, which counts the weight."""
    cast: nn.Parameter | None = None
    """The parameter of the model, if it is a cast of `param` to the compute dtype; else None."""
    options: ParameterOptions = DEFAULT_OPTIONS
    is_read: bool = False
    """True if `BuiltModel.read_weight` reads the initial value from files."""
    is_reread: bool = False
    """True if the parameter has the same value at every start, as long as nothing changes it."""
    is_changed: bool = False
    """True if code other than the optimizer may change the parameter."""

    @property
    def is_saved(self) -> bool:
        """Return whether checkpoints contain the parameter; fixed values are read from files instead."""
        may_change = self.param.requires_grad or self.is_changed
        return may_change or not (self.is_read or self.is_reread)


def weights_of(
    model_parts: Sequence[Model],
    masters: Mapping[nn.Parameter, nn.Parameter] | None = None,
    is_read: bool = False,
) -> list[Weight]:
    """Return the weights of all model parts of this rank; `masters` maps a cast to its float32 master."""
    found = []
    for model in model_parts:
        for name, param in model.named_parameters():
            canonical = model.canonical(name)
            is_copy = canonical != name
            master, cast = (masters[param], param) if masters else (param, None)
            found.append(Weight(canonical, master, is_copy, cast, is_read=is_read))
    return found


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move the buffers of a model, but not its parameters, in place."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


@torch.no_grad()
def allocate(module: nn.Module, device: torch.device) -> None:
    """Allocate memory for parameters on the meta device; all other tensors keep their values."""
    if not any(param.is_meta for param in module.parameters()):
        return
    values = {name: param for name, param in module.named_parameters() if not param.is_meta}
    kept = {name: local_tensor(param).clone() for name, param in values.items()}
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers(remove_duplicate=False)}
    names = shared_names(module)
    module.to_empty(device=device)
    for first, *others in names.values():  # `to_empty` has separated tied parameters
        for other in others:
            set_tensor(module, other, module.get_parameter(first))
    for name, param in module.named_parameters():
        if name in kept:
            local_tensor(param).copy_(kept[name])
    for name, buffer in buffers.items():
        set_tensor(module, name, buffer)


def shared_names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return all names of each parameter; tied parameters have several names."""
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, param in model.named_parameters(remove_duplicate=False):
        names[param].append(name)
    return names


def set_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace a parameter or buffer of a model by its name in the model."""
    owner, _, key = name.rpartition(".")
    setattr(model.get_submodule(owner), key, tensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_index(param: Tensor) -> list[slice]:
    """Return the position of this rank's shard in the whole tensor, as one slice per dimension."""
    offset = shard_offset(param) if isinstance(param, DTensor) else (0,) * param.dim()
    return [slice(start, start + size) for start, size in zip(offset, local_tensor(param).shape, strict=True)]


def as_shard_of(shard: Tensor, whole: Tensor) -> Tensor:
    """Return a shard as a DTensor that is split like `whole`, or unchanged if `whole` is not a DTensor.

    The shard may have another number of columns than `whole` if all ranks have the same share of columns.
    """
    return shard_like(shard, whole) if isinstance(whole, DTensor) else shard
