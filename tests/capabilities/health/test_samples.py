"""Tests how samples of nodes are read, repeatedly and for the report."""

from pathlib import Path

import pytest

from tests.support.watched_runs import Watched, ago
from trainkit.capabilities.health import samples as samples_module
from trainkit.capabilities.health import shown as shown_module
from trainkit.capabilities.health.samples import HealthFiles, health_file
from trainkit.capabilities.health.shown import read_nodes
from trainkit.run.files import append_jsonl
from trainkit.run.rundir import RunDir


def test_only_files_of_health_that_changed_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Watched(tmp_path / "run").job().health(20)
    files, opened = HealthFiles(made.run), []
    newest_sample = samples_module.newest_sample

    def counted(file: Path) -> object:
        opened.append(file.stem)
        return newest_sample(file)

    monkeypatch.setattr(samples_module, "newest_sample", counted)
    files.update()
    files.update()
    assert sorted(opened) == ["node001", "node002"]
    append_jsonl(health_file(made.run, "node002"), {"time": ago(1), "attempt": 1, "cpu_percent": 50.0})
    with health_file(made.run, "node002").open("a") as stream:
        stream.write('{"cut off')
    files.update()
    assert opened[2:] == ["node002"]
    assert files.newest["node002"].number("cpu_percent") == 50.0


def test_of_many_samples_of_nodes_a_share_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path)
    (run.path / "health").mkdir()
    for host in ("a", "b"):
        for number in range(100):
            append_jsonl(health_file(run, host), {"cpu_percent": float(number), "job_mem_gib": 1.0})
    assert [node.num_samples for node in read_nodes(run)] == [100, 100]
    monkeypatch.setattr(shown_module, "HEALTH_BYTES", health_file(run, "a").stat().st_size)
    first, _ = read_nodes(run)
    assert (first.num_samples, first.cpu_mean_percent) == (50, 49.0)
