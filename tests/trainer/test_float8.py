"""Float8 is refused where it would be something else, and changes the matrices of the blocks only."""

from __future__ import annotations

import pytest
import torch

from tests.support.models import nano, sample_keys, tokens
from trainkit.errors import EXIT_NO_RESTART, TrainkitError
from trainkit.trainer.precision import apply_float8, require_float8


def test_a_cpu_has_none() -> None:
    pytest.importorskip("torchao")
    with pytest.raises(TrainkitError, match="a CPU does not support float8") as error:
        require_float8(torch.device("cpu"))
    assert error.value.exit_code == EXIT_NO_RESTART


def test_blocks_multiply_in_float8() -> None:
    pytest.importorskip("torchao")
    from torchao.float8.float8_linear import Float8Linear

    plain, low = nano(), nano()
    names = [name for name, _ in low.named_parameters()]
    apply_float8(low.layers, emulate=True)
    assert [name for name, _ in low.named_parameters()] == names, "checkpoints stay what they are"
    assert isinstance(low.blocks[0].attention.wq, Float8Linear)
    assert low.blocks[0].attention.wq.config.pad_inner_dim, "the number of tokens can be anything"
    assert not isinstance(low.head, Float8Linear)
    exact, rounded = plain(tokens(), sample_keys()), low(tokens(), sample_keys())
    assert not torch.equal(exact, rounded)
    assert (exact - rounded).norm() < 0.1 * exact.norm()
    rounded.square().mean().backward()
    assert all(param.grad is not None for param in low.parameters())
