"""Matrix products in float8, through torchao."""

from __future__ import annotations

import torch
from torch import nn

from trainkit.errors import EXIT_NO_RESTART, TrainkitError

MULTIPLE = 16
"""The tensor cores take matrices whose sides are multiples of it."""
FIRST_CAPABILITY = (8, 9)
"""Ada; Hopper is (9, 0)."""


def require_float8(device: torch.device) -> None:
    """Raise TrainkitError (exit code 78) where torchao is missing or the device has no float8."""
    try:
        import torchao.float8  # noqa: F401
    except ImportError as error:
        raise TrainkitError(
            f"precision.float8 is true, and torchao cannot be imported ({error})",
            hint="pip install 'trainkit[float8]'",
            exit_code=EXIT_NO_RESTART,
        ) from None
    has_it = device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY
    if not has_it:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
        raise TrainkitError(
            f"precision.float8 is true, and {name} does not multiply in float8",
            hint="precision.float8: false; GPUs from Ada and Hopper on have it",
            exit_code=EXIT_NO_RESTART,
        )


def apply_float8(layers: list[nn.Module], emulate: bool = False) -> None:
    """Let the matrices of these layers multiply in float8, scaled by the largest value of each tensor.

    Their weights stay what they are. `emulate` computes what float8 would give on a device without it.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # Of the gradients' products one side is the number of tokens, which can be anything.
    config = Float8LinearConfig(emulate=emulate, pad_inner_dim=True)
    for layer in layers:
        convert_to_float8_training(layer, config=config, module_filter_fn=_fits)


def _fits(module: nn.Module, name: str) -> bool:
    """Whether a module is a matrix that the tensor cores take."""
    return isinstance(module, nn.Linear) and not any(size % MULTIPLE for size in module.weight.shape)
