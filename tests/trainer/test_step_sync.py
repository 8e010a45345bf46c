"""Tests the step report: packed on each rank, added up, and read once."""

import pytest
import torch

from tests.support.models import ALONE
from trainkit.trainer.distributed import World
from trainkit.trainer.step_sync import ReportReadback, StepReport, all_reduce_sum, any_rank, pack_report

TWO = World(0, 2, torch.device("cpu"), None, None)


def report(nll_sum: float, num_tokens: int, grad_norm: float = 1.0) -> StepReport:
    packed = pack_report(ALONE, torch.tensor(nll_sum), num_tokens, stop=False, save=False, data_wait_s=0.0)
    return ReportReadback(ALONE, packed, torch.tensor(grad_norm)).finish()


def test_ranks_are_added_up():
    parts = [
        pack_report(TWO, torch.tensor(30.0), 10, stop=False, save=True, data_wait_s=0.25),
        pack_report(TWO, torch.tensor(60.0), 35, stop=True, save=False, data_wait_s=0.75),
    ]
    readout = ReportReadback(TWO, parts[0] + parts[1], torch.tensor(3.5))
    assert readout.finish() == StepReport(
        num_tokens=45, loss=2.0, grad_norm=3.5, finite=True, stop=True, save=True, data_wait_s=0.5
    )


def test_nobody_asks_for_anything():
    quiet = report(4.0, 2)
    assert (quiet.stop, quiet.save, quiet.finite, quiet.loss) == (False, False, True, 2.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_noticed_wherever_it_is(bad):
    assert not report(bad, 2).finite
    assert not report(4.0, 2, grad_norm=bad).finite


def test_no_token_is_no_loss():
    assert report(0.0, 0).loss == 0.0


def test_counts_of_tokens_are_exact_beyond_float32():
    assert report(1.0, 2**30 + 1).num_tokens == 2**30 + 1


def test_gradients_do_not_reach_the_report():
    nll_sum = torch.ones((), requires_grad=True) * 2
    assert not pack_report(ALONE, nll_sum, 1, stop=False, save=False, data_wait_s=0.0).requires_grad


def test_one_process_agrees_with_itself():
    assert any_rank(True, ALONE)
    assert not any_rank(False, ALONE)
    assert all_reduce_sum(torch.tensor([3.0]), ALONE).item() == 3.0
