"""Tests the root cause of a hang: the ranks that blocked the others."""

import json
from dataclasses import asdict, replace

import pytest

from tests.support.runs import launch_plan
from tests.support.said import said
from trainkit.folders import ensure_folder
from trainkit.job.blame import UNKNOWN
from trainkit.job.decision import Observed
from trainkit.job.failure.records import find_first_failure, suspect_host
from trainkit.job.hangs import HangRecord, hang_failure, missing_ranks, read_hangs
from trainkit.run.files import to_json, write_json

PLAN = launch_plan()
WAITING = ("wait (control.py:61)", "advance (loop.py:110)")


def record(rank, step=41, phase="backward", beat=2, **fields):
    place = {"rank": rank, "node_rank": rank // 2, "host": f"host{rank // 2}", "step": step, "phase": phase}
    waited = {"beat": beat, "waited_s": 312.4, "limit_s": 300.0, "usual_s": 0.8}
    value = HangRecord(**place, **waited, time=f"2026-01-01T00:00:0{rank}.000Z", stack=WAITING)
    return replace(value, **fields)


def test_records_are_read_by_rank_and_damaged_ones_passed_over(attempt):
    assert read_hangs(attempt) == []
    attempt.hangs_dir.mkdir()
    for rank in (2, 0):
        write_json(attempt.rank_hang(rank), asdict(record(rank)))
    attempt.rank_hang(1).write_text("{")
    write_json(attempt.rank_hang(3), {"rank": 3})
    assert read_hangs(attempt) == [record(0), record(2)]
    assert missing_ranks(PLAN, read_hangs(attempt)) == [1, 3]


@pytest.mark.parametrize(
    ("late", "phase"),
    [
        ({"step": 41, "beat": 0}, "data"),
        ({"step": 40, "beat": 9}, "save"),
        ({"step": None, "beat": 4}, "load"),
    ],
)
def test_the_one_that_is_behind(attempt, late, phase):
    records = [record(rank) for rank in range(4)]
    records[2] = replace(records[2], **late, phase=phase)
    found = to_json(hang_failure(attempt, PLAN, records))
    said(found.pop("message"))
    expected = {"rank": 2, "node_rank": 1, "host": "host1", "time": "2026-01-01T00:00:00.000Z"}
    assert found == {**expected, "step": late["step"], "type": "Hang", "exit_code": 70, "final": False}


def write_flights(attempt, calls, backend="nccl"):
    """Write a flight record of each rank with its last call, which is open unless it is marked as done."""
    for folder in (attempt.flight_dir, attempt.stacks_dir):
        ensure_folder(folder)
    for rank, (number, op, state) in calls.items():
        entry = {"record_id": number, "process_group": ["0", "default_pg"], "collective_seq_id": number}
        entry |= {
            "profiling_name": f"{backend}:{op}",
            "time_created_ns": 1,
            "input_sizes": [[8]],
            "state": state,
        }
        (attempt.flight_dir / f"rank-{rank}").write_text(json.dumps({"entries": [entry]}))


OPEN, DONE = (12, "all_reduce", "scheduled"), (11, "all_reduce", "completed")


def test_the_flight_records_name_all_ranks_that_block_the_others(attempt):
    """Rank 0 is behind in its phases. It waits for ranks 2 and 3, as rank 1 does."""
    write_flights(attempt, {0: OPEN, 1: OPEN, 2: DONE, 3: DONE})
    records = [record(0, beat=1), record(1), record(2), record(3)]
    verdict = hang_failure(attempt, PLAN, records)
    assert (verdict.rank, verdict.node_rank, verdict.host, verdict.step) == (2, 1, "host1", 41)
    said(verdict.message)
    assert suspect_host(verdict) == ("host1", "culprit")
    write_flights(attempt, {1: DONE})
    assert hang_failure(attempt, PLAN, records).host is None, "they are on two hosts"


OTHER = (12, "barrier", "scheduled")


@pytest.mark.parametrize(
    ("calls", "rank"), [({}, None), ({3: OTHER}, 3), (dict.fromkeys((1, 3), OTHER), None)]
)
def test_no_host_is_at_fault_where_nobody_is_named_or_the_program_differs(attempt, calls, rank):
    """The rank that is behind in its phases is not named either, unlike by the rule without records."""
    write_flights(attempt, dict.fromkeys(range(4), OPEN) | calls)
    records = [record(0, beat=0), *(record(other) for other in (1, 2, 3))]
    verdict = hang_failure(attempt, PLAN, records)
    assert (verdict.rank, verdict.host) == (rank, None)
    assert suspect_host(verdict) is None
    assert (UNKNOWN in verdict.message) is (rank is None)
    said(verdict.message)


def test_a_rank_without_a_report_blocks_those_that_wait_for_it(attempt):
    write_flights(attempt, dict.fromkeys((0, 1, 3), OPEN))
    verdict = hang_failure(attempt, PLAN, [record(0), record(1), record(3)])
    assert (verdict.rank, verdict.host) == (2, "host1")
    said(verdict.message)


def test_after_a_timeout_the_rank_that_the_others_waited_for_failed_first(attempt):
    """torch ends a rank that has waited for too long, but this rank is not the root cause."""
    error = {"rank": 0, "host": "host0", "type": "exit", "exit_code": 134, "time": "2026-01-01T00:00:00Z"}
    error["message"] = "killed by SIGABRT: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL("
    write_json(attempt.rank_error(0), error)
    observed = Observed(exits=[(0, 134)])
    assert find_first_failure(attempt, PLAN, observed).rank == 0
    write_flights(attempt, dict.fromkeys((0, 1, 3), OPEN))
    verdict = find_first_failure(attempt, PLAN, observed)
    assert (verdict.rank, verdict.type) == (2, "Hang")
    said(verdict.message)
    write_flights(attempt, {2: OPEN})
    assert find_first_failure(attempt, PLAN, observed).rank == 0, "nobody is named"


def test_nobody_is_named_for_data_of_another_size(attempt):
    """gloo ends the receiving rank, but other ranks that lose their connection to it may fail earlier."""
    lost = {"rank": 0, "host": "host0", "type": "RuntimeError", "time": "2026-01-01T00:00:00Z"}
    write_json(attempt.rank_error(0), lost | {"message": "Connection reset by peer", "exit_code": 1})
    ended = {"rank": 3, "host": "host1", "type": "exit", "exit_code": 134, "time": "2026-01-01T00:00:09Z"}
    message = "killed by SIGABRT: 8 vs 4. Is there a distributed collective mismatch in your code?"
    write_json(attempt.rank_error(3), ended | {"message": message})
    verdict = find_first_failure(attempt, PLAN, Observed(exits=[(0, 134)]))
    assert (verdict.rank, verdict.host) == (None, None)
    assert verdict.message == f"{UNKNOWN}: rank 3 failed: {message}"
    # The ranks write their flight records if they can.
    write_flights(attempt, dict.fromkeys(range(3), (12, "all_reduce", "scheduled")), "gloo")
    verdict = find_first_failure(attempt, PLAN, Observed(exits=[(0, 134)]))
    assert (verdict.rank, verdict.host) == (3, None), "it called something else itself"
    write_flights(attempt, {1: (12, "all_gather", "scheduled")}, "gloo")
    verdict = find_first_failure(attempt, PLAN, Observed(exits=[(0, 134)]))
    said(verdict.message)


def test_ranks_that_cannot_connect_get_a_hint(attempt):
    verdict = hang_failure(attempt, PLAN, [record(rank, step=None, phase="connect") for rank in range(4)])
    said(verdict.message)
    assert all(word in verdict.hint for word in ("trainkit doctor", "launch.network", "NCCL_DEBUG"))
    assert hang_failure(attempt, PLAN, [record(rank) for rank in range(4)]).hint is None


def test_before_the_first_step_nothing_is_usual(attempt):
    records = [record(rank, step=None, phase="load", usual_s=None) for rank in range(4)]
    message = "no progress for 312 s, in load; no rank is behind the others"
    assert hang_failure(attempt, PLAN, records).message == message
    plan = replace(PLAN, num_nodes=1, workers_per_node=1)
    said(hang_failure(attempt, plan, records[:1]).message)


def test_at_the_same_position_the_one_that_is_elsewhere_in_the_code(attempt):
    records = [record(rank) for rank in range(4)]
    verdict = hang_failure(attempt, PLAN, records)
    assert (verdict.rank, verdict.host) == (0, None), "nothing tells them apart"
    assert suspect_host(verdict) is None
    records[3] = replace(records[3], stack=("read (disk.py:3)",))
    verdict = hang_failure(attempt, PLAN, records)
    assert (verdict.rank, verdict.host) == (3, "host1")
    records[2] = replace(records[2], stack=("read (disk.py:3)",))
    assert hang_failure(attempt, PLAN, records).rank == 0, "two against two"


def test_a_rank_that_says_nothing_comes_before_one_that_is_behind(attempt):
    records = [record(0), record(1, beat=0, phase="data"), record(3)]
    verdict = hang_failure(attempt, PLAN, records)
    assert (verdict.rank, verdict.node_rank, verdict.host, verdict.step) == (2, 1, "host1", 41)
    said(verdict.message)


def test_the_host_of_a_node_that_says_nothing(attempt):
    write_json(attempt.rendezvous_file, {"hosts": ["host0", "far-away"]})
    verdict = hang_failure(attempt, PLAN, [record(0), record(1)])
    assert (verdict.rank, verdict.host) == (2, "far-away")
    said(verdict.message)
    attempt.rendezvous_file.write_text("{}")
    assert hang_failure(attempt, PLAN, [record(0), record(1)]).host is None
