"""Computes the data types and the size of the state that an optimizer keeps for the elements of its weights.

The trainer allocates the state that `state_of` returns, so that the planned and the allocated memory agree.
"""

import math
from collections.abc import Sequence
from typing import Literal

from trainkit.config.optimizers import is_own, kind_of
from trainkit.config.training import OptimizerConfig
from trainkit.config.validation import ROW_PARTS
from trainkit.plan.model_shape import ModelShape

StateDtype = Literal["fp32", "bf16", "8bit"]
MIN_8BIT_ELEMENTS = 4096
"""Minimum number of elements for 8-bit state: the float32 state of smaller parameters takes little memory."""
MIN_8BIT_ROW = 64
"""Minimum row length for 8-bit state: with shorter rows, the scales would take too much memory."""
OWN_BYTES = 8
"""Assumed bytes of state per parameter for a user's optimizer: two float32 values, as for AdamW."""
MAX_BLOCK = 256
"""Maximum number of elements that share one scale in 8-bit optimizer state."""


def state_of(optimizer: OptimizerConfig, shape: Sequence[int]) -> dict[str, StateDtype]:
    """Return the state that an optimizer keeps for each element of a parameter, as names and data types.

    For Muon, the result applies to the parameters that AdamW updates.
    `shape` is the shape of the whole parameter, because the data types do not depend on the layout.
    """
    kind = kind_of(optimizer.name)
    if "momentum_buffer" in kind.state and optimizer.momentum == 0:
        return {}
    dtype: StateDtype = optimizer.state_dtype
    if kind.has_8bit_state and _has_8bit_state(shape):
        dtype = "8bit"
    return dict.fromkeys(kind.state, dtype)


def _has_8bit_state(shape: Sequence[int]) -> bool:
    return len(shape) > 1 and math.prod(shape) >= MIN_8BIT_ELEMENTS and math.prod(shape[1:]) >= MIN_8BIT_ROW


def row_blocks(row_size: int) -> tuple[int, int]:
    """Return the numbers of elements and of blocks in each chunk of a matrix row with 8-bit state.

    Both numbers depend only on the row size, so that checkpoints do not depend on the layout.
    """
    part = row_size // math.gcd(row_size, ROW_PARTS)
    return part, -(-part // MAX_BLOCK)


def bytes_per_element(dtype: StateDtype, row_size: int) -> float:
    """Return the bytes of a state per element of a matrix; `row_size` is the number of elements of a row."""
    if dtype == "8bit":
        # Each element has a code of one byte, and each block has a float32 scale.
        part, num_blocks = row_blocks(row_size)
        return 1 + 4 * num_blocks / part
    return {"fp32": 4, "bf16": 2}[dtype]


def optimizer_bytes(optimizer: OptimizerConfig, shape: ModelShape) -> float:
    """Return the number of bytes of optimizer state per parameter.

    The matrices of blocks have rows of several sizes, and the largest result is returned. Vectors are
    ignored, although their state is never stored with 8 bits. For a user's optimizer, the result is an
    assumption.
    """
    if is_own(optimizer.name):
        return OWN_BYTES
    return max(
        sum(bytes_per_element(dtype, row) for dtype in state_of(optimizer, (shape.dim, row)).values())
        for row in {shape.dim, shape.ffn_dim, shape.moe.ffn_dim if shape.moe else shape.dim}
    )


def optimizer_note(optimizer: OptimizerConfig) -> str | None:
    """Return a sentence about an assumption of `optimizer_bytes`, or None."""
    if not is_own(optimizer.name):
        return None
    return f"{optimizer.name}: its state is assumed to take {OWN_BYTES} bytes per parameter"
