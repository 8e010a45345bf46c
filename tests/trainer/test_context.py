"""Tests the chunks of a sequence that context-parallel ranks have."""

import pytest
import torch
from torch import nn

from tests.support.pretend_cuda import PretendMode
from trainkit.trainer.models.decoder import causal_attention
from trainkit.trainer.parallel.context import (
    attention_to_last,
    context_positions,
    cudnn_attention_to_last,
    masked_attention_to_last,
    position_slice,
    repeat_kv_heads,
)


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_ranks_share_a_sequence_and_its_work(cp):
    parts = [context_positions(rank, cp, 32) for rank in range(cp)]
    assert sorted(torch.cat(parts).tolist()) == list(range(32))
    work = {int((part + 1).sum()) for part in parts}
    assert len(work) == 1, "keys that each rank's queries look at"


def test_tensor_parallel_ranks_hold_parts_of_the_stream():
    seen = [position_slice(1, 2, tp_rank, 2, 32) for tp_rank in (0, 1)]
    assert torch.equal(seen[0].attention, seen[1].attention)
    assert torch.equal(torch.cat([one.stream for one in seen]), seen[0].attention)


@pytest.mark.parametrize("to_last", [masked_attention_to_last, cudnn_attention_to_last])
def test_queries_at_the_end_of_the_keys(to_last):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 8, 16, requires_grad=True) for heads in (4, 2, 2))
    expected = causal_attention(q, k, v)[:, :, -2:]
    weights = torch.randn(expected.shape)
    gradients = torch.autograd.grad((expected * weights).sum(), (q, k, v))
    with PretendMode():  # pretend mode has a kernel in place of cuDNN's
        found = to_last(q[:, :, -2:], k, v)
        found_gradients = torch.autograd.grad((found * weights).sum(), (q, k, v))
    torch.testing.assert_close((found, *found_gradients), (expected, *gradients))


def test_heads_that_are_repeated_attend_as_those_that_are_shared():
    torch.manual_seed(0)
    attention = nn.Module()
    attention.attend = causal_attention
    repeat_kv_heads([attention])
    q, k, v = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16), torch.randn(2, 2, 8, 16)
    torch.testing.assert_close(attention.attend(q, k, v), causal_attention(q, k, v))


def test_no_flash_attention_without_a_gpu():
    assert attention_to_last(torch.device("cpu"), torch.bfloat16, head_dim=64) is masked_attention_to_last
