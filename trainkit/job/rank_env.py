"""The rank of this process according to its environment variables, and the GPU and files used by the rank."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from trainkit import scheduler
from trainkit.errors import UsageError
from trainkit.job.spare_children import AGENT_VARIABLE, LAUNCHER_PID_VARIABLE, RANK_PID_VARIABLE

VISIBLE = "CUDA_VISIBLE_DEVICES"
RUN_DIR_VARIABLE = "TRAINKIT_JOB_RUN_DIR"
ATTEMPT_VARIABLE = "TRAINKIT_JOB_ATTEMPT"
NONCE_VARIABLE = "TRAINKIT_JOB_NONCE"
"""The environment variable with an attempt's nonce, by which ranks recognize rank 0 of their own attempt if
another job uses the same address."""
ATTENDED_VARIABLE = "TRAINKIT_JOB_ATTENDED"
"""The environment variable that is set while a user controls a rank in a terminal, which may make other ranks
wait for hours."""
TERMINAL_VARIABLE = "TRAINKIT_JOB_TERMINAL"
"""The environment variable with the path of the terminal where `trainkit run` was started."""
RANK_VARIABLES = (
    *scheduler.RANK_VARIABLES,
    NONCE_VARIABLE,
    AGENT_VARIABLE,
    LAUNCHER_PID_VARIABLE,
    RANK_PID_VARIABLE,
)
"""Environment variables that make a process a rank, and that a job submitted from inside another job must not
inherit."""


@dataclass(frozen=True)
class RankEnv:
    """The rank of a process, the number of ranks, and the rendezvous address."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    master_addr: str
    master_port: int
    source: str
    """The source of the values: ``environment``, ``single process`` or ``agent``."""
    nonce: str = field(default="", repr=False)
    """A random value shared by all ranks of an attempt; empty if a launcher other than trainkit started the
    ranks."""

    def to_environ(self) -> dict[str, str]:
        """Return the environment variables that are read by torch.distributed and launchers."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "NODE_RANK": str(self.node_rank),
            "GROUP_RANK": str(self.node_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def find_rank_env(environ: Mapping[str, str] = os.environ) -> RankEnv:
    """Return this process's rank environment, or the environment of a single process if none is set.

    Raises UsageError if the environment variables are incomplete or contradictory.
    """
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return RankEnv(0, 0, 1, 1, 0, 1, "127.0.0.1", 0, source="single process")
    sizes = {"LOCAL_WORLD_SIZE": environ.get("WORLD_SIZE", ""), "NODE_RANK": environ.get("GROUP_RANK", "0")}
    given = {**sizes, **environ}
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_PORT")
    wrong = [f"{name}={given.get(name, '')}" for name in names if not given.get(name, "").isdigit()]
    if wrong or "MASTER_ADDR" not in environ:
        raise UsageError(
            f"the rank environment is incomplete: {', '.join(wrong) or 'MASTER_ADDR is not set'}",
            hint="start the script with `trainkit submit` or `trainkit run`, or unset RANK and WORLD_SIZE",
        )
    rank, local_rank, world_size, local_world_size, node_rank, port = (int(given[name]) for name in names)
    found = RankEnv(
        rank,
        local_rank,
        world_size,
        local_world_size,
        node_rank,
        num_nodes=max(1, world_size // max(1, local_world_size)),
        master_addr=environ["MASTER_ADDR"],
        master_port=port,
        source="environment",
        nonce=environ.get(NONCE_VARIABLE, ""),
    )
    if not 0 <= found.rank < found.world_size or not 0 <= found.local_rank < found.local_world_size:
        raise UsageError(
            f"RANK={found.rank} LOCAL_RANK={found.local_rank} do not fit "
            f"WORLD_SIZE={found.world_size} LOCAL_WORLD_SIZE={found.local_world_size}"
        )
    return found


_DEVICE_NAME = re.compile(r"\d+|(?:GPU|MIG)-.+")


def visible_gpus(listed: str | None) -> list[str] | None:
    """Return the entries (indices or UUIDs) of a CUDA_VISIBLE_DEVICES value, or None if it is not set.

    As in CUDA, the list ends before the first entry that is not a GPU. For example, Slurm sets
    CUDA_VISIBLE_DEVICES to ``NoDevFiles`` for a task without GPUs.
    """
    if listed is None:
        return None
    return list(takewhile(_DEVICE_NAME.fullmatch, map(str.strip, listed.split(","))))


GPU_BINDING_HINT = (
    "request a GPU for every rank, and check what binds GPUs to tasks or sets CUDA_VISIBLE_DEVICES; "
    "`launch.srun_extra: {gpu-bind: none}` lets each task use all GPUs of its node"
)


def gpu_index(local_rank: int, num_visible: int, *, is_task: bool) -> int | None:
    """Return the index of a rank's GPU among the visible GPUs, or None if the rank has no GPU.

    Slurm can bind one GPU to each task, for example with ``--gpus-per-task=1`` or ``--gpu-bind``. If Slurm
    binds GPUs to tasks, a rank that is its own task (`is_task`) sees only its own GPU, which has index 0.
    """
    if is_task and num_visible == 1:
        return 0
    return local_rank if local_rank < num_visible else None


_SIZE_VARIABLES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


def refuse_foreign_ranks(environ: Mapping[str, str] = os.environ) -> None:
    """Raise UsageError if a launcher such as torchrun or mpirun started this process as a rank.

    Without this check, each rank would train a separate run.
    """
    for name in _SIZE_VARIABLES:
        size = environ.get(name, "")
        if size.isdigit() and int(size) > 1:
            raise UsageError(
                f"this process is one of {size} ranks of another launcher ({name}={size}), and each rank "
                "would train a separate run",
                hint="on one machine, start `trainkit run --gpus-per-node N` once; on several hosts, start "
                "`srun … trainkit run`, or without Slurm use torchrun or mpirun -x MASTER_ADDR=HOST "
                f"-x MASTER_PORT=PORT; if there is no launcher, `unset {name}`",
            )


SHARED_MEMORY = Path("/dev/shm")


STALE_STORE_S = 3600.0


def store_file(nonce: str) -> Path | None:
    """Return the file that ranks on one machine use to find each other, or None without /dev/shm.

    The store file is kept in memory, so that a full disk does not prevent ranks from starting. Only the ranks
    of the attempt know the name of the store file.
    """
    if not nonce or not os.access(SHARED_MEMORY, os.W_OK):
        return None
    return SHARED_MEMORY / f"{_store_prefix()}{hashlib.sha256(f'store {nonce}'.encode()).hexdigest()}"


def _store_prefix() -> str:
    """Return the name prefix for store files of this container, identified by its PID namespace."""
    return f"trainkit-{Path('/proc/self/ns/pid').stat().st_ino}-"


def old_stores() -> set[Path]:
    """Return the user's store files that no rank has used for the last `STALE_STORE_S` seconds."""
    before, found = time.time() - STALE_STORE_S, set()
    for path in SHARED_MEMORY.glob(f"{_store_prefix()}*"):
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_mtime < before:
                found.add(path)
    return found
