"""Choose the precision: weights in the compute dtype, loss scaling for fp16, and float8 with torchao."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from trainkit.config.training import PrecisionConfig
from trainkit.errors import FatalError
from trainkit.extras import install_line
from trainkit.trainer.models.model import local_tensor
from trainkit.trainer.torch_private import norm_of_each, set_gather

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MAX_LOSS_SCALE = 2.0**100
"""Maximum loss scale, which keeps the scale finite: halving an infinite scale would have no effect."""


def cast_weights(
    model: nn.Module,
    dtype: torch.dtype,
    keep: tuple[type[nn.Module], ...] = (),
    *,
    only_frozen: bool = False,
) -> dict[nn.Parameter, nn.Parameter]:
    """Replace a model's float32 parameters with casts to `dtype`; return a mapping from cast to master.

    Modules whose type is in `keep` stay in float32; parameters that already have `dtype` get no master
    weight. If `only_frozen`, only frozen parameters on the meta device are cast, and these get no master
    weight.

    As with `fully_shard`, the gradients of all passes in a step are summed in float32, here in the ``grad``
    of the master weights. Results are therefore the same with and without sharding. Unlike casts by autocast,
    the casts in the model are kept until the next optimizer update.
    """
    casts: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, keep):
            continue
        for name, master in module.named_parameters(recurse=False, remove_duplicate=False):
            if master.dtype == dtype or (only_frozen and not (master.is_meta and not master.requires_grad)):
                continue
            if master not in casts:
                casts[master] = nn.Parameter(master.detach().to(dtype), requires_grad=master.requires_grad)
            setattr(module, name, casts[master])
    masters = {cast: master for master, cast in casts.items()}

    def move_gradient(master: nn.Parameter, cast: Tensor) -> None:
        gradient = cast.grad
        if gradient is None:  # `Linear` has added the gradient itself
            return
        cast.grad = None
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad += gradient

    for cast, master in masters.items():
        if cast.requires_grad:
            # The hook must not refer to its own cast, because Python cannot free cycles through such hooks.
            hook = partial(move_gradient, master)
            cast.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return masters


class LossScale:
    """Dynamic loss scale that prevents fp16 gradients from underflowing, and is halved on overflow.

    The scale stays on the device, so that the host never waits for its value. Overflows are detected in the
    global gradient norm, so that all ranks skip the same steps.
    """

    def __init__(self, config: PrecisionConfig, device: torch.device) -> None:
        self.enabled = config.dtype == "fp16"
        self._growth_interval = config.loss_scale_growth_interval
        start = config.init_loss_scale if self.enabled else 1.0
        self.value = torch.tensor(start, dtype=torch.float32, device=device)
        self._good_steps = torch.zeros((), dtype=torch.float32, device=device)

    def update(self, skipped: Tensor) -> None:
        """Update the scale after a step; `skipped` (0-dim, float32) is 1 if the gradient was not finite."""
        if not self.enabled:
            return
        good = torch.where(skipped > 0, 0.0, self._good_steps + 1)
        grow = good >= self._growth_interval
        factor = torch.where(skipped > 0, 0.5, torch.where(grow, 2.0, 1.0))
        self.value = (self.value * factor).clamp(1.0, MAX_LOSS_SCALE)
        self._good_steps = torch.where(grow, 0.0, good)

    def state(self) -> dict[str, float]:
        return {"value": self.value.item(), "good_steps": self._good_steps.item()}

    def load(self, state: dict[str, float]) -> None:
        if self.enabled and state:
            self.value.fill_(state["value"])
            self._good_steps.fill_(state["good_steps"])


FLOAT8_DTYPE = torch.bfloat16
"""The compute dtype required for float8."""
FLOAT8_MULTIPLE = 16
"""Float8 tensor cores require matrix dimensions to be multiples of this number."""
FLOAT8_CAPABILITY = (8, 9)
"""Compute capability of Ada, the first GPU generation that supports float8; Hopper has (9, 0)."""


def require_float8(device: torch.device) -> None:
    """Raise FatalError if torchao is missing or the device does not support float8."""
    try:
        import torchao.float8  # noqa: F401
    except ImportError as error:
        raise FatalError(
            f"precision.float8 is set, but torchao cannot be imported ({error})",
            hint=f"`{install_line('float8')}`",
        ) from None
    supported = device.type == "cuda" and torch.cuda.get_device_capability(device) >= FLOAT8_CAPABILITY
    if not supported:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
        raise FatalError(
            f"precision.float8 is set, but {name} does not support float8",
            hint="set precision.float8 to false, or use an Ada, Hopper or newer GPU",
        )


def apply_float8(layers: list[nn.Module], *, rowwise: bool = False, emulate: bool = False) -> None:
    """Make the linear modules in the layers multiply in float8, with one scale per tensor or per row.

    The dtype of the weights does not change. If `emulate`, float8 is emulated on devices that do not support
    it.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # Pad the inner dimension, which for weight gradients is the number of tokens and may not be a multiple of
    # 16.
    recipe = Float8LinearConfig.from_recipe_name("rowwise" if rowwise else "tensorwise")
    config = replace(recipe, emulate=emulate, pad_inner_dim=True)
    for layer in layers:
        convert_to_float8_training(layer, config=config, module_filter_fn=_fits)


def _fits(module: nn.Module, name: str) -> bool:
    """Return whether a module is an `nn.Linear` whose dimensions float8 tensor cores support."""
    return isinstance(module, nn.Linear) and not any(size % FLOAT8_MULTIPLE for size in module.weight.shape)


class Float8Gather:
    """Gathers sharded weights in float8 for float8 matrix products, with the same scales on all ranks.

    Compared with bf16, gathering in float8 halves the communication without changing any product. Gathering
    in bf16 and then casting to float8 would give bit-identical weights: rounding preserves order, so the
    largest element of the bf16 matrix is the largest element of all shards, rounded. The optimizer,
    checkpoints and exports use only the float32 shards.
    """

    def __init__(self, model_parts: Iterable[nn.Module], group: dist.ProcessGroup) -> None:
        """Make FSDP gather weight matrices in float8; the ranks in `group` have the shards of each matrix."""
        from torchao.float8.float8_linear import Float8Linear

        modules = [module for part in model_parts for module in part.modules()]
        linears = [module for module in modules if isinstance(module, Float8Linear)]
        self._shards = [local_tensor(linear.weight.detach()) for linear in linears]
        self._group = group
        if not linears:
            return
        self._float8 = linears[0].config.cast_config_weight.target_dtype
        # Place the scales 16 bytes apart, because a compiled block would copy inputs that are not aligned.
        self._scales = torch.ones(len(linears), 4, device=self._shards[0].device)[:, 0]
        for linear, shard, scale in zip(linears, self._shards, self._scales, strict=True):
            num_rows = len(linear.weight)
            after = partial(_as_cast, num_rows, scale, linear.linear_mm_config)
            set_gather(linear.weight, partial(self._cast, shard, num_rows, scale), after)

    def _cast(self, shard: Tensor, num_rows: int, scale: Tensor, num_ranks: int) -> Tensor:
        """Return a shard in float8, padded to the number of rows in the largest shard."""
        from torchao.float8.float8_utils import to_fp8_saturated

        rounded = shard.to(FLOAT8_DTYPE)
        if missing := -(-num_rows // num_ranks) - len(shard):
            rounded = pad(rounded, (0, 0, 0, missing))
        cast: Tensor = to_fp8_saturated(rounded.float() * scale, self._float8)
        return cast

    @torch.no_grad()
    def update(self) -> None:
        """Compute the scales, which are equal on all ranks; call this whenever the weights have changed."""
        if not self._shards:
            return
        from torchao.float8.float8_utils import amax_to_scale

        zero = self._scales.new_zeros(1)
        filled = [shard if shard.numel() else zero for shard in self._shards]
        largest = torch.stack(norm_of_each(filled, math.inf))
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        self._scales.copy_(amax_to_scale(largest.to(FLOAT8_DTYPE), self._float8))


def _as_cast(num_rows: int, scale: Tensor, config: object, gathered: Tensor) -> Tensor:
    """Return a gathered weight in the form that Float8Linear creates when it casts a weight itself."""
    from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

    weight: Tensor = Float8TrainingTensor(
        gathered[:num_rows], scale, FLOAT8_DTYPE, config, GemmInputRole.WEIGHT
    )
    return weight
