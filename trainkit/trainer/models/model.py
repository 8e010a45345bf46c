"""The interface that lets every layout split a model, and its parameters by name.

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
"""How tensor parallelism splits a module: ``column`` and ``row`` split a matrix by its outputs and by its
inputs; ``whole_input`` gathers the whole sequence; a ``norm``, or another position-wise module of the
``stream``, gets only this rank's slice of the sequence. Every module with its own parameters needs a role
other than ``whole_input``."""


DEFAULT_OPTIONS = ParameterOptions()
HeadLoss = Callable[[Tensor, Tensor], Tensor]
"""The loss of hidden states [B, T, D] that the head's weight [vocab, D] projects to logits, float32 []."""


ReadWeight = Callable[[str, Sequence[slice]], Tensor]
"""The initial value of a parameter by its name, of which it returns the part at the slices."""


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
    """The positions of a sequence that a rank works on, int64 tensors."""

    attention: Tensor
    """Positions of its queries."""
    stream: Tensor
    """Positions of its residual stream; fewer with sequence parallelism."""

    @classmethod
    def all(cls, seq_len: int) -> PositionSlice:
        positions = torch.arange(seq_len, device="cpu")  # even if the default device is meta
        return cls(positions, positions)


class Model(nn.Module):
    """A model, or one pipeline stage of it.

    A parameter has the same name in every stage. `forward(x, sample_keys)` takes token ids [B, T] if the
    stage has the embedding, else the residual stream [B, T, D]; it returns logits [B, T, vocab] if it has the
    head, else the residual stream.
    """

    TENSOR_PLAN: ClassVar[dict[str, Role]]
    """Module name -> role; ``*`` matches one component of a name."""
    TIED: ClassVar[dict[str, str]]
    """Parameters that share a weight if embeddings are tied: later name -> first name."""
    COMPUTES_LOSS: ClassVar[bool] = False
    """Whether `forward` takes a `HeadLoss` as `loss` and then returns it instead of the logits, which saves
    the memory of all logits."""

    def __init__(self, shape: ModelShape, seq_len: int, stage: StageSpec | None = None) -> None:
        """Create the modules of `stage`, or the whole model if None."""
        super().__init__()
        self.shape = shape
        self.is_tied = shape.tie_embeddings

    @staticmethod
    @abstractmethod
    def num_params(shape: ModelShape) -> int:
        """Number of parameters; tied ones are counted once."""

    @staticmethod
    @abstractmethod
    def flops_per_token(shape: ModelShape, seq_len: int) -> float:
        """FLOPs per token of a training step, forward and backward, without recomputation."""

    @property
    @abstractmethod
    def layers(self) -> list[nn.Module]:
        """The repeated layers of this stage, in order: units of compilation, recomputation and sharding."""

    @property
    def ends(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """The modules of this stage before its `layers` and after them: units of sharding if they are large.

        What neither names is gathered and reduced with the whole model.
        """
        return [], []

    @property
    @abstractmethod
    def attentions(self) -> list[nn.Module]:
        """The modules whose `attend(q, k, v)` needs a whole sequence; context parallelism replaces it."""

    @property
    @abstractmethod
    def stream_shape(self) -> tuple[int, int]:
        """(positions, width) of this rank's residual stream for one sample."""

    @abstractmethod
    def set_positions(self, position_slice: PositionSlice) -> None:
        """Restrict the model to some positions of each sequence."""

    @abstractmethod
    def rebuild_buffers(self) -> None:
        """Recompute the buffers and tie the weights again: `to_empty` loses both."""

    @abstractmethod
    def init_std(self, name: str) -> float | None:
        """Standard deviation of a parameter's initial values by its name; None: ones (norm weights)."""

    def tie(self) -> None:
        """Tie parameters that are both in this stage; call again after parameters are replaced."""
        if not self.is_tied:
            return
        params = dict(self.named_parameters(remove_duplicate=False))
        for later, first in self.TIED.items():
            if later in params and first in params:
                set_tensor(self, later, params[first])

    def canonical(self, name: str) -> str:
        """The name under which a parameter is saved: its own, or for tied parameters that of the first."""
        return self.TIED.get(name, name) if self.is_tied else name

    @property
    def tied_names(self) -> set[str]:
        """The canonical names of tied weights."""
        return set(self.TIED.values()) if self.is_tied else set()


@dataclass(frozen=True)
class Weight:
    """One parameter, or this rank's shard of it."""

    name: str
    param: nn.Parameter
    """What the optimizer updates and a checkpoint has, in float32."""
    is_copy: bool = False
    """Whether it is tied to a parameter of another stage, which counts it."""
    cast: nn.Parameter | None = None
    """The parameter of the model where it is not `param` but a cast of it to the compute type."""
    options: ParameterOptions = DEFAULT_OPTIONS
    is_read: bool = False
    """Whether its initial value is read from files, by `BuiltModel.read_weight`."""
    is_reread: bool = False
    """Whether a start finds it as it is, if it never changes."""
    is_changed: bool = False
    """Whether something else than the optimizer may change it."""

    @property
    def is_saved(self) -> bool:
        """Whether a checkpoint has it: what never changes is read from the files again."""
        may_change = self.param.requires_grad or self.is_changed
        return may_change or not (self.is_read or self.is_reread)


def weights_of(
    model_parts: Sequence[Model],
    masters: Mapping[nn.Parameter, nn.Parameter] | None = None,
    is_read: bool = False,
) -> list[Weight]:
    """The weights of all model parts of this rank; `masters` has the float32 master of every cast."""
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
    """Give memory to the parameters that are on the meta device; all other tensors keep their values."""
    if not any(param.is_meta for param in module.parameters()):
        return
    values = {name: param for name, param in module.named_parameters() if not param.is_meta}
    kept = {name: local_tensor(param).clone() for name, param in values.items()}
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers(remove_duplicate=False)}
    names = shared_names(module)
    module.to_empty(device=device)
    for first, *others in names.values():  # tied parameters are separate now
        for other in others:
            set_tensor(module, other, module.get_parameter(first))
    for name, param in module.named_parameters():
        if name in kept:
            local_tensor(param).copy_(kept[name])
    for name, buffer in buffers.items():
        set_tensor(module, name, buffer)


def shared_names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """All names of each parameter: tied ones have several."""
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, param in model.named_parameters(remove_duplicate=False):
        names[param].append(name)
    return names


def set_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace a parameter or buffer of a model, by its name there."""
    owner, _, key = name.rpartition(".")
    setattr(model.get_submodule(owner), key, tensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_index(param: Tensor) -> list[slice]:
    """Where this rank's shard is in the whole tensor, per dimension."""
    offset = shard_offset(param) if isinstance(param, DTensor) else (0,) * param.dim()
    return [slice(start, start + size) for start, size in zip(offset, local_tensor(param).shape, strict=True)]


def as_shard_of(shard: Tensor, whole: Tensor) -> Tensor:
    """A shard as a DTensor that is split like `whole`; unchanged if `whole` is not a DTensor.

    It may have another number of columns than `whole`, if every rank's share of them is the same.
    """
    return shard_like(shard, whole) if isinstance(whole, DTensor) else shard
