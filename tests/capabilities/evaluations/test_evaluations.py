"""Tests evaluations on this machine, while the run continues and after its supervisor was killed."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.json_outputs import checked
from tests.support.programs import run_program, wait_for
from tests.support.published import PUBLISHES, WRITES
from tests.support.runs import runs_from
from trainkit.capabilities.evaluations.records import is_evaluating, read_evaluations
from trainkit.observe.ranking import Ranking, measure
from trainkit.run.end import Best
from trainkit.run.record import read_job
from trainkit.run.rundir import RunDir

pytestmark = [pytest.mark.slow(seconds=20), pytest.mark.xdist_group("evaluations")]

TRAINKIT = (sys.executable, "-m", "trainkit")
TIMEOUT_S = 200.0


def submit(folder: Path, command: str, *options: str) -> RunDir:
    (folder / "publishes.py").write_text(PUBLISHES)
    words = ["--set", f"on_checkpoint.command={json.dumps(command)}", *options]
    done = run_program(
        *TRAINKIT, "submit", "--backend", "local", "--json", *words, "--", sys.executable, "publishes.py",
        timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return RunDir(checked("submit", done.stdout)["run_dir"])


def shown(run: RunDir, command: str, *options: str) -> dict[str, object]:
    done = run_program(*TRAINKIT, command, str(run.path), "--json", *options, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def states(run: RunDir) -> dict[int, str]:
    return {step: one.state for step, one in read_evaluations(run).items()}


def test_evaluations_while_the_run_continues(tmp_path: Path) -> None:
    with runs_from(tmp_path):
        run = submit(tmp_path, WRITES)
        wait_for(lambda: states(run) == dict.fromkeys((1, 2, 3), "done"), TIMEOUT_S)
        found = shown(run, "status")
        assert found["state"] == "running"
        assert [(one["step"], one["metrics"]) for one in found["evaluations"]] == [  # type: ignore[attr-defined]
            (step, {"eval/acc": float(step)}) for step in (1, 2, 3)
        ]
        (run.path / "finish").touch()
        assert run_program(*TRAINKIT, "wait", str(run.path), timeout=TIMEOUT_S).returncode == 0
        report = shown(run, "report")
        assert [one["step"] for one in report["evaluations"]] == [1, 2, 3]  # type: ignore[attr-defined]
        csv = run_program(*TRAINKIT, "compare", str(run.path), "--curves", "eval/acc", "--csv")
        rows = [line.split(",") for line in csv.stdout.splitlines()]
        place = rows[0].index("step"), rows[0].index("eval/acc")
        assert [tuple(float(row[column]) for column in place) for row in rows[1:]] == [(1, 1), (2, 2), (3, 3)]
        assert measure(run, Ranking("eval/acc", "max")).result == Best("eval/acc", 3.0, 3)
        run_program(*TRAINKIT, "report", str(run.path), timeout=TIMEOUT_S)
        assert "eval/acc" in (run.path / "report.html").read_text()


def test_evaluations_outlive_a_killed_supervisor(tmp_path: Path) -> None:
    """The evaluation that runs and those that wait are finished after the supervisor and its ranks died."""
    with runs_from(tmp_path):
        run = submit(tmp_path, f"until test -e {tmp_path}/go; do sleep 0.05; done; {WRITES}")
        wait_for(lambda: len(states(run)) == 3 and is_evaluating(run, 1), TIMEOUT_S)
        newest = read_job(run).newest
        assert newest is not None
        assert newest.pid is not None
        os.kill(newest.pid, signal.SIGKILL)
        wait_for(lambda: shown(run, "status")["state"] == "died", TIMEOUT_S, poll_s=0.5)
        (tmp_path / "go").touch()
        wait_for(lambda: states(run) == dict.fromkeys((1, 2, 3), "done"), TIMEOUT_S)
        assert read_evaluations(run)[1].num_starts == 1
