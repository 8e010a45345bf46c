"""Tests the progress of a rank, and when the rank counts as hanging."""

import math

import pytest

from trainkit.job.signals import StopRequest
from trainkit.plan.launch import RequeuePolicy
from trainkit.run.rundir import RunDir
from trainkit.trainer.progress import (
    NUM_RECENT,
    SLOW_PHASE_LIMIT_S,
    Progress,
    RankInfo,
    Watchdog,
    phase_limit_s,
)

POLICY = RequeuePolicy(hang_factor=20.0, hang_min_s=300.0)


@pytest.fixture
def clock(monkeypatch):
    """Set the monotonic time of a progress with ``clock[0]``."""
    now = [1000.0]
    monkeypatch.setattr("trainkit.trainer.progress.time.monotonic", lambda: now[0])
    return now


def do_step(progress, clock, step, seconds=1.0):
    progress.begin_step(step)
    for phase in ("forward", "backward", "update"):
        progress.enter(phase)
    clock[0] += seconds
    progress.end_step()


def test_position(clock):
    progress = Progress()
    assert progress.current == (None, "start", 0, 1000.0)
    progress.enter("build")
    assert progress.current == (None, "build", 1, 1000.0)
    clock[0] += 2
    progress.begin_step(7)
    assert progress.current == (7, "data", 0, 1002.0)
    progress.enter("forward")
    progress.enter("backward")
    progress.enter("forward")
    assert progress.current == (7, "forward", 3, 1002.0), "a second microbatch is further than the first"


def test_a_phase_within_another(clock):
    progress = Progress()
    progress.begin_step(3)
    progress.enter("evaluate")
    clock[0] += 400
    with progress.within("save"):
        assert progress.current == (3, "save", 2, 1400.0)
        assert phase_limit_s("save", progress, POLICY) == SLOW_PHASE_LIMIT_S
        clock[0] += 900
    assert progress.current == (3, "evaluate", 3, 2300.0), "its time begins anew"


def test_usual_step_is_the_median_of_the_last_and_knows_nothing_of_validation(clock):
    progress = Progress()
    assert progress.median_step_s is None
    do_step(progress, clock, 1, 60.0)
    assert progress.median_step_s == 60.0
    for step in (2, 3):
        do_step(progress, clock, step, 2.0)
        progress.enter("evaluate")
        clock[0] += 1000.0
    assert progress.median_step_s == 2.0
    for step in range(NUM_RECENT):
        do_step(progress, clock, step, 0.5)
    assert progress.median_step_s == 0.5


def test_limits(clock):
    progress = Progress()
    assert phase_limit_s("start", progress, POLICY) is None
    assert phase_limit_s("rendezvous", progress, POLICY) is None
    policies = (RequeuePolicy(hang_min_s=1.0), RequeuePolicy(hang_min_s=500.0))
    assert [phase_limit_s("connect", progress, policy) for policy in policies] == [240.0, 500.0]
    assert phase_limit_s("build", progress, POLICY) == SLOW_PHASE_LIMIT_S
    progress.begin_step(1)
    assert phase_limit_s("data", progress, POLICY) == SLOW_PHASE_LIMIT_S, "nothing is usual yet"
    do_step(progress, clock, 1)
    progress.begin_step(2)
    assert phase_limit_s("data", progress, POLICY) == 300.0
    assert phase_limit_s("evaluate", progress, POLICY) == SLOW_PHASE_LIMIT_S, "the first one may compile"
    progress.enter("evaluate")
    progress.enter("save")
    assert phase_limit_s("evaluate", progress, POLICY) == 300.0
    progress.enter("save")
    assert (
        phase_limit_s("save", progress, POLICY)
        == phase_limit_s("end", progress, POLICY)
        == SLOW_PHASE_LIMIT_S
    )


def test_a_slow_model_has_long_limits(clock):
    progress = Progress()
    do_step(progress, clock, 1, 40.0)
    progress.begin_step(2)
    assert phase_limit_s("data", progress, POLICY) == 800.0
    assert phase_limit_s("data", progress, RequeuePolicy(hang_factor=None)) is None
    assert phase_limit_s("save", progress, RequeuePolicy(hang_factor=100.0)) == 4000.0


class TestProgressWatch:
    @pytest.fixture
    def progress(self, clock):
        progress = Progress()
        do_step(progress, clock, 1)
        progress.begin_step(2)
        return progress

    @pytest.fixture
    def watchdog(self, progress):
        class Alone(Watchdog):
            others_hang_at_s = math.inf

            def _others_hang(self):
                return self._checked_s >= self.others_hang_at_s

        return Alone(RunDir("/nowhere").attempt(1), RankInfo(0, 0, "h"), progress, StopRequest())

    @staticmethod
    def check_until(watchdog, clock, until_s):
        """Check once per second until a time, and return the first hang."""
        while clock[0] < until_s:
            clock[0] += 1.0
            seen = watchdog.find_hang(clock[0], POLICY)
            if seen is not None:
                return seen
        return None

    def test_no_progress(self, watchdog, progress, clock):
        began_s = clock[0]
        hang = self.check_until(watchdog, clock, began_s + 1000)
        assert clock[0] == began_s + 301
        assert (hang.current, hang.waited_s, hang.limit_s) == (progress.current, 301.0, 300.0)

    def test_progress(self, watchdog, progress, clock):
        for _ in range(10):
            assert self.check_until(watchdog, clock, clock[0] + 290) is None
            progress.enter("forward")

    def test_who_waits_for_one_that_hangs_says_so_with_it(self, watchdog, clock):
        watchdog.others_hang_at_s = began_s = clock[0]
        assert self.check_until(watchdog, clock, began_s + 1000) is not None
        assert clock[0] == began_s + 150, "but not one that has waited for a moment only"

    def test_time_in_the_debugger_is_not_counted(self, watchdog, progress, clock):
        assert self.check_until(watchdog, clock, clock[0] + 200) is None
        watchdog._resumed_s = clock[0]
        assert self.check_until(watchdog, clock, clock[0] + 300) is None
        assert self.check_until(watchdog, clock, clock[0] + 2) is not None

    def test_whoever_may_take_long_says_so_with_it_too(self, watchdog, progress, clock):
        began_s = clock[0]
        watchdog.others_hang_at_s = began_s + 401
        progress.enter("save")
        hang = self.check_until(watchdog, clock, began_s + 1000)
        assert (hang.waited_s, hang.limit_s) == (401.0, SLOW_PHASE_LIMIT_S)

    def test_time_in_which_the_process_was_stopped_is_not_counted(self, watchdog, progress, clock):
        assert self.check_until(watchdog, clock, clock[0] + 200) is None
        clock[0] += 5000
        assert watchdog.find_hang(clock[0], POLICY) is None
        assert self.check_until(watchdog, clock, clock[0] + 299) is None
        assert self.check_until(watchdog, clock, clock[0] + 10) is not None
