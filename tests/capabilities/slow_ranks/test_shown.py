"""Tests which events of slow and silent ranks are still current, and their texts."""

from pathlib import Path

from tests.support.said import said
from trainkit.capabilities.slow_ranks.shown import notices_of, sentence
from trainkit.run.events import Event, read_events
from trainkit.run.files import append_jsonl
from trainkit.run.history import OwnedEvents
from trainkit.run.rundir import RunDir

SLOW = {"phase": "compute", "ratio": 2.0, "own_s": 0.19, "usual_s": 0.07}


def test_slow_ranks_are_reported_until_they_are_no_longer_slow(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for event in (
        {"event": "slow_rank", "attempt": 1, "rank": 1, "host": "a", "since_step": 11, **SLOW},
        {"event": "slow_rank", "attempt": 2, "rank": 2, "host": "b", "since_step": 61, **SLOW},
        {"event": "slow_rank", "attempt": 2, "rank": 3, "host": "c", "since_step": 71, **SLOW},
        {"event": "slow_run", "attempt": 2, "since_step": 81, **SLOW, "phase": "network"},
        {"event": "slow_rank_over", "attempt": 2, "rank": 3, "host": "c", "since_step": 71, **SLOW},
    ):
        append_jsonl(run.events_file, event)
    said("\n".join(sentence(event) for event in OwnedEvents(read_events(run)).lasting(2)))


def test_the_newest_silence_is_a_warning_until_any_output(tmp_path: Path) -> None:
    seen = OwnedEvents()
    for rank in (3, 1):
        seen.add(Event({"event": "silent", "attempt": 1, "rank": rank, "reason": f"rank {rank} waits"}))
    [found] = notices_of(RunDir(tmp_path), seen.lasting(1))
    said(found.text)
    seen.add(Event({"event": "silent_over", "attempt": 1}))
    assert (seen.lasting(1), len(seen.all)) == ([], 3)


def test_events_of_another_package_last_too() -> None:
    names = ("started", "toy.hot", "toy.cold", "toy.hot_over", "finished")
    seen = OwnedEvents(Event({"event": name, "attempt": 1}) for name in names)
    assert [event.name for event in seen.all] == ["toy.hot", "toy.cold", "toy.hot_over"]
    assert [event.name for event in seen.lasting(1)] == ["toy.cold"]
    assert seen.lasting(2) == []
