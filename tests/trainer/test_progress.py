"""The position of a rank, and from when on it is said to hang."""

import time

import pytest

from trainkit.plan.launch import RequeuePolicy
from trainkit.trainer.progress import NUM_RECENT, Pulse
from trainkit.trainer.watchdog import PATIENT_S, ProgressWatch, limit_s

POLICY = RequeuePolicy(hang_factor=20.0, hang_min_s=300.0)


@pytest.fixture
def clock(monkeypatch):
    """The monotonic time of a pulse, to be set as ``clock[0]``."""
    now = [1000.0]
    monkeypatch.setattr("trainkit.trainer.progress.monotonic", lambda: now[0])
    monkeypatch.setattr("trainkit.trainer.watchdog.time.monotonic", lambda: now[0])
    return now


def do_step(pulse, clock, step, seconds=1.0):
    pulse.begin_step(step)
    for phase in ("forward", "backward", "update"):
        pulse.enter(phase)
    clock[0] += seconds
    pulse.end_step()


def test_position(clock):
    pulse = Pulse()
    assert pulse.position == (None, "start", 0, 1000.0)
    pulse.enter("build")
    assert pulse.position == (None, "build", 1, 1000.0)
    clock[0] += 2
    pulse.begin_step(7)
    assert pulse.position == (7, "data", 0, 1002.0)
    pulse.enter("forward")
    pulse.enter("backward")
    pulse.enter("forward")
    assert pulse.position == (7, "forward", 3, 1002.0), "a second microbatch is further than the first"


def test_usual_step_is_the_median_of_the_last_and_knows_nothing_of_validation(clock):
    pulse = Pulse()
    assert pulse.usual_s is None
    do_step(pulse, clock, 1, 60.0)
    assert pulse.usual_s == 60.0
    for step in (2, 3):
        do_step(pulse, clock, step, 2.0)
        pulse.enter("evaluate")
        clock[0] += 1000.0
    assert pulse.usual_s == 2.0
    for step in range(NUM_RECENT):
        do_step(pulse, clock, step, 0.5)
    assert pulse.usual_s == 0.5


def test_limits(clock):
    pulse = Pulse()
    assert limit_s("start", pulse, POLICY) is None
    assert limit_s("meet", pulse, POLICY) is None
    assert limit_s("build", pulse, POLICY) == PATIENT_S
    pulse.begin_step(1)
    assert limit_s("data", pulse, POLICY) == PATIENT_S, "nothing is usual yet"
    do_step(pulse, clock, 1)
    pulse.begin_step(2)
    assert limit_s("data", pulse, POLICY) == 300.0
    assert limit_s("evaluate", pulse, POLICY) == PATIENT_S, "the first one may compile"
    pulse.enter("evaluate")
    pulse.enter("save")
    assert limit_s("evaluate", pulse, POLICY) == 300.0
    pulse.enter("save")
    assert limit_s("save", pulse, POLICY) == limit_s("end", pulse, POLICY) == PATIENT_S


def test_a_slow_model_has_long_limits(clock):
    pulse = Pulse()
    do_step(pulse, clock, 1, 40.0)
    pulse.begin_step(2)
    assert limit_s("data", pulse, POLICY) == 800.0
    assert limit_s("data", pulse, RequeuePolicy(hang_factor=None)) is None
    assert limit_s("save", pulse, RequeuePolicy(hang_factor=100.0)) == 4000.0


class TestProgressWatch:
    @pytest.fixture
    def pulse(self, clock):
        pulse = Pulse()
        do_step(pulse, clock, 1)
        pulse.begin_step(2)
        return pulse

    @staticmethod
    def look_until(watch, clock, until_s):
        """What the looks of every second see, the last first."""
        while clock[0] < until_s:
            clock[0] += 1.0
            seen = watch.look(clock[0])
            if seen is not None:
                return seen
        return None

    def test_no_progress(self, pulse, clock):
        watch = ProgressWatch(pulse, POLICY, lambda: False)
        began_s = clock[0]
        hang = self.look_until(watch, clock, began_s + 1000)
        assert clock[0] == began_s + 301
        assert (hang.position, hang.waited_s, hang.limit_s) == (pulse.position, 301.0, 300.0)

    def test_progress(self, pulse, clock):
        watch = ProgressWatch(pulse, POLICY, lambda: False)
        for _ in range(10):
            assert self.look_until(watch, clock, clock[0] + 290) is None
            pulse.enter("forward")

    def test_who_waits_for_one_that_hangs_says_so_with_it(self, pulse, clock):
        watch = ProgressWatch(pulse, POLICY, lambda: True)
        began_s = clock[0]
        assert self.look_until(watch, clock, began_s + 1000) is not None
        assert clock[0] == began_s + 150, "but not one that has waited for a moment only"

    def test_whoever_may_take_long_says_so_with_it_too(self, pulse, clock):
        watch = ProgressWatch(pulse, POLICY, lambda: clock[0] > began_s + 400)
        began_s = clock[0]
        pulse.enter("save")
        hang = self.look_until(watch, clock, began_s + 1000)
        assert (hang.waited_s, hang.limit_s) == (401.0, PATIENT_S)

    def test_time_in_which_the_process_was_stopped_is_not_counted(self, pulse, clock):
        watch = ProgressWatch(pulse, POLICY, lambda: False)
        assert self.look_until(watch, clock, clock[0] + 200) is None
        clock[0] += 5000
        assert watch.look(clock[0]) is None
        assert self.look_until(watch, clock, clock[0] + 299) is None
        assert self.look_until(watch, clock, clock[0] + 10) is not None


def test_what_a_step_pays():
    """The calls of a step: a few microseconds, whatever the machine does beside."""
    pulse = Pulse()
    rounds = []
    for _ in range(20):
        started = time.perf_counter()
        for step in range(100):
            pulse.begin_step(step)
            pulse.enter("forward")
            pulse.enter("backward")
            pulse.enter("update")
            pulse.end_step()
        rounds.append((time.perf_counter() - started) / 100)
    assert min(rounds) < 10e-6
