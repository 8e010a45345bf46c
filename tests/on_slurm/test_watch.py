"""Tests `trainkit watch` in a terminal on the login node, while a run on two hosts is preempted."""

import re

import pytest

from tests.on_slurm.login import TRAINKIT, settings, wait_for
from tests.on_slurm.survival import start_preempting
from tests.on_slurm.test_signals import train
from tests.support.tmux import Tmux, needs_tmux
from trainkit.capabilities.health.samples import health_file


@needs_tmux
@pytest.mark.slow(seconds=30)
def test_a_run_of_two_hosts_and_its_preemption(login, tmp_path):
    run = train(login, "--partition", "low", *settings("logging.health_every_s=1"))
    hosts = login.cluster.hosts[:2]
    wait_for(lambda: all(health_file(run, host).exists() for host in hosts), "a sample of each host")
    environ = {**login.cluster.environ, **login.env}
    with Tmux(tmp_path, 80, 24, login.folder, environ) as terminal:
        terminal.type([*TRAINKIT, "watch", str(run.path), "--interval", "0.5"])
        first = int(terminal.wait_for(r"^progress .* step (\d[\d,]*) of 1,000,000$")[1].replace(",", ""))
        job_id = login.job_id(run)
        assert re.search(rf"^small +RUNNING +attempt 1 · job {job_id} · 2 nodes", terminal.screen, re.M)
        terminal.wait_for(r"^time +ran for \S+ · ETA \S+ · time limit in \S+: \S+ too short$")
        assert re.search(r"^── nodes: 2, no problems", terminal.screen, re.M)
        for host in hosts:
            terminal.wait_for(rf"^  {host} +\d+%")
        wait_for(lambda: step_on(terminal.screen) > first, "another step on the screen")
        terminal.resize(200, 50)
        terminal.wait_for(r"^grad norm +[\d.]+ {20,}[▁-█]{60,}$")
        start_preempting(login.cluster, 1)
        terminal.wait_for(r"^small +REQUEUEING", timeout_s=120)
        terminal.wait_for(r"attempt 1 stopped: saved after SIGTERM at a preemption; resumes \(restart 1\)")
        terminal.wait_for(r"^checkpoint step [\d,]+, \S+ ago · nothing at risk$")
        terminal.wait_for(r"^small +RUNNING +attempt 2 ", timeout_s=120)
        terminal.keys("q")
        terminal.wait_for(r"^\$$")
    login.trainkit("cancel", str(run.path), "--now")


def step_on(screen: str) -> int:
    """Return the step that a screen shows."""
    found = re.search(r"^progress .* step (\d[\d,]*) of", screen, re.MULTILINE)
    return 0 if found is None else int(found[1].replace(",", ""))
