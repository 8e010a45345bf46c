"""Tests the z-loss, and that its gradient and soft caps are the same however the loss is computed."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.support.models import ALONE, nano, sample_keys, tokens
from tests.support.parity import Case, assert_same_curves, curve, run_cases, train, worst_difference
from trainkit.run.rundir import AttemptDir
from trainkit.trainer import build
from trainkit.trainer.causal_lm import IGNORE_LABEL, Microbatch, nll_sum
from trainkit.trainer.forward_backward import ForwardContext, SequentialForwardBackward
from trainkit.trainer.progress import Progress

CAP, COEFFICIENT = 0.25, 0.5


def test_the_gradient_and_not_the_value_contains_the_z_loss():
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 6, 11), torch.randint(0, 11, (2, 6))
    labels[0, 2:4] = IGNORE_LABEL
    given, expected = (logits.clone().requires_grad_() for _ in range(2))
    value = nll_sum(given, labels, CAP, COEFFICIENT)
    capped = CAP * torch.tanh(expected / CAP)
    valid = capped[labels != IGNORE_LABEL]
    entropy = F.cross_entropy(valid, labels[labels != IGNORE_LABEL], reduction="sum")
    (entropy + COEFFICIENT * valid.logsumexp(-1).square().sum()).backward()
    value.backward()
    torch.testing.assert_close(value, entropy)
    torch.testing.assert_close(given.grad, expected.grad)
    with torch.no_grad():
        torch.testing.assert_close(nll_sum(logits, labels, CAP, COEFFICIENT), entropy.detach())


def test_a_loss_in_parts_has_the_z_loss_of_the_whole():
    micro, found = Microbatch(tokens(), tokens(seed=1), sample_keys()), []
    for chunks in (1, 3):
        model, losses = nano(), []
        context = ForwardContext(ALONE, partial(nll_sum, cap=CAP, z_loss=COEFFICIENT), False)
        passes = SequentialForwardBackward(lambda enabled: None, Progress(), model, context, chunks)
        passes.accumulate_gradient([micro], torch.tensor(0.25), losses.append)
        found.append((losses, [param.grad for param in model.parameters()]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)


def train_in_parts(rank: int, attempt: AttemptDir) -> None:
    """Train as one rank with a limit on logits that one sample exceeds, as with a large vocabulary."""
    build.loss_chunks = lambda layout, *_: 3 if layout.tp * layout.pp == 1 else 1
    train(rank, attempt)


CASES = [
    Case("compiled", 1, {"compile": True}),
    Case("shard", 2, {"dp_shard": 2}),
    Case("tp", 2, {"tp": 2}),
    Case("tp-whole-logits", 2, {"tp": 2, "loss_parallel": False}),
    Case("cp", 2, {"cp": 2}),
    Case("pp", 2, {"pp": 2}),
    Case("zero-bubble-tp", 4, {"pp": 2, "tp": 2, "pp_schedule": "zbv"}),
]


@pytest.mark.slow
def test_every_layout_has_the_same_z_loss(tmp_path: Path) -> None:
    options = ("train.steps=3", f"train.z_loss={COEFFICIENT}", f"model.logit_soft_cap={CAP}")
    run_cases(tmp_path, [Case("alone", 1, {}), *CASES], options)
    run_cases(tmp_path, [Case("parts", 1, {})], options, function=train_in_parts)
    run_cases(tmp_path, [Case("without", 1, {}, ("train.z_loss=0",))], options)
    assert_same_curves(tmp_path, [*CASES, Case("parts", 1, {})])
    assert worst_difference(tmp_path / "without", tmp_path / "alone") > 1e-2
    first, plain = (curve(tmp_path / name)[0] for name in ("alone", "without"))
    assert first[1] == plain[1], "the loss of the first step does not contain the z-loss"
