"""Gradients of several passes that linear layers add up while they compute them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.models import nano, sample_keys, tokens
from trainkit.trainer.build import recompute_and_compile
from trainkit.trainer.precision import SummedLinear, cast_weights, sum_in_products


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "compiled"), [("none", False), ("selective", True), ("full", True)])
def test_the_sums_are_those_of_the_hooks(mode: str, compiled: bool) -> None:
    """Bit for bit on a CPU, in two steps of three passes with a validation between them."""
    found: list[list[Tensor]] = []
    for sums in (False, True):
        model = nano()
        masters = cast_weights(model, torch.bfloat16)
        begin = sum_in_products(model, masters) if sums else lambda is_last: None
        recompute_and_compile(model.layers, mode, compiled=compiled)  # type: ignore[arg-type]
        grads: list[Tensor] = []
        for step in range(2):
            for number in range(3):
                begin(number == 2)
                model(tokens(seed=3 * step + number), sample_keys()).float().square().mean().backward()
            for master in masters.values():
                assert master.grad is not None
                grads.append(master.grad.clone())
                master.grad = None
            with torch.no_grad():
                model(tokens(), sample_keys())
        assert sum(isinstance(module, SummedLinear) for module in model.modules()) == sums * 7 * len(
            model.layers
        )
        found.append(grads)
    assert all(map(torch.equal, *found))
