"""Run forward and backward passes for user tasks, and for trainkit's models without a pipeline."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from trainkit.config.schema import RunConfig
from trainkit.task import Loss, Number, Task
from trainkit.trainer.causal_lm import Microbatch, to_device
from trainkit.trainer.distributed import World, gather_from_all
from trainkit.trainer.metrics import RECORD_KEYS
from trainkit.trainer.models.linear import plus_product
from trainkit.trainer.models.model import local_tensor
from trainkit.trainer.precision import DTYPES
from trainkit.trainer.progress import Progress
from trainkit.trainer.step_sync import LOSS_OF
from trainkit.trainer.task_batches import TaskBatch, seed_generators
from trainkit.trainer.user_code import listed, refusal

NllSum = Callable[[Tensor, Tensor], Tensor]
"""Computes the summed negative log-likelihood (0-dim, float32) for logits [B, T, vocab] and labels [B, T]."""
OnLoss = Callable[[Tensor], None]
"""Receives this rank's share of a step's loss once it is computed, before the last backward pass."""
GradientSwitch = Callable[[bool], None]
"""Enables or disables gradient reduction, which is enabled only for a step's last microbatch."""

M = TypeVar("M", contravariant=True)
"""The type of a microbatch."""


class ForwardBackward(Protocol[M]):
    """Computes the gradient of a step."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Return the names of the metrics whose sums were computed in the last pass."""
        return ()

    def begin_step(self, step: int) -> None:
        """Set the step number for all passes until the next call."""
        return None

    def accumulate_gradient(self, microbatches: Sequence[M], scale: Tensor, on_loss: OnLoss) -> None:
        """Accumulate the gradient of the summed loss times `scale`, a 0-dim float32 tensor on the device.

        `on_loss` receives sums over this rank's microbatches. For a `Model`, `on_loss` receives only the
        negative log-likelihood, a 0-dim float32 tensor. For a user's task, `on_loss` receives the loss and
        its divisor, followed by a value and a divisor for each metric, as float64 [2 + 2 x metrics].
        """
        ...

    def loss_sums(self, micro: M) -> Tensor:
        """Return the sums of one microbatch in the format of `on_loss`, without computing gradients."""
        ...


@dataclass(frozen=True)
class ForwardContext:
    """Settings shared by all passes: the loss, its parallelism, and this rank's positions in a sequence."""

    world: World
    nll_sum: NllSum
    use_loss_parallel: bool
    positions: Tensor | None = None
    """The sequence positions that this rank computes, as a tensor on the device; None for all positions."""

    @property
    def loss_share(self) -> float:
        """Return the factor for this rank's loss: 1.0 on the first tensor-parallel rank, otherwise 0.0."""
        return 0.0 if self.world.place.tp else 1.0

    def local_batch(self, micro: Microbatch) -> Microbatch:
        """Return a microbatch on the device, restricted to the positions that this rank computes."""
        micro, at = to_device(micro, self.world.device), self.positions
        if at is None:
            return micro
        return Microbatch(micro.tokens[:, at], micro.labels[:, at], micro.sample_keys)

    def loss_parallel(self) -> AbstractContextManager[object]:
        """Return the loss-parallel context manager, which must also be active during the backward pass."""
        return loss_parallel() if self.use_loss_parallel else nullcontext()


class _ChunkedLoss(torch.autograd.Function):
    """Computes the loss of hidden states [N, D] and its gradients, one chunk of tokens at a time.

    Only one chunk's logits exist at a time, and no logits are computed twice. The weight gradient is
    accumulated over the chunks in float32. With a `scale` (0-dim, float32), the forward pass computes the
    gradients of loss x `scale`. The backward pass then divides the precomputed gradients by `scale` and
    multiplies them by the incoming gradient, which usually equals `scale`.
    """

    @classmethod
    def apply(cls, x: Tensor, weight: Tensor, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            weight = weight.detach()  # A parameter's `requires_grad` is True even under `no_grad`.
        return super().apply(x, weight, *args)  # type: ignore[no-untyped-call]

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        nll_sum: NllSum,
        chunks: int,
        scale: Tensor | None = None,
    ) -> Tensor:
        has_gradient = any(ctx.needs_input_grad)
        total = torch.zeros((), device=x.device)
        x_grad = torch.empty_like(x) if has_gradient else x
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if has_gradient else weight
        for chunk, chunk_labels, chunk_grad in zip(
            x.chunk(chunks), labels.chunk(chunks), x_grad.chunk(chunks), strict=True
        ):
            logits = F.linear(chunk, weight).requires_grad_(has_gradient)
            with torch.set_grad_enabled(has_gradient):
                loss = nll_sum(logits[None], chunk_labels[None])
            total += loss.detach()
            if has_gradient:
                (gradient,) = torch.autograd.grad(loss, logits, scale)
                torch.mm(gradient, weight, out=chunk_grad)
                plus_product(weight_grad, gradient.t(), chunk)
        if has_gradient:
            ctx.gradients, ctx.scale = (x_grad, weight_grad), scale
            # A leaf whose `grad_dtype` is None accepts any dtype, and the gradient is rounded to its dtype.
            ctx.weight_grad_dtype = (weight.grad_dtype if weight.is_leaf else None) or weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        # Free the gradients early by dropping them from the context, because the context lives as long as the
        # loss.
        (x_grad, weight_grad), ctx.gradients = ctx.gradients, None
        is_float32 = ctx.weight_grad_dtype == torch.float32
        scaled = weight_grad if is_float32 else torch.empty_like(weight_grad, dtype=ctx.weight_grad_dtype)
        rest = factor if ctx.scale is None else factor / ctx.scale
        return x_grad.mul_(rest), torch.mul(weight_grad, rest, out=scaled), None, None, None, None


@dataclass
class OneByOne(ForwardBackward[M]):
    """Runs forward and backward passes one microbatch at a time, without pipeline stages."""

    sync_gradients: GradientSwitch
    progress: Progress

    def accumulate_gradient(self, microbatches: Sequence[M], scale: Tensor, on_loss: OnLoss) -> None:
        sums: Tensor | None = None
        last = len(microbatches) - 1
        for index, micro in enumerate(microbatches):
            if last > 0:
                self.sync_gradients(index == last)
            self.progress.enter("forward")
            with self._loss_context():
                loss, found = self._forward(micro, scale)
                sums = found if sums is None else sums + found
                self.progress.enter("backward")
                if index == last:
                    on_loss(sums)
                (loss * scale).backward()  # type: ignore[no-untyped-call]

    def loss_sums(self, micro: M) -> Tensor:
        with self._loss_context():
            return self._forward(micro)[1]

    def _loss_context(self) -> AbstractContextManager[object]:
        return nullcontext()

    @abstractmethod
    def _forward(self, micro: M, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the differentiable loss (0-dim, float32), and this rank's sums in `on_loss` format.

        The caller multiplies the loss by `scale`. `scale` is passed because a loss may compute its gradients
        in the forward pass.
        """


@dataclass
class SequentialForwardBackward(OneByOne[Microbatch]):
    """Runs the forward and backward passes of a `Model` without pipeline stages."""

    model: nn.Module
    context: ForwardContext
    loss_chunks: int = 1
    """Number of chunks of tokens whose losses are computed one after another; 1 disables chunking."""

    def _loss_context(self) -> AbstractContextManager[object]:
        return self.context.loss_parallel()

    def _forward(self, micro: Microbatch, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        nll_sum = self._nll_sum(micro, scale)
        return nll_sum, nll_sum.detach() * self.context.loss_share

    def _nll_sum(self, micro: Microbatch, scale: Tensor | None) -> Tensor:
        micro = self.context.local_batch(micro)
        if self.loss_chunks == 1:
            logits = self.model(micro.tokens, sample_keys=micro.sample_keys)
            return self.context.nll_sum(logits, micro.labels)
        labels, nll_sum, chunks = micro.labels.flatten(), self.context.nll_sum, self.loss_chunks

        def loss(x: Tensor, weight: Tensor) -> Tensor:
            # Without the scale, fp16 gradients would underflow. In other dtypes, scaling would only add
            # rounding errors.
            early = scale if x.dtype == torch.float16 else None
            inputs = x.flatten(0, 1), weight, labels, nll_sum, chunks, early
            found: Tensor = _ChunkedLoss.apply(*inputs)
            return found

        whole: Tensor = self.model(micro.tokens, sample_keys=micro.sample_keys, loss=loss)
        return whole


class LossModule(nn.Module):
    """Wraps the model and its loss in one module, which is FSDP's root module.

    FSDP keeps the root's parameters gathered, so the loss can use any submodule of the model.
    """

    def __init__(self, model: nn.Module, task: Task, config: RunConfig) -> None:
        super().__init__()
        self.model = model
        self.read_names = frozenset(name for name, param in model.named_parameters() if param.is_meta)
        """Names of the parameters whose initial values are read from files after sharding."""
        self.task = task
        self._config = config

    def forward(self, data: object, optimizer: str = "") -> tuple[Tensor, Number, Mapping[str, object]]:
        task, model = self.task, self.model
        loss = task.loss_for(optimizer, model, data) if optimizer else task.loss(model, data)
        if not isinstance(loss, Loss):
            method = "loss_for" if optimizer else "loss"
            message = f"{method}() returned a {type(loss).__name__}"
            raise refusal(self._config, message, "return a trainkit.task.Loss")
        return loss.total, loss.count, loss.metrics


@dataclass
class TaskForwardBackward(OneByOne[TaskBatch]):
    """Runs the forward and backward passes of a user's task."""

    module: LossModule
    config: RunConfig
    world: World

    def __post_init__(self) -> None:
        self._dtype = DTYPES[self.config.precision.dtype]
        self._names: dict[tuple[bool, str], tuple[str, ...]] = {}
        self._pass = True, ""
        """Whether the last pass was for training, and the name of the optimizer whose loss was computed (""
        without turns)."""
        self._has_passed = False
        # A separate group is needed, because a save may be using the checkpoint group in another thread.
        self._group = dist.new_group(backend="gloo") if self.world.distributed else None

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Return the names of the metrics that the loss returned in the last pass."""
        return self._names.get(self._pass, ())

    def begin_step(self, step: int) -> None:
        self.module.task.step = step

    def accumulate_gradient(self, microbatches: Sequence[TaskBatch], scale: Tensor, on_loss: OnLoss) -> None:
        super().accumulate_gradient(microbatches, scale, on_loss)
        if not self._has_passed and self.world.layout.tp > 1 and self.world.mesh is not None:
            check_replicated_gradients(self.config, self.module.model, self.world.mesh["tp"])
        self._has_passed = True

    def _forward(self, micro: TaskBatch, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        device = self.world.device
        micro = to_device(micro, device)
        seed_generators(micro.seed)
        torch.manual_seed(micro.seed)  # also seeds the device's generator
        with torch.autocast(device.type, self._dtype, enabled=self._dtype != torch.float32):
            total, count, metrics = self.module(micro.data, micro.optimizer)
        if total.numel() != 1:
            message = f"the total of its loss has shape {list(total.shape)}"
            raise refusal(self.config, message, "sum it: total.sum()")
        if torch.is_grad_enabled() and not total.requires_grad:
            raise refusal(self.config, "the total of its loss has no gradient", "do not detach the total")
        total = total.view(()).float()
        self.check_names(metrics, micro.optimizer)
        numbers = [total, count]
        for value in (metrics[name] for name in self.metric_names):
            numbers += list(value) if isinstance(value, tuple) else [value, count]
        found = torch.stack([_number(value, device) for value in numbers])
        # Replace the sums with zeros instead of multiplying them by the weight, because the loss of a filler
        # batch may be NaN or infinite. All tensor-parallel ranks compute the same loss, so include only one
        # rank's sums.
        counts = micro.weight and self.world.counts_samples
        return total * micro.weight, found if counts else torch.zeros_like(found)

    def check_names(self, metrics: Collection[str], optimizer: str = "") -> None:
        """Raise TaskError if the metric names of a loss differ between ranks or between batches."""
        names, mode = tuple(sorted(metrics)), (self.module.training, optimizer)
        self._pass = mode
        if mode not in self._names:
            taken = sorted(set(names) & RECORD_KEYS)
            if taken:
                raise refusal(
                    self.config,
                    f"a metric is called {taken[0]}",
                    "rename the metric, because every metrics record already has a key with this name",
                )
            self._refuse_same_name(mode, names)
            others = gather_from_all(list(names), self.world, self._group)
            self._names[mode] = names
            if any(other != others[0] for other in others):
                listed = sorted({", ".join(other) or "none" for other in others})
                hint = f"return the same metrics for every batch: {' | '.join(listed)}"
                raise refusal(self.config, "the metrics differ between ranks", hint)
        elif names != self._names[mode]:
            before, now = ", ".join(self._names[mode]) or "none", ", ".join(names) or "none"
            message = f"the metrics of its loss changed from {before} to {now}"
            raise refusal(self.config, message, "return the same metrics for every batch")

    def _refuse_same_name(self, mode: tuple[bool, str], names: Sequence[str]) -> None:
        """Raise TaskError if the losses of two optimizers return metrics with the same name."""
        found = {**self._names, mode: names}
        turns = [turn for is_training, turn in found if turn and is_training == mode[0]]
        logged = [
            *(LOSS_OF.format(turn) for turn in turns),
            *(n for turn in turns for n in found[mode[0], turn]),
        ]
        twice = next((name for name in logged if logged.count(name) > 1), None)
        if twice is not None:
            message = f"{twice} is returned by more than one of the losses of {', '.join(turns)}"
            raise refusal(
                self.config,
                message,
                "use a different name for each metric that loss_for() returns, for all optimizers together",
            )


def _number(value: Any, device: torch.device) -> Tensor:
    """Return a number as a 0-dim float64 tensor on the device."""
    if isinstance(value, Tensor):
        return value.detach().to(device).double().view(())
    # Create the tensor on the device, because a copy from the host would wait for all enqueued kernels.
    return torch.full((), float(value), dtype=torch.float64, device=device)


COMPARED_ELEMENTS = 256
"""Approximate number of elements of each gradient that are compared between tensor-parallel ranks."""
MAX_DIFFERENCE = 0.1
"""Relative difference above which two gradients are considered different.

`MAX_DIFFERENCE` is far above bf16 rounding errors and far below the difference between the partial gradients
of two ranks.
"""


@torch.no_grad()
def check_replicated_gradients(config: RunConfig, model: nn.Module, mesh: DeviceMesh) -> None:
    """Raise TaskError if the gradient of an unsplit parameter differs between tensor-parallel ranks.

    The gradients differ if the module's input is split, because each rank then computes only part of the
    gradient.
    """
    samples: dict[str, Tensor] = {}
    for path, param in model.named_parameters():
        is_planned = isinstance(param, DTensor) and "tp" in (param.device_mesh.mesh_dim_names or ())
        if not is_planned and param.grad is not None:
            gradient = local_tensor(param.grad).flatten()
            step = max(1, gradient.numel() // COMPARED_ELEMENTS)
            samples[path] = gradient[::step].to(mesh.device_type, torch.float32)
    if not samples:
        return
    own = torch.cat(list(samples.values()))
    gathered = [torch.empty_like(own) for _ in range(mesh.size())]
    dist.all_gather(gathered, own, group=mesh.get_group())
    parts = torch.split(torch.stack(gathered), [sample.numel() for sample in samples.values()], dim=1)
    different = torch.stack([(part - part[:1]).norm(dim=1).max() for part in parts])
    size = torch.stack([part.norm(dim=1).max() for part in parts])
    wrong = [
        path
        for path, is_wrong in zip(samples, (different > MAX_DIFFERENCE * size).tolist(), strict=True)
        if is_wrong
    ]
    if wrong:
        message = f"the tensor-parallel ranks have different gradients for {listed(wrong)}"
        hint = "use replicated_with_grad_allreduce where a module's input is split, and do not seed by rank"
        raise refusal(config, f"{message}, outside tensor_plan()", hint)
