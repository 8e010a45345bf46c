"""Tests of `trainkit report` on made-up run folders."""

import json
from pathlib import Path

import pytest

from tests.support.benches import made_up_bench, train_made_up
from tests.support.said import said
from tests.support.sweeps import made_up_sweep
from trainkit.backends import jobs
from trainkit.capabilities.report import sweep_report
from trainkit.capabilities.report.sweep_report import SweepReport, read_sweep
from trainkit.cli.main import main


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a folder with a sweep of three trials, and a Slurm that cannot be queried."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jobs, "query_jobs_or_warn", lambda ids, warn: None)
    made_up_sweep(tmp_path / "mine", {"optimizer.lr": [1e-4, 3e-4, 1e-3]}, failed=2)
    return tmp_path


def test_a_page_that_cannot_be_written(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = place / "mine" / "report.html"
    page.mkdir()
    assert main(["report", "mine"]) == 2
    said(capsys.readouterr().err)
    assert main(["report", "mine", "--out", "page.html"]) == 0
    assert "3 runs, 1 failed, 2 finished" in Path("page.html").read_text()
    assert capsys.readouterr().out == f"{Path.cwd() / 'page.html'}\n"
    assert main(["report", "mine", "--out", "page.html"]) == 2
    said(capsys.readouterr().err)
    Path("page.html").write_text("old")
    assert main(["report", "mine", "--out", "page.html", "--overwrite"]) == 0
    assert "3 runs" in Path("page.html").read_text()
    Path("link.html").symlink_to("page.html")
    assert main(["report", "mine", "--out", "link.html", "--overwrite"]) == 2
    assert main(["report", "mine", "--overwrite"]) == 2


def test_a_report_is_written_again_without_an_option(place: Path) -> None:
    page = place / "mine" / "report.html"
    page.write_text("old")
    assert main(["report", "mine"]) == 0
    assert "3 runs" in page.read_text()


def test_a_file_that_appears_while_the_report_is_read_is_kept(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*args: object) -> SweepReport:
        Path("page.html").write_text("mine")
        return read_sweep(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(sweep_report, "read_sweep", read)
    assert main(["report", "mine", "--out", "page.html"]) == 2
    said(capsys.readouterr().err)
    assert Path("page.html").read_text() == "mine"


def test_a_replaced_page_keeps_its_mode(place: Path) -> None:
    Path("page.html").write_text("old")
    Path("page.html").chmod(0o640)
    assert main(["report", "mine", "--out", "page.html", "--overwrite"]) == 0
    assert Path("page.html").stat().st_mode & 0o777 == 0o640


def test_a_metric_ranks_the_runs_and_is_drawn_first(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for index, accuracy in enumerate((0.7, 0.9, 0.8)):
        file = place / "mine" / str(index) / "metrics.jsonl"
        records = [json.loads(line) for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps({**one, "acc": accuracy}) + "\n" for one in records))
    assert main(["report", "mine", "--metric", "acc", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["objective"]["name"] == "acc"
    assert (value["best"]["index"], value["best"]["result"]) == (1, 0.9)
    page = (place / "mine" / "report.html").read_text()
    assert "Best acc (max)" in page
    curves = page.partition("<h2>Curves</h2>")[2]
    assert curves.index("<h3>acc") < curves.index("<h3>Loss")
    assert main(["report", "mine/0"]) == 0
    capsys.readouterr()
    assert main(["report", "mine/0", "--metric", "lr"]) == 0
    assert capsys.readouterr().out == f"{place / 'mine' / '0' / 'report.html'}\n"
    page = (place / "mine" / "0" / "report.html").read_text()
    assert page.index("<h3>Learning rate") < page.index("<h3>Loss")
    for name in ("mine", "mine/0"):
        capsys.readouterr()
        assert main(["report", name, "--metric", "accuracy"]) == 2
        said(capsys.readouterr().err)


def test_runs_of_a_bench_are_compared_by_their_measured_speed(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "runs").mkdir()
    bench = made_up_bench(place / "runs" / "two", repeats=2)
    for item, step_s in zip(bench.runs, (0.5, 0.25, 0.4, 0.2), strict=True):
        train_made_up(bench.run_dir(item), step_s=step_s)
    assert main(["report", "runs/two", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["objective"]["name"] == "tokens_per_s"
    assert [(trial["values"], trial["result"]) for trial in value["points"]] == [
        ({"layout": "tp=2", "repeat": 2}, 5120.0),
        ({"layout": "tp=2", "repeat": 1}, 4096.0),
        ({"layout": "dp_shard=2", "repeat": 2}, 2560.0),
        ({"layout": "dp_shard=2", "repeat": 1}, 2048.0),
    ]
    assert "Tokens per second by layout" in (bench.folder / "report.html").read_text()
