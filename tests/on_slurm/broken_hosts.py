"""Runs that are ended by Slurm, a host or the network, or whose ranks do not find each other."""

import re
from pathlib import Path

from tests.on_slurm import survival
from tests.on_slurm.broken_cases import (
    GROUP,
    ONCE,
    TIMEOUT_S,
    broken,
    changed_host,
    command_run,
    end_of,
    failed_command,
    hidden,
    on_host,
    over,
    running,
    training,
)
from tests.on_slurm.login import DEAF, DIES_ONCE, HOLD, ON_TWO_HOSTS, Login, settings, wait_for
from trainkit.run.end import read_end
from trainkit.run.rundir import RunDir

# Slurm ends the job.


def _cancelled_in(login: Login, run: RunDir, attempt: int) -> RunDir:
    login.wait_for_log(run, f"attempt {attempt}", attempt=attempt)
    login.trainkit("cancel", str(run.path), "--now")
    login.wait_for_end(run, attempt)
    return run


@broken("preempted")
def preempted_and_requeued(login: Login) -> RunDir:
    run = login.submit_listeners("--partition", "low", *ON_TWO_HOSTS)
    survival.preempt(login.cluster)
    return _cancelled_in(login, run, 2)


@broken("preempted")
def preempted_for_good(login: Login) -> RunDir:
    run = login.submit_listeners("--partition", "low", *ON_TWO_HOSTS, *settings("requeue.on=[crash]"))
    survival.preempt(login.cluster)
    return end_of(login, run)


@broken("preempted")
def preempted_without_notice(login: Login) -> RunDir:
    """Slurm gives no grace time and the ranks have no handlers, so nothing can record the end."""
    with survival.preemption(login.cluster):
        survival.set_preemption(login.cluster, "CANCEL", 0)
        run = command_run(login, DEAF, "--partition", "low", *settings("requeue.on=[crash]"))
        for rank in range(2):
            login.wait_for_log(run, "deaf", rank)
        survival.preempt(login.cluster)
    return over(login, run)


@broken("killed", 1, 2)
def rank_killed_before_a_preemption(login: Login) -> RunDir:
    """Slurm reports the preemption of attempt 2 in the log of attempt 1, where a rank was killed."""
    run = login.submit("--partition", "low", *ON_TWO_HOSTS, "--", "python", login.script(DIES_ONCE))
    for rank in range(2):
        login.wait_for_log(run, f"attempt 2 rank {rank}", rank, attempt=2)
    survival.preempt(login.cluster)
    return _cancelled_in(login, run, 3)


@broken("time-limit")
def time_limit(login: Login) -> RunDir:
    run = login.submit_listeners(
        *ON_TWO_HOSTS, *settings("resources.time='1'", "requeue.on=[crash]", "requeue.grace_s=10")
    )
    return end_of(login, run)


@broken("time-limit")
def time_limit_deaf(login: Login) -> RunDir:
    """The ranks ignore the stop signal, and Slurm kills them at the time limit."""
    run = command_run(login, DEAF, *settings("resources.time='1'", "requeue.on=[crash]"))
    return over(login, run)


@broken("log-not-opened")
def log_folder_replaced(login: Login) -> RunDir:
    """A file replaces the log folder, so no version of Slurm can create the log of the job."""
    run = login.submit(*HOLD, "--", "true")
    run.attempt(1).logs_dir.rmdir()
    run.attempt(1).logs_dir.touch()
    login.run(["scontrol", "release", login.job_id(run)], check=True)
    login.wait_for_job(run, "FAILED")
    return run


@broken("cancelled")
def scancel_by_hand(login: Login) -> RunDir:
    run = login.submit_listeners(*ON_TWO_HOSTS)
    login.run(["scancel", login.job_id(run)], check=True)
    return end_of(login, run)


@broken("cancelled")
def cancel_now(login: Login) -> RunDir:
    return _cancelled_in(login, login.submit_listeners(*ON_TWO_HOSTS), 1)


@broken("requeued")
def requeued(login: Login) -> RunDir:
    run = login.submit_listeners(*ON_TWO_HOSTS)
    login.trainkit("requeue", str(run.path))
    return _cancelled_in(login, run, 2)


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


# These runs fail because of a host or the network.


@broken("node-failure", host=2)
def host_powered_off(login: Login) -> RunDir:
    run = running(login)
    login.cluster.kill_host(2)
    return end_of(login, run)


@broken("node-failure", host=1)
def first_host_powered_off(login: Login) -> RunDir:
    """The supervisor dies with its host, and the next start of the job records the end."""
    run = running(login)
    login.cluster.kill_host(1)
    return end_of(login, run)


@broken("node-failure")
def first_host_just_powered_off(login: Login) -> RunDir:
    """The supervisor has died with its host, and the job waits to start again."""
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
    """The connections between the ranks break, while Slurm's connections stay open."""
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
    """The hosts no longer reach each other, but both reach Slurm's controller."""
    run = running(login, *settings("requeue.hang_min_s=8", "requeue.hang_factor=2"))
    lost = f"{login.cluster.address(1)}/32"
    with changed_host(login, 2, ["ip", "route", "add", "blackhole", lost], ["ip", "route", "del", lost]):
        return end_of(login, run)


# The ranks of these runs do not find each other.


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
    from trainkit.trainer import distributed
    distributed.START_TIMEOUT = timedelta(seconds=10)
    if os.environ["RANK"] == os.environ.get("LATE"):
        time.sleep(120)
"""
"""A sitecustomize.py with a start limit of 10 s, where rank $LATE never arrives, as on a slow disk."""


@broken("rendezvous", 1, 2)
def rank_late(login: Login) -> RunDir:
    login.script(SHORT_START, "sitecustomize.py")
    return end_of(login, training(login, *settings("launch.env.LATE='1'")))


@broken("import-error", 1, 2)
def import_on_one_host(login: Login) -> RunDir:
    """A package is empty on the second host, for example after an incomplete installation."""
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
    """The second host lacks a package of the agent, so the agent cannot start ranks."""
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
    """The script uses a fixed port, which a process of another job occupies on the first host."""
    with login.port_held(1, 29500):
        return failed_command(login, "os.environ['MASTER_PORT'] = '29500'\n" + GROUP)
