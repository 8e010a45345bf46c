"""Tests jobs that get stop signals: they save, are requeued if requested, and compute no step twice."""

import json
import os
import signal

import pytest

from tests.on_slurm.broken_runs import diagnosed
from tests.on_slurm.login import (
    BACKENDS,
    DEAF,
    DIES_ONCE,
    HOLD,
    ON_TWO_HOSTS,
    TRAINKIT,
    Login,
    events,
    log_of,
    settings,
    wait_for,
)
from tests.on_slurm.preemptions import Shape, hurry, notes_about_nodes
from tests.on_slurm.survival import (
    WAITS_IN_EACH_STEP,
    preempt,
    preemption,
    saved_step,
    set_preemption,
    start_preempting,
)
from tests.support.programs import ranks_of
from trainkit.run.end import KILLED
from trainkit.run.files import read_json, read_jsonl, write_json
from trainkit.run.rundir import RunDir

ENDLESS = settings(
    *("model.preset=nano", "data.seq_len=64", "train.device_batch_size=4", "train.global_batch_size=8"),
    *("train.steps=1000000", "train.log_every=1", "train.eval_every=null", "checkpoint.every_steps=null"),
    # One thread avoids two threads that wait for each other, which makes the steps of a busy machine long.
    *("precision.dtype=fp32", "logging.tensorboard=false", "resources.cpus_per_gpu=1"),
)


def steps_of(run: RunDir) -> list[tuple[int, int]]:
    """Return the attempt and step of every line of the metrics, in the order of the file."""
    return [(record["attempt"], record["step"]) for record in read_jsonl(run.metrics_file)]


def train(login: Login, *args: str) -> RunDir:
    """Return a training run without an end that has computed a few steps."""
    login.script(WAITS_IN_EACH_STEP, "sitecustomize.py")
    run = login.submit(*ON_TWO_HOSTS, *ENDLESS, *args)
    wait_for(lambda: len(steps_of(run)) >= 3, "the first steps")
    return run


SAVES_ON_USR2 = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: print("bypasses SIGTERM", flush=True))
signal.signal(signal.SIGUSR2, lambda *_: (print("saves", flush=True), sys.exit(75)))
print("attempt", os.environ["TRAINKIT_JOB_ATTEMPT"], "rank", os.environ["RANK"], flush=True)
while True:
    signal.pause()
"""
"""A script that handles the signals of its job as submitit does."""


@pytest.mark.smoke
def test_a_preemption_that_tells_only_the_ranks_saves(login):
    """Slurm also reports the preemption in the log of an earlier attempt, whose rank was killed."""
    dies = login.script(DIES_ONCE)
    login.script(SAVES_ON_USR2, "saves_on_usr2.py")
    with preemption(login.cluster):
        set_preemption(login.cluster, "REQUEUE", 60)  # six ranks may take longer than 10 s on a busy machine
        low = (*ON_TWO_HOSTS, "--partition", "low")
        usr2 = settings("requeue.signal=USR2")
        killed = login.submit(*low, "--backend", "submitit", "--", "python", dies)
        trained = train(login, "--partition", "low")
        waiting = login.submit(*low, *usr2, "--", "python", "saves_on_usr2.py")
        runs = [(1, trained), (2, killed), (1, waiting)]
        for attempt, run in runs[1:]:
            for rank in range(2):
                login.wait_for_log(run, f"attempt {attempt} rank {rank}", rank, attempt)
        # The runs must not start again before the end of the test, because the test reads their files.
        start_preempting(login.cluster, 600)
        for attempt, run in runs:
            end = login.wait_for_end(run, attempt)
            assert (end["state"], end["action"], end["exit_code"]) == ("stopped", "requeue", 75)
            assert (end["cause"], f"(restart {attempt})" in end["reason"]) == ("preempted", True)
            assert login.status(run)["state"] == "requeueing"
        assert saved_step(trained) == steps_of(trained)[-1][1]
        log, line = killed.attempt(1).supervisor_log, "attempt 1: restart: "
        wait_for(lambda: "*** JOB " in log.read_text().partition(line)[2], "Slurm's line")
        found = [diagnosed(login, killed, attempt) for attempt in (1, 2)]
        assert [(one["name"], one["rank"]) for one in found] == [("killed", 1), ("preempted", None)]


def test_a_requeued_job_goes_on_as_the_next_attempt(login):
    run = login.submit_listeners("--nodes", "1", num_ranks=1)
    reader = login.start([*TRAINKIT, "logs", str(run.path), "--follow"])
    refused = login.trainkit("resume", str(run.path))
    assert (refused.returncode, "is running as" in refused.stderr) == (2, True)
    asked = login.trainkit("requeue", str(run.path), "--json")
    assert json.loads(asked.stdout)["attempt"] == 2
    login.wait_for_log(run, "attempt 2 rank 0", attempt=2)
    assert login.trainkit("cancel", str(run.path), "--wait").returncode == 0
    assert login.wait_for_end(run, 2)["state"] == "cancelled"
    end = login.wait_for_end(run, 1)
    assert end["reason"].startswith("saved after SIGUSR2"), f"Slurm ended attempt 1 in another way: {end}"
    shown, _ = reader.communicate(timeout=240)
    assert shown == log_of(run, attempt=1) + log_of(run, attempt=2)
    assert "requeue_decision" in events(run, 1)


def listeners(login: Login) -> list[RunDir]:
    """Submit a run of listening ranks for each backend."""
    return [login.submit_listeners("--backend", backend, *ON_TWO_HOSTS) for backend in BACKENDS]


def test_cancel_saves(login):
    runs = listeners(login)
    for name in ("last", str(runs[0].path)):
        done = login.trainkit("cancel", name, "--wait")
        assert done.returncode == 0, done.stderr
    for run in runs:
        end = login.wait_for_end(run)
        assert (end["state"], end["reason"]) == ("cancelled", "saved after SIGTERM")
        assert [log_of(run, rank).splitlines()[-1] for rank in range(2)] == ["asked by SIGTERM"] * 2
    login.wait_until_idle()


def test_a_notice_for_the_batch_shell_alone_reaches_the_ranks(login):
    run = login.submit_listeners(*ON_TWO_HOSTS)
    login.run(["scancel", "--batch", "--signal=TERM", login.job_id(run)], check=True)
    end = login.wait_for_end(run)
    assert (end["state"], end["reason"]) == ("stopped", "saved after SIGTERM")
    # The signal is sent through the agents, because srun would end the whole step at once on SIGTERM.
    notices = [event["signal"] for event in read_jsonl(run.events_file) if event["event"] == "signal"]
    assert notices == ["SIGUSR2"]
    assert [log_of(run, rank).splitlines()[-1] for rank in range(2)] == ["asked by SIGTERM"] * 2


def test_cancel_now_kills(login):
    runs = listeners(login)
    for run in runs:
        assert login.trainkit("cancel", str(run.path), "--now").returncode == 0
        assert login.status(run)["state"] == "cancelled"
    login.wait_until_idle()
    for run in runs:
        assert login.wait_for_end(run)["state"] == "cancelled"
        assert log_of(run) == "attempt 1 rank 0 of 2\n"
        assert login.wait_for_end(run)["reason"] == KILLED


def test_what_does_not_listen_is_killed_after_the_grace_time(login):
    deaf = login.script(DEAF)
    run = login.submit("--set", "requeue.grace_s=1", *ON_TWO_HOSTS, "--", "python", deaf)
    login.wait_for_log(run, "deaf")
    login.trainkit("cancel", str(run.path))
    end = login.wait_for_end(run)
    assert (end["state"], end["verdict"]) == ("cancelled", None)
    assert "the grace time" in end["reason"]


def test_cancel_of_a_job_that_just_starts(login):
    for backend in BACKENDS:
        run = login.submit("--backend", backend, *ON_TWO_HOSTS, "--", "python", "listens.py")
        login.wait_for_job(run, "RUNNING")
        done = login.trainkit("cancel", str(run.path), "--wait")
        assert done.returncode == 0, done.stderr + login.logs_and_attempts(run)
        assert login.wait_for_end(run)["state"] == "cancelled"


def test_a_job_whose_id_was_never_learned_is_found(login):
    run = login.submit("--gpus-per-node", "1", *HOLD, "--", "true")
    job_id = login.job_id(run)
    assert login.status(run)["state"] == "pending"
    job = read_json(run.job_file)
    write_json(run.job_file, {**job, "attempts": []})
    refused = login.trainkit("resume", str(run.path))
    assert (refused.returncode, f"is running as {job_id}" in refused.stderr) == (2, True)
    write_json(run.job_file, {**job, "attempts": []})
    cancelled = login.trainkit("cancel", str(run.path))
    assert (cancelled.returncode, "from the queue" in cancelled.stderr) == (0, True)
    assert login.status(run)["state"] == "cancelled"
    assert login.jobs() == []


def test_preemptions_are_neither_crashes_nor_faults_of_nodes(login):
    """A second crash after the preemption would exceed `requeue.max_crashes`, a first one does not."""
    shapes = [Shape(1, 3, "gpu", "submitit"), Shape(2, 2, "gpu", "sbatch"), Shape(1, 4, "node", "sbatch")]
    runs = [(shape, shape.submit(login)) for shape in (*shapes, Shape(2, 1, "node", "submitit"))]
    for shape, run in runs:
        shape.wait_for_ranks(login, run, 1)
        hurry(run)
    preempt(login.cluster)
    for shape, run in runs:
        end = login.wait_for_end(run)
        found = (end["action"], end["cause"], end["verdict"])
        assert found == ("requeue", "preempted", None), f"{shape}: {end}"
    (shape, by_itself), (other, by_person) = runs[:2]
    shape.wait_for_ranks(login, by_itself, 2)
    os.kill(ranks_of(by_itself)[0], signal.SIGTERM)
    end = login.wait_for_end(by_itself, 2)
    assert (end["action"], end["cause"]) == ("restart", "crash"), "the preemption says nothing of it"
    assert (end["verdict"]["rank"], end["verdict"]["message"]) == (0, "killed by SIGTERM")
    other.wait_for_ranks(login, by_person, 2)
    hurry(by_person)
    login.run(["scancel", login.job_id(by_person)], check=True)
    end = login.wait_for_end(by_person, 2)
    assert (end["state"], end["action"], end["verdict"]) == ("stopped", "stopped", None)
    assert notes_about_nodes(login) == []
