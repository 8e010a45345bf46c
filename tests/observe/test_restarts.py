from pathlib import Path

from trainkit.cli.status import restarts_line
from trainkit.observe.status import find_restarts
from trainkit.run.end import RankFailure
from trainkit.run.events import Event, read_events
from trainkit.run.files import append_jsonl
from trainkit.run.history import attempts_of
from trainkit.run.rundir import RunDir


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


TIME = "2026-01-01T12:00:01.000Z"


def test_the_line_of_an_event():
    stopped = {"time": TIME, "attempt": 1, "event": "stopped", "exit_code": 75, "reason": "so"}
    assert Event(stopped).line == "12:00:01  attempt 1  stopped  exit_code=75  (so)"
    evaluated = {"time": TIME, "attempt": 2, "event": "evaluated", "val_loss": 5.822849869728088}
    assert Event(evaluated).line == "12:00:01  attempt 2  evaluated  val_loss=5.82285"


def test_failure_line():
    verdict = RankFailure(rank=3, host="n1", step=37, type="ValueError", message="bad")
    assert verdict.line == "rank 3 failed first on n1 at step 37: ValueError: bad"
    silent = RankFailure(rank=3, host="n1", type="exit", message="killed by SIGKILL")
    assert silent.line == "rank 3 failed first on n1: killed by SIGKILL"


SLOW = {"phase": "compute", "ratio": 2.0, "own_s": 0.19, "usual_s": 0.07}


def test_slow_ranks_are_reported_until_they_are_no_longer_slow(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for event in (
        {"event": "slow_rank", "attempt": 1, "rank": 1, "host": "a", "since_step": 11, **SLOW},
        {"event": "slow_rank", "attempt": 2, "rank": 2, "host": "b", "since_step": 61, **SLOW},
        {"event": "slow_rank", "attempt": 2, "rank": 3, "host": "c", "since_step": 71, **SLOW},
        {"event": "slow_run", "attempt": 2, "since_step": 81, **SLOW, "phase": "network"},
        {"event": "slow_rank_over", "attempt": 2, "rank": 3, "host": "c", "since_step": 71, **SLOW},
    ):
        append_jsonl(run.events_file, event)
    assert [event.slowdown() for event in attempts_of(read_events(run))[2].slow.values()] == [
        "rank 2 on b is slow since step 61 (compute): 190 ms a step, the other ranks 70 ms",
        "the run is slow since step 81 (network): 190 ms a step, 70 ms before",
    ]
