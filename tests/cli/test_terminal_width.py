"""Tests that every command fits its table to a terminal, and does not change it in a pipe."""

import os
import re
import sys

import pytest

from benchmarks.mutated_runs import make_project
from trainkit.cli.main import main
from trainkit.formats import table

COMMANDS = (
    *("status", "status --all --where optimizer.lr=0.1", "status runs/sweep", "status runs/bench"),
    *("ckpt ls runs/a-run-with-a-name-that-is-quite-long", "check small.yaml --show-origin"),
    "plan small.yaml --gpu-type h100 --gpus-per-node 8",
    *("compare runs/finished runs/crashed runs/restarted", "drill small.yaml --list"),
    "bench settings small.yaml --sweep train.device_batch_size=1,2 --dry-run",
)

NO_TABLE = ("folder ", "workers_per_node: ")
"""The lines around a table: a path, which is printed in full so that it can be copied, and a sentence."""


@pytest.mark.parametrize("line", COMMANDS)
def test_a_table_fits_the_terminal(tmp_path, monkeypatch, capsys, line):
    project = tmp_path / "project"
    make_project(project, ["finished", "crashed", "restarted", "sweep", "bench"])
    (project / "runs" / "finished").rename(project / "runs" / "a-run-with-a-name-that-is-quite-long")
    (project / "runs" / "finished").symlink_to("a-run-with-a-name-that-is-quite-long")
    (project / "small.yaml").write_text(
        "extends: quickstart\nlaunch: {env: {A_VARIABLE_OF_MINE: /a/rather/long/path/to/something/else}}\n"
    )
    monkeypatch.chdir(project)
    monkeypatch.setenv("PATH", f"{project / 'bin'}")
    texts = []
    for is_terminal in (False, True):
        monkeypatch.setattr(sys.stdout, "isatty", lambda is_terminal=is_terminal: is_terminal)
        monkeypatch.setattr("shutil.get_terminal_size", lambda *_, **__: os.terminal_size((80, 24)))
        code = main(line.split())
        out, err = capsys.readouterr()
        assert code in (0, 1), err
        texts.append(re.sub(r"\x1b\[[0-9;]*m", "", out))
    whole, fitted = texts
    lines = [one for one in fitted.splitlines() if not one.startswith(NO_TABLE)]
    too_long = [one for one in lines if len(one) > 80]
    assert too_long == [], fitted
    if line.startswith("status"):  # a run takes one line, and the least important columns are omitted
        return
    words = [re.sub(r"\s", "", text) for text in (whole, fitted)]
    assert sorted(set(words[0])) == sorted(set(words[1]))


def test_narrow_columns_wrap_and_more_columns_follow_below():
    rows = [["run", "where", "n"], ["a", "/one/two/three/four/five", "1"]]
    assert table(rows, fit=80) == table(rows)
    wrapped = "run  where           n\na    /one/two/three  1\n     /four/five"
    assert table(rows, right=[2], fit=22) == wrapped
    many = [[f"head-{index}" for index in range(6)], ["key", *"12345"]]
    first, second = "head-0  head-1  head-2\nkey     1       2", "head-0  head-3  head-4\nkey     3       4"
    assert table(many, fit=24) == f"{first}\n\n{second}\n\nhead-0  head-5\nkey     5"
