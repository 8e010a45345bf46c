"""Tests `trainkit shell`, `attach`, `debug` and `watch` in a terminal, and the processes that run there."""

import json
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.on_slurm.login import TRAINKIT, Login, settings, wait_for
from tests.on_slurm.survival import start_preempting
from tests.on_slurm.test_signals import train
from tests.support.tmux import Tmux, needs_tmux
from trainkit.capabilities.health.samples import health_file


@contextmanager
def terminal(login: Login, *args: str) -> Iterator[Tmux]:
    """Return the terminal where a command runs."""
    environ = {**login.cluster.environ, **login.env}
    with Tmux(login.folder, 200, 50, login.folder, environ) as window:
        window.enter(f"{shlex.join([*TRAINKIT, *args])}; echo ended with $?")
        yield window


def leave(shell: Tmux) -> None:
    """Exit a shell, and check that the command around it succeeds."""
    shell.enter("exit")
    shell.wait_for("^ended with 0$")


@needs_tmux
def test_a_shell_in_an_allocation_of_two_nodes(login):
    config = login.folder / "shell.yaml"
    config.write_text("name: x\ndevice: cpu\nlaunch: {env: {FROM_CONFIG: it's here}}\n")
    with terminal(
        login, "shell", str(config), "--nodes", "2", "--gpus-per-node", "2", "--time", "5"
    ) as shell:
        shell.wait_for("Granted job allocation")
        assert shell.ask("hostname") == login.cluster.hosts[0]
        assert shell.ask("pwd") == str(login.folder)
        assert shell.ask('echo "$FROM_CONFIG"') == "it's here"
        found = json.loads(shell.ask("trainkit env --json"))
        assert (found["is_rank"], found["rank"]) == (False, None)
        assert "interactive" in found["reason"]
        answer = shell.ask("srun trainkit env --json").splitlines()
        ranks = sorted(
            (json.loads(line) for line in answer if line.startswith("{")), key=lambda one: one["rank"]
        )
        assert [(one["rank"], one["local_rank"], one["node_rank"]) for one in ranks] == [
            (0, 0, 0),
            (1, 1, 0),
            (2, 0, 1),
            (3, 1, 1),
        ]
        assert ranks[0]["hosts"] == login.cluster.hosts[:2]
        leave(shell)
    login.wait_until_idle()
    assert not list((login.folder / "runs").glob(".shell*"))


def test_a_shell_needs_a_terminal_and_what_it_would_start_can_be_copied(login):
    shell = ("shell", "--nodes", "1", "--constraint", "rack1|rack2")
    done = login.trainkit(*shell)
    assert (done.returncode, "needs a terminal" in done.stderr) == (2, True)
    done = login.trainkit(*shell, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "--constraint=rack1|rack2" in shlex.split(done.stdout.splitlines()[0])
    assert "'--constraint=rack1|rack2'" in done.stdout
    assert not (login.folder / "runs").exists()
    assert login.jobs() == []


@needs_tmux
def test_attach_to_a_node_of_a_busy_job(login):
    args = ["--nodes", "2", "--gpus-per-node", "1", "--set", "resources.extra.exclusive=true"]
    run = login.submit_listeners(*args)
    for node in (0, 1):
        with terminal(login, "attach", str(run.path), "--node", str(node)) as shell:
            assert shell.ask("hostname") == login.cluster.hosts[node]
            assert "listens.py" in shell.ask("ps -eo args")
            found = json.loads(shell.ask("trainkit env --json"))
            assert (found["world_size"], found["hosts"]) == (1, [login.cluster.hosts[node]])
            leave(shell)
    assert login.trainkit("attach", str(run.path), "--node", "2").returncode == 2
    assert login.status(run)["state"] in ("running", "starting")
    login.trainkit("cancel", str(run.path), "--now")
    refused = login.trainkit("attach", str(run.path))
    assert refused.returncode == 2


@needs_tmux
def test_the_debugger_of_a_rank_on_another_host(login, tmp_path):
    """The login node does not see the temporary files of the host."""
    login.script("import os\nnode = os.environ['SLURMD_NODENAME']\nbreakpoint()\nprint('over')\n")
    of_host = tempfile.mkdtemp(prefix="of-host-")  # the path must be shorter than the limit for sockets
    setting = f"launch.env.TMPDIR={of_host}"
    run = login.submit("--nodes", "2", "--gpus-per-node", "1", "--set", setting, "--", "python", "script.py")
    folder = run.attempt(1).path / "debugger"
    wait_for(lambda: len([*folder.glob("rank-*.json")]) == 2, "both ranks at breakpoint()")
    hidden = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', of_host]
    environ = {**login.cluster.environ, **login.env}
    with Tmux(tmp_path, 140, 40, login.folder, environ) as window:
        window.type([*hidden, *TRAINKIT, "debug", str(run.path), "--rank", "1"])
        window.wait_for(r"\(Pdb\)$", 60)
        window.keys("p", "Space", "n", "o", "d", "e", "Enter")
        window.wait_for(f"^'{login.cluster.hosts[1]}'$")
        window.keys("c", "Enter")
        window.wait_for(r"^\$$", 60)
    login.finish(run)
    shutil.rmtree(of_host)


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
        start_preempting(login.cluster, 600)
        terminal.wait_for(r"^small +REQUEUEING", timeout_s=120)
        terminal.wait_for(r"attempt 1 stopped: saved after SIGTERM at a preemption; resumes \(restart 1\)")
        terminal.wait_for(r"^checkpoint step [\d,]+, \S+ ago · nothing at risk$")
        terminal.keys("q")
        terminal.wait_for(r"^\$$")
    login.trainkit("cancel", str(run.path), "--now")


def step_on(screen: str) -> int:
    """Return the step that a screen shows."""
    found = re.search(r"^progress .* step (\d[\d,]*) of", screen, re.MULTILINE)
    return 0 if found is None else int(found[1].replace(",", ""))
