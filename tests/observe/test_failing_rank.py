"""`diagnose` names the rank that was killed below a launcher, by its number in the world, and the signal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.job.failure.test_launcher_report import OUTPUT
from tests.observe.test_diagnose import failed, newest
from trainkit.cli.diagnose import diagnosis_text
from trainkit.observe.attempt_files import log_of
from trainkit.observe.diagnose import Diagnosis, diagnose
from trainkit.observe.signatures import load_signatures
from trainkit.run.files import write_json
from trainkit.run.history import read_plan
from trainkit.run.rundir import RunDir

LOST = {
    **{"rank": 0, "node_rank": 0, "host": "n1", "time": "2026-11-25T23:52:01Z", "exit_code": 1},
    **{"type": "RuntimeError", "message": "[…] Read error [10.0.0.2]:31370: Connection reset by peer"},
}
OLD = {"node_rank": 1, "host": "n2", "time": "2026-11-25T23:52:02Z"}
"""As versions until November 2026 recorded the launcher of the second node."""


def diagnosed(folder: Path, output: str, *records: dict[str, Any], num_ranks: int = 2) -> Diagnosis:
    """A run on two nodes, with the output of the second one's launcher; the first record is the verdict."""
    attempt = RunDir(folder).attempt(1)
    folder.mkdir()
    attempt.create()
    write_json(attempt.plan_file, {"command": ["x.py"], "num_nodes": 2, "workers_per_node": num_ranks})
    write_json(attempt.rendezvous_file, {"hosts": ["n1", "n2"]})
    for record in records:
        write_json(attempt.rank_error(num_ranks * record["node_rank"]), record)
    attempt.rank_log(num_ranks).write_text(output)
    write_json(attempt.end_file, {"state": "failed", "cause": "crash", "verdict": records[0]})
    return diagnose(attempt, load_signatures())


@pytest.mark.parametrize(
    ("name", "code", "num_ranks", "rank"),
    [
        ("torchrun-second-node", 1, 2, 2),
        ("accelerate-one-rank", 1, 1, 1),
        ("deepspeed-second-node", 247, 1, 1),
        # The launcher does not say which of its two ranks it was.
        ("deepspeed-second-node", 247, 2, None),
    ],
)
def test_in_a_folder_of_an_older_version(
    tmp_path: Path, name: str, code: int, num_ranks: int, rank: int | None
) -> None:
    record = {**OLD, "rank": num_ranks, "exit_code": code}
    record |= {"type": "exit", "message": f"ended with exit code {code}"}
    for number, records in enumerate(((record, LOST), (LOST, record))):
        found = diagnosed(tmp_path / str(number), OUTPUT[name], *records, num_ranks=num_ranks)
        assert (found.name, found.rank, found.host) == ("killed", rank, "n2"), found
        assert "killed by SIGKILL" in found.cause
        assert f"exit code {code}" not in diagnosis_text(found).partition("evidence")[0]


def test_the_agent_has_recorded_which_rank_it_was(tmp_path: Path) -> None:
    """Rank 3, while the launcher reports the end of the rank that it looked at first."""
    record = {**OLD, "rank": 3, "type": "RankKilled", "message": "killed by SIGKILL", "exit_code": 137}
    report = OUTPUT["deepspeed-second-node"]
    cases = [(report, (LOST, record)), (report, (record, LOST)), ("… return code = 1", (record, LOST))]
    for number, (output, records) in enumerate(cases):
        found = diagnosed(tmp_path / str(number), output, *records)
        assert (found.name, found.rank, found.host) == ("killed", 3, "n2"), found


def test_the_output_of_a_rank_is_in_the_log_of_its_launcher(tmp_path: Path) -> None:
    attempt = RunDir(tmp_path).attempt(1)
    attempt.create()
    plan = {"num_nodes": 2, "node_sizes": [2, 3], "workers_per_node": 3}
    for launcher, logs in (("torchrun", [0, 0, 2, 2, 2, 5]), ("python", range(6))):
        write_json(attempt.plan_file, {**plan, "launcher": launcher})
        found = [log_of(attempt, read_plan(attempt), rank) for rank in range(6)]
        assert found == [attempt.rank_log(rank) for rank in logs]
    attempt.plan_file.unlink()
    assert log_of(attempt, read_plan(attempt), 1) == attempt.rank_log(1)


STORE = "Timed out after 6 seconds waiting for clients. {}/8 clients joined."


@pytest.mark.parametrize(
    ("message", "silent", "cause"),
    [
        ("3 of 8 ranks did not start within 0:30:00: rank 5, 6, 7", (), "ranks 5-7 on node02 did not"),
        (STORE.format(1), (), "ranks 1-7 on node01, node02 did not connect"),
        (STORE.format(6), (3, 4), "ranks 3-4 on node01, node02 did not connect"),
        (STORE.format(6), (3,), "the ranks did not all connect to rank 0 in time"),
    ],
)
def test_the_ranks_that_did_not_reach_rank_0(
    tmp_path: Path, message: str, silent: tuple[int, ...], cause: str
) -> None:
    run = failed(tmp_path, b"starts\n", message, "DistStoreError")
    attempt = run.attempt(1)
    write_json(attempt.plan_file, {"num_nodes": 2, "workers_per_node": 4})
    write_json(attempt.rendezvous_file, {"hosts": ["node01", "node02"]})
    for rank in range(1, 8):
        attempt.rank_log(rank).write_text("" if rank in silent else "starts\n")
    found = newest(run)
    assert found.name == "rendezvous"
    assert found.cause.startswith(cause)
    first_missing = {"ranks 5": 5, "ranks 1": 1, "ranks 3": 3, "the ran": 0}
    assert found.rank == first_missing[cause[:7]]
