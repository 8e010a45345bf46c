"""Drives `trainkit watch` with Textual's pilot, and compares its screens with stored ones.

``REWRITE_SCREENS=1 pytest tests/capabilities/watch`` writes the screens again.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from rich.text import Text
from textual.pilot import Pilot

from tests.support import watched_runs
from tests.support.groups import make_group
from tests.support.watched_runs import NOW, requeued_job, running_job, unreachable
from trainkit.capabilities.watch.screen import RunScreen, TextScreen, WatchApp, joined
from trainkit.control.cancel import CancelResult
from trainkit.run.files import append_jsonl
from trainkit.run.group import RunGroup, create_task_run
from trainkit.run.record import AttemptRecord, JobRecord, claim_entry
from trainkit.run.registry import register
from trainkit.run.rundir import RunDir
from trainkit.scheduler import JobState
from trainkit.slurm.jobs import SlurmJob

SCREENS = Path(__file__).parent / "screens"
RUNS = {
    "running": (watched_runs.running, running_job),
    "finished": (watched_runs.finished, running_job),
    "preempted": (watched_runs.preempted, requeued_job),
    "failed": (watched_runs.failed, running_job),
    "command": (watched_runs.command, running_job),
    "large": (watched_runs.large, running_job),
    "unreachable": (watched_runs.running, unreachable),
}
SMALL, LARGE = (80, 24), (200, 50)
WIDE = ("running", "failed", "command", "large")
TIMEOUT_S = 20.0
Act = Callable[[Pilot[Any], WatchApp], Awaitable[None]]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def screen_text(app: WatchApp) -> str:
    """Return the text on the screen."""
    return "".join(f"{strip.text.rstrip()}\n" for strip in app.screen._compositor.render_strips())


async def wait_for(pilot: Pilot[Any], is_true: Callable[[], object], what: str) -> None:
    deadline_s = asyncio.get_running_loop().time() + TIMEOUT_S
    while not is_true():
        assert asyncio.get_running_loop().time() < deadline_s, f"{what}:\n{screen_text(pilot.app)}"
        await pilot.pause(0.02)
    await pilot.pause()


async def shows(pilot: Pilot[Any], text: str) -> None:
    await wait_for(pilot, lambda: text in screen_text(pilot.app), f"{text!r} does not show")


def drive(
    found: RunDir | RunGroup | None, act: Act, query: Any = running_job, size: tuple[int, int] = SMALL
) -> WatchApp:
    """Run the app without a terminal while `act` uses it."""
    app = WatchApp(found, 0.2, lambda: NOW)

    async def use() -> None:
        async with app.run_test(size=size, notifications=True) as pilot:
            await act(pilot, app)

    with patch("trainkit.backends.jobs.query_jobs_or_warn", query):
        asyncio.run(use())
    return app


def view_of(app: WatchApp) -> object:
    return isinstance(app.screen, RunScreen) and app.screen.result


@pytest.mark.parametrize(
    ("name", "size"),
    [*((name, SMALL) for name in RUNS), *((name, LARGE) for name in WIDE)],
)
def test_screens(name: str, size: tuple[int, int], folder: Path) -> None:
    make, query = RUNS[name]
    run, seen = make(folder / "runs" / name), []

    async def read(pilot: Pilot[Any], app: WatchApp) -> None:
        await shows(pilot, "── warnings")
        seen.append(screen_text(app))

    drive(run, read, query, size)
    file = SCREENS / f"{name}-{size[0]}x{size[1]}.txt"
    if os.environ.get("REWRITE_SCREENS"):
        file.write_text(seen[0])
    assert seen[0] == file.read_text()
    assert max(map(len, seen[0].splitlines())) <= size[0]


def test_keys_lead_to_texts_and_back(folder: Path) -> None:
    run = watched_runs.large(folder / "runs" / "large")

    async def use(pilot: Pilot[Any], app: WatchApp) -> None:
        await wait_for(pilot, lambda: view_of(app), "no view")
        for key, text in (
            ("n", "node038"),
            ("w", "rank 500"),
            ("l", "step=640/100000"),
            ("d", "nothing failed"),
        ):
            await pilot.press(key)
            await shows(pilot, text)
            assert isinstance(app.screen, TextScreen)
            await pilot.press("escape")
            await wait_for(pilot, lambda: view_of(app), "not back")
        await pilot.press("q")

    assert drive(run, use, size=(80, 50)).return_value == 0


def test_a_metric_fills_the_screen_below_the_numbers(folder: Path) -> None:
    run = watched_runs.running(folder / "runs" / "running")

    async def use(pilot: Pilot[Any], app: WatchApp) -> None:
        await shows(pilot, "step 640 of 2,000")
        before = screen_text(app)
        for key, name in zip("mmmmM", ("loss", "grad norm", "lr", "tokens/s", "lr"), strict=True):
            await pilot.press(key)
            await shows(pilot, f"── {name}, steps ")
            assert screen_text(app).count(", steps ") == 1
        for key in "mm":
            await pilot.press(key)
        await wait_for(pilot, lambda: screen_text(app) == before, "another screen than the first")

    drive(run, use)


def test_all_keys_are_listed(folder: Path) -> None:
    run = watched_runs.running(folder / "runs" / "running")

    async def use(pilot: Pilot[Any], app: WatchApp) -> None:
        await wait_for(pilot, lambda: view_of(app), "no view")
        await pilot.press("question_mark")
        await shows(pilot, "Show the next metric")
        shown = [line.split()[0] for line in screen_text(app).splitlines()[1:] if line.strip()]
        assert shown[:-1] == [*"ldnwcrmMq", "escape", "?"]
        await pilot.press("escape")
        await wait_for(pilot, lambda: view_of(app), "not back")
        await pilot.press("escape")
        await shows(pilot, "1 active, 0 ended")
        await pilot.press("escape", "question_mark")
        await shows(pilot, "enter     Open")

    drive(run, use)


def test_nothing_is_done_without_a_yes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, cancelled = watched_runs.running(folder / "runs" / "running"), []

    def cancel(run: RunDir, **options: Any) -> CancelResult:
        cancelled.append((run.path, options["now"]))
        return CancelResult("cancelling", "4711 is saving", {})

    monkeypatch.setattr("trainkit.capabilities.watch.screen.cancel_run", cancel)

    async def use(pilot: Pilot[Any], app: WatchApp) -> None:
        await wait_for(pilot, lambda: view_of(app), "no view")
        for answer in ("n", "escape"):
            await pilot.press("c")
            await shows(pilot, "Cancel running? The run saves and stops.")
            await pilot.press(answer)
            await wait_for(pilot, lambda: view_of(app), "not back")
        assert cancelled == []
        await pilot.press("c")
        await pilot.press("y")
        await shows(pilot, "4711 is saving")
        assert cancelled == [(run.path, False)]

    drive(run, use)


def test_requeue_says_what_it_did_or_why_it_could_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainkit.control.requeue import Requeued
    from trainkit.errors import UsageError

    run = watched_runs.failed(folder / "runs" / "failed")
    answers: list[object] = [
        Requeued(JobRecord(), AttemptRecord(3, "4712"), True),
        UsageError("4711 is already pending"),
        UsageError("runs/[/b] cannot be read"),  # the text contains no markup
    ]

    def requeue(run: RunDir) -> object:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("trainkit.control.requeue.requeue_run", requeue)

    async def use(pilot: Pilot[Any], app: WatchApp) -> None:
        await wait_for(pilot, lambda: view_of(app), "no view")
        for text in ("started attempt 3 as 4712", "4711 is already pending", "runs/[/b] cannot be read"):
            await pilot.press("r")
            await pilot.press("y")
            await shows(pilot, text)

    drive(run, use)


def test_a_list_opens_runs_and_comes_from_a_run(folder: Path) -> None:
    for name in ("running", "failed"):
        run = RUNS[name][0](folder / "runs" / name)
        register(run, name)

    async def use(pilot: Pilot[Any], app: WatchApp) -> None:
        await shows(pilot, "1 active, 1 ended")
        lines = [line.split() for line in screen_text(app).splitlines() if line.startswith(" runs/")]
        assert [[*line[:2], line[6]] for line in lines] == [
            ["runs/running", "running", "640/2000"],
            ["runs/failed", "failed", "280/2000"],
        ]
        await pilot.press("down", "enter")
        await shows(pilot, "OutOfMemoryError")
        await pilot.press("escape")
        await shows(pilot, "1 active, 1 ended")

    drive(None, use)


def test_a_folder_that_is_deleted(folder: Path) -> None:
    run = watched_runs.finished(folder / "runs" / "finished")

    async def use(pilot: Pilot[Any], app: WatchApp) -> None:
        await wait_for(pilot, lambda: view_of(app), "no view")
        # renamed at once, because the app could read half of a folder during its deletion
        run.path.rename(folder / "deleted")
        # The message wraps at a column that depends on the length of the path.
        message = "cannot be read: No such file or directory; the screen shows the state at"
        await wait_for(pilot, lambda: message in " ".join(screen_text(app).split()), "no message")
        await shows(pilot, "step 600 of 600")

    drive(run, use, size=(120, 30))


def test_a_sweep_is_one_line_and_opens(folder: Path) -> None:
    group = make_group(folder, {index: {"optimizer.lr": 0.1 * (index + 1)} for index in range(30)}, "12")
    register(RunDir(group.path), "small")

    def query(ids: Sequence[str], warn: Callable[[str], None]) -> dict[str, SlurmJob]:
        return {job_id: SlurmJob(job_id, JobState.PENDING, reason="Priority") for job_id in ids}

    async def use(pilot: Pilot[Any], app: WatchApp) -> None:
        await shows(pilot, "30 pending")
        await pilot.press("enter")
        await shows(pilot, "small: 30 runs: 30 pending")
        heading = next(line for line in screen_text(app).splitlines() if line.startswith(" TRIAL"))
        assert heading.split() == ["TRIAL", "STATE", "LR", "LAST", "LOSS", "REASON"]
        await pilot.press("ctrl+end")
        await shows(pilot, " 29     pending")
        await pilot.press("enter")
        await shows(pilot, "this run has not started yet")
        await pilot.press("escape")
        await shows(pilot, "1 active, 0 ended")

    drive(None, use, query)


def test_the_metric_that_ranks_a_group_is_switched(folder: Path) -> None:
    group = make_group(folder, {index: {"seed": index} for index in range(2)}, "12")
    for index in range(2):
        run = group.run(index)
        create_task_run(run)
        claim_entry(run, 1, 1)
        for name, value in (("loss", 1.0 + index), ("accuracy", 0.5)):
            append_jsonl(run.metrics_file, {"step": 3, "attempt": 1, name: value})

    async def use(pilot: Pilot[Any], app: WatchApp) -> None:
        await shows(pilot, "LAST LOSS")
        for key, heading in zip(
            "mmmM", ("BEST ACCURACY (max)", "LAST LOSS", "LAST LOSS", "LAST LOSS"), strict=True
        ):
            await pilot.press(key)
            await shows(pilot, heading)
        await pilot.press("M")
        await shows(pilot, "BEST ACCURACY (max)")
        await pilot.press("question_mark")
        await shows(pilot, "Rank the runs by the next metric")

    drive(RunGroup(group.path), use)


def test_no_run_yet(folder: Path) -> None:
    async def use(pilot: Pilot[Any], app: WatchApp) -> None:
        await shows(pilot, "no runs yet: `trainkit submit` starts a run")
        await pilot.press("enter")

    drive(None, use)


def test_no_line_controls_the_terminal() -> None:
    assert joined([Text("a\x1b]0;xb\u202ec\x9bd")], 80).plain == "a�]0;xb�c�d"
