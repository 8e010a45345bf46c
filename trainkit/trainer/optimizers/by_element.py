"""Update local parameter shards element by element, clipping gradients and skipping updates on the device.

The classes in this folder differ in the formula that computes an element's new values. Everything else is the
same for all of them: split master weights, casts to the compute dtype, running averages in low precision, and
compiled kernels for large shards.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import FunctionType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from trainkit.config.training import OptimizerConfig
from trainkit.plan.launch import Layout
from trainkit.plan.optimizer_state import StateDtype, state_of
from trainkit.trainer.distributed import ONE_PROCESS
from trainkit.trainer.models.model import Weight, as_shard_of
from trainkit.trainer.optimizers.interface import ShardedOptimizer, groups_of
from trainkit.trainer.quantization import QuantizedAverage, code_values
from trainkit.trainer.split_master import SplitMaster, in_float32, join, row_pieces, split
from trainkit.trainer.torch_private import any_length, copy_each

COMPILED_DEVICES = ("cuda",)
"""Device types on which the optimizer update is compiled. CPU shards are offloaded or belong to short runs,
where compilation would take more time than it saves."""
WHOLE_ELEMENTS = 1 << 24
"""Minimum size, in elements, at which a shard with float32 averages is updated by its own compiled kernel, if
the optimizer has a fused kernel.

The fused kernel updates smaller shards: launching a compiled kernel takes as long as updating 10 million
elements on a GPU.
"""
PIECE_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Number of elements converted to float32 at a time on each type of device. On a CPU, the converted elements
fit in its cache.
"""
Average = Tensor | QuantizedAverage
"""A state with one number per element, such as the running average of the gradient."""


class Rates(NamedTuple):
    """The learning rate and the decoupled weight decay of a parameter group in one step."""

    lr: float
    weight_decay: float


class Piece(NamedTuple):
    """Some rows of a shard, with their gradient and averages."""

    weight: Tensor | SplitMaster
    grad: Tensor
    averages: tuple[Average, ...]
    step: Tensor | None
    """The number of updates of the shard, if the optimizer counts them."""


class ByElement(ShardedOptimizer):
    """An optimizer that computes an element's new values only from values of the same element."""

    counts_steps: ClassVar[bool] = False
    """True if the formula depends on the number of earlier updates, which a checkpoint then contains."""
    has_fused_kernel: ClassVar[bool] = False
    """True if `_update_pieces` updates several shards in place with one kernel."""

    def __init__(
        self,
        weights: Sequence[Weight],
        config: OptimizerConfig,
        layout: Layout = ONE_PROCESS,
        *,
        compiled: bool = False,
    ) -> None:
        """If `compiled`, use compiled kernels on GPUs for large shards and low-precision averages."""
        super().__init__(weights, layout)
        self._config = config
        self._groups = groups_of(self._weights, self._locals, config)
        self._compiles = compiled and self._locals[0].device.type in COMPILED_DEVICES
        self._averages: dict[nn.Parameter, dict[str, Average]] = {}
        self._steps: dict[nn.Parameter, Tensor] = {}
        dtypes: set[StateDtype] = set()
        for shard, weight in zip(self._locals, self._weights, strict=True):
            state = state_of(config, weight.param.shape)
            dtypes.update(state.values())
            self._averages[shard] = {
                name: _zero_average(name, dtype, shard, weight) for name, dtype in state.items()
            }
            if self.counts_steps:
                self._steps[shard] = torch.zeros((), dtype=torch.float32, device=shard.device)
        self._has_kernel = self.has_fused_kernel and dtypes <= {"fp32"}
        """True if the fused kernel can update shards without converting their averages."""

    @staticmethod
    @abstractmethod
    def formula(
        weight: Tensor,
        grad: Tensor,
        averages: Sequence[Tensor],
        step: Tensor | None,
        lr: float | Tensor,
        weight_decay: float | Tensor,
        *constants: float,
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the new values of some elements and of their averages; do not modify any tensor.

        All tensors except `step` have the same shape and are in float32. `step` is the number of earlier
        updates. The formula must also be correct if torch.compile compiles it.
        """

    @abstractmethod
    def _constants(self) -> tuple[float, ...]:
        """Return the `constants` of the formula."""

    @torch.no_grad()
    def step(self, lr: float, divisor: Tensor, skip: Tensor) -> None:
        # Offloaded parameters are on the host. torch would copy `divisor` and `skip` to the host
        # asynchronously, before their values are computed.
        divisor, skip = (value.to(self._locals[0].device) for value in (divisor, skip))
        casts, counted = dict(self._casts), 1 - skip
        for group in self._groups:
            rates = Rates(lr * group.lr_scale, group.weight_decay)
            # Pass the numbers as tensors on the device, because torch.compile would recompile for each new
            # number.
            on_device = [torch.full((), rate, device=skip.device) for rate in rates]
            rest: list[nn.Parameter] = []
            for shard in group.shards:
                if (grad := shard.grad) is None:
                    continue
                if not (self._compiles and self._is_compiled(shard, grad)):
                    rest.append(shard)
                    continue
                averages = (*self._averages[shard].values(),)
                weight = self._split.get(shard, shard.detach())
                count = self._steps.get(shard)
                update = _compiled_update(self.formula, _row_part(*averages))
                weights, own_casts, grads, *states = _flat(weight, casts.pop(shard, None), grad, *averages)
                update(
                    weights, own_casts, grads, states, count, *on_device, divisor, skip, *self._constants()
                )
                if count is not None:
                    count += counted
            for batch in self._batches(rest, skip.device.type):
                self._update_pieces(batch, rates, divisor, skip)
        if casts:
            copy_each(list(casts.values()), [shard.detach() for shard in casts])

    def _is_compiled(self, shard: nn.Parameter, grad: Tensor) -> bool:
        is_large = shard.numel() >= (WHOLE_ELEMENTS if self._has_kernel else 1)
        return is_large and shard.is_contiguous() and grad.is_contiguous()

    def _batches(self, shards: list[nn.Parameter], device: str) -> Iterator[list[Piece]]:
        """Yield pieces of shards that are updated together.

        The fused kernel updates all shards at once that are not converted. Other small shards are updated
        together, and large shards some rows at a time, because their update needs memory for copies.
        """
        whole = [shard for shard in shards if self._has_kernel and shard not in self._split]
        if whole:
            yield [piece for shard in whole for piece in self._pieces(shard, shard.numel())]
            shards = [shard for shard in shards if shard in self._split]
        batch: list[Piece] = []
        num_elements = 0
        for shard in shards:
            for piece in self._pieces(shard, PIECE_ELEMENTS[device]):
                if batch and num_elements + piece.weight.numel() > PIECE_ELEMENTS[device]:
                    yield batch
                    batch, num_elements = [], 0
                batch.append(piece)
                num_elements += piece.weight.numel()
        if batch:
            yield batch

    def _pieces(self, shard: nn.Parameter, max_elements: int) -> Iterator[Piece]:
        """Yield the pieces of a shard; the update of the last piece counts the step."""
        whole, count = self._split.get(shard, shard.detach()), self._steps.get(shard)
        # The fused kernel ignores strides, so split only shards whose rows lie one after another in memory.
        has_rows = shard.dim() > 0 and shard.stride(0) == shard.shape[1:].numel()
        most = max_elements if has_rows else shard.numel()
        pieces = [*row_pieces(most, whole, shard.grad, *self._averages[shard].values())]
        for number, (weight, grad, *averages) in enumerate(pieces, 1):
            step = count if count is None or number == len(pieces) else count.clone()
            yield Piece(weight, grad, tuple(averages), step)

    def _update_pieces(self, pieces: list[Piece], rates: Rates, divisor: Tensor, skip: Tensor) -> None:
        """Update some pieces; a skipped step leaves the averages unchanged, without rounding them again.

        The pieces are joined to one tensor, so that the number of kernels does not depend on their number.
        """
        is_skipped = skip > 0
        stored = [*zip(*(piece.averages for piece in pieces), strict=True)]
        with in_float32([piece.weight for piece in pieces]) as weights:
            weight, grad = _joined(weights), _joined([piece.grad for piece in pieces])
            averages = [_joined([*map(in_full_precision, items)]) for items in stored]
            updated, new_averages = self.formula(
                weight, grad / divisor, averages, None, *rates, *self._constants()
            )
            _store(torch.where(is_skipped, weight, updated), weights)
        for items, before, after in zip(stored, averages, new_averages, strict=True):
            _store(torch.where(is_skipped, before, after), items)

    def state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for weight, shard in zip(self._weights, self._locals, strict=True):
            for kind, average in self._averages[shard].items():
                name = f"{weight.name}.{kind}"
                if isinstance(average, QuantizedAverage):
                    yield f"{name}.codes", as_shard_of(average.codes, weight.param)
                    yield f"{name}.scales", as_shard_of(average.scales, weight.param)
                else:
                    yield name, as_shard_of(average, weight.param)
            if shard in self._steps:
                yield f"{weight.name}.step", self._steps[shard]


def _zero_average(name: str, dtype: StateDtype, shard: Tensor, weight: Weight) -> Average:
    """Return the initial value of an average of a shard."""
    if dtype == "8bit":
        values = code_values(is_signed=name != "exp_avg_sq").to(shard.device)
        return QuantizedAverage.zeros(shard, weight.param, weight.name, values)
    return torch.zeros_like(shard, dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of all tensors in one dimension; a single contiguous tensor is not copied."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _store(values: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy the elements of `values` to the tensors that `_joined` joined."""
    parts = torch.split(values, [tensor.numel() for tensor in tensors])
    copy_each([*tensors], [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)])


def in_full_precision(average: Average) -> Tensor:
    """Return an average in float32; an average that is stored in float32 is not copied."""
    return average.dequantize() if isinstance(average, QuantizedAverage) else average.float()


def round_average(average: Average, updated: Tensor, skip: Tensor) -> None:
    """Round the updated float32 value of an average and store it, or do nothing if `skip` is 1."""
    if isinstance(average, QuantizedAverage):
        average.quantize(updated, skip)
    elif average is not updated:
        average.copy_(updated)


def _row_part(*items: object) -> int | None:
    """Return the number of elements in each part of a row if one of the items is a quantized average."""
    return next((item.part for item in items if isinstance(item, QuantizedAverage)), None)


def _flat(*items: Tensor | SplitMaster | QuantizedAverage | None) -> Iterator[list[Tensor]]:
    """Yield flat views of a shard and its averages, so that `_update` compiles once for all shapes."""
    part = _row_part(*items)
    for item in items:
        if isinstance(item, QuantizedAverage):
            yield [*map(any_length, item.parts()), item.values]
        else:
            tensors = item.halves if isinstance(item, SplitMaster) else () if item is None else (item,)
            yield [any_length(item.view(-1) if part is None else item.view(-1, part)) for item in tensors]


Formula = Callable[..., tuple[Tensor, Sequence[Tensor]]]


def _update(
    formula: Formula,
    weights: list[Tensor],
    casts: list[Tensor],
    grads: list[Tensor],
    states: list[list[Tensor]],
    step: Tensor | None,
    lr: Tensor,
    weight_decay: Tensor,
    divisor: Tensor,
    skip: Tensor,
    *constants: float,
) -> None:
    """Update a shard with operations that torch.compile can fuse with casts.

    A split master weight is passed as its two halves. A quantized average is passed as a list of tensors,
    because torch.compile would treat its integer attributes as dynamic.
    """
    weight, (grad,) = join(*weights) if len(weights) == 2 else weights[0], grads
    stored = [tensors[0] if len(tensors) == 1 else QuantizedAverage.of_parts(*tensors) for tensors in states]
    averages = [in_full_precision(average) for average in stored]
    updated, new_averages = formula(weight, grad / divisor, averages, step, lr, weight_decay, *constants)
    is_skipped = skip > 0
    updated = torch.where(is_skipped, weight, updated)
    for half, value in zip(weights, split(updated) if len(weights) == 2 else [updated], strict=True):
        half.copy_(value)
    for cast in casts:
        cast.copy_(updated)
    for average, before, after in zip(stored, averages, new_averages, strict=True):
        round_average(average, torch.where(is_skipped, before, after), skip)


@cache
def _compiled_update(formula: Formula, row_part: int | None) -> Callable[..., None]:
    """Return a compiled copy of `_update` for a formula, and for averages whose rows have parts of this size.

    The size is static, so each size is compiled. torch.compile runs a function eagerly after it has compiled
    the function for 8 kinds of arguments, and counts these for each code object.
    """
    code = _update.__code__.replace(co_name=f"update rows of {row_part}")
    compiled: Any = torch.compile(FunctionType(code, _update.__globals__))

    def update(*args: Any) -> None:
        compiled(formula, *args)

    return update
