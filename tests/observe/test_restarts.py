from trainkit.cli.status import restarts_line
from trainkit.observe.status import find_restarts
from trainkit.run.events import Event
from trainkit.run.history import attempts_of


def event(second, attempt, name, **fields):
    return Event({"time": f"2026-01-01T12:00:{second:06.3f}Z", "attempt": attempt, "event": name, **fields})


def restarts_in(events):
    return find_restarts(attempts_of(events))


PREEMPTED = [
    event(1, 1, "started"),
    event(2, 1, "checkpoint_commit", step=5),
    event(3, 1, "signal", signal="SIGTERM"),
    event(3.5, 1, "checkpoint_commit", step=7, reason="stop"),
    event(4, 1, "requeue_decision", action="requeue", cause="preempted"),
    event(4.25, 1, "stopped"),
    event(20, 2, "submitted"),
    event(20.25, 2, "started"),
    event(30, 2, "first_step", step=8),
]
DIED = "2026-01-01T12:00:30.500Z"
CRASHED = [
    event(31, 2, "rank_failed", rank=1, host="n1", type="exit", message="killed by SIGKILL", failed_at=DIED),
    event(31, 2, "requeue_decision", action="restart", cause="crash"),
    event(31, 2, "stopped"),
    event(31, 3, "started"),
]


def test_each_part_of_the_way_back_is_measured():
    [restart] = restarts_in(PREEMPTED)
    assert (restart.attempt, restart.action, restart.cause) == (1, "requeue", "preempted")
    parts = (restart.save_s, restart.end_s, restart.queue_s, restart.start_s, restart.total_s)
    assert parts == (0.5, 0.75, 16.0, 9.75, 27.0)
    assert restarts_line([restart]) == (
        "1 (1 preempted); last: requeue in 27.0 s (save 0.5, end 0.8, queue 16.0, start 9.8)"
    )


def test_a_failure_is_counted_from_the_moment_it_happened():
    first, second = restarts_in(PREEMPTED + CRASHED)
    assert first.cause == "preempted"
    parts = (second.save_s, second.end_s, second.queue_s, second.start_s, second.total_s)
    assert parts == (None, 0.5, 0.0, None, None)
    assert restarts_line([first, second]) == (
        "2 (1 preempted, 1 crash); last: restart (end 0.5, queue 0.0);"
        " rank 1 failed first on n1: killed by SIGKILL"
    )


def test_an_end_for_good_is_no_restart():
    decision = event(4, 1, "requeue_decision", action="failed", cause="crash")
    assert restarts_in([event(1, 1, "started"), decision, event(4, 1, "stopped")]) == []
    assert restarts_in([]) == []
