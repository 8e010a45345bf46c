"""Tests the decisions about evaluations, and evaluations of checkpoints that no training has written."""

import json
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.programs import wait_for
from tests.support.published import WRITES, publish
from tests.support.runs import make_attempt
from trainkit.capabilities.evaluations import summary
from trainkit.capabilities.evaluations.evaluator import plan_of
from trainkit.capabilities.evaluations.queue import Actions, Queue, Seen, chosen, decide, wanted_steps
from trainkit.capabilities.evaluations.records import (
    BEST_BY,
    BY,
    Evaluation,
    ResultError,
    best_of,
    is_evaluating,
    read_evaluation,
    read_evaluations,
    read_result,
)
from trainkit.cli.main import main
from trainkit.job.processes import module_argv
from trainkit.run.events import later_metrics, read_events
from trainkit.run.files import write_json
from trainkit.run.pins import pins
from trainkit.run.process import ProcessId
from trainkit.run.rundir import RunDir

TIMEOUT_S = 120.0


def open_(*steps: int, num_starts: int = 0) -> dict[int, Evaluation]:
    return {step: Evaluation(step, num_starts=num_starts, seal="a") for step in steps}


def ended(state: str, *steps: int, sealed: str = "a") -> dict[int, Evaluation]:
    return {step: Evaluation(step, state=state, seal=sealed) for step in steps}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("known", "alive", "queued", "here", "expected"),
    [
        # Without evaluations, the newest checkpoints fill the queue, and the oldest are skipped.
        ({}, (), (), False, Actions(add=(1, 2, 3), skip=(1,), start=(2, 3))),
        ({}, (), (), True, Actions(add=(1, 2, 3), skip=(1,), start=(2,))),
        # A running evaluation is never skipped, and counts.
        (open_(1), {1}, (), False, Actions(add=(2, 3), skip=(2,), start=(3,))),
        (open_(1), {1}, (), True, Actions(add=(2, 3), skip=(2,))),
        (open_(1, 2), {1, 2}, (), False, Actions(add=(3,), skip=(3,))),
        # A waiting job is replaced, and no second job is submitted for it.
        (open_(1, 2), (), {1, 2}, False, Actions(add=(3,), skip=(1,), start=(3,))),
        (ended("done", 1, 2), (), (), False, Actions(add=(3,), start=(3,))),
        # A dead process is started again, but not for ever.
        ({**ended("done", 2, 3), **open_(1, num_starts=1)}, (), (), False, Actions(start=(1,))),
        ({**ended("done", 2, 3), **open_(1, num_starts=2)}, (), (), False, Actions(fail=(1,))),
        # A checkpoint that was saved again is evaluated again, also if the evaluation failed.
        ({**ended("done", 1, 2), **ended("failed", 3, sealed="b")}, (), (), False, Actions((3,), start=(3,))),
        (ended("failed", 1, 2, 3), (), (), False, Actions()),
    ],
)
def test_decisions(known, alive, queued, here, expected):
    seen = Seen(known, dict.fromkeys((1, 2, 3), "a"), alive, queued)
    assert decide(seen, (1, 2, 3), 2, one_at_a_time=here) == expected


def test_a_step_that_is_asked_for():
    seen = Seen({**ended("done", 1, 2), **open_(3)}, dict.fromkeys((1, 2, 3), "a"), {3}, ())
    found = decide(seen, (2, 3, 4), None, one_at_a_time=False, again=(2, 3, 4))
    assert found == Actions(add=(2,), start=(2,)), "3 is running, and there is no checkpoint of step 4"


@pytest.mark.parametrize(
    ("commits", "every", "expected"),
    [([4, 8, 12], 1, [4, 8, 12]), ([4, 8, 12, 16], 2, [8, 16]), ([4, 8, 8, 12], 2, [8]), ([4], 3, [])],
)
def test_which_checkpoints(commits, every, expected):
    assert chosen(commits, every) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"acc": 1, "eval/loss": 0.5}', {"acc": 1.0, "loss": 0.5}),
        (None, "wrote no metrics"),
        ("{", "cannot be read"),
        ("[1]", "does not contain a JSON object"),
        ("{}", "does not contain a JSON object"),
        ('{"acc": true}', "the metric acc in TRAINKIT_EVAL_OUT is not a finite number: True"),
        ('{"acc": NaN}', "acc"),
        ('{"acc": {"x": 1}}', "acc"),
    ],
)
def test_the_result_of_a_command(tmp_path: Path, text: str | None, expected: Mapping[str, float] | str):
    file = tmp_path / "out.json"
    if text is not None:
        file.write_text(text)
    if isinstance(expected, str):
        with pytest.raises(ResultError, match=expected):
            read_result(file)
    else:
        assert read_result(file) == expected


def test_the_best_evaluation():
    values = {1: 0.5, 2: 0.7, 3: 0.7, 4: 0.1}
    found = [Evaluation(step, state="done", metrics={"acc": value}) for step, value in values.items()]
    found.append(Evaluation(5, state="failed", metrics={"acc": 9.0}))
    best = [best_of(found, metric, mode) for metric in ("acc", "loss") for mode in ("max", "min")]
    assert [one and one.step for one in best] == [2, 4, None, None]
    assert summary(found) == "4 done, 1 failed; step 4: eval/acc 0.1"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "test")


def start(run: RunDir, command: str, *options: str) -> Queue:
    """Create a run whose checkpoints are evaluated with a command."""
    make_attempt(run.path, [f"on_checkpoint.command={json.dumps(command)}", *options])
    run.plan_file.write_bytes(run.attempt(1).plan_file.read_bytes())
    return Queue(run, plan_of(run), print)


def finish(queue: Queue, max_waiting: int | None = 2) -> dict[int, Evaluation]:
    """Update a queue until no evaluation is open."""
    return wait_for(lambda: _ended(queue, max_waiting), TIMEOUT_S)


def _ended(queue: Queue, max_waiting: int | None) -> dict[int, Evaluation] | None:
    found = queue.update(wanted_steps(queue.run, queue.plan), max_waiting)
    return None if any(one.is_open for one in found.values()) else found


def test_metrics_and_pins(run: RunDir):
    queue = start(run, WRITES, "on_checkpoint.keep_best_by={metric: eval/acc, mode: max}")
    publish(run, 3)
    queue.update([3], 2)
    assert pins(run) == {3: {BY}}
    finish(queue)
    assert pins(run) == {3: {BEST_BY}}
    for step in (9, 5):
        publish(run, step)
    found = finish(queue, None)
    assert {step: one.state for step, one in found.items()} == {3: "done", 5: "done", 9: "done"}
    assert pins(run) == {9: {BEST_BY}}
    assert later_metrics(run) == {"eval/acc": {3: 3.0, 5: 5.0, 9: 9.0}}
    assert [event.step for event in read_events(run, "evaluation_done")] == [3, 5, 9]


def test_failures_end_only_the_evaluation(run: RunDir):
    """A damaged checkpoint is not evaluated; a later success ends the warning about both failures."""
    queue = start(run, f"echo words; test $TRAINKIT_STEP != 2 && {WRITES}")
    publish(run, 1)
    (run.checkpoint_dir(1) / "weights").write_text("7")
    publish(run, 2)
    found = finish(queue)
    assert {step: (one.state, one.log_tail) for step, one in found.items()} == {
        1: ("damaged", []),
        2: ("failed", ["words"]),
    }
    assert "SHA-256" in str(found[1].reason)
    assert found[2].reason == "the command ended with exit code 1"
    publish(run, 4)
    assert finish(queue)[4].state == "done"
    names = [(event.name, event.step) for event in read_events(run) if event.name != "checkpoint_commit"]
    assert names[-4:] == [
        ("evaluation_failed", 1),
        ("evaluation_failed", 2),
        ("evaluation_done", 4),
        ("evaluation_failed_over", 4),
    ]
    assert pins(run) == {}


def test_a_full_queue(run: RunDir):
    release = run.path / "release"
    queue = start(run, f"until test -e {release}; do sleep 0.05; done; {WRITES}")
    publish(run, 1)
    queue.update([1], 2)
    wait_for(lambda: is_evaluating(run, 1) and read_evaluation(run, 1).state == "running", TIMEOUT_S)
    for step in (2, 3, 4):
        publish(run, step)
        found = queue.update(wanted_steps(run, queue.plan), 2)
    assert {step: one.state for step, one in found.items()} == {
        1: "running",
        2: "skipped",
        3: "skipped",
        4: "waiting",
    }
    assert set(pins(run)) == {1, 4}
    release.touch()
    assert finish(queue)[4].state == "done"
    skipped = {event.step: event.reason for event in read_events(run, "evaluation_skipped")}
    assert skipped[3] == "max_waiting is 4, and the checkpoint of step 4 is newer"


def test_never_two_of_one_checkpoint(run: RunDir):
    """Several processes start evaluations at the same time, and one of them is the evaluation."""
    start(run, f"echo $TRAINKIT_STEP >> {run.path}/ran; sleep 0.3; {WRITES}")
    publish(run, 1)
    argv = module_argv("trainkit.capabilities.evaluations.follow", str(run.path))
    followers = [subprocess.Popen(argv, stdin=subprocess.DEVNULL) for _ in range(2)]
    assert [one.wait(TIMEOUT_S) for one in followers] == [0, 0]
    assert read_evaluations(run)[1].state == "done"
    assert (run.path / "ran").read_text() == "1\n"


def test_a_killed_evaluation_is_repeated_once(run: RunDir):
    queue = start(run, f"echo $$ >> {run.path}/ran; test -e {run.path}/go || sleep 600; {WRITES}")
    publish(run, 1)
    ran = run.path / "ran"
    for number in (1, 2):
        queue.update([1], 2)
        wait_for(lambda n=number: ran.exists() and len(ran.read_text().split()) == n, TIMEOUT_S)
        running = read_evaluation(run, 1)
        assert running is not None
        assert running.process is not None
        os.kill(running.process.pid, signal.SIGKILL)
        wait_for(lambda: not is_evaluating(run, 1), TIMEOUT_S)
        # The kernel also kills the command.
        command = int(ran.read_text().split()[-1])
        wait_for(lambda pid=command: not Path(f"/proc/{pid}").exists(), TIMEOUT_S)
    found = finish(queue)[1]
    assert (found.state, found.num_starts) == ("failed", 2)
    assert pins(run) == {}
    (run.path / "go").touch()
    assert main(["eval", str(run.path), "--all"]) == 0
    assert read_evaluations(run)[1].state == "done"


def test_the_command(run: RunDir, capsys: pytest.CaptureFixture[str]):
    start(run, WRITES)
    for step in (1, 2):
        publish(run, step)
    assert main(["eval", str(run.path), "--all", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["step"], one["metrics"]) for one in found] == [
        (1, {"eval/acc": 1.0}),
        (2, {"eval/acc": 2.0}),
    ]
    assert main(["eval", str(run.path), "--step", "1", "--command", "exit 3"]) == 1
    assert capsys.readouterr().out.splitlines()[0] == "step 1: failed: the command ended with exit code 3"
    assert main(["eval", str(run.path), "--step", "9"]) == 2


def test_a_process_of_another_host_may_still_run(run: RunDir):
    """Only a process that is known to have ended is repeated."""
    queue = start(run, WRITES)
    publish(run, 1)
    queue.update([1], 2)
    finish(queue)
    file = run.path / "evaluations" / "step-00000001" / "state.json"
    elsewhere = vars(ProcessId("elsewhere", "other", 1, 1))
    write_json(file, {**json.loads(file.read_text()), "state": "running", "process": elsewhere})
    assert queue.update([1], 2)[1].num_starts == 1
