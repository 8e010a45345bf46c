"""Tests that a drill leaves no running process after Ctrl-C during the start of a run."""

import os
import signal
from types import SimpleNamespace

import pytest
from job_tree import wait_for

from trainkit.capabilities.drill import command
from trainkit.run.end import read_end
from trainkit.run.record import read_job
from trainkit.run.rundir import RunDir


def is_killed(run):
    wait_for(lambda: read_job(run).newest.alive() is False)
    return read_end(run.attempt(1)).state == "cancelled"


def test_of_a_drill(start_job, tmp_path, monkeypatch):
    def create_run(*args):
        run = start_job("time.sleep(600)").run
        return SimpleNamespace(run=run, job=read_job(run))

    monkeypatch.setattr(command, "create_run", create_run)
    monkeypatch.setattr(command, "print_created", lambda created: None)
    monkeypatch.setattr(command, "start_run", lambda *args: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        list(command.Drill(tmp_path, None, None, 0, None, print).run([]))
    assert is_killed(RunDir(tmp_path / "run"))
