"""When a run restarts to continue without a slow host."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import make_attempt
from trainkit.errors import TrainkitError
from trainkit.job import progress_watch
from trainkit.job.decision import MAX_SLOW_RESTARTS, SlowHost
from trainkit.job.progress_watch import SlowHostWatch
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.slurm_request import SlurmRequest
from trainkit.run.events import log_event
from trainkit.run.files import read_json, write_json
from trainkit.run.record import AUTO_RESTART, add_slurm_attempt
from trainkit.run.rundir import AttemptDir

SLOW = {"since_step": 1200, "phase": "compute", "ratio": 2.0}


class Played:
    """A watch of a job of two nodes, whose clock a test moves."""

    def __init__(self, attempt: AttemptDir, hosts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.attempt, self.now_s = attempt, 0.0
        monkeypatch.setattr(progress_watch.time, "monotonic", lambda: self.now_s)
        plan = LaunchPlan.from_dict(read_json(attempt.plan_file))
        requeue = replace(plan.requeue, slow_hosts="restart", slow_after_s=300.0)
        plan = replace(plan, requeue=requeue, num_nodes=2, slurm=SlurmRequest({"nodes": 2}))
        self.watch = SlowHostWatch(attempt, plan, hosts)

    def event(self, name: str, rank: int | None, host: str | None, attempt: int | None = None) -> None:
        number = self.attempt.number if attempt is None else attempt
        log_event(self.attempt.run, number, name, **({"rank": rank, "host": host} if rank else {}), **SLOW)

    def after(self, seconds: float) -> SlowHost | None:
        self.now_s += seconds
        return self.watch.poll()


@pytest.fixture
def spare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(make_attempt(tmp_path / "run"), ["a", "b", "c"], monkeypatch)


def test_a_rank_that_stays_slow_makes_its_host_be_left(spare: Played) -> None:
    spare.event("slow_rank", 5, "b")
    assert spare.after(10) is None
    assert spare.after(299) is None
    assert spare.after(2) == SlowHost("b", "rank 5 slow since step 1200 (compute)")


def test_a_rank_that_recovers_a_slow_run_and_other_attempts_do_not_count(spare: Played) -> None:
    spare.event("slow_rank", 5, "b")
    assert spare.after(200) is None
    spare.event("slow_rank_over", 5, "b")
    spare.event("slow_run", None, None)
    spare.event("slow_rank", 3, "a", attempt=7)
    spare.event("slow_rank", 3, "elsewhere")
    assert spare.after(200) is None
    assert spare.after(1000) is None


@pytest.mark.parametrize("answer", [["b"], [], TrainkitError("Slurm is away")])
def test_without_a_spare_node_slurm_must_accept_the_job_without_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], answer: Any
) -> None:
    asked: list[list[str]] = []

    def excludable(hosts: list[str], request: SlurmRequest) -> list[str]:
        asked.append(list(hosts))
        if isinstance(answer, Exception):
            raise answer
        return list(answer)

    monkeypatch.setattr(progress_watch, "excludable", excludable)
    played = Played(make_attempt(tmp_path / "run"), ["a", "b"], monkeypatch)
    played.event("slow_rank", 5, "b")
    played.after(1)
    found = played.after(301)
    assert (found is not None) == (answer == ["b"])
    assert asked == [["b"]]
    if found is None:
        assert played.after(301) is None  # said and asked once
        assert asked == [["b"]]
        assert capfd.readouterr().out.count("not restarting without b (rank 5 slow since step 1200") == 1


def test_a_run_is_restarted_a_few_times_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(MAX_SLOW_RESTARTS):
        attempt = make_attempt(tmp_path / "run")
        write_json(attempt.end_file, {"cause": "slow_host", "mark": 1})
    attempt = make_attempt(tmp_path / "run")
    for number in range(1, attempt.number + 1):
        add_slurm_attempt(attempt.run, number, "7", "submit" if number == 1 else AUTO_RESTART, "sbatch")
    played = Played(attempt, ["a", "b", "c"], monkeypatch)
    played.event("slow_rank", 5, "b")
    played.after(1)
    assert played.after(301) is None
