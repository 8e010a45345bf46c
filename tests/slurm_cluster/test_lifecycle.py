"""Tests that clusters have separate hosts, run next to each other, and leave nothing behind."""

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
from tools.slurm_cluster.state import State, all_states

ROOT = Path(__file__).resolve().parents[2]
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
        assert refused.returncode == 1
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


@pytest.mark.parametrize("ends", ["owner", "boot"])
def test_an_abandoned_cluster_is_removed_and_no_other_process_is_taken_for_its_own(clusters_possible, ends):
    owner, stranger = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    given = {"num_hosts": 4, "slurm": None, "confined": False, "owner": Pid.of(owner.pid)}
    state = lifecycle.claim(None, accounting=False, options={}, **given)
    try:
        lifecycle.clean_up()
        assert traces(state) != []
        if ends == "owner":
            owner.kill()
            owner.wait()
        else:
            state.processes, state.boot_id = {"slurmctld": Pid.of(stranger.pid)}, "another"
            state.save()
        assert state.abandoned
        lifecycle.clean_up()
        assert traces(state) == []
        assert stranger.poll() is None
    finally:
        for process in (owner, stranger):
            process.kill()
            process.wait()


def test_local_disks_are_private_and_others_shared(cluster, tmp_path):
    show = f"hostname > /var/tmp/mine; hostname > /dev/shm/mine; hostname > {tmp_path}/$SLURM_NODEID"
    cluster.run(["srun", "-N4", "sh", "-c", show], check=True)
    assert [(tmp_path / str(rank)).read_text().strip() for rank in range(4)] == cluster.hosts
    for index, name in enumerate(cluster.hosts, start=1):
        shown = cluster.run(["cat", "/var/tmp/mine", "/dev/shm/mine"], host=index, check=True).stdout
        assert shown == f"{name}\n{name}\n" == 2 * (cluster.local_disk(index) / "mine").read_text()
    assert not Path("/var/tmp/mine").exists()


@needs_tmux
def test_a_shell_of_its_own(clusters_possible, tmp_path):
    environ = {**os.environ, "SHELL": "/bin/bash", "TMUX_TMPDIR": str(tmp_path)}
    with Tmux(tmp_path, 150, 50, ROOT, environ) as window:
        shell = [sys.executable, "-m", "tools.slurm_cluster", "shell", "--no-accounting"]
        window.enter(f"{shlex.join(shell)}; echo ended with $?")
        name = window.wait_for(r"^\((tk\d+)\) ", 200)[1]
        assert re.search(rf"idle {name}-node\[1-4\]", window.ask("sinfo --noheader --partition=high"))
        assert window.ask("which trainkit").endswith("bin/trainkit")
        # Ctrl-C goes to the command, not to the cluster.
        window.enter("sh -c 'echo be''gun; exec sleep 100'")
        window.wait_for("^begun$")
        window.keys("C-c")
        assert window.ask("echo there")
        (state,) = (state for state in all_states() if state.name == name)
        window.enter("exit 3")
        window.wait_for("^ended with 0$", 120)
    assert traces(state) == []
