"""Reads the texts that are searched to diagnose an attempt: files, Slurm messages and events."""

from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cached_property
from itertools import count, repeat, takewhile
from pathlib import Path

from trainkit.backends.slurm.failed_starts import FailedStart, batch_log, failed_starts
from trainkit.capabilities.diagnose.signatures import Where
from trainkit.capabilities.diagnose.texts import Evidence, Text, json_line, read_log
from trainkit.observe.logs import clean, ranks_of_nodes
from trainkit.run.end import AttemptEnd, is_end_line, read_end
from trainkit.run.events import (
    SAVE_EVENTS,
    WHOLE_BYTES,
    Event,
    diverged_since,
    event_lines,
    events_of,
    with_divergence,
)
from trainkit.run.files import open_file, parse_records, parse_time
from trainkit.run.history import Attempt, OwnedEvents, read_plan
from trainkit.run.record import JobRecord, read_rendezvous
from trainkit.run.rundir import AttemptDir
from trainkit.scheduler import JobInfo, JobState
from trainkit.shipped import ask_each, owner_of

MAX_LOGS = 256
"""Maximum number of log files to search if no record says which rank failed first."""
EXPLAINED = (JobState.NODE_FAIL, JobState.OUT_OF_MEMORY, JobState.CANCELLED, JobState.TIMEOUT)
RANK_FILE = re.compile(r"(?:rank|node)-(\d+)")


class AttemptFiles:
    """Reads the files that an attempt has written. A missing or damaged file is treated as empty."""

    def __init__(self, attempt: AttemptDir, job: JobRecord, slurm_job: JobInfo | None) -> None:
        self.attempt, self.run, self.job, self.slurm_job = attempt, attempt.run, job, slurm_job
        end = read_end(attempt)
        self.plan = read_plan(attempt)
        self.has_ended, self.end = end is not None, end or AttemptEnd()

    def end_text(self) -> Text:
        keys = ("cause", "state", "stopped_by", "reason")
        values = {key: getattr(self.end, key) for key in keys}
        known = [key for key in keys if values[key] is not None]
        lines = [clean(f"{key}: {values[key]}") for key in known]
        number = json_line(self.attempt.end_file, known[0]) if known else None
        return Text(self.shown(self.attempt.end_file), "end", lines, first_line=number)

    def _job_state(self) -> Iterator[Text]:
        if self.slurm_job is not None:
            job = self.slurm_job
            # squeue reports a requeued job as PENDING.
            state = "REQUEUED" if job.state is JobState.REQUEUED else job.slurm_state
            line = f"{state or job.state.value.upper()} {job.reason}".strip()
            if job.exit_code or job.exit_signal:
                line += f" ExitCode={job.exit_code or 0}:{job.exit_signal or 0}"
            yield Text(f"Slurm's state of job {job.job_id}", "slurm", [line], first_line=None)

    @cached_property
    def _failed_start(self) -> FailedStart | None:
        """Return the newest attempt's last start if it failed for a reason that Slurm does not know."""
        job = self.slurm_job
        is_explained = job is not None and (job.log_not_opened or job.state in EXPLAINED)
        entry = None if is_explained else self.job.newest
        if entry is None or entry.attempt != self.attempt.number:
            return None
        starts = [one for one in failed_starts(self.run, self.job, job) if one.job_id == entry.job_id]
        return starts[-1] if starts else None

    def start_text(self) -> Iterator[Text]:
        if (start := self._failed_start) is not None:
            shown = f"Slurm's state of job {start.job_id}"
            if start.file is not None:
                shown = os.path.relpath(start.file, self.run.path)
            yield Text(shown, "start", [f"{start.host}: {start.how}"], host=start.host)

    def batch_log(self) -> Text | None:
        """Return the batch script's output from the last failed start."""
        if (start := self._failed_start) is None:
            return None
        return read_log(batch_log(self.run, self.job, start.job_id), self.run.path, "srun")

    def logs(self, kind: Where, paths: Iterable[Path]) -> Iterator[Text]:
        for path in paths:
            name, rank, host = RANK_FILE.fullmatch(path.stem), None, None
            if name and kind == "log":
                rank = int(name[1])
                host = self.host_of(rank)
            elif name and kind == "agent":
                host = dict(enumerate(self.hosts)).get(int(name[1]))
            text = read_log(path, self.run.path, kind, rank, host)
            if text is not None:
                yield text

    def of_slurm(self) -> Iterator[Text]:
        """Yield messages of srun and slurmstepd, then the job's Slurm state.

        The messages come first because they contain the reason for a failure, which the Slurm state may lack.
        """
        yield from slurm_messages(self.attempt, self.job, is_recorded=self.has_ended and not self.end.guessed)
        yield from self._job_state()

    def outside(self) -> Iterator[Text]:
        """Yield texts that come from Slurm, the supervisor and the agents, and never from user programs."""
        yield from self.of_slurm()
        yield from self.logs("agent", sorted(self.attempt.logs_dir.glob("node-*.log"))[:MAX_LOGS])

    def advice(self, host: str | None, lasting: Sequence[Event]) -> dict[str, str]:
        """Return values that capabilities add to the advice. `host` is the host of the first failed rank."""
        found = ask_each(
            self.plan.parts,
            lambda one: one.advice(self.attempt, host, lasting),
            lambda name, text: {name: text},
        )
        return {key: clean(text) for own in found.values() for key, text in own.items()}

    @cached_property
    def diverged_since(self) -> int | None:
        """Return the step at which the attempt diverged, or None if it has not diverged."""
        with contextlib.suppress(OSError):
            return diverged_since(self.run, self.attempt.number)
        return None

    def curve_text(self) -> Iterator[Text]:
        if (said := with_divergence(None, self.diverged_since)) is not None:
            yield Text(self.shown(self.run.metrics_file), "event", [said], first_line=None)

    @property
    def world_size(self) -> int:
        return self.nodes[-1].stop if self.nodes else 0

    def ranks_next_to(self, rank: int | None) -> range:
        """Return the ranks on the same node as `rank`, or an empty range if they are unknown."""
        return next((ranks for ranks in self.nodes if rank in ranks), range(0))

    @cached_property
    def nodes(self) -> list[range]:
        """Return the ranks of each node, or an empty list if they are unknown."""
        return ranks_of_nodes(self.plan)

    @cached_property
    def hosts(self) -> list[str]:
        """Return the host names, indexed by node rank, or an empty list if they are unknown."""
        return read_rendezvous(self.attempt).hosts

    def host_of(self, rank: int | None) -> str | None:
        places = zip(self.hosts, self.nodes, strict=False)
        return next((host for host, ranks in places if rank in ranks), None)

    def shown(self, path: Path) -> str:
        return str(path.relative_to(self.run.path))


_END_OF_THE_JOB = re.compile(r"slurmstepd\S*: error: \*\*\* JOB \S+ ON \S+ CANCELLED AT (\S+)")
_RESOLUTION = timedelta(seconds=1)
"""Resolution of timestamps in Slurm's messages, which omit fractions of a second."""


def slurm_messages(attempt: AttemptDir, job: JobRecord, *, is_recorded: bool) -> Iterator[Text]:
    """Yield messages that srun and slurmstepd wrote about an attempt.

    `is_recorded` is True if end.json exists for the attempt. slurmstepd writes its last messages to the log
    file that was opened when the job started. After a requeue or a restart inside the allocation, the last
    messages of slurmstepd are in the log file of an earlier attempt.
    """
    entries, entry = job.attempts, job.of_attempt(attempt.number)
    start = parse_time(entry.started_at)
    others = (parse_time(other.started_at) for other in entries if other.attempt > attempt.number)
    next_start = min(filter(None, others), default=None)

    def is_of_a_later_one(line: str) -> bool:
        time = _end_of_the_job(line)
        return time is not None and next_start is not None and time >= next_start

    own = _log(attempt)
    if own is not None:
        lines = takewhile(lambda line: not is_end_line(line, attempt.number), own.lines)
        kept = list(takewhile(lambda line: not is_of_a_later_one(line), lines))
        yield own.part(0, len(kept), "srun")
    if start is None or is_recorded:
        return  # end.json already includes Slurm's reason
    earlier = [
        other.attempt for other in entries if other.attempt < attempt.number and other.job_id == entry.job_id
    ]
    for log in map(_log, map(attempt.run.attempt, earlier)):
        for index, line in enumerate([] if log is None else log.lines):
            time = _end_of_the_job(line)
            if log and time and time + _RESOLUTION > start and not is_of_a_later_one(line):
                yield log.part(index, 1, "srun")


def _log(attempt: AttemptDir) -> Text | None:
    return read_log(attempt.supervisor_log, attempt.run.path, "srun")


def _end_of_the_job(line: str) -> datetime | None:
    """Return the time at which slurmstepd terminated the job, or None if the line does not report this."""
    found = _END_OF_THE_JOB.search(line)
    time = None if found is None else parse_time(found[1])
    # Slurm writes times in the host's local time zone without naming the zone.
    return None if time is None else time.astimezone()


MAX_EVENTS = 400
MAX_SHOWN = 8
END_EVENTS = frozenset({"rank_failed", "hang", "requeue_decision", "finished", "stopped"})
"""Events that the supervisor writes after an attempt has exited. The diagnosis skips these events because
end.json has the same content."""


class AttemptEvents:
    """The last events of an attempt that precede the first failure."""

    def __init__(self, attempt: AttemptDir, failed_at: str | None) -> None:
        """Read the events of an attempt.

        `failed_at` is the time of the first failure; later events are skipped, because they cannot be its
        cause.
        """
        self._attempt, self._failed_at = attempt, failed_at
        self._numbered: deque[tuple[int | None, Event]] = deque(maxlen=MAX_EVENTS)
        """The last events with their line numbers; a line number is None if the file is too large to count
        its lines."""
        self._seen, self._owned = Attempt(attempt.number), OwnedEvents()
        # The events file may be missing or on a failing disk.
        with contextlib.suppress(OSError), open_file(self._attempt.run.events_file) as stream:
            size = os.fstat(stream.fileno()).st_size
            numbers_of_lines: Iterator[int | None] = count(1) if size <= WHOLE_BYTES else repeat(None)
            for number, line in zip(numbers_of_lines, event_lines(stream, 0, size), strict=False):
                for event in filter(self._is_before, events_of(map(_without_lists, parse_records([line])))):
                    self._numbered.append((number, event))
                    self._seen.add(event)
                    self._owned.add(event)

    def _is_before(self, event: Event) -> bool:
        if event.attempt != self._attempt.number or event.time is None or event.name in END_EVENTS:
            return False
        return self._failed_at is None or event.time < self._failed_at

    @property
    def lasting(self) -> list[Event]:
        """Return capability events that are still in effect at the end of the attempt."""
        return self._owned.lasting(self._attempt.number)

    def texts(self, *, only_lasting: bool = False) -> Iterator[Text]:
        """Yield each event as a one-line text, newest first.

        Events from capabilities are included only if they are still in effect at the end of the attempt.
        """
        lasting = list(map(id, self.lasting))
        for number, event in reversed(self._numbered):
            if id(event) not in lasting and (only_lasting or owner_of(event.name)):
                continue
            yield Text(
                self._attempt.run.events_file.name,
                "event",
                [clean(event.content)],
                event.rank,
                event.host,
                first_line=number,
            )

    def shown(self) -> list[Evidence]:
        """Return the last events, each with its time of day.

        The events of a completed save are merged into one event.
        """
        file, found = self._attempt.run.events_file.name, []
        saved: set[int | None] = set()
        for number, event in reversed(self._numbered):
            if event.name in SAVE_EVENTS:
                saved.add(event.step)
            elif event.name == "checkpoint_begin" and event.step in saved:
                continue
            text = clean(f"{event.clock}  {event.content}")
            found.append(Evidence(file, number, text))
        return found[:MAX_SHOWN][::-1]

    def values(self) -> dict[str, str]:
        """Return placeholder values that describe an incomplete save."""
        save = self._seen.open_save
        # The commit event is written shortly after the checkpoint has become visible.
        if save and save.step is not None and not self._attempt.run.checkpoint_dir(save.step).is_dir():
            return {"unsaved_step": str(save.step), "save_began": f"{save.clock} UTC"}
        return {}


def _without_lists(record: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in record.items() if not isinstance(value, list)}
