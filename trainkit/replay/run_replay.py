"""Computes steps of a run again, as ranks of this machine in a throw-away folder."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

from trainkit.cluster.machine import Machine, detect_machine
from trainkit.config import dump_effective, load_config
from trainkit.config.schema import RunConfig
from trainkit.control.resume import submission_folder
from trainkit.errors import TrainkitError, UsageError
from trainkit.job.node.worker_env import worker_environ
from trainkit.job.processes import PYTHON_OPTIONS, dies_with
from trainkit.job.rank_env import RankEnv
from trainkit.manifest import find_plain_damage, published
from trainkit.plan.launch import LaunchPlan
from trainkit.replay.steps import RunStep, find_step
from trainkit.rundir import AttemptDir, RunDir, read_json, read_metrics, write_json
from trainkit.submit.plan_run import plan_run

SAME, SINGLE = "same", "single"
SAMPLES_FILE = "sample_losses.jsonl"
"""As in `trainer.replay`, which this process must not import."""


@dataclass(frozen=True)
class ReplayPlan:
    """What a replay computes, and how."""

    run: RunDir
    first: int
    last: int
    start_step: int
    """Step of the checkpoint that it begins with; 0 for the initial weights."""
    at: RunStep
    """The last step, as the run computed it."""
    config: RunConfig
    plan: LaunchPlan

    @property
    def has_same_layout(self) -> bool:
        return self.plan.layout == self.at.plan.layout and self.plan.batch == self.at.plan.batch


def plan_replay(run: RunDir, first: int, last: int, layout: str) -> ReplayPlan:
    """What to compute for the steps `first` to `last`, with the layout of the run or on a single process.

    Raises UsageError if the run cannot be replayed, or not with that layout on this machine.
    """
    at = find_step(run, last)
    _refuse_other_batches(run, at, first)
    intact = [
        checkpoint.step
        for checkpoint in published(run.checkpoints_dir)
        if checkpoint.step < first and not find_plain_damage(checkpoint)
    ]
    config, plan = at.config, at.plan
    if layout == SINGLE and plan.world_size > 1:
        config, plan = _on_one_process(at)
    plan = replace(
        plan,
        backend="local",
        num_nodes=1,
        workers_per_node=plan.world_size,
        node_sizes=None,
        per="node",
        slurm=None,
    )
    _refuse_too_large(run, plan, detect_machine(), last)
    return ReplayPlan(run, first, last, max(intact, default=0), at, _without_extras(config), plan)


def _refuse_other_batches(run: RunDir, at: RunStep, first: int) -> None:
    """Raise UsageError if the steps were computed with different batches: their samples would be others."""
    before = find_step(run, first)
    if before.plan.batch.global_batch_size != at.plan.batch.global_batch_size or before.plan.lr != at.plan.lr:
        raise UsageError(
            f"step {first}, of attempt {before.attempt.number}, was computed with another batch size or "
            f"learning rate than step {at.step}, of attempt {at.attempt.number}",
            hint="replay them one by one",
        )


def _on_one_process(at: RunStep) -> tuple[RunConfig, LaunchPlan]:
    run = at.attempt.run
    overrides = ["resources.nodes=1", "resources.gpus_per_node=1"]
    overrides += [f"parallel.{name}=1" for name in ("dp_replicate", "dp_shard", "tp", "pp", "cp")]
    loaded = load_config(at.attempt.config_file, overrides=overrides, flags={}, layers=False)
    loaded = loaded.adjusting("train.device_batch_size", "parallel.pp_microbatches", origin="--layout single")
    with submission_folder(run, False) as code_dir:
        plan = plan_run(loaded, code_dir=code_dir, resumes=True)
    return loaded.config, replace(plan, lr=at.plan.lr)


def _refuse_too_large(run: RunDir, plan: LaunchPlan, machine: Machine, step: int) -> None:
    have, what = (machine.num_gpus, "GPUs") if plan.device == "cuda" else (machine.num_cpus, "CPU cores")
    if plan.world_size <= have:
        return
    command = f"trainkit replay {quote(str(run.path))} --step {step}"
    gpus = f" --gpus-per-node={plan.world_size}" if plan.device == "cuda" else ""
    raise UsageError(
        f"the {plan.world_size} ranks of the run do not fit: this machine has {have} {what}",
        hint=f"`--layout single` compares within rounding; with Slurm, on a node that is large enough:\n"
        f"  srun --nodes=1{gpus} --pty {command}",
    )


def _without_extras(config: RunConfig) -> RunConfig:
    """The config without what does not change the steps, as validation; every step is logged."""
    train = {"log_every": 1, "eval_every": None, "eval_at_start": False, "stop_at_step": None}
    checkpoint = {"every_steps": None, "every_minutes": None, "best_metric": None, "async_save": False}
    return config.model_copy(
        update={
            "train": config.train.model_copy(update=train),
            "checkpoint": config.checkpoint.model_copy(update=checkpoint),
            "logging": config.logging.model_copy(update={"tensorboard": False}),
            "profiler": config.profiler.model_copy(update={"start_step": None}),
        }
    )


def run_replay(what: ReplayPlan, folder: Path) -> RunDir:
    """Compute the steps in an empty folder; returns it as a run, with the metrics of every step.

    Writes nothing to the replayed run. Raises TrainkitError with the error of the first rank that fails.
    """
    copy = RunDir(folder)
    copy.checkpoints_dir.mkdir()
    for checkpoint in published(what.run.checkpoints_dir):
        if checkpoint.step < what.first:
            # All of them: the trainer goes back to an earlier one if the newest is damaged.
            copy.checkpoint_dir(checkpoint.step).symlink_to(checkpoint.path)
    if what.run.job_file.is_file():
        write_json(copy.job_file, read_json(what.run.job_file))  # says where the code snapshot is
    attempt = copy.attempt(1)
    attempt.create()
    for file in (attempt.config_file, copy.config_file):
        file.write_text(dump_effective(what.config))
    attempt.plan_file.write_text(what.plan.to_text())
    with submission_folder(what.run, False):
        _run_ranks(what, attempt)
    return copy


def _run_ranks(what: ReplayPlan, attempt: AttemptDir) -> None:
    plan, port, procs = what.plan, _free_port(), []
    python = plan.python or (sys.executable, *PYTHON_OPTIONS)
    argv = [*python, "-m", "trainkit.trainer.replay", str(attempt.run.path), str(what.first), str(what.last)]
    try:
        for rank in range(plan.world_size):
            size = plan.world_size
            env = RankEnv(rank, rank, size, size, 0, 1, "127.0.0.1", port, source="replay")
            environ = worker_environ(
                plan,
                env,
                run_dir=str(attempt.run.path),
                attempt=attempt.number,
                configured=plan.env,
                inherited=os.environ,
                network={"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"},
            )
            with attempt.rank_log(rank).open("ab") as log:
                procs.append(
                    subprocess.Popen(
                        argv,
                        env=environ,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        preexec_fn=dies_with(os.getpid(), signal.SIGKILL),
                    )
                )
        _wait(procs, attempt)
    finally:
        for process in procs:
            if process.poll() is None:
                process.kill()
                process.wait()


def _wait(procs: Sequence[subprocess.Popen[bytes]], attempt: AttemptDir) -> None:
    """Wait for all ranks; raises TrainkitError as soon as one has failed, since the others would wait."""
    waiting = dict(enumerate(procs))
    while waiting:
        for rank, process in list(waiting.items()):
            try:
                code = process.wait(timeout=0.1)
            except subprocess.TimeoutExpired:
                continue
            del waiting[rank]
            if code:
                raise TrainkitError(
                    f"rank {rank} of the replay failed: {_error_of(attempt, rank)}",
                    hint="`--keep` keeps its folder, with the logs of all ranks",
                )


def _error_of(attempt: AttemptDir, rank: int) -> str:
    try:
        return str(read_json(attempt.rank_error(rank))["message"])
    except OSError:
        lines = attempt.rank_log(rank).read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it was killed")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def recorded_steps(run: RunDir, first: int, last: int) -> dict[int, dict[str, object]]:
    """The records of metrics.jsonl for some steps."""
    return {record["step"]: record for record in read_metrics(run) if first <= record["step"] <= last}
