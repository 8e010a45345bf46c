"""Provides run folders and worker processes for tests that really train."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import trainkit
from tests.support import programs
from tests.support.ranks import ForkedWorker, start_ranks, start_worker, wait_for_all
from trainkit.backend import NewAttempt
from trainkit.backends.local.backend import LocalBackend
from trainkit.cluster.machine import Machine
from trainkit.config import dump_effective, load_config
from trainkit.job.node.rendezvous import choose_port
from trainkit.plan.facts import Facts
from trainkit.plan.launch import Batch, LaunchPlan, Layout
from trainkit.plan.make_plan import make_plan, with_parts
from trainkit.run.events import read_metrics
from trainkit.run.files import read_jsonl, write_json
from trainkit.run.record import AttemptRecord, read_job
from trainkit.run.rundir import AttemptDir, RunDir

FAST = (
    *("model.preset=nano", "data.seq_len=64", "train.device_batch_size=4", "train.global_batch_size=16"),
    *("train.log_every=1", "train.eval_every=null", "checkpoint.every_steps=null", "precision.dtype=fp32"),
    *("logging.tensorboard=false", "device=cpu"),
)
"""Options for steps of a few milliseconds, for tests that do not depend on what is learned."""

TIMEOUT_S = 180


def make_attempt(run_dir: Path, overrides: Sequence[str] = (), num_procs: int = 1) -> AttemptDir:
    """Create the next attempt of a run, as `trainkit submit` writes it."""
    run = RunDir(run_dir)
    run.path.mkdir(exist_ok=True)
    config_file = run.path.parent / "test.yaml"
    config_file.write_text("name: test\n")
    loaded = load_config(
        config_file,
        overrides=[*FAST, *overrides, f"resources.gpus_per_node={num_procs}"],
        environ={},
        cwd=run.path.parent,
    )
    num_gpus = num_procs if "device=cuda" in overrides else 0
    machine = Machine(num_cpus=2, num_gpus=num_gpus, gpu_names=("",) * num_gpus, gpu_reason="a test")
    attempt = run.attempt((run.attempt_numbers() or [0])[-1] + 1)
    attempt.create()
    attempt.config_file.write_text(dump_effective(loaded.config))
    run.config_file.write_text(dump_effective(loaded.config))
    facts = Facts(machine)
    write_json(attempt.plan_file, with_parts(make_plan(loaded, facts), loaded, facts).to_dict())
    return attempt


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    """Return the empty folder of an attempt."""
    attempt = RunDir(tmp_path).attempt(1)
    attempt.create()
    return attempt


def start_local(run: RunDir, config_text: str, plan_text: str, reason: str) -> AttemptRecord:
    """Start the next attempt on this machine while the run's lock is held. The plan may be any text."""
    return LocalBackend().start(run, NewAttempt(config_text, plan_text, None, reason, read_job(run)))  # type: ignore[arg-type]


def free_port() -> int:
    """Return a free port that no connection of another process takes meanwhile.

    An ephemeral port could be taken.
    """
    return choose_port()


def fork_workers(
    attempt: AttemptDir,
    num_procs: int = 1,
    env: dict[str, str] | None = None,
    first: Callable[[], None] | None = None,
) -> list[ForkedWorker]:
    """Start the ranks of an attempt with torch already imported. Each rank writes to its log.

    Each rank first calls `first`, a function of a test module that changes something.
    """
    return [
        ForkedWorker(
            start_worker(attempt.run.path, attempt.rank_log(rank), {**environ, **(env or {})}, first)
        )
        for rank, environ in enumerate(environs(attempt, num_procs))
    ]


def start_workers(
    attempt: AttemptDir, num_procs: int = 1, env: dict[str, str] | None = None
) -> list[subprocess.Popen[bytes]]:
    """Start the ranks of an attempt as new processes, to test their start or another environment."""
    procs = []
    for rank, environ in enumerate(environs(attempt, num_procs)):
        with attempt.rank_log(rank).open("ab") as log:
            procs.append(
                subprocess.Popen(
                    [sys.executable, "-m", "trainkit.trainer", str(attempt.run.path)],
                    env={**environ, **(env or {})},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    return procs


def environs(attempt: AttemptDir, num_procs: int) -> list[dict[str, str]]:
    """Return the environment of each rank of an attempt on this machine."""
    common = {
        **os.environ,
        "TRAINKIT_JOB_ATTEMPT": str(attempt.number),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(num_procs),
        "LOCAL_WORLD_SIZE": str(num_procs),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_procs)]


def wait_for(
    procs: Sequence[subprocess.Popen[bytes] | ForkedWorker], timeout_s: float = TIMEOUT_S
) -> list[int]:
    """Return the exit codes of processes that end by themselves.

    Raises TimeoutExpired if a process does not end, and kills all remaining processes.
    """
    try:
        return [proc.wait(timeout=timeout_s) for proc in procs]
    finally:
        for proc in procs:
            if proc.poll() is None:
                proc.kill()
                proc.wait()


def train(run_dir: Path, overrides: Sequence[str] = (), num_procs: int = 1, expect: int = 0) -> AttemptDir:
    """Run one attempt to its end and check every rank's exit code."""
    attempt = make_attempt(run_dir, overrides, num_procs)
    codes = wait_for_all([worker.proc for worker in fork_workers(attempt, num_procs)], TIMEOUT_S)
    assert codes == [expect] * num_procs, log_text(attempt)
    return attempt


def log_text(attempt: AttemptDir) -> str:
    """Return all output of the ranks of an attempt."""
    return "\n".join(path.read_text() for path in sorted(attempt.logs_dir.glob("rank-*.log")))


wait_until = partial(programs.wait_for, timeout_s=240.0)
"""A wait with a longer timeout, for events after the start of a training run."""


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    """Return the events of a name, as they are in the file."""
    return [event for event in read_jsonl(RunDir(run_dir).events_file) if event["event"] == name]


def losses(run_dir: Path) -> dict[int, float]:
    """Return the loss of each step, by step."""
    return {record["step"]: record["loss"] for record in read_metrics(RunDir(run_dir))}


def samples_seen(run_dir: Path) -> list[int]:
    """Return the number of samples seen after each step, in the order of the steps."""
    return [record["samples_seen"] for record in read_metrics(RunDir(run_dir))]


def run_ranks(function: Callable[..., None], num_procs: int, *args: Any) -> None:
    """Call `function(world, *args)` as each rank of a fully sharded gloo world.

    The function must be in a test module. An exception on any rank fails the test.
    """
    procs = start_ranks(_in_world, num_procs, function, num_procs, free_port(), args)
    assert wait_for_all(procs, TIMEOUT_S) == [0] * num_procs


def _in_world(
    rank: int, function: Callable[..., None], num_procs: int, port: int, args: Sequence[Any]
) -> None:
    import torch
    import torch.distributed as dist

    from trainkit.trainer.distributed import World

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_procs)
    mesh = dist.init_device_mesh("cpu", (1, num_procs), mesh_dim_names=("dp_replicate", "dp_shard"))
    function(World(rank, num_procs, torch.device("cpu"), mesh, dist.new_group(backend="gloo")), *args)
    dist.barrier()


def site(folder: Path, text: str) -> dict[str, str]:
    """Return variables with which every Python process first runs this code."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(text)
    return {"PYTHONPATH": f"{folder / 'site'}:{Path(__file__).parents[2]}"}


@contextmanager
def runs_from(folder: Path) -> Iterator[pytest.MonkeyPatch]:
    """Work in a folder during the block, with runs that find this code. Undo other patches at the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PYTHONPATH", str(Path(trainkit.__file__).parents[1]))
        yield patch


def launch_plan(**values: Any) -> LaunchPlan:
    """Return a plan of two nodes with two ranks each, with changes of some values."""
    shape: dict[str, Any] = {"num_nodes": 2, "workers_per_node": 2, "device": "cpu", "threads_per_worker": 1}
    sizes = {"layout": Layout(dp_shard=4), "batch": Batch(1, 1, 4, 4), "lr": 0.1, "grace_s": 20.0}
    return LaunchPlan(**{"backend": "sbatch", **shape, **sizes, "reasons": {}, **values})
