"""Provides a short training run that tests disturb, and the checks of its result."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.on_slurm.login import Login, agents_of, wait_for
from tests.support.programs import ranks_of
from tools.slurm_cluster.cluster import Cluster
from trainkit.run.end import RESUME_ACTIONS
from trainkit.run.events import read_metrics
from trainkit.run.files import parse_time, read_json, read_jsonl
from trainkit.run.manifest import find_damage, published
from trainkit.run.rundir import RunDir

CONFIG = """\
name: survivor
device: cpu
model: {{preset: nano, dropout: 0.1}}
data: {{source: {text}, seq_len: 64, val_fraction: 0.1}}
train:
  {{steps: {num_steps}, log_every: 1, eval_every: null,
   device_batch_size: {batch_size}, global_batch_size: {global_batch_size}}}
resources: {{nodes: 2, gpus_per_node: 1, cpus_per_gpu: 1, time: "10"}}
checkpoint: {{every_steps: 10}}
precision: {{dtype: fp32}}
logging: {{tensorboard: false}}
requeue: {{grace_s: 20}}
"""
"""The config of two ranks on two hosts.

A step takes about 50 ms on a core, so that a disturbance falls between two steps.
"""
WAITS_IN_EACH_STEP = """
import sys
if "trainkit.trainer" in sys.orig_argv:
    import time
    from trainkit.trainer.progress import Progress
    begin_at_once = Progress.begin_step
    def begin_later(progress, step):
        time.sleep(0.1)
        begin_at_once(progress, step)
    Progress.begin_step = begin_later
"""
"""A sitecustomize.py that makes steps slow but cheap, so that other tests can use the CPUs."""
RESTART_S = 400.0
"""More seconds than Slurm and the start of the ranks need together after any disturbance."""

Curve = list[tuple[int, str, int]]


def survivor_config(folder: Path, num_steps: int = 60, batch_size: int = 16) -> Path:
    """Write the config of the training run and its text to a folder, and return the file."""
    text = folder / "text.txt"
    text.write_text("".join(f"line {number} says {number * number}\n" for number in range(4000)))
    config = folder / "survivor.yaml"
    sizes = {"batch_size": batch_size, "global_batch_size": 2 * batch_size}
    config.write_text(CONFIG.format(text=text, num_steps=num_steps, **sizes))
    return config


def curve(run: RunDir) -> Curve:
    """Return the step, the loss as written, and the number of samples seen, for every step."""
    return [(r["step"], json.dumps(r["loss"]), r["samples_seen"]) for r in read_metrics(run)]


def steps_of(run: RunDir, attempt: int | None = None) -> list[int]:
    """Return the steps in the order of their computation, of all attempts or of one."""
    return [r["step"] for r in read_jsonl(run.metrics_file) if attempt in (None, r.get("attempt"))]


def computed_twice(run: RunDir) -> list[int]:
    """Return the steps that more than one attempt has computed."""
    steps = steps_of(run)
    return sorted({step for step in steps if steps.count(step) > 1})


def saved_step(run: RunDir) -> int:
    """Return the step of the newest intact checkpoint, or 0 without one."""
    return max((one.step for one in published(run.checkpoints_dir) if not find_damage(one)), default=0)


def newest_attempt(run: RunDir) -> int:
    """Return the number of the run's newest attempt."""
    return run.attempt_numbers()[-1]


def wait_for_steps(run: RunDir, attempt: int, count: int, timeout_s: float = RESTART_S) -> None:
    """Wait until an attempt has computed this many steps."""
    wait_for(lambda: len(steps_of(run, attempt)) >= count, f"{count} steps of attempt {attempt}", timeout_s)


def last_end(run: RunDir) -> dict[str, Any] | None:
    """Return the end of the newest attempt, unless the run resumes by itself."""
    file = run.attempt(newest_attempt(run)).end_file
    end: dict[str, Any] | None = read_json(file) if file.exists() else None
    return None if end is None or end["action"] in RESUME_ACTIONS else end


def wait_until_over(login: Login, run: RunDir, timeout_s: float) -> dict[str, Any]:
    """Wait until a run has ended in any attempt and nothing resumes it, and return its end."""
    deadline_s = time.monotonic() + timeout_s
    while (end := last_end(run)) is None:
        assert time.monotonic() < deadline_s, login.logs_and_attempts(run)
        time.sleep(0.2)
    return end


def events_of(run: RunDir, name: str) -> list[dict[str, Any]]:
    """Return the events of a run that have this name."""
    return [record for record in read_jsonl(run.events_file) if record["event"] == name]


def time_of(event: Mapping[str, Any]) -> float:
    """Return the time of an event in seconds since 1970."""
    time = parse_time(event["time"])
    assert time is not None
    return time.timestamp()


def kill_rank(run: RunDir, rank: int) -> float:
    """Send SIGKILL to a rank on whatever host it runs, and return the time in seconds since 1970."""
    os.kill(ranks_of(run)[rank], signal.SIGKILL)
    return time.time()


def pause(pids: Iterable[int]) -> None:
    """Suspend processes until `go_on`."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)


def go_on(pids: Iterable[int]) -> None:
    """Continue suspended processes."""
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def hosts_of(run: RunDir, attempt: int) -> list[str]:
    """Return the hosts of an attempt, in the order of its nodes."""
    return [host for _, host in sorted(agents_of(run, attempt))]


@contextmanager
def preemption(cluster: Cluster) -> Iterator[None]:
    """Let the block change the settings of the partition `low`, and restore them afterwards."""
    try:
        yield
    finally:
        set_preemption(cluster, "REQUEUE", 10)


def set_preemption(cluster: Cluster, mode: str, grace_s: int) -> None:
    """Set whether Slurm requeues or cancels a preempted job in `low`, and after how many seconds."""
    change = ["partition=low", f"PreemptMode={mode}", f"GraceTime={grace_s}"]
    cluster.run(["scontrol", "update", *change], timeout_s=30, check=True)


def start_preempting(cluster: Cluster, seconds: float) -> str:
    """Submit a job that takes all hosts for some seconds, and return its id."""
    options = ["--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null", "--parsable"]
    done = cluster.run(["sbatch", *options, f"--wrap=sleep {seconds}"], timeout_s=30, check=True)
    return done.stdout.strip().partition(";")[0]


def preempt(cluster: Cluster, timeout_s: float = 240.0) -> None:
    """Take all hosts for a second, and return when they are free again."""
    cluster.wait_for_job(start_preempting(cluster, 1), "COMPLETED", timeout_s)


def range_config(folder: Path, num_steps: int = 90) -> Path:
    """Write the config of a training run on 1, 2 or 4 nodes, with slow and cheap steps."""
    (folder / "sitecustomize.py").write_text(WAITS_IN_EACH_STEP)
    config = survivor_config(folder, num_steps, batch_size=2)
    config.write_text(config.read_text().replace("global_batch_size: 4", "global_batch_size: 8"))
    return config


def undisturbed(folder: Path, config: Path, num_procs: int = 1, more: Sequence[str] = ()) -> RunDir:
    """Train a config, with `more` of its values, on this machine without a disturbance."""
    from tests.support.runs import train  # this import loads torch

    overrides = []
    for key, value in yaml.safe_load(config.read_text()).items():
        if key == "task_args":
            overrides.append(f"{key}={json.dumps(value)}")
        elif key == "task" and ".py:" in value:  # the file of the task is next to the config
            overrides.append(f"{key}={config.parent / value}")
        elif key in ("model", "data", "train", "optimizer", "schedule", "checkpoint"):
            overrides += [f"{key}.{name}={json.dumps(given)}" for name, given in value.items()]
    return train(folder / "run", [*overrides, *more], num_procs).run


def losses_on_one(folder: Path, config: Path) -> list[float]:
    """Return the losses of the config on one process of this machine."""
    return [r["loss"] for r in read_metrics(undisturbed(folder, config))]
