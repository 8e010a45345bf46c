import pytest

from trainkit.job.failures import agent_verdict, find_verdict, log_tail, record_silent_death
from trainkit.rundir import RunDir, read_json, write_json


@pytest.fixture
def attempt(tmp_path):
    attempt = RunDir(tmp_path).attempt(1)
    attempt.create()
    return attempt


def record(attempt, rank, time, **fields):
    value = {"rank": rank, "node_rank": 0, "host": "h", "time": time, "step": 3, "type": "E", "message": "m"}
    write_json(attempt.rank_error(rank), {**value, "traceback": "…", **fields})


def test_first_in_time(attempt):
    record(attempt, 0, "2026-01-01T00:00:02.000Z")
    record(attempt, 1, "2026-01-01T00:00:01.000Z")
    assert find_verdict(attempt) == {
        "rank": 1,
        "node_rank": 0,
        "host": "h",
        "time": "2026-01-01T00:00:01.000Z",
        "step": 3,
        "type": "E",
        "message": "m",
        "exit_code": None,
        "final": False,
    }


@pytest.mark.parametrize(("code", "first"), [(137, 1), (139, 1), (134, 0), (3, 0)])
def test_killed_rank_comes_before_those_that_noticed(attempt, code, first):
    record(attempt, 0, "2026-01-01T00:00:01.000Z")
    record(attempt, 1, "2026-01-01T00:00:02.000Z", type="exit", exit_code=code)
    assert find_verdict(attempt)["rank"] == first


def test_damaged_record_is_passed_over(attempt):
    attempt.rank_error(0).write_text("{")
    assert find_verdict(attempt) is None
    record(attempt, 1, "2026-01-01T00:00:01.000Z")
    assert find_verdict(attempt)["rank"] == 1


def test_silent_death_keeps_the_last_lines_and_never_replaces_a_record(attempt):
    attempt.rank_log(0).write_text("\n".join(str(number) for number in range(100)))
    record_silent_death(attempt, 0, 0, 137)
    value = read_json(attempt.rank_error(0))
    assert (value["type"], value["message"]) == ("exit", "killed by SIGKILL")
    assert value["log_tail"] == [str(number) for number in range(80, 100)]
    record_silent_death(attempt, 0, 0, 1)
    assert read_json(attempt.rank_error(0)) == value


def test_no_log(attempt):
    assert log_tail(attempt.rank_log(5)) == []


def test_job_that_failed_outside_its_workers():
    assert agent_verdict(2, "killed")["message"] == "killed (agent of node 2)"
    assert agent_verdict(None, "no port")["message"] == "no port"
