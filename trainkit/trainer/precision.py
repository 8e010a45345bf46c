"""Precision: weights in the compute type, loss scaling for fp16, and float8 through torchao."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from trainkit.config.training import PrecisionConfig
from trainkit.errors import FatalError
from trainkit.extras import install_line

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MAX_LOSS_SCALE = 2.0**100
"""Keeps the scale finite: an infinite one could not be halved."""


def cast_weights(
    model: nn.Module,
    dtype: torch.dtype,
    keep: tuple[type[nn.Module], ...] = (),
    *,
    only_frozen: bool = False,
) -> dict[nn.Parameter, nn.Parameter]:
    """Replace a model's float32 parameters by casts to `dtype`; returns cast -> float32 master.

    Modules of the types in `keep` stay in float32, and parameters of type `dtype` need no master. With
    `only_frozen`, only parameters on the meta device that never change are cast: they need no master at all.

    The gradients of all passes of a step are summed in float32 in the ``grad`` of the masters, as
    `fully_shard` sums them: a run computes the same whether or not it is sharded. Unlike those of autocast,
    the casts last until the next update.
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

    def move_gradient(cast: Tensor) -> None:
        assert isinstance(cast, nn.Parameter)
        master, gradient = masters[cast], cast.grad
        assert gradient is not None
        cast.grad = None
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad += gradient

    for cast in (cast for cast in masters if cast.requires_grad):
        cast.register_post_accumulate_grad_hook(move_gradient)  # type: ignore[no-untyped-call]
    return masters


class LossScale:
    """A loss factor that keeps fp16 gradients from underflowing; halved when they overflow.

    It stays on the device, so that the host never waits for it. Overflows are detected in the global gradient
    norm, so all ranks skip the same steps.
    """

    def __init__(self, config: PrecisionConfig, device: torch.device) -> None:
        self.enabled = config.dtype == "fp16"
        self._growth_interval = config.loss_scale_growth_interval
        start = config.init_loss_scale if self.enabled else 1.0
        self.value = torch.tensor(start, dtype=torch.float32, device=device)
        self._good_steps = torch.zeros((), dtype=torch.float32, device=device)

    def update(self, skipped: Tensor) -> None:
        """Update the scale after a step; skipped: float32 [], 1 if the gradient was not finite."""
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


FLOAT8_MULTIPLE = 16
"""float8 tensor cores require matrix dimensions that are multiples of this."""
FLOAT8_CAPABILITY = (8, 9)
"""Compute capability of Ada; Hopper has (9, 0)."""


def require_float8(device: torch.device) -> None:
    """Raise FatalError if torchao is missing or the device has no float8."""
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
            hint="set precision.float8 to false; float8 requires an Ada, Hopper or newer GPU",
        )


def apply_float8(layers: list[nn.Module], *, rowwise: bool = False, emulate: bool = False) -> None:
    """Make the linear modules of these layers multiply in float8, with one scale per tensor or per row.

    The weights keep their dtype. `emulate` emulates float8 on a device without it.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # The inner dimension of weight gradients is the number of tokens, which may not be such a multiple.
    recipe = Float8LinearConfig.from_recipe_name("rowwise" if rowwise else "tensorwise")
    config = replace(recipe, emulate=emulate, pad_inner_dim=True)
    for layer in layers:
        convert_to_float8_training(layer, config=config, module_filter_fn=_fits)


def _fits(module: nn.Module, name: str) -> bool:
    """Whether a module is linear, with dimensions that float8 tensor cores support."""
    return isinstance(module, nn.Linear) and not any(size % FLOAT8_MULTIPLE for size in module.weight.shape)
