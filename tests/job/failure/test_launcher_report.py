"""Tests which rank failed first, by the launcher's report and the agent, after real kills."""

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.broken_runs import FOLDER
from tests.support.programs import wait_for
from tests.support.said import said
from trainkit.job.failure.launcher_report import LaunchedRanks, RankExit, first_exit
from trainkit.job.failure.records import first_rank_failure, killed_rank, record_silent_death
from trainkit.run.files import read_json
from trainkit.run.record import create_job

REPORTS = Path(__file__).with_name("launcher_reports")
TORCHRUN = yaml.safe_load((FOLDER / "torchrun-rank-killed.yaml").read_text())["files"]
OUTPUT = {
    "torchrun-first-node": TORCHRUN["attempts/001/logs/rank-0000.log"],
    "torchrun-second-node": TORCHRUN["attempts/001/logs/rank-0002.log"],
    **{path.stem: path.read_text() for path in REPORTS.glob("*.log")},
}


@pytest.mark.parametrize(
    ("name", "code", "rank"),
    [
        # The second node's launcher has stopped rank 3.
        ("torchrun-second-node", -9, 2),
        ("torchrun-first-node", 1, 0),
        # Rank 0 failed a moment after rank 1 was killed, and torchrun reports rank 0 as the root cause.
        ("accelerate-two-at-once", -9, 1),
        ("accelerate-one-rank", -9, None),
        # Rank 2 was killed. The report has the command of rank 3.
        ("deepspeed-second-node", -9, None),
    ],
)
def test_the_first_rank_to_fail(name, code, rank):
    found = first_exit(OUTPUT[name].splitlines())
    assert (found.code, found.rank) == (code, rank)
    assert str(abs(code)) in OUTPUT[name].splitlines()[found.index]


def test_a_rank_that_torchrun_killed_after_its_time_to_stop_was_not_the_first(attempt):
    late = OUTPUT["accelerate-two-at-once"].replace("11\n", "41\n", 1)
    found = first_exit(late.splitlines())
    assert (found.code, found.rank) == (1, 0)
    # Another exit code of the program says more than an old report.
    attempt.rank_log(0).write_text(OUTPUT["deepspeed-second-node"])
    assert killed_rank(attempt, 0, 3) is None


@pytest.mark.parametrize(
    ("name", "exit_code"), [("accelerate-two-at-once", 1), ("deepspeed-second-node", 247)]
)
def test_the_record_has_the_signal_and_the_rank(attempt, name, exit_code):
    attempt.rank_log(0).write_text(OUTPUT[name])
    killed = killed_rank(attempt, 0, exit_code)
    assert killed is not None
    record_silent_death(attempt, 0, 0, 137, killed=killed)
    record = read_json(attempt.rank_error(0))
    assert (record["type"], record["message"]) == ("RankKilled", "killed by SIGKILL")
    assert (record["rank"], record["exit_code"]) == (killed.rank, 137)


@pytest.mark.parametrize(
    ("name", "rank", "kind", "message", "place"),
    [
        ("torchrun-exception", 2, "ValueError", "bad sample 0", "train.py:7"),
        # With mp.spawn or ranks started by hand, the surviving ranks lose their connections.
        ("spawn-exception", 2, "ValueError", "bad sample", "train.py:6"),
        ("ranks-by-hand", 2, "ValueError", "bad sample", "train.py:7"),
        ("torchrun-exception-group", 0, "TypeError", "inner bad", "train.py:4"),
    ],
)
def test_the_record_has_the_exception_of_the_first_rank(attempt, name, rank, kind, message, place):
    create_job(attempt.run, backend="local", name="run", cwd="/home/me", code=None)
    attempt.rank_log(0).write_text(OUTPUT[name])
    record_silent_death(attempt, 0, 0, 1)
    found = first_rank_failure(attempt)
    assert (found.rank, found.type, found.message, found.code.place) == (rank, kind, message, place)
    assert found.log_tail[-1].startswith(kind)
    assert found.line.startswith(f"rank {rank} failed first")


def test_a_rank_that_ended_without_an_exception(attempt):
    quiet = "\n".join(line for line in OUTPUT["torchrun-exception"].splitlines() if "[rank" not in line)
    attempt.rank_log(0).write_text(quiet.replace("exitcode  : 1", "exitcode  : 3"))
    record_silent_death(attempt, 0, 0, 1)
    found = first_rank_failure(attempt)
    assert (found.rank, found.type) == (2, "exit")
    said(found.message)


def test_the_first_rank_that_fails_is_known_before_its_parent_waits_for_it():
    """Rank 4 finishes, rank 6 is killed, and rank 5 then ends because rank 6 is dead."""
    argv = {4: ["true"], 5: ["sleep", "60"], 6: ["sleep", "60"]}
    processes = {rank: subprocess.Popen(words) for rank, words in argv.items()}
    ranks = LaunchedRanks()
    try:
        ranks.watch({process.pid: rank for rank, process in processes.items()})
        ranks.watch({processes[6].pid: 6})
        processes[6].kill()
        wait_for(lambda: ranks.first_exit)
        processes[5].terminate()
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    assert (ranks.first_exit, len(ranks)) == (RankExit(-9, 6), 3)
    ranks = LaunchedRanks()
    ranks.watch({processes[6].pid: 0})
    assert ranks.first_exit is None, "a process that is gone is not watched"


@pytest.mark.parametrize(
    ("codes", "saved"), [((75, 0), True), ((0, 0), False), ((75, 1), False), ((75, -15), False)]
)
def test_ranks_have_saved_when_all_say_so(codes, saved):
    ends = [f"exit {code}" if code >= 0 else f"kill {code} $$; sleep 9" for code in codes]
    processes = [subprocess.Popen(["sh", "-c", f"read line; {end}"], stdin=subprocess.PIPE) for end in ends]
    ranks = LaunchedRanks()
    ranks.watch({process.pid: rank for rank, process in enumerate(processes)})
    for process in processes:
        process.stdin.close()
    wait_for(lambda: len(ranks.codes) == len(codes))
    for process in processes:
        process.wait()
    assert (sorted(ranks.codes), ranks.have_saved) == (sorted(codes), saved)
