"""Tests the verdicts of `trainkit wait` on recorded runs, and what it prints while it waits."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.golden.__main__ import unpack
from tests.support.said import said
from trainkit.capabilities.programs import wait_command
from trainkit.cli.main import main
from trainkit.errors import UsageError
from trainkit.run.files import read_json, write_json
from trainkit.run.rundir import RunDir, run_lock


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project folder with all recorded runs, and a run `stopped`, which has saved and stopped."""
    folder = tmp_path_factory.mktemp("recorded") / "project"
    unpack(folder)
    runs = folder / "runs"
    (runs / "cancelled").rename(runs / "stopped")
    end_file = runs / "stopped/attempts/001/end.json"
    write_json(end_file, {**read_json(end_file), "state": "stopped", "action": "stopped"})
    return folder


@pytest.fixture(autouse=True)
def in_the_project(recorded, monkeypatch):
    monkeypatch.chdir(recorded)


@pytest.mark.parametrize(
    ("run", "goal", "code"),
    [
        *(("finished", goal, 0) for goal in ("ended", "started", "checkpoint", "step=1", "step=6")),
        ("finished", "step=7", 1),
        *(("crashed", goal, code) for goal, code in (("ended", 1), ("started", 0), ("step=99", 1))),
        *(("stopped", goal, code) for goal, code in (("ended", 75), ("checkpoint", 0), ("step=12", 75))),
        *(("command", goal, code) for goal, code in (("ended", 0), ("checkpoint", 1))),
        ("command-crashed", "ended", 1),
        ("restarted", "ended", 0),
        *(("bench", goal, 0) for goal in ("ended", "started")),
        *(("sweep", goal, code) for goal, code in (("ended", 1), ("started", 0))),
        ("sweep/0", "ended", 0),
        ("array/0", "ended", 0),
    ],
)
def test_the_verdict_is_the_exit_code(run, goal, code, capsys):
    assert main(["wait", f"runs/{run}", "--for", goal, "--timeout", "60"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"runs/{run}: ")
    assert (f"runs/{run} ended before" in err) == (code != 0 and goal != "ended")


@pytest.mark.parametrize(
    ("states", "goal", "code"),
    [
        (["finished", "finished"], "ended", 0),
        (["finished", "stopped"], "ended", 75),
        (["stopped", "failed"], "ended", 1),
        (["finished", "cancelled"], "ended", 1),
        (["finished"], "checkpoint", 1),
        (["stopped"], "checkpoint", 75),
        (["died"], "ended", 1),
        (["incomplete"], "ended", 1),
    ],
)
def test_a_group_has_the_worst_verdict_of_its_runs(states, goal, code):
    assert wait_command.verdict(states, wait_command.Goal(goal)) == code


@pytest.mark.parametrize(
    ("run", "state"), [("preempted", "unknown, step 6 of 400: "), ("array", "2 unknown, 1 finished")]
)
def test_a_timeout_has_an_exit_code_of_its_own(run, state, monkeypatch, capsys):
    """The machine has no Slurm, or another Slurm, so it cannot tell whether the job waits."""
    monkeypatch.setattr(wait_command, "QUERY_INTERVAL_S", 0.1)
    assert main(["wait", f"runs/{run}", "--timeout", "0.3", "--interval", "0.2"]) == 124
    *lines, last = capsys.readouterr().err.splitlines()
    assert any(line.startswith(f"runs/{run}: {state}") for line in lines), lines
    said(last)


@pytest.mark.parametrize(
    "goal", ["finished", "step", "step=", "step=0", "step=-1", "step=x", "step=1,000", "started=1", ""]
)
def test_an_unknown_goal_is_refused(goal, capsys):
    assert main(["wait", "runs/finished", "--for", goal]) == 2
    hint = "such as step=100" if goal.startswith("step") else "use started, checkpoint, ended or step=N"
    assert f"hint: {hint}" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--timeout", "--interval"])
@pytest.mark.parametrize("value", ["nan", "inf", "1e400", "100h", "-1"])
def test_a_time_that_is_none_is_refused(option, value):
    assert main(["wait", "runs/finished", option, value]) == 2


def test_a_failure_before_a_restart_is_shown_once(recorded, capsys):
    """The run has finished with exit code 0, and nothing else would tell that its code can fail."""
    poll = wait_command.RunPoll(RunDir(recorded / "runs/restarted"), wait_command.Goal("ended"))
    assert [poll()[1], poll()[1]] == [0, 0]
    said(capsys.readouterr().err)


def test_a_preemption_before_a_restart_is_shown(recorded, capsys):
    wait_command.RunPoll(RunDir(recorded / "runs/preempted"), wait_command.Goal("ended"))()
    said(capsys.readouterr().err)


def test_a_failure_before_a_resume_is_not_shown(recorded, capsys):
    run = RunDir(recorded / "runs/restarted")
    content = read_json(run.job_file)
    content["attempts"][-1]["reason"] = "resume"
    write_json(run.job_file, content)
    assert wait_command.RunPoll(run, wait_command.Goal("ended"))()[1] == 0
    assert not capsys.readouterr().err


def test_the_verdict_does_not_need_stderr(monkeypatch):
    def gone(text: str, err: bool) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(wait_command.click, "echo", gone)
    assert main(["wait", "runs/command-crashed"]) == 1


def test_a_run_that_is_being_submitted_has_not_ended(tmp_path, monkeypatch):
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    write_json(run.job_file, {"name": "run", "attempts": []})
    poll = wait_command.RunPoll(run, wait_command.Goal("ended"))
    shown, code = poll()
    assert (shown.partition(":")[0], code) == ("pending", None)
    monkeypatch.setattr(wait_command, "NOT_SUBMITTED_S", 0.0)
    with run_lock(run):
        assert poll()[1] is None
    with pytest.raises(UsageError, match="has not been submitted"):
        poll()
    run.job_file.rename(tmp_path / "job.json")
    run.job_file.mkdir()  # reading a folder fails, like reading from a file server that does not respond
    shown, code = poll()
    said(shown)
    assert code is None
    run.path.rename(tmp_path / "moved")
    with pytest.raises(UsageError, match="no longer exists"):
        poll()


def test_an_attempt_that_never_began_has_not_started(recorded, monkeypatch):
    poll = wait_command.RunPoll(RunDir(recorded / "runs/finished"), wait_command.Goal("started"))
    died = replace(poll._status(), state="died")
    never = replace(died, used=replace(died.used, num_starts=0))
    assert not wait_command.Goal("started").is_reached(never)
    for attempt, code in ((1, 0), (2, 1)):
        monkeypatch.setattr(poll, "_status", lambda attempt=attempt: replace(died, attempt=attempt))
        assert poll()[1] == code


@pytest.mark.parametrize("goal", ["checkpoint", "step=1"])
def test_a_group_has_no_steps(goal, capsys):
    assert main(["wait", "runs/sweep", "--for", goal]) == 2
    said(capsys.readouterr().err)


def test_progress_shows_states_at_once_and_steps_now_and_then(monkeypatch, capsys):
    now_s = 0.0
    monkeypatch.setattr(wait_command.time, "monotonic", lambda: now_s)
    progress = wait_command.Progress("runs/a")
    for at_s, text in (
        (0, "pending: Resources"),
        (2, "pending: Resources"),
        (4, "running, step 1 of 1,000"),
        (6, "running, step 2 of 1,000"),
        (40, "running, step 900 of 1,000"),
        (42, "running, step 901 of 1,000"),
        (44, "stopping, step 901 of 1,000"),
    ):
        now_s = at_s
        progress.show(text, is_last=False)
    progress.show("finished, step 1,000 of 1,000", is_last=True)
    said(capsys.readouterr().err)
