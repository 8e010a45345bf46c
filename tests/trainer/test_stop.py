"""Tests a stop signal at any time: all ranks agree on it, save, and exit with code 75."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import (
    events,
    fork_workers,
    log_text,
    losses,
    make_attempt,
    start_workers,
    train,
    wait_for,
    wait_until,
)
from trainkit.run.manifest import find_damage, published
from trainkit.run.rundir import AttemptDir

pytestmark = pytest.mark.slow

LONG = ["train.steps=100000", "model.dropout=0.1"]


def newest_step(attempt: AttemptDir) -> int:
    """Return the step of the newest checkpoint, which is also the last computed step."""
    newest = published(attempt.run.checkpoints_dir)[-1]
    assert find_damage(newest) == ""
    assert newest.step == max(losses(attempt.run.path))
    return newest.step


def test_in_a_step_even_when_only_one_rank_is_signalled(tmp_path):
    attempt = make_attempt(tmp_path / "run", LONG, 2)
    procs = fork_workers(attempt, 2)
    wait_until(lambda: len(losses(attempt.run.path)) >= 3)
    procs[1].send_signal(signal.SIGINT)  # the other tests send the other signals
    assert wait_for(procs) == [75, 75], log_text(attempt)
    assert newest_step(attempt) >= 3


def test_during_start_up_even_when_only_one_rank_is_signalled(tmp_path):
    """Python needs a moment before it can handle a signal, so the test waits for its handler."""
    attempt = make_attempt(tmp_path / "run", LONG, 2)
    procs = start_workers(attempt, 2)
    wait_until(lambda: handles_sigterm(procs[1].pid))
    procs[1].send_signal(signal.SIGTERM)
    assert wait_for(procs) == [75, 75], log_text(attempt)


def handles_sigterm(pid: int) -> bool:
    return has_signal(pid, "SigCgt", signal.SIGTERM)


def is_pending(pid: int, number: signal.Signals) -> bool:
    """Return whether a signal is pending for the process. A second one would then be lost."""
    return has_signal(pid, "ShdPnd", number)


def has_signal(pid: int, mask: str, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    found = next(line for line in status.splitlines() if line.startswith(mask))
    return bool(int(found.split()[1], 16) & (1 << (number - 1)))


def signal_in_validation() -> None:
    """Send a stop signal to the rank in the middle of its first validation."""
    from trainkit.trainer.progress import Progress

    enter, num_batches = Progress.enter, 0

    def enter_and_signal(progress: Progress, phase: Any) -> None:
        nonlocal num_batches
        num_batches += phase == "evaluate"
        if phase == "evaluate" and num_batches == 10:
            os.kill(os.getpid(), signal.SIGUSR2)
        enter(progress, phase)

    Progress.enter = enter_and_signal  # type: ignore[method-assign]


def test_during_validation_which_is_made_up_for_later(tmp_path):
    options = ["train.steps=3", "train.eval_every=2", "train.eval_at_start=false"]
    options.append("train.eval_batches=20")
    train(tmp_path / "whole", options)
    attempt = make_attempt(tmp_path / "cut", options)
    assert wait_for(fork_workers(attempt, first=signal_in_validation)) == [75], log_text(attempt)
    assert not events(attempt.run.path, "evaluated")
    train(tmp_path / "cut", options)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    cut, whole = (events(tmp_path / name, "evaluated") for name in ("cut", "whole"))
    assert [(e["step"], e["val_loss"]) for e in cut] == [(e["step"], e["val_loss"]) for e in whole]


def test_during_an_asynchronous_save(tmp_path):
    attempt = make_attempt(tmp_path / "run", [*LONG, "checkpoint.every_steps=2", "model.preset=mini"], 2)
    procs = fork_workers(attempt, 2)
    wait_until(lambda: events(attempt.run.path, "checkpoint_begin"))
    for proc in procs:
        proc.send_signal(signal.SIGTERM)
    assert wait_for(procs) == [75, 75], log_text(attempt)
    newest_step(attempt)


def compile_quickly() -> None:
    """Compile without the code of Inductor."""
    import torch

    torch.compile = partial(torch.compile, backend="aot_eager")


def test_during_the_first_compile(tmp_path):
    attempt = make_attempt(tmp_path / "run", [*LONG, "parallel.compile=true", "requeue.grace_s=600"])
    procs = fork_workers(attempt, first=compile_quickly)
    wait_until(lambda: events(attempt.run.path, "training"))
    time.sleep(0.5)
    procs[0].send_signal(signal.SIGTERM)
    assert wait_for(procs, 600) == [75], log_text(attempt)
    assert newest_step(attempt) == 1


def test_second_interrupt_ends_at_once(tmp_path):
    """Rank 1 is suspended, so rank 0 waits for it in a collective and cannot save."""
    attempt = make_attempt(tmp_path / "run", LONG, 2)
    procs = fork_workers(attempt, 2)
    wait_until(lambda: len(losses(attempt.run.path)) >= 3)
    os.kill(procs[1].pid, signal.SIGSTOP)
    time.sleep(0.3)
    procs[0].send_signal(signal.SIGINT)
    time.sleep(0.3)
    wait_until(lambda: not is_pending(procs[0].pid, signal.SIGINT))
    assert procs[0].poll() is None
    procs[0].send_signal(signal.SIGINT)
    assert procs[0].wait(timeout=5) == 130
    procs[1].kill()
    wait_for(procs[1:])


def test_stuck_rank_leaves_before_the_deadline(tmp_path):
    took_s = 0.0
    for number in range(3):  # the machine may be suspended for a second, so the test tries again
        took_s = leave_stuck(tmp_path / f"run-{number}")
        if took_s < 5.0:
            break
    assert 3.0 < took_s < 5.0


def leave_stuck(run_dir: Path) -> float:
    """Return the seconds that a rank takes to exit if its peer is suspended. Its grace time is 5 s."""
    attempt = make_attempt(run_dir, [*LONG, "requeue.grace_s=5", "checkpoint.every_steps=1"], 2)
    procs = fork_workers(attempt, 2)
    wait_until(lambda: len(published(attempt.run.checkpoints_dir)) >= 1)
    os.kill(procs[1].pid, signal.SIGSTOP)
    time.sleep(0.3)
    started = time.monotonic()
    procs[0].send_signal(signal.SIGTERM)
    try:
        assert procs[0].wait(timeout=60) == 70
        took_s = time.monotonic() - started
    finally:
        procs[1].kill()
        wait_for(procs[1:])
    assert "exiting before" in attempt.rank_log(0).read_text()
    assert "Thread" in (attempt.stacks_dir / "rank-0000.txt").read_text()
    assert all(find_damage(checkpoint) == "" for checkpoint in published(attempt.run.checkpoints_dir))
    return took_s


def test_first_preparation_of_the_data_can_be_left(tmp_path):
    (tmp_path / "texts").mkdir()
    text = tmp_path / "texts" / "0.txt"
    with text.open("w") as stream:
        for number in range(400):
            stream.write(f"{number} some line of text that says nothing much\n" * 5000)
    for number in range(1, 20):
        (tmp_path / "texts" / f"{number}.txt").hardlink_to(text)
    took_s = 0.0
    for number in range(3):  # the machine may be suspended for a second
        took_s = leave_preparation(tmp_path / f"run-{number}", text.parent)
        if took_s < 5.0:
            break
    assert took_s < 5.0


def leave_preparation(run_dir: Path, texts: Path) -> float:
    """Return the seconds that a rank takes to exit after a signal while it prepares its data."""
    cache = run_dir.with_name(f"{run_dir.name}-cache")
    attempt = make_attempt(run_dir, [*LONG, f"data.source={texts}", f"data.cache_dir={cache}"])
    procs = fork_workers(attempt)
    wait_until(cache.exists)
    started = time.monotonic()
    procs[0].send_signal(signal.SIGTERM)
    assert wait_for(procs) == [75]
    took_s = time.monotonic() - started
    assert losses(run_dir) == {}
    return took_s


def test_while_a_peer_is_missing(tmp_path):
    attempt = make_attempt(tmp_path / "run", LONG, 2)
    procs = fork_workers(attempt, 2)
    procs[1].kill()
    wait_until(lambda: handles_sigterm(procs[0].pid))
    time.sleep(1.0)
    assert procs[0].poll() is None
    procs[0].send_signal(signal.SIGTERM)
    assert wait_for(procs) == [75, -signal.SIGKILL], log_text(attempt)
