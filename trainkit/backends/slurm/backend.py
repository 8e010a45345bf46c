"""The Slurm backends: one for jobs submitted with sbatch, and one for steps that already exist."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from trainkit.backend import Backend, JobStatus, NewAttempt, ScriptParts, write_cancelled
from trainkit.backends.slurm.failed_starts import bad_starts, failed_starts, note_bad_hosts
from trainkit.backends.slurm.group_chunks import clusters_of, submit_chunks
from trainkit.backends.slurm.resubmit import excludable
from trainkit.backends.slurm.shared_answers import least_interval_s
from trainkit.backends.slurm.step import find_slurm_task, slurm_job_id
from trainkit.errors import TrainkitError, UsageError, print_note
from trainkit.job.signals import AGENT_SIGNAL
from trainkit.plan.launch import LaunchPlan, Options, SlurmRequest, with_excluded
from trainkit.run.end import KILLED, is_over, read_end
from trainkit.run.events import log_event
from trainkit.run.files import write_atomic
from trainkit.run.group import RunGroup
from trainkit.run.history import read_plan
from trainkit.run.record import (
    AttemptRecord,
    JobRecord,
    add_slurm_attempt,
    claimed_by,
    copy_submitit_pickle,
    discard_attempt,
    open_attempt,
    read_rendezvous,
    set_follow_ups,
)
from trainkit.run.rundir import AttemptDir, RunDir, submission_token
from trainkit.scheduler import JobInfo, in_queue, split_job
from trainkit.slurm.client import SlurmUnreachable, require_controller
from trainkit.slurm.control import cancel, cancel_waiting, kill_steps, send_signal
from trainkit.slurm.environment import cluster_name
from trainkit.slurm.jobs import query_jobs
from trainkit.slurm.submit import cancel_command, find_by_token, query_start, submit_script

if TYPE_CHECKING:
    from trainkit.backends.slurm.queue_estimate import SlurmEstimates
    from trainkit.cluster.machine import Machine
    from trainkit.cluster.model import Cluster
    from trainkit.cluster.target import Target
    from trainkit.config.loaded import LoadedConfig
    from trainkit.config.schema import RunConfig
    from trainkit.job.allocation import Allocation
    from trainkit.plan.launch_draft import LaunchDraft

from trainkit.plan.launch import option_argv
from trainkit.quoting import log_path


class SlurmBackend(Backend):
    """Executes runs as Slurm jobs. Only Slurm knows whether such a job is running."""

    poll_s = 1.0
    ask_every_s = 10.0

    def draft(self, loaded: LoadedConfig, machine: Machine, target: Target) -> LaunchDraft:
        from trainkit.backends.slurm.slurm_draft import SlurmDraft

        return SlurmDraft(loaded, machine, target)

    def start_estimates(self, plan: LaunchPlan, config: RunConfig, cluster: Cluster) -> SlurmEstimates:
        from trainkit.backends.slurm.queue_estimate import SlurmEstimates, estimate_waits

        return SlurmEstimates(estimate_waits(plan, config, cluster))

    def in_one_job(self, plans: Sequence[LaunchPlan], cluster: Cluster) -> list[LaunchPlan]:
        from trainkit.backends.slurm.slurm_draft import in_one_job

        return in_one_job(plans, cluster.slurm_version or ())

    def job_options(self, plan: LaunchPlan) -> Options:
        if plan.slurm is None:
            return {}
        clusters: Options = {"clusters": ",".join(plan.clusters)} if plan.clusters else {}
        return {**plan.slurm.srun, **plan.slurm.sbatch, **clusters}

    def gpus_per_node(self, plan: LaunchPlan) -> int:
        whole = 0 if plan.slurm is None else plan.slurm.whole_node_gpus or 0
        return max(plan.gpus_per_node, whole)

    def waiting_for(self, plan: LaunchPlan, names: Sequence[str], reason: str) -> LaunchPlan:
        assert plan.slurm is not None
        dependency = f"afterok:{':'.join(names)}"
        slurm = replace(plan.slurm, sbatch={**plan.slurm.sbatch, "dependency": dependency})
        return replace(plan, slurm=slurm, reasons={**plan.reasons, "after": f"{dependency}: {reason}"})

    def without_hosts(
        self, plan: LaunchPlan, hosts: Sequence[str], notify: Callable[[str], None]
    ) -> LaunchPlan:
        if not hosts or plan.slurm is None:
            return plan
        if plan.clusters:
            notify(
                f"cannot exclude {', '.join(hosts)}: "
                "a job that may run on another cluster cannot exclude hosts"
            )
            return plan
        return replace(plan, slurm=with_excluded(plan.slurm, excludable(hosts, plan.slurm, notify)))

    def bad_hosts(self, run: RunDir, record: JobRecord, entry: AttemptRecord) -> list[str]:
        job = self.job(entry)
        return [start.host for start in bad_starts(failed_starts(run, record, job), job)]

    def note_bad_hosts(
        self, run: RunDir, record: JobRecord, entry: AttemptRecord, warn: Callable[[str], None]
    ) -> list[str]:
        cluster = entry.cluster or cluster_name() or ""
        return note_bad_hosts(run, record, self.job(entry), cluster, warn)[1]

    def require_reachable(self, plan: LaunchPlan) -> None:
        require_controller(plan.clusters)

    def expected_start(self, plan: LaunchPlan, script: str) -> str:
        return query_start(script, clusters=plan.clusters)[1]

    def allocation(self, run: RunDir, arguments: Sequence[str]) -> Allocation:
        from trainkit.backends.slurm.allocation import SlurmAllocation  # only supervisors import it

        job_id = slurm_job_id()
        if job_id is None:
            raise TrainkitError("this is not a Slurm job", hint="`trainkit submit` starts one")
        return SlurmAllocation(run, job_id, arguments)

    def job(self, entry: AttemptRecord) -> JobInfo | None:
        return query_jobs([entry.job]).get(entry.job)

    def alive(self, run: RunDir, entry: AttemptRecord) -> bool:
        # A job that squeue does not list is not running, even if accounting reports it as running.
        return in_queue(self.job(entry))

    def status(
        self, run: RunDir, entry: AttemptRecord, waiting: Sequence[str], jobs: Mapping[str, JobInfo] | None
    ) -> JobStatus:
        if jobs is None or entry.job not in jobs:
            # Jobs of runs that have an end.json are not queried. If the run has no end.json, a missing entry
            # means that the job's cluster does not answer.
            return JobStatus(False if is_over(run.attempt(entry.attempt)) else None)
        job = jobs.get(entry.job)
        if not in_queue(job):
            # `jobs` does not contain the chained jobs of a run that has an end.json.
            job = next((item for item in map(jobs.get, waiting) if in_queue(item)), job)
        return JobStatus(in_queue(job), job)

    def live_entry(self, run: RunDir, job: JobRecord, command: str) -> AttemptRecord | None:
        """Return the attempt with its job, or with a queued chained job if its own job has finished."""
        entry = job.attempts[-1]
        if is_over(run.attempt(entry.attempt)):
            return None
        if self.alive(run, entry):
            return entry
        jobs = query_jobs(job.waiting)
        ids = (split_job(waiting)[0] for waiting in job.waiting if in_queue(jobs.get(waiting)))
        return next((replace(entry, job_id=job_id) for job_id in ids), None)

    def signal(self, run: RunDir, entry: AttemptRecord, number: signal.Signals) -> str:
        job = self.job(entry)
        if job is not None and job.state.is_waiting:
            if number == signal.SIGUSR2:
                return "waiting"
            cancel([entry.job])
            write_cancelled(run, entry, "cancelled before it started")
            return "cancelled"
        end = read_end(run.attempt(entry.attempt))
        if number == signal.SIGTERM and end is not None and end.resumes and end.action != "restart":
            # Cancel the job: its ranks have saved and exited, so the job would only start the next attempt.
            cancel([entry.job])
            write_cancelled(run, entry, "cancelled before the restart")
            return "cancelled"
        send_signal([entry.job], sent_for(number, [(run, entry)]).name)
        return "signalled"

    def kill(self, run: RunDir, entry: AttemptRecord) -> None:
        step_id = step_of(run, entry)
        if step_id is not None:
            # Kill the step before calling scancel, which sends SIGTERM: on SIGTERM, the ranks would start to
            # save.
            with contextlib.suppress(UsageError):
                kill_steps([(entry.job, step_id)])
        cancel([entry.job])
        write_cancelled(run, entry, KILLED)

    def query_interval_s(self, entry: AttemptRecord) -> float:
        return max(self.poll_s, least_interval_s([entry.job]))

    def wait_until_gone(self, run: RunDir, entry: AttemptRecord, timeout_s: float) -> bool:
        now_s, asks_at_s = time.monotonic(), -math.inf
        deadline_s, interval_s = now_s + timeout_s, self.query_interval_s(entry)
        # The run's files are read more often than Slurm is queried.
        while not is_over(run.attempt(entry.attempt)):
            if now_s >= asks_at_s:
                if not self.alive(run, entry):
                    return True
                asks_at_s = now_s + interval_s
            if now_s > deadline_s:
                return False
            time.sleep(self.poll_s)
            now_s = time.monotonic()
        return True


class SbatchBackend(SlurmBackend):
    """Executes runs as Slurm jobs submitted with sbatch."""

    name = "sbatch"
    template = "submit.sbatch.j2"

    def script_parts(
        self, run: RunDir, attempt: int, plan: LaunchPlan, agent: Sequence[str], array: str | None
    ) -> ScriptParts:
        assert plan.slurm is not None
        step = ("srun", *option_argv(plan.slurm.srun), *agent)
        return ScriptParts(directives(run, attempt, plan.slurm, array), step, _restarts_of_starts(plan))

    def start(self, run: RunDir, new: NewAttempt) -> AttemptRecord:
        """Submit the next attempt of a run, and cancel the run's pending chained jobs.

        If Slurm rejects the job, the run folder stays unchanged. If Slurm's answer is lost, the attempt is
        kept, because the job may exist. Raises UsageError if the run folder cannot be written.
        """
        assert new.script is not None
        assert new.plan.slurm is not None
        cancel_follow_ups(run, new.job)
        attempt = _write_attempt(run, new, new.script.text)
        token = submission_token(run, attempt.number)
        with removed_unless_submitted(lambda: discard_attempt(attempt), token, new.plan.slurm.clusters):
            job = self.submit(attempt, new, token)
        try:
            entry = add_slurm_attempt(run, attempt.number, job, new.reason, self.name)
            log_event(run, attempt.number, "submitted", job_id=entry.job_id, reason=new.reason)
            if new.plan.slurm.clusters:
                print_note(f"{entry.job_id} is on the cluster {entry.cluster}")
            submit_follow_ups(attempt, entry.job, new.plan.slurm, new.num_follow_ups)
        except OSError as error:
            raise TrainkitError(
                f"{job.partition(';')[0]} was submitted, but {run.shown} cannot be written: {error.strerror}",
                hint="free some disk space, which the job needs too, "
                f"or cancel the job with `{cancel_command(job)}`",
            ) from error
        return entry

    def start_group(self, group: RunGroup) -> str:
        token, clusters = submission_token(RunDir(group.path), 1), clusters_of(group)
        remove = partial(shutil.rmtree, group.path, ignore_errors=True)
        with removed_unless_submitted(remove, token, clusters):
            submit_chunks(group, print_note)
        assert group.job_id is not None
        if clusters:
            print_note(f"{group.job_id} is on the cluster {group.record.cluster}")
        return group.job_id

    def submit(self, attempt: AttemptDir, new: NewAttempt, token: str) -> str:
        """Submit an attempt's script once; return the job id."""
        assert new.plan.slurm is not None
        clusters = new.plan.slurm.clusters
        return submit_script(
            attempt.script_file, token=token, cwd=attempt.run.path, clusters=clusters, notify=print_note
        )


class StepBackend(SlurmBackend):
    """Executes a run in the Slurm step that contains this process, as in ``srun … trainkit run``."""

    def start(self, run: RunDir, new: NewAttempt) -> AttemptRecord:
        task = find_slurm_task()
        assert task is not None
        attempt = open_attempt(run, new.config_text, new.plan_text)
        known = {"step_id": task.step_id, **claimed_by(os.getpid())}
        entry = add_slurm_attempt(run, attempt.number, task.job_id, new.reason, "srun", **known)
        log_event(run, attempt.number, "submitted", job_id=task.job_id, reason=new.reason)
        log_event(run, attempt.number, "started", world_size=new.plan.world_size, nodes=new.plan.num_nodes)
        return entry


def sent_for(number: signal.Signals, runs: Sequence[tuple[RunDir, AttemptRecord]]) -> signal.Signals:
    """Return the signal that Slurm must send to the runs' steps so that their ranks save.

    `number` is the intended signal, SIGTERM or SIGUSR2. The result is SIGURG if possible: agents translate it
    into the signal that their command handles. If Slurm sent SIGTERM, it would also kill the shell around the
    training process, and a `tee` that reads its output. The agents' signal cannot be used before the
    rendezvous, because an agent may not handle signals yet. The agents' signal also cannot be used if a
    cancellation could not be recorded, because agents would then assume a requeue.
    """
    has_agents = all(
        read_plan(run.attempt(entry.attempt)).is_command  # a damaged plan must not prevent cancelling the run
        and read_rendezvous(run.attempt(entry.attempt)).port is not None
        and (number == signal.SIGUSR2 or entry.is_cancelled)
        for run, entry in runs
    )
    return AGENT_SIGNAL if number == signal.SIGUSR2 or has_agents else number


def step_of(run: RunDir, entry: AttemptRecord) -> str | None:
    """Return the id of the Slurm step that runs an attempt's ranks, or None before their rendezvous."""
    return entry.step_id or read_rendezvous(run.attempt(entry.attempt)).step_id


def cancel_follow_ups(run: RunDir, record: JobRecord, keep: str = "") -> None:
    """Cancel the pending chained jobs except `keep`. The caller must hold the run's lock.

    Raises SlurmUnreachable, but only prints a note if the run is over and its jobs are on another cluster.
    """
    waiting, newest = [job for job in record.waiting if job != keep], record.newest
    if newest is None or not waiting:
        return
    try:
        cancel_waiting(waiting)
    except SlurmUnreachable as error:
        if not newest.other_cluster or not is_over(run.attempt(newest.attempt)):
            raise
        ids = " ".join(split_job(job)[0] for job in waiting)
        print_note(
            f"{error.message}: `scancel --clusters={newest.other_cluster} {ids}` cancels the chained jobs "
            "that may still be pending on that cluster"
        )
    set_follow_ups(run, [])


def _write_attempt(run: RunDir, new: NewAttempt, script: str) -> AttemptDir:
    """Write all files for the run's next attempt, or none of them if one cannot be written."""
    attempt = run.next_attempt()
    try:
        open_attempt(run, new.config_text, new.plan_text)
        for file in (attempt.script_file, run.script_file):
            write_atomic(file, script)
    except FileExistsError:
        raise  # another command has just created this attempt
    except OSError as error:
        discard_attempt(attempt)
        raise UsageError(
            f"{run.shown} cannot be written: {error.strerror or error}; nothing was submitted",
            hint="check the disk and your quota, or choose another folder with --run-dir",
        ) from error
    return attempt


@contextmanager
def removed_unless_submitted(
    remove: Callable[[], None], token: str, clusters: Sequence[str]
) -> Iterator[None]:
    """Call `remove` if the `with` block raises and the job is known not to exist."""
    began = time.time()
    try:
        yield
    except BaseException as error:
        may_exist = isinstance(error, SlurmUnreachable) and error.may_have_arrived
        if isinstance(error, KeyboardInterrupt):
            may_exist = not _cancel_interrupted(token, began, clusters)
        if not may_exist:
            remove()
        raise


def _cancel_interrupted(token: str, since: float, clusters: Sequence[str]) -> bool:
    """Cancel the job with this token after Ctrl-C; return False if it is unknown whether the job exists."""
    try:
        found = find_by_token(token, since=since, clusters=clusters)
        if found is not None:
            cancel([found])
            print_note(f"{found.partition(';')[0]} had already been submitted and was cancelled")
    except TrainkitError as error:
        print_note(f"cannot tell whether the job was submitted: {error.message}")
        return False
    return True


def submit_follow_ups(attempt: AttemptDir, job: str, request: SlurmRequest, count: int) -> list[str]:
    """Submit an attempt's script `count` more times as chained jobs that continue `job`; return their ids.

    The caller must hold the run's lock. If Slurm rejects a chained job, only prints a note, because the run
    itself has been submitted.
    """
    run = attempt.run
    # A job can only depend on jobs in the same cluster.
    job_id, cluster = split_job(job)
    ids: list[str] = []
    for number in range(1, count + 1):
        token = submission_token(run, attempt.number, number)
        # Make each chained job depend on all earlier jobs, because Slurm considers a job failed if it was
        # removed from the queue.
        dependency = ",".join(f"afternotok:{before}" for before in (job_id, *ids))
        options = (
            f"--comment={request.comment(token)}",
            f"--dependency={dependency}",
            "--kill-on-invalid-dep=yes",
        )
        try:
            answer = submit_script(
                attempt.script_file,
                token=token,
                cwd=run.path,
                extra_argv=options,
                clusters=[cluster] if cluster else (),
                is_only_job=False,
                notify=print_note,
            )
        except TrainkitError as error:
            print_note(f"only {len(ids)} of {count} chained jobs are in the queue: {error.message}")
            break
        new_id = split_job(answer)[0]
        copy_submitit_pickle(run, job_id, new_id)
        ids.append(new_id)
        set_follow_ups(run, ids)
    if ids:
        print_note(
            f"{', '.join(ids)} {'waits' if len(ids) == 1 else 'wait'} in the queue to continue {job_id}"
        )
    return ids


def _restarts_of_starts(plan: LaunchPlan) -> int:
    """Return how many times in a row the script requeues a job whose supervisor did not start."""
    assert plan.slurm is not None
    may_requeue = "crash" in plan.requeue.on and "requeue" in plan.slurm.sbatch
    return min(plan.requeue.max, plan.requeue.max_crashes) if may_requeue else 0


def directives(run: RunDir, attempt: int, request: SlurmRequest, array: str | None) -> Options:
    """Return the options in the `#SBATCH` lines, by name. An option that takes no value maps to True."""
    comment = request.comment(submission_token(run, attempt))
    log = log_path(str(run.attempt(attempt).supervisor_log))
    options = {**request.sbatch, "comment": comment, "output": log, "open-mode": "append"}
    if array is not None:
        options |= {"array": array, "output": _array_log(RunGroup(run.path))}
    if attempt > 1:
        options.pop("dependency", None)  # only the first attempt has to wait for other jobs
    return {name: value for name, value in options.items() if value is not False}


def _array_log(group: RunGroup) -> str:
    if "\\" in str(group.path):
        raise UsageError(
            f"{group.path} contains a backslash, so Slurm would write all tasks of an array to the same log",
            hint="use --run-dir to choose a path without a backslash",
        )
    return f"{log_path(str(group.logs_dir))}/{group.log_file('%a').name}"
