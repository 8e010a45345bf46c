"""Define the interface through which any layout can split a model and access its parameters by name.

An architecture is a single file that defines a subclass of `Model`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainkit.plan.model_shape import ModelShape
from trainkit.task import ParameterOptions
from trainkit.trainer.torch_private import shard_like, shard_offset

Role = Literal["embedding", "norm", "stream", "experts", "whole_input", "column", "heads", "row", "head"]
"""Roles that determine how tensor parallelism splits a module or its inputs.

``column`` splits a weight matrix by its outputs, and ``row`` by its inputs. ``whole_input`` gathers the whole
sequence before the module is called. Modules with the role ``norm`` or ``stream`` process each position
separately, and receive only this rank's slice of the sequence. So do modules with the role ``experts``, whose
parameters with three dimensions have a matrix for each expert. Modules with the role ``heads`` process each
attention head [B, T, heads, C] separately, and receive only this rank's heads. Every module with parameters
of its own needs a role other than ``whole_input``.
"""


DEFAULT_OPTIONS = ParameterOptions()
HeadLoss = Callable[[Tensor, Tensor], Tensor]
"""Computes the loss (0-dim, float32) from hidden states [B, T, D] and the head's weight matrix [vocab, D]."""


ReadWeight = Callable[[str, Sequence[slice]], Tensor]
"""Returns a slice of a parameter's initial value, given the parameter's name and one slice per dimension."""


@dataclass(frozen=True)
class StageSpec:
    """The parts of a model that belong to one pipeline stage."""

    layers: range
    has_embedding: bool = True
    has_head: bool = True

    @classmethod
    def whole(cls, num_layers: int) -> StageSpec:
        return cls(range(num_layers))


@dataclass(frozen=True)
class PositionSlice:
    """The positions in a sequence that this rank processes, as int64 tensors."""

    attention: Tensor
    """Positions whose attention queries this rank computes."""
    stream: Tensor
    """Positions in this rank's residual stream; with sequence parallelism, fewer than in `attention`."""

    @classmethod
    def all(cls, seq_len: int) -> PositionSlice:
        positions = torch.arange(seq_len, device="cpu")  # the default device may be meta
        return cls(positions, positions)


class Model(nn.Module):
    """A model, or one pipeline stage of a model.

    A parameter has the same name in every pipeline stage that contains it. If the stage has the embedding,
    `forward(x, sample_keys)` takes token ids [B, T], otherwise the residual stream [B, T, D]. If the stage
    has the head, `forward` returns logits [B, T, vocab], otherwise the residual stream.
    """

    TENSOR_PLAN: ClassVar[dict[str, Role]] = {}
    """Maps module names to roles; ``*`` matches one component of a dotted module name."""
    TIED: ClassVar[dict[str, str]]
    """For tied embeddings, maps the second name of each shared parameter to its first name."""
    COMPUTES_LOSS: ClassVar[bool] = False
    """True if `forward` accepts a `HeadLoss` as `loss` and returns the loss, which saves the memory for the
    logits."""

    def __init__(self, shape: ModelShape, seq_len: int, stage: StageSpec | None = None) -> None:
        """Create the modules of `stage`, or of the whole model if `stage` is None."""
        super().__init__()
        self.shape = shape
        self.is_tied = shape.tie_embeddings

    @staticmethod
    @abstractmethod
    def num_params(shape: ModelShape) -> int:
        """Return the number of parameters, counting tied parameters once."""

    @staticmethod
    @abstractmethod
    def flops_per_token(shape: ModelShape, seq_len: int) -> float:
        """Return the FLOPs per token in a training step (forward and backward), excluding recomputation."""

    @property
    @abstractmethod
    def layers(self) -> list[nn.Module]:
        """Return the repeated layers in order; each layer is compiled, recomputed and sharded as a unit."""

    @property
    def ends(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """Return the modules before and after the `layers`; large modules are sharded as separate units.

        Modules that are in neither of the returned lists are sharded together with the root module.
        """
        return [], []

    @property
    @abstractmethod
    def attentions(self) -> list[nn.Module]:
        """Return the modules whose `attend(q, k, v)` method context parallelism replaces."""

    @property
    @abstractmethod
    def stream_shape(self) -> tuple[int, int]:
        """Return the number of positions and the width of this rank's residual stream for one sample."""

    @abstractmethod
    def set_positions(self, position_slice: PositionSlice) -> None:
        """Make the model process only the given positions of each sequence."""

    @abstractmethod
    def rebuild_buffers(self) -> None:
        """Recompute the buffers and retie the weights, because `to_empty` discards both."""

    @abstractmethod
    def init_std(self, name: str) -> float | None:
        """Return the standard deviation of a parameter's initial values, or None for norm weights (ones)."""

    def tie(self) -> None:
        """Tie shared parameters that are both in this stage; call this whenever parameters are replaced."""
        if not self.is_tied:
            return
        params = dict(self.named_parameters(remove_duplicate=False))
        for later, first in self.TIED.items():
            if later in params and first in params:
                set_tensor(self, later, params[first])

    def canonical(self, name: str) -> str:
        """Return the name under which a parameter is saved; for a tied parameter, this is its first name."""
        return self.TIED.get(name, name) if self.is_tied else name

    def role(self, module_name: str) -> Role | None:
        """Return a module's role in `TENSOR_PLAN`, or None if the plan does not contain the module."""
        found = (role for pattern, role in self.TENSOR_PLAN.items() if matches(pattern, module_name))
        return next(found, None)

    @property
    def projections(self) -> set[str]:
        """Return the names of the matrices that tensor parallelism splits in the `layers`, and of experts."""
        layers, num_dims = {*self.layers}, {"column": 2, "row": 2, "experts": 3}
        return {
            f"{path}.{name}"
            for layer, own in self.named_modules()
            if own in layers
            for path, module in own.named_modules(prefix=layer)
            if (role := self.role(path)) in num_dims
            for name, param in module.named_parameters(recurse=False)
            if param.dim() == num_dims[role]
        }

    @property
    def tied_names(self) -> set[str]:
        """Return the canonical names of tied weights."""
        return set(self.TIED.values()) if self.is_tied else set()


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a module name; ``*`` matches one component of the name."""
    components, patterns = name.split("."), pattern.split(".")
    return len(patterns) == len(components) and all(map(fnmatchcase, components, patterns))


@dataclass(frozen=True)
class Weight:
    """A parameter, or this rank's shard of it."""

    name: str
    param: nn.Parameter
    """The parameter that the optimizer updates: in float32, or the upper half of a split master weight."""
    is_copy: bool = False
    """True if the parameter is tied to a parameter in another stage, where the shared weight is counted."""
    cast: nn.Parameter | None = None
    """The model's own parameter if it is a cast of `param` to the compute dtype, otherwise None."""
    lower: Tensor | None = None
    """The lower half if `param` is the upper half of a split master weight, otherwise None."""
    options: ParameterOptions = DEFAULT_OPTIONS
    is_read: bool = False
    """True if `BuiltModel.read_weight` reads the parameter's initial value from files."""
    is_reread: bool = False
    """True if the parameter has the same initial value at every start of the run."""
    is_changed: bool = False
    """True if code other than the optimizer may change the parameter."""
    is_projection: bool = False
    """True if the parameter is one of the `projections` of a `Model`."""

    @property
    def is_saved(self) -> bool:
        """Return whether checkpoints contain the parameter; constants that can be reread are omitted."""
        may_change = self.param.requires_grad or self.is_changed
        return may_change or not (self.is_read or self.is_reread)


def weights_of(
    model_parts: Sequence[Model],
    masters: Mapping[nn.Parameter, nn.Parameter] | None = None,
    lowers: Mapping[nn.Parameter, Tensor] | None = None,
    is_read: bool = False,
) -> list[Weight]:
    """Return the weights of this rank's model parts.

    `masters` maps casts to float32 master weights, and `lowers` maps the upper halves of split master weights
    to the lower halves.
    """
    masters, lowers, found = masters or {}, lowers or {}, []
    for model in model_parts:
        projections = model.projections
        for name, param in model.named_parameters():
            canonical = model.canonical(name)
            is_copy = canonical != name
            master, cast = (masters[param], param) if param in masters else (param, None)
            weight = Weight(canonical, master, is_copy, cast, lowers.get(param), is_read=is_read)
            found.append(replace(weight, is_projection=name in projections))
    return found


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move a model's buffers, but not its parameters, to a device in place."""
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
    for first, *others in names.values():  # `to_empty` unties the parameters, so tie them again
        for other in others:
            set_tensor(module, other, module.get_parameter(first))
    for name, param in module.named_parameters():
        if name in kept:
            local_tensor(param).copy_(kept[name])
    for name, buffer in buffers.items():
        set_tensor(module, name, buffer)


def shared_names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return a mapping from each parameter to all its names; tied parameters have several names."""
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, param in model.named_parameters(remove_duplicate=False):
        names[param].append(name)
    return names


def set_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace the parameter or buffer with this name in a model."""
    owner, _, key = name.rpartition(".")
    setattr(model.get_submodule(owner), key, tensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard if the tensor is a DTensor, otherwise the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_index(param: Tensor) -> list[slice]:
    """Return the position of this rank's shard within the full tensor, as one slice per dimension."""
    offset = shard_offset(param) if isinstance(param, DTensor) else (0,) * param.dim()
    return [slice(start, start + size) for start, size in zip(offset, local_tensor(param).shape, strict=True)]


def as_shard_of(shard: Tensor, whole: Tensor) -> Tensor:
    """Return a shard as a DTensor that is sharded like `whole`, or unchanged if `whole` is not a DTensor.

    Shard and `whole` may differ in the number of columns if each rank has the same fraction of columns in
    both.
    """
    return shard_like(shard, whole) if isinstance(whole, DTensor) else shard
