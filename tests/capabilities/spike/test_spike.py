"""Tests that a run with bad samples goes back and leaves them out, and continues the same in every way."""

from __future__ import annotations

from pathlib import Path

import pytest

import trainkit
from tests.support import spiky
from tests.support.json_outputs import checked
from tests.support.runs import (
    FAST,
    events,
    fork_workers,
    log_text,
    losses,
    make_attempt,
    samples_seen,
    train,
    wait_until,
)
from trainkit.cli.main import main
from trainkit.run.files import read_json
from trainkit.run.rollbacks import Ranges, read_rollbacks
from trainkit.run.rundir import RunDir

pytestmark = [pytest.mark.slow(seconds=6), pytest.mark.xdist_group("spike")]

RULE = "{factor: 3.0, window_steps: 4, patience_steps: 3, max_rollbacks: 2}"
OPTIONS = [
    f"task={Path(spiky.__file__)}:Spiky",
    "task_args.bad=[96, 208]",  # in the steps 7 to 13
    "data.shuffle=false",
    "data.num_workers=0",
    "optimizer.lr=0.001",
    "train.steps=16",
    "checkpoint.every_steps=4",
    "checkpoint.keep_last=null",
    f"train.spike={RULE}",
]

BACK = "went back from step 9 to step 4, left out 80 samples (64-143)"


def finish(run: Path, options: list[str], num_procs: int = 1) -> int:
    """Run attempts until the run has finished; return their number."""
    for number in range(1, 6):
        attempt = make_attempt(run, options, num_procs)
        codes = [worker.wait(timeout=180) for worker in fork_workers(attempt, num_procs)]
        assert codes in ([0] * num_procs, [75] * num_procs), log_text(attempt)
        if codes == [0] * num_procs:
            return number
    raise AssertionError("the run did not finish")


def ranges_of(run: Path) -> list[Ranges]:
    """Return the ranges of samples that each rollback of a run left out."""
    return [item.skipped for item in read_rollbacks(RunDir(run))]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    finish(run, OPTIONS, 2)
    return run


def test_a_run_goes_back_until_the_bad_samples_are_behind_it(whole):
    """The spike begins at step 7, and each rollback leaves out the samples of the steps since step 4."""
    found = [(item.step, item.from_step, item.skipped) for item in read_rollbacks(RunDir(whole))]
    assert found == [(4, 9, ((64, 144),)), (4, 7, ((64, 192),))]
    assert [event["step"] for event in events(whole, "rollback")] == [4, 4]
    assert samples_seen(whole) == list(range(16, 257, 16))
    assert events(whole, "training")[-1]["skipped"] == [[64, 192]]


def test_killed_at_any_moment_the_losses_stay_the_same(whole, tmp_path):
    """The ranks are killed in the middle of a spike, and right after the record of each rollback."""
    run = RunDir(tmp_path / "run")
    for kill_when in (
        lambda: events(run.path, "loss_spike"),
        lambda: len(read_rollbacks(run)) == 1,
        lambda: len(read_rollbacks(run)) == 2,
    ):
        workers = fork_workers(make_attempt(run.path, OPTIONS, 2), 2)
        wait_until(kill_when)
        for worker in workers:
            worker.kill()
            worker.wait()
    finish(run.path, OPTIONS, 2)
    assert losses(run.path) == losses(whole)
    found, expected = (
        [(item.step, item.skipped) for item in read_rollbacks(one)] for one in (run, RunDir(whole))
    )
    assert found == expected


def test_another_layout_goes_back_in_the_same_way(whole, tmp_path):
    run = tmp_path / "run"
    finish(run, OPTIONS, 1)
    assert losses(run) == pytest.approx(losses(whole), rel=1e-4)
    assert ranges_of(run) == [((64, 144),), ((64, 192),)]


def test_a_loss_that_is_not_finite(tmp_path):
    run = tmp_path / "run"
    finish(run, [*OPTIONS, "task_args.value=1.0e+39", "task_args.bad=[96, 144]"])
    assert ranges_of(run) == [((64, 144),)]
    assert all(loss is not None for loss in losses(run).values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["train.spike.max_rollbacks=1"], "the run has already gone back 1 time (train.spike.max_rollbacks)"),
        (["checkpoint.every_steps=8"], "no intact checkpoint from before step 7 is left"),
    ],
)
def test_when_a_run_fails_instead(tmp_path, options, message):
    run = tmp_path / "run"
    if "max_rollbacks" in options[0]:
        train(run, [*OPTIONS, *options], expect=75)
    attempt = train(run, [*OPTIONS, *options], expect=78)
    assert f"or not finite, from step {5 if 'max' in options[0] else 7} to" in log_text(attempt)
    assert message in log_text(attempt)
    assert "train.spike" in log_text(attempt) or "--skip-samples" in log_text(attempt)


def test_the_supervisor_restarts_the_run(whole, tmp_path, capsys, monkeypatch):
    """The run, its status and its report show each rollback, and a replay computes the steps after them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(trainkit.__file__).parents[1]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config = tmp_path / "spiky.yaml"
    config.write_text("name: spiky\n")
    sets = [word for option in (*FAST, *OPTIONS) for word in ("--set", option)]
    assert main(["submit", str(config), "--backend", "local", "--run-dir", "run", "--follow", *sets]) == 0
    run = RunDir(tmp_path / "run")
    assert run.attempt_numbers() == [1, 2, 3]
    ends = [read_json(run.attempt(number).end_file) for number in (1, 2, 3)]
    assert [(end["action"], end["cause"]) for end in ends[:2]] == [("restart", "rollback")] * 2
    assert ends[0]["reason"].startswith(
        "the run went back from step 9 to step 4, left out 80 samples (64-143)"
    )
    assert ends[2]["state"] == "finished"
    capsys.readouterr()
    assert main(["status", "run", "--json"]) == 0
    status = checked("status", capsys.readouterr().out)
    assert [(item["step"], item["from_step"]) for item in status["rollbacks"]] == [(4, 9), (4, 7)]
    main(["status", "run"])
    shown = capsys.readouterr().out
    assert BACK in shown
    main(["report", "run", "--json"])
    assert len(checked("report", capsys.readouterr().out)["rollbacks"]) == 2
    assert main(["replay", "run", "--step", "3..8", "--json"]) == 0
    assert checked("replay", capsys.readouterr().out.splitlines()[-1])["verdict"] == "equal"
