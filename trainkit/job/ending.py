"""How an attempt ended: judged by its exit codes and what was asked of it, and written down."""

from __future__ import annotations

import signal
from typing import Any

from trainkit.job.decision import COMEBACK_SIGNAL, Decision, decide, signal_exit_code
from trainkit.job.failures import agent_verdict, find_verdict
from trainkit.job.outcome import Outcome
from trainkit.job.record import KILLED, is_cancelled, num_comebacks
from trainkit.plan.launch import LaunchPlan
from trainkit.rundir import AttemptDir, RunDir, best_result, log_event, read_json, utc_now, write_json


def judge(attempt: AttemptDir, outcome: Outcome) -> Decision:
    """What happens after an attempt that ended so."""
    plan = LaunchPlan.from_dict(read_json(attempt.plan_file))
    request = outcome.request
    if is_cancelled(attempt):
        killed = signal_exit_code(signal.SIGKILL)
        if request is None and killed in outcome.exit_codes:
            return Decision("stopped", KILLED, killed)
        if request == COMEBACK_SIGNAL:
            request = signal.SIGTERM.name
    return decide(
        outcome.exit_codes, request, num_comebacks(attempt.run), plan.max_requeues, outcome.out_of_time
    )


def write_end(attempt: AttemptDir, outcome: Outcome, decision: Decision) -> None:
    """Write down how the attempt ended: verdict, end.json, events."""
    run, number = attempt.run, attempt.number
    verdict = None
    if decision.action == "failed":
        verdict = find_verdict(attempt) or agent_verdict(outcome.first_failure, decision.reason)
    state: str = "stopped" if decision.action == "requeue" else decision.action
    if state != "finished" and is_cancelled(attempt):
        state = "cancelled"
    # The one file that tells how it ended comes first; the events follow from it.
    write_json(
        attempt.end_file,
        {
            "state": state,
            "action": decision.action,
            "exit_code": decision.exit_code,
            "reason": decision.reason,
            "verdict": verdict,
            "best": _best(run),
            "time": utc_now(),
        },
    )
    if verdict is not None:
        log_event(run, number, "rank_failed", **{key: verdict[key] for key in verdict if key != "time"})
    if outcome.request == COMEBACK_SIGNAL:
        log_event(run, number, "requeue_decision", action=decision.action, reason=decision.reason)
    event = "finished" if state == "finished" else "stopped"
    log_event(run, number, event, state=state, exit_code=decision.exit_code, reason=decision.reason)


def _best(run: RunDir) -> dict[str, Any] | None:
    try:
        return best_result(run)
    except OSError:
        return None  # how it ended has to be written, whatever became of the curve
