"""Tests when a run restarts to continue without a slow host."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.runs import make_attempt
from tests.support.said import said
from trainkit.capabilities.slow_ranks import slow_hosts
from trainkit.capabilities.slow_ranks.policy import SlowRanksPlan
from trainkit.capabilities.slow_ranks.slow_hosts import SlowHostWatch
from trainkit.job.decision import PlannedStop
from trainkit.plan.launch import LaunchPlan, SlurmRequest
from trainkit.run.events import log_event
from trainkit.run.files import read_json
from trainkit.run.rundir import AttemptDir

SLOW = {"since_step": 1200, "phase": "compute", "ratio": 2.0}


class Played:
    """A watch of a job on two nodes, with a fake clock."""

    def __init__(self, attempt: AttemptDir, hosts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.attempt, self.now_s = attempt, 0.0
        monkeypatch.setattr(slow_hosts.time, "monotonic", lambda: self.now_s)
        plan = LaunchPlan.from_dict(read_json(attempt.plan_file))
        plan = plan.with_part(SlowRanksPlan(slow_hosts="restart", slow_after_s=300.0))
        plan = replace(plan, num_nodes=2, slurm=SlurmRequest({"nodes": 2}))
        self.watch = SlowHostWatch(attempt, plan, hosts)

    def event(self, name: str, rank: int | None, host: str | None, attempt: int | None = None) -> None:
        number = self.attempt.number if attempt is None else attempt
        log_event(self.attempt.run, number, name, **({"rank": rank, "host": host} if rank else {}), **SLOW)

    def after(self, seconds: float) -> PlannedStop | None:
        self.now_s += seconds
        return self.watch.poll()


@pytest.fixture
def spare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(make_attempt(tmp_path / "run"), ["a", "b", "c"], monkeypatch)


def test_a_rank_that_stays_slow_makes_its_host_be_left(spare):
    spare.event("slow_rank", 5, "b")
    assert spare.after(10) is None
    assert spare.after(299) is None
    stop = spare.after(2)
    assert stop == PlannedStop("slow_host", stop.why, "b")
    said(stop.why)


def test_a_rank_that_recovers_a_slow_run_and_other_attempts_do_not_count(spare):
    spare.event("slow_rank", 5, "b")
    assert spare.after(200) is None
    spare.event("slow_rank_over", 5, "b")
    spare.event("slow_run", None, None)
    spare.event("slow_rank", 3, "a", attempt=7)
    spare.event("slow_rank", 3, "elsewhere")
    assert spare.after(200) is None
    assert spare.after(1000) is None


def test_a_run_that_may_not_restart_again_is_left_alone(spare, capfd):
    spare.watch._policy = replace(spare.watch._policy, max=0)
    spare.event("slow_rank", 5, "b")
    spare.after(1)
    assert [spare.after(301), spare.after(301)] == [None, None]
    said = "not restarting without b (rank 5 has been slow since step 1200 (compute)): requeue.max is 0"
    assert capfd.readouterr().out.count(said) == 1
