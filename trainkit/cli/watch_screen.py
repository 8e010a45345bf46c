"""The screens of ``trainkit watch``: a run, lists of runs, texts. The only module that imports textual."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.message import Message
from textual.screen import ModalScreen, Screen
from textual.widgets import Footer, OptionList, Static
from textual.widgets.option_list import Option

from trainkit.cli.watch_source import (
    BenchSource,
    GroupSource,
    Repeater,
    RunSource,
    RunsSource,
    SlurmPoller,
    utc_clock,
)
from trainkit.errors import EXIT_INTERRUPTED, EXIT_OK, TrainkitError
from trainkit.observe.follow import last_lines
from trainkit.observe.list_text import Listing, group_listing, runs_listing
from trainkit.observe.run_text import clean
from trainkit.observe.run_view import RunView
from trainkit.observe.view_text import BAD, DIM, TITLE, Size, nodes_lines, notices_lines, view_lines
from trainkit.run.group import RunGroup
from trainkit.run.rundir import RunDir

if TYPE_CHECKING:
    from trainkit.bench.run_bench import Bench

LOG_LINES = 200
MAX_PROBLEM_LINES = 4
HANGUP_S = 5
"""After SIGHUP the terminal may be gone: the process then ends without restoring it."""


def watch(found: RunDir | RunGroup | Bench | None, interval_s: float) -> int:
    """Show a run, the runs of a group or bench, or all runs, until the user quits; returns the exit code."""
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)  # else textual would not notice that the terminal is resized
    app = WatchApp(found, interval_s)
    with app.ended_by_signals():
        result = app.run()
    if app.signal_number is not None:
        signal.signal(app.signal_number, signal.SIG_DFL)
        os.kill(os.getpid(), app.signal_number)
    if result == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    return result if result is not None else app.return_code or EXIT_OK


class Reading(Message):
    """What a reader has read, or its error."""

    def __init__(self, result: object) -> None:
        super().__init__()
        self.result: Any = result


class ReadingScreen(Screen[None]):
    """A screen that shows what is read in a thread, again and again."""

    def __init__(self, read: Callable[[], object], interval_s: float) -> None:
        super().__init__()
        self._repeater = Repeater(read, self._post, interval_s)
        self._read_at: datetime | None = None
        self.problem: str | None = None

    def _post(self, result: object) -> None:
        self.post_message(Reading(result))

    def on_mount(self) -> None:
        self._repeater.start()

    def on_unmount(self) -> None:
        self._repeater.end()

    def on_reading(self, message: Reading) -> None:
        """Show what was read; of an error, its text and what was read before."""
        if isinstance(message.result, Exception):
            self.problem = _error_text(message.result)
            if self._read_at is not None:
                self.problem += f"; shown is what was read at {self._read_at:%H:%M:%S} UTC"
        else:
            self.problem, self._read_at = None, datetime.now(timezone.utc)
            self.take(message.result)
        self.show()

    def on_resize(self) -> None:
        self.show()

    def take(self, result: Any) -> None:
        """Keep a result."""
        raise NotImplementedError

    def show(self) -> None:
        """Show the newest result."""
        raise NotImplementedError


def _error_text(error: Exception) -> str:
    if isinstance(error, TrainkitError):
        return error.message
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename} cannot be read: {error.strerror}"
    return f"{type(error).__name__}: {error}"


class RunScreen(ReadingScreen):
    """One run."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("l", "log", "Log"),
        Binding("d", "diagnosis", "Diagnosis"),
        Binding("n", "nodes", "Nodes"),
        Binding("w", "warnings", "Warnings"),
        Binding("c", "cancel", "Cancel"),
        Binding("r", "requeue", "Requeue"),
        Binding("q", "app.quit", "Quit"),
        Binding("escape", "app.leave", "Back"),
    ]

    def __init__(self, source: RunSource, interval_s: float) -> None:
        super().__init__(source.read, interval_s)
        self._source, self._interval_s = source, interval_s
        self.run_dir = source.run
        self.view: RunView | None = None

    def compose(self) -> ComposeResult:
        yield Static(Text("reading the run…", DIM), id="body")
        yield Footer(compact=True)

    def take(self, result: Any) -> None:
        self.view, self.problem = result

    def show(self) -> None:
        width, height = self.app.size.width, self.app.size.height - 1
        lines = problem_lines(self.problem, width)
        if self.view is not None:
            lines += view_lines(self.view, Size(width, height - len(lines)))
        if lines:
            self.query_one("#body", Static).update(joined(lines, width))

    def action_log(self) -> None:
        if self.view is not None and self.view.log is not None:
            path = Path(self.view.log)
            self.app.push_screen(TextScreen(lambda: _log_lines(path), self._interval_s, at_end=True))

    def action_nodes(self) -> None:
        self.app.push_screen(TextScreen(self._all_nodes, self._interval_s))

    def action_warnings(self) -> None:
        self.app.push_screen(TextScreen(self._all_notices, self._interval_s))

    def action_diagnosis(self) -> None:
        self.app.push_screen(TextScreen(self._diagnosis, 24 * 3600.0))

    def _all_nodes(self) -> list[Text]:
        if self.view is None:
            return []
        size = Size(self.app.size.width - 2)
        return nodes_lines(self.view.nodes, size, len(self.view.nodes), self.view.num_hosts)

    def _all_notices(self) -> list[Text]:
        if self.view is None:
            return []
        return notices_lines(self.view.notices, Size(self.app.size.width - 2), len(self.view.notices))

    def _diagnosis(self) -> list[Text]:
        from trainkit.cli.diagnose import diagnosis_text
        from trainkit.observe.diagnose import diagnose
        from trainkit.observe.signatures import load_signatures, user_files

        numbers = self.run_dir.attempt_numbers()
        if not numbers:
            return [Text("the run was never started")]
        job = self._source.job
        signatures = load_signatures(user_files(Path.cwd()))
        found = diagnose(self.run_dir.attempt(numbers[-1]), signatures, job.alive, job.job)
        return [Text(line) for line in diagnosis_text(found).splitlines()]

    def action_cancel(self) -> None:
        self._confirm(f"Cancel {self.run_dir.name}? It saves and ends.", self._cancel)

    def action_requeue(self) -> None:
        self._confirm(f"Requeue {self.run_dir.name}? It saves first if it runs.", self._requeue)

    def _confirm(self, question: str, act: Callable[[], str]) -> None:
        def decide(is_sure: bool | None) -> None:
            if is_sure:
                self._act(act)

        self.app.push_screen(ConfirmScreen(question), decide)

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
        from trainkit.control.cancel import cancel_run

        return cancel_run(self.run_dir, now=False, wait=False, warn=self._notify_plain).message

    def _requeue(self) -> str:
        from trainkit.control.requeue import requeue_run

        entry, is_started = requeue_run(self.run_dir)
        if is_started:
            return f"started attempt {entry.attempt} as {entry.job_id}"
        return f"{entry.job_id} is saving and will be requeued"


class ListScreen(ReadingScreen):
    """Runs to choose from."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "select", "Open", priority=True),
        Binding("q", "app.quit", "Quit"),
        Binding("escape", "app.leave", "Back"),
    ]

    def __init__(
        self,
        read: Callable[[], object],
        interval_s: float,
        listing: Callable[[Any, int], tuple[Listing, str | None]],
    ) -> None:
        super().__init__(read, interval_s)
        self._listing = listing
        self._result: object = None
        self._shown: list[str] = []
        self.listing: Listing | None = None

    def compose(self) -> ComposeResult:
        yield Static(Text("reading the runs…", DIM), id="title")
        yield OptionList(id="runs")
        yield Footer(compact=True)

    def on_screen_suspend(self) -> None:
        self._repeater.pause()

    def on_screen_resume(self) -> None:
        self._repeater.resume()

    def take(self, result: Any) -> None:
        self._result = result

    def show(self) -> None:
        if self._result is None:
            return
        width = self.app.size.width - 1  # for the scrollbar
        self.listing, problem = self._listing(self._result, width)
        lines = problem_lines(self.problem or problem, width)
        lines += [Text(self.listing.title, TITLE), Text(), self.listing.heading]
        if not self.listing.rows:
            lines.append(Text("no runs yet: `trainkit submit` starts one"))
        self.query_one("#title", Static).update(joined(lines, width))
        self._show_rows(width)

    def _show_rows(self, width: int) -> None:
        assert self.listing is not None
        options = self.query_one("#runs", OptionList)
        texts = [joined([row.text.copy()], width) for row in self.listing.rows]
        ids = [row.run_dir for row in self.listing.rows]
        if ids == self._shown:
            for index, text in enumerate(texts):
                options.replace_option_prompt_at_index(index, text)
            return
        chosen = None if options.highlighted is None else self._shown[options.highlighted]
        self._shown = ids
        options.clear_options()
        options.add_options([Option(text) for text in texts])
        if ids:
            options.highlighted = ids.index(chosen) if chosen in ids else 0

    def action_select(self) -> None:
        options = self.query_one("#runs", OptionList)
        if self.listing is None or options.highlighted is None:
            return
        row = self.listing.rows[options.highlighted]
        app = self.app
        assert isinstance(app, WatchApp)
        if row.is_group:
            app.open(RunGroup(row.run_dir))
        elif Path(row.run_dir).is_dir():
            app.open(RunDir(row.run_dir))
        else:
            self.notify("this run has not started yet")


class TextScreen(ReadingScreen):
    """Lines to scroll through."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "app.quit", "Quit"),
        Binding("escape", "app.leave", "Back"),
    ]

    def __init__(self, read: Callable[[], object], interval_s: float, at_end: bool = False) -> None:
        super().__init__(read, interval_s)
        self._lines: list[Text] = [Text("reading…", DIM)]
        self._shown: Text | None = None
        self._at_end = at_end

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="scroll"):
            yield Static(id="text")
        yield Footer(compact=True)

    def take(self, result: Any) -> None:
        self._lines = result

    def show(self) -> None:
        scroll = self.query_one("#scroll", VerticalScroll)
        was_at_end = self._at_end and scroll.is_vertical_scroll_end
        lines = [] if self.problem is None else [Text(f"! {self.problem}", BAD)]
        text = Text("\n").join(lines + self._lines)
        if text == self._shown:
            return
        self._shown = text
        self.query_one("#text", Static).update(text)
        if was_at_end:
            scroll.scroll_end(animate=False)


class ConfirmScreen(ModalScreen[bool]):
    """A question before an action."""

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
    """Shows a run, the runs of a group or bench, or the list of runs."""

    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "interrupt", show=False, priority=True),
    ]
    CSS = """
    Screen { background: ansi_default; color: ansi_default; }
    Static { height: auto; background: ansi_default; }
    #body { text-wrap: nowrap; }
    OptionList { height: 1fr; border: none; padding: 0; background: ansi_default; scrollbar-size: 1 1; }
    OptionList:focus { border: none; }
    OptionList > .option-list--option { padding: 0; }
    #scroll { height: 1fr; background: ansi_default; scrollbar-size: 1 1; }
    ConfirmScreen { align: center middle; }
    #question { width: auto; max-width: 76; padding: 1 3; border: round; }
    """

    def __init__(
        self,
        found: RunDir | RunGroup | Bench | None,
        interval_s: float,
        poller: SlurmPoller | None = None,
        clock: Callable[[], datetime] = utc_clock,
    ) -> None:
        super().__init__(ansi_color=True)
        self.clock = clock
        self._found, self._interval_s = found, interval_s
        self._poller = poller or SlurmPoller()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.signal_number: int | None = None

    def on_mount(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self.signal_number is not None:
            self.exit(EXIT_OK)
        self.open(self._found)

    def open(self, found: RunDir | RunGroup | Bench | None) -> None:
        """Show a run, the runs of a group or bench, or the list of runs."""
        if isinstance(found, RunDir):
            self.push_screen(RunScreen(RunSource(found, self._poller, self.clock), self._interval_s))
            return
        source: GroupSource | BenchSource | RunsSource
        listing = _group_listing
        if isinstance(found, RunGroup):
            source = GroupSource(found, self._poller)
        elif found is not None:
            source = BenchSource(found, self._poller)
        else:
            source, listing = RunsSource(self._poller), _runs_listing
        self.push_screen(ListScreen(source.read, self._interval_s, listing))

    def action_leave(self) -> None:
        """Close the screen; the first one leads to the list of runs."""
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

    @contextlib.contextmanager
    def ended_by_signals(self) -> Iterator[None]:
        """A block in which SIGTERM and SIGHUP end the app, which restores the terminal."""
        before = {
            number: signal.signal(number, lambda number, frame: self._end(number))
            for number in (signal.SIGTERM, signal.SIGHUP)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _end(self, number: int) -> None:
        self.signal_number = number
        if number == signal.SIGHUP:
            signal.alarm(HANGUP_S)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.exit, EXIT_OK)


def problem_lines(problem: str | None, width: int) -> list[Text]:
    """What keeps the screen from being complete, in a few lines; none without a problem."""
    if problem is None:
        return []
    return [Text(line, BAD) for line in wrap(f"! {problem}", max(1, width))[:MAX_PROBLEM_LINES]]


def joined(lines: list[Text], width: int) -> Text:
    """Lines as one text, each cut to the width."""
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Text("\n", no_wrap=True).join(lines)


def _runs_listing(result: Any, width: int) -> tuple[Listing, str | None]:
    statuses, num_hidden, problem = result
    return runs_listing(statuses, num_hidden, width, Path.cwd()), problem


def _group_listing(result: Any, width: int) -> tuple[Listing, str | None]:
    status, problem = result
    return group_listing(status, width), problem


def _log_lines(path: Path) -> list[Text]:
    lines, _ = last_lines(path, LOG_LINES)
    texts = [Text(clean(line.decode(errors="replace"))) for line in lines]
    return [Text(str(path), DIM), *(texts or [Text("nothing printed yet", DIM)])]
