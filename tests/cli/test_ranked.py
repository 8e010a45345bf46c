"""Tests `--metric` and `--sort` of `trainkit status` and `trainkit compare`."""

from __future__ import annotations

import csv
import io
import json
import os

import pytest

import trainkit
from tests.golden.__main__ import HERE as GOLDEN
from tests.golden.__main__ import unpack_run
from tests.support.said import said
from trainkit.cli.main import main
from trainkit.run.rundir import RunDir

ACCURACIES = {"0": [0.5, 0.75, 0.7], "1": [], "2": [0.25, 0.5]}


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """Return a folder with a sweep of one failed and two finished trials, which log an accuracy."""
    sweep = unpack_run(GOLDEN / "folders" / "sweep", tmp_path, os.uname().nodename)
    for index, values in ACCURACIES.items():
        file = RunDir(sweep / index).metrics_file
        lines = file.read_text().splitlines()
        for place, value in enumerate(values):
            lines[place] = json.dumps({**json.loads(lines[place]), "acc": value})
        file.write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(sweep.parent)
    return sweep


def trials(out: str) -> list[list[str]]:
    """Return the rows of a table of trials, with its heading."""
    return [line.split() for line in out.split("\n\n")[-1].splitlines()]


@pytest.mark.parametrize(
    ("options", "heading", "order"),
    [
        ("", "TRIAL STATE LR BEST VAL_LOSS REASON", "120"),
        ("--metric acc", "TRIAL STATE LR BEST ACC (max) REASON", "102"),
        ("--metric loss", "TRIAL STATE LR LAST LOSS REASON", "120"),
        ("--sort acc", "TRIAL STATE LR BEST ACC (max) REASON", "021"),
        ("--sort acc --metric acc", "TRIAL STATE LR BEST ACC (max) REASON", "021"),
        ("--sort val_loss", "TRIAL STATE LR BEST VAL_LOSS REASON", "201"),
        ("--sort STEP", "TRIAL STATE STEP LR BEST VAL_LOSS REASON", "012"),
        ("--sort AGE --metric acc", "TRIAL STATE AGE LR BEST ACC (max) REASON", "012"),
        ("--sort trial", "TRIAL STATE LR BEST VAL_LOSS REASON", "012"),
        ("--sort State", "TRIAL STATE LR BEST VAL_LOSS REASON", "102"),
        ("--sort LR", "TRIAL STATE LR BEST VAL_LOSS REASON", "021"),
        ("--sort optimizer.lr", "TRIAL STATE LR BEST VAL_LOSS REASON", "021"),
    ],
)
def test_status_of_a_group(prints, options, heading, order):
    first, *rows = trials(prints(["status", "sweep", *options.split()]).out)
    assert " ".join(first) == heading
    assert "".join(row[0] for row in rows) == order


def test_what_does_not_have_it_has_no_value(prints):
    out = prints(["status", "sweep", "--metric", "acc"]).out
    said("\n".join(line for line in out.splitlines() if line.startswith("best ")))
    assert [row[3] for row in trials(out)[1:]] == ["-", "0.7500", "0.5000"]


def test_status_as_json(prints):
    value = json.loads(prints(["status", "sweep", "--sort", "acc", "--json"]).out)
    assert (value["metric"], value["mode"], value["best"]["index"]) == ("acc", "max", 0)
    assert [trial["index"] for trial in value["points"]] == [0, 2, 1]
    assert value["points"][0]["best"] == {"metric": "acc", "value": 0.75, "step": 2}
    found = [(one["metric"], one["mode"]) for one in json.loads(prints(["status", "--json"]).out)]
    assert found in ([], [("val_loss", "min")])


def test_status_of_a_run(capsys, prints):
    assert main(["status", "sweep/0", "--metric", "acc"]) == 0
    said("\n".join(line for line in capsys.readouterr().out.splitlines() if line.startswith("best acc")))
    value = json.loads(prints(["status", "sweep/0", "--metric", "acc", "--json"]).out)
    assert (value["metric"], value["mode"], value["result"]["value"]) == ("acc", "max", 0.75)
    assert main(["status", "sweep/1", "--metric", "loss"]) == 0
    said("\n".join(line for line in capsys.readouterr().out.splitlines() if line.startswith("last loss")))


@pytest.mark.parametrize(
    ("options", "heading", "order"),
    [
        *(("", "BEST VAL_LOSS", "201"), ("--metric acc", "BEST ACC (max)", "021")),
        *(("--metric acc --sort acc", "BEST ACC (max)", "021"), ("--sort acc", "BEST ACC (max)", "021")),
        *(("--sort val_loss", "BEST VAL_LOSS", "201"), ("--sort loss", "BEST VAL_LOSS", "201")),
        *(("--sort lr", "BEST VAL_LOSS", "021"), ("--sort State", "BEST VAL_LOSS", "102")),
    ],
)
def test_compare(prints, options, heading, order):
    figures = prints(["compare", "sweep", *options.split()]).out.split("\n\n")[0].splitlines()
    assert f"  {heading}  " in figures[0]
    assert "".join(line.split()[0] for line in figures[1:]) == order


def test_compare_for_programs(prints):
    value = json.loads(prints(["compare", "sweep", "--sort", "acc", "--json"]).out)
    assert (value["metric"], value["mode"]) == ("acc", "max")
    results = [(run["result"], run["result_step"]) for run in value["runs"]]
    assert results == [(0.75, 2), (0.5, 2), (None, None)]
    rows = list(csv.DictReader(io.StringIO(prints(["compare", "sweep", "--sort", "acc", "--csv"]).out)))
    figures = [(row["metric"], row["result"], row["optimizer.lr"]) for row in rows]
    assert figures == [("acc", "0.75", "0.001"), ("acc", "0.5", "0.01"), ("acc", "", "1e+30")]


def test_what_is_refused(prints):
    for typed in (
        *("status sweep --metric ac", "status sweep --sort stpe", "status sweep --sort seed"),
        *("status sweep --metric acc --sort lor", "status sweep/0 --sort step"),
        *("status sweep/0 --metric nope", "status --metric acc", "status sweep --tag x --metric acc"),
        *("compare sweep --metric ac", "compare sweep --sort stat"),
        "compare sweep --metric acc --curves loss",
    ):
        out, err = prints(typed.split(), code=2)
        assert out == ""
        said(err)


def test_from_python(project):
    group = trainkit.Group(project)
    assert [str(group.best().path.name), group.best("acc").path.name] == ["2", "0"]
    with pytest.raises(trainkit.UsageError, match="no run has logged f1"):
        group.best("f1")
