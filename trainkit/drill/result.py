"""The results of a drill: checks the run of each scenario, and formats the table of all results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from trainkit.drill.loss_curve import Point, compare, steps_while_saving
from trainkit.drill.scenarios import Scenario, ScenarioRecord
from trainkit.formats import plural, table
from trainkit.run.end import AttemptEnd
from trainkit.run.events import Event

State = Literal["passed", "failed", "missed", "skipped"]
"""`missed`: the run ended before it could be interrupted; `skipped`: the scenario cannot be tried here."""


@dataclass(frozen=True)
class Result:
    """The result of one scenario: a row of the table at the end of a drill."""

    scenario: str
    state: State
    message: str = ""
    """What is wrong or why the scenario was skipped; if it passed, a remark."""
    action: str = ""
    """What was done to the run."""
    step: int | None = None
    restart_s: float | None = None
    restarted_by: str = ""
    num_recomputed: int | None = None
    """Number of steps that were computed again; None if the trainer does not record its steps."""
    curve: Literal["equal", "differs", "unknown", ""] = ""
    run_dir: str = ""

    @property
    def sentence(self) -> str:
        """The result as a line of the drill's log."""
        if self.state != "passed":
            return f"{self.state}: {self.message}"
        restart = (
            "" if self.restart_s is None else f", resumed after {self.restart_s:.1f} s ({self.restarted_by})"
        )
        where = "" if self.step is None else f" at step {self.step}"
        return f"{self.action}{where}{restart}: passed"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class RunOutcome:
    """The end of a run, as recorded in its folder."""

    end: AttemptEnd
    """end.json of its newest attempt; empty when there is none."""
    points: Sequence[Point]
    events: Sequence[Event]
    damages: Sequence[str]
    """What is wrong with its published checkpoints."""
    run_dir: str


def evaluate(
    scenario: Scenario,
    record: ScenarioRecord,
    outcome: RunOutcome,
    reference: Sequence[Point],
    interval: int | None,
    requeue_on: Sequence[str],
) -> Result:
    """Check one interrupted run and return its result.

    `reference` is the curve of the uninterrupted run, empty if the trainer writes none; `interval` is the
    number of steps between two saves, None if unknown; `requeue_on` is the config's `requeue.on`.
    """
    comparison, has_curve = compare(reference, outcome.points), bool(reference)
    result = Result(
        scenario.name,
        "passed",
        _remark(record, has_curve),
        action=record.action,
        step=record.step,
        restart_s=record.restart_s,
        restarted_by=record.restarted_by,
        num_recomputed=comparison.num_recomputed if has_curve else None,
        curve="unknown" if not has_curve else "differs" if comparison.difference else "equal",
        run_dir=outcome.run_dir,
    )
    if record.refused:
        return replace(result, state="skipped", message=record.refused, curve="", num_recomputed=None)
    problems = _problems(scenario, record, outcome, requeue_on)
    if has_curve:
        problems += [comparison.difference] if comparison.difference else []
        problems += _too_many_recomputed(scenario, comparison.num_recomputed, outcome, interval)
    if problems:
        return replace(result, state="failed", message="; ".join(problems))
    return replace(result, state="missed", message=record.missed) if record.missed else result


def _problems(
    scenario: Scenario, record: ScenarioRecord, outcome: RunOutcome, requeue_on: Sequence[str]
) -> list[str]:
    if record.stuck:
        return [record.stuck]
    problems = []
    if outcome.end.state != "finished":
        reason = outcome.end.reason or "it recorded no reason"
        problems.append(f"the run {outcome.end.state or 'died'}: {reason}")
    should_restart = scenario.cause is None or scenario.cause in requeue_on
    if record.no_restart and should_restart:
        problems.append(f"it did not restart by itself: {record.no_restart}")
    problems += outcome.damages
    rejected = {event.step for event in outcome.events if event.name == "checkpoint_rejected"}
    if record.damaged_step is not None and record.damaged_step not in rejected:
        problems.append(f"the damage to the checkpoint of step {record.damaged_step} was not detected")
    return problems


def _too_many_recomputed(
    scenario: Scenario, num_recomputed: int, outcome: RunOutcome, interval: int | None
) -> list[str]:
    """The problem if too many steps were recomputed: none may be after a signal, else those since a save."""
    if scenario.graceful:
        return [f"{num_recomputed} steps were recomputed after a graceful stop"] if num_recomputed else []
    if interval is None:
        return []
    intervals = 2 if scenario.name == "damaged-checkpoint" else 1
    attempts = {event.attempt for event in outcome.events if event.name == "training"}
    num_restarts = len(attempts) - 1
    allowed = num_restarts * intervals * interval + steps_while_saving(outcome.points, outcome.events)
    return (
        [f"{num_recomputed} steps were recomputed; the maximum is {allowed}"]
        if num_recomputed > allowed
        else []
    )


def _remark(record: ScenarioRecord, has_curve: bool) -> str:
    """A remark on a scenario that passed; empty without one."""
    if record.no_restart:
        return f"resumed by the drill: {record.no_restart}"
    return "" if has_curve else "only its end was checked: the COMMAND writes no steps to metrics.jsonl"


HEADING = ["SCENARIO", "ACTION", "AT STEP", "RESUMED AFTER", "RECOMPUTED", "LOSSES", "RESULT"]


def result_table(results: Sequence[Result]) -> str:
    """The table with one line per scenario, including skipped ones, followed by the messages."""
    lines = [table([HEADING, *map(_row, results)])]
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
    """A one-line summary of the drill."""
    tried = [result for result in results if result.state != "skipped"]
    passed = [result for result in tried if result.state == "passed"]
    num_skipped = len(results) - len(tried)
    text = f"{len(passed)} of {len(tried)} passed"
    return f"{text}; {num_skipped} skipped" if num_skipped else text


def all_passed(results: Sequence[Result]) -> bool:
    """Whether at least one scenario was tried and all tried scenarios passed."""
    tried = [result for result in results if result.state != "skipped"]
    return bool(tried) and all(result.state == "passed" for result in tried)
