"""Define the contents of a checkpoint: tensors with layout-independent names, counters and object states."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainkit.errors import FatalError
from trainkit.formats import JsonObject
from trainkit.run.rollbacks import Ranges, Rollback, merged
from trainkit.trainer.distributed import World
from trainkit.trainer.models.model import Weight, local_tensor
from trainkit.trainer.optimizers.interface import ShardedOptimizer
from trainkit.trainer.split_master import SplitMaster, master_of
from trainkit.trainer.step_sync import copy_from_main

OF_CAPABILITIES = "capability/"
"""Prefix of the names of tensors that capabilities add to checkpoints."""


def state_prefix(capability: str) -> str:
    """Return the prefix of the names of a capability's tensors in checkpoints."""
    return f"{OF_CAPABILITIES}{capability}/"


def owner_prefix(name: str) -> str | None:
    """Return the prefix of a tensor's name if a capability added the tensor, otherwise None."""
    return state_prefix(name.split("/")[1]) if name.startswith(OF_CAPABILITIES) else None


class StateTensors:
    """This rank's shards of the weights, of the optimizer state and of the state of capabilities."""

    def __init__(
        self,
        weights: Sequence[Weight],
        optimizer: ShardedOptimizer,
        buffers: Mapping[str, Tensor] | None = None,
        added: Iterable[tuple[str, Tensor]] = (),
    ) -> None:
        """`added` contains the names and tensors of the state of capabilities."""
        self.tensors: dict[str, Tensor | SplitMaster] = {}
        self.duplicates: list[tuple[Tensor, Tensor]] = []
        """Pairs of tensors with equal values; a checkpoint contains only the first tensor of each pair.

        Each pair is either a weight and its cast to the compute dtype, or two tied weights on a rank that has
        both the first and the last pipeline stage.
        """
        for name, buffer in (buffers or {}).items():
            self._add(f"buffer.{name}", buffer)
        for weight in weights:
            if weight.is_saved:
                self._add(f"model.{weight.name}", master_of(weight))
            if weight.cast is not None:
                self.duplicates.append((weight.param.detach(), weight.cast.detach()))
        for name, tensor in optimizer.state_tensors():
            self._add(f"optimizer.{name}", tensor)
        for name, tensor in added:
            self._add(name, tensor)

    def _add(self, name: str, tensor: Tensor | SplitMaster) -> None:
        if name in self.tensors:
            # A rank with both ends of a pipeline splits no weights.
            self.duplicates.append((cast(Tensor, self.tensors[name]), cast(Tensor, tensor)))
        else:
            self.tensors[name] = tensor

    @torch.no_grad()
    def copy_duplicates(self) -> None:
        """Copy each loaded tensor to the second tensor of its pair."""
        for loaded, duplicate in self.duplicates:
            local_tensor(duplicate).copy_(local_tensor(loaded))


class StateBuffers:
    """The persistent buffers of a model; a forward pass may modify or replace them."""

    def __init__(self, model: nn.Module) -> None:
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        self.tensors: dict[str, Tensor] = {}
        """Maps names to the buffers that a checkpoint contains."""
        state = model.state_dict()
        for name, buffer in model.named_buffers():
            if name in state:
                path, _, key = name.rpartition(".")
                self._owners[name], self.tensors[name] = (model.get_submodule(path), key), buffer

    @torch.no_grad()
    def settle(self, world: World) -> None:
        """Restore the original buffer objects, with new values, and copy rank 0's values to all ranks."""
        for name, (module, key) in self._owners.items():
            saved, now = self.tensors[name], module.get_buffer(key)
            if now is not saved:
                saved.copy_(now)
                setattr(module, key, saved)
        copy_from_main(list(self.tensors.values()), world)


@dataclass(frozen=True)
class StreamState:
    """The position of a data stream before the last sample of a step, and a digest of that sample.

    A resumed run rereads the sample to check that the stream is at the right position.
    """

    epoch: int
    samples: int
    """Number of samples read in the epoch before the step's last sample."""
    state: Any
    """Result of the stream's ``state_dict()`` at this position; None if a resumed run must reread earlier
    samples."""
    digest: str


@dataclass
class TrainingState:
    """The counters of a training run, equal on all ranks; stored in manifests under the key `progress`."""

    step: int = 0
    samples_seen: int = 0
    """Number of samples trained so far, over all epochs. Together with `skipped`, this number determines the
    position in the data."""
    tokens_seen: int = 0
    last_eval_step: int = -1
    best_value: float | None = None
    best_step: int | None = None
    best_metric: str | None = None
    """Name of the metric of `best_value`, and whether lower or higher is better; None if no best metric is
    configured."""
    nonfinite_in_a_row: int = 0
    has_updated_weights: bool = False
    """True once any step has updated the weights; steps are skipped as long as fp16 gradients overflow."""
    loss_scale: dict[str, float] = field(default_factory=dict)
    stream: StreamState | None = None
    """Position of the data stream; set only on rank 0."""
    skipped: Ranges = ()
    """Positions of the samples that the run leaves out."""
    num_rollbacks: int = 0
    """Number of rollbacks of the run on which this state is based."""
    hooks: dict[str, JsonObject] = field(default_factory=dict)
    """Values of the hooks of capabilities, by capability."""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TrainingState:
        stream, skipped = value.get("stream"), merged(value.get("skipped", ()))
        stream = None if stream is None else StreamState(**stream)
        return cls(**{**value, "stream": stream, "skipped": skipped})

    def apply(self, rollbacks: Sequence[Rollback]) -> None:
        """Leave out the samples of all rollbacks of the run that this state does not contain yet."""
        later = rollbacks[self.num_rollbacks :]
        self.skipped = merged(self.skipped, *(item.skipped for item in later))
        self.num_rollbacks = len(rollbacks)


def encode(path: str, value: Any, tensors: dict[str, Tensor]) -> Any:
    """Convert a state to JSON, adding its tensors to `tensors` and replacing each with its path.

    Raises FatalError if the state contains a value that JSON cannot represent.
    """
    if isinstance(value, Tensor):
        if path in tensors:
            raise FatalError(
                f"{path} cannot be saved: two tensors of the state have this path",
                hint="rename a key: paths collide if a key contains a dot, or if both 0 and '0' are keys",
            )
        tensors[path] = value.detach()
        return {"tensor": path}
    if isinstance(value, Mapping):
        return {"items": [[key, encode(f"{path}.{key}", item, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        items = [encode(f"{path}.{index}", item, tensors) for index, item in enumerate(value)]
        return {type(value).__name__ if type(value) in (list, tuple) else "list": items}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise FatalError(
        f"{path} cannot be saved: it is a {type(value).__name__}",
        hint="use only tensors, numbers, strings, lists and dictionaries in a tracked state_dict",
    )


def tensor_paths(value: object) -> Iterator[str]:
    """Yield the paths of all tensors in a state converted by `encode`."""
    if isinstance(value, dict):
        [(kind, content)] = value.items()
        if kind == "tensor":
            yield content
        for item in [] if kind == "tensor" else content:
            yield from tensor_paths(item[1] if kind == "items" else item)


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Rebuild a state from its tensors and the JSON returned by `encode`."""
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "items":
        return {key: decode(item, tensors) for key, item in content}
    items = [decode(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items
