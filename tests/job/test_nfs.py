"""Tests waits of one host for files of another, in a folder that both see as NFS clients do."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import pytest

from tests.support.nfs import FAST_S, nfs_clients
from tests.support.runs import launch_plan
from trainkit.backends.launcher import LaunchedRank
from trainkit.backends.slurm.claim_attempt import claim_attempt
from trainkit.backends.slurm.step import SlurmTask
from trainkit.job import hangs
from trainkit.job.failure.records import first_exit_code
from trainkit.job.hangs import HangRecord, HangWatch
from trainkit.job.node.agent import superseding_attempt
from trainkit.job.node.rendezvous import await_plan
from trainkit.run.files import read_json, refresh_listing, write_json
from trainkit.run.record import add_slurm_attempt, claim_entry, create_job
from trainkit.run.rundir import AttemptDir, RunDir

T = TypeVar("T")
TASK = SlurmTask("7", "0", 0, 1, 1, 0, (1, 1), ("host0", "host1"), "4000")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Return one folder, as two hosts see it."""
    (tmp_path / "server").mkdir()
    with nfs_clients(tmp_path / "server", tmp_path / "first", tmp_path / "other"):
        yield tmp_path / "first", tmp_path / "other"


def waiting(wait: Callable[[], T], make: Callable[[], object]) -> tuple[T, float]:
    """Return the result of `wait`, and its duration in seconds. `make` is called 0.5 s after the start."""
    looked = threading.Timer(0.5, make)
    started_s = time.monotonic()
    looked.start()
    found = wait()
    looked.join()
    return found, time.monotonic() - started_s


def create(run: RunDir, number: int = 1) -> AttemptDir:
    run.path.mkdir(exist_ok=True)
    attempt = run.attempt(number)
    attempt.create()
    attempt.config_file.write_text("")
    write_json(attempt.plan_file, launch_plan(workers_per_node=1).to_dict())
    return attempt


def test_the_clients_of_these_tests_cache_as_those_of_nfs_do(hosts):
    first, other = hosts
    (first / "file").write_text("a")
    assert (other / "file").stat().st_size == 1
    assert not (other / "late").exists()
    assert sorted(path.name for path in other.iterdir()) == ["file"]
    (first / "late").write_text("")
    (first / "file").write_text("bb")
    assert not (other / "late").exists()
    assert sorted(path.name for path in other.iterdir()) == ["file"]
    assert (other / "file").stat().st_size == 1
    assert (other / "file").read_text() == "bb"  # the client asks the server when it opens the file
    refresh_listing(other)
    assert sorted(path.name for path in other.iterdir()) == ["file", "late"]


def test_the_ranks_of_another_launcher(hosts):
    first, other = (RunDir(host / "run").attempt(1) for host in hosts)
    create(first.run)
    plan = launch_plan(workers_per_node=1)
    ranks = [LaunchedRank("torchrun", rank, 0, (1, 1), "127.0.0.1", 29500) for rank in (0, 1)]
    found, waited_s = waiting(lambda: ranks[1].meet(other, plan).nonce, lambda: ranks[0].meet(first, plan))
    assert found == read_json(other.rendezvous_file)["nonce"]
    assert waited_s < FAST_S


def test_the_next_attempt_of_a_host_that_watched_for_it(hosts):
    first, other = (RunDir(host / "run") for host in hosts)
    create(first)
    assert superseding_attempt(other.attempt(1)) is None
    create(first, 2)
    started_s = time.monotonic()
    assert await_plan(other.attempt(2)).num_nodes == 2
    assert time.monotonic() - started_s < FAST_S


def test_a_claim_after_an_attempt_of_another_host(hosts):
    first, other = (RunDir(host / "run") for host in hosts)
    create(first)
    create_job(first, backend="sbatch", name="run", cwd="/", code=None)
    add_slurm_attempt(first, 1, "7", "submit", "sbatch")
    assert other.attempt_numbers() == [1]
    create(first, 2)
    add_slurm_attempt(first, 2, "7", "submit", "sbatch")
    claim_entry(first, 2, os.getpid())
    assert other.attempt_numbers() == [1]
    claimed = claim_attempt(other, "7")
    assert isinstance(claimed, AttemptDir)
    assert claimed.number == 3


def test_the_first_failure_on_another_host(hosts):
    first, other = (RunDir(host / "run").attempt(1) for host in hosts)
    create(first.run)
    assert first_exit_code(other) is None
    assert list(other.errors_dir.iterdir()) == []
    write_json(first.rank_error(1), {"rank": 1, "exit_code": 78, "time": "2026-01-01T00:00:00.000Z"})
    assert list(other.errors_dir.iterdir()) == []
    assert first_exit_code(other) == 78


def test_a_hang_that_ranks_of_another_host_report_too(hosts, monkeypatch):
    """Ranks without a visible report would count as silent, and their host as lost."""
    monkeypatch.setattr(hangs, "GATHER_S", 0.0)
    first, other = (RunDir(host / "run").attempt(1) for host in hosts)
    create(first.run).hangs_dir.mkdir()
    watch = HangWatch(other)
    for rank, attempt in enumerate((other, first)):
        record = HangRecord(rank, rank, f"host{rank}", 4, "backward", 2, 9.0, 8.0, 0.8, "2026-01-01", ())
        write_json(attempt.rank_hang(rank), asdict(record))
        watch.poll()
    assert [record.rank for record in watch.poll()] == [0, 1]
