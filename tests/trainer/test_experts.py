"""Tests for the router and the experts of a mixture-of-experts layer."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit.trainer.models.experts import Experts, Router, count_rows

TOKENS, DIM, EXPERTS, WIDTH, TOP_K = 40, 8, 6, 16, 2


def layer() -> tuple[Router, Experts, Tensor]:
    """Return a router and experts with random weights, and tokens [N, D] that never choose expert 5."""
    torch.manual_seed(0)
    router, experts = Router(DIM, EXPERTS, TOP_K), Experts(DIM, EXPERTS, WIDTH)
    for param in (*router.parameters(), *experts.parameters()):
        torch.nn.init.normal_(param, std=0.3)
    router.bias[5] = -2.0
    return router, experts, torch.randn(TOKENS, DIM, requires_grad=True)


def by_hand(experts: Experts, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return the experts' output, computed separately for each token and expert."""
    outputs = []
    for token, own, factors in zip(x, chosen.tolist(), weights, strict=True):
        terms = [
            factor * (experts.down[e] @ (F.silu(experts.gate[e] @ token) * (experts.up[e] @ token)))
            for e, factor in zip(own, factors, strict=True)
        ]
        outputs.append(torch.stack(terms).sum(0))
    return torch.stack(outputs)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_outputs_and_gradients_equal_those_computed_token_by_token(compiled: bool) -> None:
    router, experts, x = layer()

    def forward(x: Tensor) -> Tensor:
        chosen, weights, _ = router(x)
        out: Tensor = experts(x, chosen, weights)
        return out

    run = torch.compile(forward, fullgraph=True) if compiled else forward
    chosen, weights, _ = router(x)
    assert 5 not in chosen, "the test should have an expert without tokens"
    params = (x, *router.parameters(), *experts.parameters())
    upstream = torch.randn(TOKENS, DIM)
    expected = by_hand(experts, x, chosen, weights)
    torch.testing.assert_close(run(x), expected, rtol=1e-5, atol=1e-6)
    found = torch.autograd.grad(run(x), params, upstream)
    for own, other in zip(found, torch.autograd.grad(expected, params, upstream), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)


def test_bfloat16_multiplies_with_the_products_of_torch() -> None:
    router, experts, x = layer()
    chosen, weights, _ = router(x)
    expected = experts(x, chosen, weights)
    found = experts.to(torch.bfloat16)(x.bfloat16(), chosen, weights)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.02)


def test_dispatch_gets_rows_sorted_by_expert_and_their_counts() -> None:
    router, experts, x = layer()
    chosen, weights, _ = router(x)
    expected, given = experts(x, chosen, weights), []

    def dispatch(rows: Tensor, counts: Tensor, compute: object) -> Tensor:
        given.append((rows.detach(), counts))
        return experts.compute(rows, counts)

    experts.dispatch = dispatch
    assert torch.equal(experts(x, chosen, weights), expected)
    [(rows, counts)] = given
    assert torch.equal(counts, chosen.flatten().bincount(minlength=EXPERTS))
    start = 0
    for expert, count in enumerate(counts.tolist()):
        tokens = (chosen == expert).any(1).nonzero().flatten()
        assert torch.equal(rows[start : start + count], x[tokens])  # in the order of the tokens
        start += count


def test_the_bias_decides_which_experts_are_chosen_but_not_their_weights() -> None:
    router, _, x = layer()
    with torch.no_grad():
        scores = (x @ router.weight.t()).softmax(-1)
        router.bias[5] = 2.0
        chosen, weights, _ = router(x)
        assert (chosen == 5).any(1).all()
        own = scores.gather(1, chosen)
        torch.testing.assert_close(weights, own / own.sum(1, keepdim=True))


@pytest.mark.parametrize("norm_topk", [True, False])
def test_sigmoid_scores_are_scaled(norm_topk: bool) -> None:
    torch.manual_seed(1)
    router = Router(DIM, EXPERTS, TOP_K, score="sigmoid", norm_topk=norm_topk, scale=2.5)
    torch.nn.init.normal_(router.weight)
    x = torch.randn(TOKENS, DIM)
    chosen, weights, scores = router(x)
    own = (x @ router.weight.t()).sigmoid().gather(1, chosen)
    torch.testing.assert_close(weights, 2.5 * (own / own.sum(1, keepdim=True) if norm_topk else own))
    torch.testing.assert_close(scores.sum(1), torch.ones(TOKENS))


def test_the_router_of_a_bfloat16_model_computes_in_float32() -> None:
    router, _, x = layer()
    router.weight.data = router.weight.data.bfloat16()
    x = x.detach().bfloat16()
    expected = (x.float() @ router.weight.float().t()).softmax(-1)
    assert torch.equal(router(x)[2], expected)


def test_counts_of_experts_without_tokens_are_zero() -> None:
    assert count_rows(torch.tensor([[3, 1], [3, 0]]), 5).tolist() == [1, 1, 0, 2, 0]
