"""Tests the page of a tracker: it listens on this host only, and an ssh command reaches it from others."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.programs import run_program
from tests.support.runs import free_port, make_attempt
from tests.support.said import said
from tests.support.sweeps import made_up_sweep
from trainkit.capabilities.trackers import board, command
from trainkit.cli import options
from trainkit.cli.main import main
from trainkit.extras import install_line
from trainkit.run.events import StepRecord
from trainkit.run.files import append_jsonl, write_json
from trainkit.run.group import GroupRecord, RunGroup, Trial
from trainkit.run.rundir import RunDir


class Started(Exception):
    """Raised in place of the program that would replace this process."""


@pytest.fixture(autouse=True)
def _execv(monkeypatch: pytest.MonkeyPatch) -> None:
    def execve(program: str, argv: list[str], environ: dict[str, str]) -> None:
        raise Started(argv, environ)

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr(command, "find_spec", lambda name: name)
    monkeypatch.setattr(options, "other_people", lambda: [])


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Return a run in TensorBoard and in MLflow."""
    run = make_attempt(tmp_path / "run", ["logging.mlflow=true"]).run
    run.tensorboard_dir.mkdir()
    return run


def start(*argv: str) -> list[str]:
    with pytest.raises(Started) as started:
        main(["--debug", "ui", *argv])
    found: list[str] = started.value.args[0]
    return found


def test_tensorboard(run, tmp_path, capfd):
    port = free_port()
    argv = start(str(run.path), "--port", str(port))
    place = ["--logdir", str(run.tensorboard_dir), "--load_fast", "false", "--host", "127.0.0.1"]
    assert argv[0] == sys.executable
    assert argv[3:] == [*place, "--port", str(port)]
    (tmp_path / "tensorboard.py").write_text("print('of a stranger')")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(argv, cwd=tmp_path, text=True, **pipes) as page:
        assert page.stdout.readline().startswith("TensorBoard ")  # nothing is printed before the address
        page.kill()
    url, ssh = capfd.readouterr().out.splitlines()
    assert url == f"http://127.0.0.1:{port}"
    assert ssh.startswith(f"ssh -L {port}:127.0.0.1:{port} ")
    assert ssh.endswith(f"@{socket.gethostname()}")


def group_of_three(folder: Path) -> RunGroup:
    """Return a sweep of three runs, whose last one has not started."""
    group = made_up_sweep(folder, {"optimizer.lr": [0.1, 0.01, 0.001]}, num_steps=1)
    shutil.rmtree(group.run(2).path)
    for index in (0, 1):
        group.run(index).tensorboard_dir.mkdir()
    return group


def test_the_runs_of_a_group_are_named_by_their_values(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    group = group_of_three(tmp_path / "sweep")
    before = sorted(group.path.rglob("*"))
    argv = start(str(group.path), "--port", str(free_port()))
    folder = Path(argv[argv.index("--logdir") + 1])
    assert {link.name: link.readlink() for link in folder.iterdir()} == {
        f"lr={lr}": group.run(index).tensorboard_dir for index, lr in enumerate((0.1, 0.01, 0.001))
    }
    assert argv[argv.index("--host") + 1] == "127.0.0.1"
    assert sorted(group.path.rglob("*")) == before
    run_program(*argv[:3], "--logdir", str(folder), "--help", cwd=tmp_path)
    assert not folder.exists()  # the folder with the links is removed at the end
    assert group.run(0).tensorboard_dir.is_dir()


NAMES: dict[str, tuple[list[dict[str, object]], list[str]]] = {
    "two keys": ([{"a.lr": 0.1, "b.seed": 1}], ["lr=0.1, seed=1"]),
    "two keys with one last part": ([{"a.lr": 0.1, "b.lr": 1}], ["a.lr=0.1, b.lr=1"]),
    "no values": ([{}, {}], ["0", "1"]),
    "a path": ([{"data.source": "/data/a/b"}], ["source=_data_a_b"]),
    "dots": ([{"x": ".."}], ["x=.."]),
    "the same": ([{"x": 1}, {"x": 1}], ["1 x=1", "x=1"]),
    "long": ([{"x": "é" * 500}, {"x": "é" * 501}], ["1 x=" + "é" * 58, "x=" + "é" * 58]),
    "a comma and a colon": ([{"x": "a,b:c"}], ["x=a,b:c"]),
    "NUL": ([{"x": "a\0b"}], ["x=a_b"]),
    "a secret": ([{"api_key": "sk-0123456789abcdefghij"}], ["api_key=***"]),
    "some have none": ([{}, {"x": None}], ["0", "x=null"]),
}
"""Maps a kind of values to the values of each trial, and to the names of the runs."""


@pytest.mark.parametrize("kind", NAMES)
def test_any_values_are_names(tmp_path, kind):
    values, names = NAMES[kind]
    write_json(
        tmp_path / "sweep.json", GroupRecord(name="mine").to_dict(map(Trial, range(len(values)), values))
    )
    folder = command.link_runs(RunGroup(tmp_path), tmp_path)
    assert sorted(link.name for link in folder.iterdir()) == names


@pytest.mark.parametrize("is_command", [False, True])
def test_a_group_without_tensorboard(tmp_path, capfd, is_command):
    group = made_up_sweep(tmp_path / "sweep", {"seed": [1, 2]}, num_steps=1)
    if is_command:
        write_json(group.run(1).plan_file, {"command": ["python", "a.py"]})
        group.run(1).metrics_file.unlink()
    assert main(["ui", str(group.path)]) == 2
    said(capfd.readouterr().err)


def script(folder: Path) -> RunDir:
    """Return a run of a script with three records, whose last record was cut."""
    run = make_attempt(folder).run
    write_json(run.plan_file, {"command": ["python", "a.py"]})
    rows = [{"step": n, "time": "2026-01-01T00:00:00Z", "attempt": 1, "train/acc": n / 4} for n in (1, 2)]
    rows[1] |= {"loss": None, "d_loss": 1e999, "name": "x", "done": True, "own": 3}
    run.metrics_file.write_text("".join(f"{json.dumps(row)}\n" for row in rows) + '{"step": 3, "tra')
    return run


def test_the_metrics_of_a_script_are_shown_under_their_names(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    run = script(tmp_path / "mine")
    before = sorted(run.path.rglob("*"))
    argv = start(str(run.path), "--port", str(free_port()))
    folder = Path(argv[argv.index("--logdir") + 1])
    monkeypatch.setattr(board, "Thread", lambda **values: SimpleNamespace(start=lambda: None))
    board.follow(str(folder))
    assert scalars_of(folder / "mine") == {"own": [(2, 3.0)], "train/acc": [(1, 0.25), (2, 0.5)]}
    assert sorted(run.path.rglob("*")) == before


def scalars_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    names = found.Tags()["scalars"]
    return {name: [(event.step, event.value) for event in found.Scalars(name)] for name in names}


def test_new_records_of_a_script_are_added(tmp_path):
    run = script(tmp_path / "mine")
    update = board._writer(run.metrics_file)
    update()
    append_jsonl(run.metrics_file, {"step": 4, "train/acc": 1.0})
    update()
    assert scalars_of(run.path)["train/acc"] == [(1, 0.25), (2, 0.5), (4, 1.0)]


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_resumed_script_has_one_curve(tmp_path, attempt):
    file = RunDir(tmp_path).metrics_file
    for step in (1, 2, 3, 4):
        append_jsonl(file, *({"step": step, "attempt": 1, name: 0.0} for name in ("acc", "val")))
    append_jsonl(file, *({"step": step, "attempt": attempt, "acc": 1.0} for step in (3, 4)))
    board._writer(file)()
    assert scalars_of(tmp_path)["acc"] == [(1, 0.0), (2, 0.0), (3, 1.0), (4, 1.0)]


def test_a_number_that_is_too_large_for_a_step(tmp_path):
    file = RunDir(tmp_path).metrics_file
    append_jsonl(file, *({"step": step, "acc": 0.5} for step in (1, 2**63, -(2**63), 2**53, 2)))
    board._writer(file)()
    assert scalars_of(tmp_path) == {"acc": [(1, 0.5), (2, 0.5)]}


def test_a_script_that_starts_later_is_added(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    group = group_of_three(tmp_path / "sweep")
    for index in (0, 1):
        shutil.rmtree(group.run(index).tensorboard_dir)
        write_json(group.run(index).plan_file, {"command": ["python", "a.py"]})
    folder = command.link_runs(group, tmp_path)
    later, unreadable = folder / "lr=0.001", folder / "lr=0.01"
    usual = board.steps_of

    def steps_of(records: Iterable[Mapping[str, object]]) -> Iterator[StepRecord]:
        for record in usual(records):
            if record.values.get("acc") == 0.25:
                raise OSError(5, "Input/output error")
            yield record

    monkeypatch.setattr(board, "steps_of", steps_of)
    append_jsonl(group.run(1).metrics_file, {"step": 5, "acc": 0.25})
    updates = {one: board._writer(one / "metrics.jsonl") for one in (unreadable, later)}
    warned = set[Path]()
    board._update(updates, warned)
    assert not list(later.glob("events.*"))
    group.run(2).path.mkdir()
    append_jsonl(group.run(2).metrics_file, {"step": 1, "acc": 0.5})
    append_jsonl(group.run(1).metrics_file, {"step": 6, "acc": 0.25})
    board._update(updates, warned)
    assert scalars_of(later) == {"acc": [(1, 0.5)]}
    said(capsys.readouterr().err)


def test_the_scripts_of_a_group_are_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    group = group_of_three(tmp_path / "sweep")
    shutil.rmtree(group.run(0).tensorboard_dir)
    for index in (0, 1):
        write_json(group.run(index).plan_file, {"command": ["python", "a.py"]})
    argv = start(str(group.path), "--port", str(free_port()))
    folder = Path(argv[argv.index("--logdir") + 1])
    # the script writes its TensorBoard files itself
    assert (folder / "lr=0.01").readlink() == group.run(1).tensorboard_dir
    for index, lr in ((0, 0.1), (2, 0.001)):
        assert (folder / f"lr={lr}" / "metrics.jsonl").readlink() == group.run(index).metrics_file
    kept: list[dict[Path, object]] = []
    monkeypatch.setattr(
        board, "Thread", lambda args, **values: SimpleNamespace(start=lambda: kept.append(args[0]))
    )
    board.follow(str(folder))
    # the trial that has not started is included
    assert list(kept[0]) == [folder / "lr=0.001", folder / "lr=0.1"]


def test_mlflow_of_a_group_that_has_not_started(tmp_path, capfd):
    write_json(tmp_path / "sweep.json", GroupRecord(name="mine").to_dict([Trial(0)]))
    assert main(["ui", str(tmp_path), "--tool", "mlflow"]) == 2
    said(capfd.readouterr().err)


def test_mlflow(run, tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    argv = start(str(run.path), "--tool", "mlflow", "--port", str(free_port()))
    assert f"sqlite:///{tmp_path}/mlflow/mlflow.db" in argv
    assert argv[argv.index("--host") + 1] == "127.0.0.1"


@pytest.mark.parametrize(
    ("tool", "logging"),
    [
        ("mlflow", "logging.mlflow={tracking_uri: 'http://host:5000'}"),
        *(("mlflow", "logging.mlflow=null"), ("tensorboard", "logging.tensorboard=false")),
        ("tensorboard", "logging.tensorboard=auto"),
    ],
)
def test_nothing_to_show(tmp_path, capfd, tool, logging):
    run = make_attempt(tmp_path / "run", [logging]).run
    assert main(["ui", str(run.path), "--tool", tool]) == 2
    said(capfd.readouterr().err)


def test_a_port_in_use(run, capfd):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        assert main(["ui", str(run.path), "--port", str(busy.getsockname()[1])]) == 2
    assert "another port with --port" in capfd.readouterr().err


@pytest.mark.parametrize("tool", command.PORTS)
@pytest.mark.parametrize(
    "people", [["ann"], ["ann", "bob", "cem", "dia", "eve"], None], ids=["one", "five", "unknown"]
)
def test_a_page_that_others_could_open(run, capfd, monkeypatch, tool, people):
    monkeypatch.setattr(options, "other_people", lambda: people)
    argv = [str(run.path), "--tool", tool, "--port", str(free_port())]
    assert main(["ui", *argv]) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    said(printed.err)
    assert start(*argv, "--yes")


def test_a_page_has_own_temporary_files(run, tmp_path, monkeypatch):
    (shared := tmp_path / "tmp").mkdir()
    shared.chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(shared))
    with pytest.raises(Started) as started:
        main(["--debug", "ui", str(run.path), "--port", str(free_port())])
    temporary = Path(started.value.args[1]["TMPDIR"])
    assert temporary == shared / f"trainkit-{os.getuid()}" / "tmp"
    assert temporary.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("tool", command.PORTS)
def test_not_installed(run, capfd, monkeypatch, tool):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert main(["ui", str(run.path), "--tool", tool]) == 2
    assert f"`{install_line(tool)}`\n" in capfd.readouterr().err


def test_sync_without_a_tracker(tmp_path, capfd):
    run = make_attempt(tmp_path / "run").run
    assert main(["sync", str(run.path)]) == 2
    said(capfd.readouterr().err)
