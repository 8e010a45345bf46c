"""Writes failure records on behalf of dead workers, and finds an attempt's first failure."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.errors import EXIT_FAILED, EXIT_OK, EXIT_STOPPED, EXIT_STUCK, TrainkitError
from trainkit.formats import rank_list
from trainkit.job.blame import UNKNOWN, blame_for_unlike_data, find_blame
from trainkit.job.failure.launcher_report import RankExit, first_exit, ran_out_of_memory, was_terminated
from trainkit.job.flight_records import read_flights
from trainkit.job.hangs import blamed_failure, hang_failure, node_of, read_hangs
from trainkit.job.preflight import PreflightFailed
from trainkit.job.signals import describe_exit, is_death_by_stop_signal, signal_exit_code
from trainkit.plan.launch import LaunchPlan
from trainkit.run.end import NO_RESULT, NOTICED_S, SIGNALLED, RankFailure, first_of, rank_failures
from trainkit.run.files import (
    as_utc,
    parse_time,
    refresh_listing,
    seconds_between,
    to_json,
    utc_now,
    write_json,
)
from trainkit.run.process import own_host
from trainkit.run.record import read_rendezvous
from trainkit.run.rundir import AttemptDir
from trainkit.run.tracebacks import exception_of, last_exception

if TYPE_CHECKING:
    from trainkit.cluster.bad_nodes import Kind
    from trainkit.job.decision import Observed


_THROWN = re.compile(r"^  what\(\): +(.+)$", re.MULTILINE)
"""Matches the message of a C++ exception that aborted a process, for example in NCCL's watchdog thread."""
FINAL = ("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError")
"""Types of exceptions that would be raised again after a restart."""


LOG_TAIL_LINES = 20
LOG_TAIL_BYTES = 262_144
"""Number of bytes to read from the end of a log file; large, because a launcher writes the tracebacks of all
ranks into one file."""


def _last_lines(path: Path) -> list[str]:
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - LOG_TAIL_BYTES))
            text = stream.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return text.splitlines()


def killed_rank(
    attempt: AttemptDir, worker: int, exit_code: int, seen: RankExit | None = None
) -> RankExit | None:
    """Return the rank whose death stopped a launcher or a script that starts ranks, or None if unknown.

    `seen` is the first rank exit that the agent itself observed.
    """
    reported = first_exit(_last_lines(attempt.rank_log(worker)))
    if reported is not None and (reported.code >= 0 or exit_code not in (EXIT_FAILED, 256 + reported.code)):
        reported = None
    if seen is None or seen.code >= 0 or (reported is not None and reported.rank is not None):
        return reported
    return seen


def record_silent_death(
    attempt: AttemptDir,
    worker: int,
    node_rank: int,
    exit_code: int,
    out_of_memory: bool = False,
    killed: RankExit | None = None,
    is_job: bool = True,
) -> None:
    """Write the failure record for a worker that did not write one itself.

    A worker leaves no failure record if it was killed, if it ran out of memory, or if it is a COMMAND.
    `worker` is the worker's rank or, for a launcher, the first rank of the node. `killed` is the rank whose
    death stopped a launcher; if given, `exit_code` is the exit code of that rank.
    """
    if attempt.rank_error(worker).exists():
        return
    death = _out_of_memory(exit_code, is_job) if out_of_memory else _death(attempt, worker, exit_code)
    rank = killed.rank if killed is not None else worker if death.rank is None else death.rank
    kind = death.type if killed is None or out_of_memory else "RankKilled"
    _write(attempt, worker, replace(death, rank=rank, node_rank=node_rank, type=kind, exit_code=exit_code))


def lacks_result(attempt: AttemptDir, rank: int) -> bool:
    """Return whether a rank that ran a Python function has not written its result."""
    file = attempt.rank_result(rank)
    return file.parent.is_dir() and not file.exists()


def record_missing_result(attempt: AttemptDir, rank: int, node_rank: int) -> None:
    """Write the failure record for a rank that exited with code 0 before its function returned."""
    message = "exited with code 0 before its function returned"
    failure = RankFailure(rank, node_rank, type=NO_RESULT, message=message, exit_code=EXIT_FAILED)
    _write(attempt, rank, replace(failure, final=True))


def _write(attempt: AttemptDir, worker: int, failure: RankFailure) -> None:
    """Write the failure record for a worker on this host, including the last lines of its log."""
    log = (failure.log_tail or _last_lines(attempt.rank_log(worker)))[-LOG_TAIL_LINES:]
    record = to_json(replace(failure, host=own_host(), time=utc_now(), log_tail=log))
    write_json(attempt.rank_error(worker), {**record, "traceback": None})


def _out_of_memory(exit_code: int, is_job: bool) -> RankFailure:
    """Return the failure for a process that the kernel's OOM killer killed."""
    hint = "lower the batch size or the number of loader processes"
    if is_job:
        hint = f"raise resources.mem, or {hint}"
    message = f"killed by {describe_exit(exit_code)}: out of memory"
    return RankFailure(type="OutOfMemory", message=message, hint=hint)


def _death(attempt: AttemptDir, rank: int, exit_code: int) -> RankFailure:
    """Return the failure of a worker that left no failure record, inferred from its exit code and log."""
    description = describe_exit(exit_code)
    if exit_code == EXIT_STUCK:
        hang = next((hang for hang in read_hangs(attempt) if hang.rank == rank), None)
        if hang is not None:
            return RankFailure(type="Hang", message=hang.summary, step=hang.step)
    lines = _last_lines(attempt.rank_log(rank))
    if exit_code == EXIT_FAILED:
        first = first_exit(lines)
        below = None if first is None else first.rank
        raised = None if below is None else exception_of(lines, below)
        raised = raised or last_exception(lines)
        if raised is not None:
            final, tail = raised.type in FINAL, [] if first is None else raised.tail
            found = RankFailure(below, type=raised.type, message=raised.message, code=raised.code)
            return replace(found, final=final, log_tail=tail)
        if first is not None and first.code > EXIT_OK:
            return RankFailure(below, type="exit", message=f"ended with {describe_exit(first.code)}")
    verb = "killed by" if description.startswith("SIG") else "ended with"
    thrown = _THROWN.findall("\n".join(lines)) if description == "SIGABRT" else []
    return RankFailure(type="exit", message=": ".join([f"{verb} {description}", *thrown[-1:]]))


def record_refusal(attempt: AttemptDir, rank: int, node_rank: int, error: TrainkitError) -> None:
    """Write the failure record for a rank that could not start because of `error`."""
    kind, code = type(error).__name__, error.exit_code
    # Another node may pass the check.
    node = True if isinstance(error, PreflightFailed) and error.is_node else None
    _write(
        attempt,
        rank,
        RankFailure(rank, node_rank, None, None, None, kind, error.message, code, error.hint, node=node),
    )


def first_rank_failure(attempt: AttemptDir, num_ranks: int | None = None) -> RankFailure | None:
    """Return the first recorded failure, with the end of that rank's log; None if there are no records.

    If the number of ranks is given, the failure says whether all of them failed in the same way.
    """
    refresh_listing(attempt.errors_dir)
    failures = rank_failures(attempt)
    found = first_of(failures)
    if found is None:
        return None
    path, first = found
    log = first.log_tail or _last_lines(attempt.logs_dir / f"{path.stem}.log")[-LOG_TAIL_LINES:]
    shown = replace(first, hint=first.hint or None, final=bool(first.final), node=bool(first.node))
    alike = {one.rank for _, one in failures if _is_alike(one, first)}
    return replace(shown, log_tail=log, more={}, num_alike=num_ranks if 1 < len(alike) == num_ranks else None)


def _is_alike(failure: RankFailure, first: RankFailure) -> bool:
    """Return whether a rank raised the same exception as the first rank, and at about the same time."""
    same = (failure.type, failure.message, failure.step) == (first.type, first.message, first.step)
    later_s = seconds_between(first.time, parse_time(failure.time))
    # Ranks that are killed may have the same message, because one failure makes the job end them all.
    is_exception = first.type not in ("exit", "RankKilled", "Hang")
    return same and is_exception and later_s is not None and abs(later_s) < NOTICED_S


def first_exit_code(attempt: AttemptDir) -> int | None:
    """Return the exit code of the rank that failed first, or None if no rank left a failure record."""
    first = first_rank_failure(attempt)
    return None if first is None else first.exit_code or EXIT_FAILED


def lost_host_failure(attempt: AttemptDir, lost: Sequence[str]) -> RankFailure:
    """Return the failure for lost hosts, whose loss also causes errors in ranks on other hosts."""
    hosts = read_rendezvous(attempt).hosts
    more = f"; nor {'do' if len(lost) > 2 else 'does'} {', '.join(lost[1:])}" if len(lost) > 1 else ""
    return RankFailure(
        node_rank=hosts.index(lost[0]) if lost[0] in hosts else None,
        host=lost[0],
        time=utc_now(),
        type="HostLost",
        message=f"it no longer responds{more}",
        final=False,
    )


def dead_host_failure(host: str, died_at: datetime | None) -> RankFailure:
    """Return the failure for an attempt whose first host died or whose supervisor was killed."""
    failure = agent_failure(None, "its host died, or its supervisor was killed")
    time = failure.time if died_at is None else as_utc(died_at)
    return replace(failure, host=host or None, type="HostLost", time=time)


def agent_failure(node_rank: int | None, reason: str, exit_code: int | None = None) -> RankFailure:
    """Return the failure for a job that failed outside its workers, so that no rank left a record."""
    return RankFailure(
        node_rank=node_rank,
        host=own_host(),
        time=utc_now(),
        type="exit",
        message=reason if node_rank is None else f"{reason} (agent of node {node_rank})",
        exit_code=exit_code,
        final=False,
    )


_MISMATCH = re.compile("Is there a distributed collective mismatch")
_TIMED_OUT = re.compile(r"collective operation timeout|Timed out waiting \d+ ?ms")
_HARDWARE = re.compile(r"CUDA error|ECC|NVLink|Xid|unhandled (?:cuda|system) error|SIGBUS", re.IGNORECASE)
_NOT_HARDWARE = re.compile(
    r"invalid device ordinal|device-side assert triggered|illegal memory access|misaligned address"
    r"|no kernel image|out of memory",
    re.IGNORECASE,
)
"""Matches CUDA errors that are caused by the program rather than the hardware. Examples are an invalid device
index, an out-of-range tensor index, kernels not built for this GPU, and insufficient GPU memory."""


def find_first_failure(
    attempt: AttemptDir,
    plan: LaunchPlan,
    observed: Observed,
    lost_nodes: Sequence[str] = (),
    launch_error: str | None = None,
) -> RankFailure | None:
    """Return the first failure: a lost host, else the rank blocking a hang, else the first failed rank.

    `launch_error` is the error message of srun if Slurm could not start the step. Returns None if nothing
    failed or if the failure is unknown.
    """
    if all(code in (EXIT_OK, EXIT_STOPPED) for code in observed.exit_codes):
        return None
    if lost_nodes:
        return lost_host_failure(attempt, lost_nodes)
    if launch_error is not None:
        return agent_failure(None, launch_error)
    if observed.hangs:
        return hang_failure(attempt, plan, observed.hangs)
    first = _killed_agent_failure(attempt, plan, observed.killed_node)
    first = first or first_rank_failure(attempt, plan.world_size)
    return (
        None
        if first is None
        else _unlike_failure(attempt, plan, first) or _blamed_for_timeout(attempt, plan, first)
    )


def _unlike_failure(attempt: AttemptDir, plan: LaunchPlan, first: RankFailure) -> RankFailure | None:
    """Return the failure if gloo raised an error in a rank that received unexpected data, else None.

    The rank that reports the gloo error need not be at fault. Ranks that lose their connection to the
    reporting rank may fail first. The failure names no host, because the error is in the program.
    """
    failures = [failure for _, failure in rank_failures(attempt)]
    found = next((one for one in (first, *failures) if _MISMATCH.search(str(one.message))), None)
    if found is None or found.rank is None:
        return None
    ranks = blame_for_unlike_data(read_flights(attempt, plan.world_size), found.rank)
    what = f"{rank_list(ranks)} made a different call than the other ranks" if ranks else UNKNOWN
    message = f"{what}: rank {found.rank} failed: {found.message}"
    node_rank = node_of(plan, ranks[0]) if ranks else None
    rank = ranks[0] if ranks else None
    kind = "CollectiveMismatch"
    return replace(
        found, rank=rank, node_rank=node_rank, host=None, time=first.time, type=kind, message=message
    )


def _blamed_for_timeout(attempt: AttemptDir, plan: LaunchPlan, first: RankFailure) -> RankFailure:
    """Return the failure for a collective that timed out, naming the ranks for which the others waited.

    When a collective times out, torch makes every rank write its flight record. A rank without a flight
    record is considered at fault if most of the other ranks have one. Returns `first` unchanged if the flight
    records do not show which ranks are at fault.
    """
    if not _TIMED_OUT.search("\n".join([str(first.message), *first.log_tail])):
        return first
    flights = read_flights(attempt, plan.world_size)
    silent = [rank for rank in range(plan.world_size) if rank not in flights]
    blame = find_blame(flights, silent if 2 * len(silent) < plan.world_size else ())
    if blame is None or not blame.ranks:
        return first
    found = blamed_failure(attempt, plan, blame)
    message = f"{found.message}; then the collective timed out on rank {first.rank}"
    return replace(found, message=message, time=first.time, step=first.step, log_tail=first.log_tail)


def signal_of_death(failure: RankFailure | None, exit_codes: Sequence[int]) -> str | None:
    """Return the signal in `ENDING_SIGNALS` that killed the first failed process, or None.

    The signal is taken from the failure record or, if there is none, from the exit codes.
    """
    codes = exit_codes if failure is None else [failure.exit_code or EXIT_OK]
    number = next((code - SIGNALLED for code in codes if is_death_by_stop_signal(code)), signal.SIGTERM)
    died = any(map(is_death_by_stop_signal, codes)) if failure is None else failure.died_of_stop_signal
    return signal.Signals(number).name if died else None


def _killed_agent_failure(attempt: AttemptDir, plan: LaunchPlan, node_rank: int | None) -> RankFailure | None:
    """Return the failure for an agent that was killed before any of its ranks left a failure record."""
    if node_rank is None:
        return None
    first = plan.first_rank_of(node_rank)
    # If a rank left a failure record, the agent was still alive when that rank failed.
    if any(attempt.rank_error(rank).exists() for rank in range(first, first + plan.workers_of(node_rank))):
        return None
    # SIGTERM kills an agent that is still starting and has not blocked the stop signals yet.
    number = signal.SIGTERM if was_terminated(attempt) else signal.SIGKILL

    failure = agent_failure(node_rank, "its agent was killed", signal_exit_code(number))
    if ran_out_of_memory(attempt):
        # srun prints out-of-memory reports only in a Slurm job.
        oom = _out_of_memory(signal_exit_code(signal.SIGKILL), is_job=True)
        failure = replace(failure, type=oom.type, message=oom.message, hint=oom.hint)
    hosts = read_rendezvous(attempt).hosts
    return replace(failure, host=hosts[node_rank]) if node_rank < len(hosts) else failure


def suspect_host(failure: RankFailure) -> tuple[str, Kind] | None:
    """Return the host suspected of causing a failure, and the kind of suspicion.

    Returns None if the program itself failed or was terminated.
    """
    if not failure.host or failure.died_of_stop_signal:
        return None
    if failure.node:
        return failure.host, "preflight"
    if failure.type == "HostLost":
        return failure.host, "died"
    message = str(failure.message)
    if _NOT_HARDWARE.search(message):
        return None
    was_killed = failure.was_signalled and failure.type == "exit"
    is_culprit = failure.type == "Hang" or was_killed or _HARDWARE.search(message)
    return (failure.host, "culprit") if is_culprit else None
