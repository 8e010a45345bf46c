"""The events of one attempt before its first failure, as texts and values for a diagnosis."""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from trainkit.observe.run_text import Evidence, Text, clean
from trainkit.observe.text import event_content, slowdown_line
from trainkit.run.events import SAVE_EVENTS, SILENCE_EVENTS, SLOWDOWN_EVENTS, still_slow
from trainkit.run.rundir import AttemptDir

MAX_EVENTS = 400
MAX_SHOWN = 8
END_EVENTS = frozenset({"rank_failed", "hang", "requeue_decision", "finished", "stopped"})
"""What the supervisor writes after an attempt, which repeats end.json."""


class AttemptEvents:
    """The last events of an attempt, up to its first failure."""

    def __init__(self, attempt: AttemptDir, failed_at: object) -> None:
        """`failed_at` is the time of the first failure: what happened later is not its cause."""
        self._attempt, self._failed_at = attempt, failed_at
        self._numbered: deque[tuple[int, dict[str, Any]]] = deque(maxlen=MAX_EVENTS)
        """The last events, with the numbers of their lines."""
        self._slowdowns: list[dict[str, Any]] = []
        """The events of slow ranks, however long ago."""
        self._silence: dict[str, Any] | None = None
        """The event of a silence that lasts."""
        with contextlib.suppress(OSError):  # missing, or on a disk that fails
            self._read()

    def _read(self) -> None:
        with self._attempt.run.events_file.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                event = _event(line)
                if event.get("attempt") == self._attempt.number and self._is_before(event):
                    self._numbered.append((number, event))
                    if event["event"] in SLOWDOWN_EVENTS:
                        self._slowdowns.append(event)
                    if event["event"] in SILENCE_EVENTS:
                        self._silence = event if event["event"] == "silent" else None

    def _is_before(self, event: Mapping[str, Any]) -> bool:
        time = event.get("time")
        if not isinstance(time, str) or event.get("event") in END_EVENTS:
            return False
        return not isinstance(self._failed_at, str) or time < self._failed_at

    def texts(self, *, only_silence: bool = False) -> Iterator[Text]:
        """Each event as one line, the last one first; a silence only if it lasts."""
        for number, event in reversed(self._numbered):
            if event is not self._silence and (only_silence or event["event"] == "silent"):
                continue
            rank, host = event.get("rank"), event.get("host")
            yield Text(
                self._attempt.run.events_file.name,
                "event",
                [clean(event_content(event))],
                rank if isinstance(rank, int) else None,
                host if isinstance(host, str) else None,
                first_line=number,
            )

    def shown(self) -> list[Evidence]:
        """The last events, each with its time of day; of a completed save, only its end."""
        file, found = self._attempt.run.events_file.name, []
        saved: set[object] = set()
        for number, event in reversed(self._numbered):
            if event.get("event") in SAVE_EVENTS:
                saved.add(event.get("step"))
            elif event.get("event") == "checkpoint_begin" and event.get("step") in saved:
                continue
            text = clean(f"{_clock(event)}  {event_content(event)}")
            found.append(Evidence(file, number, text))
        return found[:MAX_SHOWN][::-1]

    def values(self) -> dict[str, str]:
        """The values for advice, by placeholder: the incomplete save, the slow rank, the silence."""
        names = ("checkpoint_begin", *SAVE_EVENTS)
        saves = [event for _, event in self._numbered if event["event"] in names]
        values: dict[str, str] = {}
        if saves and saves[-1]["event"] == "checkpoint_begin" and isinstance(saves[-1].get("step"), int):
            step = saves[-1]["step"]
            # A commit is recorded a moment after the checkpoint is published.
            if not self._attempt.run.checkpoint_dir(step).is_dir():
                values = {"unsaved_step": str(step), "save_began": f"{_clock(saves[-1])} UTC"}
        slow = still_slow(self._slowdowns, self._attempt.number)
        if slow and all(isinstance(slow[0].get(key), float | int) for key in ("own_s", "usual_s")):
            values["slowdown"] = clean(slowdown_line(slow[0]).replace(" is slow since", " was slow since"))
            if slow[0].get("rank") is not None:
                values["slow_host"] = clean(str(slow[0].get("host") or ""))
        if self._silence is not None:
            values["silence"] = clean(str(self._silence.get("reason")))
        return values


def _event(line: bytes) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError:
        return {}  # cut off by a crash
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return {}
    return {key: value for key, value in event.items() if not isinstance(value, dict | list)}


def _clock(event: Mapping[str, Any]) -> str:
    return str(event.get("time"))[11:19]
