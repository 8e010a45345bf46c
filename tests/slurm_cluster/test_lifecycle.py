"""Tests that clusters run next to each other and leave nothing behind, however they end."""

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.tmux import Tmux, needs_tmux
from tools.slurm_cluster import lifecycle, network
from tools.slurm_cluster.cluster import Cluster, attach, up
from tools.slurm_cluster.processes import Pid
from tools.slurm_cluster.state import State, all_states, boot_id

ROOT = Path(__file__).resolve().parents[2]
OWNED = """
import os, sys
from tools.slurm_cluster.cluster import up
from tools.slurm_cluster.processes import Pid
print(up(accounting=False, owner=Pid.of(os.getpid())).folder, flush=True)
sys.stdin.read()
"""
ESCAPES = "trap '' TERM; setsid -f sleep 4321; sleep 1234"


def traces(state: State) -> list[str]:
    """Return the traces of a cluster that remain on this machine."""
    found = [f"folder {state.folder}"] if state.path.exists() else []
    for what, text in {
        "link": network.ip("-o", "link"),
        "name": network.HOSTS_FILE.read_text(),
        "mount": Path("/proc/mounts").read_text(),
    }.items():
        own = (rf"\b{state.name}(h\d)?[:@-]", rf"{state.folder}/", rf"{state.name}$")
        found += [f"{what} {line}" for line in text.splitlines() if re.search("|".join(own), line)]
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            known = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if f"{state.folder}/".encode() in known:
            found.append(f"process {entry.name} {known[:80]!r}")
    found += [f"state {one.file}" for one in all_states() if one.folder == state.folder]
    return found


@pytest.fixture
def second(clusters_possible: None) -> Cluster:
    return up(accounting=False, options={"MinJobAge": "2"}, owner=Pid.of(os.getpid()))


def test_a_second_one_without_accounting(cluster, second, tmp_path):
    try:
        assert max(second.state.up_s, cluster.state.up_s) < 30
        assert not set(cluster.hosts) & set(second.hosts)
        for one in (cluster, second):
            shown = one.run(["srun", "-N4", "hostname"], timeout_s=120, check=True).stdout
            assert sorted(shown.split()) == one.hosts
        refused = second.run(["sacct"], timeout_s=120)
        assert (refused.returncode, refused.stderr) == (1, "Slurm accounting storage is disabled\n")
        argv = ["sbatch", "--parsable", "--output=/dev/null", "--account=any", "--wrap", ESCAPES]
        second.wait_for_job(second.run(argv, check=True).stdout.strip(), "RUNNING", timeout_s=120)
        assert attach(second.folder).node_states()[second.hosts[0]] == "mixed"
        # This shows that `traces` finds a running cluster.
        assert len({trace.split()[0] for trace in traces(second.state)}) >= 5
    finally:
        began = time.monotonic()
        second.down()
        took_s = time.monotonic() - began
    assert traces(second.state) == []
    assert took_s < 10
    second.down()
    assert cluster.node_states() == dict.fromkeys(cluster.hosts, "idle")


def test_what_a_killed_process_left_behind_goes_with_the_next(clusters_possible):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNED], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    folder = Path(owner.stdout.readline().strip())
    state = attach(folder).state
    lifecycle.clean_up()
    assert attach(folder).node_states()
    owner.kill()
    owner.communicate()
    assert state.abandoned
    lifecycle.clean_up()
    assert traces(state) == []


def test_after_a_restart_of_the_machine_no_process_is_taken_for_its_own(clusters_possible):
    state = lifecycle.claim(
        None, accounting=False, options={}, owner=None, num_hosts=4, slurm=None, confined=False
    )
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        state.processes = {"slurmctld": Pid.of(stranger.pid)}
        state.boot_id = "another"
        state.save()
        assert state.abandoned
        assert state.boot_id != boot_id()
        lifecycle.clean_up()
        assert traces(state) == []
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@needs_tmux
def test_a_shell_of_its_own(clusters_possible, tmp_path):
    environ = {**os.environ, "SHELL": "/bin/bash", "TMUX_TMPDIR": str(tmp_path)}
    with Tmux(tmp_path, 150, 50, ROOT, environ) as window:
        shell = [sys.executable, "-m", "tools.slurm_cluster", "shell", "--no-accounting"]
        window.enter(f"{shlex.join(shell)}; echo ended with $?")
        name = window.wait_for(r"^\((tk\d+)\) ", 200)[1]
        assert "Leave with `exit` or Ctrl-D" in window.screen
        assert re.search(rf"4 +idle {name}-node\[1-4\]", window.ask("sinfo --noheader --partition=high"))
        assert window.ask("which trainkit").endswith("bin/trainkit")
        # Ctrl-C goes to the command, not to the cluster. Before the command has started, Ctrl-C would be
        # lost.
        window.enter("sh -c 'echo be''gun; exec sleep 100'")
        window.wait_for("^begun$")
        window.keys("C-c")
        assert window.ask("echo there")
        (state,) = (state for state in all_states() if state.name == name)
        window.enter("exit 3")
        window.wait_for("^ended with 0$", 120)
    assert traces(state) == []
