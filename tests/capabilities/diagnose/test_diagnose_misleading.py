"""Tests `diagnose` on runs whose files mention other failures or are damaged, and the rank that it names."""

import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.capabilities.diagnose.test_diagnose import RECORDED, failed, newest
from tests.job.failure.test_launcher_report import OUTPUT
from tests.support.broken_runs import FOLDER, unpack
from trainkit.capabilities.diagnose.command import diagnosis_lines
from trainkit.capabilities.diagnose.diagnose import Diagnosis, diagnose
from trainkit.observe.logs import log_of
from trainkit.run.files import write_json
from trainkit.run.history import read_plan
from trainkit.run.record import read_job
from trainkit.run.rundir import RunDir

OOM = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
TRACEBACK = b'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n'


def test_an_error_in_the_data_that_a_script_prints_is_no_cause(tmp_path):
    samples = (
        b'{"prompt": "why does my run end with CUDA out of memory?", "answer": "lower the batch size"}\n',
        b'sample 3: "RuntimeError: CUDA error: uncorrectable ECC error encountered" -> label 1\n',
        b'{"log": "OSError: [Errno 28] No space left on device"}\n',
    )
    for number, sample in enumerate(samples):
        found = newest(failed(tmp_path / str(number), sample * 3))
        assert found.name == "exit-code", found


def test_a_rank_that_fails_while_it_stops_is_not_why_it_stopped(tmp_path):
    run = failed(tmp_path, TRACEBACK + OOM, "CUDA out of memory", "OutOfMemoryError")
    end = {"state": "failed", "cause": "preempted", "reason": "rank 0 failed after SIGTERM", "verdict": None}
    write_json(run.attempt(1).end_file, end)
    found = newest(run)
    assert (found.name, found.rank) == ("preempted", None)


def test_logs_of_huge_lines_and_logs_that_are_empty_binary_or_cut_off(tmp_path):
    long = b"x" * 10_000_000 + b" CUDA out of memory"
    for number, log in enumerate((long, b"", b"\x00\xff\xfe" * 1000, b"\x1b[31mCUDA out of mem")):
        assert newest(failed(tmp_path / str(number), log)).name == "exit-code"
    found = newest(failed(tmp_path / "before", long + b"\n" + TRACEBACK + OOM))
    assert (found.name, found.confidence) == ("cuda-oom", "likely")
    assert found.evidence[0].line == 4
    assert newest(failed(tmp_path / "message", b"", "y" * 10_000_000, "ValueError")).name is None
    noise = random.Random(18).randbytes(300_000)
    found = newest(failed(tmp_path, noise + b"\n" + TRACEBACK + OOM))
    assert found.name == "cuda-oom"
    assert "\n".join(diagnosis_lines(found)).isprintable() is False  # the output has several lines
    assert all(text.isprintable() for text in diagnosis_lines(found))


@pytest.mark.parametrize("seed", range(3))
def test_files_that_are_cut_off_or_of_another_form(tmp_path, seed):
    chance = random.Random(seed)
    for name in chance.sample(RECORDED, 12):
        run = RunDir(tmp_path / name)
        unpack(yaml.safe_load((FOLDER / f"{name}.yaml").read_text()), run.path)
        for path in sorted(run.path.rglob("*.*")):
            damage = chance.choice(("none", "cut", "empty", "list", "null", "noise", "other"))
            content = path.read_bytes()
            if damage != "none":
                path.write_bytes(
                    {
                        "cut": content[: chance.randrange(len(content))],
                        "empty": b"",
                        "list": b"[1, 2]",
                        "null": b"null",
                        "noise": chance.randbytes(200),
                        "other": b'{"rank": "x", "hosts": 3, "node_sizes": "y", "verdict": [], "time": 5}',
                    }[damage]
                )
        found = diagnose(run.attempt(run.attempt_numbers()[-1]), read_job(run))
        assert "\n".join(diagnosis_lines(found))


LOST = {
    **{"rank": 0, "node_rank": 0, "host": "n1", "time": "2026-11-25T23:52:01Z", "exit_code": 1},
    **{"type": "RuntimeError", "message": "[…] Read error [10.0.0.2]:31370: Connection reset by peer"},
}
OLD = {"node_rank": 1, "host": "n2", "time": "2026-11-25T23:52:02Z"}
"""The record of the second node's launcher, as versions until November 2026 wrote it."""


def diagnosed(folder: Path, output: str, *records: dict[str, Any], num_ranks: int = 2) -> Diagnosis:
    """Diagnose a run on two nodes with this output of the second launcher. The first record is the cause."""
    attempt = RunDir(folder).attempt(1)
    folder.mkdir()
    attempt.create()
    write_json(attempt.plan_file, {"command": ["x.py"], "num_nodes": 2, "workers_per_node": num_ranks})
    write_json(attempt.rendezvous_file, {"hosts": ["n1", "n2"]})
    for record in records:
        write_json(attempt.rank_error(num_ranks * record["node_rank"]), record)
    attempt.rank_log(num_ranks).write_text(output)
    write_json(attempt.end_file, {"state": "failed", "cause": "crash", "verdict": records[0]})
    return diagnose(attempt, read_job(attempt.run))


@pytest.mark.parametrize(
    ("name", "code", "num_ranks", "rank"),
    [
        ("torchrun-second-node", 1, 2, 2),
        ("accelerate-one-rank", 1, 1, 1),
        ("deepspeed-second-node", 247, 1, 1),
        # The launcher does not say which of its two ranks failed.
        ("deepspeed-second-node", 247, 2, None),
    ],
)
def test_in_a_folder_of_an_older_version(tmp_path, name, code, num_ranks, rank):
    record = {**OLD, "rank": num_ranks, "exit_code": code}
    record |= {"type": "exit", "message": f"ended with exit code {code}"}
    for number, records in enumerate(((record, LOST), (LOST, record))):
        found = diagnosed(tmp_path / str(number), OUTPUT[name], *records, num_ranks=num_ranks)
        assert (found.name, found.rank, found.host) == ("killed", rank, "n2"), found
        assert "killed by SIGKILL" in found.cause
        assert f"exit code {code}" not in "\n".join(diagnosis_lines(found)).partition("evidence")[0]


def test_the_agent_has_recorded_which_rank_it_was(tmp_path):
    record = {**OLD, "rank": 3, "type": "RankKilled", "message": "killed by SIGKILL", "exit_code": 137}
    report = OUTPUT["deepspeed-second-node"]
    cases = [(report, (LOST, record)), (report, (record, LOST)), ("… return code = 1", (record, LOST))]
    # This launcher has waited for its other ranks.
    cases += [(report, (LOST, {**record, "time": "2026-11-25T23:52:31Z"}))]
    for number, (output, records) in enumerate(cases):
        found = diagnosed(tmp_path / str(number), output, *records)
        assert (found.name, found.rank, found.host) == ("killed", 3, "n2"), found


def torchrun(rank: int, raised: str, second: int, code: int = 1) -> str:
    """Return the output of a rank and its torchrun."""
    trace = f'Traceback (most recent call last):\n  File "/home/me/train.py", line 7, in <module>\n{raised}\n'
    return "".join(f"[rank{rank}]: {line}\n" for line in trace.splitlines()) + (
        "Root Cause (first observed failure):\n[0]:\n"
        f"  time      : 2026-11-25_23:52:{second}\n  host      : n\n  rank      : {rank} (local_rank: 0)\n"
        f"  exitcode  : {code} (pid: 7)\n"
    )


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("has_end", [False, True])
def test_the_first_of_several_launchers_is_the_one_that_reports_the_earliest_failure(
    tmp_path, killed, has_end
):
    attempt = RunDir(tmp_path).attempt(1)
    attempt.create()
    write_json(attempt.plan_file, {"command": ["x.py"], "num_nodes": 2, "workers_per_node": 2})
    write_json(attempt.rendezvous_file, {"hosts": ["n1", "n2"]})
    late = {"type": "KeyError", "message": "'label'", "exit_code": 1}
    if killed:  # the agent has recorded the rank
        late = {"type": "RankKilled", "message": "killed by SIGKILL", "exit_code": 137}
    noticed = {"type": "QueueError", "message": "a peer is gone", "exit_code": 1}
    first = {**noticed, "rank": 1, "node_rank": 0, "host": "n1", "time": "2026-11-25T22:52:16Z"}
    second = {**late, "rank": 3, "node_rank": 1, "host": "n2", "time": "2026-11-25T22:52:41Z"}
    for number, record in ((0, first), (2, second)):
        write_json(attempt.rank_error(number), record)
    attempt.rank_log(0).write_text(torchrun(1, "QueueError: a peer is gone", 15))
    attempt.rank_log(2).write_text(torchrun(3, "KeyError: 'label'", 10, -9 if killed else 1))
    if has_end:
        write_json(attempt.end_file, {"state": "failed", "cause": "crash", "verdict": first})
    found = diagnose(attempt, read_job(attempt.run))
    assert (found.rank, found.host) == (3, "n2"), found
    # If a launcher reports no time, the times of the records decide.
    attempt.rank_log(2).write_text("")
    assert diagnose(attempt, read_job(attempt.run)).rank == 1


def test_the_first_failure_is_that_of_the_verdict(tmp_path):
    run = failed(tmp_path, b"", "boom", "ValueError")
    attempt = run.attempt(1)
    for times in (("01", "01", "01"), ("00", "01", "01"), (None, None, None), (None, None, "01")):
        for rank, time in enumerate(times):
            record = {"rank": rank, "host": "n1", "type": "ValueError", "message": f"boom {rank}"}
            record["time"] = None if time is None else f"2026-01-01T00:00:{time}Z"
            write_json(attempt.rank_error(rank), record)
        write_json(attempt.end_file, {"state": "failed", "cause": "crash", "verdict": record})
        assert newest(run).rank == 2


def test_the_output_of_a_rank_is_in_the_log_of_its_launcher(tmp_path):
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
def test_the_ranks_that_did_not_reach_rank_0(tmp_path, message, silent, cause):
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
