"""Describes slow ranks, slow runs and silent commands for `status`, `watch`, `report` and `diagnose`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from shlex import quote

from trainkit.capability import HostView, Notice
from trainkit.run.events import Event
from trainkit.run.files import numbers, read_record
from trainkit.run.rundir import RunDir

SLOW_EVENTS = ("slow_rank", "slow_run")
"""Names of events that report a slow rank or a slow run."""
SLOWDOWN_EVENTS = (*SLOW_EVENTS, "slow_rank_over", "slow_run_over")
SLOW = 3
"""Severity of a slow rank in the list of its host's problems."""


@dataclass(frozen=True)
class Slowdown:
    """A period during which a rank was slow or, if `rank` is None, the whole run was slow."""

    attempt: int | None = None
    rank: int | None = None
    host: str | None = None
    phase: str | None = None
    """The phase that accounts for most of the delay: ``data``, ``compute`` or ``network``."""
    noticed: str | None = None
    since_step: int | None = None
    until_step: int | None = None
    """Step at which the speed was normal again; None if the attempt ended before that."""
    own_s: float | None = None
    """Seconds per step of the slow run or, for a slow rank, its seconds per step before the first
    collective."""
    usual_s: float | None = None
    """Normal value of `own_s`, measured on other ranks or, for a slow run, before the slowdown."""


def find_slowdowns(events: Iterable[Event]) -> list[Slowdown]:
    """Return the slowdowns recorded in the `SLOWDOWN_EVENTS` of a run, in the order of detection."""
    found: list[Slowdown] = []
    for event in events:
        if event.name in SLOW_EVENTS:
            found.append(read_record(Slowdown, {**event.values, "noticed": event.time}))
            continue
        for index in range(len(found) - 1, -1, -1):
            if (found[index].attempt, found[index].rank) == (event.attempt, event.rank):
                found[index] = replace(found[index], until_step=event.step)
                break
    return found


def sentence(event: Event, since: str = "has been slow since") -> str:
    """Describe a slow rank or a slow run in a sentence; the phrase `since` precedes the step."""
    is_rank = event.rank is not None
    who = f"rank {event.rank} on {event.host}" if is_rank else "the run"
    own, usual = (f"{1e3 * (event.number(key) or 0.0):,.0f} ms" for key in ("own_s", "usual_s"))
    than = f"other ranks {usual}" if is_rank else f"{usual} before"
    step, phase = event.count("since_step"), event.text("phase")
    return f"{who} {since} step {step} ({phase}): {own} per step, {than}"


def slow_of(events: Iterable[Event]) -> list[Event]:
    """Return only the events whose names are in `SLOW_EVENTS`."""
    return [event for event in events if event.name in SLOW_EVENTS]


def silence_of(events: Sequence[Event]) -> Event | None:
    """Return the newest ``silent`` event, which reports a COMMAND without output, or None."""
    return next((event for event in reversed(events) if event.name == "silent"), None)


def notices_of(run: RunDir, lasting: Sequence[Event]) -> Iterator[Notice]:
    """Yield warnings about slow ranks, slow runs and silent commands."""
    for event in slow_of(lasting):
        yield Notice(event.time, sentence(event), event.host, event.rank)
    if (silence := silence_of(lasting)) is not None:
        yield Notice(None, f"{silence.reason}; `trainkit diagnose {quote(str(run.path))}` says what to do")


def hosts_of(lasting: Iterable[Event]) -> dict[str, HostView]:
    """Return the hosts with slow ranks, each with its slowest rank."""
    slow: dict[str, list[Event]] = {}
    for event in sorted(slow_of(lasting), key=_ratio, reverse=True):
        if event.rank is not None:
            slow.setdefault(str(event.host), []).append(event)
    return {
        host: HostView(
            {"slowest_rank": own[0].rank},
            [(SLOW, f"rank {one.rank} {_ratio(one):.1f}x slower ({one.text('phase')})") for one in own],
        )
        for host, own in slow.items()
    }


def _ratio(event: Event) -> float:
    return event.number("ratio") or 0.0


def advice_values(lasting: Sequence[Event]) -> Mapping[str, str]:
    """Return the values of placeholders in advice texts: the first slowdown, and the silence of a command."""
    values, slow, silence = {}, slow_of(lasting)[:1], silence_of(lasting)
    if len(numbers(slow, "own_s") + numbers(slow, "usual_s")) == 2:
        values["slowdown"] = sentence(slow[0], "was slow since")
        if slow[0].rank is not None:
            values["slow_host"] = slow[0].host or ""
    if silence is not None:
        values["silence"] = str(silence.reason)
    return values
