"""Tests a run whose loss is NaN or infinite: commands name the first such step, and the run is never best."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
from pathlib import Path

import pytest
from steering import unpack_live_run

from tests.golden.__main__ import HERE as GOLDEN
from tests.golden.__main__ import unpack_run
from trainkit.cli.main import main
from trainkit.run.events import diverged_since, training_curve
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
    live = unpack_live_run(GOLDEN / "folders" / "finished", folder)
    diverge(live, 5)
    sweep = unpack_run(GOLDEN / "folders" / "sweep", folder, host)
    diverge(sweep / "2", 3)
    return folder


SINCE_4, SINCE_5 = "diverged since step 4", "diverged since step 5"
SAID = {
    "status": ("runs/finished  finished ", f"6/6   {SINCE_4}  3,450"),
    "status finished": (f"finished - {SINCE_4}; all", f"\nloss        {SINCE_4}\n"),
    "status live": (f"running - {SINCE_5}\n", f"\nloss        {SINCE_5}\n"),
    "status finished --json": ('"diverged_since": 4,',),
    "watch finished --once": (f"Finished: {SINCE_4}; all", f"loss       {SINCE_4}"),
    "watch live --once": (f", {SINCE_5}.", f"loss       {SINCE_5}"),
    "diagnose finished": ("attempt 1 finished: The loss was NaN", f"\n{SINCE_4}: "),
    "diagnose live": ("attempt 1 running: The loss was NaN", f"\n{SINCE_5}: "),
    "logs finished": (f"\nwarning: {SINCE_4}\n",),
    "logs finished -f": (f"\nfinished: {SINCE_4}; all workers finished\n",),
    "compare finished sweep/0": (SINCE_4,),
    "status sweep": (
        *("BEST VAL_LOSS", "0.01   -              diverged since step 3; all", "best        trial 0 ("),
    ),
    "diagnose sweep/1": ("diverged since step 2: loss or gradient was not finite in 5",),
}


@pytest.mark.parametrize("line", SAID)
def test_it_is_said_everywhere(project, monkeypatch, line):
    monkeypatch.chdir(project)
    code, text = typed(f"trainkit {line}")
    assert code == 0
    assert [part for part in SAID[line] if part not in text] == [], text


@pytest.mark.parametrize(
    ("run", "text"), [("finished", f"<b>{SINCE_4}</b>"), ("sweep", "<td>diverged since step 3; all")]
)
def test_the_page_says_it(project, monkeypatch, run, text):
    monkeypatch.chdir(project)
    assert typed(f"trainkit report {run} --out ../{run}.html")[0] == 0
    page = (project.parent / f"{run}.html").read_text()
    assert text in page
    assert page.count(" (best)<td") == 1


def test_it_has_no_best_value(project, monkeypatch):
    monkeypatch.chdir(project)
    compared = json.loads(typed("trainkit compare finished sweep/0 --json")[1])["runs"]
    assert [run["best_val_loss"] is None for run in compared] == [True, False]
    trials = json.loads(typed("trainkit status sweep --json")[1])["points"]
    assert [trial["best"] is None for trial in trials] == [False, True, True]
    assert [trial["diverged_since"] for trial in trials] == [None, 2, 3]


@pytest.mark.parametrize(
    ("records", "attempt", "since"),
    [
        *(("", 1, None), ("1:1.0 1:2.0", 1, None), ("1:1.0 1:- 1:-", 1, 2)),
        ("1:- 1:2.0", 1, None),  # the loss is finite again
        *(("1:1.0 1:- 1:2.0 1:-", 1, 4), ("1:1.0 1:Infinity 1:1e999", 1, 2)),
        ("1:1.0 1:NaN 1:acc", 1, 2),  # one record has no loss
        ("1:1.0 1:-", 2, None),  # the new attempt has no step yet
        ("1:1.0 1:-", None, 2),
        ("1:1.0 1:- 1:- 2@2:- 2:-", 2, 2),  # one step was computed twice
        *(("1:1.0 1:2.0 1:3.0 2@2:- 2:-", 2, 2), ("1:1.0 1:'text'", 1, None)),
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
