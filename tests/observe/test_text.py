from pathlib import Path

from trainkit.run.end import RankFailure
from trainkit.run.events import Event, read_events
from trainkit.run.files import append_jsonl
from trainkit.run.history import attempts_of
from trainkit.run.rundir import RunDir

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
