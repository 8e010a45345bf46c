"""Which rank of a launcher ended first: on real processes that their parent has not waited for."""

from __future__ import annotations

import subprocess
import time

import pytest

from trainkit.job.failure.launcher_report import LaunchedRanks, RankExit


def test_the_first_rank_that_fails_is_known_before_its_parent_waits_for_it() -> None:
    """Rank 4 finishes, rank 6 is killed, and rank 5 ends because of that."""
    argv = {4: ["true"], 5: ["sleep", "60"], 6: ["sleep", "60"]}
    processes = {rank: subprocess.Popen(words) for rank, words in argv.items()}
    ranks = LaunchedRanks()
    try:
        ranks.watch({rank: process.pid for rank, process in processes.items()})
        ranks.watch({6: processes[6].pid})
        processes[6].kill()
        deadline_s = time.monotonic() + 30.0
        while ranks.first_exit is None and time.monotonic() < deadline_s:
            time.sleep(0.001)
        processes[5].terminate()
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    assert (ranks.first_exit, len(ranks)) == (RankExit(-9, 6), 3)


@pytest.mark.parametrize(
    ("codes", "saved"), [((75, 0), True), ((0, 0), False), ((75, 1), False), ((75, -15), False)]
)
def test_ranks_have_saved_when_all_say_so(codes: tuple[int, int], saved: bool) -> None:
    ends = [f"exit {code}" if code >= 0 else f"kill {code} $$; sleep 9" for code in codes]
    processes = [subprocess.Popen(["sh", "-c", f"read line; {end}"], stdin=subprocess.PIPE) for end in ends]
    ranks = LaunchedRanks()
    ranks.watch({rank: process.pid for rank, process in enumerate(processes)})
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    deadline_s = time.monotonic() + 30.0
    while len(ranks.codes) < len(codes) and time.monotonic() < deadline_s:
        time.sleep(0.001)
    for process in processes:
        process.wait()
    assert (sorted(ranks.codes), ranks.have_saved) == (sorted(codes), saved)


def test_a_process_that_is_gone_is_not_watched() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    ranks = LaunchedRanks()
    ranks.watch({0: process.pid})
    assert ranks.first_exit is None
