"""Computes the steps of a replay: as ranks of this machine in a throw-away folder, or in a job of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote

from trainkit.config import dump_effective, read_effective
from trainkit.contrib.replay.plan_replay import ReplayPlan
from trainkit.contrib.replay.steps import find_step
from trainkit.control.resume import REPLAY_FILE, copy_checkpoint, submission_folder
from trainkit.errors import TrainkitError, UsageError
from trainkit.job.node.rendezvous import choose_port
from trainkit.job.node.worker_env import worker_argv, worker_environ
from trainkit.job.processes import first_failed, kill_group, start_child
from trainkit.job.rank_env import RankEnv
from trainkit.job.signals import NOTICE_SIGNALS, describe_exit
from trainkit.launch.create import collect_provenance, new_folder, start_run
from trainkit.launch.secrets import without_secrets
from trainkit.plan.launch import LaunchPlan
from trainkit.run.events import training_curve
from trainkit.run.files import read_json, write_json
from trainkit.run.manifest import published
from trainkit.run.record import AttemptRecord, create_job, read_job
from trainkit.run.rundir import AttemptDir, RunDir

SAMPLES_FILE = "sample_losses.jsonl"
"""As in `trainer.replay`, which this process must not import."""


def run_replay(what: ReplayPlan, folder: Path) -> RunDir:
    """Compute the steps in an empty folder; returns it as a run, with the metrics of every step.

    Writes nothing to the replayed run. Raises TrainkitError with the error of the first rank that fails.
    """
    copy = RunDir(folder)
    copy.checkpoints_dir.mkdir()
    for checkpoint in published(what.run.checkpoints_dir):
        if checkpoint.step < what.first:
            # All of them: the trainer goes back to an earlier one if the newest is damaged.
            _link_checkpoint(checkpoint.path, copy.checkpoint_dir(checkpoint.step))
    if what.run.job_file.is_file():
        write_json(copy.job_file, read_json(what.run.job_file))  # says where the code snapshot is
    attempt = copy.attempt(1)
    attempt.create()
    for file in (attempt.config_file, copy.config_file):
        file.write_text(dump_effective(what.config))
    attempt.plan_file.write_text(what.plan.to_text())
    with submission_folder(what.run, False):
        _run_ranks(what.plan, attempt)
    return copy


def _link_checkpoint(source: Path, target: Path) -> None:
    """Hard-link the files of a checkpoint, which the run may remove; on another disk, link its folder."""
    try:
        shutil.copytree(source, target, copy_function=os.link)
    except OSError:
        shutil.rmtree(target, ignore_errors=True)
        target.symlink_to(source)


def submit_replay(what: ReplayPlan, argv: Sequence[str], folder: Path | None) -> tuple[RunDir, AttemptRecord]:
    """Start a job that computes the steps in a run folder of its own; returns it and its job.json entry.

    The folder is `folder`, new or empty, or ``runs/NAME-replay``. The job runs the code of the replayed run.
    """
    job = read_job(what.run)
    name = f"{what.config.name}-replay"
    folder = None if folder is None else folder.absolute()
    with submission_folder(what.run, False):
        with new_folder(name, folder) as (path, name):
            copy = RunDir(path.absolute())
            copy.checkpoints_dir.mkdir(mode=0o700)
            if what.start_step:
                # Hard links, where possible: the run may remove its checkpoint before the job starts.
                copy_checkpoint(what.run.checkpoint_dir(what.start_step), copy)
            given = without_secrets(argv, what.config.launch.secrets)
            write_json(copy.provenance_file, {**collect_provenance(Path.cwd()), "argv": given})
            record = {"run": str(what.run.path), "first": what.first, "last": what.last}
            write_json(copy.path / REPLAY_FILE, record)
            cwd = str(Path.cwd())
            create_job(copy, backend=what.plan.backend, name=name, cwd=cwd, code=job.code)
        config = what.config.model_copy(update={"name": name})
        return copy, start_run(copy, config, what.plan, "submit")


def replay_of(copy: RunDir) -> ReplayPlan:
    """What the job in a folder replays, as `submit_replay` planned it.

    Raises UsageError if it is not the folder of a replay or the replayed run is gone.
    """
    try:
        record = read_json(copy.path / REPLAY_FILE)
    except FileNotFoundError:
        raise UsageError(
            f"{copy.path} is not the folder of a replay",
            hint="`trainkit replay RUN --step N --submit` makes one",
        ) from None
    run = RunDir(record["run"])
    if not run.exists():
        raise UsageError(f"the replayed run {run.path} is gone", hint="`--collect` compares with its files")
    attempt = copy.attempt(copy.attempt_numbers()[-1])
    plan, config = LaunchPlan.read(attempt.plan_file), read_effective(attempt.config_file)
    start = max((checkpoint.step for checkpoint in published(copy.checkpoints_dir)), default=0)
    first, last = record["first"], record["last"]
    done = max((record.step for record in training_curve(copy)), default=start)
    if done < last:
        raise TrainkitError(
            f"{copy.path} has computed steps {start + 1} to {done} of {last}"
            if done > start
            else f"{copy.path} has not computed a step yet",
            hint=f"`trainkit status {quote(str(copy.path))}` says what it does",
        )
    return ReplayPlan(run, first, last, start, find_step(run, last), config, plan)


def _run_ranks(plan: LaunchPlan, attempt: AttemptDir) -> None:
    port, size = choose_port(str(os.getpid()), attempt.number), plan.world_size
    procs: list[subprocess.Popen[bytes]] = []
    plan = replace(plan, env={**plan.env, **code_variables(attempt.run, plan.env)})
    try:
        for rank in range(size):
            env = RankEnv(rank, rank, size, size, 0, 1, "127.0.0.1", port, source="replay")
            environ = worker_environ(
                plan,
                env,
                attempt,
                inherited=os.environ,
                network={"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"},
            )
            argv = worker_argv(plan, env, attempt.run)
            # Python drops an exception that a signal handler raises inside a fork.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*NOTICE_SIGNALS, signal.SIGHUP})
            try:
                with attempt.rank_log(rank).open("ab") as log:
                    procs.append(start_child(argv, environ=environ, output=log, keeps_mask=False))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        # As soon as one has failed, since the others would wait for it.
        if (failed := first_failed(procs)) is not None:
            raise _failure(attempt, failed, procs[failed].poll() or 0)
    finally:
        for process in procs:
            if process.poll() is None:
                kill_group(process)
                process.wait()


def code_variables(run: RunDir, env: Mapping[str, str]) -> dict[str, str]:
    """PYTHONPATH with the run's copy of the code in front, as its job had it; empty without a copy."""
    code = read_job(run).code
    if code is None:
        return {}
    paths = [*code.import_path, env.get("PYTHONPATH") or os.environ.get("PYTHONPATH")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _failure(attempt: AttemptDir, rank: int, code: int) -> TrainkitError:
    """The error of a rank that failed, as it has recorded it, else the last line of its log."""
    hint = "`--keep` keeps its folder, with the logs of all ranks"
    try:
        record = read_json(attempt.rank_error(rank))
        message, hint = str(record["message"]), str(record["hint"] or hint)
    except OSError:
        lines = attempt.rank_log(rank).read_text(errors="replace").strip().splitlines()
        message = lines[-1] if lines else describe_exit(code if code > 0 else 128 - code)
    return TrainkitError(f"rank {rank} of the replay failed: {message}", hint=hint)
