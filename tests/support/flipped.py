"""Runs a rank where one bit of one activation's gradient flips in one step."""

import os
from collections.abc import Sequence
from typing import Any

from trainkit.run.rundir import AttemptDir


def run_flipped(
    rank: int, attempt: AttemptDir, environs: Sequence[dict[str, str]], victim: int, step: int, bit: int = 28
) -> None:
    """Run a worker whose backward pass flips a bit of a float at `step`, on the rank `victim`.

    Bit 28 of the exponent makes most gradients smaller. Bit 30 makes them very large.
    """
    import torch

    from tests.support.ranks import _as_worker
    from trainkit.trainer import loop

    build = loop.build

    def build_flipped(*args: Any) -> Any:
        built, progress = build(*args), args[3]

        def flip(grad: torch.Tensor) -> torch.Tensor:
            flipped = grad.clone()
            flipped.view(torch.int32).view(-1)[7] ^= 1 << bit
            return flipped

        def on_output(module: Any, inputs: Any, outputs: tuple[torch.Tensor, None]) -> None:
            stream, _ = outputs
            if progress.current.step == step and stream.requires_grad:
                stream.register_hook(flip)

        built.model_parts[0].layers[0].register_forward_hook(on_output)
        return built

    if rank == victim:
        loop.build = build_flipped
    _as_worker(str(attempt.run.path), str(attempt.rank_log(rank)), dict(environs[rank]))
    os._exit(1)  # a worker exits by itself
