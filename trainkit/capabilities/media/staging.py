"""Converts logged images and values, and copies them to host memory without waiting for the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainkit.capabilities.media.png import COLOR_TYPES
from trainkit.errors import UsageError

MAX_SIDE = 4096
"""Maximum width and height of an image in pixels."""
NUM_BINS = 64


@dataclass(frozen=True)
class Staged:
    """A tensor in host memory; the copy from the device may still be in progress."""

    host: Tensor
    copied: torch.cuda.Event | None = None

    def wait(self) -> Tensor:
        """Wait for the copy to finish, and return the tensor in host memory."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.host


def _stage(tensor: Tensor) -> Staged:
    """Start copying a tensor to host memory; the tensor must not be modified until the copy has finished."""
    if tensor.device.type != "cuda":
        return Staged(tensor.cpu())
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()
    return Staged(host, copied)


@torch.no_grad()
def stage_image(what: str, image: object) -> Staged:
    """Convert an image to uint8 [height, width, channels], and start copying it to host memory.

    `image` is a tensor of shape [height, width] or [channels, height, width], a NumPy array of shape [height,
    width] or [height, width, channels], or a PIL image. Floats are expected between 0 and 1, and integers
    between 0 and 255; other values are clipped. Error messages refer to the image as `what`. Raises
    UsageError if `image` has another type or shape.
    """
    pixels = _pixels(what, image)
    height, width, _ = pixels.shape
    if not (0 < height <= MAX_SIDE and 0 < width <= MAX_SIDE):
        raise UsageError(
            f"{what} has {width:,} x {height:,} pixels; each side must have 1 to {MAX_SIDE:,} pixels",
            hint="resize the image, for example with torch.nn.functional.interpolate, or log a part of "
            "the image",
        )
    if pixels.is_floating_point():
        pixels = (pixels.float().nan_to_num(0.0).clamp(0, 1) * 255).round()
    elif pixels.dtype == torch.bool:
        pixels = pixels * 255
    elif pixels.dtype != torch.uint8:
        pixels = pixels.to(torch.int64).clamp(0, 255)  # `clamp` does not support uint16 and uint32
    return _stage(pixels.to(torch.uint8).clone(memory_format=torch.contiguous_format))


def _pixels(what: str, image: object) -> Tensor:
    """Return an image as a tensor [height, width, channels]."""
    convert, mode = getattr(image, "convert", None), getattr(image, "mode", None)
    if isinstance(mode, str) and callable(convert):  # `image` is a PIL image
        image = np.asarray(image if mode in ("L", "RGB", "RGBA") else convert("RGB"))
    if isinstance(image, np.ndarray):
        found = _tensor(what, image)
        found = found[:, :, None] if found.dim() == 2 else found
        order = "[height, width] or [height, width, channels]"
    elif isinstance(image, Tensor):
        found = _local(what, image)
        found = found[:, :, None] if found.dim() == 2 else found
        found = found.permute(1, 2, 0) if image.dim() == 3 else found
        order = "[height, width] or [channels, height, width]"
    else:
        raise UsageError(
            f"{what} is a {type(image).__name__}",
            hint="log a tensor, a NumPy array or a PIL image",
        )
    if found.dim() != 3 or found.shape[2] not in COLOR_TYPES or found.is_complex():
        raise UsageError(
            f"{what} has shape {list(image.shape)} and type {image.dtype}",
            hint=f"an image must be {order}, with 1, 3 or 4 channels; torchvision.utils.make_grid "
            f"joins several images",
        )
    return found


def _tensor(what: str, values: object) -> Tensor:
    """Copy numbers into a tensor, or raise UsageError for values that are not numbers."""
    try:
        return torch.from_numpy(np.array(values))  # from_numpy rejects negative strides, so make a copy
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{what} does not contain numbers: {error}", hint="log a tensor or a list of numbers"
        ) from None


def _local(what: str, values: Tensor) -> Tensor:
    # Operations on a DTensor are collectives, which would hang because only this rank calls them.
    if hasattr(values, "to_local"):
        raise UsageError(
            f"{what} is a DTensor, and this rank has only a shard of the tensor",
            hint="call full_tensor() on every rank, and log the result",
        )
    if values.layout != torch.strided:
        raise UsageError(f"{what} is a sparse tensor", hint="log its to_dense()")
    return values.detach()


@torch.no_grad()
def stage_histogram(what: str, values: object) -> Staged:
    """Compute a histogram as a float64 tensor of shape [5 + NUM_BINS], and start copying it to host memory.

    The result consists of the minimum, maximum, sum, sum of squares and number of non-finite values, followed
    by the counts of equal-width bins. Error messages refer to the histogram as `what`. Raises UsageError if
    `values` contains no real number.
    """
    found = _local(what, values) if isinstance(values, Tensor) else _tensor(what, values)
    if found.numel() == 0 or found.is_complex():
        raise UsageError(
            f"{what} has {found.numel()} values of type {found.dtype}",
            hint="log at least one number; for complex numbers, log the real part or the absolute value",
        )
    flat = found.reshape(-1)
    flat = flat.float() if flat.dtype in (torch.float16, torch.bfloat16, torch.float32) else flat.double()
    is_finite = flat.isfinite()
    low = flat.where(is_finite, torch.inf).min()
    high = flat.where(is_finite, -torch.inf).max()
    finite = flat.where(is_finite, low)
    place = ((finite - low) / (high - low).clamp(min=torch.finfo(flat.dtype).tiny) * NUM_BINS).nan_to_num(0.0)
    counts = torch.zeros(NUM_BINS, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, place.long().clamp(0, NUM_BINS - 1), is_finite.long())
    kept = flat.where(is_finite, 0.0).double()
    sums = [low.double(), high.double(), kept.sum(), kept.square().sum(), (~is_finite).sum().double()]
    return _stage(torch.cat((torch.stack(sums), counts.double())))
