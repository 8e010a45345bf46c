"""Tests a run whose loss is NaN or infinite: commands name the first such step, and the run is never best."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
from pathlib import Path

import pytest

from tests.golden.__main__ import HERE as GOLDEN
from tests.golden.__main__ import unpack_run
from trainkit.cli.main import main
from trainkit.run.events import diverged_since, training_curve
from trainkit.run.process import ProcessId
from trainkit.run.rundir import RunDir


def typed(line: str) -> tuple[int, str]:
    """Return the exit code of a command and its output."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        return main(shlex.split(line)[1:]), out.getvalue()


def diverge(run: Path, since: int) -> None:
    """Set the losses of a recorded run to null from a step on."""
    records = training_curve(RunDir(run))
    lines = [dict(item.values) | ({"loss": None} if item.step >= since else {}) for item in records]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Return a folder with a finished run, a running one, and a sweep whose best trial has diverged."""
    folder = tmp_path_factory.mktemp("project")
    host = os.uname().nodename
    diverge(unpack_run(GOLDEN / "folders" / "finished", folder, host), 4)
    live = unpack_run(GOLDEN / "folders" / "finished", folder / "live", host).rename(folder / "runs" / "live")
    job, own = json.loads((live / "job.json").read_text()), ProcessId.of(os.getpid())
    job["attempts"][0].update(pid=own.pid, boot_id=own.boot_id, start_ticks=own.start_ticks)
    (live / "job.json").write_text(json.dumps(job))
    (live / "attempts/001/end.json").unlink()
    diverge(live, 5)
    sweep = unpack_run(GOLDEN / "folders" / "sweep", folder, host)
    diverge(sweep / "2", 3)
    return folder


@pytest.mark.parametrize(
    ("line", "code", "found"),
    [
        ("status", 0, ("runs/finished  finished ", "6/6   diverged since step 4  3,450")),
        (
            "status finished",
            0,
            ("finished - diverged since step 4; all", "\nloss        diverged since step 4\n"),
        ),
        ("status live", 0, ("running - diverged since step 5\n", "\nloss        diverged since step 5\n")),
        ("status finished --json", 0, ('"diverged_since": 4,',)),
        (
            "watch finished --once",
            0,
            ("Finished: diverged since step 4; all", "loss       diverged since step 4"),
        ),
        ("watch live --once", 0, (", diverged since step 5.", "loss       diverged since step 5")),
        ("diagnose finished", 0, ("attempt 1 finished: The loss was NaN", "\ndiverged since step 4: ")),
        ("diagnose live", 0, ("attempt 1 running: The loss was NaN", "\ndiverged since step 5: ")),
        ("logs finished", 0, ("\nwarning: diverged since step 4\n",)),
        ("logs finished -f", 0, ("\nfinished: diverged since step 4; all workers finished\n",)),
        ("compare finished sweep/0", 0, ("diverged since step 4",)),
        (
            "status sweep",
            0,
            ("BEST VAL_LOSS", "0.01   -              diverged since step 3; all", "best        trial 0 ("),
        ),
        ("diagnose sweep/1", 0, ("diverged since step 2: loss or gradient was not finite in 5",)),
    ],
)
def test_it_is_said_everywhere(project, monkeypatch, line, code, found):
    monkeypatch.chdir(project)
    exit_code, text = typed(f"trainkit {line}")
    assert exit_code == code
    for part in found:
        assert part in text, text


@pytest.mark.parametrize("run", ["finished", "sweep"])
def test_the_page_says_it(project, monkeypatch, run):
    monkeypatch.chdir(project)
    assert typed(f"trainkit report {run} --out ../{run}.html")[0] == 0
    page = (project.parent / f"{run}.html").read_text()
    assert {"finished": "<b>diverged since step 4</b>", "sweep": "<td>diverged since step 3; all"}[
        run
    ] in page
    assert page.count(" (best)<td") == 1


def test_it_has_no_best_value(project, monkeypatch):
    monkeypatch.chdir(project)
    compared = json.loads(typed("trainkit compare finished sweep/0 --json")[1])["runs"]
    assert [run["best_val_loss"] is None for run in compared] == [True, False]
    trials = json.loads(typed("trainkit status sweep --json")[1])["points"]
    assert [(trial["best"] is None, trial["diverged_since"]) for trial in trials] == [
        (False, None),
        (True, 2),
        (True, 3),
    ]


@pytest.mark.parametrize(
    ("records", "attempt", "since"),
    [
        ("", 1, None),
        ("1:1.0 1:2.0", 1, None),
        ("1:1.0 1:- 1:-", 1, 2),
        ("1:- 1:2.0", 1, None),  # the loss is finite again
        ("1:1.0 1:- 1:2.0 1:-", 1, 4),
        ("1:1.0 1:Infinity 1:1e999", 1, 2),
        ("1:1.0 1:NaN 1:acc", 1, 2),  # one record has no loss
        ("1:1.0 1:-", 2, None),  # the new attempt has no step yet
        ("1:1.0 1:-", None, 2),
        ("1:1.0 1:- 1:- 2@2:- 2:-", 2, 2),  # one step was computed twice
        ("1:1.0 1:2.0 1:3.0 2@2:- 2:-", 2, 2),
        ("1:1.0 1:'text'", 1, None),
    ],
)
def test_since_when(tmp_path, records, attempt, since):
    """Each record is ATTEMPT:LOSS, or ATTEMPT@STEP:LOSS if the steps go back."""
    step = 0
    for record in records.split():
        head, _, loss = record.partition(":")
        number, _, at = head.partition("@")
        step = int(at) if at else step + 1
        value = '"accuracy": 1' if loss == "acc" else f'"loss": {loss.replace("-", "null")}'.replace("'", '"')
        with (tmp_path / "metrics.jsonl").open("a") as stream:
            stream.write(f'{{"step": {step}, "attempt": {number}, {value}}}\n')
    assert diverged_since(RunDir(tmp_path), attempt) == since
