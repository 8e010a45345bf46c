"""Tests the queue of this machine: the order of starts, their GPUs, and the state after a killed run."""

import errno
import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.support.groups import make_group
from tests.support.runs import launch_plan
from tests.support.said import said
from trainkit.backends.local import allocation
from trainkit.backends.local import group as local_group
from trainkit.backends.local.queue import VISIBLE, QueuePlace
from trainkit.plan.launch import LaunchPlan, WorkerEnvironment
from trainkit.run.end import AttemptEnd
from trainkit.run.group import create_task_run
from trainkit.run.record import add_attempt, create_job, record_of
from trainkit.run.rundir import RunDir

FAKE = Path(__file__).parents[2] / "support" / "fake_gpus"
ONE_GPU = launch_plan(backend="local", num_nodes=1, workers_per_node=1, device="cuda")
_processes = multiprocessing.get_context("fork")


def _answer(run: RunDir, plan: LaunchPlan, connection: Connection) -> None:
    place = QueuePlace(run.attempt(1), plan, record_of(run.attempt(1)).submitted_at)
    while True:
        connection.send((place.take(now=connection.recv()), os.environ.get(VISIBLE)))


class Supervisor:
    def __init__(self, run: RunDir, plan: LaunchPlan) -> None:
        self._connection, theirs = _processes.Pipe()
        self._process = _processes.Process(target=_answer, args=(run, plan, theirs), daemon=True)
        self._process.start()

    def take(self, *, now: bool = False) -> tuple[str | None, str | None]:
        """Return the reason for which the process waits, and the GPUs that the queue gave it."""
        self._connection.send(now)
        reason, gpus = self._connection.recv()
        return reason, None if reason else gpus

    def die(self) -> None:
        self._process.kill()
        self._process.join()


Start = Callable[..., Supervisor]


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Return a function that starts the supervisor of a run with a given name, on a machine with two GPUs."""
    monkeypatch.syspath_prepend(FAKE)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setenv("FAKE_GPUS", "2")
    monkeypatch.setenv("FAKE_GPU_USERS", str(tmp_path / "users"))
    monkeypatch.delenv(VISIBLE, raising=False)
    started: list[Supervisor] = []

    def start(name, num_gpus=1, *, variables=None, **changes):
        run = make_run(tmp_path / name)
        environment = WorkerEnvironment(variables or {})
        plan = replace(ONE_GPU, workers_per_node=num_gpus, environment=environment, **changes)  # type: ignore[arg-type]
        started.append(Supervisor(run, plan))
        return started[-1]

    yield start
    for supervisor in started:
        supervisor.die()


def make_run(folder: Path) -> RunDir:
    run = RunDir(folder)
    run.path.mkdir()
    create_job(run, backend="local", name=folder.name, cwd=str(folder), code=None)
    run.attempt(1).create()
    add_attempt(run, 1, os.getpid(), "submit")
    return run


def test_runs_start_in_their_order_and_no_gpu_is_shared(start, tmp_path):
    first, wide, last = start("first"), start("wide", 2), start("last")
    assert first.take() == (None, "0")
    waits = f"waits for 2 GPUs (1 free, in use by {tmp_path}/first)", None
    assert wide.take() == waits
    # One GPU is free, but it is not given to this run, because the run before it would then never get two.
    assert last.take() == (f"waits behind {tmp_path}/wide", None)
    first.die()
    assert last.take() == (f"waits behind {tmp_path}/wide", None)
    assert wide.take() == (None, "0,1")
    reason, gpus = last.take()
    said(reason)
    assert gpus is None
    wide.die()
    assert last.take() == (None, "0")


def test_a_killed_run_is_in_nobodys_way(start, tmp_path):
    assert start("all", 2).take() == (None, "0,1")
    waiting, last = start("waiting"), start("last")
    said(waiting.take()[0])
    assert last.take()[0] == f"waits behind {tmp_path}/waiting"
    waiting.die()
    said(last.take()[0])


def test_now_takes_free_gpus_first(start):
    assert start("first").take() == (None, "0")
    assert start("second", 2).take(now=True) == (None, "1,0")
    assert start("too many", 4).take(now=True) == (None, "0,1")


def test_a_gpu_that_another_process_uses_is_not_free(start, tmp_path):
    (tmp_path / "users").write_text(f"0 {os.getpid()}\n1 4194305\n")
    one = start("one")
    name = Path("/proc/self/comm").read_text().strip()
    said(one.take()[0].replace(f"{os.getpid()} ({name})", "PID (NAME)"))
    (tmp_path / "users").write_text(f"0 {os.getpid()}\n")
    assert one.take() == (None, "1")


@pytest.mark.parametrize(("listed", "got"), [("1,0", "1"), ("GPU-b", "GPU-b"), ("0,1", "1")])
def test_a_gpu_is_the_same_by_any_of_its_names(start, listed, got):
    assert start("by index", variables={VISIBLE: "0"}).take() == (None, "0")
    assert start("other", variables={VISIBLE: listed}).take() == (None, got)
    reason, _ = start("last", variables={VISIBLE: "GPU-a,GPU-bbbb"}).take()
    said(reason)


def test_gpus_that_no_driver_tells_of_stay_visible(start, monkeypatch):
    monkeypatch.setenv("FAKE_GPUS", "0")
    assert start("first").take() == (None, None)
    assert start("second", variables={VISIBLE: "3"}).take() == (None, "3")


def test_without_gpus_cores_are_shared_out(start, monkeypatch):
    monkeypatch.setattr("trainkit.backends.local.queue.num_usable_cpus", lambda: 3)
    assert start("two", 2, device="cpu").take()[0] is None
    assert start("on a gpu", 2).take() == (None, "0,1")
    waits, _ = start("ten", 10, device="cpu").take()
    said(waits)


def test_a_run_waits_for_others_to_finish(start, tmp_path):
    first, group = make_run(tmp_path / "a"), make_group(tmp_path, {0: {"seed": 0}, 1: {"seed": 1}})
    last = start("last", after=(str(first.path), str(group.path)))

    def end(run: RunDir, state: str) -> None:
        AttemptEnd(state, "finished" if state == "finished" else "failed").write(run.attempt(1))

    said(last.take()[0])
    end(first, "failed")
    said(last.take()[0])
    end(first, "finished")
    for index in (0, 1):
        said(last.take()[0])
        group.run(index).attempt(1).path.mkdir(parents=True)
        group.run(index).attempt(1).make_latest()
        end(group.run(index), "finished")
    assert last.take() == (None, "0")


def test_a_run_of_a_group_that_ends_while_it_is_looked_at_is_not_started_again(tmp_path, monkeypatch):
    group = make_group(tmp_path, {0: {"seed": 0}})
    run = create_task_run(group.run(0))

    def ends(run: RunDir) -> bool:
        AttemptEnd("finished", "finished").write(run.attempt(1))
        return False

    monkeypatch.setattr(local_group, "_is_active", ends)
    monkeypatch.setattr(local_group, "backend_named", Mock(side_effect=AssertionError("started again")))
    local_group.run_trials(group)
    assert run.attempt_numbers() == [1]


@pytest.mark.parametrize(
    ("now", "code", "num_waits"), [(True, errno.EIO, 0), (False, errno.EACCES, 0), (False, errno.EIO, 2)]
)
def test_a_run_waits_only_for_a_queue_that_may_come_back(now, code, num_waits, tmp_path, monkeypatch):
    monkeypatch.setattr(QueuePlace, "take", Mock(side_effect=OSError(code, os.strerror(code))))
    monkeypatch.setattr(allocation, "QUEUE_PATIENCE", 3)
    run, lines = RunDir(tmp_path), list[str]()
    monkeypatch.setattr(allocation, "log_line", lines.append)
    here = allocation.LocalAllocation(run, 1, now=now)
    place = QueuePlace(run.attempt(1), ONE_GPU, None)
    while here._waits_for(place) is not None:
        lines.append("waits")
    assert lines[:-1] == ["waits"] * num_waits
    said(lines[-1])
