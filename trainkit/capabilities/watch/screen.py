"""Implements the screens of ``trainkit watch``. No other module imports textual."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import Any, ClassVar

from rich.cells import cell_len
from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import DataTable, Footer, Static

from trainkit.backend import JobStatus
from trainkit.backends.jobs import SlurmPoller, read_job_status, utc_clock
from trainkit.capabilities.diagnose.command import diagnosis_lines
from trainkit.capabilities.watch.run_view import RunView, read_view
from trainkit.capabilities.watch.view_text import Size, charted, nodes_lines, notices_lines, view_lines
from trainkit.cli.help import warn
from trainkit.cli.output import replaced
from trainkit.cli.status import MAX_ENDED_RUNS, runs_rows, trial_rows
from trainkit.control.cancel import cancel_run
from trainkit.errors import EXIT_INTERRUPTED, EXIT_OK, TrainkitError
from trainkit.observe.current import read_all, read_group
from trainkit.observe.group import GroupStatus, TrialStatus, most_relevant, state_counts
from trainkit.observe.logs import last_texts
from trainkit.observe.ranking import MAX_NAMED, logged_names
from trainkit.observe.status import RunStatus, read_status
from trainkit.run.group import RunGroup
from trainkit.run.history import RunHistory
from trainkit.run.owner import refuse_foreign
from trainkit.run.record import JobRecord
from trainkit.run.registry import find_attempt
from trainkit.run.rundir import RunDir
from trainkit.terminal import BAD, DIM, TITLE, state_style

LOG_LINES = 200
MAX_TRIALS = 200
MAX_SHARE = 0.05
"""Maximum fraction of a CPU core that reading the run folder may use. If reading would exceed this fraction,
the run folder is read less often."""
MAX_PROBLEM_LINES = 4
HANGUP_S = 5
"""Seconds after SIGHUP until the process exits without restoring the terminal, which may no longer exist."""


def watch(found: RunDir | RunGroup | None, interval_s: float) -> int:
    """Show a run, a group or all runs until the user quits, and return the exit code."""
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)  # textual ignores changes to the terminal size if these variables are set.
    app = WatchApp(found, interval_s)
    result = app.run()
    if app.signal_number is not None:
        signal.signal(app.signal_number, signal.SIG_DFL)
        os.kill(os.getpid(), app.signal_number)
    if result == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    return result if result is not None else app.return_code or EXIT_OK


def read_again(
    read: Callable[[], object],
    show: Callable[[object], object],
    interval_s: float,
    ended: threading.Event,
    is_on: threading.Event,
) -> None:
    """Call `read` every `interval_s` seconds until `ended` is set, or less often if `read` takes long.

    While `is_on` is cleared, `read` is not called.
    """
    while not ended.is_set():
        began_s = time.thread_time()
        try:
            result: object = read()
        # Show the error on the screen, because the screen would silently stop updating if this thread exited.
        except Exception as error:
            result = error
        show(result)
        ended.wait(max(interval_s, (time.thread_time() - began_s) / MAX_SHARE))
        is_on.wait()


class ReadingScreen(Screen[None]):
    """A screen whose content is read repeatedly in a background thread."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "app.quit", "Quit"),
        Binding("escape", "app.leave", "Back"),
        Binding("question_mark", "keys", "Keys", key_display="?"),
    ]

    def __init__(self, read: Callable[[], object], interval_s: float) -> None:
        super().__init__()
        self._reader = read, partial(self.call_later, self.take), interval_s
        self._ended, self._is_on = threading.Event(), threading.Event()
        self._is_on.set()
        self._read_at: datetime | None = None
        self.result: Any = None
        """The result of the last successful read; None before the first successful read."""
        self.problem: str | None = None

    def on_mount(self) -> None:
        args = (*self._reader, self._ended, self._is_on)
        threading.Thread(target=read_again, args=args, name="reader", daemon=True).start()

    def on_unmount(self) -> None:
        self._ended.set()
        self._is_on.set()

    def take(self, result: object) -> None:
        """Show the result of a read operation.

        If the result is an exception, show its message above the last successful result.
        """
        if isinstance(result, Exception):
            self.problem = _error_text(result)
            if self._read_at is not None:
                self.problem += f"; the screen shows the state at {self._read_at:%H:%M:%S} UTC"
        else:
            self.problem, self._read_at = None, datetime.now(timezone.utc)
            self.result = result
        self.show()

    def on_resize(self) -> None:
        self.show()

    def action_keys(self) -> None:
        """Show the keys of this screen and what they do."""
        own = (kind for kind in type(self).__mro__ if kind.__module__ == __name__)
        found = [one for kind in own for one in vars(kind).get("BINDINGS", ()) if isinstance(one, Binding)]
        shown = ((one.key_display or one.key, one.tooltip or one.description) for one in found)
        lines = [Text("Keys", TITLE), *(Text(f"{key:<8}  {text}") for key, text in shown)]
        self.app.push_screen(TextScreen(lambda: lines, 24 * 3600.0))

    def show(self) -> None:
        raise NotImplementedError


def _error_text(error: Exception) -> str:
    if isinstance(error, TrainkitError):
        return error.message
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename} cannot be read: {error.strerror}"
    return f"{type(error).__name__}: {error}"


class RunScreen(ReadingScreen):
    """The screen of one run."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("l", "log", "Log"),
        Binding("d", "diagnosis", "Diagnosis"),
        Binding("n", "nodes", "Nodes"),
        Binding("w", "warnings", "Warnings"),
        Binding("c", "cancel", "Cancel"),
        Binding("r", "requeue", "Requeue"),
        Binding("m", "metric(1)", "Metric", show=False, tooltip="Show the next metric as a large chart"),
        Binding("M", "metric(-1)", "Metric", show=False, tooltip="Show the previous metric as a large chart"),
    ]

    def __init__(
        self, run: RunDir, interval_s: float, poller: SlurmPoller, clock: Callable[[], datetime]
    ) -> None:
        super().__init__(self._read_view, interval_s)
        self.run_dir, self._interval_s, self._poller, self._clock = run, interval_s, poller, clock
        self._history = RunHistory(run)
        self._record, self._job = JobRecord(), JobStatus(None)
        self._metric: str | None = None
        """The metric whose chart fills the screen below the progress line; None for the normal screen."""

    def _read_view(self) -> RunView:
        """Return the current view; raise OSError if the run folder cannot be read."""
        run, history = self.run_dir, self._history
        run.path.stat()
        history.update()
        record, job = read_job_status(run, self._poller.jobs)
        self._record, self._job, now = record, job, self._clock()
        status = read_status(history, record, job.alive, now, job.job)
        return read_view(history, status, now, job.job, Path.cwd())

    def compose(self) -> ComposeResult:
        yield Static(Text("reading the run…", DIM), id="body")
        yield Footer(compact=True)

    def show(self) -> None:
        width, height = self.app.size.width, self.app.size.height - 1
        lines = problem_lines(self.problem or self._poller.problem, width)
        if self.result is not None:
            lines += view_lines(self.result, Size(width, height - len(lines)), self._metric)
        if lines:
            self.query_one("#body", Static).update(joined(lines, width))

    def action_metric(self, step: int) -> None:
        """Show the chart of the next metric or, after the last metric, the normal screen."""
        choices = [None, *(() if self.result is None else charted(self.result))]
        at = choices.index(self._metric) if self._metric in choices else 0
        self._metric = choices[(at + step) % len(choices)]
        self.show()

    def action_log(self) -> None:
        if self.result is not None and self.result.log is not None:
            path = Path(self.result.log)
            self.app.push_screen(TextScreen(lambda: _log_lines(path), self._interval_s, at_end=True))

    def action_nodes(self) -> None:
        self._open(lambda view, size: nodes_lines(view.nodes, size, len(view.nodes), view.num_hosts))

    def action_warnings(self) -> None:
        self._open(lambda view, size: notices_lines(view.notices, size, len(view.notices)))

    def _open(self, lines: Callable[[RunView, Size], list[Text]]) -> None:
        def read() -> list[Text]:
            return [] if self.result is None else lines(self.result, Size(self.app.size.width - 2))

        self.app.push_screen(TextScreen(read, self._interval_s))

    def action_diagnosis(self) -> None:
        self.app.push_screen(TextScreen(self._diagnosis, 24 * 3600.0))

    def _diagnosis(self) -> list[Text]:
        from trainkit.capabilities.diagnose.diagnose import diagnose

        job, attempt = self._job, find_attempt(self.run_dir, None)
        found = diagnose(attempt, self._record, job.alive, job.job)
        return [Text(line, getattr(line, "style", "")) for line in diagnosis_lines(found)]

    def action_cancel(self) -> None:
        self._confirm(f"Cancel {self.run_dir.name}? The run saves and stops.", self._cancel)

    def action_requeue(self) -> None:
        self._confirm(f"Requeue {self.run_dir.name}? The run saves first if it is running.", self._requeue)

    @work
    async def _confirm(self, question: str, act: Callable[[], str]) -> None:
        if await self.app.push_screen_wait(ConfirmScreen(question)):
            self._act(act)

    @work(thread=True)
    def _act(self, act: Callable[[], str]) -> None:
        try:
            self._notify_plain(act())
        except (OSError, TrainkitError) as error:
            hint = getattr(error, "hint", "")
            text = _error_text(error) + (f"; {hint}" if hint else "")
            self.notify(text, severity="error", timeout=15, markup=False)

    def _notify_plain(self, text: str) -> None:
        self.notify(text, markup=False)

    def _cancel(self) -> str:
        refuse_foreign(self.run_dir.path, "`trainkit cancel --trust` cancels the run anyway")
        return cancel_run(self.run_dir, now=False, wait=False, warn=self._notify_plain).message

    def _requeue(self) -> str:
        from trainkit.control.requeue import requeue_run

        refuse_foreign(self.run_dir.path, "`trainkit requeue --trust` requeues the run anyway")
        requeued = requeue_run(self.run_dir)
        entry = requeued.entry
        if requeued.is_started:
            return f"started attempt {entry.attempt} as {entry.job_id}"
        return f"{entry.job_id} is saving and will be requeued"


class ListScreen(ReadingScreen):
    """A list of runs; the user can open each run."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select", "Open", priority=True)]

    def __init__(self, read: Callable[[], object], interval_s: float, poller: SlurmPoller) -> None:
        super().__init__(read, interval_s)
        self._poller = poller
        self._runs: Sequence[RunStatus | GroupStatus | TrialStatus] = []

    def compose(self) -> ComposeResult:
        yield Static(id="title")
        yield DataTable[Text](cursor_type="row")
        yield Footer(compact=True)

    def on_screen_suspend(self) -> None:
        self._is_on.clear()

    def on_screen_resume(self) -> None:
        self._is_on.set()

    def _listing(self) -> tuple[str, list[Sequence[str]]]:
        """Return the title of the list, and its rows, starting with the heading."""
        if isinstance(self.result, GroupStatus):  # list failed trials first
            count, trials = len(self.result.trials), most_relevant(self.result, MAX_TRIALS)
            self._runs, rows = trials, trial_rows(self.result, trials)
            title = f"{self.result.name}: {count:,} runs: {state_counts(self.result.states)}"
            num_hidden, what = count - len(trials), ""
        else:
            runs, num_hidden = self.result
            runs.sort(key=lambda status: not status.is_active)
            self._runs, rows, what = runs, runs_rows(runs, Path.cwd()), "older ones "
            num_active = sum(status.is_active for status in runs)
            title = f"{num_active} active, {len(runs) - num_active} ended"
        return title + (f", {num_hidden:,} {what}not shown" if num_hidden else ""), rows

    def show(self) -> None:
        """Show the newest result of reading the runs. The cursor stays on the same run."""
        width, table = self.app.size.width, self.query_one(DataTable)
        lines = problem_lines(self.problem or self._poller.problem, width)
        if self.result is None:
            self.query_one("#title", Static).update(joined([*lines, Text("reading the runs…", DIM)], width))
            return
        title, rows = self._listing()
        rows = [list(map(replaced, row)) for row in rows]
        lines.append(Text(title, TITLE))
        if not self._runs:
            lines.append(Text("no runs yet: `trainkit submit` starts a run"))
        self.query_one("#title", Static).update(joined(lines, width))
        place, top = table.cursor_coordinate, table.scroll_y
        chosen = table.coordinate_to_cell_key(place).row_key.value if table.row_count else None
        table.clear(columns=True)
        # Set the width, because the table would otherwise compute it one frame too late.
        for column in zip(*rows, strict=True):
            table.add_column(column[0], width=max(map(cell_len, column)))
        for run, (name, state, *cells) in zip(self._runs, rows[1:], strict=True):
            worst = next(iter(run.states), "") if isinstance(run, GroupStatus) else run.state
            table.add_row(Text(name), Text(state, state_style(worst)), *map(Text, cells), key=run.run_dir)
        folders = [run.run_dir for run in self._runs]
        table.move_cursor(row=folders.index(chosen) if chosen in folders else 0, scroll=False)
        table.scroll_to(y=top, animate=False)

    def action_select(self) -> None:
        if not self._runs:
            return
        run, app = self._runs[self.query_one(DataTable).cursor_row], self.app
        assert isinstance(app, WatchApp)
        if isinstance(run, GroupStatus):
            app.open(RunGroup(run.run_dir))
        elif Path(run.run_dir).is_dir():
            app.open(RunDir(run.run_dir))
        else:
            self.notify("this run has not started yet")


class GroupScreen(ListScreen):
    """A list of the runs in a group, ranked by a metric that the user can change."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("m", "metric(1)", "Metric", show=False, tooltip="Rank the runs by the next metric"),
        Binding("M", "metric(-1)", "Metric", show=False, tooltip="Rank the runs by the previous metric"),
    ]

    def __init__(self, group: RunGroup, interval_s: float, poller: SlurmPoller) -> None:
        super().__init__(self._read_group, interval_s, poller)
        self._group = group
        self._metric: str | None = None
        """The metric that ranks the runs; None for the metric set in the runs' config."""

    def _read_group(self) -> GroupStatus:
        return read_group(self._group, self._poller.jobs, self._metric)

    @work(thread=True, exclusive=True)
    def action_metric(self, step: int) -> None:
        """Rank the runs by the next logged metric or, after the last one, by the metric set in the config."""
        result: object
        try:
            runs = [self._group.run(index) for index in self._group.created()[:MAX_NAMED]]
            choices = [None, *sorted(logged_names(runs))]
            at = choices.index(self._metric) if self._metric in choices else 0
            self._metric = choices[(at + step) % len(choices)]
            result = self._read_group()
        except (OSError, TrainkitError) as error:
            result = error
        self.call_later(self.take, result)


class TextScreen(ReadingScreen):
    """A screen with lines of text that the user can scroll."""

    def __init__(self, read: Callable[[], object], interval_s: float, at_end: bool = False) -> None:
        super().__init__(read, interval_s)
        self.result = [Text("reading…", DIM)]
        self._shown: Text | None = None
        self._at_end = at_end

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="scroll"):
            yield Static(id="text")
        yield Footer(compact=True)

    def show(self) -> None:
        scroll = self.query_one("#scroll", VerticalScroll)
        was_at_end = self._at_end and scroll.is_vertical_scroll_end
        lines = [] if self.problem is None else [Text(f"! {self.problem}", BAD)]
        text = Text("\n").join(lines + self.result)
        text.plain = replaced(text.plain)
        if text == self._shown:
            return
        self._shown = text
        self.query_one("#text", Static).update(text)
        if was_at_end:
            scroll.scroll_end(animate=False)


class ConfirmScreen(ModalScreen[bool]):
    """A confirmation question that is shown before an action is performed."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n,escape", "answer(False)", "No"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        yield Static(f"{self._question}\n\n  y  yes      n  no", id="question", markup=False)

    def action_answer(self, is_sure: bool) -> None:
        self.dismiss(is_sure)


class WatchApp(App[int]):
    """The textual application, which shows a run, a group, or the list of all runs."""

    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "interrupt", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", show=False, priority=True),
    ]
    CSS = """
    Screen { background: ansi_default; color: ansi_default; }
    Static { height: auto; background: ansi_default; }
    #body { text-wrap: nowrap; }
    DataTable { height: 1fr; background: ansi_default; scrollbar-size: 1 1; }
    DataTable > .datatable--header { background: ansi_default; }
    #scroll { height: 1fr; background: ansi_default; scrollbar-size: 1 1; }
    ConfirmScreen { align: center middle; }
    #question { width: auto; max-width: 76; padding: 1 3; border: round; }
    """

    def __init__(
        self,
        found: RunDir | RunGroup | None,
        interval_s: float,
        clock: Callable[[], datetime] = utc_clock,
    ) -> None:
        super().__init__(ansi_color=True)
        self.clock = clock
        self._found, self._interval_s = found, interval_s
        self._poller = SlurmPoller(clock)
        self.signal_number: int | None = None

    def on_mount(self) -> None:
        for number in (signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._end, number)
        self.open(self._found)

    def open(self, found: RunDir | RunGroup | None) -> None:
        """Open the screen of a run or a group, or the list of all runs if `found` is None."""
        if isinstance(found, RunDir):
            self.push_screen(RunScreen(found, self._interval_s, self._poller, self.clock))
            return
        if found is not None:
            self.push_screen(GroupScreen(found, self._interval_s, self._poller))
            return
        read = partial(read_all, MAX_ENDED_RUNS, self._poller.jobs, {}, warn)
        self.push_screen(ListScreen(read, self._interval_s, self._poller))

    def action_leave(self) -> None:
        """Close the current screen; if no other screen is open, show the list of runs."""
        if len(self.screen_stack) > 2:
            self.pop_screen()
        elif self._found is not None:
            self._found = None
            self.pop_screen()
            self.open(None)

    async def action_quit(self) -> None:
        self.exit(EXIT_OK)

    def action_interrupt(self) -> None:
        self.exit(EXIT_INTERRUPTED)

    def _end(self, number: int) -> None:
        """Restore the terminal and exit after a signal."""
        self.signal_number = number
        if number == signal.SIGHUP:
            signal.alarm(HANGUP_S)
        self.exit(EXIT_OK)


def problem_lines(problem: str | None, width: int) -> list[Text]:
    """Return lines that describe why the screen is incomplete, or no lines if there is no problem."""
    if problem is None:
        return []
    return [Text(line, BAD) for line in wrap(f"! {problem}", max(1, width))[:MAX_PROBLEM_LINES]]


def joined(lines: list[Text], width: int) -> Text:
    """Join lines into one text, truncating each line to the given width."""
    for line in lines:
        line.plain = replaced(line.plain)
        line.truncate(width, overflow="ellipsis")
    return Text("\n", no_wrap=True).join(lines)


def _log_lines(path: Path) -> list[Text]:
    texts = list(map(Text, last_texts(path, LOG_LINES)))
    return [Text(str(path), DIM), *(texts or [Text("nothing printed yet", DIM)])]
