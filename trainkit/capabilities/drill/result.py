"""Processes the results of a drill: compares losses, checks how runs ended, and formats a table."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainkit.capabilities.drill.scenarios import Result, Scenario
from trainkit.formats import plural, table
from trainkit.run.end import AttemptEnd
from trainkit.run.events import Event, StepRecord


def num_recomputed(steps: Sequence[StepRecord]) -> int:
    """Return the number of steps that were computed more than once."""
    return len(steps) - len({one.step for one in steps})


SIZES_TOLERANCE = 1e-5
"""Relative tolerance for comparing the losses of runs with different numbers of ranks, because the order of
summation affects rounding."""


def compare(reference: Sequence[StepRecord], steps: Sequence[StepRecord], tolerance: float = 0.0) -> str:
    """Return the first difference from the uninterrupted run as text, or an empty string if there is none."""
    expected = {one.step: one for one in reference}
    for one in steps:
        known = expected.get(one.step)
        if known is None:
            return f"step {one.step} is not in the uninterrupted run"
        # JSON preserves all digits of a loss.
        loss, usual = (json.dumps(record.values["loss"]) for record in (one, known))
        losses = (json.loads(text) or math.nan for text in (loss, usual))
        if loss != usual and not math.isclose(*losses, rel_tol=tolerance):
            return f"loss {loss} at step {one.step} instead of {usual}"
        seen, usually_seen = one.count("samples_seen"), known.count("samples_seen")
        if seen != usually_seen:
            return f"{plural(seen, 'sample')} seen at step {one.step} instead of {usually_seen}"
    missing = sorted(set(expected) - {one.step for one in steps})
    return f"step {missing[0]} is missing" if missing else ""


def largest_difference(reference: Sequence[StepRecord], steps: Sequence[StepRecord]) -> float | None:
    """Return the largest relative difference between the losses that two runs have for the same step.

    Returns None if a step has a loss in only one of the runs.
    """
    first, second = ({one.step: one.number("loss") for one in run} for run in (reference, steps))
    pairs = [(first.get(step), second.get(step)) for step in first.keys() | second.keys()]
    if any((loss is None) != (other is None) for loss, other in pairs):
        return None
    return max((abs(loss - other) / abs(loss) for loss, other in pairs if loss and other), default=0.0)


def steps_while_saving(steps: Sequence[StepRecord], events: Sequence[Event]) -> int:
    """Return the number of steps that were computed during saves that an interruption aborted.

    Steps computed during an aborted asynchronous save are lost in addition to one save interval.
    """
    total = 0
    for start in events:
        if start.name != "training":
            continue
        before = (start.attempt or 0) - 1
        done = [one.step for one in steps if one.attempt == before]
        own = (event for event in events if event.name == "checkpoint_begin" and event.attempt == before)
        begun = [event.step or 0 for event in own]
        if done and begun and begun[-1] > (start.step or 0):
            total += done[-1] - begun[-1]
    return total


def sentence(result: Result) -> str:
    """Return a result as one line for the drill's log."""
    if result.state != "passed":
        return f"{result.state}: {result.message}"
    restart = ""
    if result.restart_s is not None:
        restart = f", resumed after {result.restart_s:.1f} s ({result.restarted_by})"
    where = "" if result.step is None else f" at step {result.step}"
    return f"{result.action}{where}{restart}: passed"


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended, according to the files in its run folder."""

    end: AttemptEnd
    """The content of end.json for the newest attempt; empty if there is no end.json."""
    steps: Sequence[StepRecord]
    """The computed steps with their losses, including repeated steps."""
    events: Sequence[Event]
    damages: Sequence[str]
    """For each damaged checkpoint whose save was completed, a description of the damage."""
    run_dir: str


def evaluate(
    scenario: Scenario,
    result: Result,
    outcome: RunOutcome,
    reference: Sequence[StepRecord],
    interval: int | None,
    requeue_on: Sequence[str],
    tolerance: float = 0.0,
) -> Result:
    """Check one interrupted run, and return its result with all fields filled in.

    `reference` contains the steps of the uninterrupted run, and is empty if no steps are recorded. `interval`
    is the number of steps between two saves, or None if it is unknown. `requeue_on` is the config value of
    `requeue.on`, and `tolerance` is passed to `compare`.
    """
    result = replace(result, run_dir=outcome.run_dir)
    if result.refused:
        return replace(result, state="skipped", message=result.refused)
    problems = _problems(scenario, result, outcome, requeue_on)
    if reference:
        again, difference = num_recomputed(outcome.steps), compare(reference, outcome.steps, tolerance)
        result = replace(result, num_recomputed=again, curve="differs" if difference else "equal")
        problems += [difference] if difference else []
        problems += _too_many_recomputed(scenario, again, outcome, interval)
    else:
        remark = (
            "only the final state of the run was checked, because the COMMAND wrote no steps to metrics.jsonl"
        )
        result = replace(result, curve="unknown", message=remark)
    if problems:
        return replace(result, state="failed", message="; ".join(problems))
    if result.missed:
        return replace(result, state="missed", message=result.missed)
    if result.no_restart:
        return replace(
            result,
            message=f"the drill resumed the run, which had not restarted automatically: {result.no_restart}",
        )
    return result


def _problems(
    scenario: Scenario, result: Result, outcome: RunOutcome, requeue_on: Sequence[str]
) -> list[str]:
    if result.stuck:
        return [result.stuck]
    problems = []
    if outcome.end.state != "finished":
        reason = outcome.end.reason or "no reason was recorded"
        problems.append(f"the run {outcome.end.state or 'died'}: {reason}")
    should_restart = scenario.cause is None or scenario.cause in requeue_on
    if result.no_restart and should_restart:
        problems.append(f"the run did not restart automatically: {result.no_restart}")
    problems += outcome.damages
    rejected = {event.step for event in outcome.events if event.name == "checkpoint_rejected"}
    if result.damaged_step is not None and result.damaged_step not in rejected:
        problems.append(f"the damage to the checkpoint of step {result.damaged_step} was not detected")
    return problems


def _too_many_recomputed(
    scenario: Scenario, again: int, outcome: RunOutcome, interval: int | None
) -> list[str]:
    """Return a list with one problem if too many steps were recomputed, or an empty list otherwise.

    After a graceful stop, no step may be recomputed; after a kill, only steps since the last save may be.
    """
    if scenario.graceful:
        return [f"{recomputed(again)} after a graceful stop"] if again else []
    num_restarts = len({event.attempt for event in outcome.events if event.name == "training"}) - 1
    intervals = num_restarts * (2 if scenario.name == "damaged-checkpoint" else 1)
    allowed = intervals * (interval or 0) + steps_while_saving(outcome.steps, outcome.events)
    if interval is None or again <= allowed:
        return []
    return [f"{recomputed(again)}; the maximum is {allowed}"]


def recomputed(num_steps: int) -> str:
    """Return the beginning of a message, which states the number of recomputed steps."""
    return f"{plural(num_steps, 'step')} {'was' if num_steps == 1 else 'were'} recomputed"


HEADING = ["SCENARIO", "ACTION", "AT STEP", "RESUMED AFTER", "RECOMPUTED", "LOSSES", "RESULT"]


def result_table(results: Sequence[Result], fit: int | None = None) -> str:
    """Return a table with one row per scenario, including skipped scenarios, followed by the messages."""
    lines = [table([HEADING, *map(_row, results)], fit=fit)]
    lines += [f"{result.scenario}: {result.message}" for result in results if result.message]
    return "\n".join(lines)


def _row(result: Result) -> list[str]:
    restart = "" if result.restart_s is None else f"{result.restart_s:.1f} s"
    num = result.num_recomputed
    return [
        result.scenario,
        result.action or "-",
        "-" if result.step is None else str(result.step),
        f"{restart} ({result.restarted_by})" if restart else "-",
        "-" if num is None else plural(num, "step"),
        result.curve or "-",
        result.state.upper() if result.state in ("failed", "missed") else result.state,
    ]


def summary(results: Sequence[Result]) -> str:
    """Return a one-line summary of the drill."""
    tried = [result for result in results if result.state != "skipped"]
    passed = [result for result in tried if result.state == "passed"]
    num_skipped = len(results) - len(tried)
    text = f"{len(passed)} of {len(tried)} passed"
    return f"{text}; {num_skipped} skipped" if num_skipped else text


def all_passed(results: Sequence[Result]) -> bool:
    """Return whether at least one scenario was tried and every scenario tried has passed."""
    return {result.state for result in results} - {"skipped"} == {"passed"}
