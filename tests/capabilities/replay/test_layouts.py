"""Tests `trainkit replay` with other layouts, as a separate job, and when it is interrupted."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.flipped import run_flipped
from tests.support.programs import run_program
from tests.support.ranks import start_ranks, wait_for_all
from tests.support.replays import FSDP, OPTIONS, add_job, call, files_of
from tests.support.runs import TIMEOUT_S, environs, log_text, make_attempt, train
from trainkit.cli.main import main
from trainkit.run.files import read_json
from trainkit.run.rundir import RunDir

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("replays")]

TP, PP = ["parallel.tp=2", "parallel.dp_shard=1"], ["parallel.pp=2", "parallel.dp_shard=1"]


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("layout", "other"), [(TP, "pp=2"), (PP, "dp_shard=2")], ids=["tensor parallel", "pipeline"]
)
def test_layouts_that_split_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: list[str], other: str
) -> None:
    run = tmp_path / "run"
    train(run, [*OPTIONS, *layout, "model.dropout=0"], 2)
    add_job(run)
    code, found = call(capsys, "replay", str(run), "--step", "5..6")
    assert (code, found["verdict"], found["is_exact"]) == (0, "equal", True)
    assert all(step["recorded"] == step["replayed"] for step in found["steps"])
    code, found = call(capsys, "replay", str(run), "--step", "5..6", "--layout", other)
    assert (code, found["verdict"]) == (0, "equal")
    assert all(step["difference"] < 1e-5 for step in found["steps"])
    assert found["rounding"] == [f"layout {other} instead of {layout[0].removeprefix('parallel.')}"]


@pytest.mark.usefixtures("forked_ranks")
def test_a_large_flipped_bit_shows_on_another_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another layout shows the flipped bit, but not the rank that flipped it."""
    run = tmp_path / "run"
    attempt = make_attempt(run, [*OPTIONS, *FSDP, "model.dropout=0"], 2)
    codes = wait_for_all(start_ranks(run_flipped, 2, attempt, environs(attempt, 2), 1, 4, 30), TIMEOUT_S)
    assert codes == [0, 0], log_text(attempt)
    add_job(run)
    assert main(["replay", str(run), "--step", "4", "--layout", "tp=2"]) == 1
    text = capsys.readouterr().out
    for part in ("since step 4 by more than 0.0001 ", "layout tp=2 instead of dp_shard=2", "rank is unknown"):
        assert part in text
    assert "grad_norm=not finite;" in text


def test_a_job_on_this_machine(
    tmp_path: Path, trained: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained()
    before = files_of(run)
    words = ["--step", "4", "--submit", "--run-dir", str(tmp_path / "again"), "--follow"]
    code, found = call(capsys, "replay", str(run), *words)
    assert (code, found["verdict"], found["is_exact"]) == (0, "equal", True)
    job = RunDir(tmp_path / "again")
    assert read_json(job.plan_file)["replay"] == [4, 4]
    assert [path.name for path in job.checkpoints_dir.iterdir()] == ["step-00000002"], "it saves nothing"
    assert call(capsys, "replay", "--collect", str(job.path)) == (0, found)
    assert files_of(run) == before
    assert main(["replay", "--collect", str(run)]) == 2
    assert "is not a replay folder" in capsys.readouterr().err
    job.metrics_file.unlink()
    assert main(["replay", "--collect", str(job.path)]) == 1
    assert "has not computed a" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interruption_leaves_nothing(
    tmp_path: Path, trained: Callable[..., Path], number: signal.Signals
) -> None:
    run = trained()
    argv = [sys.executable, "-m", "trainkit", "replay", str(run), "--step", "6"]
    with subprocess.Popen(
        argv, env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.DEVNULL
    ) as process:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not (logs := list(tmp_path.glob("trainkit-replay-*/attempts/001/logs/rank-0000.log"))):
            assert time.monotonic() < deadline_s
            assert process.poll() is None
            time.sleep(0.02)
        (folder,) = {path.parents[3] for path in logs}
        process.send_signal(number)
        assert process.wait(TIMEOUT_S) == (130 if number == signal.SIGINT else 143)
    assert not folder.exists()
    while [file for file in Path("/proc").glob("[0-9]*/cmdline") if mentions(file, folder)]:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


AT_FORK = """
import os, signal, sys
# Runs first of the hooks, so that the handler runs in one of the next: Python drops an exception there.
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), {number}))
import logging
from trainkit.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interruption_while_a_rank_is_started(
    tmp_path: Path, trained: Callable[..., Path], number: signal.Signals
) -> None:
    run = trained()
    argv = [sys.executable, "-c", AT_FORK.format(number=int(number)), "replay", str(run), "--step", "6"]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    done = run_program(*argv, env=environ, timeout=TIMEOUT_S)
    assert done.returncode == (130 if number == signal.SIGINT else 143), done.stderr
    assert not list(tmp_path.glob("trainkit-replay-*"))


def mentions(file: Path, folder: Path) -> bool:
    """Return whether the command line of a process names a folder."""
    try:
        return str(folder).encode() in file.read_bytes()
    except OSError:
        return False  # the process has just ended
