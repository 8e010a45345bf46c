"""A Slurm cluster of several hosts on this machine, with methods to use it and to inject faults."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tools.slurm_cluster import cgroups, daemons, hosts, lifecycle, network, releases
from tools.slurm_cluster.processes import Pid
from tools.slurm_cluster.state import STATE_LINK, State

NUM_HOSTS = 4
COMPLETING_S = 15.0
"""A job that is still completing after this many seconds was on a powered-off host, because the time exceeds
KillWait.

slurmctld queries a powered-off host again only after a minute.
"""
BIN = Path(__file__).resolve().parents[2] / ".venv/bin"


class Cluster:
    """A running cluster. The login node is this machine, whose disks are shared; the user is root.

    Hosts are numbered from 1. The state is read from a file on each access, so that several processes can use
    the cluster concurrently.
    """

    def __init__(self, state: State) -> None:
        self._last = state

    @property
    def state(self) -> State:
        """The current state of the cluster or, after the cluster has been removed, its last known state."""
        if self._last.file.exists():
            current = State.load(self._last.file)
            if current.folder == self._last.folder:
                self._last = current
        return self._last

    @property
    def folder(self) -> Path:
        return self.state.path

    @property
    def name(self) -> str:
        return self.state.name

    @property
    def hosts(self) -> list[str]:
        """The names of the hosts, in order."""
        return [self.state.host(index) for index in self.state.hosts()]

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that a shell needs to use this cluster."""
        variables = daemons.environ(self.state)
        return {**variables, "PATH": f"{BIN}:{variables['PATH']}", "TEST_CLUSTER": str(self.folder)}

    @property
    def environ(self) -> dict[str, str]:
        """The complete environment of a command on the login node."""
        return {**os.environ, **self.variables}

    def address(self, index: int) -> str:
        """Return the IP address of a host."""
        return self.state.address(index)

    def local_disk(self, index: int) -> Path:
        """Return the folder on this machine that a host mounts as /var/tmp."""
        return hosts.folder(self.state, index) / "var-tmp"

    def log(self, name: str) -> str:
        """Return the content of a log: `slurmctld`, `slurmdbd`, or the name of a host for the log of its
        slurmd."""
        return (self.folder / "log" / f"{name}.log").read_text(errors="replace")

    def run(
        self,
        argv: Sequence[str | os.PathLike[str]],
        timeout_s: float = 60,
        host: int | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        stdin: str = "",
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node or on a host; `env` extends the cluster's environment.

        Raises subprocess.TimeoutExpired after `timeout_s` and, with `check`, RuntimeError with the output if
        the command fails.
        """
        words = [os.fspath(word) for word in argv]
        done = subprocess.run(
            self.command_line(words, host, os.fspath(cwd or "/")),
            env={**self.environ, **(env or {})},
            cwd=cwd,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        if check and done.returncode:
            raise RuntimeError(f"{words} ended with {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def command_line(self, argv: Sequence[str], host: int | None, cwd: str) -> list[str]:
        """Return the argv that runs a command in folder `cwd` on a host; run the argv with `environ`."""
        return list(argv) if host is None else hosts.inside(self.state, host, argv, cwd)

    def job(self, job_id: str) -> dict[str, str]:
        """Return the fields of `scontrol show job` for a job or array task; raise RuntimeError for an unknown
        job."""
        shown = self.run(["scontrol", "--oneliner", "show", "job", job_id], timeout_s=30, check=True).stdout
        return dict(re.findall(r"(\S+?)=(\S*)", shown.splitlines()[0]))

    def batch_script(self, job_id: str) -> bytes:
        """Return the batch script of a job, as Slurm stores it."""
        file = self.state.path / f"batch-script-{job_id}"
        self.run(["scontrol", "write", "batch_script", job_id, str(file)], timeout_s=30, check=True)
        return file.read_bytes()

    def wait_for_job(self, job_id: str, states: str | Sequence[str], timeout_s: float = 60) -> dict[str, str]:
        """Wait until a job is in one of the given states, and return the job's fields (see `job`).

        Raises TimeoutError after `timeout_s` seconds, and AssertionError immediately if the job ends in
        another state.
        """
        wanted = {states} if isinstance(states, str) else set(states)
        deadline = time.monotonic() + timeout_s
        while True:
            job = self.job(job_id)
            if job["JobState"] in wanted:
                return job
            if (
                job["JobState"] in {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"}
                and job["EndTime"] != "Unknown"
            ):
                raise AssertionError(f"job {job_id} ended as {job['JobState']}, not {wanted}: {job}")
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"job {job_id} is {job['JobState']} after {timeout_s} s, not {wanted}: {job}"
                )
            time.sleep(0.1)

    def node_states(self) -> dict[str, str]:
        """Return Slurm's state of every host: ``idle``, ``mixed``, ``allocated``, ``down*``, …"""
        shown = self.run(["sinfo", "--noheader", "--Node", "--format=%N %T"], timeout_s=30, check=True).stdout
        return dict(line.split() for line in shown.splitlines())

    def wait_for_node(self, index: int, state: str, timeout_s: float = 60) -> str:
        """Wait until the state of a host matches a regex such as ``down.*``, and return the state."""
        return self.wait_for_nodes([index], state, timeout_s)[self.state.host(index)]

    def wait_for_nodes(self, indices: Sequence[int], state: str, timeout_s: float = 60) -> dict[str, str]:
        """Wait until the states of the given hosts match a regex; return the states of all hosts.

        Raises TimeoutError after `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            states = self.node_states()
            if all(re.fullmatch(state, states[self.state.host(index)]) for index in indices):
                return states
            if time.monotonic() > deadline:
                raise TimeoutError(f"hosts {list(indices)} are not {state!r} after {timeout_s} s: {states}")
            time.sleep(0.05)

    def kill_host(self, index: int) -> None:
        """Power off a host without sending a signal to its processes."""
        hosts.power_off(self.state, index)

    def revive_host(self, index: int) -> None:
        """Power on a host again; to wait until the host is ready, use `wait_for_node`."""
        hosts.power_on(self.state, index)

    def limit_cpu(self, index: int, cpus: float) -> AbstractContextManager[None]:
        """Slow down a host while the block runs: limit the CPU time of all its processes to `cpus` CPUs."""
        state = self.state
        return cgroups.cpu_limited(state.host(index), partial(hosts.processes, state, index), cpus)

    def kill_slurmd(self, index: int) -> None:
        """Kill only the slurmd of a host; the jobs on the host keep running."""
        if not hosts.signal_slurmd(self.state, index, signal.SIGKILL):
            raise RuntimeError(f"slurmd of {self.state.host(index)} is not running")

    def start_slurmd(self, index: int) -> None:
        """Start the slurmd of a host that is powered on."""
        self.run(daemons.slurmd(self.state, index), host=index, timeout_s=30, check=True)

    def cut_off(self, index: int) -> None:
        """Disconnect a host from the network; the host itself keeps running."""
        network.set_cable(self.state, index, up=False)

    def reconnect(self, index: int) -> None:
        """Reconnect a host to the network."""
        network.set_cable(self.state, index, up=True)

    def stop_slurmctld(self, force: bool = False) -> None:
        """Stop slurmctld, with SIGKILL if `force` is true; jobs keep running."""
        daemons.stop(self.state, "slurmctld", force)

    def start_slurmctld(self) -> None:
        """Start slurmctld again, and return once it responds."""
        daemons.start_slurmctld(self.state)

    def restart_slurmctld(self) -> None:
        """Stop and start slurmctld."""
        self.stop_slurmctld()
        self.start_slurmctld()

    def stop_accounting(self) -> None:
        """Stop slurmdbd, so that sacct fails; jobs keep running."""
        daemons.stop(self.state, "slurmdbd")

    def start_accounting(self) -> None:
        """Start slurmdbd again, and return once it responds."""
        daemons.start_slurmdbd(self.state)

    def cancel_all(self, timeout_s: float = 60) -> None:
        """Cancel every job and wait until all hosts are idle."""
        self.run(["scancel", "--user=root"], timeout_s=30)
        began = time.monotonic()
        while queue := self.run(["squeue", "--noheader"], timeout_s=30, check=True).stdout:
            waited_s = time.monotonic() - began
            if waited_s > timeout_s:
                raise TimeoutError(f"still in the queue after {timeout_s} s:\n{queue}")
            if waited_s > COMPLETING_S:
                for name, state in self.node_states().items():
                    if state.startswith("completing"):
                        self._set_node(name, "down")
                        self._set_node(name, "resume")
            time.sleep(0.1)
        self.wait_for_nodes(list(self.state.hosts()), "idle", timeout_s)

    def restore(self, timeout_s: float = 60) -> None:
        """Undo all stops, kills, disconnections and drains, and cancel all jobs."""
        state = self.state
        if state.accounting and not daemons.is_running(state, "slurmdbd"):
            self.start_accounting()
        if not daemons.is_running(state, "slurmctld"):
            self.start_slurmctld()
        for index in state.hosts():
            if not hosts.is_on(state, index):
                self._set_node(state.host(index), "down")
                self.kill_host(index)
                self.revive_host(index)
                continue
            self.reconnect(index)
            if not hosts.signal_slurmd(state, index, 0):
                self.start_slurmd(index)
        for name, node_state in self.node_states().items():
            if node_state.startswith("drain"):
                self._set_node(name, "resume")
        self.cancel_all(timeout_s)

    def _set_node(self, name: str, state: str) -> None:
        argv = ["scontrol", "update", f"nodename={name}", f"state={state}", "reason=restore"]
        self.run(argv, timeout_s=30, check=True)

    def down(self) -> None:
        """Remove the cluster; do nothing if it has already been removed."""
        lifecycle.take_down(self.state)


def up(
    folder: Path | None = None,
    accounting: bool = True,
    options: Mapping[str, str] | None = None,
    owner: Pid | None = None,
    num_hosts: int = NUM_HOSTS,
    slurm: str | None = None,
    with_cgroups: bool = False,
    accounting_of: Cluster | None = None,
) -> Cluster:
    """Start a cluster and wait until its hosts are idle, after removing abandoned clusters.

    - `options` are lines of slurm.conf, for example ``{"MinJobAge": "5"}``.
    - `owner` is a process; the cluster is considered abandoned after this process has died.
    - `slurm` is a version such as ``24.11``; None means the installed version.
    - `with_cgroups` confines jobs to the CPUs and the memory that they request, with the CPUs of this
      machine.
    - `accounting_of` is a cluster whose slurmdbd also serves this cluster, so that ``--clusters`` reaches
      both.

    Raises RuntimeError if a daemon does not start, and NotPossible if the version is not available.
    """
    release = releases.find(slurm)
    if with_cgroups:
        cgroups.require()
    lifecycle.clean_up()
    began = time.monotonic()
    other = None if accounting_of is None else accounting_of.folder
    state = lifecycle.claim(folder, accounting, options or {}, owner, num_hosts, release, with_cgroups, other)
    try:
        lifecycle.start(state)
        cluster = Cluster(state)
        cluster.wait_for_nodes(list(state.hosts()), "idle", daemons.START_TIMEOUT_S)
        state.up_s = time.monotonic() - began
        state.save()
    except BaseException:
        lifecycle.take_down(state)
        raise
    return cluster


@contextmanager
def running(slurm: str | None = None, **options: Any) -> Iterator[Cluster]:
    """Start a cluster that this process owns, and remove it after the block; takes the options of `up`."""
    made = up(owner=Pid.of(os.getpid()), slurm=slurm, **options)
    try:
        yield made
    finally:
        made.down()


def attach(folder: Path) -> Cluster:
    """Return the cluster in a folder, started by any process; raise FileNotFoundError if there is none."""
    return Cluster(State.load(folder / STATE_LINK))
