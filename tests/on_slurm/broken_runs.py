"""Runs that fail for real on several hosts of a Slurm cluster, each for a reason of its own.

`python -m tests.on_slurm.broken_runs [NAME…]` makes runs, all of them without NAME, and prints what
`trainkit diagnose` reports for each next to the truth. `--record` also writes their folders to
tests/observe/broken_runs, without the names of the cluster and of this machine. `--keep DIR` keeps the runs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path
from typing import Any

from tests.on_slurm import survival
from tests.on_slurm.login import DEAF, Login, settings, wait_for
from tests.on_slurm.shared_disk import shared_small_disk
from tests.support import broken_runs
from tests.support.disks import fill
from tools.slurm_cluster.cluster import Cluster, up
from tools.slurm_cluster.processes import Pid
from trainkit.control.jobs import query_attempt_status
from trainkit.rundir import AttemptDir, RunDir, read_end
from trainkit.slurm.jobs import JobInfo

TIMEOUT_S = 100.0
ON_TWO_HOSTS = ("--nodes", "2", "--gpus-per-node", "1")
ONCE = settings("requeue.max=0", "requeue.grace_s=10")
GROUP = "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n"
WAIT = "if rank != 1: signal.pause()\n"
Make = Callable[[Login], RunDir]


@dataclass(frozen=True)
class Broken:
    """How a run is broken, and what is true of it: the cause, and the rank and host that failed first.

    Without a host, all ranks fail alike, or none does.
    """

    make: Make
    name: str | None
    """The signature; None for a failure that only the user's code explains, and when nothing failed."""
    rank: int | None = None
    host: int | None = None
    """The number of the host in the cluster."""
    attempt: int = 1
    cgroups: bool = False

    def is_right(self, found: dict[str, Any], hosts: Sequence[str]) -> bool:
        wanted: dict[str, Any] = {"name": self.name}
        if self.host is not None:
            wanted |= {"rank": self.rank, "host": hosts[self.host - 1]}
        return {key: found[key] for key in wanted} == wanted


BROKEN: dict[str, Broken] = {}


def broken(
    name: str | None, rank: int | None = None, host: int | None = None, **more: Any
) -> Callable[[Make], Make]:
    """Register a function that makes a broken run; its name is that of the run."""

    def register(make: Make) -> Make:
        BROKEN[make.__name__.replace("_", "-")] = Broken(make, name, rank, host, **more)
        return make

    return register


# What the runs are made of.


def command_run(login: Login, code: str, *options: str, launcher: str | None = None) -> RunDir:
    """A run of a script on two hosts that fails once."""
    script = login.script(broken_runs.PREAMBLE + code + "\n")
    launch = ["--launcher", launcher] if launcher else []
    command = [script] if launcher else ["python", script]
    return login.submit(*ON_TWO_HOSTS, *ONCE, *options, *launch, "--", *command)


def failed_command(login: Login, code: str, *options: str, launcher: str | None = None) -> RunDir:
    run = command_run(login, code, *options, launcher=launcher)
    login.wait_for_end(run, timeout_s=TIMEOUT_S)
    return run


def training(login: Login, *options: str, num_steps: int = 100_000) -> RunDir:
    """A training on two hosts, which `requeue.max=0` lets fail once."""
    config = survival.survivor_config(login.folder, num_steps)
    return login.submit(*ONCE, *options, config=config)


def running(login: Login, *options: str) -> RunDir:
    """A training that computes steps."""
    run = training(login, *options)
    survival.wait_for_steps(run, 1, 3)
    return run


def end_of(login: Login, run: RunDir) -> RunDir:
    login.wait_for_end(run, timeout_s=TIMEOUT_S)
    return run


def over(login: Login, run: RunDir) -> RunDir:
    """A run whose job has left the queue, whether or not it recorded its end."""
    login.wait_until_idle(TIMEOUT_S)
    return run


def on_host(login: Login, host: int, *argv: str) -> None:
    login.cluster.run(argv, host=host, check=True)


@contextmanager
def changed_host(login: Login, host: int, change: Sequence[str], undo: Sequence[str]) -> Iterator[None]:
    """Change something on one host only: each has its own mounts and its own network."""
    on_host(login, host, *change)
    try:
        yield
    finally:
        login.cluster.run(undo, host=host)


@contextmanager
def hidden(login: Login, host: int, folder: Path) -> Iterator[None]:
    """A host that sees an empty folder in the place of another one."""
    with changed_host(
        login, host, ["mount", "-t", "tmpfs", "tmpfs", str(folder)], ["umount", "--lazy", str(folder)]
    ):
        yield


# Slurm ends the job.


@broken("preempted")
def preempted_and_requeued(login: Login) -> RunDir:
    run = login.submit_listeners("--partition", "low", *ON_TWO_HOSTS)
    survival.preempt(login.cluster)
    login.wait_for_log(run, "attempt 2", attempt=2)
    login.trainkit("cancel", str(run.path), "--now")
    return end_of(login, run)


@broken("preempted")
def preempted_for_good(login: Login) -> RunDir:
    run = login.submit_listeners("--partition", "low", *ON_TWO_HOSTS, *settings("requeue.on=[crash]"))
    survival.preempt(login.cluster)
    return end_of(login, run)


@broken("preempted")
def preempted_without_notice(login: Login) -> RunDir:
    """No grace time, and the ranks do not listen: nothing is left to record the end."""
    with survival.preemption(login.cluster):
        survival.set_preemption(login.cluster, "CANCEL", 0)
        run = command_run(login, DEAF, "--partition", "low", *settings("requeue.on=[crash]"))
        for rank in range(2):
            login.wait_for_log(run, "deaf", rank)
        survival.preempt(login.cluster)
    return over(login, run)


@broken("time-limit")
def time_limit(login: Login) -> RunDir:
    run = login.submit_listeners(
        *ON_TWO_HOSTS, *settings("resources.time='1'", "requeue.on=[crash]", "requeue.grace_s=10")
    )
    return end_of(login, run)


@broken("time-limit")
def time_limit_deaf(login: Login) -> RunDir:
    """The ranks do not stop when asked: Slurm kills them at the limit."""
    run = command_run(login, DEAF, *settings("resources.time='1'", "requeue.on=[crash]"))
    return over(login, run)


@broken("cancelled")
def scancel_by_hand(login: Login) -> RunDir:
    run = login.submit_listeners(*ON_TWO_HOSTS)
    login.run(["scancel", login.job_id(run)], check=True)
    return end_of(login, run)


@broken("cancelled")
def cancel_now(login: Login) -> RunDir:
    run = login.submit_listeners(*ON_TWO_HOSTS)
    login.trainkit("cancel", str(run.path), "--now")
    return end_of(login, run)


@broken("requeued")
def requeued(login: Login) -> RunDir:
    run = login.submit_listeners(*ON_TWO_HOSTS)
    login.trainkit("requeue", str(run.path))
    login.wait_for_log(run, "attempt 2", attempt=2)
    login.trainkit("cancel", str(run.path), "--now")
    return end_of(login, run)


@broken("no-start", host=2)
def no_slurmd_at_the_start(login: Login) -> RunDir:
    """The slurmd of the second host is dead when srun starts the step."""
    script = login.script(DEAF)
    go = login.folder / "go"
    wait = settings(f"launch.setup=['while [ ! -e {go} ]; do sleep 0.1; done']")
    run = login.submit(*ON_TWO_HOSTS, *ONCE, *wait, "--", "python", script)
    login.wait_for_job(run, "RUNNING")
    login.cluster.kill_slurmd(2)
    go.touch()
    return over(login, run)


# A host or the network fails.


@broken("node-failure", host=2)
def host_powered_off(login: Login) -> RunDir:
    run = running(login)
    login.cluster.kill_host(2)
    return end_of(login, run)


@broken("node-failure", host=1)
def first_host_powered_off(login: Login) -> RunDir:
    """The supervisor dies with it; the next start of the job records the end."""
    run = running(login)
    login.cluster.kill_host(1)
    return end_of(login, run)


@broken("node-failure")
def first_host_just_powered_off(login: Login) -> RunDir:
    """The supervisor has died with it, and the job waits to start again."""
    run = running(login)
    login.cluster.kill_host(1)
    wait_for(lambda: _is_requeued(login, run), "Slurm to requeue the job", TIMEOUT_S, 0.3)
    login.run(["scontrol", "hold", login.job_id(run)], check=True)
    return run


def _is_requeued(login: Login, run: RunDir) -> bool:
    job = login.cluster.job(login.job_id(run))
    return job["JobState"] == "PENDING" and job["Restarts"] == "1"


@broken("node-failure", host=2)
def host_cut_off(login: Login) -> RunDir:
    run = running(login)
    login.cluster.cut_off(2)
    return end_of(login, run)


@broken("node-failure", host=2)
def slurmd_killed(login: Login) -> RunDir:
    run = running(login)
    login.cluster.kill_slurmd(2)
    return over(login, run)


@broken("network")
def connections_reset(login: Login) -> RunDir:
    """The connections between the ranks break, and those of Slurm do not."""
    run = running(login)
    ranks = survival.ranks_of(run)
    wait_for(lambda: _kill_connections(login, ranks[1]) or read_end(run.attempt(1)), "an end", TIMEOUT_S, 1)
    return end_of(login, run)


def _kill_connections(login: Login, pid: int) -> bool:
    listed = login.cluster.run(["ss", "-Htnp", "state", "established"], host=2, check=True).stdout
    own = re.findall(r"^\S+ +\S+ +(\S+):(\d+) +(\S+):(\d+) +users:\(\(\"python", listed, re.MULTILINE)
    for address, port, _, _ in own:
        login.cluster.run(["ss", "-K", "src", address, "sport", "=", port], host=2)
    return False


@broken("hang")
def packets_lost(login: Login) -> RunDir:
    """The hosts no longer reach each other; both reach Slurm's controller."""
    run = running(login, *settings("requeue.hang_min_s=8", "requeue.hang_factor=2"))
    lost = f"{login.cluster.address(1)}/32"
    with changed_host(login, 2, ["ip", "route", "add", "blackhole", lost], ["ip", "route", "del", lost]):
        return end_of(login, run)


# The ranks do not meet.


@broken("rendezvous", 1, 2)
def port_blocked(login: Login) -> RunDir:
    """A firewall on the second host rejects connections to the port of rank 0."""
    login.script(SHORT_START, "sitecustomize.py")
    to = ["ipproto", "tcp", "to", login.cluster.address(1), "dport"]
    ranges = ("10000-32767", "61000-65000")
    for number, ports in enumerate(ranges):
        on_host(login, 2, "ip", "rule", "add", *to, ports, "unreachable", "pref", str(90 + number))
    try:
        return end_of(login, training(login))
    finally:
        for number in range(len(ranges)):
            login.cluster.run(["ip", "rule", "del", "pref", str(90 + number)], host=2)


SHORT_START = """
import os, sys, time
if "trainkit.trainer" in sys.orig_argv:
    from datetime import timedelta
    from trainkit.trainer import distributed, worker
    distributed.START_TIMEOUT = timedelta(seconds=10)
    worker.LOG_IDLE_S = 1.0
    if os.environ["RANK"] == os.environ.get("LATE"):
        time.sleep(120)
"""
"""A sitecustomize.py: ranks wait 10 s for each other, and rank $LATE never arrives, as on a slow disk."""


@broken("rendezvous", 1, 2)
def rank_late(login: Login) -> RunDir:
    login.script(SHORT_START, "sitecustomize.py")
    return end_of(login, training(login, *settings("launch.env.LATE='1'")))


@broken("rendezvous", 1, 2)
def command_rank_late(login: Login) -> RunDir:
    """Rank 1 of a script of the user starts late; rank 0 gives up."""
    code = "if rank == 1: time.sleep(120)\nimport datetime, torch.distributed as dist\n"
    code += "dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=5))"
    return failed_command(login, code)


@broken("import-error", 1, 2)
def import_on_one_host(login: Login) -> RunDir:
    """A package is empty on the second host, as after an incomplete installation there."""
    package = login.folder / "labels"
    package.mkdir()
    (package / "__init__.py").write_text("def table(): return []\n")
    with hidden(login, 2, package):
        return failed_command(
            login,
            "sys.path.insert(0, os.getcwd())\nfrom labels import table\nsignal.pause()",
            "--no-snapshot",
        )


@broken("import-error", 1, 2)
def trainer_import_on_one_host(login: Login) -> RunDir:
    """The second host lacks a package that the trainer needs."""
    import torch.distributed.tensor

    with hidden(login, 2, Path(torch.distributed.tensor.__file__).parent):
        return end_of(login, training(login))


@broken("import-error", 1, 2)
def agent_import_on_one_host(login: Login) -> RunDir:
    """The second host lacks a package that the agent itself needs: it cannot start ranks."""
    import pydantic

    with hidden(login, 2, Path(pydantic.__file__).parent):
        return over(login, training(login))


@broken("wrong-interface")
def interface_missing(login: Login) -> RunDir:
    return end_of(login, training(login, *settings("launch.network=ib0")))


@broken("wrong-interface", 1, 2)
def interface_on_one_host_only(login: Login) -> RunDir:
    add = ["ip", "link", "add", "ib0", "type", "veth", "peer", "name", "ib1"]
    with changed_host(login, 1, add, ["ip", "link", "del", "ib0"]):
        for interface in ("ib0", "ib1"):
            on_host(login, 1, "ip", "link", "set", interface, "up")
        on_host(login, 1, "ip", "address", "add", "10.214.0.1/24", "dev", "ib0")
        code = "os.environ['GLOO_SOCKET_IFNAME'] = 'ib0'\n" + GROUP + "signal.pause()"
        return failed_command(login, code)


@broken("port-in-use", 0, 1)
def port_taken(login: Login) -> RunDir:
    """A script with a fixed port, which a process of another job still uses on the first host."""
    listen = (
        "import socket, time; s = socket.create_server(('', 29500)); print(s, flush=True); time.sleep(600)"
    )
    argv = login.cluster.command_line([sys.executable, "-c", listen], 1, "/")
    other = subprocess.Popen(argv, stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        other.stdout.readline()
        code = "os.environ['MASTER_PORT'] = '29500'\n" + GROUP
        return failed_command(login, code)
    finally:
        login.cluster.run(["pkill", "-f", "create_server.*29500"], host=1)
        other.kill()
        other.wait()


# A rank fails.


@broken("killed", 1, 2)
def rank_killed(login: Login) -> RunDir:
    """The other rank reports lost connections."""
    run = running(login)
    survival.kill_rank(run, 1)
    return end_of(login, run)


@broken("killed", 1, 2)
def command_rank_killed(login: Login) -> RunDir:
    code = GROUP + "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()"
    return failed_command(login, code)


@broken("killed", 1, 2)
def rank_segfault(login: Login) -> RunDir:
    return failed_command(
        login, GROUP + "if rank == 1:\n  import ctypes; ctypes.string_at(0)\ndist.barrier()"
    )


@broken(None, 1, 2)
def exception_on_one_rank(login: Login) -> RunDir:
    code = GROUP + "if rank == 1: raise ValueError('12 labels for 10 classes')\ndist.barrier()"
    return failed_command(login, code)


@broken(None, 1, 2)
def torchrun_exception(login: Login) -> RunDir:
    code = GROUP + "if rank == 1: raise KeyError('labels')\ndist.barrier()"
    return failed_command(login, code, launcher="torchrun")


@broken("killed", 2, 2)
def torchrun_rank_killed(login: Login) -> RunDir:
    """One of two ranks of the second host's torchrun."""
    code = GROUP + "if rank == 2: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()"
    return failed_command(login, code, "--gpus-per-node", "2", launcher="torchrun")


@broken("import-error", 3, 2)
def torchrun_import(login: Login) -> RunDir:
    code = GROUP + "if rank == 3: import a_package_that_is_not_there\ndist.barrier()"
    return failed_command(login, code, "--gpus-per-node", "2", launcher="torchrun")


@broken("missing-file", 1, 2)
def data_on_one_host(login: Login) -> RunDir:
    """A file on a node's own disk, which was copied to the first host only."""
    (login.cluster.local_disk(1) / "train.bin").write_text("tokens")
    return failed_command(login, GROUP + "open('/var/tmp/train.bin').read()\ndist.barrier()")


@broken("missing-file", 1, 2)
def training_data_on_one_host(login: Login) -> RunDir:
    config = survival.survivor_config(login.folder)
    (login.folder / "data").mkdir()
    text = shutil.copy(login.folder / "text.txt", login.folder / "data/text.txt")
    with hidden(login, 2, login.folder / "data"):
        run = login.submit(*ONCE, *settings(f"data.source={text}"), config=config)
        return end_of(login, run)


@broken("host-oom", 1, 2, cgroups=True)
def memory(login: Login) -> RunDir:
    """Rank 1 uses more than the memory of the job, and the kernel kills it."""
    code = "if rank == 1: kept = [bytearray(1 << 26) for _ in range(64)]\nsignal.pause()"
    return failed_command(login, code, *settings("resources.mem=300M"))


@broken("host-oom", 1, 2, cgroups=True)
def memory_per_node(login: Login) -> RunDir:
    code = "if rank == 1: kept = [bytearray(1 << 26) for _ in range(64)]\nsignal.pause()"
    return failed_command(login, code, *settings("resources.mem=300M"), "--per", "node")


@broken("host-oom", cgroups=True)
def memory_of_the_agents(login: Login) -> RunDir:
    """Shared memory is not freed with the rank, so the kernel kills the agent too."""
    code = (
        "if rank == 1:\n  with open('/dev/shm/fill', 'wb') as f:\n    while True: f.write(b'x' * (1 << 20))\n"
    )
    run = command_run(login, code + "signal.pause()", *settings("resources.mem=300M"), "--per", "node")
    return over(login, run)


@broken("hang", 1, 2)
def rank_stopped(login: Login) -> RunDir:
    run = running(login, *settings("requeue.hang_min_s=8", "requeue.hang_factor=2"))
    survival.pause([survival.ranks_of(run)[1]])
    return end_of(login, run)


@broken("hang")
def command_silent(login: Login) -> RunDir:
    """Rank 1 of a script no longer takes part; `requeue.silence_s` ends the run."""
    code = GROUP + "if rank == 1: time.sleep(600)\ndist.barrier()"
    return failed_command(login, code, *settings("requeue.silence_s=10"))


@broken("collective-timeout", 2, 2)
def collective_timeout(login: Login) -> RunDir:
    """Rank 2 does not take part in a collective; the time-out of the group ends the other ranks."""
    code = "import datetime, torch, torch.distributed as dist\n"
    code += "dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=10))\ndist.barrier()\n"
    code += "if rank == 2: time.sleep(600)\ndist.all_reduce(torch.ones(4))"
    return failed_command(login, code, "--gpus-per-node", "2")


# Disks, checkpoints and configs.


@broken("disk-full", 0, 1)
def checkpoint_on_a_full_disk(login: Login) -> RunDir:
    """The disk of the run folder has no space for a checkpoint."""
    with shared_small_disk(login.cluster, login.folder / "disk", "8m") as disk:
        run = training(login, "--run-dir", str(disk / "run"), num_steps=40)
        survival.wait_for_steps(run, 1, 1)
        filler = fill(disk, 64_000)
        job_id = login.job_id(run)
        wait_for(lambda: job_id not in login.jobs(), "the end of the job", TIMEOUT_S, 1)
        filler.unlink()
        kept = login.folder / "kept"
        shutil.copytree(run.path, kept / "run", symlinks=True)
    (login.folder / "disk").rmdir()
    kept.rename(login.folder / "disk")
    return run


@broken("read-only", 0, 1)
def checkpoint_on_a_read_only_disk(login: Login) -> RunDir:
    """The file system of the checkpoints becomes read-only, as after an error of the disk."""
    run = training(login, num_steps=60)
    survival.wait_for_steps(run, 1, 3)
    folder = str(run.checkpoints_dir)
    on_host(login, 1, "mount", "--bind", folder, folder)
    try:
        on_host(login, 1, "mount", "-o", "remount,bind,ro", folder)
        return end_of(login, run)
    finally:
        login.cluster.run(["umount", "--lazy", folder], host=1)


@broken("diverged")
def diverged_on_two_hosts(login: Login) -> RunDir:
    return end_of(login, training(login, *settings("optimizer.lr=1e30"), num_steps=100))


@broken("shape-mismatch")
def resumed_with_another_model(login: Login) -> RunDir:
    """The weights of a run as the start of a wider model."""
    first = training(login, *settings("train.steps=3", "train.global_batch_size=32"))
    login.finish(first)
    weights = settings(f"model.init_from={first.path}", "model.dim=96")
    run = login.submit(*ONCE, "--name", "wider", *weights, config=login.folder / "survivor.yaml")
    return end_of(login, run)


@broken("shape-mismatch")
def checkpoint_of_another_model(login: Login) -> RunDir:
    """A script whose model changed since its checkpoint was saved."""
    code = GROUP + "torch.save(torch.nn.Linear(4, 16).state_dict(), f'{rank}.pt')\ndist.barrier()\n"
    return failed_command(login, code + "torch.nn.Linear(4, 8).load_state_dict(torch.load(f'{rank}.pt'))")


SMALL_SHM = ["mount", "-o", "remount,size=64k", "/dev/shm"]
LARGE_SHM = ["mount", "-o", "remount,size=1g", "/dev/shm"]


@broken("shared-memory", 1, 2)
def shared_memory_full(login: Login) -> RunDir:
    """The /dev/shm of the second host is too small when the ranks start."""
    with changed_host(login, 2, SMALL_SHM, LARGE_SHM):
        return failed_command(login, "signal.pause()")


@broken("shared-memory", 1, 2)
def shared_memory_of_a_loader(login: Login) -> RunDir:
    """A loader process passes its batches through a /dev/shm of 64 KiB on the second host."""
    code = GROUP + f"import subprocess\nif rank == 1: subprocess.run({SMALL_SHM}, check=True)\n"
    code += "from torch.utils.data import DataLoader\ndata = [torch.zeros(1 << 20)] * 8\n"
    code += "if __name__ == '__main__':\n  for batch in DataLoader(data, num_workers=1): dist.barrier()"
    try:
        return failed_command(login, code)
    finally:
        login.cluster.run(LARGE_SHM, host=2)


@broken("bad-config")
def config_edited(login: Login) -> RunDir:
    """The config of the run is edited while the job waits."""
    run = training(login, *settings("resources.extra.hold=true"))
    files = [run.config_file, *run.path.glob("attempts/*/config.yaml")]
    for file in files:
        if file.exists():
            file.write_text(re.sub(r"log_every: 1\b", "log_every: often", file.read_text()))
    login.run(["scontrol", "release", login.job_id(run)], check=True)
    return over(login, run)


@broken("bad-config")
def wrong_argument(login: Login) -> RunDir:
    code = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--lr')\n"
    code += "parser.parse_args(['--rl', '3'])"
    return failed_command(login, code)


@broken("no-internet")
def no_internet(login: Login) -> RunDir:
    code = (
        "from huggingface_hub import hf_hub_download\nhf_hub_download('openai-community/gpt2', 'config.json')"
    )
    return failed_command(login, code)


# Making, scoring and recording them.


def diagnosed(login: Login, run: RunDir, attempt: int) -> dict[str, Any]:
    """What the command says."""
    done = login.trainkit("diagnose", str(run.path), "--attempt", str(attempt), "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def neutral(text: str, cluster: Cluster, folder: str) -> str:
    """A text without the names of the cluster and of this machine."""
    text = broken_runs.neutral(text, folder)
    text = re.sub(rf"\b{cluster.name}-node(\d)", r"node0\1", text)
    text = text.replace(cluster.address(1).removesuffix(".1") + ".", "10.0.0.")
    return re.sub(rf"\b{cluster.name}\b", "cluster", text)


def slurm_job(login: Login, attempt: AttemptDir) -> JobInfo | None:
    """Slurm's view of the job of an attempt, as the command sees it."""
    before = dict(os.environ)
    os.environ.update(login.cluster.variables)
    try:
        return query_attempt_status(attempt, print).job
    finally:
        os.environ.clear()
        os.environ.update(before)


def write_recorded(name: str, login: Login, run: RunDir, found: dict[str, Any]) -> None:
    """Write a run as one YAML file, with the truth about it."""
    truth, cluster = BROKEN[name], login.cluster
    expect: dict[str, Any] = {"name": truth.name, "confidence": found["confidence"]}
    expect |= {} if truth.host is None else {"rank": truth.rank, "host": f"node0{truth.host}"}
    content: dict[str, Any] = {
        "about": f"Recorded by tests/on_slurm/broken_runs.py. {cleandoc(truth.make.__doc__ or '')}".strip(),
        "expect": expect,
    }
    job = slurm_job(login, run.attempt(truth.attempt))
    if job is not None:
        content["slurm"] = {"job_id": job.job_id, "state": job.state.value, "slurm_state": job.slurm_state}
        content["slurm"] |= {"reason": job.reason} if job.reason else {}
    files = broken_runs.recorded_files(run.path, lambda text: neutral(text, cluster, str(login.folder)))
    own = f"attempts/{truth.attempt:03d}/"
    content["files"] = {path: text for path, text in files.items() if path.startswith((own, "events"))}
    broken_runs.write(name, content)


def make(name: str, cluster: Cluster, folder: Path) -> tuple[Login, RunDir]:
    """Make one run below a folder, to its end."""
    login = Login(cluster, folder)
    return login, BROKEN[name].make(login)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *BROKEN])
    parser.add_argument("--record", action="store_true", help="write them to tests/observe/broken_runs")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs in this folder")
    options = parser.parse_args(argv)
    keep = options.keep or Path(tempfile.mkdtemp(prefix="broken-runs-"))
    chosen = options.names or list(BROKEN)
    wrong = 0
    for with_cgroups in (False, True):
        names = [name for name in chosen if BROKEN[name].cgroups == with_cgroups]
        if not names:
            continue
        cluster = up(owner=Pid.of(os.getpid()), num_hosts=2 if with_cgroups else 4, with_cgroups=with_cgroups)
        try:
            for name in names:
                wrong += not _run_one(name, cluster, keep / name, options.record)
                cluster.restore()
        finally:
            cluster.down()
    if options.record:
        broken_runs.README.write_text(broken_runs.table())
    if options.keep is None:
        shutil.rmtree(keep)
    print(f"{len(chosen) - wrong} of {len(chosen)} right")
    return 0


def _run_one(name: str, cluster: Cluster, folder: Path, record: bool) -> bool:
    truth = BROKEN[name]
    folder.mkdir(parents=True)
    began = time.monotonic()
    try:
        login, run = make(name, cluster, folder)
        found = diagnosed(login, run, truth.attempt)
    except Exception as error:
        print(f"{name}: not made: {type(error).__name__}: {str(error)[-3000:]}", flush=True)
        return False
    right = truth.is_right(found, cluster.hosts)
    if record:
        write_recorded(name, login, run, found)
    shown = {key: found[key] for key in ("name", "rank", "host", "state", "confidence")}
    wanted = (truth.name, truth.rank, truth.host)
    print(
        f"{name}: {'right' if right else 'WRONG'} after {time.monotonic() - began:.0f} s; wanted {wanted}",
        flush=True,
    )
    print(f"    {shown}\n    {found['cause'][:300]}", flush=True)
    if not right:
        print(f"    Slurm: {slurm_job(login, run.attempt(truth.attempt))}")
    return right


if __name__ == "__main__":
    sys.exit(main())
