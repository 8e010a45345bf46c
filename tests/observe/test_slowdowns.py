"""Ranks that are slow, as `status` tells of them."""

from __future__ import annotations

from pathlib import Path

from trainkit.observe.text import slowdown_line
from trainkit.run.events import open_slowdowns
from trainkit.run.files import append_jsonl
from trainkit.run.rundir import RunDir

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
    assert [slowdown_line(event) for event in open_slowdowns(run, 2)] == [
        "rank 2 on b is slow since step 61 (compute): 190 ms a step, the other ranks 70 ms",
        "the run is slow since step 81 (network): 190 ms a step, 70 ms before",
    ]
