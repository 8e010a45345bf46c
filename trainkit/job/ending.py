"""How an attempt ended: judged by its exit codes and what was asked of it, and written down."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import Any

from trainkit.errors import EXIT_FAILED
from trainkit.job.decision import FAILURES, AttemptResult, Decision, PreviousAttempt, RestartOptions, decide
from trainkit.job.exit_codes import signal_exit_code
from trainkit.job.failure.records import agent_verdict, dead_host_verdict, find_verdict
from trainkit.job.failure.verdict import first_failure
from trainkit.job.history import failure_of, last_sign, last_step, mark_of, numbered_past, past_attempts
from trainkit.job.outcome import Outcome
from trainkit.job.record import KILLED, is_cancelled, is_cancelled_now, read_job
from trainkit.plan.launch import LaunchPlan, RequeuePolicy
from trainkit.rundir import AttemptDir, RunDir, best_result, log_event, read_json, utc_now, write_json


def judge(attempt: AttemptDir, outcome: Outcome, means: RestartOptions) -> Decision:
    """What happens after an attempt that ended so; its verdict goes into the outcome."""
    plan = LaunchPlan.from_dict(read_json(attempt.plan_file))
    cause, killed = outcome.cause, signal_exit_code(signal.SIGKILL)
    if is_cancelled(attempt):
        # Slurm's SIGTERM for the job that it cancels may have come first.
        if is_cancelled_now(attempt) and killed in outcome.exit_codes:
            return Decision("stopped", KILLED, killed)
        cause = None
    outcome.verdict = outcome.verdict or first_failure(attempt, plan, outcome)
    end = AttemptResult(
        exit_codes=outcome.exit_codes,
        request=outcome.request,
        cause=cause,
        out_of_time=outcome.out_of_time,
        not_started=outcome.not_started is not None,
        hung=outcome.hung,
        lost_nodes=outcome.lost_nodes,
        mark=mark_of(attempt),
        step=last_step(attempt, outcome.verdict),
        failure=None if outcome.verdict is None else failure_of(outcome.verdict),
    )
    return decide(end, past_attempts(attempt), plan.requeue, means)


def close_dead_attempts(
    attempt: AttemptDir, policy: RequeuePolicy, is_out: Callable[[str], bool]
) -> tuple[Outcome, Decision] | None:
    """Write the end of this job's earlier attempts that could not do so themselves: their host died.

    None when the run may go on, else what such an end makes of the attempt that was to follow: Slurm starts a
    job again as often as its host dies, and a run that takes its hosts down has to stop like any other.
    `is_out` tells whether a host is down now; else the job was perhaps only taken away without grace.
    """
    entries = read_job(attempt.run)["attempts"]
    job_ids = {entry["job_id"] for entry in entries if entry["attempt"] == attempt.number}
    refusal = None
    for entry in entries:
        dead = attempt.run.attempt(entry["attempt"])
        if dead.number < attempt.number and entry["job_id"] in job_ids and not dead.end_file.exists():
            host = str(entry.get("node") or "")
            outcome = Outcome(verdict=find_verdict(dead) or dead_host_verdict(host, last_sign(dead)))
            past = [one for number, one in numbered_past(attempt) if number < dead.number]
            decision = _after_silence(dead, host if host and is_out(host) else None, past, policy)
            write_end(dead, outcome, decision)
            refusal = (outcome, decision) if decision.action == "failed" else None
    return refusal


def _after_silence(
    dead: AttemptDir, lost_host: str | None, past: Sequence[PreviousAttempt], policy: RequeuePolicy
) -> Decision:
    if lost_host is not None:
        end = AttemptResult(
            exit_codes=[signal_exit_code(signal.SIGKILL)],
            lost_nodes=(lost_host,),
            mark=mark_of(dead),
            step=last_step(dead, None),
        )
        return decide(end, past, policy, RestartOptions(requeue=True))
    reason = "ended without a word: its host died, or its supervisor was killed"
    if len(past) >= policy.max:
        reason += f"; not started again: requeue.max is {policy.max} and it came back {len(past)} times"
        return Decision("failed", reason, EXIT_FAILED, "node_fail")
    return Decision("requeue", reason, EXIT_FAILED, "node_fail")


def write_end(attempt: AttemptDir, outcome: Outcome, decision: Decision) -> None:
    """Write down how the attempt ended and what follows: verdict, end.json, events."""
    run, number = attempt.run, attempt.number
    verdict = None
    if decision.action == "failed" or decision.cause in FAILURES:
        verdict = outcome.verdict or agent_verdict(outcome.first_failure, decision.reason.partition(";")[0])
    # The one file that tells how it ended comes first; the events follow from it.
    state = _state(attempt, decision)
    write_json(
        attempt.end_file,
        {
            "state": state,
            "action": decision.action,
            "cause": decision.cause,
            "exit_code": decision.exit_code,
            "reason": decision.reason,
            "verdict": verdict,
            "mark": mark_of(attempt),
            "step": last_step(attempt, verdict),
            "best": _best(run),
            "time": utc_now(),
        },
    )
    if verdict is not None:
        told = {key: verdict[key] for key in verdict if key != "time"}
        log_event(run, number, "rank_failed", **told, failed_at=verdict["time"])
    if outcome.hung:
        log_event(run, number, "hang", message=None if verdict is None else verdict["message"])
    if decision.cause is not None:
        words = {"action": decision.action, "cause": decision.cause, "reason": decision.reason}
        log_event(run, number, "requeue_decision", **words, delay_s=decision.delay_s)
    event = "finished" if state == "finished" else "stopped"
    log_event(run, number, event, state=state, exit_code=decision.exit_code, reason=decision.reason)


def _state(attempt: AttemptDir, decision: Decision) -> str:
    if decision.action == "finished":
        return "finished"
    if decision.comes_back:
        return "failed" if decision.cause in FAILURES else "stopped"
    return "cancelled" if is_cancelled(attempt) else str(decision.action)


def _best(run: RunDir) -> dict[str, Any] | None:
    try:
        return best_result(run)
    except OSError:
        return None  # how it ended has to be written, whatever became of the curve
