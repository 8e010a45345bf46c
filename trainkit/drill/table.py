"""What a drill found, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from trainkit.drill.verdict import Result
from trainkit.observe.words import table

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
