"""What the screen of ``trainkit watch`` shows, read again and again: files each time, Slurm seldom."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.backends import JobStatus
from trainkit.backends.jobs import QUERY_INTERVAL_S, job_statuses, open_job_ids, query_known_jobs
from trainkit.observe.group import GroupFiles, GroupStatus
from trainkit.observe.run_view import RunView, read_view
from trainkit.observe.status import RunStatus, read_status
from trainkit.run.group import RunGroup
from trainkit.run.history import RunHistory
from trainkit.run.rundir import RunDir
from trainkit.slurm.jobs import JobInfo

if TYPE_CHECKING:
    from trainkit.bench.run_bench import Bench

ANSWER_S = 5.0
"""How long a reading waits for Slurm when there are new jobs; then it shows what the files say."""
MIN_QUERY_INTERVAL_S = 2.0
"""Between two queries when there are new jobs."""
Jobs = Mapping[str, JobInfo]


def utc_clock() -> datetime:
    """The current time."""
    return datetime.now(timezone.utc)


class SlurmPoller:
    """Queries the jobs that were asked for last, every `interval_s`, in a thread of its own."""

    def __init__(
        self,
        interval_s: float = QUERY_INTERVAL_S,
        query: Callable[[Sequence[str], Callable[[str], None]], Jobs | None] = query_known_jobs,
        clock: Callable[[], datetime] = utc_clock,
    ) -> None:
        self._interval_s, self._query, self._clock = interval_s, query, clock
        self._wanted: tuple[str, ...] = ()
        self._answered: tuple[str, ...] = ()
        """What the newest answer, in `_jobs`, is about."""
        self._jobs: Jobs | None = None
        self._problem: tuple[str, datetime] | None = None
        self._changed = threading.Event()
        self._answers = threading.Condition()
        self._thread: threading.Thread | None = None

    def jobs(self, ids: Sequence[str]) -> Jobs | None:
        """The newest answer about these jobs; None while there is none."""
        with self._answers:
            self._wanted = tuple(ids)
            if not ids:
                return {}
            if not set(ids) <= set(self._answered):
                self._changed.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._poll, name="slurm", daemon=True)
                self._thread.start()
            # A job that an answer does not list has left the queue: the answer must be about all of them.
            is_complete = self._answers.wait_for(lambda: set(ids) <= set(self._answered), ANSWER_S)
            return self._jobs if is_complete else None

    @property
    def problem(self) -> str | None:
        """Why the state in Slurm is unknown, and since when; None when it is known."""
        if self._problem is None:
            return None
        text, since = self._problem
        return f"Slurm cannot be reached since {since:%H:%M:%S} UTC: {text}"

    def _poll(self) -> None:
        while True:
            self._changed.clear()
            wanted, texts = self._wanted, list[str]()
            if not wanted:
                self._changed.wait()
                continue
            jobs = self._query(wanted, texts.append)
            with self._answers:
                self._jobs, self._answered = jobs, wanted
                if jobs is not None:
                    self._problem = None
                elif self._problem is None:
                    self._problem = ("; ".join(texts), self._clock())
                self._answers.notify_all()
            asked_s = time.monotonic()
            self._changed.wait(self._interval_s)
            time.sleep(max(0.0, MIN_QUERY_INTERVAL_S - (time.monotonic() - asked_s)))


class RunSource:
    """Reads the view of a run."""

    def __init__(self, run: RunDir, poller: SlurmPoller, clock: Callable[[], datetime] = utc_clock) -> None:
        self.run, self._poller, self._clock = run, poller, clock
        self._history = RunHistory(run)
        self.job = JobStatus(None)
        """As of the newest reading."""

    def read(self) -> tuple[RunView, str | None]:
        """The view, and what keeps it from being complete; raises OSError if the folder cannot be read."""
        self.run.path.stat()
        self._history.update()
        jobs = self._poller.jobs(open_job_ids([self.run]))
        self.job = job = job_statuses([self.run], jobs)[0]
        now = self._clock()
        status = read_status(self.run, job.alive, now, job.job, self._history)
        problem = None if jobs is not None else self._poller.problem
        return read_view(self._history, status, now, job.job, Path.cwd()), problem


class _SeveralRuns:
    """A reader of several runs, which finds their jobs while it reads."""

    def __init__(self, poller: SlurmPoller) -> None:
        self._poller = poller
        self._is_answered = True

    def _query(self, ids: Sequence[str]) -> Jobs | None:
        jobs = self._poller.jobs(ids)
        self._is_answered = jobs is not None
        return jobs

    def _problem(self) -> str | None:
        return None if self._is_answered else self._poller.problem


class RunsSource(_SeveralRuns):
    """Reads the status of active runs and the newest others."""

    def __init__(self, poller: SlurmPoller) -> None:
        super().__init__(poller)
        self._histories: dict[Path, RunHistory] = {}

    def read(self) -> tuple[list[RunStatus | GroupStatus], int, str | None]:
        """The runs, the number of older ones, and what keeps them from being complete."""
        from trainkit.cli.status import read_all
        from trainkit.observe.status_text import MAX_ENDED_RUNS

        statuses, num_hidden = read_all(MAX_ENDED_RUNS, self._query, self._histories)
        return statuses, num_hidden, self._problem()


class BenchSource(_SeveralRuns):
    """Reads the status of the runs of a bench."""

    def __init__(self, bench: Bench, poller: SlurmPoller) -> None:
        super().__init__(poller)
        self._bench = bench

    def read(self) -> tuple[GroupStatus, str | None]:
        """The runs as a group, and what keeps it from being complete."""
        from trainkit.bench.run_bench import bench_status

        return bench_status(self._bench, self._query), self._problem()


class GroupSource:
    """Reads the status of a group."""

    def __init__(self, group: RunGroup, poller: SlurmPoller) -> None:
        self.group, self._poller = group, poller

    def read(self) -> tuple[GroupStatus, str | None]:
        """The group, and what keeps it from being complete."""
        files = GroupFiles(self.group)
        jobs = self._poller.jobs(files.open_ids)
        return files.status(jobs, utc_clock()), None if jobs is not None else self._poller.problem


class Repeater:
    """Calls `read` in a thread every `interval_s`, or less often so that it takes at most 5 % of a core."""

    MAX_SHARE = 0.05

    def __init__(
        self, read: Callable[[], object], show: Callable[[object], object], interval_s: float
    ) -> None:
        self._read, self._show, self._interval_s = read, show, interval_s
        self._ended, self._is_on = threading.Event(), threading.Event()
        self._is_on.set()
        self._thread = threading.Thread(target=self._run, name="reader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Stop after the reading in progress; returns at once."""
        self._ended.set()
        self._is_on.set()

    def pause(self) -> None:
        """Read nothing until `resume` is called."""
        self._is_on.clear()

    def resume(self) -> None:
        self._is_on.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            began_s = time.thread_time()
            try:
                result: object = self._read()
            except Exception as error:  # it is shown; without a reader, the screen would stop silently
                result = error
            self._show(result)
            self._ended.wait(max(self._interval_s, (time.thread_time() - began_s) / self.MAX_SHARE))
            self._is_on.wait()
