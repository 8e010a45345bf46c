"""The environment variables and command lines of the workers started by an agent.

The environment variables of a worker include the network interfaces for gloo and NCCL.
"""

from __future__ import annotations

import fcntl
import math
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from trainkit.errors import UsageError
from trainkit.job.node.rendezvous import Rendezvous
from trainkit.job.processes import log_line, module_argv
from trainkit.job.rank_env import (
    ATTEMPT_VARIABLE,
    ATTENDED_VARIABLE,
    NONCE_VARIABLE,
    RANK_VARIABLES,
    RUN_DIR_VARIABLE,
    VISIBLE,
    RankEnv,
)
from trainkit.job.spare_children import AGENT_VARIABLE
from trainkit.job.work_folder import WORK_DIR_VARIABLE
from trainkit.plan.launch import LaunchPlan
from trainkit.run.git_copy import GIT_LOCATIONS
from trainkit.run.own_folders import OwnFolders, own_folders
from trainkit.run.process import own_host
from trainkit.run.record import CodeCopy
from trainkit.run.rundir import AttemptDir, RunDir
from trainkit.shipped import Guard, in_ranks, with_launcher

STARTUP_FOLDER = Path(__file__).parents[1] / "startup"
ALLOCATOR_VARIABLES = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"}
"""The environment variables that configure torch's allocator, under their current and older names."""
BUFFER_VARIABLES = {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}
"""The environment variables that set the buffer size of torch's flight recorder, under their current and
older names.
"""
NUM_RECORDED = 2000
"""Number of collectives kept by torch's flight recorder; the default since torch 2.13. Recording costs 1.5 us
per call and 3 MB of memory in total."""
AT_START_VARIABLE = "TRAINKIT_JOB_AT_START"
"""The environment variable that lists the files to be loaded by `trainkit.job.python_start`."""
DONE_FILE_VARIABLE = "TRAINKIT_JOB_DONE_FILE"
"""The environment variable with the path of a file that a command creates when it is done, so that exit code
0 after a stop signal means "finished"."""


def worker_rank(plan: LaunchPlan, rendezvous: Rendezvous, local_rank: int) -> RankEnv:
    """Return the rank environment for one worker. Ranks are numbered node by node."""
    return RankEnv(
        rank=plan.first_rank_of(rendezvous.node_rank) + local_rank,
        local_rank=local_rank,
        world_size=plan.world_size,
        local_world_size=plan.workers_of(rendezvous.node_rank),
        node_rank=rendezvous.node_rank,
        num_nodes=plan.num_nodes,
        master_addr=rendezvous.master_addr,
        master_port=rendezvous.master_port,
        source="agent",
        nonce=rendezvous.nonce,
    )


def configured_environ(plan: LaunchPlan, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a process that is not yet a rank: inherited variables plus `launch.env`."""
    environ = {name: value for name, value in inherited.items() if name not in RANK_VARIABLES}
    # On Slurm, the job script has already set PYTHONPATH to begin with the code snapshot.
    kept = {"PYTHONPATH"} if plan.is_job else set()
    return environ | {name: value for name, value in plan.environment.variables.items() if name not in kept}


def worker_environ(
    plan: LaunchPlan,
    rank_env: RankEnv,
    attempt: AttemptDir,
    *,
    inherited: Mapping[str, str],
    defaults: Mapping[str, str],
    code: CodeCopy | None = None,
) -> dict[str, str]:
    """Return a worker's environment: inherited variables, `launch.env`, trainkit's defaults, and its rank.

    `defaults` contains variables specific to this host and attempt, such as the network interface. If there
    is a copy of the code, packages in the original folder are imported from the copy.
    """
    environ = configured_environ(plan, inherited)
    environ.setdefault(
        "OMP_NUM_THREADS", str(plan.threads_per_worker or own_threads(plan, rank_env, inherited))
    )
    environ.setdefault("PYTHONUNBUFFERED", "1")
    for name, value in defaults.items():
        environ.setdefault(name, value)
    if plan.is_here and plan.device == "cuda":
        # GPUs reserved by the supervisor take precedence over GPUs set in launch.env.
        visible = inherited.get(VISIBLE, environ.get(VISIBLE))
        if visible is not None or plan.num_nodes > 1:
            environ[VISIBLE] = gpu_slice(plan, rank_env.node_rank, visible)
    if "SLURM_ARRAY_TASK_ID" in environ and attempt.run.name.isdigit():
        # If a group consists of several arrays, each array numbers its tasks from 0, so use the index of the
        # run in the group.
        environ["SLURM_ARRAY_TASK_ID"] = attempt.run.name
    if not plan.workload.has_launcher:
        environ.update(rank_env.to_environ())
        environ[NONCE_VARIABLE] = rank_env.nonce
    if (venv := plan.environment.venv) is not None:
        # Set the same variables as bin/activate does.
        environ["VIRTUAL_ENV"] = venv
        environ["PATH"] = f"{venv}/bin:{environ.get('PATH', os.defpath)}"
        environ.pop("PYTHONHOME", None)
    environ = with_own_folders(environ, plan, attempt.run)
    environ[AGENT_VARIABLE] = str(os.getpid())
    import_path = [] if code is None or plan.is_job else code.import_path
    inherited_path = filter(None, [environ.get("PYTHONPATH")])
    environ["PYTHONPATH"] = os.pathsep.join([str(STARTUP_FOLDER), *import_path, *inherited_path])
    if code is not None:
        environ["TRAINKIT_JOB_CODE_SOURCE"], environ["TRAINKIT_JOB_CODE_COPY"] = code.source, code.code
    environ[RUN_DIR_VARIABLE] = str(attempt.run.path)
    environ[ATTEMPT_VARIABLE] = str(attempt.number)
    guard = Guard(in_ranks(plan.parts), log_line)
    for _, given in guard.each(lambda own: dict(own.environ(attempt, plan))):
        environ |= given
    at_start = filter(None, (one.at_start for one in guard.capabilities))
    environ[AT_START_VARIABLE] = os.pathsep.join(at_start)
    if plan.attended_in is not None:
        environ[ATTENDED_VARIABLE] = "1"
    if not BUFFER_VARIABLES & environ.keys():
        environ["TORCH_FR_BUFFER_SIZE"] = str(NUM_RECORDED)
    if plan.workload.is_command:
        _add_for_command(environ, plan, attempt)
        if WORK_DIR_VARIABLE in inherited:
            environ["PWD"] = inherited[WORK_DIR_VARIABLE]
        if code is not None and code.has_repository is not None:
            _keep_git_inside(environ, plan, [str(attempt.run.path), str(Path(code.code).parent)])
        return environ
    if plan.device == "cuda" and not ALLOCATOR_VARIABLES & environ.keys():
        # Without expandable segments, varying batch sizes, such as a smaller last batch of a validation,
        # would fragment the memory.
        environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    return environ


def _keep_git_inside(environ: dict[str, str], plan: LaunchPlan, folders: Sequence[str]) -> None:
    """Keep Git from using a repository above `folders`, or one set in the submitting shell's environment.

    Without these variables, Git commands in a run folder inside the project would show the project's current
    state.
    """
    for name in GIT_LOCATIONS - plan.environment.variables.keys():
        environ.pop(name, None)
    given = filter(None, [environ.get("GIT_CEILING_DIRECTORIES")])
    environ["GIT_CEILING_DIRECTORIES"] = os.pathsep.join(dict.fromkeys([*given, *folders]))


def _add_for_command(environ: dict[str, str], plan: LaunchPlan, attempt: AttemptDir) -> None:
    environ[DONE_FILE_VARIABLE] = str(attempt.done_file)
    if not plan.workload.has_launcher:
        # Set TORCHELASTIC_RUN_ID, as torchrun does, so that frameworks use the ranks set here instead of the
        # ranks in Slurm's variables. A Lightning process that uses Slurm's variables would ignore SIGTERM.
        environ["TORCHELASTIC_RUN_ID"] = f"{attempt.run.path.name}-{attempt.number}"
        return
    # TORCH_ELASTIC_SHUTDOWN_TIMEOUT is how long torchrun waits for its ranks after SIGTERM; the default is 30
    # s.
    environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(math.ceil(plan.grace_s)))
    if plan.workload.launcher == "accelerate" and plan.device == "cpu":
        # Without ACCELERATE_USE_CPU, accelerate on a host without GPUs treats every rank as a single-process
        # run.
        environ.setdefault("ACCELERATE_USE_CPU", "true")


@cache
def rank_folders(temporary: str | None, run: RunDir, keeps: bool) -> OwnFolders:
    """Return the ranks' private folders on this host; print a note if the folders are outside TMPDIR.

    Raises OSError.
    """
    environ = {} if temporary is None else {"TMPDIR": temporary}
    found = own_folders(environ, run.caches_dir / own_host(), keeps=keeps)
    shared = f"temporary files are in {found.temporary}, because every user can create files in {temporary}"
    if note := found.note or (shared if temporary not in (None, found.temporary) else ""):
        log_line(note)
    return found


def with_own_folders(environ: Mapping[str, str], plan: LaunchPlan, run: RunDir) -> dict[str, str]:
    """Return the environment with private folders for temporary files and caches added."""
    # To share a folder for temporary files with other programs, users set launch.env.TMPDIR.
    return rank_folders(environ.get("TMPDIR"), run, "TMPDIR" in plan.environment.variables).added_to(environ)


def own_threads(plan: LaunchPlan, rank_env: RankEnv, inherited: Mapping[str, str]) -> int:
    """Return the number of CPU threads per worker on this node, for plans that do not set the number."""
    given = inherited.get("SLURM_CPUS_PER_TASK", "")
    num_cpus = len(os.sched_getaffinity(0))
    if given.isdigit():
        workers_per_task = 1 if plan.per == "gpu" else rank_env.local_world_size
        return max(1, min(int(given), num_cpus) // workers_per_task)
    return max(1, num_cpus // rank_env.local_world_size)


def gpu_slice(plan: LaunchPlan, node_rank: int, visible: str | None) -> str:
    """Return CUDA_VISIBLE_DEVICES for one node of a local run, whose nodes share this machine's GPUs.

    `visible` is the inherited value of CUDA_VISIBLE_DEVICES, or None for all GPUs, numbered from 0.
    """
    count = plan.workers_per_node
    names = visible.split(",") if visible else [str(index) for index in range(plan.world_size)]
    return ",".join(names[node_rank * count : (node_rank + 1) * count])


def worker_argv(plan: LaunchPlan, rank_env: RankEnv, run: RunDir) -> tuple[str, ...]:
    """Return the command line for an agent's child: a rank, or the launcher of all the node's ranks."""
    if not plan.workload.is_command:
        trainer = module_argv("trainkit.trainer", str(run.path))
        python = plan.environment.python
        return trainer if python is None else (*python, *trainer[trainer.index("-m") :])
    if plan.workload.launcher == "python":
        return plan.workload.argv
    return with_launcher(plan.workload.launcher).argv(plan, rank_env, run)


PRESETS = {
    "auto": ("", {}),
    "ib": ("; InfiniBand for NCCL", {"NCCL_IB_DISABLE": "0"}),
    "socket": ("; NCCL is limited to sockets", {"NCCL_IB_DISABLE": "1"}),
    "debug": (
        "; NCCL and torch.distributed write debug logs",
        {"NCCL_DEBUG": "INFO", "TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_CPP_LOG_LEVEL": "INFO"},
    ),
}
SIOCGIFADDR = 0x8915
SIOCGIFFLAGS = 0x8913
IFF_UP = 0x1
IFF_LOOPBACK = 0x8
IFF_RUNNING = 0x40
VIRTUAL = ("docker", "virbr")
"""Name prefixes of virtual interfaces, which cannot reach other hosts and which NCCL also avoids."""
DISCARD_PORT = 9
INFINIBAND = Path("/sys/class/infiniband")


def network_environ(preset: str, peer: str | None) -> tuple[dict[str, str], str]:
    """Return the variables for a network preset or interface name, and a sentence explaining the choice.

    `peer` is another host of the job, or None if all ranks are on this host. gloo uses the interface on the
    route to `peer`. NCCL prefers InfiniBand and can use several interfaces. NCCL therefore chooses its
    interfaces itself, unless the config names an interface or this host has only one.

    Raises UsageError if this host has no interface named `preset`, or no InfiniBand device for the preset
    ``ib``.
    """
    if preset not in PRESETS:
        names = [name for _, name in socket.if_nameindex()]
        if preset not in names:
            raise UsageError(
                f"launch.network is {preset}, but {socket.gethostname()} has no such interface",
                hint=f"this host's interfaces are {', '.join(names)}; presets are {', '.join(PRESETS)}",
            )
        return {"GLOO_SOCKET_IFNAME": preset, **_nccl(preset)}, f"interface {preset}: set by launch.network"
    if peer is None:
        return {"GLOO_SOCKET_IFNAME": "lo", **_nccl("lo")}, "interface lo: all ranks are on this host"
    name = interface_to(peer)
    environ, reason = {}, f"no interface chosen: no route to {peer}"
    if name is not None:
        is_only = usable_interfaces() == [name]
        environ = {"GLOO_SOCKET_IFNAME": name, **(_nccl(name) if is_only else {})}
        reason = f"interface {name}: the route to {peer}{'' if is_only else '; NCCL chooses its own'}"
    if preset == "ib" and not (INFINIBAND.is_dir() and any(INFINIBAND.iterdir())):
        message = f"launch.network is ib, but {socket.gethostname()} has no InfiniBand device"
        raise UsageError(message, hint="`launch.network: socket` uses TCP")
    why, more = PRESETS[preset]
    return {**environ, **more}, f"{reason}{why}"


def _nccl(name: str) -> dict[str, str]:
    # NCCL treats an interface name as a prefix unless the name begins with an equals sign. For example, the
    # name eth1 without an equals sign would also match eth10.
    return {"NCCL_SOCKET_IFNAME": f"={name}"}


def interface_to(host: str) -> str | None:
    """Return the interface on the route to a host, or None if unknown."""
    return addresses().get(address_towards(host) or "")


def address_towards(host: str) -> str | None:
    """Return this host's IPv4 address on the route to another host, or None if unknown."""
    try:
        found = socket.getaddrinfo(host, DISCARD_PORT, socket.AF_INET, socket.SOCK_DGRAM)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(found[0][4])  # connecting a UDP socket looks up the route without sending anything
            return str(probe.getsockname()[0])
    except OSError:
        return None


def addresses() -> Mapping[str, str]:
    """Return a mapping from each IPv4 address of this host to its interface."""
    names = [name for _, name in socket.if_nameindex()]
    found = {name: _ask(SIOCGIFADDR, name) for name in names}
    return {socket.inet_ntoa(answer[20:24]): name for name, answer in found.items() if answer is not None}


def usable_interfaces() -> list[str]:
    """Return the interfaces that can reach other hosts.

    These interfaces are up, have an IPv4 address, and are neither loopback nor virtual interfaces.
    """
    return [
        name
        for name in addresses().values()
        if _flags(name) & (IFF_UP | IFF_RUNNING | IFF_LOOPBACK) == IFF_UP | IFF_RUNNING
        and not name.startswith(VIRTUAL)
    ]


def _flags(name: str) -> int:
    answer = _ask(SIOCGIFFLAGS, name)
    return 0 if answer is None else int(struct.unpack("H", answer[16:18])[0])


def _ask(request: int, name: str) -> bytes | None:
    """Return the kernel's reply (a struct ifreq) to a request about an interface, or None on an error."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return fcntl.ioctl(probe.fileno(), request, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None  # the interface has no IPv4 address
