"""Update local parameter shards with AdamW, clipping gradients and skipping updates without extra passes.

Optimizers work on plain tensors, never on DTensors: element-wise updates do not depend on the sharding, and
plain tensors have much less dispatch overhead than DTensors. Only the global gradient norm depends on the
sharding.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from trainkit.config.training import OptimizerConfig
from trainkit.plan.launch import Layout
from trainkit.trainer.distributed import ONE_PROCESS
from trainkit.trainer.models.model import Weight, as_shard_of, local_tensor
from trainkit.trainer.quantization import QuantizedAverage, code_values, is_quantized
from trainkit.trainer.split_master import SplitMaster, in_float32, join, row_pieces, split
from trainkit.trainer.torch_private import any_length, copy_each, norm_of_each, scale_next_step

NORM_CHUNK = 1 << 16
COMPILED_DEVICES = ("cuda",)
"""Device types on which the optimizer update is compiled. CPU shards are offloaded or belong to short runs,
where compilation would take more time than it saves."""
TINY = 1e-30
"""Replaces 0 where a logarithm is computed, because the logarithm of 0 is not finite."""
WHOLE_ELEMENTS = 1 << 24
"""Minimum size, in elements, at which a shard with float32 averages is updated by its own compiled kernel.

torch's fused kernel updates smaller shards: launching a compiled kernel takes as long as updating 10 million
elements on a GPU.
"""
PIECE_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Number of elements converted to float32 at a time on each type of device, if master weights are split, or
if running averages are stored in bf16 or as 8-bit codes. On a CPU, the converted elements fit in its cache.
"""


class ShardedOptimizer(ABC):
    """Updates this rank's shards of the trained parameters and computes the gradient norm."""

    def __init__(self, weights: Sequence[Weight], layout: Layout) -> None:
        weights = [weight for weight in weights if weight.param.requires_grad]
        self._weights = weights
        self._params = [weight.param for weight in weights]
        self._locals = [nn.Parameter(local_tensor(param.detach())) for param in self._params]
        self._casts = {
            shard: local_tensor(weight.cast.detach())
            for shard, weight in zip(self._locals, weights, strict=True)
            if weight.cast is not None
        }
        self._split: dict[nn.Parameter, SplitMaster] = {}
        """Maps the shards that are upper halves of split master weights to these master weights."""
        for shard, weight in zip(self._locals, weights, strict=True):
            if weight.lower is not None:
                shard.grad_dtype = torch.float32
                self._split[shard] = SplitMaster(shard.detach(), weight.lower)
        self._by_share = self._group_by_share(layout.world_size // layout.pp)
        self.has_whole_gradient = set(self._by_share) == {1.0 / layout.world_size}
        """True if this rank has the full gradient and can compute its norm without communication."""
        if self.has_whole_gradient:
            self._by_share = {1.0: list(range(len(weights)))}

    def _group_by_share(self, stage_size: int) -> dict[float, list[int]]:
        """Group parameters by the factor applied to this rank's squares in the global sum of squares.

        Returns a mapping from factors to parameter indices. If a shard is replicated on n ranks of a pipeline
        stage, the factor is 1 / n on each of these ranks.
        """
        groups: dict[float, list[int]] = defaultdict(list)
        for index, weight in enumerate(self._weights):
            num_shards = 1
            if isinstance(weight.param, DTensor):
                mesh = weight.param.device_mesh
                split = [dim for dim, at in enumerate(weight.param.placements) if not at.is_replicate()]
                num_shards = math.prod(mesh.size(dim) for dim in split)
            groups[0.0 if weight.is_copy else num_shards / stage_size].append(index)
        return dict(groups)

    def begin_step(self, lr: float) -> float:
        """Begin a step; `lr` is from the config's schedule, and the result is the learning rate to log."""
        return lr

    def turns(self) -> Sequence[str]:
        """Return the optimizers that take turns in this step, or ("",) if the task has only one loss."""
        return ("",)

    @torch.no_grad()
    def collect_gradients(self, turn: str = "") -> None:
        """Pass the gradients to the optimizer; called after the last backward pass of an optimizer turn."""
        for shard, param in zip(self._locals, self._params, strict=True):
            shard.grad = None if param.grad is None else local_tensor(param.grad)

    def square_sum(self) -> Tensor:
        """Return the gradient's sum of squares, or only this rank's share unless `has_whole_gradient`."""
        total = torch.zeros((), dtype=torch.float64, device=self._locals[0].device)
        for share, indices in self._by_share.items():
            grads = [
                g for g in (self._locals[index].grad for index in indices) if g is not None and g.numel()
            ]
            if share and grads:
                norms = torch.stack(norm_of_each(_in_chunks(grads)))
                total += norms.double().square().sum() * share
        return total

    @abstractmethod
    def step(self, lr: float, divisor: Tensor, skip: Tensor) -> None:
        """Update the parameters with gradient / `divisor`, or do nothing if `skip` is 1.

        `divisor` and `skip` are 0-dim float32 tensors on the device, so that the host does not have to wait
        for their values.
        """

    def end_step(self) -> None:
        """Finish a step, after the last optimizer turn has updated its parameters."""
        return None

    def zero_grad(self) -> None:
        for shard, param in zip(self._locals, self._params, strict=True):
            shard.grad = None
            param.grad = None

    @abstractmethod
    def state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and tensor of each state; checkpoints are loaded into these tensors in place."""


class ShardedAdamW(ShardedOptimizer):
    """AdamW (arXiv 1711.05101) on this rank's shards of a model's parameters."""

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
        groups: dict[tuple[float, float], list[nn.Parameter]] = defaultdict(list)
        for shard, weight in zip(self._locals, self._weights, strict=True):
            decay, options = weight.options.weight_decay, weight.options
            if decay is None:
                # One-dimensional parameters are norm weights and biases, which are exempt from weight decay.
                decay = config.weight_decay if weight.param.dim() > 1 else 0.0
            groups[options.lr_scale, decay].append(shard)
        self._adamw = torch.optim.AdamW(
            [
                {"params": shards, "lr_scale": lr_scale, "weight_decay": decay}
                for (lr_scale, decay), shards in groups.items()
            ],
            lr=0.0,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        self._is_rounded = config.name == "adamw_8bit" or config.state_dtype != "fp32"
        self._compiles = compiled and self._locals[0].device.type in COMPILED_DEVICES
        values = {"exp_avg": code_values(is_signed=True), "exp_avg_sq": code_values(is_signed=False)}
        for shard, weight in zip(self._locals, self._weights, strict=True):
            self._adamw.state[shard] = {
                "step": torch.zeros((), dtype=torch.float32, device=shard.device),
                **{kind: _zero_average(shard, weight, config, values[kind]) for kind in values},
            }

    @torch.no_grad()
    def step(self, lr: float, divisor: Tensor, skip: Tensor) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = lr * group["lr_scale"]
        # Offloaded parameters are on the host. torch would copy `divisor` and `skip` to the host
        # asynchronously, before their values are computed.
        divisor, skip = (value.to(self._locals[0].device) for value in (divisor, skip))
        casts, updated, counted = dict(self._casts), dict[nn.Parameter, Tensor](), 1 - skip
        for group in self._adamw.param_groups:
            # Pass the numbers as tensors on the device, because torch.compile would recompile for each new
            # number.
            rates = [torch.full((), group[key], device=skip.device) for key in ("lr", "weight_decay")]
            numbers = *rates, divisor, skip, *group["betas"], group["eps"]
            converted: list[nn.Parameter] = []
            for shard in group["params"]:
                if (grad := shard.grad) is None:
                    continue
                state = self._adamw.state[shard]
                averages = state["exp_avg"], state["exp_avg_sq"]
                master = self._split.get(shard)
                if self._compiles and self._is_compiled(shard, grad):
                    weight = shard.detach() if master is None else master
                    tensors = _flat(weight, casts.pop(shard, None), grad, *averages)
                    _compiled_update(_row_part(*averages))(*tensors, state["step"], *numbers)
                    state["step"] += counted
                elif self._is_rounded or master is not None:
                    converted.append(shard)
                else:
                    continue
                updated[shard] = grad
            self._update_converted(converted, group, divisor, skip)
        for shard in updated:
            shard.grad = None
        # torch's fused kernel updates the remaining shards, with several shards per kernel launch.
        scale_next_step(self._adamw, divisor, skip)
        self._adamw.step()
        for shard, grad in updated.items():
            shard.grad = grad
        if casts:
            copy_each(list(casts.values()), [shard.detach() for shard in casts])

    def _is_compiled(self, shard: nn.Parameter, grad: Tensor) -> bool:
        is_large = shard.numel() >= (1 if self._is_rounded else WHOLE_ELEMENTS)
        return is_large and shard.is_contiguous() and grad.is_contiguous()

    def _update_converted(
        self, shards: list[nn.Parameter], group: dict[str, Any], divisor: Tensor, skip: Tensor
    ) -> None:
        """Update shards in float32 with the fused kernel; only what is stored is split or in low precision.

        The kernel requires weights, gradients and averages of the same dtype, so convert and update small
        shards together, and large shards some rows at a time.
        """
        batch: list[_Piece] = []
        num_elements = 0
        for shard in shards:
            for piece in self._pieces(shard):
                if batch and num_elements + piece.weight.numel() > PIECE_ELEMENTS[skip.device.type]:
                    self._update_pieces(batch, group, divisor, skip)
                    batch, num_elements = [], 0
                batch.append(piece)
                num_elements += piece.weight.numel()
        if batch:
            self._update_pieces(batch, group, divisor, skip)

    def _pieces(self, shard: nn.Parameter) -> Iterator[_Piece]:
        """Yield the pieces of a shard; the update of the last piece counts the step."""
        state = self._adamw.state[shard]
        whole = self._split.get(shard, shard.detach())
        tensors = whole, shard.grad, state["exp_avg"], state["exp_avg_sq"]
        # The fused kernel ignores strides, so split only shards whose rows lie one after another in memory.
        has_rows = shard.dim() > 0 and shard.stride(0) == shard.shape[1:].numel()
        most = PIECE_ELEMENTS[shard.device.type] if has_rows else shard.numel()
        pieces = [*row_pieces(most, *tensors)]
        for number, (weight, grad, exp_avg, exp_avg_sq) in enumerate(pieces, 1):
            step = state["step"] if number == len(pieces) else state["step"].clone()
            yield _Piece(weight, grad, exp_avg, exp_avg_sq, step)

    def _update_pieces(
        self, pieces: list[_Piece], group: dict[str, Any], divisor: Tensor, skip: Tensor
    ) -> None:
        """Update some pieces; a skipped step leaves the averages unchanged, without rounding them again."""
        beta1, beta2 = group["betas"]
        averages = [average for piece in pieces for average in (piece.exp_avg, piece.exp_avg_sq)]
        new_averages = [*map(_in_float32, averages)]
        with in_float32([piece.weight for piece in pieces]) as weights:
            adamw(
                weights,
                [piece.grad for piece in pieces],
                new_averages[::2],
                new_averages[1::2],
                [],
                [piece.step for piece in pieces],
                fused=True,
                grad_scale=divisor,
                found_inf=skip,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
        for average, updated in zip(averages, new_averages, strict=True):
            _round(average, updated, skip)

    def state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for weight, shard in zip(self._weights, self._locals, strict=True):
            state, name = self._adamw.state[shard], weight.name
            for kind in ("exp_avg", "exp_avg_sq"):
                average = state[kind]
                if isinstance(average, QuantizedAverage):
                    yield f"{name}.{kind}.codes", as_shard_of(average.codes, weight.param)
                    yield f"{name}.{kind}.scales", as_shard_of(average.scales, weight.param)
                else:
                    yield f"{name}.{kind}", as_shard_of(average, weight.param)
            yield f"{name}.step", state["step"]


class _Piece(NamedTuple):
    """Some rows of a shard, with their gradient and averages."""

    weight: Tensor | SplitMaster
    grad: Tensor
    exp_avg: Tensor | QuantizedAverage
    exp_avg_sq: Tensor | QuantizedAverage
    step: Tensor


def _zero_average(
    shard: Tensor, weight: Weight, config: OptimizerConfig, values: Tensor
) -> Tensor | QuantizedAverage:
    """Return the initial running average; `values` are the values that 8-bit codes represent."""
    if config.name == "adamw_8bit" and is_quantized(weight.param):
        return QuantizedAverage.zeros(shard, weight.param, weight.name, values.to(shard.device))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[config.state_dtype]
    return torch.zeros_like(shard, dtype=dtype)


def _in_float32(average: Tensor | QuantizedAverage) -> Tensor:
    return average.dequantize() if isinstance(average, QuantizedAverage) else average.float()


def _round(average: Tensor | QuantizedAverage, updated: Tensor, skip: Tensor) -> None:
    """Round the updated float32 value of an average and store it, or do nothing if `skip` is 1."""
    if isinstance(average, QuantizedAverage):
        average.quantize(updated, skip)
    else:
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


def _update(
    weights: list[Tensor],
    casts: list[Tensor],
    grads: list[Tensor],
    exp_avg_tensors: list[Tensor],
    exp_avg_sq_tensors: list[Tensor],
    step: Tensor,
    lr: Tensor,
    weight_decay: Tensor,
    divisor: Tensor,
    skip: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """Compute the same update as the fused kernel, with operations that torch.compile can fuse with casts.

    A split master weight is passed as its two halves. A quantized average is passed as a list of tensors,
    because torch.compile would treat its integer attributes as dynamic.
    """
    weight, (grad,) = join(*weights) if len(weights) == 2 else weights[0], grads
    exp_avg, exp_avg_sq = (
        tensors[0] if len(tensors) == 1 else QuantizedAverage.of_parts(*tensors)
        for tensors in (exp_avg_tensors, exp_avg_sq_tensors)
    )
    grad, decayed = grad / divisor, weight - lr * weight_decay * weight
    first, second = _in_float32(exp_avg), _in_float32(exp_avg_sq)
    first_now = torch.lerp(first, grad, 1 - beta1)
    second_now = second * beta2 + (1 - beta2) * grad * grad
    # This formula equals 1 - beta ** step, but is more accurate in float32.
    bias1, bias2 = (-torch.expm1((step + 1) * math.log(beta or TINY)) for beta in (beta1, beta2))
    updated = decayed - lr / bias1 * first_now / ((second_now / bias2).sqrt() + eps)
    is_skipped = skip > 0
    updated = torch.where(is_skipped, weight, updated)
    for stored, value in zip(weights, split(updated) if len(weights) == 2 else [updated], strict=True):
        stored.copy_(value)
    for cast in casts:
        cast.copy_(updated)
    _round(exp_avg, torch.where(is_skipped, first, first_now), skip)
    _round(exp_avg_sq, torch.where(is_skipped, second, second_now), skip)


def _in_chunks(tensors: list[Tensor]) -> list[Tensor]:
    """Split CPU tensors into chunks, so that a float32 sum of squares over each chunk is accurate.

    torch's CPU kernel adds elements sequentially. Over 16 million elements, the CPU kernel's norm is too
    small by a relative error of 6e-4, and the error depends on the layout. The CUDA kernel adds elements
    pairwise (as a tree), which is accurate.
    """
    if tensors[0].device.type != "cpu":
        return tensors
    return [
        piece
        for tensor in tensors
        for piece in (torch.split(tensor.flatten(), NORM_CHUNK) if tensor.numel() > NORM_CHUNK else (tensor,))
    ]


@cache
def _compiled_update(row_part: int | None) -> Callable[..., None]:
    """Return a compiled copy of `_update` for quantized averages whose rows have parts of this size, or None.

    The size is static, so each size is compiled. torch.compile runs a function eagerly after it has compiled
    the function for 8 kinds of arguments, and counts these for each code object.
    """
    code = _update.__code__.replace(co_name=f"update rows of {row_part}")
    return torch.compile(FunctionType(code, _update.__globals__))
