"""Plans and starts a replay: chooses the steps, the checkpoint, the layout and the machine.

The ranks of a replay run on this machine in a temporary folder, or in a separate Slurm job.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from trainkit.capabilities.replay import ReplayPart
from trainkit.capabilities.replay.steps import RunStep, attempt_starts, find_step
from trainkit.cluster.machine import Machine, detect_machine
from trainkit.cluster.target import LOCAL
from trainkit.config import dump_effective, load_config
from trainkit.config.load import quiet_keys
from trainkit.config.schema import RunConfig
from trainkit.control.changed_config import changes
from trainkit.control.resume import copy_checkpoint
from trainkit.errors import TrainkitError, UsageError
from trainkit.formats import duration, plural
from trainkit.job.failure.records import first_rank_failure, record_silent_death
from trainkit.job.node.rendezvous import choose_port
from trainkit.job.node.worker_env import worker_argv, worker_environ
from trainkit.job.processes import exit_code, first_failed, kill_group, start_child
from trainkit.job.rank_env import RankEnv
from trainkit.job.signals import NOTICE_SIGNALS
from trainkit.launch.create import new_folder, start_run
from trainkit.launch.plan_run import gather, plan_run
from trainkit.launch.repeat import REPLAY_FILE, config_and_plan, submission_folder
from trainkit.launch.secrets import without_secrets
from trainkit.launch.snapshot import collect_provenance
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.layout_rules import DEGREES, parse_layout
from trainkit.run.end import RankFailure
from trainkit.run.events import training_curve
from trainkit.run.files import parse_time, read_json, write_atomic, write_json
from trainkit.run.manifest import find_damage, published
from trainkit.run.record import AttemptRecord, CodeCopy, create_job
from trainkit.run.rollbacks import write_rollbacks
from trainkit.run.rundir import AttemptDir, RunDir
from trainkit.shipped import load

SAME, SINGLE = "same", "single"
ORIGIN = "trainkit replay"
Flags = Mapping[str, tuple[str, object]]
"""Maps a dotted config key to a command-line flag, as typed, and the value of the flag."""
WITHOUT_EXTRAS: Mapping[str, object] = {
    "train.log_every": 1,
    "train.eval_every": None,
    "train.eval_at_start": False,
    "train.stop_at_step": None,
    "checkpoint.every_steps": None,
    "checkpoint.every_minutes": None,
    "checkpoint.best_metric": None,
    "checkpoint.async": False,
    "logging.tensorboard": False,
    "profiler.start_step": None,
    "resources.spare_nodes": 0,
    "resources.slice": None,
    "requeue.on": [],
    "requeue.follow_ups": 0,
}
"""Config values that disable everything that does not affect the recomputed steps; `quiet_keys` are also set
to null."""
IRRELEVANT = (
    "name:",
    "resources.",
    "launch.",
    "requeue.",
    "logging.",
    "checkpoint.",
    "profiler.",
    "parallel.",
    "train.log_every",
    "train.eval_",
    "train.stop_at_step",
    "train.spike",
    "train.device_batch_size",
    "train.global_batch_size",
    "optimizer.lr",
    "data.cache_dir",
    "data.num_workers",
    "device",
)
"""Config keys that `changed_values` ignores: they affect only rounding, or their effect is visible in the
plan."""


@dataclass(frozen=True)
class ReplayPlan:
    """The steps to replay, and the config and the plan for computing them."""

    run: RunDir
    first: int
    last: int
    start_step: int
    """Step of the checkpoint where the replay starts; 0 for the initial weights."""
    at: RunStep
    """The last step to replay, with the attempt that computed it."""
    config: RunConfig
    plan: LaunchPlan

    @property
    def warnings(self) -> tuple[str, ...]:
        """Reasons why the result of the replay may be unreliable, one sentence each."""
        started = parse_time(self.at.began.time)
        if started is None or self.at.job.code:
            return ()  # The run has its own copy of the code, so later edits do not affect the replay.
        config = self.at.config
        named = (config.task, config.model.architecture, config.optimizer.name, config.schedule.name)
        with submission_folder(self.at.job):
            files = [Path(name.rpartition(":")[0]).absolute() for name in named if ".py:" in name]
        return tuple(
            f"{file} was changed after attempt {self.at.attempt.number} began, and the run has no copy "
            f"of the "
            "original file, so the replay may differ from the run"
            for file in files
            if file.is_file() and file.stat().st_mtime > started.timestamp()
        )

    @property
    def cost(self) -> str:
        """Describe which steps will be computed, and how long they took in the original run."""
        count = self.last - self.start_step
        origin = f"checkpoint step-{self.start_step:08d}" if self.start_step else "the initial weights"
        ranks = plural(self.plan.world_size, f"{self.plan.device} rank")
        text = f"computing {plural(count, 'step')} from {origin} on {ranks}"
        times = [
            step_s
            for record in training_curve(self.run)
            if self.start_step < record.step <= self.last and (step_s := record.number("step_s")) is not None
        ]
        if not times:
            return text
        return f"{text}; in the run, these steps took {duration(count * median(times))}"


def plan_replay(
    run: RunDir, first: int, last: int, layout: str, flags: Flags, *, submits: bool = False
) -> ReplayPlan:
    """Plan a replay that recomputes the steps `first` to `last`.

    `layout` is ``same``, ``single`` or degrees such as ``tp=2,dp_shard=2``. `flags` change the number of
    nodes and GPUs and, with `submits`, also the Slurm options. Raises UsageError if the run cannot be
    replayed in this layout or on this machine.
    """
    at = find_step(run, last)
    _refuse_later(run, at)
    start_step = _start_step(at, first)
    _refuse_changes(run, at, start_step)
    if layout == SAME and not flags and not submits:  # Use the run's own layout on this machine.
        values = _flags({**_without_extras(at.config), "device": at.plan.device})
        config = load_config(at.attempt.config_file, flags=values, layers=False).config
        plan = replace(at.plan, slurm=None)
    else:
        config, plan = _planned(at, layout, flags, submits)
    if at.began.threads is not None and plan.layout == at.plan.layout:
        # On CPUs, the results depend on the number of threads, so use the number that the attempt used.
        plan = replace(plan, threads_per_worker=at.began.threads)
    parts = {name: part for name, part in plan.parts.items() if not load(name).quiet}
    plan = replace(plan, requeue=replace(plan.requeue, on=()), parts=parts)
    plan = plan.with_part(ReplayPart((first, last)))
    if not plan.is_job:
        plan = replace(
            plan,
            backend="local",
            num_nodes=1,
            workers_per_node=plan.world_size,
            node_sizes=None,
            per="node",
        )
        _refuse_too_large(run, plan, detect_machine(), last)
    return ReplayPlan(run, first, last, start_step, at, config, plan)


def _refuse_later(run: RunDir, at: RunStep) -> None:
    """Raise UsageError if the records show that the run has not yet reached a step."""
    newest = max((record.step for record in training_curve(run)), default=0)
    if at.step > newest + at.config.train.log_every:
        raise UsageError(
            f"{run.shown} has not computed step {at.step}: its last recorded step is {newest}",
            hint="`trainkit data show` shows the samples of any step",
        )


def _start_step(at: RunStep, first: int) -> int:
    """Return the step of the newest intact checkpoint before step `first`; 0 for the initial weights."""
    run = at.attempt.run
    intact = [
        checkpoint.step
        for checkpoint in at.checkpoints_before(first)
        if not find_damage(checkpoint, reads_tensors=False)
    ]
    begin = min(start.step for start in attempt_starts(run).values())
    if not intact and begin > 0:
        raise UsageError(
            f"{run.shown} has no checkpoint before step {first}, and it began with step {begin + 1}",
            hint="the first checkpoint was copied from another run: replay the other run",
        )
    return max(intact, default=0)


def _refuse_changes(run: RunDir, at: RunStep, start_step: int) -> None:
    """Raise UsageError if the config changed between the checkpoint and the last step to replay."""
    begins = {start_step, *(start.step for start in attempt_starts(run).values())}
    for step in sorted(begin + 1 for begin in begins if start_step <= begin < at.step):
        before = find_step(run, step)
        found = changed_values(before.attempt, before.config, before.plan, at)
        if found:
            origin = f"checkpoint step-{start_step:08d}" if start_step else "the initial weights"
            raise UsageError(
                f"step {at.step} would be computed from {origin}, but attempt {before.attempt.number} "
                f"computed step {step} with other values than attempt {at.attempt.number}: "
                f"{'; '.join(found)}",
                hint="choose a step for which these values have not changed since the previous checkpoint",
            )


def changed_values(attempt: AttemptDir, config: RunConfig, was: LaunchPlan, at: RunStep) -> list[str]:
    """Return a line for each step-affecting value that differs between `attempt` and the attempt in `at`."""
    if attempt.number == at.attempt.number:
        return []
    now, lines = at.plan, changes(config, at.config)
    found = [line for line in lines if not line.startswith(IRRELEVANT)]
    if was.batch.global_batch_size != now.batch.global_batch_size:
        found.append(f"global batch size: {was.batch.global_batch_size} -> {now.batch.global_batch_size}")
    if was.lr != now.lr:
        found.append(f"peak learning rate: {was.lr:g} -> {now.lr:g}")
    return found


def _flags(values: Mapping[str, object], origin: str = ORIGIN) -> dict[str, tuple[str, object]]:
    return {key: (origin, value) for key, value in values.items()}


def _planned(at: RunStep, layout: str, flags: Flags, submits: bool) -> tuple[RunConfig, LaunchPlan]:
    """Return the config and the plan for a replay in a different layout or in a Slurm job."""
    backend = at.config.launch.backend
    values = {
        **_without_extras(at.config),
        **_layout_values(at.plan, layout),
        "device": at.plan.device,
        "train.global_batch_size": at.plan.batch.global_batch_size,
        "launch.backend": "auto" if backend == "local" else backend,
    }
    all_flags = {**_flags(values, f"--layout {layout}"), **flags}
    if layout == SAME:
        _refuse_other_size(at, all_flags)
    loaded = load_config(at.attempt.config_file, flags=all_flags, layers=False)
    adjustable = {"train.device_batch_size", "parallel.pp_microbatches"} - values.keys()
    loaded = loaded.adjusting(*adjustable, origin=loaded.origins["name"].rpartition(":")[0])
    with submission_folder(at.job) as code_dir:
        facts = gather(loaded, target=None if submits else LOCAL, resumes=True)
        plan = plan_run(loaded, facts, code_dir=code_dir)
    return loaded.config, replace(plan, lr=at.plan.lr)


def _without_extras(config: RunConfig) -> dict[str, object]:
    return {**WITHOUT_EXTRAS, **dict.fromkeys(quiet_keys(config))}


def _layout_values(plan: LaunchPlan, layout: str) -> dict[str, object]:
    """Return the config values for a layout; all layouts except ``single`` keep the run's number of nodes."""
    values: dict[str, object] = {
        "resources.nodes": plan.num_nodes,
        "resources.gpus_per_node": plan.workers_per_node,
    }
    if layout == SINGLE:
        values = {"resources.nodes": 1, "resources.gpus_per_node": 1}
        degrees: dict[str, object] = dict.fromkeys(DEGREES, 1)
    elif layout == SAME:
        degrees = {name: getattr(plan.layout, name) for name in DEGREES}
        values["train.device_batch_size"] = plan.batch.device_batch_size
        if plan.batch.pp_microbatches is not None:
            values["parallel.pp_microbatches"] = plan.batch.pp_microbatches
    else:
        degrees = parse_layout(layout)
    return values | {f"parallel.{name}": value for name, value in degrees.items()}


def _refuse_other_size(at: RunStep, flags: Flags) -> None:
    """Raise UsageError unless the requested nodes and GPUs yield the same world size as in the run."""
    nodes, per_node = (int(str(flags[key][1])) for key in ("resources.nodes", "resources.gpus_per_node"))
    if nodes * per_node != at.plan.world_size:
        raise UsageError(
            f"{nodes} node{'s' * (nodes > 1)} with {per_node} rank{'s' * (per_node > 1)} each do not have "
            f"the {plural(at.plan.world_size, 'rank')} of the run",
            hint="change --nodes and --gpus-per-node, or choose another --layout, such as dp_shard=4",
        )


def _refuse_too_large(run: RunDir, plan: LaunchPlan, machine: Machine, step: int) -> None:
    have, what = (machine.num_gpus, "GPUs") if plan.device == "cuda" else (machine.num_cpus, "CPU cores")
    if plan.world_size <= have:
        return
    raise UsageError(
        f"the {plan.world_size} {plan.device} ranks of the replay do not fit: this machine has {have} {what}",
        hint=f"`trainkit replay {run.quoted} --step {step} --submit` computes the steps in a job; "
        "`--layout single` needs one rank, but compares values only up to rounding",
    )


def run_replay(what: ReplayPlan, folder: Path) -> RunDir:
    """Compute the steps in an empty folder, and return it as a run whose metrics include every computed step.

    The original run is not changed. If ranks fail, raises TrainkitError with the error of the rank that
    failed first.
    """
    copy = RunDir(folder)
    copy.checkpoints_dir.mkdir()
    _write_rollbacks(what, copy)
    for checkpoint in what.at.checkpoints_before(what.first):
        # Link all checkpoints, because the trainer falls back to an earlier one if the newest is damaged.
        _link_checkpoint(checkpoint.path, copy.checkpoint_dir(checkpoint.step))
    if what.run.job_file.is_file():
        # Copy job.json, because it contains the path of the code snapshot.
        write_json(copy.job_file, read_json(what.run.job_file))
    attempt = copy.attempt(1)
    attempt.create()
    for file in (attempt.config_file, copy.config_file):
        write_atomic(file, dump_effective(what.config))
    write_atomic(attempt.plan_file, what.plan.to_text())
    with submission_folder(what.at.job):
        _run_ranks(what.plan, attempt, what.at.job.code)
    return copy


def _write_rollbacks(what: ReplayPlan, copy: RunDir) -> None:
    """Make a replay leave out the samples that the attempt left out."""
    if what.at.rollbacks:
        write_rollbacks(copy, [replace(item, attempt=0) for item in what.at.rollbacks])


def _link_checkpoint(source: Path, target: Path) -> None:
    """Hard-link a checkpoint's files, so that they remain available if the run deletes the checkpoint."""
    try:
        shutil.copytree(source, target, copy_function=os.link)
    except OSError:
        shutil.rmtree(target, ignore_errors=True)
        target.symlink_to(source)


def submit_replay(what: ReplayPlan, argv: Sequence[str], folder: Path | None) -> tuple[RunDir, AttemptRecord]:
    """Submit a job that computes the steps in a new run folder; return the new run and its job record.

    `folder` must be new or empty; the default is ``runs/NAME-replay``. The job uses the same code as the
    replayed run.
    """
    job, name = what.at.job, f"{what.config.name}-replay"
    folder = None if folder is None else folder.absolute()
    with submission_folder(job):
        with new_folder(name, folder) as (path, name):
            copy = RunDir(path.absolute())
            copy.checkpoints_dir.mkdir(mode=0o700)
            _write_rollbacks(what, copy)
            if what.start_step:
                # Copy or hard-link the checkpoint, because the run may delete it before the job starts.
                copy_checkpoint(what.run.checkpoint_dir(what.start_step), copy)
            given = without_secrets(argv, what.config.launch.secrets)
            write_json(copy.provenance_file, {**collect_provenance(Path.cwd()), "argv": given})
            record = {"run": str(what.run.path), "first": what.first, "last": what.last}
            write_json(copy.path / REPLAY_FILE, record)
            cwd = str(Path.cwd())
            own = create_job(copy, backend=what.plan.backend, name=name, cwd=cwd, code=job.code)
        config = what.config.model_copy(update={"name": name})
        return copy, start_run(copy, own, config, what.plan, "submit")


def replay_of(copy: RunDir) -> ReplayPlan:
    """Return the plan of the replay in a folder that `submit_replay` created.

    Raises UsageError if the folder is not a replay or the original run no longer exists, and TrainkitError if
    the job has not computed all steps.
    """
    try:
        record = read_json(copy.path / REPLAY_FILE)
    except FileNotFoundError:
        raise UsageError(
            f"{copy.shown} is not a replay folder",
            hint="`trainkit replay RUN --step N --submit` creates a replay folder",
        ) from None
    run = RunDir(record["run"])
    if not run.exists():
        raise UsageError(f"the replayed run {run.shown} does not exist", hint="`--collect` needs its files")
    attempt = copy.attempt(copy.attempt_numbers()[-1])
    config, plan = config_and_plan(attempt)
    start = max((checkpoint.step for checkpoint in published(copy.checkpoints_dir)), default=0)
    first, last = record["first"], record["last"]
    done = max((record.step for record in training_curve(copy)), default=start)
    if done < last:
        raise TrainkitError(
            f"{copy.shown} has computed steps {start + 1} to {done} of {last}"
            if done > start
            else f"{copy.shown} has not computed any step yet",
            hint=f"`trainkit status {copy.quoted}` shows the state of the job",
        )
    return ReplayPlan(run, first, last, start, find_step(run, last), config, plan)


def _run_ranks(plan: LaunchPlan, attempt: AttemptDir, code: CodeCopy | None) -> None:
    port, size = choose_port(), plan.world_size
    procs: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(size):
            env = RankEnv(rank, rank, size, size, 0, 1, "127.0.0.1", port, source="replay")
            environ = worker_environ(
                plan,
                env,
                attempt,
                inherited=os.environ,
                defaults={"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"},
                code=code,
            )
            argv = worker_argv(plan, env, attempt.run)
            # Block signals during the fork, because Python drops exceptions that a signal handler raises
            # there.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*NOTICE_SIGNALS, signal.SIGHUP})
            try:
                with attempt.rank_log(rank).open("ab") as log:
                    procs.append(start_child(argv, environ=environ, output=log, keeps_mask=False))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        # Stop the other ranks after the first failure, because they would wait for the failed rank in
        # collectives.
        if (failed := first_failed(procs)) is not None:
            record_silent_death(attempt, failed, 0, exit_code(procs[failed]))
            failure = first_rank_failure(attempt) or RankFailure()
            raise TrainkitError(
                f"rank {failure.rank} of the replay failed: {failure.message}",
                hint=failure.hint or "use `--keep` to keep the folder with the logs of all ranks",
            )
    finally:
        for process in procs:
            if process.poll() is None:
                kill_group(process)
                process.wait()
