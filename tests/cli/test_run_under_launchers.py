"""Tests `trainkit run` and `resume` as ranks of torchrun or mpirun.

Each host is a process on this machine.
"""

import json
import os
import signal
import subprocess
import sys

import pytest
from steering import LIMIT_S, Desk, wait_for

from tests.support.programs import ranks_of
from tests.support.said import said
from trainkit.backends.launcher import LAUNCHERS, LaunchedRank
from trainkit.job.node.rendezvous import choose_port
from trainkit.job.step_run import announce, announcement_file
from trainkit.run.events import read_events, read_metrics
from trainkit.run.files import read_json
from trainkit.run.rundir import RunDir

SHOWS_RANK = """
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"]
print(json.dumps({name: os.environ[name] for name in names}), flush=True)
"""


class Ranks:
    """The ranks of a launcher, two on each host. Remaining ranks are killed at the end."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.port = choose_port()
        self.run = RunDir(desk.folder / "runs/small")
        self.started: list[subprocess.Popen[str]] = []

    def environ(self, rank: int, launcher: str = "torchrun") -> dict[str, str]:
        values = map(str, (rank, rank % 2, 4, 2))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}
        return {**dict(zip(LAUNCHERS[launcher], values, strict=True)), **address}

    def started_as(self, argv: list[str], environ: dict[str, str] | None = None) -> subprocess.Popen[str]:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        own = self.desk.environ | (environ or {})
        process = subprocess.Popen(argv, cwd=self.desk.folder, env=own, text=True, **pipes)
        self.started.append(process)
        return process

    def run_all(self, launcher: str = "torchrun") -> list[subprocess.Popen[str]]:
        """Start all ranks of `trainkit run`, the last rank first."""
        argv = self.desk.argv("run", str(self.desk.config))
        started = {rank: self.started_as(argv, self.environ(rank, launcher)) for rank in (3, 2, 1, 0)}
        return [started[rank] for rank in sorted(started)]

    def wait_for_ranks(self) -> None:
        for rank in range(4):
            self.desk.wait_for_log(self.run, f"attempt 1 rank {rank}", rank=rank)


def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the exit code of a process and its stderr."""
    _, words = process.communicate(timeout=LIMIT_S)
    return process.returncode, words


@pytest.fixture
def ranks(desk):
    ranks = Ranks(desk)
    yield ranks
    for process in ranks.started:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def test_every_rank_joins_the_run_of_rank_0(ranks):
    ranks.desk.works(SHOWS_RANK)
    # An earlier start at the same address was killed and left this announcement.
    before = LaunchedRank("torchrun", 0, 0, (2, 2), "127.0.0.1", ranks.port)
    announce(ranks.run.path.parent, before, RunDir(ranks.desk.folder / "gone").attempt(1))
    first, *others = ranks.run_all()
    shown, words = first.communicate(timeout=LIMIT_S)
    assert first.returncode == 0, words
    assert [end_of(process)[0] for process in others] == [0, 0, 0]
    assert shown.splitlines()[0] == str(ranks.run.path)
    attempt = ranks.run.attempt(1)
    found = [json.loads(attempt.rank_log(rank).read_text().splitlines()[1]) for rank in range(4)]
    places = [one["RANK"] + one["LOCAL_RANK"] + one["NODE_RANK"] for one in found]
    assert places == ["000", "110", "201", "311"]
    assert {(one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"]) for one in found} == {("4", "2")}
    # The launcher may itself listen at the port.
    port = str(read_json(attempt.rendezvous_file)["port"])
    assert {(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in found} == {("127.0.0.1", port)}
    assert port != str(ranks.port)
    plan = read_json(attempt.plan_file)
    expected = {"backend": "launcher", "num_nodes": 2, "workers_per_node": 2, "per": "gpu"}
    assert plan.items() >= expected.items()
    said(plan["reasons"]["threads_per_worker"])
    assert json.loads(shown.splitlines()[2]) == found[0]
    assert [event.name for event in read_events(ranks.run)] == ["submitted", "started", "finished"]
    assert read_json(attempt.end_file)["state"] == "finished"
    assert not announcement_file(ranks.run.path.parent, before).exists()


def test_a_signal_to_all_ranks_of_mpirun_saves_and_ends_them(ranks):
    started = ranks.run_all("mpirun")
    ranks.wait_for_ranks()
    assert ranks.desk.status(ranks.run)["state"] == "running"
    for process in started:
        process.send_signal(signal.SIGHUP)  # the signal comes from a terminal that closes
    assert [end_of(process)[0] for process in started] == [0, 0, 0, 0]
    end = read_json(ranks.run.attempt(1).end_file)
    assert (end["state"], end["reason"]) == ("stopped", "saved after SIGTERM")


def test_a_killed_rank_ends_the_others(ranks):
    ranks.desk.works(
        """
        while not asked: time.sleep(0.02)
        sys.exit(1)  # the collective that agrees on the save fails, and the rank exits
        """
    )
    started = ranks.run_all()
    ranks.wait_for_ranks()
    os.kill(ranks_of(ranks.run)[3], signal.SIGKILL)
    wait_for(lambda: ranks.run.attempt(1).rank_error(3).exists())
    started[0].send_signal(signal.SIGTERM)
    code, words = end_of(started[0])
    assert code == 1
    assert "SIGKILL\nlast lines" in words
    assert end_of(started[3])[0] == 137
    end = read_json(ranks.run.attempt(1).end_file)
    assert (end["verdict"]["rank"], end["verdict"]["message"]) == (3, "killed by SIGKILL")
    assert end["state"] == "failed"


def test_what_cannot_start_is_said_by_rank_0(ranks):
    refused = {
        ("run", "--set", "train.steps=0"): "error: --set train.steps=0: train.steps: ",
        ("run", "--", "python", "x.py"): "error: torchrun starts the ranks of a COMMAND itself\n\n"
        "hint: start the COMMAND without trainkit: `torchrun … python …`",
        ("resume", "small", "--follow"): "error: --follow cannot be combined with torchrun",
    }
    for args, expected in refused.items():
        code, words = end_of(ranks.started_as(ranks.desk.argv(*args), ranks.environ(0)))
        assert code == 2
        assert expected in words
    assert not ranks.run.path.exists()
    assert not (ranks.run.path.parent / ".steps").exists()


def test_a_run_that_belongs_to_another_user_is_not_joined(ranks, tmp_path):
    planted = RunDir(tmp_path / "planted")
    planted.path.mkdir(mode=0o777)
    planted.path.chmod(0o777)
    task = LaunchedRank("torchrun", 1, 1, (2, 2), "127.0.0.1", ranks.port)
    announce(ranks.run.path.parent, task, planted.attempt(1))
    holds = (
        "import sys, time; from trainkit.run.rundir import *; "
        "become_sole_supervisor(RunDir(sys.argv[1]), 9); print('held', flush=True); time.sleep(999)"
    )
    holder = ranks.started_as([sys.executable, "-c", holds, str(planted.path)])
    assert holder.stdout.readline() == "held\n"
    code, words = end_of(ranks.started_as(ranks.desk.argv("run", "small.yaml"), ranks.environ(1)))
    assert code == 2
    said(words)


def torchrun(ranks: Ranks, hosts: int, *args: str) -> list[subprocess.Popen[str]]:
    """Start two ranks of `trainkit` on one or two hosts."""
    place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{ranks.port}"]
    shape = ["--nnodes", str(hosts), "--nproc-per-node", str(2 // hosts)]
    argv = [sys.executable, "-m", "torch.distributed.run", *shape, *place, "-m", "trainkit", *args]
    return [ranks.started_as(argv) for _ in range(hosts)]


TRAINS = ("data.seq_len=64", "model.preset=nano", "train.log_every=1", "train.eval_every=null")


@pytest.mark.slow(seconds=40)
def test_torchrun_saves_on_all_hosts_resumes_on_one_host_and_ends_its_ranks(desk, ranks):
    run = ranks.run
    settings = [part for one in (*TRAINS, "train.steps=100000") for part in ("--set", one)]
    both = torchrun(ranks, 2, "run", "small.yaml", *settings)
    desk.wait_for_log(run, "step=3/")
    both[0].send_signal(signal.SIGTERM)
    wait_for(run.attempt(1).end_file.exists)
    both[1].send_signal(signal.SIGTERM)  # the second torchrun waits for the first one
    for process in both:
        process.communicate(timeout=LIMIT_S)
    end = read_json(run.attempt(1).end_file)
    assert (end["state"], end["reason"]) == ("stopped", "saved after SIGTERM")
    last = end["mark"] + 3
    [one] = torchrun(ranks, 1, "resume", "runs/small")
    wait_for(lambda: read_metrics(run)[-1]["step"] >= last)
    plan = read_json(run.attempt(2).plan_file)
    assert (plan["num_nodes"], plan["world_size"]) == (1, 2)
    os.kill(ranks_of(run)[1], signal.SIGKILL)
    assert end_of(one)[0] == 1
    end = read_json(run.attempt(2).end_file)
    assert (end["state"], end["verdict"]["rank"]) == ("failed", 1)
    assert end["verdict"]["message"] == "killed by SIGKILL"
    records = read_metrics(run)
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    assert {record["step"] for record in records if record["attempt"] == 2} >= {last - 2, last - 1, last}
