"""Whether what a drill saw is what was promised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from trainkit.drill.curve import Point, compare, steps_while_saving
from trainkit.drill.run_scenario import Played
from trainkit.drill.scenarios import Scenario
from trainkit.tables import table

State = Literal["holds", "broken", "missed", "not here"]
"""`missed`: it could be tried here, and the run was over first; `not here`: it cannot be tried."""


@dataclass(frozen=True)
class Result:
    """One line of the table at the end of a drill."""

    scenario: str
    state: State
    words: str = ""
    """What is wrong, or why it was not tried; what should be known about one that holds."""
    done: str = ""
    step: int | None = None
    came_back_s: float | None = None
    way_back: str = ""
    again: int | None = None
    """Steps that were computed again; None where the trainer does not write down its steps."""
    curve: Literal["equal", "differs", "not seen", ""] = ""
    run_dir: str = ""

    @property
    def sentence(self) -> str:
        """It as a line of its own, while the drill goes on."""
        if self.state != "holds":
            return f"{self.state}: {self.words}"
        back = "" if self.came_back_s is None else f", back after {self.came_back_s:.1f} s ({self.way_back})"
        where = "" if self.step is None else f" at step {self.step}"
        return f"{self.done}{where}{back}: holds"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Ended:
    """What a run left behind."""

    end: Mapping[str, Any]
    """How its newest attempt ended; empty when nothing says so."""
    points: Sequence[Point]
    events: Sequence[Mapping[str, Any]]
    damages: Sequence[str]
    """What is wrong with its published checkpoints."""
    run_dir: str


def judge(
    scenario: Scenario,
    played: Played,
    ended: Ended,
    reference: Sequence[Point],
    interval: int | None,
    requeue_on: Sequence[str],
) -> Result:
    """The verdict on one interrupted run.

    `reference` is the curve of the uninterrupted one, empty where the trainer writes none; `interval` are the
    steps between two saves, None where the drill does not know; `requeue_on` is the config's.
    """
    seen, known = compare(reference, ended.points), bool(reference)
    result = Result(
        scenario.name,
        "holds",
        _remark(played, known),
        done=played.done,
        step=played.step,
        came_back_s=played.came_back_s,
        way_back=played.way_back,
        again=seen.again if known else None,
        curve="not seen" if not known else "differs" if seen.difference else "equal",
        run_dir=ended.run_dir,
    )
    if played.refused:
        return replace(result, state="not here", words=played.refused, curve="", again=None)
    problems = _problems(scenario, played, ended, requeue_on)
    if known:
        problems += [seen.difference] if seen.difference else []
        problems += _too_many_again(scenario, seen.again, ended, interval)
    if problems:
        return replace(result, state="broken", words="; ".join(problems))
    return replace(result, state="missed", words=played.missed) if played.missed else result


def _problems(scenario: Scenario, played: Played, ended: Ended, requeue_on: Sequence[str]) -> list[str]:
    if played.stuck:
        return [played.stuck]
    problems = []
    if ended.end.get("state") != "finished":
        how = ended.end.get("reason") or "without a word"
        problems.append(f"it ended as {ended.end.get('state') or 'died'}: {how}")
    should_return = scenario.cause is None or scenario.cause in requeue_on
    if played.not_by_itself and should_return:
        problems.append(f"it did not come back by itself: {played.not_by_itself}")
    problems += ended.damages
    rejected = {event.get("step") for event in ended.events if event.get("event") == "checkpoint_rejected"}
    if played.damaged_step is not None and played.damaged_step not in rejected:
        problems.append(f"nobody noticed that the checkpoint of step {played.damaged_step} is damaged")
    return problems


def _too_many_again(scenario: Scenario, again: int, ended: Ended, interval: int | None) -> list[str]:
    """A notice costs no step; without one it is at most what was not saved yet."""
    if scenario.graceful:
        return [f"{again} steps were computed again after a notice in time"] if again else []
    if interval is None:
        return []
    intervals = 2 if scenario.name == "damaged-checkpoint" else 1
    num_strikes = (
        len({event.get("attempt") for event in ended.events if event.get("event") == "training"}) - 1
    )
    allowed = num_strikes * intervals * interval + steps_while_saving(ended.points, ended.events)
    return (
        [f"{again} steps were computed again, and {allowed} are the most that can be"]
        if again > allowed
        else []
    )


def _remark(played: Played, known: bool) -> str:
    """What a person should know although all is well."""
    if played.not_by_itself:
        return f"not by itself: {played.not_by_itself}"
    return "" if known else "its end only: COMMAND writes no steps into metrics.jsonl"


HEADING = ["scenario", "done", "at step", "back after", "computed again", "curve", "verdict"]


def result_table(results: Sequence[Result]) -> str:
    """One line a scenario, those that cannot be tried here too, with the reasons below."""
    lines = [table([HEADING, *map(_row, results)])]
    lines += [f"{result.scenario}: {result.words}" for result in results if result.words]
    return "\n".join(lines)


def _row(result: Result) -> list[str]:
    back = "" if result.came_back_s is None else f"{result.came_back_s:.1f} s"
    return [
        result.scenario,
        result.done or "-",
        "-" if result.step is None else str(result.step),
        f"{back} ({result.way_back})" if back else "-",
        "-" if result.again is None else f"{result.again} step{'' if result.again == 1 else 's'}",
        result.curve or "-",
        result.state.upper() if result.state in ("broken", "missed") else result.state,
    ]


def summary(results: Sequence[Result]) -> str:
    """The whole drill in a sentence."""
    tried = [result for result in results if result.state != "not here"]
    held = [result for result in tried if result.state == "holds"]
    rest = len(results) - len(tried)
    words = f"{len(held)} of {len(tried)} hold"
    return f"{words}; {rest} cannot be tried here" if rest else words


def all_hold(results: Sequence[Result]) -> bool:
    """Whether something was tried, and all of it holds."""
    tried = [result for result in results if result.state != "not here"]
    return bool(tried) and all(result.state == "holds" for result in tried)
