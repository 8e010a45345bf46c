"""Generates the configuration files of a cluster from the cluster's state."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tools.slurm_cluster.network import MACHINE_INDEX
from tools.slurm_cluster.state import STATE_LINK, State

NUM_CPUS = 8
"""Number of CPUs of each host if jobs are not confined to the real CPUs of this machine."""
NUM_GPUS = 4
MEM_MB = 64_000
CONFINED = {"ProctrackType": "proctrack/cgroup", "TaskPlugin": "task/affinity,task/cgroup"}
"""Settings that confine jobs to the CPUs and the memory that they request."""
CGROUP_CONF = "ConstrainCores=yes\nConstrainRAMSpace=yes\nAllowedRAMSpace=100\nConstrainSwapSpace=no\n"
ACCOUNT = "research"
"""The default account of root; its default QOS is `normal`, and jobs can request `short`."""
OTHER_ACCOUNT = "teaching"
SHORT_QOS = "short"

PARTITIONS = {
    "low": "Default=YES MaxTime=1-00:00:00 DefaultTime=10 PriorityTier=1 PreemptMode=REQUEUE GraceTime=10",
    "high": "Default=NO MaxTime=12:00:00 DefaultTime=10 PriorityTier=10 PreemptMode=OFF",
    "debug": "Default=NO MaxTime=5 DefaultTime=2 PriorityTier=1 PreemptMode=OFF MaxNodes=1",
}
"""Jobs in `high` preempt and requeue jobs in `low`; `debug` has one node and a limit of five minutes."""


def slurm_conf(state: State) -> str:
    """Return the text of slurm.conf; `state.options` override its values."""
    folder = state.path
    values = {
        "ClusterName": state.name,
        "SlurmctldHost": f"{state.machine}({state.address(MACHINE_INDEX)})",
        "SlurmctldPort": str(state.port),
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        # A requeued job starts only after its old credentials have expired, which takes 120 s by default.
        # Slurm rejects expiry times below 5 s.
        "AuthInfo": f"socket={folder}/munge/socket,cred_expire=5",
        "StateSaveLocation": f"{folder}/slurmctld",
        "SlurmdSpoolDir": f"{folder}/hosts/%n/spool",
        "SlurmctldPidFile": f"{folder}/slurmctld/pid",
        "SlurmdPidFile": f"{folder}/hosts/%n/slurmd.pid",
        "SlurmctldLogFile": f"{folder}/log/slurmctld.log",
        "SlurmdLogFile": f"{folder}/log/%n.log",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "MpiDefault": "none",
        "MailProg": "/bin/true",
        # Use the configured CPUs and memory instead of the machine's.
        "SlurmdParameters": "config_overrides",
        "ReturnToService": "2",
        # With this timeout, slurmctld marks a dead host as down after 12 to 18 s, and commands fail 5 s after
        # slurmctld has stopped.
        "MessageTimeout": "5",
        "SlurmdTimeout": "10",
        "SlurmctldTimeout": "10",
        "KillWait": "10",
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": "bf_interval=1,sched_interval=1,batch_sched_delay=0",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core_Memory",
        "DefMemPerCPU": "1000",
        "GresTypes": "gpu",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "JobRequeue": "1",
        "MaxArraySize": "10001",
        "MaxJobCount": "25000",
        **_plugins(state),
        **(CONFINED if state.cgroups else {}),
        **_accounting(state),
        **state.options,
    }
    lines = [f"{name}={value}" for name, value in values.items()]
    num_cpus = (os.cpu_count() or 1) if state.cgroups else NUM_CPUS
    for index in state.hosts():
        lines.append(
            f"NodeName={state.host(index)} NodeAddr={state.address(index)} Gres=gpu:h100:{NUM_GPUS} "
            f"Sockets=1 CoresPerSocket={num_cpus} ThreadsPerCore=1 RealMemory={MEM_MB} "
            f"Feature=rack{1 + (index - 1) // 2}"
        )
    for name, limits in PARTITIONS.items():
        nodes = state.host(1) if name == "debug" else "ALL"
        lines.append(f"PartitionName={name} Nodes={nodes} {limits}")
    return "\n".join(lines) + "\n"


def gres_conf(state: State) -> str:
    """Return the text of gres.conf; the GPUs are character devices, because Slurm requires device files."""
    return f"Name=gpu Type=h100 File={state.path}/dev/gpu[0-{NUM_GPUS - 1}]\n"


def slurmdbd_conf(state: State) -> str:
    """Return the text of slurmdbd.conf; slurmdbd rejects the file if other users can read it."""
    folder = state.path
    values = {
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={folder}/munge/socket",
        "DbdHost": state.machine,
        "DbdAddr": state.address(MACHINE_INDEX),
        "DbdPort": str(state.port + 1),
        "SlurmUser": "root",
        "LogFile": f"{folder}/log/slurmdbd.log",
        "PidFile": f"{folder}/slurmdbd.pid",
        "StorageType": "accounting_storage/mysql",
        "StorageHost": "localhost",
        "StorageUser": "root",
        "StorageLoc": "slurm",
        **_plugins(state),
    }
    return "".join(f"{name}={value}\n" for name, value in values.items())


def write(state: State) -> None:
    """Write all configuration files into the cluster's folder."""
    etc = state.path / "etc"
    etc.mkdir(exist_ok=True)
    texts: Mapping[str, str] = {
        "slurm.conf": slurm_conf(state),
        "gres.conf": gres_conf(state),
        "cgroup.conf": _cgroup_conf(state),
        "slurmdbd.conf": slurmdbd_conf(state),
    }
    for name, text in texts.items():
        (etc / name).write_text(text)
        (etc / name).chmod(0o600 if name == "slurmdbd.conf" else 0o644)


def _cgroup_conf(state: State) -> str:
    version = "CgroupPlugin=cgroup/v1\n" if _has_cgroup_v1() else ""
    return version + (CGROUP_CONF if state.cgroups else "")


def _plugins(state: State) -> dict[str, str]:
    return {"PluginDir": f"{state.slurm}/plugins"} if state.slurm else {}


def _accounting(state: State) -> dict[str, str]:
    if not state.accounting:
        return {"AccountingStorageType": "accounting_storage/none"}
    dbd = State.load(Path(state.accounting_of, STATE_LINK)) if state.accounting_of else state
    return {
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "AccountingStorageHost": state.address(MACHINE_INDEX),
        "AccountingStoragePort": str(dbd.port + 1),
        # With munge, this value is the path of a socket, not a password.
        "AccountingStoragePass": f"{state.path}/munge/socket",
        "AccountingStorageTRES": "gres/gpu",
        "AccountingStorageEnforce": "associations,limits,qos",
    }


def _has_cgroup_v1() -> bool:
    return Path("/sys/fs/cgroup/freezer").exists()
