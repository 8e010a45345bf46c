from trainkit.observe.text import duration, event_line, failure_line
from trainkit.run.failure import RankFailure


def test_event_line():
    event = {
        "time": "2026-01-01T12:00:01.000Z",
        "attempt": 1,
        "event": "stopped",
        "exit_code": 75,
        "reason": "so",
    }
    assert event_line(event) == "12:00:01  attempt 1  stopped  exit_code=75  (so)"


def test_long_numbers_of_events_are_cut():
    event = {
        "time": "2026-01-01T12:00:01.000Z",
        "attempt": 2,
        "event": "evaluated",
        "val_loss": 5.822849869728088,
    }
    assert event_line(event) == "12:00:01  attempt 2  evaluated  val_loss=5.82285"


def test_failure_line():
    verdict = RankFailure(rank=3, host="n1", step=37, type="ValueError", message="bad")
    assert failure_line(verdict) == "rank 3 failed first on n1 at step 37: ValueError: bad"
    silent = RankFailure(rank=3, host="n1", type="exit", message="killed by SIGKILL")
    assert failure_line(silent) == "rank 3 failed first on n1: killed by SIGKILL"


def test_duration():
    shown = [duration(seconds) for seconds in (None, 0, 59.9, 61, 3_600, 90_000)]
    assert shown == ["-", "0s", "59s", "1m01s", "1h00m", "1d01h"]
