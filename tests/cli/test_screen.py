"""Tests the output of `status`, `diagnose` and errors in a terminal: colours, one line per run, any width."""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable

import click
import pytest

from benchmarks.mutated_runs import make_project
from tests.support.said import said
from trainkit.cli.main import main
from trainkit.cli.status import MAX_ENDED_RUNS
from trainkit.function import ARGV
from trainkit.run.registry import register
from trainkit.run.rundir import RunDir
from trainkit.terminal import text_width

RED, YELLOW, GREEN, BOLD = "\x1b[1;31m", "\x1b[33m", "\x1b[32m", "\x1b[1m"
Show = Callable[..., tuple[str, str]]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Return a folder with runs that have finished and failed, and a group."""
    folder = tmp_path / "project"
    make_project(folder, ["finished", "crashed", "sweep"])
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", str(folder / "bin"))
    return folder


@pytest.fixture
def show(monkeypatch, capsys):
    """Return a function that prints a command to a terminal of a given width, or to a pipe."""

    def run(line: str, *, columns: int | None = 100) -> tuple[str, str]:
        for stream in (sys.stdout, sys.stderr):
            monkeypatch.setattr(stream, "isatty", lambda: columns is not None)
        size = os.terminal_size((columns or 80, 24))
        monkeypatch.setattr("shutil.get_terminal_size", lambda *_, **__: size)
        with monkeypatch.context() as environment:
            environment.setenv("NO_COLOR", os.environ.get("NO_COLOR", ""))  # `--no-color` sets it
            main(line.split())
        captured = capsys.readouterr()
        return captured.out, captured.err

    return run


SHOWN = {
    "status": [f"{RED}failed\x1b[0m", f"{GREEN}finished\x1b[0m"],
    "status runs/crashed": [f"state       {RED}failed - ", RED + "rank "],
    "status runs/finished": [f"state       {GREEN}finished - "],
    "status runs/sweep": [f"best        {BOLD}"],
    "compare runs/sweep": [f"{RED}failed\x1b[0m", f"{BOLD}5.4928 at 6\x1b[0m"],
    "diagnose runs/crashed": [f"{RED}attempt ", f"{BOLD}what to do:\x1b[0m"],
}


@pytest.mark.parametrize("line", SHOWN)
def test_states_have_colours_in_a_terminal(project, show, line):
    shown, _ = show(line)
    for text in SHOWN[line]:
        assert text in shown, shown
    # The colours only repeat the words.
    assert click.unstyle(shown) == show(f"--no-color {line}")[0]


@pytest.mark.parametrize("name", ["NO_COLOR", "TERM", "--no-color", "a pipe", "json"])
def test_nobody_gets_colours_who_wants_none(project, show, monkeypatch, name):
    if name in ("NO_COLOR", "TERM"):
        monkeypatch.setenv(name, {"NO_COLOR": "1", "TERM": "dumb"}[name])
    before, after = "--no-color " * (name == "--no-color"), " --json" * (name == "json")
    for line in (*SHOWN, "compare runs/finished runs/crashed", "status nothing", "check"):
        out, err = show(f"{before}{line}{after}", columns=None if name == "a pipe" else 100)
        # In a terminal, an error of --json is the result, so it is printed to stdout.
        assert "\x1b" not in out + err, line
        if name == "json":
            json.loads(out)


def test_an_error_names_its_kind_in_colour(project, show):
    _, said = show("status nothing")
    assert said.startswith(f"{RED}error:\x1b[0m unknown run 'nothing'\n\n{BOLD}hint:\x1b[0m ")
    _, said = show("status \x1b[31mred")
    assert "\x1b[31m" not in said
    assert show("status nothing", columns=None)[1] == click.unstyle(show("status nothing")[1])


NAMES = (
    "short",
    "a-run-with-a-name-that-is-longer-than-the-terminal-is-wide-" * 3,
    "学習率の実験-とても長い名前のもの-もっと長い名前のもの",
    "\x1b[31mred",
    "two\nlines",
    "\N{ROCKET}" * 30,
    "--json",
)


@pytest.mark.parametrize("columns", [80, 100, 120])
@pytest.mark.parametrize("where", ["here", "elsewhere", "both"])
def test_a_run_is_one_line_whatever_its_name(project, show, tmp_path, columns, where):
    here, deep = project / "runs", tmp_path / "a-folder-of-another-project" / "below" / "others" / "runs"
    deep.mkdir(parents=True)
    for index, name in enumerate(NAMES):
        folder = here if where == "here" or (where == "both" and index % 2) else deep
        register(RunDir(shutil.copytree(here / "finished", folder / name)), "small")
    if where == "elsewhere":
        here.rename(tmp_path / "away")
    known = json.loads(show("status --json")[0])
    lines = click.unstyle(show("status --all", columns=columns)[0]).removesuffix("\n").split("\n")
    if where == "elsewhere":
        title, *lines = lines
        assert title.startswith("in /")
        assert title.endswith("/runs:")
    assert len(lines) == 1 + len(known)
    assert all(text_width(line) <= columns for line in lines), lines
    assert lines[0].split()[:2] == ["RUN", "STATE"]
    # A name is shortened in the middle, because similar runs differ at the end of their names.
    assert any(line.startswith("runs/short ") for line in lines) == (where == "here")
    assert any(line.startswith("short ") for line in lines) == (where == "elsewhere")
    at = lines[0].index("STATE")
    states = {run["state"] for run in known if "states" not in run}
    assert sum(_column(line, at).startswith(tuple(states)) for line in lines) >= len(NAMES)


def copy_as_function(project, names):
    for name in names:
        run = RunDir(shutil.copytree(project / "runs" / "finished", project / "runs" / name))
        for file, changes in ((run.plan_file, {"command": [*ARGV]}), (run.job_file, {"name": "work"})):
            file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
        register(run, "work")


def test_the_runs_of_a_function_are_one_line(project, show):
    names = ["work", "work-2", "work-3", "work-4"]
    copy_as_function(project, names)
    (project / "runs" / "work-4" / "attempts" / "001" / "end.json").unlink()
    shown = show("status", columns=120)[0]
    line = next(line for line in shown.splitlines() if line.startswith("runs/work"))
    assert "runs/work (4 runs)" in line
    assert f"{RED}1 died, 3 finished\x1b[0m" in line
    said(shown.splitlines()[-1])
    shown = show("status --all", columns=120)[0]
    rows = [line.split()[0] for line in shown.splitlines() if line.startswith("runs/work")]
    assert rows == [f"runs/{name}" for name in reversed(names)]
    assert len(json.loads(show("status --json")[0])) == len(shown.splitlines()) - 1


def test_many_runs_of_a_function_print_a_warning_once(project, show):
    copy_as_function(project, [f"work-{index}" for index in range(MAX_ENDED_RUNS + 3)])
    sweep = project / "runs" / "sweep" / "sweep.json"
    sweep.write_text(json.dumps({**json.loads(sweep.read_text()), "version": 99}))
    shown, warnings = show("status", columns=120)
    assert f"({MAX_ENDED_RUNS + 3} runs)" in shown
    assert warnings.count("version 99") == 1


def _column(line: str, at: int) -> str:
    """Return the text that begins at a column of a terminal."""
    used = 0
    for index, char in enumerate(line):
        if used >= at:
            return line[index:]
        used += text_width(char)
    return ""


def test_only_the_runs_of_this_folder(project, show, tmp_path, monkeypatch):
    other = RunDir(shutil.copytree(project / "runs" / "finished", tmp_path / "other"))
    register(other, "small")
    (project / "runs" / "link").symlink_to(project / "runs" / "finished")
    outputs = (json.loads(show(f"status --json{option}")[0]) for option in ("", " --here"))
    shown, here = ([run["run_dir"] for run in runs] for runs in outputs)
    assert [folder for folder in shown if folder != str(other.path)] == here
    assert len(here) == len(shown) - 1
    assert str(other.path) in show("status --all", columns=None)[0]
    assert str(other.path) not in show("status --here --all", columns=None)[0]
    assert "other" not in show("status --here --sort loss", columns=None)[0]
    said(show("status finished --here")[1])
    (project / "empty").mkdir()
    monkeypatch.chdir(project / "empty")
    said(show("status --here")[1])


def test_a_long_detail_goes_on_below_its_value(project, show):
    lines = click.unstyle(show("status runs/crashed", columns=80)[0]).splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("state "))
    assert lines[at].startswith("state       failed - a")
    assert lines[at + 1].startswith(" " * 12 + "same failure")
    assert all(text_width(line) <= 80 for line in lines[at:])
    whole = show("status runs/crashed", columns=None)[0]
    assert any(len(line) > 100 for line in whole.splitlines() if line.startswith("state "))


def test_the_reason_of_a_trial_uses_a_wide_terminal(project, show):
    wide, usual = (show("status runs/sweep", columns=columns)[0] for columns in (200, 80))
    assert "would not help" in wide
    assert "would not" not in usual
    assert all(text_width(line) <= 80 for line in click.unstyle(usual).split("\n\n")[1].splitlines())


TABLES = (
    *("status", "status --all --where seed=7", "status runs/sweep", "status runs/bench"),
    *("ckpt ls runs/a-run-with-a-name-that-is-quite-long", "check small.yaml --show-origin"),
    "plan small.yaml --gpu-type h100 --gpus-per-node 8",
    *("compare runs/finished runs/crashed runs/restarted", "drill small.yaml --list"),
    "bench settings small.yaml --sweep train.device_batch_size=1,2 --dry-run",
)
NO_TABLE = ("folder ", "workers_per_node: ")
"""The lines around a table: a path, which is printed in full so that it can be copied, and a sentence."""


def test_a_table_fits_the_terminal(project, show):
    make_project(project / "more", ["restarted", "bench"])
    for name in ("restarted", "bench"):
        (project / "more/runs" / name).rename(project / "runs" / name)
    (project / "runs/finished").rename(project / "runs/a-run-with-a-name-that-is-quite-long")
    (project / "runs/finished").symlink_to("a-run-with-a-name-that-is-quite-long")
    variable = "A_VARIABLE_OF_MINE: /a/rather/long/path/to/something/else"
    (project / "small.yaml").write_text(f"extends: quickstart\nlaunch: {{env: {{{variable}}}}}\n")
    for line in TABLES:
        whole, fitted = (click.unstyle(show(line, columns=columns)[0]) for columns in (None, 80))
        rows = [one for one in fitted.splitlines() if not one.startswith(NO_TABLE)]
        assert rows, line
        assert [one for one in rows if len(one) > 80] == [], fitted
        if not line.startswith("status"):  # a run takes one line, without the least important columns
            assert {*re.sub(r"\s", "", whole)} == {*re.sub(r"\s", "", fitted)}


@pytest.mark.parametrize("columns", [80, 120, 200])
def test_the_keys_of_a_comparison_are_whole(project, show, columns):
    shutil.copytree(project / "runs" / "finished", project / "runs" / "finished-with-another-long-name")
    config = project / "runs" / "finished-with-another-long-name" / "config.yaml"
    config.write_text(config.read_text().replace("device_batch_size: 2", "device_batch_size: 4"))
    runs = "runs/finished runs/crashed runs/finished-with-another-long-name"
    shown = click.unstyle(show(f"compare {runs}", columns=columns)[0])
    assert "\ntrain.device_batch_size  " in shown
    assert all(text_width(line) <= columns for line in shown.splitlines())
