"""Tests of `trainkit compare` on made-up run folders."""

import csv
import io
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.benches import made_up_bench, train_made_up
from tests.support.said import said
from tests.support.sweeps import made_up_sweep, train_made_up_point
from trainkit.backends import jobs
from trainkit.capabilities.report.curves import curves
from trainkit.cli.main import main
from trainkit.config import RunConfig
from trainkit.observe.group import GroupStatus, TrialStatus, sorted_trials
from trainkit.run.files import write_json
from trainkit.run.rundir import RunDir


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a folder with a sweep of six trials, and a Slurm that cannot be queried."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jobs, "query_jobs_or_warn", lambda ids, warn: None)
    made_up_sweep(tmp_path / "mine", {"optimizer.lr": [1e-4, 3e-4], "seed": [0, 1, 2]}, failed=2)
    for index in range(6):
        config = tmp_path / "mine" / str(index) / "config.yaml"
        config.write_text(config.read_text().replace("seed: 0\n", f"seed: {index}\n"))
    return tmp_path


def json_of(capsys: pytest.CaptureFixture[str], *names: str) -> Any:
    assert main(["compare", *names, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def rows_of(capsys: pytest.CaptureFixture[str], *names: str) -> list[dict[str, str]]:
    assert main(["compare", *names, "--csv"]) == 0
    return list(csv.DictReader(io.StringIO(capsys.readouterr().out)))


def test_two_runs_and_the_keys_that_differ(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "mine/0", "mine/2"]) == 0
    figures, differences, _ = capsys.readouterr().out.split("\n\n")
    heading, first, second = (line.split() for line in figures.splitlines())
    assert heading[:4] == ["RUN", "STATE", "STEP", "LOSS"]
    assert first[:3] == ["0", "finished", "20"]
    assert second[:3] == ["2", "failed", "20"]
    assert [line.split() for line in differences.splitlines()] == [["0", "2"], ["seed", "0", "2"]]


def test_a_slow_last_step_is_not_the_speed_of_a_run(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = place / "mine/0/metrics.jsonl"
    *lines, last = metrics.read_text().splitlines()
    before = json.loads(last)["tokens_per_s"]
    metrics.write_text("\n".join([*lines, json.dumps({**json.loads(last), "tokens_per_s": 1.0})]) + "\n")
    assert json_of(capsys, "mine/0", "mine/1")["runs"][0]["tokens_per_s"] > before / 2


def test_a_parameter_may_be_called_like_a_figure(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    group = made_up_sweep(place / "odd", {"loss": [3, 1, 2]})
    rows = rows_of(capsys, "odd", "--sort", "loss")
    assert [row["values.loss"] for row in rows] == ["1", "2", "3"]
    assert all("." in row["loss"] for row in rows)
    points = [
        TrialStatus(index, {"step": value}, "finished", None, None, None, "", step=index)
        for index, value in enumerate([3, 1, 2])
    ]
    status = GroupStatus("odd", str(group.path), None, "", ["step"], None, None, None, points)
    assert [point.index for point in sorted_trials(status, "step")] == [1, 2, 0]


def test_a_group_stands_for_its_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "mine"]) == 0
    figures, differences, _ = capsys.readouterr().out.split("\n\n")
    runs = ["1", "4", "0", "2", "3", "5"]  # by their last losses
    assert [line.split()[0] for line in figures.splitlines()] == ["RUN", *runs]
    assert [line.split() for line in differences.splitlines()] == [["seed"], *([run, run] for run in runs)]


def test_the_runs_of_a_group_are_ranked_and_the_best_is_bold(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[list[float | None]] = [[0.2], [0.1], [0.1], [None], [], [0.3]]  # None: the run has diverged
    for index, losses in enumerate(logged):
        records = [{"step": 9, "attempt": 1, "loss": loss} for loss in losses]
        (place / "mine" / str(index) / "metrics.jsonl").write_text(
            "".join(f"{json.dumps(record)}\n" for record in records)
        )
    with monkeypatch.context() as patched:
        patched.setattr(sys.stdout, "isatty", lambda: True)
        patched.setenv("NO_COLOR", "")
        assert main(["compare", "mine"]) == 0
    figures = capsys.readouterr().out.split("\n\n")[0].splitlines()[1:]
    assert [line.split()[0] for line in figures] == ["1", "2", "0", "5", "3", "4"]
    assert ["\x1b[1m0.1000 at 9" in line for line in figures] == [True, *[False] * 5]
    order = [str(index) for index in range(6)]
    assert [run["run"] for run in json_of(capsys, "mine")["runs"]] == order
    assert main(["compare", *(f"mine/{index}" for index in order)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:7]] == order


def test_json_and_csv_have_the_same_values(capsys: pytest.CaptureFixture[str]) -> None:
    value = json_of(capsys, "mine/1", "mine")
    assert value["differ"] == ["seed"]
    assert [run["run"] for run in value["runs"]] == ["1", "0", "2", "3", "4", "5"]
    for row, run in zip(rows_of(capsys, "mine/1", "mine"), value["runs"], strict=True):
        assert (row["state"], row["run_dir"]) == (run["state"], run["run_dir"])
        assert row["seed"] == str(run["values"]["seed"])
        assert float(row["allocated_s"]) == run["allocated_s"] > 0


def test_the_same_config_and_a_single_run(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_up_sweep(place / "other", {"optimizer.lr": [1e-4]})
    assert main(["compare", "mine/0", "other/0"]) == 0
    out = capsys.readouterr().out
    assert "mine/0" in out
    said(out.splitlines()[-1])
    assert main(["compare", "mine/0", "mine/0"]) == 2
    said(capsys.readouterr().err)


def made(folder: Path, config: dict[str, object], command: list[str] | None = None, **values: object) -> None:
    """Create a run that has ended, of the trainer or of a COMMAND."""
    run = RunDir(folder)
    train_made_up_point(run, RunConfig.model_validate({"name": "made", **config}), 3, 1.0, 0, False)
    write_json(run.plan_file, {"command": command})
    if values:
        write_json(run.values_file, values)


def differences(capsys: pytest.CaptureFixture[str], *names: str) -> dict[str, list[str]]:
    """Return the rows of the table of the keys that differ."""
    assert main(["compare", *names]) == 0
    _, *rows = capsys.readouterr().out.split("\n\n")[1].splitlines()
    return {cells[0]: cells[1:] for cells in (re.split(r" {2,}", row) for row in rows)}


def script(*more: str, env: dict[str, str] | None = None, **config: object) -> dict[str, Any]:
    if env:
        config["launch"] = {"env": env}
    return {"config": config, "command": ["python", "a.py", *more]}


def function(**values: object) -> dict[str, Any]:
    return {"config": {}, "command": ["python", "-m", "trainkit.function"], **values}


TASK = {"config": {"task": "ring.py:Ring", "optimizer": {"lr": 0.01}}}
DIFFERENCES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, list[str]]]] = {
    "a command has no keys of the trainer": (
        script(),
        TASK,
        {"COMMAND": ["python a.py", "-"], "optimizer.lr": ["-", "0.01"], "task": ["-", "ring.py:Ring"]},
    ),
    "the words of a command": (
        script(),
        script("--lr", "1e-4", seed=3),
        {"COMMAND": ["python a.py", "python a.py --lr 1e-4"]},
    ),
    "variables and secrets": (
        script(env={"A": "1", "API_KEY": "abc123def"}),
        script(env={"A": "2"}),
        {"launch.env.A": ["1", "2"], "launch.env.API_KEY": ["***", "-"]},
    ),
    # A config key that takes text has versions, a sweep has numbers.
    "text that looks like a number": (
        script(env={"PYTHON": "3.10", "LR": "1e-1"}),
        script(env={"PYTHON": "3.1", "LR": "0.1"}),
        {"launch.env.PYTHON": ["3.10", "3.1"]},
    ),
    "numbers as text": (
        function(lr="1e-4", width="0.10", device="a"),
        function(lr=0.0001, width="0.1", device="b"),
        {"device": ["a", "b"]},
    ),
    "values of one run": (function(lr="1e-4"), function(width=3), {"lr": ["1e-4", "-"], "width": ["-", "3"]}),
    "names of digits": (function(run="007"), function(run="7"), {"run": ["007", "7"]}),
    "a command and a function": (
        script(),
        function(lr=0.1),
        {"COMMAND": ["python a.py", "-"], "lr": ["-", "0.1"]},
    ),
}
"""Maps a kind of two runs to the runs and the values that differ."""


@pytest.mark.parametrize("kind", DIFFERENCES)
def test_runs_of_two_kinds(place: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    one, other, expected = DIFFERENCES[kind]
    made(place / "one", **one)
    made(place / "other", **other)
    assert differences(capsys, "one", "other") == expected
    assert json_of(capsys, "one", "other")["differ"] == list(expected)


def test_numbers_are_numbers_where_programs_read_them(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for index, lr in enumerate(("0.1", "0.01", "1e-3")):
        made(place / f"run{index}", **function(lr=lr))
    names = [f"run{index}" for index in range(3)]
    assert [run["values"]["lr"] for run in json_of(capsys, *names)["runs"]] == [0.1, 0.01, 0.001]
    assert [row["lr"] for row in rows_of(capsys, *names)] == ["0.1", "0.01", "0.001"]
    assert list(dict.fromkeys(curves(*names)["lr"])) == [0.1, 0.01, 0.001]
    (legend,) = curves(*names).plot().legends
    assert [text.get_text() for text in legend.get_texts()] == ["lr=1e-3", "lr=0.01", "lr=0.1"]  # as typed


def test_a_bench(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = made_up_bench(place / "bench")
    for item in bench.runs:
        train_made_up(bench.run_dir(item))
    runs = json_of(capsys, "bench")["runs"]
    assert [run["run_dir"] for run in runs] == [str(bench.run_dir(item).path) for item in bench.runs]


def test_a_config_that_cannot_be_read(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "mine" / "0" / "config.yaml").write_text("{")
    assert main(["compare", "mine/0", "mine/1", "mine/2"]) == 0
    shown = capsys.readouterr()
    figures, differences, _ = shown.out.split("\n\n")
    said(shown.err)
    assert [line.split()[0] for line in figures.splitlines()] == ["RUN", "0", "1", "2"]
    assert [line.split() for line in differences.splitlines()] == [["1", "2"], ["seed", "1", "2"]]
    assert main(["compare", "mine/0", "mine/1"]) == 0
    said(capsys.readouterr().out.splitlines()[-1])


def test_curves_go_into_a_table_and_a_figure(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["compare", "mine", "--curves", "loss,grad_norm", "--smooth", "0.5"]
    assert main([*argv, "--csv", "curves.csv", "--plot", "losses.svg"]) == 0
    assert capsys.readouterr().out == "curves.csv\nlosses.svg\n"
    rows = list(csv.DictReader((place / "curves.csv").open()))
    assert len(rows) == 6 * 20
    assert set(rows[0]) == {"run", "seed", "step", "tokens", "time_s", "gpu_hours", "loss", "grad_norm"}
    assert "training loss" in (place / "losses.svg").read_text()


def test_a_figure_of_an_unfinished_sweep_says_what_is_missing(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(place / "mine" / "5")
    (place / "mine" / "4" / "metrics.jsonl").write_text("")
    for index in (3, 4):
        (place / "mine" / str(index) / "attempts" / "latest" / "end.json").unlink()
    argv = ["compare", "mine", "--curves", "loss", "--plot", "losses.svg", "--csv", "losses.csv"]
    assert main(argv) == 0
    notes = ["note: 2 of 6 trials have no values of loss yet", "note: 3 of 6 trials have not ended yet"]
    assert capsys.readouterr().err.splitlines() == notes
    assert main(["compare", "mine", "--csv"]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == notes[1]
    assert main(["compare", "mine/0", "mine/1", "--csv"]) == 0
    assert capsys.readouterr().err == ""


def test_a_figure_can_be_drawn_again(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["compare", "mine", "--curves", "loss", "--plot", "losses.svg", "--csv", "losses.csv"]
    assert main(argv) == 0
    files = [place / "losses.svg", place / "losses.csv"]
    first = [file.read_bytes() for file in files]
    for file in files:
        file.write_text("old")
        file.chmod(0o664)
    assert main(argv) == 2
    assert main([*argv, "--overwrite"]) == 0
    assert [file.read_bytes() for file in files] == first
    assert [file.stat().st_mode & 0o777 for file in files] == [0o664, 0o664]
    assert main(["compare", "mine", "--csv", "losses.csv", "--overwrite"]) == 0
    (place / "folder.svg").mkdir()
    assert main(["compare", "mine", "--plot", "folder.svg", "--overwrite"]) == 2
    assert main(["compare", "mine", "--overwrite"]) == 2


def test_repetitions_have_a_mean_and_a_standard_deviation(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = {"1e-3": [1.0, 2.0, 3.0], "1e-4": [4.0, 6.0, None]}
    for lr, losses in results.items():
        for seed, loss in enumerate(losses):
            made(place / f"{lr}-{seed}", **function(lr=lr, seed=seed))
            record = {"step": 9, "attempt": 1, "loss": loss}
            with (place / f"{lr}-{seed}" / "metrics.jsonl").open("a") as stream:
                stream.write(json.dumps(record) + "\n")
    names = [f"{lr}-{seed}" for lr in results for seed in range(3)]
    assert main(["compare", *names, "--metric", "loss"]) == 0
    *_, heading, first, second = capsys.readouterr().out.splitlines()
    assert re.split(r" {2,}", heading) == ["lr", "N", "MEAN ± SD OF LAST LOSS"]
    assert re.split(r" {2,}", first) == ["1e-3", "3", "2.0000 ± 1"]
    assert re.split(r" {2,}", second) == ["1e-4", "2 of 3", "5.0000 ± 1.4"]
    assert json_of(capsys, *names, "--metric", "loss")["repetitions"] == [
        {"values": {"lr": 1e-3}, "num_runs": 3, "num_results": 3, "mean": 2.0, "sd": 1.0},
        {"values": {"lr": 1e-4}, "num_runs": 3, "num_results": 2, "mean": 5.0, "sd": pytest.approx(2**0.5)},
    ]
    rows = rows_of(capsys, *names, "--metric", "loss")
    assert [(row["result_n"], row["result_mean"]) for row in rows] == [("3", "2.0")] * 3 + [("2", "5.0")] * 3
    assert "repetitions" not in json_of(capsys, *names[::3])


def test_curves_are_shown_in_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "mine/0", "--curves", "loss"]) == 0
    heading, row = capsys.readouterr().out.splitlines()
    assert heading.split() == ["RUN", "METRIC", "STEP", "LAST", "LOWEST", "HIGHEST", "CURVE"]
    assert row.split()[:3] == ["0", "loss", "20"]


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["--csv", "none/a.csv"], "--csv none/a.csv: no such folder: none"),
        (["--csv", "old.csv"], "--csv old.csv already exists"),
        (["--plot", "old.csv"], "--plot old.csv already exists"),
        (["--plot", "losses"], "losses: a figure cannot be without a suffix"),
        (["--plot", "losses.docx"], "losses.docx: a figure cannot be .docx"),
        (["--smooth", "0.9"], "--smooth applies only to a figure"),
        (["--curves", "perplexity"], "no run has logged perplexity"),
        (["--plot", "a.pdf", "--by", "model"], "the runs do not differ in model"),
        (["--plot", "a.pdf", "--csv", "none/a.csv"], "--csv none/a.csv: no such folder: none"),
    ],
)
def test_curves_that_cannot_be_written(
    place: Path, capsys: pytest.CaptureFixture[str], argv: list[str], error: str
) -> None:
    (place / "old.csv").write_text("mine")
    assert main(["compare", "mine", *argv]) == 2
    shown, hint = capsys.readouterr().err.split("\n\n")[:2]
    assert shown == f"error: {error}"
    assert hint.startswith("hint: ")
    assert (place / "old.csv").read_text() == "mine"
    assert not list(place.glob("*.pdf"))


def test_curves_are_no_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "mine", "--curves", "loss", "--json"]) == 2
    said(json.loads(capsys.readouterr().out)["error"])
    assert main(["compare", "mine", "--csv", "a.csv", "--json"]) == 2
    said(json.loads(capsys.readouterr().out)["error"])


def test_csv_may_stand_before_the_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--csv", "mine/0", "mine/1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
